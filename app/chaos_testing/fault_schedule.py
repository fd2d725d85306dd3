"""Which fault is due when: drawn from a seed, and never so fast that the run cannot get on. Pure."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from trainwright.core.errors import JobError, nearest
from trainwright.core.events import Checkpointed, Event, Failed, Formed, Placed, Promoted, RunEnded, RunStarted, Steps

_SETTLED_STEPS = 3  # of a generation before the next fault
_JITTER = 0.25  # of the way to the next fault, either side
_DELAY_S = 0.5  # at most, so that faults do not keep time with the news of steps


@dataclass(frozen=True, kw_only=True)
class ScheduledFault:
    """One fault to give.

    Attributes:
        step: not before this step is complete.
        after_s: nor before so many seconds since the fault before it, or since the first generation.
        draw: from 0 to 1; says which of several targets is struck, and how long after it was found due.
    """

    fault: FaultType
    step: int = 0
    after_s: float = 0.0
    draw: float = 0.0

    @property
    def delay_s(self) -> float:
        """How long it waits once it is due; at a start every moment counts."""
        return 0.0 if self.fault.starting else self.draw * 997 % 1 * _DELAY_S


@dataclass(frozen=True, kw_only=True)
class PreviousFault:
    """When the last fault was given, or the first generation was formed.

    Attributes:
        step: completed by then; None before the first fault, which needs no checkpoint.
    """

    at_s: float
    step: int | None = None


def spread_schedule(faults: Sequence[FaultType], seed: int, total_steps: int) -> tuple[ScheduledFault, ...]:
    """Each fault once, in an order drawn from the seed, spread over the steps of the run.

    Outages come last: what strikes behind one waits for its end and for a checkpoint, and a short run ends before.
    """
    rng = random.Random(seed)
    order = rng.sample(faults, len(faults))
    order.sort(key=lambda fault: (not fault.starting, fault.seconds))
    stepping = sum(not fault.starting for fault in faults)
    way, strikes, place = total_steps / (stepping + 1), [], 0
    for fault in order:
        place += not fault.starting
        step = 0 if fault.starting else round(way * (place + rng.uniform(-_JITTER, _JITTER)))
        strikes.append(ScheduledFault(fault=fault, step=max(0, min(step, total_steps - 1)), draw=rng.random()))
    return tuple(strikes)


def random_schedule(faults: Sequence[FaultType], seed: int, seconds: float, count: int) -> tuple[ScheduledFault, ...]:
    """So many faults, each drawn from the seed, one after the other with so many seconds in between.

    A fault that strikes a start comes first, and then only right behind one of the driver, which brings a start about.
    """
    rng = random.Random(seed)
    starting = [fault for fault in faults if fault.starting]
    stepping = [fault for fault in faults if not fault.starting]
    strikes = [ScheduledFault(fault=fault, draw=rng.random()) for fault in starting]
    while stepping and len(strikes) < count:
        fault = rng.choice(stepping)
        strikes.append(ScheduledFault(fault=fault, after_s=seconds, draw=rng.random()))
        if starting and fault.target == "driver" and rng.random() < 0.5:
            strikes.append(ScheduledFault(fault=starting[0], draw=rng.random()))
    return tuple(strikes)


def is_due(strike: ScheduledFault, scene: ObservedState, past: PreviousFault, now_s: float) -> bool:
    """Whether a fault may strike now.

    It waits until the run has settled: a generation has made a few steps, and a checkpoint was committed beyond the
    step of the fault before, so that a run gets on whatever the faults take. One of the start waits for none of that.
    """
    if strike.fault.starting:
        return not scene.ever_formed and not scene.ended and bool(scene.workers)
    settled = scene.formed and scene.step - scene.formed_step >= _SETTLED_STEPS
    committed = past.step is None or scene.committed > past.step
    return settled and committed and scene.step >= strike.step and now_s - past.at_s >= strike.after_s


def next_fault(
    strikes: Sequence[ScheduledFault],
    scene: ObservedState,
    past: PreviousFault,
    now_s: float,
    possible: Callable[[ScheduledFault], bool],
) -> ScheduledFault | None:
    """The first that is due and has a target; one without, such as a spare that is not up yet, lets others go first.

    Of faults at a start only those that are next in line strike it: each start gets one at most.
    """
    for position, strike in enumerate(strikes):
        if strike.fault.starting and position:
            continue
        if is_due(strike, scene, past, now_s) and possible(strike):
            return strike
    return None


def remaining_faults(strikes: Sequence[ScheduledFault], given: ScheduledFault) -> list[ScheduledFault]:
    """What is left once one is given; a fault of the start right behind one of the driver is next in line."""
    place = next(number for number, strike in enumerate(strikes) if strike is given)
    before, behind = list(strikes[:place]), list(strikes[place + 1 :])
    starting = behind[:1] if given.fault.target == "driver" and behind and behind[0].fault.starting else []
    return [*starting, *before, *behind[len(starting) :]]


# --- What stands at this moment, folded from a run's events -----------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ObservedWorker:
    """A worker's process. A `spare` holds no rank."""

    worker: int
    node: str
    pid: int
    spare: bool = False

    def __str__(self) -> str:
        return f"{'spare' if self.spare else 'worker'} {self.worker} (pid {self.pid} on {self.node})"


@dataclass(frozen=True, kw_only=True)
class ObservedState:
    """A run as its newest events tell it.

    Attributes:
        processes: that were placed and are not known to be gone, by number of the worker.
        formed: a generation is ready to step.
        ever_formed: this driver has formed one.
        step: the newest completed step.
        formed_step: at which the newest generation began.
        committed: step of the newest checkpoint.
        ended: the driver has let go of the run.
    """

    processes: Mapping[int, ObservedWorker] = field(default_factory=dict)
    formed: bool = False
    ever_formed: bool = False
    step: int = 0
    formed_step: int = 0
    committed: int = 0
    ended: bool = False

    @property
    def workers(self) -> tuple[ObservedWorker, ...]:
        """Processes that hold a rank, or are to hold one."""
        return tuple(process for process in self.processes.values() if not process.spare)

    @property
    def spares(self) -> tuple[ObservedWorker, ...]:
        """Processes that wait for a rank."""
        return tuple(process for process in self.processes.values() if process.spare)

    def after(self, event: Event) -> ObservedState:
        """The scene after one more event."""
        match event:
            case RunStarted():
                return replace(self, processes={}, formed=False, ever_formed=False, ended=False)
            case Placed():
                process = ObservedWorker(worker=event.worker, node=event.node, pid=event.pid, spare=event.spare)
                return replace(self, processes={**self.processes, event.worker: process})
            case Promoted():
                return self._promoted(event)
            case Failed():
                rest = {worker: process for worker, process in self.processes.items() if worker != event.worker}
                return replace(self, processes=rest, formed=False)
            case Formed():
                return replace(self, formed=True, ever_formed=True, formed_step=event.step, step=event.step)
            case Steps() if event.step:
                return replace(self, step=event.step[-1])
            case Checkpointed():
                return replace(self, committed=event.step)
            case RunEnded():
                return replace(self, ended=True, formed=False)
        return self

    def _promoted(self, event: Promoted) -> ObservedState:
        spare = self.processes.get(event.worker)
        if spare is None:
            return self  # it was to be a spare and is not up yet: it is placed as a worker
        return replace(self, processes={**self.processes, event.worker: replace(spare, spare=False)})


# --- The faults that can be given, as a table -------------------------------------------------------------------------


Target = Literal["worker", "spare", "driver", "store", "link"]
_OUTAGE_S = 4.0  # of the store: shorter than what the last checkpoint is tried for
_ALL = 1_000_000


@dataclass(frozen=True, kw_only=True)
class FaultType:
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
    FaultType(name="start", does="SIGKILL to a worker while the run starts", starting=True),
    FaultType(name="kill", does="SIGKILL to one worker"),
    FaultType(name="kill-two", does="SIGKILL to two workers at once", victims=2, least_workers=2),
    FaultType(name="kill-all", does="SIGKILL to all workers at once", victims=_ALL),
    FaultType(name="stop", does="SIGSTOP to one worker, which then hangs", number=signal.SIGSTOP),
    FaultType(name="again", does="SIGKILL to one worker, and to another while the run recovers", again=True),
    FaultType(name="spare", does="SIGKILL to a spare", target="spare", least_spares=1),
    FaultType(name="driver", does="SIGKILL to the driver, which is started again", target="driver"),
    FaultType(
        name="stall",
        does="SIGSTOP to the driver, until another one has taken its run over",
        target="driver",
        number=signal.SIGSTOP,
    ),
    FaultType(name="storage", does=f"the store fails for {_OUTAGE_S:g} s", target="store", seconds=_OUTAGE_S),
)
_BY_NAME = {fault.name: fault for fault in CATALOGUE}


@dataclass(frozen=True, kw_only=True)
class FaultRequirements:
    """What a run offers to faults.

    Attributes:
        storage: empty where the store can be made to fail, else why it cannot.
    """

    workers: int
    spares: int
    storage: str = ""


def _unfit_reason(fault: FaultType, stage: FaultRequirements) -> str:
    """Why a fault cannot be given to such a run; empty where it can."""
    if stage.workers < fault.least_workers:
        return f"it needs {fault.least_workers} workers, the run has {stage.workers}: set workers="
    if stage.spares < fault.least_spares:
        return "it needs a spare worker, the run has none: set spares=1"
    return stage.storage if fault.target == "store" else ""


def select_faults(names: Iterable[str], stage: FaultRequirements) -> tuple[FaultType, ...]:
    """The faults of these names; without any, all that such a run can be given.

    Raises:
        JobError: a name is none, or the run cannot be given that fault.
    """
    wanted = tuple(names)
    if not wanted:
        return tuple(fault for fault in CATALOGUE if not _unfit_reason(fault, stage))
    problems = [f"faults: {name!r} is none: {nearest(name, _BY_NAME)}" for name in wanted if name not in _BY_NAME]
    known = [_BY_NAME[name] for name in wanted if name in _BY_NAME]
    problems += [f"faults: {fault.name!r}: {why}" for fault in known if (why := _unfit_reason(fault, stage))]
    if problems:
        raise JobError(problems)
    return tuple(known)
