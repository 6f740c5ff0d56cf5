# SPDX-License-Identifier: Apache-2.0
"""Who is measured: each peer in the memory layout it prefers, under one calling convention."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

import sinkattn

from .cases import Case

Attention = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class Absent(Exception):
    """This peer cannot run this case here, and why."""


@dataclass(frozen=True)
class Peer:
    """build(case, direction) gives f(q, k, v, s_aux) -> out, or raises Absent."""

    name: str
    build: Callable[[Case, str], Attention]
    has_sink: bool = False
    heads_first: bool = True  # [batch, heads, length, head_dim]; else [batch, length, heads, head_dim]


def _sinkattn(case: Case, direction: str) -> Attention:
    return lambda q, k, v, s_aux: sinkattn.flash_attn_func(q, k, v, window_size=case.window_size, s_aux=s_aux)  # type: ignore[return-value]


def _sinkattn_without(case: Case, direction: str) -> Attention:
    return lambda q, k, v, s_aux: sinkattn.flash_attn_func(q, k, v, window_size=case.window_size)  # type: ignore[return-value]


def _visible(case: Case) -> Tensor:
    """bool [length, length]"""
    i = torch.arange(case.length)
    back = i[:, None] - i
    return (back >= 0) & (back < (case.window or case.length))


def _sdpa(case: Case, direction: str) -> Attention:
    if not case.window:
        return lambda q, k, v, s_aux: scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    mask = _visible(case)
    return lambda q, k, v, s_aux: scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)


def _flex(case: Case, direction: str) -> Attention:
    if direction == "backward":
        raise Absent("not supported: no CPU backward")
    if not any(shutil.which(compiler) for compiler in (os.environ.get("CXX", "g++"), "clang++")):
        raise Absent("not installed: it needs a C++ compiler")
    window = case.window or case.length

    def visible(batch: Tensor, head: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (i >= j) & (i - j < window)

    torch._dynamo.reset()  # else the shapes of all cases count against one recompilation limit
    mask = create_block_mask(visible, None, None, case.length, case.length, device="cpu")
    compiled = torch.compile(flex_attention, dynamic=False)
    return lambda q, k, v, s_aux: compiled(q, k, v, block_mask=mask, enable_gqa=True)


EAGER_BACKWARD_LENGTH = 2048


def _eager(case: Case, direction: str) -> Attention:
    """The formula as models write it: scores, one more column for the sink, softmax, that column dropped."""
    if direction == "backward" and case.length > EAGER_BACKWARD_LENGTH:
        raise Absent(f"not run: its N x N tensors, above N = {EAGER_BACKWARD_LENGTH}")
    hidden = torch.zeros(case.length, case.length, dtype=torch.get_default_dtype()).masked_fill(
        ~_visible(case), -torch.inf
    )
    group = case.num_q_heads // case.num_kv_heads

    def attention(q: Tensor, k: Tensor, v: Tensor, s_aux: Tensor) -> Tensor:
        keys, values = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        scores = q @ keys.mT * case.head_dim**-0.5 + hidden.to(q.dtype)
        sinks = s_aux.to(q.dtype)[:, None, None].expand(case.batch, -1, case.length, 1)
        return torch.cat([scores, sinks], -1).softmax(-1)[..., :-1] @ values

    return attention


# The first of those that compute the same thing is what the others are compared with.
CPU = (
    Peer("sinkattn", _sinkattn, has_sink=True, heads_first=False),
    Peer("sinkattn-no-sink", _sinkattn_without, heads_first=False),
    Peer("sdpa", _sdpa),
    Peer("flex", _flex),
    Peer("eager", _eager, has_sink=True),
)
