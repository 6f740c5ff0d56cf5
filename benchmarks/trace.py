# SPDX-License-Identifier: Apache-2.0
"""A server's decode steps, 70 % short requests and 30 % long ones, split in one way, another, or chosen step by step.

The batch is SLOTS sequences of a paged cache, of which those in use change as requests come and go. unsplit and
split-N run one captured graph for all steps; by-batch replays, of those graphs, the one whose parts are the planner's
P = SMs / (sequences in use * kv heads); by-lengths is one graph whose kernel cuts by the lengths it finds
(num_splits = 0). All take turns within a step, which is LAYERS layers, each with a cache of its own; times are of one.
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.table import Table
from torch import Tensor

import sinkattn
from sinkattn import _C, reference

from . import gpu, harness, report, studies
from .decode import COSINE, HEAD_DIM, NUM_KV_HEADS, NUM_Q_HEADS, PAGE_SIZE
from .decode_crossover import fill_parts

SUITE = "decode-trace"
SLOTS, LAYERS, STEPS = 64, 4, 800
SPLITS = (1, 2, 4, 8, 16, 32)
SHORT_SHARE = 0.7
PROMPTS = {"short": (128, 1024), "long": (8192, 32768)}  # tokens, from and to
OUTPUTS = {"short": (64, 256), "long": (256, 512)}
ARRIVALS, PERIOD = 0.1, 800  # requests a step, on average, and steps from a busy time to the next
WARM_UP = 600  # steps until as many go as come
CAPACITY = -(-(PROMPTS["long"][1] + OUTPUTS["long"][1]) // PAGE_SIZE) * PAGE_SIZE
PERCENTILES = (0, 5, 10, 25, 50, 75, 90, 95, 99, 100)


@dataclass(frozen=True)
class TraceRow:
    """us a layer over all steps; percentiles are those of PERCENTILES."""

    suite: str
    impl: str
    steps: int
    sequences: float  # in use, on average
    tokens: float  # of all of them, on average
    mean_us: float
    p99_us: float
    percentiles: list[float]
    commit: str
    torch: str


def lengths_of(steps: int, seed: int = 0, prompts: Mapping[str, tuple[int, int]] = PROMPTS) -> list[list[int]]:
    """Keys in use of each slot at each step, 0 for one that is free."""
    rng = random.Random(seed)
    waiting: list[tuple[int, int]] = []
    slots = [(0, 0)] * SLOTS  # keys, tokens still to come
    trace = []
    for step in range(-WARM_UP, steps):
        rate = ARRIVALS * (1 + 0.9 * math.sin(2 * math.pi * step / PERIOD))  # busy times and quiet ones
        while rng.random() < rate:
            kind = "short" if rng.random() < SHORT_SHARE else "long"
            waiting.append((rng.randint(*prompts[kind]), rng.randint(*OUTPUTS[kind])))
            rate -= 1
        slots = [(keys + 1, left - 1) if left > 1 else (0, 0) for keys, left in slots]
        slots = [waiting.pop(0) if not keys and waiting else (keys, left) for keys, left in slots]
        if step >= 0:
            trace.append([keys for keys, _ in slots])
    return trace


@dataclass(frozen=True)
class Server:
    """The caches of all layers, and one captured step for each num_splits."""

    q: Tensor
    caches: list[tuple[Tensor, Tensor]]
    s_aux: Tensor
    cache_seqlens: Tensor
    block_table: Tensor
    out: Tensor
    graphs: dict[int, torch.cuda.CUDAGraph]

    @staticmethod
    def start(capacity: int, layers: int) -> Server:
        generator = torch.Generator("cuda").manual_seed(0)
        pages = SLOTS * capacity // PAGE_SIZE

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, device="cuda", dtype=torch.bfloat16, generator=generator)

        q, s_aux = normal(SLOTS, 1, NUM_Q_HEADS, HEAD_DIM), normal(NUM_Q_HEADS).float()
        shape = (pages, PAGE_SIZE, NUM_KV_HEADS, HEAD_DIM)
        caches = [(normal(*shape), normal(*shape)) for _ in range(layers)]
        order = torch.randperm(pages, device="cuda", generator=generator).int().view(SLOTS, -1)
        lengths = torch.full((SLOTS,), capacity, dtype=torch.int32, device="cuda")
        server = Server(q, caches, s_aux, lengths, order, torch.empty_like(q), {})
        for num_splits in (0, *SPLITS):
            server.graphs[num_splits] = server._captured(num_splits)
        return server

    def _captured(self, num_splits: int) -> torch.cuda.CUDAGraph:
        capacity = self.block_table.shape[1] * PAGE_SIZE
        plan = sinkattn.plan(
            "decode", _C.query_cuda(torch.cuda.current_device()), dtype="bf16", batch=SLOTS, num_q_heads=NUM_Q_HEADS,
            num_kv_heads=NUM_KV_HEADS, head_dim=HEAD_DIM, q_len=1, k_len=capacity, s_aux_dtype="fp32",
            page_size=PAGE_SIZE, num_pages=self.block_table.numel(), window_size_right=0, num_splits=num_splits,
        )  # fmt: skip
        scratch = torch.empty(plan["workspace_bytes"], dtype=torch.uint8, device="cuda")
        lse = torch.empty(SLOTS, NUM_Q_HEADS, 1, device="cuda")

        def step() -> None:
            for k, v in self.caches:
                torch.ops.sinkattn.flash_decode_out(
                    self.q, k, v, self.s_aux, self.cache_seqlens, self.block_table, None, -1, 0, num_splits, False,
                    self.out, lse, scratch,
                )  # fmt: skip

        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):  # captured where it was warmed up
            step()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            step()
        graph.kept = (scratch, lse)  # type: ignore[attr-defined]  # a graph has addresses only
        return graph

    def check(self, lengths: list[int]) -> None:
        """Every graph against fp64: the longest sequence and the shortest. Raises RuntimeError."""
        self.cache_seqlens.copy_(torch.tensor(lengths, dtype=torch.int32))
        in_use = sorted((n, slot) for slot, n in enumerate(lengths) if n)
        for _, slot in (in_use[0], in_use[-1]):
            k, v = (x[self.block_table[slot].long()].flatten(0, 1)[None, : lengths[slot]] for x in self.caches[-1])
            heads = slice(0, NUM_Q_HEADS // NUM_KV_HEADS)
            want = reference.flash_attn_func(
                self.q[slot : slot + 1, :, heads].double(), k[:, :, :1].double(), v[:, :, :1].double(), causal=True,
                s_aux=self.s_aux[heads].double(),
            )  # fmt: skip
            assert isinstance(want, Tensor)
            for num_splits, graph in self.graphs.items():
                self.out.fill_(torch.nan)
                graph.replay()
                both = self.out[slot, :, heads].double().flatten(), want.flatten()
                cosine = float(torch.nn.functional.cosine_similarity(*both, dim=0))
                if not cosine >= COSINE:
                    raise RuntimeError(f"{SUITE}: num_splits {num_splits} is off from fp64, cosine {cosine}")


def choose(sequences: int, sms: int) -> int:
    """Of SPLITS, the most that are no more than the planner's P."""
    return max(n for n in SPLITS if n <= fill_parts(max(1, sequences), sms))


def timed(server: Server, trace: list[list[int]]) -> dict[int, list[float]]:
    """us a layer of every step, by num_splits."""
    steps = torch.tensor(trace, dtype=torch.int32, device="cuda")
    events: dict[int, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {n: [] for n in server.graphs}
    shuffle, order = random.Random(0).shuffle, list(server.graphs)
    for lengths in steps:
        server.cache_seqlens.copy_(lengths)
        shuffle(order)
        for num_splits in order:
            before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            before.record()
            server.graphs[num_splits].replay()
            after.record()
            events[num_splits].append((before, after))
    torch.cuda.synchronize()
    layers = len(server.caches)
    return {n: [1e3 * a.elapsed_time(b) / layers for a, b in pairs] for n, pairs in events.items()}


def summarise(times: dict[int, list[float]], trace: list[list[int]], sms: int, commit: str) -> list[TraceRow]:
    sequences = [sum(n > 0 for n in lengths) for lengths in trace]
    policies = {"unsplit": times[1], **{f"split-{n}": times[n] for n in SPLITS if n > 1}}
    policies["by-batch"] = [times[choose(count, sms)][step] for step, count in enumerate(sequences)]
    policies["by-lengths"] = times[0]
    mean = {"sequences": sum(sequences) / len(trace), "tokens": sum(map(sum, trace)) / len(trace)}
    rows = []
    for impl, series in policies.items():
        quantiles = torch.tensor(series, dtype=torch.float64).quantile(torch.tensor(PERCENTILES).double() / 100)
        percentiles = [harness.digits(float(x)) for x in quantiles]
        rows.append(
            TraceRow(
                suite=SUITE,
                impl=impl,
                steps=len(trace),
                sequences=harness.digits(mean["sequences"]),
                tokens=harness.digits(mean["tokens"]),
                mean_us=harness.digits(sum(series) / len(series)),
                p99_us=percentiles[PERCENTILES.index(99)],
                percentiles=percentiles,
                commit=commit,
                torch=torch.__version__,
            )
        )
    return rows


def table(rows: list[TraceRow]) -> Table:
    first = rows[0]
    shown = Table(
        title=f"us a layer and step, {first.steps} steps, {first.sequences:g} sequences of {first.tokens:g} keys in all"
    )
    for name in ("", "mean", "p50", "p99", "worst"):
        shown.add_column(name, no_wrap=True)
    for row in rows:
        p50, worst = (row.percentiles[PERCENTILES.index(p)] for p in (50, 100))
        shown.add_row(row.impl, *(f"{x:.1f}" for x in (row.mean_us, p50, row.p99_us, worst)))
    return shown


def plot(path: Path, machine: dict[str, object], rows: Sequence[TraceRow]) -> None:
    """Time of a step against the share of steps that take less."""
    with studies.picture(path, 1, 1, (7, 4.2)) as (figure, axes):
        panel = axes[0][0]
        for row in rows:
            width = 2.5 if row.impl == "by-lengths" else 1.2
            panel.plot(PERCENTILES, row.percentiles, marker="o", label=row.impl, linewidth=width)
        panel.set(xlabel="% of steps that take less", ylabel="us a layer", yscale="log")
        panel.grid(alpha=0.3, which="both")
        panel.legend(fontsize=8)
        figure.suptitle("decode steps of a server, 70 % short and 30 % long requests")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, default=STEPS, help=f"default: {STEPS}")
    parser.add_argument("--layers", type=int, default=LAYERS, help=f"default: {LAYERS}, which take 18 GB")
    gpu.add_output(parser, SUITE)


def run(options: argparse.Namespace) -> None:
    gpu.require("trace")
    commit = options.commit or harness.commit()
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    trace = lengths_of(options.steps)
    server = Server.start(CAPACITY, options.layers)
    server.check(trace[len(trace) // 2])
    rows = summarise(timed(server, trace), trace, sms, commit)
    report.show(table(rows))
    gpu.keep(rows, SUITE, options.json)
