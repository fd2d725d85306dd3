"""Workers and servers that step alone are killed and frozen: workers cost the others nothing, no sample counts twice.

The model's parameter `seen` has a number a sample, from which SGD takes the learning rate times the sample's weight in
its update each time that it counts.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import trainwright as tw
from tests.support import torch_jobs
from tests.support.exactly_once_job import strike
from tests.support.finished_runs import final_state, told
from tests.support.processes import wait_for
from tests.support.reference import registration
from tests.support.reference.model import Array, LossWithGradient, Mlp, Sgd, cross_entropy
from tests.support.reference.state import from_bytes, merge_states
from trainwright.core import events

ROWS, WIDTH, CLASSES, BATCH, EPOCHS, RATE = 192, 8, 4, 24, 3, 0.01
EVERY = ROWS // BATCH  # steps of an epoch, after each of which a checkpoint is due
STEPS = EPOCHS * EVERY


@pytest.fixture(scope="module", autouse=True)
def registered() -> Iterator[None]:
    with registration.registered():
        yield


class Counting(Mlp):
    """An Mlp whose outputs have one more column: what `seen` holds of the sample.

    Args:
        mark: the first process to reach `calls` forward passes in training makes it, and sends itself the signal.
    """

    passes = 0  # of this process

    def __init__(self, mark: str, calls: int, number: int) -> None:
        self._strike = (Path(mark), calls, number) if mark else None
        super().__init__((WIDTH, 16, CLASSES))

    def initialize(self, seed: int) -> None:
        super().initialize(seed)
        self.parameters = {**self.parameters, "seen": np.zeros(ROWS)}

    def __call__(self, *inputs: npt.NDArray[Any]) -> Array:
        x, ids = inputs
        Counting.passes += self.training
        if self._strike and self.training and Counting.passes >= self._strike[1]:
            strike(self._strike[0], self._strike[2])
        self._ids = np.asarray(ids, np.int64).reshape(-1)
        return np.concatenate([super().__call__(x), self.parameters["seen"][self._ids][:, None]], axis=1)

    def backward(self, gradient: Array) -> dict[str, Array]:
        seen = np.zeros(ROWS)
        np.add.at(seen, self._ids, gradient[:, -1])
        return {**super().backward(gradient[:, :-1]), "seen": seen}


def loss(outputs: Array, targets: npt.NDArray[Any]) -> LossWithGradient:
    graded = cross_entropy(outputs[:, :-1], targets)
    return LossWithGradient(graded.values, np.concatenate([graded.gradient, np.ones((len(outputs), 1))], axis=1))


def correct(outputs: Array, targets: npt.NDArray[Any]) -> Array:
    return np.asarray(outputs[:, :-1].argmax(axis=-1) == targets, np.float64)


def job(folder: Path, *, worker: int = 0, server: int = 0, number: int = signal.SIGKILL, **fields: Any) -> tw.Job:
    """24 steps, a checkpoint each 8, an evaluation after each epoch.

    Args:
        worker: forward passes after which a worker is struck; 0 for never.
        server: step that a server is struck in, once there is a checkpoint; 0 for never.
    """
    mark = str(folder.parent / "mark")
    random = np.random.default_rng(5)
    x = random.normal(size=(ROWS, WIDTH))
    table = tw.datasets.table({"x": x, "id": np.arange(ROWS), "y": x[:, :CLASSES].argmax(1)})

    def build() -> Counting:
        return Counting(mark if worker else "", worker, number)

    def rate(step: int, total: int) -> float:
        if server and step == server and Counting.passes == 0:
            torch_jobs.keep_pace(str(folder), EVERY, EVERY, "apart")
            strike(Path(mark), number)
        return 1.0

    return tw.Job(
        **{
            "name": "apart",
            "preflight": False,  # faults are in the job's functions
            "model": build,
            "loss": loss,
            "optimizer": lambda parameters: Sgd(learning_rate=RATE),
            "schedule": rate,
            "metrics": {"correct": correct},
            "train": table,
            "evaluate": table,
            "inputs": ("x", "id"),
            "targets": "y",
            "batch_size": BATCH,
            "epochs": EPOCHS,
            "seed": 3,
            "storage": str(folder),
            "strategy": "parameter_server",
            "plan": "dp=2,servers=2",
            "consistency": "sync",
            "workers": 2,
            "spares": 0,
            "keeper_s": 0,
            "hang_deadline_s": 5.0 if number == signal.SIGSTOP else 60.0,  # no slow machine seems to hang
            **fields,
        }
    )


def parameters(folder: Path) -> Mapping[str, Array]:
    """Those of the newest checkpoint."""
    state = final_state(folder, "apart")
    assert state.step == STEPS
    return merge_states(from_bytes(content) for _, content in sorted(state.files.items())).parameters


@pytest.fixture(scope="module")
def unbroken(ray_cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Array]:
    folder = tmp_path_factory.mktemp("unbroken") / "runs"
    assert tw.fit(job(folder)).state == "done"
    check_story(folder, generations=1, failures=0)
    return parameters(folder)


def check_story(folder: Path, *, generations: int, failures: int) -> None:
    """All steps were told once, in each generation's order, and all evaluations are of the whole set."""
    assert len(told(folder, "apart", events.Formed)) == generations
    assert len(told(folder, "apart", events.Failed)) == failures
    steps: Any = told(folder, "apart", events.Steps)
    found = [step for event in steps for step in event.step]
    assert set(found) == set(range(1, STEPS + 1)) and (generations > 1 or found == sorted(set(found)))
    evaluated: Any = told(folder, "apart", events.Evaluated)
    assert [event.step for event in evaluated] == [8, 16, 24]


def test_each_sample_counts_once_an_epoch(unbroken: Mapping[str, Array]) -> None:
    assert np.allclose(-unbroken["seen"] / RATE, EPOCHS / BATCH, rtol=0, atol=1e-12)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
def test_a_lost_worker_stops_nobody(number: int, folder: Path, unbroken: Mapping[str, Array]) -> None:
    assert tw.fit(job(folder, worker=6, number=number)).state == "done"
    pid = int((folder.parent / "mark").read_text())
    wait_for(lambda: not Path(f"/proc/{pid}").exists(), 20)  # Ray reaps a killed process a moment after the run's end
    check_story(folder, generations=1, failures=len(told(folder, "apart", events.Failed)))
    found = parameters(folder)
    for name, value in unbroken.items():
        assert np.array_equal(found[name], value), name
    if number == signal.SIGKILL:
        (failed,) = told(folder, "apart", events.Failed)
        assert failed.rank >= 2  # type: ignore[attr-defined]


def test_a_lost_server_takes_all_back_to_one_state(folder: Path, unbroken: Mapping[str, Array]) -> None:
    assert tw.fit(job(folder, server=12)).state == "done"
    check_story(folder, generations=2, failures=1)
    formed: Any = told(folder, "apart", events.Formed)
    assert [(event.source, event.step) for event in formed] == [("initial", 0), ("checkpoint", 8)]
    found = parameters(folder)
    for name, value in unbroken.items():
        assert np.array_equal(found[name], value), name


def test_asynchronous_units_count_once_though_a_worker_dies(folder: Path, ray_cluster: None) -> None:
    assert tw.fit(job(folder, worker=6, consistency="async")).state == "done"
    check_story(folder, generations=1, failures=1)
    stale: Any = told(folder, "apart", events.Stale)
    assert sum(count for event in stale for _, count in event.counts) == 2 * STEPS
    assert {event.unit for event in stale} == {"updates"}
    shares = -parameters(folder)["seen"] / RATE
    assert np.allclose(shares, EPOCHS / (BATCH / 2), rtol=0, atol=1e-12), "an update is of half a batch"
