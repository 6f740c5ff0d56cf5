# SPDX-License-Identifier: Apache-2.0
"""The examples on a CUDA device, in bf16."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from gpus import needs_gpus
from test_examples import run

pytestmark = needs_gpus()


def test_finetune_and_generate(tmp_path: Path) -> None:
    """Three runs that begin and end alike. On a CPU bf16's first five losses are 1e-3 off, without the sinks 6e-3."""
    sizes = ("--steps", "40", "--length", "512")
    run("finetune_gpt_oss.py", "--device", "cuda", "--dtype", "bfloat16", *sizes, "--output", str(tmp_path))
    results = json.loads((tmp_path / "results.json").read_text())
    for tuned in results["runs"].values():
        assert tuned["eval_loss_after"] < tuned["eval_loss_before"] - 1
    ends = [tuned["eval_loss_after"] for tuned in results["runs"].values()]
    assert len(ends) == 3
    assert max(ends) - min(ends) < 0.1
    ours, eager, exact = (torch.tensor(tuned["losses"][:5]) for tuned in results["runs"].values())
    assert 0 < (ours - exact).abs().mean() < 3e-3
    assert 0 < (eager - exact).abs().mean() < 3e-3
    moved = zip(*(torch.tensor(results["sinks"][when]).flatten() for when in ("before", "after")), strict=True)
    assert all(before != after for before, after in moved)
    printed = run(
        "generate_gpt_oss.py",
        "--model",
        str(tmp_path / "model"),
        "--tokens",
        "12",
        "--device",
        "cuda",
        "--prompt",
        "A ",
    )
    assert "sinkattn, static cache" in printed


def test_rl_parity() -> None:
    printed = run("rl_parity.py", "--device", "cuda", "--prompt", "140", "--tokens", "6")
    assert "trainer, chunks and decode agree bit for bit" in printed
