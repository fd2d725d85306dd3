"""Templates of the HTML pages, their content security policy, and the sanitizer of stored SVG.

A page is one file, which fetches nothing. Its policy allows the styles and scripts that are in it, by their hashes, and
nothing else; so no element has a `style` attribute. The live page may also ask its own server.

The sanitizer parses a drawing and writes only allowed elements and attributes again, so nothing that parsers may read
differently, such as a comment, reaches the page.
"""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Sequence
from functools import cache
from hashlib import sha256
from importlib.resources import files
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

from jinja2 import Environment, PackageLoader, StrictUndefined

if TYPE_CHECKING:
    from markupsafe import Markup

_PACKAGE = "trainwright.reporting.html"
_STYLE_ELEMENT = re.compile(r"<style>(.*?)</style>", re.DOTALL)


def render_template(name: str, **values: Any) -> str:
    """Fill a template of this folder; texts are escaped, pictures are given as Markup."""
    return _environment().get_template(name).render(**values)


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader(_PACKAGE, "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    # NaN is not JSON. The filter `tojson` also escapes <, > and &, so that no value ends the script element.
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}
    return environment


def render_page(title: str, body: str) -> str:
    """Return a page without scripts. `body` is filled from templates, and so are the style elements in it."""
    styles = (_style("page.css.j2"),)
    return _page(title, body, styles=styles, policy=_policy([*styles, *_STYLE_ELEMENT.findall(body)], (), live=False))


def render_report_page(title: str, body: str, *, live: bool) -> str:
    """Return the page of a run, with the script that draws its curves.

    Args:
        live: the page asks its server for newer contents.
    """
    styles, scripts = _report_parts()
    return _page(title, body, styles=styles, scripts=scripts, policy=report_policy(live=live), live=live)


def report_policy(*, live: bool) -> str:
    """Return the content security policy of the page of a run."""
    styles, scripts = _report_parts()
    return _policy(styles, scripts, live=live)


def _page(
    title: str, body: str, *, styles: Sequence[str], policy: str, scripts: Sequence[str] = (), live: bool = False
) -> str:
    from markupsafe import Markup

    texts = {"styles": [*map(Markup, styles)], "scripts": [*map(Markup, scripts)], "policy": Markup(policy)}
    return render_template("page.html.j2", title=title, body=Markup(body), live=live, **texts)


@cache
def _report_parts() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the styles and the scripts of the page of a run."""
    styles = (_file("uplot/uPlot.min.css"), _style("report.css.j2"))
    return styles, (_file("uplot/uPlot.iife.min.js"), _file("report.js"))


def _style(name: str) -> str:
    return render_template(name)


def _file(name: str) -> str:
    return files(_PACKAGE).joinpath(name).read_text("utf-8")


def _policy(styles: Sequence[str], scripts: Sequence[str], *, live: bool) -> str:
    parts = ["default-src 'none'", f"style-src {_hashes(styles)}"]
    parts += [f"script-src {_hashes(scripts)}"] if scripts else []
    parts += ["connect-src 'self'"] if live else []
    return "; ".join([*parts, "base-uri 'none'", "form-action 'none'"])


def _hashes(texts: Sequence[str]) -> str:
    return " ".join(f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'" for text in texts)


# --- stored SVG -------------------------------------------------------------------------------------------------------


_TAGS = frozenset({"svg", "g", "path", "rect", "text", "title"})
_ATTRIBUTES = frozenset(
    {
        "aria-label", "class", "d", "fill", "font-family", "font-size", "height", "opacity", "pointer-events", "role",
        "rx", "stroke", "stroke-dasharray", "stroke-width", "text-anchor", "viewBox", "width", "x", "y",
    }
)  # fmt: skip
_LOOKS = frozenset({"fill", "opacity", "pointer-events", "stroke", "stroke-dasharray", "stroke-width"})
_LOOK = re.compile(r"var\(--[\w-]+(?:,[\w#]+)?\)|[\w#%. -]+")
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
    """Copy an element with its allowed attributes and children. Older drawings have their colours as `style`."""
    declared = dict(part.split(":", 1) for part in element.get("style", "").split(";") if ":" in part)
    looks = {name.strip(): value.strip() for name, value in declared.items() if name.strip() in _LOOKS}
    kept = {**looks, **{name: value for name, value in element.attrib.items() if name in _ATTRIBUTES}}
    kept = {name: value for name, value in kept.items() if name not in _LOOKS or _LOOK.fullmatch(value)}
    made = ElementTree.Element(_name(element), kept)
    made.text = element.text
    made.extend(_allowed_copy(child, deepest - 1) for child in element if deepest and _name(child) in _TAGS)
    return made


def _name(element: ElementTree.Element) -> str:
    """Return the tag without its namespace."""
    return element.tag.rpartition("}")[2]
