# SPDX-License-Identifier: Apache-2.0
"""Positional sink tokens beside a window, on a CUDA device: the windowed kernels of compute capability 9.0."""

import dataclasses
import math
from itertools import pairwise

import pytest
import torch
from gpu_cases import assert_right_on_device
from gpus import different_under_load, needs_gpus
from torch import Tensor

import sinkattn
from sinkattn._testing import Case

pytestmark = needs_gpus()

LAYOUTS = {"dense": "q200x2-k260x2", "varlen": "varlen-q190.0.7.101.3.20-k190.5.200.60.3.12-tail5"}


@pytest.mark.parametrize(
    ("head_dim", "ratio"), [(64, 2), (64, 8), (64, 64), (64, 6), (40, 7), (80, 1), (96, 4), (128, 6), (128, 8)]
)
@pytest.mark.parametrize(("left", "right"), [(127, 0), (30, 0), (0, 0), (40, 30)])
@pytest.mark.parametrize("num_sink_tokens", [1, 4, 8, 9, 16])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_windows_against_fp64(
    head_dim: int, ratio: int, left: int, right: int, num_sink_tokens: int, layout: str
) -> None:
    case = Case.parse(f"d{head_dim}-sink{num_sink_tokens}-g{ratio}-{LAYOUTS[layout]}-poison-bf16-seed{ratio}")
    assert_right_on_device(dataclasses.replace(case, left=left, right=right))


@pytest.mark.parametrize("slope", [0.0, 5.0, 100.0, -100.0])
@pytest.mark.parametrize(("head_dim", "group"), [(128, 6), (64, 6), (128, 4)])
def test_rows_are_those_of_an_invariant_decode(head_dim: int, group: int, slope: float) -> None:
    """Over a cache the general forward computes them, in the same order of sums; scores outgrow the sink tokens'."""
    torch.manual_seed(0)
    q = torch.randn(1, 300, 2 * group, head_dim, device="cuda", dtype=torch.bfloat16)
    k, v = torch.randn(2, 1, 300, 2, head_dim, device="cuda", dtype=torch.bfloat16)
    q[..., 0] = 4
    k[..., 0] = torch.linspace(0, slope * head_dim**0.5, 300, device="cuda")[:, None]
    options = {"window_size": (127, 0), "num_sink_tokens": 4, "s_aux": torch.randn(2 * group, device="cuda")}
    whole = sinkattn.flash_attn_func(q, k, v, **options)
    lengths = torch.tensor([300], dtype=torch.int32, device="cuda")
    rows = sinkattn.flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths, causal=True, invariant=True, **options)
    assert torch.equal(rows, whole)


@pytest.mark.parametrize("ratio", [1, 5, 12])
@pytest.mark.parametrize("left", [0, 63, 64, 128])
@pytest.mark.parametrize("num_sink_tokens", [3, 16])
def test_gradients_of_any_group_against_fp64(ratio: int, left: int, num_sink_tokens: int) -> None:
    lens = "varlen-q190.0.7.101.1-k150.5.200.60.1-tail5"
    assert_right_on_device(
        Case.parse(f"d64-causal-w{left + 1}-sink{num_sink_tokens}-g{ratio}-{lens}-poison-bf16-seed1")
    )


@pytest.mark.parametrize("head_dim", [8, 40, 64])
@pytest.mark.parametrize("num_sink_tokens", [5, 12])
@pytest.mark.parametrize(
    ("s_dtype", "s_aux", "frozen"), [("bf16", "rand", False), ("fp32", "mix", True), ("fp32", "none", False)]
)
def test_fp16_against_fp64(head_dim: int, num_sink_tokens: int, s_dtype: str, s_aux: str, frozen: bool) -> None:
    case = Case.parse(f"d{head_dim}-causal-w128-sink{num_sink_tokens}-g8-h2-varlen-q130.300-k130.300-fp16-seed2")
    assert_right_on_device(dataclasses.replace(case, s_aux=s_aux, s_dtype=s_dtype, frozen=frozen))


def rows_of(length: int, num_q_heads: int, head_dim: int = 64) -> list[Tensor]:
    """q, k, v, dO of one packed tensor, and s_aux; two kv heads."""
    torch.manual_seed(0)
    q, dout = torch.randn(2, length, num_q_heads, head_dim, device="cuda", dtype=torch.bfloat16)
    k, v = torch.randn(2, length, 2, head_dim, device="cuda", dtype=torch.bfloat16)
    return [q, k, v, dout, torch.randn(num_q_heads, device="cuda")]


def everything(tensors: list[Tensor], bounds: tuple[int, ...], left: int, num_sink_tokens: int) -> tuple[Tensor, ...]:
    cu = torch.tensor(bounds, dtype=torch.int32, device="cuda")
    dout = tensors[3]
    leaves = [x.detach().requires_grad_() for x in (*tensors[:3], tensors[4])]
    options = {"window_size": (left, 0), "s_aux": leaves[3], "num_sink_tokens": num_sink_tokens, "return_lse": True}
    out, lse = sinkattn.flash_attn_varlen_func(*leaves[:3], cu, cu, **options)
    found = torch.autograd.grad((out, lse), leaves, (dout, torch.full_like(lse, 0.01)))
    return out.detach(), lse.detach().t(), *found


@pytest.mark.parametrize(
    ("num_q_heads", "head_dim", "left", "num_sink_tokens"),
    [(16, 64, 127, 4), (16, 64, 127, 16), (10, 64, 63, 8), (12, 128, 127, 4), (10, 96, 127, 16)],
)
def test_bits_are_the_same_packed_and_one_by_one(
    num_q_heads: int, head_dim: int, left: int, num_sink_tokens: int
) -> None:
    """Sequences shorter than the sink tokens and longer than all slices of their sums."""
    bounds = (0, 700, 703, 767, 768, 898, 2998, 3010, 3343)
    tensors = rows_of(bounds[-1], num_q_heads, head_dim)
    packed = everything(tensors, bounds, left, num_sink_tokens)
    for begin, end in pairwise(bounds):
        part = [*(x[begin:end] for x in tensors[:4]), tensors[4]]
        alone = everything(part, (0, end - begin), left, num_sink_tokens)
        for got, want in zip(packed[:5], alone[:5], strict=True):
            assert torch.equal(got[begin:end], want), (begin, end)


@pytest.mark.parametrize(("head_dim", "num_sink_tokens"), [(64, 4), (64, 16), (128, 4)])
def test_repeats_are_bitwise_equal_under_load(head_dim: int, num_sink_tokens: int) -> None:
    tensors = rows_of(1000, 16, head_dim)
    assert different_under_load(lambda: everything(tensors, (0, 400, 1000), 127, num_sink_tokens)) == 0


@pytest.mark.parametrize(("group", "head_dim"), [(4, 64), (6, 64), (6, 128)])
@pytest.mark.parametrize("row", [0, 3, 15, 64, 200])
@pytest.mark.parametrize(
    ("name", "value"),
    [("q", math.nan), ("k", math.nan), *((x, y) for x in ("v", "dout") for y in (math.nan, math.inf))],
)
def test_values_that_are_not_finite_stay_where_they_are_seen(
    name: str, value: float, row: int, group: int, head_dim: int
) -> None:
    length, left, num_sink_tokens = 300, 99, 6
    tensors = rows_of(length, 2 * group, head_dim)
    clean = everything(tensors, (0, length), left, num_sink_tokens)
    bad = [x.clone() for x in tensors]
    bad[["q", "k", "v", "dout"].index(name)][row, 0, 7] = value
    out, _, dq, dk, dv, _ = everything(bad, (0, length), left, num_sink_tokens)

    i, j = torch.arange(length)[:, None], torch.arange(length)[None]
    sees = (j <= i) & ((j >= i - left) | (j < num_sink_tokens))
    hit = [torch.zeros(x.shape[:2], dtype=torch.bool) for x in (out, dq, dk, dv)]
    if name in ("k", "v"):
        seeing = sees[:, row]
        hit[0][:, :group] = hit[1][:, :group] = seeing[:, None]
        hit[2][:, 0] = (sees & seeing[:, None]).any(0)
        hit[3][:, 0] = hit[2][:, 0] if name == "k" else False
    else:
        hit[0][row, 0], hit[1][row, 0] = name == "q", True
        hit[2][:, 0] = hit[3][:, 0] = sees[row]
    for x, where in zip((out, dq, dk, dv), hit, strict=True):
        assert torch.equal(~torch.isfinite(x).all(-1).cpu(), where)
    if name == "dout":  # P is fine: one column alone
        assert torch.isfinite(dv[..., torch.arange(head_dim) != 7]).all()
    for x, want, where in zip((out, dq, dk, dv), (clean[0], *clean[2:5]), hit, strict=True):
        assert torch.equal(x.cpu()[~where], want.cpu()[~where])


def test_ds_aux_is_exact_where_it_cancels() -> None:
    lens = (2048,)
    case = Case(
        left=127, right=0, num_sink_tokens=8, ratio=2, q_lens=lens, k_lens=lens, dlse=False, dtype="bf16", seed=3
    )
    assert_right_on_device(case)


@pytest.mark.parametrize(("head_dim", "num_sink_tokens"), [(64, 4), (64, 16), (128, 4)])
def test_hostile_cu_seqlens_are_contained_and_reported(head_dim: int, num_sink_tokens: int, seed: int) -> None:
    q, k, v, _, s_aux = rows_of(300, 16, head_dim)
    sinkattn.check_errors()
    generator = torch.Generator().manual_seed(seed)
    for _ in range(100):
        bad = torch.randint(-(2**31), 2**31, (6,), generator=generator, dtype=torch.int64).to(torch.int32).cuda()
        bad = bad % 400 if torch.rand((), generator=generator) < 0.5 else bad
        leaves = [x.detach().requires_grad_() for x in (q, k, v, s_aux)]
        options = {"window_size": (127, 0), "s_aux": leaves[3], "num_sink_tokens": num_sink_tokens}
        out = sinkattn.flash_attn_varlen_func(*leaves[:3], bad, bad.flip(0), **options)
        torch.autograd.grad(out, leaves, q)
    with pytest.raises(ValueError, match="cu_seqlens did not start at 0"):
        sinkattn.check_errors()
