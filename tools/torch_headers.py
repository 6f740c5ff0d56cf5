# SPDX-License-Identifier: Apache-2.0
"""python tools/torch_headers.py RELEASE FOLDER: torch's headers, FOLDER/include, out of a wheel of that release.

The whole wheel is downloaded, some 500 MB, and dropped again. The operators are compiled against headers alone.
"""

import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path


def main(release: str, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        subprocess.run([*command, "--dest", scratch, f"torch=={release}.*"], check=True)
        (wheel,) = Path(scratch).glob("torch-*.whl")
        with zipfile.ZipFile(wheel) as archive:
            for name in archive.namelist():
                if name.startswith("torch/include/"):
                    archive.extract(name, scratch)
        include = folder / "include"
        shutil.rmtree(include, ignore_errors=True)
        (Path(scratch) / "torch" / "include").rename(include)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
