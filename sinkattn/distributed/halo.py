# SPDX-License-Identifier: Apache-2.0
"""Windowed layers: a rank needs, beside its own keys, those that a window reaches across its borders, and no more.

Each range of a rank with its halo is a packed sequence of its own, so that all of them are one call. Keys of the halo
that belong to other sequences form sequences without rows. To the right of a range the halo has rows too, of zeros,
since rows stand at the end of their keys; what they give is dropped.
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..ops import _fwd
from .shards import Call, Range, Shards, local_offsets


@dataclass(frozen=True)
class Halo:
    """What one rank sends and gets: `sent` are places among its own tokens, `got` among its keys with halos."""

    own: tuple[Range, ...]  # its ranges, and
    rows: tuple[Range, ...]  # each with its right halo, and
    keys: tuple[Range, ...]  # each with both, in tokens of the whole
    sent: tuple[tuple[Range, ...], ...]  # for each rank
    got: tuple[tuple[Range, ...], ...]


def _size(ranges: tuple[Range, ...]) -> int:
    return sum(end - begin for begin, end in ranges)


def _starts(ranges: tuple[Range, ...]) -> list[int]:
    return [_size(ranges[:i]) for i in range(len(ranges))]


def _reach(shards: Shards, rank: int, left: int, right: int) -> tuple[Range, ...]:
    return tuple((max(0, begin - left), min(shards.total, end + right)) for begin, end in shards.ranges[rank])


def _pieces(shards: Shards, source: int, target: int, left: int, right: int) -> list[tuple[Range, Range]]:
    """What `source` holds of the halos of `target`: (places among source's tokens, among target's keys)."""
    reach, pieces = _reach(shards, target, left, right), []
    for (own_begin, own_end), (low, high), at in zip(shards.ranges[target], reach, _starts(reach), strict=True):
        for halo in ((low, own_begin), (own_end, high)):
            for (begin, end), start in zip(shards.ranges[source], _starts(shards.ranges[source]), strict=True):
                first, last = max(begin, halo[0]), min(end, halo[1])
                if first < last:
                    sent = (start + first - begin, start + last - begin)
                    pieces.append((sent, (at + first - low, at + last - low)))
    return pieces


@lru_cache(maxsize=64)
def _halo(shards: Shards, rank: int, left: int, right: int) -> Halo:
    ranks, keys = range(len(shards.ranges)), _reach(shards, rank, left, right)
    return Halo(
        shards.ranges[rank],
        tuple((own[0], reach[1]) for own, reach in zip(shards.ranges[rank], keys, strict=True)),
        keys,
        tuple(tuple(sent for sent, _ in _pieces(shards, rank, r, left, right)) for r in ranks),
        tuple(tuple(got for _, got in _pieces(shards, r, rank, left, right)) for r in ranks),
    )


def _places(halo: Halo, of: tuple[Range, ...]) -> list[Range]:
    """Where the rank's own ranges lie among `of`, which contain them."""
    pairs = zip(halo.own, of, _starts(of), strict=True)
    return [(at + own[0] - around[0], at + own[1] - around[0]) for own, around, at in pairs]


def _exchange(
    k: Tensor, v: Tensor, sent: tuple[tuple[Range, ...], ...], got: tuple[tuple[Range, ...], ...], group: Any
) -> tuple[list[Tensor], dist.Work]:
    """Starts to send the places `sent` of k and v; the pieces for the places `got`, [tokens, 2, batch, heads, d]."""
    pieces = [torch.stack((k[:, begin:end], v[:, begin:end])) for ranges in sent for begin, end in ranges]
    message = torch.cat([x.permute(2, 0, 1, 3, 4) for x in pieces] or [k.new_empty(0, 2, k.shape[0], *k.shape[2:])])
    to, of = [_size(x) for x in sent], [_size(x) for x in got]
    answer = message.new_empty(sum(of), *message.shape[1:])
    work = dist.all_to_all_single(answer, message, of, to, group=group, async_op=True)
    return list(torch.split(answer, [end - begin for begin, end in _flat(got)])) if sum(of) else [], work


def _flat(ranges: tuple[tuple[Range, ...], ...]) -> list[Range]:
    return [x for of_rank in ranges for x in of_rank]


class _WithHalo(torch.autograd.Function):
    """k and v [batch, tokens, num_kv_heads, head_dim], each range with its halo; backward adds the halo's gradients."""

    @staticmethod
    def forward(ctx: Any, k: Tensor, v: Tensor, halo: Halo, group: dist.ProcessGroup | None) -> tuple[Tensor, Tensor]:
        ctx.halo, ctx.group = halo, group
        pieces, work = _exchange(k, v, halo.sent, halo.got, group)
        whole = k.new_empty(2, k.shape[0], _size(halo.keys), *k.shape[2:])
        at = 0
        for begin, end in _places(halo, halo.keys):  # while the halo is on its way
            for x, own in zip(whole, (k, v), strict=True):
                x[:, begin:end] = own[:, at : at + end - begin]
            at += end - begin
        work.wait()
        for (begin, end), piece in zip(_flat(halo.got), pieces, strict=True):
            whole[:, :, begin:end] = piece.permute(1, 2, 0, 3, 4)
        return whole[0], whole[1]

    @staticmethod
    def backward(ctx: Any, dk: Tensor, dv: Tensor) -> tuple[Any, ...]:
        halo: Halo = ctx.halo
        pieces, work = _exchange(dk, dv, halo.got, halo.sent, ctx.group)
        places = _places(halo, halo.keys)
        own = [torch.cat([x[:, begin:end] for begin, end in places] or [x], 1) for x in (dk, dv)]
        work.wait()
        for (begin, end), piece in zip(_flat(halo.sent), pieces, strict=True):
            for x, added in zip(own, piece.permute(1, 2, 0, 3, 4), strict=True):
                x[:, begin:end] += added
        return *own, None, None


def _offsets(cu_seqlens: Tensor, halo: Halo) -> tuple[Tensor, Tensor]:
    """cu_seqlens_q and cu_seqlens_k of the rank's rows and keys."""
    parts_q: list[Tensor] = []
    parts_k: list[Tensor] = []
    for rows, keys, at_rows, at_keys in zip(halo.rows, halo.keys, _starts(halo.rows), _starts(halo.keys), strict=True):
        if parts_k:  # rows past the last offset, if the range before ends with some, are a sequence without keys
            parts_q.append(torch.full_like(cu_seqlens[:1], at_rows))
            parts_k.append(parts_k[-1][-1:])
        parts_q.append(local_offsets(cu_seqlens, [rows], at_rows))
        parts_k.append(local_offsets(cu_seqlens, [keys], at_keys))
    if len(parts_q) == 1:
        return parts_q[0], parts_k[0]
    return (torch.cat(parts_q), torch.cat(parts_k)) if parts_q else (torch.zeros_like(cu_seqlens),) * 2


@lru_cache(maxsize=64)
def _dense_offsets(halo: Halo, total: int, batch: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The same for `batch` sequences of `total` tokens; kept, since a copy to the device would be waited for."""
    one_q, one_k = _offsets(torch.tensor([0, total], dtype=torch.int32), halo)
    nth = torch.arange(batch, dtype=torch.int32)[:, None]
    both = (one_q + nth * _size(halo.rows)).flatten(), (one_k + nth * _size(halo.keys)).flatten()
    return both[0].to(device), both[1].to(device)


def attention(
    q: Tensor, k: Tensor, v: Tensor, s_aux: Tensor | None, cu_seqlens: Tensor | None, call: Call
) -> tuple[Tensor, Tensor]:
    """out and LSE of a rank's tokens; with cu_seqlens the batch is 1."""
    halo = _halo(call.shards, call.rank, *call.window_size)
    batch = q.shape[0]
    if cu_seqlens is None:
        cu_q, cu_k = _dense_offsets(halo, call.shards.total, batch, q.device)
    else:
        cu_q, cu_k = _offsets(cu_seqlens, halo)
    k, v = _WithHalo.apply(k, v, halo, call.group)  # type: ignore[no-untyped-call]
    if halo.rows != halo.own:
        pieces = zip(torch.split(q, [end - begin for begin, end in halo.own], 1), halo.own, halo.rows, strict=True)
        q = torch.cat(
            [x for piece, own, rows in pieces for x in (piece, q.new_zeros(batch, rows[1] - own[1], *q.shape[2:]))], 1
        )
    rows, keys, values = (x.flatten(0, 1) for x in (q, k, v))
    out, lse = _fwd(rows, keys, values, s_aux, cu_q, cu_k, None, None, call.softmax_scale, *call.window_size, 0)
    out, lse = torch.unflatten(out, 0, (batch, -1)), torch.unflatten(lse, 1, (batch, -1)).transpose(0, 1)
    if cu_seqlens is not None and len(halo.own) > 1:  # of a row past the last offset the LSE is -inf, not the sink
        tokens = torch.cat([torch.arange(*rows, device=q.device) for rows in halo.rows])
        lse = lse.masked_fill(tokens >= cu_seqlens[-1], -math.inf)
    if halo.rows != halo.own:
        places = _places(halo, halo.rows)
        out = torch.cat([out[:, begin:end] for begin, end in places], 1)
        lse = torch.cat([lse[:, :, begin:end] for begin, end in places], 2)
    return out, lse
