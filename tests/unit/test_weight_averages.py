"""Averages of weights (EMA and SWA) of the torch engines: as in a plain loop, evaluated, saved and loaded."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import pytorch_optimizer
import torch
from torch.optim.swa_utils import AveragedModel

import trainwright as tw
from tests.support.planner_cases import PROFILE, decide
from tests.support.torch_engines import feed, one_device, saved, spec
from trainwright.core.errors import JobError, PlanError
from trainwright.planning.profiler import profile_job
from trainwright.strategies.torch.checkpoint.safetensors_files import load_weights, take_weights

EMA = tw.WeightAverage(decay=0.9)
STEADY = tw.WeightAverage(decay=0.9, warmup=False)
LATE = tw.WeightAverage(
    decay=0.2, start=2, every=2
)  # of epochs of three steps; its warm-up ends with the second update
SWA = tw.WeightAverage(decay=None, start=1, every=3)


def trained(engine: Any, first: int = 0, last: int = 12) -> Any:
    for step in range(first, last):
        engine.train_step(feed(step=step))
    return engine


def job(average: tw.WeightAverage | None) -> Any:
    return spec(weight_average=average, total_steps=12, epochs=4)


def plain(average: tw.WeightAverage) -> dict[str, torch.Tensor]:
    """The average by torch's own class, beside the same training without one."""
    engine = one_device(job(None))
    begin, mean = average.start * 3, None

    def rule(old: torch.Tensor, new: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        decay = min(average.decay or 0.0, (1 + int(count)) / (10 + int(count)) if average.warmup else 1.0)
        return old * decay + new * (1 - decay)

    for step in range(13):
        if step == begin:
            mean = AveragedModel(engine.replica.model, avg_fn=None if average.decay is None else rule)
            mean.update_parameters(engine.replica.model)
        elif mean is not None and (step - begin) % average.every == 0:
            mean.update_parameters(engine.replica.model)
        if step < 12:
            engine.train_step(feed(step=step))
    assert mean is not None
    return {name: value.detach() for name, value in mean.module.named_parameters()}


@pytest.mark.parametrize("average", [EMA, STEADY, LATE, SWA], ids=["ema", "steady", "late", "swa"])
def test_an_average_is_that_of_torch_and_goes_on_bit_by_bit(average: tw.WeightAverage) -> None:
    unbroken = trained(one_device(job(average)))
    files = saved(unbroken)
    expected = plain(average)
    for name, value in load_weights(files).items():
        torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-7)
    for middle in (2, 7, 8):
        stopped = trained(one_device(job(average)), last=middle)
        assert "average" in json.loads(saved(stopped).files["state.json"])["files"] or middle < average.start * 3
        for resumed in (loaded(average, saved(stopped)), restored(average, stopped.snapshot())):
            assert saved(trained(resumed, first=middle)).files == files.files


def loaded(average: tw.WeightAverage | None, files: Any) -> Any:
    engine = one_device(job(average))
    engine.load(files)
    return engine


def restored(average: tw.WeightAverage, copy: Any) -> Any:
    engine = one_device(job(average))
    engine.restore(copy)
    return engine


def test_it_is_evaluated_and_predicted_with_in_place_of_the_parameters_which_stay() -> None:
    engine = trained(one_device(job(EMA)))
    files, outputs = saved(engine), engine.predict_step(feed())
    sums = engine.evaluate_step(feed())
    assert saved(engine).files == files.files
    files.weights_only = True  # as inference reads them
    for alone in (loaded(None, files), loaded(EMA, files)):
        assert alone.evaluate_step(feed()) == sums
        assert all((alone.predict_step(feed())[name] == value).all() for name, value in outputs.items())
    raw = trained(one_device(job(None)))
    assert raw.evaluate_step(feed()) != sums


class Tied(torch.nn.Module):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.again = torch.nn.Linear(4, 3), torch.nn.Linear(4, 3)
        self.again.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x) + self.again(x)


def test_a_parameter_with_two_names_is_loaded_with_its_average() -> None:
    how = replace(job(EMA), model=Tied)
    engine, model = trained(one_device(how)), Tied()
    files = saved(engine)
    take_weights(model, files)
    with engine.replica.averaged():
        assert all(map(torch.equal, model.state_dict().values(), engine.replica.model.state_dict().values()))
    files.weights_only = True  # as inference reads them
    alone = one_device(how)
    alone.load(files)
    assert alone.evaluate_step(feed()) == engine.evaluate_step(feed())


def test_before_it_begins_and_without_one_in_the_checkpoint_the_parameters_count() -> None:
    early, never = trained(one_device(job(SWA)), last=2), trained(one_device(job(None)), last=2)
    assert saved(early).files == saved(never).files
    assert early.evaluate_step(feed()) == never.evaluate_step(feed())
    resumed = loaded(EMA, saved(never))
    assert resumed.evaluate_step(feed()) == never.evaluate_step(feed())


def test_the_first_weights_do_not_last_in_a_short_run() -> None:
    def first(average: tw.WeightAverage) -> float:
        return math.prod(1 - average.share(step, 100) for step in range(1, 501))

    assert first(tw.WeightAverage()) < 1e-9
    assert first(tw.WeightAverage(warmup=False)) == pytest.approx(0.999**500)


@pytest.mark.parametrize(
    ("given", "words"), [({"decay": 1.0}, "less than 1"), ({"start": -1}, "epochs"), ({"every": 0}, "1 or more")]
)
def test_averages_that_make_no_sense(given: dict[str, Any], words: str) -> None:
    with pytest.raises(JobError, match=words):
        tw.WeightAverage(**given)


def test_an_optimizer_with_an_average_of_its_own_is_refused() -> None:
    with pytest.raises(JobError, match=r"made ScheduleFreeAdamW, whose eval\(\) and train\(\) exchange the parameters"):
        one_device(spec(optimizer=pytorch_optimizer.ScheduleFreeAdamW))


def numbered(outputs: Any, targets: Any, *, step: int) -> Any:
    return outputs


def test_parameter_servers_and_keras_refuse_it_and_a_loss_that_takes_the_step() -> None:
    with pytest.raises(PlanError, match="its servers do not have weight_average="):
        decide(weight_average=EMA, strategy="parameter_server", workers=2)
    with pytest.raises(PlanError, match="weight_average= is for torch models"):
        decide(profile=replace(PROFILE, framework="tensorflow"), weight_average=EMA)
    with pytest.raises(PlanError, match="the argument step= of loss= is for torch models"):
        decide(profile=replace(PROFILE, framework="tensorflow"), loss=numbered)
    with pytest.raises(PlanError, match="its servers do not have the argument step= of loss="):
        decide(loss=numbered, strategy="parameter_server", workers=2)


def test_the_planner_counts_its_copies() -> None:
    rows = tw.datasets.table({"x": np.ones((8, 3), np.float32), "y": np.ones(8, np.float32)})
    fields: dict[str, Any] = {
        "name": "averaged", "model": lambda: torch.nn.Linear(3, 1), "loss": torch.nn.functional.mse_loss, "inputs": "x",
        "targets": "y", "train": rows, "optimizer": torch.optim.SGD, "batch_size": 4,
    }  # fmt: skip
    found = [profile_job(tw.Job(**fields, weight_average=each), rows, rows.index()) for each in (None, EMA)]
    assert [each.weight_copies for each in found] == [0, 2]
