# SPDX-License-Identifier: Apache-2.0
"""Decode from contiguous and paged caches, split or not, against fp64, and the cache that grows in place."""

import dataclasses
import math
from typing import Any

import pytest
import torch
from arguments import Calls, cache, decode_args, ops, out_args
from test_fwd import check_variant, served, with_dtypes

import sinkattn
from sinkattn import reference
from sinkattn._testing import (
    HEAD_DIMS,
    RATIOS,
    Case,
    assert_right_at,
    at_level,
    available_levels,
    evaluate,
    make_inputs,
    run_ops,
)

LENS = "q1x5-k0.1.64.129.300"
CASES = (
    [f"d{d}-causal-g4-cache-{LENS}-tail5" for d in (*HEAD_DIMS, 512)]
    + [f"d64-causal-g{ratio}-h2-cache-q1x2-k90.40" for ratio in RATIOS]
    + [f"d64-causal-w70-sink3-g4-paged{size}-{LENS}" for size in (1, 16, 64, 128, 256)]
    + [f"d64-causal-w70-sink3-g4-paged{size}-q3x5-k7.1.64.129.300" for size in (1, 16, 64, 128, 256)]
    + [f"d64-causal-g4-paged{size}-shared-q1x3-k280.300.17" for size in (1, 16, 64, 256)]
    + [f"d64-causal-w{window}-g4-cache-{LENS}" for window in (1, 2, 127, 128, 129, 299, 300, 301, 2**31 - 1)]
    + [f"d64-causal-w20-sink{n}-g4-cache-{LENS}" for n in (1, 4, 64, 301)]
    + [f"d192-v128-causal-w70-sink3-g4-{layout}-q3x3-k7.129.300" for layout in ("cache", "paged16", "cache-splits3")]
    + [f"d512-v72-causal-g4-cache-{LENS}-invariant"]
    + [f"d576-v512-causal-g5-{layout}-{LENS}-latent" for layout in ("cache", "paged1", "paged16-splits3")]
    + ["d576-v512-causal-g128-paged64-q1x2-k70.9-latent", f"d576-v512-causal-w70-sink3-g4-cache-{LENS}-invariant"]
    + ["d520-v456-causal-w70-sink3-g2-h2-paged16-q3x3-k7.129.300-latent-poison"]
    + [f"d64-causal-w40-sink2-g2-cache-q{q_len}x3-k3.70.200" for q_len in (2, 4, 9, 70)]
    + [f"d64-causal-g8-cache-{LENS}-splits{splits}" for splits in (1, 2, 3, 7, 64)]
    + [f"d64-causal-w90-sink3-g8-paged16-{LENS}-splits{splits}" for splits in (1, 2, 3, 7)]
    + [f"d64-causal-w90-sink3-g8-paged16-{LENS}-invariant", f"d512-causal-w90-g8-cache-{LENS}-invariant"]
    + [f"d64-causal-g4-cache-{LENS}-{strides}" for strides in ("transposed", "sliced", "offset", "lastdim", "expanded")]
    + [f"d64-causal-g4-cache-{LENS}-{aux}" for aux in ("auxnone", "auxbf16", "auxfp16", "auxmix", "scale0.1")]
    + [f"d64-causal-w90-g4-cache-{LENS}-tail9-poison", f"d64-causal-w90-g4-paged64-{LENS}-poison-splits3"]
)


@pytest.mark.parametrize("widths", [*map(str, (*HEAD_DIMS, 512)), "192-v128"])
def test_only_the_output_is_rounded(widths: str) -> None:
    """Rounding an exact result to bf16 leaves a cosine of 0.9999985 with it, and of a row 0.9999966; weights of one
    bf16 number would leave 0.9999971 and 0.999991. The prefill's rows have the same bits: tests/test_order.py."""
    case = Case.parse(f"d{widths}-causal-g8-h2-cache-q2x3-k520.130.45-bf16-seed1")
    t = make_inputs(case)
    want = evaluate(case, t)["out"]
    cosine = torch.nn.functional.cosine_similarity
    for level in available_levels():
        for splits in (0, 1, 3):
            with at_level(level):
                out = run_ops(dataclasses.replace(case, num_splits=splits), t, sinkattn)["out"].double()
            assert cosine(out.flatten(), want.flatten(), 0) >= 0.999998, (level, splits)
            assert cosine(out, want, -1).min() >= 0.999995, (level, splits)


@pytest.mark.parametrize("name", with_dtypes(CASES, 12))
def test_case(name: str) -> None:
    assert_right_at(Case.parse(name), available_levels())


@pytest.mark.parametrize(("name", "dtype"), served("decode"))
def test_variant(name: str, dtype: str) -> None:
    check_variant(name, f"paged16-q2x2-k40.150-{dtype}")


@pytest.mark.parametrize("num_splits", [1, 2, 3, 64, 2**40])
def test_two_passes_are_what_a_cpu_does(num_splits: int) -> None:
    q, cache, s_aux = torch.randn(3, 2, 8, 64), torch.randn(2, 3, 600, 2, 64), torch.randn(8)
    options = {"cache_seqlens": torch.tensor([600, 0, 77], dtype=torch.int32), "causal": True, "s_aux": s_aux}
    results = [
        sinkattn.flash_attn_with_kvcache(q, *cache, num_splits=n, return_lse=True, **options)
        for n in (num_splits, -num_splits, 1)
    ]
    for asked, passes, unsplit in zip(*results, strict=True):
        assert torch.equal(asked, passes)
        assert torch.equal(asked, unsplit)


@pytest.mark.parametrize("page_size", [0, 1, 16])
@pytest.mark.parametrize("new", [1, 5])
@pytest.mark.parametrize("one_length", [False, True])
@pytest.mark.parametrize("mask", [{}, {"window_size": (4, 0), "num_sink_tokens": 1}])
def test_new_keys_are_appended_in_place(mask: dict[str, Any], one_length: bool, new: int, page_size: int) -> None:
    batch, capacity, heads, dim = 3, 48, 2, 64
    table = None
    if page_size:
        pages = batch * capacity // page_size
        table = torch.randperm(pages).int().view(batch, -1)
        cache = torch.randn(2, pages, page_size, heads, dim)
    else:
        cache = torch.randn(2, batch, capacity, heads, dim)
    lens = 17 if one_length else torch.tensor([0, 17, capacity - new], dtype=torch.int32)
    q, (k, v) = torch.randn(batch, new, 8, dim), torch.randn(2, batch, new, heads, dim)
    options = {"cache_seqlens": lens, "block_table": table, "causal": True, "return_lse": True}
    options |= mask | {"s_aux": 3 * torch.randn(8)}
    ours, theirs = cache.clone(), cache.clone()
    got = sinkattn.flash_attn_with_kvcache(q, *ours, k, v, **options)
    want = reference.flash_attn_with_kvcache(q, *theirs, k, v, **options)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    assert torch.equal(ours, theirs)
    assert not torch.equal(ours, cache)


@pytest.mark.parametrize("lens", [None, 20, torch.tensor([20, 20], dtype=torch.int32)])
def test_lengths_may_be_a_number_or_absent(lens: int | torch.Tensor | None) -> None:
    q, cache = torch.randn(2, 1, 4, 64), torch.randn(2, 2, 32, 2, 64)
    got = sinkattn.flash_attn_with_kvcache(q, *cache, cache_seqlens=lens)
    want = reference.flash_attn_with_kvcache(q, *cache, cache_seqlens=lens)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def test_more_than_one_row_needs_causal() -> None:
    with pytest.raises((ValueError, NotImplementedError), match="causal"):
        sinkattn.flash_attn_with_kvcache(torch.zeros(1, 2, 1, 64), *torch.zeros(2, 1, 8, 1, 64))


def test_one_row_needs_no_causal() -> None:
    q, k, v, s_aux, lens = cache()
    row = q[:, :1]
    results = [
        sinkattn.flash_attn_with_kvcache(row, k, v, cache_seqlens=lens, s_aux=s_aux, causal=c) for c in (True, False)
    ]
    assert torch.equal(*results)


def test_decode_out_writes_what_decode_returns() -> None:
    arguments = decode_args(paged=True)
    q, pages = arguments[0], arguments[1]
    needed = sinkattn.plan(
        "decode", dtype="fp32", s_aux_dtype="fp32", batch=2, num_q_heads=4, num_kv_heads=2, head_dim=8, q_len=2,
        k_len=8, page_size=pages.shape[1], num_pages=pages.shape[0], window_size_right=0, num_splits=2,
    )["workspace_bytes"]  # fmt: skip
    with_out = out_args(arguments, needed)
    out, lse = with_out[-3:-1]
    version = out._version
    with Calls() as calls:
        assert ops.flash_decode_out(*with_out) is None
    assert out._version > version
    assert set(calls.seen) == {"flash_decode_out"}
    want_out, want_lse = ops.flash_decode(*arguments)
    assert torch.equal(out, want_out)
    assert torch.equal(lse, want_lse)

    view = torch.empty(2, 2, 6, 8)[:, :, 1:5]
    ops.flash_decode_out(*arguments, view, lse, with_out[-1])
    assert torch.equal(view, want_out)
    if needed > 0:
        with pytest.raises(ValueError, match=f"scratch has {needed - 1} bytes, this call needs {needed}"):
            ops.flash_decode_out(*out_args(arguments, needed - 1))
    assert q.shape == out.shape


def test_decode_splits_need_scratch() -> None:
    plan = sinkattn.plan(
        "decode", {"backend": "cpu", "arch": 1, "workers": 2}, dtype="fp32", batch=1, num_q_heads=8,
        num_kv_heads=1, head_dim=64, q_len=1, k_len=4096, window_size_right=0, num_splits=4,
    )  # fmt: skip
    assert plan["num_splits"] == 4
    assert plan["workspace_bytes"] > 0
    q, k, v = (torch.randn(1, rows, heads, 64) for rows, heads in ((1, 8), (4096, 1), (4096, 1)))
    with pytest.raises(ValueError, match=r"scratch has 1 bytes, this call needs \d+ contiguous ones; sinkattn.plan"):
        ops.flash_decode_out(*out_args((q, k, v, None, None, None, None, -1, 0, 4, False), 1))


def test_selected_keys_are_pages_of_one_key() -> None:
    """128:1 heads of 512, each sequence with its own choice from one cache: every key outside it has no effect."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 1, 128, 512, generator=generator)
    cache = torch.randn(300, 1, 1, 512, generator=generator)
    table = torch.stack([torch.randperm(300, generator=generator)[:48] for _ in range(2)]).int()
    lens = torch.tensor([48, 31], dtype=torch.int32)
    s_aux = torch.randn(128, generator=generator)
    outside = torch.ones(300, dtype=torch.bool)
    for row, n in zip(table, lens, strict=True):
        outside[row[:n].long()] = False
    cache[outside] = torch.nan
    out, lse = sinkattn.flash_attn_with_kvcache(
        q, cache, cache, cache_seqlens=lens, block_table=table, causal=True, s_aux=s_aux, return_lse=True
    )
    for b, n in enumerate(lens.tolist()):
        keys = cache[table[b, :n].long()].transpose(0, 1).double()  # [1, n, 1, 512]
        want, want_lse = reference.flash_attn_func(
            q[b : b + 1].double(), keys, keys, causal=True, s_aux=s_aux.double(), return_lse=True
        )
        torch.testing.assert_close(out[b].double(), want[0], rtol=0, atol=2e-6 * float(want.abs().max()))
        torch.testing.assert_close(lse[b].double(), want_lse[0], rtol=0, atol=1e-5)


def test_ten_million_keys_from_pages() -> None:
    """Each of 64 pages stands in the table 2442 times: out as of its keys once, the LSE larger by log(2442)."""
    times, generator = 2442, torch.Generator().manual_seed(0)
    q = torch.randn(1, 1, 8, 64, generator=generator).bfloat16()
    k, v = (torch.randn(64, 64, 1, 64, generator=generator).bfloat16() for _ in "kv")
    s_aux, table = torch.randn(8, generator=generator), torch.randperm(64 * times, generator=generator) % 64
    assert table.bincount().tolist() == [times] * 64
    out, lse = sinkattn.flash_attn_with_kvcache(
        q, k, v, cache_seqlens=len(table) * 64, block_table=table.int()[None], causal=True, s_aux=s_aux, return_lse=True
    )
    once = (x.flatten(0, 1)[None].double() for x in (k, v))
    sink = (s_aux - math.log(times)).double()
    want, want_lse = reference.flash_attn_func(q.double(), *once, causal=True, s_aux=sink, return_lse=True)
    assert torch.nn.functional.cosine_similarity(out.double().flatten(), want.flatten(), 0) > 0.99999
    torch.testing.assert_close(lse.double(), want_lse + math.log(times), rtol=0, atol=1e-5)
