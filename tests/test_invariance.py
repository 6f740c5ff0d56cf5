# SPDX-License-Identifier: Apache-2.0
"""The same bits: on repeats, for any number of threads, for a row anywhere; and what must agree but for rounding."""

from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

import sinkattn

DTYPES = [torch.float32, torch.bfloat16]
ALL_DTYPES = [*DTYPES, torch.float16]
MASKS = [
    {"window_size": (-1, 0)},
    {"window_size": (30, 0), "num_sink_tokens": 3},
    {"window_size": (127, 0)},
    {"window_size": (-1, -1)},
]
CAUSAL = MASKS[:3]
FEW = settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def draw(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def qkv(q_len: int, k_len: int, dtype: torch.dtype, batch: int = 2, heads: int = 4) -> list[Tensor]:
    shapes = ((batch, q_len, heads, 64), (batch, k_len, 2, 64), (batch, k_len, 2, 64))
    return [draw(seed, *shape, dtype=dtype) for seed, shape in enumerate(shapes)]


S_AUX = 2 + 3 * draw(9, 4)


def forward(q: Tensor, k: Tensor, v: Tensor, **options: object) -> tuple[Tensor, Tensor]:
    return sinkattn.flash_attn_func(q, k, v, return_lse=True, **({"s_aux": S_AUX} | options))


def gradients(q: Tensor, k: Tensor, v: Tensor, cu: Tensor | None = None, **options: object) -> list[Tensor]:
    """out, lse, dq, dk, dv, ds_aux, with a dO and dLSE made of a row's own q, so that it is the same row anywhere."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v, S_AUX[: q.shape[-2]])]
    if cu is None:
        out, lse = sinkattn.flash_attn_func(*leaves[:3], s_aux=leaves[3], return_lse=True, **options)
    else:
        out, lse = sinkattn.flash_attn_varlen_func(*leaves[:3], cu, cu, s_aux=leaves[3], return_lse=True, **options)
    dlse = q[..., 0].float().transpose(-1, -2).contiguous()
    return [out.detach(), lse.detach(), *torch.autograd.grad((out, lse), leaves, (q.roll(1, -1), dlse))]


def assert_same(got: object, want: object) -> None:
    for a, b in zip(got, want, strict=True):  # type: ignore[call-overload]
        assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", ALL_DTYPES)
@pytest.mark.parametrize("mask", MASKS)
def test_repeats(level: str, dtype: torch.dtype, mask: dict[str, object]) -> None:
    tensors = qkv(140, 140, dtype)
    first = gradients(*tensors, **mask)
    for _ in range(3):
        assert_same(gradients(*tensors, **mask), first)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mask", MASKS)
def test_one_and_two_threads(level: str, dtype: torch.dtype, mask: dict[str, object], threads: None) -> None:
    tensors, cu = qkv(150, 150, dtype, batch=3), torch.tensor([0, 40, 41, 150], dtype=torch.int32)
    results = []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        dense = gradients(*tensors, **mask)
        packed = gradients(*(x[0] for x in tensors), cu, **mask)
        q, k, v = tensors[0][:, :1], *tensors[1:]
        decoded = torch.ops.sinkattn.flash_decode(q, k, v, S_AUX, None, None, None, -1, 0, 3, False)
        results.append([*dense, *packed, *decoded])
    assert_same(results[1], results[0])
    assert_same(results[2], results[0])


@pytest.mark.parametrize("dtype", ALL_DTYPES)
def test_callers_in_two_threads(level: str, dtype: torch.dtype, threads: None) -> None:
    torch.set_num_threads(2)
    inputs = [qkv(length, length, dtype) for length in (90, 130)]

    def call(i: int) -> list[Tensor]:
        q, k, v = inputs[i]
        decoded = torch.ops.sinkattn.flash_decode(q[:, :1], k, v, S_AUX, None, None, None, -1, 0, 3, False)
        return [*gradients(q, k, v, **MASKS[1]), *decoded]

    want = [call(0), call(1)]
    with ThreadPoolExecutor(2) as pool:
        for found in pool.map(lambda i: (i, [call(i) for _ in range(8)]), (0, 1, 0, 1)):
            for got in found[1]:
                assert_same(got, want[found[0]])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mask", CAUSAL)
def test_row_alone(level: str, dtype: torch.dtype, mask: dict[str, object]) -> None:
    q, k, v = qkv(200, 200, dtype)
    out, lse = forward(q, k, v, **mask)
    for row in range(200):
        alone = forward(q[:, row : row + 1], k[:, : row + 1], v[:, : row + 1], **mask)
        assert_same(alone, (out[:, row : row + 1], lse[:, :, row : row + 1]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mask", CAUSAL)
def test_chunked_prefill(level: str, dtype: torch.dtype, mask: dict[str, object]) -> None:
    q, k, v = qkv(200, 200, dtype)
    for ends in ((64, 128, 200), (1, 2, 37, 101, 200), (130, 131, 200)):
        begins = (0, *ends[:-1])
        parts = [forward(q[:, a:b], k[:, :b], v[:, :b], **mask) for a, b in zip(begins, ends, strict=True)]
        out, lse = torch.cat([o for o, _ in parts], 1), torch.cat([x for _, x in parts], 2)
        assert_same((out, lse), forward(q, k, v, **mask))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mask", [*MASKS, {"window_size": (20, 9)}])
def test_last_rows_of_a_sequence(level: str, dtype: torch.dtype, mask: dict[str, object]) -> None:
    q, k, v = qkv(200, 230, dtype)
    out, lse = forward(q, k, v, **mask)
    for begin in (1, 63, 64, 100, 199):
        assert_same(forward(q[:, begin:], k, v, **mask), (out[:, begin:], lse[:, :, begin:]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_sequence_and_head_alone(level: str, dtype: torch.dtype) -> None:
    mask, tensors = MASKS[1], qkv(100, 130, dtype, batch=3)
    out, lse = forward(*tensors, **mask)
    for b in range(3):
        assert_same(forward(*(x[b : b + 1] for x in tensors), **mask), (out[b : b + 1], lse[b : b + 1]))
    q, k, v = tensors
    for head in range(4):
        kv, one = slice(head // 2, head // 2 + 1), slice(head, head + 1)
        alone = forward(q[:, :, one], k[:, :, kv], v[:, :, kv], **(mask | {"s_aux": S_AUX[one]}))
        assert_same(alone, (out[:, :, one], lse[:, one]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("lengths", [(1, 1, 1), (70, 0, 1, 129), (64, 64), (5, 200)])
def test_packed_is_one_by_one(
    level: str, dtype: torch.dtype, mask: dict[str, object], lengths: tuple[int, ...]
) -> None:
    """ds_aux, a sum over all, but for rounding."""
    total = sum(lengths)
    q, k, v = (x[0] for x in qkv(total, total, dtype, batch=1))
    cu = torch.tensor([0, *lengths]).cumsum(0).int()
    packed = gradients(q, k, v, cu, **mask)
    alone = [gradients(*(x[None, a:b] for x in (q, k, v)), **mask) for a, b in pairwise(cu)]
    for name, dim in (("out", 0), ("dq", 0), ("dk", 0), ("dv", 0), ("lse", 1)):
        index = ("out", "lse", "dq", "dk", "dv").index(name)
        assert torch.equal(packed[index], torch.cat([x[index][0] for x in alone], dim)), name
    torch.testing.assert_close(packed[5], sum(x[5] for x in alone), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("dtype", DTYPES)
def test_dense_gradients_are_one_by_one(level: str, dtype: torch.dtype) -> None:
    tensors = qkv(130, 130, dtype, batch=3)
    whole = gradients(*tensors, **MASKS[1])
    for b in range(3):
        assert_same(gradients(*(x[b : b + 1] for x in tensors), **MASKS[1])[:5], [x[b : b + 1] for x in whole[:5]])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mask", MASKS[:2])
def test_long_sequences_alone_packed_and_in_threads(dtype: torch.dtype, mask: dict[str, object], threads: None) -> None:
    """Long enough for a backward that sums a sequence in parts."""
    cu = torch.tensor([0, 1100, 1105, 3205], dtype=torch.int32)
    tensors = [x[0] for x in qkv(3205, 3205, dtype, batch=1, heads=2)]
    results = []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        results.append(gradients(*tensors, cu, **mask))
    assert_same(results[1], results[0])
    assert_same(results[2], results[0])
    for a, b in pairwise(cu):
        alone = gradients(*(x[None, a:b] for x in tensors), **mask)
        for index in (0, 2, 3, 4):
            assert torch.equal(results[0][index][a:b], alone[index][0])
        assert torch.equal(results[0][1][:, a:b], alone[1][0])


def paged(x: Tensor, page_size: int, seed: int) -> tuple[Tensor, Tensor]:
    batch, rows, *rest = x.shape
    count = -(-rows // page_size)
    padded = torch.full((batch, count * page_size, *rest), torch.nan, dtype=x.dtype)
    padded[:, :rows] = x
    order = torch.randperm(batch * count, generator=torch.Generator().manual_seed(seed))
    pages = torch.empty(batch * count, page_size, *rest, dtype=x.dtype)
    pages[order] = padded.view(-1, page_size, *rest)
    return pages, order.int().view(batch, count)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mask", CAUSAL)
@pytest.mark.parametrize("page_size", [0, 1, 16, 64, 256])
def test_decode_is_the_prefill_row(
    level: str, dtype: torch.dtype, mask: dict[str, object], page_size: int, threads: None
) -> None:
    torch.set_num_threads(3)
    q, k, v = qkv(700, 700, dtype, batch=3)
    out, lse = forward(q, k, v, **mask)
    if page_size:
        (k, table), (v, _) = paged(k, page_size, 1), paged(v, page_size, 1)
    else:
        table = None
    left, sinks = mask["window_size"][0], mask.get("num_sink_tokens", 0)  # type: ignore[index]
    lens = (700, 65, 530)
    for rows, splits, invariant in ((1, 0, True), (1, 0, False), (3, 2, False)):
        last = torch.stack([q[b, n - rows : n] for b, n in enumerate(lens)])
        got = torch.ops.sinkattn.flash_decode(
            last, k, v, S_AUX, torch.tensor(lens, dtype=torch.int32), table, None, left, sinks, splits, invariant
        )
        for b, n in enumerate(lens):
            assert_same((got[0][b], got[1][b]), (out[b, n - rows : n], lse[b, :, n - rows : n]))


@FEW
@given(lengths=st.lists(st.integers(0, 140), min_size=1, max_size=6), mask=st.sampled_from(MASKS), data=st.data())
def test_place_in_a_pack(level: str, lengths: list[int], mask: dict[str, object], data: st.DataObject) -> None:
    dtype, chosen = data.draw(st.sampled_from(ALL_DTYPES)), data.draw(st.integers(0, len(lengths) - 1))
    total = sum(lengths)
    tensors = [x[0] for x in qkv(total, total, dtype, batch=1)]
    cu = torch.tensor([0, *lengths]).cumsum(0).int()
    begin, end = int(cu[chosen]), int(cu[chosen + 1])
    packed = gradients(*tensors, cu, **mask)
    alone = gradients(*(x[begin:end] for x in tensors), torch.tensor([0, end - begin], dtype=torch.int32), **mask)
    for index in (0, 2, 3, 4):
        assert torch.equal(packed[index][begin:end], alone[index])
    assert torch.equal(packed[1][:, begin:end], alone[1])


@FEW
@given(points=st.lists(st.integers(0, 90), min_size=1, max_size=4).map(sorted), with_sink=st.booleans())
def test_merge_at_any_point(level: str, points: list[int], with_sink: bool) -> None:
    """Keys cut anywhere, empty parts too, merged in order; the sink enters once, last."""
    q, k, v = qkv(20, 90, torch.float32)
    bounds = [0, *points, 90]
    parts = [forward(q, k[:, a:b], v[:, a:b], s_aux=None) for a, b in pairwise(bounds)]
    merged = parts[0]
    for part in parts[1:]:
        merged = sinkattn.merge_attn_states(*merged, *part)
    if with_sink:
        merged = sinkattn.apply_sink(*merged, S_AUX)
    for ours, theirs in zip(merged, forward(q, k, v, s_aux=S_AUX if with_sink else None), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=2e-6)


@FEW
@given(shift=st.floats(-30, 30), mask=st.sampled_from(MASKS))
def test_scores_and_sink_shifted_alike(level: str, shift: float, mask: dict[str, object]) -> None:
    """A constant added to all scores, by a column of q against a column of ones in k, and to s: O stays, LSE moves."""
    q, k, v = qkv(50, 70, torch.float32)
    k[..., 63], q[..., 63] = 1.0, 0.0
    out, lse = forward(q, k, v, **mask)
    shifted = q.clone()
    shifted[..., 63] = shift * 8  # softmax_scale is 1 / 8
    moved, moved_lse = forward(shifted, k, v, **(mask | {"s_aux": S_AUX + shift}))
    torch.testing.assert_close(moved, out, rtol=2e-4, atol=2e-5)
    torch.testing.assert_close(moved_lse, lse + shift, rtol=1e-5, atol=1e-4)
