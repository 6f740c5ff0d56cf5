# SPDX-License-Identifier: Apache-2.0
"""Matplotlib's SVG in a tenth of its bytes, which looks the same: lines of one style are one path, and points one more.

Text stays text, coordinates have one decimal, those of a path are relative, each style is named once, and what no
picture shows is left out.
"""

from __future__ import annotations

import itertools
import re
from xml.etree import ElementTree as Tree
from xml.sax.saxutils import escape

_SVG, _XLINK = "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"
_HREF = f"{{{_XLINK}}}href"
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e-?\d+)?")
_COMMAND = re.compile(r"([MLQCzh])([^MLQCzh]*)")
_LEADING_ZERO = re.compile(r"(?<![\d.])0\.")
_MOVE = re.compile(r"translate\((\S+) (\S+)\)")
_DOT = "fill: none; stroke: {}; stroke-width: {}; stroke-linecap: round"


def _rounded(text: str) -> str:
    return _NUMBER.sub(lambda m: f"{round(float(m[0]), 1) + 0.0:g}" if len(m[0]) > 3 else m[0], text)


def _moved(path: str, x: float, y: float) -> str:
    """A path of lines, somewhere else."""
    numbers = iter(range(len(path)))
    return _NUMBER.sub(lambda m: f"{float(m[0]) + (y if next(numbers) % 2 else x):.1f}", path)


def _relative(path: str) -> str:
    """The same path in tenths, each point as its distance from the one before."""
    written, last, start = [], (0, 0), (0, 0)
    for command, numbers in _COMMAND.findall(path):
        values = [round(10 * float(number)) for number in _NUMBER.findall(numbers)]
        if command in "zh":  # back to the start; a point, which is a line to itself
            written.append(command + "".join(map(str, values)))
            last = start if command == "z" else last
            continue
        points = list(zip(values[::2], values[1::2], strict=True))
        steps = [f"{step / 10:g}" for x, y in points for step in (x - last[0], y - last[1])]
        if command == "L" and "0" in steps:
            written.append(f"h{steps[0]}" if steps[1] == "0" else f"v{steps[1]}")
        else:
            written.append(command.lower() + " ".join(steps).replace(" -", "-"))
        last = points[-1]
        start = last if command == "M" else start
    return _LEADING_ZERO.sub(".", "".join(written))


def _joined(formula: Tree.Element) -> Tree.Element:
    """The text of a <g> that places a formula's characters one by one: those of a style and height stand together."""
    spans = sorted(formula[0], key=lambda span: float(span.attrib["x"]))
    runs = itertools.groupby(spans, lambda span: (float(span.attrib["y"]), span.attrib["style"]))
    (y, style, words), *others = [(y, style, "".join(span.text or "" for span in run)) for (y, style), run in runs]
    place = {"transform": formula.attrib["transform"], "y": f"{y}"}
    if moved := _MOVE.fullmatch(place["transform"]):
        place = {"x": moved[1], "y": f"{float(moved[2]) + y}"}
    text = Tree.Element(f"{{{_SVG}}}text", {**place, "style": style})
    text.text = words
    for below, style, words in others:
        Tree.SubElement(text, f"{{{_SVG}}}tspan", {"dy": f"{below - y}", "style": style}).text = words
        y = below
    return text


def _drawn(group: Tree.Element, marks: dict[str, Tree.Element]) -> tuple[str, str]:
    """What a group's <use> draw, as one path and its style; a round mark becomes the cap of a line without length."""
    found, style = [], ""
    for use in group:
        mark, x, y = marks[use.attrib[_HREF][1:]], float(use.attrib["x"]), float(use.attrib["y"])
        path = mark.attrib["d"]
        if "C" in path:
            radius = max(float(number) for number in _NUMBER.findall(path))
            color = re.search(r"stroke: (#\w+)", f"{use.attrib['style']}; {mark.attrib['style']}")
            style = _DOT.format(color[1] if color else "#000000", f"{2 * radius + 1:g}")
            found.append(f"M{x:.1f} {y:.1f}h0")
        else:
            style = "fill: none; " + (use.attrib.get("style", "") or mark.attrib["style"])
            found.append(_moved(path, x, y))
    return "".join(found), style


def _flat(
    element: Tree.Element, clip: str | None, marks: dict[str, Tree.Element], drawn: list[tuple[str, str, Tree.Element]]
) -> None:
    """Appends (tag, style and clip, element) in the order of drawing.

    Lines of one style share a path, unless an area is drawn over the first of them.
    """
    for child in element:
        tag, of = child.tag.removeprefix(f"{{{_SVG}}}"), child.attrib.get("clip-path", clip)
        if tag == "defs":
            continue
        if tag == "g" and len(child) and all(x.tag == f"{{{_SVG}}}use" for x in child):
            path, style = _drawn(child, marks)
            child = Tree.Element(f"{{{_SVG}}}path", {"d": path, "style": style})
            tag = "path"
        if tag == "g" and "transform" not in child.attrib:
            _flat(child, of, marks, drawn)
            continue
        if tag == "g" and [x.tag for x in child] == [f"{{{_SVG}}}text"] and "style" not in child.attrib:
            tag, child = "text", _joined(child)
        key = f"{child.attrib.get('style', '')}|{of or ''}"
        if tag == "path" and "fill: none" in key:
            above = itertools.takewhile(lambda x: x[0] != "path" or "fill: none" in x[1], reversed(drawn))
            alike = next((x for x in above if x[:2] == (tag, key)), None)
            if alike:
                alike[2].attrib["d"] += child.attrib["d"]
                continue
        if of:
            child.attrib["clip-path"] = of
        drawn.append((tag, key, child))


def _written(element: Tree.Element, names: dict[str, str], classes: dict[str, str]) -> str:
    """One element with its own short attributes; classes gets the styles that are new."""
    shown = []
    for name, value in element.attrib.items():
        if name == "style":
            shown.append(("class", classes.setdefault(value, f"s{len(classes)}")))
        elif name == "clip-path":
            shown.append((name, names[value]))
        elif name == "d":
            shown.append((name, _relative(value)))
        elif name != "id" and not value.startswith("rotate(-0 "):
            shown.append((name, _rounded(value)))
    tag = element.tag.removeprefix(f"{{{_SVG}}}")
    attributes = "".join(f' {name}="{value}"' for name, value in shown)
    words = element.text or "" if tag in ("text", "tspan") else ""
    content = escape(words) + "".join(_written(x, names, classes) for x in element)
    return f"<{tag}{attributes}>{content}</{tag}>" if content else f"<{tag}{attributes}/>"


def compact(text: str) -> str:
    """The picture that matplotlib wrote with svg.fonttype "none", smaller."""
    root = Tree.fromstring(text)
    marks = {x.attrib["id"]: x for x in root.iter(f"{{{_SVG}}}path") if "id" in x.attrib}
    clips = {x.attrib["id"]: x[0] for x in root.iter(f"{{{_SVG}}}clipPath")}
    drawn: list[tuple[str, str, Tree.Element]] = []
    for figure in root.findall(f"{{{_SVG}}}g"):
        _flat(figure, None, marks, drawn)
    classes: dict[str, str] = {}
    names = {f"url(#{name})": f"url(#c{i})" for i, name in enumerate(clips)}
    lines = [_written(element, names, classes) for *_, element in drawn]
    boxes = [
        f'<clipPath id="c{i}"><rect'
        + "".join(f' {side}="{_rounded(box.attrib[side])}"' for side in ("x", "y", "width", "height"))
        + "/></clipPath>"
        for i, box in enumerate(clips.values())
    ]
    styles = "".join(f".{name}{{{style.replace(': ', ':').replace('; ', ';')}}}" for style, name in classes.items())
    size = " ".join(f'{name}="{root.attrib[name]}"' for name in ("width", "height", "viewBox"))
    head = f'<svg xmlns="{_SVG}" {size}>\n<style>*{{stroke-linejoin:round;stroke-linecap:butt}}{styles}</style>'
    return "\n".join([head, f"<defs>{''.join(boxes)}</defs>", *lines, "</svg>", ""])
