# SPDX-License-Identifier: Apache-2.0
"""The CUDA kernels on prefill against FA2, cuDNN, flex_attention, eager and FA4: windows, full causal, packed.

sinkattn, flex, eager and fa4 compute with a sink; fa2 and cudnn without, because they have none. Every result is
checked before its time is taken. A target is the time we require on an H200.
"""

import argparse
import os
from functools import partial
from pathlib import Path

import torch

from . import cases, gpu, harness, peers, report

SUITE = "prefill"
SECONDS = 0.25  # a case and direction, at least MIN_ROUNDS
_FORWARD = {"FA2": "fa2", "cuDNN": "cudnn", "flex + sink": "flex", "FA4 + sink": "fa4"}
COLUMNS = {"forward": _FORWARD, "backward": _FORWARD | {"FA4 + sink (deterministic)": "fa4-deterministic"}}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--backward", action="store_true", help="the backward too")
    parser.add_argument("--quick", action="store_true", help="cases with a target, FA2 alone; kept only with --json")
    parser.add_argument("--case", action="append", metavar="NAME", help="this case alone; kept only with --json")
    parser.add_argument("--graph", action="store_true", help="calls captured as graphs: without the host's time")
    gpu.add_output(parser, SUITE)
    gpu.add_readme(parser)


def chosen(names: list[str] | None, quick: bool) -> list[cases.Case]:
    """The cases to measure. Raises ValueError for a name that is none."""
    known = {case.id: case for case in (*cases.PREFILL, cases.HOST)}
    if unknown := [name for name in names or () if name not in known]:
        raise ValueError(f"--case is {', '.join(unknown)}; known are {', '.join(known)}")
    if names:
        return [known[name] for name in names]
    return [*cases.PREFILL_QUICK, cases.HOST, *(cases.PREFILL[len(cases.PREFILL_QUICK) :] if not quick else ())]


def readme(text: str, results: Path = harness.RESULTS) -> str:
    shown = []
    for path in sorted(results.glob(f"*/{SUITE}.json")):
        machine, rows = harness.load(path, gpu.Row)
        where = f"{machine['gpu']}, CUDA {machine['cuda']}"
        shown.append(report.markdown(where, rows, cases.PREFILL_QUICK, COLUMNS, "TFLOP/s", cases.TARGETS))
        shown.append(report.host_table(rows))
        for plot in sorted((harness.ROOT / "docs").glob(f"{SUITE}-{path.parent.name}.svg")):
            shown.append(f"![TFLOP/s against length](docs/{plot.name})")
    return report.placed(text, SUITE, shown)


def is_shown(row: gpu.Row) -> bool:
    return row.case in cases.TARGETS or (row.ms is not None and row.impl in report.LINES)


def run(options: argparse.Namespace) -> None:
    if options.readme:
        report.README.write_text(readme(report.README.read_text()))
        return
    measured = chosen(options.case, options.quick)
    if not torch.cuda.is_available():
        raise SystemExit("python -m benchmarks prefill measures a CUDA device, and torch finds none here.")
    suite = SUITE + "-graph" * options.graph
    if arch := os.environ.get("SINKATTN_CUDA_ARCH"):
        suite += f"-sm{arch}"
    kept = None if options.quick or options.case else harness.results_path(suite, torch.cuda.get_device_name())
    path, commit = options.json or kept, options.commit or harness.commit()
    who = peers.PREFILL_QUICK if options.quick else peers.PREFILL
    directions = ("forward", "backward") if options.backward else ("forward",)
    rows: list[gpu.Row] = []
    with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]  # the default one cannot be captured
        for case, direction in harness.walk([(case, d) for case in measured for d in directions]):
            if case != cases.HOST:
                clock = partial(gpu.take_turns, seconds=SECONDS)
                rows += gpu.measure(suite, case, direction, who, clock, commit, options.graph)
            elif not options.graph:
                both = "forward" if direction == "forward" else "both"
                rows += gpu.measure(suite, case, both, who, gpu.host_times, commit)
            torch.cuda.empty_cache()
            if path:  # after each: a run may be cut short
                harness.save(path, [*filter(is_shown if path == kept else None, rows)], gpu.machine())
    report.show(report.table(rows, "TFLOP/s", cases.TARGETS))
    if path:
        print(f"wrote {path}")
