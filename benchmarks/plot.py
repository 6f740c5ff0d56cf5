# SPDX-License-Identifier: Apache-2.0
"""The pictures under docs/ and the tables of its pages, from what is kept; needs no GPU."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from . import (
    accuracy,
    crossover,
    decode_crossover,
    distributed,
    generate,
    gpu,
    harness,
    launches,
    long,
    naive,
    packed,
    paged,
    planner,
    prefill,
    report,
    scaling,
    serving,
    shapes,
    split_prefill,
    tiers,
    trace,
    traffic,
)

# Each has a SUITE, and plot(path, machine, rows); those of a page markdown(machine, rows) too; TABLES it alone.
PICTURES: dict[ModuleType, type[Any]] = {
    decode_crossover: decode_crossover.CrossoverRow,
    trace: trace.TraceRow,
    tiers: tiers.TierRow,
    shapes: gpu.Row,
    packed: gpu.Row,
    split_prefill: gpu.Row,
    crossover: crossover.CrossoverRow,
    launches: launches.LaunchRow,
    scaling: scaling.ScalingRow,
    accuracy: accuracy.AccuracyRow,
    distributed: distributed.DistributedRow,
    long: long.LongRow,
    planner: planner.PlannerRow,
    traffic: traffic.TrafficRow,
}
TABLES: dict[ModuleType, type[Any]] = {
    paged: paged.PagedRow,
    generate: generate.GenerateRow,
    serving: serving.ServingRow,
}
DOCS = harness.ROOT / "docs"
PAGE = DOCS / "studies.md"
# What needs no rows.
COMPUTED: dict[ModuleType, Callable[[], list[str]]] = {packed: naive.computed, split_prefill: split_prefill.computed}
# The studies whose tables stand on a page, between their marks.
PAGES: dict[Path, tuple[ModuleType, ...]] = {
    PAGE: (shapes, packed, crossover, split_prefill, launches, scaling, accuracy),
    DOCS / "planner.md": (planner,),
    DOCS / "decoding.md": (traffic, paged),
    DOCS / "huggingface.md": (generate,),
    DOCS / "vllm.md": (serving,),
}
ON_PAGE = PAGES[PAGE]


def page(path: Path, results: Path = harness.RESULTS) -> str:
    """A page's text with the tables that the kept results give: a GPU's, or without them a CPU's."""
    text = path.read_text()
    for study in PAGES[path]:
        kind = (PICTURES | TABLES)[study]
        kept = [harness.load(path, kind) for path in sorted(results.glob(f"*/{study.SUITE}.json"))]
        gpus = [of for of in kept if "cpu" not in of[0]]
        shown = [lines for of in gpus or kept for lines in study.markdown(*of)]
        computed = COMPUTED[study]() if study in COMPUTED else []
        text = report.placed(text, study.SUITE, computed + (shown or [report.none_yet(study.SUITE)]))
    return text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--results", type=Path, default=harness.RESULTS, help="default: benchmarks/results")
    parser.add_argument("--output", type=Path, default=DOCS, help="default: docs")


def run(options: argparse.Namespace) -> None:
    drawn = []
    for path in sorted(options.results.glob(f"*/{prefill.SUITE}.json")):
        _, rows = harness.load(path, gpu.Row)
        for direction in report.DIRECTIONS:
            if report.swept(rows, direction):
                drawn.append(options.output / f"{prefill.SUITE}-{direction}-{path.parent.name}.svg")
                report.plot_sweeps(drawn[-1], rows, direction)
    for study, kind in PICTURES.items():
        for path in sorted(options.results.glob(f"*/{study.SUITE}.json")):
            drawn.append(options.output / f"{study.SUITE}-{path.parent.name}.svg")
            study.plot(drawn[-1], *harness.load(path, kind))
    if not drawn:
        raise SystemExit(f"{options.results} holds nothing to draw; `python -m benchmarks prefill` keeps some.")
    if options.results == harness.RESULTS:
        for path in PAGES:
            path.write_text(page(path))
    print("\n".join(f"wrote {path}" for path in drawn))
