"""What is said of students beside their teachers, against values computed by hand and by torch."""

from __future__ import annotations

import copy
import importlib
import math
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import trainwright as tw
from tests.support.finished_runs import told
from trainwright.core import events
from trainwright.core.data import Batch, Terms
from trainwright.core.engine import ModelSpec
from trainwright.core.errors import CheckpointError
from trainwright.distillation.distillation_spec import Teacher
from trainwright.distillation.distilled_run import evaluate_finished
from trainwright.distillation.student_evaluation import (
    ALL_TEACHERS,
    AgreementMetrics,
    ClassificationMetrics,
    EvaluatedModel,
    RegressionMetrics,
    SoftTargetMatrix,
    StudentEvaluation,
    ensemble_outputs,
    labelled_outputs,
    labels_of,
    log_softmax,
)
from trainwright.reporting.html.run_report import verdict_html
from trainwright.reporting.scorecard import ModelScore, Scorecard, StudentTeacherScore, retained_share
from trainwright.storage.object_store import open_store
from trainwright.strategies.distillation.distillation_loss import DistillationLoss

ROWS, CLASSES = 37, 5
RNG = np.random.default_rng(3)
STUDENT, TEACHER = RNG.normal(size=(2, ROWS, CLASSES)) * 2
LABELS = RNG.integers(0, CLASSES, ROWS)
ONES = np.ones(ROWS)


def test_scores_of_classes_are_those_of_torch() -> None:
    tally, accord = ClassificationMetrics(), AgreementMetrics(values=False)
    for part in (slice(0, 20), slice(20, ROWS)):  # sums, never means of means
        own = labelled_outputs("classification", STUDENT[part], LABELS[part], ONES[part])
        theirs = labelled_outputs("classification", TEACHER[part], LABELS[part], ONES[part])
        tally.add(own)
        accord.add(own, theirs)
    own, theirs, labels = (torch.tensor(each) for each in (STUDENT, TEACHER, LABELS))
    nll = float(functional.cross_entropy(own, labels))
    apart = functional.kl_div(own.log_softmax(1), theirs.log_softmax(1), log_target=True, reduction="batchmean")
    scores = tally.scores()
    assert scores["NLL"] == pytest.approx(nll, abs=1e-12)
    assert scores["top-1"] == float((own.argmax(1) == labels).double().mean())
    assert accord.scores()["KL"] == pytest.approx(float(apart), abs=1e-12)
    assert accord.scores()["agreement"] == float((own.argmax(1) == theirs.argmax(1)).double().mean())


def test_calibration_by_hand() -> None:
    """Four samples: 0.9 sure and right twice of three; 0.6 sure and right."""
    chances = np.log([[0.9, 0.1], [0.9, 0.1], [0.1, 0.9], [0.6, 0.4]])
    tally = ClassificationMetrics()
    tally.add(labelled_outputs("classification", chances, np.array([0, 1, 1, 0]), np.ones(4)))
    assert tally.scores()["ECE"] == pytest.approx((3 * abs(0.9 - 2 / 3) + abs(0.6 - 1)) / 4)
    np.testing.assert_allclose(tally.reliability(), [[0.6, 1.0, 0.25], [0.9, 2 / 3, 0.75]])


def test_what_has_no_weight_does_not_count() -> None:
    said, labels, weights = STUDENT.copy(), LABELS.copy(), ONES.copy()
    said[3], weights[3] = np.nan, 0.0
    tally, without = ClassificationMetrics(), ClassificationMetrics()
    tally.add(labelled_outputs("classification", np.nan_to_num(said), labels, weights))
    kept = np.arange(ROWS) != 3
    without.add(labelled_outputs("classification", STUDENT[kept], LABELS[kept], ONES[kept]))
    assert tally.scores() == pytest.approx(without.scores()) and tally.weight == ROWS - 1


def test_classes_that_a_teacher_masks_cost_nothing() -> None:
    masked = TEACHER.copy()
    masked[:, 0] = -np.inf
    accord = AgreementMetrics(values=False)
    accord.add(*(labelled_outputs("classification", each, None, ONES) for each in (STUDENT, masked)))
    chances = np.exp(log_softmax(masked))[:, 1:]
    expected = (chances * (np.log(chances) - log_softmax(STUDENT)[:, 1:])).sum(1).mean()
    assert accord.scores()["KL"] == pytest.approx(expected)


def test_labels_of_each_kind() -> None:
    """Next tokens where the loss is of one less; a mask; an index to be ignored; shares of classes; labels."""
    said = RNG.normal(size=(3, 4, CLASSES))
    tokens = RNG.integers(0, CLASSES, (3, 4))
    mask = np.array([[1.0, 1, 0], [1, 0, 0], [1, 1, 1]])
    labels, weights, kept = labels_of("language_model", said, [tokens, np.ones(3)], Terms(mask, mask))
    assert kept == 3 and weights.tolist() == mask.tolist()
    assert (labels == tokens[:, 1:])[mask > 0].all()  # type: ignore[index]
    ignored = np.where(np.arange(ROWS) % 2, LABELS, -100)
    labels, weights, _ = labels_of("classification", STUDENT, [ignored], None)
    assert weights.tolist() == (np.arange(ROWS) % 2).tolist() and labels is not None and labels.min() >= 0
    shares = np.eye(CLASSES)[LABELS]
    labels, _, _ = labels_of("classification", STUDENT, [np.ones((ROWS, 2)), shares], None)
    assert labels is not None and (labels == LABELS).all()
    labels, _, _ = labels_of("multi_label", STUDENT, [shares], None)
    units = labelled_outputs("multi_label", STUDENT, labels, ONES)
    expected = functional.binary_cross_entropy_with_logits(torch.tensor(STUDENT), torch.tensor(shares))
    tally = ClassificationMetrics()
    tally.add(units)
    assert tally.scores()["NLL"] == pytest.approx(float(expected)) and tally.weight == ROWS * CLASSES
    assert labels_of("classification", STUDENT, [], None)[0] is None


def test_values_are_judged_by_their_errors() -> None:
    truth = RNG.normal(size=(ROWS, 2))
    said, others = truth + 0.5, truth - 0.5
    residue, accord = RegressionMetrics(), AgreementMetrics(values=True)
    for part in (slice(0, 10), slice(10, ROWS)):
        own, theirs = (labelled_outputs("regression", each[part], truth[part], ONES[part]) for each in (said, others))
        residue.add(own)
        accord.add(own, theirs)
    spread = ((truth - truth.mean(0)) ** 2).sum()
    assert residue.scores() == pytest.approx({"RMSE": 0.5, "R2": 1 - (0.25 * truth.size) / spread})
    assert accord.scores() == pytest.approx({"RMSE between": 1.0})


@pytest.mark.parametrize("labelled", [True, False])
@pytest.mark.parametrize("kind", ["classification", "multi_label", "regression"])
def test_several_teachers_together_say_the_mean_of_their_chances_or_values(kind: str, labelled: bool) -> None:
    shape = (ROWS,) if kind == "classification" else STUDENT.shape
    units = {name: labelled_outputs(kind, each, np.zeros(shape) if labelled else None, ONES) for name, each in
             {"a": STUDENT, "b": TEACHER}.items()}  # fmt: skip
    mixed = ensemble_outputs(kind, units, {"a": 0.25, "b": 0.75})
    if kind == "regression":
        np.testing.assert_allclose(mixed.chances, 0.25 * STUDENT + 0.75 * TEACHER)
    else:
        chances = {name: np.exp(each.chances) for name, each in units.items()}
        np.testing.assert_allclose(np.exp(mixed.chances), 0.25 * chances["a"] + 0.75 * chances["b"])
    assert mixed.columns == units["a"].columns == (CLASSES if kind == "multi_label" else 1)
    assert mixed.labels is units["a"].labels and mixed.weights is units["a"].weights


@pytest.mark.parametrize("classes", [CLASSES, 1000])
def test_the_picture_shows_the_mean_chances_of_the_commonest_classes(classes: int) -> None:
    said = RNG.normal(size=(400, classes))
    labels = RNG.integers(0, min(classes, 15), 400)
    picture = SoftTargetMatrix(classes, labels)
    for part in (slice(0, 100), slice(100, 400)):
        picture.add(log_softmax(said[part]), labels[part], np.ones(len(said[part])))
    shown, means = picture.shown(), np.array(picture.means())
    assert shown == sorted(set(labels.tolist()))
    chances = np.exp(log_softmax(said))
    expected = np.stack([chances[labels == each].mean(0)[shown] for each in shown])
    np.testing.assert_allclose(means, expected)
    most, share = picture.commonest()
    assert share == np.bincount(labels).max() / 400 and np.bincount(labels)[most] == np.bincount(labels).max()


def verdict(own: float = 0.8, theirs: float = 0.9, **fields: Any) -> Scorecard:
    soft = [[0.7, 0.3], [0.2, 0.8]]
    student = ModelScore(
        name="<small>", student=True, scores={"top-1": own, "NLL": 0.5, "ECE": 0.02}, metrics={"loss": 0.5},
        parameters=100, size_bytes=400, latency_s={"1": 1e-4, "64": 1e-3}, soft=soft, reliability=[[0.9, 0.8, 1.0]],
    )  # fmt: skip
    big = ModelScore(name="big", student=False, scores={"top-1": theirs}, parameters=1000, size_bytes=4000, soft=soft)
    pair = StudentTeacherScore(
        student="<small>", teacher="big", scores={"agreement": 0.75, "KL": 0.1}, kept=retained_share(own, theirs)
    )
    own_fields = {"classes": [0, 1], "commonest": [1.0, 0.5], "marks": [student, big], "pairs": [pair]}
    return Scorecard(kind="classification", step=3, rows=10, of_rows=10, units=10.0, **{**own_fields, **fields})


def test_the_verdict_is_told_in_plain_words() -> None:
    (kept,) = verdict().sentences()
    assert "keeps 88.9% of the top-1 of big (0.8000 of 0.9000), with 10.0% of its parameters" in kept
    assert "their predictions agree on 75.0%" in kept
    (better,) = verdict(own=0.95).sentences()
    assert "<small> is better than big" in better
    poor = verdict(own=0.4).sentences()
    assert "no better than always predicting class 1, which is right for 50.0%" in poor[1]
    assert "no labels" in verdict(own=math.nan).sentences()[0]
    assert "big (teacher)" in str(verdict()) and "10 rows" in str(verdict())


def test_a_verdict_comes_back_from_its_facts() -> None:
    assert Scorecard.read(verdict().facts()) == verdict()


def test_the_report_has_its_tables_and_pictures() -> None:
    page = verdict_html(verdict().facts())
    assert "<small>" not in page and "&lt;small&gt;" in page
    assert page.count('aria-label="soft targets') == 2 and 'aria-label="reliability"' in page
    assert page.count(">30<") >= 1 and "88.9%" in page


def test_values_have_neither_classes_nor_calibration() -> None:
    marks = [ModelScore(name="s", student=True, scores={"RMSE": 1.0, "R2": -0.1}), ModelScore(name="t", student=False,
             scores={"RMSE": 0.5, "R2": 0.7})]  # fmt: skip
    pairs = [
        StudentTeacherScore(student="s", teacher="t", scores={"RMSE between": 0.3}, kept=retained_share(-0.1, 0.7))
    ]
    found = Scorecard(kind="regression", step=1, rows=5, of_rows=9, units=5.0, marks=marks, pairs=pairs)
    assert "keeps nothing of t: R2 -0.1000 against 0.7000" in found.sentences()[0]
    page = verdict_html(found.facts())
    assert "Calibration" not in page and "5 of 9 rows" in page


def heard(kind: str, student: Teacher, teachers: list[Teacher], job: tw.Job) -> Scorecard:
    """What is said of models that no run trained."""
    names = tuple(each.name for each in teachers)
    loss = DistillationLoss(
        soft=tw.SoftLoss(kind=kind), hard=job.loss,  # type: ignore[arg-type]
        targets=(*job.target_names, *(f"teacher.{name}" for name in names)),
        labels=job.target_names, students=(student.name,), teachers=names,
    )  # fmt: skip
    speakers = [EvaluatedModel.of(student, job.evaluate, build=student.model)]
    speakers += [EvaluatedModel.of(each, job.evaluate) for each in teachers]
    hearing = StudentEvaluation(job, loss, speakers, np.arange(job.evaluate.index().rows))
    hearing.run()
    return hearing.scorecard()


def of_module(name: str, module: nn.Module) -> Teacher:
    return Teacher(name=name, model=partial(copy.deepcopy, module), inputs="x")


def test_a_language_model_is_judged_by_the_jobs_own_tokens() -> None:
    """Rows of different lengths in two batches; the mask comes with the loss, which is of the next token."""
    torch.manual_seed(0)
    small, big = (nn.Sequential(nn.Embedding(7, width), nn.Linear(width, 7)) for width in (4, 16))
    x = RNG.integers(0, 7, (300, 6)).astype(np.int32)
    long = RNG.integers(2, 7, 300)

    def loss(outputs: torch.Tensor, targets: Any) -> tw.Terms:
        tokens, long = targets
        values = functional.cross_entropy(
            outputs[:, :-1].flatten(0, 1), tokens[:, 1:].long().flatten(), reduction="none"
        )
        return tw.Terms(values.view(len(tokens), -1), (torch.arange(1, 6) < long[:, None]).float())

    data = tw.datasets.table({"x": x, "long": long})
    job = tw.Job(
        name="lm", model=dict, optimizer=list, loss=loss, inputs="x", targets=("x", "long"), train=data, evaluate=data,
        batch_size=32,
    )  # fmt: skip
    found = heard("language_model", of_module("small", small), [of_module("big", big)], job)
    mark = found.mark("small")
    with torch.no_grad():
        values, weights = loss(small(torch.tensor(x)), (torch.tensor(x), torch.tensor(long)))
    assert found.units == float(weights.sum()) and found.tokens == 6 and found.rows == 300
    assert mark.scores["NLL"] == pytest.approx(float((values * weights).sum() / weights.sum()), rel=1e-5)
    assert mark.metrics["loss"] == pytest.approx(mark.scores["NLL"], rel=1e-5)
    assert mark.parameters == 4 * 7 + 5 * 7 and {"1", "32"} == mark.latency_s.keys()
    assert "time, a token" in found.header() and found.classes == list(range(7))


@pytest.mark.parametrize("kind", ["multi_label", "regression"])
def test_labels_by_themselves_and_values(kind: str) -> None:
    torch.manual_seed(0)
    small, big = nn.Linear(3, 4), nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 4))
    x = RNG.normal(size=(ROWS, 3)).astype(np.float32)
    truth = RNG.normal(size=(ROWS, 4)).astype(np.float32)
    several = kind == "multi_label"
    data = tw.datasets.table({"x": x, "y": (truth > 0).astype(np.float32) if several else truth})
    hard = functional.binary_cross_entropy_with_logits if several else functional.mse_loss
    job = tw.Job(
        name=kind, model=dict, optimizer=list, loss=partial(hard, reduction="none"), inputs="x", targets="y",
        train=data, evaluate=data, batch_size=64,
    )  # fmt: skip
    found = heard(kind, of_module("small", small), [of_module("big", big)], job)
    mark, page = found.mark("small"), verdict_html(found.facts())
    with torch.no_grad():
        said, labels = small(torch.tensor(x)), torch.tensor(truth)
    if several:
        chances, present = torch.sigmoid(said), labels > 0
        assert mark.scores["NLL"] == pytest.approx(mark.metrics["loss"], rel=1e-5)
        assert mark.scores["top-1"] == pytest.approx(float(((chances > 0.5) == present).double().mean()))
        expected = [chances[present[:, label]].mean(0).tolist() for label in range(4)]
        np.testing.assert_allclose(mark.soft, expected, rtol=1e-5)
    else:
        assert mark.scores["RMSE"] == pytest.approx(math.sqrt(mark.metrics["loss"]), rel=1e-5)
        assert mark.scores["R2"] == pytest.approx(1 - float(((said - labels) ** 2).sum() / spread(labels)), rel=1e-5)
    assert ("soft targets of small" in page) == several and found.pairs[0].scores


def spread(values: torch.Tensor) -> torch.Tensor:
    return ((values - values.mean(0)) ** 2).sum()


def test_a_keras_student_beside_torch_teachers() -> None:
    import keras

    weights = [RNG.normal(size=(3, CLASSES)).astype(np.float32), np.zeros(CLASSES, np.float32)]

    def small() -> Any:
        dense = keras.layers.Dense(CLASSES)  # which Keras names anew each time
        model = keras.Sequential([keras.Input((3,)), dense])
        dense.set_weights(weights)
        return model

    torch.manual_seed(0)
    teachers = [of_module(name, nn.Linear(3, CLASSES)) for name in "ab"]
    x = RNG.normal(size=(ROWS, 3)).astype(np.float32)
    data = tw.datasets.table({"x": x, "y": LABELS})
    job = tw.Job(
        name="mixed", model=small, optimizer=list, inputs="x", targets="y", train=data, evaluate=data, batch_size=8,
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=None),
        metrics={"accuracy": keras.metrics.SparseCategoricalAccuracy(), "odd": lambda outputs, targets: outputs["no"]},
    )  # fmt: skip
    found = heard("classification", Teacher(name="small", model=small, inputs="x"), teachers, job)
    expected = float(((x @ weights[0]).argmax(1) == LABELS).mean())
    assert found.mark("small").scores["top-1"] == expected
    assert found.mark("small").metrics["accuracy"] == pytest.approx(expected)
    assert found.mark("a").metrics["accuracy"] == found.mark("a").scores["top-1"]
    assert [(pair.student, pair.teacher) for pair in found.pairs] == [
        ("small", name) for name in ("a", "b", ALL_TEACHERS)
    ]
    assert "odd" not in found.mark("a").metrics


def test_students_that_cannot_be_judged_are_no_failure_of_their_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def judge(**options: bool) -> None:
        raise CheckpointError("the file of weights is gone", remedy="bring it back")

    store = open_store(str(tmp_path))
    wish = SimpleNamespace(student=SimpleNamespace(evaluate="rows"))
    run: Any = SimpleNamespace(state="done", distillation=wish, judge=judge, store=store, job=SimpleNamespace(name="r"))
    evaluate_finished(run)
    (noted,) = told(tmp_path, "r", events.Noted)
    for text in (noted.text, capsys.readouterr().err):  # type: ignore[attr-defined]
        assert "are not judged: the file of weights is gone" in text and "bring it back" in text
    run.state = "stopped"
    evaluate_finished(run)
    assert len(told(tmp_path, "r", events.Noted)) == 1


@pytest.mark.parametrize("framework", ["torch", "tensorflow"])
def test_a_jobs_functions_judge_arrays(framework: str) -> None:
    marking = importlib.import_module(f"trainwright.strategies.{framework}.distillation.model_backend")
    spec = ModelSpec(
        model=dict, optimizer=list, total_steps=1, loss=lambda outputs, targets: (outputs[:, 0] - targets) ** 2,
        inputs=(), targets=("y",), metrics={"first": lambda outputs, targets: outputs["logits"][:, 0]},
    )  # fmt: skip
    batch = Batch(columns={"y": np.ones(3, np.float32)}, weights=np.ones(3), samples=np.arange(3))
    said = np.array([[1.0], [3.0], [0.0]], dtype=np.float32)
    values, weights = marking.marked(spec, batch, said)
    assert values.tolist() == [0.0, 4.0, 1.0] and weights.tolist() == [1.0, 1.0, 1.0]
    assert marking.marked(spec, batch, {"logits": said}, "first").values.tolist() == [1.0, 3.0, 0.0]
