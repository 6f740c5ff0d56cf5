# SPDX-License-Identifier: Apache-2.0
"""mypy --strict over the python blocks of README.md and docs/*.md, each page one module; pyright over README's.

Blocks marked as not run are left out. README has to pass as it is; other pages may call untyped functions, define some
without hints, and use a .grad that may be None.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(r"(<!-- not run: [^>]+ -->\n)?^```(\S*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
EXCUSED = re.compile(r"\[no-untyped-call\]|\[no-untyped-def\]|\[no-any-return\]|\"Tensor \| None\"")


def module_of(page: Path) -> str:
    """The page's blocks, on the lines that they have in it."""
    text = page.read_text()
    lines = [""] * text.count("\n")
    for block in BLOCK.finditer(text):
        if block[2] == "python" and not block[1]:
            begin = text.count("\n", 0, block.start(3))
            lines[begin : begin + block[3].count("\n")] = block[3].splitlines()
    return "\n".join(lines).rstrip()


def pyright(folder: Path, name: str) -> list[str]:
    """What pyright's standard mode says of a module, as mypy writes it; by basedpyright, which brings its own node."""
    options = {"include": [name], "extraPaths": [str(ROOT)], "typeCheckingMode": "standard"}
    (folder / "pyrightconfig.json").write_text(json.dumps(options))
    command = [sys.executable, "-m", "basedpyright", "--pythonpath", sys.executable, "--outputjson", "-p", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    found = json.loads(done.stdout)
    if found["summary"]["filesAnalyzed"] != 1:
        raise RuntimeError(f"pyright looked at {found['summary']['filesAnalyzed']} files, not at {name} alone")
    return [
        f"{name}:{x['range']['start']['line'] + 1}: {x['severity']}: {x['message']} [pyright]"
        for x in found["generalDiagnostics"]
    ]


def main() -> int:
    pages = {page.stem.lower() + "_page.py": page for page in (ROOT / "README.md", *sorted(ROOT.glob("docs/*.md")))}
    modules = {name: text for name, page in pages.items() if (text := module_of(page))}
    with tempfile.TemporaryDirectory() as folder:
        for name, text in modules.items():
            (Path(folder) / name).write_text(text + "\n")
        options = ["--strict", "--config-file", str(ROOT / "pyproject.toml"), "--cache-dir", str(ROOT / ".mypy_cache")]
        command = [sys.executable, "-m", "mypy", "--no-error-summary", *options, *modules]
        environment = os.environ | {"MYPYPATH": str(ROOT)}
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
        of_readme = pyright(Path(folder), "readme_page.py")
    if done.returncode not in (0, 1):
        print(done.stdout + done.stderr)
        return done.returncode
    wrong = [x for x in done.stdout.splitlines() if x.startswith("readme_page.py") or not EXCUSED.search(x)] + of_readme
    for line in wrong:
        name, _, rest = line.partition(":")
        print(f"{pages[name].relative_to(ROOT)}:{rest}")
    print(f"{len(modules)} pages, {len(wrong)} errors")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
