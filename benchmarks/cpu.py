# SPDX-License-Identifier: Apache-2.0
"""The CPU backend against SDPA, flex_attention and eager: full causal and a window of 128, fp32 and bf16.

SDPA computes a window as a boolean mask over all pairs, its only way. SDPA, flex and "sinkattn-no-sink" have no sink.
flex's compilation is not timed.
"""

import argparse
from pathlib import Path

import torch

from . import cases, gpu, harness, peers, report

SUITE = "cpu"
COLUMNS = {
    "forward": {"SDPA": "sdpa", "flex": "flex", "eager + sink": "eager"},
    "backward": {"SDPA": "sdpa", "eager + sink": "eager"},
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="default: %(default)s")
    parser.add_argument("--quick", action="store_true", help="the shortest cases, in seconds; kept only with --json")
    gpu.add_output(parser, SUITE)
    gpu.add_readme(parser)


def readme(text: str, results: Path = harness.RESULTS) -> str:
    tables = []
    for path in sorted(results.glob(f"*/{SUITE}.json")):
        machine, rows = harness.load(path, harness.Row)
        where = f"{machine['cpu']}, {machine['threads']} threads"
        tables.append(report.markdown(where, rows, cases.CPU, COLUMNS, "GFLOP/s"))
    return report.placed(text, SUITE, tables)


def run(options: argparse.Namespace) -> None:
    if options.readme:
        report.README.write_text(readme(report.README.read_text()))
        return
    torch.set_num_threads(options.threads)
    measured = cases.CPU_QUICK if options.quick else cases.CPU
    seconds, commit = 1.0 if options.quick else 6.0, options.commit or harness.commit()
    rows: list[harness.Row] = []
    for case, direction in harness.walk([(case, d) for case in measured for d in report.DIRECTIONS]):
        rows += harness.measure(SUITE, case, direction, peers.CPU, seconds, commit)
    report.show(report.table(rows))
    machine = harness.machine()
    kept = harness.results_path(SUITE, f"{machine['cpu']} {machine['threads']} threads")
    path = options.json or (None if options.quick else kept)
    if path:
        harness.save(path, rows, machine)
        print(f"wrote {path}")
