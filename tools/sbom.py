# SPDX-License-Identifier: Apache-2.0
"""python tools/sbom.py LIBRARIES OUT TORCH...: what a wheel is made of, as CycloneDX 1.6, for its .dist-info/sboms.

LIBRARIES is the folder that becomes sinkattn/_lib, TORCH the versions whose headers the operators were compiled with.
The same files give the same document: its time is SOURCE_DATE_EPOCH, or there is none, and its number is a digest.
"""

import ctypes
import datetime
import hashlib
import json
import os
import re
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

APACHE = [{"license": {"id": "Apache-2.0"}}]


def build_info(library: Path) -> str:
    function = ctypes.CDLL(str(library)).sinkattn_build_info
    function.restype = ctypes.c_char_p
    return str(function().decode())


def toolkit_version() -> str:
    said = subprocess.run([os.environ.get("NVCC") or "nvcc", "--version"], capture_output=True, text=True, check=True)
    found = re.search(r"V(\d+\.\d+\.\d+)", said.stdout)
    return found[1] if found else "unknown"


def document(libraries: Path, torches: list[str]) -> dict[str, Any]:
    (library,) = libraries.glob("libsinkattn.so.*")
    info = build_info(library)
    version = info.split(";")[0].removeprefix("sinkattn ")
    compiler = info.split("; ")[1]
    root = f"pkg:pypi/sinkattn@{version}"
    parts: list[dict[str, Any]] = [
        {"type": "file", "bom-ref": f"sinkattn/_lib/{path.name}", "name": f"sinkattn/_lib/{path.name}"}
        | {"hashes": [{"alg": "SHA-256", "content": hashlib.sha256(path.read_bytes()).hexdigest()}]}
        for path in sorted(libraries.iterdir())
    ]
    if "cuda" in info:  # the runtime is linked statically; the driver is the machine's
        parts.append(
            {"type": "library", "bom-ref": "cudart_static", "name": "CUDA runtime, linked statically"}
            | {"version": toolkit_version(), "licenses": [{"license": {"name": "NVIDIA CUDA Toolkit EULA"}}]}
        )
    parts += [
        {"type": "framework", "bom-ref": f"pkg:pypi/torch@{torch}", "name": "torch", "version": torch}
        | {"purl": f"pkg:pypi/torch@{torch}", "description": "headers; the library is the user's own"}
        for torch in torches
    ]
    metadata: dict[str, Any] = {
        "component": {"type": "library", "bom-ref": root, "name": "sinkattn", "version": version}
        | {"purl": root, "licenses": APACHE},
        "tools": {"components": [{"type": "application", "name": compiler}]},
    }
    if epoch := os.environ.get("SOURCE_DATE_EPOCH"):
        time = datetime.datetime.fromtimestamp(int(epoch), datetime.timezone.utc)
        metadata["timestamp"] = time.strftime("%Y-%m-%dT%H:%M:%SZ")
    bom = {"metadata": metadata, "components": parts}
    bom["dependencies"] = [{"ref": root, "dependsOn": [part["bom-ref"] for part in parts]}]
    number = uuid.uuid5(uuid.NAMESPACE_URL, json.dumps(bom, sort_keys=True))
    return {"bomFormat": "CycloneDX", "specVersion": "1.6", "serialNumber": f"urn:uuid:{number}", "version": 1} | bom


if __name__ == "__main__":
    out = Path(sys.argv[2])
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(document(Path(sys.argv[1]), sys.argv[3:]), indent=2) + "\n")
