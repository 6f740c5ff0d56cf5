# SPDX-License-Identifier: Apache-2.0
"""Invariant decode on a CUDA device: the bits of a prefill."""

import pytest
import torch
from gpu_caches import LENS, assert_same, decode_op, make_cache
from gpus import captured, needs_gpus
from torch import Tensor

import sinkattn

pytestmark = needs_gpus()
INVARIANT_MASKS = {"all": (-1, 0), "window": (127, 0), "wide": (1000, 0), "sinks": (127, 4), "prefix": (200, 600)}


def invariant(t: dict[str, Tensor | None], left: int, num_sink_tokens: int) -> tuple[Tensor, ...]:
    return decode_op(*t.values(), None, left, num_sink_tokens, 0, True)


@pytest.mark.parametrize("mask", INVARIANT_MASKS)
@pytest.mark.parametrize("page_size", [0, 1, 64])
@pytest.mark.parametrize("q_len", [1, 3])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_invariant_is_the_row_of_a_prefill(head_dim: int, q_len: int, page_size: int, mask: str) -> None:
    left, num_sink_tokens = INVARIANT_MASKS[mask]
    lens = [1500, 700, 33, 2048, 5]
    options = {"kv_heads": 2, "head_dim": head_dim, "q_len": q_len}
    dense = make_cache(lens, **options)
    got = invariant(make_cache(lens, page_size, **options), left, num_sink_tokens)
    q, k, v, s_aux = (dense[name] for name in ("q", "k", "v", "s_aux"))
    for b, length in enumerate(lens):
        rows = torch.randn(1, length, *q.shape[2:], device="cuda", dtype=q.dtype)  # of a prefill, ours its last ones
        rows[:, length - q_len :] = q[b]
        out, lse = sinkattn.flash_attn_func(
            rows, k[b : b + 1, :length], v[b : b + 1, :length], causal=True, window_size=(left, 0), s_aux=s_aux,
            num_sink_tokens=num_sink_tokens, return_lse=True,
        )  # fmt: skip
        assert torch.equal(got[0][b], out[0, length - q_len :])
        assert torch.equal(got[1][b], lse[0, :, length - q_len :])
    sinkattn.check_errors()


@pytest.mark.parametrize("page_size", [0, 64])
def test_invariant_depends_on_nothing_else(page_size: int) -> None:
    t = make_cache(LENS, page_size)
    out, lse = invariant(t, -1, 0)
    for b in range(len(LENS)):
        alone = {name: x[b : b + 1] if name in ("q", "cache_seqlens", "block_table") and x is not None else x
                 for name, x in t.items()}  # fmt: skip
        if not page_size:
            alone |= {"k": t["k"][b : b + 1], "v": t["v"][b : b + 1]}
        assert_same(invariant(alone, -1, 0), (out[b : b + 1], lse[b : b + 1]))
    if not page_size:  # a slice of a larger cache, read where it lies, and heads ahead of slots
        wide = {name: torch.cat((x, x), 1)[:, : x.shape[1]] if name in ("k", "v") else x for name, x in t.items()}
        assert_same(invariant(wide, -1, 0), (out, lse))
        turned = {name: x.transpose(1, 2).contiguous().transpose(1, 2) if name in ("k", "v", "q") else x
                  for name, x in t.items()}  # fmt: skip
        assert_same(invariant(turned, -1, 0), (out, lse))
        mixed = wide | {"v": t["v"].transpose(1, 3).contiguous().transpose(1, 3)}
        assert_same(invariant(mixed, -1, 0), (out, lse))
        shared = t | {name: t[name][4:5].expand_as(t[name]) for name in ("k", "v")}
        copied = t | {name: shared[name].contiguous() for name in ("k", "v")}
        assert_same(invariant(shared, -1, 0), invariant(copied, -1, 0))


def test_invariant_lengths_change_between_replays() -> None:
    t = make_cache([2048] * 4, 64)
    torch.nan_to_num_(t["k"]), torch.nan_to_num_(t["v"])
    results = []

    def step() -> None:
        results[:] = invariant(t, -1, 0)

    graph = captured(step)
    for lens in ([2048, 1, 0, 77], [0, 0, 0, 0], [300, 2000, 17, 1024]):
        t["cache_seqlens"].copy_(torch.tensor(lens, dtype=torch.int32))
        graph.replay()
        assert_same(tuple(results), invariant(t, -1, 0))


def test_invariant_contains_what_is_hostile() -> None:
    t = make_cache(LENS, 64)
    table, lens = t["block_table"], t["cache_seqlens"]
    want = invariant(t, 127, 4)
    table[4, 1:29] = -1  # which no row sees
    assert_same(invariant(t, 127, 4), want)
    sinkattn.check_errors()
    table[4, 31] = 2**31 - 1
    invariant(t, 127, 4)
    with pytest.raises(ValueError, match="block_table named a page outside"):
        sinkattn.check_errors()
    lens[0], lens[1], lens[2] = -5, 2**31 - 1, 5000
    invariant(t, -1, 0)
    with pytest.raises(ValueError, match="cache_seqlens was negative"):
        sinkattn.check_errors()
