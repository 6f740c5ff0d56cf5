# SPDX-License-Identifier: Apache-2.0
"""TFLOP/s and time against length, and the decode studies, as SVG under docs/, from what is kept; needs no GPU."""

from __future__ import annotations

import argparse
from pathlib import Path

from . import decode_crossover, distributed, gpu, harness, prefill, report, trace


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--results", type=Path, default=harness.RESULTS, help="default: benchmarks/results")
    parser.add_argument("--output", type=Path, default=harness.ROOT / "docs", help="default: docs")


def run(options: argparse.Namespace) -> None:
    drawn = []
    for path in sorted(options.results.glob(f"*/{prefill.SUITE}.json")):
        _, rows = harness.load(path, gpu.Row)
        for direction in report.DIRECTIONS:
            if report.swept(rows, direction):
                drawn.append(options.output / f"{prefill.SUITE}-{direction}-{path.parent.name}.svg")
                report.plot_sweeps(drawn[-1], rows, direction)
    for path in sorted(options.results.glob(f"*/{decode_crossover.SUITE}.json")):
        machine, crossover_rows = harness.load(path, decode_crossover.CrossoverRow)
        drawn.append(options.output / f"{decode_crossover.SUITE}-{path.parent.name}.svg")
        decode_crossover.plot(drawn[-1], crossover_rows, int(str(machine["sms"])))
    for path in sorted(options.results.glob(f"*/{trace.SUITE}.json")):
        _, trace_rows = harness.load(path, trace.TraceRow)
        drawn.append(options.output / f"{trace.SUITE}-{path.parent.name}.svg")
        trace.plot(drawn[-1], trace_rows)
    for path in sorted(options.results.glob(f"*/{distributed.SUITE}.json")):
        machine, distributed_rows = harness.load(path, distributed.DistributedRow)
        drawn.append(options.output / f"{distributed.SUITE}-{path.parent.name}.svg")
        distributed.plot(drawn[-1], distributed_rows, machine)
    if not drawn:
        raise SystemExit(
            f"{options.results} holds no times of growing length; `python -m benchmarks prefill` keeps some."
        )
    print("\n".join(f"wrote {path}" for path in drawn))
