# SPDX-License-Identifier: Apache-2.0
"""The planner's closed forms on any machine: B*, P, P*, utilisation and T(P), beside simulations and measured times.

Without options: one H200 as kept results describe it, one of 1000 multiprocessors and one with a second memory of an
eighth of the bandwidth, all simulated, for docs/planner.md. With any of a machine's numbers, or of the heads, the batch
or the keys: the same for these alone, and nothing is kept.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from . import decode, decode_crossover, harness, long, simulate, studies, tiers
from .simulate import GPT_OSS, Heads, Machine

SUITE = "planner"
FOLDER = "simulated"
KEYS = (1 << 17, 1 << 20)
PARTS = (1, 2, 4, 8, 16, 33, 66, 132, 264, 528, 1056)
MANY_PARTS = (1, 8, 33, 66, 125, 250, 375, 500, 1000, 2000)
BATCHES = (1, 2, 4, 8, 16, 17, 32, 64, 125)
RATIO = 8  # of the two memories' bandwidth
SHARES = (0.0, 1 / 64, 1 / 32, 1 / 16, 1 / 9, 1 / 4, 1 / 2)
TIER_PARTS = (16, 33, 66)
H200 = "nvidia-h200"


@dataclass(frozen=True)
class PlannerRow:
    """One sequence's time. impl: closed, simulated or measured; with two memories bound, equal or proportional."""

    suite: str
    machine: str
    keys: int
    share: float  # of the keys, in the second memory
    parts: int
    impl: str
    us: float


def machines() -> tuple[Machine, Machine, Machine]:
    """One H200; 1000 multiprocessors, each with as much of the memory; an H200 with a second memory."""
    one = simulate.h200()
    wide = replace(one, name="1000 SMs", sms=1000, gbps=(one.gbps[0] * 1000 / one.sms,))
    return one, wide, replace(one, name="two memories, 8:1", gbps=(one.gbps[0], one.gbps[0] / RATIO))


def measured() -> dict[tuple[int, int], float]:
    """us by keys and parts, of one sequence on an H200."""
    folder = harness.RESULTS / H200
    _, million = harness.load(folder / f"{long.SUITE}.json", long.LongRow)
    found = {(row.keys, row.num_splits): row.us for row in million if row.impl == "one launch" and row.num_splits}
    _, steps = harness.load(folder / f"{decode.SUITE}.json", decode.DecodeRow)
    alone = next(row for row in steps if (row.case, row.impl) == ("b1-131k", "sinkattn-unsplit"))
    if alone.ms:
        found[1 << 17, 1] = 1e3 * alone.ms
    _, tiered = harness.load(folder / f"{tiers.SUITE}.json", tiers.TierRow)
    near = [row for row in tiered if (row.case, row.host_pages, row.impl) == ("b1-131k", 0, "resident")]
    return found | {(1 << 17, row.num_splits): row.us for row in near}


def curve(machine: Machine, heads: Heads, keys: int, parts: Sequence[int]) -> list[PlannerRow]:
    rows = []
    for n in parts:
        times = {
            "closed": simulate.closed_us(machine, heads, 1, keys, n),
            "simulated": simulate.call_us(machine, heads, [simulate.equal_parts(heads, keys, n)]),
        }
        rows += [PlannerRow(SUITE, machine.name, keys, 0.0, n, impl, harness.digits(us)) for impl, us in times.items()]
    return rows


def tiered(machine: Machine, heads: Heads, keys: int) -> list[PlannerRow]:
    """bound: the slower of the two memories alone, however the keys are cut."""
    rows, sizes = list[PlannerRow](), keys * heads.num_kv_heads * heads.key_bytes / 1e3
    for share in SHARES:
        bound = max((1 - share) * sizes / machine.gbps[0], share * sizes / machine.gbps[1])
        rows.append(PlannerRow(SUITE, machine.name, keys, share, 0, "bound", harness.digits(bound)))
        for parts in TIER_PARTS:
            for impl, weight in (("equal", 1.0), ("proportional", machine.gbps[0] / machine.gbps[1])):
                us = simulate.call_us(machine, heads, simulate.two_tiers(heads, keys, share, parts, weight))
                rows.append(PlannerRow(SUITE, machine.name, keys, share, parts, impl, harness.digits(us)))
    return rows


def rows() -> list[PlannerRow]:
    one, wide, two = machines()
    seen = measured()
    found = [row for keys in KEYS for row in curve(one, GPT_OSS, keys, PARTS)]
    found += [PlannerRow(SUITE, one.name, keys, 0.0, n, "measured", us) for (keys, n), us in seen.items() if n in PARTS]
    found += [row for keys in KEYS for row in curve(wide, GPT_OSS, keys, MANY_PARTS)]
    return found + tiered(two, GPT_OSS, KEYS[-1])


def utilisation(of: Sequence[Machine], heads: Heads, batches: Sequence[int]) -> str:
    """Unsplit work and work in P parts: items, and the share of the machine's time that they use."""
    head, lines = ["sequences"], []
    for machine in of:
        head += [f"{machine.name}: items, util", f"P, items, util (B* = {machine.fill_batch(heads)})"]
    for batch in batches:
        cells = [str(batch)]
        for machine in of:
            items, parts = batch * heads.num_kv_heads, max(1, machine.fill_parts(heads, batch))
            for cut, said in ((1, ""), (parts, f"{parts}, ")):
                cells.append(f"{said}{cut * items}, {100 * simulate.utilisation(cut * items, machine.sms):.0f} %")
        lines.append(cells)
    return studies.table(head, lines)


def _us(rows: Sequence[PlannerRow]) -> dict[tuple[str, int, int, str], float]:
    return {(row.machine, row.keys, row.parts, row.impl): row.us for row in rows if not row.share}


def _time(us: float | None) -> str:
    return "-" if us is None else f"{us:.4g}"


def curves(rows: Sequence[PlannerRow], machine: str, impls: Sequence[str]) -> str:
    us = _us(rows)
    keys = sorted({row.keys for row in rows if row.machine == machine})
    head = ["parts", *(f"{n} keys, us: {', '.join(impls)}" for n in keys)]
    parts = sorted({row.parts for row in rows if row.machine == machine})
    return studies.table(
        head, [[str(n), *(", ".join(_time(us.get((machine, k, n, i))) for i in impls) for k in keys)] for n in parts]
    )


def best(rows: Sequence[PlannerRow], machine: str, keys: int, impl: str) -> int:
    """Of the parts asked for, the fastest."""
    of = {n: us for (name, k, n, i), us in _us(rows).items() if (name, k, i) == (machine, keys, impl)}
    return min(of, key=lambda n: of[n])


def two_memories(rows: Sequence[PlannerRow]) -> str:
    found = [row for row in rows if row.impl in ("bound", "equal", "proportional")]
    us = {(row.share, row.parts, row.impl): row.us for row in found}
    head = ["of the keys in the slower memory", "bound, us", *(f"{n} parts: equal, proportional" for n in TIER_PARTS)]
    lines = []
    for share in dict.fromkeys(row.share for row in found):
        cells = [", ".join(_time(us[share, n, impl]) for impl in ("equal", "proportional")) for n in TIER_PARTS]
        lines.append([f"{100 * share:.3g} %", _time(us[share, 0, "bound"]), *cells])
    return studies.table(head, lines)


def _of_batches(one: Machine, heads: Heads) -> list[list[str]]:
    """Lines of verdicts that decode-crossover and decode-tiers decide."""
    _, cells = harness.load(harness.RESULTS / H200 / f"{decode_crossover.SUITE}.json", decode_crossover.CrossoverRow)
    times = decode_crossover.by_cell(cells)

    def over_found(batch: int) -> str:
        """One part each over the cut by lengths, all lengths."""
        ratios = sorted(of["unsplit"] / of["found"] for (b, _), of in times.items() if b == batch)
        return f"{ratios[0]:.2f} to {ratios[-1]:.2f} at {batch} sequences"

    timed = {(r.batch, r.length, r.num_splits): r.us for r in cells if r.num_splits > 0}
    off = sorted(abs(simulate.closed_us(one, heads, *cell) / us - 1) for cell, us in timed.items())
    _, tier_rows = harness.load(harness.RESULTS / H200 / f"{tiers.SUITE}.json", tiers.TierRow)
    half = next(r for r in tier_rows if (r.case, r.host_pages * 2, r.impl) == ("b1-131k", r.pages, "resident"))
    return [
        [
            "B* = ceil(SMs / kv heads)",
            f"{one.fill_batch(heads)} sequences in one part each are as fast as any cut",
            f"one part over the cut by lengths: {over_found(16)}, {over_found(32)}",
            "right for the multiprocessors; it says nothing of the memory",
        ],
        [
            "T(P) = max(t0 + tau n / P, bytes / rate) + merge",
            "any time",
            f"off by {100 * median(off):.0f} % in the median of {len(off)} times, {100 * off[-1]:.0f} % at most",
            "right",
        ],
        [
            "parts in proportion to each memory's bandwidth",
            "1.5 times as fast as equal ones, half of the keys in host memory",
            f"equal parts take {half.us / half.bound_us:.2f} times the link alone",
            "refuted: nothing is left to win",
        ],
    ]


def _of_parts(one: Machine, heads: Heads, keys: int) -> list[list[str]]:
    """Lines of verdicts that decode-long decides."""
    _, million = harness.load(harness.RESULTS / H200 / f"{long.SUITE}.json", long.LongRow)
    by_parts, passes = long.by_parts(million, "one launch"), long.by_parts(million, "two passes")
    fastest, most = long.best(million, "one launch"), max(passes)
    ends = [passes[n].reduce_us for n in (132, most)]
    each = "-" if None in ends else f"{(ends[1] - ends[0]) / (most - 132):.3f} us a part, from memory, by ncu"  # type: ignore[operator]
    util = simulate.utilisation(heads.num_kv_heads, one.sms)
    p, p_star, cap = one.fill_parts(heads, 1), one.best_parts(heads, 1, keys), int(one.worth_parts(heads, keys))

    def over_best(parts: int) -> str:
        return f"{by_parts[parts].us / by_parts[fastest].us:.2f}"

    return [
        [
            "util = items / (rounds * workers)",
            f"one part of one sequence uses {100 * util:.0f} %, so a full machine is {1 / util:.1f} times as fast",
            f"{by_parts[1].us / by_parts[fastest].us:.1f} times, at {keys} keys",
            "right to a quarter: a multiprocessor with two blocks reads more than with one",
        ],
        [
            "P = floor(SMs / (batch * kv heads))",
            f"{p} parts of one sequence are the best",
            f"{fastest} are, at {keys} keys; {p} take {over_best(p)} times as long",
            "refuted: two blocks a multiprocessor, not one",
        ],
        [
            "P* = min(P, sqrt(t / r))",
            f"{p_star} at {keys} keys, and {cap} without P",
            f"264 parts take {over_best(264)} times the best, {p_star} {over_best(p_star)} times",
            "refuted as the best number: past the memory's rate parts cost and save nothing",
        ],
        [
            "merge = parts * partial / a block's rate",
            f"{one.part_us(heads):.3f} us a part",
            each,
            "refuted: partials are read more slowly than keys",
        ],
    ]


def verdicts() -> str:
    """The closed forms beside what an H200 gave."""
    one = simulate.h200()
    lines = _of_batches(one, GPT_OSS) + _of_parts(one, GPT_OSS, KEYS[-1])
    return studies.table(["closed form", "says", "measured on an H200", "so"], lines)


def markdown(machine: dict[str, object], rows: Sequence[PlannerRow]) -> list[str]:
    one, wide, two = machines()
    simulated = {name: best(rows, name, KEYS[-1], "simulated") for name in (one.name, wide.name)}
    return [
        f"Utilisation, computed: gpt-oss's {GPT_OSS.num_kv_heads} kv heads, one row a sequence, one item a "
        "multiprocessor at a time.",
        utilisation((one, wide), GPT_OSS, BATCHES),
        "T(P) of one sequence: closed form, simulated, measured. The simulated H200 is made from kept rows of "
        f"decode-crossover: {one.gbps[0]:.0f} GB/s, a block's {one.block_gbps:.1f}, {one.begin_us:.1f} us to begin, "
        f"{one.merge_us:.1f} us to merge and {one.part_us(GPT_OSS):.3f} a part; the last "
        "assumes that partials are read at a block's rate. Measured are kept rows of decode, long and tiers.",
        curves(rows, one.name, ("closed", "simulated", "measured")),
        "The closed forms beside what was measured:",
        verdicts(),
        f"Simulated: {wide.name}, each with an H200's share of the memory, {wide.gbps[0]:.0f} GB/s in all. B* is "
        f"{wide.fill_batch(GPT_OSS)}, P {wide.fill_parts(GPT_OSS, 1)}, P* {wide.best_parts(GPT_OSS, 1, KEYS[0])} at "
        f"{KEYS[0]} keys. Of these parts {simulated[wide.name]} are the fastest at {KEYS[-1]} keys, and on the H200 "
        f"{simulated[one.name]}.",
        curves(rows, wide.name, ("closed", "simulated")),
        f"Simulated: an H200 with a second memory of {two.gbps[1]:.0f} GB/s, an eighth of the first; {KEYS[-1]} keys, "
        "us. bound: the slower of the two alone. equal: parts of as many keys each. proportional: a key in the slower "
        f"memory counts as {RATIO}.",
        two_memories(rows),
    ]


def plot(path: Path, machine: dict[str, object], rows: Sequence[PlannerRow]) -> None:
    """T(P), a column for each machine."""
    us, names = _us(rows), [m.name for m in machines()[:2]]
    with studies.picture(path, 1, 2, (11, 4.2)) as (figure, axes):
        for panel, name in zip(axes[0], names, strict=True):
            for keys in KEYS:
                for impl, style in (("closed", "--"), ("simulated", "-"), ("measured", "")):
                    points = sorted((n, t) for (m, k, n, i), t in us.items() if (m, k, i) == (name, keys, impl))
                    if points:
                        x, y = zip(*points, strict=True)
                        marker = "x" if impl == "measured" else None
                        panel.plot(x, y, linestyle=style, marker=marker, label=f"{keys >> 10}K keys, {impl}")
            panel.set(title=name, xscale="log", yscale="log", xlabel="parts", ylabel="us")
            panel.grid(alpha=0.3)
            panel.legend(fontsize=8)
        figure.suptitle("T(P) of one sequence, 64:8 heads of 64; crosses are measured, lines are not")


def calculate(machine: Machine, heads: Heads, batch: int, keys: int) -> list[str]:
    """The same for a reader's own machine."""
    p = machine.fill_parts(heads, batch)
    parts = sorted({1, 2, 4, 8, 16, 32, max(1, p), 2 * max(1, p), machine.best_parts(heads, batch, keys)})
    times = []
    for n in parts:
        sequences = [simulate.equal_parts(heads, keys, n)] * batch
        items = n * batch * heads.num_kv_heads
        both = (simulate.closed_us(machine, heads, batch, keys, n), simulate.call_us(machine, heads, sequences))
        times.append([str(n), f"{100 * simulate.utilisation(items, machine.sms):.0f} %", *map(_time, both)])
    facts = [
        ["B*", str(machine.fill_batch(heads))],
        ["P", str(p)],
        ["sqrt(t / r)", f"{machine.worth_parts(heads, keys):.1f}"],
        ["P*", str(machine.best_parts(heads, batch, keys))],
    ]
    shown = [
        f"{machine.sms} multiprocessors, {batch} x {keys} keys, {heads.num_q_heads}:{heads.num_kv_heads} heads of "
        f"{heads.head_dim}",
        studies.table(["closed form", "is"], facts),
        studies.table(["parts", "util", "T, closed, us", "T, simulated, us"], times),
    ]
    if len(machine.gbps) > 1:
        shown.append(two_memories(tiered(machine, heads, keys)))
    return shown


def add_arguments(parser: argparse.ArgumentParser) -> None:
    number = {"type": float, "metavar": "X"}
    parser.add_argument("--sms", type=int, metavar="N", help="multiprocessors")
    parser.add_argument("--gbps", nargs="+", **number, help="bandwidth of each memory, the nearest first; one or two")  # type: ignore[arg-type]
    parser.add_argument("--block-gbps", **number, help="what one block takes in")  # type: ignore[arg-type]
    parser.add_argument("--begin-us", **number, help="latency of a call before its first key")  # type: ignore[arg-type]
    parser.add_argument("--merge-us", **number, help="of a merge, beside its parts")  # type: ignore[arg-type]
    parser.add_argument("--blocks-an-sm", type=int, metavar="N", help="blocks that share a multiprocessor")
    for name, default in (("num-q-heads", 64), ("num-kv-heads", 8), ("head-dim", 64), ("batch", 1), ("keys", 1 << 20)):
        parser.add_argument(f"--{name}", type=int, metavar="N", help=f"default: {default}")
    parser.add_argument("--json", "--output", type=Path, help=f"where rows go; default: benchmarks/results/{FOLDER}")


def run(options: argparse.Namespace) -> None:
    def given(*names: str) -> dict[str, object]:
        return {name: value for name in names if (value := getattr(options, name)) is not None}

    at = given("sms", "gbps", "block_gbps", "begin_us", "merge_us", "blocks_an_sm")
    heads, sizes = given("num_q_heads", "num_kv_heads", "head_dim"), given("batch", "keys")
    if at or heads or sizes:
        if any(
            not isinstance(x, list) and float(str(x)) <= 0 for x in (*heads.values(), *sizes.values(), *at.values())
        ):
            raise SystemExit("benchmarks planner: every number must be above 0")
        if "gbps" in at:
            at["gbps"] = tuple(options.gbps)
            if len(options.gbps) > 2 or min(options.gbps) <= 0:
                raise SystemExit("benchmarks planner: --gbps takes one or two numbers above 0")
        machine = replace(simulate.h200(), name="yours", **at)  # type: ignore[arg-type]
        studies.show(calculate(machine, Heads(**heads), options.batch or 1, options.keys or KEYS[-1]))  # type: ignore[arg-type]
        return
    found = rows()
    facts: dict[str, object] = {"simulated": f"from {H200}/{decode_crossover.SUITE}.json"}
    studies.show(markdown(facts, found))
    path = options.json or harness.results_path(SUITE, FOLDER)
    harness.save(path, found, facts)
    print(f"wrote {path}; python -m benchmarks plot draws what benchmarks/results keeps")
