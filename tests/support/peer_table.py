"""The table of `docs/moving-in.md`: options of other trainers and what to use here."""

from __future__ import annotations

from trainwright.core.peer_options import PEER_OPTIONS


def markdown() -> str:
    """One row for each answer, with all names that it answers."""
    names: dict[str, list[str]] = {}
    for name, advice in PEER_OPTIONS.items():
        names.setdefault(advice, []).append(f"`{name}`")
    rows = (f"| {', '.join(found)} | {advice} |" for advice, found in names.items())
    return "\n".join(["| elsewhere | here |", "|---|---|", *rows])


if __name__ == "__main__":
    print(markdown())
