# SPDX-License-Identifier: Apache-2.0
"""Paged decode on a CUDA device: the bits of a contiguous cache, and tables that are wrong."""

import pytest
import torch
from gpu_caches import LENS, arguments, assert_same, buffers, decode_op, decode_out_op, make_cache
from gpus import needs_gpus
from torch import Tensor

import sinkattn

pytestmark = needs_gpus()


@pytest.mark.parametrize("options", [{}, {"num_splits": 3}, {"left": 127}, {"left": 127, "num_sink_tokens": 600}])
@pytest.mark.parametrize("page_size", [1, 16, 64, 128, 256])
def test_paged_is_contiguous_bit_for_bit(page_size: int, options: dict[str, int]) -> None:
    dense, paged = make_cache(LENS), make_cache(LENS, page_size)
    want = decode_op(*arguments(dense, **options))
    assert want[0].isfinite().all()
    assert_same(decode_op(*arguments(paged, **options)), want)


def test_more_than_2_31_elements() -> None:
    t, num_pages = make_cache([640]), 2**31 // (64 * 8 * 64) + 100
    assert t["k"] is not None
    cache = torch.empty(num_pages, 64, 8, 64, device="cuda", dtype=torch.bfloat16)
    cache[-10:] = t["k"].view(10, 64, 8, 64)
    table = torch.arange(num_pages - 10, num_pages, dtype=torch.int32, device="cuda").view(1, 10)
    far = t | {"k": cache, "v": cache, "block_table": table}
    assert_same(decode_op(*arguments(far)), decode_op(*arguments(t | {"v": t["k"]})))


def test_hostile_lengths_and_tables_are_contained_and_reported(seed: int) -> None:
    t = make_cache(LENS, 64)
    good = decode_op(*arguments(t))
    sinkattn.check_errors()
    table = t["block_table"]
    assert table is not None
    generator = torch.Generator().manual_seed(seed)

    def hostile(shape: torch.Size, top: int) -> Tensor:
        wild = torch.randint(-(2**31), 2**31, shape, generator=generator, dtype=torch.int64)
        near = torch.randint(-top, 2 * top, shape, generator=generator, dtype=torch.int64)
        return torch.where(torch.rand(shape, generator=generator) < 0.5, wild, near).int().cuda()

    room = 4096
    for index in range(200):
        bad = t | {"cache_seqlens": hostile(torch.Size([len(LENS)]), 2048), "block_table": hostile(table.shape, 200)}
        options = {"left": (-1, 127, 5)[index % 3], "num_splits": (0, 1, 5, -5)[index // 3 % 4]}
        canaries = []
        for buffer in buffers(bad, **options):
            around = torch.full((buffer.numel() * buffer.element_size() + 2 * room,), 0x5A, dtype=torch.uint8).cuda()
            inner = around[room : room + buffer.numel() * buffer.element_size()]
            canaries.append((around, inner.view(buffer.dtype).view(buffer.shape)))
        decode_out_op(*arguments(bad, **options), *(inner for _, inner in canaries))
        for around, _ in canaries:
            assert (around[:room] == 0x5A).all()
            assert (around[-room:] == 0x5A).all()
    with pytest.raises(ValueError, match=r"cache_seqlens was negative .* block_table named a page outside"):
        sinkattn.check_errors()
    sinkattn.check_errors()
    assert_same(decode_op(*arguments(t)), good)


def test_pages_that_no_row_sees_may_be_anything() -> None:
    t = make_cache([2048, 900], 64)
    table = t["block_table"]
    assert table is not None
    want = decode_op(*arguments(t, left=127, num_sink_tokens=4))
    table[0, 1:30], table[1, 15:] = -1, 2**31 - 1
    assert_same(decode_op(*arguments(t, left=127, num_sink_tokens=4)), want)
    sinkattn.check_errors()


def test_a_sliced_block_table_is_read_in_place() -> None:
    t = make_cache(LENS, 64)
    table = t["block_table"]
    assert table is not None
    wide = torch.full((table.shape[0], table.shape[1] + 7), -1, dtype=torch.int32, device="cuda")
    wide[:, : table.shape[1]] = table
    assert_same(decode_op(*arguments(t | {"block_table": wide[:, : table.shape[1]]})), decode_op(*arguments(t)))
