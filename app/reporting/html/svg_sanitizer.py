"""A drawing that was stored, for a page: whoever can write to the store can have put anything into it.

It is parsed, and what is on the list is written anew; the rest is left out. What a page's parser and ours take
differently, such as comments, never reaches the page.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING
from xml.etree import ElementTree

if TYPE_CHECKING:
    from markupsafe import Markup

_TAGS = frozenset({"svg", "g", "path", "rect", "text", "title"})
_ATTRIBUTES = frozenset(
    {
        "aria-label", "class", "d", "fill", "font-family", "font-size", "height", "opacity", "role", "rx", "stroke",
        "stroke-width", "style", "text-anchor", "viewBox", "width", "x", "y",
    }
)  # fmt: skip
_STYLES = frozenset(
    {
        "fill", "height", "max-width", "opacity", "pointer-events", "stroke", "stroke-dasharray", "stroke-width",
        "width",
    }
)  # fmt: skip
_STYLE = re.compile(r"\s*([a-z-]+)\s*:\s*(?:var\(--[\w-]+(?:,[\w#]+)?\)|[\w#%. -]+)\s*")
_DEEPEST = 8  # of ours: 3


def drawing(svg: str) -> Markup:
    """The shapes and words of a stored SVG as markup; empty where it is none, or declares entities."""
    from markupsafe import Markup

    try:
        root = ElementTree.fromstring("" if "<!DOCTYPE" in svg.upper() else svg)
    except ElementTree.ParseError:
        return Markup()
    if _name(root) != "svg":
        return Markup()
    return Markup(ElementTree.tostring(_listed(root, _DEEPEST), encoding="unicode"))


def _listed(element: ElementTree.Element, deepest: int) -> ElementTree.Element:
    """A copy of an element without what is not on the list."""
    kept = {name: value for name, value in element.attrib.items() if name in _ATTRIBUTES}
    if "style" in kept:
        kept["style"] = ";".join(part for part in kept["style"].split(";") if _harmless(part))
    made = ElementTree.Element(_name(element), kept)
    made.text = element.text
    made.extend(_listed(child, deepest - 1) for child in element if deepest and _name(child) in _TAGS)
    return made


def _name(element: ElementTree.Element) -> str:
    """The tag without its namespace, which a page does not need."""
    return element.tag.rpartition("}")[2]


def _harmless(declaration: str) -> bool:
    found = _STYLE.fullmatch(declaration)
    return found is not None and found[1] in _STYLES
