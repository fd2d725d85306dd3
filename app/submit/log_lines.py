"""The log of a job as it comes over connections that break. Pure: pieces of text in, lines and figures out."""

from __future__ import annotations

import math
import re
from dataclasses import replace

from trainwright.reporting.event_messages import Figures

_FIGURES = re.compile(
    r"step (?P<step>[\d,]+)/(?P<total>[\d,]+), epoch (?P<epoch>\d+)/(?P<epochs>\d+)"
    r"(?:, loss (?P<loss>\S+), (?P<rate>[\d.,]+) samples/s(?:, waiting for data (?P<wait>\d+)%)?"
    r", (?P<left>[\d:-]+) left)?"
    r"(?:, (?P<activity>\D.*))?"
)
_RAYS_OWN = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d+\s+INFO \w+\.py:\d+ -- |Running entrypoint for job ")
_NO_TRAINWRIGHT = re.compile(
    r"No module named '?trainwright\b|Error while finding module specification for 'trainwright"
)


class Reel:
    """What was told of a log. A connection gives it from its beginning; what was told already is passed over."""

    def __init__(self) -> None:
        self._told = self._place = 0
        self._rest = ""

    def rewind(self) -> None:
        """A new connection begins."""
        self._place = 0

    def take(self, text: str) -> list[str]:
        """The lines that a piece completes."""
        new = text[max(0, self._told - self._place) :]
        self._place += len(text)
        self._told = max(self._told, self._place)
        *lines, self._rest = (self._rest + new).split("\n")
        return lines

    def end(self) -> list[str]:
        """What is left when the log is over: a last line without an end, or none."""
        rest, self._rest = self._rest, ""
        return [rest] if rest else []


def is_rays_own(line: str) -> bool:
    """Whether a line is Ray's talk of how it starts a job."""
    return _RAYS_OWN.match(line) is not None


def lacks_trainwright(line: str) -> bool:
    """Whether a line says that the cluster's Python has no trainwright."""
    return _NO_TRAINWRIGHT.search(line) is not None


def figures_of(line: str) -> Figures | None:
    """The figures of a line that `Figures.text` wrote; None for any other."""
    found = _FIGURES.fullmatch(line)
    if found is None:
        return None
    steps = Figures(
        step=_whole(found["step"]),
        total=_whole(found["total"]),
        epoch=_whole(found["epoch"]),
        epochs=_whole(found["epochs"]),
        activity=found["activity"] or "",
    )
    if found["loss"] is None:
        return steps
    try:
        loss, rate = float(found["loss"]), float(found["rate"].replace(",", ""))
    except ValueError:
        return None
    wait = int(found["wait"]) / 100 if found["wait"] else math.nan
    return replace(steps, loss=loss, samples_per_s=rate, wait_share=wait, left_s=_left(found["left"]))


def _whole(text: str) -> int:
    return int(text.replace(",", ""))


def _left(clock: str) -> float:
    """Seconds of `1:05:09`; NaN of `-:--`."""
    if "-" in clock:
        return math.nan
    seconds = 0
    for part in clock.split(":"):
        seconds = 60 * seconds + int(part)
    return float(seconds)
