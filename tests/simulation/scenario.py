"""Scenarios: a run and the faults it meets, as data, drawn from a seed."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from random import Random

from tests.simulation.plans import Plans, staged
from trainwright.core.events import Evaluated
from trainwright.core.metric_goals import EarlyStop, best_evaluation
from trainwright.driver.checkpointing import evaluation_due
from trainwright.driver.failure_policy import MIN_LOSSES
from trainwright.driver.run_policy import RunPolicy

KINDS = {
    "kill": 24, "kill two": 5, "kill all": 2, "crash loop": 2, "hang": 5, "internal": 4, "user": 2, "data": 1,
    "storage": 3, "cut": 5, "slow start": 3, "start death": 4, "start loop": 1, "never starts": 1,
    "upload fails": 6, "upload hangs": 2, "upload internal": 1, "commit fails": 4, "commit slow": 4, "outage": 4,
    "preempt": 6, "preempt all": 2, "memory full": 2, "copies lost": 2,
    "stop": 8, "stop now": 3, "stop twice": 2, "crash": 5, "stall": 4, "log lost": 1,
}  # fmt: skip
VERBS = ("reserve", "form", "restore", "run", "evaluate", "snapshot", "upload", "leave")


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault. It strikes at a virtual time, or, where `verb` is given, just after the n-th call of that verb."""

    kind: str
    at_s: float = 0.0
    verb: str = ""
    nth: int = 0
    target: float = 0.0  # which worker, as a fraction of those alive
    amount: float = 0.0  # how much of it, in [0, 1)


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A run, the layout of its state, and its faults."""

    seed: int
    settings: RunPolicy
    layout: str = "replicated"
    faults: tuple[Fault, ...] = ()
    spikes: frozenset[int] = frozenset()  # steps whose loss is far above that of the others

    @property
    def announces(self) -> bool:
        """Whether callbacks want to be told of checkpoints."""
        return self.seed % 3 == 0


def least_of(settings: RunPolicy) -> int:
    """Fewest workers that a run may ever go on with."""
    return settings.world.fewest if settings.world.last_resort is None else settings.world.last_resort


def draw(seed: int, workers: int | None = None, also: tuple[str, ...] = ()) -> Scenario:
    """The scenario of a seed; `workers` overrides the world size drawn from 1 to 8, `also` adds kinds of faults."""
    rng = Random(seed)
    count = rng.choice((1, 2, 2, 2, 3, 3, 4, 4, 5, 6, 8))
    count = workers or count
    total = rng.randint(2, 12)
    settings = RunPolicy.of(
        workers=count,
        total_steps=total,
        steps_per_epoch=rng.randint(2, 8),
        spares=rng.choice((0, 0, 1, 1, 2)),
        reform="new_process" if rng.random() < 0.15 else "in_place",
        checkpoint_steps=rng.choice((None, None, 1, 2, 3, 5)),
        evaluate_steps=rng.choice((None, 2, 3, 5)),
        failures=rng.choice((0, 1, 2, 3, 3, 5)),
        place_deadline_s=60.0,
        call_deadline_s=rng.choice((20.0, 20.0, 90.0)),
        hang_deadline_s=40.0,
        upload_deadline_s=30.0,
        storage_attempts=3,
    )
    layouts = ["replicated"] * 6 + ["sharded"] + (["hybrid"] * 2 if count >= 4 and count % 2 == 0 else [])
    horizon_s = 3.0 + total * rng.choice((0.5, 1.0, 2.0))
    faults = tuple(_fault(rng, horizon_s) for _ in range(_number(rng)))
    faults += tuple(replace(_fault(rng, horizon_s), kind=kind, verb="") for kind in also)
    settings = settings.with_fields(keep_s=rng.choice((None, None, 0.5, 2.0)), checkpoint_auto=rng.random() < 0.1)
    settings = settings.with_fields(pass_limit=Random(seed + 2**33).choice((0, 1, 5)))
    scenario = Scenario(seed=seed, settings=settings, layout=rng.choice(layouts), faults=faults)
    scenario = _damaged(_spiky(_crewed(scenario), Random(seed + 2**38)), Random(seed + 2**39))
    return _profiled(_judged(scenario, Random(seed + 2**40)), Random(seed + 2**42))


def _profiled(scenario: Scenario, rng: Random) -> Scenario:
    """A fifth trace some steps, of which the run may not take all; now and then a trace is not written."""
    if rng.random() > 0.2:
        return scenario
    first = rng.randint(1, scenario.settings.length.total_steps + 1)
    settings = scenario.settings.with_fields(profile=range(first, first + rng.randint(1, 4)))
    kinds = rng.choices(("trace fails", "trace hangs", "trace internal"), k=rng.choice((0, 0, 1, 1, 2)))
    faults = tuple(Fault(kind=kind, at_s=rng.random() * 5, amount=rng.random()) for kind in kinds)
    return replace(scenario, settings=settings, faults=(*scenario.faults, *faults))


def _judged(scenario: Scenario, rng: Random) -> Scenario:
    """A third of those that evaluate keep the best checkpoint, or end early, or both; some have a time limit."""
    if scenario.settings.length.evaluate_steps is None or rng.random() > 0.33:
        return scenario
    stop = rng.choice((None, EarlyStop("-score", patience=1), EarlyStop("score", patience=2, min_delta=1.0)))
    settings = scenario.settings.with_fields(best="score" if stop is None else rng.choice(("", "score", "-score")))
    limit_s = rng.choice((None, None, None, 2.0 + 12.0 * rng.random()))
    return replace(scenario, settings=settings.with_fields(early_stop=stop, max_time_s=limit_s))


def score(seed: int, step: int) -> float:
    """The metric of an evaluation: a function of the step, with ties, and NaN now and then."""
    drawn = Random(seed * 1000 + step).randint(0, 6)
    return float(drawn) if drawn else math.nan


def last_step(scenario: Scenario) -> int:
    """The step that ends a run which nobody stops."""
    length, past = scenario.settings.length, list[Evaluated]()
    for step in range(length.stride, length.total_steps, length.stride):
        if evaluation_due(scenario.settings, step):
            past.append(Evaluated(step=step, metrics={"score": score(scenario.seed, step)}))
            if length.early_stop is not None and length.early_stop.reason(past):
                return step
    return length.total_steps


def best_step(scenario: Scenario, evaluated: Iterable[int]) -> int:
    """The step of the best of some evaluations; 0 where there is none, or no goal."""
    past = [Evaluated(step=step, metrics={"score": score(scenario.seed, step)}) for step in sorted(evaluated)]
    best = best_evaluation(scenario.settings.saving.best, past) if scenario.settings.saving.best else None
    return best.step if best else 0


def _crewed(scenario: Scenario) -> Scenario:
    """Some worlds of replicas are of other numbers, crews or plans."""
    seed, settings = scenario.seed, scenario.settings
    if scenario.layout != "replicated":
        return scenario
    scenario = _elastic(scenario, Random(seed + 2**32))
    kind = Random(seed + 2**35).random()
    if settings.world.reform == "in_place" and kind < 0.2:
        return served(scenario, Random(seed + 2**36))
    if 0.2 < kind < 0.35:
        return led(scenario, Random(seed + 2**37))
    return _planned(scenario, Random(seed + 2**34))


def served(scenario: Scenario, rng: Random) -> Scenario:
    """The same with servers beside as many workers, which step alone."""
    settings, servers = scenario.settings, rng.choice((1, 1, 2, 3))
    bounds = settings.with_fields(
        workers=settings.world.workers + servers,
        servers=servers,
        topology="independent",
        tolerates=frozenset({"worker"}),
        min_workers=rng.choice((None, servers + 1)),
        max_workers=settings.world.most + servers,
        shrink_s=8.0,
    )
    faults = scenario.faults
    if rng.random() < 0.1:  # while they form
        faults += (Fault(kind="log lost", verb="reserve", nth=rng.randint(1, bounds.world.workers), amount=0.2),)
    return replace(scenario, settings=bounds, layout="served", faults=faults)


def led(scenario: Scenario, rng: Random) -> Scenario:
    """The same with a chief that leads as many workers and servers; or without servers, where all are needed."""
    settings, servers = scenario.settings, rng.choice((0, 1, 1, 2))
    others = 1 + servers if servers else 0
    bounds = settings.with_fields(
        workers=settings.world.workers + others,
        servers=servers,
        topology="coordinator",
        reform="new_process",
        tolerates=frozenset({"worker"} if servers else ()),
        min_workers=None if settings.world.min_workers is None or not servers else settings.world.min_workers + others,
        max_workers=settings.world.most + others if servers else None,
    )
    return replace(scenario, settings=bounds, layout="led")


def _elastic(scenario: Scenario, rng: Random) -> Scenario:
    """A third of the worlds may shrink and grow."""
    if rng.random() < 0.67:
        return scenario
    count, at_once = scenario.settings.world.workers, Random(scenario.seed + 2**38).random() < 0.5
    bounds = scenario.settings.with_fields(
        min_workers=rng.randint(1, count), max_workers=count + rng.randint(0, 2), shrink_s=8.0, shrinks_at_once=at_once
    )
    return replace(scenario, settings=bounds)


def _planned(scenario: Scenario, rng: Random) -> Scenario:
    """A quarter of those that reform in place have plans of their own for some numbers of workers, or to measure."""
    settings = scenario.settings
    if settings.world.reform == "new_process" or settings.world.workers > 8 or rng.random() < 0.75:
        return scenario
    count = settings.world.workers
    stages = [number for number in range(1, count + 1) if count % number == 0]
    tried = rng.choice((1, 1, 2, 3))
    plans = tuple(staged(rng.choice(stages), count, name) for name in ("first", "second", "third")[:tried])
    others = frozenset(number for number in range(1, count + 1) if rng.random() < 0.6)
    settings = settings.with_fields(layouts=Plans(plans=plans, others=others))
    faults = scenario.faults
    if settings.world.min_workers is None:
        settings = settings.with_fields(last_resort=rng.choice((None, 1)))
    if rng.random() < 0.7:  # room is lost, and comes back
        settings = settings.with_fields(min_workers=rng.randint(1, count), last_resort=None, shrink_s=8.0)
        at_s = 2.0 + rng.random() * settings.length.total_steps
        faults += (Fault(kind="slow start", at_s=at_s), Fault(kind="kill", at_s=at_s + 0.1, target=rng.random()))
    return replace(scenario, settings=settings, layout="planned", faults=faults)


def _damaged(scenario: Scenario, rng: Random) -> Scenario:
    """In a few a checkpoint is damaged, and everybody needs it."""
    if rng.random() > 0.05:
        return scenario
    return replace(scenario, faults=(*scenario.faults, Fault(kind="checkpoint damaged", at_s=rng.random() * 5)))


def _spiky(scenario: Scenario, rng: Random) -> Scenario:
    """A few run for long enough to tell a spike of the loss, which they are taken back from or end by."""
    return scenario if rng.random() > 0.02 else spiked(scenario, rng, rng.choice((0, 1, 1, 2)))


def spiked(scenario: Scenario, rng: Random, limit: int) -> Scenario:
    """The same for longer, with a spike or two."""
    total = rng.randint(MIN_LOSSES + 4, MIN_LOSSES + 16)
    settings = scenario.settings.with_fields(total_steps=total, max_loss_ratio=10.0, spike_limit=limit)
    spikes = frozenset(rng.choices(range(MIN_LOSSES + 1, total + 1), k=rng.choice((1, 1, 2))))
    return replace(scenario, settings=settings, spikes=spikes)


def unbroken(scenario: Scenario) -> Scenario:
    """The same run without faults."""
    return replace(scenario, faults=())


def _number(rng: Random) -> int:
    return rng.choice((0, 1, 1, 2, 2, 3, 3, 4, 5, 7))


def _fault(rng: Random, horizon_s: float) -> Fault:
    kind = rng.choices(tuple(KINDS), tuple(KINDS.values()))[0]
    at_moment = rng.random() < 0.5
    return Fault(
        kind=kind,
        at_s=rng.random() * horizon_s,
        verb=rng.choice(VERBS) if at_moment else "",
        nth=1 + int(rng.random() ** 2 * 30),
        target=rng.random(),
        amount=rng.random(),
    )
