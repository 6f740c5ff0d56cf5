# SPDX-License-Identifier: Apache-2.0
"""Matplotlib's SVG in a tenth of its bytes, which looks the same: lines of one style are one path, and points markers.

Text stays text, coordinates have one decimal, those of a path are relative, each style is named once, and what no
picture shows is left out.
"""

from __future__ import annotations

import itertools
import re
from xml.etree import ElementTree as Tree
from xml.sax.saxutils import escape

_SVG, _XLINK = "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"
_G = f"{{{_SVG}}}g"
_HREF = f"{{{_XLINK}}}href"
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e-?\d+)?")
_COMMAND = re.compile(r"([MLQCzh])([^MLQCzh]*)")
_LEADING_ZERO = re.compile(r"(?<![\d.])0\.")
_FONT = re.compile(r"font-family: 'DejaVu Sans'(, sans-serif)?(; )?")
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


def _mark(use: Tree.Element, marks: dict[str, Tree.Element], x: float, y: float) -> tuple[str, str]:
    """What a <use> draws, at x, y, as a path and its style; a round mark is the cap of a line without length."""
    mark = marks[use.attrib[_HREF][1:]]
    path = mark.attrib["d"]
    if "C" not in path:
        return _moved(path, x, y), "fill: none; " + (use.attrib.get("style", "") or mark.attrib["style"])
    radius = max(float(number) for number in _NUMBER.findall(path))
    color = re.search(r"stroke: (#\w+)", f"{use.attrib['style']}; {mark.attrib['style']}")
    return f"M{x:.1f} {y:.1f}h0", _DOT.format(color[1] if color else "#000000", f"{2 * radius + 1:g}")


def _drawn(group: Tree.Element, marks: dict[str, Tree.Element]) -> tuple[str, str]:
    """What a group's <use> draw, as one path and its style."""
    found = [_mark(use, marks, float(use.attrib["x"]), float(use.attrib["y"])) for use in group]
    return "".join(path for path, _ in found), found[-1][1]


def _is_points(element: Tree.Element) -> bool:
    return element.tag == _G and len(element) > 0 and all(x.tag == f"{{{_SVG}}}use" for x in element)


def _marked(root: Tree.Element, marks: dict[str, Tree.Element]) -> dict[tuple[str, str], str]:
    """Takes out points that are those of the line in front of them; its style has a marker instead, by name."""
    markers: dict[tuple[str, str], str] = {}
    for group in root.iter(_G):
        for line, points in itertools.pairwise([x for x in group if x.tag != f"{{{_SVG}}}defs"]):
            if _is_points(points) and line.attrib.get("clip-path") == points.attrib.get("clip-path"):
                at = "".join(f"L {use.attrib['x']} {use.attrib['y']}" for use in points).replace("L", "M", 1)
                if _relative(line.attrib.get("d", "")) == _relative(at):
                    group.remove(points)
                    name = markers.setdefault(_mark(points[0], marks, 0, 0), f"m{len(markers)}")
                    line.attrib["style"] += f"; marker: url(#{name})"
    return markers


def _unclip(root: Tree.Element, clips: dict[str, Tree.Element]) -> None:
    """Forgets the clips of paths and points that lie in them anyway."""
    for element in root.iter():
        box = clips.get(element.attrib.get("clip-path", ""))
        if box is not None:
            uses = element if _is_points(element) else ()
            places = element.attrib.get("d", "") or " ".join(f"{use.attrib['x']} {use.attrib['y']}" for use in uses)
            numbers = [float(x) for x in _NUMBER.findall(places)]
            for values, start, size in ((numbers[::2], "x", "width"), (numbers[1::2], "y", "height")):
                beyond = [value - float(box.attrib[start]) for value in values]
                if not beyond or min(beyond) < -0.05 or max(beyond) > float(box.attrib[size]) + 0.05:
                    break
            else:
                del element.attrib["clip-path"]


def _flat(
    element: Tree.Element, clip: str | None, marks: dict[str, Tree.Element], drawn: list[tuple[str, str, Tree.Element]]
) -> None:
    """Appends (tag, style and clip, element) in the order of drawing; on a white figure panels need no white of theirs.

    Lines of one style share a path, unless an area is drawn over the first of them; so do areas one after the other.
    """
    for child in element:
        tag, of = child.tag.removeprefix(f"{{{_SVG}}}"), child.attrib.get("clip-path", clip)
        if tag == "defs":
            continue
        if _is_points(child):
            path, style = _drawn(child, marks)
            child = Tree.Element(f"{{{_SVG}}}path", {"d": path, "style": style})
            tag = "path"
        if tag == "g" and "transform" not in child.attrib:
            _flat(child, of, marks, drawn)
            continue
        if tag == "g" and [x.tag for x in child] == [f"{{{_SVG}}}text"] and "style" not in child.attrib:
            tag, child = "text", _joined(child)
        key = f"{child.attrib.get('style', '')}|{of or ''}"
        if tag == "path":
            if key == "fill: #ffffff|" and drawn:
                continue
            above = itertools.takewhile(lambda x: x[0] != "path" or "fill: none" in x[1], reversed(drawn))
            free = above if "fill: none" in key else drawn[-1:]
            alike = next((x for x in free if x[:2] == (tag, key)), None)
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
            shown.append(("class", classes.setdefault(_FONT.sub("", value), f"s{len(classes)}")))
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
    clips = {f"url(#{x.attrib['id']})": x[0] for x in root.iter(f"{{{_SVG}}}clipPath")}
    drawn: list[tuple[str, str, Tree.Element]] = []
    _unclip(root, clips)
    markers = _marked(root, marks)
    for figure in root.findall(_G):
        _flat(figure, None, marks, drawn)
    classes: dict[str, str] = {}
    used = {element.attrib.get("clip-path") for *_, element in drawn}
    names = {name: f"url(#c{i})" for i, name in enumerate(name for name in clips if name in used)}
    lines = []
    for (tag, _), run in itertools.groupby(drawn, lambda x: x[:2]):
        elements = [element for *_, element in run]
        if tag == "text" and len(elements) > 1:  # a style's texts that follow each other, such as an axis's, in a group
            group = Tree.Element(_G, {"style": elements[0].attrib["style"]})
            for element in elements:
                del element.attrib["style"]
            group.extend(elements)
            elements = [group]
        lines += [_written(element, names, classes) for element in elements]
    boxes = [
        f'<clipPath id="{short[5:-1]}"><rect'
        + "".join(f' {side}="{_rounded(clips[name].attrib[side])}"' for side in ("x", "y", "width", "height"))
        + "/></clipPath>"
        for name, short in names.items()
    ]
    points = [
        f'<marker id="{name}" markerUnits="userSpaceOnUse">'
        + _written(Tree.Element(f"{{{_SVG}}}path", {"d": path, "style": style}), names, classes)
        + "</marker>"
        for (path, style), name in markers.items()
    ]
    styles = "".join(f".{name}{{{style.replace(': ', ':').replace('; ', ';')}}}" for style, name in classes.items())
    size = " ".join(f'{name}="{root.attrib[name]}"' for name in ("width", "height", "viewBox"))
    every = "*{stroke-linejoin:round}marker{overflow:visible}text{font-family:'DejaVu Sans',sans-serif}"
    head = f'<svg xmlns="{_SVG}" {size}>\n<style>{every}{styles}</style>'
    return "\n".join([head, f"<defs>{''.join(boxes + points)}</defs>", *lines, "</svg>", ""])
