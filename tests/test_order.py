# SPDX-License-Identifier: Apache-2.0
"""One order of sums: a row has one bit pattern, whatever computes it, and docs/numerics.md says which.

Of CUDA's decodes, those with invariant=True give the prefill's row: tests/test_gpu_invariance.py.
"""

import math
import os

import numpy as np
import pytest
import torch
from order_cases import Walk, check

ROWS = int(os.environ.get("SINKATTN_ORDER_ROWS", "500"))  # over all levels and dtypes
ROWS_A_WALK = 5
CHUNK, TILE, SLACK = 512, 128, 6
LOG2_E = 1.44269504088896340736


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_one_bit_pattern(level: str, dtype: torch.dtype, seed: int, threads: None) -> None:
    for i in range(-(-ROWS // (6 * 3 * ROWS_A_WALK))):
        check(Walk(seed + i, dtype, most_keys=300 if level == "oracle" else 2100), ROWS_A_WALK)


def row_in_order(scores: np.ndarray, v: np.ndarray, keys: list[int], s: float) -> tuple[np.ndarray, float]:
    """out and LSE of one row, from scores in units of log(2), values and the keys that it sees. All sums in fp32."""
    total_pivot, total_sum, total_out = -np.inf, np.float32(0), np.zeros(v.shape[1], np.float32)
    for chunk in range(0, len(scores), CHUNK):
        pivot, sum_, out = -np.inf, np.float32(0), np.zeros(v.shape[1], np.float32)
        for tile in range(chunk, chunk + CHUNK, TILE):
            seen = [j for j in keys if tile <= j < tile + TILE]
            top = max((scores[j] for j in seen), default=-np.inf)
            old, pivot = pivot, np.rint(top) if top > pivot + SLACK else pivot
            tile_sum, tile_out = np.float32(0), np.zeros(v.shape[1], np.float32)
            for j in seen:
                weight = np.exp2(np.float32(scores[j] - pivot))
                tile_sum, tile_out = tile_sum + weight, tile_out + weight * v[j]
            alpha = np.float32(1 if old == pivot else np.exp2(old - pivot))
            sum_, out = sum_ * alpha + tile_sum, out * alpha + tile_out
        if pivot == -np.inf:
            continue
        old, total_pivot = total_pivot, max(total_pivot, pivot)
        kept, added = np.float32(np.exp2(old - total_pivot)), np.float32(np.exp2(pivot - total_pivot))
        total_sum, total_out = total_sum * kept + sum_ * added, total_out * kept + out * added
    pivot = float(total_pivot) / LOG2_E
    top = max(pivot, s)
    total = float(total_sum) * math.exp(pivot - top) + math.exp(s - top)
    return total_out * np.float32(math.exp(pivot - top) / total), top + math.log(total)


WINDOWS = [(-1, 0), (700, 3), (90, 4), (600, 540)]


@pytest.mark.parametrize(("left", "sinks"), WINDOWS)
@pytest.mark.parametrize("whole_scores", [True, False])
def test_the_order(level: str, left: int, sinks: int, whole_scores: bool) -> None:
    """With scores that are integers in units of log(2) a weight is a power of two, whatever computes it, and all bits
    are the order's. With other scores the weights' last bits are a level's own."""
    if level == "oracle":
        pytest.skip("sums in double")
    n, generator = 1300, torch.Generator().manual_seed(5)
    q, k, v = torch.randn(3, 1, n, 1, 16, generator=generator)
    scale, s = math.log(2) if whole_scores else 0.7, 1.5
    if whole_scores:
        q, k = (q * 1.5).round(), (k * 1.5).round()
    found = torch.ops.sinkattn.flash_attn_fwd(q, k, v, torch.tensor([s]), None, None, None, None, scale, left, 0, sinks)
    for row in (0, 127, 128, 511, 512, 513, 640, 1100, n - 1):
        keys = [j for j in range(row + 1) if left < 0 or j >= row - left or j < sinks]
        scores = (k[0, :, 0] @ q[0, row, 0] * np.float32(scale * LOG2_E)).numpy()
        out, lse = row_in_order(scores, v[0, :, 0].numpy(), keys, s)
        got, got_lse = found[0][0, row, 0].numpy(), float(found[1][0, 0, row])
        if whole_scores:
            assert got.tobytes() == out.tobytes(), row
            assert got_lse == np.float32(lse), row
        else:
            np.testing.assert_allclose(got, out, rtol=0, atol=2e-6)
            assert abs(got_lse - lse) < 2e-6 * max(1, abs(lse))


def test_large_scores(level: str) -> None:
    """The only key of a row weighs 1, also where neighbouring floats are further apart than any weight may be. Levels
    that fuse the scale into the difference do so up to 2^29: docs/numerics.md."""
    largest = 124 if level in ("scalar", "oracle") else 29
    draws = [torch.rand(32, generator=torch.Generator().manual_seed(e)) for e in range(largest)]
    sizes = torch.cat([2.0**e * (1 + x) for e, x in enumerate(draws)])
    scores = torch.cat([sizes, -sizes])
    k, v = torch.zeros(len(scores), 1, 1, 8), torch.randn(len(scores), 1, 1, 8)
    k[:, 0, 0, 0] = scores
    out, lse = torch.ops.sinkattn.flash_attn_fwd(torch.ones_like(k), k, v, None, None, None, None, None, 1.0, -1, -1, 0)
    torch.testing.assert_close(out, v, rtol=1e-5, atol=0)
    torch.testing.assert_close(lse.flatten(), scores, rtol=1e-6, atol=1e-6)
