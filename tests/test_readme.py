# SPDX-License-Identifier: Apache-2.0
"""What README shows is so: its mask is the mask, its tables are the kept results. test_docs.py runs its blocks."""

import re
from pathlib import Path
from types import ModuleType

import pytest
import torch

from benchmarks import cpu, gpu, harness, prefill, report
from benchmarks.cases import PREFILL_QUICK
from sinkattn.reference import visible

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "README.md").read_text()


def test_mask_picture() -> None:
    rows = re.findall(r"^ +row \d      ([ox. ]{16}) +\+", TEXT, re.MULTILINE)
    drawn = torch.tensor([[cell in "ox" for cell in row[:16:2]] for row in rows])
    length = torch.tensor([8])
    assert torch.equal(drawn, visible(length, length, 8, 8, left=2, right=0, num_sink_tokens=1)[0])


@pytest.mark.parametrize(("study", "text"), [(cpu, TEXT), (prefill, TEXT)])
def test_table_is_drawn_from_the_kept_results(study: ModuleType, text: str, tmp_path: Path) -> None:
    assert study.readme(text) == text, f"python -m benchmarks {study.SUITE} --readme"
    assert report.none_yet(study.SUITE) in study.readme(text, tmp_path)
    with pytest.raises(ValueError, match="the page has no"):
        study.readme("# no place for a table\n")


def test_the_price_of_the_sinks_gradient() -> None:
    """Of the cases with a target, the kept backward over the same run's without sinks."""
    _, rows = harness.load(harness.RESULTS / "nvidia-h200" / f"{prefill.SUITE}.json", gpu.Row)
    ms = {(row.case, row.impl): row.ms for row in rows if row.direction == "backward" and row.ms}
    cases = [case.id for case in PREFILL_QUICK if (case.id, "sinkattn") in ms]
    more = sorted(100 * (ms[case, "sinkattn"] / ms[case, "sinkattn-no-sink"] - 1) for case in cases)
    assert len(more) == 8
    assert f"costs {more[0]:.0f} to {more[-1]:.0f} % of these backwards" in TEXT
