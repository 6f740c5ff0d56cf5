# SPDX-License-Identifier: Apache-2.0
"""Every edge of the contract by name, and one test for each known way of getting attention with sinks wrong."""

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

import sinkattn
from sinkattn import _C, reference
from sinkattn._testing import Case, assert_right, make_inputs, restride

NAN, INF = math.nan, math.inf
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def qkv(q_len: int = 40, k_len: int = 40, heads: int = 4, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """q, k, v of batch 2, two kv heads and head_dim 64, as leaves."""
    generator = torch.Generator().manual_seed(q_len * 1000 + k_len)
    shapes = ((2, q_len, heads, 64), (2, k_len, 2, 64), (2, k_len, 2, 64))
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]


def attend(leaves: list[Tensor], s_aux: Tensor | None = None, g: float | None = 1.0, **options: object) -> list[Tensor]:
    """out, lse, and the gradients of the leaves and s_aux for dO = 1 and dLSE = g."""
    inputs = leaves if s_aux is None else [*leaves, s_aux]
    out, lse = sinkattn.flash_attn_func(*leaves, s_aux=s_aux, return_lse=True, **options)
    outputs = [out] if g is None else [out, lse]
    seeds = [torch.ones_like(out)] if g is None else [torch.ones_like(out), torch.full_like(lse, g)]
    return [out, lse, *torch.autograd.grad(outputs, inputs, seeds)]


def same_bits(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def sinks(*values: float) -> Tensor:
    return torch.tensor(values).requires_grad_()


# The edges of the contract.


def test_row_without_keys_gives_zero_and_the_sink(level: str) -> None:
    leaves, s_aux = qkv(q_len=40, k_len=10), sinks(1.0, -2.0, 3.0, 50.0)
    out, lse, dq, _, _, ds_aux = attend(leaves, s_aux, causal=True)
    assert torch.equal(out[:, :30], torch.zeros_like(out[:, :30]))
    assert torch.equal(dq[:, :30], torch.zeros_like(dq[:, :30]))
    assert torch.equal(lse[:, :, :30], s_aux.detach()[None, :, None].expand(2, 4, 30))
    # Each of the 2 x 30 rows without keys adds g = 1.
    with_keys = attend([leaves[0][:, 30:].detach().requires_grad_(), *leaves[1:]], s_aux, causal=True)[5]
    torch.testing.assert_close(ds_aux, with_keys + 60, rtol=1e-5, atol=1e-4)


def test_row_without_keys_and_without_sink_has_lse_minus_inf(level: str) -> None:
    out, lse, dq, dk, dv = attend(qkv(q_len=40, k_len=10), causal=True)
    assert torch.equal(out[:, :30], torch.zeros_like(out[:, :30]))
    assert torch.equal(dq[:, :30], torch.zeros_like(dq[:, :30]))
    assert torch.equal(lse[:, :, :30], torch.full_like(lse[:, :, :30], -INF))
    assert all(torch.isfinite(x).all() for x in (lse[:, :, 30:], dk, dv))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", [{"causal": True}, {"causal": True, "window_size": (9, 0), "num_sink_tokens": 3}])
def test_sink_of_minus_inf_is_no_sink_bit_for_bit(level: str, dtype: torch.dtype, options: dict[str, object]) -> None:
    for lengths in ((40, 40), (150, 200), (40, 10)):
        leaves = qkv(*lengths, dtype=dtype)
        *with_sink, ds_aux = attend(leaves, sinks(*[-INF] * 4), **options)
        assert same_bits(with_sink, attend(leaves, **options))
        assert torch.equal(ds_aux, torch.zeros(4))


@pytest.mark.parametrize("dtype", DTYPES)
def test_sink_of_plus_inf_takes_everything(level: str, dtype: torch.dtype) -> None:
    out, lse, *grads, ds_aux = attend(qkv(dtype=dtype), sinks(*[INF] * 4), causal=True)
    assert all(torch.equal(x, torch.zeros_like(x)) for x in (out, *grads))
    assert torch.equal(lse, torch.full_like(lse, INF))
    assert torch.equal(ds_aux, torch.full((4,), 80.0))


@pytest.mark.parametrize("s", [100.0, 1e4])
@pytest.mark.parametrize("dtype", DTYPES)
def test_sink_far_above_the_scores_keeps_lse_finite(level: str, dtype: torch.dtype, s: float) -> None:
    out, lse, *grads = attend(qkv(dtype=dtype), sinks(*[s] * 4), causal=True)
    assert torch.equal(lse, torch.full_like(lse, s))
    assert all(torch.isfinite(x).all() for x in (out, *grads))
    assert out.float().abs().max() < 1e-30
    torch.testing.assert_close(grads[3], torch.full((4,), 80.0))


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_sink_reaches_its_head_only(level: str, dtype: torch.dtype) -> None:
    out, lse, dq, dk, dv, ds_aux = attend(qkv(dtype=dtype), sinks(1.0, NAN, 2.0, 3.0), causal=True)
    head = torch.tensor([False, True, False, False])
    assert torch.equal(out.isnan(), head[:, None].expand_as(out))
    assert torch.equal(dq.isnan(), head[:, None].expand_as(dq))
    assert torch.equal(lse.isnan(), head[:, None].expand_as(lse))
    assert torch.equal(ds_aux.isnan(), head)
    for grad in (dk, dv):  # of kv heads 0 and 1
        assert torch.equal(grad.isnan(), torch.tensor([True, False])[:, None].expand_as(grad))


@pytest.mark.parametrize("which", ["q", "k", "v"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_visible_nan_reaches_the_rows_that_see_it_only(level: str, dtype: torch.dtype, which: str) -> None:
    leaves = [x.detach() for x in qkv(150, 150, dtype=dtype)]
    leaves["qkv".index(which)][0, 70, 0, 5] = NAN
    out, lse, dq, dk, dv = attend([x.requires_grad_() for x in leaves], causal=True, window_size=(20, 0))
    rows, keys = torch.zeros(2, 150, 4, dtype=torch.bool), torch.zeros(2, 150, 2, dtype=torch.bool)
    rows[0, 70 : 71 if which == "q" else 91, : 1 if which == "q" else 2] = True
    keys[0, 50 : 71 if which == "q" else 91, 0] = True  # what those rows see
    # In q and k it is in the score, in v only in its own column of out, and in no probability.
    in_score = torch.tensor(which != "v")
    assert torch.equal(lse.isnan(), rows.transpose(1, 2) & in_score)
    assert torch.equal(out.isnan(), rows[..., None] & (in_score | (torch.arange(64) == 5)))
    assert torch.equal(dq.isnan(), rows[..., None].expand_as(dq))
    assert torch.equal(dk.isnan(), keys[..., None].expand_as(dk))
    assert torch.equal(dv.isnan(), (keys & in_score)[..., None].expand_as(dv))


@pytest.mark.parametrize("garbage", [NAN, INF, -INF])
@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_that_no_row_sees_has_no_effect(level: str, dtype: torch.dtype, garbage: float) -> None:
    leaves = qkv(50, 150, dtype=dtype)
    options = {"causal": True, "window_size": (19, 0), "num_sink_tokens": 2}
    dead = torch.arange(150)[:, None, None] < 81  # the first row, at p = 100, sees keys from 81
    dead[:2] = False

    def fill(value: float) -> list[Tensor]:
        return [leaves[0], *(x.detach().masked_fill(dead, value).requires_grad_() for x in leaves[1:])]

    s_aux = sinks(1.0, 2.0, 3.0, 4.0)
    assert same_bits(attend(fill(garbage), s_aux, **options), attend(fill(0.0), s_aux, **options))


@pytest.mark.parametrize("shape", [(0, 5, 7), (2, 0, 7), (2, 5, 0), (2, 0, 0)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_empty_batch_rows_and_keys_are_legal(level: str, dtype: torch.dtype, shape: tuple[int, int, int]) -> None:
    batch, q_len, k_len = shape
    shapes = ((batch, q_len, 4, 64), (batch, k_len, 2, 64), (batch, k_len, 2, 64))
    leaves = [torch.randn(s).to(dtype).requires_grad_() for s in shapes]
    out, lse, dq, dk, dv, ds_aux = attend(leaves, sinks(1.0, 2.0, 3.0, 4.0), causal=True)
    assert out.shape == dq.shape == shapes[0]
    assert lse.shape == (batch, 4, q_len)
    assert all(torch.equal(x, torch.zeros_like(x)) for x in (out, dq, dk, dv))
    assert torch.equal(ds_aux, torch.full((4,), float(batch * q_len if k_len == 0 else 0)))
    s_aux = torch.tensor([1.0, 2.0, 3.0, 4.0])
    out, lse = sinkattn.flash_attn_with_kvcache(*leaves, s_aux=s_aux, causal=True, return_lse=True)
    assert torch.equal(out, torch.zeros(shapes[0], dtype=dtype))
    assert torch.equal(lse, s_aux[:, None].expand(batch, 4, q_len))


def test_empty_sequences_inside_a_batch_are_legal(level: str) -> None:
    """Known failure: division by zero or NaN at sequences of no rows, of no keys, of neither."""
    assert_right(Case.parse("d64-causal-sink2-g2-varlen-q0.5.0.9.0-k3.0.0.9.0-fp32"))
    assert_right(Case.parse("d64-causal-g2-varlen-q0x3-k0x3-tail4-bf16"))


def far_apart(x: Tensor, path: Path, gap: int) -> Tensor:
    """x [batch, rows, heads, head_dim] with its sequences `gap` elements apart in a file that is mostly a hole."""
    storage = torch.from_file(str(path), shared=True, size=gap * (x.shape[0] - 1) + x[0].numel(), dtype=x.dtype)
    return storage.as_strided(x.shape, (gap, *x[0].contiguous().stride())).copy_(x)


@pytest.mark.parametrize("gap", [2**31 + 64, 2**32 + 128])
def test_offsets_beyond_2_31_elements(level: str, gap: int, tmp_path: Path) -> None:
    """Known failure: int32 overflow of offsets in q, k, v, dO and strides; 2^32 would wrap back to the start."""
    leaves, s_aux = qkv(dtype=torch.bfloat16), sinks(1.0, 2.0, 3.0, 4.0)
    far = [far_apart(x.detach(), tmp_path / str(i), gap).requires_grad_() for i, x in enumerate(leaves)]
    assert same_bits(attend(far, s_aux, causal=True), attend(leaves, s_aux, causal=True))


@pytest.mark.parametrize("page_size", [16, 64])
def test_pages_beyond_2_31_elements(level: str, page_size: int, tmp_path: Path) -> None:
    num_pages = (2**32 + 2**28) // (page_size * 2 * 64)
    shape = (num_pages, page_size, 2, 64)
    size = math.prod(shape)
    k, v = (torch.from_file(str(tmp_path / n), shared=True, size=size, dtype=torch.bfloat16).view(shape) for n in "kv")
    pages = torch.tensor([num_pages - 1, num_pages // 2 + 1, 0, num_pages - 7])
    k[pages], v[pages] = torch.randn(2, 4, page_size, 2, 64).bfloat16()
    q, s_aux = torch.randn(1, 1, 4, 64).bfloat16(), torch.randn(4)
    table = torch.arange(4, dtype=torch.int32)[None]
    far = sinkattn.flash_attn_with_kvcache(q, k, v, block_table=pages.int()[None], s_aux=s_aux)
    assert torch.equal(far, sinkattn.flash_attn_with_kvcache(q, k[pages], v[pages], block_table=table, s_aux=s_aux))


# One-hot rows and keys: the exact key set of every row, forward and backward.

MASKS = [(-1, 0), (-1, -1), (0, 0), (1, 0), (126, 0), (127, 0), (128, 0), (0, -1), (5, 3), (-1, 7), (9, 2**31 - 1)]


@pytest.mark.parametrize("lengths", [(130, 130), (70, 200), (200, 70), (1, 200)])
@pytest.mark.parametrize("num_sink_tokens", [0, 4, 300])
def test_key_sets_are_exact(level: str, lengths: tuple[int, int], num_sink_tokens: int) -> None:
    """Known failures: a window off by one, causal alignment when q_len != k_len, a tile size assumed twice."""
    q_len, k_len = lengths
    eye = torch.eye(256)
    rows, keys = eye[None, :q_len, None], eye[None, :k_len, None]
    zero, ones = torch.zeros(1, q_len, 1, 256), torch.ones(1, k_len, 1, 256)
    for left, right in MASKS:
        lens = torch.tensor([q_len]), torch.tensor([k_len])
        seen = reference.visible(*lens, q_len, k_len, left, right, num_sink_tokens)[0]
        options = {"window_size": (left, right), "num_sink_tokens": num_sink_tokens}
        # Equal scores: O_i = sum of the keys' one-hots / their number; with dO one-hot, dV_j[i] = P_ij.
        leaves = [zero.requires_grad_(), ones.requires_grad_(), keys.clone().requires_grad_()]
        out = sinkattn.flash_attn_func(*leaves, **options)
        (dv,) = torch.autograd.grad(out, leaves[2], rows)
        assert torch.equal(out[0, :, 0, :k_len] > 0, seen), (left, right)
        assert torch.equal(dv[0, :, 0, :q_len].T > 0, seen), (left, right)
        # dS_ij = P_ij (g + ..) with v = 0: dQ_i[j] and dK_j[i] are scale * P_ij.
        leaves = [(rows / 8).requires_grad_(), (keys / 8).requires_grad_(), torch.zeros_like(ones).requires_grad_()]
        lse = sinkattn.flash_attn_func(*leaves, return_lse=True, **options)[1]
        live = torch.where(torch.isinf(lse), 0.0, 1.0)
        dq, dk = torch.autograd.grad(lse, leaves[:2], live)
        assert torch.equal(dq[0, :, 0, :k_len] > 0, seen), (left, right)
        assert torch.equal(dk[0, :, 0, :q_len].T > 0, seen), (left, right)


@pytest.mark.parametrize("splits", [0, 1, 2, 5])
@pytest.mark.parametrize("page_size", [0, 16])
def test_key_sets_of_decode_are_exact(level: str, splits: int, page_size: int) -> None:
    keys = torch.eye(256)[None, :, None]
    table = torch.arange(16, dtype=torch.int32)[None].flip(1) if page_size else None
    cache = keys.view(16, 16, 1, 256).flip(0) if page_size else keys
    for k_len in (1, 16, 129, 256):
        for left in (-1, 0, 1, 126, 127, 128, 300):
            for num_sink_tokens in (0, 4, 300):
                seen = reference.visible(torch.tensor([3]), torch.tensor([k_len]), 3, 256, left, 0, num_sink_tokens)[0]
                lens = torch.tensor([k_len], dtype=torch.int32)
                out, _ = torch.ops.sinkattn.flash_decode(
                    torch.zeros(1, 3, 1, 256), torch.ones_like(cache), cache, None, lens, table,
                    None, left, num_sink_tokens, splits, False,
                )  # fmt: skip
                assert torch.equal(out[0, :, 0] > 0, seen), (k_len, left, num_sink_tokens)


def test_hugging_face_window_counts_the_row(level: str) -> None:
    """Known failure: sliding_window = 128 taken for left = 128; it is 128 keys, the row's own among them."""
    keys = torch.eye(256)[None, :, None]
    out = sinkattn.flash_attn_func(torch.zeros_like(keys), torch.ones_like(keys), keys, window_size=(127, 0))
    assert (out[0, 200, 0] > 0).sum() == 128


# Known failures of others, one test each.


@pytest.mark.parametrize("splits", [1, 2, 3, 8])
def test_sink_is_counted_once_not_per_split(level: str, splits: int) -> None:
    q, k, v = (x.detach() for x in qkv(1, 1100))
    s_aux = torch.tensor([0.0, 3.0, 6.0, 9.0])
    got = torch.ops.sinkattn.flash_decode(q, k, v, s_aux, None, None, None, -1, 0, splits, False)
    want = reference.flash_attn_func(q.double(), k.double(), v.double(), s_aux=s_aux, return_lse=True)
    for ours, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=1e-5)


def test_sink_is_not_scaled(level: str) -> None:
    q, k, v = qkv(1, 1)
    s_aux = torch.tensor([1.0, 2.0, 3.0, 4.0])
    for scale in (None, 0.01, 10.0):
        _, lse = sinkattn.flash_attn_func(q * 0, k, v, softmax_scale=scale, s_aux=s_aux, return_lse=True)
        torch.testing.assert_close(lse[0, :, 0], torch.log1p(s_aux.exp()))


def test_sink_is_not_dropped(level: str) -> None:
    for dtype in DTYPES:
        leaves = qkv(dtype=dtype)
        small = attend(leaves, sinks(5.0, 5.0, 5.0, 5.0))[0].float().norm() / attend(leaves)[0].float().norm()
        assert small < 0.5


def test_ds_aux_has_the_sign_of_a_central_difference(level: str) -> None:
    q, k, v = qkv(9, 9)
    step = 1e-2
    for head in range(4):
        ends = []
        for side in (-step, step):
            s_aux = torch.tensor([0.5, 1.0, 1.5, 2.0])
            s_aux[head] += side
            out, lse = sinkattn.flash_attn_func(q, k, v, s_aux=s_aux, return_lse=True)
            ends.append((out.double().sum() + lse.double().sum()).item())
        analytic = attend([q, k, v], sinks(0.5, 1.0, 1.5, 2.0))[5][head].item()
        assert analytic == pytest.approx((ends[1] - ends[0]) / (2 * step), rel=1e-2, abs=1e-3)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_ds_aux_is_not_taken_from_rounded_out(level: str, dtype: str) -> None:
    """Long rows, whose terms cancel: from a rounded O this sum is off by far more than 1e-5 of its terms."""
    assert_right(Case.parse(f"d64-causal-g2-q200x2-k200x2-nodlse-{dtype}"))


def test_causal_is_aligned_at_the_last_row_and_key(level: str) -> None:
    for lengths in ("q7-k40", "q40-k7", "q129-k300"):
        assert_right(Case.parse(f"d64-causal-{lengths}-fp32"))


@pytest.mark.parametrize("ratio", [1, 2, 3, 5, 8, 64])
def test_query_heads_of_a_kv_head_are_neighbours(level: str, ratio: int) -> None:
    """GQA head order. Head h reads kv head h / ratio, which v names."""
    q, k = torch.randn(1, 5, 3 * ratio, 64), torch.randn(1, 9, 3, 64)
    v = torch.arange(3.0)[None, None, :, None].expand(1, 9, 3, 64)
    out = sinkattn.flash_attn_func(q, k, v)
    want = torch.arange(3.0).repeat_interleave(ratio)[None, None, :, None].expand_as(out)
    torch.testing.assert_close(out, want)


def test_packed_tail_is_written(level: str) -> None:
    for dtype in ("fp32", "bf16"):
        assert_right(Case.parse(f"d64-causal-g2-varlen-q5.70-k9.70-tail70-{dtype}"))


def test_dead_cache_rows_do_not_leak(level: str) -> None:
    """0 * NaN. Cache slots in no use, and keys that the window hides, hold NaN."""
    for layout in ("cache", "paged16", "paged256"):
        for dtype in ("fp32", "bf16", "fp16"):
            assert_right(Case.parse(f"d64-causal-w20-sink2-g4-{layout}-q1x3-k5.130.40-tail9-poison-{dtype}"))


@pytest.mark.parametrize("dtype", DTYPES)
def test_dirty_memory_has_no_effect(level: str, dtype: torch.dtype) -> None:
    """Scratch dirty from an earlier run, an output left unwritten. Torch fills new memory with NaN."""
    leaves, s_aux = qkv(150, 150, dtype=dtype), sinks(1.0, 2.0, 3.0, 4.0)
    cache = [x.detach() for x in qkv(1, 300, dtype=dtype)]

    def everything() -> list[Tensor]:
        decoded = torch.ops.sinkattn.flash_decode(*cache, s_aux, None, None, None, 200, 2, 3, False)
        return [*attend(leaves, s_aux, causal=True, window_size=(70, 0), num_sink_tokens=2), *decoded]

    clean = everything()
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(4).isnan().all()
        dirty = everything()
    finally:
        torch.use_deterministic_algorithms(False)
    assert same_bits(dirty, clean)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_lengths_around_every_tile_size(level: str, dtype: str) -> None:
    """A tile size assumed in two places, rows of a partial tile normalised by garbage."""
    tiles = {(row["tile_q"], row["tile_k"]) for row in _C.variants() if row["backend"] == "cpu" and row["tile_q"]}
    for tile_q, tile_k in tiles:
        for q_len in (tile_q - 1, tile_q, tile_q + 1):
            for k_len in (tile_k - 1, tile_k, tile_k + 1, 2 * tile_k + 1):
                assert_right(Case.parse(f"d40-causal-w{tile_k}-q{q_len}-k{k_len}-{dtype}"))


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_expanded_output_gradient(level: str, dtype: str) -> None:
    """dO with stride 0, as .sum().backward() makes it."""
    assert_right(Case.parse(f"d64-causal-g2-q70x2-k70x2-doutsum-{dtype}"))


def test_neighbours_of_length_one_stay_apart(level: str) -> None:
    """Sequences of length 1 side by side taken for one. Each row sees its own key alone, so O = v."""
    q, v = torch.randn(6, 4, 64), torch.randn(6, 2, 64)
    cu = torch.arange(7, dtype=torch.int32)
    out = sinkattn.flash_attn_varlen_func(q, torch.randn(6, 2, 64), v, cu, cu, 1, 1, causal=True)
    torch.testing.assert_close(out, v.repeat_interleave(2, 1))


def test_sliced_sinks_take_their_own_gradient(level: str) -> None:
    """Heads sharded without their sinks, or without the sinks' gradient."""
    q, k, v = qkv(30, 30, heads=8)
    s_aux = (3 * torch.randn(8)).requires_grad_()
    (whole,) = torch.autograd.grad(sinkattn.flash_attn_func(q, k, v, s_aux=s_aux, causal=True).sum(), s_aux)
    for rank in range(2):
        heads, kv = slice(4 * rank, 4 * rank + 4), slice(rank, rank + 1)
        out = sinkattn.flash_attn_func(q[:, :, heads], k[:, :, kv], v[:, :, kv], s_aux=s_aux[heads], causal=True)
        (grad,) = torch.autograd.grad(out.sum(), s_aux)
        assert torch.equal(grad[heads], whole[heads])
        assert grad.count_nonzero() == 4
    strided = torch.stack([s_aux, s_aux], 1).detach()[:, 0]
    assert torch.equal(sinkattn.flash_attn_func(q, k, v, s_aux=strided), sinkattn.flash_attn_func(q, k, v, s_aux=s_aux))


def test_fp16_products_of_large_dout_and_v_do_not_overflow(level: str) -> None:
    """dO . v in fp16. Here it is 2.5e6 for every key alike, so dS and with it dQ and dK are rounding."""
    q, k, _ = (x.detach().requires_grad_() for x in qkv(70, 70, dtype=torch.float16))
    v = torch.full((2, 70, 2, 64), 200.0, dtype=torch.float16, requires_grad=True)
    out = sinkattn.flash_attn_func(q, k, v, causal=True)
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), torch.full_like(out, 200.0))
    assert all(torch.isfinite(x).all() for x in (out, dq, dk, dv))
    assert max(dq.abs().max(), dk.abs().max()) < 50


def test_visible_score_of_minus_inf_has_weight_zero(level: str) -> None:
    q, k, v = (x.detach() for x in qkv(3, 3))
    k[:, 1] = -INF
    q = q.abs()
    for s_aux in (None, torch.tensor([1.0, 2.0, 3.0, 4.0])):
        got = sinkattn.flash_attn_func(q, k, v, s_aux=s_aux, return_lse=True)
        want = sinkattn.flash_attn_func(q, k[:, ::2], v[:, ::2], s_aux=s_aux, return_lse=True)
        for ours, theirs in zip(got, want, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
    out, lse = sinkattn.flash_attn_func(q[:, :1], k[:, 1:2], v[:, 1:2], return_lse=True)
    assert torch.equal(out, torch.zeros_like(out))
    assert torch.equal(lse, torch.full_like(lse, -INF))


def test_a_visible_infinite_value_is_the_output(level: str) -> None:
    """Whatever its weight, of which products of bf16 take the part that 8 bits leave as well: it must not be 0 here."""
    q, k, v = (x.detach().bfloat16() for x in qkv(3, 40))
    q[:, 0] = 0  # weights of exactly 1
    v[:, 5, :, 7], v[:, 30, :, 9] = INF, -INF
    out = sinkattn.flash_attn_func(q, k, v)
    assert torch.equal(out[..., 7], torch.full_like(out[..., 7], INF))
    assert torch.equal(out[..., 9], torch.full_like(out[..., 9], -INF))
    out[..., [7, 9]] = 0
    assert torch.isfinite(out).all()


def test_gradient_of_the_lse_reaches_q_k_and_the_sink(level: str) -> None:
    leaves, s_aux = qkv(), sinks(1.0, 2.0, 3.0, 4.0)
    _, lse = sinkattn.flash_attn_func(*leaves, s_aux=s_aux, return_lse=True)
    dq, dk, dv, ds_aux = torch.autograd.grad(lse.sum(), [*leaves, s_aux])
    _, want = reference.flash_attn_func(*(x.double() for x in leaves), s_aux=s_aux.double(), return_lse=True)
    for ours, theirs in zip((dq, dk, ds_aux), torch.autograd.grad(want.sum(), [*leaves[:2], s_aux]), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert torch.equal(dv, torch.zeros_like(dv))


@pytest.mark.parametrize("bad", [-1, 4, 2**31 - 1, -(2**31)])
def test_page_out_of_range_is_not_page_zero(level: str, bad: int) -> None:
    cache = torch.randn(2, 4, 16, 2, 64)
    table = torch.tensor([[0, bad]], dtype=torch.int32)
    with pytest.raises(ValueError, match=rf"block_table\[0\]\[1\] is {bad};"):
        sinkattn.flash_attn_with_kvcache(torch.randn(1, 1, 4, 64), *cache, block_table=table)


def test_every_stride_gives_the_same_bits(level: str) -> None:
    t = make_inputs(Case.parse("d64-causal-g2-h2-q70x2-k70x2-bf16"))
    plain = [x.detach() for x in (t.q, t.k, t.v)]
    want = attend([x.clone().requires_grad_() for x in plain], causal=True)
    for strides in ("transposed", "sliced", "offset", "lastdim"):
        got = attend([restride(x, strides).requires_grad_() for x in plain], causal=True)
        assert same_bits(got, want), strides
