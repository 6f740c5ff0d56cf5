# SPDX-License-Identifier: Apache-2.0
"""A cache whose old pages lie in pinned host memory: how near a decode in one launch comes to the slower tier's time.

found are the parts that the kernel cuts by the lengths, resident are equal parts, as many as SMs hold blocks. bound is
what the slower tier takes alone, as no way of cutting can be faster. The first pages of each sequence are the host's.
Times are warm, of a node in a captured graph; each result is held against fp64.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.table import Table
from torch import Tensor

from . import decode, gpu, harness, report, studies
from .decode import COSINE, HEAD_DIM, NUM_KV_HEADS, PAGE_SIZE, Cache, DecodeCase

SUITE = "decode-tiers"
CASES = (DecodeCase("b1-131k", 1, 131072, 0), DecodeCase("b8-32k", 8, 32768, 0))
SHARES = (0.0, 1 / 256, 1 / 128, 3 / 256, 1 / 64, 3 / 128, 1 / 32, 1 / 16, 1 / 2)  # of a sequence's pages
RESIDENT = 4  # blocks an SM
PAGE_BYTES = PAGE_SIZE * NUM_KV_HEADS * HEAD_DIM * 2 * 2
NODES, ROUNDS = 5, 7
IMPLS = ("found", "resident")


@dataclass(frozen=True)
class TierRow:
    """One measurement; host_pages of a sequence's are the host's."""

    suite: str
    case: str
    host_pages: int
    pages: int
    impl: str
    num_splits: int
    us: float
    bound_us: float
    commit: str
    torch: str


@dataclass(frozen=True)
class Tiers:
    """A cache in two tiers: pages from `near` of them on are the host's."""

    whole: Cache
    k: Tensor
    v: Tensor
    k_host: Tensor
    v_host: Tensor
    block_table: Tensor

    @staticmethod
    def of(whole: Cache, host_pages: int) -> Tiers:
        table = whole.block_table.long()
        old, new = table[:, :host_pages].flatten(), table[:, host_pages:].flatten()
        k_host, v_host = (x[old].cpu().pin_memory() for x in (whole.k, whole.v))
        numbers = torch.arange(table.numel(), dtype=torch.int32, device=table.device)
        near, far = numbers[: new.numel()].view(len(table), -1), numbers[new.numel() :].view(len(table), -1)
        return Tiers(whole, whole.k[new], whole.v[new], k_host, v_host, torch.cat([far, near], 1))

    def decode(self, num_splits: int) -> Callable[[], Tensor]:
        at, host = self.whole, {"k_cache_host": self.k_host, "v_cache_host": self.v_host}
        call = (at.q, self.k, self.v, at.s_aux, at.cache_seqlens, self.block_table, None, -1, 0, num_splits, False)

        def run() -> Tensor:
            out, _ = torch.ops.sinkattn.flash_decode(*call, **host)
            assert isinstance(out, Tensor)
            return out

        return run


def bound_us(case: DecodeCase, host_pages: int, gbps: tuple[float, float]) -> float:
    """The slower of reading the host's pages and reading the others; gbps of the device and of the host."""
    old = case.batch * host_pages * PAGE_BYTES
    return max((case.cache_bytes - old) / gbps[0], old / gbps[1]) / 1e3


def time_us(call: Callable[[], Tensor]) -> float:
    return 1e3 * decode.warm_ms(call, ROUNDS, NODES)


def measure(case: DecodeCase, shares: tuple[float, ...], sms: int, commit: str) -> list[TierRow]:
    """Raises RuntimeError when a result is wrong."""
    whole, rows, pages = Cache.of(case), list[TierRow](), case.length // PAGE_SIZE
    few = DecodeCase("", 1, 16384, 0)  # enough for the host's bandwidth
    all_host = Tiers.of(Cache.of(few), few.length // PAGE_SIZE).decode(0)
    ours = time_us(Tiers.of(whole, 0).decode(0))
    gbps = case.cache_bytes / ours / 1e3, few.cache_bytes / time_us(all_host) / 1e3
    parts = max(1, RESIDENT * sms // (case.batch * NUM_KV_HEADS))
    for host_pages in dict.fromkeys(round(share * pages) for share in shares):
        tiers = Tiers.of(whole, host_pages)
        for impl, num_splits in zip(IMPLS, (0, parts), strict=True):
            call = tiers.decode(num_splits)
            cosine = decode.cosine_to_fp64(case, whole, call())
            if not cosine >= COSINE:
                raise RuntimeError(f"{case.id}, {host_pages} pages, {impl}: off from fp64, cosine {cosine}")
            times = harness.digits(time_us(call)), harness.digits(bound_us(case, host_pages, gbps))
            rows.append(TierRow(SUITE, case.id, host_pages, pages, impl, num_splits, *times, commit, torch.__version__))
    return rows


def by_cell(rows: list[TierRow]) -> dict[tuple[str, int], dict[str, TierRow]]:
    """Rows by (case, host_pages) and impl."""
    found: dict[tuple[str, int], dict[str, TierRow]] = {}
    for row in rows:
        found.setdefault((row.case, row.host_pages), {})[row.impl] = row
    return found


def table(rows: list[TierRow]) -> Table:
    shown = Table(title="us a call, and times the bound")
    for name in ("case", "pages of the host", "bound", *IMPLS):
        shown.add_column(name, no_wrap=True)
    for (case, host_pages), cell in by_cell(rows).items():
        bound = cell["found"].bound_us
        times = [f"{cell[impl].us:.1f}, {cell[impl].us / bound:.2f}" for impl in IMPLS]
        shown.add_row(case, f"{host_pages} of {cell['found'].pages}", f"{bound:.1f}", *times)
    return shown


def plot(path: Path, machine: dict[str, object], rows: Sequence[TierRow]) -> None:
    """Times over the bound against the share of the host."""
    names = list(dict.fromkeys(row.case for row in rows))
    with studies.picture(path, 1, len(names), (5.5 * len(names), 4)) as (figure, axes):
        for panel, name in zip(axes[0], names, strict=True):
            for impl in IMPLS:
                some = [row for row in rows if (row.case, row.impl) == (name, impl) and row.host_pages]
                shares = [100 * row.host_pages / row.pages for row in some]
                panel.plot(shares, [row.us / row.bound_us for row in some], marker="o", label=impl)
            panel.axhline(1, color="black", linewidth=0.8)
            panel.set(title=name, xscale="log", xlabel="% of the keys in host memory", ylabel="time over the bound")
            panel.grid(alpha=0.3)
            panel.legend(fontsize=8)
        figure.suptitle("decode from two tiers, 64:8 heads of 64, bf16; bound: the slower tier alone")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--cases", nargs="*", choices=[case.id for case in CASES], help="default: all of them")
    parser.add_argument(
        "--shares", nargs="*", type=float, help="of a sequence's pages in host memory; default: 0 to 1/2"
    )
    gpu.add_output(parser, SUITE)


def run(options: argparse.Namespace) -> None:
    gpu.require("tiers")
    commit, rows = options.commit or harness.commit(), list[TierRow]()
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    for case in CASES:
        if not options.cases or case.id in options.cases:
            rows += measure(case, tuple(options.shares or SHARES), sms, commit)
    report.show(table(rows))
    if options.json or not (options.cases or options.shares):
        gpu.keep(rows, SUITE, options.json)
