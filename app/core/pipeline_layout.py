"""Which stage of a pipeline holds which section of the model: what planner, timeline and engines go by.

A pipeline cuts the model into stages x chunks sections that follow each other. A stage's chunks are dealt out in turns,
each turn in the order of the stages; in folded schedules every second turn goes back through them, so that the sections
of two turns meet on one stage, and the first stage ends the model that it begins.
"""

from __future__ import annotations

FOLDED = frozenset({"zbv"})  # schedules whose chunks go to the last stage and back (a V: Qi et al., 2024)
STREAMED = frozenset({"pipedream"})  # schedules whose steps follow each other without a drain (Narayanan et al., 2021a)
CHUNKED = FOLDED | {"interleaved"}  # schedules whose stages hold several chunks


def misplaced(schedule: str, chunks: int) -> str:
    """Why a schedule cannot have so many chunks of a stage; empty where it can."""
    if schedule in FOLDED and chunks != 2:
        return f"schedule={schedule} goes through the stages and back, in 2 chunks of each and not {chunks}"
    if schedule not in CHUNKED and chunks > 1:
        return f"chunks={chunks} is for schedule={' or '.join(sorted(CHUNKED))}"
    return ""


def section_of(schedule: str, *, stage: int, stages: int, chunk: int = 0) -> int:
    """The section, from 0, that is a stage's chunk."""
    return chunk * stages + _turned(schedule, stage, stages, chunk)


def place_of(schedule: str, *, section: int, stages: int) -> tuple[int, int]:
    """The stage that holds a section, and which of its chunks it is."""
    chunk, place = divmod(section, stages)
    return _turned(schedule, place, stages, chunk), chunk


def loss_stage(schedule: str, *, stages: int, chunks: int = 1) -> int:
    """The stage that ends the model, and so computes the loss."""
    return place_of(schedule, section=stages * chunks - 1, stages=stages)[0]


def _turned(schedule: str, place: int, stages: int, chunk: int) -> int:
    return stages - 1 - place if schedule in FOLDED and chunk % 2 else place
