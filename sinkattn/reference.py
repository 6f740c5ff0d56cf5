# SPDX-License-Identifier: Apache-2.0
"""The readable definition: sinkattn's public functions in eager PyTorch.

Everything is computed in fp64 for fp64 input and in fp32 for any other, is differentiable by autograd, and holds all
scores at once, so it is for reading, for checking, and for nothing large. v, and with it out, may have fewer columns
than q and k. With S the scaled scores of the visible pairs
and s the logit of a head,

    LSE_i = log(sum_j exp(S_ij) + exp(s))    P_ij = exp(S_ij - LSE_i)    O_i = sum_j P_ij v_j
"""

import math
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

Window = tuple[int | None, int | None]
ReturnLse = bool | Literal["raw"]
ScaleLayout = Literal["rows", "128x4"]
Result = Tensor | tuple[Tensor, Tensor]


def visible(
    q_lens: Tensor, k_lens: Tensor, max_q: int, max_k: int, left: int, right: int, num_sink_tokens: int
) -> Tensor:
    """Which keys each row sees: bool [batch, max_q, max_k] for sequences of q_lens rows and k_lens keys (both [batch]).

    Row i stands at p = i + (k_len - q_len); left and right count from p, which is inside, and -1 is unbounded.
    """
    i = torch.arange(max_q, device=q_lens.device)[None, :, None]
    j = torch.arange(max_k, device=q_lens.device)[None, None, :]
    q_len, k_len = q_lens.long()[:, None, None], k_lens.long()[:, None, None]
    p = i + (k_len - q_len)
    seen = (i < q_len) & (j < k_len)
    if right >= 0:
        seen = seen & (j - p <= right)
    if left >= 0:
        seen = seen & ((p - j <= left) | (j < num_sink_tokens))
    return seen


def _logsumexp(logits: Tensor) -> Tensor:
    """log(sum(exp(logits))) over the last dimension; -inf with gradient 0 if all are, +inf and 1 if one is."""
    top = logits.amax(-1)
    edge = torch.isinf(top)
    inner = torch.logsumexp(torch.where(edge[..., None], 0.0, logits), -1)
    return torch.where(edge, torch.where(top > 0, top, top.detach()), inner)


def _weight(logit: Tensor, lse: Tensor) -> Tensor:
    """exp(logit - lse), and 0 where both are -inf."""
    return torch.exp(logit - torch.where(lse == -math.inf, 0.0, lse))


def _attend(
    q: Tensor, k: Tensor, v: Tensor, s_aux: Tensor | None, seen: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """out [batch, q_len, num_q_heads, head_dim]; lse with and lse without the sink, both [batch, num_q_heads, q_len].

    q [batch, q_len, num_q_heads, head_dim], k and v [batch, k_len, num_kv_heads, head_dim], seen [batch, q_len, k_len].
    """
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    group = q.shape[2] // max(k.shape[2], 1)
    q_rows = q.to(wide).transpose(1, 2)  # [batch, num_q_heads, q_len, head_dim]
    # [batch, num_q_heads, k_len, head_dim]
    keys, values = (x.to(wide).repeat_interleave(group, 2).transpose(1, 2) for x in (k, v))
    seen = seen[:, None]
    finite = all(bool(torch.isfinite(x).all()) for x in (q, k, v))
    if finite:
        scores = scale * (q_rows @ keys.mT)
    else:
        # 0 * NaN is NaN: pairs that do not exist are taken out before the products, not after.
        pair = seen[..., None]  # of [batch, num_q_heads, q_len, k_len, head_dim]
        rows, cols = torch.where(pair, q_rows[:, :, :, None], 0.0), torch.where(pair, keys[:, :, None], 0.0)
        scores = scale * (rows * cols).sum(-1)
    scores = torch.where(seen, scores, -math.inf)
    lse_raw = _logsumexp(pad(scores, (0, 1), value=-math.inf))
    lse = lse_raw
    if s_aux is not None:
        sink = s_aux.to(wide)[None, :, None, None].expand(*scores.shape[:3], 1)
        lse = _logsumexp(torch.cat([scores, sink], -1))
    probs = torch.where(seen, _weight(scores, lse[..., None]), 0.0)
    out = probs @ values if finite else (probs[..., None] * torch.where(pair, values[:, :, None], 0.0)).sum(3)
    # A NaN logit is never silent, not even in a row without keys, where the sum is empty.
    out = out + torch.where(torch.isnan(lse), lse, 0.0)[..., None].detach()
    return out.transpose(1, 2).to(q.dtype), lse, lse_raw


def _window(window_size: Window, causal: bool) -> tuple[int, int]:
    left, right = (-1 if side is None else side for side in window_size)
    if left < -1 or right < -1:
        raise ValueError(f"window_size is {window_size}; each side is -1 (unbounded) or at least 0")
    return left, 0 if causal else right


def _scale(softmax_scale: float | None, head_dim: int) -> float:
    if softmax_scale == 0:
        raise ValueError("softmax_scale is 0; give None for head_dim ** -0.5")
    return head_dim**-0.5 if softmax_scale is None else softmax_scale


def _refuse(**unsupported: object) -> None:
    for name, value in unsupported.items():
        if value:
            raise NotImplementedError(f"{name}={value!r} is not supported; leave it at its default")


def _select(out: Tensor, lse: Tensor, lse_raw: Tensor, return_lse: ReturnLse) -> Result:
    if not return_lse:
        return out
    return out, lse_raw if return_lse == "raw" else lse


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
    num_sink_tokens: int = 0,
    return_lse: ReturnLse = False,
) -> Result:
    """Attention of q [batch, q_len, num_q_heads, head_dim] to k, v [batch, k_len, num_kv_heads, head_dim].

    s_aux [num_q_heads] are the learned sink logits, in natural-log units. Returns out like q, and with return_lse also
    the LSE [batch, num_q_heads, q_len], without the sink for "raw". Raises ValueError for window sides below -1,
    NotImplementedError for dropout, softcap, alibi and attention probabilities.
    """
    alibi = alibi_slopes is not None
    _refuse(dropout_p=dropout_p, softcap=softcap, alibi_slopes=alibi, return_attn_probs=return_attn_probs)
    batch, q_len, k_len = q.shape[0], q.shape[1], k.shape[1]
    q_lens, k_lens = (torch.full((batch,), n, device=q.device) for n in (q_len, k_len))
    seen = visible(q_lens, k_lens, q_len, k_len, *_window(window_size, causal), num_sink_tokens)
    return _select(*_attend(q, k, v, s_aux, seen, _scale(softmax_scale, q.shape[-1])), return_lse)


def _rows(cu_seqlens: Tensor, total: int) -> tuple[Tensor, Tensor, Tensor]:
    """Lengths [batch]; the packed row at each place of a padded batch, and if there is one, both [batch, max_len]."""
    cu = cu_seqlens.long()
    lens = cu.diff()
    if cu.numel() == 0 or int(cu[0]) != 0 or bool((lens < 0).any()) or int(cu[-1]) > total:
        raise ValueError(f"cu_seqlens is {cu.tolist()}; it starts at 0, does not decrease and ends at {total} or below")
    place = torch.arange(int(lens.max()) if lens.numel() else 0, device=cu.device)
    valid = place < lens[:, None]
    return lens, torch.where(valid, cu[:-1, None] + place, 0), valid


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
    num_sink_tokens: int = 0,
    return_lse: ReturnLse = False,
) -> Result:
    """flash_attn_func on packed q [total_q, num_q_heads, head_dim], k, v [total_k, num_kv_heads, head_dim].

    Sequence b has rows cu_seqlens_q[b] to cu_seqlens_q[b + 1], and keys likewise; rows past the last get out 0,
    LSE -inf. The LSE is [num_q_heads, total_q]. With seqused_k [batch] in place of cu_seqlens_k, k and v are a cache
    as that of flash_attn_with_kvcache, and rows stand at the end of seqused_k keys. Raises ValueError on offsets that
    do not start at 0, decrease, or end past the tensor, and on lengths and pages outside the cache.
    """
    alibi = alibi_slopes is not None
    _refuse(dropout_p=dropout_p, softcap=softcap, alibi_slopes=alibi, return_attn_probs=return_attn_probs)
    q_lens, q_rows, q_valid = _rows(cu_seqlens_q, q.shape[0])
    if seqused_k is not None and cu_seqlens_k is None:
        k_lens = seqused_k.long()
        page, slot, _ = _cached(k.shape[1], k.shape[0], k_lens, block_table)
        keys, values = k[page, slot], v[page, slot]
    elif cu_seqlens_k is not None and seqused_k is None:
        k_lens, k_rows, _ = _rows(cu_seqlens_k, k.shape[0])
        keys, values = k[k_rows], v[k_rows]
    else:
        raise ValueError("give one of cu_seqlens_k, of packed keys, and seqused_k, of those in a cache")
    seen = visible(q_lens, k_lens, q_rows.shape[1], keys.shape[1], *_window(window_size, causal), num_sink_tokens)
    out, *both = _attend(q[q_rows], keys, values, s_aux, seen, _scale(softmax_scale, q.shape[-1]))
    rows = (q_rows[q_valid],)
    packed = q.new_zeros(*q.shape[:2], v.shape[-1]).index_put(rows, out[q_valid])
    empty = both[0].new_full((q.shape[0], q.shape[1]), -math.inf)
    lse, lse_raw = (empty.index_put(rows, x.transpose(1, 2)[q_valid]).T for x in both)
    return _select(packed, lse, lse_raw, return_lse)


def _cached(page_size: int, num_pages: int, lens: Tensor, block_table: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Page and slot of each place of a cache that has lens [batch] keys in use, and if it is one; [batch, capacity]."""
    batch, capacity = lens.shape[0], page_size * (1 if block_table is None else block_table.shape[1])
    if bool((lens < 0).any()) or bool((lens > capacity).any()):
        raise ValueError(f"keys in use are {lens.tolist()}; the cache holds {capacity}")
    place = torch.arange(capacity, device=lens.device)
    used = place < lens[:, None]
    if block_table is None:
        pages = torch.arange(batch, device=lens.device)[:, None].expand(batch, capacity)
    else:
        pages = block_table.long()[:, place // page_size]
    if bool(((pages < 0) | (pages >= num_pages))[used].any()):
        raise ValueError(f"block_table has a page outside [0, {num_pages}) among those in use")
    return torch.where(used, pages, 0), (place % page_size).expand(batch, -1), used


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    *,
    cache_seqlens: int | Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    s_aux: Tensor | None = None,
    num_sink_tokens: int = 0,
    return_lse: ReturnLse = False,
    k_cache_host: Tensor | None = None,
    v_cache_host: Tensor | None = None,
) -> Result:
    """Attention of q [batch, q_len, num_q_heads, head_dim] to the first cache_seqlens keys, causal among its rows.

    The cache is [batch, capacity, num_kv_heads, head_dim], or, with block_table [batch, max_pages], pages
    [num_pages, page_size, num_kv_heads, head_dim], and then those of k_cache_host, v_cache_host. New keys k, v
    [batch, new, num_kv_heads, head_dim] are first written into k_cache, v_cache, in place, behind the old ones; v is
    None where v_cache is a slice of k_cache's columns. Raises
    ValueError for lengths beyond the capacity and for missing pages.
    """
    left, right = _window(window_size, causal)
    if right > 0 or (q.shape[1] > 1 and right != 0):
        raise ValueError("decoding is causal: give causal=True with more than one row, and no right window")
    page_size = k_cache.shape[1]
    capacity = page_size * (1 if block_table is None else block_table.shape[1])
    lens = torch.as_tensor(capacity if cache_seqlens is None else cache_seqlens, device=q.device).long()
    lens = lens.expand(q.shape[0])
    new = 0 if k is None else k.shape[1]
    if bool((lens < 0).any()):
        raise ValueError(f"cache_seqlens is {lens.tolist()}; it must be at least 0")
    num_pages = k_cache.shape[0] + (0 if k_cache_host is None else k_cache_host.shape[0])
    page, slot, used = _cached(page_size, num_pages, lens + new, block_table)
    if k is not None:
        if v is None and v_cache.untyped_storage().data_ptr() != k_cache.untyped_storage().data_ptr():
            raise ValueError("v is None; then v_cache must be a slice of k_cache's columns")
        fresh = used & (torch.arange(capacity, device=q.device) >= lens[:, None])
        k_cache[page[fresh], slot[fresh]] = k.flatten(0, 1)
        if v is not None:
            v_cache[page[fresh], slot[fresh]] = v.flatten(0, 1)
    if k_cache_host is not None and v_cache_host is not None:
        k_cache, v_cache = (
            torch.cat([x, y.to(x.device)]) for x, y in ((k_cache, k_cache_host), (v_cache, v_cache_host))
        )
    q_lens = torch.full_like(lens, q.shape[1])
    seen = visible(q_lens, lens + new, q.shape[1], capacity, left, 0, num_sink_tokens)
    keys, values = k_cache[page, slot], v_cache[page, slot]
    return _select(*_attend(q, keys, values, s_aux, seen, _scale(softmax_scale, q.shape[-1])), return_lse)


def merge_attn_states(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over the union of two disjoint sets of keys, from the partial (O, LSE without the sink) of each.

    out is [batch, q_len, num_q_heads, head_dim] and lse [batch, num_q_heads, q_len]; packed, [total_q, num_q_heads,
    head_dim] and [num_q_heads, total_q].
    """
    lse = _logsumexp(torch.stack([lse_a, lse_b], -1))
    parts = (_weight(x, lse).transpose(-1, -2)[..., None] * out for x, out in ((lse_a, out_a), (lse_b, out_b)))
    return sum(parts, torch.zeros_like(lse_a).transpose(-1, -2)[..., None]).to(out_a.dtype), lse


def apply_sink(out: Tensor, lse: Tensor, s_aux: Tensor) -> tuple[Tensor, Tensor]:
    """(O, LSE) with the sinks s_aux [num_q_heads], from those without; shapes as in merge_attn_states."""
    sink = s_aux.to(lse.dtype)[:, None].expand_as(lse)
    with_sink = _logsumexp(torch.stack([lse, sink], -1))
    return (out * _weight(lse, with_sink).transpose(-1, -2)[..., None]).to(out.dtype), with_sink


E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def nvfp4_scales_by_tiles(scales: Tensor) -> Tensor:
    """Scales [.., n] in the order in which a GEMM takes those of an NVFP4 operand, bytes of float8_e4m3fn.

    All but the last dimension are rows. Tiles of 128 rows and 4 scales follow each other, those of the same rows first,
    and scale (row, column) of a tile lies at row % 32 * 16 + row / 32 * 4 + column: cuBLAS describes this as the layout
    of 1D block scaling factors. Returns [rows up to a multiple of 128, n up to one of 4], contiguous, 0 where there is
    no scale.
    """
    rows = scales.reshape(-1, scales.shape[-1]).view(torch.uint8)
    padded = pad(rows, (0, -rows.shape[1] % 4, 0, -rows.shape[0] % 128))
    tiles = padded.view(-1, 4, 32, padded.shape[1] // 4, 4)  # row tile, row / 32, row % 32, column tile, column
    return tiles.permute(0, 3, 2, 1, 4).reshape(padded.shape).view(scales.dtype)


def _nvfp4_scales_by_rows(scales: Tensor, rows: int, columns: int) -> Tensor:
    """nvfp4_scales_by_tiles undone: [rows, columns]."""
    tiles = scales.view(torch.uint8).view(-1, scales.shape[1] // 4, 32, 4, 4)
    padded = tiles.permute(0, 3, 2, 1, 4).reshape(scales.shape)
    return padded[:rows, :columns].view(scales.dtype)


def _by_tiles(scale_layout: ScaleLayout) -> bool:
    if scale_layout not in ("rows", "128x4"):
        raise ValueError(f"scale_layout is {scale_layout!r}; it must be 'rows' or '128x4'")
    return scale_layout == "128x4"


def quantize_nvfp4(
    x: Tensor, global_scale: float = 1.0, *, scale_layout: ScaleLayout = "rows"
) -> tuple[Tensor, Tensor]:
    """NVFP4 of x [.., n], n a multiple of 16: values uint8 [.., n / 2] and scales float8_e4m3fn [.., n / 16].

    With y = x * global_scale in fp32, a block of 16 has the scale max |y| / 6 and the values y / scale, each rounded to
    the nearest number of its format, ties to even, at most 448 and 6; the even column is in the low half of its byte. A
    scale of 0 has values of 0. A block that holds NaN or infinity has the scale NaN and values of 0. Scales by "128x4"
    are as nvfp4_scales_by_tiles gives them.
    """
    by_tiles = _by_tiles(scale_layout)
    y = (x.float() * global_scale).reshape(*x.shape[:-1], -1, 16)
    top = y.abs().amax(-1, keepdim=True)
    scale = torch.where(top.isfinite(), (top / 6).clamp(max=448), torch.nan).to(torch.float8_e4m3fn)
    size = (y.double() / scale.double()).abs()
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    size = (step * (size / step).round()).clamp(
        max=6
    )  # round() takes ties to the even multiple, which is the even code
    code = torch.searchsorted(torch.tensor(E2M1, dtype=size.dtype, device=x.device), size) + 8 * y.signbit()
    code = torch.where(scale.float() > 0, code, 0).flatten(-2).to(torch.uint8)
    scales = scale.squeeze(-1)
    return code[..., ::2] | code[..., 1::2] << 4, nvfp4_scales_by_tiles(scales) if by_tiles else scales


def dequantize_nvfp4(
    values: Tensor, scales: Tensor, global_scale: float = 1.0, *, scale_layout: ScaleLayout = "rows"
) -> Tensor:
    """The fp32 numbers [.., n] of values uint8 [.., n / 2] and scales float8_e4m3fn, which by rows are [.., n / 16]."""
    if _by_tiles(scale_layout):
        columns = values.shape[-1] // 8
        of = _nvfp4_scales_by_rows(scales, values.shape[:-1].numel(), columns)
        scales = of.view(torch.uint8).reshape(*values.shape[:-1], columns).view(scales.dtype)
    code = torch.stack([values & 15, values >> 4], -1).flatten(-2).long()
    size = torch.tensor(E2M1, device=values.device)[code & 7]
    number = torch.where(code < 8, size, -size).view(*scales.shape, 16)
    found: Tensor = (number * scales.float()[..., None]).flatten(-2) / global_scale
    return found
