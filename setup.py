# SPDX-License-Identifier: Apache-2.0
"""Build sinkattn/_lib: make compiles the C and CUDA library, and torch's operators for each torch asked for.

That is the torch that is here, or each of SINKATTN_TORCH_INCLUDES, include folders of torches, as `make wheel` sets it.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import setuptools

TORCH = "torch==2.13.0"
HOW = f"first `pip install {TORCH} 'setuptools>=77'`, then `pip install --no-build-isolation .`"

if int(setuptools.__version__.split(".")[0]) < 77:
    sys.exit(f"sinkattn needs setuptools 77 or newer to build, this is {setuptools.__version__}: {HOW}.")
from setuptools.command.bdist_wheel import bdist_wheel  # noqa: E402
from setuptools.command.build_ext import build_ext  # noqa: E402

INCLUDES = [Path(folder) for folder in os.environ.get("SINKATTN_TORCH_INCLUDES", "").split()]
if not INCLUDES:
    try:
        import torch
    except ImportError:
        sys.exit(
            "sinkattn is compiled against the torch that will run it, and there is none here (build isolation hides"
            f" it): {HOW}."
        )
    INCLUDES = [Path(torch.__file__).parent / "include"]

ROOT = Path(__file__).parent
BUILD = Path("build/native")


def find(pattern: str, header: Path) -> str:
    found = re.search(pattern, header.read_text())
    if not found:
        sys.exit(f"{header} has no {pattern}.")
    return found[1]


def version_header(include: Path) -> Path:
    return include / "torch" / "headeronly" / "version.h"


def torch_release(include: Path) -> tuple[int, int]:
    header = version_header(include)
    return int(find(r"TORCH_VERSION_MAJOR (\d+)", header)), int(find(r"TORCH_VERSION_MINOR (\d+)", header))


class BuildWithMake(build_ext):
    """build_ext whose one extension is the folder sinkattn/_lib. make knows what is stale, so it is always asked."""

    def run(self) -> None:
        if shutil.which("make") is None:
            sys.exit("sinkattn needs `make` and a C compiler to build, and there is no `make` on PATH.")
        folder = ROOT / "sinkattn" / "_lib" if self.inplace else Path(self.build_lib) / "sinkattn" / "_lib"
        if self.inplace:  # an extension module of an older build would be found before _C.py
            for stale in (ROOT / "sinkattn").glob("_C.*.so"):
                stale.unlink()
        for include in INCLUDES:
            subprocess.run(
                [
                    *("make", f"-j{os.cpu_count() or 1}", "package", f"BUILD={BUILD}", f"LIBRARIES={folder}"),
                    *(f"TORCH_INCLUDE={include}", "WERROR="),
                ],
                check=True,
            )
        served = {f"torch{major}.{minor}.so" for major, minor in map(torch_release, INCLUDES)}
        for stale in folder.glob("torch*.so"):
            if stale.name not in served:
                stale.unlink()

    def get_outputs(self) -> list[str]:
        return [str(path) for path in (Path(self.build_lib) / "sinkattn" / "_lib").glob("*.so*")]

    def get_output_mapping(self) -> dict[str, str]:
        return {}

    def get_source_files(self) -> list[str]:
        return []


class WheelForAnyPython(bdist_wheel):
    """Nothing in sinkattn/_lib has Python in it, so one wheel serves every version."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]

    def write_wheelfile(self, wheelfile_base: str, *arguments: str) -> None:
        super().write_wheelfile(wheelfile_base, *arguments)
        if self.distribution.get_command_obj("editable_wheel", create=False):
            return  # its wheel holds a path, and no library
        out = Path(wheelfile_base) / "sboms" / "sinkattn.cdx.json"
        torches = [find(r'TORCH_VERSION \\\n +"(.+)"', version_header(include)) for include in INCLUDES]
        libraries = Path(self.bdist_dir) / "sinkattn" / "_lib"
        subprocess.run([sys.executable, "tools/sbom.py", libraries, out, *torches], check=True)


first, last = min(map(torch_release, INCLUDES)), max(map(torch_release, INCLUDES))
setuptools.setup(
    version=find(r'#define SINKATTN_VERSION "(.+)"', ROOT / "csrc" / "include" / "sinkattn.h"),
    # Operators serve the torch release that they were compiled against, and no other.
    install_requires=[f"torch>={first[0]}.{first[1]},<{last[0]}.{last[1] + 1}"],
    ext_modules=[setuptools.Extension("sinkattn._lib", [])],
    cmdclass={"build_ext": BuildWithMake, "bdist_wheel": WheelForAnyPython},
)
