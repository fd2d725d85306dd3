"""The whole trial: an unbroken run, one under faults, a verdict."""

from __future__ import annotations

import contextlib
import tempfile
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainwright.chaos_testing import chaos_report as v
from trainwright.chaos_testing.driver_main import write_job_file
from trainwright.chaos_testing.fault_schedule import (
    FaultRequirements,
    FaultType,
    ScheduledFault,
    Target,
    random_schedule,
    select_faults,
    spread_schedule,
)
from trainwright.chaos_testing.run_observer import ObservedRun, RunObserver
from trainwright.chaos_testing.store_outage import Outage, create_outage, outage_obstacle
from trainwright.core.errors import TrainwrightError
from trainwright.core.job import Job
from trainwright.storage.checkpoints import newest_intact, read_manifest
from trainwright.storage.memory_checkpoints import FOLDER_PREFIX, MemoryCheckpointStore
from trainwright.storage.object_store import open_store
from trainwright.storage.run_log import RunLog
from trainwright.worker.worker_config import pickle_job

_LEAST_HANG_S, _HANG_PACES = 5.0, 5.0  # hangs are known after this many seconds, and so many times the slowest news
FAILURE_BUDGET = 20  # in a row
_SILENCE_S = 240.0  # beyond the job's own, for the driver to say something
_ENDLESS = 10_000  # faults, where they go on until the run ends
_LONGEST_NAME = 80

_Say = Callable[[str], object]


@dataclass(frozen=True, kw_only=True)
class ChaosOptions:
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


def run_experiment(job: Job, wish: ChaosOptions, say: _Say = lambda _: None) -> v.ChaosReport:
    """Train a job unbroken and under faults, in storage of their own, and compare.

    Raises:
        JobError: the job or a fault is not right.
        TrainwrightError: the unbroken run cannot start, or failed.
    """
    from trainwright import api

    plan = api.plan(job).chosen
    spares = job.spares if job.spares is not None else int(plan.workers > 1)
    stage = FaultRequirements(workers=plan.workers, spares=spares, storage=outage_obstacle(job.storage))
    faults = select_faults(wish.faults, stage)
    pinned = job.replace(workers=plan.workers, strategy=plan.strategy)
    with scratch_storage(job.storage, keep=wish.keep) as bench:
        say(f"the unbroken run: {bench.storage}")
        unbroken = run_job(pinned, "unbroken", bench)
        if unbroken.error:
            raise TrainwrightError("the unbroken run failed", where=job.name, detail=unbroken.error)
        return _compare(pinned, unbroken, faults, wish, bench, say)


def _compare(
    job: Job, unbroken: ObservedRun, faults: Sequence[FaultType], wish: ChaosOptions, bench: ScratchStorage, say: _Say
) -> v.ChaosReport:
    history = v.run_history(unbroken)
    strikes = _draw_schedule(faults, wish, history.start.total_steps)
    hardened, changed = _harden(job, unbroken, strikes)
    say(f"the run under faults, seed {wish.seed}: {', '.join(fault.name for fault in faults)}")
    before = HostSnapshot.now()
    broken = run_job(hardened, "chaos", bench, strikes=strikes, say=say)
    leftovers = leaks_of(broken, before, run_name(job, "chaos"), bench)
    final = bench.final(run_name(job, "unbroken"))
    found, since = v.compare_runs(unbroken, final, broken, _final(broken, run_name(job, "chaos"), bench))
    repeatable = None
    if wish.twice or (found and not broken.error):
        say("a second unbroken run: does the job repeat itself?")
        again = run_job(job, "again", bench)
        repeatable = not v.compare_runs(unbroken, final, again, _final(again, run_name(job, "again"), bench))[0]
    return v.ChaosReport(
        job=job.name,
        seed=wish.seed,
        steps=history.start.total_steps,
        differences=found,
        since_step=since,
        repeatable=repeatable,
        costs=v.fault_costs(broken),
        missed=() if wish.every_s is not None else broken.missed,
        leftovers=leftovers,
        changed=changed,
        goodput=v.goodput(broken),
        unbroken_goodput=v.goodput(unbroken),
        seconds=v.elapsed_s(broken),
        unbroken_seconds=v.elapsed_s(unbroken),
        kept=bench.storage if wish.keep else "",
    )


def _draw_schedule(faults: Sequence[FaultType], wish: ChaosOptions, total_steps: int) -> tuple[ScheduledFault, ...]:
    """The schedule."""
    if wish.every_s is None:
        return spread_schedule(faults, wish.seed, total_steps)
    return random_schedule(faults, wish.seed, wish.every_s, _ENDLESS)


def _harden(job: Job, unbroken: ObservedRun, strikes: Sequence[ScheduledFault]) -> tuple[Job, tuple[str, ...]]:
    """The job with the patience that so many faults need; its result stays the same. And what was changed, in words."""
    fields: dict[str, Any] = {"failures": max(job.failures, FAILURE_BUDGET), "failures_an_hour": None}
    if job.hang_deadline_s is None and any(strike.fault.name == "stop" for strike in strikes):
        slowest_s = max(
            [v.longest_step_gap_s(unbroken), *(event.seconds for event in v.run_history(unbroken).evaluated)]
        )
        fields["hang_deadline_s"] = round(max(_LEAST_HANG_S, _HANG_PACES * slowest_s), 1)
    history = v.run_history(unbroken)
    often = history.start.total_steps // (2 * max(len(strikes), 1) + 2)
    if strikes and not strikes[0].after_s and _checkpoint_steps(job, history.start.steps_per_epoch) > max(often, 1):
        fields["checkpoint_steps"] = max(often, 1)
    changed = {name: value for name, value in fields.items() if getattr(job, name) != value}
    return job.replace(**changed), tuple(f"{name}={value}" for name, value in changed.items())


def _checkpoint_steps(job: Job, steps_per_epoch: int) -> int:
    given = job.checkpoint_steps
    return given if isinstance(given, int) else steps_per_epoch


def leaks_of(course: ObservedRun, before: HostSnapshot, run: str, bench: ScratchStorage) -> tuple[str, ...]:
    """What a run has left behind."""
    copies = MemoryCheckpointStore(open_store(bench.storage).uri_of(run)).folder.name
    return (*(f"process of {process}" for process in course.remaining), *HostSnapshot.now().new(before, run, copies))


def run_name(job: Job, suffix: str) -> str:
    """Name of the run of that kind."""
    return f"{job.name[:_LONGEST_NAME]}-{suffix}"


def _final(course: ObservedRun, run: str, bench: ScratchStorage) -> v.FinalCheckpoint:
    return v.FinalCheckpoint() if course.error else bench.final(run)


@dataclass(frozen=True, kw_only=True)
class ScratchStorage:
    """Where the trial's runs are.

    Attributes:
        storage: of the runs.
        folder: on this machine, for orders and logs of the drivers.
    """

    storage: str
    folder: Path

    def final(self, run: str) -> v.FinalCheckpoint:
        """The newest checkpoint of a run, every file of it read and checked."""
        store = open_store(self.storage)
        head = RunLog(store, run).head()
        ref, notes = newest_intact(store, run, head.checkpoints if head else ())
        if ref is None or notes:
            raise TrainwrightError(f"the last checkpoint of {run} is not whole", detail="\n".join(notes))
        files = read_manifest(store, run, ref).files
        return v.FinalCheckpoint(step=ref.step, files={entry.name: entry.sha256 for entry in files})


@contextlib.contextmanager
def scratch_storage(storage: str, *, keep: bool = False) -> Iterator[ScratchStorage]:
    """Storage below the job's own, for the time of a trial."""
    from trainwright.ray_cluster.discovery import connect

    connect()
    store, name = open_store(storage), f"chaos-{uuid.uuid4().hex[:8]}"
    with tempfile.TemporaryDirectory(prefix="trainwright-chaos-") as folder:
        try:
            yield ScratchStorage(storage=store.uri_of(name), folder=Path(folder))
        finally:
            if not keep:
                store.delete_folder(name)


def run_job(
    job: Job,
    suffix: str,
    bench: ScratchStorage,
    *,
    strikes: Iterable[ScheduledFault] = (),
    link: Outage | None = None,
    spent: Callable[[], object] = lambda: None,
    say: _Say = lambda _: None,
) -> ObservedRun:
    """One run of the job, under faults or none, on the cluster that this process is connected to.

    Args:
        suffix: of the run's name.
        link: cuts the link between two nodes, where a strike wants that.
        spent: called once all faults are given.
        say: takes a line for people.
    """
    import ray

    from trainwright.ray_cluster.discovery import discover

    named_job = job.replace(name=run_name(job, suffix), storage=bench.storage)
    order = bench.folder / f"{suffix}.job"
    write_job_file(order, pickle_job(named_job))
    context = ray.get_runtime_context()
    wanted = tuple(strikes)
    outages: dict[Target, Outage] = {"link": link} if link is not None else {}
    if any(strike.fault.target == "store" for strike in wanted):
        outages["store"] = create_outage(bench.storage, _reachable_host())
    runner = RunObserver(
        named_job.name,
        order,
        environment={"RAY_ADDRESS": context.gcs_address},
        silence_s=_SILENCE_S + job.patience_s(discover(possible=True)) + (job.hang_deadline_s or 0.0),
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


# --- What a run leaves behind on this machine -------------------------------------------------------------------------


_SHARED = Path("/dev/shm")


@dataclass(frozen=True, kw_only=True)
class HostSnapshot:
    """What is there at one moment.

    Attributes:
        shared: files in shared memory.
        actors: names of Ray's named actors, in all namespaces.
    """

    shared: frozenset[str]
    actors: frozenset[str]

    @classmethod
    def now(cls) -> HostSnapshot:
        """Look around; needs a connection to Ray."""
        from ray.util import list_named_actors

        named = list_named_actors(all_namespaces=True)
        return cls(shared=_shared_files(), actors=frozenset(str(actor["name"]) for actor in named))

    def new(self, before: HostSnapshot, run: str, copies: str) -> tuple[str, ...]:
        """Return what came since and nobody uses: shared memory without a process, actors with the run's name.

        Args:
            before: the surroundings at the start of the run.
            run: name of the run.
            copies: name of the run's own folder of state copies; those of other runs are theirs to remove.
        """
        used = _mapped_inodes()
        new = {name for name in self.shared - before.shared if name == copies or not name.startswith(FOLDER_PREFIX)}
        orphans = {name for name in new if _inode(name) not in used}
        actors = {name for name in self.actors - before.actors if run in name}
        return (
            *(f"shared memory {_SHARED / name}" for name in sorted(orphans & _shared_files())),
            *(f"actor {name}" for name in sorted(actors)),
        )


def _shared_files() -> frozenset[str]:
    return frozenset(path.name for path in _SHARED.iterdir()) if _SHARED.is_dir() else frozenset()


def _inode(name: str) -> int:
    with contextlib.suppress(FileNotFoundError):
        return (_SHARED / name).stat().st_ino
    return 0


def _mapped_inodes() -> set[int]:
    """Inodes of shared memory that a living process has mapped or open, whatever name it had then.

    A semaphore is mapped under another name than the one that it is given afterwards (glibc, sem_open).
    """
    found: set[int] = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or is not ours to look at
            for line in (process / "maps").read_text().splitlines():
                found |= {int(line.split()[4])} if f"{_SHARED}/" in line else set()
            for handle in (process / "fd").iterdir():
                with contextlib.suppress(OSError):
                    found |= {handle.stat().st_ino} if str(handle.readlink()).startswith(f"{_SHARED}/") else set()
    return found
