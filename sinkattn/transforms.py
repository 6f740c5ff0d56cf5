# SPDX-License-Identifier: Apache-2.0
"""torch.func (grad, vjp, jacrev, vmap of these): the operators as Python autograd functions.

torch's transforms do not take an autograd function that is written in C++, as the operators' own is, so a call that
they meet comes here; torch.compile breaks its graph there. vmap calls the operators once a sample.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_fwd = torch.ops.sinkattn.flash_attn_fwd.default
_bwd = torch.ops.sinkattn.flash_attn_bwd.default

_NO_FORWARD_MODE = "sinkattn: forward-mode differentiation is not supported; use reverse mode"


class _Backward(torch.autograd.Function):
    """dq, dk, dv, ds_aux by flash_attn_bwd, from its arguments."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, ...]:
        return tuple(_bwd(*arguments))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        """Nothing is kept, since nothing comes after."""

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise NotImplementedError(
            "sinkattn: double backward is not supported; drop create_graph=True, or differentiate sinkattn.reference"
        )

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise NotImplementedError(_NO_FORWARD_MODE)


class Forward(torch.autograd.Function):
    """(out, lse) by flash_attn_fwd, from its arguments."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, ...]:
        return tuple(_fwd(*arguments))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.save_for_backward(*inputs[:6], *output)
        ctx.options = inputs[6:]

    @staticmethod
    def backward(ctx: Any, dout: Tensor, dlse: Tensor) -> Any:
        q, k, v, s_aux, cu_seqlens_q, cu_seqlens_k, out, lse = ctx.saved_tensors
        learning = s_aux if ctx.needs_input_grad[3] else None
        dq, dk, dv, ds_aux = _Backward.apply(  # type: ignore[no-untyped-call]
            dout, dlse, q, k, v, out, lse, learning, cu_seqlens_q, cu_seqlens_k, *ctx.options
        )
        return dq, dk, dv, None if learning is None else ds_aux, *[None] * 8

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise NotImplementedError(_NO_FORWARD_MODE)


def serves(op: Any, error: RuntimeError) -> bool:
    """Whether a transform met an operator that Forward computes as well."""
    if "a torch.func transform meets an operator" not in str(error):
        return False
    if op is not _fwd:
        name = op._schema.name.removeprefix("sinkattn::")
        raise NotImplementedError(f"sinkattn: {name} has no backward; use flash_attn_func where gradients are needed")
    return True
