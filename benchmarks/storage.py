"""What readers of storage take: the history of a long run, a list of many runs, a checkpoint that is verified."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median

from figures import Figure
from processes import Cost, measured, run_alone

from trainwright.core.engine import CheckpointManifest, CheckpointRef, checkpoint_path
from trainwright.core.events import Evaluated, Event, Formed, RunEnded, RunStarted, Steps
from trainwright.reporting import run_views
from trainwright.storage.checkpoints import CheckpointWriter, newest_intact, verify, write_manifest
from trainwright.storage.event_files import EventCompactor, batch_path, read_events, read_run_summary
from trainwright.storage.object_store import Store, open_store
from trainwright.storage.run_log import Owner, RunLog
from trainwright.storage.run_summary import RunSummary

NOTE = (
    "A folder on the local disk, each measurement in a process of its own, memory as growth of its peak "
    "over that after the imports; medians of 3. `history` is what a resume, `show` and a report read of a run of 10^6 "
    "steps in batches of 500, compacted each 100 batches; the peer folds all of its events, as was done before there "
    "were summaries. `runs_view` lists 1,000 runs of 5,000 steps that are done; the peer folds all events of each, one "
    "after the other. `verify` is of one file of 1 GiB; the peer reads the file whole and hashes it. `resume` is all "
    "that a driver reads and writes of a run of 10^7 steps with 1,000 checkpoints before it asks for workers, beside "
    "what it may take: 2 s and 200 MiB."
)
MOST_S, MOST_MIB = 2.0, 200.0
BATCH = 500


def measure(folder: Path, *, smoke: bool) -> list[Figure]:
    """Compare with reading everything."""
    steps, count, size_bytes, longest = (5_000, 5, 1 << 20, 10_000) if smoke else (10**6, 1_000, 1 << 30, 10**7)
    store = open_store(str(folder / "runs"))
    _run(store, "long", steps, every=100)
    for number in range(count):
        _run(open_store(str(folder / "many")), f"run-{number:04d}", 5_000, every=5)
    ref = _checkpoint(store, size_bytes)
    pairs = 1 if smoke else 3
    found = []
    for what, place, where, ways in (
        ("history", "runs", "long", (history_ours, history_peer)),
        ("runs", "many", "", (runs_ours, runs_peer)),
        ("verify", "runs", f"{ref.path}:{ref.manifest_sha256}", (verify_ours, verify_peer)),
    ):
        taken = [[_alone(way, str(folder / place), where) for _ in range(pairs)] for way in ways]
        for unit, column in (("s", 0), ("MiB", 1)):
            ours, peer = (median(row[column] for row in rows) for rows in taken)
            name = f"{what}, {'time' if unit == 's' else 'memory'}"
            found.append(
                Figure(benchmark="storage", what=name, unit=unit, ours=ours, peer=peer, pairs=pairs, count=True)
            )
    _run(store, "longest", longest, every=20, commits=longest // 10_000)
    resumed = [_alone(resume_ours, str(folder / "runs"), "longest") for _ in range(pairs)]
    for column, (unit, most) in enumerate((("s", MOST_S), ("MiB", MOST_MIB))):
        name = f"resume of {longest:,} steps, {'time' if unit == 's' else 'memory'}, beside what it may take"
        ours = median(row[column] for row in resumed)
        found.append(Figure(benchmark="storage", what=name, unit=unit, ours=ours, peer=most, pairs=pairs, count=True))
    return found


def resume_ours(uri: str, run: str) -> None:
    """As `prepare`, then `RunLedger.acquire`, `chain` and `told`."""
    store = open_store(uri)
    assert RunLog(store, run).head() is not None and read_run_summary(store, run).probed is None
    entry = RunLog(store, run, dead=lambda _: True).acquire(Owner.here(), {"name": run})
    newest_intact(store, run, entry.checkpoints, checksums=False)
    assert read_run_summary(store, run).told == entry.checkpoints[-1].step


def history_ours(uri: str, run: str) -> None:
    """From the summary."""
    read_run_summary(open_store(uri), run)


def history_peer(uri: str, run: str) -> None:
    """From all events."""
    folding = RunSummary()
    for event in read_events(open_store(uri), run):
        folding.add(event)


def runs_ours(uri: str, _: str) -> None:
    """As `trainwright runs`."""
    run_views.runs_view(uri)


def runs_peer(uri: str, _: str) -> None:
    """All events of all runs."""
    for run in open_store(uri).folders():
        RunLog(open_store(uri), run).head()
        history_peer(uri, run)


def verify_ours(uri: str, ref: str) -> None:
    """In portions."""
    path, digest = ref.split(":")
    verify(open_store(uri), "long", CheckpointRef(step=1, path=path, manifest_sha256=digest), checksums=True)


def verify_peer(uri: str, ref: str) -> None:
    """The file whole."""
    hashlib.sha256(open_store(uri).get(f"long/{ref.split(':')[0]}/model")).hexdigest()


def _alone(way: Callable[[str, str], None], uri: str, where: str) -> tuple[float, float]:
    """Return the seconds and MiB of one way in a process of its own."""
    cost: Cost = run_alone(partial(measured, partial(way, uri, where)))
    return cost.seconds, cost.grown_bytes / 2**20


def _run(store: Store, name: str, steps: int, *, every: int, commits: int = 0) -> None:
    """A run that is done, as its driver would have written it, compacted each so many batches and at the end.

    Args:
        commits: checkpoints, of no more than their names but for the last one.
    """
    log = RunLog(store, name)
    token = log.acquire(Owner.here(), {"name": name}).token
    compactor = EventCompactor(store, name, clock=_Minutes())
    begun = [RunStarted(time_s=1, run=name, token=token, total_steps=steps, steps_per_epoch=100), Formed(time_s=2)]
    _put(store, batch_path(name, token, 0), begun)
    for number, first in enumerate(range(1, steps, BATCH), 1):
        told: list[Event] = [_steps(first), Evaluated(time_s=first, step=first + BATCH - 1, metrics={"accuracy": 0.5})]
        if first + BATCH > steps:
            told.append(RunEnded(time_s=first, outcome="done", step=steps))
        _put(store, batch_path(name, token, number), told)
        if number % every == 0 or first + BATCH > steps:
            compactor.compact()
    for number in range(commits):
        last = steps * (number + 1) // commits
        log.commit(token, _checkpoint(store, 1 << 10, name, last), 3)
    log.release(token, "done")


class _Minutes:
    """A clock on which a minute passes from one look to the next."""

    def __init__(self) -> None:
        self._seconds = time.monotonic()

    def __call__(self) -> float:
        self._seconds += 61
        return self._seconds


def _steps(first: int) -> Steps:
    steps = list(range(first, first + BATCH))

    def vary(scale: float) -> list[float]:
        return [scale * (1 + (step * 7919 % 1000) / 999) for step in steps]

    return Steps(
        time_s=first, generation=1, step=steps, loss=vary(0.7), learning_rate=[1e-3] * BATCH, gradient_norm=vary(1.1),
        samples=[256] * BATCH, step_s=vary(0.01), wait_s=vary(0.001),
    )  # fmt: skip


def _put(store: Store, path: str, happened: list[RunStarted | Formed] | list[Event]) -> None:
    store.put(path, "".join(f"{event.to_json()}\n" for event in happened).encode(), sync=False)


def _checkpoint(store: Store, size_bytes: int, run: str = "long", step: int = 1) -> CheckpointRef:
    path = checkpoint_path(step, 1)
    writer = CheckpointWriter(store, run, path)
    writer.write("model", bytes(size_bytes))
    digest = write_manifest(store, run, path, CheckpointManifest(step=step, files=writer.entries))
    return CheckpointRef(step=step, path=path, manifest_sha256=digest)
