# SPDX-License-Identifier: Apache-2.0
"""Time and memory of a layer's attention against tokens, to 1M; gpt-oss-20b's 24 layers, projected and measured.

A layer has gpt-oss's 64:8 heads of 64 in bf16 and sinks, 8:2 on a CPU; half of the layers have a window of 128, the
others see all keys before. The stack's time is projected as the sum of its layers, each measured alone; where full
attention was not measured, from its longest time by the square of the length. One stack is then run, each layer's q the
output of the layer before. Memory: what a call has allocated at its peak, its input and output among it. A call that
takes a second or more is timed once, the others are medians.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from . import gpu, harness, peers, studies
from .cases import Case
from .harness import Call, Inputs

SUITE = "scaling"
LAYERS = 24  # windowed and full ones in turn
WINDOWS = {"window 128": 128, "full": 0}
DIRECTIONS = ("forward", "both")
# By device: the least tokens, the most of each kind and direction, and those of the stack that is run.
LEAST = {"cuda": 1024, "cpu": 512}
_KINDS = [(name, direction) for name in WINDOWS for direction in DIRECTIONS]
MOST = {
    "cuda": dict.fromkeys(_KINDS, 1 << 20),
    "cpu": dict(zip(_KINDS, (1 << 16, 1 << 15, 1 << 13, 1 << 12), strict=True)),
}
STACK = {"cuda": 1 << 14, "cpu": 1 << 12}
QUICK = 256
SECONDS, ROUNDS = 0.05, 2
LONG = 1.0  # seconds


@dataclass(frozen=True)
class ScalingRow:
    """One layer, or a stack of LAYERS; extra_mib: beside input and output."""

    suite: str
    layer: str
    direction: str
    tokens: int
    ms: float
    extra_mib: float
    peak_mib: float
    commit: str
    torch: str


def _held(case: Case, direction: str) -> float:
    """MiB of input and output: q, k, v, out; with a backward dout and three gradients, and no out."""
    q, kv = case.num_q_heads, 2 * case.num_kv_heads
    heads = 2 * q + kv if direction == "forward" else 3 * q + 2 * kv
    return heads * case.length * case.head_dim * 2 / 2**20


def _measured(
    layer: str, direction: str, tokens: int, call: Call, held: float, commit: str
) -> tuple[ScalingRow, tuple[Tensor, ...]]:
    """The row, and what the call gave when its memory was read."""
    seconds, results = 0.0, tuple[Tensor, ...]()

    def timed() -> tuple[Tensor, ...]:
        nonlocal seconds, results
        begin = time.perf_counter()
        results = call()
        if studies.device() == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - begin
        return results

    extra = gpu.extra_mib(timed)
    ms = 1e3 * seconds if seconds > LONG else studies.take_turns({layer: call}, SECONDS, ROUNDS)[layer]
    peak = harness.digits(held + extra)
    row = ScalingRow(SUITE, layer, direction, tokens, harness.digits(ms), extra, peak, commit, torch.__version__)
    return row, results


def layer(name: str, direction: str, tokens: int, commit: str) -> ScalingRow:
    """Raises RuntimeError when the result is wrong."""
    case = studies.gpt_oss(tokens, WINDOWS[name])
    inputs = Inputs.of(case)
    call = harness.prepare(peers.OURS, case, direction, inputs)
    row, results = _measured(name, direction, tokens, call, _held(case, direction), commit)
    for fault in harness.faults(case, direction, inputs, {peers.OURS: results}).values():
        raise RuntimeError(f"{case.id} {direction}: {fault}")
    return row


def stack(direction: str, tokens: int, layers: int, commit: str) -> ScalingRow:
    """All layers, one after the other; kernels and lengths are those that `layer` has checked."""
    cases = [studies.gpt_oss(tokens, window) for window in WINDOWS.values()] * (layers // len(WINDOWS))
    inputs = Inputs.of(cases[0])
    attend = [peers.OURS.build(case, direction) for case in cases]
    wanted = (inputs.q, inputs.k, inputs.v, inputs.s_aux)
    for x in wanted:
        x.requires_grad_(direction == "both")

    def call() -> tuple[Tensor, ...]:
        x = inputs.q
        for attention in attend:
            x = attention(x, inputs.k, inputs.v, inputs.s_aux)
        return torch.autograd.grad(x, wanted, inputs.dout) if direction == "both" else (x,)

    row, results = _measured("stack", direction, tokens, call, _held(cases[0], direction), commit)
    if not all(bool(torch.isfinite(x).all()) for x in results):
        raise RuntimeError(f"stack of {layers} layers, {tokens} tokens, {direction}: not finite")
    return row


def projected(rows: Sequence[ScalingRow], direction: str, tokens: int, layers: int = LAYERS) -> float | None:
    """ms of a stack from its layers; a full one beyond the longest measured grows with the square."""
    total = 0.0
    for name in WINDOWS:
        times = {row.tokens: row.ms for row in rows if (row.layer, row.direction) == (name, direction)}
        longest = max(times, default=0)
        if tokens in times:
            one = times[tokens]
        elif name == "full" and longest and tokens > longest:
            one = times[longest] * (tokens / longest) ** 2
        else:
            return None
        total += one * layers / len(WINDOWS)
    return total


def markdown(machine: dict[str, object], rows: Sequence[ScalingRow]) -> list[str]:
    found = {(row.layer, row.direction, row.tokens): row for row in rows}
    lines = []
    for tokens in sorted({row.tokens for row in rows}):
        cells = [str(tokens)]
        for direction in DIRECTIONS:
            for name in WINDOWS:
                row = found.get((name, direction, tokens))
                cells.append(
                    f"{studies.milliseconds(row.ms)}, {row.peak_mib:.4g} ({row.extra_mib:.3g})" if row else "-"
                )
            total, measured = projected(rows, direction, tokens), found.get(("stack", direction, tokens))
            shown = studies.milliseconds(total)
            beside = (
                f", measured {studies.milliseconds(measured.ms)} ({measured.ms / total:.3f}x)"
                if measured and total
                else ""
            )
            cells.append(
                shown + ("" if ("full", direction, tokens) in found or not total else " by the square") + beside
            )
        lines.append(cells)
    words = {"forward": "forward", "both": "forward + backward"}
    heads = [f"{words[d]}: {name}" for d in DIRECTIONS for name in (*WINDOWS, f"{LAYERS} layers, ms")]
    return [
        studies.where(machine, rows) + " A layer: ms, MiB at the peak (of them beside input and output).",
        studies.table(["tokens", *heads], lines),
    ]


def plot(path: Path, machine: dict[str, object], rows: Sequence[ScalingRow]) -> None:
    with studies.picture(path, 1, 2, (11, 4.4)) as (figure, axes):
        for panel, value, label in zip(axes[0], ("ms", "peak_mib"), ("ms", "MiB at the peak"), strict=True):
            for name in (*WINDOWS, "stack"):
                for direction, style in zip(DIRECTIONS, ("-", "--"), strict=True):
                    points = sorted(
                        (r.tokens, getattr(r, value)) for r in rows if (r.layer, r.direction) == (name, direction)
                    )
                    words = "forward + backward" if direction == "both" else direction
                    label_of = f"{f'{LAYERS} layers, run' if name == 'stack' else name}, {words}"
                    x, y = [n for n, _ in points], [v for _, v in points]
                    panel.plot(x, y, linestyle=style, marker="x" if name == "stack" else ".", label=label_of)
            panel.set(xscale="log", yscale="log", xlabel="tokens", ylabel=label)
            panel.grid(alpha=0.3)
        every = sorted({row.tokens for row in rows})
        for direction, style in zip(DIRECTIONS, ("-", "--"), strict=True):
            points = [(n, total) for n in every if (total := projected(rows, direction, n)) is not None]
            label_of = f"{LAYERS} layers, projected{', with backward' * (direction == 'both')}"
            axes[0][0].plot(*zip(*points, strict=True), color="black", linewidth=0.8, linestyle=style, label=label_of)
        axes[0][0].legend(fontsize=7)
        figure.suptitle(f"one sequence, bf16, with sinks, {machine.get('gpu') or machine['cpu']}")


def work(quick: bool) -> list[tuple[str, str, int]]:
    device = studies.device()
    found = []
    for (name, direction), most in MOST[device].items():
        tokens = QUICK if quick else LEAST[device]
        while tokens <= (QUICK if quick else most):
            found.append((name, direction, tokens))
            tokens *= 2
    return found + [("stack", direction, QUICK if quick else STACK[device]) for direction in DIRECTIONS]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    studies.add_output(parser, SUITE)


def run(options: argparse.Namespace) -> None:
    path, commit, rows = studies.place(SUITE, options), options.commit or harness.commit(), list[ScalingRow]()
    with studies.one_stream():
        for name, direction, tokens in harness.progress(work(options.quick), lambda item: " ".join(map(str, item))):
            if name == "stack":
                rows.append(stack(direction, tokens, LAYERS, commit))
            else:
                rows.append(layer(name, direction, tokens, commit))
            if studies.device() == "cuda":
                torch.cuda.empty_cache()
            if path:  # after each: a run may be cut short
                harness.save(path, rows, studies.machine())
    studies.show(markdown(studies.machine(), rows))
    studies.keep(path, rows)
