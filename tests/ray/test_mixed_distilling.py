"""A teacher of one framework and a student of another in one call; and what cannot be, told before it is trained."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import ray
import torch
from torch import nn
from torch.nn import functional

import trainwright as tw
from tests.support.keras_distillation import (
    ALPHA,
    CLASSES,
    HEAT,
    RATE,
    ROWS,
    STEPS,
    WIDTH,
    keras_linear,
    keras_loss,
    keras_sgd,
)
from trainwright.core.errors import DataError, JobError, RunConflict

pytestmark = pytest.mark.usefixtures("ray_cluster")

Loop = tuple[np.ndarray, np.ndarray]


def kernel(classes: int = CLASSES) -> np.ndarray:
    """Of the teacher, which is linear."""
    return np.random.default_rng(3).normal(size=(WIDTH, classes)).astype(np.float32)


def data() -> dict[str, np.ndarray]:
    x = np.random.default_rng(7).normal(size=(ROWS, WIDTH)).astype(np.float32)
    return {"x": x, "y": x[:, :CLASSES].argmax(1).astype(np.int64)}


def torch_linear(weights: np.ndarray) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        model = nn.Linear(*weights.shape)
        model.load_state_dict({"weight": torch.from_numpy(weights.T.copy()), "bias": torch.zeros(weights.shape[1])})
        return model

    return build


def torch_loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(outputs, targets, reduction="none")


def torch_sgd(parameters: Any) -> Any:
    return torch.optim.SGD(parameters, lr=RATE)


LINEAR: dict[str, Any] = {"torch": torch_linear, "keras": keras_linear}
OWN: dict[str, Any] = {
    "torch": {"loss": torch_loss, "optimizer": torch_sgd},
    "keras": {"loss": keras_loss, "optimizer": keras_sgd},
}


def distillation(
    folder: Path, way: Any, student: str, teacher: str, *, classes: int = CLASSES, soft: Any = None, **about: Any
) -> tw.Distillation:
    """Steps of all rows at once, from a student that says nothing."""
    job = tw.Job(
        name=f"student-{way}", model=LINEAR[student](np.zeros((WIDTH, CLASSES), np.float32)), inputs="x", targets="y",
        train=tw.datasets.table(data()), batch_size=ROWS, epochs=STEPS, workers=1, storage=str(folder), spares=0,
        preflight=False,  # of Keras it takes seconds in a process that has used TensorFlow
        **OWN[student],
    )  # fmt: skip
    big = tw.Teacher(name="big", **{"model": LINEAR[teacher](kernel(classes)), "inputs": "x", **about})
    loss = soft or tw.SoftLoss(alpha=ALPHA, temperature=HEAT)
    return tw.Distillation(student=job, teachers=(big,), loss=loss, way=way, keep="fp32", cpus=0.5)


def softmax(logits: np.ndarray) -> np.ndarray:
    shares = np.exp(logits - logits.max(1, keepdims=True))
    return shares / shares.sum(1, keepdims=True)


def by_hand() -> Loop:
    """The student after all steps."""
    x, y = data()["x"].astype(np.float64), np.eye(CLASSES)[data()["y"]]
    said = softmax(x @ kernel() / HEAT)
    weights, bias = np.zeros((WIDTH, CLASSES)), np.zeros(CLASSES)
    for _ in range(STEPS):
        logits = x @ weights + bias
        slope = ALPHA * (softmax(logits) - y) + (1 - ALPHA) * HEAT * (softmax(logits / HEAT) - said)
        weights, bias = weights - RATE * x.T @ slope / ROWS, bias - RATE * slope.mean(0)
    return weights, bias


def held(run: tw.Run, framework: str) -> Loop:
    """A run's student."""
    model = run.load_model()
    if framework == "torch":
        return model.weight.detach().numpy().T, model.bias.detach().numpy()
    weights, bias = model.get_weights()
    return weights, bias


def test_a_worker_that_holds_both_frameworks_loads_torchs_compiler() -> None:
    """Workers of the tests' cluster have imported the torch engines, then TensorFlow; triton comes last."""

    @ray.remote(num_cpus=0, max_retries=0)
    def load() -> bool:
        import tensorflow  # noqa: F401
        import torch._dynamo.utils  # noqa: F401

        return "triton._C.libtriton" in sys.modules

    assert ray.get(load.remote()), "triton was not loaded, and so could not crash"


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # Keras' own, of its variables
@pytest.mark.parametrize(
    ("student", "teacher", "ways"),
    [pytest.param("torch", "keras", ("online",), marks=pytest.mark.soak), ("keras", "torch", ("offline", "online"))],
)
def test_a_student_learns_from_a_teacher_of_another_framework(
    student: str, teacher: str, ways: tuple[str, ...], tmp_path: Path
) -> None:
    """The fourth of these, a torch student of what a Keras teacher stored, is in tests/ray/test_soft_targets.py."""
    for way in ways:
        run = tw.distill(distillation(tmp_path, way, student, teacher))
        for found, expected in zip(held(run, student), by_hand(), strict=True):
            np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5, err_msg=way)
    if "offline" in ways:
        _stored_of_another(distillation(tmp_path, "offline", student, teacher), tmp_path / "targets")


def _stored_of_another(taught: tw.Distillation, targets: Path) -> None:
    """Kept targets of another teacher or data set, and those that lack rows, are refused with what differs."""
    (folder,) = targets.glob("big-*")
    manifest, (part,) = folder / "_PREDICTIONS.json", folder.glob("part-*")
    kept = manifest.read_text()
    for field, line in (
        ("checkpoint_sha256", "checkpoint_sha256: 0{12} -> "),
        ("data_sha256", "data_sha256: 0{12} -> "),
    ):
        manifest.write_text(json.dumps({**json.loads(kept), field: "0" * 64}))
        with pytest.raises(RunConflict, match=line):
            tw.distill(taught, fresh=True)
    manifest.write_text(kept)
    pq.write_table(pq.read_table(part).slice(1), part)
    with pytest.raises(DataError, match="the part has 199 of 200 rows"):
        tw.distill(taught, fresh=True)


@pytest.mark.parametrize("way", ["offline", "online", "inline"])
def test_other_classes_are_refused_before_a_teacher_is_asked(way: str, tmp_path: Path) -> None:
    with pytest.raises(JobError, match="teacher 'big' has 5 classes, student 'student' has 4"):
        tw.distill(distillation(tmp_path, way, "torch", "torch", classes=5))
    assert not any(tmp_path.iterdir())


class Tokens(nn.Module):
    """A language model of a few words."""

    def __init__(self, words: int) -> None:
        super().__init__()
        self.table = nn.Embedding(16, words)
        nn.init.zeros_(self.table.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.table(x)


def test_another_vocabulary_is_refused_before_a_teacher_is_asked(tmp_path: Path) -> None:
    taught = distillation(tmp_path, "offline", "torch", "torch", soft=tw.SoftLoss(kind="language_model"))
    rows = tw.datasets.table({"x": np.zeros((8, 5), np.int64), "y": np.zeros((8, 5), np.int64)})
    student = taught.student.replace(model=lambda: Tokens(7), train=rows)
    teachers = (tw.Teacher(name="big", model=lambda: Tokens(9), inputs="x"),)
    with pytest.raises(JobError, match="teacher 'big' has 9 words in the vocabulary, student 'student' has 7"):
        tw.distill(taught.replace(student=student, teachers=teachers))
    assert not any(tmp_path.iterdir())


def test_a_teacher_in_the_step_of_another_framework_is_refused(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="'big' is a model of Keras and cannot run in the step of a student of torch"):
        tw.distill(distillation(tmp_path, "inline", "torch", "keras"))
    assert not any(tmp_path.iterdir())


def shares() -> Any:
    import keras

    given = keras.Input((WIDTH,))
    return keras.Model(given, keras.layers.Dense(CLASSES, "softmax", kernel_initializer="ones")(given))


@pytest.mark.parametrize("way", ["offline", "online", "inline"])
def test_probabilities_are_refused_before_a_step(way: str, tmp_path: Path) -> None:
    with pytest.raises(JobError, match="the teacher's outputs are probabilities and no logits"):
        tw.distill(distillation(tmp_path, way, "keras", "keras", model=shares))
    assert not (tmp_path / f"student-{way}").exists()
