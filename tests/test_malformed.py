# SPDX-License-Identifier: Apache-2.0
"""Every argument of every function, given what it cannot be: an error of ours that names it, and none of torch's."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from arguments import append_args, cache, decode_args, dense, packed, partials, varlen_cache_args
from torch import Tensor

import sinkattn

Call = dict[str, Any]


def dense_call() -> Call:
    return dict(zip(("q", "k", "v", "s_aux"), dense(), strict=True))


def packed_call() -> Call:
    return dict(zip(("q", "k", "v", "s_aux", "cu_seqlens_q", "cu_seqlens_k"), packed(), strict=True))


def cache_call() -> Call:
    names = ("q", "k_cache", "v_cache", "s_aux", "cache_seqlens")
    return dict(zip(names, cache(), strict=True)) | {"causal": True}


def paged_call() -> Call:
    names = ("q", "k_cache", "v_cache", "s_aux", "cache_seqlens", "block_table")
    return dict(zip(names, decode_args(paged=True), strict=False)) | {"causal": True}


def varlen_cache_call() -> Call:
    names = ("q", "k", "v", "s_aux", "cu_seqlens_q", "seqused_k", "block_table")
    return dict(zip(names, varlen_cache_args(), strict=False))


def append_call() -> Call:
    k_cache, v_cache, k, v, lens, _ = append_args()
    return cache_call() | {"k_cache": k_cache, "v_cache": v_cache, "k": k, "v": v, "cache_seqlens": lens}


def merge_call() -> Call:
    return dict(zip(("out_a", "lse_a", "out_b", "lse_b"), partials(), strict=True))


def sink_call() -> Call:
    out, lse, *_ = partials()
    return {"out": out, "lse": lse, "s_aux": torch.zeros(4)}


CALLS: dict[str, tuple[Callable[..., Any], Callable[[], Call]]] = {
    "dense": (sinkattn.flash_attn_func, dense_call),
    "packed": (sinkattn.flash_attn_varlen_func, packed_call),
    "cache": (sinkattn.flash_attn_with_kvcache, cache_call),
    "paged": (sinkattn.flash_attn_with_kvcache, paged_call),
    "varlen cache": (sinkattn.flash_attn_varlen_func, varlen_cache_call),
    "append": (sinkattn.flash_attn_with_kvcache, append_call),
    "merge": (sinkattn.merge_attn_states, merge_call),
    "sink": (sinkattn.apply_sink, sink_call),
}

NO_TENSOR: list[Any] = [True, 1, 1.0, 1j, "q", b"q", [1.0], (), {}, np.ones(4), np.float32(1), object(), torch.float32]
NO_INTEGER: list[Any] = [1.5, 3.0, "3", [1], (1,), None, 2**70, -(2**70), np.ones(2), torch.ones(2), math.nan, object()]
NO_FLAG: list[Any] = ["no", 2, 1.5, None, [], torch.ones(2), torch.tensor(True), np.ones(2), object()]
NO_LENGTHS = [*NO_TENSOR[3:10], 1.0, np.ones(2, dtype=np.int32), np.float32(1), True, -(2**31), 2**70, math.nan]
NO_WINDOW: list[Any] = [
    *(None, 3, "ab", 1.5, {}, (), (1,), (1, 0, 0), torch.tensor([3, 0]), np.array([3, 0]), range(2), {1: 2, 3: 4}),
    *((3.0, 0.0), (3, 0.0), ("3", 0), (3, "0"), ([3], 0), (3, [0]), (-2, 0), (0, -2), (2**70, 0), (math.inf, 0)),
    *((True, False), (torch.ones(2), 0), (0, np.ones(2)), (object(), 0), (None, -5), (-5, None)),
]
NO_LONGEST: list[Any] = [1.5, "3", [1], 2**70, -1, torch.ones(2), object()]
NO_ZERO: list[Any] = [0.1, 1, "0", -0.1, math.nan, torch.ones(2), np.ones(2), [0.0], object()]
VALUES: dict[str, list[Any]] = {
    "softmax_scale": ["x", [1.0], 1j, 0.0, 0, math.nan, math.inf, 1e300, torch.ones(2), np.ones(2), object()],
    "causal": NO_FLAG,
    "window_size": NO_WINDOW,
    "num_sink_tokens": [*NO_INTEGER, -1],
    "num_splits": NO_INTEGER,
    "invariant": ["no", None, [], 1.5, torch.ones(2)],
    "return_lse": ["both", "", "RAW", 2, 0.5, None, [], (), torch.ones(2), torch.tensor(True), np.ones(2), object()],
    "return_softmax_lse": ["both", 2, 0.5, [1], torch.ones(2), np.ones(2), object()],
    "max_seqlen_q": NO_LONGEST,
    "max_seqlen_k": NO_LONGEST,
    "dropout_p": NO_ZERO,
    "softcap": NO_ZERO,
    "alibi_slopes": [torch.ones(4), np.ones(4), [1.0] * 4, 1.0],
    "return_attn_probs": [True, 1, "yes", torch.ones(2), np.ones(2)],
    "rotary_cos": [torch.ones(4, 4), np.ones(4), 1.0],
    "rotary_sin": [torch.ones(4, 4), np.ones(4), 1.0],
    "cache_batch_idx": [torch.ones(2), np.ones(2), [1], 1],
    "cache_leftpad": [torch.ones(2), np.ones(2), [1], 1],
    "cache_seqlens": NO_LENGTHS,
    "learnable_sink": NO_TENSOR,
    "sinks": NO_TENSOR,
}
ALL = "softmax_scale causal window_size num_sink_tokens return_lse softcap alibi_slopes learnable_sink sinks"
TAKEN = {  # by these functions, of those in VALUES
    "dense": f"{ALL} dropout_p return_attn_probs",
    "packed": f"{ALL} dropout_p return_attn_probs max_seqlen_q max_seqlen_k",
    "cache": f"{ALL} num_splits invariant return_softmax_lse rotary_cos rotary_sin cache_batch_idx cache_leftpad"
    " cache_seqlens",
    "varlen cache": f"{ALL} dropout_p return_attn_probs max_seqlen_q max_seqlen_k",
    "append": "cache_seqlens",
}


def other_kinds(x: Tensor) -> list[Tensor]:
    """The tensor with another dtype, layout, device or rank."""
    dtypes = (torch.bool, torch.complex64, torch.float8_e4m3fn, torch.uint8, torch.int64)
    return [*(x.to(dtype) for dtype in dtypes), x.to_sparse(), x.to("meta"), x[None], x[0], x[..., None]]


def other_sizes(x: Tensor) -> list[Tensor]:
    return [x[..., :0], torch.cat([x, x], -1), torch.empty(0, dtype=x.dtype)]


def malformed(kind: str) -> list[tuple[str, Any]]:
    _, make = CALLS[kind]
    found: list[tuple[str, Any]] = []
    for name, value in make().items():
        if not isinstance(value, Tensor):
            continue
        value = value.detach()
        found += [(name, x) for x in (NO_LENGTHS if name == "cache_seqlens" else NO_TENSOR)]
        found += [(name, x) for x in other_kinds(value)]
        if name not in ("block_table", "out"):  # these may have any last dimension
            found += [(name, x) for x in other_sizes(value)]
        if name not in ("s_aux", "cache_seqlens", "block_table") or kind == "sink":
            found.append((name, None))
    return found + [(name, value) for name in TAKEN.get(kind, "").split() for value in VALUES[name]]


def complaint(kind: str, name: str, value: Any) -> str | None:
    function, make = CALLS[kind]
    call = make()
    if name in ("learnable_sink", "sinks"):
        del call["s_aux"]
    try:
        function(**call | {name: value})
    except (ValueError, TypeError, NotImplementedError) as error:
        text = str(error)
        named = name in text or (name in ("out_a", "out_b") and "out" in text) or (name[:4] == "lse_" and "lse" in text)
        return (
            None if text.startswith("sinkattn: ") and named and "\n" not in text else f"{type(error).__name__}: {text}"
        )
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


@pytest.mark.parametrize("kind", CALLS)
def test_malformed_calls_are_refused_by_name(kind: str) -> None:
    calls = malformed(kind)
    assert len(calls) > 60
    wrong = [
        f"{name}={value!r:.60}: {said:.200}"
        for name, value in calls
        if (said := complaint(kind, name, value)) is not None
    ]
    assert wrong == []
