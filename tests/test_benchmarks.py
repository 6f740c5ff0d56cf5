# SPDX-License-Identifier: Apache-2.0
"""The benchmarks refuse wrong kernels, count work by the mask, and say why a peer is absent."""

import gc
import re
import weakref
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock
from xml.etree import ElementTree

import pytest
import torch
from gpus import needs_gpus
from torch.nn.attention.flex_attention import create_block_mask

import sinkattn
from benchmarks import cases, gpu, harness, peers, prefill, report
from benchmarks.__main__ import main

CASE = cases.Case(length=96, head_dim=16, dtype="fp32", window=8)
PACKED = replace(CASE, packed=(50, 3, 43))
PEERS = tuple(peer for peer in peers.CPU if peer.name != "flex")  # which compiles for ten seconds


def off_by_one(case: cases.Case, direction: str) -> peers.Attention:
    left, right = case.window_size
    return lambda q, k, v, s_aux: sinkattn.flash_attn_func(q, k, v, window_size=(left + 1, right), s_aux=s_aux)


def without_sink(case: cases.Case, direction: str) -> peers.Attention:
    return lambda q, k, v, s_aux: sinkattn.flash_attn_func(q, k, v, window_size=case.window_size) + 0 * s_aux.sum()


def broken(case: cases.Case, direction: str) -> peers.Attention:
    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, s_aux: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError("no kernel\nand a long story")

    return attention


def planted(build: object, name: str = "planted") -> peers.Peer:
    return peers.Peer(name, build, has_sink=True, heads_first=False)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("window", [0, 8])
def test_peers_agree_and_are_timed(dtype: str, direction: str, window: int) -> None:
    case = cases.Case(96, 16, dtype, window)
    rows = harness.measure("cpu", case, direction, PEERS, seconds=0, commit="none")
    assert [row.impl for row in rows] == [peer.name for peer in PEERS]
    for row in rows:
        assert row.ms is not None, row.note
        assert row.gflops is not None
        assert row.ms * row.gflops == pytest.approx(1e3 * case.gflop(direction), rel=1e-3)


@pytest.mark.parametrize("direction", ["forward", "backward", "both"])
def test_packed_sequences_are_apart(direction: str) -> None:
    eager = next(peer for peer in PEERS if peer.name == "eager")  # which masks by position
    calls, notes = harness.ready(PACKED, direction, [peers.OURS, peers.OURS_WITHOUT, eager])
    assert (len(calls), notes) == (3, {})


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("wrong", [off_by_one, without_sink])
def test_a_wrong_kernel_is_not_timed(direction: str, wrong: object) -> None:
    rows = harness.measure("cpu", CASE, direction, [*PEERS, planted(wrong)], seconds=0, commit="none")
    assert rows[-1].ms is None
    assert re.match(r"wrong: off from fp64 by [\d.]+ of a row", rows[-1].note)
    assert all(row.ms is not None for row in rows[:-1])
    with pytest.raises(RuntimeError, match=f"{CASE.id} {direction}: sinkattn is off from fp64"):
        harness.measure("cpu", CASE, direction, [planted(wrong, "sinkattn"), *PEERS[1:]], seconds=0, commit="none")


def test_a_kernel_wrong_before_the_last_rows_is_not_timed() -> None:
    def early(case: cases.Case, direction: str) -> peers.Attention:
        right = peers.OURS.build(case, direction)
        wipe = torch.ones(case.length, 1, 1)
        wipe[7] = 0
        return lambda q, k, v, s_aux: right(q, k, v, s_aux) * wipe

    rows = harness.measure("cpu", CASE, "forward", [*PEERS, planted(early)], seconds=0, commit="none")
    assert (rows[-1].ms, rows[-1].note.partition(" by ")[0]) == (None, "wrong: off from sinkattn")


def test_a_row_that_cancels_is_not_measured_by_itself() -> None:
    """rows[0] sees few keys: its norm is 10, the others' 1; and in one head it cancels. rows[6] is zero in all."""
    rows = torch.ones(1, 64, 8, 4) / 2
    rows[:, 0] *= 10
    rows[0, 0, 3] = 0
    rows[:, 6] = 0
    for row, head, distance, expected in ((0, 3, 0.7, 0.08), (0, 2, 0.7, 0.07), (5, 3, 1.0, 1.0), (6, 3, 0.2, 0.2)):
        got = rows.clone()
        got[0, row, head, 0] += distance
        assert harness.row_error(got, rows) == pytest.approx(expected)
    rows[0, 5, 3] = torch.nan
    assert harness.row_error(rows, torch.ones_like(rows)) == float("inf")


def test_absent_peers_say_why() -> None:
    flex = next(peer for peer in peers.CPU if peer.name == "flex")
    who = [*PEERS, flex, planted(broken)]
    rows = harness.measure("cpu", CASE, "backward", who, seconds=0, commit="none")
    assert (rows[-2].ms, rows[-2].note) == (None, "not supported: no CPU backward")
    assert (rows[-1].ms, rows[-1].note) == (None, "refused: no kernel")
    ours = harness.measure("cpu", CASE, "forward", [planted(broken, "sinkattn")], seconds=0, commit="none")
    assert ours[0].note.startswith("not compiled: no kernel")


def test_absent_peers_of_a_gpu_say_why() -> None:
    absent = {
        ("cudnn", "w128-16384", "forward"): "not supported: SDPA's cuDNN has neither windows nor packed sequences",
        ("flex", "w128-512", "forward"): "not run: it compiles for seconds a shape, so only where there is a target",
        ("eager", "w128-16384", "forward"): "not run: its N x N tensors, above N = 4096",
        ("fa4-deterministic", "w128-512", "forward"): "not run: the forward is the same",
    }
    for (name, case_id, direction), why in absent.items():
        peer = next(peer for peer in peers.PREFILL if peer.name == name)
        case = next(case for case in cases.PREFILL if case.id == case_id)
        with pytest.raises(peers.Absent, match=f"^{re.escape(why)}$"):
            peer.build(case, direction)


@pytest.mark.parametrize("packed", [(), (300, 1, 211)])
@pytest.mark.parametrize("window", [0, 100, 200])
def test_flex_masks_are_those_of_torch(packed: tuple[int, ...], window: int) -> None:
    case = cases.Case(512, 16, "fp32", window, packed=packed)
    visible = peers._positions(case)
    ours = peers._block_mask(visible, 512, "cpu")
    theirs = create_block_mask(visible, None, None, 512, 512, device="cpu")
    assert torch.equal(ours.to_dense(), theirs.to_dense())
    assert ours.full_kv_num_blocks is not None
    assert theirs.full_kv_num_blocks is not None
    assert torch.equal(ours.full_kv_num_blocks, theirs.full_kv_num_blocks)
    assert torch.equal(ours.kv_num_blocks, theirs.kv_num_blocks)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("packed", [(), (300, 1, 211)])
def test_flex_with_a_sink_is_right(packed: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)  # for a CPU it gives no LSE
    case = cases.Case(512, 16, "fp32", 100, packed=packed, name="w128-16384")
    flex = next(peer for peer in peers.PREFILL if peer.name == "flex")
    calls, notes = harness.ready(case, "forward", [peers.OURS, flex])
    assert (len(calls), notes) == (2, {})


def test_ids_are_unique() -> None:
    for table in (cases.CPU, cases.CPU_QUICK, [*cases.PREFILL, cases.HOST]):
        assert len({case.id for case in table}) == len(table)


def test_every_target_has_its_case() -> None:
    assert {case.id for case in [*cases.PREFILL_QUICK, cases.HOST]} == set(cases.TARGETS)
    sizes = {c.id: (c.length, c.head_dim, c.window, c.num_q_heads, c.num_kv_heads) for c in cases.PREFILL_QUICK}
    assert sizes["w128-65536"] == sizes["w128-packed"] == (65536, 64, 128, 64, 8)
    assert sizes["w4096-d128"] == (16384, 128, 4096, 32, 8)


def test_the_packed_batch() -> None:
    lengths = cases.packed_lengths()
    assert (len(lengths), max(lengths), sum(lengths)) == (76, 3213, 65536)


@pytest.mark.parametrize("case", [cases.Case(50, 16, "fp32"), cases.Case(50, 16, "fp32", 7), PACKED])
def test_work_is_counted_over_visible_pairs(case: cases.Case) -> None:
    pairs = sum(min(i + 1, case.window or n) for n in case.lengths for i in range(n)) * case.num_q_heads
    assert case.gflop("forward") == pytest.approx(4 * case.head_dim * pairs / 1e9)
    assert case.gflop("backward") == pytest.approx(10 * case.head_dim * pairs / 1e9)


def test_cases_are_chosen_by_name() -> None:
    assert prefill.chosen(None, True) == [*cases.PREFILL_QUICK, cases.HOST]
    assert [case.id for case in prefill.chosen(["w1024-d128", "host"], False)] == ["w1024-d128", "host"]
    with pytest.raises(ValueError, match=r"--case is w127; known are w128-16384, .*, host"):
        prefill.chosen(["w127"], False)


def test_rows_survive_the_file_and_are_shown(tmp_path: Path) -> None:
    rows = [row for d in report.DIRECTIONS for row in harness.measure("cpu", CASE, d, PEERS, 0, "none")]
    path = tmp_path / "machine" / "cpu.json"
    harness.save(path, rows, harness.machine())
    machine, loaded = harness.load(path, harness.Row)
    assert (machine, loaded) == (harness.machine(), rows)
    assert report.table(rows).row_count == 2
    columns = {"forward": {"SDPA": "sdpa", "flex": "flex", "eager": "eager"}, "backward": {"SDPA": "sdpa"}}
    drawn = report.markdown("here", rows, [CASE], columns, "GFLOP/s").splitlines()
    number, times = r"[\d.]+ \(\d+\)", r"[\d.]+x"
    line = rf"\| w8-96-d16-fp32 \| {number} \| {times} \| {times} \| {number} \| {times} \|"
    assert re.fullmatch(line, drawn[-3]), drawn
    assert drawn[-1] == "Not in the table: flex: not measured."


@pytest.mark.parametrize("count", [0, 1, 2, 5])
def test_a_file_has_a_line_a_row(tmp_path: Path, count: int) -> None:
    """What all rows have in common, such as the commit, is written once; so are notes and what begins row after row."""
    rows = [replace(GPU_ROWS[0], case=f"case {i // 3}", note=f"row {i // 2}, [null]") for i in range(count)]
    path = tmp_path / "rows.json"
    harness.save(path, rows, H200)
    assert harness.load(path, gpu.Row) == (H200, rows)
    text = path.read_text()
    assert text.count('"none"') == (count > 0)
    lines = text.partition('"rows": [\n')[2].splitlines()[:-2]
    if count == 5:
        assert [line.strip(",") for line in lines] == ['["case 0",0]', "[]", "[1]", '["case 1",1]', "[2]"]


def gpu_row(case: str, impl: str, ms: float | None, direction: str = "forward", note: str = "") -> gpu.Row:
    tflops = None if ms is None or case == "host" else 100 / ms
    return gpu.Row("prefill", case, direction, impl, ms, tflops, 0.5, note, "none", torch.__version__)


GPU_ROWS = [
    gpu_row("w128-16384", "sinkattn", 0.2),
    gpu_row("w128-16384", "fa2", 0.5),
    gpu_row("w128-16384", "cudnn", None, note="not supported: windows"),
    gpu_row("w128-16384", "sinkattn", None, "backward", "not compiled: no bwd kernel"),
    gpu_row("w128-16384", "fa2", 1.5, "backward"),
    gpu_row("w128-512", "sinkattn", 0.01),
    gpu_row("full-1024-d128", "fa2", 0.03),
    gpu_row("full-1024-d128", "sinkattn", 0.02),
    gpu_row("host", "sinkattn", 0.0212),
    gpu_row("host", "fa2", 0.03),
    gpu_row("w128-512", "fa2", None, note="not shown"),
    gpu_row("full-packed", "sinkattn", 2.0),
    gpu_row("full-packed", "fa2", None, note="not supported: packed"),
]
H200 = {"gpu": "NVIDIA H200", "cuda": "13.0"}


def test_gpu_rows_are_drawn_without_a_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "nvidia-h200" / "prefill.json"
    harness.save(path, GPU_ROWS, H200)
    assert harness.load(path, gpu.Row) == (H200, GPU_ROWS)
    marks = "<!-- benchmarks prefill: begin -->", "<!-- benchmarks prefill: end -->"
    text = prefill.readme(f"{marks[0]}\nold\n{marks[1]}\n", tmp_path)
    # The peers come in COLUMNS' order; 0.16 and 0.45 are the targets.
    line = r"\| w128-16384 \| 0.200 \(500\) \| 0.16 \| 2.50x \| - \| 0.45 \| - \|"
    assert re.search(line, text), text
    assert "\n\nDashes under FA2 mean not supported: packed.\n\n" in text
    assert "Not in the table: cuDNN: not supported: windows; " in text
    assert "; flex + sink, FA4 + sink, cuDNN, FA4 + sink (deterministic): not measured." in text
    assert "NVIDIA H200, CUDA 13.0" in text
    assert (
        "us:\n\n| call | sinkattn, with sink | FA2, no sink |\n|---|---|---|\n| forward without gradients | 21 | 30 |\n"
        in text
    )
    assert main(["plot", "--results", str(tmp_path), "--output", str(tmp_path)]) == 0
    picture = tmp_path / "prefill-nvidia-h200.svg"
    assert capsys.readouterr().out == f"wrote {picture}\n"
    drawn = picture.read_bytes()
    lines = {line.get("class") for line in ElementTree.fromstring(drawn).iter("{http://www.w3.org/2000/svg}polyline")}
    assert lines == {"sinkattn", "fa2"}
    main(["plot", "--results", str(tmp_path), "--output", str(tmp_path)])
    assert picture.read_bytes() == drawn


def test_the_table_of_a_gpu_has_targets_ratios_and_reasons() -> None:
    table = report.table(GPU_ROWS, "TFLOP/s", cases.TARGETS)
    cells = {str(column.header): list(column.cells) for column in table.columns}
    assert cells["target"][:2] == ["0.16", "0.45"]
    assert cells["sinkattn"][:2] == ["0.200 (500)", "not compiled"]
    assert cells["fa2"][:2] == ["0.500 (2.50x)", "1.50 (-)"]
    assert cells["cudnn"][:2] == ["not supported", "-"]
    assert cells["extra MiB"][0] == "0.5"
    assert str(table.caption).splitlines()[0] == "cudnn, forward: not supported: windows"


def test_a_captured_call_keeps_its_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph has addresses only, and would read what others have written there since."""
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Mock)
    monkeypatch.setattr(torch.cuda, "graph", lambda *_, **__: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    inputs = torch.zeros(3)
    alive = weakref.ref(inputs)
    replay = gpu.captured(lambda inputs=inputs: (inputs + 1,))
    del inputs
    gc.collect()
    assert alive() is not None
    assert torch.equal(replay()[0], torch.ones(3))


def test_plots_need_results(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="holds nothing to draw"):
        main(["plot", "--results", str(tmp_path)])


def test_prefill_needs_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="measures a CUDA device, and torch finds none here"):
        main(["prefill", "--quick"])


@needs_gpus()
@pytest.mark.parametrize("mode", [[], ["--graph"]])
def test_prefill_measures(tmp_path: Path, mode: list[str]) -> None:
    path = tmp_path / "rows.json"
    names = ["--case", "w128-512", "--case", "full-512-d128", "--case", "host"]
    assert main(["prefill", "--backward", "--json", str(path), "--commit", "none", *names, *mode]) == 0
    _, rows = harness.load(path, gpu.Row)
    timed = {(row.case, row.impl) for row in rows if row.ms is not None and row.direction == "forward"}
    assert timed >= {(case, impl) for case in ("w128-512", "full-512-d128") for impl in ("sinkattn", "fa2", "eager")}
    assert (("host", "sinkattn") in timed) == (not mode)


def test_an_unknown_study_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["gpu"])
    assert "invalid choice: 'gpu'" in capsys.readouterr().err
