# SPDX-License-Identifier: Apache-2.0
"""The examples on a CUDA device, in bf16."""

import json
from pathlib import Path

import torch
from gpus import needs_gpus
from test_examples import run

pytestmark = needs_gpus()


def test_finetune_and_generate(tmp_path: Path) -> None:
    """bf16's losses stay near fp32's, with sinkattn and with eager attention.

    The first five are 1e-3 off on a CPU, without the sinks 6e-3. Over 20 steps seeds 2 to 7 are at most 3.5e-3 off,
    both. Where 40 steps end is chance: up to 0.19 from fp32's end, and eager attention ends 0.23 from itself when the
    weights begin 2^-22 of themselves away.
    """
    sizes = ("--steps", "40", "--length", "512")
    run("finetune_gpt_oss.py", "--device", "cuda", "--dtype", "bfloat16", *sizes, "--output", str(tmp_path))
    results = json.loads((tmp_path / "results.json").read_text())
    for tuned in results["runs"].values():
        assert tuned["eval_loss_after"] < tuned["eval_loss_before"] - 1
    *halves, exact = (torch.tensor(tuned["losses"]) for tuned in results["runs"].values())
    assert len(halves) == 2
    for off in ((losses - exact).abs() for losses in halves):
        assert 0 < off[:5].mean() < 3e-3
        assert off[:20].mean() < 5e-3
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
