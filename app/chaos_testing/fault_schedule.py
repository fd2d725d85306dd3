"""The faults of a chaos test, and their schedule: the summary of the observed run decides when a fault is due.

Schedules are drawn from a seed. A fault waits until the run has made progress after the fault before it. All functions
are pure.
"""

from __future__ import annotations

import random
import signal
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from trainwright.core.errors import JobError, nearest
from trainwright.core.events import Checkpointed, Formed, Placed
from trainwright.storage.run_summary import RunSummary

_SETTLED_STEPS = 3  # steps after a rendezvous before the next fault
_JITTER = 0.25  # share of the distance to the next fault, on either side
_DELAY_S = 0.5  # at most; without a delay faults would always coincide with events of steps


@dataclass(frozen=True, kw_only=True)
class ScheduledFault:
    """One fault of a schedule."""

    fault: FaultType
    step: int = 0  # step that must be complete before the fault
    after_s: float = 0.0  # least time since the previous fault, or since the first rendezvous
    draw: float = 0.0  # random number from 0 to 1, which chooses the target and the delay

    @property
    def delay_s(self) -> float:
        """Return the delay between the moment when the fault is due and its injection; none at the start of a run."""
        return 0.0 if self.fault.at_start else self.draw * 997 % 1 * _DELAY_S


@dataclass(frozen=True, kw_only=True)
class PreviousFault:
    """Time of the last fault, or of the first rendezvous."""

    at_s: float  # monotonic time
    step: int | None = None  # newest completed step; None before the first fault, which needs no checkpoint


def spread_schedule(faults: Sequence[FaultType], seed: int, total_steps: int) -> tuple[ScheduledFault, ...]:
    """Return a schedule with each fault once, in random order, spread over the steps of the run.

    Outages come last: a fault behind an outage waits for its end and for a checkpoint, and a short run may end before.
    """
    rng = random.Random(seed)
    order = rng.sample(faults, len(faults))
    order.sort(key=lambda fault: (not fault.at_start, fault.seconds))
    stepping = sum(not fault.at_start for fault in faults)
    way, schedule, place = total_steps / (stepping + 1), [], 0
    for fault in order:
        place += not fault.at_start
        step = 0 if fault.at_start else round(way * (place + rng.uniform(-_JITTER, _JITTER)))
        schedule.append(ScheduledFault(fault=fault, step=max(0, min(step, total_steps - 1)), draw=rng.random()))
    return tuple(schedule)


def random_schedule(faults: Sequence[FaultType], seed: int, seconds: float, count: int) -> tuple[ScheduledFault, ...]:
    """Return a schedule of `count` random faults with `seconds` between them.

    A fault at the start of a run comes first, and later only right after a driver fault, which causes a new start.
    """
    rng = random.Random(seed)
    at_start = [fault for fault in faults if fault.at_start]
    stepping = [fault for fault in faults if not fault.at_start]
    schedule = [ScheduledFault(fault=fault, draw=rng.random()) for fault in at_start]
    while stepping and len(schedule) < count:
        fault = rng.choice(stepping)
        schedule.append(ScheduledFault(fault=fault, after_s=seconds, draw=rng.random()))
        if at_start and fault.target == "driver" and rng.random() < 0.5:
            schedule.append(ScheduledFault(fault=at_start[0], draw=rng.random()))
    return tuple(schedule)


def is_due(scheduled: ScheduledFault, run: RunSummary, previous: PreviousFault, now_s: float) -> bool:
    """Return whether a fault may be injected now.

    It waits for a few steps after the last rendezvous and for a checkpoint beyond the step of the previous fault, so
    that the run makes progress between faults. A fault at the start of a run does not wait.
    """
    if scheduled.fault.at_start:
        return not run.formed and run.end is None and bool(processes_of(run))
    steps = run.formed and run.cause is None and run.end is None
    settled = steps and run.step - _newest_step(run, Formed) >= _SETTLED_STEPS
    committed = previous.step is None or _newest_step(run, Checkpointed) > previous.step
    return settled and committed and run.step >= scheduled.step and now_s - previous.at_s >= scheduled.after_s


def next_fault(
    schedule: Sequence[ScheduledFault],
    run: RunSummary,
    previous: PreviousFault,
    now_s: float,
    possible: Callable[[ScheduledFault], bool],
) -> ScheduledFault | None:
    """Return the first fault that is due and has a target; faults without one, as a missing warm standby, wait.

    A fault at the start of a run is injected only if it is the next of the schedule: each start gets one at most.
    """
    for position, scheduled in enumerate(schedule):
        if scheduled.fault.at_start and position:
            continue
        if is_due(scheduled, run, previous, now_s) and possible(scheduled):
            return scheduled
    return None


def remaining_faults(schedule: Sequence[ScheduledFault], given: ScheduledFault) -> list[ScheduledFault]:
    """Return the schedule without an injected fault; after a driver fault, a following start fault is the next."""
    place = next(number for number, scheduled in enumerate(schedule) if scheduled is given)
    before, behind = list(schedule[:place]), list(schedule[place + 1 :])
    at_start = behind[:1] if given.fault.target == "driver" and behind and behind[0].fault.at_start else []
    return [*at_start, *before, *behind[len(at_start) :]]


# --- State of the observed run ----------------------------------------------------------------------------------------


def processes_of(run: RunSummary, *, spares: bool = False) -> list[Placed]:
    """Return the living processes that have a rank or will get one, or the warm standbys."""
    return [process for process in run.processes.values() if process.spare is spares]


def process_text(process: Placed) -> str:
    """`worker 1 (pid 4711 on node-2)`."""
    kind = "warm standby" if process.spare else "worker"
    return f"{kind} {process.worker} (pid {process.pid} on {process.node})"


def _newest_step(run: RunSummary, kind: type[Formed] | type[Checkpointed]) -> int:
    """Return the step of the newest event of a kind; 0 without one."""
    return next((event.step for event in reversed(run.newest) if isinstance(event, kind)), 0)


# --- Catalogue of faults ----------------------------------------------------------------------------------------------


Target = Literal["worker", "spare", "driver", "store", "link"]
_OUTAGE_S = 4.0  # of the store: shorter than the time for which the last checkpoint is retried
_ALL = 1_000_000


@dataclass(frozen=True, kw_only=True)
class FaultType:
    """One kind of fault."""

    name: str
    description: str
    target: Target = "worker"  # what it hits; a link between nodes needs an outage that can interrupt it
    victims: int = 1  # number of workers hit at the same time
    signal_number: int = signal.SIGKILL
    seconds: float = 0.0  # duration of an outage; 0 for a signal
    at_start: bool = False  # whether it is injected while the run starts, not while it steps
    twice: bool = False  # whether it hits another worker while the run recovers from the first
    least_workers: int = 1  # number of workers that the run needs
    least_spares: int = 0  # number of warm standbys that the run needs


CATALOGUE = (
    FaultType(name="start", description="SIGKILL to a worker while the run starts", at_start=True),
    FaultType(name="kill", description="SIGKILL to one worker"),
    FaultType(name="kill-two", description="SIGKILL to two workers at once", victims=2, least_workers=2),
    FaultType(name="kill-all", description="SIGKILL to all workers at once", victims=_ALL),
    FaultType(name="stop", description="SIGSTOP to one worker, which then hangs", signal_number=signal.SIGSTOP),
    FaultType(name="again", description="SIGKILL to one worker, and to another while the run recovers", twice=True),
    FaultType(name="spare", description="SIGKILL to a warm standby", target="spare", least_spares=1),
    FaultType(name="driver", description="SIGKILL to the driver, which is started again", target="driver"),
    FaultType(
        name="stall",
        description="SIGSTOP to the driver, until another one has taken its run over",
        target="driver",
        signal_number=signal.SIGSTOP,
    ),
    FaultType(name="storage", description=f"the store fails for {_OUTAGE_S:g} s", target="store", seconds=_OUTAGE_S),
)
_BY_NAME = {fault.name: fault for fault in CATALOGUE}


@dataclass(frozen=True, kw_only=True)
class FaultRequirements:
    """Properties of a run that decide which faults fit it."""

    workers: int
    spares: int
    storage: str = ""  # why the store cannot be made to fail; empty if it can


def _unfit_reason(fault: FaultType, requirements: FaultRequirements) -> str:
    """Return why a fault does not fit a run; empty if it does."""
    if requirements.workers < fault.least_workers:
        return f"it needs {fault.least_workers} workers, the run has {requirements.workers}: set workers="
    if requirements.spares < fault.least_spares:
        return "it needs a warm standby, the run has none: set spares=1"
    return requirements.storage if fault.target == "store" else ""


def select_faults(names: Iterable[str], requirements: FaultRequirements) -> tuple[FaultType, ...]:
    """Return the faults of these names; without names, all that fit the run.

    Raises:
        JobError: a name is unknown, or a fault does not fit the run.
    """
    wanted = tuple(names)
    if not wanted:
        return tuple(fault for fault in CATALOGUE if not _unfit_reason(fault, requirements))
    problems = [f"faults: unknown fault {name!r}: {nearest(name, _BY_NAME)}" for name in wanted if name not in _BY_NAME]
    known = [_BY_NAME[name] for name in wanted if name in _BY_NAME]
    problems += [f"faults: {fault.name!r}: {why}" for fault in known if (why := _unfit_reason(fault, requirements))]
    if problems:
        raise JobError(problems)
    return tuple(known)
