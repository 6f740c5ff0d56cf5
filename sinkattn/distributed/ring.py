# SPDX-License-Identifier: Apache-2.0
"""Full layers on any number of heads: K and V travel around the ring of ranks, and dK, dV one step behind them.

A rank begins with its own keys, and there the sink enters, once; what the keys of others give is merged in the order in
which they come, in fp32. The backward hands every block of keys the final out and LSE. While a block is computed the
next one is on its way.

ds_aux belongs to the rank that owns the row. Of one block the operator finds what the rows give without any key, and
what its keys add; the first counts once. So of every further block it is taken off again, as the operator finds it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..ops import _fwd, merge_attn_states
from .shards import Call, local_offsets

_bwd = torch.ops.sinkattn.flash_attn_bwd.default


@dataclass(frozen=True)
class Move:
    """A tensor on its way to the next rank, and the one that comes from the rank before."""

    sent: Tensor  # kept until it has been read
    got: Tensor
    works: list[dist.Work]

    def wait(self) -> Tensor:
        for work in self.works:
            work.wait()
        return self.got


class Ring(Call):
    def source(self, step: int) -> int:
        """Whose keys are here in a step."""
        return (self.rank - step) % self.ranks

    def start(self, sent: Tensor, step: int) -> Move:
        """Hands on `sent`, [2, batch, tokens, heads, d], for what is here in `step`."""
        got = sent.new_empty(*sent.shape[:2], self.shards.lengths[self.source(step)], *sent.shape[3:])
        group = self.group or dist.group.WORLD
        assert group is not None
        to, of = (dist.get_global_rank(group, (self.rank + x) % self.ranks) for x in (1, -1))
        moves = [dist.P2POp(dist.isend, sent, to, group), dist.P2POp(dist.irecv, got, of, group)]
        return Move(sent, got, dist.batch_isend_irecv(moves))

    def options(self, step: int) -> tuple[Any, ...]:
        """Of the operators; keys of others are before all rows that they are given to, or the layer is not causal."""
        return self.max_seqlen, self.max_seqlen, self.softmax_scale, -1, self.window_size[1] if step == 0 else -1, 0


@dataclass(frozen=True)
class Block:
    """Rows of this rank, and keys, the first of those here, that all of these rows see within their sequences."""

    rows: slice
    keys: slice
    cu_seqlens: tuple[Tensor | None, Tensor | None]

    def operands(self, rows: Sequence[Tensor], stats: Sequence[Tensor | None], keys: Tensor) -> tuple[Any, ...]:
        """Its part of rows [batch, tokens, ...], stats [batch, heads, tokens], and k, v, as the operators take them."""
        cut_rows = [x[:, self.rows] for x in rows]
        cut_stats = [None if x is None else x[:, :, self.rows] for x in stats]
        cut_keys = [x[:, self.keys] for x in keys]
        if self.cu_seqlens[0] is None:
            return cut_rows, cut_stats, cut_keys
        return [x[0] for x in cut_rows], [None if x is None else x[0] for x in cut_stats], [x[0] for x in cut_keys]


def _blocks(ring: Ring, step: int, cu_seqlens: Tensor | None) -> list[Block]:
    mine, theirs = ring.shards.ranges[ring.rank], ring.shards.ranges[ring.source(step)]
    if step == 0 or ring.window_size[1] < 0:
        seen = [len(theirs)] * len(mine)
    else:
        seen = [sum(keys[1] <= rows[0] for keys in theirs) for rows in mine]
    blocks, at = [], 0
    for count in sorted(set(seen)):  # ranges ascend, and so do those that they see
        rows, keys = [x for x, n in zip(mine, seen, strict=True) if n == count], theirs[:count]
        num_rows, num_keys = (sum(end - begin for begin, end in x) for x in (rows, keys))
        if count:
            cu = [None if cu_seqlens is None else local_offsets(cu_seqlens, x) for x in (rows, keys)]
            blocks.append(Block(slice(at, at + num_rows), slice(0, num_keys), (cu[0], cu[1])))
        at += num_rows
    return blocks


def _wide(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _forward(
    ring: Ring, q: Tensor, kv: Tensor, s_aux: Tensor | None, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor]:
    out = torch.empty_like(q, dtype=_wide(q))
    lse = out.new_empty(q.shape[0], q.shape[2], q.shape[1])
    here = kv
    for step in range(ring.ranks):
        move = ring.start(here, step + 1) if step + 1 < ring.ranks else None
        for block in _blocks(ring, step, cu_seqlens):
            (rows,), _, (k, v) = block.operands((q,), (), here)
            part = _fwd(rows, k, v, s_aux if step == 0 else None, *block.cu_seqlens, *ring.options(step))
            part_out, part_lse = part if cu_seqlens is None else (x[None] for x in part)
            at = (slice(None), block.rows), (slice(None), slice(None), block.rows)
            if step > 0:
                part_out, part_lse = merge_attn_states(out[at[0]], lse[at[1]], part_out.to(out.dtype), part_lse)
            out[at[0]], lse[at[1]] = part_out, part_lse
        here = move.wait() if move else here
    return out.to(q.dtype), lse


def _without_keys(
    ring: Ring, block: Block, rows: Sequence[Tensor], stats: Sequence[Tensor | None], k: Tensor, s_aux: Tensor
) -> Tensor:
    """What dout, q, out with dlse, lse, the operands of a block, give to ds_aux when they see no key.

    One key is there, of no sequence: operators that are handed none may be others, which sum otherwise.
    """
    cu_seqlens = block.cu_seqlens[0]
    if cu_seqlens is None:
        rows, k = [x.flatten(0, 1) for x in rows], k.flatten(0, 1)
        stats = [None if x is None else x.transpose(0, 1).flatten(1) for x in stats]
        cu_seqlens = torch.zeros(2, dtype=torch.int32, device=k.device)
        cu_seqlens[1:].fill_(len(rows[0]))
    (dout, q, out), (dlse, lse), k = rows, stats, k[:1]
    offsets = cu_seqlens, torch.zeros_like(cu_seqlens)
    ds_aux: Tensor = _bwd(dout, dlse, q, k, k, out, lse, s_aux, *offsets, *ring.options(1))[3]
    return ds_aux


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, s_aux: Tensor | None, cu_seqlens: Tensor | None, ring: Ring
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.ring = ring
        out, lse = _forward(ring, q, torch.stack((k, v)), s_aux, cu_seqlens)
        ctx.save_for_backward(q, k, v, s_aux, cu_seqlens, out, lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        ring: Ring = ctx.ring
        q, k, v, s_aux, cu_seqlens, out, lse = ctx.saved_tensors
        dout = torch.zeros_like(out) if dout is None else dout
        dq = torch.zeros_like(q, dtype=_wide(q))
        wide_s_aux = s_aux.to(dq.dtype) if ctx.needs_input_grad[3] else None
        ds_aux = None if wide_s_aux is None else torch.zeros_like(wide_s_aux)
        here = torch.stack((k, v))
        sums = torch.zeros_like(here, dtype=dq.dtype)  # dK and dV of the keys that are here
        sums_move: Move | None = None
        for step in range(ring.ranks):
            move = ring.start(here, step + 1) if step + 1 < ring.ranks else None
            parts = []
            for block in _blocks(ring, step, cu_seqlens):
                rows, stats, (k, v) = block.operands((dout, q, out), (dlse, lse), here)
                operands = rows[0], stats[0], rows[1], k, v, rows[2], stats[1], wide_s_aux
                part_dq, *part, part_ds_aux = _bwd(*operands, *block.cu_seqlens, *ring.options(step))
                dq[:, block.rows] += part_dq
                parts.append((block, part))
                if ds_aux is not None and wide_s_aux is not None:
                    ds_aux += part_ds_aux
                    if step > 0:
                        ds_aux -= _without_keys(ring, block, rows, stats, k, wide_s_aux)
            sums = sums_move.wait() if sums_move else sums
            for block, part in parts:
                for of_all, of_part in zip(sums, part, strict=True):
                    of_all[:, block.keys] += of_part
            sums_move = ring.start(sums, step + 1) if ring.ranks > 1 else None
            here = move.wait() if move else here
        sums = sums_move.wait() if sums_move else sums
        if ds_aux is not None:
            ds_aux = ds_aux.to(s_aux.dtype)
        return dq.to(q.dtype), *sums.to(k.dtype), ds_aux, None, None


def attention(
    q: Tensor, k: Tensor, v: Tensor, s_aux: Tensor | None, cu_seqlens: Tensor | None, call: Call
) -> tuple[Tensor, Tensor]:
    """out and LSE of a rank's tokens; with cu_seqlens the batch is 1."""
    ring = Ring(call.shards, call.group, call.max_seqlen, call.softmax_scale, call.window_size)
    return _RingAttention.apply(q, k, v, s_aux, cu_seqlens, ring)  # type: ignore[no-untyped-call,no-any-return]
