"""`sbatch clusters/slurm.sbatch` on hosts with Debian's Slurm: to the end, stopped, resumed, cancelled, a node lost."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.hosts import lan, packages, slurm
from tests.hosts.lan import Host
from tests.support import processes
from tests.support.conformance import reference_case
from tests.support.finished_runs import final_state, told
from tests.support.processes import ROOT
from trainwright.core import events
from trainwright.storage.object_store import open_store
from trainwright.storage.run_log import RunLog

pytestmark = pytest.mark.hosts
NAMES = ("head", "one", "two", "three", "four")
LAST_S = 60.0
START_S = 150.0  # of a job on several hosts, which are one machine that runs other tests too
GATE = 5
# From step GATE on it waits for a file, which says how slow the steps are from there; `whole` is not held up. Nothing
# but numpy, which starts soonest and adds up to the same whoever adds.
JOB = """
import pathlib, time
import numpy as np
import trainwright as tw
from tests.support.reference.model import cross_entropy
from tests.support.reference.model import Mlp
from tests.support.reference.model import Sgd
from tests.support.reference import registration

registration.register()

folder = pathlib.Path({folder!r})
x = np.random.default_rng(5).normal(size=(192, 8))

def job(name="whole", workers=1):
    def rate(step, total):
        if name != "whole" and step >= {gate}:
            while not (folder / f"go-{{name}}").exists():
                time.sleep(0.05)
            time.sleep(float((folder / f"go-{{name}}").read_text()))
        return 1.0

    return tw.Job(
        name=name, model=lambda: Mlp((8, 16, 4)), loss=cross_entropy, schedule=rate, inputs="x", targets="y", epochs=3,
        optimizer=lambda parameters: Sgd(learning_rate=0.1, momentum=0.9), batch_size=24, seed=3, workers=workers,
        spares=0, keeper_s=0, checkpoint_steps=1000, hang_deadline_s=170.0, preflight=False,
        train=tw.datasets.table({{"x": x, "y": x[:, :4].argmax(1)}}), storage=str(folder / "runs"),
    )
"""
STEPS = 24


@dataclass(frozen=True, kw_only=True)
class World:
    """Hosts by name, and the folder of the job file, which all of them see."""

    hosts: dict[str, Host]
    folder: Path

    def submit(self, run: str, nodes: int = 1, workers: int = 1) -> slurm.Job:
        """A job by the user's command."""
        job = f"fit job.py --set name={run} --set workers={workers}"
        script = self.folder / f"{run}.sbatch"
        return slurm.submit(self.hosts["head"], script, {"nodes": str(nodes), "job": job})

    def await_gate(self, run: str) -> None:
        """Until the steps before the gate are done."""
        processes.wait_for(lambda: sum(len(event.step) for event in self.told(run, events.Steps)) >= GATE, START_S)

    def open_gate(self, run: str, pace_s: float) -> None:
        """Let it go on, with steps of so many seconds."""
        (self.folder / "going").write_text(str(pace_s))
        (self.folder / "going").rename(self.folder / f"go-{run}")

    def told(self, run: str, kind: type[events.Event]) -> Any:
        """Its events of one kind."""
        return told(self.folder / "runs", run, kind)

    def await_nothing(self, nodes: list[str]) -> None:
        """Until no process of Ray's or the run's is left on these, and see that no memory and no file of theirs is."""
        for host in map(self.hosts.__getitem__, nodes):
            processes.wait_for(lambda host=host: not host.processes("ray", "trainwright"), LAST_S)  # type: ignore[misc]
            left = host.machine.run("sh", "-c", "ls -A /dev/shm; ls -d /tmp/ray* 2>/dev/null || true")
            assert left == "", f"{host.name}: {left}"


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """Hosts with Slurm."""
    folder = tmp_path_factory.mktemp("slurm")
    (folder / "job.py").write_text(JOB.format(folder=str(folder), gate=GATE))
    (folder / "tests").symlink_to(ROOT / "tests")  # the folder is on the path of driver and workers
    with lan.lan(NAMES, packages.unpacked(ROOT / "data" / "debian"), [folder]) as made:
        for host in made.values():
            host.write("/root/.trainwright/storage.env", "", 0o600)
        slurm.start([*made.values()])
        yield World(hosts=made, folder=folder)


@pytest.fixture(scope="module")
def jobs(world: World) -> dict[str, slurm.Job]:
    """All at once: Slurm gives them the hosts as these are free. Those that something happens to wait for it."""
    return {
        "lost": world.submit("lost", nodes=3, workers=3),
        **{run: world.submit(run) for run in ("stopped", "cancelled", "whole")},
    }


def test_stopped_with_a_checkpoint_and_resumed(world: World, jobs: dict[str, slurm.Job]) -> None:
    job = jobs["stopped"]
    world.await_gate("stopped")
    job.cancel("--batch", "--signal=TERM")
    world.open_gate("stopped", pace_s=0.5)
    assert job.ended() == "FAILED 143:0", job.said()
    entry = RunLog(open_store(str(world.folder / "runs")), "stopped").head()
    assert entry is not None and entry.outcome == "stopped" and entry.checkpoints, job.said()
    assert entry.checkpoints[-1].step < STEPS, job.said()
    world.await_nothing(job.nodes())
    world.open_gate("stopped", pace_s=0.0)
    jobs["resumed"] = world.submit("stopped")


def test_cancelled(world: World, jobs: dict[str, slurm.Job]) -> None:
    world.await_gate("cancelled")
    jobs["cancelled"].cancel()
    assert jobs["cancelled"].ended().startswith("CANCELLED"), jobs["cancelled"].said()
    world.await_nothing(jobs["cancelled"].nodes())


def test_a_node_is_lost(world: World, jobs: dict[str, slurm.Job]) -> None:
    """Its worker begins again on one of the others."""
    job = jobs["lost"]
    world.await_gate("lost")
    head, other, victim = job.nodes()
    world.hosts[victim].kill()
    world.open_gate("lost", pace_s=0.0)
    assert job.ended() == "COMPLETED 0:0", job.said()
    formed = world.told("lost", events.Formed)
    assert set(formed[0].nodes) == {head, other, victim}
    assert set(formed[-1].nodes) == {head, other} and formed[-1].steps_lost == 0, job.said()
    world.await_nothing([head, other])


def test_what_comes_out_is_the_same(world: World, jobs: dict[str, slurm.Job]) -> None:
    assert jobs["whole"].ended() == "COMPLETED 0:0", jobs["whole"].said()
    assert jobs["resumed"].ended() == "COMPLETED 0:0", jobs["resumed"].said()
    whole, resumed, lost = (final_state(world.folder / "runs", run) for run in ("whole", "stopped", "lost"))
    assert resumed == whole
    assert lost.step == whole.step == STEPS
    ours, theirs = reference_case.state(lost.files), reference_case.state(whole.files)
    for name in theirs:  # of float64, added up in another order
        np.testing.assert_allclose(ours[name], theirs[name], rtol=1e-9, atol=1e-12, err_msg=name)
    world.await_nothing(jobs["whole"].nodes())
    world.await_nothing(jobs["resumed"].nodes())
