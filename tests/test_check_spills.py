# SPDX-License-Identifier: Apache-2.0
"""tools/check_spills.py, which reads what ptxas says of each kernel."""

import re
import subprocess
import sys
from pathlib import Path

TOOL = Path(__file__).parent.parent / "tools" / "check_spills.py"
PTXAS = """\
ptxas info    : Compiling entry function '_Z6kernelv' for '{arch}'
ptxas info    : Function properties for _Z6kernelv
    {stack} bytes stack frame, {spills} bytes spill stores, {spills} bytes spill loads
ptxas info    : Used 168 registers, used 1 barriers, 1024 bytes smem, 400 bytes cmem[0]
"""


def spills(folder: Path, source: str, text: str) -> subprocess.CompletedProcess[str]:
    log = folder / "csrc" / "cuda" / f"{source}.ptxas"
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_text(text)
    return subprocess.run([sys.executable, TOOL, log], capture_output=True, text=True, timeout=60)


def test_spills_of_tuned_kernels_are_found(tmp_path: Path) -> None:
    clean = PTXAS.format(arch="sm_90a", stack=0, spills=0)
    done = spills(tmp_path, "fwd_sm90/fwd_sm90", clean + PTXAS.format(arch="sm_80", stack=8, spills=8))
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"kernel +sm_90a +168 +1024 +0 +0 +0 +yes\n$", done.stdout)
    for stack, stores in ((8, 12), (8, 0)):
        done = spills(tmp_path, "fwd_sm90/fwd_sm90", PTXAS.format(arch="sm_90a", stack=stack, spills=stores))
        assert done.returncode == 1
        assert re.search(
            rf"fwd_sm90/fwd_sm90.cu: \S*kernel\S* has a stack frame of 8 bytes, {stores} bytes of", done.stdout
        )
    loss = (
        "ptxas info : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due to a call\n"
    )
    done = spills(tmp_path, "fwd_sm90/fwd_sm90", clean + loss)
    assert done.returncode == 1
    assert "fwd_sm90/fwd_sm90.cu: wgmma.mma_async instructions are serialized" in done.stdout


def test_spills_of_no_tuned_kernel_are_no_success(tmp_path: Path) -> None:
    done = spills(tmp_path, "fwd_sm80/fwd_sm80", PTXAS.format(arch="sm_90a", stack=8, spills=8))
    assert done.returncode == 1
    assert "no tuned kernel is among these logs" in done.stdout
    assert "is no log of ptxas -v" in spills(tmp_path, "fwd_sm90/fwd_sm90", "nvcc: command not found\n").stderr
