# SPDX-License-Identifier: Apache-2.0
"""Who is measured: each peer in the memory layout it prefers, under one calling convention."""

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch._functorch import config as functorch_config
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

import sinkattn

from .cases import TARGETS, Case

Attention = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
Visible = Callable[[Any, Any, Tensor, Tensor], Tensor]


class Absent(Exception):
    """This peer cannot run this case here, and why."""


@dataclass(frozen=True)
class Peer:
    """build(case, direction) gives f(q, k, v, s_aux) -> out, or raises Absent."""

    name: str
    build: Callable[[Case, str], Attention]
    has_sink: bool = False
    heads_first: bool = True  # [batch, heads, length, head_dim]; else [batch, length, heads, head_dim]
    s_aux_dtype: torch.dtype = torch.float32

    @property
    def is_ours(self) -> bool:
        return self.name.startswith("sinkattn")


def row_bounds(case: Case) -> Tensor:
    return torch.tensor([0, *accumulate(case.packed)], dtype=torch.int32, device=case.device)


def packed_options(case: Case) -> dict[str, Any]:
    bounds, longest = row_bounds(case), max(case.packed)
    return {"cu_seqlens_q": bounds, "cu_seqlens_k": bounds, "max_seqlen_q": longest, "max_seqlen_k": longest}


def on_rows(attention: Attention) -> Attention:
    """For functions that take packed rows [total, heads, head_dim]."""
    return lambda q, k, v, s_aux: attention(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), s_aux)[None]


def _sinkattn(case: Case, direction: str, with_sink: bool = True) -> Attention:
    function: Callable[..., Any] = sinkattn.flash_attn_func
    if case.packed:
        function = partial(sinkattn.flash_attn_varlen_func, **packed_options(case))
    mask = {"window_size": case.window_size, "num_sink_tokens": case.num_sink_tokens}

    def attention(q: Tensor, k: Tensor, v: Tensor, s_aux: Tensor) -> Tensor:
        return function(q, k, v, s_aux=s_aux if with_sink else None, **mask)  # type: ignore[no-any-return]

    return on_rows(attention) if case.packed else attention


def _positions(case: Case) -> Visible:
    """visible(batch, head, i, j), on positions in the row of tokens."""
    window = case.window or case.length
    if not case.packed:
        return lambda batch, head, i, j: (i >= j) & (i - j < window)
    lengths = torch.tensor(case.packed, device=case.device)
    sequence = torch.arange(len(case.packed), device=case.device).repeat_interleave(lengths)
    return lambda batch, head, i, j: (i >= j) & (i - j < window) & (sequence[i] == sequence[j])


def _visible(case: Case) -> Tensor:
    """bool [length, length]"""
    i = torch.arange(case.length, device=case.device)
    return _positions(case)(0, 0, i[:, None], i)


def _sdpa(case: Case, direction: str) -> Attention:
    if not case.window:
        return lambda q, k, v, s_aux: scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    mask = _visible(case)
    return lambda q, k, v, s_aux: scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)


def _sdpa_flash(case: Case, direction: str) -> Attention:
    """FlashAttention 2 as it is in torch; by its operator, since SDPA itself passes no window on."""
    left, right = case.window_size if case.window else (None, None)
    bounds, longest = (row_bounds(case), max(case.packed)) if case.packed else (None, case.length)
    flash = torch.ops.aten._flash_attention_forward

    def attention(q: Tensor, k: Tensor, v: Tensor, s_aux: Tensor) -> Tensor:
        arguments = (q, k, v, bounds, bounds, longest, longest, 0.0, True, False)
        return flash(*arguments, window_size_left=left, window_size_right=right)[0]  # type: ignore[no-any-return]

    return on_rows(attention) if case.packed else attention


def _sdpa_cudnn(case: Case, direction: str) -> Attention:
    if case.packed or case.window:
        raise Absent("not supported: SDPA's cuDNN has neither windows nor packed sequences")

    def attention(q: Tensor, k: Tensor, v: Tensor, s_aux: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    return attention


def _flex(case: Case, direction: str) -> Attention:
    if direction == "backward":
        raise Absent("not supported: no CPU backward")
    if not any(shutil.which(compiler) for compiler in (os.environ.get("CXX", "g++"), "clang++")):
        raise Absent("not installed: it needs a C++ compiler")
    torch._dynamo.reset()  # else the shapes of all cases count against one recompilation limit
    mask = create_block_mask(_positions(case), None, None, case.length, case.length, device="cpu")
    compiled = torch.compile(flex_attention, dynamic=False)
    return lambda q, k, v, s_aux: compiled(q, k, v, block_mask=mask, enable_gqa=True)


FLEX_BLOCK = 128


def _block_mask(visible: Visible, length: int, device: str) -> BlockMask:
    """create_block_mask by a few rows at a time: its length x length tensors would not fit."""
    columns = torch.arange(length, device=device)
    some, every = [], []
    for rows in torch.split(columns, 16 * FLEX_BLOCK):
        tiles = visible(0, 0, rows[:, None], columns).view(-1, FLEX_BLOCK, length // FLEX_BLOCK, FLEX_BLOCK)
        some.append(tiles.any(3).any(1))
        every.append(tiles.all(3).all(1))

    def listed(blocks: Tensor) -> tuple[Tensor, Tensor]:  # bool [rows, columns] -> how many of a row, these first
        count, order = blocks.sum(-1), blocks.int().argsort(stable=True, dim=-1, descending=True)
        return count.int()[None, None], order.int()[None, None]

    whole = torch.cat(every)
    partly = torch.cat(some) & ~whole
    return BlockMask.from_kv_blocks(*listed(partly), *listed(whole), BLOCK_SIZE=FLEX_BLOCK, mask_mod=visible)


def _flex_with_sink(case: Case, direction: str) -> Attention:
    """The sink by rescaling: exp(lse) / (exp(lse) + exp(s)) times attention without it."""
    if case.id not in TARGETS or case.length % FLEX_BLOCK:
        raise Absent("not run: it compiles for seconds a shape, so only where there is a target")
    torch._dynamo.reset()
    functorch_config.donated_buffer = False  # a backward is timed again and again on one forward
    mask = _block_mask(_positions(case), case.length, case.device)

    def attention(q: Tensor, k: Tensor, v: Tensor, s_aux: Tensor) -> Tensor:
        out, aux = flex_attention(q, k, v, block_mask=mask, enable_gqa=True, return_aux=AuxRequest(lse=True))
        assert aux.lse is not None
        return out * torch.sigmoid(aux.lse - s_aux[:, None])[..., None].to(out.dtype)

    return torch.compile(attention, dynamic=False)


EAGER_BACKWARD_LENGTH = 2048
EAGER_GPU_LENGTH = 4096


def _eager(case: Case, direction: str) -> Attention:
    """The formula as models write it: scores, one more column for the sink, softmax, that column dropped."""
    longest = EAGER_GPU_LENGTH if case.device != "cpu" else EAGER_BACKWARD_LENGTH if direction == "backward" else None
    if longest and case.length > longest:
        raise Absent(f"not run: its N x N tensors, above N = {longest}")
    visible = _visible(case)
    hidden = torch.zeros(visible.shape, device=case.device).masked_fill(~visible, -torch.inf)
    group = case.num_q_heads // case.num_kv_heads

    def attention(q: Tensor, k: Tensor, v: Tensor, s_aux: Tensor) -> Tensor:
        keys, values = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        scores = q @ keys.mT * case.head_dim**-0.5 + hidden.to(q.dtype)
        sinks = s_aux.to(q.dtype)[:, None, None].expand(case.batch, -1, case.length, 1)
        return torch.cat([scores, sinks], -1).softmax(-1)[..., :-1] @ values

    return attention


def _fa4(case: Case, direction: str, deterministic: bool = False) -> Attention:
    if deterministic and direction == "forward":
        raise Absent("not run: the forward is the same")
    if case.num_sink_tokens:
        raise Absent("not supported: it has no positional sink tokens")
    try:
        from flash_attn import cute  # type: ignore[import-not-found]
    except ImportError as error:
        raise Absent("not installed") from error
    sides = tuple(None if side < 0 else side for side in case.window_size)
    mask = {"causal": True} if sides == (None, 0) else {"window_size": sides}
    options: dict[str, Any] = {**mask, "deterministic": deterministic}
    function = cute.flash_attn_func
    if case.packed:
        options |= packed_options(case)
        function = cute.flash_attn_varlen_func

    def attention(q: Tensor, k: Tensor, v: Tensor, s_aux: Tensor) -> Tensor:
        result = function(q, k, v, learnable_sink=s_aux, **options)
        return result[0] if isinstance(result, tuple) else result  # type: ignore[no-any-return]

    return on_rows(attention) if case.packed else attention


OURS = Peer("sinkattn", _sinkattn, has_sink=True, heads_first=False)
OURS_WITHOUT = Peer("sinkattn-no-sink", partial(_sinkattn, with_sink=False), heads_first=False)
EAGER = Peer("eager", _eager, has_sink=True)
FA4 = Peer("fa4", _fa4, has_sink=True, heads_first=False, s_aux_dtype=torch.bfloat16)
FA4_DETERMINISTIC = replace(FA4, name="fa4-deterministic", build=partial(_fa4, deterministic=True))
# The first of those that compute the same thing is what the others are compared with.
CPU = (OURS, OURS_WITHOUT, Peer("sdpa", _sdpa), Peer("flex", _flex), EAGER)
PREFILL_QUICK = (OURS, OURS_WITHOUT, Peer("fa2", _sdpa_flash, heads_first=False))
_WITH_SINK = Peer("flex", _flex_with_sink, has_sink=True), EAGER, FA4, FA4_DETERMINISTIC
PREFILL = (*PREFILL_QUICK, Peer("cudnn", _sdpa_cudnn), *_WITH_SINK)
SHAPES = (OURS, FA4, FA4_DETERMINISTIC)
