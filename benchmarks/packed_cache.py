# SPDX-License-Identifier: Apache-2.0
"""Packed rows over a paged cache beside packed keys, by page size; and a mixed batch beside its parts.

Each paged result must have the bits of the packed one before either is timed. The mixed batch has chunks of a prefill
and single rows, all with as many keys; its parts are the chunks alone and the single rows alone, in calls of their own.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

import sinkattn

from . import cases, harness, studies

SUITE = "packed-cache"
PAGE_SIZES = (1, 16, 64, 256)
MIXED_PAGE_SIZES = (16, 64)
SECONDS = {"cuda": 0.25, "cpu": 1.0}


@dataclass(frozen=True)
class Batch:
    """Rows and keys of each sequence; window 0 is none."""

    name: str
    q_lens: tuple[int, ...]
    k_lens: tuple[int, ...]
    num_q_heads: int = 64
    num_kv_heads: int = 8
    head_dim: int = 64
    window: int = 0


@dataclass(frozen=True)
class PackedCacheRow:
    """ms over page_size's pages; packed_ms: over packed keys; of a mixed batch, its two parts' times together."""

    suite: str
    case: str
    page_size: int
    ms: float
    packed_ms: float
    commit: str
    torch: str


def batches() -> list[Batch]:
    lens = tuple(cases.packed_lengths())
    return [
        Batch("76 sequences, 65536 tokens, d64", lens, lens),
        Batch("76 sequences, 65536 tokens, d128", lens, lens, 32, 8, 128),
        Batch("76 sequences, 65536 tokens, d64, w128", lens, lens, window=128),
        Batch("8 chunks of 512 of 8192, d64", (512,) * 8, (8192,) * 8),
        Batch("8 chunks of 512 of 8192, d128", (512,) * 8, (8192,) * 8, 32, 8, 128),
    ]


MIXED = Batch("mixed: 8 chunks of 512, 120 rows, of 8192", (512,) * 8 + (1,) * 120, (8192,) * 128)
QUICK = [Batch("3 sequences", (20, 1, 9), (40, 30, 9), 8, 2), Batch("w16", (20, 9), (40, 9), 8, 2, window=16)]
QUICK_MIXED = Batch("mixed: 2 chunks of 20, 3 rows, of 60", (20, 20, 1, 1, 1), (60,) * 5, 8, 2)


def int32(values: Sequence[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=studies.device())


def offsets(lens: Sequence[int]) -> Tensor:
    return int32([0, *torch.tensor(lens).cumsum(0).tolist()])


@dataclass(frozen=True)
class Inputs:
    batch: Batch
    q: Tensor
    k: Tensor
    v: Tensor
    s_aux: Tensor

    @staticmethod
    def of(batch: Batch) -> Inputs:
        device = studies.device()
        generator = torch.Generator(device).manual_seed(0)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, device=device, dtype=torch.bfloat16, generator=generator)

        k, v = (normal(sum(batch.k_lens), batch.num_kv_heads, batch.head_dim) for _ in range(2))
        q = normal(sum(batch.q_lens), batch.num_q_heads, batch.head_dim)
        return Inputs(batch, q, k, v, normal(batch.num_q_heads).float())

    def packed(self) -> Callable[[], Tensor]:
        bounds = offsets(self.batch.q_lens), offsets(self.batch.k_lens)
        return lambda: self._attend(self.q, self.k, self.v, *bounds)

    def paged(self, page_size: int, first: int = 0, last: int | None = None) -> Callable[[], Tensor]:
        """Sequences first to last, from pages that lie in shuffled order."""
        batch, rows = self.batch, offsets(self.batch.q_lens).tolist()
        chosen = slice(first, len(batch.k_lens) if last is None else last)
        counts = [-(-n // page_size) for n in batch.k_lens]
        order = torch.randperm(sum(counts), device=self.q.device).int().split(counts)
        table = torch.nn.utils.rnn.pad_sequence(list(order), batch_first=True)
        pages = [x.new_zeros(sum(counts), page_size, *x.shape[1:]) for x in (self.k, self.v)]
        for to, x in zip(pages, (self.k, self.v), strict=True):
            for keys, own in zip(x.split(list(batch.k_lens)), order, strict=True):
                at = torch.arange(len(keys), device=x.device)
                to[own.long()[at // page_size], at % page_size] = keys
        q = self.q[rows[first] : rows[chosen.stop]]
        bounds, used = offsets(batch.q_lens[chosen]), int32(batch.k_lens[chosen])
        return lambda: self._attend(q, *pages, bounds, seqused_k=used, block_table=table[chosen])

    def _attend(self, *tensors: Tensor, **cache: Tensor) -> Tensor:
        left = self.batch.window - 1 if self.batch.window else -1
        return sinkattn.flash_attn_varlen_func(
            *tensors, causal=True, window_size=(left, 0), s_aux=self.s_aux, **cache  # type: ignore[arg-type, misc]
        )  # fmt: skip


def _timed(calls: dict[str, Callable[[], Tensor]], seconds: float) -> dict[str, float]:
    taken = studies.take_turns({name: lambda call=call: (call(), ())[1] for name, call in calls.items()}, seconds)
    return {name: harness.digits(ms) for name, ms in taken.items()}


def measure(batch: Batch, page_sizes: Sequence[int], seconds: float, commit: str) -> list[PackedCacheRow]:
    """Raises RuntimeError where bits differ."""
    inputs, packed = Inputs.of(batch), "packed"
    calls = {packed: inputs.packed()} | {str(size): inputs.paged(size) for size in page_sizes}
    want = calls[packed]()
    for size in page_sizes:
        if not torch.equal(calls[str(size)](), want):
            raise RuntimeError(f"{SUITE}: {batch.name}, pages of {size}: not the bits of packed keys")
    ms = _timed(calls, seconds)
    return [
        PackedCacheRow(SUITE, batch.name, size, ms[str(size)], ms[packed], commit, torch.__version__)
        for size in page_sizes
    ]


def measure_mixed(batch: Batch, page_size: int, seconds: float, commit: str) -> PackedCacheRow:
    inputs, single = Inputs.of(batch), batch.q_lens.index(1)
    calls = {
        "mixed": inputs.paged(page_size),
        "chunks": inputs.paged(page_size, 0, single),
        "rows": inputs.paged(page_size, single),
    }
    ms = _timed(calls, seconds)
    parts = harness.digits(ms["chunks"] + ms["rows"])
    return PackedCacheRow(SUITE, batch.name, page_size, ms["mixed"], parts, commit, torch.__version__)


def markdown(machine: dict[str, object], rows: Sequence[PackedCacheRow]) -> list[str]:
    lines = [
        [row.case, str(row.page_size), studies.milliseconds(row.packed_ms), studies.milliseconds(row.ms),
         f"{row.ms / row.packed_ms:.3f}"]
        for row in rows
    ]  # fmt: skip
    heads = ["case", "page size", "packed keys, or the two parts, ms", "pages, ms", "pages over packed"]
    return [studies.where(machine, rows), studies.table(heads, lines)]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    studies.add_output(parser, SUITE)


def run(options: argparse.Namespace) -> None:
    seconds = 0.0 if options.quick else SECONDS[studies.device()]
    commit, rows = options.commit or harness.commit(), list[PackedCacheRow]()
    with studies.one_stream():
        for batch in QUICK if options.quick else batches():
            rows += measure(batch, PAGE_SIZES, seconds, commit)
        mixed = QUICK_MIXED if options.quick else MIXED
        rows += [measure_mixed(mixed, size, seconds, commit) for size in MIXED_PAGE_SIZES]
    studies.show(markdown(studies.machine(), rows))
    studies.keep(studies.place(SUITE, options), rows)
