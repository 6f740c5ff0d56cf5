# SPDX-License-Identifier: Apache-2.0
"""Decode on a CUDA device against its targets: bf16, with a sink, gpt-oss's heads and MiMo-V2-Flash's; FlashInfer where
it is installed.

Warm: a node's time in a captured graph of 50, as a generating model sees it. Cold: one call after a write that empties
the L2 of the cache. Every result is held against fp64 before it is timed.
"""

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

import sinkattn
from sinkattn import _C, reference

from . import gpu, harness
from .gpu import FLUSH_BYTES
from .harness import digits
from .peers import Absent

SUITE = "decode"
NUM_Q_HEADS, NUM_KV_HEADS, HEAD_DIM, PAGE_SIZE = 64, 8, 64, 64
NODES = 50
COSINE = 0.99999  # to fp64


@dataclass(frozen=True)
class DecodeCase:
    """One row a sequence, against `length` keys in use each; window 0: all of them. us: what performance asks for."""

    id: str
    batch: int
    length: int
    window: int
    target_us: float | None = None
    goal_us: float | None = None
    num_kv_heads: int = NUM_KV_HEADS
    widths: tuple[int, int] = (HEAD_DIM, HEAD_DIM)  # of keys, of values

    @property
    def cache_bytes(self) -> int:
        seen = self.batch * min(self.length, self.window or self.length)
        return seen * self.num_kv_heads * sum(self.widths) * 2


def _of_mimo(name: str, batch: int, length: int) -> tuple[DecodeCase, ...]:
    return tuple(
        DecodeCase(f"{name}-192-{heads}", batch, length, 0, num_kv_heads=heads, widths=(192, 128)) for heads in (4, 8)
    )


CASES = (
    DecodeCase("b1-1k", 1, 1024, 0, 6.5, 4.3),
    DecodeCase("b1-4k", 1, 4096, 0, 8.5, 5.8),
    DecodeCase("b1-8k", 1, 8192, 0, 10.0, 7.0),
    DecodeCase("b1-131k", 1, 131072, 0, 67, 63),
    DecodeCase("b1-1m", 1, 1 << 20, 0),
    DecodeCase("b8-32k", 8, 32768, 0, 130, 124),
    DecodeCase("b32-8k", 32, 8192, 0, 126, 122),
    DecodeCase("b64-8k", 64, 8192, 0, 245, 238),
    DecodeCase("b1-w128", 1, 8192, 128, 5.0, 2.8),
    DecodeCase("b64-w128", 64, 8192, 128, 10, 5.5),
    DecodeCase("b256-w128", 256, 8192, 128, 30, 20),
    *_of_mimo("b1-8k", 1, 8192),
    *_of_mimo("b8-8k", 8, 8192),
    *_of_mimo("b32-8k", 32, 8192),
    *_of_mimo("b1-131k", 1, 131072),
    DecodeCase("b64-w128-192-8", 64, 8192, 128, widths=(192, 128)),
)


@dataclass(frozen=True)
class DecodeRow:
    """One measurement in ms; gbps: bytes of seen keys and values over the warm time. None where the peer is absent."""

    suite: str
    case: str
    direction: str
    impl: str
    ms: float | None
    ms_cold: float | None
    gbps: float | None
    target_ms: float | None
    goal_ms: float | None
    note: str
    commit: str
    torch: str


@dataclass(frozen=True)
class Cache:
    """A paged cache whose pages lie in shuffled order; q [batch, 1, num_q_heads, head_dim]."""

    q: Tensor
    k: Tensor
    v: Tensor
    s_aux: Tensor
    cache_seqlens: Tensor
    block_table: Tensor

    @staticmethod
    def of(case: DecodeCase) -> "Cache":
        generator = torch.Generator("cuda").manual_seed(0)
        pages = case.batch * case.length // PAGE_SIZE

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, device="cuda", dtype=torch.bfloat16, generator=generator)

        q = normal(case.batch, 1, NUM_Q_HEADS, case.widths[0])
        k, v = (normal(pages, PAGE_SIZE, case.num_kv_heads, width) for width in case.widths)
        order = torch.randperm(pages, device="cuda", generator=generator).int()
        s_aux = 1.5 * torch.randn(NUM_Q_HEADS, device="cuda", generator=generator)
        lengths = torch.full((case.batch,), case.length, dtype=torch.int32, device="cuda")
        return Cache(q, k, v, s_aux, lengths, order.view(case.batch, -1))


Call = Callable[[], Tensor]


def _plan(case: DecodeCase, num_splits: int) -> dict[str, object]:
    return sinkattn.plan(
        "decode", _C.query_cuda(torch.cuda.current_device()), dtype="bf16", batch=case.batch, num_q_heads=NUM_Q_HEADS,
        num_kv_heads=case.num_kv_heads, head_dim=case.widths[0], head_dim_v=case.widths[1], q_len=1, k_len=case.length,
        s_aux_dtype="fp32", page_size=PAGE_SIZE, num_pages=case.batch * case.length // PAGE_SIZE,
        window_size_left=case.window - 1, window_size_right=0, num_splits=num_splits,
    )  # fmt: skip


def prepare(case: DecodeCase, cache: Cache, num_splits: int = 0) -> Call:
    workspace_bytes = _plan(case, num_splits)["workspace_bytes"]
    assert isinstance(workspace_bytes, int)
    scratch = torch.empty(workspace_bytes, dtype=torch.uint8, device="cuda")
    out = cache.q.new_empty(*cache.q.shape[:3], case.widths[1])
    lse = torch.empty(case.batch, NUM_Q_HEADS, 1, device="cuda")
    options = (cache.cache_seqlens, cache.block_table, None, case.window - 1, 0, num_splits, False)

    def call() -> Tensor:
        torch.ops.sinkattn.flash_decode_out(cache.q, cache.k, cache.v, cache.s_aux, *options, out, lse, scratch)
        return out

    return call


def _xqa(case: DecodeCase, cache: Cache) -> Call:
    try:
        from flashinfer.decode import trtllm_batch_decode_with_kv_cache
    except ImportError as error:
        raise Absent("not installed: flashinfer") from error
    workspace = torch.zeros(128 << 20, dtype=torch.uint8, device="cuda")
    out = torch.empty_like(cache.q)
    if case.widths != (HEAD_DIM, HEAD_DIM):
        raise Absent("it has values as wide as keys")
    sinks = [cache.s_aux.view(NUM_KV_HEADS, -1)]

    def call() -> Tensor:
        trtllm_batch_decode_with_kv_cache(
            cache.q[:, 0], (cache.k, cache.v), workspace, cache.block_table, cache.cache_seqlens, case.length,
            HEAD_DIM**-0.5, 1.0, case.window - 1, out=out[:, 0], sinks=sinks, kv_layout="NHD", backend="xqa",
        )  # fmt: skip
        return out

    return call


PEERS: dict[str, Callable[[DecodeCase, Cache], Call]] = {
    "sinkattn": prepare,
    "sinkattn-unsplit": lambda case, cache: prepare(case, cache, num_splits=1),
    "xqa": _xqa,
}


def cosine_to_fp64(case: DecodeCase, cache: Cache, out: Tensor) -> float:
    """Of the first sequence and kv head and of the last, the worse."""
    seen, group = min(case.length, case.window or case.length), NUM_Q_HEADS // case.num_kv_heads
    worst = 1.0
    for b, head in {(0, 0), (case.batch - 1, case.num_kv_heads - 1)}:
        heads, table = slice(group * head, group * (head + 1)), cache.block_table[b].long()
        k, v = (x[table, :, head].reshape(1, -1, 1, x.shape[-1])[:, -seen:].double() for x in (cache.k, cache.v))
        q, s_aux = cache.q[b : b + 1, :, heads].double(), cache.s_aux[heads].double()
        want = reference.flash_attn_func(q, k, v, causal=True, s_aux=s_aux)
        assert isinstance(want, Tensor)
        both = out[b, :, heads].double().flatten(), want.flatten()
        worst = min(worst, float(torch.nn.functional.cosine_similarity(*both, dim=0)))
    return worst


def replay_ms(graph: torch.cuda.CUDAGraph, rounds: int, prepare: Callable[[], object] = lambda: None) -> float:
    """Median over replays, each behind what `prepare` enqueues."""
    times: list[float] = []
    for _ in range(rounds):
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        prepare()
        before.record()
        graph.replay()
        after.record()
        torch.cuda.synchronize()
        times.append(before.elapsed_time(after))
    return median(times)


def captured(call: Call, nodes: int) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):  # captured where it was warmed up
        call()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(nodes):
            call()
    graph.replay()
    return graph


def warm_ms(call: Call, rounds: int, nodes: int = NODES) -> float:
    """Of one node in a graph of `nodes`, median over replays."""
    return replay_ms(captured(call, nodes), rounds) / nodes


def cold_ms(call: Call, rounds: int) -> float:
    """Of one captured call behind a write of FLUSH_BYTES, median."""
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return replay_ms(graph, rounds, flush.zero_)


def measure(case: DecodeCase, peers: dict[str, Callable[[DecodeCase, Cache], Call]], commit: str) -> list[DecodeRow]:
    cache, rows = Cache.of(case), []
    for impl, build in peers.items():
        warm = cold = gbps = None
        note = ""
        try:
            call = build(case, cache)
            cosine = cosine_to_fp64(case, cache, call())
            if not cosine >= COSINE:
                raise RuntimeError(f"{case.id}: {impl} is off from fp64, cosine {cosine}")
            warm, cold = (digits(time(call, 30)) for time in (warm_ms, cold_ms))
            gbps = digits(case.cache_bytes / warm / 1e6)
        except Absent as reason:
            note = str(reason)
        except Exception as error:
            if impl.startswith("sinkattn"):
                raise
            note = harness.failure(error)
        target, goal = (None if us is None else us / 1e3 for us in (case.target_us, case.goal_us))
        measured = (warm, cold, gbps, target, goal, note)
        rows.append(DecodeRow(SUITE, case.id, "decode", impl, *measured, commit, torch.__version__))
    return rows


def table(rows: list[DecodeRow]) -> Table:
    shown = Table(title="us a call: in a graph, cold L2 (GB/s of seen keys and values)")
    shown.caption = "\n".join(dict.fromkeys(f"{row.case}, {row.impl}: {row.note}" for row in rows if row.note))
    for name in ("case", "target", "goal", *dict.fromkeys(row.impl for row in rows)):
        shown.add_column(name, no_wrap=True)
    for case in dict.fromkeys(row.case for row in rows):
        found = [row for row in rows if row.case == case]
        limits = ["-" if ms is None else f"{1e3 * ms:g}" for ms in (found[0].target_ms, found[0].goal_ms)]
        cells = [
            "-" if row.ms is None else f"{1e3 * row.ms:.1f}, {1e3 * (row.ms_cold or math.nan):.1f} ({row.gbps:.0f})"
            for row in found
        ]
        shown.add_row(case, *limits, *cells)
    return shown


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--cases", nargs="*", choices=[case.id for case in CASES], help="default: all of them")
    parser.add_argument("--impls", nargs="*", choices=list(PEERS), help="default: all of them")
    gpu.add_output(parser, SUITE)


def run(options: argparse.Namespace) -> None:
    gpu.require("decode")
    commit, rows = options.commit or harness.commit(), []
    for case in CASES:
        if options.cases and case.id not in options.cases:
            continue
        rows += measure(case, {n: p for n, p in PEERS.items() if not options.impls or n in options.impls}, commit)
        torch.cuda.empty_cache()
    Console(width=160).print(table(rows))
    if options.json or not (options.cases or options.impls):
        gpu.keep(rows, SUITE, options.json)
