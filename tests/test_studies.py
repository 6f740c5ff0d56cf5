# SPDX-License-Identifier: Apache-2.0
"""The studies of docs/studies.md: they run on a CPU too, find crossings, and the page shows what is kept."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from arguments import Calls
from gpus import needs_gpus

import sinkattn
from benchmarks import (
    accuracy,
    crossover,
    generate,
    gpu,
    harness,
    launches,
    naive,
    packed,
    packed_cache,
    peers,
    plot,
    report,
    scaling,
    serving,
    split_prefill,
    studies,
    vllm_steps,
)
from benchmarks.__main__ import main

PAGE = plot.PAGE.read_text()


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def kept_by(study: str, path: Path) -> list[Any]:
    assert main([study, "--quick", "--json", str(path), "--commit", "none"]) == 0
    module = next(module for module in plot.ON_PAGE if study == module.SUITE)
    machine, rows = harness.load(path, plot.PICTURES[module])
    module.plot(path.with_suffix(".svg"), machine, rows)
    assert b"</svg>" in path.with_suffix(".svg").read_bytes()
    assert len(module.markdown(machine, rows)) > 1
    return rows


def test_a_page_shows_the_kept_results(tmp_path: Path) -> None:
    for path, shown in plot.PAGES.items():
        assert plot.page(path) == path.read_text(), "python -m benchmarks plot"
        for study in shown:
            assert report.none_yet(study.SUITE) in plot.page(path, tmp_path), study.SUITE


def test_a_page_measures_nothing_in_its_prose() -> None:
    """A figure stands in a table, which the test above compares."""
    prose = re.sub(r"<!-- benchmarks ([\w-]+): begin -->.*?<!-- benchmarks \1: end -->", "", PAGE, flags=re.DOTALL)
    unit = r"\b\d[\d.,]*\s*(?:x|ms|us|s|%|times|[KMG]i?B|[TG]FLOP/s)(?!\w)"
    assert re.findall(unit, prose) == []
    assert re.findall(unit, "4.2 ms, 3x and 1,000 times") == ["4.2 ms", "3x", "1,000 times"]


@pytest.mark.parametrize(
    ("slower", "expected"),
    [
        (lambda n: n < 700, (672, 704)),
        (lambda n: n < 5000, (4864, 5120)),
        (lambda n: n in (64, 128), (128, 144)),  # the last crossing counts
        (lambda n: False, True),
        (lambda n: n > 4000, False),
    ],
)
def test_a_crossing_is_bisected(slower: Callable[[int], bool], expected: object) -> None:
    asked: list[int] = []

    def faster(length: int) -> bool:
        asked.append(length)
        return not slower(length)

    found = crossover.crossing(faster, [64 << i for i in range(8)])
    assert found == expected
    if isinstance(found, tuple):
        assert slower(found[0])
        assert not slower(found[1])
        assert {*found} <= {*asked}


def test_a_crossing_is_said() -> None:
    field = crossover.fields("cuda")[1]

    def rows(times: dict[str, list[float]]) -> list[crossover.CrossoverRow]:
        return [
            crossover.CrossoverRow("crossover", "long", "forward", 512 << i, impl, ms, "", "abc", "2.0")
            for impl, of in times.items()
            for i, ms in enumerate(of)
        ]

    measured = rows({"w128": [3, 3, 3], "w1024": [5, 6, 9], "full": [2, 4, 8]})
    said = crossover.markdown({"gpu": "NVIDIA H200", "cuda": "13.0"}, measured)[-1]
    assert "* forward, w128 against full: crossing between 512 and 1024 tokens; w128 is faster from there.\n" in said
    assert "* forward, w1024 against full: none; at 2048 tokens w1024 is slower.\n" in said
    assert "* forward, full against fa2: not measured." in said
    faster = crossover.found(rows({"w128": [1, 1], "full": [2, 2]}), field, "forward", ("w128", "full"))
    assert faster is True


def test_packed_is_measured_without_a_gpu(on_cpu: None, tmp_path: Path) -> None:
    rows = kept_by("packed", tmp_path / "packed.json")
    assert {row.impl for row in rows if row.ms is not None} == {
        "sinkattn", "sinkattn-no-sink", "standard", "standard-no-sink",
    }  # fmt: skip
    assert {row.note for row in rows if row.impl.startswith("naive")} == {"not supported: it is a CUDA kernel"}
    assert {row.case for row in rows} == {
        f"2x60-{mask}-{dtype}" for mask in ("full", "w16") for dtype in ("bf16", "fp16")
    }
    # At least two copies of the scores of 2 sequences, 32 heads of 60 x 60; all keys and values, once for each head.
    (eager,) = (row for row in rows if (row.case, row.impl) == ("2x60-full-bf16", "standard"))
    assert eager.extra_mib > (2 * 60 + 128) * 2 * 32 * 60 * 2 / 2**20


def test_a_packed_cache_is_measured_without_a_gpu(on_cpu: None, tmp_path: Path) -> None:
    path = tmp_path / "packed-cache.json"
    assert main(["packed-cache", "--quick", "--json", str(path), "--commit", "none"]) == 0
    machine, rows = harness.load(path, packed_cache.PackedCacheRow)
    names = [batch.name for batch in packed_cache.QUICK]
    assert [(row.case, row.page_size) for row in rows] == [
        *((name, size) for name in names for size in packed_cache.PAGE_SIZES),
        *((packed_cache.QUICK_MIXED.name, size) for size in packed_cache.MIXED_PAGE_SIZES),
    ]
    assert all(row.ms > 0 and row.packed_ms > 0 for row in rows)
    assert f"{rows[0].ms / rows[0].packed_ms:.3f}" in packed_cache.markdown(machine, rows)[1]
    long = next(batch for batch in packed_cache.batches() if batch.window)
    assert sum(long.q_lens) == sum(long.k_lens) == 65536


def test_an_engines_step_is_measured_without_a_gpu(on_cpu: None, tmp_path: Path) -> None:
    path = tmp_path / "serving.json"
    assert main(["serving", "--quick", "--json", str(path), "--commit", "none"]) == 0
    machine, rows = harness.load(path, serving.ServingRow)
    assert [(row.step, row.layer) for row in rows] == [("3 x 1 rows", "sliding"), ("3 x 1 rows", "full")]
    times = ("backend_us", "ops_us", "packed_us", "host_us", "host_ops_us")
    assert all(getattr(row, name) > 0 for row in rows for name in times)
    assert f"| {rows[0].ops_us:.1f} | {rows[0].backend_us:.1f} |" in serving.markdown(machine, rows)[1]
    steps = [list(vllm_steps.steps(run))[index] for run, index in serving.STEPS]
    assert [serving.describe(x) for x in steps][1:3] == ["12 x 1 + 651 + 361 rows", "16 x 1 rows"]


def test_packed_sequences_are_those_of_the_standard_formula(on_cpu: None) -> None:
    """As a batch of equal lengths; and what does not fit is said."""
    (case,) = (case for case in packed.cases([(4, 64)]) if case.name == "4x64-w16-bf16")
    assert (case.packed, case.num_q_heads, case.num_kv_heads, case.head_dim) == ((64,) * 4, 32, 8, 128)
    (long,) = (case for case in packed.cases([(1, 65536)]) if case.name == "1x65536-full-bf16")
    with pytest.raises(peers.Absent, match=r"not run: its N x N tensors take 1024 GiB, and \d+ are free"):
        packed.standard(long, "forward")


def test_the_naive_kernel_says_what_it_needs() -> None:
    limit = 232448  # of compute capability 9.0
    needed = {case.name: naive.shared_bytes(case) for case in packed.cases(packed.CONFIGURATIONS)}
    assert needed["2x1024-full-bf16"] == 4 * 16 * (128 + 1024) < limit
    assert needed["1x4096-full-bf16"] > limit > needed["1x65536-w128-fp16"]
    case = next(case for case in packed.cases([(2, 60)]))
    with pytest.raises(peers.Absent, match="computes packed forwards alone"):
        naive.build(replace(case, device="cuda"), "backward")


def test_a_naive_tile_meets_the_shared_memory() -> None:
    """At the line that a block has by itself, and at the one that it may ask for."""
    for head_dim in naive.HEAD_DIMS:
        for limit in (naive.STATIC, naive.OPT_IN):
            keys = naive.longest(head_dim, limit)
            assert naive.tile_bytes(head_dim, keys) <= limit < naive.tile_bytes(head_dim, keys + 1)
    shown = naive.computed()[1]
    assert "| 512 | 36 | 40 | 48 |" in shown
    assert "| 1024 | 68, opt-in | 72, opt-in | 80, opt-in |" in shown
    assert "| 4096 | 260, does not fit |" in shown
    assert "| at most, 48 KiB | 704 keys | 640 keys | 512 keys |" in shown


def test_traffic_and_winners_of_packed_calls() -> None:
    (case,) = (case for case in packed.cases([(2, 60)]) if case.name == "2x60-full-bf16")
    asked = packed.traffic_bytes(case)
    token = 128 * 2  # bytes of a head
    assert asked["sinkattn"] == 120 * (2 * 32 + 2 * 8) * token + 120 * 32 * 4
    assert asked["naive"] == 120 * 2 * 32 * token + 2 * (16 + 32 + 48 + 60) * 2 * 32 * token
    assert asked["standard"] == 120 * (2 * 32 + 2 * 8 + 4 * 32) * token + 10 * 2 * 2 * 32 * 60**2
    (narrow,) = (case for case in packed.cases([(2, 60)]) if case.name == "2x60-w16-bf16")
    assert packed.traffic_bytes(narrow)["naive"] == 120 * 2 * 32 * token + 2 * (16 + 31 + 31 + 27) * 2 * 32 * token
    _, rows = harness.load(harness.RESULTS / "nvidia-h200" / "packed.json", gpu.Row)
    shown = packed.markdown({"gpu": "NVIDIA H200", "cuda": "13.0"}, rows)[1]
    ms = {row.impl: row.ms for row in rows if row.case == "2x60-full-bf16"}
    ratio = min(ms["naive"] or 0, ms["standard"] or 0) / (ms["sinkattn"] or 1)
    assert f"| sinkattn, {ratio:.3g}x |" in shown.splitlines()[2]


def test_both_grids_of_the_naive_kernel_are_studied() -> None:
    short, _ = crossover.fields("cuda")
    assert short.contests == (("flash", "naive"), ("flash", "naive-blocks"))
    assert min(short.lengths["forward"]) == 16
    assert {peer.name for peer in launches.NAIVES} == {"naive", "naive-blocks"}


def test_winners_among_launches() -> None:
    def row(call: str, host_us: float) -> launches.LaunchRow:
        return launches.LaunchRow("launches", "case", call, 1, [132], 0, 0, 3, host_us, "abc", "2.0")

    rows = [row("FA2: forward", 30), row("ours: forward", 20), row("naive: forward", 50), row("ours: backward", 9)]
    rows += [row("flash_decode_out", 3), row(f"{launches.NOTHING}: forward", 1)]
    assert launches.winners(rows) == {1: 1.5}
    lines = launches.markdown({"gpu": "NVIDIA H200", "cuda": "13.0"}, rows)[1].splitlines()
    assert [line.endswith("| 1.50x |") for line in lines[2:]] == [False, True, False, False, False, False]


def test_scaling_is_projected() -> None:
    def row(layer: str, tokens: int, ms: float) -> scaling.ScalingRow:
        return scaling.ScalingRow("scaling", layer, "forward", tokens, ms, 0, 1, "abc", "2.0")

    rows = [row("window 128", 1024, 1), row("window 128", 2048, 2), row("full", 1024, 10), row("stack", 1024, 131)]
    assert scaling.projected(rows, "forward", 1024) == 12 * 1 + 12 * 10
    assert scaling.projected(rows, "forward", 2048) == 12 * 2 + 12 * 40
    assert scaling.projected(rows, "forward", 4096) is None
    shown = scaling.markdown({"gpu": "H200", "cuda": "13"}, rows)[1]
    assert "| 132, measured 131 (0.992x) |" in shown
    assert "| 504 by the square |" in shown


def test_scaling_is_measured_without_a_gpu(on_cpu: None, tmp_path: Path) -> None:
    rows = kept_by("scaling", tmp_path / "scaling.json")
    of = {(row.layer, row.direction, row.tokens): row for row in rows}
    assert of.keys() >= {(name, d, 256) for name in ("window 128", "full", "stack") for d in ("forward", "both")}
    # q, k, v, out, and with the backward q, k, v, dout, dq, dk, dv [256, 8 or 2, 64] in bf16.
    for direction, heads in (("forward", 8 + 2 + 2 + 8), ("both", 8 + 2 + 2 + 8 + 8 + 2 + 2)):
        row = of["full", direction, 256]
        assert row.peak_mib == pytest.approx(heads * 256 * 64 * 2 / 2**20 + row.extra_mib, rel=1e-3)


def test_accuracy_is_measured_without_a_gpu(on_cpu: None, tmp_path: Path) -> None:
    rows = kept_by("accuracy", tmp_path / "accuracy.json")
    of = {(row.case, row.s_aux, row.impl, row.quantity): row for row in rows}
    assert {row.s_aux for row in rows} == {*accuracy.QUICK_STRENGTHS} < {*accuracy.STRENGTHS}
    for (case, s_aux, impl, quantity), row in of.items():
        if impl == "flex":
            assert (row.error, row.note) == (None, "not supported: on a CPU it gives no LSE, and no backward")
        elif impl == "sinkattn":
            assert row.error < {"ds_aux": 1e-5, "lse": 1e-6}.get(quantity, 5e-3), (case, s_aux, quantity)
    assert of["full-160-d64-bf16", 3.0, "eager", "ds_aux"].error > 1e-4
    weak, strong = (of["full-160-d64-bf16", s_aux, "sinkattn", "out"].error for s_aux in (-8.0, 3.0))
    assert weak != strong


def test_an_error_is_of_the_whole() -> None:
    want, terms = torch.tensor([3.0, 4.0], dtype=torch.float64), torch.tensor([10.0, 100.0], dtype=torch.float64)
    got = torch.tensor([3.0, 4.5])
    assert accuracy.error("out", got, want, terms) == 0.1
    assert accuracy.error("ds_aux", got, want, terms) == 0.005
    assert accuracy.error("out", torch.tensor([3.0, torch.nan]), want, terms) == float("inf")


def test_crossover_is_measured_without_a_gpu(on_cpu: None) -> None:
    short, long = crossover.fields(studies.device(), quick=True)
    assert (short.lengths, long.lengths) == ({"forward": (16, 32, 64)}, {"forward": (512, 1024), "both": (512,)})
    assert crossover.fields("cuda")[1].lengths["forward"][-1] == 131072
    rows = crossover.measure(short, "forward", 32, "none")
    assert {row.impl for row in rows if row.ms} == {"flash", "PyTorch"}
    rows = crossover.measure(long, "both", 512, "none")
    assert {row.impl for row in rows if row.ms} == {"w128", "w1024", "full", "SDPA"}


def test_a_crossover_cut_short_keeps_its_rows(
    on_cpu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every length is kept as soon as it is measured, and said in a log; bisected ones too."""

    def measure(field: crossover.Field, direction: str, length: int, commit: str) -> list[crossover.CrossoverRow]:
        if (field.name, direction, length) == ("long", "both", cut):
            raise KeyboardInterrupt
        times = {name: 8.0 if name == "w128" else length / 100 for name in field.entries}
        where = ("crossover", field.name, direction, length)
        return [crossover.CrossoverRow(*where, name, ms, "", commit, "2.0") for name, ms in times.items()]

    monkeypatch.setattr(crossover, "measure", measure)
    path, cut = tmp_path / "crossover.json", 512
    with pytest.raises(KeyboardInterrupt):
        main(["crossover", "--quick", "--json", str(path), "--commit", "none"])
    _, rows = harness.load(path, crossover.CrossoverRow)
    assert [row.length for row in rows if row.impl in ("flash", "w128")] == [16, 32, 64, 512, 1024]
    assert "s: short forward 32" in capsys.readouterr().out
    cut = 0
    rows = kept_by("crossover", path)
    assert {832, 800, 768} < {row.length for row in rows}
    assert crossover.found(rows, crossover.fields("cpu")[1], "forward", ("w128", "full")) == (768, 800)


def test_split_prefill_is_measured_without_a_gpu(on_cpu: None, tmp_path: Path) -> None:
    rows = kept_by("split-prefill", tmp_path / "rows.json")
    assert [(row.case, row.impl, row.note) for row in rows] == [
        ("16of1024-8:1", impl, "") for impl in ("sinkattn", "split-2", "split-4")
    ]
    assert all(row.ms for row in rows)


def test_a_generated_token_is_timed_by_difference() -> None:
    asked = list[int]()

    def run(new: int) -> float:
        asked.append(new)
        return 1.0 + 0.002 * new

    assert generate.token_ms(run) == 2.0
    assert asked == [8] * 5 + [40] * 3
    rows = [generate.GenerateRow("generate", 64, "eager", 2.5, "abc", "2.13", 90, 0, "3 of 8")]
    assert "| 64 | eager | 2.5 | 90 | - | 3 of 8 |" in generate.markdown({"gpu": "G", "cuda": "13.0"}, rows)[1]


@torch.no_grad()
def test_generated_rows_are_those_of_one_prefill(on_cpu: None) -> None:
    model = generate.new_model(quick=True)
    assert generate.rows_apart(model, 150, "sinkattn") == f"0 of {generate.FEW * generate.LAYERS * 8}"
    for impl, name in ((generate.PREFILL, "flash_attn_fwd"), ("sinkattn", "flash_decode")):
        with generate.attending(model, impl), Calls() as calls:
            generate.seconds_of(model, 20, False)(3)
        assert {op: len(seen) for op, seen in calls.seen.items()} == {name: 3 * generate.LAYERS}


@pytest.mark.parametrize(("keys", "parts"), [(1024, 8), (1027, 8), (19, 1), (40, 4)])
def test_split_prefill_is_one_forward(keys: int, parts: int) -> None:
    """Also where parts leave keys over, and gradients: the sink joins once."""
    q, k, v = (torch.randn(1, n, heads, 16, requires_grad=True) for n, heads in ((7, 4), (keys, 2), (keys, 2)))
    s_aux = torch.randn(4, requires_grad=True)
    both = []
    for out in (
        split_prefill.split_attention(q, k, v, s_aux, parts),
        sinkattn.flash_attn_func(q, k, v, causal=True, s_aux=s_aux),
    ):
        both.append((out, *torch.autograd.grad(out.square().sum(), (q, k, v, s_aux))))
    torch.testing.assert_close(*both, rtol=2e-5, atol=2e-6)


def test_partial_results_take_little_memory() -> None:
    assert split_prefill.partial_bytes(16, 8) == 9 * 16 * 64 * (64 * 2 + 4)
    assert "| 16 | 0.387 (0.6 %) |" in split_prefill.computed()[1]
    assert "| 1, a decode's workspace | 0.0352 (0.055 %) |" in split_prefill.computed()[1]  # of 2 parts, 36 KiB


def test_blocks_are_counted_in_a_trace() -> None:
    events = [
        {"cat": "kernel", "name": "k", "args": {"grid": [64, 2, 1]}},
        {"cat": "gpu_memset", "name": "Memset"},
        {"cat": "kernel", "name": "k", "args": {"grid": [132, 1, 1]}},
        {"cat": "cuda_runtime", "name": "cudaStreamSynchronize"},
        {"cat": "cuda_runtime", "name": "cudaLaunchKernel"},
        {"cat": "cpu_op", "name": "aten::Synchronize"},
    ]
    found, blocks = launches.counts(events)
    assert (dict(found), blocks) == ({"kernels": 2, "copies": 1, "syncs": 1}, [128, 132])


def test_launches_are_drawn_without_a_gpu(tmp_path: Path) -> None:
    row = launches.LaunchRow("launches", "b1-1k", "flash_decode_out", 1, [132], 0, 0, 3, 14.2, "abc", "2.0")
    facts: dict[str, object] = {"gpu": "NVIDIA H200", "cuda": "13.0"}
    assert "| b1-1k | flash_decode_out | 1 | 132 | 0 | 0 | 3 | 14.2 |  |" in launches.markdown(facts, [row])[1]
    launches.plot(tmp_path / "launches.svg", facts, [row])
    assert b"</svg>" in (tmp_path / "launches.svg").read_bytes()


@needs_gpus()
def test_the_naive_kernel_is_right() -> None:
    """In both of its grids."""
    who = (*packed.PEERS, naive.NAIVE_BLOCKS)
    for case in packed.cases([(2, 60), (3, 129), (1, 1024)]):
        calls, notes = harness.ready(case, "forward", who)
        assert (len(calls), notes) == (len(who), {}), case.name


def test_a_picture_is_small_and_whole(tmp_path: Path) -> None:
    """Text is text, a line is one path, and its points are a marker's."""
    path = tmp_path / "picture.svg"
    with studies.picture(path, 1, 2, (8, 4)) as (figure, axes):
        for panel, marker in zip(axes[0], ("o", "x"), strict=True):
            panel.plot([1, 10, 100], [1, 2, 4], marker=marker, label="a & b < c")
            panel.set(xscale="log", title="ten to the n")
        axes[0][0].legend()
        figure.suptitle("above")
    text = path.read_text()
    assert len(text) < 12_000
    root = ElementTree.fromstring(text)
    words = {"".join("".join(x.itertext()).split()) for x in root.iter("{http://www.w3.org/2000/svg}text")}
    assert {"a&b<c", "above", "tentothen", "102"} <= words  # the last is ten squared
    assert "<use" not in text
    paths = list(root.iter("{http://www.w3.org/2000/svg}path"))
    assert sum("h0" in path.attrib["d"] for path in paths) == 2  # the marker, and the point in the legend
    for marker in re.findall(r"\.(\w+){[^}]*marker:url\(#m\d\)", text):
        (line,) = (path.attrib["d"] for path in paths if path.attrib["class"] == marker)
        step = r"l([\d.]+)-[\d.]+"
        match = re.fullmatch(rf"m[\d.]+ [\d.]+{step}{step}", line)
        assert match, line
        assert float(match[1]) == pytest.approx(float(match[2]), abs=0.2)
    assert text.count("marker:url") == text.count("<marker ") == 2
