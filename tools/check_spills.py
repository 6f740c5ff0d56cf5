# SPDX-License-Identifier: Apache-2.0
"""What each CUDA kernel takes of an SM, as ptxas -v told it; `make check-spills` compiles the kernels and runs this.

Findings are kernels of csrc/cuda/*_sm90 ("tuned") that spill or keep a stack frame, and what ptxas calls a potential
performance loss: wgmma made serial, setmaxnreg ignored. Exits with 1 if there is any.

    python tools/check_spills.py build/native/csrc/cuda/fwd_sm90/fwd_sm90.ptxas ...
"""

import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

# Tuned sources -> the code that runs; elsewhere these files have empty kernels.
TUNED = {re.compile(r"csrc/cuda/\w+_sm90/"): "sm_90a"}
ENTRY = re.compile(r"Compiling entry function '(\S+)' for '(\w+)'")
PROPERTIES = re.compile(r"Function properties for (\S+)")
STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
USED = re.compile(r"Used (\d+) registers")
SHARED = re.compile(r"(\d+) bytes smem")
LOSS = re.compile(r"\(C\d+\) Potential Performance Loss: (.*)|(setmaxnreg.*ignored.*)")


@dataclass
class Kernel:
    """One function for one architecture; shared is what the compiler knows of, not what a launch adds."""

    source: str
    name: str
    arch: str
    tuned: bool
    registers: int = 0
    shared: int = 0
    stack: int = 0
    stores: int = 0
    loads: int = 0


def read(path: Path) -> tuple[list[Kernel], list[str]]:
    """The kernels of a log, and the performance losses of tuned code. Raises ValueError for a log without a kernel."""
    source = path.as_posix()[path.as_posix().find("csrc/") :].removesuffix(".ptxas") + ".cu"
    only = next((arch for folder, arch in TUNED.items() if folder.match(source)), None)
    kernels: list[Kernel] = []
    losses: list[str] = []
    arch = ""
    lines = path.read_text().splitlines()
    for line in lines:
        if found := ENTRY.search(line):
            arch = found[2]
        elif found := PROPERTIES.search(line):
            kernels.append(Kernel(source, found[1], arch, arch == only))
        elif found := STACK.search(line):
            kernels[-1].stack, kernels[-1].stores, kernels[-1].loads = map(int, found.groups())
        elif found := USED.search(line):
            kernels[-1].registers = int(found[1])
            kernels[-1].shared = sum(map(int, SHARED.findall(line)))
        elif only and (found := LOSS.search(line)):
            losses.append(f"{source}: {found[1] or found[2]}")
    if not any("ptxas info" in line for line in lines):
        raise ValueError(f"{path} is no log of ptxas -v")
    return [kernel for kernel in kernels if only in (None, kernel.arch)], losses


def demangle(kernels: list[Kernel]) -> None:
    """void sa::(anonymous namespace)::f<sa::Bf16>(int) becomes f<Bf16>. Names stay as they are without c++filt."""
    if not shutil.which("c++filt"):
        return
    names = "\n".join(kernel.name for kernel in kernels)
    plain = subprocess.run(["c++filt"], input=names, check=True, capture_output=True, text=True).stdout.splitlines()
    for kernel, name in zip(kernels, plain, strict=True):
        name = re.sub(r"\(anonymous namespace\)::|\bsa::|^void ", "", name)
        kernel.name = name.partition("(")[0].replace("> >", ">>")


def finding(kernel: Kernel) -> str | None:
    if not kernel.tuned or not (kernel.stack or kernel.stores or kernel.loads):
        return None
    return (
        f"{kernel.source}: {kernel.name} has a stack frame of {kernel.stack} bytes,"
        f" {kernel.stores} bytes of spill stores, {kernel.loads} of spill loads"
    )


def table(kernels: list[Kernel]) -> str:
    head = ("kernel", "code", "registers", "static shared", "stack", "spill stores", "spill loads", "tuned")
    rows = [
        (k.name, k.arch, *map(str, (k.registers, k.shared, k.stack, k.stores, k.loads)), "yes" if k.tuned else "")
        for k in kernels
    ]
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]

    def line(row: tuple[str, ...]) -> str:
        cells = zip(row, widths, strict=True)
        return "  ".join(c.rjust(w) if 2 <= i < 7 else c.ljust(w) for i, (c, w) in enumerate(cells)).rstrip()

    return "\n".join(map(line, (head, *rows)))


def main(arguments: list[str]) -> int:
    kernels: list[Kernel] = []
    findings: list[str] = []
    for argument in arguments:
        found, losses = read(Path(argument))
        kernels += found
        findings += losses
    demangle(kernels)
    findings += [text for kernel in kernels if (text := finding(kernel))]
    if not any(kernel.tuned for kernel in kernels):
        findings.append("no tuned kernel is among these logs")
    print("\n".join([table(kernels), *findings]), flush=True)
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
