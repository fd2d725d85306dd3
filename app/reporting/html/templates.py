"""The templates of pages: styles and pictures inline, no scripts, nothing fetched, which the pages' policy enforces."""

from __future__ import annotations

from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined


def fill(name: str, **values: Any) -> str:
    """A template of this folder with its values; texts are escaped, pictures come as markup."""
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
