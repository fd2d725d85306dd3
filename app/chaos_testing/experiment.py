"""Run a chaos test: one run without faults, one with faults, and a comparison of the two."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainwright.chaos_testing import chaos_report
from trainwright.chaos_testing.fault_schedule import (
    FaultRequirements,
    FaultType,
    ScheduledFault,
    Target,
    process_text,
    random_schedule,
    select_faults,
    spread_schedule,
)
from trainwright.chaos_testing.run_observer import ObservedRun, RunObserver
from trainwright.chaos_testing.store_outage import Outage, create_outage, outage_obstacle
from trainwright.core.errors import CheckpointError, TrainwrightError
from trainwright.core.job import Job
from trainwright.core.plan import Plan
from trainwright.storage.checkpoints import newest_intact, read_manifest
from trainwright.storage.memory_checkpoints import FOLDER_PREFIX, MemoryCheckpointStore
from trainwright.storage.object_store import open_store
from trainwright.storage.run_log import RunLog
from trainwright.worker.worker_config import pickle_job

_LEAST_HANG_S, _HANG_FACTOR = 5.0, 5.0  # the hang deadline: at least this, and this factor of the slowest step event
FAILURE_BUDGET = 20  # failures in a row that the job may have
_SILENCE_S = 240.0  # without an event, beyond the job's own waiting times, until the run counts as hanging
_ENDLESS = 10_000  # faults of a schedule that lasts until the run ends
_LONGEST_NAME = 80

_Say = Callable[[str], object]


@dataclass(frozen=True, kw_only=True)
class ChaosOptions:
    """Options of a chaos test."""

    seed: int = 0  # of the schedule of faults
    faults: tuple[str, ...] = ()  # names of faults; none for all that fit the job
    # seconds between random faults until the run ends; None injects each fault once, spread over the run
    every_s: float | None = None
    keep: bool = False
    twice: bool = False  # whether to make a second run without faults in any case


def run_experiment(job: Job, plan: Plan, options: ChaosOptions, say: _Say = lambda _: None) -> chaos_report.ChaosReport:
    """Train a job without and with faults, each in scratch storage, and compare the two runs.

    Args:
        plan: of the job; both runs are pinned to its strategy and number of workers.

    Raises:
        JobError: the job or a fault is invalid.
        CheckpointError: the final checkpoint of a run is missing or damaged.
        TrainwrightError: the run without faults cannot start, or failed.
    """
    spares = job.recovery.spares if job.recovery.spares is not None else int(plan.workers > 1)
    requirements = FaultRequirements(workers=plan.workers, spares=spares, storage=outage_obstacle(job.storage))
    faults = select_faults(options.faults, requirements)
    pinned = job.replace(workers=plan.workers, strategy=plan.strategy)
    with scratch_storage(job.storage, keep=options.keep) as scratch:
        say(f"the uninterrupted run, in {scratch.storage}" + ("" if options.keep else ", deleted at the end"))
        reference = run_job(pinned, "uninterrupted", scratch)
        if reference.error:
            raise TrainwrightError(
                "the run without faults failed, so there is nothing to compare with",
                where=job.name,
                remedy="correct the job until trainwright fit trains it to its end",
                detail=reference.error,
            )
        return _compare(pinned, reference, faults, options, scratch, say)


def _compare(
    job: Job,
    reference: ObservedRun,
    faults: Sequence[FaultType],
    options: ChaosOptions,
    scratch: ScratchStorage,
    say: _Say,
) -> chaos_report.ChaosReport:
    total_steps = chaos_report.run_history(reference).summary.start.total_steps
    if options.every_s is None:
        schedule = spread_schedule(faults, options.seed, total_steps)
    else:
        schedule = random_schedule(faults, options.seed, options.every_s, _ENDLESS)
    hardened, changed = _harden(job, reference, schedule)
    say(f"the run under faults, seed {options.seed}: {', '.join(fault.name for fault in faults)}")
    before = HostSnapshot.now()
    broken = run_job(hardened, "chaos", scratch, schedule=schedule, say=say)
    leaks = leaks_of(broken, before, run_name(job, "chaos"), scratch)
    final = scratch.final(run_name(job, "uninterrupted"))

    def compare(run: ObservedRun, suffix: str) -> tuple[tuple[str, ...], int | None]:
        other = chaos_report.FinalCheckpoint() if run.error else scratch.final(run_name(job, suffix))
        return chaos_report.compare_runs(reference, final, run, other)

    found, since = compare(broken, "chaos")
    repeatable = None
    if options.twice or (found and not broken.error):
        say("a second uninterrupted run: is the job repeatable?")
        repeatable = not compare(run_job(job, "again", scratch), "again")[0]
    return chaos_report.ChaosReport(
        job=job.name,
        seed=options.seed,
        steps=total_steps,
        differences=found,
        since_step=since,
        repeatable=repeatable,
        costs=chaos_report.fault_costs(broken),
        missed=() if options.every_s is not None else broken.missed,
        leaks=leaks,
        changed=changed,
        goodput=chaos_report.goodput(broken),
        unbroken_goodput=chaos_report.goodput(reference),
        seconds=chaos_report.elapsed_s(broken),
        unbroken_seconds=chaos_report.elapsed_s(reference),
        storage=scratch.storage if options.keep else "",
    )


def _harden(job: Job, reference: ObservedRun, schedule: Sequence[ScheduledFault]) -> tuple[Job, tuple[str, ...]]:
    """Return the job with limits that survive so many faults, and the changes in words; its result stays the same."""
    history, recovery = chaos_report.run_history(reference), job.recovery
    fields: dict[str, Any] = {"failures": max(recovery.failures, FAILURE_BUDGET), "failures_an_hour": None}
    if recovery.hang_deadline_s is None and any(scheduled.fault.name == "stop" for scheduled in schedule):
        gap_s = chaos_report.longest_step_gap_s(reference)
        slowest_s = max([gap_s, *(event.seconds for event in history.evaluated)])
        fields["hang_deadline_s"] = round(max(_LEAST_HANG_S, _HANG_FACTOR * slowest_s), 1)
    start, given = history.summary.start, job.checkpointing.checkpoint_steps
    often = max(start.total_steps // (2 * max(len(schedule), 1) + 2), 1)
    usual = given if isinstance(given, int) else start.steps_per_epoch
    if schedule and not schedule[0].after_s and usual > often:
        fields["checkpoint_steps"] = often
    changed = {name: value for name, value in fields.items() if job.get(name) != value}
    return job.replace(**changed), tuple(f"{name}={value}" for name, value in changed.items())


def leaks_of(observed: ObservedRun, before: HostSnapshot, run: str, scratch: ScratchStorage) -> tuple[str, ...]:
    """Return what outlived a run: processes, shared memory and actors."""
    copies = MemoryCheckpointStore(open_store(scratch.storage).uri_of(run)).folder.name
    remaining = (f"process of {process_text(process)}" for process in observed.remaining)
    return (*remaining, *HostSnapshot.now().new(before, run, copies))


def run_name(job: Job, suffix: str) -> str:
    """Return the name of a run of the test."""
    return f"{job.name[:_LONGEST_NAME]}-{suffix}"


@dataclass(frozen=True, kw_only=True)
class ScratchStorage:
    """Temporary storage of a chaos test."""

    storage: str
    folder: Path  # on this machine, for job files and logs of the drivers

    def final(self, run: str) -> chaos_report.FinalCheckpoint:
        """Return the newest checkpoint of a run, with every file read and checked. Raises CheckpointError."""
        store = open_store(self.storage)
        head = RunLog(store, run).head()
        ref, notes = newest_intact(store, run, head.checkpoints if head else ())
        if ref is None or notes:
            raise CheckpointError(
                f"the final checkpoint of the run {run!r} is missing or damaged, so it cannot be compared",
                where=store.uri_of(run),
                remedy=f"check the store: trainwright doctor --storage {self.storage}; then start the test again, with "
                "--keep if you want to see the files",
                detail="\n".join(notes),
            )
        files = read_manifest(store, run, ref).files
        return chaos_report.FinalCheckpoint(step=ref.step, files={entry.name: entry.sha256 for entry in files})


@contextlib.contextmanager
def scratch_storage(storage: str, *, keep: bool = False) -> Iterator[ScratchStorage]:
    """Create storage below the job's own, and delete it at the end unless `keep` is set."""
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
    scratch: ScratchStorage,
    *,
    schedule: Iterable[ScheduledFault] = (),
    link: Outage | None = None,
    on_all_injected: Callable[[], object] = lambda: None,
    say: _Say = lambda _: None,
) -> ObservedRun:
    """Run the job once, with or without faults, on the connected cluster.

    Args:
        link: interrupts the network between two nodes, if a fault needs that.
    """
    import ray

    from trainwright.ray_cluster.discovery import discover

    named_job = job.replace(name=run_name(job, suffix), storage=scratch.storage)
    job_file = scratch.folder / f"{suffix}.job"
    job_file.write_bytes(pickle_job(named_job))
    context = ray.get_runtime_context()
    wanted = tuple(schedule)
    outages: dict[Target, Outage] = {"link": link} if link is not None else {}
    if any(scheduled.fault.target == "store" for scheduled in wanted):
        outages["store"] = create_outage(scratch.storage, _reachable_host())
    observer = RunObserver(
        named_job.name,
        job_file,
        environment={"RAY_ADDRESS": context.gcs_address, "PYTHONPATH": os.pathsep.join(sys.path)},
        event_timeout_s=_SILENCE_S
        + job.start_deadline_s(discover(possible=True))
        + (job.recovery.hang_deadline_s or 0.0),
        schedule=wanted,
        outages=outages,
        on_all_injected=on_all_injected,
        say=say,
    )
    return observer.run()


def _reachable_host() -> str:
    """Return the address at which all nodes reach this one."""
    import ray

    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    alone = sum(node["Alive"] for node in nodes) == 1
    return "127.0.0.1" if alone else str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]


# --- Resources that outlive a run on this machine ---------------------------------------------------------------------


_SHARED = Path("/dev/shm")


@dataclass(frozen=True, kw_only=True)
class HostSnapshot:
    """Shared memory and named actors at one moment."""

    shared: frozenset[str]  # names of files in shared memory
    actors: frozenset[str]  # names of Ray's named actors, in all namespaces

    @classmethod
    def now(cls) -> HostSnapshot:
        """Take a snapshot; needs a connection to Ray."""
        from ray.util import list_named_actors

        named = list_named_actors(all_namespaces=True)
        return cls(shared=_shared_files(), actors=frozenset(str(actor["name"]) for actor in named))

    def new(self, before: HostSnapshot, run: str, copies: str) -> tuple[str, ...]:
        """Return what is new and unused: shared memory without a process, and actors with the run's name.

        Args:
            copies: folder of the run's in-memory checkpoints; those of other runs are not counted.
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
    """Return inodes of shared memory that a living process has mapped or open, under any name.

    glibc's sem_open maps a semaphore under a temporary name and renames it afterwards.
    """
    found: set[int] = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # the process has ended, or belongs to another user
            for line in (process / "maps").read_text().splitlines():
                found |= {int(line.split()[4])} if f"{_SHARED}/" in line else set()
            for handle in (process / "fd").iterdir():
                with contextlib.suppress(OSError):
                    found |= {handle.stat().st_ino} if str(handle.readlink()).startswith(f"{_SHARED}/") else set()
    return found
