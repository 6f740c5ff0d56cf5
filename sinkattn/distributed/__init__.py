# SPDX-License-Identifier: Apache-2.0
"""Attention of sequences whose tokens lie on several ranks; and DTensors sharded over heads.

    out = context_parallel_attention(q, k, v, s_aux=s_aux, window_size=(127, 0), group=group, shards=shards)

Each rank calls it with its own tokens and gets their rows of what one process would compute. docs/distributed.md says
which method is for which layer, and what each communicates.

Gradients of q, k, v are whole. That of s_aux is the part of this rank, as the gradient of every parameter is: its sum
over the group is the whole, and the data-parallel reduction over the group forms it.

Importing this module lets the functions of sinkattn take DTensors that are sharded over heads or over the batch.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from ..ops import _window
from ..reference import Result, Window
from . import dtensor, halo, ring, ulysses
from .shards import Call, Shards

__all__ = ["METHODS", "Shards", "context_parallel_attention", "method_for"]

METHODS = ("ulysses", "halo", "ring")

dtensor.register()


def method_for(
    num_q_heads: int, num_kv_heads: int, ranks: int, window_size: tuple[int, int], num_sink_tokens: int = 0
) -> str:
    """What method=None takes: halo for windows, otherwise ulysses where the heads divide, otherwise ring."""
    if min(window_size) >= 0 and not num_sink_tokens:
        return "halo"
    return "ulysses" if ulysses.heads_divide(num_q_heads, num_kv_heads, ranks) else "ring"


def _check(q: Tensor, k: Tensor, v: Tensor, s_aux: Tensor | None, cu_seqlens: Tensor | None) -> None:
    rank = 4 if cu_seqlens is None else 3
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != rank:
            raise ValueError(
                f"sinkattn: {name} has shape {list(x.shape)}; it must be [batch, tokens, heads, head_dim], or, with"
                " cu_seqlens, [tokens, heads, head_dim]"
            )
        if x.shape[:-2] != q.shape[:-2] or x.shape[-1] != q.shape[-1]:
            raise ValueError(
                f"sinkattn: {name} has shape {list(x.shape)}, q {list(q.shape)}; they differ in heads alone"
            )
    if k.shape != v.shape or k.shape[-2] == 0 or q.shape[-2] % k.shape[-2]:
        heads = [x.shape[-2] for x in (q, k, v)]
        raise ValueError(f"sinkattn: q, k, v have {heads} heads; k and v as many, and q a multiple of them")
    if len({(x.dtype, x.device) for x in (q, k, v)}) > 1:
        kinds = ", ".join(f"{x.dtype} on {x.device}" for x in (q, k, v))
        raise ValueError(f"sinkattn: q, k, v are {kinds}; they must have one dtype and device")
    if s_aux is not None and s_aux.shape != q.shape[-2:-1]:
        raise ValueError(f"sinkattn: s_aux has shape {list(s_aux.shape)}; it must be [num_q_heads], [{q.shape[-2]}]")
    if cu_seqlens is not None and (cu_seqlens.dim() != 1 or cu_seqlens.dtype != torch.int32 or not len(cu_seqlens)):
        raise ValueError(
            f"sinkattn: cu_seqlens is {cu_seqlens.dtype} {list(cu_seqlens.shape)}; it must be int32 [n + 1]"
        )


def _check_shards(shards: Shards, tokens: int, group: dist.ProcessGroup | None) -> None:
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    if len(shards.ranges) != ranks:
        raise ValueError(f"sinkattn: shards are of {len(shards.ranges)} ranks; the group has {ranks}")
    if shards.lengths[rank] != tokens:
        raise ValueError(f"sinkattn: q has {tokens} tokens on rank {rank}; shards say {shards.lengths[rank]}")


def context_parallel_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: dist.ProcessGroup | None = None,
    shards: Shards | None = None,
    method: str | None = None,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    s_aux: Tensor | None = None,
    num_sink_tokens: int = 0,
    return_lse: bool = False,
) -> Result:
    """flash_attn_func, or with cu_seqlens flash_attn_varlen_func, of self-attention over the tokens of all ranks.

    q, k, v   this rank's tokens, [batch, tokens, heads, head_dim], or packed [tokens, heads, head_dim].
    group     the ranks that share the tokens; None is all.
    shards    which tokens each rank holds; None: contiguous, of the lengths that the ranks then tell each other, for
              which the host waits in every call. It must be the same on all ranks.
    method    "ulysses", "halo" or "ring"; None is method_for's choice.
    cu_seqlens, max_seqlen  of the whole, the same on all ranks.
    s_aux     all of [num_q_heads], on every rank.

    Returns out like q, with return_lse also the LSE, [batch, heads, tokens] or [heads, tokens]. Differentiable in q, k,
    v, s_aux, also through the LSE. ValueError and NotImplementedError as in sinkattn; halo takes windows bounded on
    both sides, ring none but causal, and num_sink_tokens is for ulysses.
    """
    _check(q, k, v, s_aux, cu_seqlens)
    window = _window(window_size, causal)
    tokens = q.shape[-3]
    shards = Shards.gathered(tokens, group, q.device) if shards is None else shards
    _check_shards(shards, tokens, group)
    method = method or method_for(q.shape[-2], k.shape[-2], len(shards.ranges), window, num_sink_tokens)
    if method not in METHODS:
        raise ValueError(f"sinkattn: method is {method!r}; it must be None or one of {', '.join(METHODS)}")
    if num_sink_tokens and method != "ulysses":
        raise NotImplementedError(
            f'sinkattn: num_sink_tokens is {num_sink_tokens} with method "{method}"; only method="ulysses" has it'
        )
    if method == "halo" and min(window) < 0:
        raise NotImplementedError(f'sinkattn: window_size is {window}; halo needs both sides, take "ulysses" or "ring"')
    if method == "ring" and window not in ((-1, 0), (-1, -1)):
        raise NotImplementedError(
            f'sinkattn: window_size is {window}; ring has none but causal, take "halo" or "ulysses"'
        )
    packed = cu_seqlens is not None
    q, k, v = (x[None] if packed else x for x in (q, k, v))
    call = Call(shards, group, max_seqlen, softmax_scale, window, num_sink_tokens)
    if method == "ulysses":
        out, lse = ulysses.attention(q, k, v, s_aux, cu_seqlens, call, return_lse)
    else:
        attend = halo.attention if method == "halo" else ring.attention
        out, lse = attend(q, k, v, s_aux, cu_seqlens, call)
    if packed:
        out, lse = out[0], lse[0]
    return (out, lse) if return_lse else out
