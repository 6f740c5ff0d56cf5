# SPDX-License-Identifier: Apache-2.0
"""What the studies of docs/studies.md share: the device that is here, its clock, what is kept and what is shown."""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markdown import Markdown

from . import gpu, harness, svg
from .cases import Case
from .harness import Call, Name
from .peers import Peer

GRAPHED = 4096  # tokens up to which a GPU's calls are captured: there the host would be the slower one


def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def gpt_oss(length: int, window: int) -> Case:
    """A layer of gpt-oss; on a CPU an eighth of its heads."""
    num_q_heads, num_kv_heads = (64, 8) if device() == "cuda" else (8, 2)
    return Case(length, 64, "bf16", window, num_q_heads=num_q_heads, num_kv_heads=num_kv_heads, device=device())


def one_stream() -> AbstractContextManager[object]:
    """Where a study runs: calls on the default stream cannot be captured."""
    return torch.cuda.stream(torch.cuda.Stream()) if device() == "cuda" else nullcontext()  # type: ignore[no-untyped-call]


def take_turns(calls: dict[Name, Call], seconds: float, least: int = gpu.MIN_ROUNDS) -> dict[Name, float]:
    """Median time of each in ms."""
    if device() == "cuda":
        return gpu.take_turns(calls, seconds, least)
    return harness.take_turns(calls, seconds)


def measure(
    suite: str, case: Case, direction: str, peers: Sequence[Peer], seconds: float, commit: str
) -> list[gpu.Row]:
    """A row for each peer, checked. Raises RuntimeError when we are wrong."""
    graph = case.device == "cuda" and case.length <= GRAPHED
    rows = gpu.measure(suite, case, direction, peers, partial(take_turns, seconds=seconds, least=3), commit, graph)
    if case.device == "cuda":
        torch.cuda.empty_cache()
    return rows


def free_bytes() -> int:
    if device() == "cuda":
        torch.cuda.empty_cache()  # what the peer before has left counts as free
        return torch.cuda.mem_get_info()[0]
    available = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemAvailable"))
    return int(available.split()[1]) << 10


def machine() -> dict[str, object]:
    return gpu.machine() if device() == "cuda" else harness.machine()


def where(machine: dict[str, object], rows: Sequence[Any]) -> str:
    """What was measured on, and of what."""
    place = (
        f"{machine['gpu']}, CUDA {machine['cuda']}"
        if "gpu" in machine
        else f"{machine['cpu']}, {machine['threads']} threads"
    )
    return f"{place}, torch {rows[0].torch}, commit {rows[0].commit}."


def table(heads: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """As markdown."""
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (heads, ["---"] * len(heads), *lines))


def milliseconds(ms: float | None) -> str:
    if ms is None:
        return "-"
    return f"{ms:.4f}" if ms < 0.1 else f"{ms:.3f}" if ms < 1 else f"{ms:.2f}" if ms < 10 else f"{ms:.4g}"


def add_output(parser: argparse.ArgumentParser, suite: str) -> None:
    gpu.add_output(parser, suite)
    parser.add_argument("--quick", action="store_true", help="a few small sizes; kept only with --json")


def place(suite: str, options: argparse.Namespace) -> Path | None:
    """Where rows go."""
    facts = machine()
    name = str(facts["gpu"]) if "gpu" in facts else f"{facts['cpu']} {facts['threads']} threads"
    kept: Path | None = options.json or (None if options.quick else harness.results_path(suite, name))
    return kept


def show(shown: Sequence[str]) -> None:
    """Markdown on the terminal; a log has room for every column."""
    Console(width=None if sys.stdout.isatty() else 200).print(Markdown("\n\n".join(shown)))


def keep(path: Path | None, rows: Sequence[Any]) -> None:
    """The rows as JSON, where there is a place for them."""
    if path:
        harness.save(path, rows, machine())
        print(f"wrote {path}; python -m benchmarks plot draws what benchmarks/results keeps")


@contextmanager
def picture(path: Path, rows: int, columns: int, size: tuple[float, float]) -> Iterator[tuple[Any, Any]]:
    """A figure and its panels [rows, columns], written in the end as SVG: the same bytes for the same rows."""
    from matplotlib import pyplot
    from matplotlib.ticker import NullLocator

    with pyplot.rc_context({"svg.hashsalt": path.stem, "svg.fonttype": "none", "font.sans-serif": ["DejaVu Sans"]}):
        figure, axes = pyplot.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained")
        yield figure, axes
        for panel in axes.flat:
            for axis, (least, most) in ((panel.xaxis, panel.get_xlim()), (panel.yaxis, panel.get_ylim())):
                if axis.get_scale() == "log" and most > 1000 * least:  # decades are enough
                    axis.set_minor_locator(NullLocator())
        written = io.StringIO()
        figure.savefig(written, format="svg", metadata={"Date": None})
        path.write_text(svg.compact(written.getvalue()))
        pyplot.close(figure)
