# SPDX-License-Identifier: Apache-2.0
"""Ulysses: from some tokens of all heads to all tokens of some heads, plain attention there, and back."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..ops import _fwd
from .shards import Call, Shards


def _swap(to_heads: bool, call: Call, tensors: tuple[Tensor, ...]) -> list[Tensor]:
    """One all-to-all for all of the tensors, [batch, tokens, heads, head_dim] each.

    With to_heads from a rank's tokens of all heads to all tokens of its heads; otherwise the way back.
    """
    shards, ranks, lengths, mine = call.shards, call.ranks, call.shards.lengths, call.shards.lengths[call.rank]
    batch, _, _, head_dim = tensors[0].shape
    is_ordered = shards == Shards.contiguous(lengths)  # all tokens in the order of the ranks are the whole
    heads = [x.shape[2] // (ranks if to_heads else 1) for x in tensors]  # of one rank
    # Messages are [tokens, batch, heads of one rank, head_dim], those for rank 0 first.
    if to_heads:
        split = [torch.unflatten(x, 2, (ranks, -1)).permute(2, 1, 0, 3, 4) for x in tensors]
        sent = torch.cat(split, 3).flatten(0, 1)
    else:
        whole = torch.cat([x.transpose(0, 1) for x in tensors], 2)
        sent = whole if is_ordered else torch.cat([shards.take(whole, r, 0) for r in range(ranks)])
    to_me, to_others = [mine] * ranks, list(lengths)
    got = sent.new_empty(shards.total if to_heads else ranks * mine, batch, sum(heads), head_dim)
    received, given = (to_others, to_me) if to_heads else (to_me, to_others)
    dist.all_to_all_single(got, sent, received, given, group=call.group)
    if to_heads:
        whole = got if is_ordered else shards.join(torch.split(got, list(lengths)), 0)
        return [x.transpose(0, 1) for x in torch.split(whole, heads, 2)]
    return [
        x.permute(2, 1, 0, 3, 4).flatten(2, 3) for x in torch.split(torch.unflatten(got, 0, (ranks, mine)), heads, 3)
    ]


class _Swap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, to_heads: bool, call: Call, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.to_heads, ctx.call = to_heads, call
        return tuple(_swap(to_heads, call, tensors))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return None, None, *_swap(not ctx.to_heads, ctx.call, grads)


def heads_divide(num_q_heads: int, num_kv_heads: int, ranks: int) -> bool:
    """Every rank gets whole heads: kv heads are divided among ranks, or each is repeated for several of them."""
    return num_q_heads % ranks == 0 and (num_kv_heads % ranks == 0 or ranks % num_kv_heads == 0)


def attention(
    q: Tensor, k: Tensor, v: Tensor, s_aux: Tensor | None, cu_seqlens: Tensor | None, call: Call, return_lse: bool
) -> tuple[Tensor, Tensor]:
    """out of a rank's tokens, and where it is asked for their LSE; with cu_seqlens the batch is 1."""
    if not heads_divide(q.shape[2], k.shape[2], call.ranks):
        raise NotImplementedError(
            f"sinkattn: {q.shape[2]} q heads and {k.shape[2]} kv heads on {call.ranks} ranks; ulysses needs a multiple"
            ' of the ranks of q heads, and a multiple or a divisor of kv heads: take method="ring" or "halo"'
        )
    if k.shape[2] < call.ranks:
        k, v = (x.repeat_interleave(call.ranks // x.shape[2], 2) for x in (k, v))
    q, k, v = _Swap.apply(True, call, q, k, v)  # type: ignore[no-untyped-call]
    if s_aux is not None:
        s_aux = torch.unflatten(s_aux, 0, (call.ranks, -1))[call.rank]
    if cu_seqlens is not None:
        q, k, v = (x[0] for x in (q, k, v))
    lengths = cu_seqlens, cu_seqlens, call.max_seqlen, call.max_seqlen
    out, lse = _fwd(q, k, v, s_aux, *lengths, call.softmax_scale, *call.window_size, call.num_sink_tokens)
    if cu_seqlens is not None:
        out, lse = out[None], lse[None]
    (out,) = _Swap.apply(False, call, out)  # type: ignore[no-untyped-call]
    if return_lse:
        (lse,) = _Swap.apply(False, call, lse.transpose(1, 2)[..., None])  # type: ignore[no-untyped-call]
        lse = lse[..., 0].transpose(1, 2)
    return out, lse
