# SPDX-License-Identifier: Apache-2.0
"""New keys and values written into a cache: where they go, what is left alone, what is refused."""

from collections.abc import Callable
from random import Random

import pytest
import torch
from arguments import STRIDES, append_args, cache, ops
from torch import Tensor

import sinkattn


def paged(k_cache: Tensor, v_cache: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    table = torch.tensor([[2, 0], [3, 1]], dtype=torch.int32)
    pages = [
        torch.empty_like(x.reshape(4, 4, 2, 8)).index_put_((table.flatten().long(),), x.reshape(4, 4, 2, 8))
        for x in (k_cache, v_cache)
    ]
    return pages[0], pages[1], table


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("layout", ["contiguous", "paged"])
def test_appending_writes_the_new_slots_and_no_other(layout: str, dtype: torch.dtype) -> None:
    *tensors, lens, table = append_args(layout == "paged")
    k_cache, v_cache, k, v = (x.to(dtype) for x in tensors)
    wanted = (k_cache.clone(), v_cache.clone())
    for b, start in enumerate(lens.tolist()):
        for i in range(k.shape[1]):
            slot = start + i
            at = (b, slot) if table is None else (int(table[b, slot // 4]), slot % 4)
            for cache_, rows in zip(wanted, (k, v), strict=True):
                cache_[at] = rows[b, i]
    versions = (k_cache._version, v_cache._version)
    after = ops.append_kv(k_cache, v_cache, k, v, lens, table)
    assert torch.equal(after, lens + 3)
    assert torch.equal(k_cache, wanted[0])
    assert torch.equal(v_cache, wanted[1])
    assert k_cache._version > versions[0]
    assert v_cache._version > versions[1]


@pytest.mark.parametrize("layout", STRIDES)
def test_appending_with_any_strides(layout: str) -> None:
    k_cache, v_cache, k, v, lens, _ = append_args()
    wanted, rest = (k_cache.clone(), v_cache.clone()), (lens, None)
    ops.append_kv(*wanted, k, v, *rest)
    written = [STRIDES[layout](x) for x in (k_cache, v_cache)]
    ops.append_kv(*written, *(STRIDES[layout](x) for x in (k, v)), *rest)
    assert all(torch.equal(a, b) for a, b in zip(written, wanted, strict=True))


def test_appending_nothing() -> None:
    k_cache, v_cache, k, v, lens, _ = append_args()
    before = k_cache.clone()
    assert torch.equal(ops.append_kv(k_cache, v_cache, k[:, :0], v[:, :0], lens, None), lens)
    assert ops.append_kv(k_cache[:0], v_cache[:0], k[:0], v[:0], lens[:0], None).shape == (0,)
    assert torch.equal(k_cache, before)


def test_what_is_appended_has_no_gradient() -> None:
    k_cache, v_cache, k, v, lens, _ = append_args()
    with pytest.raises(NotImplementedError, match="keys and values in a cache have no gradients"):
        ops.append_kv(k_cache, v_cache, k.requires_grad_(), v, lens, None)
    with torch.no_grad():
        ops.append_kv(k_cache, v_cache, k, v, lens, None)


BAD_APPENDS: dict[str, tuple[int, Callable[[Tensor], Tensor], str]] = {
    "dtype": (2, lambda k: k.half(), "k is Half, it must be Float"),
    "v-dtype": (1, lambda v_cache: v_cache.half(), "v_cache is Half, it must be Float"),
    "batch": (2, lambda k: k[:1], "k_cache has batch 2, k has 1"),
    "heads": (2, lambda k: k[:, :, :1], r"k has shape \[2, 3, 1, 8\], v has shape \[2, 3, 2, 8\]; both must"),
    "length": (3, lambda v: v[:, :2], r"k has shape \[2, 3, 2, 8\], v has shape \[2, 2, 2, 8\]; both must"),
    "rank": (2, lambda k: k[0], "k has 3 dimensions"),
    "device": (2, lambda k: k.to("meta"), "k is on meta, k_cache is on cpu"),
    "lengths": (4, lambda lens: lens.long(), "cache_seqlens is Long, it must be Int"),
    "overlap": (0, lambda k_cache: k_cache[:1].expand(2, -1, -1, -1), "its rows must not overlap"),
}


@pytest.mark.parametrize("name", BAD_APPENDS)
def test_appending_wrong_tensors_is_refused(name: str) -> None:
    position, change, message = BAD_APPENDS[name]
    arguments = list(append_args())
    arguments[position] = change(arguments[position])
    if name == "batch":
        arguments[3], arguments[4] = arguments[3][:1], arguments[4][:1]
    with pytest.raises(ValueError, match=message):
        ops.append_kv(*arguments)


OVERLAPS: dict[str, tuple[Callable[[Tensor, Tensor], tuple[Tensor, ...]], str]] = {
    "one": (lambda x, k: (x[0], x[0], k, k), "k_cache and v_cache overlap"),
    "shifted": (lambda x, k: (x[0, :, :-1], x[0, :, 1:], k, k), "k_cache and v_cache overlap"),
    "unaligned": (lambda x, k: (x[0, ..., 1:], x[0, ..., 1:], k[..., 1:], k[..., 1:]), "k_cache and v_cache overlap"),
    "k": (lambda x, k: (x[0], x[1], x[0, :, 1:4], k), "k lies within k_cache"),
    "v": (lambda x, k: (x[0], x[1], k, x[1, :, 1:4]), "v lies within v_cache"),
    "crosswise": (lambda x, k: (x[0], x[1], x[1, :, 1:4], k), "k lies within v_cache"),
}


@pytest.mark.parametrize("name", OVERLAPS)
def test_appending_within_the_cache_is_refused(name: str) -> None:
    change, message = OVERLAPS[name]
    _, _, k, _, lens, _ = append_args()
    both = torch.randn(2, 2, 8, 2, 8)
    before = both.clone()
    with pytest.raises(ValueError, match=message):
        ops.append_kv(*change(both, k), lens, None)
    assert torch.equal(both, before)


def elements(x: Tensor) -> list[int]:
    """Where each element of x lies in its storage."""
    places = torch.tensor([x.storage_offset()])
    for size, stride in zip(x.shape, x.stride(), strict=True):
        places = (places[:, None] + torch.arange(size) * stride).flatten()
    return places.tolist()


def random_caches(random: Random) -> tuple[Tensor, Tensor]:
    """Two views of one buffer: mostly dense axes in any order, some with a gap or one element short, some at random."""

    def strides() -> list[int]:
        if random.random() < 0.3:
            return [random.choice([0, 1, 2, 3, 8, 16, 17, 24, 64]) for _ in shape]
        found, step = [0] * 4, random.choice([1, 1, 2, 3])
        for dim in random.choice([[3, 2, 1, 0], [3, 1, 2, 0], random.sample(range(4), 4)]):
            found[dim] = step
            step = max(step * shape[dim] * random.choice([1, 1, 2]) + random.choice([0, 0, 0, 1, -1, 4]), 0)
        return found

    shape = [random.choice([1, 2, 3]), random.choice([1, 2, 4]), random.choice([1, 2, 3]), 8]
    k_strides = strides()
    v_strides = k_strides if random.random() < 0.7 else strides()
    memory = torch.zeros(8192)
    k_cache = memory.as_strided(shape, k_strides, random.choice([0, 4, 8]))
    return k_cache, memory.as_strided(shape, v_strides, random.choice([0, 1, 2, 4, 8, 16, 24, 32, 64, 300, 1000]))


def test_no_layout_that_overlaps_is_written() -> None:
    random = Random(20)
    accepted = overlapping = 0
    for _ in range(4000):
        k_cache, v_cache = random_caches(random)
        places = elements(k_cache) + elements(v_cache)
        apart = len(set(places)) == len(places)
        overlapping += not apart
        batch, _, heads, head_dim = k_cache.shape
        k, v = torch.randn(2, batch, 1, heads, head_dim)
        try:
            ops.append_kv(k_cache, v_cache, k, v, torch.zeros(batch, dtype=torch.int32), None)
        except ValueError as error:
            assert "overlap" in str(error)  # noqa: PT017
            assert not k_cache.any()
            continue
        accepted += 1
        assert apart, (k_cache.shape, k_cache.stride(), v_cache.stride(), v_cache.storage_offset())
        assert torch.equal(k_cache[:, :1], k)
        assert torch.equal(v_cache[:, :1], v)
    assert accepted > 300
    assert overlapping > 1500


PARTED: dict[str, Callable[[], tuple[Tensor, Tensor]]] = {
    "vLLM: heads first, keys before values": lambda: torch.zeros(2, 2, 8, 16).transpose(1, 2).split(8, -1),
    "vLLM: blocks of keys, then of values": lambda: torch.zeros(2, 2, 8, 2, 8).unbind(1),
    "one head": lambda: tuple(x.unsqueeze(2) for x in torch.zeros(2, 8, 16).split(8, -1)),
    "every other head": lambda: (x := torch.zeros(2, 8, 4, 8), (x[:, :, ::2], x[:, :, 1::2]))[1],
    "every other slot": lambda: (x := torch.zeros(2, 16, 2, 8), (x[:, ::2], x[:, 1::2]))[1],
    "heads of a qkv projection": lambda: torch.zeros(2, 8, 8, 8).split((4, 2, 2), 2)[1:],
    "one layer of many": lambda: torch.zeros(3, 2, 2, 8, 2, 8)[1].unbind(),
    "head_dim of a stride": lambda: torch.zeros(2, 8, 2, 8, 2).unbind(-1),
}


@pytest.mark.parametrize("name", PARTED)
def test_layouts_in_use_are_written(name: str) -> None:
    _, _, k, v, _, _ = append_args()
    caches = PARTED[name]()
    heads = caches[0].shape[2]
    ops.append_kv(*caches, k[:, :, :heads], v[:, :, :heads], torch.tensor([1, 4], dtype=torch.int32), None)
    for cache_, rows in zip(caches, (k, v), strict=True):
        for b, start in enumerate((1, 4)):
            assert torch.equal(cache_[b, start : start + 3], rows[b, :, :heads])
        assert cache_.count_nonzero() == rows[:, :, :heads].numel()


@pytest.mark.parametrize("dim", range(5))
def test_appending_to_keys_beside_values(dim: int) -> None:
    """One tensor for both, halved along any of its dimensions."""
    k_cache, v_cache, k, v, lens, _ = append_args()
    halves = torch.stack((k_cache, v_cache), dim).unbind(dim)
    for caches in ((k_cache, v_cache), halves):
        ops.append_kv(*caches, k, v, lens, None)
    assert torch.equal(halves[0], k_cache)
    assert torch.equal(halves[1], v_cache)


def test_what_was_made_for_inference_is_not_written_elsewhere() -> None:
    _, _, k, v, lens, _ = append_args()
    with torch.inference_mode():
        caches = torch.zeros(2, 2, 8, 2, 8).unbind()
    with torch.no_grad(), pytest.raises(RuntimeError, match=r"k_cache was made under torch.inference_mode"):
        ops.append_kv(*caches, k, v, lens, None)
    assert not caches[0].any()
    with torch.inference_mode():
        ops.append_kv(*caches, k, v, lens, None)
    assert caches[0].any()


def test_appending_outside_the_cache_writes_nothing() -> None:
    q, k_cache, v_cache, _, _ = cache()
    new = torch.randn(2, 2, 2, 8)
    before = k_cache.clone()
    for lens in (7, -1):
        with pytest.raises(ValueError, match=f"cache_seqlens.0. is {lens}; .* 2 new keys in a cache that holds 8"):
            sinkattn.flash_attn_with_kvcache(q, k_cache, v_cache, new, new, cache_seqlens=lens, causal=True)
    k_pages, v_pages, table = paged(k_cache, v_cache)
    for page in (-1, 4):
        table[0, 0] = page
        with pytest.raises(ValueError, match=r"block_table.0..0. is .*; it must be a page from 0 to 3"):
            sinkattn.flash_attn_with_kvcache(
                q, k_pages, v_pages, new, new, cache_seqlens=0, block_table=table, causal=True
            )
    assert torch.equal(k_cache, before)


def test_appending_behind_a_window_whose_past_is_unmapped() -> None:
    """Caches give back the pages that a window has left; neither the new keys nor the rows need them."""
    q, k_cache, v_cache, s_aux, _ = cache()
    new = torch.randn(2, 2, 2, 8)
    k_pages, v_pages, table = paged(k_cache, v_cache)
    options = {"cache_seqlens": 6, "causal": True, "window_size": (1, 0), "s_aux": s_aux}
    want = sinkattn.flash_attn_with_kvcache(q, k_cache, v_cache, new, new, **options)
    table[:, 0] = -1
    got = sinkattn.flash_attn_with_kvcache(q, k_pages, v_pages, new, new, block_table=table, **options)
    torch.testing.assert_close(got, want)
