# SPDX-License-Identifier: Apache-2.0
"""What a decode call makes the device and the host do, counted by the profiler: kernels, copies, syncs, allocations.

Counts are of CALLS calls less those of none, over CALLS. host_us is the wall time of a call while the device keeps up.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from rich.table import Table

import sinkattn

from . import decode, gpu, harness, report
from .decode import HEAD_DIM, NUM_KV_HEADS, Cache, DecodeCase

SUITE = "decode-launches"
CALLS = 20
CASES = (
    DecodeCase("b1-1k", 1, 1024, 0),
    DecodeCase("b8-8k", 8, 8192, 0),
    DecodeCase("b64-w128", 64, 8192, 128),
)


@dataclass(frozen=True)
class LaunchRow:
    """Of one call. copies are also memsets; syncs are the host's waits for the device."""

    suite: str
    case: str
    call: str
    kernels: float
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


def counts(call: Callable[[], object], times: int) -> Counter[str]:
    torch.cuda.synchronize()
    allocated = torch.cuda.memory_stats()["allocation.all.allocated"]
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(times):
            call()
        torch.cuda.synchronize()
    found = Counter(allocations=torch.cuda.memory_stats()["allocation.all.allocated"] - allocated)
    for event in profile.events() or ():
        if event.device_type == torch.autograd.DeviceType.CUDA:  # type: ignore[attr-defined]
            found["copies" if event.name.startswith(("Memcpy", "Memset")) else "kernels"] += 1
        elif event.name.startswith("cu") and "Synchronize" in event.name:
            found["syncs"] += 1
    return found


def host_us(call: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    best = float("inf")
    for _ in range(5):
        begin = time.perf_counter()
        for _ in range(100):
            call()
        best = min(best, (time.perf_counter() - begin) / 100)
        torch.cuda.synchronize()
    return 1e6 * best


def measure(case: DecodeCase, commit: str) -> list[LaunchRow]:
    rows = []
    for name, call in calls_of(case).items():
        for _ in range(3):
            call()
        many, none = counts(call, CALLS), counts(call, 0)
        each = {what: (many[what] - none[what]) / CALLS for what in ("kernels", "copies", "syncs", "allocations")}
        time_us = harness.digits(host_us(call))
        rows.append(LaunchRow(SUITE, case.id, name, host_us=time_us, commit=commit, torch=torch.__version__, **each))
    return rows


def table(rows: list[LaunchRow]) -> Table:
    shown = Table(title="of one call")
    for name in ("case", "call", "kernels", "copies", "syncs", "allocations", "host us"):
        shown.add_column(name, no_wrap=True)
    for row in rows:
        counted = (row.kernels, row.copies, row.syncs, row.allocations)
        shown.add_row(row.case, row.call, *(f"{x:g}" for x in counted), f"{row.host_us:.1f}")
    return shown


def add_arguments(parser: argparse.ArgumentParser) -> None:
    gpu.add_output(parser, SUITE)


def run(options: argparse.Namespace) -> None:
    gpu.require("launches")
    commit, rows = options.commit or harness.commit(), list[LaunchRow]()
    for case in CASES:
        rows += measure(case, commit)
    report.show(table(rows))
    gpu.keep(rows, SUITE, options.json)
