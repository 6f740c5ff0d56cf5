# SPDX-License-Identifier: Apache-2.0
"""tools/check_structure.py: the repository passes it, and each rule about kernels finds a line that breaks it."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tools"))
from check_structure import findings  # noqa: E402

GEOMETRY, TILES, PHASES, SWIZZLES = "accumulator geometry belongs to", "bounds of tiles belong", "phases", "swizzles"
# A line of a kernel -> what is found in it; None where it is in order.
LINES = {
    "const int row = threadIdx.x % 128 / 32 * 16 + lane % 16;": GEOMETRY,
    "const int row = lane / 4 + 8 * i;": GEOMETRY,
    "const int row = threadIdx.x % 32 / 4;": GEOMETRY,
    "const int column = 2 * (threadIdx.x % 4);": GEOMETRY,
    "const int column = lane % 4 * 2;": GEOMETRY,
    "const unsigned quad = 0xfu << (lane / 4 * 4);": None,
    "const int row = warpgroup_row(i), column = fragment_column();": None,
    "const int begin = keys.begin / C::kTileK;": TILES,
    "const int end = (keys.end + kKeys - 1) / kKeys;": TILES,
    "const int t = sa_tile_of(keys.begin, C::kTileK);": None,
    'static_assert((C::kTileQ - 64) / C::kTileK < 4, "");': None,
    "const int chunks = C::kHeadDim / 8;": None,
    "smem.full.wait(ring.phase());": PHASES,
    "const int at = row * 128 + ((chunk ^ (row & 7)) << 4);": SWIZZLES,
    "const int at = row * 128 + ((chunk ^ row % 8) << 4);": SWIZZLES,
    "// a comment may say lane / 4 and keys.begin / kTileK": None,
    "// ---- host ----": "without dashes",
}


def test_the_repository_is_in_order() -> None:
    assert list(findings(ROOT)) == []


def test_the_tree_is_small() -> None:
    """What a release does not need is in git's history, such as studies of questions that are settled."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("needs a git checkout: which files are tracked")
    sizes = {name: (ROOT / name).stat().st_size for name in listed.stdout.split("\0") if (ROOT / name).is_file()}
    assert 1_000_000 < sum(sizes.values()) <= 3_325_000, sorted(sizes, key=lambda name: -sizes[name])[:10]


@pytest.mark.parametrize("line", LINES)
def test_a_line_of_a_kernel(line: str, tmp_path: Path) -> None:
    room = tmp_path / "csrc/cuda/fwd_sm90"
    room.mkdir(parents=True)
    (room / "part.cuh").write_text(f"// SPDX-License-Identifier: Apache-2.0\n\nnamespace sa::fwd_sm90 {{\n{line}\n}}\n")
    found, expected = [sentence for _, _, sentence in findings(tmp_path)], LINES[line]
    assert [expected is not None and expected in sentence for sentence in found] == [True] * (expected is not None)


def test_a_long_method_is_found_and_its_struct_is_not(tmp_path: Path) -> None:
    room = tmp_path / "csrc/cuda/fwd_sm90"
    room.mkdir(parents=True)
    head = "// SPDX-License-Identifier: Apache-2.0\n\nnamespace sa::fwd_sm90 {\nstruct Math {\n"

    def method(lines: int) -> str:
        return "    void run(int first,\n             int last) {\n" + "        step();\n" * lines + "    }\n"

    (room / "part.cuh").write_text(head + 2 * method(50) + "};\n}\n")
    assert list(findings(tmp_path)) == []
    (room / "part.cuh").write_text(head + method(80) + "};\n}\n")
    assert [sentence for _, _, sentence in findings(tmp_path)] == ["the function has 82 lines; at most 80"]
