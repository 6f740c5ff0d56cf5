# SPDX-License-Identifier: Apache-2.0
"""The benchmarks refuse wrong kernels, count work by the mask, and say why a peer is absent."""

import re
from pathlib import Path

import pytest

import sinkattn
from benchmarks import cases, harness, peers, report
from benchmarks.__main__ import main

CASE = cases.Case(length=96, head_dim=16, dtype="fp32", window=8)
PEERS = tuple(peer for peer in peers.CPU if peer.name != "flex")  # which compiles for ten seconds


def off_by_one(case: cases.Case, direction: str) -> peers.Attention:
    left, right = case.window_size
    return lambda q, k, v, s_aux: sinkattn.flash_attn_func(q, k, v, window_size=(left + 1, right), s_aux=s_aux)


def without_sink(case: cases.Case, direction: str) -> peers.Attention:
    return lambda q, k, v, s_aux: sinkattn.flash_attn_func(q, k, v, window_size=case.window_size) + 0 * s_aux.sum()


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("window", [0, 8])
def test_peers_agree_and_are_timed(dtype: str, direction: str, window: int) -> None:
    case = cases.Case(96, 16, dtype, window)
    rows = harness.measure("cpu", case, direction, PEERS, seconds=0, commit="none")
    assert [row.impl for row in rows] == [peer.name for peer in PEERS]
    for row in rows:
        assert row.ms is not None
        assert row.gflops is not None
        assert row.ms * row.gflops == pytest.approx(1e3 * case.gflop(direction), rel=1e-3)


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("wrong", [off_by_one, without_sink])
def test_a_wrong_kernel_is_not_timed(direction: str, wrong: object) -> None:
    planted = peers.Peer("planted", wrong, has_sink=True, heads_first=False)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match=f"{CASE.id} {direction}: planted is off from fp64"):
        harness.measure("cpu", CASE, direction, [*PEERS, planted], seconds=0, commit="none")


def test_absent_peers_say_why() -> None:
    flex = next(peer for peer in peers.CPU if peer.name == "flex")
    rows = harness.measure("cpu", CASE, "backward", [*PEERS, flex], seconds=0, commit="none")
    assert (rows[-1].ms, rows[-1].note) == (None, "not supported: no CPU backward")


def test_ids_are_unique() -> None:
    for table in (cases.CPU, cases.CPU_QUICK):
        assert len({case.id for case in table}) == len(table)


@pytest.mark.parametrize("case", [cases.Case(50, 16, "fp32"), cases.Case(50, 16, "fp32", 7)])
def test_work_is_counted_over_visible_pairs(case: cases.Case) -> None:
    pairs = sum(min(i + 1, case.window or case.length) for i in range(case.length)) * case.num_q_heads
    assert case.gflop("forward") == pytest.approx(4 * case.head_dim * pairs / 1e9)
    assert case.gflop("backward") == pytest.approx(10 * case.head_dim * pairs / 1e9)


def test_rows_survive_the_file_and_are_drawn(tmp_path: Path) -> None:
    rows = [row for d in report.DIRECTIONS for row in harness.measure("cpu", CASE, d, PEERS, 0, "none")]
    path = tmp_path / "machine" / "cpu.json"
    harness.save(path, rows)
    machine, loaded = harness.load(path)
    assert (machine, loaded) == (harness.machine(), rows)
    assert report.table(rows).row_count == 2
    drawn = report.markdown(machine, rows, [CASE]).splitlines()[-1]
    assert re.fullmatch(r"\| w8-96-d16-fp32 \| [\d.]+ \(\d+\) \| [\d.]+x \| - \| [\d.]+x \|.*", drawn), drawn
    report.plot(path.with_suffix(".png"), rows, [CASE])
    assert path.with_suffix(".png").stat().st_size > 10_000


def test_an_unknown_study_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["gpu"])
    assert "invalid choice: 'gpu'" in capsys.readouterr().err
