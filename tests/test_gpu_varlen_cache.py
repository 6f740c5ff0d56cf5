# SPDX-License-Identifier: Apache-2.0
"""Packed rows over a cache on a CUDA device: mixed batches with the bits of each sequence alone."""

from random import Random
from typing import Any

import pytest
import torch
from arguments import Calls
from gpu_cases import beside_empty
from gpus import captured, launched, needs_gpus
from torch import Tensor
from varlen_cases import Batch, assert_same

import sinkattn
from sinkattn import reference

pytestmark = needs_gpus()

HALVES = (torch.bfloat16, torch.float16)
DIMS = (8, 64, 64, 64, 72, 128, 128, 256)


def gpu_batch(name: str, longer: int = 8, dims: tuple[int, ...] = DIMS) -> Batch:
    return Batch(name, Random(f"{name}/dtype").choice(HALVES), "cuda", dims, longer)


@pytest.mark.parametrize("block", range(10))
def test_random_mixed_batches(block: int, seed: int) -> None:
    for index in range(40 * block, 40 * block + 40):
        batch = gpu_batch(f"{seed}/{index}", (1, 8, 20)[index % 3])
        want = batch.alone()
        size = batch.random.choice((1, 1, 3, 8, 16, 16, 24, 40, 56, 64, 80, 112, 128, 256))
        layout = batch.random.choice(("apart", "vllm", "beside"))
        assert_same(batch.run(*batch.paged(size, layout)), want, (seed, index, size, layout, vars(batch)))
        assert_same(batch.run(*batch.contiguous()), want, (seed, index, vars(batch)))
        k, v, table = batch.paged(size, layout)
        batch.cu_seqlens = beside_empty(batch.cu_seqlens)
        batch.seqused = torch.nn.functional.pad(batch.seqused, (0, 400))
        table = torch.nn.functional.pad(table, (0, 0, 0, 400))
        assert_same(batch.run(k, v, table), want, (seed, index, "in larger tiles", vars(batch)))
    sinkattn.check_errors()


def test_random_mixed_batches_against_the_reference(seed: int) -> None:
    for index in range(10):
        batch = gpu_batch(f"{seed}/{index}/reference", 1)
        got = batch.run(*batch.paged(batch.random.choice((1, 16))))
        names = ("q", "cu_seqlens", "seqused")
        batch.device = "cpu"
        for name in names:
            setattr(batch, name, getattr(batch, name).cpu())
        batch.q, batch.dtype = batch.q.double(), torch.float64
        batch.keys = [(k.cpu().double(), v.cpu().double()) for k, v in batch.keys]
        batch.options["s_aux"] = s_aux = batch.options["s_aux"]
        batch.options["s_aux"] = None if s_aux is None else s_aux.cpu()
        want = batch.run(*batch.contiguous(), functions=reference)
        for x, y in zip(got, want, strict=True):
            torch.testing.assert_close(x.cpu().double(), y.double(), rtol=2e-2, atol=2e-2, msg=f"{seed}/{index}")


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("page_size", [1, 2, 16, 48, 64, 256])
def test_one_row_has_one_bit_pattern(page_size: int, head_dim: int, seed: int) -> None:
    random = Random(f"{seed}/{page_size}/{head_dim}")
    torch.manual_seed(seed)
    length, dtype = 900, random.choice(HALVES)
    q, k, v = (torch.randn(length, heads, head_dim, device="cuda", dtype=dtype) for heads in (16, 2, 2))
    options: dict[str, Any] = {
        "window_size": (random.choice((-1, 300, 60)), 0),
        "num_sink_tokens": random.choice((0, 5)),
        "s_aux": torch.randn(16, device="cuda"),
    }
    whole = sinkattn.flash_attn_func(q[None], k[None], v[None], **options)[0]
    count = -(-length // page_size)
    pages = torch.full((2, 2 * count + 1, page_size, 2, head_dim), torch.nan, device="cuda", dtype=dtype)
    table = torch.randperm(2 * count, device="cuda").int().view(2, count)
    at = torch.arange(length, device="cuda")
    slots = [row[at // page_size].long() * page_size + at % page_size for row in table]
    pages[0].flatten(0, 1)[slots[1]], pages[1].flatten(0, 1)[slots[1]] = k, v  # the neighbour has the whole prompt
    done = 0
    while done < length:
        rows = min(random.choice((1, 1, 2, 4, 8, 40, 200)), length - done)
        new = slice(done, done := done + rows)
        pages[0].flatten(0, 1)[slots[0][new]], pages[1].flatten(0, 1)[slots[0][new]] = k[new], v[new]
        other = random.randrange(length)
        bounds, used = ([0, rows, rows + 1], [done, other + 1])
        out = sinkattn.flash_attn_varlen_func(
            torch.cat([q[new], q[other : other + 1]]), *pages, torch.tensor(bounds, dtype=torch.int32, device="cuda"),
            seqused_k=torch.tensor(used, dtype=torch.int32, device="cuda"), block_table=table, **options,
        )  # fmt: skip
        assert torch.equal(out[:-1], whole[new]), (new, options)
        assert torch.equal(out[-1], whole[other]), (other, options)
    sinkattn.check_errors()


def engine_batch(page_size: int, head_dim: int = 64) -> dict[str, Tensor]:
    torch.manual_seed(0)
    pages = 4096 // page_size
    both = torch.randn(pages, 2, page_size, 2 * head_dim, device="cuda", dtype=torch.bfloat16)
    k, v = both.transpose(1, 2).split(head_dim, -1)
    return {
        "q": torch.randn(200, 16, head_dim, device="cuda", dtype=torch.bfloat16),
        "k": k,
        "v": v,
        "cu_seqlens_q": torch.tensor([0, 150, 151, 155, 155], dtype=torch.int32, device="cuda"),
        "seqused_k": torch.tensor([700, 1000, 30, 0], dtype=torch.int32, device="cuda"),
        "block_table": torch.randperm(pages, device="cuda").int().view(4, -1),
        "s_aux": torch.randn(16, device="cuda"),
    }


def test_a_captured_graph_reads_lengths_and_pages_as_they_are() -> None:
    batch = engine_batch(16)

    def step() -> Tensor:
        return sinkattn.flash_attn_varlen_func(**batch, causal=True)

    results = []
    graph = captured(lambda: results.append(step()))
    for lens, used in (([0, 0, 1, 199, 200], [1, 5, 1024, 1]), ([0, 60, 61, 62, 190], [60, 1000, 999, 500])):
        batch["cu_seqlens_q"].copy_(torch.tensor(lens))
        batch["seqused_k"].copy_(torch.tensor(used))
        batch["block_table"].copy_(batch["block_table"].flip(0))
        graph.replay()
        assert torch.equal(results[-1], step())
    sinkattn.check_errors()


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("left", [-1, 127])
def test_a_call_is_one_launch_without_a_sync(page_size: int, left: int) -> None:
    batch = engine_batch(page_size)

    def step() -> object:
        return sinkattn.flash_attn_varlen_func(**batch, window_size=(left, 0))

    step()
    torch.cuda.synchronize()
    on_gpu = launched(step)
    assert len(on_gpu) == 1, on_gpu
    assert ("ThreadKeys" if page_size == 1 and left < 0 else "CacheKeys") in on_gpu[0]


def test_pages_are_read_where_they_lie() -> None:
    batch = engine_batch(16)
    with Calls() as calls:
        sinkattn.flash_attn_varlen_func(**batch, causal=True)
    (seen,) = calls.seen["flash_decode_varlen"]
    assert seen[1].data_ptr() == batch["k"].data_ptr()
    assert not batch["k"].is_contiguous()


@pytest.mark.parametrize("head_dim", [64, 128])
def test_pages_that_no_row_sees_may_be_unmapped(head_dim: int) -> None:
    """Pages before a window, between sink tokens and a window, and past the keys."""
    batch = engine_batch(4, head_dim)
    options: dict[str, Any] = {"window_size": (20, 0), "num_sink_tokens": 3}
    batch["cu_seqlens_q"].copy_(torch.tensor([0, 2, 3, 4, 4]))
    batch["seqused_k"].copy_(torch.tensor([60, 1000, 100, 0]))
    want = sinkattn.flash_attn_varlen_func(**batch, **options)
    for b, (first, last) in enumerate(((9, 14), (244, 249), (19, 24))):
        row = batch["block_table"][b]
        row[1:first], row[last + 1 :] = -1, 2**31 - 1
    assert torch.equal(sinkattn.flash_attn_varlen_func(**batch, **options), want)
    sinkattn.check_errors()
    batch["block_table"][1, 0] = -7
    sinkattn.flash_attn_varlen_func(**batch, **options)
    with pytest.raises(ValueError, match="block_table named a page outside the cache, whose keys were read as 0"):
        sinkattn.check_errors()


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("left", [-1, 127])
def test_hostile_lengths_and_tables_are_contained_and_reported(
    left: int, head_dim: int, page_size: int, seed: int
) -> None:
    """The cache lies within NaN: a key from outside would show."""
    batch = engine_batch(page_size, head_dim)
    around = torch.full((2**23,), torch.nan, device="cuda", dtype=torch.bfloat16)
    inner = around[2**20 :][: batch["k"].numel() * 2].view(4096 // page_size, 2, page_size, 2 * head_dim)
    inner.normal_()
    batch["k"], batch["v"] = inner.transpose(1, 2).split(head_dim, -1)
    good = {name: batch[name].clone() for name in ("cu_seqlens_q", "seqused_k", "block_table")}
    want = sinkattn.flash_attn_varlen_func(**batch, window_size=(left, 0))
    sinkattn.check_errors()
    generator = torch.Generator().manual_seed(seed)
    for index in range(60):
        for name, x in good.items():
            wild = torch.randint(-(2**31), 2**31, x.shape, generator=generator)
            near = torch.randint(-3, 1100, x.shape, generator=generator)
            chosen = torch.where(torch.rand(x.shape, generator=generator) < 0.5, wild, near)
            keep = torch.rand(x.shape, generator=generator) < (0.9, 0.5, 0.0)[index % 3]
            batch[name] = torch.where(keep.cuda(), x, chosen.int().cuda())
        out = sinkattn.flash_attn_varlen_func(**batch, window_size=(left, 0))
        assert out.isfinite().all()
    with pytest.raises(ValueError, match=r"cu_seqlens.*cache_seqlens.*block_table"):
        sinkattn.check_errors()
    sinkattn.check_errors()
    assert torch.equal(sinkattn.flash_attn_varlen_func(**batch | good, window_size=(left, 0)), want)


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("left", [-1, 127])
def test_values_that_are_not_finite_reach_the_rows_that_see_them(left: int, head_dim: int, page_size: int) -> None:
    batch = Batch("not finite/47", torch.bfloat16, "cuda", (head_dim,), 6)
    batch.options |= {"window_size": (left, 0), "num_sink_tokens": 0, "return_lse": True}
    for keys, values in batch.keys:
        keys[len(keys) // 2 : len(keys) // 2 + 1, :, 0] = torch.nan
        values[len(values) * 3 // 4 :: 17, :, 3] = torch.inf
    got, want = batch.run(*batch.paged(page_size)), batch.alone()
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0, equal_nan=True)
    assert not got[0].isfinite().all()


@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_cache_past_2_31_elements(head_dim: int) -> None:
    count = 2**31 // (64 * 8 * head_dim) + 10
    cache = torch.zeros(count, 64, 8, head_dim, device="cuda", dtype=torch.bfloat16)
    keys = torch.randn(128, 8, head_dim, device="cuda", dtype=torch.bfloat16)
    cache[-1], cache[0] = keys[:64], keys[64:]
    q = torch.randn(3, 16, head_dim, device="cuda", dtype=torch.bfloat16)
    int32 = {"dtype": torch.int32, "device": "cuda"}
    out = sinkattn.flash_attn_varlen_func(
        q, cache, cache, torch.tensor([0, 3], **int32), seqused_k=torch.tensor([120], **int32),
        block_table=torch.tensor([[count - 1, 0]], **int32), causal=True,
    )  # fmt: skip
    want = sinkattn.flash_attn_func(q[None], keys[None, :120], keys[None, :120], causal=True)[0]
    assert torch.equal(out, want)
