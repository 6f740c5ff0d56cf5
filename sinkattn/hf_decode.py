# SPDX-License-Identifier: Apache-2.0
"""One new token a sequence, as transformers generates: which keys of a cache it sees, and one flash_decode over them.

Keys are described by a mask of hf_masks, made once a forward: of LENGTHS, the first keys of the cache, as many for each
sequence; of COLUMNS, some keys of each sequence, because padding lies among them. A static cache hands over its unused
end as well. What is in use is computed from the cache's own count, which a graph reads on the device at each replay.
"""

from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn.functional import pad

from sinkattn.hf_masks import COLUMNS, LENGTHS
from sinkattn.hf_sequences import Sequences
from sinkattn.ops import flash_attn_with_kvcache

MAX_ROWS = 128
"""Most rows of a kv head, tokens times its q heads, that go to flash_decode, which splits keys: on an H200 128 rows of
one sequence of 32768 keys take 54 us, and a prefill of few rows takes 230."""

_NOTHING, _WRONG = -1, -2  # in COLUMNS: no key; in the first column, a row whose keys are not known


def wants_gradients(*tensors: Tensor | None) -> bool:
    """flash_decode has no backward, and no rule for torch.func."""
    if not torch.compiler.is_compiling() and torch._C._functorch.maybe_current_level() is not None:
        return True
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def reads_host(x: Tensor) -> bool:
    """Whether values of x may be read here: not in a graph that is being made."""
    return not torch.compiler.is_compiling() and not (x.is_cuda and torch.cuda.is_current_stream_capturing())


def first_keys(batch: int, used: int | Tensor, kv_len: int, device: Any) -> Tensor:
    """A mask [batch, kv_len] of LENGTHS: all sequences see the first `used` keys."""
    if isinstance(used, Tensor):
        lengths = used.to(device, LENGTHS).reshape(1).repeat(batch)
    else:
        lengths = torch.full((batch,), used, dtype=LENGTHS, device=device)
    return lengths[:, None].expand(batch, kv_len)


def keys_beside_padding(
    tokens: Tensor, position: int | Tensor, kv_offset: int, kv_len: int, wrong: Tensor | None = None
) -> Tensor:
    """A mask [batch, kv_len] of COLUMNS, for the token at `position` of tokens, bool [batch, len], False for padding.

    Column j of the cache holds token kv_offset + j. A sequence sees its tokens up to the position, and none where that
    is padding itself. flash_decode refuses rows that are `wrong`, bool [batch], or whose token lies past the end of
    `tokens`: on CUDA, where nothing is read on the host, in check_errors().
    """
    batch, length = tokens.shape
    at = torch.arange(kv_offset, kv_offset + kv_len, device=tokens.device)
    seen = pad(tokens, (0, max(0, kv_offset + kv_len - length)))[:, kv_offset : kv_offset + kv_len] & (at <= position)
    seen &= (seen & (at == position)).any(1, keepdim=True)
    slots = torch.where(seen, seen.cumsum(1) - 1, kv_len)  # of what is not seen, one that is cut off
    columns = torch.full((batch, kv_len + 1), _NOTHING, dtype=torch.int32, device=tokens.device)
    columns = columns.scatter(1, slots, torch.arange(kv_len, dtype=torch.int32, device=tokens.device).expand_as(slots))
    columns = columns[:, :kv_len]
    if isinstance(position, Tensor):  # a number was checked
        columns = torch.where(position >= length, _WRONG, columns)
    if wrong is not None:
        columns = torch.where(wrong[:, None], _WRONG, columns)
    return columns.view(COLUMNS)


class Keys(NamedTuple):
    """cache_seqlens [batch] and, where other keys than the first are seen, columns [batch, kv_len], both int32.

    tables: block tables made of the columns, by _pitch.
    """

    cache_seqlens: Tensor
    columns: Tensor | None
    tables: dict[int, Tensor]


def read_keys(mask: Tensor) -> Keys:
    """Of a mask [batch, kv_len] of LENGTHS or COLUMNS."""
    # Kept by the mask in a weak dictionary: a view, whose _base may be the mask, would hold its own key.
    if mask.dtype == LENGTHS:
        return Keys(mask[:, 0].clone(), None, {})
    columns = mask.view(torch.int32)  # has no _base, as a view of another dtype
    lengths = (columns > _NOTHING).sum(1) - (columns[:, :1] == _WRONG).sum(1)
    return Keys(lengths.to(torch.int32), columns, {})


def behind_cache(keys: Keys, kv_len: int) -> Sequences:
    """The sequences of one new token each: what asks for gradients is gathered for a prefill."""
    lengths, columns = keys[:2]
    batch, every = lengths.shape[0], torch.arange(kv_len, device=lengths.device)
    if columns is None:
        columns = every.expand(batch, -1)
    rows = torch.arange(batch + 1, device=lengths.device)
    indices = (columns + kv_len * rows[:batch, None])[every < lengths[:, None]]
    return Sequences(rows.to(torch.int32), pad(lengths.cumsum(0), (1, 0)).to(torch.int32), (rows[:batch], indices))


def decode(q: Tensor, k: Tensor, v: Tensor, keys: Keys | None, *, invariant: bool = False, **options: Any) -> Tensor:
    """out, as q, of q [batch, q_len, num_q_heads, head_dim] over a cache k, v [batch, kv_len, num_kv_heads, head_dim].

    Sequences whose columns are given have pages of one key, which are the cache itself. v, and with it out, may be
    narrower.
    """
    lengths, table = None, None
    if keys is not None:
        lengths = keys.cache_seqlens
        if keys.columns is not None:
            if not _pitch(k) == _pitch(v) > 0:
                k, v = k.contiguous(), v.contiguous()
            pitch = _pitch(k)
            if pitch not in keys.tables:
                first = pitch * torch.arange(k.shape[0], dtype=torch.int32, device=k.device)[:, None]
                keys.tables[pitch] = torch.where(keys.columns < 0, 0, keys.columns + first)
            k, v, table = _pages_of_one(k), _pages_of_one(v), keys.tables[pitch]
    options["invariant"] = invariant
    out = flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths, block_table=table, causal=True, **options)
    return cast(Tensor, out)


def _pitch(cache: Tensor) -> int:
    """From a sequence's first token to the next one's, in strides of tokens; 0 where that is no number for a page."""
    batch, kv_len, _, _ = cache.shape
    far, near, _, column = cache.stride()
    pitch = kv_len if batch == 1 else far // near if near else 0
    return 0 if (batch > 1 and pitch * near != far) or column != 1 or batch * pitch >= 2**31 else pitch


def _pages_of_one(cache: Tensor) -> Tensor:
    """Pages [.., 1, num_kv_heads, head_dim]: page b * pitch + j is key j of sequence b."""
    batch, kv_len, heads, head_dim = cache.shape
    _, step, head_step, _ = cache.stride()
    return cache.as_strided(((batch - 1) * _pitch(cache) + kv_len, 1, heads, head_dim), (step, step, head_step, 1))
