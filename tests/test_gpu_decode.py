# SPDX-License-Identifier: Apache-2.0
"""Decode on a CUDA device. SINKATTN_GPU_CASES is the number of random configurations."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable

import pytest
import torch
from gpus import needs_gpus
from test_decode import CASES
from test_gpu import on_device
from torch import Tensor

import sinkattn
from sinkattn import _C
from sinkattn._testing import (
    DTYPES,
    EDGES,
    Case,
    Inputs,
    Outcome,
    compare_all,
    evaluate,
    make_inputs,
    random_case,
    run_ops,
)

pytestmark = needs_gpus()
RANDOM_CASES = int(os.environ.get("SINKATTN_GPU_CASES", "500"))
SERVED = [name for name in CASES if not ("invariant" in name and "d512" in name)]
decode_op, decode_out_op = torch.ops.sinkattn.flash_decode, torch.ops.sinkattn.flash_decode_out
append_op = torch.ops.sinkattn.append_kv


def cache_on_device(case: Case, t: Inputs) -> Inputs:
    assert t.cache_seqlens is not None
    table = None if t.block_table is None else t.block_table.cuda()
    return dataclasses.replace(on_device(case, t), cache_seqlens=t.cache_seqlens.cuda(), block_table=table)


def assert_right_on_device(case: Case, least_cosine: float = -1.0) -> None:
    t = make_inputs(case)
    got = {name: x.cpu() for name, x in run_ops(case, cache_on_device(case, t), sinkattn).items()}
    ref = evaluate(case, t)
    outcome = Outcome(case, "cuda", compare_all(case, t, got, ref, evaluate(case, t, DTYPES[case.dtype])))
    assert not outcome.failures, str(outcome)
    cosine = torch.nn.functional.cosine_similarity(got["out"].double().flatten(), ref["out"].flatten(), 0)
    assert not cosine < least_cosine, f"cosine {cosine}: {outcome}"


@pytest.mark.parametrize("name", SERVED)
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_case(name: str, dtype: str) -> None:
    assert_right_on_device(Case.parse(f"{name}-{dtype}"))


def test_random_configurations_against_fp64(seed: int) -> None:
    found, index = 0, 0
    while found < RANDOM_CASES:
        case = random_case(f"{seed}-{index}")
        index += 1
        if not case.decode:
            continue
        found += 1
        dtype = case.dtype if case.dtype in ("bf16", "fp16") else "bf16"
        assert_right_on_device(
            dataclasses.replace(case, dtype=dtype, invariant=case.invariant and case.head_dim <= 256)
        )


MASKS = {
    "window": {"left": 127},
    "causal": {},
    "sink": {"left": 127, "num_sink_tokens": 4},
    "prefix": {"left": 63, "num_sink_tokens": 700},
    "all": {"left": 200, "num_sink_tokens": 17, "q_lens": (3,) * 4},
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("num_splits", [0, 1, 2, 8, -8])
@pytest.mark.parametrize("head_dim", [64, 128, 256, 512])
def test_parity(head_dim: int, num_splits: int, mask: str) -> None:
    case = Case(
        head_dim=head_dim, right=0, ratio=8, kv_heads=2, layout="paged", page_size=16, q_lens=(1,) * 4,
        k_lens=(1500, 37, 0, 801), num_splits=num_splits, poison=True, dtype="bf16", seed=1,
    )  # fmt: skip
    assert_right_on_device(dataclasses.replace(case, **MASKS[mask]), least_cosine=0.999998)


@pytest.mark.parametrize("edge", EDGES)
@pytest.mark.parametrize("num_splits", [0, 3])
def test_edges_of_s_aux(edge: str, num_splits: int) -> None:
    case = Case(right=0, ratio=8, layout="cache", q_lens=(2,) * 3, k_lens=(900, 1, 0), s_aux=edge, dtype="bf16", seed=1)
    assert_right_on_device(dataclasses.replace(case, num_splits=num_splits))


@pytest.mark.parametrize("ratio", [1, 3, 8, 16, 20, 64, 128])
@pytest.mark.parametrize("q_len", [1, 2, 16, 33])
def test_rows_of_several_tiles(ratio: int, q_len: int) -> None:
    case = Case(right=0, left=300, ratio=ratio, layout="cache", q_lens=(q_len,) * 2, k_lens=(700, 20), dtype="bf16")
    assert_right_on_device(case)


def make_cache(
    lens: list[int], page_size: int = 0, capacity: int = 0, kv_heads: int = 8, head_dim: int = 64, q_len: int = 1
) -> dict[str, Tensor | None]:
    """gpt-oss's heads; slots past a sequence's end, and pages that no sequence has, hold NaN."""
    generator = torch.Generator("cuda").manual_seed(0)
    batch, capacity = len(lens), capacity or max(*lens, 1)
    shape = (2, batch, capacity, kv_heads, head_dim)
    cache = torch.randn(shape, device="cuda", dtype=torch.bfloat16, generator=generator)
    seqlens = torch.tensor(lens, dtype=torch.int32, device="cuda")
    cache.masked_fill_((torch.arange(capacity, device="cuda") >= seqlens[:, None])[None, :, :, None, None], torch.nan)
    q = torch.randn(batch, q_len, 8 * kv_heads, head_dim, device="cuda", dtype=torch.bfloat16, generator=generator)
    s_aux = 2 * torch.randn(8 * kv_heads, device="cuda", generator=generator)
    table = None
    if page_size:
        assert capacity % page_size == 0
        count = batch * capacity // page_size
        order = torch.randperm(count + 3, device="cuda", generator=generator)
        pages = cache.new_full((2, count + 3, page_size, kv_heads, head_dim), torch.nan)
        pages[:, order[:count]] = cache.view(2, count, page_size, kv_heads, head_dim)
        table, cache = order[:count].int().view(batch, -1), pages
    return {"q": q, "k": cache[0], "v": cache[1], "s_aux": s_aux, "cache_seqlens": seqlens, "block_table": table}


def arguments(
    t: dict[str, Tensor | None], left: int = -1, num_sink_tokens: int = 0, num_splits: int = 0
) -> tuple[object, ...]:
    return (*t.values(), None, left, num_sink_tokens, num_splits, False)


def buffers(
    t: dict[str, Tensor | None], left: int = -1, num_sink_tokens: int = 0, num_splits: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """out, lse and scratch of flash_decode_out."""
    q, k, table = t["q"], t["k"], t["block_table"]
    assert q is not None
    assert k is not None
    sizes = {"page_size": k.shape[1], "num_pages": k.shape[0]} if table is not None else {}
    plan = sinkattn.plan(
        "decode", _C.query_cuda(0), dtype="bf16", batch=q.shape[0], num_q_heads=q.shape[2], num_kv_heads=k.shape[2],
        head_dim=q.shape[3], q_len=q.shape[1], k_len=k.shape[1] * (1 if table is None else table.shape[1]),
        s_aux_dtype="fp32", window_size_left=left, window_size_right=0, num_sink_tokens=num_sink_tokens,
        num_splits=num_splits, **sizes,
    )  # fmt: skip
    lse = torch.empty(q.shape[0], q.shape[2], q.shape[1], device="cuda")
    return torch.empty_like(q), lse, torch.empty(plan["workspace_bytes"], dtype=torch.uint8, device="cuda")


def assert_same(got: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> None:
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)


LENS = [1500, 0, 700, 33, 2048, 1]


@pytest.mark.parametrize("options", [{}, {"num_splits": 3}, {"left": 127}, {"left": 127, "num_sink_tokens": 600}])
@pytest.mark.parametrize("page_size", [1, 16, 64, 128, 256])
def test_paged_is_contiguous_bit_for_bit(page_size: int, options: dict[str, int]) -> None:
    dense, paged = make_cache(LENS), make_cache(LENS, page_size)
    want = decode_op(*arguments(dense, **options))
    assert want[0].isfinite().all()
    assert_same(decode_op(*arguments(paged, **options)), want)


@pytest.mark.parametrize("num_splits", [1, 3, 8])
def test_a_fixed_split_does_not_depend_on_the_batch(num_splits: int) -> None:
    t = make_cache(LENS)
    out, lse = decode_op(*arguments(t, num_splits=num_splits))
    for b in range(len(LENS)):
        alone = {name: x[b : b + 1] if x is not None and name != "s_aux" else x for name, x in t.items()}
        assert_same(decode_op(*arguments(alone, num_splits=num_splits)), (out[b : b + 1], lse[b : b + 1]))


@pytest.mark.parametrize("options", [{}, {"left": 127}, {"left": 300, "num_sink_tokens": 600}])
@pytest.mark.parametrize("page_size", [0, 1, 64])
@pytest.mark.parametrize("q_len", [1, 3])
@pytest.mark.parametrize("head_dim", [64, 128, 256, 512])
def test_two_passes_are_one_bit_for_bit(head_dim: int, q_len: int, page_size: int, options: dict[str, int]) -> None:
    t = make_cache(LENS, page_size, kv_heads=2, head_dim=head_dim, q_len=q_len)
    for num_splits in (1, 2, 3, 8, 9, 40, 1000):
        want = decode_op(*arguments(t, num_splits=num_splits, **options))
        assert_same(decode_op(*arguments(t, num_splits=-num_splits, **options)), want)
    sinkattn.check_errors()


def test_two_passes_are_two_launches() -> None:
    t = make_cache(LENS, 64)
    call = (*arguments(t, num_splits=-5), *buffers(t, num_splits=-5))
    decode_out_op(*call)
    torch.cuda.synchronize()
    on_gpu = launched(lambda: decode_out_op(*call))
    assert ["reduce_kernel" in name for name in on_gpu] == [False, True], on_gpu


SHARED: dict[str, tuple[int, dict[str, int]]] = {
    "b1-rows": (1, {"q_len": 33}),
    "b40": (40, {}),
    "b64": (64, {}),
    "b64-pairs": (64, {"capacity": 4096}),
    "b70-pairs": (70, {"capacity": 4096}),
    "b67-d128": (67, {"head_dim": 128}),
    "b100-h3": (100, {"kv_heads": 3}),
    "b200-rows": (200, {"kv_heads": 2, "q_len": 5}),
    "b300": (300, {"kv_heads": 2}),
}


@pytest.mark.parametrize("page_size", [0, 64])
@pytest.mark.parametrize("lengths", ["equal", "any", "few"])
@pytest.mark.parametrize("name", SHARED)
def test_shares_that_end_anywhere(name: str, lengths: str, page_size: int, seed: int) -> None:
    """Where equal parts do not fill the multiprocessors, blocks take shares, in which streams end and begin."""
    batch, sizes = SHARED[name]
    generator = torch.Generator().manual_seed(seed)
    lens = torch.randint(0, 1500, (batch,), generator=generator)
    lens[batch // 2], lens[-1], lens[0] = 0, 3, 1500
    if lengths == "equal":
        lens[:] = 1500
    if lengths == "few":  # keys in a tenth of the sequences
        lens[torch.rand(batch, generator=generator) < 0.9] = 0
    t = make_cache(lens.tolist(), page_size, **{"capacity": 1536, **sizes})
    got = decode_op(*arguments(t))
    assert_close(got, decode_op(*arguments(t, num_splits=1)))
    for _ in range(20):
        assert_same(decode_op(*arguments(t)), got)
    sinkattn.check_errors()


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


def test_a_batch_of_thousands() -> None:
    lens = [(7 * b) % 90 for b in range(5000)]
    t = make_cache(lens, capacity=512, kv_heads=1)
    assert_close(decode_op(*arguments(t)), decode_op(*arguments(t, num_splits=1)))


def assert_close(got: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> None:
    """Two ways of splitting."""
    torch.testing.assert_close(got[0], want[0], rtol=2e-2, atol=2e-3)
    torch.testing.assert_close(got[1], want[1], rtol=1e-5, atol=1e-5)


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


# ---- the cache that grows ----


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


def launched(call: Callable[[], object]) -> list[str]:
    """What the call puts on the device; it must not wait for that, neither by torch nor in the library."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        torch.cuda.set_sync_debug_mode("error")
        try:
            with torch.profiler.record_function("the call"):
                call()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()
    on_host, on_gpu = ([e for e in profile.events() if e.device_type == getattr(torch.autograd.DeviceType, name)]
                       for name in ("CPU", "CUDA"))  # fmt: skip
    (within,) = (e.time_range for e in on_host if e.name == "the call")
    runtime = [e.name for e in on_host if within.start <= e.time_range.start <= within.end and e.name.startswith("cu")]
    assert any("Launch" in name for name in runtime), runtime
    assert not [name for name in runtime if "Synchronize" in name or name == "cudaMemcpy"]
    return [e.name for e in on_gpu if e.name != "the call"]


def test_appending_is_one_launch_without_a_sync() -> None:
    arguments_ = to_device(make_append([5, 17, 60], 1, 16))
    append_op(*arguments_)
    torch.cuda.synchronize()
    on_gpu = launched(lambda: append_op(*arguments_))
    assert len(on_gpu) == 1, on_gpu
    assert "append_kernel" in on_gpu[0]


# ---- the prefill's bits ----

INVARIANT_MASKS = {"all": (-1, 0), "window": (127, 0), "wide": (1000, 0), "sinks": (127, 4), "prefix": (200, 600)}


def invariant(t: dict[str, Tensor | None], left: int, num_sink_tokens: int) -> tuple[Tensor, ...]:
    return decode_op(*t.values(), None, left, num_sink_tokens, 0, True)


@pytest.mark.parametrize("mask", INVARIANT_MASKS)
@pytest.mark.parametrize("page_size", [0, 1, 64])
@pytest.mark.parametrize("q_len", [1, 3])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_invariant_is_the_row_of_a_prefill(head_dim: int, q_len: int, page_size: int, mask: str) -> None:
    left, num_sink_tokens = INVARIANT_MASKS[mask]
    lens = [1500, 700, 33, 2048, 5]
    options = {"kv_heads": 2, "head_dim": head_dim, "q_len": q_len}
    dense = make_cache(lens, **options)
    got = invariant(make_cache(lens, page_size, **options), left, num_sink_tokens)
    q, k, v, s_aux = (dense[name] for name in ("q", "k", "v", "s_aux"))
    for b, length in enumerate(lens):
        rows = torch.randn(1, length, *q.shape[2:], device="cuda", dtype=q.dtype)  # of a prefill, ours its last ones
        rows[:, length - q_len :] = q[b]
        out, lse = sinkattn.flash_attn_func(
            rows, k[b : b + 1, :length], v[b : b + 1, :length], causal=True, window_size=(left, 0), s_aux=s_aux,
            num_sink_tokens=num_sink_tokens, return_lse=True,
        )  # fmt: skip
        assert torch.equal(got[0][b], out[0, length - q_len :])
        assert torch.equal(got[1][b], lse[0, :, length - q_len :])
    sinkattn.check_errors()


@pytest.mark.parametrize("page_size", [0, 64])
def test_invariant_depends_on_nothing_else(page_size: int) -> None:
    t = make_cache(LENS, page_size)
    out, lse = invariant(t, -1, 0)
    for b in range(len(LENS)):
        alone = {name: x[b : b + 1] if name in ("q", "cache_seqlens", "block_table") and x is not None else x
                 for name, x in t.items()}  # fmt: skip
        if not page_size:
            alone |= {"k": t["k"][b : b + 1], "v": t["v"][b : b + 1]}
        assert_same(invariant(alone, -1, 0), (out[b : b + 1], lse[b : b + 1]))
    if not page_size:  # a slice of a larger cache, read where it lies, and heads ahead of slots
        wide = {name: torch.cat((x, x), 1)[:, : x.shape[1]] if name in ("k", "v") else x for name, x in t.items()}
        assert_same(invariant(wide, -1, 0), (out, lse))
        turned = {name: x.transpose(1, 2).contiguous().transpose(1, 2) if name in ("k", "v", "q") else x
                  for name, x in t.items()}  # fmt: skip
        assert_same(invariant(turned, -1, 0), (out, lse))
        mixed = wide | {"v": t["v"].transpose(1, 3).contiguous().transpose(1, 3)}
        assert_same(invariant(mixed, -1, 0), (out, lse))
        shared = t | {name: t[name][4:5].expand_as(t[name]) for name in ("k", "v")}
        copied = t | {name: shared[name].contiguous() for name in ("k", "v")}
        assert_same(invariant(shared, -1, 0), invariant(copied, -1, 0))


def test_invariant_lengths_change_between_replays() -> None:
    t = make_cache([2048] * 4, 64)
    torch.nan_to_num_(t["k"]), torch.nan_to_num_(t["v"])
    results = []

    def step() -> None:
        results[:] = invariant(t, -1, 0)

    graph = captured(step)
    for lens in ([2048, 1, 0, 77], [0, 0, 0, 0], [300, 2000, 17, 1024]):
        t["cache_seqlens"].copy_(torch.tensor(lens, dtype=torch.int32))
        graph.replay()
        assert_same(tuple(results), invariant(t, -1, 0))


def test_invariant_contains_what_is_hostile() -> None:
    t = make_cache(LENS, 64)
    table, lens = t["block_table"], t["cache_seqlens"]
    want = invariant(t, 127, 4)
    table[4, 1:29] = -1  # which no row sees
    assert_same(invariant(t, 127, 4), want)
    sinkattn.check_errors()
    table[4, 31] = 2**31 - 1
    invariant(t, 127, 4)
    with pytest.raises(ValueError, match="block_table named a page outside"):
        sinkattn.check_errors()
    lens[0], lens[1], lens[2] = -5, 2**31 - 1, 5000
    invariant(t, -1, 0)
    with pytest.raises(ValueError, match="cache_seqlens was negative"):
        sinkattn.check_errors()


@pytest.mark.parametrize("num_splits", [0, 1, 3])
@pytest.mark.parametrize("value", [torch.inf, -torch.inf])
def test_an_infinite_value_that_all_rows_see(value: float, num_splits: int) -> None:
    t = make_cache(LENS)
    want = decode_op(*arguments(t, num_splits=num_splits))
    assert t["v"] is not None
    t["v"][2, 300, :, 5] = value
    out, lse = decode_op(*arguments(t, num_splits=num_splits))
    assert (out[2, ..., 5] == value).all()
    out[2, ..., 5] = want[0][2, ..., 5]
    assert_same((out, lse), want)


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


def captured(call: Callable[[], object]) -> torch.cuda.CUDAGraph:
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


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


@pytest.mark.parametrize("options", [{}, {"num_splits": 5}, {"num_splits": -5}])
def test_scratch_may_hold_anything(options: dict[str, int]) -> None:
    t = make_cache(LENS, 64)
    out, lse, needed = buffers(t, **options)
    want = decode_op(*arguments(t, **options))
    other = make_cache([2048] * 2, 64, kv_heads=2)
    small_out, small_lse, small = buffers(other, **options)
    rounds = 30
    scratch = needed.new_empty(max(needed.numel(), 16 * rounds + small.numel()))
    for round_ in range(rounds):
        if round_ % 3 == 0:
            scratch.copy_(torch.randint(0, 256, scratch.shape, dtype=torch.uint8, device="cuda"))
        elif round_ % 3 == 1:
            scratch.fill_((0, 255, 1)[round_ // 3 % 3])
        else:  # what another shape leaves
            there = scratch[16 * round_ : 16 * round_ + small.numel()]
            decode_out_op(*arguments(other, **options), small_out, small_lse, there)
        out.fill_(torch.nan)
        decode_out_op(*arguments(t, **options), out, lse, scratch)
        assert_same((out, lse), want)


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


@pytest.mark.parametrize("num_splits", [0, 5])
def test_repeats_are_bitwise_equal_under_load(num_splits: int) -> None:
    t = make_cache([4096, 700, 33], 16, capacity=4096)
    first = decode_op(*arguments(t, num_splits=num_splits))
    busy, noise = torch.cuda.Stream(), torch.randn(2048, 2048, device="cuda")
    different = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(int(os.environ.get("SINKATTN_GPU_REPEATS", "500"))):
        with torch.cuda.stream(busy):
            noise = (noise @ noise).clamp(-1, 1)
        different += (decode_op(*arguments(t, num_splits=num_splits))[0] != first[0]).sum()
    assert different.item() == 0


@pytest.mark.parametrize("options", [{}, {"num_splits": 5}, {"left": 127}])
def test_one_launch_no_sync_no_allocation(options: dict[str, int]) -> None:
    t = make_cache(LENS, 64)
    call = (*arguments(t, **options), *buffers(t, **options))
    decode_out_op(*call)
    torch.cuda.synchronize()
    allocated = torch.cuda.memory_stats()["allocation.all.allocated"]
    on_gpu = launched(lambda: decode_out_op(*call))
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == allocated
    assert len(on_gpu) == 1, on_gpu
    assert "decode_kernel" in on_gpu[0]


def test_the_plan_says_what_it_does() -> None:
    device = _C.query_cuda(0)
    sizes = {"dtype": "bf16", "batch": 1, "num_q_heads": 64, "num_kv_heads": 8, "head_dim": 64, "q_len": 1}
    plan = sinkattn.plan("decode", device, k_len=131072, window_size_right=0, **sizes)
    assert "by the lengths found" in plan["reason"]
    assert plan["num_splits"] == 2 * device["workers"]
    window = sinkattn.plan("decode", device, k_len=131072, window_size_left=127, window_size_right=0, **sizes)
    assert (window["num_splits"], window["workspace_bytes"]) == (1, 0)


def test_what_is_not_compiled_raises() -> None:
    t = make_cache([64], head_dim=512)
    with pytest.raises(NotImplementedError, match="no decode kernel serves bf16, head_dim 512, invariant"):
        decode_op(*t.values(), None, -1, 0, 0, True)
    floats = {name: x.float() if name in ("q", "k", "v") and x is not None else x for name, x in t.items()}
    with pytest.raises(NotImplementedError, match="no decode kernel serves fp32"):
        decode_op(*arguments(floats))
