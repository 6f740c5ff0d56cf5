# SPDX-License-Identifier: Apache-2.0
"""README's picture and the tables of docs' pages, from what is kept; needs no GPU."""

import argparse
from pathlib import Path
from types import ModuleType
from typing import Any

from . import curves, generate, gpu, harness, prefill, report, serving, shapes

# Each has a SUITE, and markdown(machine, rows).
TABLES: dict[ModuleType, type[Any]] = {shapes: gpu.Row, generate: generate.GenerateRow, serving: serving.ServingRow}
DOCS = harness.ROOT / "docs"
PAGE = DOCS / "studies.md"
# The studies whose tables stand on a page, between their marks.
PAGES: dict[Path, tuple[ModuleType, ...]] = {
    PAGE: (shapes,),
    DOCS / "huggingface.md": (generate,),
    DOCS / "vllm.md": (serving,),
}


def page(path: Path, results: Path = harness.RESULTS) -> str:
    """A page's text with the tables that the kept results give: a GPU's, or without them a CPU's."""
    text = path.read_text()
    for study in PAGES[path]:
        kind = TABLES[study]
        kept = [harness.load(path, kind) for path in sorted(results.glob(f"*/{study.SUITE}.json"))]
        gpus = [of for of in kept if "cpu" not in of[0]]
        shown = [lines for of in gpus or kept for lines in study.markdown(*of)]
        text = report.placed(text, study.SUITE, shown or [report.none_yet(study.SUITE)])
    return text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--results", type=Path, default=harness.RESULTS, help="default: benchmarks/results")
    parser.add_argument("--output", type=Path, default=DOCS, help="default: docs")


def run(options: argparse.Namespace) -> None:
    drawn = []
    for path in sorted(options.results.glob(f"*/{prefill.SUITE}.json")):
        _, rows = harness.load(path, gpu.Row)
        drawn.append(options.output / f"{prefill.SUITE}-{path.parent.name}.svg")
        drawn[-1].write_text(curves.picture(rows))
    if not drawn:
        raise SystemExit(f"{options.results} holds nothing to draw; `python -m benchmarks prefill` keeps some.")
    if options.results == harness.RESULTS:
        for path in PAGES:
            path.write_text(page(path))
    print("\n".join(f"wrote {path}" for path in drawn))
