# SPDX-License-Identifier: Apache-2.0
"""Graphs and streams of decode on a CUDA device: lengths that change between replays, calls at the same time."""

import pytest
import torch
from gpu_caches import arguments, assert_close, assert_same, buffers, decode_op, decode_out_op, make_cache
from gpus import captured, needs_gpus

import sinkattn

pytestmark = needs_gpus()


@pytest.mark.parametrize("options", [{}, {"num_splits": 5}, {"num_splits": -5}, {"left": 127}])
def test_lengths_change_between_replays(options: dict[str, int]) -> None:
    t = make_cache([4096] * 4, 64)
    out, lse, scratch = buffers(t, **options)
    graph = captured(lambda: decode_out_op(*arguments(t, **options), out, lse, scratch))
    for lens in ([4096, 1, 0, 77], [1, 1, 1, 1], [0, 0, 0, 0], [4095, 4096, 4096, 4096], [300, 2000, 17, 4096]):
        assert t["cache_seqlens"] is not None
        t["cache_seqlens"].copy_(torch.tensor(lens, dtype=torch.int32))
        want = decode_op(*arguments(t, **options))
        for _ in range(3):
            out.fill_(torch.nan)
            graph.replay()
            assert_same((out, lse), want)


@pytest.mark.parametrize("capacity", [2048, 4096])
def test_lengths_under_shares_change_between_replays(capacity: int, seed: int) -> None:
    t = make_cache([2048] * 64, 64, capacity=capacity)
    out, lse, scratch = buffers(t)
    graph = captured(lambda: decode_out_op(*arguments(t), out, lse, scratch))
    generator = torch.Generator().manual_seed(seed)
    for top in (2048, 1, 2, 500, 2048, 30, 2048):
        lengths = torch.randint(0, top + 1, (64,), generator=generator)
        for some in (slice(0), slice(8, 48), slice(64)):  # have none
            lengths[some] = 0
            t["cache_seqlens"].copy_(lengths)
            want = decode_op(*arguments(t))
            assert_close(want, decode_op(*arguments(t, num_splits=1)))
            for _ in range(3):
                out.fill_(torch.nan)
                lse.fill_(torch.nan)
                graph.replay()
                assert_same((out, lse), want)


@pytest.mark.parametrize("options", [{}, {"left": 700}, {"left": 300, "num_sink_tokens": 600}])
@pytest.mark.parametrize("page_size", [0, 1, 64])
@pytest.mark.parametrize("q_len", [1, 2])
def test_parts_that_are_a_cluster(q_len: int, page_size: int, options: dict[str, int]) -> None:
    """One sequence of at most 4096 keys, whose lengths, and so the number of parts, change between replays."""
    t = make_cache([4096], page_size, q_len=q_len)
    out, lse, scratch = buffers(t, **options)
    graph = captured(lambda: decode_out_op(*arguments(t, **options), out, lse, scratch))
    for length in (4096, 1, 0, 17, 129, 4096, 1000, 300, 2049, 3):
        t["cache_seqlens"].fill_(length)
        want = decode_op(*arguments(t, **options))
        assert_close(want, decode_op(*arguments(t, **options, num_splits=1)))
        for _ in range(3):
            out.fill_(torch.nan)
            graph.replay()
            assert_same((out, lse), want)
    sinkattn.check_errors()


@pytest.mark.parametrize(("batch", "length"), [(1, 8192), (33, 2048), (66, 1024), (66, 4096)])
def test_keys_that_the_kernel_in_front_writes(batch: int, length: int) -> None:
    """out of one decode is k of the next, whose blocks start before and ask the L2 cache for it."""
    t = make_cache([length] * batch, 64)
    assert t["k"] is not None
    front = make_cache([512] * t["k"].shape[0], kv_heads=1, q_len=64)  # its last blocks run on when the next ones come
    assert front["q"] is not None
    written, wrote = buffers(t), buffers(front, num_splits=1)
    t["k"] = wrote[0]

    def write() -> None:
        decode_out_op(*arguments(front, num_splits=1), *wrote)

    def both() -> None:
        write()
        decode_out_op(*arguments(t), *written)

    graph = captured(both)
    for _ in range(3):
        front["q"].normal_()
        write()
        torch.cuda.synchronize()
        want = decode_op(*arguments(t))
        wrote[0].zero_()
        graph.replay()
        assert_same(written[:2], want)


@pytest.mark.parametrize("num_splits", [0, 5, -5])
def test_two_streams_at_once(num_splits: int) -> None:
    work = [make_cache(lens, 64, capacity=4096) for lens in ([4096, 300, 1], [17, 2222, 4000])]
    want = [decode_op(*arguments(t, num_splits=num_splits)) for t in work]
    streams = [torch.cuda.Stream() for _ in work]
    graphs, results = [], []  # a graph has addresses only: its out, lse and scratch are kept here
    for t in work:
        written = buffers(t, num_splits=num_splits)
        call = (*arguments(t, num_splits=num_splits), *written)
        graphs.append(captured(lambda c=call: decode_out_op(*c)))
        results.append(written)
    different = [torch.zeros((), dtype=torch.int64, device="cuda") for _ in work]
    torch.cuda.synchronize()
    for index in range(200):
        for i, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                if index % 2:
                    graphs[i].replay()
                    got = results[i]
                else:
                    got = decode_op(*arguments(work[i], num_splits=num_splits))
                different[i] += (got[0] != want[i][0]).sum() + (got[1] != want[i][1]).sum()
    torch.cuda.synchronize()
    assert [x.item() for x in different] == [0, 0]
