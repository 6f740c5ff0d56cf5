# SPDX-License-Identifier: Apache-2.0
"""python tools/try_wheel.py WHEEL RELEASE FOLDER [PYTEST...]: the wheel under a torch of that release, on a CPU.

The package index has torch built for CUDA, which wants gigabytes of CUDA libraries before it imports. None is called
on a CPU, so each gets an empty one of its name, whose functions return an error.
"""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

NEEDED = ("filelock", "typing_extensions", "sympy", "networkx", "jinja2", "fsspec", "setuptools", "numpy")
TESTING = ("pytest", "hypothesis")
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
    functions = "".join(
        f"int {name}(void) {{ return 999; }}\n" for names in by_version.values() for name in sorted(names)
    )
    versions = "".join(
        f"{version} {{ global: {'; '.join(sorted(names))}; }};\n" for version, names in by_version.items() if version
    )
    (folder / "empty.c").write_text(functions)
    (folder / "empty.map").write_text(versions)
    script = [f"-Wl,--version-script={folder / 'empty.map'}"] if versions else []
    for name in sorted(missing):
        command = [
            "cc",
            "-shared",
            "-fPIC",
            "-w",
            *script,
            f"-Wl,-soname,{name}",
            folder / "empty.c",
            "-o",
            folder / name,
        ]
        subprocess.run(command, check=True)


def install(wheel: Path, release: str, folder: Path) -> Path:
    site = folder / "site"
    if not (site / "torch").exists():
        site.mkdir(parents=True)
        pip = [sys.executable, "-m", "pip"]
        subprocess.run([*pip, "install", "--quiet", "--target", site, *NEEDED, *TESTING], check=True)
        download = ["download", "--quiet", "--no-deps", "--only-binary=:all:", "--dest", folder, f"torch=={release}.*"]
        subprocess.run([*pip, *download], check=True)
        (torch,) = folder.glob("torch-*.whl")
        zipfile.ZipFile(torch).extractall(site)
        torch.unlink()
        empty_cuda_libraries(site / "torch" / "lib")
    zipfile.ZipFile(wheel).extractall(site)
    return site


if __name__ == "__main__":
    site = install(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]).resolve())
    root = Path(__file__).resolve().parent.parent
    paths = os.pathsep.join(map(str, (site, root, root / "tests")))
    environment = os.environ | {"PYTHONPATH": paths, "PYTHONSAFEPATH": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *sys.argv[4:]]
    sys.exit(subprocess.run(command, cwd=root, env=environment).returncode)
