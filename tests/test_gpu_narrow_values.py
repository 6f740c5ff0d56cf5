# SPDX-License-Identifier: Apache-2.0
"""Values narrower than keys on a CUDA device. Random ones: test_gpu_fwd.py and test_gpu_decode.py."""

from typing import Any

import pytest
import torch
from gpu_caches import LENS, arguments, assert_same, decode_op, make_cache
from gpu_cases import assert_right_on_device
from gpus import launched, needs_gpus
from test_narrow_values import CACHES
from torch import Tensor
from torch.nn.functional import pad

import sinkattn
from sinkattn import _C
from sinkattn._testing import Case
from sinkattn.hf_decode import decode, read_keys
from sinkattn.hf_masks import COLUMNS

pytestmark = needs_gpus()

WIDTHS = ("192-v128", "256-v8", "256-v200", "128-v64", "64-v16", "72-v64", "16-v8")
MASKS = ("causal-w128-g8-q300x2-k300x2", "causal-w33-sink3-g4-h2-varlen-q1.70.0.130-k7.90.5.131-tail3", "g2-q90-k40")


@pytest.mark.parametrize("widths", WIDTHS)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_forward_and_backward(widths: str, mask: str, dtype: str) -> None:
    assert_right_on_device(Case.parse(f"d{widths}-{mask}-{dtype}-seed1"))


CACHE_MASKS = ("causal-g16-h4-paged16-q1x3-k700.37.300", "causal-w33-sink3-g4-h2-cache-q3x2-k290.40-splits2")


@pytest.mark.parametrize("widths", [*WIDTHS, "128-v120", "192-v136", "384-v200"])
@pytest.mark.parametrize("mask", CACHE_MASKS)
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_decode(widths: str, mask: str, dtype: str) -> None:
    assert_right_on_device(Case.parse(f"d{widths}-{mask}-poison-{dtype}-seed1"))


@pytest.mark.parametrize("widths", ["192-v128", "192-v40", "256-v40"])
@pytest.mark.parametrize("layout", ["cache", "paged3", "paged16", "paged64-shared"])
def test_decode_reads_no_values_past_their_end(widths: str, layout: str) -> None:
    """NaN lies behind the columns of V, in keys that nobody sees and in pages that nobody has."""
    name = f"d{widths}-causal-w150-sink2-g8-h2-{layout}-q2x3-k90.301.0-tail5-sliced-poison-bf16-seed1"
    assert_right_on_device(Case.parse(name))


@pytest.mark.parametrize("poison", ["poison", "sliced-poison"])
def test_rows_are_not_read_past_their_end(poison: str) -> None:
    """NaN lies behind the rows of V, and in keys that nobody sees."""
    assert_right_on_device(Case.parse(f"d192-v128-causal-w40-g4-h2-q100x2-k300x2-{poison}-bf16-seed1"))


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def variant(op: str, head_dim: int, head_dim_v: int) -> str:
    sizes = {"num_q_heads": 8, "num_kv_heads": 2, "q_len": 300, "k_len": 400, "window_size_right": 0}
    device = _C.query_cuda(0)
    plan = sinkattn.plan(op, device, dtype="bf16", batch=2, head_dim=head_dim, head_dim_v=head_dim_v, **sizes)
    return str(plan["variant"])


@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
def test_zeros_behind_the_values_change_nothing(head_dim: int) -> None:
    """Where the same kernel serves both, they have the same bits: the forwards, and the gradients where both do."""
    torch.manual_seed(0)
    same_forward, same_backward = (variant(op, head_dim, 40) == variant(op, head_dim, 0) for op in ("fwd", "bwd"))
    q, k, v = drawn(2, 300, 8, head_dim), drawn(2, 400, 2, head_dim), drawn(2, 400, 2, 40)
    s_aux, dout = torch.randn(8, device="cuda"), drawn(2, 300, 8, 40)
    results = []
    for values, seed in ((v, dout), (pad(v, (0, head_dim - 40)), pad(dout, (0, head_dim - 40)))):
        leaves = [x.detach().clone().requires_grad_() for x in (q, k, values, s_aux)]
        out, lse = sinkattn.flash_attn_func(*leaves[:3], causal=True, s_aux=leaves[3], return_lse=True)
        grads = torch.autograd.grad((out, lse), leaves, (seed, torch.ones_like(lse)))
        results.append((out[..., :40], lse, grads[0], grads[1], grads[2][..., :40], grads[3]))
    for i, (narrow, wide) in enumerate(zip(*results, strict=True)):
        if same_forward and (i < 2 or same_backward):
            assert torch.equal(narrow, wide)
        torch.testing.assert_close(narrow, wide, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("page_size", [1, 8, 16])
@pytest.mark.parametrize("widths", [(192, 128), (128, 40), (72, 24), (64, 40)])
def test_packed_rows_over_a_cache(widths: tuple[int, int], page_size: int) -> None:
    torch.manual_seed(0)
    rows = drawn(40, 8, widths[0])
    k, v = (drawn(144 // page_size, page_size, 2, width) for width in widths)
    cu = torch.tensor([0, 30, 40], dtype=torch.int32, device="cuda")
    used = torch.tensor([50, 33], dtype=torch.int32, device="cuda")
    table = torch.randperm(len(k), device="cuda").int()[: 128 // page_size].view(2, -1)
    options: dict[str, Any] = {"causal": True, "s_aux": torch.randn(8, device="cuda")}
    out = sinkattn.flash_attn_varlen_func(rows, k, v, cu, seqused_k=used, block_table=table, **options)
    for b in range(2):
        keys, values = (x[table[b].long()].flatten(0, 1)[None, : used[b]] for x in (k, v))
        alone = sinkattn.flash_attn_func(rows[None, cu[b] : cu[b + 1]], keys, values, **options)
        assert torch.equal(out[cu[b] : cu[b + 1]], alone[0])


@pytest.mark.parametrize("layout", CACHES)
def test_new_keys_and_values(layout: str) -> None:
    k, v = (torch.randn(3, 2, n, device="cuda") for n in (24, 16))
    for slots in (True, False):
        with torch.device("cuda"):
            k_cache, v_cache = CACHES[layout]()
        if slots:
            torch.ops.sinkattn.append_kv_slots(k_cache, v_cache, k, v, torch.tensor([19, -1, 6], device="cuda"))
            to, written = [19, 6], [0, 2]
        else:
            used, table = (torch.tensor(x, dtype=torch.int32, device="cuda") for x in ([3], [[4, 1]]))
            after = torch.ops.sinkattn.append_kv(k_cache, v_cache, k[None], v[None], used, table)
            assert after.tolist() == [6]
            to, written = [19, 4, 5], [0, 1, 2]
        for cache, new in ((k_cache, k), (v_cache, v)):
            want = torch.zeros(20, *new.shape[1:], device="cuda")
            want[to] = new[written]
            assert torch.equal(cache.reshape(want.shape), want)


@pytest.mark.parametrize("num_splits", [0, 3])
@pytest.mark.parametrize("widths", [(256, 40), (256, 200), (512, 264)])
def test_a_decode_with_zeros_behind_the_values_has_the_same_bits(widths: tuple[int, int], num_splits: int) -> None:
    head_dim, head_dim_v = widths
    t = make_cache(LENS, 64, capacity=2048, kv_heads=2, head_dim=head_dim, head_dim_v=head_dim_v)
    assert t["v"] is not None
    out, lse = decode_op(*arguments(t, num_splits=num_splits))
    t["v"] = pad(t["v"], (0, head_dim - head_dim_v))
    wide, its_lse = decode_op(*arguments(t, num_splits=num_splits))
    assert_same((out, lse), (wide[..., :head_dim_v], its_lse))


@pytest.mark.parametrize("arch", ["80", ""])
@pytest.mark.parametrize("window", [(-1, 0), (30, 0)])
def test_one_token_with_the_bits_of_a_prefill(
    window: tuple[int, int], arch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The forward over the cache serves it, since no decode has narrow values with invariant."""
    if arch:
        monkeypatch.setenv("SINKATTN_CUDA_ARCH", arch)
    torch.manual_seed(0)
    q, k, v = drawn(2, 1, 8, 192), drawn(2, 2, 300, 192).transpose(1, 2), drawn(2, 2, 300, 128).transpose(1, 2)
    options: dict[str, Any] = {"s_aux": torch.randn(8, device="cuda"), "window_size": window}
    want = sinkattn.flash_attn_func(q, k, v, causal=True, **options)
    assert torch.equal(decode(q, k, v, None, invariant=True, **options), want)
    columns = torch.arange(300, dtype=torch.int32, device="cuda").expand(2, -1).clone()
    assert torch.equal(decode(q, k, v, read_keys(columns.view(COLUMNS)), invariant=True, **options), want)


def test_one_token_of_a_model() -> None:
    """What sinkattn.hf does there: one launch over the cache as it is."""
    torch.manual_seed(0)
    q, k, v = drawn(2, 1, 8, 192), drawn(2, 2, 50, 192).transpose(1, 2), drawn(2, 2, 50, 128).transpose(1, 2)
    options: dict[str, Any] = {"s_aux": torch.randn(8, device="cuda"), "window_size": (30, 0)}
    out = decode(q, k, v, None, **options)
    on_gpu = launched(lambda: decode(q, k, v, None, **options))
    assert len(on_gpu) == 1, on_gpu
    torch.testing.assert_close(out, sinkattn.flash_attn_func(q, k, v, **options), rtol=2e-2, atol=2e-2)
