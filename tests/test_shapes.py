# SPDX-License-Identifier: Apache-2.0
"""The judge of the kernels over many shapes: what it walks, what it checks, and how it shows the worst first."""

import re
import runpy
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from gpus import needs_gpus

import sinkattn
from benchmarks import cases, gpu, harness, peers, plot, report, shapes
from benchmarks.__main__ import main
from sinkattn import reference

BASE = cases.Case(40, 16, "fp32", num_q_heads=6, num_kv_heads=2)
MASKS = {
    "causal": BASE,
    "batch": replace(BASE, batch=2, window=7),
    "not causal": replace(BASE, right=-1),
    "not causal, a batch": replace(BASE, right=-1, batch=2),
    "two-sided": replace(BASE, window=6, right=5),
    "two-sided, whole": replace(BASE, length=9, window=6, right=5),
    "chunk": replace(BASE, length=18, k_length=50),
    "chunk with a window": replace(BASE, length=18, k_length=50, window=9),
    "chunk, two-sided": replace(BASE, length=18, k_length=50, window=9, right=3),
    "sink tokens": replace(BASE, window=6, num_sink_tokens=3),
    "chunk, sink tokens": replace(BASE, length=18, k_length=50, window=6, num_sink_tokens=20),
    "packed": replace(BASE, packed=(5, 35)),
    "packed, sink tokens": replace(BASE, packed=(5, 35), window=4, num_sink_tokens=2),
    "packed, tiny": replace(BASE, packed=(37, 3), window=2),
}


def test_the_shapes_cover_the_axes() -> None:
    table = cases.SHAPES
    assert len({case.id for case in table}) == len({replace(case, name="") for case in table}) == len(table) >= 40
    assert all(case.device == "cuda" for case in table)
    lengths = {case.length for case in table if not case.packed}
    assert {min(lengths), max(lengths)} <= {64, 65536}  # the former is a chunk
    assert {512, 1024, 2048, 4096, 8192, 16384, 32768, 65536} <= lengths
    assert any(case.length % 64 for case in table)
    assert len({case.batch for case in table}) >= 4
    assert {1, 3, 4, 5, 6, 7, 8, 16} <= {case.group for case in table}
    assert {(case.num_q_heads, case.num_kv_heads) for case in table} >= {(16, 16), (32, 32), (16, 1), (28, 4)}
    assert {40, 64, 72, 80, 96, 128, 256} <= {case.head_dim for case in table}
    assert {128, 512, 1024, 2048, 4096} <= {case.window for case in table}
    assert {case.dtype for case in table} == {"bf16", "fp16"}
    assert len({(case.head_dim, case.window > 0) for case in table if case.right > 0}) >= 2  # two-sided
    assert {64, 128} <= {case.head_dim for case in table if case.right < 0}
    chunks = [case for case in table if case.k_length]
    assert {case.window > 0 for case in chunks} == {True, False}
    assert max(case.k_length / case.length for case in chunks) >= 128
    sinks = [case for case in table if case.num_sink_tokens]
    assert {1, 4, 64, 128} <= {case.num_sink_tokens for case in sinks}
    assert any(case.packed for case in sinks)
    assert any(case.k_length for case in sinks)
    packs = {case.packed for case in table if case.packed}
    assert cases.packed_lengths() in packs
    assert any(len({*lengths}) == 1 and len(lengths) >= 512 for lengths in packs)  # many tiny
    assert any(len({*lengths}) == 1 and len(lengths) < 64 for lengths in packs)  # equal ones
    assert any(lengths[0] > sum(lengths[1:]) / 2 > 0 and len(lengths) > 100 for lengths in packs)  # one long


def test_sink_tokens_stand_beside_their_window() -> None:
    known = {case.id: case for case in cases.SHAPES}
    assert {*shapes.BESIDE} == {case.id for case in cases.SHAPES if case.num_sink_tokens}
    for with_sinks, alone in shapes.BESIDE.items():
        assert known[alone] == replace(known[with_sinks], name=alone, num_sink_tokens=0)


def test_shapes_are_chosen_by_name() -> None:
    assert shapes.chosen(None) == cases.SHAPES
    names = ["w128-sink4-16384-d64-64:8", "full-8192-d64-16:1"]
    assert [case.id for case in shapes.chosen(names)] == [names[1], "w128-16384-d64-64:8", names[0]]
    with pytest.raises(ValueError, match=r"--case is full; known are full-512-d64-64:8, "):
        shapes.chosen(["full"])


def seen(case: cases.Case) -> list[torch.Tensor]:
    """What each sequence's rows see, [rows, keys]."""
    left, right = case.window_size
    found = []
    for rows in case.lengths:
        keys = case.k_length or rows
        lengths = torch.tensor([rows]), torch.tensor([keys])
        found.append(reference.visible(*lengths, rows, keys, left, right, case.num_sink_tokens)[0])
    return found


@pytest.mark.parametrize("name", MASKS)
def test_work_is_counted_over_visible_pairs(name: str) -> None:
    case = MASKS[name]
    pairs = sum(int(x.sum()) for x in seen(case)) * case.num_q_heads
    assert case.gflop("forward") == pytest.approx(4 * case.head_dim * pairs / 1e9)


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("scores", [1, 1 << 25])
def test_the_exact_rows_are_those_of_the_whole(
    name: str, direction: str, scores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In blocks of few rows as at once; all rows and keys where sink tokens or no right side make every row count."""
    monkeypatch.setattr(harness, "BLOCK_SCORES", scores)
    monkeypatch.setattr(harness, "PROBED", 4)
    case = MASKS[name]
    inputs = harness.Inputs.of(case)
    exact = harness._exact_rows(case, direction, inputs, True)
    last = case.lengths[-1]
    q, dout = (x[:, -last:].double() for x in (inputs.q, inputs.dout))
    k, v = (x[:, -(case.k_length or last) :].double() for x in (inputs.k, inputs.v))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    mask: dict[str, Any] = {"window_size": case.window_size, "num_sink_tokens": case.num_sink_tokens}
    out = reference.flash_attn_func(q, k, v, s_aux=inputs.s_aux.double(), **mask)
    assert isinstance(out, torch.Tensor)
    want = (out,) if direction == "forward" else torch.autograd.grad(out, leaves, dout)
    for got, whole in zip(exact, want, strict=True):
        assert torch.allclose(got, whole[:, -got.shape[1] :], rtol=0, atol=1e-12)
    everything = direction == "backward" and (case.right < 0 or case.num_sink_tokens or last <= 4 + case.right)
    compared = [x.shape[1] for x in want] if everything else [min(4, last)] * len(want)
    assert [x.shape[1] for x in exact] == compared


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("name", MASKS)
def test_ours_is_right(name: str, direction: str) -> None:
    calls, why = harness.ready(MASKS[name], direction, [peers.OURS])
    assert (len(calls), why) == (1, {})


def planted(attention: Callable[..., Any]) -> peers.Peer:
    def build(case: cases.Case, direction: str) -> peers.Attention:
        mask = {"window_size": case.window_size, "num_sink_tokens": case.num_sink_tokens}
        return lambda q, k, v, s_aux: attention(case, q, k, v, s_aux=s_aux, **mask)

    return peers.Peer("planted", build, has_sink=True, heads_first=False)


def without_the_first_key_s_gradient(case: cases.Case, q: Any, k: Any, v: Any, **rest: Any) -> Any:
    k = torch.cat([k[:, :1].detach(), k[:, 1:]], 1)
    return sinkattn.flash_attn_func(q, k, v, **rest)


@pytest.mark.parametrize("name", ["sink tokens", "not causal"])
def test_a_lost_gradient_of_an_early_key_is_found(name: str) -> None:
    """Sums over all rows, which no probe of the last ones would see."""
    rows = harness.measure("cpu", MASKS[name], "backward", [planted(without_the_first_key_s_gradient)], 0, "none")
    assert rows[0].ms is None
    assert rows[0].note.startswith("wrong: off from fp64 by 1 of a row")


def stand_in(monkeypatch: pytest.MonkeyPatch, function: Callable[..., Any]) -> None:
    package, cute = ModuleType("flash_attn"), ModuleType("flash_attn.cute")
    package.cute = cute_module = cute  # type: ignore[attr-defined]
    cute_module.flash_attn_func = cute_module.flash_attn_varlen_func = function  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    monkeypatch.setitem(sys.modules, "flash_attn.cute", cute)


def test_a_missing_peer_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    _, why = harness.ready(BASE, "backward", peers.SHAPES)
    assert why == {peers.FA4: "not installed", peers.FA4_DETERMINISTIC: "not installed"}


def test_fa4_is_given_the_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[dict[str, Any]] = []

    def function(q: Any, k: Any, v: Any, learnable_sink: Any, **options: Any) -> Any:
        given.append(options)
        return q, None

    stand_in(monkeypatch, function)
    x = torch.zeros(1, 40, 2, 8)
    for name in ("causal", "batch", "not causal", "two-sided"):
        for peer in (peers.FA4, peers.FA4_DETERMINISTIC):
            peer.build(MASKS[name], "backward")(x, x, x, x)
    masks: list[dict[str, Any]] = [
        {"causal": True}, {"window_size": (6, 0)}, {"window_size": (None, None)}, {"window_size": (5, 5)},
    ]  # fmt: skip
    assert given == [{**mask, "deterministic": mode} for mask in masks for mode in (False, True)]
    with pytest.raises(peers.Absent, match=r"^not supported: it has no positional sink tokens$"):
        peers.FA4.build(MASKS["sink tokens"], "forward")


def test_a_refusal_has_the_peer_s_own_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "asserts.py"  # in a test, pytest would give it a message
    source.write_text("def refuse(q):\n    assert q.shape[-1] == 8\n")
    refuse = runpy.run_path(str(source))["refuse"]

    def function(q: Any, k: Any, v: Any, **options: Any) -> Any:
        if options["deterministic"]:
            refuse(q)
        raise NotImplementedError("head_dim 16 is not supported\nsee there")

    stand_in(monkeypatch, function)
    _, why = harness.ready(BASE, "backward", peers.SHAPES)
    words = "refused: head_dim 16 is not supported", "refused: assert q.shape[-1] == 8"
    assert why == dict(zip((peers.FA4, peers.FA4_DETERMINISTIC), words, strict=True))


H200: dict[str, object] = {"gpu": "NVIDIA H200", "cuda": "13.0"}


def row(case: str, direction: str, impl: str, ms: float | None, note: str = "") -> gpu.Row:
    tflops = None if ms is None else 100 / ms
    return gpu.Row("shapes", case, direction, impl, ms, tflops, 0.5, note, "none", "2.0")


def of_shape(case: str, ours: float, fa4: float | str, deterministic: float | str) -> list[gpu.Row]:
    of = {"fa4": fa4, "fa4-deterministic": deterministic}
    theirs = [
        row(case, "backward", impl, None, x) if isinstance(x, str) else row(case, "backward", impl, x)
        for impl, x in of.items()
    ]
    return [row(case, "backward", report.OURS, ours), *theirs]


NO_SINKS = "not supported: it has no positional sink tokens"
ROWS = [
    *of_shape("full-512-d64-64:8", 1.0, 1.0, 1.2),
    *of_shape("full-8192-d64-16:1", 2.0, 0.5, 0.6),
    *of_shape("w128-16384-d64-64:8", 0.5, 1.0, 0.45),
    *of_shape("full-8192-d40-16:4", 4.0, "refused: head_dim must be 64", "failed: RuntimeError: out of memory"),
    *of_shape("w128-sink4-16384-d64-64:8", 15.0, NO_SINKS, NO_SINKS),
    row("full-512-d64-64:8", "forward", report.OURS, 1.0),
    row("full-512-d64-64:8", "forward", "fa4", None, "not installed"),
    row("full-512-d64-64:8", "forward", "fa4-deterministic", None, "not run: the forward is the same"),
]


def test_the_table_is_drawn_worst_first() -> None:
    where, forward, backward, sinks, notes, means = shapes.markdown(H200, ROWS)
    assert where == "NVIDIA H200, CUDA 13.0, torch 2.0, commit none."
    assert forward.splitlines()[2:] == ["| full-512-d64-64:8 | 1.00 (100) | - |"]
    assert backward.splitlines() == [
        "| backward, worst first | ms (TFLOP/s) | FA4 / ours | FA4 (deterministic) / ours |",
        "| --- | --- | --- | --- |",
        "| full-8192-d64-16:1 | 2.00 (50) | 0.25x | 0.30x |",
        "| w128-16384-d64-64:8 | 0.500 (200) | 2.00x | 0.90x |",
        "| full-512-d64-64:8 | 1.00 (100) | 1.00x | 1.20x |",
        "| full-8192-d40-16:4 | 4.00 (25) | - | - |",
    ]
    assert sinks.splitlines()[0] == "| positional sink tokens | backward, ms (TFLOP/s) | / its window alone |"
    assert sinks.splitlines()[2:] == ["| w128-sink4-16384-d64-64:8 | 15 (6.67) | 30x |"]
    assert notes.splitlines() == [
        "* FA4, backward: refused: head_dim must be 64: full-8192-d40-16:4.",
        "* FA4 (deterministic), backward: failed: RuntimeError: out of memory: full-8192-d40-16:4.",
        "* FA4, forward: not installed: full-512-d64-64:8.",
    ]
    fa4 = "geometric mean 0.79x of 3 shapes, 1 below 1; worst 0.25x, full-8192-d64-16:1"
    deterministic = "geometric mean 0.69x of 3 shapes, 2 below 1; worst 0.30x, full-8192-d64-16:1"
    assert means.splitlines() == [
        "* forward, FA4 / ours: not measured.",
        f"* backward, FA4 / ours: {fa4}.",
        f"* backward, FA4 (deterministic) / ours: {deterministic}.",
    ]


def test_rows_survive_the_file_and_are_shown(tmp_path: Path) -> None:
    path = tmp_path / "nvidia-h200" / "shapes.json"
    harness.save(path, ROWS, H200)
    assert harness.load(path, gpu.Row) == (H200, ROWS)
    page = plot.page(plot.PAGE, tmp_path)
    assert "| full-8192-d64-16:1 | 2.00 (50) | 0.25x | 0.30x |" in page


def test_a_run_cut_short_keeps_its_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measure(case: cases.Case, direction: str, commit: str) -> list[gpu.Row]:
        if direction == "forward" and case.length == 4096:
            raise KeyboardInterrupt
        return [replace(x, case=case.id, direction=direction, commit=commit) for x in ROWS[3:6]]

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(gpu, "require", lambda study: None)
    monkeypatch.setattr(shapes, "measure", measure)
    path = tmp_path / "shapes.json"
    with pytest.raises(KeyboardInterrupt):
        main(["shapes", "--output", str(path), "--commit", "abc"])
    _, rows = harness.load(path, gpu.Row)
    assert [(x.case, x.direction) for x in rows[::3]] == [
        (f"full-{n}-d64-64:8", d) for n in (512, 2000) for d in ("forward", "backward")
    ]
    said = capsys.readouterr().out.splitlines()
    ratios = "2.00 (50), FA4 / ours 0.25x, FA4 (deterministic) / ours 0.30x"
    assert re.fullmatch(rf"[\d.]+ s: full-512-d64-64:8 backward: {re.escape(ratios)}", said[1])
    main(["shapes", "--backward", "--case", "full-512-d64-64:8", "--commit", "abc"])  # kept only with a place
    assert "wrote" not in capsys.readouterr().out


def test_shapes_need_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="benchmarks shapes needs a CUDA device"):
        main(["shapes"])


@needs_gpus()
def test_shapes_are_measured(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    names = ["full-512-d64-64:8", "noncausal-8x512-d64-64:8", "w128-sink64-2048of32768-d64-64:8"]
    cases_given = [x for name in names for x in ("--case", name)]
    assert main(["shapes", "--json", str(path), "--commit", "none", *cases_given]) == 0
    _, rows = harness.load(path, gpu.Row)
    timed = {(x.case, x.direction) for x in rows if x.impl == report.OURS and x.ms is not None}
    assert timed == {(name, d) for name in (*names, shapes.BESIDE[names[-1]]) for d in report.DIRECTIONS}
