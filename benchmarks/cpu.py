# SPDX-License-Identifier: Apache-2.0
"""The CPU backend against SDPA, flex_attention and eager: full causal and a window of 128, fp32 and bf16.

SDPA computes a window as a boolean mask over all pairs, the only way it has. SDPA and flex have no sink; "sinkattn"
computes with one, "sinkattn-no-sink" what they compute. flex is compiled, and compiling is not timed.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from rich.console import Console

from . import cases, harness, peers, report

SUITE = "cpu"
README = harness.ROOT / "README.md"
BEGIN, END = f"<!-- benchmarks {SUITE}: begin -->", f"<!-- benchmarks {SUITE}: end -->"
NONE_YET = f"No results yet; `python -m benchmarks {SUITE}` measures here."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="default: %(default)s")
    parser.add_argument("--quick", action="store_true", help="the shortest cases, in seconds; kept only with --json")
    parser.add_argument("--json", type=Path, help="where rows go; default: benchmarks/results/<device>/cpu.json")
    parser.add_argument(
        "--readme", action="store_true", help="measure nothing: draw README's table from the kept results"
    )


def readme(text: str, results: Path = harness.RESULTS) -> str:
    """README's text with the table that the kept results give. Raises ValueError when it has no place for it."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"README has no {BEGIN} ... {END}")
    shown = [case for case in cases.CPU if case.length >= 2048]
    tables = [report.markdown(*harness.load(path), shown) for path in sorted(results.glob(f"*/{SUITE}.json"))]
    return before + begin + "\n" + "\n\n".join(tables or [NONE_YET]) + "\n" + end + after


def run(options: argparse.Namespace) -> None:
    if options.readme:
        README.write_text(readme(README.read_text()))
        return
    torch.set_num_threads(options.threads)
    measured = cases.CPU_QUICK if options.quick else cases.CPU
    rows = harness.run(SUITE, measured, peers.CPU, seconds=1.0 if options.quick else 6.0)
    Console().print(report.table(rows))
    path = options.json or (None if options.quick else harness.results_path(SUITE))
    if path:
        harness.save(path, rows)
        report.plot(path.with_suffix(".png"), rows, measured)
        print(f"wrote {path} and {path.with_suffix('.png').name}")
