# SPDX-License-Identifier: Apache-2.0
"""One latent for all heads: keys of 576 columns whose first 512 are the values; every level's are in test_decode.py."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from arguments import ops
from torch import Tensor
from torch.profiler import profile

import sinkattn
from sinkattn import reference

TABLE = torch.tensor([[5, 0, 3], [2, 4, 1]], dtype=torch.int32)
USED = torch.tensor([19, 33], dtype=torch.int32)
OPTIONS: dict[str, Any] = {"cache_seqlens": USED, "block_table": TABLE, "causal": True, "return_lse": True}


def latents(
    heads: int = 6, dtype: torch.dtype = torch.float32, q_len: int = 2, widths: tuple[int, int] = (576, 512)
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, pages of 16 slots, the view of them that is v_cache, s_aux."""
    generator = torch.Generator().manual_seed(7)
    q = torch.randn(2, q_len, heads, widths[0], generator=generator).to(dtype)
    pages = torch.randn(6, 16, 1, widths[0], generator=generator).to(dtype)
    return q, pages, pages[..., : widths[1]], torch.randn(heads, generator=generator)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_values_are_read_where_they_lie(dtype: torch.dtype) -> None:
    q, k, v, s_aux = latents(128, dtype)
    with profile() as traced:
        got = sinkattn.flash_attn_with_kvcache(q, k, v, s_aux=s_aux, **OPTIONS)
    events = {event.name for event in traced.events()}
    assert "sinkattn::flash_decode" in events
    assert not events & {"aten::clone", "aten::contiguous", "aten::copy_"}
    copied = sinkattn.flash_attn_with_kvcache(q, k, v.contiguous(), s_aux=s_aux, **OPTIONS)
    assert all(map(torch.equal, got, copied))
    want = reference.flash_attn_with_kvcache(q, k, v, s_aux=s_aux, **OPTIONS)
    torch.testing.assert_close(got, want, rtol=0.01, atol=0.01)


def test_packed_rows_are_the_decodes(level: str) -> None:
    q, k, v, s_aux = latents(dtype=torch.bfloat16, q_len=5)
    options: dict[str, Any] = {"s_aux": s_aux, "causal": True, "return_lse": True, "window_size": (20, 0)}
    want, lse = sinkattn.flash_attn_with_kvcache(q, k, v, **OPTIONS | options)
    rows, cu = torch.cat([q[0, 4:], q[1]]), torch.tensor([0, 1, 6], dtype=torch.int32)
    packed, stats = sinkattn.flash_attn_varlen_func(rows, k, v, cu, seqused_k=USED, block_table=TABLE, **options)
    assert torch.equal(packed, torch.cat([want[0, 4:], want[1]]))
    assert torch.equal(stats, torch.cat([lse[0, :, 4:], lse[1]], 1))


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("first", [0, 64])
def test_a_new_latent_is_written_once(paged: bool, first: int) -> None:
    q, k, _, s_aux = latents()
    new, cache = torch.randn(2, 2, 1, 576), k if paged else k.reshape(2, 48, 1, 576)
    options = OPTIONS | {"s_aux": s_aux, "block_table": TABLE if paged else None, "cache_seqlens": USED - 2}
    results = []
    for functions in (sinkattn, reference):
        keys = cache.clone()
        got = functions.flash_attn_with_kvcache(q, keys, keys[..., first : first + 512], new, **options)
        results.append((*got, keys))
    torch.testing.assert_close(*results)
    assert (results[0][2] != cache).any(-1).sum() == 4


@pytest.mark.parametrize("offset", [0, 1])
def test_latents_go_to_slots(offset: int) -> None:
    """Also in memory that is not aligned, which is copied there and back."""
    k = torch.zeros(6 * 16 * 576 + offset)[offset:].view(6, 16, 1, 576)
    want, rows, slots = torch.zeros(96, 1, 576), torch.randn(5, 1, 576), torch.tensor([3, -1, 95, 40])
    ops.append_kv_slots(k, k[..., :512], rows, None, slots)
    want[[3, 95, 40]] = rows[[0, 2, 3]]
    assert torch.equal(k.flatten(0, 1), want)


def test_compiled_steps_read_the_latent_that_they_write() -> None:
    torch.compiler.reset()
    q, k, _, s_aux = latents(q_len=1)
    new = torch.randn(2, 1, 1, 576)

    def step(cache: Tensor, used: Tensor) -> Any:
        options = OPTIONS | {"cache_seqlens": used, "s_aux": s_aux}
        return sinkattn.flash_attn_with_kvcache(q, cache, cache[..., :512], new, **options)

    mine, theirs = k.clone(), k.clone()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    assert all(map(torch.equal, compiled(mine, USED), step(theirs, USED)))
    assert torch.equal(mine, theirs)
    assert not torch.equal(mine, k)


def decoded(*widths: int) -> object:
    q, k, v, _ = latents(widths=widths)
    return ops.flash_decode(q, k, v, None, USED, TABLE)


def appended(view: Callable[[Tensor], Tensor], v: Tensor | None = None, own: bool = True) -> object:
    pages = torch.zeros(7, 16, 1, 576)[:6]
    return ops.append_kv(pages, view(pages), pages[:2, :1] + 0 if own else pages[:2, :1], v, USED, TABLE)


COLUMNS = "v is None, and v_cache is not a slice of k_cache's columns; give the new values, or k_cache"
REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "values of 576": (lambda: decoded(576, 576), "head_dim_v is 576; it must be at most 512, whatever head_dim is"),
    "keys of 584": (lambda: decoded(584, 512), "head_dim is 584; it must be a multiple of 8 from 8 to 576"),
    "values elsewhere": (lambda: appended(lambda k: k[..., :512].clone()), COLUMNS),
    "values a page on": (lambda: appended(lambda k: k.as_strided((6, 16, 1, 512), k.stride(), 9216)), COLUMNS),
    "values across slots": (lambda: appended(lambda k: k.as_strided((6, 16, 1, 512), k.stride(), 72)), COLUMNS),
    "values as well": (lambda: appended(lambda k: k[..., :512], torch.zeros(2, 1, 1, 512)),
                       "k_cache and v_cache overlap; .*, or v_cache is a slice of k_cache's columns and v None"),
    "keys in the cache": (lambda: appended(lambda k: k[..., :512], own=False), "k lies within k_cache"),
    "of the reference": (lambda: reference.flash_attn_with_kvcache(*latents()[:2], torch.zeros(6, 16, 1, 512),
                                                                   latents()[1][:2, :1], **OPTIONS),
                         "v is None; then v_cache must be a slice of k_cache's columns"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name: str) -> None:
    call, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        call()


def planned(arch: int, **sizes: Any) -> dict[str, Any]:
    gpu = {"backend": "cuda", "arch": arch, "workers": 132}
    sizes = {"num_pages": 16 * ("page_size" in sizes)} | sizes
    sizes = {"batch": 2, "num_q_heads": 128, "num_kv_heads": 1, "head_dim": 576, "head_dim_v": 512, "k_len": 64} | sizes
    return sinkattn.plan("decode", gpu, dtype="bf16", q_len=4, window_size_right=0, **sizes)


@pytest.mark.parametrize(("arch", "sizes"), [(80, {}), (80, {"packed": True}), (90, {"packed": True}),
                                             (90, {"invariant": True}), (90, {"page_size": 8})])  # fmt: skip
def test_a_gpu_refuses_it_when_it_is_planned(arch: int, sizes: dict[str, Any]) -> None:
    with pytest.raises(NotImplementedError, match=r"head_dim is 576; on CUDA it must be at most 512, or on 9"):
        planned(arch, **sizes)


@pytest.mark.parametrize("sizes", [{}, {"page_size": 16}, {"num_q_heads": 1}, {"k_len": 0}, {"num_splits": -3}])
def test_compute_capability_9_0_serves_it(sizes: dict[str, Any]) -> None:
    assert planned(90, **sizes)["variant"] == "sa_decode_cuda_sm90_rows_d576"
