# SPDX-License-Identifier: Apache-2.0
"""Ten million keys of one sequence, one kv head, from a paged cache whose pages lie in shuffled order.

On a CPU as on a GPU. Out and the LSE of every query head are held against fp64, in blocks of keys.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

import sinkattn

from . import gpu, harness, simulate, studies
from .decode import COSINE

SUITE = "decode-paged"
KEYS, QUICK_KEYS = 10_000_000, 100_000
NUM_Q_HEADS, HEAD_DIM, PAGE_SIZE = 8, 64, 64
BLOCK = 1 << 19  # keys at once in fp64
ROUNDS = 5
LSE = 1e-5  # largest distance to fp64


@dataclass(frozen=True)
class PagedRow:
    """gbps: of K and V. lse_error and cosine are to fp64; num_splits is 0 where the kernel cuts by the length."""

    suite: str
    keys: int
    num_splits: int
    ms: float
    gbps: float
    lse_error: float
    cosine: float
    commit: str
    torch: str


@dataclass(frozen=True)
class Paged:
    """q [1, 1, q heads, head_dim]; K and V pages [pages, page_size, 1, head_dim], block_table [1, pages]."""

    q: Tensor
    k: Tensor
    v: Tensor
    s_aux: Tensor
    block_table: Tensor
    keys: int

    @staticmethod
    def of(keys: int, pages: int | None = None) -> Paged:
        """With fewer pages than the keys need, the table names each as often as the others."""
        device, needed = studies.device(), -(-keys // PAGE_SIZE)
        generator = torch.Generator(device).manual_seed(0)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, device=device, dtype=torch.bfloat16, generator=generator)

        shape = (needed if pages is None else pages, PAGE_SIZE, 1, HEAD_DIM)
        table = torch.randperm(needed, device=device, generator=generator) % shape[0]
        q, k, v, s_aux = (
            normal(1, 1, NUM_Q_HEADS, HEAD_DIM),
            normal(*shape),
            normal(*shape),
            normal(NUM_Q_HEADS).float(),
        )
        return Paged(q, k, v, s_aux, table.int()[None], keys)

    def decode(self) -> tuple[Tensor, Tensor]:
        return sinkattn.flash_attn_with_kvcache(
            self.q, self.k, self.v, cache_seqlens=self.keys, block_table=self.block_table, causal=True,
            s_aux=self.s_aux, return_lse=True,
        )  # fmt: skip

    def exact(self) -> tuple[Tensor, Tensor]:
        """out [q heads, head_dim] and lse [q heads] in fp64."""
        q, lse, out = (
            self.q[0, 0].double() * HEAD_DIM**-0.5,
            self.s_aux.double(),
            torch.zeros_like(self.q[0, 0]).double(),
        )
        for at in range(0, self.keys, BLOCK):
            table = self.block_table[0, at // PAGE_SIZE : (at + BLOCK) // PAGE_SIZE].long()
            k, v = (x[table].flatten(0, 2)[: self.keys - at].double() for x in (self.k, self.v))
            scores = q @ k.mT
            both = torch.logaddexp(lse, scores.logsumexp(-1))
            out = out * (lse - both).exp()[:, None] + (scores - both[:, None]).exp() @ v
            lse = both
        return out, lse


def time_ms(call: Callable[[], object]) -> float:
    if studies.device() == "cuda":
        return gpu.take_turns({"call": lambda: (call(), ())[1]}, 0.5)["call"]
    call()
    times = []
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        call()
        times.append(1e3 * (time.perf_counter() - begin))
    return median(times)


def plan(keys: int) -> dict[str, object]:
    """Of this CPU."""
    pages = -(-keys // PAGE_SIZE)
    return sinkattn.plan(
        "decode", dtype="bf16", batch=1, num_q_heads=NUM_Q_HEADS, num_kv_heads=1, head_dim=HEAD_DIM, q_len=1,
        k_len=pages * PAGE_SIZE, s_aux_dtype="fp32", page_size=PAGE_SIZE, num_pages=pages, window_size_right=0,
    )  # fmt: skip


def measure(keys: int, commit: str) -> list[PagedRow]:
    """Raises RuntimeError when the result is wrong."""
    paged = Paged.of(keys)
    (out, lse), (want, want_lse) = paged.decode(), paged.exact()
    lse_error = float((lse[0, :, 0].double() - want_lse).abs().max())
    cosine = float(torch.nn.functional.cosine_similarity(out[0, 0].double().flatten(), want.flatten(), dim=0))
    if not (cosine >= COSINE and lse_error <= LSE):
        raise RuntimeError(f"{SUITE}: off from fp64, cosine {cosine}, LSE by {lse_error}")
    size = harness.num_bytes((paged.k, paged.v))
    splits = 0 if studies.device() == "cuda" else int(str(plan(keys)["num_splits"]))
    taken = time_ms(paged.decode)
    ms, gbps, off = (harness.digits(x) for x in (taken, size / taken / 1e6, lse_error))
    return [PagedRow(SUITE, keys, splits, ms, gbps, off, cosine, commit, torch.__version__)]


def markdown(machine: dict[str, object], rows: Sequence[PagedRow]) -> list[str]:
    lines = [
        [
            str(row.keys),
            str(row.num_splits),
            f"{row.ms:.4g}",
            f"{row.gbps:.3g}",
            f"{row.lse_error:.1e}",
            f"{1 - row.cosine:.1e}",
        ]
        for row in rows
    ]
    one, heads, keys = simulate.h200(), simulate.Heads(NUM_Q_HEADS, 1, HEAD_DIM), rows[0].keys
    parts = one.best_parts(heads, 1, keys)
    us = simulate.closed_us(one, heads, 1, keys, 2 * parts)
    return [
        studies.where(machine, rows),
        studies.table(["keys", "parts", "ms", "GB/s", "LSE, off by", "out, 1 - cosine"], lines),
        f"Planned for an H200, not measured there: P* = {parts} parts; twice as many, two a multiprocessor, take "
        f"{us:.0f} us by the closed form of [the planner](planner.md#any-machine-python--m-benchmarks-planner).",
    ]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    studies.add_output(parser, SUITE)


def run(options: argparse.Namespace) -> None:
    keys = QUICK_KEYS if options.quick else KEYS
    needed = 2 * 2 * HEAD_DIM * keys + 2**30  # K and V, and a block of them in fp64
    if needed > studies.free_bytes():
        raise SystemExit(
            f"benchmarks paged: {keys} keys need {needed >> 30} GiB, {studies.free_bytes() >> 30} are free"
        )
    rows = measure(keys, options.commit or harness.commit())
    studies.show(markdown(studies.machine(), rows))
    studies.keep(studies.place(SUITE, options), rows)
