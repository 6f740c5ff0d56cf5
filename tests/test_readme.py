# SPDX-License-Identifier: Apache-2.0
"""What README shows is so: its python and c blocks run, its mask is the mask, its table is the kept results.

Blocks marked py or unmarked are fragments, and are not run.
"""

import re
import shlex
import subprocess
from pathlib import Path
from types import ModuleType

import pytest
import torch

from benchmarks import cpu, distributed, prefill, report
from sinkattn.reference import visible

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "README.md").read_text()


def block(language: str) -> str:
    (found,) = re.findall(rf"```{language}\n(.*?)```", TEXT, re.DOTALL)
    return str(found)


def test_python_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, torch.Tensor] = {}
    exec(block("python"), names)
    assert names["s_aux"].grad is not None
    assert "torch.Size([1, 1024, 8, 64]) torch.Size([1, 8, 1024])" in capsys.readouterr().out


def test_c_example_runs(tmp_path: Path) -> None:
    (tmp_path / "example.c").write_text(block("c"))
    build = ROOT / "build" / "native"
    libraries = shlex.split((build / "link_libs").read_text())
    compile_it = ["cc", "-std=c11", "-Wall", "-Wextra", "-Werror", f"-I{ROOT / 'csrc' / 'include'}", "example.c"]
    subprocess.run([*compile_it, str(build / "libsinkattn.a"), *libraries, "-o", "example"], cwd=tmp_path, check=True)
    ran = subprocess.run([tmp_path / "example"], check=True, capture_output=True, text=True)
    assert ran.stdout.endswith("lse[0] = 0.693147\n"), ran.stdout  # log(exp(0) + exp(0)): one key and the sink


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


def test_links_lead_somewhere() -> None:
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    links = [(page, link) for page in pages for link in re.findall(r"\]\((?!http)([^)#]+)", page.read_text())]
    assert links
    assert [(page.name, link) for page, link in links if not (page.parent / link).exists()] == []
