# SPDX-License-Identifier: Apache-2.0
"""GRPO steps of verl on a CPU, sampled by verl's vLLM rollout: its server, its worker's extension, its weight sync."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

if importlib.util.find_spec("vllm") is None or importlib.util.find_spec("verl") is None:
    pytest.skip("vllm and verl are not both in this environment: make test-vllm makes one", allow_module_level=True)

import vllm
from vllm.platforms import current_platform

if not current_platform.is_cpu():
    pytest.skip("this vLLM is for another device than the CPU, on which these tests train", allow_module_level=True)

TESTS = Path(__file__).parent


def test_grpo_steps(tmp_path: Path) -> None:
    """The trainer finds the log-probabilities that were sampled with, whose sinks are its own after each sync alone."""
    alias = tmp_path / f"vllm-{vllm.__version__}+cpu.dist-info"  # verl asks for the version of a package of that name
    alias.mkdir()
    (alias / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {vllm.__version__}+cpu\n")
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    command = [sys.executable, str(TESTS / "verl_rollout.py"), str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "rollout.json").read_text())
    assert found["attention"] == ""
    assert found["synced"] == ["", ""]
    for other in (found["dummy"], *found["stale"]):
        assert "layer 0 of vLLM's model computes with other sinks than the trainer's" in other
    assert max(found["gaps"]) < 1e-5 < 1e-3 < found["moved"]
