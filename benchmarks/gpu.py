# SPDX-License-Identifier: Apache-2.0
"""Times on a CUDA device: the median over rounds, each call after a write that leaves nothing of its input in the L2.

Peers take turns in shuffled order. A call is timed between two events: where the host is slower than the device, its
time, unless the call is a captured graph.
"""

import argparse
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from sinkattn import _C

from . import cases, harness
from .cases import Case
from .harness import Call, Item, Name
from .peers import Peer

FLUSH_BYTES = 256 << 20  # more than any L2
MIN_ROUNDS, MAX_ROUNDS = 5, 500
HOST_CALLS, HOST_ROUNDS = 200, 7


def add_output(parser: argparse.ArgumentParser, suite: str) -> None:
    where = f"where rows go; default: benchmarks/results/<device>/{suite}.json"
    parser.add_argument("--json", "--output", type=Path, help=where)
    parser.add_argument("--commit", help="the commit that rows name; default: git's")


def add_readme(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--readme", action="store_true", help="measure nothing: draw README's table from what is kept")


def require(study: str) -> None:
    """Raises SystemExit where there is no CUDA device."""
    if not torch.cuda.is_available():
        raise SystemExit(f"benchmarks {study} needs a CUDA device")


def keep(rows: Sequence[Any], suite: str, path: Path | None) -> None:
    """Saves the rows of a study, at the suite's place where no path is given."""
    path = path or harness.results_path(suite, torch.cuda.get_device_name())
    harness.save(path, rows, machine())
    print(f"wrote {path}")


@dataclass(frozen=True)
class Row:
    """One measurement; ms and tflops are None where the peer is absent, and note says why.

    extra_mib: what the call allocates at its peak beside what it returns.
    """

    suite: str
    case: str
    direction: str
    impl: str
    ms: float | None
    tflops: float | None
    extra_mib: float | None
    note: str
    commit: str
    torch: str

    @property
    def speed(self) -> float | None:
        return self.tflops


def take_turns(calls: dict[Name, Call], seconds: float, least: int = MIN_ROUNDS) -> dict[Name, float]:
    """Median time of each in ms, over as many rounds as about `seconds` hold, at least `least`."""
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    events: dict[Name, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {peer: [] for peer in calls}
    order = list(calls)
    shuffle = random.Random(0).shuffle

    def rounds(count: int) -> float:
        begin = time.perf_counter()
        for _ in range(count):
            shuffle(order)
            for peer in order:
                before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
                flush.zero_()
                before.record()
                calls[peer]()
                after.record()
                events[peer].append((before, after))
        torch.cuda.synchronize()
        return time.perf_counter() - begin

    rounds(1)  # to warm up: its times are the first to go
    for pairs in events.values():
        pairs.clear()
    each = rounds(1)
    rounds(min(max(int(seconds / each), least), MAX_ROUNDS) - 1)
    return {peer: median(before.elapsed_time(after) for before, after in pairs) for peer, pairs in events.items()}


def captured(call: Call) -> Call:
    """The call as a graph, which costs the host next to nothing; the current stream must not be the default one."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        results = call()

    def replay(_: Call = call) -> tuple[Tensor, ...]:  # a graph has addresses only: the call keeps its tensors
        graph.replay()
        return results

    return replay


def capture(calls: dict[Name, Call], notes: dict[Name, str]) -> None:
    """Calls become graphs; one that cannot be captured goes, with a note. Raises when it is ours."""
    for name in list(calls):
        try:
            calls[name] = captured(calls[name])
        except Exception as error:
            del calls[name]
            if isinstance(name, Peer) and name.is_ours:
                raise
            notes[name] = harness.failure(error)


def peak_bytes(call: Callable[[], Item]) -> tuple[Item, int]:
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    results = call()
    torch.cuda.synchronize()
    return results, torch.cuda.max_memory_allocated() - before


def extra_mib(call: Call) -> float:
    """What a call allocates at its peak beside what it returns."""
    if not torch.cuda.is_available():
        return harness.extra_mib(call)
    results, peak = peak_bytes(call)
    return harness.digits(max(0, peak - harness.num_bytes(results)) / 2**20)


def host_times(calls: dict[Name, Call]) -> dict[Name, float]:
    """Median wall time of each in ms, while calls follow each other and the device keeps up."""
    times: dict[Name, list[float]] = {peer: [] for peer in calls}
    for _ in range(HOST_ROUNDS):
        for peer, call in calls.items():
            torch.cuda.synchronize()
            begin = time.perf_counter()
            for _ in range(HOST_CALLS):
                call()
            times[peer].append((time.perf_counter() - begin) / HOST_CALLS * 1e3)
    return {peer: median(values) for peer, values in times.items()}


Clock = Callable[[dict[Peer, Call]], dict[Peer, float]]


def measure(
    suite: str, case: Case, direction: str, peers: Sequence[Peer], clock: Clock, commit: str, graph: bool = False
) -> list[Row]:
    """A row for each peer. Raises RuntimeError when we are wrong."""
    calls, notes = harness.ready(case, direction, peers)
    memory = {peer: extra_mib(call) for peer, call in calls.items()}
    if graph:
        capture(calls, notes)
    times = clock(calls)

    def row(peer: Peer) -> Row:
        ms = times.get(peer)
        shown = None if ms is None else harness.digits(ms)
        tflops = None if ms is None or case == cases.HOST else harness.digits(case.gflop(direction) / ms)
        note = notes.get(peer, "")
        return Row(
            suite, case.id, direction, peer.name, shown, tflops, memory.get(peer), note, commit, torch.__version__
        )

    return [row(peer) for peer in peers]


def machine() -> dict[str, object]:
    facts = torch.cuda.get_device_properties(0)
    return {"gpu": facts.name, "sms": facts.multi_processor_count, "cuda": torch.version.cuda, "build": _C.build_info()}
