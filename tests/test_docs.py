# SPDX-License-Identifier: Apache-2.0
"""What the pages show is so: snippets run, links lead somewhere, quoted messages are the sources', pictures are drawn.

The python blocks of a page run one after another, in one namespace. CONTRIBUTING.md has the rest.
"""

import ast
import contextlib
import importlib.util
import io
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import sinkattn
from benchmarks.__main__ import STUDIES
from tools import draw_masks

ROOT = Path(__file__).parent.parent
PAGES = sorted({*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("tests/**/*.md")})
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]


class Block(NamedTuple):
    language: str
    text: str
    not_run: str | None
    line: int


def blocks(page: Path) -> list[Block]:
    text = page.read_text()
    found = re.finditer(r"(?:<!-- not run: ([^>]+) -->\n)?^```(\S*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [Block(m[2], m[3], m[1], text.count("\n", 0, m.start(3)) + 1) for m in found]


def with_blocks(*languages: str) -> list[str]:
    pages = zip(NAMES, PAGES, strict=True)
    return [name for name, page in pages if any(b.language in languages and not b.not_run for b in blocks(page))]


@pytest.mark.parametrize("name", with_blocks("python"))
def test_python_runs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    names: dict[str, Any] = {"__name__": "__main__"}
    printed = None
    for block in blocks(ROOT / name):
        if block.language == "python" and not block.not_run:
            if "transformers" in block.text and importlib.util.find_spec("transformers") is None:
                pytest.skip("transformers is not installed: pip install --no-build-isolation '.[hf]'")
            code = compile("\n" * (block.line - 1) + block.text, ROOT / name, "exec")
            with contextlib.redirect_stdout(io.StringIO()) as caught:
                exec(code, names)
            printed = caught.getvalue()
        elif block.language == "text" and printed is not None:
            assert printed == block.text, f"{name}:{block.line}"
            printed = None


@pytest.mark.parametrize("name", with_blocks("c"))
def test_c_runs(name: str, tmp_path: Path) -> None:
    native = ROOT / "build" / "native"
    strict = ["cc", "-std=c11", "-Wall", "-Wextra", "-Werror", f"-I{ROOT / 'csrc' / 'include'}"]
    libraries = [str(native / "libsinkattn.a"), *shlex.split((native / "link_libs").read_text())]
    page = blocks(ROOT / name)
    for block, after in zip(page, [*page[1:], None], strict=True):
        if block.language != "c" or block.not_run:
            continue
        (tmp_path / "example.c").write_text(block.text)
        subprocess.run([*strict, "example.c", *libraries, "-o", "example"], cwd=tmp_path, check=True)
        ran = subprocess.run([tmp_path / "example"], check=True, capture_output=True, text=True)
        if after is not None and after.language == "text":
            assert re.fullmatch(re.escape(after.text).replace("\\.\\.\\.", ".+"), ran.stdout), ran.stdout


@pytest.mark.parametrize("name", with_blocks("sh"))
def test_shell_runs(name: str) -> None:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    for block in blocks(ROOT / name):
        if block.language == "sh" and not block.not_run:
            environment = os.environ | {"PATH": path, "PYTHONPATH": str(ROOT)}
            done = subprocess.run(
                ["bash", "-ec", block.text], cwd=ROOT, env=environment, capture_output=True, text=True
            )
            assert done.returncode == 0, f"{name}:{block.line}\n{done.stderr}"


def test_what_is_not_run_says_why() -> None:
    run = {"python", "c", "sh", "text", ""}
    command = re.compile(r"^(?:\$ |make |pip |python3? |git |import |from \w+ import )", re.MULTILINE)
    unsaid = [
        f"{name}:{block.line}"
        for name, page in zip(NAMES, PAGES, strict=True)
        for block in blocks(page)
        if not block.not_run
        and (block.language not in run or (block.language in ("text", "") and command.search(block.text)))
    ]
    assert unsaid == [], "put <!-- not run: why --> before the block, or make it python, c or sh"


def anchors(page: Path) -> set[str]:
    """Of a page's headings, as GitHub and Sphinx make them."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_lead_somewhere() -> None:
    lost = []
    for name, page in zip(NAMES, PAGES, strict=True):
        for link in re.findall(r"\]\((?!https?://)([^)\s]+)\)", page.read_text()):
            path, _, anchor = link.partition("#")
            target = page.parent / path if path else page
            if not target.exists() or (anchor and anchor not in anchors(target)):
                lost.append(f"{name}: {link}")
    assert lost == []
    assert "edges" in anchors(ROOT / "docs" / "numerics.md")


def test_pictures_are_drawn_by_their_script() -> None:
    assert draw_masks.PICTURE.read_text() == draw_masks.draw(), "python tools/draw_masks.py"


def test_the_reference_has_every_public_name() -> None:
    page = (ROOT / "docs" / "api.rst").read_text()
    assert set(re.findall(r"^\.\. autofunction:: (\w+)$", page, re.MULTILINE)) == set(sinkattn.__all__)
    assert all(getattr(sinkattn, name).__doc__ for name in sinkattn.__all__)


def test_the_support_matrix_is_what_is_compiled() -> None:
    """docs/conf.py reads variants.def itself, for kernels that are not compiled here; those that are agree with it."""
    text = (ROOT / "docs" / "conf.py").read_text()
    names: dict[str, Any] = {"re": re, "VARIANTS": ROOT / "csrc" / "core" / "variants.def"}
    exec(text[text.index("def support_matrix") : text.index("class SupportMatrix")], names)
    shown = {row[2]: row for row in names["support_matrix"]()}
    for variant in sinkattn.variants():
        op, backend, name, dtypes, max_head_dim, tile, _ = shown[variant["name"]]
        assert (op, backend, name) == (variant["op"], variant["backend"], variant["name"])
        assert dtypes.split(", ") == variant["dtypes"]
        assert (max_head_dim, tile) == (str(variant["max_head_dim"]), f"{variant['tile_q']} x {variant['tile_k']}")


def literals(path: Path) -> str:
    """The string literals of a source, adjacent ones joined, and … for what a format fills in."""
    text = path.read_text()
    if path.suffix == ".py":
        nodes = list(ast.walk(ast.parse(text)))
        formats = [node.values for node in nodes if isinstance(node, ast.JoinedStr)]
        found = ["".join(str(x.value) if isinstance(x, ast.Constant) else "…" for x in parts) for parts in formats]
        return "\n".join(found + [str(node.value) for node in nodes if isinstance(node, ast.Constant)])
    text = re.sub(r'"\s*PRI\w+\s*("?)', lambda m: "" if m[1] else '"', text)
    found = re.findall(r'"((?:[^"\\\n]|\\.)*)"', re.sub(r'"\s*\n?\s*"', "", text))
    return re.sub(r"\\(.)", r"\1", "\n".join(found))


def test_messages_are_those_of_the_sources() -> None:
    """The words between two … of a quoted message stand in one source, in that order and near each other."""
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    folders = ("sinkattn/**/*.py", "examples/*.py", "csrc/**/*.c*")
    sources = [ROOT / "setup.py", *(path for folder in folders for path in ROOT.glob(folder))]
    texts = [literals(path) for path in sources]
    quoted = [a or b for a, b in re.findall(r"^\| (?:`` ?(.+?) ?``|`([^`]+)`) \|", page, re.MULTILINE)]
    assert len(quoted) > 100
    missing = []
    for message in quoted:
        words = [re.escape(part.strip()) for part in message.split("…") if part.strip(" .,;:()")]
        pattern = re.compile(r".{0,120}?".join(words), re.DOTALL)
        if not any(pattern.search(text) for text in texts):
            missing.append(message)
    assert missing == []


def test_commands_that_pages_name_exist() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    known = {"make": targets, "python -m benchmarks": set(STUDIES)}
    unknown = []
    for name, page in zip(NAMES, PAGES, strict=True):
        text = page.read_text()
        for command, names in known.items():
            used = re.findall(rf"(?:`|^|\. ){command} ([a-z][\w-]*)", text, re.MULTILINE)
            unknown += [f"{name}: {command} {word}" for word in used if word not in names]
    assert unknown == []
