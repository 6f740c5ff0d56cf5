# SPDX-License-Identifier: Apache-2.0
"""What the GPU tests of decode share: caches of gpt-oss's heads, the arguments and buffers of its operators."""

from typing import Any

import torch
from torch import Tensor

import sinkattn
from sinkattn import _C

LENS = [1500, 0, 700, 33, 2048, 1]
decode_op, decode_out_op = torch.ops.sinkattn.flash_decode, torch.ops.sinkattn.flash_decode_out
append_op = torch.ops.sinkattn.append_kv


def make_cache(
    lens: list[int],
    page_size: int = 0,
    capacity: int = 0,
    kv_heads: int = 8,
    head_dim: int = 64,
    q_len: int = 1,
    head_dim_v: int = 0,
) -> dict[str, Tensor | None]:
    """gpt-oss's heads; slots past a sequence's end, and pages that no sequence has, hold NaN."""
    generator = torch.Generator("cuda").manual_seed(0)
    batch, capacity = len(lens), capacity or max(*lens, 1)
    shape = (2, batch, capacity, kv_heads, head_dim)
    cache = torch.randn(shape, device="cuda", dtype=torch.bfloat16, generator=generator)
    seqlens = torch.tensor(lens, dtype=torch.int32, device="cuda")
    cache.masked_fill_((torch.arange(capacity, device="cuda") >= seqlens[:, None])[None, :, :, None, None], torch.nan)
    q = torch.randn(batch, q_len, 8 * kv_heads, head_dim, device="cuda", dtype=torch.bfloat16, generator=generator)
    s_aux = 2 * torch.randn(8 * kv_heads, device="cuda", generator=generator)
    table = None
    if page_size:
        assert capacity % page_size == 0
        count = batch * capacity // page_size
        order = torch.randperm(count + 3, device="cuda", generator=generator)
        pages = cache.new_full((2, count + 3, page_size, kv_heads, head_dim), torch.nan)
        pages[:, order[:count]] = cache.view(2, count, page_size, kv_heads, head_dim)
        table, cache = order[:count].int().view(batch, -1), pages
    v = cache[1, ..., :head_dim_v].contiguous() if head_dim_v else cache[1]
    return {"q": q, "k": cache[0], "v": v, "s_aux": s_aux, "cache_seqlens": seqlens, "block_table": table}


def no_host_pages(t: dict[str, Any]) -> dict[str, Tensor]:
    """Host pages, of which there are none: with them the forward serves no decode."""
    return {f"{name}_cache_host": t[name][:0].cpu() for name in ("k", "v")}


def arguments(
    t: dict[str, Tensor | None], left: int = -1, num_sink_tokens: int = 0, num_splits: int = 0
) -> tuple[object, ...]:
    return (*t.values(), None, left, num_sink_tokens, num_splits, False)


def buffers(
    t: dict[str, Tensor | None], left: int = -1, num_sink_tokens: int = 0, num_splits: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v, table = t["q"], t["k"], t["v"], t["block_table"]
    assert q is not None
    assert k is not None
    assert v is not None
    sizes = {"page_size": k.shape[1], "num_pages": k.shape[0]} if table is not None else {}
    plan = sinkattn.plan(
        "decode", _C.query_cuda(0), dtype="bf16", batch=q.shape[0], num_q_heads=q.shape[2], num_kv_heads=k.shape[2],
        head_dim=q.shape[3], head_dim_v=v.shape[3], q_len=q.shape[1],
        k_len=k.shape[1] * (1 if table is None else table.shape[1]),
        s_aux_dtype="fp32", window_size_left=left, window_size_right=0, num_sink_tokens=num_sink_tokens,
        num_splits=num_splits, **sizes,
    )  # fmt: skip
    lse = torch.empty(q.shape[0], q.shape[2], q.shape[1], device="cuda")
    return (
        q.new_empty(*q.shape[:3], v.shape[3]),
        lse,
        torch.empty(plan["workspace_bytes"], dtype=torch.uint8, device="cuda"),
    )


def assert_same(got: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> None:
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)


def assert_close(got: tuple[Tensor, ...], want: tuple[Tensor, ...], atol: float = 2e-3) -> None:
    torch.testing.assert_close(got[0], want[0], rtol=2e-2, atol=atol)
    torch.testing.assert_close(got[1], want[1], rtol=1e-5, atol=1e-5)
