"""The tables of strategies in README and `docs/strategies.md`, from the registry."""

from __future__ import annotations

from collections.abc import Mapping

from trainwright.strategies.search.registry import STRATEGIES, TABLES

SHORT = ("name", "does", "like", "equal", "fit", "step", "verified")  # README


def markdown(columns: Mapping[str, str]) -> str:
    """All strategies, with these headings by key."""
    head = f"| {' | '.join(columns.values())} |\n|{'---|' * len(columns)}"
    rows = ({**each.row, "name": f"`{each.name}`", "layout": _code(each.layout)} for each in STRATEGIES.values())
    return "\n".join([head, *(f"| {' | '.join(row[key] for key in columns)} |" for row in rows)])


def tables() -> dict[str, tuple[str, ...]]:
    """By file, the tables that it must have."""
    headings = {key: heading for columns in TABLES for key, heading in columns.items()}
    return {
        "README.md": (markdown({key: headings[key] for key in SHORT}),),
        "docs/strategies.md": tuple(map(markdown, TABLES)),
    }


def _code(text: str) -> str:
    return f"`{text}`" if text else ""


if __name__ == "__main__":
    for name, found in tables().items():
        print(name, *found, sep="\n\n", end="\n\n")
