"""The trial of a job's functions before any worker starts: in processes, without Ray."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import trainwright as tw
from tests.support.run_views import ALIVE
from tests.support.torch_jobs import F1
from trainwright.core.cluster import Cluster, Node
from trainwright.core.engine import CheckpointRef
from trainwright.core.errors import DataError, JobError, RunConflict, TrainwrightError, UserCodeError
from trainwright.core.plan import Mesh, Plan, WorkerResources
from trainwright.planning.job_preparation import plan_for, prepare
from trainwright.runtime import function_trial
from trainwright.runtime.function_trial import (
    ROWS,
    Preflight,
    TrialTask,
    first_rows,
    needs_second_trial,
    run_trial,
    start_method,
)
from trainwright.storage.run_log import RunLog

HERE = Cluster(nodes=(Node(name="here", cpus=2, memory_bytes=8 << 30),))


@pytest.fixture(autouse=True)
def unconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another test of this process may have connected it to a Ray cluster."""
    monkeypatch.setattr(function_trial, "ray_is_connected", lambda: False)


def cross_entropy(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(outputs, targets, reduction="none")


def data() -> dict[str, np.ndarray]:
    x = np.random.default_rng(0).standard_normal((64, 8)).astype("float32")
    return {"x": x, "y": (x[:, 0] > 0).astype("int64")}


def job(folder: Path, **fields: Any) -> tw.Job:
    rows = tw.datasets.table(data())
    given: dict[str, Any] = {
        "name": "tried", "model": lambda: nn.Linear(8, 2), "loss": cross_entropy, "optimizer": torch.optim.Adam,
        "train": rows, "evaluate": rows, "inputs": "x", "targets": "y", "batch_size": 16, "epochs": 3, "workers": 1,
        "storage": str(folder / "runs"),
    }  # fmt: skip
    return tw.Job(**{**given, **fields})


def settled(wanted: tw.Job, **options: bool) -> tuple[str, ...]:
    """What `fit` would do before it starts workers; the notes."""
    prepared = prepare(wanted, **options)
    with Preflight(prepared, resume=options.get("resume", False)) as trial:
        return trial.settle(plan_for(prepared, HERE))


def test_nothing_is_said_of_a_job_that_is_right_and_its_process_is_gone(tmp_path: Path) -> None:
    def model() -> nn.Module:
        (tmp_path / str(os.getpid())).touch()
        return nn.Linear(8, 2)

    assert settled(job(tmp_path, model=model, metrics={"acc": lambda o, t: o.argmax(1) == t})) == ()
    pids = {int(file.name) for file in tmp_path.iterdir() if file.name.isdigit()} - {os.getpid()}
    assert len(pids) == 1 and not Path(f"/proc/{pids.pop()}").exists()


def files_of(error: TrainwrightError) -> set[str]:
    """The files of the frames in an error's traceback."""
    return set(re.findall(r'File "(.+?)", line', error.detail))


def torn(outputs: Any, targets: Any) -> Any:
    raise KeyError("no such class")


def stepped(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return cross_entropy(model(batch["x"]), batch["y"])


def late(step: int, total: int) -> float:
    return {0: 1.0}[step]


class Once(F1):
    merge = None


def logging(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    tw.log("lr", torch.ones(2))
    return cross_entropy(outputs, targets)


class Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8, 2))


def meta() -> nn.Module:
    with torch.device("meta"):
        return Bare()


@pytest.mark.parametrize(
    ("fields", "kind", "what"),
    [
        ({"metrics": {"acc": lambda o, t: (o.argmax(1) == t).float().mean()}}, JobError, "return one value per sample"),
        ({"metrics": {"acc": torn}}, UserCodeError, "metric 'acc' raised KeyError: 'no such class'"),
        ({"loss": torn}, UserCodeError, "loss= raised KeyError"),
        ({"weight": len}, JobError, "weight= counts the items of a loss of one number, and loss= returned more"),
        ({"optimizer": lambda p: None}, JobError, "optimizer() returned NoneType"),
        ({"schedule": lambda step: 1.0}, JobError, "schedule= takes one argument, the optimizer, and returned float"),
        ({"schedule": late}, UserCodeError, "KeyError: 11, for step 11 of 12"),
        ({"schedule": lambda step, total: float("nan")}, JobError, "schedule= returned nan for step 0"),
        ({"metrics": {"f1": F1, "once": Once}}, JobError, "metric 'once' has no merge(other)"),
        ({"loss": logging}, JobError, "tw.log('lr') was given shape (2,) for 16 rows"),
        ({"model": meta}, JobError, "'weight' of the model is on the meta device"),
        ({"model": lambda: nn.Linear(9, 2)}, UserCodeError, "shapes cannot be multiplied"),
        ({"loss": None, "step": stepped, "best": "kl"}, JobError, "best='kl' is not an evaluated metric: valid"),
    ],
    ids=["reduced metric", "metric", "loss", "weight", "no optimizer", "schedule", "end of a schedule",
         "nan", "unmerged", "logged", "meta", "shapes", "no metric"],
)  # fmt: skip
def test_what_is_wrong_is_said_before_a_run_begins(
    fields: dict[str, Any], kind: type[TrainwrightError], what: str, tmp_path: Path
) -> None:
    with pytest.raises(kind) as caught:
        settled(job(tmp_path, **fields))
    text = str(caught.value)
    assert what in text and "rows before any worker started" in caught.value.where and "rank" not in text
    assert kind is not UserCodeError or "Traceback" in caught.value.detail or "shapes" in text
    assert prepare(job(tmp_path, epochs=2)).begun is False, "no run of that name was begun: the mended job may start"


def vectors() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def maps() -> nn.Module:
    return nn.Sequential(nn.Unflatten(1, (2, 4)), nn.BatchNorm1d(2), nn.Flatten(), nn.Linear(8, 2))


def frozen() -> nn.Module:
    model = vectors()
    model[1].eval()
    return model


@pytest.mark.parametrize(
    ("fields", "refused"),
    [
        (
            {"model": vectors, "batch_size": 21},
            "a batch of 1 row leaves .* 1 for a micro-batch.*: set drop_last=True",
        ),
        ({"model": vectors, "batch_size": 21, "drop_last": True}, ""),
        ({"model": maps, "batch_size": 21}, ""),
        ({"model": frozen, "batch_size": 21}, ""),
        (
            {"model": vectors, "batch_size": 31, "plan": "dp=2", "workers": 2},
            "of 2 rows .*: set drop_last=True",
        ),
        (
            {"model": vectors, "batch_size": 2, "plan": "dp=2", "workers": 2},
            "of 2 rows .*: set a larger batch_size",
        ),
        ({"model": vectors, "batch_size": 31, "plan": "dp=2", "workers": 2, "batch_norm": "sync"}, ""),
        (
            {"model": vectors, "batch_size": 7, "plan": "dp=3", "workers": 3, "drop_last": True},
            "of 7 rows leaves a data rank 1 .*: set a larger batch_size",
        ),
        ({"model": vectors, "batch_size": 61, "accumulation": 2}, "a batch of 3 rows leaves a data rank 1"),
        ({"model": vectors, "batch_size": 60, "accumulation": 2}, ""),
    ],
    ids=[
        "one row",
        "left out",
        "maps",
        "frozen",
        "two ranks",
        "each batch",
        "sync",
        "second batch",
        "micro-batches",
        "two rows",
    ],
)
def test_a_batch_that_is_too_small_for_a_batch_norm_of_vectors_is_refused(
    fields: dict[str, Any], refused: str, tmp_path: Path
) -> None:
    prepared = prepare(job(tmp_path, **{"inexact": ("batch_norm",), **fields}))
    with pytest.raises(JobError, match=refused) if refused else contextlib.nullcontext():
        plan_for(prepared, HERE)


def test_a_plan_is_not_shown_for_functions_that_raise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainwright.ray_cluster.discovery.connect", lambda: True)
    monkeypatch.setattr("trainwright.planning.job_preparation.discover", lambda possible: HERE)
    with pytest.raises(UserCodeError, match="loss= raised KeyError"):
        tw.plan(job(tmp_path, loss=torn))
    notes = tw.plan(job(tmp_path, loss=lambda outputs, targets: os.kill(os.getpid(), signal.SIGKILL))).chosen.notes
    assert "could not be tried before the workers start" in notes[-1] and "more than" in notes[-1]


def test_the_users_own_lines_are_in_the_traceback(tmp_path: Path) -> None:
    with pytest.raises(UserCodeError) as caught:
        settled(job(tmp_path, loss=torn))
    assert 'raise KeyError("no such class")' in caught.value.detail and files_of(caught.value) == {__file__}


def test_a_job_for_a_number_of_rows_is_tried_with_that_number(tmp_path: Path) -> None:
    def fixed(rows: int) -> Callable[[Any, Any], Any]:
        return lambda outputs, targets: cross_entropy(outputs.view(rows, 2), targets)

    assert settled(job(tmp_path, loss=fixed(16))) == ()
    assert settled(job(tmp_path, loss=fixed(8), workers=2)) == ()
    with pytest.raises(UserCodeError, match="loss= raised RuntimeError") as caught:
        settled(job(tmp_path, loss=fixed(7)))
    assert caught.value.where == "tried on 16 rows before any worker started"


def test_a_loss_that_a_plan_divides_is_tried_as_divided(tmp_path: Path) -> None:
    def summed(outputs: Any, targets: Any) -> Any:
        return cross_entropy(outputs, targets).sum()

    def gathered(outputs: Any, targets: Any) -> Any:
        return cross_entropy(tw.gather(outputs), tw.gather(targets))

    assert settled(job(tmp_path, loss=summed)) == settled(job(tmp_path, loss=gathered, workers=2)) == ()
    assert settled(job(tmp_path, loss=nn.CrossEntropyLoss(), workers=2)) == ()
    cut = "divides a batch over 2 data ranks with 4 micro-batches each.*a mean over rows, but it is .* for 2 rows"
    with pytest.raises(JobError, match=cut) as caught:
        settled(job(tmp_path, loss=summed, workers=2, accumulation=4))
    assert caught.value.where == "tried on 2 rows before any worker started"


def test_its_time_is_that_of_a_trial_and_not_of_the_start_of_ray(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which may take minutes, between the first trial and the one with as many rows as a worker has."""
    happened: list[Any] = []
    asked = iter([function_trial._Retry(rows=16)])

    class Connection:
        def send(self, answer: function_trial.PreflightResult) -> None:
            assert answer.error is not None
            happened.append(answer.error.where.partition(" rows")[0])

        def recv(self) -> Any:
            try:
                return next(asked)
            except StopIteration:
                raise EOFError from None

    monkeypatch.setattr(function_trial, "_limit", lambda cpu_s: None)
    monkeypatch.setattr(function_trial.gc, "disable", lambda: None)
    monkeypatch.setattr(function_trial.signal, "alarm", happened.append)
    task = function_trial.task_of(prepare(job(tmp_path, loss=torn)))
    function_trial._serve(Connection(), lambda: task)  # type: ignore[arg-type]
    assert happened == [60, 0, "tried on 5", 60, 0, "tried on 16"]


def test_what_takes_long_or_dies_is_left_to_the_workers_with_a_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def endless(outputs: Any, targets: Any) -> Any:
        while True:
            time.perf_counter()

    def deadly(outputs: Any, targets: Any) -> Any:
        os.abort()

    monkeypatch.setattr(function_trial, "CPU_S", 1)
    assert "take more than 1 s of CPU time" in settled(job(tmp_path, loss=endless))[0]
    assert "was killed by SIGABRT" in settled(job(tmp_path, loss=deadly))[0]
    monkeypatch.setattr(function_trial, "MOST_BYTES", 70)
    assert "the model has 0.0 GiB of weights" in settled(job(tmp_path))[0]


def test_it_is_left_out_where_the_job_says_so_or_the_run_has_stepped_before(tmp_path: Path) -> None:
    assert settled(job(tmp_path, loss=torn, preflight=False)) == ()
    prepared = prepare(job(tmp_path, loss=torn))
    begun = replace(prepared, begun=True)
    with Preflight(begun) as trial:
        assert trial.settle(plan_for(prepared, HERE)) == ()
    with Preflight(begun, resume=True) as trial, pytest.raises(UserCodeError):  # its code may have changed
        trial.settle(plan_for(prepared, HERE))


class Opened:
    """A transform that is slow to open."""

    def __call__(self, columns: dict[str, Any]) -> dict[str, Any]:
        raise AssertionError("nothing is computed")


def test_it_is_left_out_in_a_process_that_is_connected_to_a_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared = prepare(job(tmp_path, loss=lambda outputs, targets: 1 / 0))
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda: True))
    with Preflight(prepared) as trial:
        assert trial.settle(plan_for(prepared, HERE)) == ()


def test_data_that_is_slow_to_open_is_not_opened(tmp_path: Path) -> None:
    prepared = prepare(job(tmp_path))
    slow = prepared.job.replace(train=prepared.job.train.map_batches(Opened, cpus=1))
    with Preflight(replace(prepared, job=slow)) as trial:
        assert "slow to open" in trial.settle(plan_for(prepared, HERE))[0]


def test_ragged_rows_without_padding_are_found(tmp_path: Path) -> None:
    ragged = tw.datasets.table({"x": [[1.0], [2.0, 3.0]] * 8, "y": [0] * 16})
    given = {"train": ragged, "evaluate": None, "model": lambda: nn.Linear(1, 2)}
    with pytest.raises(DataError, match="column 'x' is ragged") as caught:
        settled(job(tmp_path, **given))
    assert "pad={'x': tw.Pad()}" in caught.value.remedy


def test_a_bad_row_is_no_reason_not_to_try(tmp_path: Path) -> None:
    def second(row: dict[str, Any], rng: Any) -> dict[str, Any]:
        if row["x"][0] == data()["x"][2, 0]:
            raise ValueError("damaged")
        return row

    wanted = job(tmp_path)
    rows = wanted.train.map(second)
    batch = first_rows(wanted, rows, rows.index())
    assert batch.rows == ROWS and (batch.columns["x"] == data()["x"][0]).all()


def test_a_loss_that_is_not_finite_on_a_few_rows_is_no_verdict_but_the_metrics_are_tried(tmp_path: Path) -> None:
    def infinite(outputs: Any, targets: Any) -> Any:
        return outputs[:, 0] / 0.0

    assert settled(job(tmp_path, loss=infinite)) == ()
    with pytest.raises(UserCodeError, match="metric 'bad'"):
        settled(job(tmp_path, loss=infinite, metrics={"bad": torn}))


def test_errors_that_may_come_of_where_they_were_tried_are_left_to_the_workers() -> None:
    alone = Plan(strategy="one_device", engine="", mesh=Mesh(), batch_size=8, placement=WorkerResources(cpus=1.0))
    on_gpus = replace(alone, placement=WorkerResources(cpus=1.0, accelerators=1, accelerator="GPU"))
    together = replace(alone, mesh=Mesh(data=2))
    half = UserCodeError("loss= raised RuntimeError: \"addmm\" not implemented for 'Half'")
    device = UserCodeError("model() raised AssertionError: x", detail="torch.cuda.current_device()")
    group = UserCodeError("step= raised ValueError: Default process group has not been initialized")
    assert [needs_second_trial(half, plan) for plan in (alone, on_gpus, together)] == [False, True, False]
    assert [needs_second_trial(device, plan) for plan in (alone, on_gpus, together)] == [False, True, False]
    assert [needs_second_trial(group, plan) for plan in (alone, on_gpus, together)] == [False, False, True]
    forked = UserCodeError("the backward pass raised RuntimeError: ... in combination with fork-based multiprocessing")
    assert all(needs_second_trial(forked, plan) for plan in (alone, on_gpus, together))
    assert not needs_second_trial(UserCodeError("loss= raised KeyError: 'y'"), on_gpus)
    assert not needs_second_trial(JobError(["metric 'cuda' returned a single number"]), on_gpus)


def test_code_that_asks_for_its_rank_is_left_to_workers_that_have_one(tmp_path: Path) -> None:
    def ranked(outputs: Any, targets: Any) -> Any:
        return cross_entropy(outputs, targets) * (1 + torch.distributed.get_rank())

    assert "process group" in settled(job(tmp_path, loss=ranked, workers=2))[0]
    with pytest.raises(UserCodeError, match="process group"):
        settled(job(tmp_path, loss=ranked))


def test_a_fresh_process_does_the_same_where_a_fork_is_not_safe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(function_trial, "start_method", lambda framework="": "fresh" if framework else "later")
    monkeypatch.setattr(function_trial, "_WAIT_S", 120)  # of a busy machine
    with pytest.raises(UserCodeError, match="metric 'acc' raised KeyError: 'no such class'"):
        settled(job(tmp_path, metrics={"acc": torn}))


def test_a_fork_is_made_where_it_can_use_the_framework(monkeypatch: pytest.MonkeyPatch) -> None:
    class Compat:
        in_use = staticmethod(lambda: True)

    monkeypatch.setattr(function_trial, "load_module", lambda module: Compat)
    monkeypatch.setitem(sys.modules, "tensorflow", Compat)  # type: ignore[arg-type]
    assert (start_method(), start_method("torch"), start_method("tensorflow")) == ("later", "fork", "fresh")
    monkeypatch.setattr(Compat, "in_use", staticmethod(lambda: False))
    assert (start_method(), start_method("tensorflow")) == ("fork", "fork")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert (start_method(), start_method("torch")) == ("fresh", "fresh")


def test_it_forks_in_any_thread_and_goes_on_without_a_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ThreadPoolExecutor(1) as pool:
        error = pool.submit(settled, job(tmp_path, loss=torn)).exception()
    assert isinstance(error, UserCodeError) and "no such class" in str(error)

    def full() -> int:
        raise OSError("Cannot allocate memory")

    monkeypatch.setattr(os, "fork", full)
    assert "Cannot allocate memory" in settled(job(tmp_path, loss=torn))[0]


def test_a_failed_start_ends_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        function_trial, "start_method", lambda framework="": "fork"
    )  # whatever other tests of this process use
    prepared, began = prepare(job(tmp_path, loss=lambda o, t: time.sleep(60))), time.monotonic()
    with pytest.raises(KeyboardInterrupt), Preflight(prepared) as trial:
        assert trial._child is not None
        pid = trial._child._pid
        raise KeyboardInterrupt
    assert not Path(f"/proc/{pid}").exists() and time.monotonic() - began < 30


def test_keras_metrics_that_are_no_sum_are_refused(tmp_path: Path) -> None:
    """In this process, where it may be in use: what the other one does."""
    import keras

    def model() -> Any:
        return keras.Sequential([keras.Input((8,)), keras.layers.Dense(2)])

    def compiled() -> Any:
        made = model()
        made.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
        return made

    class Last(keras.metrics.Metric):  # type: ignore[misc]  # keras has no types
        def __init__(self) -> None:
            super().__init__()
            self.last = self.add_variable((), "zeros", name="last")

        def update_state(self, y_true: Any, y_pred: Any) -> None:
            self.last.assign(y_pred[-1, 0])

        def result(self) -> Any:
            return self.last

    wanted = job(
        tmp_path, model=model, optimizer=lambda v: keras.optimizers.Adam(), metrics={"last": Last},
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )  # fmt: skip
    batch = first_rows(wanted, wanted.train, wanted.train.index())
    task = TrialTask(job=wanted, train=batch, evaluate=batch, total_steps=12)
    error = run_trial(task).error
    assert isinstance(error, JobError) and "last' is not a sum over batches" in str(error)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")

    def logged(outputs: Any, targets: Any) -> Any:
        tw.log("mean", 1.0)
        return loss(targets, outputs)

    told = run_trial(replace(task, job=wanted.replace(metrics={}, loss=logged))).error
    assert isinstance(told, JobError) and "tw.log('mean') is for torch" in str(told)
    fitted = wanted.replace(run="fit", optimizer=None, loss=None, metrics={}, best="acuracy", model=compiled)
    error = run_trial(TrialTask(job=fitted, train=batch, evaluate=batch, total_steps=12)).error
    assert isinstance(error, JobError) and "best='acuracy' is not an evaluated metric: did you mean 'accu" in str(error)
    one = {"metrics": {"accuracy": keras.metrics.SparseCategoricalAccuracy()}}
    assert (
        run_trial(TrialTask(job=wanted.replace(**one), train=batch, evaluate=batch, total_steps=12))
        == function_trial.PreflightResult()
    )


def test_a_model_that_cannot_be_built_shows_the_users_own_lines(tmp_path: Path) -> None:
    def built() -> nn.Module:
        return nn.Linear(8, CLASSES["two"])  # noqa: F821

    with pytest.raises(UserCodeError, match=r"model\(\) raised NameError") as caught:
        settled(job(tmp_path, model=built))
    assert 'nn.Linear(8, CLASSES["two"])' in caught.value.detail and files_of(caught.value) == {__file__}


def test_a_job_may_be_corrected_until_its_run_has_a_checkpoint(tmp_path: Path) -> None:
    """A failure in the first step leaves nothing that another job could continue by mistake."""
    first, corrected = prepare(job(tmp_path)), job(tmp_path, batch_size=8)
    log = RunLog(first.store, "tried")
    token = log.acquire(ALIVE, first.description).token
    with pytest.raises(RunConflict, match="was started with another job"):
        prepare(corrected)  # its workers may hold steps that no checkpoint has
    log.release(token, "failed")
    assert not prepare(corrected).begun
    token = log.acquire(ALIVE, first.description).token
    log.commit(token, CheckpointRef(step=2, path="checkpoints/00000002-1", manifest_sha256=""), keep=1)
    log.release(token, "failed")
    assert prepare(job(tmp_path)).begun
    with pytest.raises(RunConflict, match="was started with another job:\n    batch_size"):
        prepare(corrected)


def keras_models() -> tuple[Any, Any, Any]:
    """A function of a model, a layer that adds losses and noise, and a model with a train_step of its own."""
    import keras
    import tensorflow as tf
    from keras import layers, ops

    def features(*more: Any) -> Any:
        keras.utils.set_random_seed(0)
        return keras.Sequential([keras.Input((8,)), *more, layers.Dense(2, kernel_regularizer="l2")])

    class Latent(layers.Layer):  # type: ignore[misc]  # keras has no types
        def __init__(self, reduce: Any) -> None:
            super().__init__()
            self.reduce, self.seeds = reduce, keras.random.SeedGenerator(1)

        def call(self, x: Any) -> Any:
            self.add_loss(self.reduce(ops.sum(x**2, axis=-1)))
            return x + keras.random.normal(ops.shape(x), seed=self.seeds)

    class Contrastive(keras.Model):  # type: ignore[misc]  # keras has no types
        def __init__(self, loss: Any) -> None:
            super().__init__()
            self.inner, self.rows_loss = features(), loss

        def call(self, x: Any) -> Any:
            return self.inner(x)

        def train_step(self, data: Any) -> Any:
            with tf.GradientTape() as tape:
                loss = ops.mean(self.rows_loss(data[1], self(data[0], training=True)))
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
            return {"loss": loss}

    return features, Latent, Contrastive


def keras_losses() -> dict[str, dict[str, Any]]:
    """Jobs of Keras models, by what their losses are; those that begin with "no" have a loss of each row alone."""
    import keras
    from keras import layers, ops

    features, latent, contrastive = keras_models()

    def compared(y_true: Any, y_pred: Any) -> Any:
        scores = y_pred @ ops.transpose(y_pred + 1.0)
        return keras.losses.sparse_categorical_crossentropy(ops.arange(ops.shape(scores)[0]), scores, from_logits=True)

    alone = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def step(loss: Any, *more: Any, own: Any = None) -> dict[str, Any]:
        model, optimizer = lambda: features(*(each() for each in more)), lambda variables: keras.optimizers.SGD(0.1)
        given = {"step": own, "inputs": (), "targets": ()} if own else {"loss": loss}
        return {"model": model, "optimizer": optimizer, "loss": None, **given}

    def fit(model: Any, loss: Any = None, **given: Any) -> dict[str, Any]:
        def compiled() -> Any:
            made = model()
            made.compile(keras.optimizers.SGD(0.1), loss, **given)
            return made

        return {"model": compiled, "run": "fit", "loss": None, "optimizer": None}

    def summed() -> Any:
        return latent(ops.sum)

    usual = (layers.BatchNormalization, lambda: layers.Dropout(0.5), lambda: latent(ops.mean))
    total = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum")
    return {
        "compared": step(compared),
        "added sum": step(alone, summed),
        "own step compared": step(None, own=lambda model, batch: compared(batch["y"], model(batch["x"]))),
        "fit compared": fit(features, compared),
        "fit with an added sum": fit(lambda: features(summed()), alone),
        "train_step compared": fit(lambda: contrastive(compared)),
        "no step": step(alone, *usual),
        "no own step": step(
            None, *usual, own=lambda model, batch: alone.call(batch["y"], model(batch["x"], training=True))
        ),
        "no fit": fit(lambda: features(*(each() for each in usual)), alone, metrics=["accuracy"]),
        "no sum in fit": fit(features, total),
        "no train_step": fit(lambda: contrastive(alone)),
    }


@pytest.mark.parametrize("inexact", [(), ("batch_loss",)], ids=["exact", "accepted"])
def test_losses_of_keras_models_that_depend_on_other_rows_are_refused(
    tmp_path: Path, inexact: Any, caplog: pytest.LogCaptureFixture
) -> None:
    losses = keras_losses()
    for name in (name for name in losses if "compared" in name or not inexact):
        fields = losses[name]
        wanted = job(tmp_path, **fields, inexact=("batch_norm", *inexact))
        batch = first_rows(wanted, wanted.train, wanted.train.index())
        found = run_trial(TrialTask(job=wanted, train=batch, evaluate=None, total_steps=12))
        assert (found.error, found.untried) == (None, ""), name
        if name.startswith("no ") or inexact:
            assert found.divided is None, name
        else:
            assert isinstance(found.divided, JobError), name
            assert "no mean over rows" in str(found.divided) and 'inexact=("batch_loss",)' in str(found.divided), name
    assert not [each for each in caplog.records if each.name.startswith("trainwright")], "all could be tried"
