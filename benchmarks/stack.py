# SPDX-License-Identifier: Apache-2.0
"""A training step of 4 attention layers in gpt-oss-20b's shape: time and memory on a GPU, against flex and eager.

A layer is x + o_proj(attention(q_proj(norm(x)), k_proj(...), v_proj(...))), windows of 128 and full causal in turn;
rotary embedding and experts, the same for all, are left out. A step is a forward and a backward in bf16, from no
gradients to those of x and all parameters. Every gradient is compared, with eager's in fp32 where that fits and else
with ours, before a time is taken. Then the attention alone: what it allocates beside out, LSE and gradients.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch
from rich.table import Table
from torch import Tensor, nn

from . import gpu, harness, peers, report
from .cases import Case
from .harness import digits
from .peers import Absent, Attention

SUITE = "stack"
HIDDEN, NUM_Q_HEADS, NUM_KV_HEADS, HEAD_DIM, WINDOWS = 2880, 64, 8, 64, (128, 0, 128, 0)
LENGTHS = (4096, 32768)  # eager fits into the first
ROUNDS = 10
DISTANCE = 0.05  # of a gradient, relative to its norm
MIB = 2**20


@dataclass(frozen=True)
class StackRow:
    """Of one step, or one forward and backward of an attention; None where the peer is absent, and note says why.

    peak_mib: allocated at the peak beyond inputs and parameters. beyond_mib: of that, neither out, LSE nor gradients.
    distance, of_sinks: the largest of a gradient to the same of `reference`, relative, without the sinks' and of these.
    """

    suite: str
    case: str
    impl: str
    ms: float | None
    peak_mib: float | None
    beyond_mib: float | None
    distance: float | None
    of_sinks: float | None
    reference: str
    note: str
    commit: str
    torch: str


def case_of(length: int, window: int, device: str = "cuda", dtype: str = "bf16") -> Case:
    return Case(length, HEAD_DIM, dtype, window, 1, NUM_Q_HEADS, NUM_KV_HEADS, device=device)


def _eager(case: Case) -> Attention:
    return peers.EAGER.build(case, "backward")


# build(case) gives f(q, k, v, s_aux) on [1, length, heads, head_dim], or on heads first, as the second says
Build = Callable[[Case], Attention]
IMPLS: dict[str, tuple[Build, bool]] = {
    "sinkattn": (lambda case: peers.OURS.build(case, "both"), False),
    "flex": (peers.flex_with_sink, True),
    "eager": (_eager, True),
}


class Layer(nn.Module):
    def __init__(self, case: Case, hidden: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(hidden)
        rows = [heads * case.head_dim for heads in (case.num_q_heads, case.num_kv_heads, case.num_kv_heads)]
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(hidden, n) for n in rows)
        self.o_proj = nn.Linear(rows[0], hidden)
        self.s_aux = nn.Parameter(1.5 * torch.randn(case.num_q_heads))
        for projection, std in ((self.q_proj, 3.0), (self.k_proj, 1.0), (self.v_proj, 1.0)):  # scores that stand out
            nn.init.normal_(projection.weight, std=std / math.sqrt(hidden))

    def forward(self, x: Tensor, attention: Attention, heads_first: bool) -> Tensor:
        normed, head_dim = self.norm(x), self.q_proj.out_features // len(self.s_aux)
        q, k, v = (
            project(normed).unflatten(-1, (-1, head_dim)).transpose(1, 2 if heads_first else 1)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        out = attention(q, k, v, self.s_aux)
        return x + self.o_proj((out.transpose(1, 2) if heads_first else out).flatten(2))  # type: ignore[no-any-return]


Step = Callable[[], dict[str, Tensor]]


def prepare(cases: list[Case], layers: nn.ModuleList, x: Tensor, dout: Tensor, impl: str) -> Step:
    """A step of layers, one a case; gives the gradients by name."""
    build, heads_first = IMPLS[impl]
    kept = {case: build(case) for case in cases}
    parameters = {"x": x, **dict(layers.named_parameters())}

    def step() -> dict[str, Tensor]:
        for parameter in parameters.values():
            parameter.grad = None
        out = x
        for case, layer in zip(cases, layers, strict=True):
            out = layer(out, kept[case], heads_first)
        out.backward(dout)  # type: ignore[no-untyped-call]
        return {name: parameter.grad for name, parameter in parameters.items() if parameter.grad is not None}

    return step


def distances(got: dict[str, Tensor], want: dict[str, Tensor]) -> tuple[float, float]:
    """The largest distance of a gradient, relative to its norm, inf for NaN: of all but the sinks', and of these."""
    assert got.keys() == want.keys()
    worst = [0.0, 0.0]
    for name, exact in want.items():
        if name.endswith("k_proj.bias"):  # it moves all scores of a row alike: its sum cancels but for the sinks
            continue
        off = (got[name].float() - exact.float()).norm() / exact.float().norm()
        of_sinks = name.endswith("s_aux")
        worst[of_sinks] = max(worst[of_sinks], digits(float(off.nan_to_num(nan=torch.inf))))
    return worst[0], worst[1]


def make(cases: list[Case], hidden: int) -> tuple[nn.ModuleList, Tensor, Tensor]:
    """Layers, x and dout in bf16, or in fp32 where the cases are; sinks stay in fp32."""
    torch.manual_seed(0)
    case = cases[0]
    layers = nn.ModuleList(Layer(case, hidden) for case in cases).to(case.device)
    dtype = torch.bfloat16 if case.dtype == "bf16" else torch.float32
    for name, parameter in layers.named_parameters():
        if not name.endswith("s_aux"):
            parameter.data = parameter.data.to(dtype)
    x, dout = torch.randn(2, 1, case.length, hidden, device=case.device).to(dtype)
    return layers, x.requires_grad_(), dout


def exact_gradients(cases: list[Case], layers: nn.ModuleList, x: Tensor, dout: Tensor) -> dict[str, Tensor]:
    """Eager's in fp32. Raises Absent where its N x N tensors do not fit."""
    twin, _, _ = make(cases, x.shape[-1])
    twin.load_state_dict(layers.state_dict())
    twin.float()
    gradients = prepare(cases, twin, x.detach().float().requires_grad_(), dout.float(), "eager")()
    return {name: gradient.cpu() for name, gradient in gradients.items()}


def peak_mib(step: Callable[[], object]) -> float:
    return digits(gpu.peak_bytes(step)[1] / MIB)


def clocked_ms(step: Callable[[], object]) -> float:
    times = []
    for _ in range(ROUNDS):
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        before.record()
        step()
        after.record()
        torch.cuda.synchronize()
        times.append(before.elapsed_time(after))
    return digits(median(times))


def measure(
    cases: list[Case], hidden: int, commit: str, clock: Callable[[Step], float], peak: Callable[[Step], float]
) -> list[StackRow]:
    """A row for each of IMPLS. Raises RuntimeError when we are wrong."""
    layers, x, dout = make(cases, hidden)
    parameters = list(layers.parameters())
    rows: list[StackRow] = []
    want: dict[str, Tensor] = {}
    reference = "eager in fp32"
    try:
        want = exact_gradients(cases, layers, x, dout)
    except Absent:
        reference = "sinkattn"
    for impl in IMPLS:
        ms = mib = off = of_sinks = None
        note = ""
        try:
            step = prepare(cases, layers, x, dout, impl)
            got = {name: gradient.cpu() for name, gradient in step().items()}
            want = want or got
            off, of_sinks = distances(got, want)
            # A peer takes the sinks' from a bf16 output: that cancelling sum may have few digits, and is only told.
            if max(off, of_sinks if impl == "sinkattn" else 0.0) > DISTANCE:
                raise RuntimeError(f"a gradient is off from {reference} by {off}, of sinks {of_sinks}, of its norm")
            for parameter in (x, *parameters):
                parameter.grad = None
            mib, ms = peak(step), clock(step)
        except Absent as reason:
            note = str(reason)
        except Exception as error:
            if impl == "sinkattn":
                raise
            note = harness.failure(error)
        name = f"stack-{cases[0].length}"
        measured = (ms, mib, None, off, of_sinks, reference, note)
        rows.append(StackRow(SUITE, name, impl, *measured, commit, torch.__version__))
    return rows


def measure_attention(case: Case, commit: str) -> StackRow:
    """What a forward and backward of sinkattn's attention allocates."""
    inputs = harness.Inputs.of(case)
    call = harness.prepare(peers.OURS, case, "both", inputs)
    call()
    peak = peak_mib(call)
    lse_bytes = 4 * case.num_q_heads * case.length
    kept = sum(x.numel() * x.element_size() for x in (inputs.q, *call())) + lse_bytes
    measured = (clocked_ms(call), peak, digits(peak - kept / MIB), None, None, "", "")
    return StackRow(SUITE, f"attention-{case.id}", "sinkattn", *measured, commit, torch.__version__)


def table(rows: list[StackRow]) -> Table:
    shown = Table(title="forward and backward: ms, MiB at the peak beyond inputs and parameters")
    shown.caption = "\n".join(dict.fromkeys(f"{row.case}, {row.impl}: {row.note}" for row in rows if row.note))
    for name in ("case", "impl", "ms", "peak MiB", "beyond out, LSE, gradients", "distance", "of sinks", "to"):
        shown.add_column(name, no_wrap=True)
    for row in rows:
        numbers = (row.ms, row.peak_mib, row.beyond_mib, row.distance, row.of_sinks)
        shown.add_row(row.case, row.impl, *("-" if x is None else f"{x:g}" for x in numbers), row.reference)
    return shown


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--lengths", nargs="*", type=int, help=f"tokens; default: {LENGTHS}")
    gpu.add_output(parser, SUITE)


def run(options: argparse.Namespace) -> None:
    gpu.require(SUITE)
    commit, rows = options.commit or harness.commit(), list[StackRow]()
    for length in options.lengths or LENGTHS:
        rows += [measure_attention(case_of(length, window), commit) for window in dict.fromkeys(WINDOWS)]
        cases = [case_of(length, window) for window in WINDOWS]
        rows += measure(cases, HIDDEN, commit, clocked_ms, peak_mib)
        torch.cuda.empty_cache()
        if options.json or not options.lengths:
            gpu.keep(rows, SUITE, options.json)  # after each: a run may be cut short
    report.show(table(rows))
