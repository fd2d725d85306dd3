"""The same as `recovery` with four workers."""

from __future__ import annotations

from pathlib import Path

from figures import Figure
from recovery import NOTE as _NOTE
from recovery import figures_of, measure_all

NOTE = (
    "As `recovery`, with four workers, a quarter of the batch for each; on a machine of two cores they share these. "
    + _NOTE
)


def measure(folder: Path, *, smoke: bool) -> list[Figure]:
    return figures_of("recovery_4", measure_all(folder, workers=3 if smoke else 4, smoke=smoke))
