# SPDX-License-Identifier: Apache-2.0
"""The functions of csrc/cuda/ptx, each alone on the GPU: tests/cuda, a program of its own."""

import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from gpus import needs_gpus

ROOT = Path(__file__).parent.parent
PROGRAM = ROOT / "build" / "native" / "test_device"
pytestmark = [
    needs_gpus(),
    pytest.mark.skipif(
        shutil.which("nvcc") is None and not PROGRAM.exists(),
        reason="needs nvcc, or what make build/native/test_device made",
    ),
]


def test_functions_of_the_device() -> None:
    if shutil.which("nvcc"):
        subprocess.run(["make", "-s", str(PROGRAM.relative_to(ROOT))], cwd=ROOT, check=True)
    done = subprocess.run([PROGRAM], capture_output=True, text=True, timeout=120)
    lines = done.stdout.splitlines()
    assert not [line for line in lines if "FAILED" in line], done.stdout
    assert done.returncode == 0, done.stderr
    assert len(lines) == (41 if torch.cuda.get_device_capability() == (9, 0) else 13), done.stdout
