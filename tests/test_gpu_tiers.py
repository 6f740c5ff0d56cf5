# SPDX-License-Identifier: Apache-2.0
"""A paged cache half in pinned memory of the host, on a CUDA device: the bits of the same cache in one tier."""

import pytest
import torch
from gpu_caches import LENS, arguments, assert_same, decode_op, make_cache
from gpus import captured, launched, needs_gpus
from test_tiers import split_pages
from torch import Tensor

import sinkattn

pytestmark = needs_gpus()


def in_two_tiers(t: dict[str, Tensor | None], near: int) -> tuple[dict[str, Tensor | None], dict[str, Tensor]]:
    tiers = split_pages(t, near)
    host = {name: tiers.pop(name).cpu().pin_memory() for name in ("k_cache_host", "v_cache_host")}
    return t | tiers, host


OPTIONS = [{}, {"num_splits": 3}, {"left": 127}, {"left": 127, "num_sink_tokens": 600}]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(64, 0), (128, 0), (192, 128), (512, 0)])
def test_two_tiers_are_one_cache(head_dim: int, head_dim_v: int, page_size: int, options: dict[str, int]) -> None:
    t = make_cache(LENS, page_size, capacity=2048, kv_heads=2, head_dim=head_dim, head_dim_v=head_dim_v)
    assert t["k"] is not None
    want = decode_op(*arguments(t, **options))
    assert want[0].isfinite().all()
    for near in (0, t["k"].shape[0] // 2, t["k"].shape[0]):
        ours, host = in_two_tiers(t, near)
        assert_same(decode_op(*arguments(ours, **options), **host), want)
    sinkattn.check_errors()


@pytest.mark.parametrize("lens", [[1900], [1500, 3, 0, 700] * 16], ids=["clusters", "pairs"])
def test_two_tiers_of_eight_heads_are_one_cache(lens: list[int]) -> None:
    t = make_cache(lens, 64, capacity=4096)
    assert t["k"] is not None
    ours, host = in_two_tiers(t, t["k"].shape[0] // 2)
    assert_same(decode_op(*arguments(ours), **host), decode_op(*arguments(t)))


def test_invariant_has_them_too() -> None:
    t = make_cache(LENS, 64)
    ours, host = in_two_tiers(t, 60)
    assert_same(decode_op(*arguments(ours)[:-1], True, **host), decode_op(*arguments(t)[:-1], True))


def test_it_is_one_launch_without_a_sync() -> None:
    ours, host = in_two_tiers(make_cache(LENS, 64), 60)
    decode_op(*arguments(ours), **host)
    torch.cuda.synchronize()
    on_gpu = launched(lambda: decode_op(*arguments(ours), **host))
    assert len(on_gpu) == 1, on_gpu


def test_hostile_tables_are_contained_and_reported(seed: int) -> None:
    t = make_cache(LENS, 64)
    ours, host = in_two_tiers(t, 60)
    want = decode_op(*arguments(ours), **host)
    table, generator = ours["block_table"], torch.Generator().manual_seed(seed)
    assert table is not None
    good = table.clone()
    for index in range(100):
        wild = torch.randint(-(2**31), 2**31, table.shape, generator=generator, dtype=torch.int64)
        near = torch.randint(-200, 400, table.shape, generator=generator, dtype=torch.int64)
        table.copy_(torch.where(torch.rand(table.shape, generator=generator) < 0.5, wild, near))
        decode_op(*arguments(ours, num_splits=(0, 1, 5)[index % 3]), **host)
    with pytest.raises(ValueError, match="block_table named a page outside"):
        sinkattn.check_errors()
    table.copy_(good)
    assert_same(decode_op(*arguments(ours), **host), want)
    sinkattn.check_errors()


def test_pages_outside_read_as_zeros() -> None:
    """As an unmapped page of one tier does, so nothing of the other tier is read in its place."""
    t = make_cache([640], 64)
    assert t["k"] is not None
    ours, host = in_two_tiers(t, 5)
    for page in (t["k"].shape[0], -1, 2**31 - 1):
        t["block_table"][0, 3], ours["block_table"][0, 3] = -1, page  # type: ignore[index]
        assert_same(decode_op(*arguments(ours), **host), decode_op(*arguments(t)))
    with pytest.raises(ValueError, match="block_table named a page outside"):
        sinkattn.check_errors()


def test_dropped_pages_are_nobodys_until_they_are_read() -> None:
    t = make_cache(LENS, 64)
    want = decode_op(*arguments(t))
    ours, host = in_two_tiers(t, 0)
    shape = host["k_cache_host"].shape
    decode_op(*arguments(ours), **host)
    torch.cuda.synchronize()
    torch.cuda._sleep(10**9)  # half a second, in which the pages are dropped and their memory is asked for
    got = decode_op(*arguments(ours), **host)
    host.clear()
    others = [torch.full(shape, torch.nan, dtype=torch.bfloat16, pin_memory=True) for _ in range(2)]
    assert_same(got, want)
    assert all(x.isnan().all() for x in others)


def test_pageable_memory_is_refused() -> None:
    ours, host = in_two_tiers(make_cache(LENS, 64), 60)
    pageable = {name: x.clone() for name, x in host.items()}
    assert not pageable["k_cache_host"].is_pinned()
    with pytest.raises(ValueError, match=r"k_cache_host is on cpu, it must be pinned memory"):
        decode_op(*arguments(ours), **pageable)


def test_a_graph_follows_lengths_and_tables() -> None:
    t, host = in_two_tiers(make_cache([2048] * 3, 64), 40)
    lens, table = t["cache_seqlens"], t["block_table"]
    assert lens is not None
    assert table is not None
    results: list[Tensor] = []

    def step() -> None:
        results[:] = decode_op(*arguments(t), **host)

    graph = captured(step)
    for new in ([2048, 5, 1300], [0, 0, 1], [64, 2047, 2048]):
        lens.copy_(torch.tensor(new))
        table.copy_(table.flip(0))
        graph.replay()
        assert_same(tuple(results), decode_op(*arguments(t), **host))
