# SPDX-License-Identifier: Apache-2.0
"""What every call on a CUDA device promises: its stream and device, what it allocates, waits, threads, offsets."""

import contextlib
import math
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from gpu_caches import LENS, append_op, arguments, assert_close, assert_same, decode_op, make_cache
from gpu_cases import Decoder, gpt_oss_like
from gpus import launched, needs_gpus
from test_gpu_kernels import KINDS, TUNED
from torch import Tensor

import sinkattn
from sinkattn import _C
from sinkattn.__main__ import main

pytestmark = needs_gpus()
fwd_op, bwd_op = torch.ops.sinkattn.flash_attn_fwd, torch.ops.sinkattn.flash_attn_bwd
Call = Callable[[], tuple[Tensor, ...]]


def prefill(name: str, packed: bool, length: int = 1000) -> dict[str, Call]:
    left = KINDS[name].left
    q, k, v, s_aux = gpt_oss_like(1, length, KINDS[name].largest)
    cu = None
    if packed:
        q, k, v = (x[0] for x in (q, k, v))
        cu = torch.tensor([0, 10, length - 100, length - 5], dtype=torch.int32, device="cuda")
    mask = (cu, cu, None, None, None, left, 0, 0)
    out, lse = fwd_op(q, k, v, s_aux, *mask)
    dout, dlse = q.roll(1, 0), torch.randn_like(lse)
    return {
        "fwd": lambda: fwd_op(q, k, v, s_aux, *mask),
        "bwd": lambda: bwd_op(dout, dlse, q, k, v, out, lse, s_aux, *mask),
    }


def decodes() -> dict[str, Call]:
    t, window = make_cache(LENS, 64), make_cache(LENS)
    return {
        "decode": lambda: decode_op(*arguments(t)),
        "decode, 5 parts": lambda: decode_op(*arguments(t, num_splits=5)),
        "decode, two passes": lambda: decode_op(*arguments(t, num_splits=-5)),
        "decode, window": lambda: decode_op(*arguments(window, left=127)),
        "decode, invariant": lambda: decode_op(*arguments(t)[:-1], True),
    }


def all_calls(length: int = 1000) -> dict[str, Call]:
    found = decodes()
    for name in TUNED:
        for packed in (False, True):
            for op, call in prefill(name, packed, length).items():
                found[f"{op}, {name}{', packed' if packed else ''}"] = call
    return found


@contextlib.contextmanager
def new_memory_full_of_nan() -> Iterator[None]:
    """Torch fills what it allocates; bytes with 255, which are NaN as well."""
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(4, device="cuda").isnan().all()
        assert (torch.empty(4, device="cuda", dtype=torch.uint8) == 255).all()
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def test_dirty_memory_has_no_effect() -> None:
    for name, call in all_calls().items():
        want = call()
        with new_memory_full_of_nan():
            got = call()
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True)), name
    sinkattn.check_errors()


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", TUNED)
def test_nothing_is_allocated_but_results_and_the_planned_workspace(name: str, packed: bool) -> None:
    calls, length, head_dim = prefill(name, packed), 1000, KINDS[name].largest
    for op, call in calls.items():
        call()
        torch.cuda.synchronize()
        plan = sinkattn.plan(
            op, _C.query_cuda(0), dtype="bf16", s_aux_dtype="fp32", batch=3 if packed else 1, num_q_heads=16,
            num_kv_heads=2, head_dim=head_dim, q_len=length, k_len=length, window_size_left=KINDS[name].left,
            window_size_right=0, packed=packed,
        )  # fmt: skip
        before = torch.cuda.memory_stats()
        results = call()
        torch.cuda.synchronize()
        asked = torch.cuda.memory_stats()["requested_bytes.all.allocated"] - before["requested_bytes.all.allocated"]
        returned = sum(x.numel() * x.element_size() for x in results)
        assert asked == returned + plan["workspace_bytes"], op
        del results
        left = torch.cuda.memory_stats()["requested_bytes.all.current"] - before["requested_bytes.all.current"]
        assert left == 0, f"{op} keeps {left} bytes"


def test_no_call_waits_for_the_device() -> None:
    for name, call in all_calls().items():
        call()
        torch.cuda.synchronize()
        assert launched(call), name


def test_calls_run_on_the_current_stream() -> None:
    """A stream that is busy first, and then writes the input: who does not wait for it reads what was there before."""
    q, k, v, s_aux = gpt_oss_like(1, 400)
    t, append = make_cache([300, 20]), make_cache([300, 20], capacity=400)
    t["k"].nan_to_num_(), t["v"].nan_to_num_()
    new = torch.randn(2, 1, 8, 64, device="cuda", dtype=torch.bfloat16)
    out, lse = fwd_op(q, k, v, s_aux, *(None,) * 5, 127, 0, 0)

    def appended(x: Tensor) -> tuple[Tensor, ...]:
        caches = append["k"].clone(), append["v"].clone()
        append_op(*caches, x, x, append["cache_seqlens"], None)
        return tuple(cache.nan_to_num() for cache in caches)

    calls: dict[str, tuple[Tensor, Callable[[Tensor], tuple[Tensor, ...]]]] = {
        "fwd": (q, lambda x: fwd_op(x, k, v, s_aux, *(None,) * 5, 127, 0, 0)),
        "fwd, full": (q, lambda x: fwd_op(x, k, v, s_aux, *(None,) * 5, -1, 0, 0)),
        "bwd": (q, lambda x: bwd_op(x, None, q, k, v, out, lse, s_aux, *(None,) * 5, 127, 0, 0)),
        "decode": (t["q"], lambda x: decode_op(*arguments(t | {"q": x}))),
        "invariant": (t["q"], lambda x: decode_op(*arguments(t | {"q": x})[:-1], True)),
        "append": (new, appended),
    }
    side = torch.cuda.Stream()
    for name, (x, call) in calls.items():
        want, late = call(x), torch.zeros_like(x)
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            torch.cuda._sleep(20_000_000)
            late.copy_(x)
            got = call(late)
        torch.cuda.synchronize()
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True)), name


def test_threads_at_once_get_the_same_bits() -> None:
    calls = all_calls(length=700)
    want = {name: call() for name, call in calls.items()}
    torch.cuda.synchronize()

    def work(names: list[str]) -> list[str]:
        wrong = []
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(20):
                for name in names:
                    got = calls[name]()
                    same = [(a == b).all() for a, b in zip(got, want[name], strict=True)]
                    wrong += [] if torch.stack(same).all().item() else [name]
        return wrong

    with ThreadPoolExecutor(2) as pool:
        assert [*pool.map(work, (list(calls), list(calls)[::-1]))] == [[], []]
    sinkattn.check_errors()


@needs_gpus(2)
def test_tensors_on_another_device_than_the_current_one() -> None:
    q, k, v, s_aux = gpt_oss_like(1, 300)
    t = make_cache(LENS)
    there = [x.to("cuda:1") for x in (q, k, v, s_aux)]
    t_there = {name: None if x is None else x.to("cuda:1") for name, x in t.items()}
    for left in (127, -1):
        want = fwd_op(q, k, v, s_aux, *(None,) * 5, left, 0, 0)
        got = fwd_op(*there, *(None,) * 5, left, 0, 0)
        grads = [bwd_op(x[0], None, *x[:3], *y, x[3], *(None,) * 5, left, 0, 0)
                 for x, y in (((q, k, v, s_aux), want), (there, got))]  # fmt: skip
        assert_same(tuple(x.to("cuda:0") for x in (*got, *grads[1])), (*want, *grads[0]))
    assert_same(tuple(x.to("cuda:0") for x in decode_op(*arguments(t_there))), decode_op(*arguments(t)))
    assert torch.cuda.current_device() == 0
    with pytest.raises(ValueError, match="k is on cuda:0, q is on cuda:1"):
        fwd_op(there[0], k, v, None, *(None,) * 5, -1, 0, 0)


# In a process of its own: what other tests' tensors leave free in this one's memory would hold what is asked for here.
FAILED_ALLOCATIONS = """
import contextlib, torch, sinkattn
fwd, bwd = torch.ops.sinkattn.flash_attn_fwd, torch.ops.sinkattn.flash_attn_bwd
q, k, v = (torch.randn(1, 20000, heads, 64, device="cuda", dtype=torch.bfloat16) for heads in (64, 8, 8))
s_aux, mask = torch.randn(64, device="cuda"), (None,) * 5

def both():
    out, lse = fwd(q, k, v, s_aux, *mask, -1, 0, 0)
    return [x.cpu() for x in (out, lse, *bwd(out, lse, q, k, v, out, lse, s_aux, *mask, -1, 0, 0))]

want, total, failed = both(), torch.cuda.get_device_properties(0).total_memory, 0
for room in range(0, 4096, 16):
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + (room << 20)) / total)
    with contextlib.suppress(torch.OutOfMemoryError):
        got = both()
        break
    failed += 1
print(failed, all(torch.equal(a, b) for a, b in zip(got, want, strict=True)))
"""


def test_a_failed_allocation_leaves_nothing_behind() -> None:
    """Memory for ever more of what a forward and a backward ask for."""
    done = subprocess.run([sys.executable, "-c", FAILED_ALLOCATIONS], capture_output=True, text=True)
    failed, equal = done.stdout.split() or [done.stderr, ""]
    assert equal == "True", (failed, equal)
    assert int(failed) > 5


FAILED_LAUNCH = """
import torch, sinkattn
q = torch.randn(1, 300, 8, 64, device="cuda", dtype=torch.bfloat16)
want = sinkattn.flash_attn_func(q, q, q, causal=True)
torch.cuda.synchronize()
try:
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            print("the wait ended the capture")
        try:
            sinkattn.flash_attn_func(q, q, q, causal=True)
        except RuntimeError as error:
            print(error)
except RuntimeError:
    pass
torch.cuda.synchronize()
assert torch.equal(sinkattn.flash_attn_func(q, q, q, causal=True), want)
print("right again")
"""


def test_a_failed_launch_is_an_error_and_the_next_call_is_right() -> None:
    """Into a capture that a wait has ended nothing is launched. In a process of its own: torch is not tidy there."""
    done = subprocess.run([sys.executable, "-c", FAILED_LAUNCH], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    first, message, *_, last = done.stdout.splitlines()
    assert (first, last) == ("the wait ended the capture", "right again"), done.stdout
    assert re.match(r"sinkattn: .* failed with cudaErrorStreamCapture", message), message


def test_more_than_2_31_elements_of_every_prefill_tensor() -> None:
    """Known failure: int32 offsets. q, k and v are slices of one tensor; only the last rows have results to look at."""
    for name in TUNED:
        kind, tokens, rows = KINDS[name], 530_000, 1000
        heads = -(-4096 // (8 * kind.largest)) * 8
        left = 127 if name == "window" else 299
        qkv = torch.randn(1, tokens, heads + heads // 4, kind.largest, device="cuda", dtype=torch.bfloat16)
        s_aux, mask = torch.randn(heads, device="cuda"), (*(None,) * 5, left, 0, 0)
        results = []
        for x in (qkv, qkv[:, -rows:].contiguous()):
            q, k, v = x.split((heads, heads // 8, heads // 8), 2)
            out, lse = fwd_op(q, k, v, s_aux, *mask)
            assert x is not qkv or min(out.numel(), k.stride(1) * tokens) > 2**31
            grads = bwd_op(q, None, q, k, v, out, lse, s_aux, *mask)
            results.append([*(y[:, -300:].clone() for y in (out, *grads[:3])), lse[..., -300:].clone()])
            del out, lse, grads
        for far, near in zip(*results, strict=True):
            torch.testing.assert_close(far, near, rtol=2e-2, atol=1e-2, msg=lambda text, name=name: f"{name}: {text}")


def test_more_than_2_31_elements_between_two_sequences_of_a_cache() -> None:
    t = make_cache([640, 500])
    far = dict(t)
    storage = torch.empty(2**31 + 2**26, device="cuda", dtype=torch.bfloat16)
    for i, name in enumerate("kv"):
        x = t[name]
        at = storage[i << 24 :].as_strided(x.shape, (2**31 + 64, *x.stride()[1:]))
        far[name] = at.copy_(x)
    for options in ({}, {"num_splits": 3}, {"left": 127}):
        assert_same(decode_op(*arguments(far, **options)), decode_op(*arguments(t, **options)))


@pytest.mark.parametrize("options", [{}, {"left": 200, "num_sink_tokens": 17}])
def test_every_number_of_splits_agrees_with_one(options: dict[str, int]) -> None:
    for head_dim in (64, 128, 256, 512):
        t = make_cache(LENS, 16, kv_heads=2, head_dim=head_dim, capacity=2048)
        want = decode_op(*arguments(t, num_splits=1, **options))
        for num_splits in (0, 2, 3, 8, 9, 40, 1000):
            assert_close(decode_op(*arguments(t, num_splits=num_splits, **options)), want)


@pytest.mark.parametrize("invariant", [False, True])
def test_a_page_out_of_range_is_not_page_zero(invariant: bool) -> None:
    """Whatever page 0 holds, which no sequence has."""
    t = make_cache([640, 200], 64)
    table, unused = t["block_table"], set(range(t["k"].shape[0])) - set(t["block_table"].flatten().tolist())
    spare = unused.pop()
    t["k"][[0, spare]], t["v"][[0, spare]] = t["k"][[spare, 0]], t["v"][[spare, 0]]
    table.masked_fill_(table == 0, spare)
    for bad in (-1, t["k"].shape[0], 2**31 - 1, -(2**31)):
        table[0, 3] = bad
        results = []
        for value in (0.0, 7.0, math.nan):
            t["k"][0], t["v"][0] = value, value
            results.append(decode_op(*arguments(t)[:-1], invariant))
        for other in results[1:]:
            assert_same(other, results[0])
    with pytest.raises(ValueError, match="block_table named a page outside"):
        sinkattn.check_errors()


@pytest.mark.parametrize(("batch", "q_len", "capacity"), [(0, 1, 64), (2, 0, 64), (2, 1, 0), (0, 0, 0)])
@pytest.mark.parametrize("invariant", [False, True])
def test_decodes_of_nothing(batch: int, q_len: int, capacity: int, invariant: bool) -> None:
    q = torch.randn(batch, q_len, 8, 64, device="cuda", dtype=torch.bfloat16)
    cache, s_aux = q.new_empty(2, batch, capacity, 2, 64), torch.randn(8, device="cuda")
    lens = torch.zeros(batch, dtype=torch.int32, device="cuda")
    out, lse = decode_op(q, *cache, s_aux, lens, None, None, -1, 0, 0, invariant)
    assert torch.equal(out, torch.zeros_like(q))
    assert torch.equal(lse, s_aux[:, None].expand(batch, 8, q_len))
    sinkattn.check_errors()


def test_merged_parts_and_the_sink_are_one_call() -> None:
    q, k, v, s_aux = gpt_oss_like(2, 300)
    leaves = [x.requires_grad_() for x in (q, k, v, s_aux)]
    whole = sinkattn.flash_attn_func(q, k, v, s_aux=s_aux, return_lse=True)
    parts = [
        sinkattn.flash_attn_func(q, k[:, a:b], v[:, a:b], return_lse=True)
        for a, b in ((0, 100), (100, 101), (101, 300))
    ]
    merged = sinkattn.merge_attn_states(*sinkattn.merge_attn_states(*parts[0], *parts[1]), *parts[2])
    merged = sinkattn.apply_sink(*merged, s_aux)
    torch.testing.assert_close(merged[0], whole[0], rtol=2e-2, atol=2e-3)
    torch.testing.assert_close(merged[1], whole[1], rtol=1e-5, atol=1e-5)
    seeds = (torch.randn_like(whole[0]), torch.randn_like(whole[1]))
    for got, want in zip(*(torch.autograd.grad(x, leaves, seeds) for x in (merged, whole)), strict=True):
        assert (got - want).float().norm() < 1e-2 * want.float().norm()


def test_the_command_line_knows_this_device(capsys: pytest.CaptureFixture[str]) -> None:
    device = _C.query_cuda(0)
    assert re.search(rf"^cuda +{re.escape(device['name'])}, sm_{device['arch']}, ", sinkattn.check(), re.MULTILINE)
    assert main(["plan", "fwd", "--cuda", "0", "--q-len", "4096", "--k-len", "4096", "--window-size-right", "0"]) == 0
    assert re.search(r"^variant +sa_fwd_cuda_sm", capsys.readouterr().out, re.MULTILINE)


OPCHECKS: dict[str, Callable[[], tuple[Any, ...]]] = {
    "flash_attn_fwd": lambda: (*(x.requires_grad_() for x in gpt_oss_like(1, 40)), *(None,) * 5, 20, 0, 2),
    "flash_decode": lambda: arguments(make_cache([40, 7], 8, capacity=40), left=20),
    "append_kv": lambda: (
        *torch.zeros(2, 2, 8, 2, 64, device="cuda"), *torch.randn(2, 2, 3, 2, 64, device="cuda"),
        torch.tensor([0, 5], dtype=torch.int32, device="cuda"), None,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OPCHECKS)
def test_opcheck(name: str) -> None:
    results = torch.library.opcheck(getattr(torch.ops.sinkattn, name).default, OPCHECKS[name]())
    assert set(results.values()) == {"SUCCESS"}


def test_a_whole_training_step_in_a_graph() -> None:
    """A packed model's forward, backward and optimizer, replayed on other tokens and bounds, beside a twin without."""
    torch.manual_seed(0)
    models = [Decoder().cuda().bfloat16() for _ in range(2)]
    for layer in (*models[0].qkv, *models[0].out):
        layer.weight.data *= 4  # so that what is seen matters
    models[1].load_state_dict(models[0].state_dict())
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.05) for model in models]
    tokens = torch.randint(256, (200,), device="cuda")
    bounds = torch.tensor([0, 130, 131, 200], dtype=torch.int32, device="cuda")

    def step(i: int) -> Tensor:
        optimizers[i].zero_grad(set_to_none=False)
        loss: Tensor = models[i](tokens, bounds)
        loss.backward()
        optimizers[i].step()
        return loss.detach()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step(0), step(1)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(0)
    losses = []
    for new in ([0, 130, 131, 200], [0, 1, 2, 200], [0, 90, 130, 180], [0, 0, 100, 200]):
        tokens.random_(256)
        bounds.copy_(torch.tensor(new))
        graph.replay()
        torch.testing.assert_close(captured, step(1), rtol=1e-3, atol=1e-3)
        losses.append(captured.item())
    assert len({*losses}) == 4
    for got, want in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-3)
