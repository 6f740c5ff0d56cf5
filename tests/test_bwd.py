# SPDX-License-Identifier: Apache-2.0
"""Backward: dq, dk, dv and ds_aux of every CPU level against fp64 over a case table; the reference's own gradients."""

import itertools

import pytest
import torch
from test_fwd import LENGTHS, VARLEN, check_variant, served, with_dtypes

import sinkattn
from sinkattn import reference
from sinkattn._testing import HEAD_DIMS, RATIOS, Case, assert_right_at, available_levels, evaluate, make_inputs

CASES = (
    [f"d{d}-causal-w33-sink2-g2-q70x2-k90x2" for d in HEAD_DIMS]
    + [f"d{d}-causal-w33-sink2-g2-h2-q70-k90" for d in ("192-v128", "64-v8", "256-v72")]
    + ["d192-v128-causal-w40-sink2-g2-varlen-q5.64-k9.64-tail3", "d80-v40-g2-h2-q40-k60-sliced-doutsum"]
    + [f"d64-causal-g{ratio}-h2-q33-k50" for ratio in RATIOS]
    + [f"d64-{mask}q150-k150" for mask in ("", "causal-", "w1-", "causal-w1-", "causal-w128-", "w99-r3-")]
    + [f"d64-causal-w9-sink{n}-g3-q100-k140" for n in (1, 4, 64, 141)]
    + [f"d64-causal-w50-sink3-g2-{lengths}" for lengths in LENGTHS]
    + [f"d{d}-causal-w40-sink2-g2-varlen-{lengths}" for d in (64, 72) for lengths in VARLEN]
    + [f"d80-causal-g2-h2-q70-k70-{strides}" for strides in ("transposed", "sliced", "offset", "lastdim", "expanded")]
    + [f"d64-causal-q70-k70-{dout}" for dout in ("doutsum", "douttransposed", "nodlse", "doutsum-nodlse")]
    + [f"d64-causal-w20-g4-q80-k80-{aux}" for aux in ("auxnone", "auxbf16", "auxfp16", "auxmix", "frozen", "scale0.1")]
)


@pytest.mark.parametrize("name", with_dtypes(CASES, 16))
def test_case(name: str) -> None:
    assert_right_at(Case.parse(name), available_levels())


LONG = (
    "d16-causal-w100-sink3-g2-q1100-k1100",
    "d16-causal-q2100-k2100",
    "d8-causal-w1500-q2100-k2300",
    "d16-causal-w300-sink5-varlen-q1030.5.1500-k1030.2.1400-tail3",
    "d8-w70-r50-q3100-k3100",
)


@pytest.mark.parametrize("name", LONG)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_long_sequences_are_summed_in_segments(name: str, dtype: str) -> None:
    levels = (level for level in available_levels() if level != "oracle")  # its three loops would take minutes
    assert_right_at(Case.parse(f"{name}-{dtype}"), levels)


@pytest.mark.parametrize(("name", "dtype"), served("bwd"))
def test_variant(name: str, dtype: str) -> None:
    check_variant(name, f"q40-k150-{dtype}")


@pytest.mark.parametrize("name", ["d64-causal-w20-sink3-g4-h2-q50-k70", "d40-r4-w9-g3-varlen-q5.0.9-k9.3.0-tail2"])
def test_ds_aux_of_the_reference_is_the_formula(name: str) -> None:
    case = Case.parse(f"{name}-auxfp64-fp64")
    t = make_inputs(case)
    leaves = [x.detach().requires_grad_() for x in (t.q, t.k, t.v, t.s_aux)]
    options = {"window_size": (case.left, case.right), "num_sink_tokens": case.num_sink_tokens, "return_lse": True}
    if t.cu_q is None:
        out, lse = reference.flash_attn_func(*leaves[:3], s_aux=leaves[3], **options)
    else:
        out, lse = reference.flash_attn_varlen_func(*leaves[:3], t.cu_q, t.cu_k, s_aux=leaves[3], **options)
    lse, dlse = torch.nan_to_num(lse, neginf=0.0), torch.nan_to_num(t.dlse)
    (ds_aux,) = torch.autograd.grad((out, lse), leaves[3:], (torch.nan_to_num(t.dout), dlse))
    torch.testing.assert_close(ds_aux, evaluate(case, t)["ds_aux"], rtol=1e-10, atol=1e-10)


OPTIONS = ({"causal": True}, {"window_size": (1, 2), "num_sink_tokens": 2}, {"return_lse": "raw"})


@pytest.mark.parametrize("options", OPTIONS)
def test_gradients_of_the_reference_are_central_differences(options: dict[str, object]) -> None:
    shapes = ((2, 5, 4, 8), (2, 7, 2, 8), (2, 7, 2, 8), (4,))
    leaves = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, s_aux: torch.Tensor) -> object:
        return reference.flash_attn_func(q, k, v, s_aux=s_aux, **({"return_lse": True} | options))

    assert torch.autograd.gradcheck(attend, leaves)


def test_who_asks_for_no_gradient_gets_none(level: str) -> None:
    tensors = [torch.randn(shape) for shape in ((1, 50, 4, 32), (1, 50, 2, 32), (1, 50, 2, 32), (4,))]
    whole = None
    for needs in itertools.product((True, False), repeat=4):
        leaves = [x.clone().requires_grad_(need) for x, need in zip(tensors, needs, strict=True)]
        out = sinkattn.flash_attn_func(*leaves[:3], window_size=(7, 0), s_aux=leaves[3])
        assert out.requires_grad == any(needs)
        if any(needs):
            out.sum().backward()
        grads = [x.grad for x in leaves]
        whole = whole or grads
        assert [grad is not None for grad in grads] == list(needs)
        assert all(a is None or torch.equal(a, b) for a, b in zip(grads, whole, strict=True))


def test_gradients_of_merge_and_sink_are_those_of_the_whole(level: str) -> None:
    q, k, v = (torch.randn(1, 33, heads, 64, dtype=torch.float64) for heads in (4, 2, 2))
    leaves = [x.requires_grad_() for x in (q, k, v, 3 * torch.randn(4, dtype=torch.float64))]
    q, k, v, s_aux = leaves
    whole = sinkattn.flash_attn_func(q, k, v, s_aux=s_aux, return_lse=True)
    parts = [sinkattn.flash_attn_func(q, k[:, a:b], v[:, a:b], return_lse=True) for a, b in ((0, 20), (20, 33))]
    merged = sinkattn.apply_sink(*sinkattn.merge_attn_states(*parts[0], *parts[1]), s_aux)
    seeds = [torch.randn_like(x) for x in whole]
    for ours, theirs in zip(merged, whole, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)
    grads = (torch.autograd.grad(outputs, leaves, seeds) for outputs in (merged, whole))
    for ours, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)
