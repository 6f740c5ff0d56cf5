# SPDX-License-Identifier: Apache-2.0
"""One sequence of a million keys in N parts: against reading alone, and beside the reduction-cost model.

N parts are merged in the launch that made them (num_splits = N) and in a second pass (-N), which ncu times by itself.
The model knows two rates of the run: what the device reads, and what one block takes in while few are at work (N = 1).
Parts run at the second as long as there is room for them all and the first allows it; then a block adds up N partials,
read at the second. Results are held against fp64 first; then all graphs and reading alone take turns, since a GPU that
draws too much power slows its clock for tens of ms, for whoever comes then. Times are of a node; ncu's are of a call.
"""

from __future__ import annotations

import argparse
import csv
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
from rich.table import Table

from . import decode, gpu, harness, report, studies
from .decode import COSINE, HEAD_DIM, NUM_KV_HEADS, NUM_Q_HEADS, Cache, DecodeCase

SUITE = "decode-long"
KEYS = 1 << 20
PARTS = (1, 2, 4, 8, 16, 33, 66, 132, 264, 528, 1056, 2112)
NODES, ROUNDS = 5, 15
BLOCKS_AN_SM = 4  # of 4 warps, as num_splits has them
PARTIAL_BYTES = NUM_Q_HEADS // NUM_KV_HEADS * (HEAD_DIM + 8) * 4  # (O, pivot, sum) of a group's rows, and padding
METRICS = ("gpu__time_duration.sum", "dram__bytes_read.sum")


@dataclass(frozen=True)
class LongRow:
    """impl: read, one launch, two passes or model. num_splits is what was asked for, 0 the kernel's own choice.

    reduce_us: of adding up alone, the second pass by ncu, or the model's term. dram_gbps: by ncu, of the first kernel.
    None where it was not measured.
    """

    suite: str
    keys: int
    impl: str
    num_splits: int
    us: float
    gbps: float
    of_read: float
    reduce_us: float | None
    dram_gbps: float | None
    commit: str
    torch: str


def model_us(parts: int, keys: int, sms: int, read_gbps: float, block_gbps: float) -> tuple[float, float]:
    """(the call, of that adding up the parts)"""
    head_bytes = 2 * 2 * HEAD_DIM * keys
    waves = -(-parts * NUM_KV_HEADS // (BLOCKS_AN_SM * sms))
    attend = max(NUM_KV_HEADS * head_bytes / read_gbps, waves * head_bytes / parts / block_gbps)
    reduce = parts * PARTIAL_BYTES / block_gbps if parts > 1 else 0.0
    return (attend + reduce) / 1e3, reduce / 1e3


def profiled(parts: tuple[int, ...], keys: int) -> dict[int, tuple[float | None, float]]:
    """By num_splits: us of the second pass, and what the first kernel read from memory, in GB/s. Empty without ncu."""
    if not shutil.which("ncu"):
        print("reduce_us and dram_gbps are not measured: ncu is not on PATH", file=sys.stderr)
        return {}
    ncu = ["ncu", "--csv", "--page", "raw", "--print-units", "base", "--clock-control", "none"]
    ncu += ["--metrics", ",".join(METRICS), "-k", "regex:decode_kernel|reduce_kernel"]
    bare = [sys.executable, "-m", "benchmarks", "long", "--bare", "--keys", str(keys), "--parts", *map(str, parts)]
    told = subprocess.run(ncu + bare, cwd=harness.ROOT, capture_output=True, text=True)
    lines = [line for line in told.stdout.splitlines() if line.startswith('"')]
    kernels = [row for row in csv.DictReader(lines) if row["ID"]]
    if told.returncode or not kernels:
        raise RuntimeError(f"ncu failed: {told.stdout[-500:]} {told.stderr[-500:]}")
    found: dict[int, tuple[float | None, float]] = {}
    left = iter(kernels)
    for num_splits in order(parts):
        first = next(left)
        ns, read_bytes = (float(first[metric].replace(",", "")) for metric in METRICS)
        second = next(left) if num_splits < -1 else None
        reduce_us = None if second is None else float(second[METRICS[0]].replace(",", "")) / 1e3
        if "decode_kernel" not in first["Kernel Name"] or (second and "reduce_kernel" not in second["Kernel Name"]):
            raise RuntimeError(f"ncu saw other kernels than were launched: {first['Kernel Name']}")
        found[num_splits] = reduce_us, read_bytes / ns
    return found


def order(parts: tuple[int, ...]) -> list[int]:
    """Each num_splits that is measured."""
    return [0, *parts, *(-n for n in parts if n > 1)]


def measure(parts: tuple[int, ...], keys: int, commit: str) -> list[LongRow]:
    """Raises RuntimeError when a result is wrong, or two passes have other bits than one launch."""
    from . import reader

    case = DecodeCase("b1-long", 1, keys, 0)
    cache, results = Cache.of(case), dict[int, torch.Tensor]()
    calls: dict[str | int, decode.Call] = {f"read {i}": call for i, call in enumerate(reader.readers(cache.k, cache.v))}
    for num_splits in order(parts):
        calls[num_splits] = decode.prepare(case, cache, num_splits)
        results[num_splits] = calls[num_splits]().clone()
        if num_splits < 0 and not results[num_splits].equal(results[-num_splits]):
            raise RuntimeError(f"{SUITE}: num_splits {num_splits} has other bits than {-num_splits}")
        cosine = 1.0 if num_splits < 0 else decode.cosine_to_fp64(case, cache, results[num_splits])
        if not cosine >= COSINE:
            raise RuntimeError(f"{SUITE}: num_splits {num_splits} is off from fp64, cosine {cosine}")
    graphs = {name: decode.captured(call, NODES) for name, call in calls.items()}
    rounds = [{name: decode.replay_ms(graph, 1) for name, graph in graphs.items()} for _ in range(ROUNDS)]
    found = {name: 1e3 / NODES * median(times[name] for times in rounds) for name in graphs}
    read_us = min(us for name, us in found.items() if isinstance(name, str))
    times = {name: us for name, us in found.items() if isinstance(name, int)}
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    rates = case.cache_bytes / read_us / 1e3, case.cache_bytes / NUM_KV_HEADS / times[1] / 1e3
    seen = profiled(parts, keys)

    def row(impl: str, num_splits: int, us: float, reduce_us: float | None, dram_gbps: float | None) -> LongRow:
        numbers = [harness.digits(x) for x in (us, case.cache_bytes / us / 1e3, read_us / us)]
        rest = [None if x is None else harness.digits(x) for x in (reduce_us, dram_gbps)]
        return LongRow(SUITE, keys, impl, num_splits, *numbers, *rest, commit, torch.__version__)

    rows = [row("read", 0, read_us, None, None)]
    for num_splits, us in times.items():
        rows.append(
            row("two passes" if num_splits < 0 else "one launch", num_splits, us, *seen.get(num_splits, (None,) * 2))
        )
    return rows + [row("model", n, *model_us(n, keys, sms, *rates), None) for n in parts]


def by_parts(rows: list[LongRow], impl: str) -> dict[int, LongRow]:
    return {abs(row.num_splits): row for row in rows if row.impl == impl}


def best(rows: list[LongRow], impl: str) -> int:
    """Of the numbers of parts asked for, the fastest."""
    return min((row.us, n) for n, row in by_parts(rows, impl).items() if n)[1]


def table(rows: list[LongRow]) -> Table:
    read = by_parts(rows, "read")[0]
    shown = Table(title=f"us a call, {read.keys} keys; reading alone {read.us:.1f}, {read.gbps:.0f} GB/s")
    shown.caption = ", ".join(
        f"{impl}: best in {best(rows, impl)} parts" for impl in ("one launch", "two passes", "model")
    )
    for name in (
        "parts",
        "one launch",
        "of read",
        "model",
        "two passes",
        "second pass, ncu",
        "model's",
        "DRAM GB/s, ncu",
    ):
        shown.add_column(name, no_wrap=True)
    once, twice, model = (by_parts(rows, impl) for impl in ("one launch", "two passes", "model"))

    def cell(found: dict[int, LongRow], n: int, what: str = "us", form: str = ".1f") -> str:
        value = getattr(found[n], what) if n in found else None
        return "-" if value is None else format(value, form)

    for n in once:
        shown.add_row(
            str(n) if n else "by lengths", cell(once, n), cell(once, n, "of_read", ".3f"), cell(model, n),
            cell(twice, n), cell(twice, n, "reduce_us"), cell(model, n, "reduce_us"), cell(once, n, "dram_gbps", ".0f"),
        )  # fmt: skip
    return shown


def plot(path: Path, machine: dict[str, object], rows: list[LongRow]) -> None:
    """Times against the number of parts, beside reading alone."""
    with studies.picture(path, 1, 1, (7, 4.2)) as (figure, axes):
        panel = axes[0][0]
        for impl, style in (("one launch", "-o"), ("two passes", "-s"), ("model", "--")):
            found = {n: row.us for n, row in by_parts(rows, impl).items() if n}
            panel.plot(list(found), list(found.values()), style, label=impl, markersize=4)
        panel.axhline(by_parts(rows, "one launch")[0].us, linewidth=1, label="by the lengths found")
        panel.axhline(by_parts(rows, "read")[0].us, color="black", linewidth=0.8, linestyle=":", label="reading alone")
        panel.set(xscale="log", yscale="log", xlabel="parts", ylabel="us")
        panel.grid(alpha=0.3, which="both")
        panel.legend(fontsize=8)
        figure.suptitle(f"decode of one sequence of {rows[0].keys} keys, 64:8 heads of 64, bf16")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--parts", nargs="*", type=int, default=PARTS, help="default: 1 to 2112; 1 is always among them"
    )
    parser.add_argument("--keys", type=int, default=KEYS, help=f"a multiple of 64; default: {KEYS}")
    parser.add_argument("--bare", action="store_true", help="only call each once, in order, for a profiler")
    gpu.add_output(parser, SUITE)


def run(options: argparse.Namespace) -> None:
    gpu.require("long")
    parts = tuple(sorted({1, *options.parts}))
    if options.bare:
        case = DecodeCase("b1-long", 1, options.keys, 0)
        cache = Cache.of(case)
        for num_splits in order(parts):
            decode.prepare(case, cache, num_splits)()
        torch.cuda.synchronize()
        return
    rows = measure(parts, options.keys, options.commit or harness.commit())
    report.show(table(rows))
    gpu.keep(rows, SUITE, options.json)
