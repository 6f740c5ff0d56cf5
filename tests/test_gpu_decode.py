# SPDX-License-Identifier: Apache-2.0
"""Decode on a CUDA device. SINKATTN_GPU_CASES is the number of random configurations, SINKATTN_GPU_REPEATS of repeats
that must agree."""

import dataclasses

import pytest
import torch
from gpu_caches import LENS, arguments, assert_close, assert_same, buffers, decode_op, decode_out_op, make_cache
from gpu_cases import RANDOM_CASES, assert_right_on_device
from gpus import different_under_load, launched, needs_gpus
from test_decode import CASES

import sinkattn
from sinkattn import _C
from sinkattn._testing import EDGES, Case, random_case

pytestmark = needs_gpus()
# The others are refused.
SERVED = [name for name in CASES if not ("invariant" in name and "d512" in name) and Case.parse(name).head_dim <= 512]


@pytest.mark.parametrize("name", SERVED)
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_case(name: str, dtype: str) -> None:
    assert_right_on_device(Case.parse(f"{name}-{dtype}"))


def test_random_configurations_against_fp64(seed: int) -> None:
    found, index = 0, 0
    while found < RANDOM_CASES:
        case = random_case(f"{seed}-{index}")
        index += 1
        if not case.decode or case.head_dim > 512:
            continue
        found += 1
        dtype = case.dtype if case.dtype in ("bf16", "fp16") else "bf16"
        invariant = case.invariant and case.head_dim <= 256 and not case.head_dim_v
        assert_right_on_device(dataclasses.replace(case, dtype=dtype, invariant=invariant))


MASKS = {
    "window": {"left": 127},
    "causal": {},
    "sink": {"left": 127, "num_sink_tokens": 4},
    "prefix": {"left": 63, "num_sink_tokens": 700},
    "all": {"left": 200, "num_sink_tokens": 17, "q_lens": (3,) * 4},
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("num_splits", [0, 1, 2, 8, -8])
@pytest.mark.parametrize("widths", ["64", "128", "192-v128", "256", "512"])
def test_parity(widths: str, num_splits: int, mask: str) -> None:
    case = Case.parse(f"d{widths}-causal-g8-h2-paged16-q1x4-k1500.37.0.801-poison-bf16-seed1")
    case = dataclasses.replace(case, num_splits=num_splits, **MASKS[mask])
    assert_right_on_device(case, least_cosine=0.999998)


@pytest.mark.parametrize("edge", EDGES)
@pytest.mark.parametrize("num_splits", [0, 3])
def test_edges_of_s_aux(edge: str, num_splits: int) -> None:
    case = Case.parse("d64-causal-g8-cache-q2x3-k900.1.0-bf16-seed1")
    assert_right_on_device(dataclasses.replace(case, s_aux=edge, num_splits=num_splits))


@pytest.mark.parametrize("ratio", [1, 3, 8, 16, 20, 64, 128])
@pytest.mark.parametrize("q_len", [1, 2, 16, 33])
def test_rows_of_several_tiles(ratio: int, q_len: int) -> None:
    assert_right_on_device(Case.parse(f"d64-causal-w301-g{ratio}-cache-q{q_len}x2-k700.20-bf16"))


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
@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(64, 0), (128, 0), (192, 128), (256, 0), (512, 0)])
def test_two_passes_are_one_bit_for_bit(
    head_dim: int, head_dim_v: int, q_len: int, page_size: int, options: dict[str, int]
) -> None:
    t = make_cache(LENS, page_size, kv_heads=2, head_dim=head_dim, q_len=q_len, head_dim_v=head_dim_v)
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
    "b67-d192-v128": (67, {"head_dim": 192, "head_dim_v": 128}),
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
    # Kernels of many rows round weights to bf16, 1/512 of values of about 1, which num_splits does not.
    assert_close(got, decode_op(*arguments(t, num_splits=1)), atol=4e-3 if "rows" in name else 2e-3)
    for _ in range(20):
        assert_same(decode_op(*arguments(t)), got)
    sinkattn.check_errors()


def test_a_batch_of_thousands() -> None:
    lens = [(7 * b) % 90 for b in range(5000)]
    t = make_cache(lens, capacity=512, kv_heads=1)
    assert_close(decode_op(*arguments(t)), decode_op(*arguments(t, num_splits=1)))


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


@pytest.mark.parametrize("num_splits", [0, 5])
def test_repeats_are_bitwise_equal_under_load(num_splits: int) -> None:
    t = make_cache([4096, 700, 33], 16, capacity=4096)
    assert different_under_load(lambda: decode_op(*arguments(t, num_splits=num_splits))) == 0


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
