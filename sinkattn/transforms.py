# SPDX-License-Identifier: Apache-2.0
"""torch.func (grad, vjp, jacrev, vmap of these): the operators as Python autograd functions.

torch's transforms do not take an autograd function that is written in C++, as the operators' own is, so a call that
they meet comes here; torch.compile breaks its graph there. vmap calls the operators once a sample.
"""

from typing import Any

import torch
from torch import Tensor

_fwd = torch.ops.sinkattn.flash_attn_fwd.default
_fwd_raw = torch.ops.sinkattn.flash_attn_fwd_raw.default
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
    def backward(ctx: Any, dout: Tensor, dlse: Tensor, dlse_raw: Tensor | None = None) -> Any:
        q, k, v, s_aux, cu_seqlens_q, cu_seqlens_k, out, lse, *raw = ctx.saved_tensors
        learning = s_aux if ctx.needs_input_grad[3] else None

        def gradients(dout: Tensor, dlse: Tensor | None, lse: Tensor, s_aux: Tensor | None) -> Any:
            lengths = (cu_seqlens_q, cu_seqlens_k, *ctx.options)
            return _Backward.apply(dout, dlse, q, k, v, out, lse, s_aux, *lengths)  # type: ignore[no-untyped-call]

        dq, dk, dv, ds_aux = gradients(dout, dlse, lse, learning)
        if dlse_raw is not None:  # an attention without the sink, as csrc/torch/autograd.cpp has it
            more_dq, more_dk, _, _ = gradients(torch.zeros_like(dout), dlse_raw, raw[0], None)
            dq, dk = dq + more_dq, dk + more_dk
        return dq, dk, dv, None if learning is None else ds_aux, *[None] * 8

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise NotImplementedError(_NO_FORWARD_MODE)


class RawForward(Forward):
    """(out, lse, lse_raw) by flash_attn_fwd_raw, from its arguments."""

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, ...]:
        return tuple(_fwd_raw(*arguments))


_SERVED = {_fwd: Forward, _fwd_raw: RawForward}


def function_for(op: Any, error: RuntimeError) -> type[Forward] | None:
    """The function that computes the operator that a transform met; None for another error."""
    if "a torch.func transform meets an operator" not in str(error):
        return None
    if op not in _SERVED:
        name = op._schema.name.removeprefix("sinkattn::")
        raise NotImplementedError(f"sinkattn: {name} has no backward; use flash_attn_func where gradients are needed")
    return _SERVED[op]
