# SPDX-License-Identifier: Apache-2.0
"""Errors of out, LSE, dq, dk, dv and ds_aux against fp64, over the strength of the sink, of sinkattn and of its peers.

2048 tokens in bf16, full causal and a window of 128. An error is the norm of the difference over the norm of what fp64
gives; of ds_aux, a sum that cancels, the largest difference over the sum of its absolute terms. eager is PyTorch's
formula as models write it, flex flex_attention rescaled by its LSE; fa2 and SDPA have no sink.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import torch
from torch import Tensor

import sinkattn
from sinkattn import reference

from . import harness, peers, studies
from .cases import Case
from .harness import Inputs
from .peers import Absent, Attention, Peer

SUITE = "accuracy"
LENGTH, QUICK_LENGTH = 2048, 160
STRENGTHS = (None, -8.0, -4.0, 0.0, 3.0, 8.0, 20.0, 50.0, 100.0)  # None: no sink
QUICK_STRENGTHS = (None, -8.0, 3.0)
QUANTITIES = ("out", "lse", "dq", "dk", "dv", "ds_aux")


@dataclass(frozen=True)
class AccuracyRow:
    """error is None where it was not measured, and note says why."""

    suite: str
    case: str
    s_aux: float | None
    impl: str
    quantity: str
    error: float | None
    note: str
    commit: str
    torch: str


def _flex(case: Case, direction: str) -> Attention:
    if case.device == "cpu":
        raise Absent("not supported: on a CPU it gives no LSE, and no backward")
    torch._dynamo.reset()  # else the shapes of all cases count against one recompilation limit
    return peers.flex_with_sink(case)


def _named(name: str, pool: Sequence[Peer]) -> Peer:
    return next(peer for peer in pool if peer.name == name)


WITH_SINK = (peers.OURS, Peer("flex", _flex, has_sink=True), _named("eager", peers.CPU))
WITHOUT = {
    "cuda": (peers.OURS_WITHOUT, _named("fa2", peers.PREFILL)),
    "cpu": (peers.OURS_WITHOUT, _named("sdpa", peers.CPU)),
}


def cases(length: int) -> list[Case]:
    return [studies.gpt_oss(length, window) for window in (128, 0)]


def exact(case: Case, inputs: Inputs, s_aux: Tensor | None) -> tuple[dict[str, Tensor], Tensor]:
    """Everything in fp64, of the inputs as rounded; and of ds_aux the sum of absolute terms [num_q_heads]."""
    q, k, v = (x.double().requires_grad_() for x in (inputs.q, inputs.k, inputs.v))
    s = None if s_aux is None else s_aux.double().requires_grad_()
    out, lse = reference.flash_attn_func(q, k, v, window_size=case.window_size, s_aux=s, return_lse=True)
    wanted = (q, k, v) if s is None else (q, k, v, s)
    grads = torch.autograd.grad(out, wanted, inputs.dout.double())
    found = dict(zip(("dq", "dk", "dv", "ds_aux"), grads, strict=False)) | {"out": out.detach(), "lse": lse.detach()}
    if s is None:
        return found, lse.new_zeros(())
    delta = (inputs.dout.double() * found["out"]).sum(-1).transpose(1, 2)  # [batch, num_q_heads, length]
    return found, ((s.detach()[:, None] - found["lse"]).exp() * delta).abs().sum((0, 2))


def error(quantity: str, got: Tensor, want: Tensor, terms: Tensor) -> float:
    """inf for NaN."""
    distance = got.double() - want
    value = (distance.abs() / terms).max() if quantity == "ds_aux" else distance.norm() / want.norm()
    return harness.digits(float(value.nan_to_num(nan=torch.inf)))


def results(peer: Peer, case: Case, inputs: Inputs, attention: Attention) -> dict[str, Tensor]:
    """What the peer computes, by quantity."""
    q, k, v, dout = harness.native(peer, inputs)
    s_aux = inputs.s_aux.to(peer.s_aux_dtype, copy=True)
    wanted = (q, k, v, s_aux) if peer.has_sink else (q, k, v)
    for x in wanted:
        x.requires_grad_()
    out = attention(q, k, v, s_aux)
    grads = harness.in_common_layout(peer, torch.autograd.grad(out, wanted, dout))
    (out,) = harness.in_common_layout(peer, (out.detach(),))
    found = {"out": out, **dict(zip(("dq", "dk", "dv", "ds_aux"), grads, strict=False))}
    if peer.is_ours:
        sinks = inputs.s_aux if peer.has_sink else None
        q, k, v = inputs.q, inputs.k, inputs.v
        found["lse"] = sinkattn.flash_attn_func(q, k, v, window_size=case.window_size, s_aux=sinks, return_lse=True)[1]
    return found


def measure(case: Case, strengths: Sequence[float | None], commit: str) -> list[AccuracyRow]:
    rows = []
    for who, over in ((WITHOUT[case.device], (None,)), (WITH_SINK, strengths[1:])):
        built: dict[Peer, Attention] = {}
        notes: dict[Peer, str] = {}
        for peer in who:
            try:
                built[peer] = peer.build(case, "both")
            except Absent as reason:
                notes[peer] = str(reason)
        for s in over:
            inputs = Inputs.of(case)
            inputs = replace(inputs, s_aux=torch.full_like(inputs.s_aux, 0.0 if s is None else s))
            want, terms = exact(case, inputs, None if s is None else inputs.s_aux)
            for peer in who:
                got: dict[str, Tensor] = {}
                if peer in built:
                    try:
                        got = results(peer, case, inputs, built[peer])
                    except Exception as failed:
                        notes[peer] = harness.why(peer, failed)
                for quantity in QUANTITIES:
                    if quantity in want and (quantity in got or peer in notes):
                        value = error(quantity, got[quantity], want[quantity], terms) if quantity in got else None
                        said = (value, notes.get(peer, ""), commit, torch.__version__)
                        rows.append(AccuracyRow(SUITE, case.id, s, peer.name, quantity, *said))
    return rows


def _name(s_aux: float | None) -> str:
    return "none" if s_aux is None else f"{s_aux:g}"


def markdown(machine: dict[str, object], rows: Sequence[AccuracyRow]) -> list[str]:
    shown = [studies.where(machine, rows)]
    for case in dict.fromkeys(row.case for row in rows):
        of = {(row.s_aux, row.impl, row.quantity): row.error for row in rows if row.case == case}
        lines = []
        for s_aux, impl in dict.fromkeys((s, name) for s, name, _ in of):
            values = [of.get((s_aux, impl, quantity)) for quantity in QUANTITIES]
            if any(value is not None for value in values):
                lines.append([_name(s_aux), impl, *("-" if value is None else f"{value:.1e}" for value in values)])
        shown.append(studies.table([f"{case}: s_aux", "", *QUANTITIES], lines))
    notes = dict.fromkeys(f"{row.impl}: {row.note}." for row in rows if row.note)
    return [*shown, *notes]


def plot(path: Path, machine: dict[str, object], rows: Sequence[AccuracyRow]) -> None:
    every = list(dict.fromkeys(row.case for row in rows))
    names = [_name(s) for s in STRENGTHS if s is not None]
    with studies.picture(path, 2, len(QUANTITIES) // 2, (10, 7)) as (figure, axes):
        for panel, quantity in zip(axes.flat, QUANTITIES, strict=True):
            for (case, style), (i, peer) in product(zip(every, ("-", ":"), strict=True), enumerate(WITH_SINK)):
                found = {
                    _name(row.s_aux): row.error
                    for row in rows
                    if (row.case, row.impl, row.quantity) == (case, peer.name, quantity) and row.error
                }
                x = [n for n, name in enumerate(names) if name in found]
                label = f"{peer.name}, {case.split('-')[0]}"
                panel.plot(x, [found[names[n]] for n in x], style, color=f"C{i}", marker=".", label=label)
            panel.set_xticks(range(len(names)), names)
            panel.set(title=quantity, yscale="log", xlabel="s_aux")
            panel.grid(alpha=0.3)
        axes[0][0].legend(fontsize=8)
        figure.suptitle(f"error against fp64, bf16, {machine.get('gpu') or machine['cpu']}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    studies.add_output(parser, SUITE)


def run(options: argparse.Namespace) -> None:
    path, commit, rows = studies.place(SUITE, options), options.commit or harness.commit(), list[AccuracyRow]()
    for case in harness.progress(cases(QUICK_LENGTH if options.quick else LENGTH), lambda case: case.id):
        rows += measure(case, QUICK_STRENGTHS if options.quick else STRENGTHS, commit)
        if path:
            harness.save(path, rows, studies.machine())
    studies.show(markdown(studies.machine(), rows))
    studies.keep(path, rows)
