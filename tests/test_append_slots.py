# SPDX-License-Identifier: Apache-2.0
"""New keys and values written to slots of a cache by number, as engines map tokens to pages."""

from collections.abc import Callable

import pytest
import torch
from arguments import STRIDES, append_args, ops, slots_args
from torch import Tensor

NAN = float("nan")
LAYOUTS: dict[str, Callable[[], tuple[Tensor, ...]]] = {  # 5 pages of 4 slots, 2 heads of 8
    "apart": lambda: torch.zeros(2, 5, 4, 2, 8).unbind(),
    "vLLM: heads first, keys before values": lambda: torch.zeros(5, 2, 4, 16).transpose(1, 2).split(8, -1),
    "vLLM: blocks of keys, then of values": lambda: torch.zeros(5, 2, 4, 2, 8).unbind(1),
    "SGLang: a page of one slot": lambda: torch.zeros(2, 20, 1, 2, 8).unbind(),
    "one row": lambda: torch.zeros(2, 1, 20, 2, 8).unbind(),
    "unaligned": lambda: torch.zeros(2, 5, 4, 2, 9)[..., 1:].unbind(),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_rows_go_to_their_slots_and_nowhere_else(layout: str, dtype: torch.dtype) -> None:
    k_cache, v_cache = LAYOUTS[layout]()
    k, v = torch.randn(2, 9, 2, 8)
    slots = torch.tensor([7, -1, 0, 19, -(2**31), 4, 5], dtype=dtype)  # engines pad k and v: two rows have no slot
    versions = (k_cache._version, v_cache._version)
    assert ops.append_kv_slots(k_cache, v_cache, k, v, slots) is None
    size = k_cache.shape[1]
    for cache, rows in ((k_cache, k), (v_cache, v)):
        wanted = torch.zeros(20, 2, 8)
        wanted[[7, 0, 19, 4, 5]] = rows[[0, 2, 3, 5, 6]]
        assert torch.equal(cache, wanted.view(20 // size, size, 2, 8))
    assert k_cache._version > versions[0]
    assert v_cache._version > versions[1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_slots_are_the_pages_of_a_table(dtype: torch.dtype) -> None:
    """What append_kv writes behind the keys in use, by the slots that an engine computes from its table."""
    *tensors, lens, table = append_args(paged=True)
    k_cache, v_cache, k, v = (x.to(dtype) for x in tensors)
    wanted = (k_cache.clone(), v_cache.clone())
    ops.append_kv(*wanted, k, v, lens, table)
    at = lens[:, None] + torch.arange(k.shape[1])
    slots = table.gather(1, at // 4) * 4 + at % 4
    ops.append_kv_slots(k_cache, v_cache, k.flatten(0, 1), v.flatten(0, 1), slots.flatten().long())
    assert torch.equal(k_cache, wanted[0])
    assert torch.equal(v_cache, wanted[1])


@pytest.mark.parametrize("layout", STRIDES)
def test_rows_of_any_strides(layout: str) -> None:
    k_cache, v_cache, k, v, slots = slots_args()
    wanted = (k_cache.clone(), v_cache.clone())
    ops.append_kv_slots(*wanted, k, v, slots)
    turned = [STRIDES[layout](x[None])[0] for x in (k, v)]
    caches = [STRIDES[layout](x) for x in (k_cache, v_cache)]
    ops.append_kv_slots(*caches, *turned, slots.repeat_interleave(2)[::2])
    assert all(torch.equal(a, b) for a, b in zip(caches, wanted, strict=True))


def test_no_rows_and_rows_that_go_nowhere() -> None:
    k_cache, v_cache, k, v, slots = slots_args()
    before = k_cache.clone()
    ops.append_kv_slots(k_cache, v_cache, k, v, torch.full_like(slots, -1))
    ops.append_kv_slots(k_cache, v_cache, k, v, slots[:0])
    ops.append_kv_slots(k_cache, v_cache, k[:0], v[:0], slots[:0])
    ops.append_kv_slots(k_cache[:0], v_cache[:0], k[:0], v[:0], slots[:0])
    assert torch.equal(k_cache, before)
    with pytest.raises(ValueError, match=r"is 0; it must be a slot of the cache, which has 0, or negative"):
        ops.append_kv_slots(k_cache[:0], v_cache[:0], k, v, torch.zeros_like(slots))


def test_random_slots_stay_inside() -> None:
    generator = torch.Generator().manual_seed(1)
    refused = 0
    for _ in range(300):
        k_cache, v_cache = (x[1:6] for x in torch.zeros(2, 7, 4, 2, 8))
        k, v = torch.randn(2, 6, 2, 8, generator=generator)
        slots = torch.randint(-3, 22, (6,), generator=generator)
        if torch.rand((), generator=generator) < 0.2:
            slots[int(torch.randint(6, (), generator=generator))] = 2 ** int(
                torch.randint(5, 63, (), generator=generator)
            )
        if bool((slots > 19).any()):
            refused += 1
            place = int((slots > 19).nonzero()[0])
            with pytest.raises(
                ValueError, match=rf"slot_mapping\[{place}\] is {slots[place]}; it must be .* which has 20, or"
            ):
                ops.append_kv_slots(k_cache, v_cache, k, v, slots)
            assert not k_cache.any()
            continue
        ops.append_kv_slots(k_cache, v_cache, k, v, slots)
        written = {int(s): i for i, s in enumerate(slots.tolist()) if s >= 0}  # the last row of a slot stays
        for slot in range(20):
            row = k[written[slot]] if slot in written else torch.zeros(2, 8)
            assert torch.equal(k_cache[slot // 4, slot % 4], row)
    assert 50 < refused < 250


REFUSED: dict[str, tuple[int, Callable[[Tensor], Tensor], str]] = {
    "cache rank": (0, lambda x: x[0], "k_cache has 3 dimensions"),
    "rank": (2, lambda k: k[None], r"k has 4 dimensions, it must be \[total, num_kv_heads, head_dim\], a row for each"),
    "v rank": (3, lambda v: v[0], "v has 2 dimensions"),
    "dtype": (2, lambda k: k.half(), "k is Half, it must be Float"),
    "integers": (0, lambda x: x.long(), "k_cache is Long; bfloat16"),
    "heads": (3, lambda v: v[:, :1], r"k has shape \[6, 2, 8\], v has shape \[6, 1, 8\]; both must"),
    "caches": (1, lambda x: x[:2], "k_cache has shape .*, v_cache has shape"),
    "device": (3, lambda v: v.to("meta"), "v is on meta, k_cache is on cpu"),
    "slots' device": (4, lambda slots: slots.to("meta"), "slot_mapping is on meta, k_cache is on cpu"),
    "slots' rank": (4, lambda slots: slots[None], r"slot_mapping has 2 dimensions, it must be \[total\]"),
    "slots' dtype": (4, lambda slots: slots.short(), r"slot_mapping is Short, it must be Long or Int"),
    "more slots": (4, lambda slots: slots.repeat(2), "slot_mapping has 12 slots, k has 6 rows; there must be a row"),
    "expanded": (0, lambda x: x[:1].expand_as(x), "its rows must not overlap"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_wrong_tensors_are_refused(name: str) -> None:
    arguments = list(slots_args())
    position, change, message = REFUSED[name]
    arguments[position] = change(arguments[position])
    with pytest.raises(ValueError, match=message):
        ops.append_kv_slots(*arguments)


def test_other_sizes_than_the_cache_are_refused() -> None:
    k_cache, v_cache, k, v, slots = slots_args()
    with pytest.raises(ValueError, match=r"k has shape \[6, 1, 8\], it must be \[6, 2, 8\]"):
        ops.append_kv_slots(k_cache, v_cache, k[:, :1], v[:, :1], slots)


def test_overlaps_are_refused() -> None:
    k_cache, v_cache, k, v, slots = slots_args()
    with pytest.raises(ValueError, match="k_cache and v_cache overlap"):
        ops.append_kv_slots(k_cache, k_cache, k, v, slots)
    with pytest.raises(ValueError, match="v lies within k_cache"):
        ops.append_kv_slots(k_cache, v_cache, k, k_cache.flatten(0, 1)[3:9], slots)
    with pytest.raises(ValueError, match="k_cache and slot_mapping overlap"):
        ops.append_kv_slots(k_cache, v_cache, k, v, k_cache.view(-1).view(torch.int64)[:6])


def test_gradients_and_inference_tensors_are_refused() -> None:
    k_cache, v_cache, k, v, slots = slots_args()
    with pytest.raises(NotImplementedError, match="keys and values in a cache have no gradients"):
        ops.append_kv_slots(k_cache, v_cache, k.requires_grad_(), v, slots)
    with torch.inference_mode():
        caches = torch.zeros(2, 4, 4, 2, 8).unbind()
    with torch.no_grad(), pytest.raises(RuntimeError, match=r"k_cache was made under torch.inference_mode"):
        ops.append_kv_slots(*caches, k, v, slots)


def test_a_compiled_step_is_one_graph() -> None:
    def step(k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, slots: Tensor) -> Tensor:
        ops.append_kv_slots(k_cache, v_cache, k, v, slots)
        return k_cache.sum()

    ours, theirs = slots_args(), slots_args()
    want = step(*ours)
    assert torch.equal(torch.compile(step, fullgraph=True, backend="aot_eager")(*theirs), want)
    assert torch.equal(ours[0], theirs[0])
