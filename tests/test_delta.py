# SPDX-License-Identifier: Apache-2.0
"""Where dQ nearly cancels, delta, computed from a rounded out, causes its error: docs/numerics.md."""

import torch
from torch import Tensor

import sinkattn
from sinkattn import reference

CALL = {"causal": True, "window_size": (63, 0)}


def gradient(attend: object, q: Tensor, dout: Tensor) -> tuple[Tensor, Tensor]:
    q = q.clone().requires_grad_()
    out = attend(q)  # type: ignore[operator]
    return out.detach().double(), torch.autograd.grad(out, q, dout.to(out.dtype))[0].double()


def test_the_error_of_dq_is_that_of_delta(level: str) -> None:
    """Keys and values have a common part. The rest of the error is a rounding or two: of dS, to bf16, and of dQ."""
    generator = torch.Generator().manual_seed(1)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    q, k = 0.3 * randn(1, 128, 4, 32), randn(1, 32) + 0.3 * randn(1, 128, 1, 32)
    v, dout, s_aux = 1 + 0.3 * randn(1, 128, 1, 32), randn(1, 128, 4, 32), randn(4)
    q, k, v, dout = (x.bfloat16() for x in (q, k, v, dout))
    wide = [x.double() for x in (k, v, s_aux)]
    out, dq = gradient(lambda q: sinkattn.flash_attn_func(q, k, v, s_aux=s_aux, **CALL), q, dout)
    exact = gradient(lambda q: reference.flash_attn_func(q, *wide[:2], s_aux=wide[2], **CALL), q.double(), dout)
    mean_key = reference.flash_attn_func(q.double(), wide[0], wide[0], s_aux=wide[2], **CALL)
    lacking = (dout.double() * (exact[0] - out)).sum(-1, keepdim=True)
    of_delta = 32**-0.5 * lacking * mean_key
    assert (dq - exact[1]).norm() > 0.01 * exact[1].norm(), "the case no longer shows the error"
    assert (dq - of_delta - exact[1]).norm() < 0.004 * exact[1].norm()
