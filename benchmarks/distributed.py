# SPDX-License-Identifier: Apache-2.0
"""One sequence on several GPUs against the same on one: torchrun --nproc-per-node 2 -m benchmarks distributed.

The time of a call is that of the slowest rank, from a barrier on. One GPU is rank 0 alone, with the plain function,
whose last rows are held against fp64; every row of the others is held against it. A backward is timed alone.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from rich.table import Table
from torch import Tensor

from sinkattn.distributed import Shards, context_parallel_attention
from sinkattn.distributed.ring import Ring

from . import gpu, harness, peers, report, studies
from .cases import Case
from .harness import Call, Inputs

SUITE = "distributed"
PAGE = harness.ROOT / "docs" / "distributed.md"
CALLS = {"w128": 10, "full": 1}  # timed together: the host, which is slower than a short call, runs ahead
ROUNDS = 5
ALONE = "one GPU"
# What is measured for a mask: method and layout of the tokens.
METHODS = {
    "w128": (("halo", "contiguous"), ("halo", "zigzag"), ("ulysses", "contiguous")),
    "full": (("ulysses", "contiguous"), ("ring", "contiguous"), ("ring", "zigzag")),
}


@dataclass(frozen=True)
class DistributedRow:
    """One measurement; error is the largest distance of a row from one GPU's, relative to that row."""

    suite: str
    case: str
    direction: str
    impl: str
    ranks: int
    ms: float
    tflops: float
    error: float
    commit: str
    torch: str


def case_of(mask: str, length: int) -> Case:
    window = 128 if mask == "w128" else 0
    return Case(length, 64, "bf16", window, 1, 64, 8, device="cuda", name=f"{mask}-{length}")


def layout(name: str, length: int, ranks: int) -> Shards:
    if name == "zigzag":
        return Shards.zigzag(length, ranks)
    return Shards.contiguous([length * (r + 1) // ranks - length * r // ranks for r in range(ranks)])


def prepare(case: Case, direction: str, inputs: Inputs, method: str, shards: Shards) -> Call:
    """What a rank runs: the forward gives (out,), the backward (dq, dk, dv, ds_aux) of its tokens."""
    mine = [shards.take(x, dist.get_rank(), 1).clone() for x in (inputs.q, inputs.k, inputs.v, inputs.dout)]
    leaves = [x.requires_grad_(direction != "forward") for x in (*mine[:3], inputs.s_aux.clone())]

    def forward() -> Tensor:
        q, k, v, s_aux = leaves
        out = context_parallel_attention(
            q, k, v, shards=shards, method=method, window_size=case.window_size, s_aux=s_aux
        )
        assert isinstance(out, Tensor)
        return out

    if direction == "forward":
        return lambda: (forward(),)
    out = forward()
    return lambda: torch.autograd.grad(out, leaves, mine[3], retain_graph=True)


def slowest_ms(call: Call, calls: int, ranks: range) -> float:
    """Of one of `calls` calls: the median over rounds, after one to warm up, of the slowest of the ranks that call."""
    times = []
    for _ in range(ROUNDS + 1):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        dist.barrier()
        torch.cuda.synchronize()
        begin.record()
        for _ in range(calls if dist.get_rank() in ranks else 0):
            call()
        end.record()
        end.synchronize()
        ms = torch.tensor([begin.elapsed_time(end) / calls], device="cuda")
        dist.all_reduce(ms, op=dist.ReduceOp.MAX)
        times.append(float(ms))
    return median(times[1:])


def error(got: tuple[Tensor, ...], whole: tuple[Tensor, ...], shards: Shards) -> float:
    """Largest of all ranks. ds_aux, which the ranks add up, counts as one row."""
    rank, worst = dist.get_rank(), 0.0
    for x, expected in zip(got, whole, strict=True):
        if x.dim() == 1:
            summed = x.clone()
            dist.all_reduce(summed)
            worst = max(worst, harness.row_error(summed[None], expected[None]))
        else:
            worst = max(worst, harness.row_error(x, shards.take(expected, rank, 1)))
    found = torch.tensor([worst], device=whole[0].device)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return float(found)


def measure(mask: str, length: int, direction: str, commit: str) -> list[DistributedRow]:
    """Raises RuntimeError when a result is wrong."""
    case, ranks, count = case_of(mask, length), dist.get_world_size(), CALLS[mask]
    calls, notes = harness.ready(case, direction, [peers.OURS])
    if notes:
        raise RuntimeError(f"{case.id} {direction}: {notes}")
    alone, inputs, rows = calls[peers.OURS], Inputs.of(case), list[DistributedRow]()
    whole = alone()

    def keep(impl: str, used: int, ms: float, found: float) -> None:
        tflops = harness.digits(case.gflop(direction) / ms)
        about = SUITE, case.id, direction, impl, used, harness.digits(ms), tflops, harness.digits(found)
        rows.append(DistributedRow(*about, commit, torch.__version__))

    keep(ALONE, 1, slowest_ms(alone, count, range(1)), 0.0)
    for method, name in METHODS[mask]:
        shards = layout(name, length, ranks)
        call = prepare(case, direction, inputs, method, shards)
        found = error(call(), whole, shards)
        if not found <= harness.TOLERANCE[case.dtype]:
            raise RuntimeError(f"{case.id} {direction}: {method}, {name} is off from one GPU by {found:.2g} of a row")
        keep(f"{method}, {name}", ranks, slowest_ms(call, count, range(ranks)), found)
    return rows


def exchange_ms(length: int) -> float:
    """Time of one step of the ring that computes nothing: K and V go to the next rank."""
    ranks = dist.get_world_size()
    ring = Ring(layout("contiguous", length, ranks), None, None, None, (-1, 0))
    kv = torch.zeros(2, 1, ring.shards.lengths[dist.get_rank()], 8, 64, dtype=torch.bfloat16, device="cuda")
    return slowest_ms(lambda: (ring.start(kv, 1).wait(),), CALLS["w128"], range(ranks))


def speedups(rows: list[DistributedRow], case: str, direction: str) -> dict[str, tuple[DistributedRow, float]]:
    """Each row with its speed over that of one GPU."""
    chosen = {row.impl: row for row in rows if (row.case, row.direction) == (case, direction)}
    return {impl: (row, chosen[ALONE].ms / row.ms) for impl, row in chosen.items()}


def cells(rows: list[DistributedRow]) -> list[list[str]]:
    """A table's lines."""
    found = []
    for case, direction in dict.fromkeys((row.case, row.direction) for row in rows):
        for impl, (row, speedup) in speedups(rows, case, direction).items():
            numbers = report._milliseconds(row.ms), f"{row.tflops:.0f}", f"{speedup:.2f}x", f"{speedup / row.ranks:.0%}"
            found.append([case, direction, impl, str(row.ranks), *numbers, f"{row.error:.2g}"])
    return found


HEAD = ("case", "direction", "method", "GPUs", "ms", "TFLOP/s", "speedup", "efficiency", "error")


def table(rows: list[DistributedRow]) -> Table:
    shown = Table(title="slowest rank; error: largest distance of a row from one GPU's, relative to the row")
    for name in HEAD:
        shown.add_column(name, no_wrap=True)
    for line in cells(rows):
        shown.add_row(*line)
    return shown


def readme(text: str, results: Path = harness.RESULTS) -> str:
    """The page's text with the tables and plots that the kept results give."""
    shown = []
    for path in sorted(results.glob(f"*/{SUITE}.json")):
        machine, rows = harness.load(path, DistributedRow)
        lines = ["| " + " | ".join(line) + " |" for line in (HEAD, ["---"] * len(HEAD), *cells(rows))]
        about = f"{max(row.ranks for row in rows)} x {machine['gpu']}, torch {rows[0].torch}, commit {rows[0].commit}."
        exchange = (
            f"A step of the ring that computes nothing, K and V to the next rank, takes {machine['exchange_ms']} ms."
        )
        plot = f"{SUITE}-{path.parent.name}.svg"
        shown += [f"{about} {exchange}", "\n".join(lines), f"![speed over one GPU]({plot})"]
    return report.placed(text, SUITE, shown)


def plot(path: Path, machine: dict[str, object], rows: list[DistributedRow]) -> None:
    """Speed over one GPU, a panel for each case; the dashed line is as many times as there are GPUs."""
    found = list(dict.fromkeys(row.case for row in rows))
    ranks = max(row.ranks for row in rows)
    with studies.picture(path, 1, len(found), (5 * len(found), 3.8)) as (figure, axes):
        for panel, case in zip(axes[0], found, strict=True):
            for i, direction in enumerate(report.DIRECTIONS):
                shown = {impl: x for impl, (_, x) in speedups(rows, case, direction).items() if impl != ALONE}
                bars = panel.bar([n + 0.4 * i for n in range(len(shown))], list(shown.values()), 0.38, label=direction)
                panel.bar_label(bars, fmt="%.2f", fontsize=8)
            panel.set_xticks([n + 0.2 for n in range(len(shown))], [impl.replace(", ", "\n") for impl in shown])
            panel.axhline(ranks, color="black", linewidth=0.8, linestyle="--")
            panel.set(title=case, ylim=(0, 1.15 * ranks))
        axes[0][0].set_ylabel("times as fast as one GPU")
        axes[0][0].legend(loc="lower left")
        figure.suptitle(f"{ranks} x {machine['gpu']}, 64:8 heads of 64, bf16")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--length", type=int, default=131072, help="tokens; default: 131072")
    parser.add_argument("--readme", action="store_true", help=f"measure nothing: draw the table of {PAGE.name}")
    gpu.add_output(parser, SUITE)


def run(options: argparse.Namespace) -> None:
    if options.readme:
        PAGE.write_text(readme(PAGE.read_text()))
        return
    gpu.require(SUITE)
    if "RANK" not in os.environ:
        raise SystemExit(
            "benchmarks distributed has a process for each GPU: torchrun --nproc-per-node 2 -m benchmarks ..."
        )
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    try:
        commit, rows = options.commit or harness.commit(), list[DistributedRow]()
        path = options.json or harness.results_path(SUITE, torch.cuda.get_device_name())
        facts = {**gpu.machine(), "exchange_ms": harness.digits(exchange_ms(options.length))}
        for mask in METHODS:
            for direction in report.DIRECTIONS:
                rows += measure(mask, options.length, direction, commit)
                torch.cuda.empty_cache()
                if dist.get_rank() == 0:  # after each: a run may be cut short
                    harness.save(path, rows, facts)
        if dist.get_rank() == 0:
            report.show(table(rows))
            print(f"one step of the ring without computing: {facts['exchange_ms']} ms\nwrote {path}")
    finally:
        dist.destroy_process_group()
