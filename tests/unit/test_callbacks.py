"""Callbacks of torch jobs: what they are given, when the worker of rank 0 calls them, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import trainwright as tw
from tests.support.driver_harness import Story
from tests.support.planner_cases import PROFILE, decide
from tests.support.scripted_engine import FIRST, PEER, ScriptedEngine, join, scripted_worker
from tests.support.torch_engines import feed, one_device, spec
from tests.support.work_orders import table_job
from trainwright.core import events
from trainwright.core.callbacks import Callbacks
from trainwright.core.data import Feed, MetricSums, StepReport
from trainwright.core.errors import JobError, PlanError, UserCodeError
from trainwright.core.topology import Group, StateTag
from trainwright.driver.messages import EvaluateRequest, RestorePlan, RunRequest
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

    callbacks = Callbacks(lambda: [Looking(), Looking()], model.show, 2)
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
        Callbacks(lambda: made, Shown().show, 1)
    assert words in str(caught.value)


def test_errors_say_which_callback_and_step() -> None:
    class Failing:
        def after_step(self, context: tw.CallbackContext) -> None:
            raise ValueError("no disk")

    with pytest.raises(UserCodeError) as caught:
        Callbacks(lambda: [Failing()], Shown().show, 1).after_step(report(7))
    text = str(caught.value)
    assert "Failing.after_step() of callbacks= raised ValueError: no disk (rank 0, after step 7)" in text
    assert "resume=True" in text and 'raise ValueError("no disk")' in caught.value.detail
    with pytest.raises(UserCodeError, match=r"callbacks\(\) raised ZeroDivisionError"):
        Callbacks(lambda: [1 // 0], Shown().show, 1)


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
    worker.heal(RestorePlan(step=0, source="initial"))
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
    worker.heal(RestorePlan(step=0, source="initial"))
    worker.run(RunRequest(steps=range(2)))
    assert not worker.evaluate(EvaluateRequest(step=2)).awaited
    assert calls == [], "another rank calls nothing"
    tag = form(worker, 0)
    assert tag.report is not None and tag.report.step == 2
    worker.heal(RestorePlan(step=2, source="replica", report=tag.report))
    assert names() == [("recovery", 2), ("step", 2), ("epoch", 2)]
    worker.run(RunRequest(steps=range(2, 4)))
    worker.heal(RestorePlan(step=4, source="replica", report=form(worker, 0).report))
    assert names()[3:] == [("step", 3), ("step", 4), ("epoch", 4), ("recovery", 4)], "it has called for step 4"
    worker.heal(RestorePlan(step=3, source="replica"))
    worker.run(RunRequest(steps=range(3, 4)))
    assert names()[7:] == [("recovery", 3), ("step", 4), ("epoch", 4)], "a step that is done again calls again"


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
        assert [heal.argument.report for heal in story.calls("heal")] == [passed] * 2
