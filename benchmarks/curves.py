# SPDX-License-Identifier: Apache-2.0
"""README's picture, as SVG: TFLOP/s against length, forward above and backward below, a column for each of SWEEPS."""

import math
from collections.abc import Iterable, Sequence
from xml.sax.saxutils import escape

from .cases import SWEEP_LENGTHS, SWEEPS
from .report import DIRECTIONS, LINES, OURS, Row

WIDTH, HEIGHT, LEFT, TOP, GAP = 240, 180, 50, 60, 60  # of a panel, and around it
COLORS = dict(zip(LINES, ("#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd"), strict=True))
STYLE = (
    "text{font:10px 'DejaVu Sans',sans-serif}.m{text-anchor:middle}.y{text-anchor:end}path{stroke:#ddd}"
    "polyline{fill:none}marker{overflow:visible}"
)


def swept(rows: Iterable[Row], direction: str) -> dict[tuple[str, str], Row]:
    """The timed rows of growing length, by case and peer."""
    ids = {name.format(n) for _, name, *_ in SWEEPS for n in SWEEP_LENGTHS}
    kept = (row for row in rows if row.direction == direction and row.case in ids and row.impl in LINES)
    return {(row.case, row.impl): row for row in kept if row.ms is not None}


def _text(x: float, y: float, words: object, kind: str = "m") -> str:
    return f'<text class="{kind}" x="{x:g}" y="{y:g}">{escape(str(words))}</text>'


def _line(impl: str, points: Iterable[tuple[float, float]]) -> str:
    joined = " ".join(f"{x:.0f},{y:.0f}" for x, y in points)
    return f'<polyline class="{impl}" points="{joined}"/>'


def _style(impl: str) -> str:
    width = 2.5 if impl == OURS else 1.2
    return f".{impl}{{stroke:{COLORS[impl]};stroke-width:{width};marker:url(#{impl})}}"


def _ticks(most: float) -> list[float]:
    """About five round numbers from 0 to beyond most."""
    step = 10 ** math.floor(math.log10(most / 4))
    step *= max(k for k in (1, 2, 5) if k * step <= most / 4)
    return [step * i for i in range(math.ceil(most / step) + 1)]


def _panel(x: float, y: float, series: dict[str, dict[int, float]]) -> list[str]:
    """series: value by length for each peer."""
    ticks = _ticks(max(value for line in series.values() for value in line.values()))

    def across(length: int) -> float:
        return x + WIDTH * (SWEEP_LENGTHS.index(length) + 0.5) / len(SWEEP_LENGTHS)

    def up(value: float) -> float:
        return y + HEIGHT * (1 - value / ticks[-1])

    grid = "".join(f"M{x:g} {up(at):.0f}h{WIDTH}" for at in ticks)
    lines = [f'<path d="{grid}"/>', *(_text(x - 4, round(up(at) + 3), f"{at:g}", "y") for at in ticks)]
    for length in SWEEP_LENGTHS[::2]:
        name = f"{length // 1024}k" if length >= 1024 else length
        lines.append(_text(across(length), y + HEIGHT + 14, name))
    return lines + [_line(impl, [(across(n), up(v)) for n, v in line.items()]) for impl, line in series.items()]


def picture(rows: Sequence[Row]) -> str:
    found = {direction: swept(rows, direction) for direction in DIRECTIONS}
    timed = {impl for of in found.values() for _, impl in of}
    impls = [impl for impl in LINES if impl in timed]
    width, height = LEFT + len(SWEEPS) * (WIDTH + GAP), TOP + len(DIRECTIONS) * (HEIGHT + GAP)
    drawn = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}">',
        f"<style>{STYLE}{''.join(map(_style, impls))}</style>",
    ]
    for impl in impls:
        mark = f'<circle r="3" fill="{COLORS[impl]}"/>'
        drawn.append(f'<marker id="{impl}" markerUnits="userSpaceOnUse">{mark}</marker>')
    drawn.append(f'<rect width="{width}" height="{height}" fill="white"/>')
    drawn.append(_text(width / 2, 16, "TFLOP/s, bf16, cold L2: 64 query heads of 64 or 32 of 128, 8 kv heads"))
    for i, impl in enumerate(impls):
        x = LEFT + 170 * i
        drawn += [_line(impl, [(x, 32), (x + 20, 32)]), _text(x + 28, 35, LINES[impl], "l")]
    for column, (title, name, *_) in enumerate(SWEEPS):
        x = LEFT + column * (WIDTH + GAP)
        drawn.append(_text(x + WIDTH / 2, TOP - 8, title))
        for row, (direction, of) in enumerate(found.items()):
            y = TOP + row * (HEIGHT + GAP)
            drawn.append(_text(x + WIDTH / 2, y + HEIGHT + 30, f"{direction}, tokens"))
            series: dict[str, dict[int, float]] = {}
            for impl in impls:
                lengths = {n: of.get((name.format(n), impl)) for n in SWEEP_LENGTHS}
                if line := {n: one.tflops for n, one in lengths.items() if one is not None}:
                    series[impl] = line
            if series:
                drawn += _panel(x, y, series)
    return "\n".join([*drawn, "</svg>", ""])
