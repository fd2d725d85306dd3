"""Which fault is due when: drawn from a seed, and never so fast that the run cannot get on. Pure."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from trainwright.chaos_testing.fault_catalogue import Fault
from trainwright.chaos_testing.run_state import Scene

SETTLED_STEPS = 3  # of a generation before the next fault
_JITTER = 0.25  # of the way to the next fault, either side
_DELAY_S = 0.5  # at most, so that faults do not keep time with the news of steps


@dataclass(frozen=True, kw_only=True)
class Strike:
    """One fault to give.

    Attributes:
        step: not before this step is complete.
        after_s: nor before so many seconds since the fault before it, or since the first generation.
        draw: from 0 to 1; says which of several targets is struck, and how long after it was found due.
    """

    fault: Fault
    step: int = 0
    after_s: float = 0.0
    draw: float = 0.0

    @property
    def delay_s(self) -> float:
        """How long it waits once it is due; at a start every moment counts."""
        return 0.0 if self.fault.starting else self.draw * 997 % 1 * _DELAY_S


@dataclass(frozen=True, kw_only=True)
class Past:
    """When the last fault was given, or the first generation was formed.

    Attributes:
        step: completed by then; None before the first fault, which needs no checkpoint.
    """

    at_s: float
    step: int | None = None


def spread(faults: Sequence[Fault], seed: int, total_steps: int) -> tuple[Strike, ...]:
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
        strikes.append(Strike(fault=fault, step=max(0, min(step, total_steps - 1)), draw=rng.random()))
    return tuple(strikes)


def every(faults: Sequence[Fault], seed: int, seconds: float, count: int) -> tuple[Strike, ...]:
    """So many faults, each drawn from the seed, one after the other with so many seconds in between.

    A fault that strikes a start comes first, and then only right behind one of the driver, which brings a start about.
    """
    rng = random.Random(seed)
    starting = [fault for fault in faults if fault.starting]
    stepping = [fault for fault in faults if not fault.starting]
    strikes = [Strike(fault=fault, draw=rng.random()) for fault in starting]
    while stepping and len(strikes) < count:
        fault = rng.choice(stepping)
        strikes.append(Strike(fault=fault, after_s=seconds, draw=rng.random()))
        if starting and fault.target == "driver" and rng.random() < 0.5:
            strikes.append(Strike(fault=starting[0], draw=rng.random()))
    return tuple(strikes)


def due(strike: Strike, scene: Scene, past: Past, now_s: float) -> bool:
    """Whether a fault may strike now.

    It waits until the run has settled: a generation has made a few steps, and a checkpoint was committed beyond the
    step of the fault before, so that a run gets on whatever the faults take. One of the start waits for none of that.
    """
    if strike.fault.starting:
        return not scene.ever_formed and not scene.ended and bool(scene.workers)
    settled = scene.formed and scene.step - scene.formed_step >= SETTLED_STEPS
    committed = past.step is None or scene.committed > past.step
    return settled and committed and scene.step >= strike.step and now_s - past.at_s >= strike.after_s


def next_of(
    strikes: Sequence[Strike], scene: Scene, past: Past, now_s: float, possible: Callable[[Strike], bool]
) -> Strike | None:
    """The first that is due and has a target; one without, such as a spare that is not up yet, lets others go first.

    Of faults at a start only those that are next in line strike it: each start gets one at most.
    """
    for position, strike in enumerate(strikes):
        if strike.fault.starting and position:
            continue
        if due(strike, scene, past, now_s) and possible(strike):
            return strike
    return None


def rest_of(strikes: Sequence[Strike], given: Strike) -> list[Strike]:
    """What is left once one is given; a fault of the start right behind one of the driver is next in line."""
    place = next(number for number, strike in enumerate(strikes) if strike is given)
    before, behind = list(strikes[:place]), list(strikes[place + 1 :])
    starting = behind[:1] if given.fault.target == "driver" and behind and behind[0].fault.starting else []
    return [*starting, *before, *behind[len(starting) :]]
