# SPDX-License-Identifier: Apache-2.0
"""Which tokens of the batch rows that transformers passes form a sequence: bounds for flash_attn_varlen_func."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from sinkattn.hf_masks import ONE_SEQUENCE, PADDING, SEQUENCES


class Sequences(NamedTuple):
    """cu_seqlens_q and cu_seqlens_k, int32 [sequences + 1], of the batch rows laid end to end.

    Where padding stands amid the tokens of a sequence, tokens are the indices of the queries and of the keys that
    remain when all padding is taken out, and the bounds are those of what remains.
    """

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    tokens: tuple[Tensor, Tensor] | None = None


def find_sequences(mask: Tensor | None, position_ids: Tensor | None, batch: int, q_len: int, k_len: int) -> Sequences:
    """The sequences of batch rows of k_len keys, whose last q_len are the queries as well.

    mask is [batch, k_len] of a dtype of hf_masks, position_ids [1 or batch, q_len]. A sequence starts with each row,
    where the number in a mask of SEQUENCES changes, and, unless there is such a mask, at each token whose position is
    not that of the token before it plus one. Behind padding a row goes on where positions go on, with the padding
    counted or not, and where nothing says that they do not.
    """
    tokens = None
    if mask is not None and mask.dtype not in (ONE_SEQUENCE, SEQUENCES) and not mask.all():
        tokens = mask.to(PADDING)
    like = position_ids if mask is None else mask
    starts = torch.zeros(batch, k_len, dtype=torch.bool, device=None if like is None else like.device)
    if mask is not None and mask.dtype == SEQUENCES:
        if q_len != k_len or (mask < 0).any() or (mask[:, 1:] < mask[:, :-1]).any():
            raise NotImplementedError(
                "sinkattn: the mask's packed sequences are not runs of tokens whose positions count on; use eager"
                " attention"
            )
        starts[:, 1:] = mask[:, 1:] != mask[:, :-1]
    elif position_ids is not None:
        _mark_restarts(starts[:, k_len - q_len :], position_ids, None if tokens is None else tokens[:, k_len - q_len :])
        if q_len != k_len and starts.any():
            raise ValueError(
                f"sinkattn: position_ids restart within {q_len} tokens that follow {k_len - q_len} cached ones;"
                " sequences are packed before an empty cache only"
            )
        if mask is not None and mask.dtype == ONE_SEQUENCE and starts.any():
            raise NotImplementedError(
                "sinkattn: position_ids restart within a row: packed sequences, each of which has first tokens of its"
                " own; a StreamingCache takes one sequence a row"
            )
    starts[:, :1] = True
    if tokens is not None:
        return _beside_padding(tokens, starts, position_ids if q_len == k_len else None, q_len)
    if q_len == k_len:
        bounds = pad(starts.flatten().nonzero().flatten(), (0, 1), value=batch * q_len).to(torch.int32)
        return Sequences(bounds, bounds.clone())
    rows = torch.arange(batch + 1, dtype=torch.int32, device=starts.device)
    return Sequences(rows * q_len, rows * k_len)


def _mark_restarts(starts: Tensor, position_ids: Tensor, tokens: Tensor | None) -> None:
    """Writes True into starts [batch, q_len] at tokens that do not count on from a token beside them."""
    if position_ids.ndim != 2:
        raise NotImplementedError(
            f"sinkattn: position_ids has shape {tuple(position_ids.shape)}, not [batch, q_len]; use eager attention"
        )
    restarts = position_ids[:, 1:] != position_ids[:, :-1] + 1
    starts[:, 1:] = restarts if tokens is None else restarts & tokens[:, 1:] & tokens[:, :-1]


def _beside_padding(tokens: Tensor, starts: Tensor, position_ids: Tensor | None, q_len: int) -> Sequences:
    """Rows are cut into runs, of padding or of one sequence's tokens; tokens and starts are bool [batch, k_len].

    A run of padding is two sequences: its queries without keys, whose out is zeros, and its keys without queries. So
    nothing is gathered or scattered, unless a sequence goes on behind padding.
    """
    batch, k_len = tokens.shape
    starts[:, 1:] |= tokens[:, 1:] != tokens[:, :-1]
    begin = starts.flatten().nonzero().flatten()
    end = pad(begin[1:], (0, 1), value=batch * k_len)
    padding, row = ~tokens.flatten()[begin], begin // k_len
    goes_on = torch.zeros_like(padding)  # runs whose sequence began in the last run but one
    goes_on[2:] = padding[1:-1] & ~padding[2:] & ~padding[:-2] & (row[2:] == row[:-2])
    if position_ids is not None and goes_on.any():
        p = position_ids.expand(batch, -1).flatten()
        step = p[begin[2:]] - p[end[:-2] - 1]
        goes_on[2:] &= (step == 1) | (step == 1 + end[1:-1] - begin[1:-1])
    if goes_on.any():
        return _without_padding(tokens, begin[~padding & ~goes_on], q_len)
    q_end = row * q_len + (end - row * k_len - (k_len - q_len)).clamp(min=0)
    shown = torch.stack((padding, torch.ones_like(padding)), 1)
    cu_seqlens_q = pad(torch.stack((q_end, q_end), 1)[shown], (1, 0))
    cu_seqlens_k = pad(torch.stack((begin, end), 1)[shown], (1, 0))
    return Sequences(cu_seqlens_q.to(torch.int32), cu_seqlens_k.to(torch.int32))


def _without_padding(tokens: Tensor, begin: Tensor, q_len: int) -> Sequences:
    """Of the sequences whose first tokens are those of begin, indices into tokens [batch, k_len] laid end to end."""
    k_len = tokens.shape[1]
    keys = tokens.flatten().nonzero().flatten()
    row, column = keys // k_len, keys % k_len - (k_len - q_len)
    is_query = column >= 0
    cu_seqlens_k = pad(torch.searchsorted(keys, begin), (0, 1), value=keys.numel())
    cu_seqlens_q = pad(is_query.cumsum(0), (1, 0))[cu_seqlens_k]
    queries = (row * q_len + column)[is_query]
    return Sequences(cu_seqlens_q.to(torch.int32), cu_seqlens_k.to(torch.int32), (queries, keys))


@torch.library.custom_op("sinkattn::sequence_bounds", mutates_args=())
def sequence_bounds(
    mask: Tensor | None, position_ids: Tensor | None, batch: int, q_len: int, k_len: int
) -> tuple[Tensor, Tensor]:
    """The bounds of find_sequences, as an op, opaque to a compiled graph, because their size depends on the data."""
    found = find_sequences(mask, position_ids, batch, q_len, k_len)
    if found.tokens is not None:
        raise NotImplementedError(
            "sinkattn: attention_mask has padding amid the tokens of a row, which a compiled graph cannot take out; put"
            " it at the row's ends, or leave out torch.compile"
        )
    return found.cu_seqlens_q, found.cu_seqlens_k


@sequence_bounds.register_fake
def _(mask: Tensor | None, position_ids: Tensor | None, batch: int, q_len: int, k_len: int) -> tuple[Tensor, Tensor]:
    size = torch.library.get_ctx().new_dynamic_size()
    like = position_ids if mask is None else mask
    assert like is not None
    return like.new_empty(size, dtype=torch.int32), like.new_empty(size, dtype=torch.int32)
