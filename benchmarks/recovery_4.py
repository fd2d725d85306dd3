"""The same as `recovery` with four workers."""

from __future__ import annotations

from pathlib import Path

from figures import Figure
from recovery import KILLS, contest, figures_of
from recovery import NOTE as _NOTE

NOTE = (
    "As `recovery`, with four workers, a quarter of the batch for each; on a machine of two cores they share these. "
    + _NOTE
)


def measure(folder: Path, *, quick: bool) -> list[Figure]:
    """The figures of this benchmark."""
    return figures_of("recovery_4", contest(folder, workers=4, kills=2 if quick else KILLS))
