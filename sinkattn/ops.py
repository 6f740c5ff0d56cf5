# SPDX-License-Identifier: Apache-2.0
"""Attention with learned sinks, in flash-attention 2's argument order: change the import, add s_aux.

Shapes: q and out [batch, q_len, num_q_heads, head_dim], k and v [batch, k_len, num_kv_heads, head_dim], LSE
[batch, num_q_heads, q_len] in fp32 (fp64 for fp64 input). Query head h reads kv head h // (num_q_heads / num_kv_heads).
Row i of a sequence stands at p = i + k_len - q_len and sees key j when

    (right < 0 or j <= p + right) and (left < 0 or j >= p - left or j < num_sink_tokens)

with (left, right) = window_size, both counting from the row itself; -1 or None is unbounded. causal=True is right = 0,
whatever window_size says of the right side, as in flash-attention: callers pass (w, w) with causal=True. So
transformers' sliding_window=128, which counts the row as well, is window_size=(127, 0).

bf16, fp16, fp32 or fp64, on CUDA bf16 or fp16: one dtype for q, k, v and caches, on one device. Any strides; rows of
head_dim that are not contiguous and 16-byte aligned are copied. head_dim is a multiple of 8 up to 256, or up to 576
where keys are read from a cache; v's and all on CUDA are at most 512. v's, and with it out's, may be a smaller multiple
of 8 than that of q and k.

Arguments that every function takes:
    softmax_scale    factor of q . k; None is head_dim ** -0.5.
    s_aux            [num_q_heads] learned sink logits in natural-log units, never scaled; fp32, bf16 or fp16 (fp64 with
                     fp64 input). `learnable_sink` and `sinks` are other names for it.
    num_sink_tokens  the first keys of a sequence, visible through the window.
    return_lse       True: return (out, lse); "raw": the LSE without the sink, as merge_attn_states takes it.
    deterministic    has nothing to do: the same input always gives the same bits.

ValueError says which argument breaks which rule; NotImplementedError names what is not supported, and the way out.
"""

import operator
from typing import Any, Literal, overload

import torch
from torch import Tensor

from . import _C  # noqa: F401  registers torch.ops.sinkattn
from .calls import call, shown
from .lengths import check_lengths, rows_of_cache
from .reference import Result, ReturnLse, Window

_fwd = torch.ops.sinkattn.flash_attn_fwd.default
_fwd_raw = torch.ops.sinkattn.flash_attn_fwd_raw.default
_decode = torch.ops.sinkattn.flash_decode.default
_decode_raw = torch.ops.sinkattn.flash_decode_raw.default
_decode_varlen = torch.ops.sinkattn.flash_decode_varlen.default
_decode_varlen_raw = torch.ops.sinkattn.flash_decode_varlen_raw.default
_append = torch.ops.sinkattn.append_kv.default
_merge_attn_states = torch.ops.sinkattn.merge_attn_states.default
_apply_sink = torch.ops.sinkattn.apply_sink.default

_UNSUPPORTED = {
    "dropout_p": "it must be 0.0: set the model's attention dropout to 0",
    "softcap": "it must be 0.0: scores are not capped here, use the model's eager attention",
    "alibi_slopes": "it must be None: scores take no bias here, use the model's eager attention",
    "return_attn_probs": "it must be False: return_lse=True gives the LSE, and the probabilities are exp(score - lse)",
    "rotary_cos": "it must be None: rotate q and k before the call",
    "rotary_sin": "it must be None: rotate q and k before the call",
    "cache_leftpad": "it must be None: let sequences start at slot 0, or pass a paged cache with a block_table",
}


def _refuse(**arguments: object) -> None:
    for name, value in arguments.items():
        if value is None or value is False or (type(value) is float and value == 0.0):
            continue
        if isinstance(value, Tensor):
            raise NotImplementedError(
                f"sinkattn: {name} is a tensor of shape {list(value.shape)}; {_UNSUPPORTED[name]}"
            )
        try:
            given = bool(value)
        except ValueError:  # an array
            given = True
        if given:
            raise NotImplementedError(f"sinkattn: {name} is {shown(value)}; {_UNSUPPORTED[name]}")


def _one_s_aux(s_aux: Tensor | None, learnable_sink: Tensor | None, sinks: Tensor | None) -> Tensor | None:
    if learnable_sink is None and sinks is None:
        return s_aux
    names = {"s_aux": s_aux, "learnable_sink": learnable_sink, "sinks": sinks}
    given = [name for name, value in names.items() if value is not None]
    if len(given) > 1:
        raise TypeError(f"sinkattn: {' and '.join(given)} were given, they are names of one argument")
    found = names[given[0]]
    if not isinstance(found, Tensor):
        raise TypeError(f"sinkattn: {given[0]} is {shown(found)}; it must be a torch.Tensor or None")
    return found


def _given(value: object, name: str) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"sinkattn: {name} is {shown(value)}; it must be a torch.Tensor")


def _check_partials(first_name: str, /, **tensors: Tensor) -> None:
    """What ATen, which merging is made of, would take, or refuse in words of its own."""
    device = None
    for name, value in tensors.items():
        _given(value, name)
        if value.layout != torch.strided:
            raise NotImplementedError(
                f"sinkattn: {name} is a tensor of another kind, {value.layout}; it must be strided"
            )
        if not value.is_floating_point() or value.itemsize < 2:
            raise ValueError(f"sinkattn: {name} is {value.dtype}; bfloat16, float16, float32 and float64 are served")
        device = device or value.device
        if value.device != device:
            raise ValueError(f"sinkattn: {name} is on {value.device}, {first_name} is on {device}")


def _integer(value: Any, name: str, rule: str) -> int:
    if isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool):
        return value  # type: ignore[return-value]  # a symbolic one stays symbolic
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)
    except TypeError:
        raise TypeError(f"sinkattn: {name} is {shown(value)}; {rule}") from None


def _flag(value: object, name: str) -> bool:
    """True or False from what stands for one: 0, 1, numpy's or a symbolic one."""
    if value is True or value is False:
        return value
    if type(value).__name__ in ("bool", "bool_", "SymBool") or (isinstance(value, int) and value in (0, 1)):
        return bool(value)
    raise TypeError(f"sinkattn: {name} is {shown(value)}; it must be True or False")


def _window(window_size: Window, causal: bool) -> tuple[int, int]:
    if not isinstance(window_size, (tuple, list)) or len(window_size) != 2:
        raise ValueError(
            f"sinkattn: window_size is {window_size!r}; it must be (left, right), each without the row itself"
        )
    left, right = window_size
    left, right = -1 if left is None else left, -1 if right is None else right
    if type(left) is not int or type(right) is not int:
        rule = f"each side of {window_size!r} must be an integer or None"
        left, right = (_integer(side, "window_size", rule) for side in (left, right))
    if right < -1:
        raise ValueError(f"sinkattn: window_size_right is {right}; it must be -1 (unbounded) or at least 0")
    return left, 0 if _flag(causal, "causal") else right


def _lengths(number: Any, q: Tensor) -> Tensor:
    """One number of keys as int32 [batch]."""
    rule = "it must be an integer, or an int32 tensor: torch.tensor(cache_seqlens, dtype=torch.int32, device=q.device)"
    number = _integer(number, "cache_seqlens", rule)
    if abs(number) >= 2**31:  # the kernels look at what fits int32
        raise ValueError(f"sinkattn: cache_seqlens is {number}; it must be from 0 to the capacity")
    return torch.full(q.shape[:1], number, dtype=torch.int32, device=q.device)


def _wants_raw(s_aux: Tensor | None, return_lse: ReturnLse) -> bool:
    """Whether the LSE without the sink is another one than the LSE."""
    if return_lse is not True and return_lse is not False and (not isinstance(return_lse, str) or return_lse != "raw"):
        raise ValueError(f'sinkattn: return_lse is {shown(return_lse)}; it must be True, False or "raw"')
    return return_lse == "raw" and s_aux is not None


# fmt: off
@overload
def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float = ..., softmax_scale: float | None = ..., causal: bool = ...,
    window_size: Window = ..., softcap: float = ..., alibi_slopes: Tensor | None = ..., deterministic: bool = ...,
    return_attn_probs: bool = ..., *, s_aux: Tensor | None = ..., learnable_sink: Tensor | None = ...,
    sinks: Tensor | None = ..., num_sink_tokens: int = ..., return_lse: Literal[False] = ...,
) -> Tensor: ...
@overload
def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float = ..., softmax_scale: float | None = ..., causal: bool = ...,
    window_size: Window = ..., softcap: float = ..., alibi_slopes: Tensor | None = ..., deterministic: bool = ...,
    return_attn_probs: bool = ..., *, s_aux: Tensor | None = ..., learnable_sink: Tensor | None = ...,
    sinks: Tensor | None = ..., num_sink_tokens: int = ..., return_lse: Literal[True, "raw"],
) -> tuple[Tensor, Tensor]: ...
@overload
def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float = ..., softmax_scale: float | None = ..., causal: bool = ...,
    window_size: Window = ..., softcap: float = ..., alibi_slopes: Tensor | None = ..., deterministic: bool = ...,
    return_attn_probs: bool = ..., *, s_aux: Tensor | None = ..., learnable_sink: Tensor | None = ...,
    sinks: Tensor | None = ..., num_sink_tokens: int = ..., return_lse: ReturnLse,
) -> Result: ...
# fmt: on
def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    s_aux: Tensor | None = None,
    learnable_sink: Tensor | None = None,
    sinks: Tensor | None = None,
    num_sink_tokens: int = 0,
    return_lse: ReturnLse = False,
) -> Result:
    """Attention over a batch of sequences of one length; differentiable in q, k, v, s_aux, also through the LSE.

    q [batch, q_len, num_q_heads, head_dim], k and v [batch, k_len, num_kv_heads, head_dim], s_aux [num_q_heads].
    causal=True makes window_size's right side 0, whatever it is. Returns out, shaped as q, or (out, lse) with lse
    [batch, num_q_heads, q_len]. Other arguments, dtypes and errors: help(sinkattn.ops).
    """
    _refuse(dropout_p=dropout_p, softcap=softcap, alibi_slopes=alibi_slopes, return_attn_probs=return_attn_probs)
    s_aux = _one_s_aux(s_aux, learnable_sink, sinks)
    left, right = _window(window_size, causal)
    fwd = _fwd_raw if _wants_raw(s_aux, return_lse) else _fwd
    out, *_, lse = call(fwd, q, k, v, s_aux, None, None, None, None, softmax_scale, left, right, num_sink_tokens)
    return (out, lse) if return_lse else out


# fmt: off
@overload
def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor | None = ...,
    max_seqlen_q: int | None = ..., max_seqlen_k: int | None = ..., dropout_p: float = ...,
    softmax_scale: float | None = ..., causal: bool = ..., window_size: Window = ..., softcap: float = ...,
    alibi_slopes: Tensor | None = ..., deterministic: bool = ..., return_attn_probs: bool = ...,
    block_table: Tensor | None = ..., *, seqused_k: Tensor | None = ..., s_aux: Tensor | None = ...,
    learnable_sink: Tensor | None = ..., sinks: Tensor | None = ..., num_sink_tokens: int = ...,
    return_lse: Literal[False] = ...,
) -> Tensor: ...
@overload
def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor | None = ...,
    max_seqlen_q: int | None = ..., max_seqlen_k: int | None = ..., dropout_p: float = ...,
    softmax_scale: float | None = ..., causal: bool = ..., window_size: Window = ..., softcap: float = ...,
    alibi_slopes: Tensor | None = ..., deterministic: bool = ..., return_attn_probs: bool = ...,
    block_table: Tensor | None = ..., *, seqused_k: Tensor | None = ..., s_aux: Tensor | None = ...,
    learnable_sink: Tensor | None = ..., sinks: Tensor | None = ..., num_sink_tokens: int = ...,
    return_lse: Literal[True, "raw"],
) -> tuple[Tensor, Tensor]: ...
@overload
def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor | None = ...,
    max_seqlen_q: int | None = ..., max_seqlen_k: int | None = ..., dropout_p: float = ...,
    softmax_scale: float | None = ..., causal: bool = ..., window_size: Window = ..., softcap: float = ...,
    alibi_slopes: Tensor | None = ..., deterministic: bool = ..., return_attn_probs: bool = ...,
    block_table: Tensor | None = ..., *, seqused_k: Tensor | None = ..., s_aux: Tensor | None = ...,
    learnable_sink: Tensor | None = ..., sinks: Tensor | None = ..., num_sink_tokens: int = ..., return_lse: ReturnLse,
) -> Result: ...
# fmt: on
def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
    *,
    seqused_k: Tensor | None = None,
    s_aux: Tensor | None = None,
    learnable_sink: Tensor | None = None,
    sinks: Tensor | None = None,
    num_sink_tokens: int = 0,
    return_lse: ReturnLse = False,
) -> Result:
    """flash_attn_func over packed q, out [total_q, num_q_heads, head_dim] and k, v [total_k, num_kv_heads, head_dim].

    Sequence b has rows cu_seqlens_q[b] to cu_seqlens_q[b + 1] of q, and keys likewise; both are int32 [batch + 1] on
    q's device. Rows past the last offset get out = 0, LSE = -inf and zero gradients. max_seqlen_q and max_seqlen_k,
    the longest sequences, are hints. causal=True makes window_size's right side 0, whatever it is. The LSE is
    [num_q_heads, total_q]. On the CPU, offsets that do not start at 0, decrease, or end past the tensor raise
    ValueError.

    With seqused_k in place of cu_seqlens_k, packed rows read a cache, as serving engines call it for chunks of a
    prefill and decode rows at once: k and v are pages [num_pages, page_size, num_kv_heads, head_dim] with block_table
    int32 [batch, max_pages], or [batch, capacity, num_kv_heads, head_dim] without. Sequence b has seqused_k[b] (int32
    [batch]) keys, its rows stand at their end, and have the bits of flash_attn_func on that sequence. On the CPU
    head_dim may be up to 576, and v a slice of k's columns, as of one latent; beyond 256, which flash_attn_func does
    not take, the bits are those of flash_attn_with_kvcache with invariant=True. Tensors that ask for a gradient raise
    NotImplementedError.
    """
    _refuse(dropout_p=dropout_p, softcap=softcap, alibi_slopes=alibi_slopes, return_attn_probs=return_attn_probs)
    cached = seqused_k is not None or block_table is not None
    check_lengths(cu_seqlens_q, cu_seqlens_k, seqused_k, cached)
    s_aux = _one_s_aux(s_aux, learnable_sink, sinks)
    left, right = _window(window_size, causal)
    raw = _wants_raw(s_aux, return_lse)
    out, *_, lse = call(
        (_decode_varlen_raw if raw else _decode_varlen) if cached else _fwd_raw if raw else _fwd,
        q,
        k,
        v,
        s_aux,
        cu_seqlens_q,
        *((seqused_k, block_table) if cached else (cu_seqlens_k,)),
        max_seqlen_q,
        max_seqlen_k,
        softmax_scale,
        left,
        right,
        num_sink_tokens,
    )
    return (out, lse) if return_lse else out


# fmt: off
@overload
def flash_attn_with_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None = ..., v: Tensor | None = ...,
    rotary_cos: Tensor | None = ..., rotary_sin: Tensor | None = ..., cache_seqlens: int | Tensor | None = ...,
    cache_batch_idx: Tensor | None = ..., cache_leftpad: Tensor | None = ..., block_table: Tensor | None = ...,
    softmax_scale: float | None = ..., causal: bool = ..., window_size: Window = ..., softcap: float = ...,
    rotary_interleaved: bool = ..., alibi_slopes: Tensor | None = ..., num_splits: int = ...,
    return_softmax_lse: Literal[False] = ..., *, s_aux: Tensor | None = ..., learnable_sink: Tensor | None = ...,
    sinks: Tensor | None = ..., num_sink_tokens: int = ..., invariant: bool = ..., return_lse: Literal[False] = ...,
    k_cache_host: Tensor | None = ..., v_cache_host: Tensor | None = ...,
) -> Tensor: ...
@overload
def flash_attn_with_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None = ..., v: Tensor | None = ...,
    rotary_cos: Tensor | None = ..., rotary_sin: Tensor | None = ..., cache_seqlens: int | Tensor | None = ...,
    cache_batch_idx: Tensor | None = ..., cache_leftpad: Tensor | None = ..., block_table: Tensor | None = ...,
    softmax_scale: float | None = ..., causal: bool = ..., window_size: Window = ..., softcap: float = ...,
    rotary_interleaved: bool = ..., alibi_slopes: Tensor | None = ..., num_splits: int = ...,
    return_softmax_lse: bool = ..., *, s_aux: Tensor | None = ..., learnable_sink: Tensor | None = ...,
    sinks: Tensor | None = ..., num_sink_tokens: int = ..., invariant: bool = ..., return_lse: Literal[True, "raw"],
    k_cache_host: Tensor | None = ..., v_cache_host: Tensor | None = ...,
) -> tuple[Tensor, Tensor]: ...
@overload
def flash_attn_with_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None = ..., v: Tensor | None = ...,
    rotary_cos: Tensor | None = ..., rotary_sin: Tensor | None = ..., cache_seqlens: int | Tensor | None = ...,
    cache_batch_idx: Tensor | None = ..., cache_leftpad: Tensor | None = ..., block_table: Tensor | None = ...,
    softmax_scale: float | None = ..., causal: bool = ..., window_size: Window = ..., softcap: float = ...,
    rotary_interleaved: bool = ..., alibi_slopes: Tensor | None = ..., num_splits: int = ..., *,
    return_softmax_lse: Literal[True], s_aux: Tensor | None = ..., learnable_sink: Tensor | None = ...,
    sinks: Tensor | None = ..., num_sink_tokens: int = ..., invariant: bool = ..., return_lse: ReturnLse = ...,
    k_cache_host: Tensor | None = ..., v_cache_host: Tensor | None = ...,
) -> tuple[Tensor, Tensor]: ...
@overload
def flash_attn_with_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None = ..., v: Tensor | None = ...,
    rotary_cos: Tensor | None = ..., rotary_sin: Tensor | None = ..., cache_seqlens: int | Tensor | None = ...,
    cache_batch_idx: Tensor | None = ..., cache_leftpad: Tensor | None = ..., block_table: Tensor | None = ...,
    softmax_scale: float | None = ..., causal: bool = ..., window_size: Window = ..., softcap: float = ...,
    rotary_interleaved: bool = ..., alibi_slopes: Tensor | None = ..., num_splits: int = ...,
    return_softmax_lse: bool = ..., *, s_aux: Tensor | None = ..., learnable_sink: Tensor | None = ...,
    sinks: Tensor | None = ..., num_sink_tokens: int = ..., invariant: bool = ..., return_lse: ReturnLse = ...,
    k_cache_host: Tensor | None = ..., v_cache_host: Tensor | None = ...,
) -> Result: ...
# fmt: on
def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    *,
    s_aux: Tensor | None = None,
    learnable_sink: Tensor | None = None,
    sinks: Tensor | None = None,
    num_sink_tokens: int = 0,
    invariant: bool = False,
    return_lse: ReturnLse = False,
    k_cache_host: Tensor | None = None,
    v_cache_host: Tensor | None = None,
) -> Result:
    """Attention of a few rows a sequence to a KV cache; not differentiable.

    k_cache, v_cache are [batch, capacity, num_kv_heads, head_dim] or, with block_table int32 [batch, max_pages], pages
    [num_pages, page_size, num_kv_heads, head_dim]. With cache_batch_idx int32 [batch] sequence b uses row
    cache_batch_idx[b] of a contiguous cache of any number of rows: a block_table of one page each, which errors name.
    cache_seqlens (int32 [batch], or one number) are the keys in use, the whole capacity if left out; the rows of q
    stand at their end. More than one row needs causal=True, which makes window_size's right side 0, whatever it is.
    k and v [batch, new, num_kv_heads, head_dim] are first written into the cache, in place, behind the keys in use, and
    count as in use in this call; cache_seqlens stays as it is, for the caller to count on. num_splits is the parts that
    a sequence's keys are cut into, 0 the planner's choice; -N are N parts that CUDA merges by a second kernel, for
    study, with the bits of N. A CPU's decode has the bits of flash_attn_func's row, whatever the batch and the parts.
    CUDA's has them with invariant=True, up to head_dim 256 and in some multiple of the time; the bits of other
    num_splits than 0 do not depend on the batch there either.
    k_cache_host, v_cache_host are more pages of a paged cache, in pinned memory, which a GPU reads where they lie:
    block_table names them from num_pages on, and new keys never go there. A captured graph reads them again: keep them.
    head_dim may be up to 576, v_cache's up to 512. One latent for all heads is k_cache [.., 1, 576] with its view
    k_cache[..., :512] as v_cache, and a new one is k with v=None. Above 512 CUDA takes only 9.0 and pages of 16 n keys.
    return_softmax_lse is flash-attention's name for return_lse. Lengths and pages outside the cache raise ValueError on
    the CPU: before anything is written where new keys lack a slot, while other errors may come when they are in their
    slots already, behind the keys in use. On CUDA, where no length is read on the host, lengths are clamped, keys of
    such pages are read as 0 and new ones without a slot not written, and check_errors() raises. Caches that overlap
    each other, but as above, or new keys that lie within one, raise ValueError; new keys that ask for gradients,
    NotImplementedError.
    """
    _refuse(
        rotary_cos=rotary_cos,
        rotary_sin=rotary_sin,
        cache_leftpad=cache_leftpad,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
    )
    invariant = _flag(invariant, "invariant")
    return_softmax_lse = _flag(return_softmax_lse, "return_softmax_lse")
    return_lse = return_softmax_lse if return_lse is False else return_lse
    s_aux = _one_s_aux(s_aux, learnable_sink, sinks)
    left, right = _window(window_size, causal)
    _given(q, "q")
    if right != 0 and q.ndim == 4 and q.shape[1] > 1:  # another rank is refused below
        raise NotImplementedError(
            f"sinkattn: {q.shape[1]} rows with causal=False; rows of one call are causal among themselves, give"
            " causal=True, or use flash_attn_func"
        )
    if cache_seqlens is not None and not isinstance(cache_seqlens, Tensor):
        cache_seqlens = _lengths(cache_seqlens, q)
    if cache_batch_idx is not None:
        block_table = rows_of_cache(cache_batch_idx, block_table, q)
    if k is not None:
        if cache_seqlens is None:
            raise ValueError("sinkattn: k and v are given without cache_seqlens, which says where they go")
        cache_seqlens = call(_append, k_cache, v_cache, k, v, cache_seqlens, block_table)
    elif v is not None:
        raise ValueError("sinkattn: v is given without k; they go together")
    host = {}  # keywords cost time, and few calls have these
    if k_cache_host is not None or v_cache_host is not None:
        host = {"k_cache_host": k_cache_host, "v_cache_host": v_cache_host}
    result = call(
        _decode_raw if _wants_raw(s_aux, return_lse) else _decode,
        q,
        k_cache,
        v_cache,
        s_aux,
        cache_seqlens,
        block_table,
        softmax_scale,
        left,
        num_sink_tokens,
        num_splits,
        invariant,
        **host,
    )
    return (result[0], result[-1]) if return_lse else result[0]


def merge_attn_states(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """(out, lse) over the union of two disjoint sets of keys, from the out and the LSE without the sink of each.

    out [batch, q_len, num_q_heads, head_dim] with lse [batch, num_q_heads, q_len], or packed
    [total_q, num_q_heads, head_dim] with [num_q_heads, total_q]. Differentiable. Raises ValueError when shapes or
    dtypes disagree.
    """
    _check_partials("out_a", out_a=out_a, lse_a=lse_a, out_b=out_b, lse_b=lse_b)
    out, lse = call(_merge_attn_states, out_a, lse_a, out_b, lse_b)
    return out, lse


def apply_sink(out: Tensor, lse: Tensor, s_aux: Tensor) -> tuple[Tensor, Tensor]:
    """(out, lse) with the sinks s_aux [num_q_heads], from those without: what follows the last merge, once.

    Shapes as in merge_attn_states. Differentiable. Raises ValueError when shapes disagree.
    """
    _check_partials("out", out=out, lse=lse, s_aux=s_aux)
    out, lse = call(_apply_sink, out, lse, s_aux)
    return out, lse
