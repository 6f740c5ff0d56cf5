# SPDX-License-Identifier: Apache-2.0
"""TFLOP/s and time against length, as SVG under docs/, from the kept results of the GPU; needs no GPU."""

from __future__ import annotations

import argparse
from pathlib import Path

from . import gpu, harness, prefill, report


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
    if not drawn:
        raise SystemExit(
            f"{options.results} holds no times of growing length; `python -m benchmarks prefill` keeps some."
        )
    print("\n".join(f"wrote {path}" for path in drawn))
