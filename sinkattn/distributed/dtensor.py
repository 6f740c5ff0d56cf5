# SPDX-License-Identifier: Apache-2.0
"""The operators on DTensors: sharded over heads, over the batch, or not at all.

Heads are sharded where every rank gets whole kv heads, whose query heads go with them; s_aux is sharded alike. Over the
batch, and it alone, ds_aux is a partial sum.
"""

from typing import Any

import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

Placements = list[Any]  # of each output or argument; None for what is no tensor


def _shardings(q: Any, k: Any) -> list[tuple[Any, Any, Any]]:
    """What goes together on one dimension of the mesh: of rows and keys, of the LSE, of s_aux."""
    is_packed = len(q.shape) == 3
    found: list[tuple[Any, Any, Any]] = [(Replicate(), Replicate(), Replicate())]
    if k.shape[-2] % k.mesh.size() == 0:
        found.append((Shard(len(q.shape) - 2), Shard(0 if is_packed else 1), Shard(0)))
    if not is_packed:
        found.append((Shard(0), Shard(0), Replicate()))
    return found


def _rest(arguments: tuple[Any, ...]) -> Placements:
    """cu_seqlens, if they are given, are everywhere."""
    return [None if x is None or isinstance(x, (int, float)) else Replicate() for x in arguments]


def _fwd_shardings(q: Any, k: Any, v: Any, s_aux: Any = None, *rest: Any) -> list[tuple[Placements, Placements]]:
    return [
        ([rows, lse], [rows, rows, rows, None if s_aux is None else sink, *_rest(rest)])
        for rows, lse, sink in _shardings(q, k)
    ]


def _fwd_raw_shardings(*arguments: Any) -> list[tuple[Placements, Placements]]:
    return [([rows, lse, lse], taken) for (rows, lse), taken in _fwd_shardings(*arguments)]


def _bwd_shardings(
    dout: Any, dlse: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, s_aux: Any = None, *rest: Any
) -> list[tuple[Placements, Placements]]:
    found = []
    for rows, stats, sink in _shardings(q, k):
        ds_aux = Replicate() if s_aux is None else Partial() if (rows, sink) == (Shard(0), Replicate()) else sink
        inputs = [rows, None if dlse is None else stats, rows, rows, rows, rows, stats, None if s_aux is None else sink]
        found.append(([rows, rows, rows, ds_aux], [*inputs, *_rest(rest)]))
    return found


def register() -> None:
    """Tells DTensor of the operators; sinkattn.distributed does it."""
    register_sharding(torch.ops.sinkattn.flash_attn_fwd.default)(_fwd_shardings)
    register_sharding(torch.ops.sinkattn.flash_attn_fwd_raw.default)(_fwd_raw_shardings)
    register_sharding(torch.ops.sinkattn.flash_attn_bwd.default)(_bwd_shardings)
