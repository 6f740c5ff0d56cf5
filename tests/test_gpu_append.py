# SPDX-License-Identifier: Apache-2.0
"""Keys and values appended to a cache on a CUDA device."""

from collections.abc import Callable

import pytest
import torch
from gpu_caches import append_op, assert_same, make_cache
from gpus import launched, needs_gpus
from torch import Tensor

import sinkattn

pytestmark = needs_gpus()


def make_append(
    lens: list[int], new: int, page_size: int = 0, dtype: torch.dtype = torch.bfloat16, head_dim: int = 64
) -> list[Tensor | None]:
    """k_cache, v_cache, k, v, cache_seqlens, block_table on the CPU: three kv heads, a capacity of 64."""
    generator = torch.Generator().manual_seed(7)
    batch, capacity = len(lens), 64
    pages = (batch * capacity // page_size + 2, page_size) if page_size else (batch, capacity)
    caches = torch.randn(2, *pages, 3, head_dim, generator=generator).to(dtype)
    k, v = torch.randn(2, batch, new, 3, head_dim, generator=generator).to(dtype)
    table = None
    if page_size:
        table = torch.randperm(pages[0], generator=generator)[: batch * capacity // page_size].int().view(batch, -1)
    return [caches[0], caches[1], k, v, torch.tensor(lens, dtype=torch.int32), table]


def to_device(tensors: list[Tensor | None]) -> list[Tensor | None]:
    return [None if x is None else x.cuda() for x in tensors]


@pytest.mark.parametrize("page_size", [0, 1, 16])
@pytest.mark.parametrize("new", [0, 1, 5, 40])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("head_dim", [8, 64, 512])
def test_appending_is_the_cpu_s(head_dim: int, dtype: torch.dtype, new: int, page_size: int) -> None:
    ours = make_append([0, 17, 64 - new, 3], new, page_size, dtype, head_dim)
    theirs = to_device(ours)
    want, got = append_op(*ours), append_op(*theirs)
    assert torch.equal(got.cpu(), want)
    assert_same((theirs[0].cpu(), theirs[1].cpu()), (ours[0], ours[1]))
    sinkattn.check_errors()


@pytest.mark.parametrize("turned", [lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
                                    lambda x: torch.cat([x, x], -1)[..., 64:],
                                    lambda x: torch.cat([x, x[..., :3]], -1)[..., :64]])  # fmt: skip
def test_appending_with_any_strides(turned: Callable[[Tensor], Tensor]) -> None:
    ours = make_append([5, 17, 60], 4)
    theirs = [x if x is None or x.dim() == 1 else turned(x) for x in to_device(ours)]
    append_op(*ours)
    append_op(*theirs)
    assert_same((theirs[0].cpu(), theirs[1].cpu()), (ours[0], ours[1]))


@pytest.mark.parametrize("page_size", [0, 64])
@pytest.mark.parametrize("q_len", [1, 3])
def test_appending_and_attending_in_one_call(q_len: int, page_size: int) -> None:
    lens = [1500, 33, 700, 2045]
    t = make_cache(lens, page_size, capacity=2048, q_len=q_len)
    k, v = torch.randn(2, 4, q_len, 8, 64, device="cuda", dtype=torch.bfloat16)
    options = {"cache_seqlens": t["cache_seqlens"], "block_table": t["block_table"], "s_aux": t["s_aux"]}
    got = sinkattn.flash_attn_with_kvcache(t["q"], t["k"], t["v"], k, v, causal=True, return_lse=True, **options)
    options["cache_seqlens"] = t["cache_seqlens"] + q_len
    want = sinkattn.flash_attn_with_kvcache(t["q"], t["k"], t["v"], causal=True, return_lse=True, **options)
    assert_same(got, want)
    for b, start in enumerate(lens):
        for slot in range(start, start + q_len):
            at = (b, slot) if t["block_table"] is None else (int(t["block_table"][b, slot // 64]), slot % 64)
            assert torch.equal(t["k"][at], k[b, slot - start])
            assert torch.equal(t["v"][at], v[b, slot - start])
    assert got[0].isfinite().all()  # what is past the new keys is NaN
    sinkattn.check_errors()


@pytest.mark.parametrize("page_size", [0, 16])
def test_hostile_lengths_and_tables_write_no_other_slot(page_size: int, seed: int) -> None:
    generator, room = torch.Generator().manual_seed(seed), 4096
    reported = set()
    for _ in range(100):
        ours = make_append([0] * 4, 3, page_size)
        lens, table = ours[4], ours[5]
        lens.copy_(torch.randint(-4, 70, lens.shape, generator=generator))
        wild = torch.randint(-(2**31), 2**31, lens.shape, generator=generator).int()
        lens.copy_(torch.where(torch.rand(lens.shape, generator=generator) < 0.3, wild, lens))
        if page_size:
            bad = torch.rand(table.shape, generator=generator) < 0.3
            table.masked_fill_(bad, (-1, -(2**31), 2**31 - 1, ours[0].shape[0])[int(lens[0]) % 4])
        around = torch.full((2, ours[0].numel() + 2 * room), -7.0, dtype=torch.bfloat16, device="cuda")
        theirs = to_device(ours)
        for i in range(2):
            inner = around[i, room:-room].view(ours[0].shape)
            theirs[i] = inner.copy_(ours[i])
        after = append_op(*theirs)
        wanted, bits = (ours[0].clone(), ours[1].clone()), 0
        for b, used in enumerate(lens.tolist()):
            begin = min(max(used, 0), 64)
            end = min(begin + 3, 64)
            bits |= begin != used or end != used + 3
            for slot in range(begin, end):
                page = int(table[b, slot // page_size]) if page_size else b
                if not 0 <= page < ours[0].shape[0]:
                    bits |= 2
                    continue
                for cache, rows in zip(wanted, ours[2:4], strict=True):
                    cache[page, slot % page_size if page_size else slot] = rows[b, slot - begin]
            assert int(after[b]) == end
        assert_same((theirs[0].cpu(), theirs[1].cpu()), wanted)
        assert (around[:, :room] == -7).all()
        assert (around[:, -room:] == -7).all()
        words = {1: ["cache_seqlens"], 2: ["block_table"], 3: ["cache_seqlens", "block_table"]}.get(bits, [])
        reported.add(bits)
        if words:
            with pytest.raises(ValueError, match=".*".join(words)) as error:
                sinkattn.check_errors()
            assert ("block_table" in str(error.value)) == (bits > 1)
        sinkattn.check_errors()
    assert len(reported) > 1


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_slots_are_the_cpu_s(page_size: int, dtype: torch.dtype) -> None:
    k_cache, v_cache, k, v, _, _ = make_append([0] * 4, 9, page_size)
    rows = [x.flatten(0, 1) for x in (k, v)]
    slots = torch.randperm(k_cache.shape[0] * page_size, generator=torch.Generator().manual_seed(3))[:30].to(dtype)
    slots[::7] = -1
    theirs = to_device([k_cache, v_cache, *rows, slots])
    torch.ops.sinkattn.append_kv_slots(k_cache, v_cache, *rows, slots)
    torch.ops.sinkattn.append_kv_slots(*theirs)
    assert_same((theirs[0].cpu(), theirs[1].cpu()), (k_cache, v_cache))
    sinkattn.check_errors()


@pytest.mark.parametrize("first", [0, 64])
@pytest.mark.parametrize("page_size", [0, 1, 16])
def test_keys_alone_are_the_cpu_s(page_size: int, first: int) -> None:
    """Of one latent, whose values are columns of its keys."""
    keys, _, new, _, lens, table = make_append([0, 17, 62, 3], 2, page_size, head_dim=576)
    theirs = keys.cuda()
    want = append_op(keys, keys[..., first : first + 512], new, None, lens, table)
    got = append_op(theirs, theirs[..., first : first + 512], *to_device([new, None, lens, table]))
    assert_same((got.cpu(), theirs.cpu()), (want, keys))
    if page_size:
        slots = torch.tensor([-1, 40, 3, 7, 0, 11, 25])
        rows, ours = new.flatten(0, 1) + 1, (keys, keys[..., first : first + 512])
        torch.ops.sinkattn.append_kv_slots(*ours, rows, None, slots)
        torch.ops.sinkattn.append_kv_slots(theirs, theirs[..., first : first + 512], rows.cuda(), None, slots.cuda())
        assert torch.equal(theirs.cpu(), keys)
    sinkattn.check_errors()


def test_slots_outside_are_left_out_and_reported() -> None:
    k_cache, v_cache, k, v, _, _ = to_device(make_append([0] * 4, 1, 16))
    num_slots, k, v = k_cache.shape[0] * 16, k.flatten(0, 1), v.flatten(0, 1)
    before = k_cache.clone()
    slots = torch.tensor([num_slots, 2**62, -5, 3], device="cuda")
    torch.ops.sinkattn.append_kv_slots(k_cache, v_cache, k, v, slots)
    before[0, 3] = k[3]
    assert torch.equal(k_cache, before)
    with pytest.raises(ValueError, match="slot_mapping named a slot outside the cache, whose row was not written"):
        sinkattn.check_errors()


def test_appending_past_2_31_elements() -> None:
    pages = 2**31 // (64 * 8 * 64) + 10
    cache = torch.zeros(pages, 64, 8, 64, device="cuda", dtype=torch.bfloat16)
    k = torch.randn(1, 3, 8, 64, device="cuda", dtype=torch.bfloat16)
    table = torch.tensor([[pages - 1, 0, pages - 2]], dtype=torch.int32, device="cuda")
    append_op(cache, torch.zeros_like(cache), k, k, torch.tensor([62], dtype=torch.int32, device="cuda"), table)
    assert_same((cache[-1, 62:], cache[0, :1]), (k[0, :2], k[0, 2:]))
    cache[-1, 62:], cache[0, :1] = 0, 0
    assert not cache.any()


@pytest.mark.parametrize("page_size", [0, 64])
def test_a_captured_graph_appends_where_lengths_say(page_size: int) -> None:
    t = make_cache([5] * 4, page_size, capacity=512)
    t["k"].zero_(), t["v"].zero_()
    k, v = torch.randn(2, 4, 1, 8, 64, device="cuda", dtype=torch.bfloat16)
    lens, table = t["cache_seqlens"], t["block_table"]

    def step() -> object:
        return sinkattn.flash_attn_with_kvcache(
            t["q"], t["k"], t["v"], k, v, cache_seqlens=lens, block_table=table, s_aux=t["s_aux"]
        )

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
        lens.add_(1)
    lens.copy_(torch.tensor([0, 100, 400, 5]))
    for _ in range(20):
        k.normal_(), v.normal_()
        before = t["k"].clone(), t["v"].clone(), lens.clone()
        graph.replay()
        assert torch.equal(lens, before[2] + 1)
        append_op(*before[:2], k, v, before[2], table)
        assert_same((t["k"], t["v"]), before[:2])
        want = sinkattn.flash_attn_with_kvcache(
            t["q"], t["k"], t["v"], cache_seqlens=lens, block_table=table, s_aux=t["s_aux"]
        )
        assert torch.equal(out, want)


def test_appending_is_one_launch_without_a_sync() -> None:
    arguments_ = to_device(make_append([5, 17, 60], 1, 16))
    append_op(*arguments_)
    torch.cuda.synchronize()
    on_gpu = launched(lambda: append_op(*arguments_))
    assert len(on_gpu) == 1, on_gpu
    assert "append_kernel" in on_gpu[0]
