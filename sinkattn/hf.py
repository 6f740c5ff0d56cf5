# SPDX-License-Identifier: Apache-2.0
"""sinkattn for Hugging Face transformers, 5.5.3 and later.

    sinkattn.hf.register()
    model.set_attn_implementation("sinkattn")  # or from_pretrained(..., attn_implementation="sinkattn")

What a row sees is what the mask that the model asks for says, read by sinkattn.hf_masks: causal or two-sided, a window,
packed sequences. Where no mask is made, the layer's own is_causal and sliding_window say it.

Which rows of the input form a sequence is read, in this order, from

* `cu_seq_lens_q` and `cu_seq_lens_k`, where the caller passes them;
* the mask's packed sequences;
* a padding mask [batch, kv_len] and `position_ids`: each batch row is one sequence without its padding; and as long as
  nothing is cached before the input (k_len == q_len), a sequence starts wherever a token's position is not that of the
  token before it plus one.

Behind cached keys, one new token a sequence is one flash_decode, and so are several without padding, up to 128 rows of
a kv head (tokens times its query heads). All else, and what asks for gradients, is a prefill. Rows in the padding get
zeros. What cannot be computed as asked raises; nothing falls back to attention without sinks.

A model whose config has num_sink_tokens = n sees the first n keys of each sequence through the windows of its layers.
"""

import sys
from collections.abc import Callable, MutableMapping
from functools import partial
from typing import Any, cast

import torch
from packaging.version import Version
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from sinkattn.hf_decode import (
    MAX_ROWS,
    Keys,
    behind_cache,
    decode,
    first_keys,
    keys_beside_padding,
    read_keys,
    reads_host,
    wants_gradients,
)
from sinkattn.hf_masks import (
    COLUMNS,
    LENGTHS,
    ONE_SEQUENCE,
    PADDING,
    SEQUENCES,
    WHOLE,
    decode_mask,
    encode_mask,
    is_encoded_mask,
    read_mask,
)
from sinkattn.hf_sequences import Sequences, find_sequences, sequence_bounds
from sinkattn.ops import flash_attn_func, flash_attn_varlen_func

try:
    import transformers
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "sinkattn: sinkattn.hf needs transformers, and it is not installed: pip install --no-build-isolation '.[hf]' in"
        " sinkattn's folder",
        name=error.name,
    ) from error

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


def register(*, invariant: bool | None = None) -> None:
    """Tell transformers of attn_implementation="sinkattn", its attention and its mask.

    invariant=True: on CUDA cached steps have the bits of a prefill, whatever the batch, as they always have on the CPU,
    and take longer. It holds where the cache keeps all keys: layers without a window, and with one as well under
    DynamicCache(), made without a config. A cache that drops keys, as generate()'s own do behind a window and a
    StreamingCache does, makes a row count its keys from elsewhere, and last bits differ. None keeps what an earlier
    call of this or of sinkattn.verl_patch.apply() said, False at first.

    Raises ImportError when transformers is too old.
    """
    if Version(transformers.__version__) < Version(MIN_TRANSFORMERS):
        raise ImportError(
            f"sinkattn: transformers is {transformers.__version__}; sinkattn.hf needs {MIN_TRANSFORMERS} or later"
        )
    register_attention(attention_forward, invariant)
    AttentionMaskInterface.register(NAME, attention_mask)


def register_attention(attend: Callable[..., Any], invariant: bool | None) -> None:
    """Register `attend`, which takes what attention_forward takes; invariant is register()'s."""
    if invariant is None:  # what is registered now tells
        before = ALL_ATTENTION_FUNCTIONS.get(NAME)
        invariant = isinstance(before, partial) and before.keywords.get("invariant") is True
    AttentionInterface.register(NAME, partial(attend, invariant=True) if invariant else attend)


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
    invariant: bool = False,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention of one layer, called by transformers.

    query is [batch, num_q_heads, q_len, head_dim], key and value [batch, num_kv_heads, k_len, head_dim]; value, and
    with it out, may be narrower. attention_mask is None, a mask that the function attention_mask made, or the caller's
    own: bool or integers [batch, kv_len], 0 for padding. kv_len <= k_len: keys past it are the unused end of a static
    cache. s_aux is [num_q_heads]; sliding_window counts the row itself. whole_sequence is said by a caller that has
    traded heads for the sequence's other parts; invariant is register()'s. Returns out [batch, q_len, num_q_heads,
    head_dim], and None for the weights.

    Raises ValueError for arguments at odds with each other, NotImplementedError for what is not computed.
    """
    widths = value.shape[-1], query.shape[-1]
    if widths[0] > widths[1]:
        raise NotImplementedError(
            f"sinkattn: value has head_dim {widths[0]}, query {widths[1]}; value must not be wider: use eager attention"
        )
    _refuse(module, query.shape[1], s_aux, dropout, softcap, output_attentions, kwargs)
    if not whole_sequence:
        _refuse_ulysses()
    # Under autocast the rotary embedding leaves q and k in fp32, beside v in bf16; a cache makes v fp32 as well.
    dtype, device = value.dtype, value.device.type
    if dtype == torch.float32 and torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
    q, k, v = (x.to(dtype).transpose(1, 2) for x in (query, key, value))
    batch, q_len = q.shape[:2]
    causal, window = read_layer(module, attention_mask, sliding_window, is_causal)
    kind = WHOLE
    if attention_mask is not None:
        _check_mask(attention_mask, batch, q_len, k.shape[1], causal)
        kind = attention_mask.dtype if is_encoded_mask(attention_mask) else PADDING
        kv_len = attention_mask.shape[-1]
        if kv_len != k.shape[1]:
            k, v = k[:, :kv_len], v[:, :kv_len]
    left = -1 if window is None else window - 1
    options: dict[str, Any] = {"softmax_scale": scaling, "window_size": (left, 0 if causal else left), "s_aux": s_aux}
    options["num_sink_tokens"] = _num_sink_tokens(module, window, attention_mask, k.shape[1] - q_len)

    found = None
    keys = _read_keys_once(cast(Tensor, attention_mask)) if kind in (LENGTHS, COLUMNS) else None
    if cu_seq_lens_q is not None or cu_seq_lens_k is not None:
        if cu_seq_lens_q is None or cu_seq_lens_k is None or kind not in (WHOLE, SEQUENCES):
            raise ValueError("sinkattn: cu_seq_lens_q and cu_seq_lens_k come together, and without an attention_mask")
        found = Sequences(cu_seq_lens_q.to(torch.int32), cu_seq_lens_k.to(torch.int32))
    elif keys is None and (kind != WHOLE or (position_ids is not None and q_len > 1)):
        found = _find_once(attention_mask, position_ids, batch, q_len, k.shape[1], whole_sequence)
        max_length_q, max_length_k = q_len, k.shape[1]

    few = q_len < k.shape[1] and q_len * query.shape[1] <= MAX_ROWS * key.shape[1] and causal and not whole_sequence
    if found is None and few and not wants_gradients(q, k, v, s_aux):
        return decode(q, k, v, keys, invariant=invariant, **options), None
    if keys is not None:
        found = behind_cache(keys, k.shape[1])
        max_length_q, max_length_k = q_len, k.shape[1]
    if found is None:
        return cast(Tensor, flash_attn_func(q, k, v, **options)), None
    return _prefill(q, k, v, found, max_length_q, max_length_k, **options), None


def _prefill(
    q: Tensor, k: Tensor, v: Tensor, found: Sequences, max_len_q: int | None, max_len_k: int | None, **options: Any
) -> Tensor:
    batch, q_len = q.shape[:2]
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    if found.tokens is not None:
        queries, keys = found.tokens
        q, k, v = q[queries], k[keys], v[keys]
    out = cast(Tensor, flash_attn_varlen_func(q, k, v, *found[:2], max_len_q, max_len_k, **options))
    if found.tokens is not None:
        out = out.new_zeros(batch * q_len, *out.shape[1:]).index_copy(0, queries, out)
    return out.view(batch, q_len, *out.shape[1:])


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
) -> Tensor:
    """The mask for attention_forward: what mask_function says, None for causal, as a tensor of sinkattn.hf_masks.

    attention_mask is [batch, tokens], False for padding. A static cache hands over its whole buffer as keys; only the
    width of this mask tells how much of it is filled. Each forward makes its own, by which attention_forward knows it.

    Raises NotImplementedError for a mask_function it does not compute and for padding beside a StreamingCache,
    ValueError for a mask too short.
    """
    if is_encoded_mask(attention_mask):  # generate() makes masks before a forward that asks again
        return cast(Tensor, attention_mask)
    config = kwargs.get("config")
    # An indexer picks keys for each row: it reads a 4-D mask, and its layers pass no mask of what it picked.
    if getattr(config, "index_topk", None) is not None:
        raise NotImplementedError(f"sinkattn: {type(config).__name__} has index_topk, an indexer; use eager attention")
    if getattr(config, "keep_window_size", None) is not None:  # Doge adds what its layers compute to a 4-D mask
        raise NotImplementedError(
            f"sinkattn: {type(config).__name__} has keep_window_size, a mask of each layer's own; use eager attention"
        )
    causal, window, sequences = True, None, None
    if mask_function is not None:
        causal, window, sequences = read_mask(mask_function, type(config).__name__)
    streaming = kv_offset < 0  # -1 and the tokens that a StreamingCache has dropped, see there
    if streaming:
        kv_offset = -1 - kv_offset
    first = getattr(config, "num_sink_tokens", None) or 0
    if first and kv_offset > 0 and window is not None and not streaming:
        raise NotImplementedError(
            f"sinkattn: {type(config).__name__} has num_sink_tokens {first}, and the cache has dropped the first tokens"
            " behind a window; pass past_key_values=transformers.DynamicCache(), which keeps all, or a"
            " sinkattn.cache.StreamingCache"
        )
    if attention_mask is not None and attention_mask.ndim != 2:
        raise _too_short(attention_mask, kv_length)
    if causal and q_length == 1 and sequences is None and not streaming:
        growing = kwargs.get("allow_is_causal_skip", True)  # not of a cache that a graph may hold
        mask = _one_token(batch_size, kv_length, q_offset, kv_offset, window, attention_mask, growing, device)
        if mask is not None:
            return encode_mask(mask, causal, window)
    in_use = int(q_offset) + q_length - kv_offset if causal else kv_length  # two-sided rows see every key
    if attention_mask is not None and attention_mask.shape[1] < kv_offset + in_use:
        raise _too_short(attention_mask, kv_offset + in_use)
    if streaming and attention_mask is not None and not attention_mask.all():
        raise NotImplementedError(
            "sinkattn: attention_mask has padding, whose sequences have other first tokens; a StreamingCache takes"
            " sequences of one length"
        )
    if kv_offset > 0 and window is not None and attention_mask is not None and not streaming:
        attention_mask = attention_mask.bool()
        if torch.compiler.is_compiling():  # such a row raises in sequence_bounds
            alternate = torch.arange(attention_mask.shape[1], device=attention_mask.device) % 2 == 0
            attention_mask = torch.where(_gaps(attention_mask)[:, None], alternate, attention_mask)
        else:
            _refuse_gaps(_gaps(attention_mask))
    if streaming and q_length == in_use > 1:  # later rows cannot be packed: nothing is cached before packed ones
        mask = torch.empty((1, 1), dtype=ONE_SEQUENCE, device=device).expand(batch_size, in_use)
    elif sequences is not None:
        mask = sequences
    elif attention_mask is not None:
        mask = attention_mask[:, kv_offset : kv_offset + in_use].to(PADDING)
    else:
        mask = torch.empty((1, 1), dtype=WHOLE, device=device).expand(batch_size, in_use)
    return encode_mask(mask, causal, window)


def _one_token(
    batch: int,
    kv_length: int,
    q_offset: int | Tensor,
    kv_offset: int,
    window: int | None,
    tokens: Tensor | None,
    growing: bool,
    device: torch.device | str,
) -> Tensor | None:
    """The mask of one new token a sequence; None where what holds for any number of them is to say it.

    In a graph, whose lengths may change between replays, nothing is read on the host, and nothing but the dtype of the
    mask depends on whether all is in use: then each step has one and the same graph.
    """
    readable = tokens is None or reads_host(tokens)
    growing = growing and not isinstance(q_offset, Tensor) and q_offset + 1 - kv_offset == kv_length
    if growing and not readable:
        return None
    if tokens is not None and readable:
        q_offset = int(q_offset)
    wrong = None
    if tokens is not None:
        tokens = tokens.bool()
        if not isinstance(q_offset, Tensor) and tokens.shape[1] <= q_offset:
            raise _too_short(tokens, q_offset + 1)
        if kv_offset > 0 and window is not None:
            wrong = _gaps(tokens)
            if readable:
                _refuse_gaps(wrong)
        if not readable or not tokens.all():
            return keys_beside_padding(tokens, q_offset, kv_offset, kv_length, None if readable else wrong)
    if growing:
        return torch.empty((1, 1), dtype=WHOLE, device=device).expand(batch, kv_length)
    return first_keys(batch, q_offset + 1 - kv_offset, kv_length, device)


def _too_short(mask: Tensor, length: int) -> ValueError:
    return ValueError(
        f"sinkattn: attention_mask of shape {tuple(mask.shape)} covers {mask.shape[-1]} tokens; with what is cached"
        f" there are {length}"
    )


def _gaps(tokens: Tensor) -> Tensor:
    """Whether a row of tokens, bool [batch, len], has padding amid them."""
    return (tokens[:, 1:] & ~tokens[:, :-1]).sum(1) + tokens[:, 0] > 1


def _refuse_gaps(gaps: Tensor) -> None:
    """A cache that keeps the last keys of a window keeps the padding among them, and has dropped tokens for it."""
    if gaps.any():
        raise NotImplementedError(
            "sinkattn: attention_mask has padding amid the tokens of a row, beside a cache that keeps a window's last"
            " keys, padding among them; pad on the left, or take a cache that keeps all keys"
        )


def read_layer(
    module: torch.nn.Module, mask: Tensor | None, sliding_window: int | None, is_causal: bool | None
) -> tuple[bool, int | None]:
    """causal and the window of a layer: those of the mask that the model made or, without, its own.

    Raises ValueError where the two have different windows, or no row is to see itself.
    """
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    window = sliding_window
    if is_encoded_mask(mask):
        causal, window = decode_mask(cast(Tensor, mask))
        if sliding_window is not None and sliding_window != window:
            raise ValueError(
                f"sinkattn: {type(module).__name__} passes sliding_window {sliding_window}, and its mask has {window};"
                " they must agree: use eager attention"
            )
    if window is not None and window < 1:
        raise ValueError(f"sinkattn: sliding_window is {window}; it counts the row itself: at least 1, or None")
    return bool(causal), window


def _num_sink_tokens(module: torch.nn.Module, window: int | None, mask: Tensor | None, cached: int) -> int:
    number: int = getattr(getattr(module, "config", None), "num_sink_tokens", None) or 0
    if number and window is not None and cached and not is_encoded_mask(mask):
        raise NotImplementedError(
            f"sinkattn: num_sink_tokens is {number}, and {cached} keys are cached before a row without a mask of"
            " sinkattn.hf, which knows whether the first ones are among them; register() its mask as well"
        )
    return number


def _refuse(
    module: torch.nn.Module,
    num_q_heads: int,
    s_aux: Tensor | None,
    dropout: float,
    softcap: float | None,
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
    if not isinstance(mask, Tensor) or mask.ndim not in (2, 5) or mask.is_floating_point():
        got = f"{mask.dtype} of shape {tuple(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
        raise NotImplementedError(f"sinkattn: attention_mask is {got}, not bool [batch, kv_len]; use eager attention")
    kv_len = mask.shape[-1]
    if mask.shape[0] != batch or not q_len <= kv_len <= k_len:
        raise ValueError(
            f"sinkattn: attention_mask has shape {(mask.shape[0], kv_len)}; batch is {batch} and kv_len must lie"
            f" between q_len, {q_len}, and k_len, {k_len}"
        )
    if not causal and kv_len != q_len and not (is_encoded_mask(mask) and mask.dtype == WHOLE):
        raise NotImplementedError(
            "sinkattn: attention_mask is given to cross-attention, or to two-sided attention with a cache; use eager"
            " attention"
        )


# A mask of attention_mask, or gathered position_ids -> the state it was read in, position_ids beside it, what was found
_Kept = tuple[tuple[int, ...], Tensor | None, Sequences | None]
_kept: MutableMapping[Tensor, _Kept] = WeakIdKeyDictionary()


def _find_once(
    made: Tensor | None, position_ids: Tensor | None, batch: int, q_len: int, k_len: int, gathered: bool
) -> Sequences | None:
    """find_sequences, once for each mask that attention_mask made, and so once a forward; None for whole batch rows.

    gathered: position_ids were made for one forward too, from those of several ranks. Tensors of another origin may
    live for many forwards and change unseen, so that they are read in each layer. A compiled graph cannot branch on
    what it finds: it always gets bounds.
    """
    compiling, encoded = torch.compiler.is_compiling(), is_encoded_mask(made)
    key = made if encoded else position_ids if gathered and made is None else None
    beside = None if key is position_ids else position_ids  # a key that its own value held would live for ever
    state = () if compiling else (version(made), version(position_ids), q_len, k_len)
    if key is not None and not compiling:
        kept: _Kept | None = _kept.get(key)
        if kept is not None and kept[0] == state and kept[1] is beside:
            return kept[2]
    mask = None
    if made is not None and not encoded:
        mask = made.to(PADDING)
    elif made is not None and made.dtype != WHOLE:
        mask = made[:, 0, 0, 0]
    if compiling:
        return Sequences(*sequence_bounds(mask, position_ids, batch, q_len, k_len))
    found: Sequences | None = find_sequences(mask, position_ids, batch, q_len, k_len)
    if found is not None and found.tokens is None and found.cu_seqlens_q.numel() == batch + 1:
        found = None
    if key is not None:
        _kept[key] = state, beside, found
    return found


_keys: MutableMapping[Tensor, tuple[int, Keys]] = WeakIdKeyDictionary()


def _read_keys_once(mask: Tensor) -> Keys:
    """read_keys, once a forward, but for a compiled graph."""
    if torch.compiler.is_compiling():
        return read_keys(mask[:, 0, 0, 0])
    state, kept = version(mask), _keys.get(mask)
    if kept is None or kept[0] != state:
        kept = state, read_keys(mask[:, 0, 0, 0])
        _keys[mask] = kept
    return kept[1]


def version(x: Tensor | None) -> int:
    """How often x was changed in place; inference tensors do not count."""
    return 0 if x is None or x.is_inference() else x._version
