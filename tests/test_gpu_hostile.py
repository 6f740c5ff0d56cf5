# SPDX-License-Identifier: Apache-2.0
"""Sequence boundaries that are wrong, on a CUDA device: contained, and reported."""

import pytest
import torch
from gpu_cases import gpt_oss_like
from gpus import needs_gpus
from torch import Tensor

import sinkattn

pytestmark = needs_gpus()


@pytest.mark.parametrize("left", [127, -1])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_hostile_cu_seqlens_are_contained_and_reported(head_dim: int, left: int, seed: int) -> None:
    q, k, v, s_aux = (x[0] if x.ndim == 4 else x for x in gpt_oss_like(1, 300, head_dim))
    good = torch.tensor([0, 100, 300], dtype=torch.int32, device="cuda")
    want = sinkattn.flash_attn_varlen_func(q, k, v, good, good, causal=True, s_aux=s_aux)
    sinkattn.check_errors()
    generator = torch.Generator().manual_seed(seed)
    for _ in range(200):
        bad = torch.randint(-(2**31), 2**31, (6,), generator=generator, dtype=torch.int64).to(torch.int32).cuda()
        bad = bad % 400 if torch.rand((), generator=generator) < 0.5 else bad
        leaves = [x.detach().requires_grad_() for x in (q, k, v, s_aux)]
        out = sinkattn.flash_attn_varlen_func(
            *leaves[:3], bad, bad.flip(0), causal=True, window_size=(left, 0), s_aux=leaves[3]
        )
        torch.autograd.grad(out, leaves, q)
    with pytest.raises(ValueError, match="cu_seqlens did not start at 0"):
        sinkattn.check_errors()
    sinkattn.check_errors()
    assert torch.equal(sinkattn.flash_attn_varlen_func(q, k, v, good, good, causal=True, s_aux=s_aux), want)


@pytest.mark.parametrize("left", [127, -1])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_the_first_sequence_begins_at_row_0_whatever_its_offset(head_dim: int, left: int) -> None:
    q, k, v, s_aux = (x[0] if x.ndim == 4 else x for x in gpt_oss_like(1, 300, head_dim))

    def run(first: int) -> tuple[Tensor, ...]:
        bounds = torch.tensor([first, 200, 290], dtype=torch.int32, device="cuda")
        leaves = [x.detach().requires_grad_() for x in (q, k, v, s_aux)]
        out = sinkattn.flash_attn_varlen_func(
            *leaves[:3], bounds, bounds, causal=True, window_size=(left, 0), s_aux=leaves[3]
        )
        return (out, *torch.autograd.grad(out, leaves, q))

    want = run(0)
    sinkattn.check_errors()
    for first in (150, 250, -3):
        for a, b in zip(run(first), want, strict=True):
            assert torch.equal(a, b)
        with pytest.raises(ValueError, match="cu_seqlens did not start at 0"):
            sinkattn.check_errors()


def test_sinkattn_check_raises_at_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SINKATTN_CHECK", "1")
    q, k, v, _ = (x[0] if x.ndim == 4 else x for x in gpt_oss_like(1, 300))
    bad = torch.tensor([0, 200, 100], dtype=torch.int32, device="cuda")
    with pytest.raises(ValueError, match="decreased"):
        sinkattn.flash_attn_varlen_func(q, k, v, bad, bad, causal=True)
