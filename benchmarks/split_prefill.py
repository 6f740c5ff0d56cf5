# SPDX-License-Identifier: Apache-2.0
"""A few rows against many keys: one forward, or one over parts of the keys, merged: when does splitting K pay?

The keys before the rows become a batch of equal parts, each without the sink (return_lse="raw"); what is left, with the
rows' own keys, is one part more. Parts merge two by two, and the sink joins at the end. Each result is held against
fp64 in its last rows.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

import sinkattn

from . import gpu, harness, long, peers, report, studies
from .cases import Case
from .peers import Attention, Peer

SUITE = "split-prefill"
ROWS, KEYS = (16, 64, 128, 512, 1024), 32768
PARTS = (2, 4, 8, 16)
QUICK_ROWS, QUICK_KEYS, QUICK_PARTS = (16,), 1024, (2, 4)
SECONDS = {"cuda": 0.25, "cpu": 1.0}


def split_attention(q: Tensor, k: Tensor, v: Tensor, s_aux: Tensor, parts: int) -> Tensor:
    """flash_attn_func(causal=True) of one sequence, its keys in `parts`, a power of two, and a rest."""
    far = (k.shape[1] - q.shape[1]) // parts * parts
    k_far, v_far = (x[0, :far].unflatten(0, (parts, -1)) for x in (k, v))  # type: ignore[no-untyped-call]
    out, lse = sinkattn.flash_attn_func(q.expand(parts, -1, -1, -1), k_far, v_far, return_lse="raw")
    while len(out) > 1:
        half = len(out) // 2
        out, lse = sinkattn.merge_attn_states(out[:half], lse[:half], out[half:], lse[half:])
    near = sinkattn.flash_attn_func(q, k[:, far:], v[:, far:], causal=True, return_lse="raw")
    return sinkattn.apply_sink(*sinkattn.merge_attn_states(out, lse, *near), s_aux)[0]


def _build(case: Case, direction: str, parts: int) -> Attention:
    return lambda q, k, v, s_aux: split_attention(q, k, v, s_aux, parts)


def of_parts(parts: int) -> Peer:
    return Peer(f"split-{parts}", partial(_build, parts=parts), has_sink=True, heads_first=False)


def cases(rows: Sequence[int], keys: int) -> list[Case]:
    """gpt-oss's heads, and those of one of eight ranks that share them; on a CPU the latter."""
    heads = ((64, 8), (8, 1)) if studies.device() == "cuda" else ((8, 1),)
    return [
        Case(
            n, 64, "bf16", num_q_heads=q, num_kv_heads=kv, k_length=keys, device=studies.device(),
            name=f"{n}of{keys}-{q}:{kv}",
        )
        for q, kv in heads
        for n in rows
    ]  # fmt: skip


def partial_bytes(rows: int, parts: int, num_q_heads: int = 64, head_dim: int = 64) -> int:
    """Of a split's partial results: out in bf16 and LSE in fp32, of `parts` and the rest."""
    return (parts + 1) * rows * num_q_heads * (2 * head_dim + 4)


def computed() -> list[str]:
    """What splitting keeps in memory, beside K and V; a decode keeps fp32, and has no rest."""
    read = 2 * 2 * 8 * 64 * KEYS
    kept = {str(rows): [partial_bytes(rows, n) for n in PARTS] for rows in ROWS}
    kept["1, a decode's workspace"] = [n * 8 * long.PARTIAL_BYTES for n in PARTS]

    def cell(size: int) -> str:
        return f"{size / 2**20:.3g} ({100 * size / read:.2g} %)"

    return [
        f"Partial results, computed: MiB, and the share of {KEYS} keys' K and V; 64:8 heads of 64.",
        studies.table(["rows", *(f"{n} parts" for n in PARTS)], [[rows, *map(cell, of)] for rows, of in kept.items()]),
    ]


def markdown(machine: dict[str, object], rows: Sequence[gpu.Row]) -> list[str]:
    found: dict[str, dict[str, gpu.Row]] = {}
    for row in rows:
        found.setdefault(row.case, {})[row.impl] = row
    split = list(dict.fromkeys(row.impl for row in rows if row.impl != report.OURS))
    lines = []
    for case, of in found.items():
        timed = [row for row in of.values() if row.ms is not None]
        fastest = min(timed, key=lambda row: row.ms or 0.0).impl
        ratios = [report.ratio(of.get(impl), of[report.OURS]) for impl in split]
        lines.append([case, studies.milliseconds(of[report.OURS].ms), *ratios, fastest])
    return [studies.where(machine, rows), studies.table(["case", "one forward, ms", *split, "fastest"], lines)]


def plot(path: Path, machine: dict[str, object], rows: Sequence[gpu.Row]) -> None:
    """Times over one forward's, case by case."""
    ours = {row.case: row.ms for row in rows if row.impl == report.OURS and row.ms}
    with studies.picture(path, 1, 1, (8, 4.2)) as (figure, axes):
        panel = axes[0][0]
        for impl in dict.fromkeys(row.impl for row in rows if row.impl != report.OURS):
            some = [row for row in rows if row.impl == impl and row.ms and row.case in ours]
            panel.plot(
                [row.case for row in some], [(row.ms or 0) / ours[row.case] for row in some], marker="o", label=impl
            )
        panel.axhline(1, color="black", linewidth=0.8)
        panel.set(ylabel="time over one forward's")
        panel.tick_params(axis="x", labelsize=7, rotation=30)
        panel.grid(alpha=0.3)
        panel.legend(fontsize=8)
        figure.suptitle(f"few rows against many keys, {machine.get('gpu') or machine['cpu']}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    studies.add_output(parser, SUITE)


def run(options: argparse.Namespace) -> None:
    rows, keys, parts = (QUICK_ROWS, QUICK_KEYS, QUICK_PARTS) if options.quick else (ROWS, KEYS, PARTS)
    seconds = 0.0 if options.quick else SECONDS[studies.device()]
    measured, commit = list[Any](), options.commit or harness.commit()
    with studies.one_stream():
        for case, direction in harness.walk([(case, "forward") for case in cases(rows, keys)]):
            both = (peers.OURS, *(of_parts(n) for n in parts))
            measured += studies.measure(SUITE, case, direction, both, seconds, commit)
    studies.show(computed() + markdown(studies.machine(), measured))
    studies.keep(studies.place(SUITE, options), measured)
