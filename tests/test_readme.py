# SPDX-License-Identifier: Apache-2.0
"""What README shows is so: its mask is the mask, its tables are the kept results. test_docs.py runs its blocks."""

import re
from pathlib import Path
from types import ModuleType

import pytest
import torch

from benchmarks import cpu, distributed, prefill, report
from sinkattn.reference import visible

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "README.md").read_text()


def test_mask_picture() -> None:
    rows = re.findall(r"^ +row \d      ([ox. ]{16}) +\+", TEXT, re.MULTILINE)
    drawn = torch.tensor([[cell in "ox" for cell in row[:16:2]] for row in rows])
    length = torch.tensor([8])
    assert torch.equal(drawn, visible(length, length, 8, 8, left=2, right=0, num_sink_tokens=1)[0])


@pytest.mark.parametrize(("study", "text"), [(cpu, TEXT), (prefill, TEXT), (distributed, distributed.PAGE.read_text())])
def test_table_is_drawn_from_the_kept_results(study: ModuleType, text: str, tmp_path: Path) -> None:
    assert study.readme(text) == text, f"python -m benchmarks {study.SUITE} --readme"
    assert report.none_yet(study.SUITE) in study.readme(text, tmp_path)
    with pytest.raises(ValueError, match="the page has no"):
        study.readme("# no place for a table\n")
