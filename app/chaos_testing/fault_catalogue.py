"""The faults that can be given, as a table."""

from __future__ import annotations

import signal
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from trainwright.core.errors import JobError, nearest

Target = Literal["worker", "spare", "driver", "store", "link"]
OUTAGE_S = 4.0  # of the store: shorter than what the last checkpoint is tried for
_ALL = 1_000_000


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One kind of fault.

    Attributes:
        does: what it does, in words.
        target: whom it strikes; a link between nodes only where somebody is there who can cut it.
        victims: how many workers at the same time.
        number: of the signal.
        seconds: for which it lasts, where it is an outage and no signal.
        starting: it strikes while the run starts, not while it steps.
        again: once more, at another worker, while the run recovers from the first.
        least_workers: the run must have.
        least_spares: the run must have.
    """

    name: str
    does: str
    target: Target = "worker"
    victims: int = 1
    number: int = signal.SIGKILL
    seconds: float = 0.0
    starting: bool = False
    again: bool = False
    least_workers: int = 1
    least_spares: int = 0


CATALOGUE = (
    Fault(name="start", does="SIGKILL to a worker while the run starts", starting=True),
    Fault(name="kill", does="SIGKILL to one worker"),
    Fault(name="kill-two", does="SIGKILL to two workers at once", victims=2, least_workers=2),
    Fault(name="kill-all", does="SIGKILL to all workers at once", victims=_ALL),
    Fault(name="stop", does="SIGSTOP to one worker, which then hangs", number=signal.SIGSTOP),
    Fault(name="again", does="SIGKILL to one worker, and to another while the run recovers", again=True),
    Fault(name="spare", does="SIGKILL to a spare", target="spare", least_spares=1),
    Fault(name="driver", does="SIGKILL to the driver, which is started again", target="driver"),
    Fault(
        name="stall",
        does="SIGSTOP to the driver, until another one has taken its run over",
        target="driver",
        number=signal.SIGSTOP,
    ),
    Fault(name="storage", does=f"the store fails for {OUTAGE_S:g} s", target="store", seconds=OUTAGE_S),
)
_BY_NAME = {fault.name: fault for fault in CATALOGUE}


@dataclass(frozen=True, kw_only=True)
class Stage:
    """What a run offers to faults.

    Attributes:
        storage: empty where the store can be made to fail, else why it cannot.
    """

    workers: int
    spares: int
    storage: str = ""


def unfit(fault: Fault, stage: Stage) -> str:
    """Why a fault cannot be given to such a run; empty where it can."""
    if stage.workers < fault.least_workers:
        return f"it needs {fault.least_workers} workers, the run has {stage.workers}: set workers="
    if stage.spares < fault.least_spares:
        return "it needs a spare worker, the run has none: set spares=1"
    return stage.storage if fault.target == "store" else ""


def chosen(names: Iterable[str], stage: Stage) -> tuple[Fault, ...]:
    """The faults of these names; without any, all that such a run can be given.

    Raises:
        JobError: a name is none, or the run cannot be given that fault.
    """
    wanted = tuple(names)
    if not wanted:
        return tuple(fault for fault in CATALOGUE if not unfit(fault, stage))
    problems = [f"faults: {name!r} is none: {nearest(name, _BY_NAME)}" for name in wanted if name not in _BY_NAME]
    known = [_BY_NAME[name] for name in wanted if name in _BY_NAME]
    problems += [f"faults: {fault.name!r}: {why}" for fault in known if (why := unfit(fault, stage))]
    if problems:
        raise JobError(problems)
    return tuple(known)
