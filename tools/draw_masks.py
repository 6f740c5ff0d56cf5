# SPDX-License-Identifier: Apache-2.0
"""python tools/draw_masks.py: draws docs/masks.svg, what rows see by sinkattn.reference.visible under each mask."""

import itertools
from pathlib import Path

import torch

from sinkattn.reference import visible

PICTURE = Path(__file__).parent.parent / "docs" / "masks.svg"
CELL, SIDE, STEP_X, STEP_Y, COLUMNS = 9, 8, 172, 166, 4
COLOURS = {"unseen": "#e4e4e4", "key": "#4878a8", "sink token": "#e08a2e", "s_aux": "#4f9d5b"}

# title, arguments, then of each sequence q_len and k_len; num_sink_tokens
PANELS: list[tuple[str, str, tuple[int, int], list[tuple[int, int]], int]] = [
    ("everything", "", (-1, -1), [(12, 12)], 0),
    ("causal", "causal=True", (-1, 0), [(12, 12)], 0),
    ("causal window", "window_size=(3, 0)", (3, 0), [(12, 12)], 0),
    ("window to both sides", "window_size=(2, 2)", (2, 2), [(12, 12)], 0),
    ("window and sink tokens", "(3, 0), num_sink_tokens=2", (3, 0), [(12, 12)], 2),
    ("chunk: 4 rows, 12 keys", "causal=True", (-1, 0), [(4, 12)], 0),
    ("decode with a window", "window_size=(3, 0)", (3, 0), [(1, 12)], 0),
    ("packed: 5, 4 and 3 rows", "causal=True, cu_seqlens", (-1, 0), [(5, 5), (4, 4), (3, 3)], 0),
]


def cells(
    window: tuple[int, int], sequences: list[tuple[int, int]], num_sink_tokens: int
) -> dict[str, list[tuple[int, int]]]:
    """(row, column) of each kind of cell that a row sees."""
    found: dict[str, list[tuple[int, int]]] = {"key": [], "sink token": []}
    row = key = 0
    for q_len, k_len in sequences:
        lengths = torch.tensor([q_len]), torch.tensor([k_len])
        seen = visible(*lengths, q_len, k_len, *window, num_sink_tokens)[0]
        for i, j in seen.nonzero().tolist():
            found["sink token" if j < num_sink_tokens else "key"].append((row + i, key + j))
        row, key = row + q_len, key + k_len
    return found


def path(places: list[tuple[int, int]]) -> str:
    """A dashed line for each run of cells in a row, as thick as a cell: each dash is one."""
    drawn = ""
    for i, j in places:
        if (i, j - 1) not in places:
            length = next(n for n in itertools.count(1) if (i, j + n) not in places)
            drawn += f"M{(j + 2) * CELL} {i * CELL + SIDE // 2}h{(length - 1) * CELL + SIDE}"
    return drawn


def draw() -> str:
    width, height = STEP_X * COLUMNS, STEP_Y * -(-len(PANELS) // COLUMNS)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height + 16}" font-family="sans-serif" '
        f'stroke-width="{SIDE}" stroke-dasharray="{SIDE} {CELL - SIDE}">',
        f'<pattern id="unseen" width="{CELL}" height="{CELL}" patternUnits="userSpaceOnUse">'
        f'<rect width="{SIDE}" height="{SIDE}" fill="{COLOURS["unseen"]}"/></pattern>',
        '<rect width="100%" height="100%" fill="#fff"/>',
    ]
    for n, (title, arguments, window, sequences, num_sink_tokens) in enumerate(PANELS):
        lines.append(f'<g transform="translate({n % COLUMNS * STEP_X + 8} {n // COLUMNS * STEP_Y + 40})">')
        lines.append(
            f'<text y="-24" font-size="12">{title}</text><text y="-9" font-size="10" fill="#555">{arguments}</text>'
        )
        rows, keys = (sum(lengths) for lengths in zip(*sequences, strict=True))
        area = f'width="{keys * CELL}" height="{rows * CELL}"'
        lines.append(f'<path stroke="{COLOURS["s_aux"]}" d="M{CELL} 0v{rows * CELL}"/>')
        lines.append(f'<rect x="{2 * CELL}" {area} fill="url(#unseen)"/>')
        for kind, places in cells(window, sequences, num_sink_tokens).items():
            if places:
                lines.append(f'<path stroke="{COLOURS[kind]}" d="{path(places)}"/>')
        lines.append("</g>")
    for n, (kind, colour) in enumerate(COLOURS.items()):
        meaning = {"key": "a key that the row sees", "unseen": "not seen", "sink token": "a positional sink token"}
        text = meaning.get(kind, "s_aux: in every sum, no key")
        lines.append(f'<rect x="{8 + n * 160}" y="{height + 2}" width="9" height="9" fill="{colour}"/>')
        lines.append(f'<text x="{22 + n * 160}" y="{height + 10}" font-size="10">{text}</text>')
    return "\n".join([*lines, "</svg>", ""])


if __name__ == "__main__":
    PICTURE.write_text(draw())
