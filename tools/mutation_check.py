# SPDX-License-Identifier: Apache-2.0
"""Plants bugs, one at a time, in a copy of the sources, and sees that the test named beside each one fails.

All take minutes: a bug in C or C++ compiles the extension again.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tools.mutations import C_SUITE, CUDA_TEST, MUTATIONS

ROOT = Path(__file__).resolve().parent.parent


def build(scratch: Path) -> None:
    command = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
    done = subprocess.run(command, cwd=scratch, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"the build failed:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")


def c_passes(scratch: Path, test: str) -> bool:
    """Whether a test of the C suite passes; the suite fails where no test has the name."""
    emulates = f"{C_SUITE}{test}" == CUDA_TEST
    folder = "build/emulated" if emulates else "build/native"
    command = ["make", "-j2", f"{folder}/test_c", f"BUILD={folder}"]
    command += ["NVCC=tests/emulator/nvcc", "CCACHE="] if emulates else []
    made = subprocess.run(command, cwd=scratch, capture_output=True, text=True)
    if made.returncode:
        raise SystemExit(f"the C suite does not build:\n{made.stderr[-3000:]}")
    try:
        done = subprocess.run([f"{folder}/test_c", "1", test], cwd=scratch, capture_output=True, text=True, timeout=900)
    except subprocess.TimeoutExpired:
        return False
    if done.stdout.endswith("0 passed, 0 failed\n"):
        raise SystemExit(f"the C suite has no test {test!r}")
    return done.returncode == 0


def passes(scratch: Path, *tests: str) -> bool:
    """Whether all pass; a crash is a failure, a test that is not there an error of this script."""
    if not all(c_passes(scratch, test.removeprefix(C_SUITE)) for test in tests if test.startswith(C_SUITE)):
        return False
    tests = tuple(test for test in tests if not test.startswith(C_SUITE))
    if not tests:
        return True
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    done = subprocess.run(command, cwd=scratch, capture_output=True, text=True)
    if done.returncode in (2, 3, 4, 5):
        raise SystemExit(f"pytest did not run {tests}:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    return done.returncode == 0


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m tools.mutation_check", description=__doc__)
    parser.add_argument("words", nargs="*", help="only bugs with one of these words in their name; default: all")
    words = parser.parse_args(arguments).words
    chosen = [m for m in MUTATIONS if not words or any(word in m.name for word in words)]
    if not chosen:
        parser.error(f"no bug has {' or '.join(words)} in its name")
    missed = []
    for m in chosen:
        if m.old not in (ROOT / m.path).read_text():
            raise SystemExit(f"{m.name}: {m.path} does not have {m.old!r}")
    with tempfile.TemporaryDirectory(prefix="mutation_check_") as folder:
        scratch = Path(folder) / "sinkattn"
        ignored = shutil.ignore_patterns(
            ".git", ".venv", "__pycache__", ".*_cache", ".hypothesis", "asan", "tsan", "fuzz"
        )
        shutil.copytree(ROOT, scratch, ignore=ignored)
        if not all(m.of_c_suite for m in chosen):
            build(scratch)
        if not passes(scratch, *sorted({m.test for m in chosen})):
            raise SystemExit("the tests do not pass without a planted bug")
        for m in chosen:
            path = scratch / m.path
            text = path.read_text()
            path.write_text(text.replace(m.old, m.new))
            if path.suffix != ".py" and not m.of_c_suite:
                build(scratch)
            caught = not passes(scratch, m.test)
            print(f"{'caught' if caught else 'MISSED':7} {m.name:34} {m.test}", flush=True)
            if not caught:
                missed.append(m.name)
            path.write_text(text)
    print(f"{len(chosen) - len(missed)} of {len(chosen)} planted bugs caught")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
