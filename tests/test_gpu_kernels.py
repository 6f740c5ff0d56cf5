# SPDX-License-Identifier: Apache-2.0
"""Every CUDA kernel by itself: every head_dim, every edge, lengths around its tiles, the exact keys it sees."""

import math
from typing import Any, NamedTuple

import pytest
import torch
from gpu_cases import assert_right_on_device, gpt_oss_like
from gpus import needs_gpus
from test_edges import MASKS
from torch import Tensor

import sinkattn
from sinkattn import _C, reference
from sinkattn._testing import EDGES, Case, restride

pytestmark = needs_gpus()


class Kind(NamedTuple):
    """Sizes and a mask that a forward and a backward of the table serve, and their names on compute capability 9.0."""

    head_dims: range
    left: int
    ratio: int
    fwd: str
    bwd: str
    head_dim_v: int = 0
    kv_heads: int = 1

    @property
    def largest(self) -> int:
        return self.head_dims[-1]


KINDS = {
    "window": Kind(range(8, 65, 8), 127, 8, "sm90_window", "sm90_window"),
    "window-d64": Kind(range(8, 65, 8), 127, 6, "sm90_d64_window", "sm90_window"),
    "window-d96": Kind(range(72, 97, 8), 127, 8, "sm90_d128_window", "sm90_d96"),
    "window-d128": Kind(range(104, 129, 8), 127, 8, "sm90_d128_window", "sm90_d128_window"),
    "window-d192-v128": Kind(range(136, 193, 8), 127, 8, "sm90_d192_v128_window", "sm90_d192_v128_window", 128),
    "d64": Kind(range(8, 65, 8), -1, 8, "sm90_d64", "sm90_d64"),
    "d96": Kind(range(72, 97, 8), -1, 8, "sm90_d96", "sm90_d96"),
    "d128": Kind(range(104, 129, 8), -1, 8, "sm90_d128", "sm90_d128"),
    "d256": Kind(range(136, 257, 8), -1, 8, "sm90_d256", "sm90_d256"),
    "d192-v128": Kind(range(136, 193, 8), -1, 8, "sm90_d192_v128", "sm90_d192_v128", 128),
    "d64-wide-group": Kind(range(8, 65, 8), -1, 201, "sm80_d64", "sm80_d64", 0, 2),
    "d128-wide-group": Kind(range(72, 129, 8), -1, 201, "sm80_d128", "sm80_d128", 0, 2),
    "d256-wide-group": Kind(range(136, 257, 8), -1, 201, "sm80_d256", "sm80_d256", 0, 2),
}
BY_CASE = [name for name, kind in KINDS.items() if kind.ratio == 8]
TUNED = [name for name in BY_CASE if not KINDS[name].head_dim_v]
DECODES = {"sm80_d64": range(8, 65, 8), "sm80_d128": range(72, 129, 8), "sm80_d256": range(136, 257, 8),
           "sm80_d512": range(264, 513, 8), "sm80_d192_v128": range(136, 193, 8),
           "sm90_window": range(8, 65, 8),
           "sm90_chain_d64": range(8, 65, 8), "sm90_chain_d128": range(72, 129, 8)}  # fmt: skip
DECODED_VALUES = {"sm80_d192_v128": 128, "sm90_rows_d192_v128": 128}  # columns, where not head_dim
# Large caches. With num_splits, which the kernels with swapped operands do not take; query heads of 8 kv heads.
MANY_ROWS = {"sm90_rows_d64": range(8, 65, 8), "sm90_rows_d128": range(72, 129, 8),
             "sm90_rows_d192_v128": range(136, 193, 8), "sm90_rows_d256": range(136, 257, 8),
             "sm90_rows_d576": range(264, 513, 8)}  # fmt: skip
SWAPPED = {
    "sm90_swapped_d64": (range(8, 65, 8), 384), "sm90_swapped_d128": (range(72, 129, 8), 384),
    "sm90_swapped_d256": (range(136, 257, 8), 192), "sm90_swapped_d512": (range(264, 513, 8), 128),
}  # fmt: skip
INVARIANT = ("sm90_window", "sm90_chain_d64", "sm90_chain_d128")


PACKED = {
    "sm80_packed_d64": (64, 0, -1, 200), "sm80_packed_d128": (128, 0, -1, 200), "sm80_packed_d256": (256, 0, -1, 200),
    "sm90_packed_d64": (64, 0, -1, 8), "sm90_packed_d128": (128, 0, -1, 8), "sm90_packed_d256": (256, 0, -1, 8),
    "sm90_packed_d96": (96, 0, -1, 8), "sm90_packed_d192_v128": (192, 128, -1, 8),
    "sm90_packed_window": (64, 0, 127, 8),
}  # fmt: skip


# By rows of a tile: tokens of one sequence, and head_dim and head_dim_v of kernels.
WIDTHS = {"d64": (64, 0), "d128": (128, 0), "d192_v128": (192, 128)}
SMALL_TILES = {64: (40, WIDTHS | {"d256": (256, 0)}), 128: (1000, WIDTHS)}
MANY = 400  # sequences, for larger tiles


def planned(op: str, head_dim: int, device: dict[str, Any], **sizes: Any) -> dict[str, Any]:
    sizes = {"batch": 1, "num_kv_heads": 1, "q_len": 40, "k_len": 60, "window_size_right": 0} | sizes
    return sinkattn.plan(op, device, dtype="bf16", head_dim=head_dim, **sizes)


def check_every_kernel_is_in_these_tables(hopper: dict[str, Any]) -> None:
    met = set()
    for kind in KINDS.values():
        sizes = {"batch": MANY, "num_q_heads": kind.kv_heads * kind.ratio, "num_kv_heads": kind.kv_heads}
        sizes |= {"window_size_left": kind.left, "head_dim_v": kind.head_dim_v}
        for op, name in (("fwd", kind.fwd), ("bwd", kind.bwd)):
            found = {planned(op, head_dim, hopper, **sizes)["variant"] for head_dim in kind.head_dims}
            assert found == {f"sa_{op}_cuda_{name}"}
            met |= found
    for name, head_dims in DECODES.items():
        sizes = {"num_q_heads": 8, "q_len": 1, "invariant": name in INVARIANT}
        sizes["head_dim_v"] = DECODED_VALUES.get(name, 0)
        sizes |= {"window_size_left": 90} if name == "sm90_window" else {}
        found = {planned("decode", head_dim, hopper, **sizes)["variant"] for head_dim in head_dims}
        assert found == {f"sa_decode_cuda_{name}"}
        met |= found
    for name, head_dims in MANY_ROWS.items():
        sizes = {"num_q_heads": 384, "num_kv_heads": 8, "q_len": 1, "k_len": 1 << 20, "num_splits": 3}
        sizes["head_dim_v"] = DECODED_VALUES.get(name, 0)
        found = {planned("decode", head_dim, hopper, **sizes)["variant"] for head_dim in head_dims}
        assert found == {f"sa_decode_cuda_{name}"}
        met |= found
    for name, (head_dims, heads) in SWAPPED.items():
        sizes = {"num_q_heads": heads, "num_kv_heads": 8, "q_len": 1, "k_len": 1 << 20}
        found = {planned("decode", head_dim, hopper, **sizes)["variant"] for head_dim in head_dims}
        assert found == {f"sa_decode_cuda_{name}"}
        met |= found
    for name, (head_dim, head_dim_v, left, ratio) in PACKED.items():
        sizes = {"batch": MANY, "num_q_heads": ratio, "window_size_left": left, "packed": True, "page_size": 20,
                 "num_pages": 9, "head_dim_v": head_dim_v}  # fmt: skip
        assert planned("decode", head_dim, hopper, **sizes)["variant"] == f"sa_decode_cuda_{name}"
        met.add(f"sa_decode_cuda_{name}")
    for rows, (tokens, widths) in SMALL_TILES.items():
        few = {"num_q_heads": 16, "num_kv_heads": 2, "q_len": tokens, "k_len": 2048}
        cached = {"packed": True, "page_size": 16, "num_pages": 9}
        for name, (head_dim, head_dim_v) in widths.items():
            for op, arch, sizes in (("fwd", "sm90", few), ("decode", "sm90_packed", few | cached)):
                found = planned(op, head_dim, hopper, head_dim_v=head_dim_v, **sizes)["variant"]
                assert found == f"sa_{op}_cuda_{arch}_{name}_tile{rows}"
                met.add(found)
    assert met == {row["name"] for row in _C.variants() if row["backend"] == "cuda"}


ALL_SIZES = [(name, head_dim) for name, kind in KINDS.items() for head_dim in kind.head_dims]


@pytest.mark.parametrize(("name", "head_dim"), ALL_SIZES)
def test_every_head_dim_of_every_kernel(name: str, head_dim: int) -> None:
    kind = KINDS[name]
    q_lens, k_lens = ((70, 0, 9), (90, 5, 9)) if kind.ratio == 8 else ((9, 3), (30, 3))
    case = Case(
        head_dim=head_dim, head_dim_v=kind.head_dim_v, left=kind.left, right=0, ratio=kind.ratio,
        kv_heads=kind.kv_heads, layout="varlen",
        q_lens=q_lens, k_lens=k_lens, tail=3, poison=True, dtype="bf16" if head_dim % 16 else "fp16", seed=head_dim,
    )  # fmt: skip
    assert_right_on_device(case)


@pytest.mark.parametrize("name", DECODES)
def test_every_head_dim_of_every_decode(name: str) -> None:
    for head_dim in DECODES[name]:
        case = Case(
            head_dim=head_dim, head_dim_v=DECODED_VALUES.get(name, 0), right=0, left=200 if "chain" in name else 90,
            ratio=4, layout="paged", page_size=16, q_lens=(2,) * 3, k_lens=(370, 0, 33), invariant=name in INVARIANT,
            poison=True, dtype="bf16", seed=head_dim,
        )  # fmt: skip
        assert_right_on_device(case)


@pytest.mark.parametrize("edge", EDGES)
@pytest.mark.parametrize("name", BY_CASE)
def test_edges_of_s_aux(name: str, edge: str) -> None:
    kind = KINDS[name]
    case = Case(
        head_dim=kind.largest, head_dim_v=kind.head_dim_v, left=kind.left, right=0, ratio=8, layout="varlen",
        q_lens=(200, 1, 20), k_lens=(200, 0, 7), s_aux=edge, dtype="bf16", seed=1,
    )  # fmt: skip
    assert_right_on_device(case)


@pytest.mark.parametrize(("num_q_heads", "num_kv_heads"), [(1, 1), (5, 5), (65, 13), (96, 8), (128, 2)])
@pytest.mark.parametrize("name", BY_CASE[1:])
def test_head_counts(name: str, num_q_heads: int, num_kv_heads: int) -> None:
    kind = KINDS[name]
    case = Case(
        head_dim=kind.largest, head_dim_v=kind.head_dim_v, right=0, ratio=num_q_heads // num_kv_heads,
        kv_heads=num_kv_heads, q_lens=(70,), k_lens=(130,), dtype="bf16", seed=1,
    )  # fmt: skip
    assert_right_on_device(case)


@pytest.mark.parametrize("op", ["fwd", "bwd"])
@pytest.mark.parametrize("name", BY_CASE)
def test_lengths_around_every_tile_size(name: str, op: str) -> None:
    kind, head_dim = KINDS[name], KINDS[name].largest - 24
    sizes = {"num_q_heads": 2, "window_size_left": kind.left, "head_dim_v": kind.head_dim_v}
    plan = planned(op, head_dim, _C.query_cuda(0), **sizes)
    tile_q, tile_k = plan["tile_q"], plan["tile_k"]
    for q_len in (tile_q // 2 - 1, tile_q // 2, tile_q // 2 + 1):  # of two heads: a tile holds tile_q / 2 tokens
        for k_len in (tile_k - 1, tile_k, tile_k + 1, 2 * tile_k + 1):
            case = Case(
                head_dim=head_dim, head_dim_v=kind.head_dim_v, left=kind.left, right=0, ratio=2, q_lens=(q_len,),
                k_lens=(k_len,), dtype="bf16", seed=q_len,
            )  # fmt: skip
            assert_right_on_device(case)


def one_hot(length: int, width: int) -> Tensor:
    """[chunks, length, 1, width]: of chunk c, row j is the one-hot of j - c * width, or zero."""
    eye = torch.eye(length, device="cuda", dtype=torch.bfloat16)
    eye = torch.nn.functional.pad(eye, (0, -length % width))
    return eye.view(length, -1, width).transpose(0, 1)[:, :, None].contiguous()


def with_chunks(x: Tensor, count: int) -> Tensor:
    return torch.cat([x, x.new_zeros(count - len(x), *x.shape[1:])])


def joined(x: Tensor, length: int) -> Tensor:
    """What one_hot took apart: [chunks, rows, heads, width] to [rows, heads, length]."""
    return x.permute(1, 2, 0, 3).flatten(2)[..., :length]


@pytest.mark.parametrize("lengths", [(130, 130), (70, 200), (200, 70), (1, 200)])
@pytest.mark.parametrize("num_sink_tokens", [0, 4, 300])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_key_sets_are_exact(head_dim: int, lengths: tuple[int, int], num_sink_tokens: int) -> None:
    """Masks choose the kernel."""
    q_len, k_len = lengths
    rows, keys = one_hot(q_len, head_dim), one_hot(k_len, head_dim)
    chunks = max(len(rows), len(keys))
    rows, keys = with_chunks(rows, chunks).expand(-1, -1, 8, -1), with_chunks(keys, chunks)
    for left, right in MASKS:
        lens = torch.tensor([q_len]), torch.tensor([k_len])
        seen = reference.visible(*lens, q_len, k_len, left, right, num_sink_tokens)[0].cuda()
        options = {"window_size": (left, right), "num_sink_tokens": num_sink_tokens}
        # Equal scores: O_i = sum of the keys' one-hots / their number; with dO one-hot, dV_j[i] = sum of heads of P_ij.
        leaves = [torch.zeros_like(rows).requires_grad_(), torch.ones_like(keys), keys.clone().requires_grad_()]
        out = sinkattn.flash_attn_func(*leaves, **options)
        (dv,) = torch.autograd.grad(out, leaves[2], rows)
        assert torch.equal(joined(out, k_len) > 0, seen[:, None].expand(-1, 8, -1)), (left, right)
        assert torch.equal(joined(dv, q_len)[:, 0].T > 0, seen), (left, right)
        # dS_ij = P_ij g with v = 0: dQ_i[j] and dK_j[i] are scale * P_ij.
        leaves = [(rows / 8).requires_grad_(), (keys / 8).requires_grad_(), torch.zeros_like(keys)]
        lse = sinkattn.flash_attn_func(*leaves, return_lse=True, **options)[1]
        dq, dk = torch.autograd.grad(lse, leaves[:2], torch.where(torch.isinf(lse), 0.0, 1.0))
        assert torch.equal(joined(dq, k_len) > 0, seen[:, None].expand(-1, 8, -1)), (left, right)
        assert torch.equal(joined(dk, q_len)[:, 0].T > 0, seen), (left, right)


@pytest.mark.parametrize("num_splits", [0, 1, 2, 5, -5])
@pytest.mark.parametrize("page_size", [0, 16])
@pytest.mark.parametrize("head_dim", [64, 128, 256, 512])
def test_key_sets_of_decode_are_exact(head_dim: int, page_size: int, num_splits: int) -> None:
    keys = one_hot(256, head_dim)
    chunks, table = len(keys), None
    cache = keys
    if page_size:
        pages = keys.view(-1, page_size, 1, head_dim)
        table = torch.arange(len(pages), dtype=torch.int32, device="cuda").flip(0).view(chunks, -1)
        cache = pages.flip(0)
    q = torch.zeros(chunks, 3, 8, head_dim, device="cuda", dtype=torch.bfloat16)
    for k_len in (1, 16, 129, 256):
        lens = torch.full((chunks,), k_len, dtype=torch.int32, device="cuda")
        for left in (-1, 0, 1, 126, 127, 128, 300):
            for num_sink_tokens in (0, 4, 300):
                seen = reference.visible(torch.tensor([3]), torch.tensor([k_len]), 3, 256, left, 0, num_sink_tokens)[0]
                out, _ = torch.ops.sinkattn.flash_decode(
                    q, torch.ones_like(cache), cache, None, lens, table, None, left, num_sink_tokens, num_splits, False
                )
                got = joined(out, 256) > 0
                assert torch.equal(got, seen.cuda()[:, None].expand(-1, 8, -1)), (k_len, left, num_sink_tokens)


def everything(leaves: list[Tensor], s_aux: Tensor | None, left: int, dout: Tensor, **options: Any) -> list[Tensor]:
    out, lse = sinkattn.flash_attn_func(*leaves, s_aux=s_aux, window_size=(left, 0), return_lse=True, **options)
    dlse = torch.ones_like(lse).masked_fill(torch.isinf(lse), 0)
    inputs = leaves if s_aux is None else [*leaves, s_aux]
    return [out.detach(), lse.detach(), *torch.autograd.grad((out, lse), inputs, (dout, dlse))]


@pytest.mark.parametrize("lengths", [(300, 300), (40, 300), (300, 40)])
@pytest.mark.parametrize("name", TUNED)
def test_sink_of_minus_inf_is_no_sink_bit_for_bit(name: str, lengths: tuple[int, int]) -> None:
    q, k, v, _ = gpt_oss_like(2, 300, KINDS[name].largest)
    leaves = [x.requires_grad_() for x in (q[:, : lengths[0]], k[:, : lengths[1]], v[:, : lengths[1]])]
    s_aux, dout = torch.full((16,), -math.inf, device="cuda", requires_grad=True), leaves[0].detach().roll(1, 1)
    *with_sink, ds_aux = everything(leaves, s_aux, KINDS[name].left, dout)
    without = everything(leaves, None, KINDS[name].left, dout)
    assert all(torch.equal(a, b) for a, b in zip(with_sink, without, strict=True))
    assert not ds_aux.any()


@pytest.mark.parametrize("size", [1, 12])
@pytest.mark.parametrize("head_dim", KINDS["d96"].head_dims)
def test_d96_has_the_bits_of_d128(head_dim: int, size: int) -> None:
    q, k, v, s_aux = gpt_oss_like(2, 500, head_dim)
    for left in (-1, 300):
        options = {"s_aux": s_aux, "window_size": (left, 0), "softmax_scale": 0.1, "return_lse": True}
        out, lse = sinkattn.flash_attn_func(size * q, k, v, **options)
        wide = [torch.nn.functional.pad(x, (0, 104 - head_dim)) for x in (size * q, k, v)]
        wide_out, wide_lse = sinkattn.flash_attn_func(*wide, **options)
        assert torch.equal(out, wide_out[..., :head_dim])
        assert torch.equal(lse, wide_lse)


@pytest.mark.parametrize("size", [1, 12])
@pytest.mark.parametrize("heads", [6, 10, 12, 14])
def test_windows_of_wide_tiles_have_the_bits_of_any_mask(heads: int, size: int) -> None:
    """Against the general forward over a cache."""
    q, k, v, s_aux = gpt_oss_like(2, 500)
    q = size * q[:, :, :heads]
    options = {"s_aux": s_aux[:heads], "window_size": (127, 0), "return_lse": True}
    want = sinkattn.flash_attn_with_kvcache(q, k, v, causal=True, invariant=True, **options)
    for got, its in zip(sinkattn.flash_attn_func(q, k, v, **options), want, strict=True):
        assert torch.equal(got, its)


@pytest.mark.parametrize("size", [1, 12])
@pytest.mark.parametrize("mask", [(-1, 0), (1000, 0), (300, 4)])
@pytest.mark.parametrize("head_dim", [64, 72, 128, 192, 256])
def test_small_tiles_have_the_bits_of_large_ones(head_dim: int, mask: tuple[int, int], size: int) -> None:
    q, k, v, s_aux = gpt_oss_like(1, 2500, head_dim)
    v = v[..., :128]
    q *= size
    options = {"s_aux": s_aux, "window_size": (mask[0], 0), "num_sink_tokens": mask[1], "return_lse": True}
    out, lse = sinkattn.flash_attn_func(q, k, v, **options)
    for begin, end in ((2436, 2500), (2400, 2401), (1500, 2500)):
        few = sinkattn.flash_attn_func(q[:, begin:end], k[:, :end], v[:, :end], **options)
        assert torch.equal(few[0], out[:, begin:end])
        assert torch.equal(few[1], lse[:, :, begin:end])


@pytest.mark.parametrize("name", TUNED)
def test_fp16_products_of_large_dout_and_v_do_not_overflow(name: str) -> None:
    q, k, v, _ = (x.half() for x in gpt_oss_like(1, 300, KINDS[name].largest))
    leaves = [x.requires_grad_() for x in (q, k, torch.full_like(v, 200.0))]
    out = sinkattn.flash_attn_func(*leaves, window_size=(KINDS[name].left, 0))
    dq, dk, _ = torch.autograd.grad(out, leaves, torch.full_like(out, 200.0))
    assert torch.equal(out, torch.full_like(out, 200.0))
    assert all(torch.isfinite(x).all() for x in (dq, dk))
    assert dq.abs().max() < 200


@pytest.mark.parametrize("name", TUNED)
def test_offsets_outside_are_those_clamped_to_the_tensor(name: str) -> None:
    """What is hostile reads and writes as if it were not, forward and backward, and is reported."""
    q, k, v, s_aux = (x[0] if x.ndim == 4 else x for x in gpt_oss_like(1, 300, KINDS[name].largest))

    def run(*offsets: int) -> list[Tensor]:
        cu = torch.tensor(offsets, dtype=torch.int32, device="cuda")
        leaves = [x.detach().requires_grad_() for x in (q, k, v, s_aux)]
        options = {"window_size": (KINDS[name].left, 0), "s_aux": leaves[3], "return_lse": True}
        out, lse = sinkattn.flash_attn_varlen_func(*leaves[:3], cu, cu, **options)
        dlse = torch.ones_like(lse).masked_fill(torch.isinf(lse), 0)
        return [out.detach(), lse.detach(), *torch.autograd.grad((out, lse), leaves, (q, dlse))]

    sinkattn.check_errors()
    for bad, clamped in (
        ((0, 100, 2**31 - 1), (0, 100, 300)),
        ((-(2**31), 100, 301), (0, 100, 300)),
        ((0, 170, 400, 500), (0, 170, 300, 300)),
    ):
        want = run(*clamped)
        sinkattn.check_errors()
        assert all(torch.equal(x, y) for x, y in zip(run(*bad), want, strict=True)), bad
        with pytest.raises(ValueError, match="cu_seqlens"):
            sinkattn.check_errors()


@pytest.mark.parametrize("strides", ["transposed", "sliced", "offset", "lastdim"])
@pytest.mark.parametrize("name", TUNED)
def test_every_stride_gives_the_same_bits(name: str, strides: str) -> None:
    q, k, v, s_aux = gpt_oss_like(2, 200, KINDS[name].largest)
    s_aux.requires_grad_()
    want = everything([x.clone().requires_grad_() for x in (q, k, v)], s_aux, KINDS[name].left, q)
    got = everything([restride(x, strides).requires_grad_() for x in (q, k, v)], s_aux, KINDS[name].left, q)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("num_sink_tokens", [0, 4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", TUNED)
def test_a_row_s_lse_and_bits_are_its_own(name: str, dtype: torch.dtype, num_sink_tokens: int) -> None:
    *qkv, s_aux = gpt_oss_like(3, 500, KINDS[name].largest)
    q, k, v = (x.to(dtype) for x in qkv)
    options = {"window_size": (KINDS[name].left, 0), "s_aux": s_aux, "num_sink_tokens": num_sink_tokens,
               "return_lse": True}  # fmt: skip

    def same(got: tuple[Tensor, Tensor], at: slice, rows: slice) -> bool:
        return torch.equal(got[0], whole[0][at, rows]) and torch.equal(got[1], whole[1][at, :, rows])

    whole = sinkattn.flash_attn_func(q, k, v, **options)
    for at in (slice(1, 2), slice(1, 3)):
        assert same(sinkattn.flash_attn_func(q[at], k[at], v[at], **options), at, slice(None))
    for begin, end in ((0, 131), (131, 397), (397, 398)):
        chunk = sinkattn.flash_attn_func(q[:, begin:end], k[:, :end], v[:, :end], **options)
        assert same(chunk, slice(None), slice(begin, end))
    cu = torch.arange(0, 1501, 500, dtype=torch.int32, device="cuda")
    out, lse = sinkattn.flash_attn_varlen_func(*(x.flatten(0, 1) for x in (q, k, v)), cu, cu, **options)
    assert same((out.view_as(q), lse.view(16, 3, 500).transpose(0, 1)), slice(None), slice(None))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = sinkattn.flash_attn_func(q, k, v, **options)
    for x in captured:
        x.fill_(math.nan)
    graph.replay()
    assert same(captured, slice(None), slice(None))
