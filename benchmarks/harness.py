# SPDX-License-Identifier: Apache-2.0
"""Check, then time: a wrong peer is not timed and its row says so; if we are wrong the run ends.

Within a case all peers take turns, call by call, on the same threads, in an order shuffled each round, so that a busy
machine and a neighbour's caches affect all alike. The median of each is kept.
"""

import json
import random
import re
import subprocess
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate, takewhile
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import torch
from rich.progress import Progress, TimeElapsedColumn
from torch import Tensor

from sinkattn import _C, reference

from .cases import DTYPES, Case
from .peers import Absent, Peer

AnyRow = TypeVar("AnyRow")
Item = TypeVar("Item")
Name = TypeVar("Name")

ROOT = Path(__file__).parent.parent
RESULTS = Path(__file__).parent / "results"
MIN_ROUNDS, MAX_ROUNDS = 3, 30
PROBED = 16  # last rows, held against fp64
BLOCK_ROWS, BLOCK_SCORES = 1024, 1 << 25  # at most so many at once in fp64, where PROBED rows allow it
# Largest row_error. Rounding stays near half of it; one key too many or too few in a window of 128 moves a row by more.
TOLERANCE = {"fp32": 2e-5, "bf16": 5e-2, "fp16": 1e-2}


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

    @property
    def speed(self) -> float | None:
        return self.gflops


@dataclass(frozen=True)
class Inputs:
    """q, dout [batch, length, num_q_heads, head_dim], k, v with num_kv_heads; s_aux [num_q_heads] fp32.

    Packed sequences follow each other in the one row of tokens of a batch of 1.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    s_aux: Tensor

    @staticmethod
    def of(case: Case) -> "Inputs":
        generator = torch.Generator(case.device).manual_seed(0)

        def normal(*size: int) -> Tensor:
            return torch.randn(size, generator=generator, device=case.device)

        def rows(heads: int, length: int = case.length) -> Tensor:
            return normal(case.batch, length, heads, case.head_dim).to(DTYPES[case.dtype])

        q, (k, v) = rows(case.num_q_heads), (rows(case.num_kv_heads, case.k_length or case.length) for _ in range(2))
        s_aux = 1.5 * normal(case.num_q_heads)
        return Inputs(q, k, v, rows(case.num_q_heads), s_aux)


Call = Callable[[], tuple[Tensor, ...]]


def native(peer: Peer, inputs: Inputs) -> tuple[Tensor, ...]:
    """Copies of q, k, v, dout in the peer's layout."""
    tensors = (inputs.q, inputs.k, inputs.v, inputs.dout)
    return tuple(x.transpose(1, 2).contiguous() if peer.heads_first else x.clone() for x in tensors)


def prepare(peer: Peer, case: Case, direction: str, inputs: Inputs) -> Call:
    """The call to time: a forward gives (out,), the backward or both (dq, dk, dv), and ds_aux with a sink."""
    attention = peer.build(case, direction)
    q, k, v, dout = native(peer, inputs)
    s_aux = inputs.s_aux.to(peer.s_aux_dtype, copy=True)
    if direction == "forward":

        def forward() -> tuple[Tensor, ...]:
            with torch.no_grad():
                return (attention(q, k, v, s_aux),)

        return forward
    wanted = (q, k, v, s_aux) if peer.has_sink else (q, k, v)
    for x in (q, k, v, s_aux):
        x.requires_grad_()
    if direction == "both":
        return lambda: torch.autograd.grad(attention(q, k, v, s_aux), wanted, dout)
    out = attention(q, k, v, s_aux)
    return lambda: torch.autograd.grad(out, wanted, dout, retain_graph=True)


def in_common_layout(peer: Peer, results: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(x.transpose(1, 2) if peer.heads_first and x.dim() == 4 else x for x in results)


def _exact_rows(case: Case, direction: str, inputs: Inputs, has_sink: bool) -> tuple[Tensor, ...]:
    """out, or dq, dk, dv, of the last sequence's last rows and keys in fp64.

    A key's sums need every row that sees it, so rows are walked from the first that sees one of the last keys. With
    sink tokens, or a mask without a right side, these are all, and all rows and keys are compared.
    """
    q_len = case.lengths[-1]
    k_len = case.k_length or q_len
    probed = min(PROBED, q_len)
    everywhere = direction != "forward" and (case.right < 0 or case.num_sink_tokens > 0)
    walked = q_len if everywhere else probed if direction == "forward" else min(q_len, probed + case.right)
    bounded = case.window > 0 and case.right >= 0 and not case.num_sink_tokens
    last = min(k_len, walked + case.window - 1) if bounded else k_len  # keys that they may see

    def group(q: Tensor, dout: Tensor, k: Tensor, v: Tensor, s_aux: Tensor) -> tuple[Tensor, ...]:
        sinks = s_aux.double() if has_sink else None
        outs, dqs, dk, dv = [], [], *(torch.zeros_like(x, dtype=torch.double) for x in (k, v))
        for rows, keys, window_size in _blocks(case, walked, last):
            part = [q[:, rows].double(), *(x[:, keys].double() for x in (k, v))]
            for x in part:
                x.requires_grad_(direction != "forward")
            mask = {"window_size": window_size, "num_sink_tokens": case.num_sink_tokens}
            out = reference.flash_attn_func(*part, s_aux=sinks, **mask)  # type: ignore[arg-type]
            assert isinstance(out, Tensor)
            outs.append(out.detach())
            if direction != "forward":
                dq, *of_keys = torch.autograd.grad(out, part, dout[:, rows].double())
                dqs.append(dq)
                for whole, x in zip((dk, dv), of_keys, strict=True):
                    whole[:, keys] += x
        if direction == "forward":
            return (torch.cat(outs, 1),)
        exact = (torch.cat(dqs, 1), dk, dv)
        return exact if walked == q_len else tuple(x[:, -probed:] for x in exact)

    # One kv head at a time: of a million keys there is no room for more.
    parts = [x[:, -walked:].chunk(case.num_kv_heads, 2) for x in (inputs.q, inputs.dout)]
    parts += [x[:, -last:].chunk(case.num_kv_heads, 2) for x in (inputs.k, inputs.v)]
    groups = map(group, *parts, inputs.s_aux.chunk(case.num_kv_heads))
    return tuple(torch.cat(heads, 2) for heads in zip(*groups, strict=True))


def _blocks(case: Case, q_len: int, k_len: int) -> Iterator[tuple[slice, Tensor, tuple[int, int]]]:
    """Blocks of q_len rows whose scores fit: rows, the keys that they see, and the window as it is among these keys."""
    left, right = case.window_size
    seen = k_len if left < 0 or right < 0 else min(k_len, BLOCK_ROWS + left + right + case.num_sink_tokens)
    step = min(BLOCK_ROWS, max(PROBED, BLOCK_SCORES // (case.batch * case.group * seen)))
    for start in range(0, q_len, step):
        stop = min(start + step, q_len)
        first, final = start + k_len - q_len, stop - 1 + k_len - q_len  # where these rows stand among the keys
        begin = 0 if left < 0 else max(0, first - left)
        end = k_len if right < 0 else min(k_len, final + right + 1)
        after = end - 1 - final  # the reference puts the last row on the last key, which is so far behind it
        window_size = left if left < 0 else left + after, right if right < 0 else right - after
        sinks = torch.arange(min(case.num_sink_tokens, begin))
        yield slice(start, stop), torch.cat([sinks, torch.arange(begin, end)]).to(case.device), window_size


def row_error(got: Tensor, expected: Tensor) -> float:
    """Largest distance of two rows (last dimension), relative to the row's norm; inf for NaN.

    The norm counts as at least the median of all and the mean of the row's heads: in an early row, which sees few keys,
    a gradient may cancel in one head.
    """
    norm = expected.double().norm(dim=-1)
    heads = norm.mean(-1, keepdim=True) if norm.dim() else norm
    least = norm.maximum(heads).maximum(norm.median()).clamp(min=1e-30)
    return float(((got.double() - expected.double()).norm(dim=-1) / least).nan_to_num(nan=torch.inf).max())


def _fault(results: Sequence[Tensor], expected: Sequence[Tensor], what: str, tolerance: float) -> str | None:
    pairs = zip(results, expected, strict=True)
    worst = max(row_error(got[:, -want.shape[1] :] if want.dim() > 1 else got, want) for got, want in pairs)
    return f"off from {what} by {worst:.2g} of a row" if worst > tolerance else None


def faults(case: Case, direction: str, inputs: Inputs, results: dict[Peer, tuple[Tensor, ...]]) -> dict[Peer, str]:
    """Each peer's last rows against fp64, and all rows against the first right peer that computes the same."""
    found: dict[Peer, str] = {}
    for has_sink in (True, False):
        family = [peer for peer in results if peer.has_sink == has_sink]
        exact = _exact_rows(case, direction, inputs, has_sink) if family else ()
        first = None
        for peer in family:
            # ds_aux has no rows, and as peers take it from a bf16 output, no digits.
            compared = results[peer] if case.dtype == "fp32" else results[peer][: len(exact)]
            fault = _fault(compared[: len(exact)], exact, "fp64", TOLERANCE[case.dtype])
            if not fault and first:  # two that are right are at most twice as far from each other
                fault = _fault(compared, results[first][: len(compared)], first.name, 2 * TOLERANCE[case.dtype])
            if fault:
                found[peer] = fault
            first = first or (None if fault else peer)
    return found


def failure(error: Exception) -> str:
    """A failed peer's note: its message's first line, or the assertion that refused."""
    kind, words = type(error).__name__, str(error)
    if isinstance(error, AssertionError | NotImplementedError | ValueError):
        frames = traceback.extract_tb(error.__traceback__)
        said = words or (frames[-1].line if frames else "") or kind
        return f"refused: {said}".partition("\n")[0][:200]
    return f"failed: {kind}: {words}".partition("\n")[0][:200]


def why(peer: Peer, error: Exception) -> str:
    if isinstance(error, Absent):
        return str(error)
    if not peer.is_ours:
        return failure(error)
    if isinstance(error, NotImplementedError):
        return f"not compiled: {error}"
    raise error


def ready(case: Case, direction: str, peers: Sequence[Peer]) -> tuple[dict[Peer, Call], dict[Peer, str]]:
    """The calls to time, each made once and found right, and of the other peers why not."""
    inputs = Inputs.of(case)
    calls: dict[Peer, Call] = {}
    notes: dict[Peer, str] = {}
    results: dict[Peer, tuple[Tensor, ...]] = {}
    for peer in peers:
        try:
            call = prepare(peer, case, direction, inputs)
            results[peer] = in_common_layout(peer, call())
            calls[peer] = call
        except Exception as error:
            notes[peer] = why(peer, error)
    for peer, fault in faults(case, direction, inputs, results).items():
        if peer.is_ours:
            raise RuntimeError(f"{case.id} {direction}: {peer.name} is {fault}")
        del calls[peer]
        notes[peer] = f"wrong: {fault}"
    return calls, notes


def take_turns(calls: dict[Name, Call], seconds: float) -> dict[Name, float]:
    """Median time of each in ms, over rounds that go on until `seconds` are over."""
    times: dict[Name, list[float]] = {peer: [] for peer in calls}
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


def num_bytes(tensors: Iterable[Tensor]) -> int:
    return sum(x.numel() * x.element_size() for x in tensors)


def extra_mib(call: Call) -> float:
    """What a call on the CPU allocates at its peak beside what it returns."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        results = call()
    assert profile.profiler is not None
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    events.sort(key=lambda e: e.start_ns())
    peak = max(accumulate((e.nbytes() for e in events), initial=0))
    return digits(max(0, peak - num_bytes(results)) / 2**20)


def commit() -> str:
    """What rows name unless --commit is given: git's commit, "unknown" in a tree without git."""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "--short", "HEAD") + ("-dirty" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def digits(x: float) -> float:
    return float(f"{x:.4g}")


def measure(suite: str, case: Case, direction: str, peers: Sequence[Peer], seconds: float, commit: str) -> list[Row]:
    calls, notes = ready(case, direction, peers)
    times = take_turns(calls, seconds)

    def row(peer: Peer) -> Row:
        ms = times.get(peer)
        shown, gflops = (None, None) if ms is None else (digits(ms), digits(case.gflop(direction) / ms * 1e3))
        return Row(suite, case.id, direction, peer.name, shown, gflops, notes.get(peer, ""), commit, torch.__version__)

    return [row(peer) for peer in peers]


def walk(work: Sequence[tuple[Case, str]]) -> Iterator[tuple[Case, str]]:
    return progress(work, lambda item: f"{item[0].id} {item[1]}")


def progress(work: Sequence[Item], describe: Callable[[Item], str] = str) -> Iterator[Item]:
    with Progress(*Progress.get_default_columns(), TimeElapsedColumn()) as bar:
        task = bar.add_task("", total=len(work))
        for item in work:
            bar.update(task, description=describe(item))
            yield item
            bar.advance(task)
            if not bar.console.is_terminal:
                bar.console.print(f"{bar.tasks[0].elapsed:.1f} s: {describe(item)}")


def machine() -> dict[str, object]:
    """What the times depend on beside the code."""
    cpu = _C.query_cpu(torch.get_num_threads())
    return {"cpu": cpu["name"], "threads": torch.get_num_threads(), "build": _C.build_info()}


def results_path(suite: str, device: str) -> Path:
    return RESULTS / re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-") / f"{suite}.json"


def save(path: Path, rows: Sequence[Any], machine: dict[str, object]) -> None:
    """A line a row: "same" has what all rows share, "notes" the texts that the column note numbers, and a line leaves
    out its first values where they are those of the line before.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    kept = [asdict(row) for row in rows]
    notes = list(dict.fromkeys(row["note"] for row in kept if "note" in row))
    texts = [{name: json.dumps(value, separators=(",", ":")) for name, value in row.items()} for row in kept]
    names = list(kept[0]) if kept else []
    columns = [name for name in names if len({row[name] for row in texts}) > 1]
    same = {name: kept[0][name] for name in names if name not in columns}
    head = {"machine": machine, "same": same, "columns": columns} | ({"notes": notes} if "note" in columns else {})
    facts = "".join(f'"{name}": {json.dumps(value)},\n' for name, value in head.items())
    lines, before = [], [""] * len(columns)
    for row, text in zip(kept, texts, strict=True):
        values = [str(notes.index(row[name])) if name == "note" else text[name] for name in columns]
        shared = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(values, before, strict=True))))
        lines.append(f"[{','.join(values[shared:])}]")
        before = values
    path.write_text(f'{{\n{facts}"rows": [\n' + ",\n".join(lines) + "\n]\n}\n")


def load(path: Path, kind: Callable[..., AnyRow]) -> tuple[dict[str, object], list[AnyRow]]:
    kept = json.loads(path.read_text())
    columns, rows, values = kept["columns"], list[AnyRow](), list[Any]()
    for line in kept["rows"]:
        values = values[: len(columns) - len(line)] + line
        row = kept["same"] | dict(zip(columns, values, strict=True))
        if "notes" in kept:
            row["note"] = kept["notes"][row["note"]]
        rows.append(kind(**row))
    return kept["machine"], rows
