# SPDX-License-Identifier: Apache-2.0
"""Whatever is wrong or unsupported raises, with the argument, the value got and the way out."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from arguments import FORWARDS, backward_args, cache, decode_args, dense, ops, out_args, packed, partials, put_at
from torch import Tensor

import sinkattn
from sinkattn import reference


def test_names_of_the_sink() -> None:
    q, k, v, s_aux = dense()
    want = sinkattn.flash_attn_func(q, k, v, s_aux=s_aux)
    assert torch.equal(sinkattn.flash_attn_func(q, k, v, learnable_sink=s_aux), want)
    assert torch.equal(sinkattn.flash_attn_func(q, k, v, sinks=s_aux), want)
    with pytest.raises(TypeError, match="s_aux and sinks were given, they are names of one argument"):
        sinkattn.flash_attn_func(q, k, v, s_aux=s_aux, sinks=s_aux)


def backward(position: int, change: Callable[[Tensor], Any]) -> object:
    return ops.flash_attn_bwd(*put_at(backward_args(FORWARDS["dense"](False)), position, change))


def decode(position: int, change: Callable[[Tensor], Any]) -> object:
    return ops.flash_decode(*put_at(decode_args(), position, change))


def decode_paged(position: int, change: Callable[[Tensor], Any]) -> object:
    return ops.flash_decode(*put_at(decode_args(paged=True), position, change))


def decode_out(position: int, change: Callable[[Tensor], Any]) -> object:
    return ops.flash_decode_out(*put_at(out_args(decode_args()), position, change))


def decode_into(position: int, other: int) -> None:
    """flash_decode_out with an output that begins where another argument does."""
    arguments = out_args(decode_args(), 64)
    memory = arguments[other].view(arguments[position].dtype).flatten()
    ops.flash_decode_out(*put_at(arguments, position, lambda x: memory[: x.numel()].view(x.shape)))


SLOPES = torch.ones(4)
UNSUPPORTED = {
    "dropout_p": (0.1, "dropout_p is 0.1; it must be 0.0: set"),
    "softcap": (30.0, "softcap is 30.0; it must be 0.0"),
    "alibi_slopes": (SLOPES, r"alibi_slopes is a tensor of shape \[4\]; it must be None"),
    "return_attn_probs": (True, "return_attn_probs is True; it must be False: return_lse=True"),
}
CACHE_UNSUPPORTED = {
    "softcap": (30.0, "softcap is 30.0; it must be 0.0"),
    "alibi_slopes": (SLOPES, "alibi_slopes is a tensor"),
    "rotary_cos": (SLOPES, "rotary_cos is a tensor .* rotate q and k before the call"),
    "rotary_sin": (SLOPES, "rotary_sin is a tensor .* rotate q and k before the call"),
    "cache_leftpad": (SLOPES, "cache_leftpad is a tensor .* start at slot 0"),
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_unsupported_arguments(name: str) -> None:
    value, message = UNSUPPORTED[name]
    q, k, v, _ = dense()
    with pytest.raises(NotImplementedError, match=message):
        sinkattn.flash_attn_func(q, k, v, **{name: value})
    q, k, v, _, cu_q, cu_k = packed()
    with pytest.raises(NotImplementedError, match=message):
        sinkattn.flash_attn_varlen_func(q, k, v, cu_q, cu_k, **{name: value})


@pytest.mark.parametrize("name", CACHE_UNSUPPORTED)
def test_unsupported_arguments_of_the_cache(name: str) -> None:
    value, message = CACHE_UNSUPPORTED[name]
    q, k, v, _, lens = cache()
    with pytest.raises(NotImplementedError, match=message):
        sinkattn.flash_attn_with_kvcache(q, k, v, cache_seqlens=lens, causal=True, **{name: value})


def test_rows_of_a_cache_are_causal() -> None:
    q, k, v, _, lens = cache()
    with pytest.raises(NotImplementedError, match="2 rows with causal=False"):
        sinkattn.flash_attn_with_kvcache(q, k, v, cache_seqlens=lens)
    with pytest.raises(ValueError, match="without cache_seqlens"):
        sinkattn.flash_attn_with_kvcache(q, k, v, k, v, causal=True)
    with pytest.raises(ValueError, match="v is given without k; they go together"):
        sinkattn.flash_attn_with_kvcache(q, k, v, None, v, cache_seqlens=lens, causal=True)


def test_a_cache_and_one_number() -> None:
    q, k, v, _, lens = cache()
    for rows in (q[0], q[0, 0], q[0, 0, 0, 0]):
        with pytest.raises(ValueError, match=rf"q has {rows.ndim} dimensions, it must be \[batch, len"):
            sinkattn.flash_attn_with_kvcache(rows, k, v, cache_seqlens=lens)
        with pytest.raises(ValueError, match=f"q has {rows.ndim} dimensions"):
            sinkattn.flash_attn_with_kvcache(rows, k, v, cache_seqlens=5)
    for number in (-(2**31), 2**31, 2**70):
        with pytest.raises(ValueError, match=f"cache_seqlens is {number}; it must be from 0 to the capacity"):
            sinkattn.flash_attn_with_kvcache(q, k, v, cache_seqlens=number, causal=True)
    with pytest.raises(ValueError, match=r"cache_seqlens\[0\] is 9; it must be from 0 to 8"):
        sinkattn.flash_attn_with_kvcache(q, k, v, cache_seqlens=9, causal=True)


def test_numbers_of_numpy_are_numbers() -> None:
    q, k, v, s_aux, _ = cache()
    want = sinkattn.flash_attn_with_kvcache(
        q, k, v, cache_seqlens=5, causal=True, window_size=(3, 0), s_aux=s_aux, num_sink_tokens=1, softmax_scale=0.5
    )
    for integer in (np.int32, np.int64, np.uint8, np.array):
        got = sinkattn.flash_attn_with_kvcache(
            q, k, v, cache_seqlens=integer(5), causal=np.True_, window_size=(integer(3), integer(0)), s_aux=s_aux,
            num_sink_tokens=np.int64(1), softmax_scale=np.float32(0.5),
        )  # fmt: skip
        assert torch.equal(got, want)


@pytest.mark.parametrize("right", [None, -1, 0, 1, 4, 100])
def test_causal_makes_the_right_side_0(right: int | None) -> None:
    """As in flash-attention, whose callers, transformers among them, pass (w - 1, w - 1) with causal=True."""
    q, k, v, s_aux, cu_q, cu_k = packed()
    results = [
        sinkattn.flash_attn_varlen_func(q, k, v, cu_q, cu_k, causal=causal, window_size=(2, side), s_aux=s_aux)
        for causal, side in ((True, right), (False, 0), (False, 4))
    ]
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])
    q, k, v, s_aux = dense()
    for function in (sinkattn.flash_attn_func, reference.flash_attn_func):
        got, want = (
            function(q, k, v, causal=causal, window_size=(2, side), s_aux=s_aux)
            for causal, side in ((True, right), (False, 0))
        )
        assert torch.equal(got, want)
    q, k, v, s_aux, lens = cache()
    decoded = [
        sinkattn.flash_attn_with_kvcache(q, k, v, cache_seqlens=lens, causal=causal, window_size=(2, side), s_aux=s_aux)
        for causal, side in ((True, right), (False, 0))
    ]
    assert torch.equal(*decoded)


@pytest.mark.parametrize("lse", [True, False, "raw"])
def test_what_return_lse_returns(lse: bool | str) -> None:
    q, k, v, s_aux, _ = cache()
    calls = [
        sinkattn.flash_attn_func(q, k, v, causal=True, s_aux=s_aux, return_lse=lse),
        sinkattn.flash_attn_with_kvcache(q, k, v, cache_seqlens=8, causal=True, s_aux=s_aux, return_lse=lse),
        sinkattn.flash_attn_with_kvcache(
            q, k, v, causal=True, s_aux=s_aux, return_lse=lse, return_softmax_lse=bool(lse)
        ),
    ]
    want = reference.flash_attn_func(q, k, v, causal=True, s_aux=s_aux, return_lse=lse)
    for got in calls:
        assert type(got) is type(want)
        torch.testing.assert_close(got, want)
    by_the_other_name = sinkattn.flash_attn_with_kvcache(
        q, k, v, causal=True, s_aux=s_aux, return_softmax_lse=lse is not False
    )
    assert isinstance(by_the_other_name, tuple) == (lse is not False)


def attend(edit: Callable[[list[Any]], None], make: Callable[[], list[Tensor]] = dense, **options: Any) -> object:
    tensors: list[Any] = make()
    edit(tensors)
    if len(tensors) == 6:
        q, k, v, s_aux, cu_q, cu_k = tensors
        return sinkattn.flash_attn_varlen_func(q, k, v, cu_q, cu_k, s_aux=s_aux, **options)
    return sinkattn.flash_attn_func(*tensors[:3], s_aux=tensors[3], **options)


def put(position: int, change: Callable[[Tensor], object]) -> Callable[[list[Any]], None]:
    def edit(tensors: list[Any]) -> None:
        tensors[position] = change(tensors[position])

    return edit


def keep(tensors: list[Any]) -> None:
    return None


WRONG: dict[str, tuple[Callable[[], object], str]] = {
    "q rank": (lambda: attend(put(0, lambda x: x[0])), r"q has 3 dimensions, it must be \[batch, len"),
    "k rank": (lambda: attend(put(1, lambda x: x[0])), "k has 3 dimensions"),
    "v rank": (lambda: attend(put(2, lambda x: x[0])), "v has 3 dimensions"),
    "packed rank": (lambda: attend(put(0, lambda x: x[None]), packed), r"q has 4 dimensions, it must be \[tot"),
    "q dtype": (lambda: attend(put(0, lambda x: x.int())), "q is Int; bfloat16, float16"),
    "q None": (lambda: attend(put(0, lambda x: None)), "q is None, it must be a tensor"),
    "k None": (lambda: attend(put(1, lambda x: None)), "k is None, it must be a tensor"),
    "k dtype": (lambda: attend(put(1, lambda x: x.half())), "k is Half, it must be Float"),
    "v dtype": (lambda: attend(put(2, lambda x: x.half())), "v is Half, it must be Float"),
    "k device": (lambda: attend(put(1, lambda x: x.to("meta"))), "k is on meta, q is on cpu"),
    "s_aux device": (lambda: attend(put(3, lambda x: x.to("meta"))), "s_aux is on meta|s_aux is on cpu"),
    "batch": (lambda: attend(put(0, lambda x: x[:1])), "k has batch 2, q has 1"),
    "k head_dim": (lambda: attend(put(1, lambda x: x[..., :4])), "k has head_dim 4, q has 8"),
    "v shape": (
        lambda: attend(put(2, lambda x: x[:, :3])),
        r"k has shape \[2, 7, 2, 8\], v has shape \[2, 3, 2, 8\]; both must have one shape",
    ),
    "s_aux shape": (lambda: attend(put(3, lambda x: x[:3])), r"s_aux has shape \[3\], it must be \[4\]"),
    "s_aux rank": (lambda: attend(put(3, lambda x: x[None])), r"s_aux has shape \[1, 4\], it must be \[4\]"),
    "s_aux dtype": (lambda: attend(put(3, lambda x: x.long())), "s_aux is Long; it must be BFloat16, Half"),
    "s_aux fp64": (
        lambda: attend(put(3, lambda x: x.double())),
        r"s_aux is Double; it must be BFloat16, Half or Float when q is Float: s_aux.float\(\)",
    ),
    "k shape": (
        lambda: attend(put(1, lambda x: x[:, :3])),
        r"k has shape \[2, 3, 2, 8\], v has shape \[2, 7, 2, 8\]; both must have one shape",
    ),
    "scale 0": (lambda: attend(keep, softmax_scale=0.0), "softmax_scale is 0; leave it out"),
    "scale nan": (lambda: attend(keep, softmax_scale=math.nan), "softmax_scale is nan"),
    "left": (lambda: attend(keep, window_size=(-2, 0)), "window_size_left is -2"),
    "right": (lambda: attend(keep, window_size=(0, -7)), "window_size_right is -7"),
    "window": (lambda: attend(keep, window_size=128), r"window_size is 128; it must be \(left, right\)"),
    "sides": (lambda: attend(keep, window_size=(1, 0, 0)), r"window_size is \(1, 0, 0\); it must be"),
    "sink tokens": (lambda: attend(keep, num_sink_tokens=-1), "num_sink_tokens is -1"),
    "return_lse": (lambda: attend(keep, return_lse="both"), "return_lse is 'both'"),
    "cu dtype": (
        lambda: attend(put(4, lambda x: x.long()), packed),
        r"cu_seqlens_q is Long, it must be Int \(torch.int32\)",
    ),
    "cu shape": (
        lambda: attend(put(5, lambda x: x[:3]), packed),
        r"cu_seqlens_q has shape \[4\], cu_seqlens_k has shape \[3\]; both must have one shape",
    ),
    "cu empty": (lambda: attend(put(4, lambda x: x[:0]), packed), "cu_seqlens_q is empty"),
    "cu start": (lambda: attend(put(4, lambda x: x + 1), packed), r"cu_seqlens_q\[0\] is 1"),
    "cu order": (lambda: attend(put(4, lambda x: x.flip(0) - 5), packed), r"cu_seqlens_q\[0\]|cu_seqlens_q\[1\]"),
    "cu end": (lambda: attend(put(5, lambda x: x * 9), packed), r"cu_seqlens_k\[1\] is 36|cu_seqlens_k\[3\] is 72"),
    "one cu": (
        lambda: ops.flash_attn_fwd(*packed()[:5], None, None, None, None, -1, -1, 0),
        "go together, only cu_seqlens_q was given",
    ),
    "head ratio": (
        lambda: sinkattn.flash_attn_func(dense()[0][:, :, :3], *dense()[1:3]),
        "num_q_heads is 3; it must be a multiple of num_kv_heads",
    ),
    "head_dim": (
        lambda: sinkattn.flash_attn_func(*(x[..., :4] for x in dense()[:3])),
        "head_dim is 4; it must be a multiple of 8",
    ),
    "dout shape": (
        lambda: backward(0, lambda x: x[:, :2]),
        r"dout has shape \[2, 2, 4, 8\], it must be \[2, 5, 4, 8\]",
    ),
    "lse dtype": (lambda: backward(6, lambda x: x.double()), "lse is Double, it must be Float"),
    "dlse shape": (lambda: backward(1, lambda x: x[:1]), r"dlse has shape \[1, 4, 5\]"),
    "cache batch": (lambda: decode(0, lambda x: x[:1]), "k_cache has batch 2, q has 1"),
    "cache rank": (lambda: decode(1, lambda x: x[0]), "k_cache has 3 dimensions"),
    "cache shape": (lambda: decode(2, lambda x: x[:, :3]), "v_cache has shape"),
    "cache_seqlens dtype": (lambda: decode(4, lambda x: x.long()), "cache_seqlens is Long, it must be Int"),
    "cache_seqlens range": (lambda: decode(4, lambda x: x + 1), r"cache_seqlens\[1\] is 9; it must be from 0 to 8"),
    "block_table rank": (lambda: decode_paged(5, lambda x: x[0]), "block_table has 1 dimensions"),
    "page range": (
        lambda: decode_paged(5, lambda x: x + 1),
        r"block_table\[0\]\[0\] is 4; it must be a page from 0 to 3",
    ),
    "num_splits": (
        lambda: ops.flash_decode(*put_at(put_at(decode_args(), 9, lambda _: -1), 10, lambda _: True)),
        "num_splits is -1; it must be 0 or 1 when invariant is true",
    ),
    "out strides": (
        lambda: decode_out(11, lambda x: x.mT.contiguous().mT),
        "out must have contiguous, 16-byte aligned rows",
    ),
    "out lse strides": (lambda: decode_out(12, lambda x: x.mT.contiguous().mT), "lse must be contiguous"),
    "out is q": (lambda: decode_into(11, 0), "q and out overlap; out is written, so it must have memory of its own"),
    "out within k_cache": (lambda: decode_into(11, 1), "k_cache and out overlap; out is written"),
    "lse within out": (lambda: decode_into(12, 11), "out and lse overlap; lse is written"),
    "scratch within v_cache": (lambda: decode_into(13, 2), "v_cache and scratch overlap; scratch is written"),
    "pages without rows": (
        lambda: ops.flash_decode(
            *put_at(put_at(decode_args(paged=True), 1, lambda x: x[:, :0]), 2, lambda x: x[:, :0])
        ),
        "page_size is 0, num_pages is 4; pages must have 1 row or more",
    ),
    "scratch dtype": (lambda: decode_out(13, lambda x: x.float()), "scratch is Float, it must be Byte"),
    "merge shapes": (
        lambda: sinkattn.merge_attn_states(*partials()[:2], partials()[2][:1], partials()[3][:1]),
        "out_a has shape .* out_b",
    ),
    "merge lse": (lambda: sinkattn.merge_attn_states(*put_at(partials(), 1, lambda x: x.mT)), "does not belong to out"),
    "apply_sink shape": (lambda: sinkattn.apply_sink(*partials()[:2], torch.ones(3)), r"s_aux has shape \[3\]"),
    "cpu level": (lambda: at_level("fast"), "SINKATTN_CPU_LEVEL is fast; it must be oracle, scalar"),
}


def at_level(level: str) -> object:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SINKATTN_CPU_LEVEL", level)
        return attend(keep)


@pytest.mark.parametrize("name", WRONG)
def test_refusal(name: str) -> None:
    call, message = WRONG[name]
    with pytest.raises(ValueError, match=message):
        call()


def test_ranks_are_checked_while_tracing() -> None:
    q, k, v, _ = (x.to("meta") for x in dense())
    with pytest.raises(ValueError, match="q has 3 dimensions"):
        sinkattn.flash_attn_func(q[0], k, v)
