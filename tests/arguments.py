# SPDX-License-Identifier: Apache-2.0
"""Small arguments for the operators, shared by the tests of the torch surface."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

ops = torch.ops.sinkattn
Arguments = tuple[Any, ...]


def dense(q_len: int = 5, k_len: int = 7, dtype: torch.dtype = torch.float32, grad: bool = False) -> list[Tensor]:
    """q, k, v, s_aux of two sequences, 4 : 2 heads, head_dim 8."""
    generator = torch.Generator().manual_seed(3)
    shapes = ((2, q_len, 4, 8), (2, k_len, 2, 8), (2, k_len, 2, 8), (4,))
    return [torch.randn(shape, generator=generator, dtype=dtype).requires_grad_(grad) for shape in shapes]


def packed(dtype: torch.dtype = torch.float32, grad: bool = False) -> list[Tensor]:
    """q, k, v, s_aux, cu_seqlens_q, cu_seqlens_k: lengths 3, 0, 2 of 4, 2, 2, and one row past the end of each."""
    generator = torch.Generator().manual_seed(4)
    shapes = ((6, 4, 8), (9, 2, 8), (9, 2, 8), (4,))
    tensors = [torch.randn(shape, generator=generator, dtype=dtype).requires_grad_(grad) for shape in shapes]
    return [*tensors, *(torch.tensor(cu, dtype=torch.int32) for cu in ([0, 3, 3, 5], [0, 4, 6, 8]))]


def cache(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """q, k_cache, v_cache, s_aux, cache_seqlens."""
    q, k, v, s_aux = dense(2, 8, dtype)
    return q, k, v, s_aux, torch.tensor([5, 8], dtype=torch.int32)


def narrow(dtype: torch.dtype = torch.float32, grad: bool = False) -> list[Tensor]:
    """dense() with head_dim 24 and values of 16."""
    generator = torch.Generator().manual_seed(5)
    shapes = ((2, 5, 4, 24), (2, 7, 2, 24), (2, 7, 2, 16), (4,))
    return [torch.randn(shape, generator=generator, dtype=dtype).requires_grad_(grad) for shape in shapes]


DENSE_ARGS = (None, None, None, None, None, 3, 0, 1)
FORWARDS = {
    "dense": lambda grad: (*dense(grad=grad), *DENSE_ARGS),
    "dense-no-sink": lambda grad: (*dense(grad=grad)[:3], None, *DENSE_ARGS),
    "packed": lambda grad: (*packed(grad=grad), 3, 4, 0.3, -1, 0, 0),
    "packed-no-max": lambda grad: (*packed(grad=grad), None, None, None, 2, -1, 0),
    "narrow": lambda grad: (*narrow(grad=grad), *DENSE_ARGS),
    "bf16": lambda grad: (*(x.detach().bfloat16().requires_grad_(grad) for x in dense()), *DENSE_ARGS),
}


def backward_args(forward: Arguments, frozen: bool = False, lse_used: bool = True) -> Arguments:
    out, lse = ops.flash_attn_fwd(*forward)
    q, k, v, s_aux, *rest = forward
    dlse = torch.linspace(-1, 1, lse.numel(), dtype=lse.dtype).view(lse.shape) if lse_used else None
    return (torch.ones_like(out), dlse, q, k, v, out, lse, None if frozen else s_aux, *rest)


def decode_args(paged: bool = False) -> Arguments:
    q, k, v, s_aux, lens = cache()
    if not paged:
        return (q, k, v, s_aux, lens, None, None, 3, 1, 0, False)
    table = torch.tensor([[3, 0], [1, 2]], dtype=torch.int32)
    return (q, k.view(4, 4, 2, 8), v.view(4, 4, 2, 8), s_aux, lens, table, 0.4, -1, 0, 2, False)


def narrow_decode_args() -> Arguments:
    q, k, v, s_aux = narrow()
    return (q[:, :2], k, v, s_aux, torch.tensor([5, 7], dtype=torch.int32), None, None, 3, 1, 0, False)


def varlen_cache_args() -> Arguments:
    """Of flash_decode_varlen: rows 3, 0, 2 of 4, 8, 5 keys in pages of 4, and one row past the end."""
    q, _, _, s_aux, cu_q, _ = packed()
    _, k, v, _, _, table, *_ = decode_args(paged=True)
    table, lens = torch.cat([table, table[:1]]), torch.tensor([4, 8, 5], dtype=torch.int32)
    return (q, k, v, s_aux, cu_q, lens, table, 3, 8, 0.4, 3, 0, 1)


def append_args(paged: bool = False) -> Arguments:
    """k_cache, v_cache, k, v, cache_seqlens, block_table: three new keys for each of two sequences."""
    _, k_cache, v_cache, _, lens, table, *_ = decode_args(paged)
    k, v = torch.randn(2, 2, 3, 2, 8, generator=torch.Generator().manual_seed(6))
    return (k_cache, v_cache, k, v, lens - torch.tensor([0, 7], dtype=torch.int32), table)


def slots_args() -> tuple[Tensor, ...]:
    """k_cache, v_cache, k, v, slot_mapping: six new rows, one of which goes nowhere."""
    k_cache, v_cache, k, v, _, _ = append_args(paged=True)
    return k_cache.clone(), v_cache.clone(), k.flatten(0, 1), v.flatten(0, 1), torch.tensor([3, 8, -1, 15, 0, 9])


def out_args(arguments: Arguments, scratch_bytes: int = 1 << 20) -> Arguments:
    q = arguments[0]
    lse = torch.empty(q.shape[0], q.shape[2], q.shape[1])
    return (*arguments, torch.empty_like(q), lse, torch.empty(scratch_bytes, dtype=torch.uint8))


def partials() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    q, k, v, _ = dense(dtype=torch.float64)
    a, b = (ops.flash_attn_fwd(q, k[:, at], v[:, at], None, *DENSE_ARGS) for at in (slice(0, 3), slice(3, 7)))
    return tuple(x.requires_grad_() for x in (*a, *b))  # type: ignore[return-value]


def put_at(arguments: Arguments, position: int, change: Callable[[Any], object]) -> list[Any]:
    changed = list(arguments)
    changed[position] = change(changed[position])
    return changed


STRIDES: dict[str, Callable[[Tensor], Tensor]] = {
    "heads-first": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "head-dim-strided": lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),
    "offset-by-one": lambda x: torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape),
    "odd-row-stride": lambda x: torch.cat([x, x[..., :3]], -1)[..., :8],
    "sliced": lambda x: torch.cat([x, x, x], 1)[:, x.shape[1] : 2 * x.shape[1]],
    "every-other-row": lambda x: torch.stack([x, x], 2).flatten(1, 2)[:, ::2],
}


class Calls(TorchDispatchMode):
    """The arguments of every sinkattn operator that reaches a kernel, with the defaults that torch leaves out."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, list[Arguments]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Arguments = (), kwargs: Any = None) -> Any:
        if func.namespace == "sinkattn":
            left_out = [x.default_value for x in func._schema.arguments[len(args) :]]
            self.seen.setdefault(func._opname, []).append((*args, *left_out))
        return func(*args, **(kwargs or {}))
