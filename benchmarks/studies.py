# SPDX-License-Identifier: Apache-2.0
"""What studies share: the device that is here, its clock, what is kept and what is shown."""

import argparse
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markdown import Markdown

from . import gpu, harness
from .harness import Call, Name


def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def one_stream() -> AbstractContextManager[object]:
    """Where a study runs: calls on the default stream cannot be captured."""
    return torch.cuda.stream(torch.cuda.Stream()) if device() == "cuda" else nullcontext()  # type: ignore[no-untyped-call]


def take_turns(calls: dict[Name, Call], seconds: float) -> dict[Name, float]:
    if device() == "cuda":
        return gpu.take_turns(calls, seconds)
    return harness.take_turns(calls, seconds)


def machine() -> dict[str, object]:
    return gpu.machine() if device() == "cuda" else harness.machine()


def where(machine: dict[str, object], rows: Sequence[Any]) -> str:
    gpu, cpu = "{gpu}, CUDA {cuda}", "{cpu}, {threads} threads"
    place = (gpu if "gpu" in machine else cpu).format_map(machine)
    return f"{place}, torch {rows[0].torch}, commit {rows[0].commit}."


def table(heads: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (heads, ["---"] * len(heads), *lines))


def milliseconds(ms: float | None) -> str:
    if ms is None:
        return "-"
    return f"{ms:.4f}" if ms < 0.1 else f"{ms:.3f}" if ms < 1 else f"{ms:.2f}" if ms < 10 else f"{ms:.4g}"


def add_output(parser: argparse.ArgumentParser, suite: str) -> None:
    gpu.add_output(parser, suite)
    parser.add_argument("--quick", action="store_true", help="a few small sizes; kept only with --json")


def place(suite: str, options: argparse.Namespace) -> Path | None:
    facts = machine()
    name = str(facts["gpu"]) if "gpu" in facts else f"{facts['cpu']} {facts['threads']} threads"
    kept: Path | None = options.json or (None if options.quick else harness.results_path(suite, name))
    return kept


def show(shown: Sequence[str]) -> None:
    Console(width=None if sys.stdout.isatty() else 200).print(Markdown("\n\n".join(shown)))


def keep(path: Path | None, rows: Sequence[Any]) -> None:
    if path:
        harness.save(path, rows, machine())
        print(f"wrote {path}; python -m benchmarks plot draws what benchmarks/results keeps")
