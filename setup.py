# SPDX-License-Identifier: Apache-2.0
"""Build sinkattn._C: make compiles C and CUDA into one archive, BuildExtension compiles the binding and links."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import setuptools

TORCH = "torch==2.13.0"
HOW = f"first `pip install {TORCH} 'setuptools>=77' ninja`, then `pip install --no-build-isolation .`"

if int(setuptools.__version__.split(".")[0]) < 77:
    sys.exit(f"sinkattn needs setuptools 77 or newer to build, this is {setuptools.__version__}: {HOW}.")
try:
    import torch
    from torch.utils.cpp_extension import BuildExtension, CppExtension, is_ninja_available
except ImportError:
    sys.exit(
        "sinkattn is compiled against the torch that will run it, and there is none here (build isolation hides it):"
        f" {HOW}."
    )

BUILD = Path("build/native")
ARCHIVE = BUILD / "libsinkattn.a"
HEADER = Path(__file__).parent / "csrc" / "include" / "sinkattn.h"


class BuildWithMake(BuildExtension):  # type: ignore[misc]
    """build_ext that has make build the archive first. make and ninja know what is stale, so it always asks them."""

    def finalize_options(self) -> None:
        super().finalize_options()
        self.build_temp = str(BUILD)
        self.force = is_ninja_available()

    def build_extensions(self) -> None:
        if shutil.which("make") is None:
            sys.exit("sinkattn needs `make` and a C compiler to build, and there is no `make` on PATH.")
        subprocess.run(["make", f"-j{os.cpu_count() or 1}", "lib", f"BUILD={BUILD}", "WERROR="], check=True)
        for extension in self.extensions:
            extension.extra_objects = [str(ARCHIVE)]
            extension.extra_link_args += (BUILD / "link_libs").read_text().split()
        super().build_extensions()


def version() -> str:
    found = re.search(r'#define SINKATTN_VERSION "(.+)"', HEADER.read_text())
    if not found:
        sys.exit(f"{HEADER} defines no SINKATTN_VERSION.")
    return found[1]


release = ".".join(torch.__version__.split(".")[:2])
setuptools.setup(
    version=version(),
    # The binary serves the torch release that it was compiled against, and no other.
    install_requires=[f"torch=={release}.*"],
    ext_modules=[
        CppExtension(
            "sinkattn._C",
            sorted(str(path) for path in Path("csrc/torch").glob("*.cpp")),
            include_dirs=[str(HEADER.parent.resolve())],
            depends=[str(path) for path in Path("csrc").rglob("*.h")],
            # at::parallel_for is serial without -fopenmp, Python's flags carry -g, the define shows ninja a new torch.
            extra_compile_args=[
                *("-O2", "-g0", "-fopenmp", "-fvisibility=hidden"),
                f'-DSINKATTN_TORCH="{torch.__version__}"',
            ],
            extra_link_args=["-fopenmp", "-Wl,--exclude-libs,ALL"],
        )
    ],
    cmdclass={"build_ext": BuildWithMake},
)
