"""Students with teachers: whatever the layout, the steps are those of one device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import torch
from torch import nn

from tests.support.conformance import problems, tensorflow_case, torch_case
from tests.support.conformance.attention_model import LAYOUTS, WIDTH, Run, assert_near, bent
from tests.support.conformance.cases import Case
from tests.support.conformance.harness import Pool, World
from tests.support.conformance.keras_cases import ALONE, MIRRORED, PROBLEM
from tests.support.conformance.staged_model import plan, spec, trained
from tests.support.torch_engines import Files
from trainwright.core.soft_loss import Match, SoftLoss
from trainwright.strategies.distillation.distillation_loss import DistillationLoss, student_metrics
from trainwright.strategies.distillation.layer_match import LayerProjection
from trainwright.strategies.distillation.multi_student import StudentModels, unwrap_student
from trainwright.strategies.tensorflow.training.checkpoint_files import take_weights


def small() -> nn.Module:
    """A student that is also the other's teacher."""
    wide = torch.float64
    return nn.Sequential(
        nn.Linear(problems.FEATURES, 3, dtype=wide), nn.Tanh(), nn.Linear(3, problems.CLASSES, dtype=wide)
    )


LOSS = DistillationLoss(
    soft=SoftLoss(alpha=0.3, matches=(Match(student="1", teacher="in", of="big", weight=0.5),), combine="learned"),
    hard=torch_case.cross_entropy,
    targets=("y", "teacher.big", "teacher.big/in"),
    labels=("y",),
    students=("deep", "small"),
    teachers=("big",),
    joint=("small",),
)
CLASS = StudentModels(
    builders={"deep": bent, "small": small},
    loss=LOSS,
    bridges={"deep/match-0": LayerProjection(axis=1, given=WIDTH, wanted=problems.FEATURES)},
)
JOB = spec(CLASS, loss=LOSS, targets=("y", "t", "z"))
CUTS = {"stages": ("students.deep.2.out",), "shards of stages": ("students.deep.2",)}


@pytest.fixture(scope="module")
def alone(pool: Pool) -> Callable[[], Run]:
    """What one device does."""
    return cache(lambda: trained(pool, plan(), JOB))


@pytest.mark.parametrize("layout", ["parallel", "sharded", "stages", "shards of stages"])
def test_a_class_with_bridges_and_learned_weights_is_that_of_one_device(
    pool: Pool, layout: str, alone: Callable[[], Run]
) -> None:
    """Two ranks share 23 samples in four micro-batches each; the layer that is matched lies in the first stage."""
    how = replace(LAYOUTS[layout], cuts=CUTS.get(layout, ()))
    found = trained(pool, how, JOB)
    assert_near(found, alone())
    assert "model.safetensors/weighing" in found[1] and found[1]["model.safetensors/weighing"].any()


def masked(outputs: Any, targets: Any) -> Any:
    return torch_case.weighted(outputs, targets)


def test_weights_of_the_hard_loss_count_for_all_terms(pool: Pool) -> None:
    """One student, bare, with teachers weighted by confidence."""
    loss = DistillationLoss(
        soft=SoftLoss(divergence="jensen_shannon", combine="confidence"),
        hard=masked, targets=("y", "w", "teacher.one", "teacher.two"), labels=("y", "w"), teachers=("one", "two"),
    )  # fmt: skip
    job = spec(bent, loss=loss, targets=("y", "w", "t", "m"))
    found, expected = (trained(pool, how, job) for how in (LAYOUTS["parallel"], plan()))
    assert_near(found, expected)


# --- Keras ------------------------------------------------------------------------------------------------------------


def functional(width: int) -> keras.Model:
    """Two inputs, one hidden layer."""
    inputs = [keras.Input((problems.FEATURES,), dtype="float64", name=name) for name in PROBLEM.inputs]
    joined = keras.layers.Concatenate(dtype="float64")(inputs)
    hidden = keras.layers.Dense(width, activation="tanh", dtype="float64", name="hidden")(joined)
    return keras.Model(inputs, keras.layers.Dense(problems.CLASSES, dtype="float64")(hidden))


class Telling:
    """A teacher that runs in the step: made once a process, outside of what its strategy does."""

    def __init__(self) -> None:
        self.layer = keras.layers.Dense(problems.CLASSES, kernel_initializer="ones", dtype="float64")
        self.layer.build((None, problems.FEATURES))

    def __call__(self, columns: Mapping[str, Any]) -> dict[str, Any]:
        return {"teacher.beside": self.layer(columns["x"])}


@dataclass(frozen=True, kw_only=True)
class Beside:
    """What loads it."""

    name: str = "beside"
    wanted: tuple[str, ...] = ("x",)
    columns: tuple[str, ...] = ("teacher.beside",)

    def identity(self) -> str:
        return "telling"

    def module(self) -> Telling:
        return Telling()


TRAINED = "optimizer/_trainable_variables/"
KERAS = {"wide": partial(functional, problems.FEATURES), "narrow": partial(functional, 3)}


def keras_class(*names: str) -> StudentModels:
    """Of some of them: a layer is matched, which needs a bridge in one, and two teachers' weights are learned."""
    match = Match(student="hidden", teacher="in", of="big", by="cosine")
    loss = DistillationLoss(
        soft=SoftLoss(alpha=0.3, matches=(match,), combine="learned"), hard=tensorflow_case.cross_entropy,
        targets=("y", "teacher.big", "teacher.big/in", "x"), labels=("y",), students=names, teachers=("big",),
        inline={"beside": Beside()},
    )  # fmt: skip
    needed = {"narrow/match-0": LayerProjection(axis=1, given=3, wanted=problems.FEATURES)} if "narrow" in names else {}
    return StudentModels(builders={name: KERAS[name] for name in names}, loss=loss, bridges=needed)


def keras_trained(pool: Pool, case: Case, students: StudentModels) -> tuple[Any, Mapping[str, bytes]]:
    """What is said of the first batch after six steps, and the files."""
    feeds = case.feeds(PROBLEM, 1, range(PROBLEM.steps))
    job = replace(
        tensorflow_case.spec(PROBLEM), model=students, loss=students.loss, targets=("y", "t", "z", "x"),
        metrics=student_metrics({"accuracy": tensorflow_case.accuracy}, students.loss),
    )  # fmt: skip
    with World(pool, "tensorflow", case.plan(PROBLEM, 1), job, reusable=False) as world:
        world.start(feeds[0])
        world.train(feeds)
        (said,) = world.every("predict", lambda rank: (feeds[0][rank],))
        (sums,) = world.every("evaluate", lambda rank: ([feeds[0][rank]],))
        files = world.files()
    assert len(sums.totals) == 1 + len(students.builders)
    return said, files


@pytest.mark.soak
@pytest.mark.parametrize("case", [MIRRORED], ids=lambda case: case.name)
def test_a_class_of_keras_on_two_devices_is_each_alone_on_one(pool: Pool, case: Case) -> None:
    students = keras_class("wide", "narrow")
    said, files = keras_trained(pool, case, students)
    _, others = keras_trained(pool, ALONE, keras_class("wide"))
    ours, theirs = (
        {
            name: value
            for name, value in tensorflow_case.state(each).items()
            if name.startswith((TRAINED, "model/weighing"))
        }
        for each in (files, others)
    )
    assert len(theirs) == 1 + 4 and len(ours) == len(theirs) + 4 + 2
    assert all(np.allclose(ours[name], value, rtol=1e-9, atol=1e-9) for name, value in theirs.items())
    assert all(value.any() for value in ours.values()), "the teachers' weights too"
    reader = Files()
    reader.files.update(files)
    model = students.alone("narrow")()
    take_weights(model, reader)
    data, rows = problems.columns(PROBLEM), problems.rows_of(case.feeds(PROBLEM, 1, range(1))[0][0])
    outputs = unwrap_student(model)([tf.constant(data[name][rows]) for name in PROBLEM.inputs])
    assert np.allclose(outputs, said["narrow"], rtol=1e-9, atol=1e-12)
