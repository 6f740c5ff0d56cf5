# SPDX-License-Identifier: Apache-2.0
"""Values narrower than keys: out has their columns, and each surface of torch takes them.

The kernels' results at every level are in the case tables of test_fwd.py, test_bwd.py and test_decode.py.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from arguments import DENSE_ARGS, narrow, narrow_decode_args, ops, out_args, put_at
from test_func import loss
from torch import Tensor
from torch.nn.functional import pad

import sinkattn
from sinkattn import reference

OPTIONS: dict[str, Any] = {"causal": True, "window_size": (3, 0), "num_sink_tokens": 1, "return_lse": True}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_zeros_behind_the_values_change_nothing(level: str, dtype: torch.dtype) -> None:
    """So v may be given head_dim columns where a kernel wants them, and out cut."""
    generator = torch.Generator().manual_seed(1)
    q, k = (torch.randn(2, n, h, 72, generator=generator).to(dtype) for n, h in ((70, 4), (300, 2)))
    v, s_aux = torch.randn(2, 300, 2, 40, generator=generator).to(dtype), torch.randn(4, generator=generator)
    options = {"causal": True, "window_size": (150, 0), "s_aux": s_aux, "return_lse": True}
    out, lse = sinkattn.flash_attn_func(q, k, v, **options)
    wide_out, wide_lse = sinkattn.flash_attn_func(q, k, pad(v, (0, 32)), **options)
    assert out.shape == (2, 70, 4, 40)
    assert torch.equal(out, wide_out[..., :40])
    assert torch.equal(lse, wide_lse)


@pytest.mark.parametrize("return_lse", [True, "raw"])
@pytest.mark.parametrize("packing", [False, True])
def test_gradients_are_those_of_differences(packing: bool, return_lse: bool | str) -> None:
    q, k, v, s_aux = narrow(torch.float64)
    cu = torch.tensor([0, 2, 2, 4], dtype=torch.int32)

    def attend(*leaves: Tensor) -> Any:
        options = OPTIONS | {"s_aux": leaves[3], "return_lse": return_lse}
        if packing:
            return sinkattn.flash_attn_varlen_func(*leaves[:3], cu, cu + (cu > 0), 2, 3, **options)
        return sinkattn.flash_attn_func(*leaves[:3], **options)

    leaves = [x[0] if packing and x.ndim == 4 else x for x in (q, k, v, s_aux)]
    leaves = [x.detach().clone().requires_grad_() for x in leaves]
    if packing:
        leaves[0] = leaves[0].detach()[:4].requires_grad_()
    assert torch.autograd.gradcheck(attend, leaves)


def test_packed_rows_past_the_last_sequence_are_zero() -> None:
    q, k, v, s_aux = (x[0] if x.ndim == 4 else x for x in narrow())
    cu = torch.tensor([0, 2, 3], dtype=torch.int32)
    options: dict[str, Any] = {"s_aux": s_aux, "return_lse": True, "causal": True}
    got = sinkattn.flash_attn_varlen_func(q, k, v, cu, cu, **options)
    torch.testing.assert_close(got, reference.flash_attn_varlen_func(q, k, v, cu, cu, **options))
    assert got[0].shape == (5, 4, 16)
    assert not got[0][3:].any()


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_vmap_of_grad() -> None:
    q, k, v, s_aux = narrow(torch.float64)
    samples = [torch.stack([x, x / 2]) for x in (q, k, v)]
    got = torch.func.vmap(torch.func.grad(loss(sinkattn), (0, 2)), (0, 0, 0, None))(*samples, s_aux)
    for i in range(2):
        want = torch.func.grad(loss(reference), (0, 2))(*(x[i] for x in samples), s_aux)
        torch.testing.assert_close([x[i] for x in got], list(want))


def test_compile_forward_and_backward_with_dynamic_shapes() -> None:
    torch.compiler.reset()
    compiled = torch.compile(loss(sinkattn), fullgraph=True, dynamic=True, backend="aot_eager")
    for length in (7, 6):
        q, k, v, s_aux = narrow(grad=True)
        leaves = (q, k[:, :length], v[:, :length], s_aux)
        got, want = (torch.autograd.grad(f(*leaves), (q, k, v, s_aux)) for f in (compiled, loss(sinkattn)))
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("latent", [False, True])
def test_decode_into_given_tensors_and_in_nvfp4(latent: bool) -> None:
    """latent, here and below: values are the first columns of the keys."""
    call = narrow_decode_args()
    call = (*call[:2], call[1][..., :16] if latent else call[2], *call[3:])
    want = ops.flash_decode(*call)
    torch.testing.assert_close(
        want[0],
        reference.flash_attn_with_kvcache(
            *call[:3], cache_seqlens=call[4], causal=True, window_size=(3, 0), s_aux=call[3], num_sink_tokens=1
        ),
    )
    given = list(out_args(call))
    given[11] = torch.empty(2, 2, 4, 16)
    ops.flash_decode_out(*given)
    assert torch.equal(given[11], want[0])
    assert torch.equal(given[12], want[1])
    out, _, values, scales = ops.flash_decode_nvfp4(*call, 3.0)
    codes, code_scales = reference.quantize_nvfp4(out, 3.0)
    assert torch.equal(values, codes)
    assert torch.equal(scales.view(torch.uint8), code_scales.view(torch.uint8))


def test_packed_rows_over_a_cache() -> None:
    q, k, v, s_aux = narrow()
    rows, cu = q.flatten(0, 1)[:6], torch.tensor([0, 2, 5], dtype=torch.int32)
    used = torch.tensor([5, 7], dtype=torch.int32)
    options: dict[str, Any] = {"seqused_k": used, "causal": True, "s_aux": s_aux, "return_lse": True}
    got = sinkattn.flash_attn_varlen_func(rows, k, v, cu, **options)
    torch.testing.assert_close(got, reference.flash_attn_varlen_func(rows, k, v, cu, **options))
    assert got[0].shape == (6, 4, 16)


@pytest.mark.parametrize("latent", [False, True])
def test_pages_in_two_tiers(latent: bool) -> None:
    q, k, v, s_aux = narrow()
    pages = [torch.cat([x[:, :6], x[:, :2]], 1).reshape(8, 2, *x.shape[2:]) for x in (k, v)]
    pages = [pages[0], pages[0][..., :16]] if latent else pages
    table = torch.tensor([[7, 0, 5], [1, 6, 2]], dtype=torch.int32)
    used = torch.tensor([5, 6], dtype=torch.int32)
    options: dict[str, Any] = {"cache_seqlens": used, "block_table": table, "causal": True, "s_aux": s_aux}
    want = sinkattn.flash_attn_with_kvcache(q[:, :1], *pages, **options)
    tiers = [x.split((5, 3)) for x in pages]
    hosts = {"k_cache_host": tiers[0][1], "v_cache_host": tiers[1][1]}
    assert torch.equal(sinkattn.flash_attn_with_kvcache(q[:, :1], tiers[0][0], tiers[1][0], **options, **hosts), want)


CACHES: dict[str, Callable[[], tuple[Tensor, ...]]] = {  # 5 pages of 4 slots, 2 heads, keys of 24 and values of 16
    "apart": lambda: (torch.zeros(5, 4, 2, 24), torch.zeros(5, 4, 2, 16)),
    "one row": lambda: torch.zeros(5, 4, 2, 40).split((24, 16), -1),
    "one row, values first": lambda: torch.zeros(5, 4, 2, 40).split((16, 24), -1)[::-1],
    "one row, heads first": lambda: torch.zeros(5, 2, 4, 40).transpose(1, 2).split((24, 16), -1),
    "a page of each": lambda: ((both := torch.zeros(5, 2, 4, 2, 24))[:, 0], both[:, 1, ..., :16]),
}


@pytest.mark.parametrize("layout", CACHES)
def test_new_keys_and_values_go_to_their_slots(layout: str) -> None:
    k, v = torch.randn(3, 2, 24), torch.randn(3, 2, 16)
    slots = torch.tensor([19, -1, 6])
    k_cache, v_cache = CACHES[layout]()
    ops.append_kv_slots(k_cache, v_cache, k, v, slots)
    for cache, rows in ((k_cache, k), (v_cache, v)):
        want = torch.zeros(20, *rows.shape[1:])
        want[[19, 6]] = rows[[0, 2]]
        assert torch.equal(cache.reshape(want.shape), want)
    k_cache, v_cache = CACHES[layout]()
    used, table = torch.tensor([3], dtype=torch.int32), torch.tensor([[4, 1]], dtype=torch.int32)
    assert ops.append_kv(k_cache, v_cache, k[None], v[None], used, table).tolist() == [6]
    for cache, rows in ((k_cache, k), (v_cache, v)):
        want = torch.zeros(20, *rows.shape[1:])
        want[[19, 4, 5]] = rows
        assert torch.equal(cache.reshape(want.shape), want)


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "wider": (lambda: ops.flash_attn_fwd(*put_at([*narrow(), *DENSE_ARGS], 1, lambda x: x[..., :8])), "k has head_dim"),
    "wider than keys": (
        lambda: ops.flash_attn_fwd(*(torch.zeros(1, 3, 2, n) for n in (16, 16, 24))),
        "v has head_dim 24, k has 16; v's must be a multiple of 8 from 8 to k's",
    ),
    "no columns": (
        lambda: ops.flash_attn_fwd(*(torch.zeros(1, 3, 2, n) for n in (16, 16, 0))),
        "v has head_dim 0, k has 16; v's must be",
    ),
    "no multiple of 8": (
        lambda: ops.flash_attn_fwd(*(torch.zeros(1, 3, 2, n) for n in (16, 16, 12))),
        "head_dim_v is 12; it must be a multiple of 8 from 8 to head_dim, 16",
    ),
    "a cache's": (
        lambda: ops.flash_decode(*(torch.zeros(1, 3, 2, n) for n in (16, 16, 24))),
        "v_cache has head_dim 24, k_cache has 16",
    ),
    "out of q's columns": (
        lambda: ops.flash_decode_out(*out_args(narrow_decode_args())),
        r"out has shape \[2, 2, 4, 24\], it must be \[2, 2, 4, 16\]",
    ),
    "dout of q's columns": (
        lambda: ops.flash_attn_bwd(torch.zeros(2, 5, 4, 24), None, *narrow()[:3], *ops.flash_attn_fwd(*narrow()[:3])),
        r"dout has shape \[2, 5, 4, 24\], it must be \[2, 5, 4, 16\]",
    ),
    "new values as wide as keys": (
        lambda: ops.append_kv_slots(*CACHES["apart"](), *torch.zeros(2, 1, 2, 24), torch.tensor([0])),
        "v has head_dim 24, v_cache has 16",
    ),
    "NVFP4 of half a block": (
        lambda: ops.flash_decode_nvfp4(*put_at(narrow_decode_args(), 2, lambda x: x[..., :8].contiguous())),
        "head_dim_v is 8; it must be a multiple of 16 for NVFP4",
    ),
    "plan": (
        lambda: sinkattn.plan(
            "fwd", dtype="bf16", batch=1, num_q_heads=2, num_kv_heads=1, head_dim=64, head_dim_v=2**31, q_len=9, k_len=9
        ),
        "head_dim_v is 2147483648; it must fit 32 bits",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    make, text = REFUSED[name]
    with pytest.raises(ValueError, match=text):
        make()
