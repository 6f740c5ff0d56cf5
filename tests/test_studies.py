# SPDX-License-Identifier: Apache-2.0
"""Studies run on a CPU too, and pages show what is kept."""

import re
from pathlib import Path

import pytest
import torch
from arguments import Calls

from benchmarks import generate, harness, plot, report, serving, vllm_steps
from benchmarks.__main__ import main

PAGE = plot.PAGE.read_text()


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def test_a_page_shows_the_kept_results(tmp_path: Path) -> None:
    for path, shown in plot.PAGES.items():
        assert plot.page(path) == path.read_text(), "python -m benchmarks plot"
        for study in shown:
            assert report.none_yet(study.SUITE) in plot.page(path, tmp_path), study.SUITE


def test_a_page_measures_nothing_in_its_prose() -> None:
    """A figure stands in a table, which the test above compares."""
    kept = PAGE.partition("## Settled once")[0]
    prose = re.sub(r"<!-- benchmarks ([\w-]+): begin -->.*?<!-- benchmarks \1: end -->", "", kept, flags=re.DOTALL)
    unit = r"\b\d[\d.,]*\s*(?:x|ms|us|s|%|times|[KMG]i?B|[TG]FLOP/s)(?!\w)"
    assert re.findall(unit, prose) == []
    assert re.findall(unit, "4.2 ms, 3x and 1,000 times") == ["4.2 ms", "3x", "1,000 times"]


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
