# SPDX-License-Identifier: Apache-2.0
"""Tables, drawn from rows. A ratio is a peer's time over sinkattn's with its sink: above 1 is faster."""

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from .cases import Case
from .harness import ROOT

README = ROOT / "README.md"
OURS = "sinkattn"
DIRECTIONS = ("forward", "backward")
# Who is in the picture of growing length, and as what.
LINES = {
    "sinkattn": "sinkattn, with sink",
    "fa2": "FA2, no sink",
    "cudnn": "cuDNN, no sink",
    "fa4": "FA4, with sink",
    "eager": "eager, with sink",
}
Row = Any  # harness.Row or gpu.Row
Targets = Mapping[str, Mapping[str, float]]  # ms by case and direction


def none_yet(suite: str) -> str:
    return f"No results yet; `python -m benchmarks {suite}` measures here."


def placed(text: str, suite: str, shown: Sequence[str]) -> str:
    """text with what is shown of a suite between its marks. Raises ValueError when it has no place for it."""
    mark = f"<!-- benchmarks {suite}: begin -->", f"<!-- benchmarks {suite}: end -->"
    before, begin, rest = text.partition(mark[0])
    _, end, after = rest.partition(mark[1])
    if not begin or not end:
        raise ValueError(f"the page has no {mark[0]} ... {mark[1]}")
    return before + begin + "\n" + "\n\n".join(shown or [none_yet(suite)]) + "\n" + end + after


def _by_impl(rows: Iterable[Row], case: str, direction: str) -> dict[str, Row]:
    return {row.impl: row for row in rows if row.case == case and row.direction == direction}


def _milliseconds(ms: float) -> str:
    return f"{ms:.3f}" if ms < 1 else f"{ms:.2f}" if ms < 10 else f"{ms:.1f}" if ms < 100 else f"{ms:.0f}"


def ratio(row: Row | None, ours: Row) -> str:
    if row is None or row.ms is None or ours.ms is None:
        return "-"
    return f"{row.ms / ours.ms:.2f}x" if row.ms < 10 * ours.ms else f"{row.ms / ours.ms:.0f}x"


def table(rows: Sequence[Row], unit: str = "GFLOP/s", targets: Targets | None = None) -> Table:
    impls = list(dict.fromkeys(row.impl for row in rows))
    shown = Table(title=f"ms ({unit} of visible pairs); peers: ms (their time / sinkattn's)")
    shown.caption = "\n".join(dict.fromkeys(f"{row.impl}, {row.direction}: {row.note}" for row in rows if row.note))
    for name in ("case", "direction", *(("target", "extra MiB") if targets else ()), *impls):
        shown.add_column(name, no_wrap=True)
    for case, direction in dict.fromkeys((row.case, row.direction) for row in rows):
        found = _by_impl(rows, case, direction)
        ours = found[OURS]

        def cell(row: Row | None, ours: Row = ours) -> str:
            if row is None:
                return "-"
            if row.ms is None:
                return str(row.note.partition(":")[0])
            beside = ratio(row, ours) if row is not ours else "-" if row.speed is None else f"{row.speed:.0f}"
            return f"{_milliseconds(row.ms)} ({beside})"

        extra = [_target(targets, case, direction), _shown(ours.extra_mib)] if targets else []
        shown.add_row(case, direction, *extra, *(cell(found.get(impl)) for impl in impls))
    return shown


def show(table: Table) -> None:
    Console(width=None if sys.stdout.isatty() else 200).print(table)


def _shown(x: float | None) -> str:
    return "-" if x is None else f"{x:g}"


def _target(targets: Targets, case: str, direction: str) -> str:
    return _shown(targets.get(case, {}).get(direction))


def markdown(
    where: str,
    rows: Sequence[Row],
    cases: Iterable[Case],
    columns: Mapping[str, Mapping[str, str]],
    unit: str,
    targets: Targets | None = None,
) -> str:
    """For the README: one line a case. columns: direction -> heading -> peer; below, why who is not timed."""
    cases, ids = list(cases), {case.id for case in cases}
    absent, dashes = dict[str, dict[str, None]](), dict[str, dict[str, None]]()  # reason -> headings
    timed: dict[str, dict[str, str]] = {}
    for direction, peers in columns.items():
        of = {peer: [r for r in rows if (r.impl, r.direction) == (peer, direction)] for peer in peers.values()}
        timed[direction] = {h: peer for h, peer in peers.items() if any(row.ms is not None for row in of[peer])}
        for heading, peer in peers.items():
            if heading not in timed[direction]:
                why = of[peer][0].note if of[peer] else "not measured"
                absent.setdefault(why, {}).setdefault(heading)
                continue
            for why in (row.note for row in of[peer] if row.ms is None and row.case in ids):
                dashes.setdefault(why, {}).setdefault(heading)
    columns, head = timed, ["case"]
    for direction, peers in columns.items():
        head += [f"{direction}, ms ({unit})", *(["target"] if targets else []), *peers]
    lines = [f"{where}, torch {rows[0].torch}, commit {rows[0].commit}.", ""]
    lines += ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for case in cases:
        cells = [case.id]
        for direction, peers in columns.items():
            found = _by_impl(rows, case.id, direction)
            ours: Any = found.get(OURS)
            known = ours is not None and ours.ms is not None
            cells.append(f"{_milliseconds(ours.ms)} ({ours.speed:.0f})" if known else "-")
            cells += [_target(targets, case.id, direction)] if targets else []
            cells += [ratio(found.get(peer), ours) if known else "-" for peer in peers.values()]
        lines.append("| " + " | ".join(cells) + " |")
    if dashes:
        lines += ["", "Dashes " + "; ".join(f"under {', '.join(who)} mean {why}" for why, who in dashes.items()) + "."]
    if absent:
        lines += ["", "Not in the table: " + "; ".join(f"{', '.join(who)}: {why}" for why, who in absent.items()) + "."]
    return "\n".join(lines)


def host_table(rows: Sequence[Row]) -> str:
    """What a call costs the host, from the rows of the case `host`: a line for each kind of call."""
    calls = {"forward without gradients": "forward", "forward and backward": "both"}
    times = {words: _by_impl(rows, "host", direction) for words, direction in calls.items()}
    timed = (impl for found in times.values() for impl, row in found.items() if impl in LINES and row.ms)
    peers = list(dict.fromkeys(timed))
    if not peers:
        return "Host time of a call: not measured."
    lines = ["| call | " + " | ".join(LINES[impl] for impl in peers) + " |", "|---" * (1 + len(peers)) + "|"]
    for words, found in times.items():
        ms = [found[impl].ms if impl in found else None for impl in peers]
        lines.append(f"| {words} | " + " | ".join("-" if x is None else f"{1e3 * x:.0f}" for x in ms) + " |")
    return "\n".join(["Host time of a call of 16 tokens, us:", "", *lines])
