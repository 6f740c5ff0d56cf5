# SPDX-License-Identifier: Apache-2.0
"""Check, then time. A peer whose result is wrong ends the run: the time of a wrong kernel is no result.

Within a case all peers take turns, call by call, on the same threads, in an order shuffled each round: a busy moment of
the machine hits all of them, and so does what a neighbour leaves in the caches. The median of each is kept.
"""

from __future__ import annotations

import json
import random
import re
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch
from rich.progress import Progress, TimeElapsedColumn
from torch import Tensor

from sinkattn import _C, reference

from .cases import DTYPES, Case
from .peers import Absent, Peer

ROOT = Path(__file__).parent.parent
RESULTS = Path(__file__).parent / "results"
MIN_ROUNDS, MAX_ROUNDS = 3, 30
PROBED = 16  # last rows, held against fp64
# Largest distance of a row, relative to the row or to the median row. Rounding stays near half of it, and one key too
# many or too few in a window of 128 moves some row by more.
TOLERANCE = {"fp32": 2e-5, "bf16": 5e-2}


@dataclass(frozen=True)
class Row:
    """One measurement; ms and gflops are None where the peer is absent, and note says why."""

    suite: str
    case: str
    direction: str
    impl: str
    ms: float | None
    gflops: float | None
    note: str
    commit: str
    torch: str


@dataclass(frozen=True)
class Inputs:
    """q, dout [batch, length, num_q_heads, head_dim], k, v with num_kv_heads; s_aux [num_q_heads] fp32."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    s_aux: Tensor

    @staticmethod
    def of(case: Case) -> Inputs:
        generator = torch.Generator().manual_seed(0)

        def normal(heads: int) -> Tensor:
            size = (case.batch, case.length, heads, case.head_dim)
            return torch.randn(size, generator=generator).to(DTYPES[case.dtype])

        q, k, v = normal(case.num_q_heads), normal(case.num_kv_heads), normal(case.num_kv_heads)
        s_aux = 1.5 * torch.randn(case.num_q_heads, generator=generator)
        return Inputs(q, k, v, normal(case.num_q_heads), s_aux)


Call = Callable[[], tuple[Tensor, ...]]


def prepare(peer: Peer, case: Case, direction: str, inputs: Inputs) -> Call:
    """What is timed: the forward gives (out,), the backward alone (dq, dk, dv) and with a sink ds_aux."""
    attention = peer.build(case, direction)

    def native(tensor: Tensor) -> Tensor:
        return tensor.transpose(1, 2).contiguous() if peer.heads_first else tensor.clone()

    q, k, v, dout = map(native, (inputs.q, inputs.k, inputs.v, inputs.dout))
    s_aux = inputs.s_aux.clone()
    if direction == "forward":

        def forward() -> tuple[Tensor, ...]:
            with torch.no_grad():
                return (attention(q, k, v, s_aux),)

        return forward
    wanted = (q, k, v, s_aux) if peer.has_sink else (q, k, v)
    out = attention(*(x.requires_grad_() for x in (q, k, v, s_aux)))
    return lambda: torch.autograd.grad(out, wanted, dout, retain_graph=True)


def _in_common_layout(peer: Peer, results: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(x.transpose(1, 2) if peer.heads_first and x.dim() == 4 else x for x in results)


def _exact_rows(case: Case, direction: str, inputs: Inputs, has_sink: bool) -> tuple[Tensor, ...]:
    """out, or dq, dk, dv, of the last rows and keys in fp64: no other row sees those keys, so the sums are whole."""
    q, dout = (x[:, -PROBED:].double() for x in (inputs.q, inputs.dout))
    k, v = inputs.k.double(), inputs.v.double()
    for x in (q, k, v):
        x.requires_grad_(direction == "backward")
    s_aux = inputs.s_aux.double() if has_sink else None
    out = reference.flash_attn_func(q, k, v, window_size=case.window_size, s_aux=s_aux)
    assert isinstance(out, Tensor)
    if direction == "forward":
        return (out,)
    return tuple(x[:, -PROBED:] for x in torch.autograd.grad(out, (q, k, v), dout))


def row_error(got: Tensor, expected: Tensor) -> float:
    """Largest distance of two rows (last dimension), relative to the row's norm or the median norm; inf for NaN."""
    norm = expected.double().norm(dim=-1)
    distance = (got.double() - expected.double()).norm(dim=-1) / norm.clamp(min=norm.median().clamp(min=1e-30))
    return float(distance.nan_to_num(nan=torch.inf).max())


def check(case: Case, direction: str, inputs: Inputs, results: dict[Peer, tuple[Tensor, ...]]) -> None:
    """Every peer's last rows against fp64, and all of its rows against the first peer that computes the same."""
    for has_sink in (True, False):
        family = [peer for peer in results if peer.has_sink == has_sink]
        if not family:
            continue
        exact = _exact_rows(case, direction, inputs, has_sink)
        for peer in family:
            with_rows = results[peer][: len(exact)]  # ds_aux has none
            last_rows = zip((x[:, -PROBED:] for x in with_rows), exact, strict=True)
            all_rows = zip(results[peer], results[family[0]], strict=True)
            for what, pairs in (("fp64", last_rows), (family[0].name, all_rows)):
                worst = max(row_error(got, expected) for got, expected in pairs)
                if worst > TOLERANCE[case.dtype]:
                    raise RuntimeError(f"{case.id} {direction}: {peer.name} is off from {what} by {worst:.2g} of a row")


def take_turns(calls: dict[Peer, Call], seconds: float) -> dict[Peer, float]:
    """Median time of each in ms, over rounds that go on until `seconds` are over."""
    times: dict[Peer, list[float]] = {peer: [] for peer in calls}
    order = list(calls)
    shuffle = random.Random(0).shuffle
    begin = time.perf_counter()
    for turn in range(MAX_ROUNDS):
        if turn >= MIN_ROUNDS and time.perf_counter() - begin > seconds:
            break
        shuffle(order)
        for peer in order:
            start = time.perf_counter()
            calls[peer]()
            times[peer].append(1e3 * (time.perf_counter() - start))
    return {peer: median(values) for peer, values in times.items()}


def _commit() -> str:
    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()

    return git("rev-parse", "--short", "HEAD") + (
        "-dirty" if git("status", "--porcelain", "--untracked-files=no") else ""
    )


def _digits(x: float) -> float:
    return float(f"{x:.4g}")


def measure(suite: str, case: Case, direction: str, peers: Sequence[Peer], seconds: float, commit: str) -> list[Row]:
    inputs = Inputs.of(case)
    calls: dict[Peer, Call] = {}
    notes: dict[Peer, str] = {}
    for peer in peers:
        try:
            calls[peer] = prepare(peer, case, direction, inputs)
        except Absent as reason:
            notes[peer] = str(reason)
    # The checked call is the warm-up as well.
    check(case, direction, inputs, {peer: _in_common_layout(peer, call()) for peer, call in calls.items()})
    times = take_turns(calls, seconds)

    def row(peer: Peer) -> Row:
        ms = times.get(peer)
        shown, gflops = (None, None) if ms is None else (_digits(ms), _digits(case.gflop(direction) / ms * 1e3))
        return Row(suite, case.id, direction, peer.name, shown, gflops, notes.get(peer, ""), commit, torch.__version__)

    return [row(peer) for peer in peers]


def run(suite: str, cases: Sequence[Case], peers: Sequence[Peer], seconds: float) -> list[Row]:
    commit, rows = _commit(), []
    with Progress(*Progress.get_default_columns(), TimeElapsedColumn()) as progress:
        task = progress.add_task("", total=2 * len(cases))
        for case in cases:
            for direction in ("forward", "backward"):
                progress.update(task, description=f"{case.id} {direction}")
                rows += measure(suite, case, direction, peers, seconds, commit)
                progress.advance(task)
    return rows


def machine() -> dict[str, object]:
    """What the times depend on beside the code."""
    cpu = _C.query_cpu(torch.get_num_threads())
    return {"cpu": cpu["name"], "threads": torch.get_num_threads(), "build": _C.build_info()}


def results_path(suite: str) -> Path:
    name = f"{machine()['cpu']} {machine()['threads']} threads".lower()
    return RESULTS / re.sub(r"[^a-z0-9]+", "-", name).strip("-") / f"{suite}.json"


def save(path: Path, rows: Sequence[Row]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join("    " + json.dumps(asdict(row)) for row in rows)
    path.write_text(f'{{\n  "machine": {json.dumps(machine())},\n  "rows": [\n{lines}\n  ]\n}}\n')


def load(path: Path) -> tuple[dict[str, object], list[Row]]:
    content = json.loads(path.read_text())
    return content["machine"], [Row(**row) for row in content["rows"]]
