"""Fake worker processes and the groups they form."""

from __future__ import annotations

import math
from typing import Any

from trainwright.core.plan import Plan
from trainwright.core.topology import StateTag
from trainwright.driver import messages as m
from trainwright.worker.step_profiler import StepProfiler

FRESH = 1  # the lineage of a build: no step applied yet
TORN = -1  # the lineage of a state that was interrupted
TRIED = -2  # of one that took throwaway steps


def apply(lineage: int, index: int) -> int:
    """The lineage after one more step that used the batch of this index: losing or doubling one changes it."""
    return hash((lineage, index))


def lineages(steps: int) -> list[int]:
    """The right lineage after each number of completed steps."""
    chain = [FRESH]
    for index in range(steps):
        chain.append(apply(chain[-1], index))
    return chain


class Process:
    """One worker process: what it holds, what it does, and what was said about it."""

    __slots__ = (
        "adrift",
        "alive",
        "beside",
        "born_s",
        "busy_s",
        "call",
        "copies",
        "deaf",
        "driver",
        "due_s",
        "freed",
        "hung",
        "killed",
        "lineage",
        "member",
        "noticed",
        "piece",
        "plan",
        "profiler",
        "raise_next",
        "raised",
        "rank",
        "slot",
        "sound",
        "spare",
        "step",
        "team",
        "ticket",
        "told",
        "trace_hung",
        "trained",
        "tried",
        "up",
        "upload",
        "upload_hung",
        "worker",
    )  # fmt: skip

    def __init__(self, driver: Any, place: m.StartWorker, now_s: float) -> None:
        self.driver, self.worker, self.slot, self.rank = driver, place.worker, place.slot, place.slot
        self.spare, self.beside = place.spare, place.beside
        self.born_s = now_s
        self.up, self.alive, self.killed, self.told = False, True, False, False
        self.call: m.CallWorker | None = None  # on the thread of steps
        self.upload: m.CallWorker | None = None
        self.ticket = 0  # numbers the answer to the call; older ones are void
        self.due_s = 0.0
        self.raise_next = ""
        self.raised = False  # an error that no process is trusted after
        self.hung, self.deaf, self.upload_hung, self.trace_hung = False, False, False, False
        self.busy_s = 0.0  # until when the thread of uploads and traces has something to do
        self.adrift = False  # its chief cannot reach it, and knows it not
        self.noticed = False  # told that it will be ended soon
        self.team: Team | None = None
        self.member = False  # of a team that it has not left
        self.freed: Team | None = None  # the team whose connections were shut
        self.piece = "state"
        self.plan: Plan | None = None  # what it builds for
        self.tried = False  # it took throwaway steps
        self.step, self.lineage, self.sound, self.trained = 0, FRESH, True, False
        self.copies: dict[str, tuple[str, int, int]] = {}  # by the verb that they are for
        self.profiler: StepProfiler | None = None

    def tag(self, layout: str, total: int) -> StateTag:
        """What it says it holds."""
        step = self.step if self.trained else None
        return StateTag(step=step, layout=layout, pieces=frozenset({self.piece}), total=total, sound=self.sound)

    @property
    def guilty(self) -> bool:
        """Whether it deserves to be ended."""
        return not self.alive or self.hung or self.upload_hung or self.raised or self.noticed

    @property
    def harmless(self) -> bool:
        """Whether its death is no failure: it was ended, or held no rank."""
        return self.killed or self.spare

    def occupy(self, now_s: float, takes_s: float) -> float | None:
        """Have the thread of uploads and traces do one more thing; return in how many seconds it begins, if ever."""
        wait_s = max(self.busy_s - now_s, 0.0)
        self.busy_s = now_s + wait_s + takes_s
        return None if math.isinf(wait_s) else wait_s

    def freeze(self) -> None:
        """What that thread does last never ends."""
        self.busy_s = math.inf

    def take(self, step: int, lineage: int) -> None:
        """Hold a sound state."""
        self.step, self.lineage, self.sound, self.trained = step, lineage, True, True

    def turn_to(self, plan: Plan) -> None:
        """Build for a plan: anew, where it is of another layout or throwaway steps were taken."""
        if self.tried or self.plan is None or self.plan.layout != plan.layout:
            self.tried = False
            self.drop()
        self.plan = plan

    def drop(self) -> None:
        """Hold what was just built."""
        self.step, self.lineage, self.sound, self.trained = 0, FRESH, True, False

    def tear(self) -> None:
        """Be interrupted while the state changes."""
        self.lineage, self.sound, self.trained = TORN, False, True


class Team:
    """A generation's group as the processes see it: collective verbs end together or break for all."""

    __slots__ = (
        "argument",
        "arrived",
        "broken",
        "cut",
        "early",
        "lineage",
        "members",
        "number",
        "passing",
        "ranks",
        "size",
        "step",
        "stop_requested",
        "ticket",
        "verb",
    )  # fmt: skip

    def __init__(self, number: int) -> None:
        self.number = number
        self.size = 0
        self.members: list[Process] = []
        self.ranks: set[int] = set()
        self.arrived: list[Process] = []
        self.verb, self.argument = "", None
        self.broken, self.cut, self.stop_requested = False, False, False
        self.ticket = 0
        self.step, self.lineage = 0, FRESH
        self.passing: frozenset[int] = frozenset()
        self.early = False  # it breaks before anybody has changed anything
