# SPDX-License-Identifier: Apache-2.0
"""A layer's share of an engine's step: the vLLM backend beside the operators alone, on steps that vLLM recorded.

The backend writes the step's keys and attends, into the engine's output; the operators do so on views made once, into
their own tensors. Graphs show the difference on the device, eager calls that on the host. "packed" is the backend under
VLLM_BATCH_INVARIANT. Layers have gpt-oss's sizes.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sinkattn import vllm

from . import gpu, harness, studies
from .vllm_steps import KINDS, Layer, Recorded, steps

SUITE = "serving"
STEPS = (("mixed", 0), ("mixed", 9), ("mixed", 12), ("mixed", 45), ("drafts", 9))
MOST = 4
SECONDS = 0.2
ops = torch.ops.sinkattn


@dataclass(frozen=True)
class ServingRow:
    """us of one layer; host_us are of eager calls, as far as the host is concerned."""

    suite: str
    step: str
    layer: str
    backend_us: float
    ops_us: float
    packed_us: float
    host_us: float
    host_ops_us: float
    commit: str
    torch: str


def describe(recorded: Recorded) -> str:
    rows, decodes = recorded.query_start_loc.diff().tolist(), recorded.decodes(MOST)
    parts = [f"{decodes[0]} x {decodes[1]}"] if decodes[0] else []
    return " + ".join(parts + [str(n) for n in rows[decodes[0] :]]) + " rows"


def operators(
    layer: Layer, rows: tuple[Tensor, Tensor, Tensor], slots: Tensor, step: vllm.Step
) -> Callable[[], Tensor]:
    q, k, v = rows
    pages = vllm.cache_pages(layer.kv_cache, layer.head_dim)
    scale, s_aux, window = (layer.options[x] for x in ("scale", "s_aux", "sliding_window"))
    left = -1 if window is None else window - 1
    few, lens, table = q, *step.packed[1:]
    if step.apart is not None:
        (each, lens, table), others = step.apart
        assert others is None, "recorded sequences are short"
        few = q.unflatten(0, (len(lens), each))

    def call() -> Tensor:
        ops.append_kv_slots(*pages, k, v, slots)
        if step.apart is not None:
            out, _ = ops.flash_decode(few, *pages, s_aux, lens, table, scale, left)
        else:
            out, _ = ops.flash_decode_varlen(q, *pages, s_aux, *step.packed, None, None, scale, left, 0)
        return out

    return call


def measure(run: str, index: int, kind: str, seconds: float, commit: str) -> ServingRow:
    """On the cache that the steps before have left."""
    device = studies.device()
    layer = Layer(kind, device, heads=(64, 8) if device == "cuda" else (8, 2))
    recorded_steps = list(steps(run))[: index + 1]
    for recorded in recorded_steps:
        _, k, v = layer.rows(recorded.num_actual_tokens)
        vllm.write_cache(k, v, layer.kv_cache, recorded.slot_mapping[kind].to(device))
    rows, slots = layer.rows(recorded.num_actual_tokens), recorded.slot_mapping[kind].to(device)
    output = torch.empty_like(rows[0])

    def backend(step: vllm.Step) -> Callable[[], tuple[Tensor, ...]]:
        return lambda: (layer.run(rows, slots, step, output), (output,))[1]

    step = recorded.step(kind, device, MOST)
    alone = operators(layer, rows, slots, step)
    calls = {"backend": backend(step), "ops": lambda: (alone(),), "packed": backend(recorded.step(kind, device, 0))}
    host = gpu.host_times(calls) if device == "cuda" else harness.take_turns(calls, 0)
    if device == "cuda":
        calls = {name: gpu.captured(call) for name, call in calls.items()}
    us = {name: harness.digits(1000 * ms) for name, ms in studies.take_turns(calls, seconds).items()}
    host_us = {name: harness.digits(1000 * ms) for name, ms in host.items()}
    return ServingRow(
        SUITE, describe(recorded), kind, us["backend"], us["ops"], us["packed"], host_us["backend"], host_us["ops"],
        commit, torch.__version__,
    )  # fmt: skip


def markdown(machine: dict[str, object], rows: Sequence[ServingRow]) -> list[str]:
    lines = [
        [row.step, row.layer, *(f"{x:.1f}" for x in (row.ops_us, row.backend_us, row.packed_us)),
         f"{row.host_ops_us:.1f}", f"{row.host_us:.1f}"]
        for row in rows
    ]  # fmt: skip
    heads = [
        "step", "layer", "operators, us", "backend, us", "backend, packed, us", "host: operators, us",
        "host: backend, us",
    ]  # fmt: skip
    return [studies.where(machine, rows), studies.table(heads, lines)]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    studies.add_output(parser, SUITE)


def run(options: argparse.Namespace) -> None:
    commit, rows = options.commit or harness.commit(), list[ServingRow]()
    with studies.one_stream():
        for name, index in STEPS[3:4] if options.quick else STEPS:
            for kind in KINDS:
                rows.append(measure(name, index, kind, 0.0 if options.quick else SECONDS, commit))
    studies.show(markdown(studies.machine(), rows))
    studies.keep(studies.place(SUITE, options), rows)
