# SPDX-License-Identifier: Apache-2.0
"""Checks include arrows, rooms, where window arithmetic, tiles' bounds, barriers' phases, accumulator geometry and
swizzles stand, lengths, SPDX lines, titles.

Prints one ``file:line: sentence`` for each finding and exits with 1 if there is any.

    python tools/check_structure.py [repository root]
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 80
# Longer ones, which are to be cut and may not grow: lines of the file, lines of a function.
LONGER: dict[str, tuple[int, int]] = {}

# Of csrc/cuda: what every kernel says, and a room for each kernel, which no other room may include.
CUDA_FLOOR = {"cuda/ptx", "cuda/tile", "cuda/work", "cuda/host"}
ROOMS = (
    *("fwd_sm90", "fwd_window_sm90", "fwd_wide_window_sm90", "bwd_sm90", "bwd_window_sm90", "fwd_sm80", "bwd_sm80"),
    *("bwd_wide_window_sm90", "decode", "decode_window_sm90"),
)
# Folder of csrc -> folders whose headers it may include; the longest matching folder of a file counts.
ARROWS = {
    "include": {"include"},
    "core": {"include", "core"},
    "cpu": {"include", "core", "cpu"},
    "torch": {"include", "torch"},
    "cuda": {"include", "core", "cuda", *CUDA_FLOOR},
    "cuda/ptx": {"cuda/ptx"},
    "cuda/tile": {"core", "cuda/ptx", "cuda/tile"},
    "cuda/work": {"include", "core", "cuda/ptx", "cuda/work"},
    "cuda/host": {"include", "core", "cuda/work", "cuda/host"},
    **{f"cuda/{room}": {"include", "core", *CUDA_FLOOR, f"cuda/{room}"} for room in ROOMS},
}
# Headers of a world -> the only folder that knows it.
WORLDS = {
    "torch": re.compile(r"torch/|ATen/|c10/|pybind11/|Python\.h"),
    "cuda": re.compile(r"cuda|cooperative_groups|mma\.h|cub/|cute/|cutlass/|nv"),
}
INCLUDE = re.compile(r'\s*#\s*include\s*([<"])([^>"]+)[>"]')

# Only these read the mask's fields.
MASK_FIELD = re.compile(r"(?:\.|->)(?:has_)?(?:left|right|shift)\b|\bwindow_size_(?:left|right)\s*[-+*/]\s*\w")
MASK_FILES = {"csrc/core/mask.h", "csrc/core/validate.c"}

# Words of a CUDA vocabulary -> the files or folder that may use them, and where others find what they need.
VOCABULARY = (
    (re.compile(r"\bbarrier_(?:init|wait|arrive)\(|\.phase\(\)"), "cuda/tile/pipe.cuh", "barriers' phases belong to"),
    (re.compile(r"\^ \(?\w+ (?:& 7|% 8)\)*\) << 4"), "cuda/tile/fragment.cuh", "swizzles belong to"),
    # The row of a warp, of a lane, and the column of a lane; / 4 * 4 is the first lane of four.
    (
        re.compile(
            r"/ 32 \* 16\b|\b(?:lane|threadIdx\.x(?: % 32)?) / 4\b(?! [*%])"
            r"|\b2 \* \((?:lane|threadIdx\.x) % 4\)|\b(?:lane|threadIdx\.x) % 4 \* 2\b"
        ),
        "cuda/tile/",
        "accumulator geometry belongs to",
    ),
    # Which tile holds a key or a row is sa_tile_of and sa_tile_from of core/split.h, or a walk of cuda/work.
    (
        re.compile(r"^(?!.*static_assert).*/ (?:C::)?k(?:Tile[QK]?|Keys)\b"),
        "cuda/work/",
        "bounds of tiles belong to core/split.h and",
    ),
)
# Files that still write such lines, since machine code may depend on them: words of the sentence -> files.
EXPLICIT = {
    "swizzles": {"cuda/decode/tile.cuh"},
    "geometry": {
        "cuda/bwd_window_sm90/bwd_window_sm90.cu",
        "cuda/bwd_window_sm90/rows.cuh",
        "cuda/decode/load.cuh",
        "cuda/decode/merge.cuh",
        "cuda/decode/tile.cuh",
        "cuda/fwd_sm80/fwd_sm80.cu",
    },
}

# A definition's first line opens a brace that one at the same column closes: 0 or, in a struct, 4. Data has "= {".
FUNCTION = re.compile(r"^[A-Za-z_].*\)[^;=]*\{$|^ .*\)[^;=]*\{$")
PYTHON_IMPORT = re.compile(r"\s*(?:from|import)\s+(tests|benchmarks|examples|tools)\b")

SOURCES = {".c", ".h", ".cu", ".cuh", ".cpp", ".def"}
Finding = tuple[Path, int, str]


def without_comments(text: str) -> str:
    """Blanks comments and string literals out, keeping every line where it is."""

    def blank(match: re.Match[str]) -> str:
        return re.sub(r"[^\n]", " ", match.group())

    return re.sub(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"', blank, text, flags=re.DOTALL)


def layer_of(path: Path, csrc: Path) -> str:
    folder = path.relative_to(csrc).parent.as_posix()
    while folder not in ARROWS and "/" in folder:
        folder = folder.rpartition("/")[0]
    return folder


def check_arrows(path: Path, lines: list[str], csrc: Path) -> Iterator[Finding]:
    layer = layer_of(path, csrc)
    if layer not in ARROWS:
        yield path, 1, f"csrc/{layer} has no place among the arrows; name it in tools/check_structure.py"
        return
    for number, line in enumerate(lines, 1):
        match = INCLUDE.match(line)
        if not match:
            continue
        quote, name = match.groups()
        if quote == "<":
            for world, pattern in WORLDS.items():
                if pattern.match(name) and layer.partition("/")[0] != world:
                    yield path, number, f"<{name}> belongs to csrc/{world} alone"
            continue
        candidates = (folder / name for folder in (path.parent, csrc, csrc / "include"))
        target = next((c.resolve() for c in candidates if c.is_file()), None)
        if target is None:
            yield path, number, f'"{name}" is in neither its own folder, csrc nor csrc/include'
        elif csrc not in target.parents:
            yield path, number, f'"{name}" lies outside csrc'
        elif layer_of(target, csrc) not in ARROWS[layer]:
            yield path, number, f"csrc/{layer} must not include csrc/{layer_of(target, csrc)}"


def check_room(path: Path, text: str, csrc: Path) -> Iterator[Finding]:
    """A room's names stand in its own namespace, and its kernels' files include every part by name."""
    room = layer_of(path, csrc).rpartition("/")[2]
    if room not in ROOMS:
        return
    if f"\nnamespace sa::{room} {{\n" not in text:
        yield path, 1, f"what stands in csrc/cuda/{room} belongs to namespace sa::{room}"
    if path.suffix == ".cu":
        listed = "".join(kernels.read_text() for kernels in path.parent.glob("*.cu"))
        for part in sorted(path.parent.glob("*.cuh")):
            if f'#include "cuda/{room}/{part.name}"' not in listed:
                yield path, 1, f"the kernel's file lists the parts of its room; cuda/{room}/{part.name} is missing"


def check_mask(path: Path, code: list[str], root: Path) -> Iterator[Finding]:
    if path.relative_to(root).as_posix() in MASK_FILES:
        return
    for number, line in enumerate(code, 1):
        if MASK_FIELD.search(line):
            yield path, number, f"window arithmetic belongs to core/mask.h: {line.strip()}"


def check_vocabulary(path: Path, code: list[str], csrc: Path) -> Iterator[Finding]:
    name = path.relative_to(csrc).as_posix()
    if not name.startswith("cuda/") or name.startswith("cuda/ptx/"):
        return
    for pattern, owner, sentence in VOCABULARY:
        if any(word in sentence and name in files for word, files in EXPLICIT.items()):
            continue
        for number, line in enumerate(code, 1):
            if not name.startswith(owner) and pattern.search(line):
                yield path, number, f"{sentence} {owner}: {line.strip()}"


def check_lengths(path: Path, code: list[str], root: Path) -> Iterator[Finding]:
    file_lines, function_lines = LONGER.get(path.relative_to(root).as_posix(), (MAX_FILE_LINES, MAX_FUNCTION_LINES))
    if len(code) > file_lines:
        yield path, file_lines + 1, f"the file has {len(code)} lines; at most {file_lines}"
    begin, closing = 0, "}"
    for number, line in enumerate(code, 1):
        if not begin and FUNCTION.match(line):
            first = number  # of the line that this one continues
            while first > 1 and re.match(r" {5}", code[first - 1]):
                first -= 1
            begin, closing = number, "    }" if re.match(r" {4}\S", code[first - 1]) else "}"
        elif begin and line.startswith(closing):
            if number - begin + 1 > function_lines:
                yield path, begin, f"the function has {number - begin + 1} lines; at most {function_lines}"
            begin = 0


def check_spdx(path: Path, lines: list[str]) -> Iterator[Finding]:
    first = lines[1:2] if lines and lines[0].startswith("#!") else lines[:1]
    if lines and not (first and "SPDX-License-Identifier: Apache-2.0" in first[0]):
        yield path, 1, "the first line must hold SPDX-License-Identifier: Apache-2.0"


def check_titles(path: Path, lines: list[str]) -> Iterator[Finding]:
    for number, line in enumerate(lines, 1):
        if re.match(r"\s*(?://|#|/\*) ?[-=]{3}", line):
            yield path, number, "a title is a plain comment, without dashes"


def findings(root: Path) -> Iterator[Finding]:
    csrc = root / "csrc"
    tops = ("csrc", "tests", "examples")
    for path in sorted(p for top in tops for p in (root / top).rglob("*") if p.suffix in SOURCES):
        text = path.read_text(encoding="utf-8")
        lines, code = text.splitlines(), without_comments(text).splitlines()
        yield from check_spdx(path, lines)
        yield from check_titles(path, lines)
        yield from check_lengths(path, code, root)
        if csrc in path.parents:
            yield from check_arrows(path, lines, csrc)
            yield from check_room(path, text, csrc)
            yield from check_mask(path, code, root)
            yield from check_vocabulary(path, code, csrc)
    for top in ("sinkattn", "tests", "examples", "benchmarks", "tools"):
        for path in sorted((root / top).rglob("*.py*")):
            if path.suffix not in {".py", ".pyi"}:
                continue
            lines = path.read_text(encoding="utf-8").splitlines()
            yield from check_spdx(path, lines)
            yield from check_titles(path, lines)
            for number, line in enumerate(lines, 1):
                match = PYTHON_IMPORT.match(line)
                if top == "sinkattn" and match:
                    yield path, number, f"sinkattn must not import {match.group(1)}"


def main() -> int:
    root = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent.parent).resolve()
    if not (root / "csrc").is_dir():
        print(f"{root} has no csrc", file=sys.stderr)
        return 2
    found = list(findings(root))
    for path, line, sentence in found:
        print(f"{path.relative_to(root)}:{line}: {sentence}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
