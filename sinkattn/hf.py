# SPDX-License-Identifier: Apache-2.0
"""sinkattn for Hugging Face transformers, 5.5.3 and later.

    sinkattn.hf.register()
    model.set_attn_implementation("sinkattn")  # or from_pretrained(..., attn_implementation="sinkattn")

Which rows of the input form a sequence is read, in this order, from

* `cu_seq_lens_q` and `cu_seq_lens_k`, where the caller passes them;
* a padding mask [batch, kv_len] that masks something: each batch row is one sequence, its tokens side by side, the
  padding on its left, its right or both;
* `position_ids`, as long as nothing is cached before the input (k_len == q_len): a sequence starts wherever a position
  is not its left neighbour's plus one.

Rows in the padding get zeros. What cannot be computed as asked raises; nothing falls back to attention without sinks.
"""

import sys
from collections.abc import Callable, MutableMapping
from typing import Any, cast

import torch
import transformers
from packaging.version import Version
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.weak import WeakIdKeyDictionary
from transformers import AttentionInterface, AttentionMaskInterface

from sinkattn.ops import flash_attn_func, flash_attn_varlen_func

NAME = "sinkattn"
MIN_TRANSFORMERS = "5.5.3"

# What models and trainers hand to every layer and what says nothing about attention.
_PASSENGERS = {
    "cache_position",
    "labels",
    "logits_to_keep",
    "num_items_in_batch",
    "output_hidden_states",
    "output_router_logits",
    "return_dict",
    "seq_idx",
    "use_cache",
}

# The dtype of a mask that hides nothing and says that each batch row is one sequence, as a StreamingCache keeps it. The
# mask is all that models pass on from the cache to each layer, and a compiled graph keeps no attribute of a tensor.
# transformers makes a caller's own mask bool before it asks for this one.
_ONE_SEQUENCE = torch.uint8

# The mask functions of transformers whose meaning the arguments of attention_forward repeat.
_KNOWN_MASKS = {
    "bidirectional_mask_function",
    "causal_mask_function",
    "packed_sequence_mask_function",
    "sliding_window_bidirectional_overlay",
    "sliding_window_overlay",
}


def register() -> None:
    """Tell transformers of attn_implementation="sinkattn", its attention and its mask; a second call changes nothing.

    Raises ImportError when transformers is too old.
    """
    if Version(transformers.__version__) < Version(MIN_TRANSFORMERS):
        raise ImportError(
            f"sinkattn: transformers is {transformers.__version__}; sinkattn.hf needs {MIN_TRANSFORMERS} or later"
        )
    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, attention_mask)


def attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: Tensor | None = None,
    position_ids: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    max_length_q: int | None = None,
    max_length_k: int | None = None,
    output_attentions: bool | None = None,
    whole_sequence: bool = False,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention of one layer, called by transformers.

    query is [batch, num_q_heads, q_len, head_dim], key and value [batch, num_kv_heads, k_len, head_dim]. attention_mask
    is None or bool [batch, kv_len] with kv_len <= k_len; keys past kv_len are the unused end of a static cache. s_aux
    is [num_q_heads]; sliding_window counts the row itself. whole_sequence is said by a caller that has traded heads for
    the sequence's other parts. Returns out [batch, q_len, num_q_heads, head_dim], and None for the weights.

    Raises ValueError for arguments at odds with each other, NotImplementedError for what is not computed.
    """
    widths = value.shape[-1], query.shape[-1]
    if widths[0] != widths[1]:
        raise NotImplementedError(
            f"sinkattn: value has head_dim {widths[0]}, query {widths[1]}; they must be equal: use eager attention"
        )
    _refuse(module, query.shape[1], s_aux, dropout, softcap, sliding_window, output_attentions, kwargs)
    if not whole_sequence:
        _refuse_ulysses()
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    left = -1 if sliding_window is None else sliding_window - 1
    options: dict[str, Any] = {"softmax_scale": scaling, "window_size": (left, 0 if causal else left), "s_aux": s_aux}

    # Under autocast the rotary embedding leaves q and k in fp32, beside v in bf16; a cache makes v fp32 as well.
    dtype, device = value.dtype, value.device.type
    if dtype == torch.float32 and torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
    q, k, v = (x.to(dtype).transpose(1, 2) for x in (query, key, value))
    batch, q_len = q.shape[:2]
    if attention_mask is not None:
        _check_mask(attention_mask, batch, q_len, k.shape[1], causal)
        k, v = (x[:, : attention_mask.shape[1]] for x in (k, v))

    bounds = None
    if cu_seq_lens_q is not None or cu_seq_lens_k is not None:
        if cu_seq_lens_q is None or cu_seq_lens_k is None or attention_mask is not None:
            raise ValueError("sinkattn: cu_seq_lens_q and cu_seq_lens_k come together, and without an attention_mask")
        bounds = cu_seq_lens_q.to(torch.int32), cu_seq_lens_k.to(torch.int32)
    elif attention_mask is not None or (position_ids is not None and q_len > 1):
        bounds = _sequence_bounds_once(attention_mask, position_ids, batch, q_len, k.shape[1])
        max_length_q, max_length_k = q_len, k.shape[1]

    if bounds is None:
        return cast(Tensor, flash_attn_func(q, k, v, **options)), None
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    out = cast(Tensor, flash_attn_varlen_func(q, k, v, *bounds, max_length_q, max_length_k, **options))
    return out.view(batch, q_len, *out.shape[1:]), None


def attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | None = None,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> Tensor | None:
    """The mask for attention_forward: bool [batch, keys in use], or None when all kv_length keys are in use.

    A static cache hands over its whole buffer as keys; only the width of this mask tells how much of it is filled.

    Raises NotImplementedError for a mask_function it does not compute and for padding beside a StreamingCache,
    ValueError for a mask too short.
    """
    if mask_function is not None and not torch.compiler.is_compiling():  # a graph cannot look into a closure
        unknown = sorted(_mask_parts(mask_function) - _KNOWN_MASKS)
        if unknown:
            raise NotImplementedError(
                f"sinkattn: mask {unknown} is not one of {sorted(_KNOWN_MASKS)}; use eager attention"
            )
    # An indexer picks keys for each row: it reads a 4-D mask, and its layers pass no mask of what it picked.
    config = kwargs.get("config")
    if getattr(config, "index_topk", None) is not None:
        raise NotImplementedError(f"sinkattn: {type(config).__name__} has index_topk, an indexer; use eager attention")
    two_sided = "allow_is_bidirectional_skip" in kwargs  # an argument of two-sided masks alone, and they see every key
    streaming = kv_offset < 0  # -1 and the tokens that a StreamingCache has dropped, see there
    if streaming:
        kv_offset = -1 - kv_offset
    in_use = kv_length if two_sided else int(q_offset) + q_length - kv_offset
    if attention_mask is not None and attention_mask.shape[1] < kv_offset + in_use:
        raise ValueError(
            f"sinkattn: attention_mask covers {attention_mask.shape[1]} tokens; with what is cached there are"
            f" {kv_offset + in_use}"
        )
    if streaming and attention_mask is not None and not attention_mask.all():
        raise NotImplementedError(
            "sinkattn: attention_mask has padding, whose sequences have other first tokens; a StreamingCache takes"
            " sequences of one length"
        )
    if streaming and q_length == in_use > 1:  # later rows cannot be packed: nothing is cached before packed ones
        return torch.ones(batch_size, in_use, dtype=_ONE_SEQUENCE, device=device)
    if attention_mask is not None:
        return attention_mask[:, kv_offset : kv_offset + in_use]
    return None if in_use == kv_length else torch.ones(batch_size, in_use, dtype=torch.bool, device=device)


def _mask_parts(mask_function: Callable[..., Any]) -> set[str]:
    """Names of the mask functions whose intersection this one is."""
    name = mask_function.__qualname__.removesuffix(".<locals>.inner_mask")
    if name != "and_masks.<locals>.and_mask" or mask_function.__closure__ is None:
        return {name}
    return set().union(*map(_mask_parts, mask_function.__closure__[0].cell_contents))


def _refuse(
    module: torch.nn.Module,
    num_q_heads: int,
    s_aux: Tensor | None,
    dropout: float,
    softcap: float | None,
    sliding_window: int | None,
    output_attentions: bool | None,
    kwargs: dict[str, Any],
) -> None:
    if s_aux is None and getattr(module, "sinks", None) is not None:
        raise ValueError(f"sinkattn: {type(module).__name__} has sinks and passes no s_aux; they are not to be dropped")
    if s_aux is not None and s_aux.shape != (num_q_heads,):
        raise ValueError(
            f"sinkattn: s_aux has shape {tuple(s_aux.shape)} and query has {num_q_heads} heads; it must hold one logit"
            " a head: where heads are split over devices, split the sinks alike"
        )
    if sliding_window is not None and sliding_window < 1:
        raise ValueError(f"sinkattn: sliding_window is {sliding_window}; it counts the row itself: at least 1, or None")
    if dropout > 0:
        raise NotImplementedError(
            f"sinkattn: dropout is {dropout}; there is none: set the model's attention_dropout to 0"
        )
    if softcap:
        raise NotImplementedError(f"sinkattn: softcap is {softcap}; there is none: use eager attention")
    if output_attentions:
        raise NotImplementedError(
            "sinkattn: output_attentions is True; the weights are never stored: use eager attention"
        )
    unknown = sorted(name for name, x in kwargs.items() if name not in _PASSENGERS and x is not None and x is not False)
    if unknown:
        raise NotImplementedError(
            f"sinkattn: {unknown} may change the result in unknown ways: leave out or use eager attention"
        )
    # Layers that add keys or pick some, and say so by a 4-D mask where one is made.
    for part in ("compressor", "indexer"):
        if getattr(module, part, None) is not None:
            raise NotImplementedError(f"sinkattn: {type(module).__name__} has a key {part}; use eager attention")


def _refuse_ulysses() -> None:
    # verl cuts the sequence over its Ulysses group, and leaves it to the attention to trade heads for the rest of it.
    ulysses = sys.modules.get("verl.utils.ulysses")
    if ulysses is not None and ulysses.get_ulysses_sequence_parallel_world_size() > 1:
        raise NotImplementedError(
            "sinkattn: verl's ulysses_sequence_parallel_size is above 1; that takes sinkattn.verl_patch.apply(), after"
            " any hf.register(), and it logs why it fails"
        )


def _check_mask(mask: Tensor, batch: int, q_len: int, k_len: int, causal: bool) -> None:
    if not isinstance(mask, Tensor) or mask.ndim != 2 or mask.is_floating_point():
        got = f"{mask.dtype} of shape {tuple(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
        raise NotImplementedError(f"sinkattn: attention_mask is {got}, not bool [batch, kv_len]; use eager attention")
    if mask.shape[0] != batch or not q_len <= mask.shape[1] <= k_len:
        raise ValueError(
            f"sinkattn: attention_mask has shape {tuple(mask.shape)}; batch is {batch} and kv_len must lie between"
            f" q_len, {q_len}, and k_len, {k_len}"
        )
    if not causal and mask.shape[1] != q_len:
        raise NotImplementedError("sinkattn: attention_mask is given to cross-attention; use eager attention")


@torch.library.custom_op("sinkattn::sequence_bounds", mutates_args=())
def sequence_bounds(
    mask: Tensor | None, position_ids: Tensor | None, batch: int, q_len: int, k_len: int
) -> tuple[Tensor, Tensor]:
    """cu_seqlens_q and cu_seqlens_k of the batch rows laid end to end, int32 [sequences + 1].

    mask is bool [batch, k_len], position_ids [1 or batch, q_len]; where neither cuts, a batch row is one sequence. This
    is an op, opaque to a compiled graph, because their size depends on the data.
    """
    if mask is not None and not mask.all():
        return _padded_bounds(mask.to(torch.bool), q_len)
    like = position_ids if mask is None else mask
    starts = torch.zeros(batch, q_len, dtype=torch.bool, device=None if like is None else like.device)
    starts[:, :1] = True
    if position_ids is not None:
        if position_ids.ndim != 2:
            raise NotImplementedError(
                f"sinkattn: position_ids has shape {tuple(position_ids.shape)}, not [batch, q_len]; use eager attention"
            )
        starts[:, 1:] = position_ids[:, 1:] != position_ids[:, :-1] + 1
    if mask is not None and mask.dtype == _ONE_SEQUENCE and starts[:, 1:].any():
        raise NotImplementedError(
            "sinkattn: position_ids restart within a row: packed sequences, each of which has first tokens of its own;"
            " a StreamingCache takes one sequence a row"
        )
    if q_len == k_len:
        bounds = pad(starts.flatten().nonzero().flatten(), (0, 1), value=batch * q_len).to(torch.int32)
        return bounds, bounds.clone()
    if starts[:, 1:].any():
        raise ValueError(
            f"sinkattn: position_ids restart within {q_len} tokens that follow {k_len - q_len} cached ones; sequences"
            " are packed before an empty cache only"
        )
    rows = torch.arange(batch + 1, dtype=torch.int32, device=starts.device)
    return rows * q_len, rows * k_len


@sequence_bounds.register_fake
def _(mask: Tensor | None, position_ids: Tensor | None, batch: int, q_len: int, k_len: int) -> tuple[Tensor, Tensor]:
    size = torch.library.get_ctx().new_dynamic_size()
    like = position_ids if mask is None else mask
    assert like is not None
    return like.new_empty(size, dtype=torch.int32), like.new_empty(size, dtype=torch.int32)


def _padded_bounds(mask: Tensor, q_len: int) -> tuple[Tensor, Tensor]:
    """Bounds around padding, from mask [batch, kv_len], whose last q_len columns are the queries.

    Three sequences a batch row: queries ahead of its tokens, without keys; keys ahead of its tokens, without queries;
    its tokens. So nothing is gathered or scattered, and queries in the padding get zeros.
    """
    batch, kv_len = mask.shape
    begin = mask.to(torch.int32).argmax(1)
    end = begin + mask.sum(1)
    column, row = torch.arange(kv_len, device=mask.device), torch.arange(batch, device=mask.device)
    if not torch.equal(mask, (column >= begin[:, None]) & (column < end[:, None])):
        raise ValueError("sinkattn: attention_mask has padding amid the tokens of a row; it must be at the row's ends")
    cached = kv_len - q_len
    q_begin, q_end = ((x - cached).clamp(min=0) + row * q_len for x in (begin, end))
    k_begin, k_end = begin + row * kv_len, end + row * kv_len
    cu_seqlens_q = torch.stack((q_begin, q_begin, q_end), 1)
    cu_seqlens_k = torch.stack((pad(k_end[:-1], (1, 0)), k_begin, k_end), 1)
    return pad(cu_seqlens_q.flatten(), (1, 0)).to(torch.int32), pad(cu_seqlens_k.flatten(), (1, 0)).to(torch.int32)


# mask or position_ids -> state they were read in, position_ids beside a mask, bounds
_Kept = tuple[tuple[int | None, ...], Tensor | None, tuple[Tensor, Tensor] | None]
_kept: MutableMapping[Tensor | None, _Kept] = WeakIdKeyDictionary()


def _sequence_bounds_once(
    mask: Tensor | None, position_ids: Tensor | None, batch: int, q_len: int, k_len: int
) -> tuple[Tensor, Tensor] | None:
    """sequence_bounds, found in a forward's first layer and kept while the mask, or else position_ids, lives unchanged.

    None when each batch row is one sequence. A compiled graph cannot branch on that: it always gets bounds.
    """
    if torch.compiler.is_compiling():
        return cast(tuple[Tensor, Tensor], sequence_bounds(mask, position_ids, batch, q_len, k_len))
    first, second = (position_ids, None) if mask is None else (mask, position_ids)
    state = (_version(first), _version(second), batch, q_len, k_len)
    kept: _Kept | None = _kept.get(first)
    if kept is None or kept[0] != state or kept[1] is not second or None in state:
        bounds = sequence_bounds(mask, position_ids, batch, q_len, k_len)
        kept = (state, second, bounds if bounds[0].numel() > batch + 1 else None)
        _kept[first] = kept
    return kept[2]


def _version(x: Tensor | None) -> int | None:
    """How often x was changed in place; None for an inference tensor, which does not count."""
    return 0 if x is None else None if x.is_inference() else x._version
