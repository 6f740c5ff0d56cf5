# SPDX-License-Identifier: Apache-2.0
"""The examples run as their users run them, and what they claim holds."""

import importlib.util
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
STEPS = 8

for name in ("transformers", "matplotlib", "rich", "tqdm"):
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed: pip install --no-build-isolation '.[demo]'", allow_module_level=True)


def run(script: str, *arguments: str, **environment: str) -> str:
    path = os.pathsep.join([str(EXAMPLES.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, str(EXAMPLES / script), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": path} | environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("demo")
    printed = run("finetune_gpt_oss.py", "--steps", str(STEPS), "--length", "160", "--output", str(folder))
    assert "Logits against eager's in fp32" in printed
    return folder


def test_finetune(tuned: Path) -> None:
    results = json.loads((tuned / "results.json").read_text())
    ours, eager = results["runs"]["sinkattn"], results["runs"]["eager"]
    assert len(ours["losses"]) == len(eager["losses"]) == STEPS
    for run in (ours, eager):
        assert run["eval_loss_after"] < run["eval_loss_before"] - 0.5
        assert run["tokens_per_second"] > 0
    assert math.isclose(ours["eval_loss_before"], eager["eval_loss_before"], rel_tol=1e-5)
    assert math.isclose(ours["eval_loss_after"], eager["eval_loss_after"], rel_tol=1e-3)
    seen = results["logit_difference"]
    bound = 1e-5 * seen["largest_logit"]
    assert 0 < seen["median"] <= seen["largest_before_rerouting"] <= bound
    assert (seen["far"] == 0) == (seen["largest"] <= bound)
    assert seen["rerouted"] > 0 or seen["far"] == 0

    assert results["layer_types"] == ["sliding", "full"] * 2
    for before, after in zip(results["sinks"]["before"], results["sinks"]["after"], strict=True):
        assert all(1e-5 < abs(a - b) < 0.1 for a, b in zip(before, after, strict=True))
    shares = [share for when in ("before", "after") for layer in results["sink_mass"][when] for share in layer]
    assert len(shares) == 2 * 4 * 8
    assert all(0 < share < 1 for share in shares)


def test_finetune_plot(tuned: Path) -> None:
    import matplotlib.image

    pixels = matplotlib.image.imread(tuned / "finetune.png")
    assert pixels.shape[0] > 400
    assert pixels.shape[1] > 1200
    assert pixels[..., :3].std() > 0.05, "the picture is empty"


def test_generate(tuned: Path) -> None:
    printed = run("generate_gpt_oss.py", "--model", str(tuned / "model"), "--tokens", "12", "--prompt", "The print ")
    assert "All three wrote the same." in printed
    assert "The print " in printed


def test_rl_parity() -> None:
    sizes = ("--prompt", "140", "--tokens", "6")
    printed = run("rl_parity.py", "--dtype", "float32", *sizes, OMP_NUM_THREADS="1")  # a second thread only waits
    assert "trainer, chunks and decode agree bit for bit" in printed
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in printed.splitlines() if "│" in line]
    found = {(attention, matmuls, name): (gap, same) for attention, matmuls, name, gap, _, same in rows}
    assert len(found) == 12
    for name in ("chunks", "decode", "decode, invariant"):
        assert found["sinkattn", "16 rows", name] == ("0.0e+00", "100.0%")
    assert 0 < float(found["eager", "16 rows", "decode"][0]) < 1e-4, "nothing was compared"


def test_select_keys() -> None:
    printed = run(
        "select_keys.py", "--keys", "4096", "--top", "256", "--heads", "32", "--head-dim", "128", "--batch", "2"
    )
    assert "256 of 4096 keys, 32:1 heads of 128: off from fp64 by" in printed
    assert float(re.search(r"by (\S+)", printed)[1]) < 5e-3  # type: ignore[index]
    assert 0.5 < float(re.search(r"hold: (\S+)", printed)[1]) < 1  # type: ignore[index]
