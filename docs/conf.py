# SPDX-License-Identifier: Apache-2.0
"""`make docs`: README, the pages beside this file and the API reference. Sphinx's source folder is the repository."""

import json
import re
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

import sinkattn

VARIANTS = Path(__file__).parent.parent / "csrc" / "core" / "variants.def"

project = "sinkattn"
release = sinkattn.__version__
root_doc = "docs/index"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.viewcode"]
include_patterns = ["*.md", "docs/**", "tests/results/README.md"]
exclude_patterns = [".*", "build", "dist", "*.egg-info"]
html_theme = "alabaster"
html_theme_options = {"description": "Attention with learned sinks", "page_width": "1200px", "sidebar_width": "230px"}
html_copy_source = False
myst_heading_anchors = 4
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_typehints_format = "short"


def support_matrix() -> list[list[str]]:
    """op, backend, kernel, dtypes, max_head_dim, tile and serves of each row of variants.def, compiled here or not."""
    rows = []
    for row in re.findall(r"^SA_(?:ROOMY_)?VARIANT\((.*)\)$", VARIANTS.read_text(), re.MULTILINE):
        op, backend, arch, _, dtypes, max_head_dim, tile_q, tile_k, _, serves = row.split(", ")
        dtypes = dtypes.replace("SA_HALVES", "bf16, fp16").replace("SA_FLOATS", "bf16, fp16, fp32").replace(" | ", ", ")
        dtypes = re.sub(r"SA_BIT\(SINKATTN_(\w+)\)", lambda dtype: dtype[1].lower(), dtypes)
        rows.append([op, backend, f"sa_{op}_{backend}_{arch}", dtypes, max_head_dim, f"{tile_q} x {tile_k}", serves])
    return rows


class SupportMatrix(SphinxDirective):
    """.. support-matrix:: has no arguments."""

    def run(self) -> list[nodes.Node]:
        head = ["op", "backend", "kernel", "dtypes", "head_dim up to", "rows x keys a tile", "asks for"]
        rows = ["   " + json.dumps(row)[1:-1] for row in [head, *support_matrix()]]
        return self.parse_text_to_nodes("\n".join([".. csv-table::", "   :header-rows: 1", "", *rows]))


def show_as_written(app: Sphinx, what: str, name: str, obj: object, options: Any, lines: list[str]) -> None:
    """Docstrings are plain text: what they indent is shown as it stands."""
    shown: list[str] = []
    inside = False
    for line in lines:
        if line and line.startswith("  ") != inside:
            inside = not inside
            shown += ["", "::", ""] if inside else [""]
        shown.append(line)
    lines[:] = shown


def setup(app: Sphinx) -> None:
    app.add_directive("support-matrix", SupportMatrix)
    app.connect("autodoc-process-docstring", show_as_written)
