"""Callbacks on real workers: equal to a plain loop, and to an unbroken run where rank 0 is killed in its callbacks."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import trainwright as tw
from tests.support.finished_runs import final_state, told
from trainwright.core import events
from trainwright.core.errors import JobError, UserCodeError

STEPS, EPOCHS, BATCH = 4, 2, 8  # steps of an epoch
ROWS = {"x": np.random.default_rng(0).normal(size=(STEPS * BATCH, 3))}
ROWS["y"] = ROWS["x"].sum(1)
Call = list[Any]  # method, completed steps and epochs, metrics, parameters


class Recorder:
    """Writes each call to a file; dies in some calls, before they are written, each once."""

    def __init__(self, folder: Path, *deaths: tuple[str, int]) -> None:
        self.folder, self.deaths = folder, deaths

    def _record(self, name: str, context: tw.CallbackContext) -> None:
        assert not context.model.training and not torch.is_grad_enabled()
        torch.rand(3)
        mark = self.folder / f"died-{name}-{context.step}"
        if (name, context.step) in self.deaths and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        held = [each.tolist() for each in context.model.parameters()]
        with (self.folder / "calls").open("a") as file:
            file.write(json.dumps([name, context.step, context.epoch, context.metrics, held]) + "\n")

    def after_step(self, context: tw.CallbackContext) -> None:
        self._record("step", context)

    def after_epoch(self, context: tw.CallbackContext) -> None:
        self._record("epoch", context)

    def after_evaluation(self, context: tw.CallbackContext) -> None:
        self._record("evaluation", context)

    def after_recovery(self, context: tw.CallbackContext) -> None:
        self._record("recovery", context)


class Album:
    """Logs an image and a text after each step and evaluation, and writes down each checkpoint; dies in some calls."""

    def __init__(self, folder: Path, *deaths: tuple[str, int]) -> None:
        self.folder, self.deaths = folder, deaths

    def _die(self, name: str, step: int) -> None:
        mark = self.folder / f"died-{name}-{step}"
        if (name, step) in self.deaths and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    def after_step(self, context: tw.CallbackContext) -> None:
        (weight, *_) = context.model.parameters()
        print("step", context.step)
        context.log_image("weight", torch.sigmoid(weight))
        self._die("step", context.step)

    def after_evaluation(self, context: tw.CallbackContext) -> None:
        context.log_text("evaluation", f"{context.metrics['loss']:.12f}")

    def after_checkpoint(self, context: tw.CallbackContext) -> None:
        self._die("checkpoint", context.step)
        net = tw.load_model(job_of(self.folder), step=context.step)
        held = [each.tolist() for each in net.parameters()]
        with (self.folder / "checkpoints").open("a") as file:
            file.write(json.dumps([context.step, Path(context.checkpoint).is_dir(), held]) + "\n")


class Keeper:
    """A tracker that keeps images and texts in a file."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def begin(self, run: Any, params: Any) -> int:
        return 0

    def log(self, rows: Any) -> None:
        pass

    def log_media(self, media: list[events.MediaLogged]) -> None:
        with self.file.open("a") as file:
            file.writelines(json.dumps([each.name, each.step, each.text, each.image.hex()]) + "\n" for each in media)

    def end(self, ending: Any) -> None:
        pass


class Looking:
    """Looks at the model, and then fails."""

    def after_step(self, context: tw.CallbackContext) -> None:
        if context.step == 2:
            raise KeyError(len(list(context.model.parameters())))


def model() -> nn.Module:
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    for parameter in net.parameters():
        parameter.data = torch.linspace(-0.5, 0.7, parameter.numel(), dtype=torch.float64).view_as(parameter)
    return net


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def squared(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (outputs[:, 0] - targets) ** 2


def job(folder: Path, *callbacks: Any, **fields: Any) -> tw.Job:
    folder.mkdir()
    data = tw.datasets.table(ROWS)
    given: dict[str, Any] = {"workers": 2, "callbacks": lambda: list(callbacks), **fields}
    return tw.Job(
        name="called", model=model, optimizer=sgd, loss=squared, train=data, evaluate=data, inputs="x", targets="y",
        batch_size=BATCH, epochs=EPOCHS, shuffle=False, spares=0, keeper_s=0, storage=str(folder / "runs"),
        preflight=False, **given,
    )  # fmt: skip


def job_of(folder: Path) -> tw.Job:
    """The job as its callbacks know it."""
    return tw.Job(name="called", model=model, optimizer=sgd, loss=squared, train=tw.datasets.table(ROWS), inputs="x",
        targets="y", batch_size=BATCH, epochs=EPOCHS, shuffle=False, storage=str(folder / "runs"))  # fmt: skip


def calls(folder: Path) -> list[Call]:
    return [json.loads(line) for line in (folder / "calls").read_text().splitlines()]


def plain_loop() -> list[Call]:
    """What a loop without trainwright would call."""
    net, found = model(), list[Call]()
    optimizer, x, y = sgd(net.parameters()), torch.tensor(ROWS["x"]), torch.tensor(ROWS["y"])
    for step in range(1, STEPS * EPOCHS + 1):
        part = slice((step - 1) % STEPS * BATCH, ((step - 1) % STEPS + 1) * BATCH)
        optimizer.zero_grad()
        loss = squared(net(x[part]), y[part]).mean()
        loss.backward()
        optimizer.step()
        held, metrics = [each.tolist() for each in net.parameters()], {"loss": loss.item(), "learning_rate": 0.1}
        found.append(["step", step, step // STEPS, metrics, held])
        if step % STEPS == 0:
            evaluated = {"loss": squared(net(x), y).mean().item()}
            found += [["epoch", step, step // STEPS, metrics, held]]
            found += [["evaluation", step, step // STEPS, evaluated, held]]
    return found


def assert_close(found: list[Call], expected: list[Call]) -> None:
    assert [call[:3] for call in found] == [call[:3] for call in expected]
    for (*_, metrics, held), (*_, wanted, parameters) in zip(found, expected, strict=True):
        assert metrics == pytest.approx(wanted, rel=1e-12)
        for one, other in zip(held, parameters, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-14)


def test_callbacks_equal_a_plain_loop_and_an_unbroken_run(ray_cluster: None, tmp_path: Path) -> None:
    one, two, killed = (tmp_path / name for name in ("one", "two", "killed"))
    assert tw.fit(job(one, Recorder(one), workers=1)).state == "done"
    assert tw.fit(job(two, Recorder(two))).state == "done"
    deaths = ("step", 3), ("evaluation", 8)
    assert tw.fit(job(killed, Recorder(killed, *deaths))).state == "done"

    assert_close(calls(one), plain_loop())
    assert_close(calls(two), calls(one))
    assert final_state(killed / "runs", "called") == final_state(two / "runs", "called")
    order = [tuple(call[:2]) for call in calls(killed)]
    assert order[2:4] == [("recovery", 3), ("step", 3)], "the call in which rank 0 died is made by the next one"
    assert order[-4:] == [("recovery", 8), ("step", 8), ("epoch", 8), ("evaluation", 8)], "some are made again"
    by_place = {(name, step): call for name, step, *call in calls(killed) if name != "recovery"}
    assert [[*place, *call] for place, call in by_place.items()] == calls(two), "bit by bit"


def test_errors_of_callbacks_end_the_run_at_once(ray_cluster: None, tmp_path: Path) -> None:
    with pytest.raises(UserCodeError, match=r"Looking.after_step\(\) of callbacks= raised KeyError: 4 \(rank 0, after"):
        tw.fit(job(tmp_path / "raising", Looking()))
    assert len(told(tmp_path / "raising" / "runs", "called", events.Formed)) == 1, "it is not tried again"
    with pytest.raises(JobError, match=r"context.model: the plan divides the model.* use tw.load_model"):
        tw.fit(job(tmp_path / "divided", Looking(), strategy="sharded"))


def test_images_texts_and_checkpoints_are_those_of_an_unbroken_run(ray_cluster: None, tmp_path: Path) -> None:
    kept: dict[str, list[Any]] = {}
    for name, deaths in (("two", ()), ("killed", (("step", 3), ("checkpoint", 4), ("checkpoint", 8)))):
        folder = tmp_path / name
        made = job(folder, Album(folder, *deaths), trackers=(Keeper(folder / "kept"),), checkpoint_steps=4)
        assert tw.fit(made).state == "done"
        kept[name] = [json.loads(line) for line in (folder / "kept").read_text().splitlines()]
        saved = [json.loads(line) for line in (folder / "checkpoints").read_text().splitlines()]
        assert {(step, there) for step, there, _ in saved} == {(4, True), (8, True)}
        assert name == "killed" or len(saved) == 2, "each once where nothing fails"
        kept[name].append({step: held for step, _, held in saved})
    assert kept["killed"] == kept["two"]
    assert [tuple(item[:2]) for item in kept["two"][:-1]] == [
        place for step in range(1, 9) for place in [("weight", step), ("evaluation", step)][: 1 + (step % 4 == 0)]
    ]
