"""What the runs of a search came to, as storage knows it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from trainwright.reporting.history import read_history
from trainwright.storage.run_log import RunLog
from trainwright.storage.store import Store

_STOPPED = "stopped"  # folder of the runs that were stopped for good


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a run came to.

    Attributes:
        told: the metric by steps, of each evaluation, in order; at least one.
        stopped: it was behind others after the last of these.
    """

    told: Mapping[int, float]
    stopped: bool = False

    @property
    def step(self) -> int:
        """After how many steps."""
        return max(self.told)

    @property
    def value(self) -> float:
        """The metric then."""
        return self.told[self.step]


def outcome_of(store: Store, run: str, metric: str) -> Outcome | None:
    """What a run came to that was stopped, or is done and says so; None of one that has more to do or to say."""
    mark = store.find(f"{_STOPPED}/{run}")
    if mark is not None:
        return Outcome(told=dict(json.loads(mark)), stopped=True)
    head = RunLog(store, run).head()
    if head is None or head.outcome != "done":
        return None
    told = {each.step: each.metrics[metric] for each in read_history(store, run).evaluated}
    return Outcome(told=told) if max(told, default=-1) >= head.checkpoints[-1].step else None


def mark_stopped(store: Store, run: str, outcome: Outcome) -> None:
    """Remember that a run was stopped for good, with its figures: its events of these may not be in storage yet."""
    store.put(f"{_STOPPED}/{run}", json.dumps([*outcome.told.items()]).encode())
