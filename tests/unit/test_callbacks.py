"""Callbacks of torch jobs: what they are given, when the worker of rank 0 calls them, and what is refused."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import trainwright as tw
from tests.support.driver_harness import Story, progressed
from tests.support.planner_cases import PROFILE, decide
from tests.support.scripted_engine import FIRST, PEER, ScriptedEngine, join, scripted_worker
from tests.support.torch_engines import feed, one_device, spec
from tests.support.work_orders import table_job
from trainwright.core import events
from trainwright.core.callbacks import Callbacks
from trainwright.core.data import Feed, MetricSums, StepReport
from trainwright.core.engine import CheckpointRef
from trainwright.core.errors import JobError, PeerLost, PlanError, UserCodeError
from trainwright.core.topology import Group, StateTag
from trainwright.driver import messages as m
from trainwright.driver.messages import EvaluateRequest, RestorePlan, RunRequest
from trainwright.storage.event_log import EventLog
from trainwright.storage.object_store import open_store
from trainwright.worker.worker import Worker

Call = tuple[str, int, int, dict[str, float]]
calls: list[Call] = []


class Recorder:
    def after_step(self, context: tw.CallbackContext) -> None:
        calls.append(("step", context.step, context.epoch, context.metrics))

    def after_epoch(self, context: tw.CallbackContext) -> None:
        calls.append(("epoch", context.step, context.epoch, context.metrics))

    def after_evaluation(self, context: tw.CallbackContext) -> None:
        calls.append(("evaluation", context.step, context.epoch, context.metrics))

    def after_checkpoint(self, context: tw.CallbackContext) -> None:
        assert context.checkpoint.endswith(f"/checkpoints/{context.step}")
        calls.append(("checkpoint", context.step, context.epoch, context.metrics))

    def after_recovery(self, context: tw.CallbackContext) -> None:
        calls.append(("recovery", context.step, context.epoch, context.metrics))


class Shown:
    """A model that is shown: whether it is, and how often it was."""

    def __init__(self) -> None:
        self.now, self.times = False, 0

    @contextmanager
    def show(self) -> Iterator[Shown]:
        self.now, self.times = True, self.times + 1
        try:
            yield self
        finally:
            self.now = False


def report(step: int, **fields: Any) -> StepReport:
    return StepReport(step=step, loss=float(step), weight=1.0, learning_rate=0.1, **fields)


def test_a_callback_gets_the_values_of_the_step_and_the_model_for_the_time_of_the_call() -> None:
    model, seen = Shown(), list[Any]()

    class Looking:
        def after_step(self, context: tw.CallbackContext) -> None:
            if context.step > 1:
                seen.append((context.metrics, context.model.now, context.model is model))

    callbacks = Callbacks(lambda: [Looking(), Looking()], model.show, 2, print)
    callbacks.after_step(report(1))
    assert model.times == 0, "a model that nobody looks at is not shown"
    callbacks.after_step(report(2, gradient_norm=3.0, logged=MetricSums(totals={"kl": (4.0, 2.0)})))
    assert seen == [({"loss": 2.0, "learning_rate": 0.1, "kl": 2.0, "gradient_norm": 3.0}, True, True)] * 2
    assert (model.now, model.times) == (False, 1)


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (None, "returned a NoneType: return a list of objects"),
        ([object()], "returned a object, which has none of the methods that are called: give it one of after_step("),
        ([Recorder], "returned the class Recorder: return objects, Recorder()"),
    ],
)
def test_what_is_no_callback_is_refused(made: Any, words: str) -> None:
    with pytest.raises(JobError) as caught:
        Callbacks(lambda: made, Shown().show, 1, print)
    assert words in str(caught.value)


def test_errors_say_which_callback_and_step() -> None:
    class Failing:
        def after_step(self, context: tw.CallbackContext) -> None:
            raise ValueError("no disk")

    with pytest.raises(UserCodeError) as caught:
        Callbacks(lambda: [Failing()], Shown().show, 1, print).after_step(report(7))
    text = str(caught.value)
    assert "Failing.after_step() of callbacks= raised ValueError: no disk (rank 0, after step 7)" in text
    assert "resume=True" in text and 'raise ValueError("no disk")' in caught.value.detail
    with pytest.raises(UserCodeError, match=r"callbacks\(\) raised ZeroDivisionError"):
        Callbacks(lambda: [1 // 0], Shown().show, 1, print)


def test_the_model_of_a_checkpoint_is_not_the_one_that_goes_on() -> None:
    class Looking:
        def after_checkpoint(self, context: tw.CallbackContext) -> None:
            assert context.checkpoint == "runs/demo/checkpoints/4" and not context.metrics
            _ = context.model

    callbacks = Callbacks(lambda: [Looking()], Shown().show, 2, print)
    assert callbacks.announces
    with pytest.raises(JobError, match=r"training went on.*use tw.load_model\(job, step=context.step\)"):
        callbacks.after_checkpoint(4, "runs/demo/checkpoints/4")


# --- images and texts -------------------------------------------------------------------------------------------------


def logged(log: Callable[[tw.CallbackContext], object]) -> list[events.MediaLogged]:
    """What a callback logs after step 3."""
    found: list[events.MediaLogged] = []

    class Logging:
        def after_step(self, context: tw.CallbackContext) -> None:
            log(context)

    callbacks = Callbacks(lambda: [Logging()], Shown().show, 2, found.append)
    assert not callbacks.announces
    callbacks.after_step(report(3))
    return found


RED = np.zeros((2, 3, 3), np.uint8)
RED[:, :, 0] = 255


def figure() -> Any:
    from matplotlib.figure import Figure

    return Figure(figsize=(0.03, 0.02), dpi=100, facecolor="red")


@pytest.mark.parametrize(
    "image",
    [
        RED, RED / 255, RED.tolist(), torch.tensor(RED), torch.tensor(RED).permute(2, 0, 1).to(torch.bfloat16) / 255,
        np.dstack([RED, np.full((2, 3), 255, np.uint8)]), Image.fromarray(RED), figure(),
    ],
    ids=["uint8", "float", "list", "tensor", "channels first", "alpha", "pillow", "matplotlib"],
)  # fmt: skip
def test_an_image_becomes_the_same_png_from_whatever_it_is(image: Any) -> None:
    image = np.array(image, np.uint8) if isinstance(image, list) else image
    (event,) = logged(lambda context: context.log_image("red", image))
    assert (event.step, event.name, event.width, event.height) == (3, "red", 3, 2)
    shown = np.asarray(Image.open(io.BytesIO(event.image)).convert("RGB"))
    assert np.array_equal(shown, RED)
    (again,) = logged(lambda context: context.log_image("red", event.image))
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(again.image)).convert("RGB")), RED)


def test_one_channel_is_grey_and_truth_is_white() -> None:
    mask = np.array([[True, False, True]] * 2)
    grey = mask * np.uint8(255)
    for event in logged(lambda context: (context.log_image("a", grey), context.log_image("b", mask))):
        assert np.array_equal(np.asarray(Image.open(io.BytesIO(event.image))), grey)


@pytest.mark.parametrize(
    ("log", "words"),
    [
        (lambda c: c.log_image("x", np.zeros((4, 2, 3, 3))), r"ndarray of shape \(4, 2, 3, 3\) is not an image: give"),
        (lambda c: c.log_image("x", None), "NoneType is not an image"),
        (lambda c: c.log_image("x", np.zeros((0, 2))), r"shape \(0, 2\) is not an image"),
        (lambda c: c.log_image("x", RED * 2.0), "floats from 0 to 510: give floats from 0 to 1, or uint8"),
        (lambda c: c.log_image("x", np.full((2, 2), np.nan)), "floats from nan to nan"),
        (lambda c: c.log_image("x", RED.astype(np.int64)), "numbers are int64: give uint8"),
        (lambda c: c.log_image("x", b"GIF"), "not an image file that Pillow can read"),
        (lambda c: c.log_image("x", NOISE), "2000 x 2000 pixels, 11.* MiB as PNG, more than 4 MiB"),
        (lambda c: c.log_text("x", 5), "give a str, not int"),
        (lambda c: c.log_text(5, "x"), "take a name of letters first, not 5"),
        (lambda c: c.log_image(" ", RED), "take a name of letters first, not ' '"),
        (lambda c: c.log_text("x", "x" * 100_001), "100,001 characters are more than 100,000"),
        (lambda c: (c.log_text("x", "a"), c.log_text("x", "b")), "'x' is logged twice after step 3"),
    ],
)  # fmt: skip
def test_what_cannot_be_logged_is_said(log: Any, words: str) -> None:
    with pytest.raises(JobError, match=words):
        logged(log)


NOISE = np.random.default_rng(0).integers(0, 256, (2000, 2000, 3), np.uint8)


def test_a_text_has_no_secret_and_no_half_of_a_character(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "s3cr3t-value")
    (event,) = logged(lambda context: context.log_text("said", "key s3cr3t-value \udc80"))
    assert event.text == "key *** ?"


def test_the_log_of_events_keeps_the_name_alone(tmp_path: Path) -> None:
    heard: list[Any] = []
    with EventLog(open_store(str(tmp_path)), "demo") as log:
        log.listen(SimpleNamespace(on=heard.append, close=lambda: None))
        for event in logged(lambda context: (context.log_image("red", RED), context.log_text("said", "words"))):
            log.write(event)
        late: list[Any] = []
        log.listen(SimpleNamespace(on=late.append, close=lambda: None))
        assert [(event.name, event.image, event.text) for event in late] == [("red", b"", ""), ("said", b"", "")]
        assert heard[0].image and heard[1].text == "words"
        assert "bytes" not in heard[0].kept.to_json() and '"width":3' in heard[0].kept.to_json()


def test_the_model_is_shown_as_evaluations_see_it() -> None:
    average = tw.WeightAverage(decay=0.5)
    engine = one_device(spec(weight_average=average, total_steps=12, epochs=4))
    for step in range(3):
        engine.train_step(feed(step=step))
    trained = {name: value.clone() for name, value in engine.replica.model.state_dict().items()}
    with engine.whole_model() as model:
        assert model is engine.replica.model and not model.training and not torch.is_grad_enabled()
        assert any(not torch.equal(value, trained[name]) for name, value in model.state_dict().items())
    assert model.training and all(torch.equal(value, trained[name]) for name, value in model.state_dict().items())


def test_parameter_servers_and_the_steps_of_tensorflow_refuse_them() -> None:
    with pytest.raises(PlanError, match="its servers do not have callbacks="):
        decide(callbacks=list, strategy="parameter_server", workers=2)
    with pytest.raises(PlanError, match=r'callbacks= is for torch models.*run="fit" takes Keras'):
        decide(profile=replace(PROFILE, framework="tensorflow"), callbacks=list)


# --- the worker -------------------------------------------------------------------------------------------------------


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Worker:
    """A worker of a job of 3 epochs of 2 steps, with an evaluation set, before it joins."""
    calls.clear()
    monkeypatch.setattr(ScriptedEngine, "capabilities", replace(ScriptedEngine.capabilities, torch_training=True))
    monkeypatch.setattr(ScriptedEngine, "train_step", lambda engine, feed: report(feed.step + 1), raising=False)
    monkeypatch.setattr(ScriptedEngine, "evaluate_step", evaluated, raising=False)
    rows = tw.datasets.table({"x": np.zeros((2, 2), np.float32), "y": np.zeros(2, np.int64)})
    job = table_job(epochs=3, evaluate=rows, callbacks=lambda: [Recorder()])
    worker = scripted_worker(monkeypatch, job)
    vars(worker)["_job"] = job  # the one that was not pickled, whose callbacks write into this module
    return worker


def evaluated(engine: object, feed: Feed, states: object) -> MetricSums:
    return MetricSums(totals={"loss": (4.0, 2.0)})


def form(worker: Worker, rank: int) -> StateTag:
    return worker.form(Group(generation=FIRST, rank=rank, peers=tuple(replace(PEER, rank=each) for each in range(2))))


def names() -> list[tuple[str, int]]:
    return [(name, step) for name, step, *_ in calls]


def test_rank_0_calls_them_after_steps_epochs_and_evaluations(worker: Worker) -> None:
    join(worker)
    worker.restore(RestorePlan(step=0, source="initial"))
    assert calls == []
    worker.run(RunRequest(steps=range(3)))
    assert names() == [("step", 1), ("step", 2), ("epoch", 2), ("step", 3)]
    assert [epoch for _, _, epoch, _ in calls] == [0, 1, 1, 1]
    sums = worker.evaluate(EvaluateRequest(step=3))
    assert sums.awaited and (sums + MetricSums()).awaited and len(calls) == 4
    done = worker.evaluate(EvaluateRequest(step=3, evaluated=sums + sums))
    assert not done.awaited and calls[-1] == ("evaluation", 3, 1, {"loss": 2.0}) == (*calls[-1][:3], done.means())


def test_a_new_rank_0_calls_for_the_step_that_the_lost_one_may_not_have_called_for(worker: Worker) -> None:
    join(worker, rank=1, size=2)
    worker.restore(RestorePlan(step=0, source="initial"))
    worker.run(RunRequest(steps=range(2)))
    assert not worker.evaluate(EvaluateRequest(step=2)).awaited
    assert calls == [], "another rank calls nothing"
    tag = form(worker, 0)
    assert tag.report is not None and tag.report.step == 2
    worker.restore(RestorePlan(step=2, source="replica", report=tag.report))
    assert names() == [("recovery", 2), ("step", 2), ("epoch", 2)]
    worker.run(RunRequest(steps=range(2, 4)))
    worker.restore(RestorePlan(step=4, source="replica", report=form(worker, 0).report))
    assert names()[3:] == [("step", 3), ("step", 4), ("epoch", 4), ("recovery", 4)], "it has called for step 4"
    worker.restore(RestorePlan(step=3, source="replica"))
    worker.run(RunRequest(steps=range(3, 4)))
    assert names()[7:] == [("recovery", 3), ("step", 4), ("epoch", 4)], "a step that is done again calls again"


def test_they_are_told_once_of_each_checkpoint_at_the_next_steps_or_at_the_end(worker: Worker) -> None:
    join(worker)
    worker.restore(RestorePlan(step=0, source="initial"))
    two, four = (CheckpointRef(step=step, path=f"checkpoints/{step}", manifest_sha256="") for step in (2, 4))
    assert worker.run(RunRequest(steps=range(2))).announces
    worker.run(RunRequest(steps=range(2, 3), checkpoints=(two,)))
    worker.run(RunRequest(steps=range(3, 4), checkpoints=(two,)))
    worker.run(RunRequest(steps=range(4, 4), checkpoints=(two, four)))
    found = [call for call in names() if call[0] != "epoch"]
    assert found == [("step", 1), ("step", 2), ("checkpoint", 2), ("step", 3), ("step", 4), ("checkpoint", 4)]


# --- the driver -------------------------------------------------------------------------------------------------------


def test_the_driver_gives_rank_0_the_metrics_of_all_ranks_and_the_report_of_a_survivor() -> None:
    story = Story(evaluate_steps=8).running().segment(8).snapshot(8)
    part = MetricSums(totals={"loss": (3.0, 1.0)})
    story.returns("evaluate", replace(part, awaited=True), part)
    (call,) = story.calls("evaluate")
    assert call.worker == 0 and call.argument.evaluated.totals == {"loss": (6.0, 2.0)}
    assert story.emitted(events.Evaluated) == []
    story.returns("evaluate", MetricSums(totals={"loss": (6.0, 2.0)}), workers=[0])
    assert story.emitted(events.Evaluated)[0].metrics == {"loss": 3.0}

    for told, passed in ((report(2), report(2)), (report(3), None)):
        story = Story().up().start().formed(StateTag(step=None), StateTag(step=2, report=told))
        assert [restore_plan.argument.report for restore_plan in story.calls("restore")] == [passed] * 2


def asked(story: Story) -> tuple[range, list[int]]:
    """The steps of the last call, and those of the checkpoints that it names."""
    call = story.calls("run")[0].argument
    return call.steps, [ref.step for ref in call.checkpoints]


def test_the_driver_tells_of_a_checkpoint_until_rank_0_has_gone_on_and_of_the_last_one_at_the_end() -> None:
    story = Story(workers=1, checkpoint_steps=4, total_steps=12).running()
    report = m.SegmentReport(step=0, announces=True)
    assert asked(story) == (range(4), [])
    story.returns("run", replace(report, step=4)).snapshot(4)
    assert asked(story) == (range(4, 8), []), "it is being written"
    story.committed(4).returns("run", replace(report, step=8)).snapshot(8)
    assert asked(story) == (range(8, 12), [4])
    progressed(story, 9).committed(8).returns("run", replace(report, step=12)).snapshot(12)
    story.committed(12)
    assert asked(story) == (range(12, 12), [12]), "the run is over but for that"
    story.returns("run", replace(report, step=12))
    assert [end.outcome for end in story.all(m.ReleaseLease)] == ["done"]


def test_a_checkpoint_is_named_again_where_the_call_was_lost() -> None:
    story = Story(checkpoint_steps=4, total_steps=8).running()
    report = m.SegmentReport(step=4, announces=True)
    story.returns("run", report).snapshot(4).committed(4)
    story.returns("run", replace(report, step=8)).snapshot(8).committed(8)
    assert asked(story) == (range(8, 8), [8])
    story.tell(m.WorkerDied(worker=0, cause="killed"))
    story.raises(1, "run", "peer", PeerLost("connection closed"))
    story.start().formed(StateTag(step=None), StateTag(step=8)).returns("restore", StateTag(step=8))
    assert asked(story) == (range(8, 8), [8])
    story.returns("run", replace(report, step=8))
    assert [end.outcome for end in story.all(m.ReleaseLease)] == ["done"]
