# SPDX-License-Identifier: Apache-2.0
"""A decode's out in NVFP4: the bits of the reference quantiser, applied to out."""

import math

import pytest
import torch
from arguments import decode_args
from torch import Tensor

from sinkattn import reference

ops = torch.ops.sinkattn


def assert_packed(packed: tuple[Tensor, ...], want: tuple[Tensor, Tensor], global_scale: float = 1.0) -> None:
    """out, lse, values, scales against flash_decode's out and lse, and the quantiser's bits of that out."""
    for got, there in zip(packed[:2], want, strict=True):
        torch.testing.assert_close(got, there, rtol=0, atol=0, equal_nan=True)
    values, scales = reference.quantize_nvfp4(want[0], global_scale)
    assert torch.equal(packed[2], values)
    assert torch.equal(packed[3].view(torch.uint8), scales.view(torch.uint8))


def edges(dtype: torch.dtype) -> Tensor:
    """[rows, 256], whose blocks of 16 hold ties of both roundings and their neighbours, zeros, NaN and infinity."""
    numbers = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()[:127]
    middles = (numbers[1:] + numbers[:-1]) / 2
    tops = torch.cat([numbers, middles, numbers.new_tensor([449.0, 1e30, 2.0**-11, 1e-30, 0.0, math.inf, math.nan])])
    tops = torch.cat([6 * tops, 6 * tops * (1 + 2**-7), 6 * tops * (1 - 2**-7)]).to(dtype)
    ratios = torch.tensor([0.0, -0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 3.5, -4.0, -5.0])
    ratios = torch.stack([ratios, ratios * (1 + 2**-7), ratios * (1 - 2**-7), -ratios])
    scales = (tops.float() / 6).to(torch.float8_e4m3fn).float().nan_to_num(0)
    blocks = torch.cat([(scales[:, None, None] * ratios).to(dtype), tops[:, None, None].expand(-1, 4, 1)], -1)
    blocks = torch.where(torch.rand(blocks.shape, generator=torch.Generator().manual_seed(0)) < 0.1, -blocks, blocks)
    return torch.nn.functional.pad(blocks.flatten(), (0, -blocks.numel() % 256)).view(-1, 256)


def of_one_key(values: Tensor) -> tuple[object, ...]:
    """A decode whose out is `values` [rows, 256]: one key a sequence and no sink."""
    v = values[:, None, None]
    return torch.zeros_like(v), torch.zeros_like(v), v, None, None, None, None, -1, 0, 0, False


@pytest.mark.parametrize("global_scale", [1.0, 0.3, 2e-38, 1e38])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_edges_of_the_formats(dtype: torch.dtype, global_scale: float) -> None:
    call = of_one_key(edges(dtype))
    packed = ops.flash_decode_nvfp4(*call, global_scale)
    assert torch.equal(packed[0].nan_to_num(7), call[2].nan_to_num(7))  # type: ignore[union-attr]
    assert_packed(packed, ops.flash_decode(*call), global_scale)


def test_blocks_by_hand() -> None:
    """scale, then values: 6 -> 1; ties to even; a scale that is rounded down leaves more than 6, which saturates."""
    rows = torch.zeros(6, 256)
    rows[0, :8] = torch.tensor([6.0, -0.25, 0.75, 1.25, -1.75, 2.5, 3.5, 5.0])
    rows[1, :2] = torch.tensor([6.2, 1.0])
    rows[2, :2] = torch.tensor([1e6, 1344.0])
    rows[3, :2] = torch.tensor([math.inf, 1.0])
    rows[4, :2] = torch.tensor([math.nan, 1.0])
    rows[5, :2] = torch.tensor([6 * 2.0**-10, -6 * 2.0**-11])
    _, _, values, scales = ops.flash_decode_nvfp4(*of_one_key(rows))
    codes = torch.stack([values & 15, values >> 4], -1).flatten(-2)[:, 0, 0, :8].tolist()
    assert codes[0] == [7, 8, 2, 2, 8 + 4, 4, 6, 6]
    assert [row[:2] for row in codes[1:]] == [[7, 2], [7, 5], [0, 0], [0, 0], [0, 0]]
    assert scales.float()[:3, 0, 0, 0].tolist() == [1.0, 1.0, 448.0]
    assert scales.view(torch.uint8)[3:, 0, 0, 0].tolist() == [0x7F, 0x7F, 0]
    assert not values[:, ..., 8:].any()
    again = reference.dequantize_nvfp4(values, scales)[:, 0, 0]
    assert again[0, :8].tolist() == [6, 0, 1, 1, -2, 2, 4, 4]
    assert again[3:5, :16].isnan().all()
    assert torch.equal(again[:, 16:], torch.zeros(6, 240))


def test_what_comes_back_is_near() -> None:
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    for global_scale in (1.0, 100.0):
        again = reference.dequantize_nvfp4(*reference.quantize_nvfp4(x, global_scale), global_scale)
        top = x.unflatten(-1, (-1, 16)).abs().amax(-1, keepdim=True).expand(-1, -1, 16).flatten(-2)
        assert ((again - x).abs() <= 0.21 * top).all()  # half of 6 - 4 is a sixth, and a scale is off by up to a 16th
        assert torch.nn.functional.cosine_similarity(again.flatten(), x.flatten(), 0) > 0.99


@pytest.mark.parametrize("num_splits", [0, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [16, 48, 512])
def test_it_is_the_quantiser_of_out(level: str, head_dim: int, dtype: torch.dtype, num_splits: int) -> None:
    generator = torch.Generator().manual_seed(head_dim)
    q = torch.randn(3, 2, 8, head_dim, generator=generator).to(dtype)
    cache = torch.randn(2, 12, 16, 2, head_dim, generator=generator).to(dtype)
    table = torch.randperm(12, generator=generator).int().view(3, 4)
    lens = torch.tensor([64, 0, 37], dtype=torch.int32)
    call = (q, *cache, torch.randn(8, generator=generator), lens, table, None, 20, 2, num_splits, False)
    assert_packed(ops.flash_decode_nvfp4(*call, 3.0), ops.flash_decode(*call), 3.0)


@pytest.mark.parametrize(("rows", "columns"), [(128, 4), (1, 1), (129, 5), (300, 12), (64, 9)])
def test_scales_by_tiles_lie_where_a_gemm_looks(rows: int, columns: int) -> None:
    """Against the definition, scale by scale: the offset within a tile, and tiles of the same rows side by side."""
    codes = torch.randint(1, 127, (rows, columns), dtype=torch.uint8)
    tiled = reference.nvfp4_scales_by_tiles(codes.view(torch.float8_e4m3fn))
    across = -(-columns // 4)
    assert tiled.shape == (-(-rows // 128) * 128, 4 * across)
    assert tiled.dtype == torch.float8_e4m3fn
    want = torch.zeros(tiled.numel(), dtype=torch.uint8)
    for row in range(rows):
        for column in range(columns):
            tile = row // 128 * across + column // 4
            inside = row % 32 * 16 + row % 128 // 32 * 4 + column % 4
            want[512 * tile + inside] = codes[row, column]
    assert tiled.view(torch.uint8).flatten().tolist() == want.tolist()


def test_the_quantiser_s_option() -> None:
    """Tokens of several dimensions are rows; what comes back is what the scales by rows give; a decode's join in."""
    x = torch.randn(2, 70, 3 * 16, generator=torch.Generator().manual_seed(0))
    values, scales = reference.quantize_nvfp4(x, 3.0)
    same, tiled = reference.quantize_nvfp4(x, 3.0, scale_layout="128x4")
    assert torch.equal(values, same)
    assert tiled.shape == (256, 4)
    again = reference.dequantize_nvfp4(values, tiled, 3.0, scale_layout="128x4")
    assert torch.equal(again, reference.dequantize_nvfp4(values, scales, 3.0))
    _, _, values, scales = ops.flash_decode_nvfp4(*of_one_key(edges(torch.bfloat16)))
    operand = reference.nvfp4_scales_by_tiles(scales.flatten(2))  # [tokens, num_q_heads * head_dim / 16]
    got = reference.dequantize_nvfp4(values.flatten(2), operand, scale_layout="128x4")
    torch.testing.assert_close(
        got, reference.dequantize_nvfp4(values, scales).flatten(2), rtol=0, atol=0, equal_nan=True
    )
    with pytest.raises(ValueError, match="scale_layout is 'cublas'; it must be 'rows' or '128x4'"):
        reference.quantize_nvfp4(x, scale_layout="cublas")  # type: ignore[arg-type]


def test_what_is_refused() -> None:
    call = decode_args()
    assert call[0].shape[-1] == 8
    with pytest.raises(ValueError, match="head_dim is 8; it must be a multiple of 16 for NVFP4"):
        ops.flash_decode_nvfp4(*call)
    call = of_one_key(torch.zeros(1, 256))
    for wrong in (0.0, -1.0, math.inf, math.nan, 1e-40):
        with pytest.raises(ValueError, match="global_scale is"):
            ops.flash_decode_nvfp4(*call, wrong)
    with pytest.raises(NotImplementedError, match="flash_decode has no backward"):
        ops.flash_decode_nvfp4(call[0].clone().requires_grad_(), *call[1:])  # type: ignore[attr-defined]


def test_opcheck() -> None:
    results = torch.library.opcheck(ops.flash_decode_nvfp4.default, (*of_one_key(torch.randn(2, 64)), 2.0))
    assert set(results.values()) == {"SUCCESS"}
