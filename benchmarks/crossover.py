# SPDX-License-Identifier: Apache-2.0
"""From which length on one way of attending is faster than another, found by bisection.

naive is a kernel that keeps all scores of a block of rows in shared memory (naive.cu); on a CPU PyTorch's own formula
stands for it. wN is sinkattn with a causal window of N, full with all keys before; fa2 is FlashAttention 2 as it is in
torch, without a sink; on a CPU scaled_dot_product_attention stands for it. Every result is checked before it is timed.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch

from . import gpu, harness, peers, studies
from .cases import Case
from .harness import Call
from .naive import NAIVE, NAIVE_BLOCKS
from .peers import Peer

SUITE = "crossover"
GRAIN = 16  # tokens; and a sixteenth of the length: bisection goes no further
SECONDS = 0.05
LEAST = 3  # rounds


@dataclass(frozen=True)
class Field:
    """Who is measured at the same lengths: name -> (window, peer); and which pairs are compared."""

    name: str
    title: str
    lengths: Mapping[str, tuple[int, ...]]  # by direction
    sizes: Mapping[str, int]  # of Case
    batch: int
    entries: Mapping[str, tuple[int, Peer]]
    contests: tuple[tuple[str, str], ...]  # (which overtakes, whom)


def fields(device: str, quick: bool = False) -> tuple[Field, ...]:
    on_gpu = device == "cuda"
    eager = next(peer for peer in peers.CPU if peer.name == "eager")
    simple = {"naive": NAIVE, "naive-blocks": NAIVE_BLOCKS} if on_gpu else {"PyTorch": eager}
    full = ("fa2", peers.PREFILL_QUICK[-1]) if on_gpu else ("SDPA", next(p for p in peers.CPU if p.name == "sdpa"))
    narrow = {"num_q_heads": 32, "num_kv_heads": 8, "head_dim": 128} if on_gpu else {"head_dim": 64}
    wide = {"num_q_heads": 64, "num_kv_heads": 8, "head_dim": 64} if on_gpu else {"head_dim": 64}
    short, longest = (64, 1024) if quick else (1024, 131072 if on_gpu else 8192)
    return (
        Field(
            "short", "2 sequences", {"forward": _doubled(16, short)}, narrow, 2,
            {"flash": (0, peers.OURS), **{name: (0, peer) for name, peer in simple.items()}},
            tuple(("flash", name) for name in simple),
        ),
        Field(
            "long", "1 sequence", {"forward": _doubled(512, longest), "both": _doubled(512, longest // 2)}, wide, 1,
            {"w128": (128, peers.OURS), "w1024": (1024, peers.OURS), "full": (0, peers.OURS), full[0]: (0, full[1])},
            (("w128", "full"), ("w1024", "full"), ("full", full[0])),
        ),
    )  # fmt: skip


def _doubled(least: int, most: int) -> tuple[int, ...]:
    return tuple(least << i for i in range((most // least).bit_length()))


@dataclass(frozen=True)
class CrossoverRow:
    """One measurement; ms is None where the peer is absent, and note says why."""

    suite: str
    field: str
    direction: str
    length: int
    impl: str
    ms: float | None
    note: str
    commit: str
    torch: str


def measure(field: Field, direction: str, length: int, commit: str) -> list[CrossoverRow]:
    """Raises RuntimeError when a result of ours is wrong."""
    lengths = (length,) * field.batch if field.batch > 1 and studies.device() == "cuda" else ()
    batch = 1 if lengths else field.batch
    total = length * len(lengths) if lengths else length
    whole = Case(total, dtype="bf16", packed=lengths, batch=batch, device=studies.device(), **field.sizes)  # type: ignore[arg-type]
    calls: dict[str, Call] = {}
    notes: dict[str, str] = {}
    for window in dict.fromkeys(window for window, _ in field.entries.values()):
        case = replace(whole, window=window, name=f"{field.name}-{length}-{window}")
        who = {peer: name for name, (its, peer) in field.entries.items() if its == window}
        ready, why = harness.ready(case, direction, list(who))
        calls |= {who[peer]: call for peer, call in ready.items()}
        notes |= {who[peer]: note for peer, note in why.items()}
    if studies.device() == "cuda" and total <= studies.GRAPHED:
        gpu.capture(calls, notes)
    times = studies.take_turns(calls, SECONDS, LEAST)
    if studies.device() == "cuda":
        torch.cuda.empty_cache()
    shown = {name: harness.digits(ms) for name, ms in times.items()}
    where = (SUITE, field.name, direction, length)
    return [
        CrossoverRow(*where, name, shown.get(name), notes.get(name, ""), commit, torch.__version__)
        for name in field.entries
    ]


Crossing = tuple[int, int] | bool


def crossing(faster: Callable[[int], bool], lengths: Sequence[int]) -> Crossing:
    """(slower at, faster at, and at all lengths after), as near as GRAIN allows; True where always faster, or False."""
    known = [faster(length) for length in lengths]
    if all(known):
        return True
    if not known[-1]:
        return False
    last = max(i for i, won in enumerate(known) if not won)
    low, high = lengths[last], lengths[last + 1]
    while high - low > max(GRAIN, low // 16):
        middle = (low + high) // 2 // GRAIN * GRAIN
        low, high = (low, middle) if faster(middle) else (middle, high)
    return low, high


def _times(rows: Sequence[CrossoverRow], field: str, direction: str) -> dict[str, dict[int, float]]:
    found: dict[str, dict[int, float]] = {}
    for row in rows:
        if (row.field, row.direction) == (field, direction) and row.ms is not None:
            found.setdefault(row.impl, {})[row.length] = row.ms
    return found


def found(rows: Sequence[CrossoverRow], field: Field, direction: str, contest: tuple[str, str]) -> Crossing | None:
    """What the rows say of a contest, without measuring; None where the two were not measured."""
    times = _times(rows, field.name, direction)
    first, second = (times.get(name, {}) for name in contest)
    both = sorted(first.keys() & second.keys())
    if not both:
        return None
    known = {length: first[length] <= second[length] for length in both}
    if all(known.values()):
        return True
    if not known[both[-1]]:
        return False
    low = max(length for length, won in known.items() if not won)
    return low, min(length for length in both if length > low)


def sentence(contest: tuple[str, str], crossed: Crossing | None, lengths: Sequence[int]) -> str:
    ours, theirs = contest
    if crossed is None:
        return f"{ours} against {theirs}: not measured."
    if crossed is True:
        return f"{ours} against {theirs}: none; {ours} is faster at every length from {min(lengths)} to {max(lengths)}."
    if crossed is False:
        return f"{ours} against {theirs}: none; at {max(lengths)} tokens {ours} is slower."
    return (
        f"{ours} against {theirs}: crossing between {crossed[0]} and {crossed[1]} tokens; {ours} is faster from there."
    )


def _said(rows: Sequence[CrossoverRow], every: Sequence[Field]) -> list[str]:
    said = []
    for field in every:
        for direction in field.lengths:
            lengths = [row.length for row in rows if (row.field, row.direction) == (field.name, direction)]
            words = "forward + backward" if direction == "both" else direction
            for contest in field.contests if lengths else ():
                said.append(f"{words}, {sentence(contest, found(rows, field, direction, contest), lengths)}")
    return said


def _fields_of(machine: dict[str, object]) -> tuple[Field, ...]:
    return fields("cuda" if "gpu" in machine else "cpu")


def markdown(machine: dict[str, object], rows: Sequence[CrossoverRow]) -> list[str]:
    shown = [studies.where(machine, rows)]
    for field in _fields_of(machine):
        for direction in field.lengths:
            times, names = _times(rows, field.name, direction), list(field.entries)
            lengths = [n for n in sorted({n for of in times.values() for n in of}) if n & (n - 1) == 0]
            lines = [[str(n), *(studies.milliseconds(times.get(name, {}).get(n)) for name in names)] for n in lengths]
            words = "forward + backward" if direction == "both" else direction
            shown.append(studies.table([f"{words}, ms: {field.title} of", *names], lines))
    absent: dict[tuple[str, str], list[int]] = {}
    for row in rows:
        if row.note:
            absent.setdefault((row.impl, row.note), []).append(row.length)
    notes = [f"{impl}, {min(n)} to {max(n)} tokens: {note}." for (impl, note), n in absent.items()]
    return [*shown, "\n".join(f"* {line}" for line in (*_said(rows, _fields_of(machine)), *notes))]


def plot(path: Path, machine: dict[str, object], rows: Sequence[CrossoverRow]) -> None:
    """Time against length; a line where one overtakes."""
    every = _fields_of(machine)
    panels = [(field, direction) for field in every for direction in field.lengths]
    with studies.picture(path, 1, len(panels), (5.2 * len(panels), 4.4)) as (figure, axes):
        for panel, (field, direction) in zip(axes[0], panels, strict=True):
            times = _times(rows, field.name, direction)
            for name in field.entries:
                points = sorted(times.get(name, {}).items())
                if points:
                    panel.plot([n for n, _ in points], [ms for _, ms in points], marker=".", label=name)
            for contest, style in zip(field.contests, ("--", ":", "-."), strict=False):
                crossed = found(rows, field, direction, contest)
                if isinstance(crossed, tuple):
                    label = f"{contest[0]} before {contest[1]} from {crossed[1]} on"
                    panel.axvline(crossed[1], color="black", linewidth=0.8, linestyle=style, label=label)
            words = "forward + backward" if direction == "both" else direction
            panel.set(title=f"{field.title}, {words}", xscale="log", yscale="log", xlabel="tokens of a sequence")
            ticks = field.lengths[direction]
            panel.set_xticks(ticks, [f"{n // 1024}k" if n >= 1024 else str(n) for n in ticks], fontsize=8)
            panel.minorticks_off()
            panel.grid(alpha=0.3)
            panel.legend(fontsize=8)
        axes[0][0].set_ylabel("ms")
        figure.suptitle(f"who is faster from where, bf16, {machine.get('gpu') or machine['cpu']}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    studies.add_output(parser, SUITE)


def run(options: argparse.Namespace) -> None:
    path, commit, rows = studies.place(SUITE, options), options.commit or harness.commit(), list[CrossoverRow]()
    every = {field.name: field for field in fields(studies.device(), options.quick)}

    @cache
    def times(name: str, direction: str, length: int) -> dict[str, float | None]:
        measured = measure(every[name], direction, length, commit)
        rows.extend(measured)
        if path:  # after each: a run may be cut short
            harness.save(path, rows, studies.machine())
        return {row.impl: row.ms for row in measured}

    def bisect(field: Field, direction: str, ours: str, theirs: str) -> None:
        def faster(length: int) -> bool:
            found = times(field.name, direction, length)
            first, second = found[ours], found[theirs]
            return first is not None and second is not None and first <= second

        measured = {length: times(field.name, direction, length) for length in field.lengths[direction]}
        timed = [n for n, found in measured.items() if found[ours] is not None and found[theirs] is not None]
        if timed:
            crossing(faster, timed)

    races = [(field, direction) for field in every.values() for direction in field.lengths]
    points = [(field.name, direction, length) for field, direction in races for length in field.lengths[direction]]
    contests = [(field, direction, *contest) for field, direction in races for contest in field.contests]
    with studies.one_stream():
        for point in harness.progress(points, lambda point: " ".join(map(str, point))):
            times(*point)
        for contest in harness.progress(contests, lambda contest: f"{contest[2]} against {contest[3]}, {contest[1]}"):
            bisect(*contest)
    studies.show(markdown(studies.machine(), rows))
    studies.keep(path, rows)
