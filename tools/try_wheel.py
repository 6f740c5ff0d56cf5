# SPDX-License-Identifier: Apache-2.0
"""python tools/try_wheel.py WHEEL RELEASE[-PYTHON] FOLDER PYTEST...: the wheel under a torch of that release.

On a CPU, with pytest's arguments as in the folder tests. RELEASE-PYTHON, 2.15-3.14 say, takes another Python; where
none is found, it says so and takes this one. Prints one line, and everything if a test failed.

The package index has torch built for CUDA, whose import needs gigabytes of CUDA libraries. A CPU calls none, so each is
replaced by one whose functions return an error.
"""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NEEDED = ("filelock", "typing_extensions", "sympy", "networkx", "jinja2", "fsspec", "setuptools", "numpy")
TESTING = ("pytest", "hypothesis", "exceptiongroup", "tomli")  # the last two for Python 3.10, whose pip would add them
OF_THE_SYSTEM = ("libc.so", "libm.so", "libz.so", "libdl", "librt", "libgcc_s", "libquadmath", "libpthread", "ld-linux")


def output(*command: str | Path) -> list[str]:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


def empty_cuda_libraries(folder: Path) -> None:
    own, needed, taken, given = set(), set(), set(), set()
    for library in folder.glob("*.so*"):
        own.add(library.name)
        needed |= {line.split("[")[1].rstrip("]") for line in output("readelf", "-d", library) if "(NEEDED)" in line}
        for line in output("nm", "-D", library):
            *_, kind, name = line.split()
            (taken if kind == "U" else given).add(name.replace("@@", "@"))
    missing = {name for name in needed - own if not name.startswith((*OF_THE_SYSTEM, "libstdc++"))}
    by_version: dict[str, set[str]] = {}
    for symbol in taken - given:
        if symbol.startswith(("cu", "nccl", "nvrtc", "nvshmem", "__cuda")):
            name, _, version = symbol.partition("@")
            by_version.setdefault(version, set()).add(name)
    functions = "".join(f"int {x}(void) {{ return 999; }}\n" for names in by_version.values() for x in sorted(names))
    versions = "".join(
        f"{version} {{ global: {'; '.join(sorted(names))}; }};\n" for version, names in by_version.items() if version
    )
    (folder / "empty.c").write_text(functions)
    (folder / "empty.map").write_text(versions)
    script = [f"-Wl,--version-script={folder / 'empty.map'}"] if versions else []
    for name in sorted(missing):
        command = ["cc", "-shared", "-fPIC", "-w", *script, f"-Wl,-soname,{name}"]
        subprocess.run([*command, folder / "empty.c", "-o", folder / name], check=True)


def install(wheel: Path, release: str, version: str, folder: Path) -> Path:
    site = folder / "site"
    site.mkdir(parents=True)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    chosen = ["--quiet", "--only-binary=:all:", "--python-version", version]
    subprocess.run([*pip, "install", *chosen, "--target", site, *NEEDED, *TESTING], check=True)
    download = ["download", *chosen, "--no-deps", "--dest", folder, f"torch=={release}.*"]
    subprocess.run([*pip, *download], check=True)
    (torch,) = folder.glob("torch-*.whl")
    zipfile.ZipFile(torch).extractall(site)
    torch.unlink()
    empty_cuda_libraries(site / "torch" / "lib")
    zipfile.ZipFile(wheel).extractall(site)
    return site


def find_python(version: str, folder: Path) -> str | None:
    if not version:
        return sys.executable
    command = [sys.executable, ROOT / "tools" / "get_python.py", version, folder]
    found = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    return found.stdout.strip() or None


def run(python: str, site: Path, tests: list[str]) -> subprocess.CompletedProcess[str]:
    """From the folder of the tests, as a Python before 3.11 imports first what lies in the current one."""
    paths = os.pathsep.join(map(str, (site, ROOT, ROOT / "tests")))
    environment = os.environ | {"PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1"}
    command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]
    pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.run(command, cwd=ROOT / "tests", env=environment, check=False, **pipe)


def main(wheel: Path, leg: str, folder: Path, tests: list[str]) -> int:
    release, _, version = leg.partition("-")
    shutil.rmtree(folder, ignore_errors=True)
    python = find_python(version, folder)
    if not python:
        print(f"Python {version}: not run, it is neither here nor in Debian; torch {release} under this one instead")
        python = sys.executable
    say = "import platform; print(platform.python_version())"
    version = subprocess.run([python, "-c", say], capture_output=True, text=True, check=True).stdout.strip()
    site = install(wheel, release, version.rpartition(".")[0], folder)
    done = run(python, site, tests)
    torch = next(site.glob("torch-*.dist-info")).name.removeprefix("torch-").removesuffix(".dist-info")
    last = done.stdout.splitlines()[-1]
    print(f"{wheel.name}, torch {torch}, Python {version}: {last}" if not done.returncode else done.stdout)
    if not done.returncode:
        shutil.rmtree(folder)
    return done.returncode


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]).resolve(), sys.argv[4:]))
