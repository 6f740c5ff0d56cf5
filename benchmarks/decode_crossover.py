# SPDX-License-Identifier: Apache-2.0
"""Where a decode that is split stops paying: batch by length, beside the planner's closed forms.

unsplit is one block a sequence and kv head, closed the P = SMs / (batch * kv heads) parts each that fill the machine,
passes the same merged by a second launch (num_splits = -P), where P is not 1, found what the kernel cuts by the lengths
it finds (num_splits = 0). Unsplit rows fill the machine from B* = ceil(SMs / kv heads) sequences on. Times are warm, of
a node in a captured graph; each result is held against fp64.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.table import Table

from . import decode, gpu, harness, report, studies
from .decode import COSINE, NUM_KV_HEADS, Cache, DecodeCase

SUITE = "decode-crossover"
BATCHES = tuple(1 << i for i in range(9))
LENGTHS = tuple(512 << i for i in range(8))
MAX_TOKENS = 1 << 20  # of a batch
NODES, ROUNDS = 20, 7
NOISE = 1.02  # times so near each other are the same
LABELS = {"unsplit": "one part", "closed": "P parts", "found": "by the lengths found"}


@dataclass(frozen=True)
class CrossoverRow:
    """One measurement; num_splits is what was asked for, 0 the kernel's own choice."""

    suite: str
    batch: int
    length: int
    impl: str
    num_splits: int
    us: float
    commit: str
    torch: str


def fill_batch(sms: int) -> int:
    """B*: sequences from which on unsplit rows fill the machine."""
    return -(-sms // NUM_KV_HEADS)


def fill_parts(batch: int, sms: int) -> int:
    """P: parts of each sequence that fill the machine, at least 1."""
    return max(1, sms // (batch * NUM_KV_HEADS))


def cells(batches: tuple[int, ...] = BATCHES, lengths: tuple[int, ...] = LENGTHS) -> list[tuple[int, int]]:
    return [(batch, length) for length in lengths for batch in batches if batch * length <= MAX_TOKENS]


def measure(batch: int, length: int, sms: int, commit: str) -> list[CrossoverRow]:
    """Raises RuntimeError when a result is wrong."""
    case = DecodeCase(f"b{batch}-{length}", batch, length, 0)
    cache, rows, times = Cache.of(case), [], dict[int, float]()
    parts = fill_parts(batch, sms)
    for impl, num_splits in {"unsplit": 1, "closed": parts, "passes": -parts if parts > 1 else 1, "found": 0}.items():
        if num_splits not in times:
            call = decode.prepare(case, cache, num_splits)
            cosine = decode.cosine_to_fp64(case, cache, call())
            if not cosine >= COSINE:
                raise RuntimeError(f"{case.id}: {impl} is off from fp64, cosine {cosine}")
            times[num_splits] = harness.digits(1e3 * decode.warm_ms(call, ROUNDS, NODES))
        rows.append(CrossoverRow(SUITE, batch, length, impl, num_splits, times[num_splits], commit, torch.__version__))
    return rows


def by_cell(rows: Sequence[CrossoverRow]) -> dict[tuple[int, int], dict[str, float]]:
    """Times in us by (batch, length) and impl."""
    found: dict[tuple[int, int], dict[str, float]] = {}
    for row in rows:
        found.setdefault((row.batch, row.length), {})[row.impl] = row.us
    return found


def crossover(rows: list[CrossoverRow], length: int) -> int | None:
    """The least batch from which on unsplit is as fast as found; None where it never is."""
    times = by_cell(rows)
    least = None
    for batch in sorted({row.batch for row in rows if row.length == length}, reverse=True):
        cell = times[batch, length]
        if cell["unsplit"] > NOISE * cell["found"]:
            break
        least = batch
    return least


def table(rows: list[CrossoverRow], sms: int) -> Table:
    times, batches = by_cell(rows), sorted({row.batch for row in rows})
    shown = Table(title=f"us found, then unsplit, closed and passes as multiples of it; B* = {fill_batch(sms)}")
    for name in ("length", *(f"b{batch}, P {fill_parts(batch, sms)}" for batch in batches), "unsplit as fast"):
        shown.add_column(name, no_wrap=True)
    for length in sorted({row.length for row in rows}):
        shown_cells = []
        for batch in batches:
            cell = times.get((batch, length))
            ratios = [f"{cell[impl] / cell['found']:.2f}" for impl in ("unsplit", "closed", "passes")] if cell else []
            shown_cells.append(" ".join([f"{cell['found']:.1f}", *ratios]) if cell else "-")
        batch_from = crossover(rows, length)
        shown.add_row(str(length), *shown_cells, "-" if batch_from is None else f"b{batch_from}")
    return shown


def plot(path: Path, machine: dict[str, object], rows: Sequence[CrossoverRow]) -> None:
    """Times over that of `found` against the batch, a line for each length."""
    times, sms = by_cell(rows), int(str(machine["sms"]))
    with studies.picture(path, 1, 2, (11, 4.2)) as (figure, axes):
        for panel, impl in zip(axes[0], ("unsplit", "closed"), strict=True):
            for length in sorted({row.length for row in rows}):
                batches = sorted(batch for batch, n in times if n == length)
                ratios = [times[batch, length][impl] / times[batch, length]["found"] for batch in batches]
                panel.plot(batches, ratios, marker="o", label=f"{length} keys")
            panel.axhline(1, color="black", linewidth=0.8)
            panel.axvline(fill_batch(sms), color="black", linewidth=0.8, linestyle="--")
            panel.set(title=f"{LABELS[impl]} / {LABELS['found']}", xscale="log", xlabel="sequences")
            batches = sorted({batch for batch, _ in times})
            panel.set_xticks(batches, [str(batch) for batch in batches])
            panel.minorticks_off()
            panel.grid(alpha=0.3)
        axes[0][0].set_yscale("log")
        axes[0][0].legend(fontsize=8)
        axes[0][0].set_ylabel("times as long")
        figure.suptitle(f"decode, 64:8 heads of 64, bf16; dashed: B* = {fill_batch(sms)}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--batches", nargs="*", type=int, help="default: 1 to 256")
    parser.add_argument("--lengths", nargs="*", type=int, help="multiples of 64; default: 512 to 65536")
    gpu.add_output(parser, SUITE)


def run(options: argparse.Namespace) -> None:
    gpu.require("decode-crossover")
    commit, rows = options.commit or harness.commit(), list[CrossoverRow]()
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    for batch, length in cells(tuple(options.batches or BATCHES), tuple(options.lengths or LENGTHS)):
        rows += measure(batch, length, sms, commit)
    report.show(table(rows, sms))
    if options.json or not (options.batches or options.lengths):
        gpu.keep(rows, SUITE, options.json)
