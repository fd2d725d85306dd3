"""Classes of students: each is as it would be alone, in training, in files, in plans, with teachers that run beside."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import torch
from torch import Tensor, nn

import trainwright as tw
from tests.support import torch_engines
from tests.support.torch_jobs import F1
from tests.support.torch_profile import profile_model
from trainwright.core.data import Batch, Feed
from trainwright.core.errors import JobError, NonFiniteLoss
from trainwright.core.soft_loss import Match, SoftLoss
from trainwright.strategies.distillation.distillation_loss import DistillationLoss, student_metrics, tensor_ops_for
from trainwright.strategies.distillation.multi_student import StudentModels, unwrap_student
from trainwright.strategies.torch.checkpoint.safetensors_files import take_weights
from trainwright.strategies.torch.model_files import export

WIDE = torch.float64
TARGETS = ("y", "teacher.big", "teacher.big/middle")


def student(width: int = 8) -> nn.Module:
    return nn.Sequential(nn.Linear(4, width, dtype=WIDE), nn.Tanh(), nn.Linear(width, 3, dtype=WIDE))


BUILDERS: dict[str, Callable[[], Any]] = {"wide": student, "narrow": partial(student, 5)}


def batch(first: int = 0, rows: int = 12) -> Batch:
    random = np.random.default_rng(100 + first)
    told = {"teacher.big": random.normal(size=(rows, 3)), "teacher.big/middle": random.normal(size=(rows, 8))}
    return torch_engines.batch(rows, first, np.float64, **told)


def feeds() -> list[Feed]:
    return [torch_engines.feed(batch(12 * step), step=step) for step in range(4)]


def distilled(**fields: Any) -> DistillationLoss:
    given = {"soft": SoftLoss(alpha=0.3), "hard": torch_engines.loss, "targets": TARGETS, "labels": ("y",),
             "students": (*BUILDERS,), "teachers": ("big",)}  # fmt: skip
    return DistillationLoss(**{**given, **fields})


def matching() -> StudentModels:
    """With a layer to match, for which one of them needs a bridge."""
    loss = distilled(soft=SoftLoss(alpha=0.3, matches=(Match(student="1", teacher="middle"),)))
    return StudentModels(builders=BUILDERS, loss=loss).fitted(batch().columns, ("x",))


def trained(model: Any, loss: Any, how: Any = None, **fields: Any) -> Any:
    """An engine after four steps."""
    job = torch_engines.spec(model=model, loss=loss, targets=TARGETS, **fields)
    engine = torch_engines.one_device(job, how)
    for each in feeds():
        engine.train_step(each)
    return engine


def state(engine: Any) -> dict[str, Tensor]:
    return dict(engine.snapshot().state.model)


# --- torch ------------------------------------------------------------------------------------------------------------


def test_each_student_of_a_class_is_as_if_it_were_alone() -> None:
    """From the same start, though they are built one after the other."""
    together = state(trained(StudentModels(builders=BUILDERS, loss=distilled()), distilled()))
    for name, build in BUILDERS.items():
        alone = state(trained(build, distilled(students=(name,))))
        for key, value in alone.items():
            assert torch.allclose(together[f"students.{name}.{key}"], value, rtol=1e-12, atol=1e-14), key


def test_mutual_learning_is_a_plain_loop() -> None:
    loss = distilled(mutual=True, teachers=())
    found = state(trained(StudentModels(builders=BUILDERS, loss=loss), loss))
    torch.manual_seed(0)
    engine = torch_engines.one_device(
        torch_engines.spec(model=StudentModels(builders=BUILDERS, loss=loss), loss=loss, targets=TARGETS)
    )
    models = {name: build() for name, build in BUILDERS.items()}
    for name, model in models.items():
        begun = state(engine)
        model.load_state_dict({key: begun[f"students.{name}.{key}"].clone() for key in model.state_dict()})
    rules = {name: torch_engines.adam(model.parameters()) for name, model in models.items()}
    for each in feeds():
        columns = {name: torch.from_numpy(np.array(value)) for name, value in each.parts[0][0].columns.items()}
        said = {name: model(columns["x"]) for name, model in models.items()}
        for name, other in (("wide", "narrow"), ("narrow", "wide")):
            mine, theirs = (said[name] / 2).log_softmax(-1), (said[other].detach() / 2).log_softmax(-1)
            soft = nn.functional.kl_div(mine, theirs, reduction="none", log_target=True).sum(-1)
            value = (0.3 * torch_engines.loss(said[name], columns["y"]) + 0.7 * 4 * soft).mean()
            rules[name].zero_grad()
            value.backward()
            rules[name].step()
    for name, model in models.items():
        for key, value in model.state_dict().items():
            assert torch.allclose(found[f"students.{name}.{key}"], value, rtol=1e-10, atol=1e-12), key


def test_one_student_of_a_class_is_judged_and_taken_out_of_its_files(tmp_path: Any) -> None:
    students = matching()
    with pytest.raises(JobError, match="metric 'f1' has state"):
        student_metrics({"f1": F1}, students.loss)
    metrics = student_metrics({"accuracy": torch_engines.accuracy}, students.loss)
    engine = trained(students, students.loss, metrics=metrics)
    files, given = torch_engines.saved(engine), feeds()[0]
    sums = engine.evaluate_step(given).means()
    for name, build in BUILDERS.items():
        job = torch_engines.spec(
            model=students.alone(name), loss=torch_engines.loss, metrics={"accuracy": torch_engines.accuracy}
        )
        again = torch_engines.one_device(job)
        again.load(files)
        assert again.evaluate_step(given).means()["accuracy"] == sums[f"{name}/accuracy"]
        assert np.array_equal(again.predict_step(given)["output"], engine.predict_step(given)[name])
        model = students.alone(name)()
        take_weights(model, files)
        export(unwrap_student(model), str(tmp_path / f"{name}.pt"), torch_engines.spec())
        build().load_state_dict(torch.load(tmp_path / f"{name}.pt"))
    assert isinstance(unwrap_student(student()), nn.Sequential)


@pytest.mark.parametrize("change", [{"recompute": "full"}, {"accumulation": 3}])
def test_layers_that_are_matched_survive_how_steps_are_made(change: dict[str, Any]) -> None:
    """What backward computes again is not heard of."""
    students = matching()
    expected = state(trained(students, students.loss))
    found = state(trained(students, students.loss, torch_engines.plan(**change)))
    assert all(torch.allclose(found[key], value, rtol=1e-12) for key, value in expected.items())


def test_a_class_is_compiled_and_copied_as_one_module() -> None:
    model = matching()()
    given = torch.ones(2, 4, dtype=WIDE)
    compiled = torch.compile(model, fullgraph=True, backend="eager")(given)
    for outputs in (compiled, copy.deepcopy(model)(given)):
        assert outputs.keys() == {"wide", "narrow", "wide/match-0", "narrow/match-0"}
        assert all(torch.equal(outputs[name], value) for name, value in model(given).items())


def test_a_class_is_planned_like_any_model() -> None:
    students, sample = matching(), batch().columns
    profile = profile_model(students, sample, ("x",))
    assert not profile.untraced and sum(layer.parameters for layer in profile.layers) == 4 * 13 + 13 + 3 * 13 + 6 + 48
    data = tw.datasets.table({name: np.array(column) for name, column in sample.items()})
    job = tw.Job(
        name="class", model=students, loss=students.loss, optimizer=torch_engines.adam, train=data, inputs="x",
        targets=TARGETS, batch_size=6,
    )  # fmt: skip
    found = tw.plan(job, cluster="2xL4").chosen.plan
    assert found.strategy in ("one_device", "data_parallel")


def test_layers_that_are_not_there_are_refused() -> None:
    def asked(**fields: Any) -> StudentModels:
        loss = distilled(soft=SoftLoss(matches=(Match(**{"student": "1", "teacher": "middle", **fields}),)))
        return StudentModels(builders=BUILDERS, loss=loss).fitted(batch().columns, ("x",))

    with pytest.raises(JobError, match="no layer 'first': valid names: 0, 1, 2"):
        asked(student="first")
    with pytest.raises(JobError, match="item '1' of the layer is not a tensor: it gives one tensor"):
        asked(student="1:1")
    with pytest.raises(JobError, match=r"no column 'teacher\.big/midle'"):
        asked(teacher="midle")
    with pytest.raises(JobError, match="builders are of wide, the loss of wide, narrow"):
        StudentModels(builders={"wide": student}, loss=distilled())


def test_students_with_names_of_torchs_own_are_refused() -> None:
    with pytest.raises(JobError, match="named 'half', which torch's modules have a use for"):
        StudentModels(builders={"half": student, "wide": student}, loss=distilled(students=("half", "wide")))()
    with pytest.raises(JobError, match="no student 'wid': did you mean 'wide'"):
        matching().alone("wid")


def test_a_teacher_that_is_not_finite_is_named() -> None:
    loss = distilled(targets=("y", "teacher.big"), students=("wide",))
    engine = torch_engines.one_device(torch_engines.spec(model=student, loss=loss, targets=("y", "teacher.big")))
    bad = batch()
    bad.columns["teacher.big"][[3, 5], 1] = np.nan
    with pytest.raises(NonFiniteLoss, match=r"in samples 3, 5 ") as caught:
        engine.train_step(torch_engines.feed(bad))
    assert "correct the source of 'teacher.big', which is not finite there" in str(caught.value)


class Deaf(nn.Sequential):
    """Does not run its last layer."""

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self[1](self[0](inputs))
        return outputs


def test_a_layer_that_does_not_run_is_told() -> None:
    loss = distilled(students=("deaf",), soft=SoftLoss(matches=(Match(student="2", teacher="middle"),)))
    deaf = StudentModels(builders={"deaf": lambda: Deaf(*student())}, loss=loss)
    with pytest.raises(JobError, match="'deaf/match-0': the model did not run that layer"):
        deaf.fitted(batch().columns, ("x",))


class Dropping(nn.Module):
    """A teacher, which would draw at random in training."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(4, 3, dtype=WIDE), nn.Dropout(0.5))

    def forward(self, columns: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {"teacher.big": self.model(columns["x"])}


@dataclass(frozen=True, kw_only=True)
class Beside:
    """A teacher that runs in the step; notes how often it is loaded."""

    make: Callable[[], Any]
    name: str = "big"
    wanted: tuple[str, ...] = ("x",)
    columns: tuple[str, ...] = ("teacher.big",)
    loads: list[int] = field(default_factory=list)

    def identity(self) -> str:
        return f"{id(self)}"

    def module(self) -> Any:
        self.loads.append(1)
        return self.make()


def test_a_teacher_in_the_step_says_what_its_column_says() -> None:
    torch.manual_seed(5)
    teacher = Dropping().eval().requires_grad_(False)
    beside = Beside(make=lambda: copy.deepcopy(teacher))
    loss = distilled(targets=("y", "x"), teachers=(), inline={"big": beside}, students=("wide",))
    job = torch_engines.spec(model=student, loss=loss, targets=("y", "x"))
    engine = torch_engines.one_device(job)
    stored = distilled(targets=("y", "teacher.big"), students=("wide",))
    other = torch_engines.one_device(torch_engines.spec(model=student, loss=stored, targets=("y", "told")))
    for each in feeds():
        (given,) = each.parts[0]
        told = teacher({"x": torch.from_numpy(np.array(given.columns["x"]))})["teacher.big"].numpy()
        reports = [
            engine.train_step(each),
            other.train_step(replace(each, parts=((replace(given, columns={**given.columns, "told": told}),),))),
        ]
        assert reports[0] == reports[1]
    assert len(beside.loads) == 1
    assert all(torch.equal(value, state(other)[key]) for key, value in state(engine).items())


# --- Keras ------------------------------------------------------------------------------------------------------------


def keras_loss(outputs: tf.Tensor, targets: tf.Tensor) -> tf.Tensor:
    return tf.nn.sparse_softmax_cross_entropy_with_logits(targets, outputs)


def test_keras_students_without_variables_are_refused() -> None:
    def late() -> keras.Model:
        return keras.Sequential([keras.layers.Dense(3)])

    loss = distilled(hard=keras_loss)
    with pytest.raises(JobError, match="'wide' has no variables yet"):
        StudentModels(builders={"wide": late, "narrow": late}, loss=loss)()


@pytest.mark.parametrize(
    ("policy", "kind"), [("float16", "float32"), ("mixed_float16", "float32"), ("float64", "float64")]
)
def test_learned_weights_of_keras_are_not_rounded_to_half_precision(policy: str, kind: str) -> None:
    def small() -> keras.Model:
        return keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, dtype=policy)])

    soft = SoftLoss(alpha=0.3, combine="learned")
    loss = DistillationLoss(
        soft=soft, hard=keras_loss, targets=("y", "teacher.a", "teacher.b"), labels=("y",), teachers=("a", "b")
    )
    model = StudentModels(builders={"student": small}, loss=loss)()
    said = model(tf.zeros((5, 4), policy.removeprefix("mixed_")))["teachers"]
    assert model.weighing.dtype == kind and said.dtype == kind and said.shape == (5, 2)


@dataclass(frozen=True)
class Again:
    """A teacher in the step, with whatever weights."""

    weights: str
    name: str = "again"

    def identity(self) -> str:
        return self.weights

    def module(self) -> Any:
        return nn.Identity()


@pytest.mark.parametrize("like", [torch.zeros(1), tf.zeros(1)], ids=["torch", "keras"])
def test_a_teacher_in_the_step_makes_room_for_the_next_of_its_name(like: Any) -> None:
    ops = tensor_ops_for(like)
    held = importlib.import_module(ops.answers.__module__)._loaded
    for weights in ("old", "new"):
        ops.answers(Again(weights), {}, like)
    assert [key[1] for key in held if key[0] == "again"] == ["new"]
