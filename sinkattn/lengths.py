# SPDX-License-Identifier: Apache-2.0
"""Which keys each sequence has: arguments of packed rows and of caches that exclude each other."""

import torch
from torch import Tensor

from .calls import shown


def check_lengths(
    cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, seqused_k: Tensor | None, cached: bool
) -> None:
    """Those of packed rows: keys are packed as well, by cu_seqlens_k, or lie in a cache, by seqused_k."""
    if cu_seqlens_q is None:
        raise ValueError("sinkattn: cu_seqlens_q is None; it must be int32 offsets [batch + 1], or use flash_attn_func")
    if cached and seqused_k is None:
        lengths = "int32 [batch] keys in use" if cu_seqlens_k is None else "cu_seqlens_k.diff(), and cu_seqlens_k=None"
        raise ValueError(f"sinkattn: block_table is given without seqused_k; it must be {lengths}")
    if cached and cu_seqlens_k is not None:
        raise ValueError(
            "sinkattn: cu_seqlens_k and seqused_k are both given; the first is for packed keys, the second for a cache"
        )
    if not cached and cu_seqlens_k is None:
        raise ValueError(
            "sinkattn: cu_seqlens_k is None; it must be int32 offsets [batch + 1], or give seqused_k to read a cache"
        )


def rows_of_cache(cache_batch_idx: Tensor, block_table: Tensor | None, q: Tensor) -> Tensor:
    """A block table: each row of the cache is one page, and a sequence has one."""
    if not isinstance(cache_batch_idx, Tensor):
        raise TypeError(f"sinkattn: cache_batch_idx is {shown(cache_batch_idx)}; it must be a torch.Tensor")
    if block_table is not None:
        raise ValueError("sinkattn: cache_batch_idx and block_table are both given; block_table says where pages are")
    x, batch = cache_batch_idx, q.shape[:1]
    if (x.shape, x.dtype, x.device, x.layout) != (batch, torch.int32, q.device, torch.strided):
        raise ValueError(
            f"sinkattn: cache_batch_idx is {x.layout} {x.dtype} {list(x.shape)} on {x.device}; it must be strided"
            f" torch.int32 {list(batch)} on {q.device}, a row of the cache for each sequence"
        )
    return x[:, None]
