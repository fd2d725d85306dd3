"""The whole trial: an unbroken run, one under faults, a verdict."""

from __future__ import annotations

import contextlib
import tempfile
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainwright.chaos_testing import verdict as v
from trainwright.chaos_testing.driver_main import write_order
from trainwright.chaos_testing.fault_catalogue import Fault, Stage, Target, chosen
from trainwright.chaos_testing.fault_schedule import Strike, every, spread
from trainwright.chaos_testing.leak_check import Surroundings
from trainwright.chaos_testing.run_observer import Course, Runner
from trainwright.chaos_testing.store_outage import Outage, cannot_fail, outage_of
from trainwright.core.errors import TrainwrightError
from trainwright.core.job import Job
from trainwright.storage.checkpoints import newest_good, read_manifest
from trainwright.storage.memory_checkpoints import Shelf
from trainwright.storage.run_log import RunLog
from trainwright.storage.store import open_store
from trainwright.worker.job_pickle import pack

LEAST_HANG_S, HANG_PACES = 5.0, 5.0  # hangs are known after this many seconds, and so many times the slowest news
FAILURES = 20  # in a row
PATIENCE_S = 240.0  # beyond the job's own, for the driver to say something
_ENDLESS = 10_000  # faults, where they go on until the run ends
_LONGEST_NAME = 80

Say = Callable[[str], object]


@dataclass(frozen=True, kw_only=True)
class Wish:
    """What is asked for.

    Attributes:
        faults: names; none for all that fit the job.
        every_s: seconds between faults, which then go on until the run ends; None gives each once, over the run.
        keep: whether the runs stay.
        twice: whether a second unbroken run is made in any case.
    """

    seed: int = 0
    faults: tuple[str, ...] = ()
    every_s: float | None = None
    keep: bool = False
    twice: bool = False


def chaos(job: Job, wish: Wish, say: Say = lambda _: None) -> v.Verdict:
    """Train a job unbroken and under faults, in storage of their own, and compare.

    Raises:
        JobError: the job or a fault is not right.
        TrainwrightError: the unbroken run cannot start, or failed.
    """
    from trainwright import api

    plan = api.plan(job).chosen
    spares = job.spares if job.spares is not None else int(plan.workers > 1)
    stage = Stage(workers=plan.workers, spares=spares, storage=cannot_fail(job.storage))
    faults = chosen(wish.faults, stage)
    pinned = job.replace(workers=plan.workers, strategy=plan.strategy)
    with scratch(job.storage, keep=wish.keep) as bench:
        say(f"the unbroken run: {bench.storage}")
        unbroken = train(pinned, "unbroken", bench)
        if unbroken.error:
            raise TrainwrightError("the unbroken run failed", where=job.name, detail=unbroken.error)
        return _compare(pinned, unbroken, faults, wish, bench, say)


def _compare(job: Job, unbroken: Course, faults: Sequence[Fault], wish: Wish, bench: Bench, say: Say) -> v.Verdict:
    history = v.history_of(unbroken)
    strikes = drawn(faults, wish, history.start.total_steps)
    hardened, changed = harden(job, unbroken, strikes)
    say(f"the run under faults, seed {wish.seed}: {', '.join(fault.name for fault in faults)}")
    before = Surroundings.now()
    broken = train(hardened, "chaos", bench, strikes=strikes, say=say)
    leftovers = left_by(broken, before, named(job, "chaos"), bench)
    final = bench.final(named(job, "unbroken"))
    found, since = v.differences(unbroken, final, broken, _final(broken, named(job, "chaos"), bench))
    repeatable = None
    if wish.twice or (found and not broken.error):
        say("a second unbroken run: does the job repeat itself?")
        again = train(job, "again", bench)
        repeatable = not v.differences(unbroken, final, again, _final(again, named(job, "again"), bench))[0]
    return v.Verdict(
        job=job.name,
        seed=wish.seed,
        steps=history.start.total_steps,
        differences=found,
        since_step=since,
        repeatable=repeatable,
        costs=v.costs(broken),
        missed=() if wish.every_s is not None else broken.missed,
        leftovers=leftovers,
        changed=changed,
        goodput=v.goodput(broken),
        unbroken_goodput=v.goodput(unbroken),
        seconds=v.elapsed_s(broken),
        unbroken_seconds=v.elapsed_s(unbroken),
        kept=bench.storage if wish.keep else "",
    )


def drawn(faults: Sequence[Fault], wish: Wish, total_steps: int) -> tuple[Strike, ...]:
    """The schedule."""
    if wish.every_s is None:
        return spread(faults, wish.seed, total_steps)
    return every(faults, wish.seed, wish.every_s, _ENDLESS)


def harden(job: Job, unbroken: Course, strikes: Sequence[Strike]) -> tuple[Job, tuple[str, ...]]:
    """The job with the patience that so many faults need; its result stays the same. And what was changed, in words."""
    fields: dict[str, Any] = {"failures": max(job.failures, FAILURES), "failures_an_hour": None}
    if job.hang_deadline_s is None and any(strike.fault.name == "stop" for strike in strikes):
        slowest_s = max([v.pace_s(unbroken), *(event.seconds for event in v.history_of(unbroken).evaluated)])
        fields["hang_deadline_s"] = round(max(LEAST_HANG_S, HANG_PACES * slowest_s), 1)
    history = v.history_of(unbroken)
    often = history.start.total_steps // (2 * max(len(strikes), 1) + 2)
    if strikes and not strikes[0].after_s and _checkpoint_steps(job, history.start.steps_per_epoch) > max(often, 1):
        fields["checkpoint_steps"] = max(often, 1)
    changed = {name: value for name, value in fields.items() if getattr(job, name) != value}
    return job.replace(**changed), tuple(f"{name}={value}" for name, value in changed.items())


def _checkpoint_steps(job: Job, steps_per_epoch: int) -> int:
    given = job.checkpoint_steps
    return given if isinstance(given, int) else steps_per_epoch


def left_by(course: Course, before: Surroundings, run: str, bench: Bench) -> tuple[str, ...]:
    """What a run has left behind."""
    copies = Shelf(open_store(bench.storage).uri_of(run)).folder.name
    return (*(f"process of {process}" for process in course.remaining), *Surroundings.now().new(before, run, copies))


def named(job: Job, suffix: str) -> str:
    """Name of the run of that kind."""
    return f"{job.name[:_LONGEST_NAME]}-{suffix}"


def _final(course: Course, run: str, bench: Bench) -> v.Final:
    return v.Final() if course.error else bench.final(run)


@dataclass(frozen=True, kw_only=True)
class Bench:
    """Where the trial's runs are.

    Attributes:
        storage: of the runs.
        folder: on this machine, for orders and logs of the drivers.
    """

    storage: str
    folder: Path

    def final(self, run: str) -> v.Final:
        """The newest checkpoint of a run, every file of it read and checked."""
        store = open_store(self.storage)
        head = RunLog(store, run).head()
        ref, notes = newest_good(store, run, head.checkpoints if head else ())
        if ref is None or notes:
            raise TrainwrightError(f"the last checkpoint of {run} is not whole", detail="\n".join(notes))
        files = read_manifest(store, run, ref).files
        return v.Final(step=ref.step, files={entry.name: entry.sha256 for entry in files})


@contextlib.contextmanager
def scratch(storage: str, *, keep: bool = False) -> Iterator[Bench]:
    """Storage below the job's own, for the time of a trial."""
    from trainwright.runtime.cluster_discovery import connect

    connect()
    store, name = open_store(storage), f"chaos-{uuid.uuid4().hex[:8]}"
    with tempfile.TemporaryDirectory(prefix="trainwright-chaos-") as folder:
        try:
            yield Bench(storage=store.uri_of(name), folder=Path(folder))
        finally:
            if not keep:
                store.delete_folder(name)


def train(
    job: Job,
    suffix: str,
    bench: Bench,
    *,
    strikes: Iterable[Strike] = (),
    link: Outage | None = None,
    spent: Callable[[], object] = lambda: None,
    say: Say = lambda _: None,
) -> Course:
    """One run of the job, under faults or none, on the cluster that this process is connected to.

    Args:
        suffix: of the run's name.
        link: cuts the link between two nodes, where a strike wants that.
        spent: called once all faults are given.
        say: takes a line for people.
    """
    import ray

    from trainwright.runtime.cluster_discovery import discover

    named_job = job.replace(name=named(job, suffix), storage=bench.storage)
    order = bench.folder / f"{suffix}.job"
    write_order(order, pack(named_job))
    context = ray.get_runtime_context()
    wanted = tuple(strikes)
    outages: dict[Target, Outage] = {"link": link} if link is not None else {}
    if any(strike.fault.target == "store" for strike in wanted):
        outages["store"] = outage_of(bench.storage, _reachable_host())
    runner = Runner(
        named_job.name,
        order,
        environment={"RAY_ADDRESS": context.gcs_address},
        silence_s=PATIENCE_S + job.patience_s(discover(possible=True)) + (job.hang_deadline_s or 0.0),
        strikes=wanted,
        outages=outages,
        spent=spent,
        say=say,
    )
    return runner.run()


def _reachable_host() -> str:
    """Where all nodes reach this one."""
    import ray

    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    alone = sum(node["Alive"] for node in nodes) == 1
    return "127.0.0.1" if alone else str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]
