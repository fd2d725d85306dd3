"""Teachers of both frameworks in one process: arrays in and out, layers by name, weights from anywhere."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import cloudpickle
import keras
import numpy as np
import pytest
import tensorflow as tf
import torch
from torch import nn

import trainwright as tw
from tests.support.conformance import tensorflow_case, torch_case
from tests.support.prediction_jobs import columns_of, job, train
from tests.support.torch_engines import Net, spec
from trainwright.core.errors import CheckpointError, JobError
from trainwright.core.events import Evaluated
from trainwright.core.soft_loss import SoftLoss
from trainwright.distillation import teacher_runner
from trainwright.distillation.distillation_spec import Teacher
from trainwright.distillation.teacher_runner import TeacherRunner, load_teacher
from trainwright.storage.event_files import append_event
from trainwright.storage.object_store import open_store
from trainwright.strategies.distillation.distillation_loss import DistillationLoss
from trainwright.strategies.tensorflow.training import checkpoint_files as keras_files
from trainwright.strategies.torch import model_files

Columns = Mapping[str, Any]


def rows(count: int = 21) -> dict[str, Any]:
    return {"id": np.arange(count), "x": np.random.default_rng(6).normal(size=(count, 4)).astype(np.float32)}


def seeded(seed: int = 5) -> nn.Module:
    torch.manual_seed(seed)
    return Net().requires_grad_(False)


def keras_model() -> keras.Model:
    given = keras.Input((4,), name="given")
    inner = keras.layers.Dense(6, activation="tanh", name="inner")(given)
    return keras.Model(given, keras.layers.Dense(3, name="head")(inner))


class Several(Net):
    """Several outputs, one of them logits; a layer that gives a tuple."""

    def __init__(self) -> None:
        super().__init__(middle=Pair)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden, turned = self.middle(self.first(x))
        return {"logits": self.second(hidden), "extra": turned}


class Pair(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x.tanh(), -x


def exported(model: Any, folder: Path, name: str) -> str:
    path = str(folder / name)
    (model_files if isinstance(model, nn.Module) else keras_files).export(model, path, spec())
    return path


def torch_hidden(model: nn.Module) -> Any:
    with torch.no_grad():
        given = torch.from_numpy(rows()["x"])
        return model(given).numpy(), model.middle(model.first(given)).numpy()


def test_a_run_speaks_with_its_layers_in_any_process_and_in_a_loss(tmp_path: Path) -> None:
    chosen = job(tmp_path)
    model = train(chosen, 3, columns_of)
    teacher = Teacher(name="big", job=chosen, layers=("middle",), batch_size=8)
    assert teacher.columns == ("teacher.big", "teacher.big/middle") and teacher.wanted == ("x",)
    runner = load_teacher(teacher)
    output, hidden = torch_hidden(model)
    found = cloudpickle.loads(cloudpickle.dumps(runner))(rows())
    assert list(found) == ["id", "x", *teacher.columns]
    np.testing.assert_allclose(found["teacher.big"], output, atol=1e-6)
    np.testing.assert_allclose(found["teacher.big/middle"], hidden, atol=1e-6)
    alone = load_teacher(Teacher(name="big", job=chosen)).teach(rows())
    np.testing.assert_allclose(alone["teacher.big"], output, atol=1e-6)
    drawn = torch.random.get_rng_state()
    inside = runner.module().train()
    assert torch.equal(torch.random.get_rng_state(), drawn)
    told = inside({"x": torch.from_numpy(rows()["x"]).requires_grad_(), "other": torch.zeros(1)})
    assert not any(value.requires_grad for value in (*told.values(), *inside.parameters())) and not inside.training
    np.testing.assert_allclose(told["teacher.big/middle"].numpy(), hidden, atol=1e-6)
    # The newest checkpoint is another teacher; what was loaded stays what it was.
    train(chosen, 5, columns_of)
    assert load_teacher(teacher).sha256 != runner.sha256 == load_teacher(Teacher(name="big", job=chosen, step=3)).sha256
    np.testing.assert_array_equal(runner.teach(rows())["teacher.big"], found["teacher.big"])
    assert np.abs(load_teacher(teacher).teach(rows())["teacher.big"] - output).max() > 1e-4


def test_the_best_checkpoint_of_a_run_can_teach(tmp_path: Path) -> None:
    chosen = job(tmp_path, best="-loss", evaluate=job(tmp_path).train)
    for steps in (3, 5):
        train(chosen, steps, columns_of)
        append_event(open_store(chosen.storage), chosen.name, Evaluated(step=steps, metrics={"loss": float(steps)}))
    best, third, newest = (load_teacher(Teacher(name="big", job=chosen, step=step)) for step in ("best", 3, None))
    assert best.sha256 == third.sha256 != newest.sha256
    with pytest.raises(JobError, match='step="best" needs best= in job='):
        Teacher(name="big", job=job(tmp_path), step="best")


@pytest.mark.parametrize("name", ["w.safetensors", "w.pt", ""])
def test_any_torch_module_teaches_with_the_weights_of_a_file_or_its_own(name: str, tmp_path: Path) -> None:
    weights = exported(seeded(), tmp_path, name) if name else None
    teacher = Teacher(name="t", model=Net if name else seeded, weights=weights, inputs={"x": "x"})
    np.testing.assert_allclose(load_teacher(teacher).teach(rows())["teacher.t"], torch_hidden(seeded())[0], atol=1e-6)
    other = Teacher(name="t", model=lambda: seeded(6), inputs="x")
    assert load_teacher(teacher).sha256 != load_teacher(other).sha256


class Subclassed(keras.Model):  # type: ignore[misc]
    """Its layers are called by code of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = keras.layers.Dense(6, activation="tanh", name="inner")
        self.head = keras.layers.Dense(3, name="head")
        self(np.zeros((1, 4), np.float32))

    def call(self, given: Any) -> Any:
        return self.head(self.inner(given))


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # Keras' own, of its variables
@pytest.mark.parametrize(
    ("build", "name"), [(keras_model, "w.keras"), (keras_model, "w.weights.h5"), (Subclassed, "w.weights.h5")],
    ids=["whole", "functional", "subclassed"],
)  # fmt: skip
def test_a_keras_model_teaches_with_its_layers(build: Callable[[], Any], name: str, tmp_path: Path) -> None:
    model = build()
    weights = exported(model, tmp_path, name)
    teacher = Teacher(name="k", model=build, weights=weights, inputs="x", layers=("inner",))
    hidden = np.tanh(rows()["x"] @ model.get_layer("inner").kernel.numpy())
    for found in (load_teacher(teacher).teach(rows()), load_teacher(teacher).module()({"x": rows()["x"]})):
        np.testing.assert_allclose(found["teacher.k"], np.asarray(model(rows()["x"])), atol=1e-5)
        np.testing.assert_allclose(found["teacher.k/inner"], hidden, atol=1e-5)


def test_logits_are_taken_of_probabilities_that_are_said_to_be(tmp_path: Path) -> None:
    def softmaxed() -> nn.Module:
        return nn.Sequential(seeded(), nn.Softmax(dim=-1))

    def sigmoids() -> nn.Module:
        return nn.Sequential(seeded(), nn.Sigmoid())

    logits = torch.from_numpy(torch_hidden(seeded())[0])
    told = Teacher(name="t", model=softmaxed, inputs="x", probabilities=True)
    np.testing.assert_allclose(load_teacher(told).teach(rows())["teacher.t"], logits.log_softmax(-1).numpy(), atol=1e-5)
    each = Teacher(name="t", model=sigmoids, inputs="x", probabilities="sigmoid")
    np.testing.assert_allclose(load_teacher(each).teach(rows())["teacher.t"], logits.numpy(), atol=1e-5)
    for speak in (
        lambda one: load_teacher(one).teach(rows()),
        lambda one: load_teacher(one).module()({"x": torch.from_numpy(rows()["x"])}),
    ):
        with pytest.raises(JobError, match="outputs are probabilities and no logits") as caught:
            speak(Teacher(name="t", model=softmaxed, inputs="x"))
        assert "Teacher(probabilities=True)" in str(caught.value)
        with pytest.raises(JobError, match="are not probabilities, 1 in sum"):
            speak(Teacher(name="t", model=seeded, inputs="x", probabilities=True))


def several() -> nn.Module:
    torch.manual_seed(1)
    return Several()


def test_outputs_and_items_of_layers_are_chosen_by_name() -> None:
    teacher = Teacher(name="t", model=several, inputs="x", layers=("middle", "middle:1", "first"))
    found = load_teacher(teacher).teach(rows())
    np.testing.assert_allclose(found["teacher.t/middle:1"], -found["teacher.t/first"], atol=1e-6)
    np.testing.assert_allclose(found["teacher.t/middle"], np.tanh(found["teacher.t/first"]), atol=1e-6)
    assert found["teacher.t"].shape == (21, 3)
    extra = load_teacher(Teacher(name="t", model=several, inputs="x", output="extra")).teach(rows())
    np.testing.assert_allclose(extra["teacher.t"], found["teacher.t/middle:1"], atol=1e-6)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "nobody": ({}, "give job= .* or model= with inputs="),
    "nameless": ({"name": "a b", "model": Net, "inputs": "x"}, "the teacher is named 'a b'"),
    "blind": ({"model": Net}, "inputs= is missing"),
    "stepped": ({"model": Net, "inputs": "x", "step": 3}, "step= is for job="),
    "unknown": ({"model": Net, "inputs": "x", "layer": "x"}, "did you mean 'layers'"),
    "twice": ({"model": Net, "inputs": "x", "layers": ("first", "first")}, "names one twice"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_no_teacher_is_refused_at_once(name: str) -> None:
    fields, message = WRONG[name]
    with pytest.raises(JobError, match=message):
        Teacher(**{"name": "t", **fields})


LATE: dict[str, tuple[Callable[[str], dict[str, Any]], str]] = {
    "random": (lambda path: {"model": Net}, "model\\(\\) has other weights each time"),
    "absent": (lambda path: {"model": Net, "weights": path + "-none.pt"}, "file of weights cannot be read: No such"),
    "misfit": (
        lambda path: {"model": Several, "weights": path, "layers": ("none",)},
        "no layer 'none': valid names: f",
    ),
    "foreign": (lambda path: {"model": lambda: nn.Linear(4, 3), "weights": path}, "the weights do not fit the model"),
    "item": (
        lambda path: {"model": Several, "weights": path, "layers": ("middle:7",)},
        "item '7' of the layer is not a ",
    ),
    "output": (lambda path: {"model": Several, "weights": path, "output": "logit"}, "did you mean 'logits'"),
    "keras": (lambda path: {"model": keras_model, "weights": path}, "the weights do not fit the model"),
}


@pytest.mark.parametrize("name", LATE)
def test_what_does_not_fit_is_told_when_it_is_loaded(name: str, tmp_path: Path) -> None:
    make, message = LATE[name]
    path = exported(seeded(), tmp_path, "w.safetensors")
    with pytest.raises((JobError, CheckpointError), match=message):
        load_teacher(Teacher(**{"name": "t", "inputs": "x", **make(path)})).teach(rows())


def test_a_file_that_changed_since_is_refused_and_a_model_is_built_once(tmp_path: Path) -> None:
    built: list[int] = []

    def counted() -> nn.Module:
        built.append(1)
        return Net()

    path = exported(seeded(), tmp_path, "w.pt")
    runner = load_teacher(Teacher(name="t", model=counted, weights=path, inputs="x"))
    first: Columns = runner.teach(rows())
    count = len(built)
    again = TeacherRunner(teacher=runner.teacher, sha256=runner.sha256).teach(rows())
    np.testing.assert_array_equal(first["teacher.t"], again["teacher.t"])
    assert len(built) == count
    teacher_runner._open.clear()
    exported(seeded(7), tmp_path, "w.pt")
    with pytest.raises(CheckpointError, match="has changed since it was first read"):
        runner.teach(rows())


def test_a_lecturer_is_a_heavy_transform() -> None:
    data = tw.datasets.table(rows()).map_batches(load_teacher(Teacher(name="t", model=seeded, inputs="x")), cpus=1)
    found = data.read(data.index(), [3, 1])
    np.testing.assert_allclose(found["teacher.t"], torch_hidden(seeded())[0][[3, 1]], atol=1e-6)


BUILT: list[str] = []


def counted_torch() -> nn.Module:
    BUILT.append("torch")
    return seeded()


def counted_keras() -> keras.Model:
    BUILT.append("keras")
    keras.utils.set_random_seed(5)
    return keras_model()


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # Keras' own, of its variables
@pytest.mark.parametrize("framework", ["torch", "keras"])
def test_a_loss_runs_teachers_in_the_step_as_if_their_columns_were_there(framework: str) -> None:
    """They go to workers with the loss, and each is opened once in a process, also where two have the same weights."""
    model, hard, tensor = {
        "torch": (counted_torch, torch_case.cross_entropy, torch.from_numpy),
        "keras": (counted_keras, tensorflow_case.cross_entropy, tf.constant),
    }[framework]
    inline = {name: load_teacher(Teacher(name=name, model=model, inputs="x")) for name in ("one", "two")}
    data, labels = rows(), tensor(np.arange(21) % 3)
    columns = {f"teacher.{name}": tensor(one.teach(data)[f"teacher.{name}"]) for name, one in inline.items()}
    soft, outputs = SoftLoss(alpha=0.3), tensor(np.random.default_rng(8).normal(size=(21, 3)).astype(np.float32))
    stored = DistillationLoss(soft=soft, hard=hard, targets=("y", *columns), labels=("y",), teachers=tuple(inline))
    expected = np.asarray(stored(outputs, (labels, *columns.values())))
    BUILT.clear()
    loss = DistillationLoss(soft=soft, hard=hard, targets=("y", "x"), labels=("y",), inline=inline)
    for each in (loss, cloudpickle.loads(cloudpickle.dumps(loss))):
        np.testing.assert_allclose(np.asarray(each(outputs, (labels, tensor(data["x"])))), expected, atol=1e-5)
    assert len(BUILT) == 2
    # The same weights asked for more are another teacher.
    assert (
        inline["one"].identity() != load_teacher(Teacher(name="one", model=model, inputs="x", layers=("i",))).identity()
    )
