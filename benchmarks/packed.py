# SPDX-License-Identifier: Apache-2.0
"""Packed prefill, 32:8 heads of 128: PyTorch's own formula, a kernel of one tile, and sinkattn, with and without sinks.

Tensors are (total, heads, head_dim) with cu_seqlens. Each with a full causal mask and a window, in bf16 and fp16. Every
result is held against fp64 and against sinkattn's, each run. PyTorch's formula computes the batch padded, here without
padding, and keeps N x N scores; the naive kernel (naive.cu) keeps a block of rows' scores in shared memory.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from . import gpu, harness, peers, report, studies
from .cases import Case
from .naive import NAIVE, NAIVE_WITHOUT, ROWS
from .peers import Absent, Attention, Peer

SUITE = "packed"
CONFIGURATIONS = ((2, 60), (4, 64), (2, 1024), (1, 4096), (1, 16384), (1, 65536))  # sequences, tokens of each
CPU_CONFIGURATIONS = CONFIGURATIONS[:4]
QUICK_CONFIGURATIONS = CONFIGURATIONS[:1]
SECONDS = {"cuda": 0.25, "cpu": 2.0}
NAMES = {"sinkattn": "sinkattn", "naive": "naive kernel", "standard": "PyTorch"}


def cases(configurations: Sequence[tuple[int, int]]) -> list[Case]:
    found = []
    for count, length in configurations:
        for dtype in ("bf16", "fp16"):
            for window in (0, 16 if length <= 64 else 128):
                name = f"{count}x{length}-{f'w{window}' if window else 'full'}-{dtype}"
                sizes = {"num_q_heads": 32, "num_kv_heads": 8, "packed": (length,) * count, "name": name}
                found.append(Case(count * length, 128, dtype, window, device=studies.device(), **sizes))  # type: ignore[arg-type]
    return found


def standard(case: Case, direction: str, with_sink: bool = True) -> Attention:
    """PyTorch's formula on sequences of one length."""
    count, length = len(case.packed), case.packed[0]
    needed, free = 4 * 2 * count * case.num_q_heads * length**2, studies.free_bytes()
    if needed > free:
        raise Absent(f"not run: its N x N tensors take {needed / 2**30:.0f} GiB, and {free / 2**30:.0f} are free")
    attention = peers.standard(replace(case, packed=(), batch=count, length=length), with_sink)

    def packed(q: Tensor, k: Tensor, v: Tensor, s_aux: Tensor) -> Tensor:
        q, k, v = (x.view(count, length, *x.shape[2:]).transpose(1, 2) for x in (q, k, v))
        return attention(q, k, v, s_aux).transpose(1, 2).flatten(0, 1)[None]

    return packed


PEERS = (
    peers.OURS,
    NAIVE,
    Peer("standard", standard, has_sink=True, heads_first=False),
    peers.OURS_WITHOUT,
    NAIVE_WITHOUT,
    Peer("standard-no-sink", partial(standard, with_sink=False), heads_first=False),
)


def _found(rows: Sequence[gpu.Row]) -> dict[str, dict[str, gpu.Row]]:
    found: dict[str, dict[str, gpu.Row]] = {}
    for row in rows:
        found.setdefault(row.case, {})[row.impl] = row
    return found


def traffic_bytes(case: Case) -> dict[str, int]:
    """What a call with sinks asks of memory, its caches not counted, by peer.

    sinkattn: every tensor once, and the LSE. The naive kernel: K and V once more for each tile of rows of each query
    head. PyTorch's formula: K and V repeated for the query heads; the scores written, then scaled, masked, joined by
    the sink and made weights, each a read and a write, and read by the last product.
    """
    of_head, total = 2 * case.head_dim, sum(case.packed)
    io, keys = 2 * total * case.num_q_heads * of_head, 2 * total * case.num_kv_heads * of_head
    seen = 0
    for n in case.packed:
        for first in range(0, n, ROWS):
            last = min(first + ROWS, n)
            seen += last - max(0, first - case.window + 1 if case.window else 0)
    scores = 2 * case.num_q_heads * sum(n * n for n in case.packed)
    repeated = 2 * total * case.num_q_heads * of_head
    return {
        "sinkattn": io + keys + 4 * total * case.num_q_heads,
        "naive": io + 2 * seen * case.num_q_heads * of_head,
        "standard": io + keys + 2 * repeated + 10 * scores,
    }


def _winner(row: dict[str, gpu.Row]) -> str:
    """The fastest with sinks, and how many times its time the next one took."""
    timed = sorted((row[name].ms or 0.0, words) for name, words in NAMES.items() if row[name].ms)
    return timed[0][1] if len(timed) < 2 else f"{timed[0][1]}, {timed[1][0] / timed[0][0]:.3g}x"


def _memory(row: gpu.Row) -> str:
    return "-" if row.ms is None or row.extra_mib is None else f"{row.extra_mib:.4g}"


def markdown(machine: dict[str, object], rows: Sequence[gpu.Row]) -> list[str]:
    heads = ["case", "sinkattn + s_aux, ms (TFLOP/s)", "naive", "PyTorch", "winner, over the next"]
    heads += ["sinkattn, no sink, ms", "naive", "PyTorch"]
    traffic = {case.id: traffic_bytes(case) for case in cases(CONFIGURATIONS)}
    lines = []
    for case, row in _found(rows).items():
        ours, without = row["sinkattn"], row["sinkattn-no-sink"]
        times = f"{studies.milliseconds(ours.ms)} ({ours.tflops:.3g})"
        ratios = [report.ratio(row[name], ours) for name in ("naive", "standard")]
        others = [report.ratio(row[f"{name}-no-sink"], without) for name in ("naive", "standard")]
        extra = ", ".join(_memory(row[name]) for name in NAMES)
        asked = ", ".join(f"{traffic[case][name] / 2**20:.4g}" for name in NAMES)
        lines.append([case, times, *ratios, _winner(row), studies.milliseconds(without.ms), *others, extra, asked])
    absent: dict[str, list[str]] = {}
    for one in rows:
        if one.note and one.impl in NAMES:
            absent.setdefault(f"{NAMES[one.impl]}, {one.note}", []).append(one.case)
    notes = [
        f"* {note}: {', '.join(names) if len(names) < len(lines) else 'everywhere'}." for note, names in absent.items()
    ]
    memory = [f"{what}: sinkattn, naive, PyTorch" for what in ("extra MiB", "traffic, computed, MiB")]
    shown = studies.table([*heads, *memory], lines)
    return [studies.where(machine, rows), shown, *(["\n".join(notes)] if notes else [])]


def plot(path: Path, machine: dict[str, object], rows: Sequence[gpu.Row]) -> None:
    """Time above, memory below, case by case; a column for each mask, bf16."""
    with studies.picture(path, 2, 2, (12, 7)) as (figure, axes):
        found = _found(rows)
        for column, mask in enumerate(("full", "w")):
            names = [name for name in found if name.endswith("bf16") and name.split("-")[1].startswith(mask)]
            for panel, value, label in zip(axes[:, column], ("ms", "extra_mib"), ("ms", "extra MiB"), strict=True):
                for impl, words in NAMES.items():
                    values = [getattr(found[name][impl], value) for name in names]
                    shown = [name.partition("-")[0] for name in names]
                    panel.plot(shown, [x or None for x in values], marker="o", label=f"{words} + s_aux")
                panel.set(yscale="log", ylabel=label)
                panel.grid(alpha=0.3)
            axes[0][column].set_title("full causal" if mask == "full" else "window of 16, from 1024 tokens on 128")
        axes[0][0].legend()
        figure.suptitle(f"packed forward, bf16, 32:8 heads of 128, {machine.get('gpu') or machine['cpu']}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    studies.add_output(parser, SUITE)


def run(options: argparse.Namespace) -> None:
    configurations = CONFIGURATIONS if studies.device() == "cuda" else CPU_CONFIGURATIONS
    measured = cases(QUICK_CONFIGURATIONS if options.quick else configurations)
    seconds = 0.0 if options.quick else SECONDS[studies.device()]
    path, commit, rows = studies.place(SUITE, options), options.commit or harness.commit(), list[Any]()
    with studies.one_stream():
        for case, direction in harness.walk([(case, "forward") for case in measured]):
            rows += studies.measure(SUITE, case, direction, PEERS, seconds, commit)
            if path:  # after each: a run may be cut short
                harness.save(path, rows, studies.machine())
    studies.show(markdown(studies.machine(), rows))
    studies.keep(path, rows)
