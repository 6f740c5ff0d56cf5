# SPDX-License-Identifier: Apache-2.0
"""What a call makes the device and the host do, by the profiler: kernels, their blocks, copies, syncs, allocations.

Counts are of CALLS calls less those of none, over CALLS; a grid of 128 blocks is one kernel. host_us is the wall time
of a call while the device keeps up. Prefills are held against fp64 first. What a training step pays before any kernel
is in the rows of 16 tokens: a function of torch.autograd that does nothing beside ours, and both without the thread
that torch has for each device's backward.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import sinkattn

from . import cases, decode, gpu, harness, packed, peers, report, studies
from .decode import HEAD_DIM, NUM_KV_HEADS, Cache, DecodeCase
from .harness import Inputs
from .naive import NAIVE, NAIVE_BLOCKS

SUITE = "launches"
CALLS = 20
NOTHING = "a function that does nothing"
PREFILLS = tuple(
    case for case in cases.PREFILL_QUICK if case.id in ("w128-16384", "w128-packed", "full-16384-d64", "w1024-d128")
)
PEERS = (peers.OURS, peers.PREFILL_QUICK[-1])
NAIVES = {NAIVE: "naive kernel", NAIVE_BLOCKS: "naive kernel, a block a sequence and head"}  # which have a sink too
CASES = (
    DecodeCase("b1-1k", 1, 1024, 0),
    DecodeCase("b8-8k", 8, 8192, 0),
    DecodeCase("b64-w128", 64, 8192, 128),
)


@dataclass(frozen=True)
class LaunchRow:
    """Of one call. blocks: of each kernel; copies are also memsets; syncs are the host's waits for the device."""

    suite: str
    case: str
    call: str
    kernels: float
    blocks: list[int]
    copies: float
    syncs: float
    allocations: float
    host_us: float
    commit: str
    torch: str


def calls_of(case: DecodeCase) -> dict[str, Callable[[], object]]:
    """What a program may call for one step, by name."""
    cache = Cache.of(case)
    k, v = torch.randn(2, case.batch, 1, NUM_KV_HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    before = cache.cache_seqlens - 1
    options: dict[str, Any] = {
        "block_table": cache.block_table,
        "s_aux": cache.s_aux,
        "window_size": (case.window - 1, 0),
    }
    out_variant = decode.prepare(case, cache)

    def append() -> object:
        return torch.ops.sinkattn.append_kv(cache.k, cache.v, k, v, before, cache.block_table)

    def attend() -> object:
        return sinkattn.flash_attn_with_kvcache(
            cache.q, cache.k, cache.v, cache_seqlens=cache.cache_seqlens, causal=True, **options
        )

    def append_and_attend() -> object:
        return sinkattn.flash_attn_with_kvcache(
            cache.q, cache.k, cache.v, k, v, cache_seqlens=before, causal=True, **options
        )

    graph = torch.cuda.CUDAGraph()
    append_and_attend()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        append(), out_variant()

    def replay(_: object = (cache, k, v, before)) -> None:  # a graph has addresses only
        graph.replay()

    return {
        "flash_decode_out": out_variant,
        "append_kv": append,
        "flash_attn_with_kvcache": attend,
        "flash_attn_with_kvcache, k and v": append_and_attend,
        "graph of append and decode": replay,
    }


def profiled(call: Callable[[], object], times: int) -> list[dict[str, Any]]:
    """The profiler's events, in the order of time."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(times):
            call()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        events: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
    return sorted((event for event in events if "ts" in event), key=lambda event: float(event["ts"]))


def counts(events: Sequence[dict[str, Any]]) -> tuple[Counter[str], list[int]]:
    """Kernels, copies and syncs among the events; and the blocks of each kernel."""
    found, blocks = Counter[str](), []
    for event in events:
        category = event.get("cat")
        if category == "kernel":
            found["kernels"] += 1
            blocks.append(math.prod(event["args"]["grid"]))
        elif category in ("gpu_memcpy", "gpu_memset"):
            found["copies"] += 1
        elif category in ("cuda_runtime", "cuda_driver") and "Synchronize" in event["name"]:
            found["syncs"] += 1
    return found, blocks


def allocations(call: Callable[[], object]) -> int:
    before = int(torch.cuda.memory_stats()["allocation.all.allocated"])
    call()
    after = int(torch.cuda.memory_stats()["allocation.all.allocated"])
    return after - before


def host_us(call: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    best = float("inf")
    for _ in range(5):
        begin = time.perf_counter()
        for _ in range(CALLS):
            call()
        best = min(best, (time.perf_counter() - begin) / CALLS)
        torch.cuda.synchronize()
    return 1e6 * best


def measure(case: str, calls: Mapping[str, Callable[[], object]], commit: str) -> list[LaunchRow]:
    rows = []
    for name, call in calls.items():
        for _ in range(3):
            call()
        torch.cuda.synchronize()
        (many, blocks), (none, _) = counts(profiled(call, CALLS)), counts(profiled(call, 0))
        each = {what: (many[what] - none[what]) / CALLS for what in ("kernels", "copies", "syncs")}
        times = {"allocations": float(allocations(call)), "host_us": harness.digits(host_us(call))}
        first = blocks[: len(blocks) // CALLS]
        rows.append(LaunchRow(SUITE, case, name, blocks=first, commit=commit, torch=torch.__version__, **each, **times))
    return rows


def prefills(case: cases.Case) -> dict[str, Callable[[], object]]:
    """Raises RuntimeError when we are wrong."""
    found: dict[str, Callable[[], object]] = {}
    for direction in report.DIRECTIONS:
        calls, _ = harness.ready(case, direction, (*PEERS, *NAIVES))
        found |= {f"{NAIVES.get(peer) or report.LINES[peer.name]}: {direction}": call for peer, call in calls.items()}
    return found


class Nothing(torch.autograd.Function):
    """Of attention's arguments and gradients, without a kernel."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, s_aux: Tensor) -> Tensor:
        ctx.save_for_backward(k, v, s_aux)
        return q.view_as(q)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        return dout, *ctx.saved_tensors


def training_steps() -> dict[str, Callable[[], object]]:
    """Forward and backward of a case so small that the host is all there is to see."""
    nothing = peers.Peer("nothing", lambda case, direction: Nothing.apply, True, False)
    ready, _ = harness.ready(cases.HOST, "both", PEERS)
    calls = {report.LINES[peer.name]: call for peer, call in ready.items()}
    calls[NOTHING] = harness.prepare(nothing, cases.HOST, "both", Inputs.of(cases.HOST))

    def on_one_thread(call: harness.Call) -> Callable[[], object]:
        def step() -> object:
            with torch.autograd.set_multithreading_enabled(False):
                return call()

        return step

    found: dict[str, Callable[[], object]] = {f"{name}: forward and backward": call for name, call in calls.items()}
    return found | {f"{name}, on one thread": on_one_thread(call) for name, call in found.items()}


def _blocks(row: LaunchRow) -> str:
    return ", ".join(map(str, row.blocks)) or "-"


def winners(rows: Sequence[LaunchRow]) -> dict[int, float]:
    """Of calls that compute the same, the one that costs the host least, and how many times that the next one costs;
    by the row's place."""
    rivals: dict[tuple[str, str], list[tuple[float, int]]] = {}
    for i, row in enumerate(rows):
        who, colon, what = row.call.partition(": ")
        if colon and not who.startswith(NOTHING):
            rivals.setdefault((row.case, what), []).append((row.host_us, i))
    ranked = (sorted(group) for group in rivals.values() if len(group) > 1)
    return {i: second / first for (first, i), (second, _), *_ in ranked}


def markdown(machine: dict[str, object], rows: Sequence[LaunchRow]) -> list[str]:
    lines, ahead = [], winners(rows)
    for i, row in enumerate(rows):
        counted = (row.copies, row.syncs, row.allocations)
        cells = [row.case, row.call, f"{row.kernels:g}", _blocks(row), *(f"{x:g}" for x in counted)]
        lines.append([*cells, f"{row.host_us:.3g}", f"{ahead[i]:.2f}x" if i in ahead else ""])
    heads = ["case", "call", "kernels", "blocks of each", "copies", "waits", "allocations", "host, us", "winner, by"]
    return [studies.where(machine, rows), studies.table(heads, lines)]


def plot(path: Path, machine: dict[str, object], rows: Sequence[LaunchRow]) -> None:
    """Host time and kernels, call by call."""
    with studies.picture(path, 1, 2, (13, 0.3 * len(rows) + 1.5)) as (figure, axes):
        names = [f"{row.case}, {row.call}" for row in rows][::-1]
        for panel, value, label in zip(axes[0], ("host_us", "kernels"), ("host, us", "kernels a call"), strict=True):
            panel.barh(names, [getattr(row, value) for row in rows][::-1])
            panel.set_xlabel(label)
            panel.tick_params(axis="y", labelsize=7)
            panel.grid(alpha=0.3, axis="x")
        axes[0][1].set_yticks([])
        figure.suptitle(f"one call, {machine['gpu']}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    studies.add_output(parser, SUITE)


def run(options: argparse.Namespace) -> None:
    gpu.require("launches")
    commit, rows = options.commit or harness.commit(), list[LaunchRow]()
    two_short = next(case for case in packed.cases(packed.QUICK_CONFIGURATIONS) if case.name == "2x60-full-bf16")
    for case in (two_short, *(PREFILLS[:1] if options.quick else PREFILLS)):
        rows += measure(case.id, prefills(case), commit)
        torch.cuda.empty_cache()
    rows += measure(cases.HOST.id, training_steps(), commit)
    for step in CASES:
        rows += measure(step.id, calls_of(step), commit)
    studies.show(markdown(studies.machine(), rows))
    studies.keep(studies.place(SUITE, options), rows)
