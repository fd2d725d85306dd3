"""Templates of the HTML pages, and the sanitizer of stored SVG.

Pages have inline styles and pictures, no scripts, and fetch nothing; their content security policy enforces this. The
sanitizer parses a drawing and writes only allowed elements and attributes again, so nothing that parsers may read
differently, such as a comment, reaches the page.
"""

from __future__ import annotations

import re
from functools import cache
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

from jinja2 import Environment, PackageLoader, StrictUndefined

if TYPE_CHECKING:
    from markupsafe import Markup


def render_template(name: str, **values: Any) -> str:
    """Fill a template of this folder; texts are escaped, pictures are given as Markup."""
    return _environment().get_template(name).render(**values)


@cache
def _environment() -> Environment:
    return Environment(
        loader=PackageLoader("trainwright.reporting.html", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


# --- stored SVG -------------------------------------------------------------------------------------------------------


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
_DEEPEST = 8  # levels; our drawings have 3


def sanitized_svg(svg: str) -> Markup:
    """Return the shapes and texts of a stored SVG; empty where it is not SVG, or declares entities."""
    from markupsafe import Markup

    try:
        root = ElementTree.fromstring("" if "<!DOCTYPE" in svg.upper() else svg)
    except ElementTree.ParseError:
        return Markup()
    if _name(root) != "svg":
        return Markup()
    return Markup(ElementTree.tostring(_allowed_copy(root, _DEEPEST), encoding="unicode"))


def _allowed_copy(element: ElementTree.Element, deepest: int) -> ElementTree.Element:
    """Copy an element with its allowed attributes and children."""
    kept = {name: value for name, value in element.attrib.items() if name in _ATTRIBUTES}
    if "style" in kept:
        kept["style"] = ";".join(part for part in kept["style"].split(";") if _is_allowed_style(part))
    made = ElementTree.Element(_name(element), kept)
    made.text = element.text
    made.extend(_allowed_copy(child, deepest - 1) for child in element if deepest and _name(child) in _TAGS)
    return made


def _name(element: ElementTree.Element) -> str:
    """Return the tag without its namespace."""
    return element.tag.rpartition("}")[2]


def _is_allowed_style(declaration: str) -> bool:
    found = _STYLE.fullmatch(declaration)
    return found is not None and found[1] in _STYLES
