# SPDX-License-Identifier: Apache-2.0
"""Runs a case at a CPU level, or many random ones in processes of their own."""

import math
import multiprocessing as mp
import os
import platform
import random
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from queue import Empty
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .cases import DTYPES, Case, random_case
from .evaluation import Finding, Inputs, compare_all, evaluate, make_inputs

LEVEL_VARIABLE = "SINKATTN_CPU_LEVEL"
X86_LEVELS = ("avx2", "avx512", "avx512_bf16", "amx_bf16")
LEVELS = ("oracle", "scalar", *(("neon", "neon_bf16") if platform.machine() == "aarch64" else X86_LEVELS))


def run_ops(case: Case, t: Inputs, ops: ModuleType, backward: bool = True) -> dict[str, Tensor]:
    """out and lse, and the gradients unless the case decodes, by the functions of `ops`."""
    common: dict[str, Any] = {"softmax_scale": case.scale, "s_aux": t.s_aux, "num_sink_tokens": case.num_sink_tokens}
    common |= {"window_size": (case.left, case.right), "return_lse": "raw" if case.raw else True}
    if case.decode:
        if case.num_splits or case.invariant:
            decode = torch.ops.sinkattn.flash_decode_raw if case.raw else torch.ops.sinkattn.flash_decode
            out, *_, lse = decode(
                t.q, t.k, t.v, t.s_aux, t.cache_seqlens, t.block_table, case.scale, case.left, case.num_sink_tokens,
                case.num_splits, case.invariant,
            )  # fmt: skip
        else:
            common |= {"cache_seqlens": t.cache_seqlens, "block_table": t.block_table, "causal": True}
            out, lse = ops.flash_attn_with_kvcache(t.q, t.k, t.v, **common)
        return {"out": out.detach(), "lse": lse.detach()}
    if case.layout == "varlen":
        lengths = (t.cu_q, t.cu_k, max(case.q_lens), max(case.k_lens))
        out, lse = ops.flash_attn_varlen_func(t.q, t.k, t.v, *lengths, **common)
    else:
        out, lse = ops.flash_attn_func(t.q, t.k, t.v, **common)
    if not backward:
        return {"out": out.detach(), "lse": lse.detach()}
    wanted = {"dq": t.q, "dk": t.k, "dv": t.v}
    if t.s_aux is not None and not case.frozen:
        wanted["ds_aux"] = t.s_aux
    outputs, seeds = ((out,), (t.dout,)) if t.dlse is None else ((out, lse), (t.dout, t.dlse))
    grads = torch.autograd.grad(outputs, tuple(wanted.values()), seeds)
    return {"out": out.detach(), "lse": lse.detach(), **dict(zip(wanted, grads, strict=True))}


def check(case: Case, ops: ModuleType | None = None, backward: bool = True) -> list[Finding]:
    """Runs a case and compares every output with fp64; ops stands in for sinkattn's own functions."""
    if ops is None:
        import sinkattn as ops
    assert ops is not None
    t = make_inputs(case)
    return compare_all(
        case, t, run_ops(case, t, ops, backward), evaluate(case, t), evaluate(case, t, DTYPES[case.dtype])
    )


def assert_right(case: Case, ops: ModuleType | None = None, backward: bool = True) -> None:
    """Raises AssertionError, with what is wrong and how to run it alone, when check() finds a failure."""
    outcome = Outcome(case, os.environ.get(LEVEL_VARIABLE, "default"), check(case, ops, backward))
    assert not outcome.failures, str(outcome)


def assert_right_at(case: Case, levels: Iterable[str], backward: bool = True) -> None:
    """assert_right at each of these CPU levels, on one evaluation in fp64."""
    import sinkattn

    t = make_inputs(case)
    expected = evaluate(case, t), evaluate(case, t, DTYPES[case.dtype])
    failed = []
    for level in levels:
        with at_level(level):
            outcome = Outcome(case, level, compare_all(case, t, run_ops(case, t, sinkattn, backward), *expected))
        failed += [str(outcome)] if outcome.failures else []
    assert not failed, "\n".join(failed)


def available_levels() -> tuple[str, ...]:
    """The CPU levels of this machine, lowest first."""
    from sinkattn import _C

    with at_level(None):
        return LEVELS[: _C.query_cpu()["arch"] + 1]


@contextmanager
def at_level(level: str | None) -> Iterator[None]:
    """The CPU level inside the block; None is the machine's own."""
    before = os.environ.pop(LEVEL_VARIABLE, None)
    if level is not None:
        os.environ[LEVEL_VARIABLE] = level
    try:
        yield
    finally:
        os.environ.pop(LEVEL_VARIABLE, None)
        if before is not None:
            os.environ[LEVEL_VARIABLE] = before


class Outcome(NamedTuple):
    case: Case
    level: str
    findings: list[Finding]

    @property
    def failures(self) -> list[Finding]:
        return [f for f in self.findings if not f.ratio <= 1]

    def __str__(self) -> str:
        lines = [f"{LEVEL_VARIABLE}={self.level} python -m sinkattn._testing --case {self.case.id}"]
        return "\n    ".join(lines + [f"{f.name}: {f.text}" for f in self.failures])


def check_at(case: Case, level: str) -> Outcome:
    """check() with the CPU level forced; what it raises is a finding."""
    with at_level(level):
        try:
            return Outcome(case, level, check(case))
        except Exception as error:
            return Outcome(case, level, [Finding("raised", math.inf, f"{type(error).__name__}: {error}")])


def random_outcome(seed: int, index: int, levels: tuple[str, ...]) -> Outcome:
    case = random_case(f"{seed}/{index}")
    return check_at(case, random.Random(f"{seed}/{index}/level").choice(levels))


class Summary:
    def __init__(self) -> None:
        self.failed: list[Outcome] = []
        self.counts: Counter[str] = Counter()
        self.worst: dict[str, tuple[float, str]] = {}  # the largest error over allowed, and its case

    def add(self, outcome: Outcome) -> None:
        case = outcome.case
        kind = "decode" if case.decode else "forward and backward"
        self.counts.update((kind, case.dtype, case.layout, outcome.level, f"head_dim {case.head_dim}"))
        if outcome.failures:
            self.failed.append(outcome)
        for f in outcome.findings:
            name = f"{case.dtype} {f.name}"
            if f.ratio > self.worst.get(name, (-1.0, ""))[0]:
                self.worst[name] = (f.ratio, f"{outcome.level} {case.id}")


def _work(seed: int, first: int, count: int, step: int, current: Any, slot: int, results: Any) -> None:
    torch.set_num_threads(1)
    levels = available_levels()
    for index in range(first, count, step):
        current[slot] = index
        results.put((slot, random_outcome(seed, index, levels)))
    results.put((slot, None))


def run_random(seed: int, count: int, workers: int) -> Summary:
    """Runs cases 0 to count of a seed in processes of one thread; one that dies is a failure of the case it was at."""
    context = mp.get_context("spawn")
    current, results, summary = context.Array("q", workers), context.Queue(), Summary()
    levels = available_levels()

    def start(slot: int, first: int) -> Any:
        current[slot] = first
        process = context.Process(target=_work, args=(seed, first, count, workers, current, slot, results), daemon=True)
        process.start()
        return process

    running = {slot: start(slot, slot) for slot in range(workers)}
    begun = told = time.monotonic()
    done = 0
    while running:
        try:
            slot, outcome = results.get(timeout=1)
            if outcome is None:
                running.pop(slot).join()
                continue
            done += 1
            summary.add(outcome)
            if outcome.failures:
                print(f"FAILED {outcome}", flush=True)
        except Empty:
            for slot, process in list(running.items()):
                if process.exitcode is not None:
                    index = current[slot]
                    level = random.Random(f"{seed}/{index}/level").choice(levels)
                    died = Finding("died", math.inf, f"the process ended with code {process.exitcode}")
                    outcome = Outcome(random_case(f"{seed}/{index}"), level, [died])
                    print(f"FAILED {outcome}", flush=True)
                    summary.add(outcome)
                    running[slot] = start(slot, index + workers)
        if time.monotonic() - told > 10:
            told = time.monotonic()
            rate = done / (told - begun)
            print(f"{done} of {count} cases, {rate:.0f} a second, {len(summary.failed)} failed", flush=True)
    return summary
