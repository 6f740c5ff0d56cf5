# SPDX-License-Identifier: Apache-2.0
"""The judge of the CUDA kernels: forward and backward over many shapes, against FA4 in both of its modes, worst first.

Calls are captured as graphs and start with a cold L2. All have a learned sink, and results are checked before they are
timed, as in the study prefill. FA4 has no positional sink tokens; such shapes stand beside our time for their window.
"""

import argparse
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from statistics import geometric_mean

import torch

from . import cases, gpu, harness, peers, report, studies

SUITE = "shapes"
SECONDS, ROUNDS = 0.2, 3  # a shape and direction: as many rounds as take so long, at least ROUNDS
SHOWN = 16  # shapes of a table; the kept rows have all of them
# What a direction is compared with, by impl.
COLUMNS = {
    "forward": {"fa4": "FA4 / ours"},
    "backward": {"fa4": "FA4 / ours", "fa4-deterministic": "FA4 (deterministic) / ours"},
}
IMPLS = {"fa4": "FA4", "fa4-deterministic": "FA4 (deterministic)"}
_BY_SIZES = {replace(case, name=""): case.id for case in cases.SHAPES}
# Each shape with positional sink tokens, and the shape that is its window alone.
BESIDE = {
    case.id: _BY_SIZES[replace(case, name="", num_sink_tokens=0)] for case in cases.SHAPES if case.num_sink_tokens
}
Found = dict[tuple[str, str], dict[str, gpu.Row]]


def by_shape(rows: Iterable[gpu.Row]) -> Found:
    found: Found = {}
    for row in rows:
        found.setdefault((row.case, row.direction), {})[row.impl] = row
    return found


def ratio(row: gpu.Row | None, ours: gpu.Row | None) -> float | None:
    """A peer's time over ours: above 1, sinkattn is faster."""
    if row is None or ours is None or row.ms is None or ours.ms is None:
        return None
    return row.ms / ours.ms


def ratios(found: dict[str, gpu.Row], direction: str) -> list[float | None]:
    return [ratio(found.get(impl), found.get(report.OURS)) for impl in COLUMNS[direction]]


def worst_first(found: Found, direction: str) -> list[str]:
    """Shapes without positional sink tokens by their worst ratio; those without one after them, by TFLOP/s."""

    def order(shape: str) -> tuple[bool, float]:
        known = [x for x in ratios(found[shape, direction], direction) if x is not None]
        ours = found[shape, direction].get(report.OURS)
        return not known, min(known) if known else (ours.tflops or 0.0) if ours else 0.0

    return sorted((shape for shape, d in found if d == direction and shape not in BESIDE), key=order)


def _ours(row: gpu.Row | None) -> str:
    if row is None or row.ms is None:
        return row.note.partition(":")[0] if row else "-"
    return f"{studies.milliseconds(row.ms)} ({row.tflops:.3g})"


def _times(x: float | None) -> str:
    return "-" if x is None else f"{x:.2f}x" if x < 10 else f"{x:.0f}x"


def means(found: Found, direction: str) -> list[str]:
    """Of each column the geometric mean, the worst shape, and how many are below 1."""
    said = []
    for impl, heading in COLUMNS[direction].items():
        of: dict[str, float] = {}
        for shape in worst_first(found, direction):
            rows = found[shape, direction]
            if (x := ratio(rows.get(impl), rows.get(report.OURS))) is not None:
                of[shape] = x
        if not of:
            said.append(f"* {direction}, {heading}: not measured.")
            continue
        worst = min(of, key=of.__getitem__)
        below = sum(x < 1 for x in of.values())
        mean = _times(geometric_mean(of.values()))
        text = f"geometric mean {mean} of {len(of)} shapes, {below} below 1; worst {_times(of[worst])}, {worst}"
        said.append(f"* {direction}, {heading}: {text}.")
    return said


def notes(found: Found) -> list[str]:
    """Why peers are missing, once each: a reason, and the shapes it is of."""
    of: dict[str, dict[str, None]] = {}
    shapes = {shape for shape, _ in found if shape not in BESIDE}
    for (shape, direction), rows in found.items():
        for impl in COLUMNS[direction] if shape in shapes else ():
            if impl in rows and rows[impl].ms is None:
                of.setdefault(f"{IMPLS[impl]}, {direction}: {rows[impl].note}", {}).setdefault(shape)
    return [f"* {why}: {'everywhere' if set(who) == shapes else ', '.join(who)}." for why, who in of.items()]


def _with_sinks(found: Found) -> list[str]:
    """The table of shapes with positional sink tokens, beside the time of their window alone; the costliest first."""

    def cost(shape: str, direction: str) -> float | None:
        ours = (found.get((name, direction), {}).get(report.OURS) for name in (shape, BESIDE[shape]))
        return ratio(*ours)

    directions = [d for d in COLUMNS if any((shape, d) in found for shape in BESIDE)]
    shapes = [shape for shape in BESIDE if any((shape, d) in found for d in directions)]
    if not shapes:
        return []
    heads, lines = ["positional sink tokens"], []
    for direction in directions:
        heads += [f"{direction}, ms (TFLOP/s)", "/ its window alone"]
    for shape in sorted(shapes, key=lambda shape: -max(cost(shape, d) or 0.0 for d in directions)):
        lines.append([shape])
        for direction in directions:
            ours = found.get((shape, direction), {}).get(report.OURS)
            lines[-1] += [_ours(ours), _times(cost(shape, direction))]
    return [studies.table(heads, lines)]


def markdown(machine: dict[str, object], rows: Sequence[gpu.Row]) -> list[str]:
    found = by_shape(rows)
    shown = [studies.where(machine, rows)]
    directions = [direction for direction in COLUMNS if worst_first(found, direction)]
    for direction in directions:
        heads = [f"{direction}, worst first", "ms (TFLOP/s)", *COLUMNS[direction].values()]
        lines = []
        for shape in worst_first(found, direction)[:SHOWN]:
            of = found[shape, direction]
            lines.append([shape, _ours(of.get(report.OURS)), *map(_times, ratios(of, direction))])
        shown.append(studies.table(heads, lines))
    shown += _with_sinks(found)
    if missing := notes(found):
        shown.append("\n".join(missing))
    if directions:
        shown.append("\n".join(x for direction in directions for x in means(found, direction)))
    return shown


def line(case: cases.Case, direction: str, rows: Sequence[gpu.Row]) -> str:
    found = {row.impl: row for row in rows}
    said = [f"{case.id} {direction}: {_ours(found.get(report.OURS))}"]
    for impl, heading in COLUMNS[direction].items():
        x, row = ratio(found.get(impl), found.get(report.OURS)), found.get(impl)
        said.append(f"{heading} {_times(x) if x is not None or row is None else row.note}")
    return ", ".join(said)


def chosen(names: Sequence[str] | None) -> list[cases.Case]:
    """The shapes to measure, in the table's order; with sink tokens also the window alone.

    Raises ValueError for a name that is none.
    """
    known = {case.id: case for case in cases.SHAPES}
    if unknown := [name for name in names or () if name not in known]:
        raise ValueError(f"--case is {', '.join(unknown)}; known are {', '.join(known)}")
    wanted = {*(names or known), *(BESIDE[name] for name in names or () if name in BESIDE)}
    return [case for case in cases.SHAPES if case.id in wanted]


def measure(case: cases.Case, direction: str, commit: str) -> list[gpu.Row]:
    clock = partial(gpu.take_turns, seconds=SECONDS, least=ROUNDS)
    who = [peer for peer in peers.SHAPES if direction == "backward" or peer != peers.FA4_DETERMINISTIC]
    rows = gpu.measure(SUITE, case, direction, who, clock, commit, graph=True)
    torch.cuda.empty_cache()
    return rows


def add_arguments(parser: argparse.ArgumentParser) -> None:
    what = "this shape, with sink tokens also its window alone; kept only with --output"
    parser.add_argument("--case", action="append", metavar="NAME", help=what)
    only = parser.add_mutually_exclusive_group()
    for direction in COLUMNS:
        only.add_argument(f"--{direction}", action="store_true", help=f"the {direction} alone; kept only with --output")
    gpu.add_output(parser, SUITE)


def run(options: argparse.Namespace) -> None:
    measured = chosen(options.case)
    gpu.require(SUITE)
    directions = [d for d in COLUMNS if getattr(options, d)] or list(COLUMNS)
    whole = not options.case and len(directions) == len(COLUMNS)
    path = options.json or (harness.results_path(SUITE, torch.cuda.get_device_name()) if whole else None)
    commit, rows, begin = options.commit or harness.commit(), list[gpu.Row](), time.perf_counter()
    with studies.one_stream():
        for case in measured:
            for direction in directions:
                rows += (found := measure(case, direction, commit))
                print(f"{time.perf_counter() - begin:.1f} s: {line(case, direction, found)}", flush=True)
                if path:  # after each: a run may be cut short
                    harness.save(path, rows, studies.machine())
    studies.show(markdown(studies.machine(), rows))
    studies.keep(path, rows)
