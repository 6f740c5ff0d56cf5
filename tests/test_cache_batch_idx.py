# SPDX-License-Identifier: Apache-2.0
"""cache_batch_idx: the row of a contiguous cache that each sequence uses."""

from typing import Any

import pytest
import torch
from torch import Tensor

import sinkattn


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def inputs(batch: int = 3, rows: int = 6) -> dict[str, Any]:
    """Sequences of 1, 40 and 17 keys somewhere in a cache of more rows; the other rows are NaN."""
    generator = torch.Generator().manual_seed(batch)
    cache = torch.randn(2, rows, 40, 2, 16, generator=generator)
    q, s_aux = torch.randn(batch, 2, 8, 16, generator=generator), torch.randn(8, generator=generator)
    return {"q": q, "k_cache": cache[0], "v_cache": cache[1], "s_aux": s_aux, "causal": True, "return_lse": True}


@pytest.mark.parametrize("index", [(4, 0, 5), (0, 1, 2), (2, 2, 3)])
@pytest.mark.parametrize("options", [{}, {"invariant": True}, {"num_splits": 3}, {"window_size": (9, 0)}])
@pytest.mark.parametrize("raw", [False, True])
def test_rows_are_those_of_the_gathered_cache(index: tuple[int, ...], options: dict[str, Any], raw: bool) -> None:
    call = inputs() | options | ({"return_lse": "raw"} if raw else {})
    at, lens = int32(*index), int32(1, 40, 17)
    gathered = call | {name: call[name][at.long()].clone() for name in ("k_cache", "v_cache")}
    want = sinkattn.flash_attn_with_kvcache(**gathered, cache_seqlens=lens)
    for name in ("k_cache", "v_cache"):
        call[name][[row for row in range(6) if row not in index]] = torch.nan
    got = sinkattn.flash_attn_with_kvcache(**call, cache_seqlens=lens, cache_batch_idx=at)
    assert all(map(torch.equal, got, want))


def test_a_strided_index_and_a_cache_kept_heads_first() -> None:
    call, wide = inputs(), int32(4, -1, 0, -1, 5, -1)
    want = sinkattn.flash_attn_with_kvcache(**call, cache_seqlens=9, cache_batch_idx=int32(4, 0, 5))
    call |= {name: call[name].transpose(1, 2).contiguous().transpose(1, 2) for name in ("k_cache", "v_cache")}
    got = sinkattn.flash_attn_with_kvcache(**call, cache_seqlens=9, cache_batch_idx=wide[::2])
    assert all(map(torch.equal, got, want))


def test_new_keys_go_to_the_row_of_their_sequence() -> None:
    call = inputs()
    k, v = torch.randn(2, 3, 2, 2, 16)
    wanted = call["k_cache"].clone()
    for b, (row, used) in enumerate(((4, 0), (0, 38), (5, 17))):
        wanted[row, used : used + 2] = k[b]
    call["cache_batch_idx"] = int32(4, 0, 5)
    got = sinkattn.flash_attn_with_kvcache(**call, k=k, v=v, cache_seqlens=int32(0, 38, 17))
    assert torch.equal(call["k_cache"], wanted)
    after = sinkattn.flash_attn_with_kvcache(**call, cache_seqlens=int32(2, 40, 19))
    assert all(map(torch.equal, got, after))


def test_a_compiled_call_is_one_graph() -> None:
    call, at = inputs(), int32(4, 0, 5)
    compiled = torch.compile(sinkattn.flash_attn_with_kvcache, fullgraph=True, backend="aot_eager")
    want = sinkattn.flash_attn_with_kvcache(**call, cache_seqlens=int32(1, 40, 17), cache_batch_idx=at)
    got = compiled(**call, cache_seqlens=int32(1, 40, 17), cache_batch_idx=at)
    assert all(map(torch.equal, got, want))


REFUSED: dict[str, tuple[Any, dict[str, Any], type[Exception], str]] = {
    "dtype": (
        torch.tensor([0, 1, 2]),
        {},
        ValueError,
        r"torch.int64 \[3\] on cpu; it must be strided torch.int32 \[3\]",
    ),
    "batch": (
        int32(0, 1),
        {},
        ValueError,
        r"torch.int32 \[2\] on cpu; it must be strided torch.int32 \[3\] on cpu, a row",
    ),
    "rank": (int32(0, 1, 2)[:, None], {}, ValueError, r"torch.int32 \[3, 1\] on cpu; it must be"),
    "device": (
        int32(0, 1, 2).to("meta"),
        {},
        ValueError,
        r"cache_batch_idx is torch.strided torch.int32 \[3\] on meta; it must be",
    ),
    "no tensor": ([0, 1, 2], {}, TypeError, "cache_batch_idx is of type builtins.list; it must be a torch.Tensor"),
    "table": (int32(0, 1, 2), {"block_table": torch.zeros(3, 1, dtype=torch.int32)}, ValueError, "are both given"),
    "row": (int32(0, 6, 2), {}, ValueError, r"block_table\[1\]\[0\] is 6; it must be a page from 0 to 5"),
    "negative": (int32(-1, 1, 2), {}, ValueError, r"block_table\[0\]\[0\] is -1"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_wrong_indices_are_refused(name: str) -> None:
    index, options, error, message = REFUSED[name]
    with pytest.raises(error, match=message):
        sinkattn.flash_attn_with_kvcache(**inputs(), **options, cache_seqlens=9, cache_batch_idx=index)
