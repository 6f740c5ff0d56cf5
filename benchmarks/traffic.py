# SPDX-License-Identifier: Apache-2.0
"""A server's decode steps by simulation: the measured trace, and one whose long requests are above 64K keys.

70 % of the requests are short, 30 % long. Ways to split as in `trace`, and the planner's forms as a policy of three
branches: one part from B* sequences on, P parts below, P* parts where the cost of adding up says fewer. A scheduler may
keep long requests back and decode them together, every so many steps. Times are of one layer's attention alone, on the
machine that `planner` takes from kept results; beside the measured trace they show how far to trust the rest.
"""

from __future__ import annotations

import argparse
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from . import harness, planner, simulate, studies, trace
from .simulate import GPT_OSS, Heads, Machine

SUITE = "traffic"
ABOVE = {"short": (128, 8191), "long": (65537, 131072)}  # tokens of a prompt, from and to
BRANCHES = ("one part", "P parts", "P* parts")
EVERY = (1, 4, 8)  # steps, one of which has the long requests
REQUESTS, GAP_US = 200, 8000.0  # between two arrivals, on average: the memory is busy for two thirds of it
TRAFFICS = {"trace": trace.PROMPTS, "above 64K": ABOVE}
MEASURED = {"one part": "unsplit", "16 parts": "split-16", "P parts": "by-batch", "by lengths": "by-lengths"}
Cut = Callable[[Sequence[int]], list[list[list[simulate.Piece]]]]


@dataclass(frozen=True)
class TrafficRow:
    """us a layer. what: a step, or the time between two tokens of a request; measured_us: the kept mean of `trace`."""

    suite: str
    traffic: str
    what: str
    way: str
    every: int
    count: int
    mean_us: float
    p50_us: float
    p99_us: float
    measured_us: float | None


def branch(machine: Machine, heads: Heads, batch: int, keys: int) -> tuple[str, int]:
    """Of the three branches the one that is taken, and its parts."""
    parts, worth = machine.fill_parts(heads, batch), int(machine.worth_parts(heads, keys))
    if batch >= machine.fill_batch(heads):
        return BRANCHES[0], 1
    return (BRANCHES[2], max(1, worth)) if worth < parts else (BRANCHES[1], parts)


def fewest_keys(machine: Machine, heads: Heads, batch: int) -> int:
    """Keys from which on the branch of P* is not taken any more."""
    return next(
        tiles * simulate.TILE
        for tiles in range(1, 1 << 20)
        if branch(machine, heads, batch, tiles * simulate.TILE)[0] != BRANCHES[2]
    )


def ways(machine: Machine, heads: Heads) -> dict[str, Cut]:
    """How a step's lengths are cut."""

    def equal(parts: Callable[[list[int]], int]) -> Cut:
        def cut(lengths: Sequence[int]) -> list[list[list[simulate.Piece]]]:
            used = [n for n in lengths if n]
            return [simulate.equal_parts(heads, n, parts(used)) for n in used]

        return cut

    return {
        "one part": equal(lambda used: 1),
        "16 parts": equal(lambda used: 16),
        "P parts": equal(lambda used: trace.choose(len(used), machine.sms)),
        "three branches": equal(lambda used: branch(machine, heads, len(used), max(used))[1]),
        "by lengths": lambda lengths: simulate.cut_by_length(machine, heads, lengths),
    }


def row(traffic: str, what: str, way: str, every: int, times: Sequence[float], measured: float | None) -> TrafficRow:
    quantiles = torch.tensor(times, dtype=torch.float64).quantile(torch.tensor([0.5, 0.99]).double()).tolist()
    mean, p50, p99 = (harness.digits(x) for x in (sum(times) / len(times), *quantiles))
    return TrafficRow(SUITE, traffic, what, way, every, len(times), mean, p50, p99, measured)


def steps_of(traffic: str, steps: int) -> list[list[int]]:
    """Of the sequences in use at each step, the keys."""
    return [[n for n in lengths if n] for lengths in trace.lengths_of(steps, prompts=TRAFFICS[traffic])]


def steps(traffic: str, count: int) -> list[TrafficRow]:
    machine, measured = simulate.h200(), dict[str, float]()
    if traffic == "trace" and count == trace.STEPS:
        _, kept = harness.load(harness.RESULTS / planner.H200 / f"{trace.SUITE}.json", trace.TraceRow)
        measured = {row.impl: row.mean_us for row in kept}
    rows, walked = [], [lengths for lengths in steps_of(traffic, count) if lengths]
    for name, cut in ways(machine, GPT_OSS).items():
        times = [simulate.call_us(machine, GPT_OSS, cut(lengths)) for lengths in walked]
        rows.append(row(traffic, "step", name, 1, times, measured.get(MEASURED.get(name, ""))))
    return rows


@dataclass
class Request:
    keys: int
    left: int  # tokens still to come
    came_us: float  # when it came, then when its last token did
    is_long: bool


def requests(count: int, seed: int = 0) -> list[Request]:
    """As they come."""
    rng, now, found = random.Random(seed), 0.0, list[Request]()
    for _ in range(count):
        now += rng.expovariate(1 / GAP_US)
        kind = "short" if rng.random() < trace.SHORT_SHARE else "long"
        found.append(Request(rng.randint(*ABOVE[kind]), rng.randint(*trace.OUTPUTS[kind]), now, kind == "long"))
    return found


def serve(machine: Machine, heads: Heads, waiting: list[Request], cut: Cut, every: int) -> dict[str, list[float]]:
    """us between tokens, of short requests and of long ones, which are decoded together in one of `every` steps."""
    times: dict[str, list[float]] = {"short": [], "long": []}
    now, step, running = 0.0, 0, list[Request]()
    while waiting or running:
        if not running:
            now = max(now, waiting[0].came_us)
        while waiting and waiting[0].came_us <= now:
            running.append(waiting.pop(0))
        short = [request for request in running if not request.is_long]
        chosen = running if step % every == 0 or not short else short
        now += simulate.call_us(machine, heads, cut([request.keys for request in chosen]))
        for request in chosen:
            times["long" if request.is_long else "short"].append(now - request.came_us)
            request.came_us, request.keys, request.left = now, request.keys + 1, request.left - 1
        running, step = [request for request in running if request.left], step + 1
    return times


def schedules(count: int) -> list[TrafficRow]:
    machine, rows = simulate.h200(), list[TrafficRow]()
    of = ways(machine, GPT_OSS)
    for way in ("P parts", "by lengths"):
        for every in EVERY:
            times = serve(machine, GPT_OSS, requests(count), of[way], every)
            rows += [row("above 64K", what, way, every, times[what], None) for what in times if times[what]]
    return rows


def branches(traffic: str, count: int) -> Counter[str]:
    """How often each branch is taken."""
    machine = simulate.h200()
    return Counter(branch(machine, GPT_OSS, len(n), max(n))[0] for n in steps_of(traffic, count) if n)


def _steps_table(rows: Sequence[TrafficRow]) -> str:
    lines = []
    for row in (row for row in rows if row.what == "step"):
        measured = "-" if row.measured_us is None else f"{row.measured_us:.4g}"
        lines.append([row.traffic, row.way, *(f"{x:.4g}" for x in (row.mean_us, row.p50_us, row.p99_us)), measured])
    return studies.table(["traffic", "way", "mean", "p50", "p99", "mean, measured"], lines)


def _branches_table(machine: Machine, counts: dict[str, Counter[str]]) -> str:
    taken = {name: [str(of[name]) for of in counts.values()] for name in BRANCHES}
    reach = {
        BRANCHES[0]: f"from {machine.fill_batch(GPT_OSS)} sequences on",
        BRANCHES[1]: "below, from there on where P* ends",
        BRANCHES[2]: ", ".join(
            f"{batch}: below {fewest_keys(machine, GPT_OSS, batch)} keys" for batch in (1, 2, 4, 8, 16)
        ),
    }
    heads = ["branch", *(f"steps, {name}" for name in counts), "taken where"]
    return studies.table(heads, [[name, *taken[name], reach[name]] for name in BRANCHES])


def _schedules_table(rows: Sequence[TrafficRow]) -> str:
    found = {(row.way, row.every, row.what): row for row in rows if row.what != "step"}
    lines = []
    for way, every in dict.fromkeys((way, every) for way, every, _ in found):
        when = "every step" if every == 1 else f"one of {every} steps"
        cells = [found[way, every, what] for what in ("short", "long")]
        lines.append([way, when, *(f"{x:.4g}" for cell in cells for x in (cell.mean_us, cell.p50_us, cell.p99_us))])
    heads = [f"{what}: {value}" for what in ("short", "long") for value in ("mean", "p50", "p99")]
    return studies.table(["way", "long requests in", *heads], lines)


def markdown(machine: dict[str, object], rows: Sequence[TrafficRow]) -> list[str]:
    count = next(row.count for row in rows if row.what == "step")
    taken = {name: branches(name, count) for name in TRAFFICS}
    return [
        f"Simulated: {count} steps, us a layer; the last column is what an H200 took over the same steps.",
        _steps_table(rows),
        "How often each branch is taken, of 132 multiprocessors and 8 kv heads:",
        _branches_table(simulate.h200(), taken),
        "Simulated: us a layer between two tokens of a request, with long requests in every step or kept back and "
        f"decoded together; {REQUESTS} requests, one in {GAP_US / 1e3:g} ms of a layer's time.",
        _schedules_table(rows),
    ]


def plot(path: Path, machine: dict[str, object], rows: Sequence[TrafficRow]) -> None:
    """Times of steps left, of tokens right."""
    with studies.picture(path, 1, 2, (11, 4.2)) as (figure, axes):
        for column, of_steps in enumerate((True, False)):
            some = [row for row in rows if (row.what == "step") == of_steps]
            names = [
                f"{row.traffic}: {row.way}" if of_steps else f"{row.what}, {row.way}, long 1 in {row.every}"
                for row in some
            ]
            panel = axes[0][column]
            for value, marker in (("mean_us", "o"), ("p50_us", "|"), ("p99_us", ">")):
                times = [getattr(row, value) for row in some][::-1]
                panel.plot(times, names[::-1], marker=marker, linestyle="", label=value[:-3])
            panel.set(xscale="log", xlabel="us a layer, " + ("a step" if of_steps else "between tokens"))
            panel.tick_params(axis="y", labelsize=7)
            panel.grid(alpha=0.3)
        axes[0][0].legend(fontsize=8)
        figure.suptitle("a server's decode steps, simulated")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, default=trace.STEPS, help=f"default: {trace.STEPS}")
    parser.add_argument("--requests", type=int, default=REQUESTS, help=f"default: {REQUESTS}; 0: no schedulers")
    parser.add_argument("--json", "--output", type=Path, help="where rows go; default: benchmarks/results/simulated")


def run(options: argparse.Namespace) -> None:
    rows = [row for traffic in TRAFFICS for row in steps(traffic, options.steps)]
    rows += schedules(options.requests) if options.requests else []
    facts: dict[str, object] = {"simulated": f"as {planner.SUITE}.json"}
    studies.show(markdown(facts, rows))
    if options.json or (options.steps, options.requests) == (trace.STEPS, REQUESTS):
        path = options.json or harness.results_path(SUITE, planner.FOLDER)
        harness.save(path, rows, facts)
        print(f"wrote {path}; python -m benchmarks plot draws what benchmarks/results keeps")
