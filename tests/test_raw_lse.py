# SPDX-License-Identifier: Apache-2.0
"""The LSE over the keys alone, merging, and the sink that joins afterwards: values and gradients.

test_gpu_raw_lse.py runs the same on a CUDA device.
"""

import math

import pytest
import torch
from torch import Tensor

import sinkattn
from sinkattn._testing import DTYPES, Case, assert_right, make_inputs, random_join
from sinkattn.reference import flash_attn_func as reference_attn

LOGITS = (-1e4, -60.0, -20.0, -3.0, 0.0, 20.0, 100.0, 1e4)


def test_random_joins(seed: int) -> None:
    failures = [f for index in range(400) for f in random_join(f"{seed}/{index}") if not f.ratio <= 1]
    assert not failures, failures[:10]


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32", "fp64"])
@pytest.mark.parametrize("lens", ["q9-k40", "varlen-q40.0.7-k40.9.0", "cache-q2x3-k40.30.0", "paged16-q2x3-k40.30.7"])
def test_raw_against_fp64(lens: str, dtype: str) -> None:
    assert_right(Case.parse(f"d64-causal-w20-sink2-g2-{lens}-auxmix-raw-{dtype}-seed3"))


def test_packed_tail_leaks_nothing() -> None:
    assert_right(Case.parse("d64-causal-g2-varlen-q40.7-k40.7-tail9-raw-bf16-seed4"))


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_out_and_raw_lse_have_one_bit_pattern(dtype: str) -> None:
    t = make_inputs(Case.parse(f"d64-causal-w20-g2-q70-k90-auxmix-{dtype}"))
    q, k, v, s_aux = (x.detach() for x in (t.q, t.k, t.v, t.s_aux))
    options = {"causal": True, "window_size": (19, 0)}
    out, raw = sinkattn.flash_attn_func(q, k, v, s_aux=s_aux, return_lse="raw", **options)
    assert torch.equal(raw, sinkattn.flash_attn_func(q, k, v, return_lse=True, **options)[1])
    want = sinkattn.flash_attn_func(q, k, v, s_aux=s_aux, **options)
    torch.testing.assert_close(out, want, rtol=0, atol=0, equal_nan=True)


def gradients_of_sinks(out: Tensor, lse: Tensor, s_aux: Tensor, dout: Tensor) -> Tensor:
    return torch.autograd.grad(sinkattn.apply_sink(out, lse, s_aux)[0], s_aux, dout)[0]


def test_apply_sink_trains_sinks_far_below_the_scores() -> None:
    """Their weight w rounds to 0, the keys' to 1, and w (1 - w) must not."""
    out, dout = torch.randn(2, 1, 50, len(LOGITS), 64).unbind()
    lse, s_aux = torch.randn(1, len(LOGITS), 50), torch.tensor(LOGITS, requires_grad=True)
    got = gradients_of_sinks(out, lse, s_aux, dout)
    wide = s_aux.detach().double()
    w = torch.sigmoid(wide[None, :, None] - lse.double())
    kept = torch.sigmoid(lse.double() - wide[None, :, None])
    terms = w * kept * (out.double() * dout.double()).sum(-1).mT
    off = (got.double() + terms.sum((0, 2))).abs()  # terms have both signs: their sum may be far smaller
    assert (off <= 1e-5 * terms.abs().sum((0, 2)) + 1e-37).all()
    assert got[1].item() != 0.0
    assert got[2].item() != 0.0


def test_raw_trains_sinks_far_below_the_scores() -> None:
    torch.manual_seed(0)  # a sum of terms of both signs may be far smaller than they are
    q, k, v, dout = torch.randn(4, 1, 50, len(LOGITS), 64).unbind()
    s_aux = torch.tensor(LOGITS, requires_grad=True)
    out, _ = sinkattn.flash_attn_func(q, k, v, causal=True, s_aux=s_aux, return_lse="raw")
    (got,) = torch.autograd.grad(out, s_aux, dout)
    wide = s_aux.detach().double().requires_grad_()
    exact = reference_attn(*(x.double() for x in (q, k, v)), causal=True, s_aux=wide)
    (want,) = torch.autograd.grad(exact, wide, dout.double())
    torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-37)
    assert got[1].item() != 0.0


def test_gradients_of_both_outputs() -> None:
    q, k, v = (torch.randn(1, 30, 2, 16, dtype=torch.float64, requires_grad=True) for _ in range(3))
    s_aux = torch.randn(2, dtype=torch.float64, requires_grad=True)
    for weight_out, weight_raw in ((1.0, 0.0), (0.0, 1.0), (1.0, 1.0)):
        for sinks in (s_aux, s_aux.detach()):
            given = [x for x in (q, k, v, sinks) if x.requires_grad]
            both = []
            for function in (sinkattn.flash_attn_func, reference_attn):
                out, raw = function(q, k, v, causal=True, s_aux=sinks, return_lse="raw")
                parts = [w * x.square().sum() for w, x in ((weight_out, out), (weight_raw, raw)) if w]
                both.append(torch.autograd.grad(sum(parts), given, allow_unused=True, materialize_grads=True))
            torch.testing.assert_close(*both)


def test_lse_raw_op_returns_both() -> None:
    q, k, v = torch.randn(3, 1, 30, 2, 16).unbind()
    s_aux = torch.randn(2)
    mask = (None, -1, 0, 0)
    lengths = (None,) * 4
    out, lse, raw = torch.ops.sinkattn.flash_attn_fwd_raw(q, k, v, s_aux, *lengths, *mask)
    want_out, want_lse = torch.ops.sinkattn.flash_attn_fwd(q, k, v, s_aux, *lengths, *mask)
    assert torch.equal(out, want_out)
    assert torch.equal(lse, want_lse)
    torch.testing.assert_close(lse, torch.logaddexp(raw, s_aux[None, :, None].expand_as(raw)))
    out, lse, raw = torch.ops.sinkattn.flash_decode_raw(q[:, -1:], k, v, s_aux, None, None, None, -1, 0, 0, False)
    torch.testing.assert_close(lse, torch.logaddexp(raw, s_aux[None, :, None].expand_as(raw)))


@pytest.mark.parametrize(
    ("dtype", "lse_dtype"),
    [(torch.bool, "fp32"), (torch.int64, "fp32"), (torch.float8_e4m3fn, "fp32"), (torch.complex64, "fp32"),
     (torch.float64, "fp32"), (torch.int32, "fp64")],
)  # fmt: skip
def test_apply_sink_checks_its_dtype(dtype: torch.dtype, lse_dtype: str) -> None:
    out, lse = torch.randn(1, 5, 2, 8), torch.randn(1, 2, 5, dtype=DTYPES[lse_dtype])
    with pytest.raises(ValueError, match=r"sinkattn: s_aux is .* (must be float32|are served)"):
        sinkattn.apply_sink(out, lse, torch.ones(2).to(dtype))


def test_apply_sink_of_rows_without_keys_ignores_their_gradient() -> None:
    out, lse = torch.randn(6, 2, 8), torch.randn(2, 6)
    out[4:], lse[:, 4:] = 0.0, -math.inf
    dout = torch.randn_like(out)
    s_aux = torch.randn(2, requires_grad=True)
    want = gradients_of_sinks(out, lse, s_aux, dout)
    dout[4:] = math.nan
    assert torch.equal(gradients_of_sinks(out, lse, s_aux, dout), want)
