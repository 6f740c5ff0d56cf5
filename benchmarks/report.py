# SPDX-License-Identifier: Apache-2.0
"""Tables and plots, drawn from rows. A ratio is a peer's time over sinkattn's with its sink: above 1 is faster."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.table import Table

from .cases import Case
from .harness import Row

OURS = "sinkattn"
DIRECTIONS = ("forward", "backward")


def _by_impl(rows: Iterable[Row], case: str, direction: str) -> dict[str, Row]:
    return {row.impl: row for row in rows if row.case == case and row.direction == direction}


def _milliseconds(ms: float) -> str:
    return f"{ms:.3f}" if ms < 1 else f"{ms:.2f}" if ms < 10 else f"{ms:.1f}" if ms < 100 else f"{ms:.0f}"


def ratio(row: Row | None, ours: Row) -> str:
    if row is None or row.ms is None or ours.ms is None:
        return "-"
    return f"{row.ms / ours.ms:.2f}x" if row.ms < 10 * ours.ms else f"{row.ms / ours.ms:.0f}x"


def table(rows: Sequence[Row]) -> Table:
    """For the terminal: every row, with the times of all peers."""
    impls = list(dict.fromkeys(row.impl for row in rows))
    shown = Table(title="ms (GFLOP/s of visible pairs); peers: ms (their time / sinkattn's)")
    shown.caption = "\n".join(dict.fromkeys(f"{row.impl}, {row.direction}: {row.note}" for row in rows if row.note))
    for name in ("case", "direction", *impls):
        shown.add_column(name, no_wrap=True)
    for case, direction in dict.fromkeys((row.case, row.direction) for row in rows):
        found = _by_impl(rows, case, direction)

        def cell(row: Row, ours: Row) -> str:
            if row.ms is None:
                return row.note.partition(":")[0]
            return f"{_milliseconds(row.ms)} ({f'{row.gflops:.0f}' if row is ours else ratio(row, ours)})"

        shown.add_row(case, direction, *(cell(found[impl], found[OURS]) for impl in impls))
    return shown


def markdown(machine: dict[str, object], rows: Sequence[Row], cases: Iterable[Case]) -> str:
    """For the README: one line a case."""
    head = [
        "case",
        "forward, ms (GFLOP/s)",
        "SDPA",
        "flex",
        "eager + sink",
        "backward, ms (GFLOP/s)",
        "SDPA",
        "eager + sink",
    ]
    lines = [
        f"{machine['cpu']}, {machine['threads']} threads, torch {rows[0].torch}, commit {rows[0].commit}.",
        "",
        "| " + " | ".join(head) + " |",
        "|---" * len(head) + "|",
    ]
    for case in cases:
        cells = [case.id]
        for direction, peers in zip(DIRECTIONS, (("sdpa", "flex", "eager"), ("sdpa", "eager")), strict=True):
            found = _by_impl(rows, case.id, direction)
            ours = found[OURS]
            cells.append("-" if ours.ms is None else f"{_milliseconds(ours.ms)} ({ours.gflops:.0f})")
            cells += [ratio(found.get(peer), ours) for peer in peers]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def plot(path: Path, rows: Sequence[Row], cases: Sequence[Case]) -> None:
    """Time against length, one panel for each dtype, mask and direction, at the head_dim with the most lengths."""
    from matplotlib import pyplot

    head_dims = [case.head_dim for case in cases]
    head_dim = max(set(head_dims), key=head_dims.count)
    kept = [case for case in cases if case.head_dim == head_dim]
    dtypes, windows = list(dict.fromkeys(c.dtype for c in kept)), list(dict.fromkeys(c.window for c in kept))
    columns = [(window, direction) for window in windows for direction in DIRECTIONS]
    size = (4.0 * len(columns), 3.4 * len(dtypes))
    figure, axes = pyplot.subplots(len(dtypes), len(columns), figsize=size, squeeze=False, layout="constrained")
    impls = list(dict.fromkeys(row.impl for row in rows))
    for i, dtype in enumerate(dtypes):
        for j, (window, direction) in enumerate(columns):
            panel = axes[i][j]
            lengths = sorted(case.length for case in kept if (case.dtype, case.window) == (dtype, window))
            for impl in impls:
                found = [_by_impl(rows, Case(n, head_dim, dtype, window).id, direction).get(impl) for n in lengths]
                points = [
                    (n, row.ms) for n, row in zip(lengths, found, strict=True) if row is not None and row.ms is not None
                ]
                panel.plot(*zip(*points, strict=True) if points else ([], []), marker="o", label=impl)
            mask = f"window {window}" if window else "full causal"
            panel.set(title=f"{dtype}, {mask}, {direction}", xscale="log", yscale="log", xlabel="length", ylabel="ms")
            panel.set_xticks(lengths, [str(n) for n in lengths], minor=False)
            panel.minorticks_off()
            panel.grid(alpha=0.3)
    axes[0][0].legend()
    figure.suptitle(f"8 query heads, 2 kv heads, head_dim {head_dim}: less is faster")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
