"""What the driver asks of plans, and tells workers of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from trainwright.core.data import Columns, Feed, Feeding
from trainwright.core.events import Probed
from trainwright.core.group import Address, Generation, Role
from trainwright.core.plan import Plan


@dataclass(frozen=True, kw_only=True)
class Reservation:
    """A generation to come, and the plan that it works under; None for the one that every process was given.

    A process that has built for another layout begins anew, and holds no state then.

    Attributes:
        role: that the process will have.
        former: the address of the process before it at its rank, in this very generation, for engines whose groups
            know each other by fixed addresses: it is to be bound again; None for any.
    """

    generation: Generation
    plan: Plan | None = None
    role: Role = "worker"
    former: Address | None = None


@dataclass(frozen=True, kw_only=True)
class Probing:
    """Measure throwaway steps of the plan: `steps` at most, and none is begun after `seconds`, but for the first two.

    They train, so that all of a step is timed; the process builds anew before it trains on.
    """

    steps: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The evaluation set is to be judged at a step, by those who have its shares.

    Attributes:
        feeding: the receiver's share; None for that of its rank in the plan.
    """

    step: int
    feeding: Feeding | None = None


@dataclass(frozen=True, kw_only=True)
class Predicting:
    """The model's outputs are wanted for some feeds.

    Attributes:
        place: along the second dimension, the only one that is kept of outputs (rows, places, ...), others stay as they
            are; None for all.
    """

    feeds: tuple[Feed, ...]
    place: int | None = None

    def chosen(self, outputs: Columns) -> Columns:
        """What is wanted of a feed's outputs."""
        if self.place is None:
            return outputs
        kept = slice(self.place, self.place + 1)
        return {name: value[:, kept] if value.ndim > 2 else value for name, value in outputs.items()}


class Layouts(Protocol):
    """The plans of a run, all with one device in each worker. Pure: the same question gives the same answer."""

    @property
    def plans(self) -> tuple[Plan, ...]:
        """The plan of the run, then those that it is measured against before the first step."""

    def on(self, room: int, fewest: int) -> Plan | None:
        """For at most `room` and at least `fewest` workers: the run's plan, smaller where it must be, else another."""

    def lacking(self, room: int) -> str:
        """Why the run's own plan is none for so many workers, and why no other is either where that is so."""

    def measured(self, step_s: Mapping[int, float], aside: Mapping[int, str]) -> tuple[Layouts, Probed]:
        """The same with the best measured of `plans` as the run's, and an event that tells of it.

        Args:
            step_s: seconds of a step by place in `plans`; at least one.
            aside: why the others could not be measured.
        """


@dataclass(frozen=True, kw_only=True)
class Trials:
    """Plans that are measured before the first step, by their places in `Layouts.plans`.

    Attributes:
        left: that are still to be measured, in order.
        step_s: seconds of a step.
        aside: why one cannot be measured.
        first: the error of the first that was set aside.
        trying: the first of `left` has been begun with.
        since_s: when the first of all was begun with; 0 before.
    """

    left: tuple[int, ...]
    since_s: float = 0.0
    step_s: Mapping[int, float] = field(default_factory=dict)
    aside: Mapping[int, str] = field(default_factory=dict)
    first: Exception | None = None
    trying: bool = False
