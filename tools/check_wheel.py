# SPDX-License-Identifier: Apache-2.0
"""python tools/check_wheel.py WHEEL [SAME]: whether a wheel is what a release promises; SAME is a second build of it.

Its tag serves every Python, libsinkattn has no symbol of torch and operators none of Python, the SBOM's digests are the
files', no path of the building machine is inside, and a second build has the same bytes.
"""

import hashlib
import json
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PLACES = (str(Path(__file__).resolve().parent.parent).encode(), b"/site-packages/", b"/tmp/")


def symbols(library: Path, *options: str) -> list[str]:
    """nm's lines of the dynamic symbols, without addresses, which may have c10 in them."""
    done = subprocess.run(["nm", "-D", *options, library], capture_output=True, text=True, check=True)
    return [re.sub("^[0-9a-f]+", "", line) for line in done.stdout.splitlines()]


def faults(wheel: Path, same: Path | None = None) -> list[str]:
    found = []
    if not re.fullmatch(r"sinkattn-[\d.]+-py3-none-manylinux_2_\d+_(x86_64|aarch64)\.whl", wheel.name):
        found.append(f"{wheel.name} is not named for every Python and a manylinux")
    if same and wheel.read_bytes() != same.read_bytes():
        found.append(f"{wheel} and {same} differ")
    with zipfile.ZipFile(wheel) as archive, tempfile.TemporaryDirectory() as scratch:
        names = archive.namelist()
        libraries = {name: archive.read(name) for name in names if ".so" in Path(name).name}
        boms = [name for name in names if name.endswith(".dist-info/sboms/sinkattn.cdx.json")]
        if len(boms) != 1:
            return [*found, f"{wheel.name} has {len(boms)} SBOMs; it must have one"]
        parts = json.loads(archive.read(boms[0]))["components"]
        listed = {part["name"]: part["hashes"][0]["content"] for part in parts if part["type"] == "file"}
        if listed != {name: hashlib.sha256(data).hexdigest() for name, data in libraries.items()}:
            found.append("the SBOM's files are not the wheel's")
        found += [
            f"{name} names a folder of this machine"
            for name, data in libraries.items()
            if any(place in data for place in PLACES)
        ]
        for name in libraries:
            path = Path(archive.extract(name, scratch))
            foreign = r" (Py[A-Z]|_Py)" if path.name.startswith("torch") else r"torch|c10|_ZN2at|_Z|Py[A-Z]"
            found += [f"{name} has the symbol {line.split()[-1]}" for line in symbols(path) if re.search(foreign, line)]
    return found


if __name__ == "__main__":
    problems = faults(Path(sys.argv[1]), Path(sys.argv[2]) if len(sys.argv) > 2 else None)
    print("\n".join(problems) or f"{sys.argv[1]}: as promised")
    sys.exit(bool(problems))
