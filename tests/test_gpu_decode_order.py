# SPDX-License-Identifier: Apache-2.0
"""Decodes with invariant on a CUDA device: a row has the prefill's bits, in any batch and from any pages.

SINKATTN_ORDER_ROWS is how many rows of each dtype are decoded, each in batches from five page sizes.
"""

import os

import pytest
import torch
from gpu_caches import assert_same
from gpus import captured, needs_gpus
from order_cases import Walk, check
from torch import Tensor

import sinkattn

pytestmark = needs_gpus()
ROWS = int(os.environ.get("SINKATTN_ORDER_ROWS", "320"))
ROWS_A_WALK = 5
ops = torch.ops.sinkattn


@pytest.mark.parametrize("part", range(4))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_one_bit_pattern(dtype: torch.dtype, seed: int, part: int) -> None:
    for i in range(part, ROWS // ROWS_A_WALK, 4):
        check(Walk(seed + i, dtype, "cuda", invariant=True, workers=(1,), most_keys=7000), ROWS_A_WALK)
    sinkattn.check_errors()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_chunks(dtype: torch.dtype, seed: int) -> None:
    for i in range(4):
        check(Walk(seed + i, dtype, "cuda", invariant=True, workers=(1,), chunks=True), 2)
    sinkattn.check_errors()


@pytest.mark.parametrize(("head_dim", "batch"), [(64, 2), (64, 64), (128, 64), (64, 200), (64, 260), (128, 260)])
def test_chunks_of_a_large_capacity(head_dim: int, batch: int) -> None:
    """Few of the chunks that the cache has room for. In larger batches a block has several, of 260 all of a stream."""
    generator = torch.Generator("cuda").manual_seed(head_dim)
    q, k, v = (
        torch.randn(*shape, head_dim, generator=generator, device="cuda", dtype=torch.bfloat16)
        for shape in ((batch, 2, 16), (2048, 64, 2), (2048, 64, 2))
    )
    ends = torch.randint(0, 131073, (batch,), generator=generator, device="cuda", dtype=torch.int32)
    ends[:2] = torch.tensor([0, 131072])
    table = torch.arange(2048, device="cuda", dtype=torch.int32).expand(batch, -1).contiguous()
    out, lse = ops.flash_decode(q, k, v, None, ends, table, None, -1, 0, 0, True)
    for b, end in enumerate(ends.tolist()):
        keys = [x.view(1, -1, 2, head_dim)[:, :end] for x in (k, v)]
        want = ops.flash_attn_fwd(q[b : b + 1], *keys, None, None, None, None, None, None, -1, 0, 0)
        assert_same((out[b], lse[b]), tuple(x[0] for x in want))


def rows_of_a_prefill(
    dtype: torch.dtype, size: float, left: int, signs: float, keys: int, head_dim: int = 64
) -> tuple[Tensor, ...]:
    generator = torch.Generator("cuda").manual_seed(1)
    q, k, v = (
        torch.randn(1, keys, heads, head_dim, generator=generator, device="cuda", dtype=dtype) for heads in (16, 2, 2)
    )
    if signs:  # scores all of one sign
        q, k = signs * q.abs(), k.abs()
    q, s_aux = q * size, torch.randn(16, generator=generator, device="cuda")
    return q, k, v, s_aux, *ops.flash_attn_fwd(q, k, v, s_aux, None, None, None, None, None, left, 0, 0)


@pytest.mark.parametrize(("left", "head_dim"), [(-1, 64), (700, 64), (127, 64), (127, 128), (60, 96), (-1, 96)])
@pytest.mark.parametrize(("size", "signs"), [(1, 0), (12, 0), (60, 0), (4, -1), (12, -1), (12, 1)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_pivots_that_move(dtype: torch.dtype, size: float, signs: float, left: int, head_dim: int) -> None:
    """Scores up to some hundreds, or all far below 0."""
    q, k, v, s_aux, out, lse = rows_of_a_prefill(dtype, size, left, signs, 1700, head_dim)
    for rows, batch in ((1, 4), (1, 9), (1, 18), (3, 18)):  # clusters of all kinds
        for ends in torch.arange(rows, 1700, 97, device="cuda", dtype=torch.int32).split(batch):
            picked = ends[:, None] - rows + torch.arange(rows, device="cuda")
            caches = [x.expand(len(ends), -1, -1, -1) for x in (k, v)]
            found = ops.flash_decode(q[0, picked], *caches, s_aux, ends, None, None, left, 0, 0, True)
            assert_same(found, (out[0, picked], lse[0, :, picked].movedim(1, 0)))


@pytest.mark.parametrize("batch", [1, 20, 64, 260])
@pytest.mark.parametrize("first", [0, 700])
def test_a_pivot_that_cannot_move(first: int, batch: int) -> None:
    """Rounding leaves the pivot so far below its own score that the weight is infinite."""
    q, k, v = (torch.ones(1, n, 1, 64, device="cuda", dtype=torch.bfloat16) for n in (1, 1100, 1100))
    q, k[:, first:] = q * 16384, 24576.0
    ends = torch.full((batch,), 1100, device="cuda", dtype=torch.int32)
    caches = [x.expand(batch, -1, -1, -1) for x in (k, v)]
    found = ops.flash_decode(q.expand(batch, -1, -1, -1), *caches, None, ends, None, None, -1, 0, 0, True)
    want = ops.flash_attn_fwd(q, k, v, None, None, None, None, None, None, -1, 0, 0)
    for x, y in zip(found, want, strict=False):
        assert torch.equal(x[:1].nan_to_num(1e9), y.nan_to_num(1e9))


@pytest.mark.parametrize("batch", [1, 6, 144])
@pytest.mark.parametrize(("head_dim", "chunk"), [(64, 8192), (128, 20480)])
def test_rows_on_both_sides_of_a_chunks_end(head_dim: int, chunk: int, batch: int) -> None:
    """Some rows see nothing of the last chunk; 144 sequences are work of blocks of 4 warps."""
    q, k, v, s_aux, out, lse = rows_of_a_prefill(torch.bfloat16, 1, -1, 0, chunk + 16, head_dim)
    ends = torch.tensor([chunk + x for x in (0, 1, 3, 7, 8, 9)], device="cuda", dtype=torch.int32)
    for some in ends.repeat(max(1, batch // len(ends))).split(batch):
        caches = [x.expand(len(some), -1, -1, -1) for x in (k, v)]
        for rows in (2, 8):
            picked = some[:, None] - rows + torch.arange(rows, device="cuda")
            found = ops.flash_decode(q[0, picked], *caches, s_aux, some, None, None, -1, 0, 0, True)
            assert_same(found, (out[0, picked], lse[0, :, picked].movedim(1, 0)))


@pytest.mark.parametrize("keys", [3000, 17000])
def test_a_graph_has_the_prefills_bits(keys: int) -> None:
    q, k, v, s_aux, out, lse = rows_of_a_prefill(torch.bfloat16, 2, -1, 0, keys)
    row, length = q[:, :1].clone(), torch.full((1,), keys, dtype=torch.int32, device="cuda")
    found: list[Tensor] = []

    def step() -> None:
        found[:] = ops.flash_decode(row, k, v, s_aux, length, None, None, -1, 0, 0, True)

    graph = captured(step)
    for end in (keys, 1, 128, 129, 1300, 2047, keys // 2, keys - 1):
        row.copy_(q[:, end - 1 : end])
        length.fill_(end)
        graph.replay()
        assert_same(tuple(found), (out[:, end - 1 : end], lse[:, :, end - 1 : end]))


@pytest.mark.parametrize("page_size", [0, 1, 16, 64])
@pytest.mark.parametrize(("left", "heads"), [(127, (8, 1)), (127, (4, 2)), (100, (8, 1)), (75, (16, 2))])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_caches_shorter_than_the_window(dtype: torch.dtype, left: int, heads: tuple[int, int], page_size: int) -> None:
    """Capacities below the window's left: all rows of short sequences."""
    generator = torch.Generator("cuda").manual_seed(left)
    q, k, v = (torch.randn(64, n, 64, generator=generator, device="cuda").to(dtype) for n in (heads[0], *heads[1:] * 2))
    s_aux = torch.randn(heads[0], generator=generator, device="cuda")
    out, *stats = ops.flash_attn_fwd_raw(q[None], k[None], v[None], s_aux, None, None, None, None, None, left, 0, 0)
    for capacity in (16, 48, 64):
        size = min(page_size, capacity) or capacity
        for rows in (1, 3, 8):
            ends = torch.arange(rows, capacity + 1, device="cuda")
            picked = ends[:, None] - rows + torch.arange(rows, device="cuda")
            caches = [x[:capacity].view(-1, size, *x.shape[1:]) for x in (k, v)]
            table = torch.arange(capacity // size, device="cuda", dtype=torch.int32).expand(len(ends), -1).contiguous()
            if page_size == 0:
                caches, table = [x.expand(len(ends), -1, -1, -1) for x in caches], None
            found = ops.flash_decode_raw(q[picked], *caches, s_aux, ends.int(), table, None, left, 0, 0, True)
            assert_same(found, (out[0, picked], *(x[0, :, picked].movedim(1, 0) for x in stats)))
