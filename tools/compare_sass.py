# SPDX-License-Identifier: Apache-2.0
"""Whether two builds hold the same machine code, kernel by kernel; for changes that must not reach the GPU.

Kernels are matched by architecture and demangled name without namespaces, and compared by instructions and encodings,
without addresses, labels and names of symbols. Prints a line for each kernel that differs or that only one build has,
and exits with 1 if there is any. Needs cuobjdump, nvdisasm and c++filt.

    python tools/compare_sass.py build/before build/after
    python tools/compare_sass.py --object fwd_sm90 build/before build/after
"""

import argparse
import collections
import difflib
import re
import subprocess
import sys
from pathlib import Path

ARCH = re.compile(r"code for (sm_\w+)")
FUNCTION = re.compile(r"\s*Function : (\S+)")
INSTRUCTION = re.compile(r"\s*(?:/\*[0-9a-f]{4,}\*/\s+(.*?);)?\s*/\* (0x[0-9a-f]{16}) \*/")
LABEL = re.compile(r"`?\(?\.L_\w+\)?")
Kernels = dict[str, list[list[str]]]  # one listing for each kernel of a name, in the order of the files


def plain(names: list[str]) -> list[str]:
    """void sa::room::(anonymous namespace)::f<sa::Bf16>(int) becomes f<Bf16>(int)."""
    done = subprocess.run(["c++filt"], input="\n".join(names), check=True, capture_output=True, text=True)
    return [re.sub(r"\(anonymous namespace\)::|\b(?:\w+::)+|^void ", "", name) for name in done.stdout.splitlines()]


def normal(instruction: str, symbols: dict[str, str]) -> str:
    """An instruction with its labels numbered in the order of appearance, and without names of symbols."""

    def numbered(match: re.Match[str]) -> str:
        return symbols.setdefault(match.group(), f"L{len(symbols)}")

    return re.sub(r"_Z\w+", "SYMBOL", LABEL.sub(numbered, instruction))


def read_object(text: str) -> list[tuple[str, str, list[str]]]:
    """Architecture, mangled name and instructions of each kernel."""
    found: list[tuple[str, str, list[str]]] = []
    arch, symbols = "", dict[str, str]()
    for line in text.splitlines():
        if match := ARCH.search(line):
            arch = match[1]
        elif match := FUNCTION.match(line):
            found.append((arch, match[1], []))
            symbols = {}
        elif found and (match := INSTRUCTION.match(line)):
            if match[1]:
                found[-1][2].append(normal(match[1], symbols))
            found[-1][2][-1] += f"  {match[2]}"
    return found


def read_build(build: Path, part: str) -> Kernels:
    kernels: Kernels = collections.defaultdict(list)
    for path in sorted((build / "csrc/cuda").rglob("*.cu.o")):
        if part not in path.as_posix():
            continue
        done = subprocess.run(["cuobjdump", "-sass", path], check=True, capture_output=True, text=True)
        found = read_object(done.stdout)
        for (arch, _, code), name in zip(found, plain([name for _, name, _ in found]), strict=True):
            kernels[f"{arch} {name}"].append(code)
    return kernels


def difference(before: list[str], after: list[str]) -> str:
    changed = [
        x for x in difflib.unified_diff(before, after, lineterm="", n=0) if x[0] in "+-" and x[:3] not in {"+++", "---"}
    ]
    return f"{len(before)} instructions became {len(after)}; {len(changed)} lines of difference"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("before", type=Path, help="a build folder")
    parser.add_argument("after", type=Path)
    parser.add_argument("--object", metavar="PART", default="", help="only objects whose path contains this")
    parser.add_argument("--show", metavar="PART", help="print the difference of kernels whose name contains this")
    options = parser.parse_args()
    before, after = (read_build(build, options.object) for build in (options.before, options.after))
    same = different = 0
    for name in sorted(before.keys() | after.keys()):
        old, new = sorted(before.get(name, [])), sorted(after.get(name, []))
        if old == new:
            same += len(old)
            continue
        different += 1
        if len(old) != len(new):
            print(f"{name}: {len(old)} kernels became {len(new)}")
            continue
        for x, y in zip(old, new, strict=True):
            if x == y:
                continue
            print(f"{name}: {difference(x, y)}")
            if options.show and options.show in name:
                print("\n".join(difflib.unified_diff(x, y, lineterm="")))
    print(f"{same} kernels are the same, {different} differ")
    return 1 if different or not same else 0


if __name__ == "__main__":
    sys.exit(main())
