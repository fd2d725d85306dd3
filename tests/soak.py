"""A run under random faults for a while, on a real S3 server behind a proxy that fails: `make soak`.

Nothing may be lost, counted twice or left behind. The faults are those of `trainwright chaos`, by its schedule and its
injector. The steps of the run under faults are slow for as long as faults are given, then as fast as they can be.

With the rights of root it trains on two hosts, each in namespaces of its own, and the link between them is cut as well:
briefly, so that nobody need notice, or for so long that a host is lost, which then joins again.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import shlex
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import trainwright as tw
from tests.support import namespaces, processes, ray_clusters, s3_server, torch_jobs
from tests.support.finished_runs import final_state
from tests.support.sample_counts import account_of
from trainwright.chaos_testing import chaos_report as v
from trainwright.chaos_testing import experiment
from trainwright.chaos_testing.chaos_report import as_data
from trainwright.chaos_testing.experiment import HostSnapshot
from trainwright.chaos_testing.fault_schedule import CATALOGUE, FaultType, ScheduledFault, random_schedule
from trainwright.chaos_testing.run_observer import ObservedRun
from trainwright.core.events import Event, Formed, RunStarted, Steps
from trainwright.storage.object_store import open_store
from trainwright.storage.run_log import RunLog

CUTS = (
    FaultType(name="glitch", description="the link between the hosts is cut for a moment", target="link", seconds=1.5),
    FaultType(
        name="cut", description="the link between the hosts is cut until one is lost", target="link", seconds=9.0
    ),
)
# A host joins the cluster whose address and credentials a file tells, and again whenever it was lost.
JOIN = """
until [ -f "$1" ]; do sleep 0.1; done; . "$1"
while :; do "$2" start --address="$GCS" --node-ip-address="$3" --num-cpus=2 --temp-dir="$4" --block; sleep 1; done
"""
MARK = "TRAINWRIGHT_SOAK"  # in the environment of every process that the soak starts
BATCH, RATE = 29, 1e-2  # 203 rows make 7 steps: each sample weighs as much as any other
STEPS_PER_EPOCH = torch_jobs.ROWS // BATCH
PACE_S, CHECKPOINT_STEPS = 0.15, 20
SPARE_EPOCHS = 15  # beyond what fits between the faults, so that the last one is not the end
STEP = torch_jobs.make_step(())


@dataclass(frozen=True, kw_only=True)
class Task:
    """What is asked for.

    Attributes:
        count: faults to give.
        every_s: seconds between them, at least.
        faults: names of the catalogue, and of CUTS.
        told: file by which a second host hears of the cluster; empty for one host.
    """

    count: int
    every_s: float
    seed: int
    faults: tuple[str, ...]
    told: str = ""

    @property
    def host(self) -> str:
        """Where this host is reached."""
        return namespaces.ENDS[0] if self.told else "127.0.0.1"

    @property
    def epochs(self) -> int:
        """Enough of them that the run outlasts its faults."""
        return math.ceil(self.count * self.every_s / PACE_S / STEPS_PER_EPOCH) + SPARE_EPOCHS

    @property
    def strikes(self) -> tuple[ScheduledFault, ...]:
        """The schedule."""
        by_name = {fault.name: fault for fault in (*CATALOGUE, *CUTS)}
        return random_schedule([by_name[name] for name in self.faults], self.seed, self.every_s, self.count)


def job(task: Task, storage: str, pace: Path) -> tw.Job:
    """The job; its steps are slow while there is a file `pace`."""

    def step(model: Any, batch: Any) -> torch.Tensor:
        if pace.exists():
            time.sleep(PACE_S)
        return STEP(model, batch)

    return torch_jobs.job(
        storage, name="soak", step=step, batch_size=BATCH, epochs=task.epochs, checkpoint_steps=CHECKPOINT_STEPS,
        spares=1, hang_deadline_s=5.0, failures=experiment.FAILURE_BUDGET,
    )  # fmt: skip


def soak(task: Task, storage: str, folder: Path) -> dict[str, Any]:
    """Train without and with faults; what came of it, with all that is wrong under `wrong`."""
    pace = folder / "pace"
    made = job(task, storage, pace)
    with experiment.scratch_storage(storage) as bench:
        unbroken = experiment.run_job(made, "uninterrupted", bench)
        assert not unbroken.error, unbroken.error
        pace.touch()
        before = HostSnapshot.now()
        link = namespaces.OwnEnd() if task.told else None
        broken = experiment.run_job(
            made, "chaos", bench, schedule=task.strikes, link=link, on_all_injected=pace.unlink, say=say
        )
        names = [experiment.run_name(made, suffix) for suffix in ("uninterrupted", "chaos")]
        wrong = list(experiment.leaks_of(broken, before, names[1], bench)) + living_actors()
        finals = [bench.final(names[0]), v.FinalCheckpoint() if broken.error else bench.final(names[1])]
        differing, since = v.compare_runs(unbroken, finals[0], broken, finals[1])
        if not broken.error:
            wrong += miscounted(bench.storage, names[1], task) + uncommitted(bench.storage, names[1], broken)
    history = v.run_history(broken)
    found = v.ChaosReport(
        job=made.name, seed=task.seed, steps=history.summary.start.total_steps, differences=differing, since_step=since,
        costs=v.fault_costs(broken), missed=broken.missed, goodput=v.goodput(broken),
        unbroken_goodput=v.goodput(unbroken),
        seconds=v.elapsed_s(broken), unbroken_seconds=v.elapsed_s(unbroken),
    )  # fmt: skip
    wrong += [f"in the bucket: {path}" for path, _ in open_store(storage).list()]
    wrong += [f"never given: {name}" for name in broken.missed]
    return {**as_data(found), "wrong": [*differing, *wrong]}


def miscounted(storage: str, run: str, task: Task) -> list[str]:
    """Samples that did not count once in each epoch, by the account that the model itself keeps."""
    times = -account_of(final_state(storage, run)) / RATE * BATCH
    bad = np.flatnonzero(~np.isclose(times, task.epochs, rtol=0, atol=1e-3))
    return [f"sample {row} counted {times[row]:.3f} times in {task.epochs} epochs" for row in bad[:10]]


def uncommitted(storage: str, run: str, course: ObservedRun) -> list[str]:
    """Steps that the committed history lacks or holds twice: each generation goes on exactly where it begins.

    A driver that takes workers over tells what storage lacks of the one before, though that may have told it here.
    """
    wrong, reached, heir = [], 0, False
    for event in course.events:
        if isinstance(event, RunStarted):
            heir = True
        elif isinstance(event, Formed):
            reached = min(reached, event.step)
        elif isinstance(event, Steps):
            reached = min(reached, event.step[0] - 1) if heir and event.step else reached
            heir = False
            wrong += _gaps(event, reached)
            reached = event.step[-1] if event.step else reached
    head = RunLog(open_store(storage), run).head()
    if head is None or head.outcome != "done" or head.checkpoints[-1].step != reached:
        wrong.append(f"the log ends with {head}, the steps with {reached}")
    return wrong


def _gaps(event: Event, reached: int) -> list[str]:
    assert isinstance(event, Steps), "only steps are asked about"
    expected = list(range(reached + 1, reached + 1 + len(event.step)))
    return [] if event.step == expected else [f"after step {reached} came {event.step[:3]}"]


def living_actors() -> list[str]:
    """Actors of the cluster that are not dead, and placement groups that are not removed."""
    from ray._private.state import actors
    from ray.util import placement_group_table

    living = [f"actor {actor['ActorClassName']}" for actor in actors().values() if actor["State"] != "DEAD"]
    groups = placement_group_table().values()  # type: ignore[no-untyped-call]
    return living + [f"placement group {group['name']}" for group in groups if group["state"] != "REMOVED"]


def say(line: str) -> None:
    """A line for people."""
    print(f"{time.strftime('%H:%M:%S')}  {line}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def cluster(task: Task, folder: Path, server: s3_server.S3Server) -> Iterator[None]:
    """A Ray cluster of two CPUs on each host, whose processes know the store and keep their files here."""
    import ray

    quiet: dict[str, Any] = {"include_dashboard": False, "log_to_driver": False, "logging_level": "ERROR"}
    temporary = str(folder / "ray")
    context = ray.init(address="local", num_cpus=2, _temp_dir=temporary, _node_ip_address=task.host, **quiet)
    if task.told:
        variables = {**server.environment(), "GCS": context.address_info["gcs_address"]}
        told = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in variables.items())
        Path(task.told).with_suffix(".new").write_text(told)
        Path(task.told).with_suffix(".new").rename(task.told)
        processes.wait_for(lambda: len(ray.nodes()) == 2)
    yield
    ray.shutdown()


@contextlib.contextmanager
def own_folder() -> Iterator[Path]:
    """A folder for everything; below it the one that all processes take for temporary files."""
    with tempfile.TemporaryDirectory(prefix="soak-", ignore_cleanup_errors=True) as name:
        temporary = Path(name) / "tmp"
        temporary.mkdir()
        os.environ["TMPDIR"] = tempfile.tempdir = str(temporary)
        yield Path(name)


def temporary_files() -> list[Path]:
    """What is left where temporary files go, but for torch's cache, which stays by its nature."""
    return [path for path in Path(tempfile.gettempdir()).iterdir() if not path.name.startswith("torchinductor")]


def marked(mark: str) -> list[str]:
    """Processes that carry the mark, this one aside."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            environment = (process / "environ").read_bytes()
            command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if f"{MARK}={mark}".encode() in environment.split(b"\0") and process.name != str(os.getpid()):
            found.append(f"process {process.name}: {command[:120]}")
    return found


def gone(mark: str, patience_s: float = 20.0) -> list[str]:
    """Marked processes that are there still after a while."""
    until_s = time.monotonic() + patience_s
    while (found := marked(mark)) and time.monotonic() < until_s:
        time.sleep(0.2)
    return found


def on_two_hosts(arguments: list[str]) -> int:
    """The same in two machines with a cable between them; what is said there is said here."""
    ray = Path(sys.executable).with_name("ray")
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="soak-", ignore_cleanup_errors=True))
        head, other = (stack.enter_context(namespaces.machine(name)) for name in ("head", "other"))
        _, end = namespaces.cable(head, other).addresses
        told = Path(folder) / "told"
        log = stack.enter_context((Path(folder) / "other.log").open("w"))
        join = other.start("sh", "-c", JOIN, "-", told, ray, end, Path(folder) / "ray", env=namespaces.NODES)
        threading.Thread(target=lambda: [log.write(line) for line in join.stdout or ()], daemon=True).start()
        within = head.start(sys.executable, "-m", "tests.soak", *arguments, "--told", told, env=namespaces.NODES)
        for line in within.stdout or ():
            print(line, end="", flush=True)
        left = [name for name in other.run("ls", "/dev/shm").split() if name.startswith("trainwright")]
        print(*(f"left in the other host's shared memory: {name}" for name in left), sep="\n", end="", file=sys.stderr)
        return within.wait(60) or len(left)


def main(arguments: list[str]) -> int:
    """Soak; print what came of it as JSON; 0 when nothing is wrong."""
    parser = argparse.ArgumentParser(prog="make soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--every", type=float, default=20.0, help="seconds between faults")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--hosts", type=int, choices=(1, 2), default=1 if os.geteuid() else 2)
    parser.add_argument("--faults", default="")
    parser.add_argument("--told", default="", help="for the second host; set where it is started")
    given = parser.parse_args(arguments)
    if given.hosts == 2 and not given.told:
        return on_two_hosts(arguments)
    every = (*CATALOGUE, *CUTS) if given.told else CATALOGUE
    faults = tuple(filter(None, given.faults.split(","))) or tuple(fault.name for fault in every)
    count = max(1, round(given.minutes * 60 / given.every))
    task = Task(count=count, every_s=given.every, seed=given.seed, faults=faults, told=given.told)
    mark = os.environ[MARK] = uuid.uuid4().hex  # the kernel shows it of processes started from here on
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(s3_server.running(task.host))
        server.make_bucket("soak")
        os.environ |= server.environment()
        folder = stack.enter_context(own_folder())
        stack.enter_context(ray_clusters.forking(ray_clusters.TORCH_IMPORTS))  # its workers carry the mark as it does
        ray_clusters.thrifty()
        with cluster(task, folder, server):
            found = soak(task, "s3://soak/runs", folder)
        found["wrong"] += [f"file {path}" for path in temporary_files()]
    found["wrong"] += gone(mark)
    found["passed"] = not found["wrong"]
    print(json.dumps(found, indent=2))
    return 0 if found["passed"] else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
