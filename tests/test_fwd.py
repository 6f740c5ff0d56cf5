# SPDX-License-Identifier: Apache-2.0
"""Forward: every CPU level against fp64 over a case table, and the reference against other writings of the function."""

import pytest
import torch

import sinkattn
from sinkattn import _C, reference
from sinkattn._testing import (
    DTYPES,
    HEAD_DIMS,
    LEVELS,
    RATIOS,
    Case,
    assert_right,
    assert_right_at,
    at_level,
    available_levels,
    check,
    evaluate,
    make_inputs,
)

WINDOWS = ("", "w1-", "w2-", "w127-", "w128-", "w129-", "w199-", "w200-", "w201-", "w2147483647-")
LENGTHS = ("q1-k1", "q1-k300", "q300-k1", "q64-k64", "q65-k63", "q128-k128", "q129-k127", "q63-k257", "q200-k100")
VARLEN = ("q1x9-k1x9", "q0.5.0.64.1.130-k0.5.7.64.300.130", "q70.0.3-k0.20.3-tail3", "q300.1.17-k300.299.5")
CASES = (
    [f"d{d}-causal-w33-sink2-g2-q70x2-k90x2" for d in HEAD_DIMS]
    + [f"d{d}-causal-w33-sink2-g2-h2-q70-k90" for d in ("192-v128", "64-v8", "256-v72")]
    + ["d192-v128-causal-w40-sink2-g2-varlen-q5.64-k9.64-tail3", "d80-v40-g2-h2-q40-k60-sliced"]
    + [f"d64-causal-g{ratio}-h2-q33-k50" for ratio in RATIOS]
    + [f"d64-{right}{window}q200-k200" for right in ("causal-", "") for window in WINDOWS]
    + [f"d64-r{right}-{window}q100-k140" for right in (1, 5, 139, 2**31 - 1) for window in ("", "w1-", "w7-", "w140-")]
    + [f"d64-causal-w9-sink{n}-g3-q100-k140" for n in (1, 4, 64, 141, 2**31 - 1)]
    + [f"d64-causal-w50-sink3-g2-{lengths}" for lengths in LENGTHS]
    + [f"d64-{mask}{lengths}" for mask in ("", "r3-") for lengths in LENGTHS]
    + [f"d{d}-causal-w40-sink2-g2-varlen-{lengths}" for d in (64, 72) for lengths in VARLEN]
    + [f"d80-causal-g2-h2-{strides}" for strides in ("transposed", "sliced", "offset", "lastdim", "expanded")]
    + [f"d64-causal-g2-h2-varlen-q5.64-k9.64-{strides}" for strides in ("transposed", "sliced", "offset", "expanded")]
    + [f"d64-causal-w20-g8-q100-k100-{aux}" for aux in ("auxnone", "auxbf16", "auxfp16", "auxmix", "scale0.1")]
)


def with_dtypes(names: list[str], rarer: int) -> list[str]:
    """Each case in fp32 and bf16, and every len / rarer-th in fp16 and fp64."""
    some = names[:: len(names) // rarer]
    return [f"{x}-{dtype}" for dtype in DTYPES for x in (names if dtype in ("fp32", "bf16") else some)]


@pytest.mark.parametrize("name", with_dtypes(CASES, 25))
def test_case(name: str) -> None:
    assert_right_at(Case.parse(name), available_levels(), backward=False)


def test_case_id_parses_back() -> None:
    for name in CASES:
        assert Case.parse(Case.parse(name).id) == Case.parse(name)
    with pytest.raises(ValueError, match="g2q7"):
        Case.parse("d64-g2q7-bf16")


def test_check_sees_a_dropped_sink_and_a_wrong_window() -> None:
    case = Case.parse("d64-causal-w20-q60-k60-bf16")
    t = make_inputs(case)

    class Wrong:
        @staticmethod
        def flash_attn_func(q, k, v, **options):  # type: ignore[no-untyped-def]
            return reference.flash_attn_func(q, k, v, **(options | change))

    larger = t.s_aux.detach() * 1.01
    for change in ({"s_aux": None}, {"window_size": (20, 0)}, {"window_size": (18, 0)}, {"s_aux": larger}):
        assert any(f.ratio > 1 for f in check(case, Wrong, backward=False)), change  # type: ignore[arg-type]


def test_a_failure_names_its_levels(monkeypatch: pytest.MonkeyPatch) -> None:
    def sinkless(*args: torch.Tensor, **options: object) -> object:
        return reference.flash_attn_func(*args, **(options | {"s_aux": None}))

    monkeypatch.setattr(sinkattn, "flash_attn_func", sinkless)
    with pytest.raises(AssertionError, match=r"(?s)oracle.*scalar"):
        assert_right_at(Case.parse("d64-causal-w20-q60-k60-fp32"), ("oracle", "scalar"), backward=False)


def served(op: str) -> list[tuple[str, str]]:
    """(variant, dtype) of every compiled CPU kernel of an op that this machine can run."""
    rows = [row for row in _C.variants() if row["op"] == op and row["backend"] == "cpu"]
    arches = range(len(available_levels()))
    return [(row["name"], dtype) for row in rows if row["arch"] in arches for dtype in row["dtypes"]]


def check_variant(name: str, case: str, **options: bool) -> None:
    row = next(row for row in _C.variants() if row["name"] == name)
    with at_level(LEVELS[row["arch"]]):
        for head_dim in (*HEAD_DIMS, 512):
            if head_dim <= row["max_head_dim"]:
                assert_right(Case.parse(f"d{head_dim}-causal-w70-sink3-g2-{case}"), **options)


@pytest.mark.parametrize(("name", "dtype"), served("fwd"))
def test_variant(name: str, dtype: str) -> None:
    check_variant(name, f"q40-k150-{dtype}", backward=False)


@pytest.mark.parametrize("name", ["d64-causal-w20-sink3-g4-h2-q50-k70", "d40-r4-w9-g3-varlen-q5.0.9-k9.3.0-tail2"])
def test_reference_is_the_explicit_evaluation(name: str) -> None:
    assert_right(Case.parse(name + "-fp64"), reference)


def test_reference_without_sinks_is_sdpa() -> None:
    q, k, v = (torch.randn(2, 37, heads, 64, dtype=torch.float64) for heads in (6, 2, 2))
    for causal in (False, True):
        ours = reference.flash_attn_func(q, k, v, causal=causal)
        theirs = torch.nn.functional.scaled_dot_product_attention(
            *(x.transpose(1, 2) for x in (q, k, v)), is_causal=causal, enable_gqa=True
        )
        torch.testing.assert_close(ours, theirs.transpose(1, 2), rtol=1e-12, atol=1e-13)


def test_reference_is_softmax_with_one_more_logit() -> None:
    """The form of gpt-oss: the sink is a column of logits that is dropped after the softmax."""
    q, k, v = (torch.randn(2, 37, heads, 64, dtype=torch.float64) for heads in (6, 2, 2))
    s_aux = torch.randn(6, dtype=torch.float64) * 3
    scores = torch.einsum("bihd,bjhd->bhij", q, k.repeat_interleave(3, 2)) * 64**-0.5
    row, key = torch.arange(37)[:, None], torch.arange(37)
    scores = scores.masked_fill((key > row) | (key <= row - 10), -torch.inf)
    logits = torch.cat([scores, s_aux[None, :, None, None].expand(2, 6, 37, 1)], -1)
    theirs = torch.einsum("bhij,bjhd->bihd", logits.softmax(-1)[..., :-1], v.repeat_interleave(3, 2))
    ours, lse = reference.flash_attn_func(q, k, v, causal=True, window_size=(9, 0), s_aux=s_aux, return_lse=True)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(lse, logits.logsumexp(-1), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_tolerance_is_what_eager_loses(dtype: str) -> None:
    """The loss that the tolerance is made of is that of eager PyTorch in the dtype itself, not a larger one."""
    case = Case.parse(f"d64-causal-w50-g4-auxbf16-nodlse-{dtype}")
    t = make_inputs(case)
    ref, low = evaluate(case, t), evaluate(case, t, DTYPES[dtype])
    q, k, v = (x.detach().transpose(1, 2).requires_grad_() for x in (t.q, t.k, t.v))
    scores = (q @ k.repeat_interleave(4, 1).mT * 64**-0.5).masked_fill(~t.seen[:, None], -torch.inf)
    logits = torch.cat([scores, t.s_aux.detach().to(q.dtype)[None, :, None, None].expand(*scores.shape[:3], 1)], -1)
    out = logits.softmax(-1)[..., :-1] @ v.repeat_interleave(4, 1)
    grads = torch.autograd.grad(out, (q, k, v), t.dout.transpose(1, 2))
    for name, eager in zip(("out", "dq", "dk", "dv"), (out, *grads), strict=True):
        loss = (eager.detach().transpose(1, 2).double() - ref[name]).abs().mean()
        emulated = (low[name].double() - ref[name]).abs().mean()
        assert emulated <= 1.1 * loss, name
