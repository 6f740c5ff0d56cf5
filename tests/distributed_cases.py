# SPDX-License-Identifier: Apache-2.0
"""What ranks of a process group check together: each case against one process that holds the whole."""

import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DeviceMesh, Placement, Replicate, Shard, distribute_tensor
from torch.multiprocessing.spawn import spawn

import sinkattn
from benchmarks import harness
from sinkattn.distributed import Shards, context_parallel_attention, halo, ring

# Of the largest element; in bf16 of each row, as in benchmarks.
TOLERANCE = {torch.float64: 1e-13, torch.float32: 3e-6, torch.bfloat16: harness.TOLERANCE["bf16"]}
DS_AUX_TOLERANCE = 2e-5  # in bf16: twice what each of the two is from the truth


@dataclass(frozen=True)
class Case:
    name: str
    method: str | None
    shards: Shards
    window_size: tuple[int, int] = (-1, 0)
    cu_seqlens: tuple[int, ...] = ()  # empty: dense, a batch of 2
    heads: tuple[int, int] = (8, 2)
    members: tuple[int, ...] = (0, 1)
    dtype: torch.dtype = torch.float32
    num_sink_tokens: int = 0
    has_s_aux: bool = True
    passes_shards: bool = True
    head_dim: int = 8

    @property
    def id(self) -> str:
        return f"{len(self.members)}-{self.name}-{'packed' if self.cu_seqlens else 'dense'}"


Inputs = dict[str, Tensor]


def inputs_of(case: Case, device: str) -> Inputs:
    generator = torch.Generator().manual_seed(5)
    total, (q_heads, kv_heads) = case.shards.total, case.heads

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, case.dtype)

    lead = (total,) if case.cu_seqlens else (2, total)
    whole = {name: normal(*lead, heads, case.head_dim)
             for name, heads in (("q", q_heads), ("k", kv_heads), ("v", kv_heads), ("dout", q_heads))}  # fmt: skip
    wide = torch.float64 if case.dtype == torch.float64 else torch.float32
    stats = (q_heads, total) if case.cu_seqlens else (2, q_heads, total)
    dlse = torch.randn(stats, generator=generator).to(device, wide)
    if case.cu_seqlens:  # the LSE of rows past the last offset is -inf
        dlse[:, case.cu_seqlens[-1] :] = 0
    s_aux = 1.5 * torch.randn(q_heads, generator=generator).to(device, wide)
    return {**whole, "dlse": dlse, "s_aux": s_aux}


def outputs(call: Callable[..., tuple[Tensor, Tensor]], case: Case, x: Inputs) -> Inputs:
    leaves = {name: x[name].detach().clone().requires_grad_() for name in ("q", "k", "v", "s_aux")}
    if not case.has_s_aux:
        del leaves["s_aux"]
    out, lse = call(leaves["q"], leaves["k"], leaves["v"], s_aux=leaves.get("s_aux"))
    finite = torch.where(torch.isfinite(lse), lse, 0.0)
    loss = (out * x["dout"]).sum() + (finite * x["dlse"]).sum()
    grads = torch.autograd.grad(loss, list(leaves.values()))
    return {"out": out.detach(), "lse": lse.detach(), **{f"d{n}": g for n, g in zip(leaves, grads, strict=True)}}


def alone(case: Case, x: Inputs) -> Inputs:
    def call(q: Tensor, k: Tensor, v: Tensor, s_aux: Tensor | None) -> tuple[Tensor, Tensor]:
        options = {"window_size": case.window_size, "s_aux": s_aux, "num_sink_tokens": case.num_sink_tokens,
                   "return_lse": True}  # fmt: skip
        if not case.cu_seqlens:
            return sinkattn.flash_attn_func(q, k, v, **options)
        cu = torch.tensor(case.cu_seqlens, dtype=torch.int32, device=q.device)
        return sinkattn.flash_attn_varlen_func(q, k, v, cu, cu, **options)

    return outputs(call, case, x)


def token_dim(name: str) -> int:
    return -1 if name.endswith("lse") else -3


def together(case: Case, x: Inputs, group: dist.ProcessGroup) -> Inputs:
    rank = dist.get_rank(group)
    mine = {name: value if name == "s_aux" else case.shards.take(value, rank, token_dim(name)).contiguous()
            for name, value in x.items()}  # fmt: skip

    def call(q: Tensor, k: Tensor, v: Tensor, s_aux: Tensor | None) -> tuple[Tensor, Tensor]:
        cu = torch.tensor(case.cu_seqlens, dtype=torch.int32, device=q.device) if case.cu_seqlens else None
        return context_parallel_attention(
            q, k, v, group=group, shards=case.shards if case.passes_shards else None, method=case.method, cu_seqlens=cu,
            window_size=case.window_size, s_aux=s_aux, num_sink_tokens=case.num_sink_tokens, return_lse=True,
        )  # fmt: skip

    return outputs(call, case, mine)


def distance(got: Tensor, expected: Tensor) -> float:
    """Largest, relative to the largest element expected, in bf16 to each row; inf where infinities or NaN differ."""
    if got.shape != expected.shape or not torch.equal(torch.isfinite(got), torch.isfinite(expected)):
        return torch.inf
    if got.dtype == torch.bfloat16:
        return harness.row_error(got, expected)
    got, expected = (torch.where(torch.isfinite(y), y, 0.0).double() for y in (got, expected))
    return float((got - expected).abs().max() / expected.abs().max().clamp(min=1e-30)) if got.numel() else 0.0


def distance_of_ds_aux(got: Tensor, expected: Inputs, x: Inputs) -> float:
    """Largest, relative to the sum of the absolute terms of a head, which cancel."""
    p_sink = torch.exp(x["s_aux"].double()[:, None] - expected["lse"].double())
    of_rows = (x["dout"].double() * expected["out"].double()).sum(-1).transpose(-1, -2) - x["dlse"].double()
    terms = (p_sink * of_rows).masked_fill(torch.isneginf(expected["lse"]), 0).abs()
    sums = terms.sum([d for d in range(terms.dim()) if d != terms.dim() - 2])
    return float(((got - expected["ds_aux"]).abs() / sums).max())


def check_case(case: Case, group: dist.ProcessGroup, device: str) -> None:
    rank, x = dist.get_rank(group), inputs_of(case, device)
    expected, got, again = alone(case, x), together(case, x, group), together(case, x, group)
    same_bits = all(torch.equal(again[name], got[name]) for name in got)
    assert got.keys() == expected.keys()
    if case.has_s_aux:  # the gradient of the whole is the sum of those of the ranks
        dist.all_reduce(got["ds_aux"], group=group)
        if case.dtype == torch.bfloat16:
            found = distance_of_ds_aux(got.pop("ds_aux"), expected, x)
            assert found <= DS_AUX_TOLERANCE, f"ds_aux is off by {found:.3g} of the sum of its terms"
    for name, value in got.items():
        mine = expected[name] if name == "ds_aux" else case.shards.take(expected[name], rank, token_dim(name))
        found = distance(value, mine)
        assert found <= TOLERANCE[case.dtype], f"{name} of rank {rank} is off by {found:.3g} of its largest element"
    assert same_bits, "other bits the second time"


def check_parts_of_the_keys(device: str) -> None:
    """The ring's part in one process: a backward over some of the keys, with the out and LSE of all."""
    case = Case("parts", None, Shards.contiguous((300,)), (-1, -1), (), (16, 2), (0,), torch.bfloat16, head_dim=64)
    x = inputs_of(case, device)
    expected = alone(case, x)
    call = ring.Ring(case.shards, None, None, None, case.window_size)
    rows, stats = (x["dout"], x["q"], expected["out"]), (x["dlse"], expected["lse"])
    dq, ds_aux = torch.zeros_like(x["q"], dtype=torch.float32), torch.zeros_like(x["s_aux"])
    for keys in (slice(0, 100), slice(100, 250), slice(250, 300)):
        block, k = ring.Block(slice(0, 300), keys, (None, None)), x["k"][:, keys]
        operands = (rows[0], stats[0], rows[1], k, x["v"][:, keys], rows[2], stats[1], x["s_aux"], None, None)
        part = torch.ops.sinkattn.flash_attn_bwd(*operands, *call.options(1))
        for name, found in (("dk", part[1]), ("dv", part[2])):
            assert distance(found, expected[name][:, keys]) <= TOLERANCE[torch.bfloat16], name
        dq += part[0]
        ds_aux += part[3]
        if keys.start > 0:
            ds_aux -= ring._without_keys(call, block, rows, stats, k, x["s_aux"])
    assert distance(dq.bfloat16(), expected["dq"]) <= TOLERANCE[torch.bfloat16]
    assert distance_of_ds_aux(ds_aux, expected, x) <= DS_AUX_TOLERANCE


def check_narrow_sinks(group: dist.ProcessGroup) -> None:
    """ds_aux of bf16 sinks is rounded once: the bits of the same sinks in fp32, rounded at the end."""
    case = Case("narrow-sinks", "ring", Shards.zigzag(96, 2))
    x = inputs_of(case, "cpu")
    narrow = x["s_aux"].bfloat16()
    got, wide = (together(case, x | {"s_aux": s_aux}, group) for s_aux in (narrow, narrow.float()))
    assert got["ds_aux"].dtype == torch.bfloat16
    for name, value in got.items():
        assert torch.equal(value, wide[name].to(value.dtype)), name


def layouts(total: int, lengths: tuple[int, ...]) -> dict[str, Shards]:
    return {"uneven": Shards.contiguous(lengths), "zigzag": Shards.zigzag(total, len(lengths))}


def cases() -> list[Case]:
    found: list[Case] = []
    for members, lengths, heads in (
        ((0, 1), (37, 60), (8, 2)),
        ((1, 3), (50, 47), (4, 1)),  # not the first ranks, and one kv head for two
        ((0, 1, 2), (20, 45, 11), (6, 3)),
        ((0, 1, 2, 3), (13, 8, 31, 5), (8, 2)),
    ):
        total = sum(lengths)
        for layout, shards in layouts(total, lengths).items():
            for cu in ((), (0, total // 3, total // 3, total // 2, total - 2)):
                for name, window in (
                    ("ulysses", (-1, 0)),
                    ("halo", (15, 0)),
                    ("halo-two-sided", (11, 6)),
                    ("ring", (-1, 0)),
                    ("ring-not-causal", (-1, -1)),
                ):
                    method, full = name.partition("-")[0], f"{name}-{layout}-{heads[0]}:{heads[1]}"
                    found.append(Case(full, method, shards, window, cu, heads, members))
    pair, tail = Shards.contiguous((37, 60)), Shards.zigzag(96, 2)
    every, empty = (0, 1, 2, 3), Shards.contiguous((30, 0, 46, 7))
    for method, window in (("ulysses", -1), ("halo", 9), ("ring", -1)):
        found += [
            Case(f"{method}-fp64", method, pair, (window, 0), dtype=torch.float64),
            Case(f"{method}-no-tokens", method, empty, (window, 0), members=every),
            Case(f"{method}-no-sink", method, pair, (window, 0), has_s_aux=False),
            Case(f"{method}-tail", method, tail, (window, 0), (0, 5, 20)),
            Case(f"{method}-bf16", method, tail, (window, 0), dtype=torch.bfloat16, head_dim=16),
            Case(f"{method}-bf16", method, pair, (window, 0), (0, 50, 95), dtype=torch.bfloat16, head_dim=16),
        ]
    return [
        *found,
        Case("ulysses-prefix", "ulysses", pair, (7, 0), num_sink_tokens=3),
        Case("chosen-and-gathered", None, pair, (7, 0), passes_shards=False),
        Case("halo-of-the-row-alone", "halo", pair, (0, 0)),
        Case("halo-of-all", "halo", Shards.zigzag(41, 4), (200, 0), members=every),
    ]


def gpu_cases() -> list[Case]:
    """Of what the CUDA kernels compute, on two ranks: tiles and windows that the borders cut."""
    lengths, found = (700, 900), list[Case]()
    for layout, shards in layouts(1600, lengths).items():
        for cu in ((), (0, 300, 300, 1000, 1590)):
            for method, window in (("ulysses", 127), ("ulysses", -1), ("halo", 127), ("ring", -1)):
                name = f"{method}-{layout}-{'full' if window < 0 else 'w128'}"
                found.append(Case(name, method, shards, (window, 0), cu, (16, 2), (0, 1), torch.bfloat16, head_dim=64))
    return [*found, replace(found[0], name="halo-two-sided", method="halo", window_size=(50, 40))]


@contextmanager
def order_of(*named: tuple[Any, str, str]) -> Iterator[list[str]]:
    seen: list[str] = []

    def logged(word: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            seen.append(word)
            return function(*arguments, **options)

        return call

    with ExitStack() as stack:
        for owner, name, word in named:
            stack.enter_context(patch.object(owner, name, logged(word, getattr(owner, name))))
        yield seen


def check_overlap(group: dist.ProcessGroup) -> None:
    """Messages travel while a rank computes or copies: the order of starts, work and waits."""
    shards, rank = Shards.contiguous((20, 13)), dist.get_rank(group)
    x = [shards.take(torch.randn(1, 33, 4, 8), rank, 1).requires_grad_() for _ in range(3)]
    of_ring = (ring.Ring, "start", "start"), (ring.Move, "wait", "wait"), (ring, "_fwd", "rows"), (ring, "_bwd", "rows")
    with order_of(*of_ring) as seen:
        out = context_parallel_attention(*x, group=group, shards=shards, method="ring", causal=True)
        later = ["rows"] * rank  # the first rank sees no keys of the second
        assert seen == ["start", "rows", "wait", *later], seen
        seen.clear()
        out.sum().backward()
        assert seen == ["start", "rows", "start", "wait", *later, "wait", "start", "wait"], seen
    of_halo = (halo.dist, "all_to_all_single", "start"), (halo, "_places", "copy"), (dist.Work, "wait", "wait")
    with order_of(*of_halo) as seen:
        out = context_parallel_attention(*x, group=group, shards=shards, method="halo", window_size=(9, 0))
        assert seen[:3] == ["start", "copy", "wait"], seen
        seen.clear()
        out.sum().backward()
        assert seen[:3] == ["start", "copy", "wait"], seen


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.project = nn.Linear(16, 3 * 4 * 8)
        self.s_aux = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor, shards: Shards | None) -> Tensor:
        q, k, v = self.project(x).unflatten(-1, (3, 4, 8)).unbind(2)
        if shards is None:
            return sinkattn.flash_attn_func(q, k, v, window_size=(9, 0), s_aux=self.s_aux)
        return context_parallel_attention(q, k, v, shards=shards, window_size=(9, 0), s_aux=self.s_aux)


def check_data_parallel(group: dist.ProcessGroup) -> None:
    """Data parallelism averages over a sequence's ranks, so a loss that is a sum is multiplied by their number."""
    shards, rank, ranks = Shards.contiguous((13, 8, 31, 5)), dist.get_rank(group), dist.get_world_size(group)
    x = torch.randn(2, shards.total, 16, generator=torch.Generator().manual_seed(8))
    single, model = Layer(), Layer()
    (single(x, None) ** 2).sum().backward()
    ((model(shards.take(x, rank, 1), shards) ** 2).sum() * ranks).backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, group=group)
        parameter.grad /= ranks
    for (name, expected), got in zip(single.named_parameters(), model.parameters(), strict=True):
        found = distance(got.grad, expected.grad)
        assert found <= TOLERANCE[torch.float32], f"{name} is off by {found:.3g}"


def check_dtensor(
    mesh: DeviceMesh, placements: tuple[list[Placement], ...], packed: bool = False, heads: tuple[int, int] = (8, 4)
) -> None:
    """DTensors in, the results and gradients of one process out. placements: of rows and keys, the LSE, s_aux, out."""
    on_gpu = mesh.device_type == "cuda"
    case = Case("dtensor", None, Shards.contiguous((57,)), (9, 0), (0, 20, 57) if packed else (), heads)
    if on_gpu:
        case = replace(case, dtype=torch.bfloat16, head_dim=64)
    x = inputs_of(case, mesh.device_type)
    expected = alone(case, x)
    of_rows, of_lse, of_s_aux, of_out = placements
    where = {name: of_s_aux if name == "s_aux" else of_lse if name == "dlse" else of_rows for name in x}
    spread = {name: distribute_tensor(value, mesh, where[name]) for name, value in x.items()}

    def call(q: Tensor, k: Tensor, v: Tensor, s_aux: Tensor | None) -> tuple[Tensor, Tensor]:
        options = {"window_size": case.window_size, "s_aux": s_aux, "return_lse": True}
        if not packed:
            return sinkattn.flash_attn_func(q, k, v, **options)
        cu = torch.tensor(case.cu_seqlens, dtype=torch.int32, device=mesh.device_type)
        offsets = distribute_tensor(cu, mesh, [Replicate()] * mesh.ndim)
        return sinkattn.flash_attn_varlen_func(q, k, v, offsets, offsets, **options)

    got = outputs(call, case, spread)
    whole = {name: value.full_tensor() for name, value in got.items()}
    for name in ("out", "dq", "dk", "dv"):
        assert list(got[name].placements) == of_out, f"{name} is {got[name].placements}"
    for name, value in whole.items():
        found = distance(value, expected[name])
        assert found <= TOLERANCE[case.dtype], f"{name} is off by {found:.3g}"


def check_dtensor_call(mesh: DeviceMesh, call: Callable[..., tuple[Tensor, ...]], sinks: int = 0) -> None:
    dtype = torch.bfloat16 if mesh.device_type == "cuda" else torch.float32
    given = [torch.randn(2, 9, 8, 64, device=mesh.device_type, dtype=dtype) for _ in range(3)]
    given += [torch.randn(8, device=mesh.device_type) for _ in range(sinks)]
    for x in given:
        dist.broadcast(x, 0)
    single = [x.clone().requires_grad_() for x in given]
    spread = [distribute_tensor(x, mesh, [Shard(min(x.ndim - 1, 2))]).requires_grad_() for x in given]
    results = []
    for leaves in (single, spread):
        outs = call(*leaves)
        torch.autograd.backward([out.square().sum() for out in outs])
        results.append([*outs, *(x.grad for x in leaves)])
    for x, y in zip(*results, strict=True):
        found = distance(y.full_tensor(), x)
        assert found <= TOLERANCE[dtype], f"off by {found:.3g}"


def dtensor_checks(device: str) -> dict[str, Callable[[], None]]:
    line = DeviceMesh(device, list(range(dist.get_world_size())))
    square = DeviceMesh(device, [[0, 1], [2, 3]] if dist.get_world_size() == 4 else [[0, 1]])
    copy, ranks = Replicate(), line.size()
    heads, packed = ([Shard(2)], [Shard(1)], [Shard(0)]), ([Shard(1)], [Shard(0)], [Shard(0)])
    batch = [Shard(0), copy], [Shard(0), copy], [copy, copy]
    both = [Shard(0), Shard(2)], [Shard(0), Shard(1)], [copy, Shard(0)]

    def defaults(*x: Tensor) -> tuple[Tensor, ...]:  # torch hands on no argument that has its default
        return (sinkattn.flash_attn_func(*x),)

    def raw(*x: Tensor) -> tuple[Tensor, ...]:
        return sinkattn.flash_attn_func(*x[:3], causal=True, s_aux=x[3], return_lse="raw")

    checks = (
        partial(check_dtensor, line, (*heads, heads[0])),
        partial(check_dtensor, line, (*packed, packed[0]), packed=True),
        partial(check_dtensor, square, (*batch, batch[0])),
        partial(check_dtensor, square, (*both, both[0])),
        # kv heads that do not divide are put together
        partial(check_dtensor, line, (*heads, [copy]), heads=(2 * ranks, ranks // 2)),
        partial(check_dtensor_call, line, defaults),
        partial(check_dtensor_call, line, raw, 1),
    )
    return dict(zip(DTENSORS, checks, strict=True))


DTENSORS = (
    "dtensor-heads", "dtensor-heads-packed", "dtensor-batch", "dtensor-batch-and-heads", "dtensor-too-few-heads",
    "dtensor-defaults", "dtensor-raw",
)  # fmt: skip


@contextmanager
def ranks(backend: str, rank: int, world: int, meeting: str) -> Iterator[None]:
    timeout = timedelta(seconds=60)
    dist.init_process_group(backend, f"file://{meeting}", rank=rank, world_size=world, timeout=timeout)
    try:
        yield
    finally:
        dist.destroy_process_group()


def outcome(check: Callable[[], None]) -> str:
    """Empty, or what went wrong. An error on one rank alone would leave the others waiting, so nothing is raised."""
    try:
        check()
    except Exception:
        return traceback.format_exc()
    return ""


def run(rank: int, world: int, folder: str, backend: str) -> None:
    """One rank: every case in its group, then what takes all; the outcomes go to a file of the rank."""
    torch.set_num_threads(1)
    device, every = ("cpu", cases()) if backend == "gloo" else ("cuda", gpu_cases())
    if device == "cuda":
        torch.cuda.set_device(rank)
    with ranks(backend, rank, world, f"{folder}/meeting"):
        groups = {members: dist.new_group(list(members)) for members in dict.fromkeys(case.members for case in every)}
        checks: dict[str, Callable[[], None]] = {
            case.id: partial(check_case, case, groups[case.members], device) for case in every if rank in case.members
        }
        if device == "cpu":
            checks["data-parallel"] = lambda: check_data_parallel(groups[0, 1, 2, 3])
            if rank < 2:
                checks["overlap"] = lambda: check_overlap(groups[0, 1])
                checks["narrow-sinks"] = lambda: check_narrow_sinks(groups[0, 1])
        checks |= dtensor_checks(device)
        torch.save({name: outcome(check) for name, check in checks.items()}, Path(folder) / f"{rank}.pt")


def outcomes(world: int, folder: Path, backend: str) -> list[dict[str, str]]:
    spawn(run, (world, str(folder), backend), nprocs=world)
    return [torch.load(folder / f"{rank}.pt") for rank in range(world)]
