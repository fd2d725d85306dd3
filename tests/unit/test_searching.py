"""A search before and after its runs: what it refuses, what it makes of figures, and what teachers are worth."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import trainwright as tw
from tests.support import torch_jobs
from trainwright.core.errors import JobError
from trainwright.distillation.search_result import ModelCost, Score, SearchResult, Setting, result_page, settings_svg
from trainwright.strategies.distillation.distillation_loss import DistillationLoss, teacher_metrics

DATA = tw.datasets.table(torch_jobs.data())


def cross_entropy(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(outputs, targets, reduction="none")


def accuracy(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return outputs.argmax(-1) == targets


def build() -> nn.Module:
    return nn.Linear(torch_jobs.WIDTH, torch_jobs.CLASSES)


def student(**fields: Any) -> tw.Job:
    own = {
        "name": "small", "model": build, "loss": cross_entropy, "optimizer": torch.optim.SGD, "inputs": "x",
        "targets": "y", "train": DATA, "evaluate": DATA, "metrics": {"accuracy": accuracy}, "batch_size": 32, "seed": 4,
    }  # fmt: skip
    return tw.Job(**{**own, **fields})


def distillation(job: tw.Job | None = None, **fields: Any) -> tw.Distillation:
    teacher = tw.Teacher(name="big", model=build, inputs="x")
    return tw.Distillation(**{"student": job or student(), "teachers": (teacher,), **fields})


@pytest.mark.parametrize(
    ("changed", "fields", "said"),
    [
        ({"students": {"tiny": build}}, {}, "a search is of one student"),
        ({"teachers": ()}, {}, "there is no teacher"),
        ({"job": student(evaluate=None)}, {}, "evaluate= is missing: give the test set"),
        ({"job": student(targets=()), "loss": tw.SoftLoss(alpha=0)}, {"alphas": (0.0,)}, "no targets= and loss="),
        ({}, {"metric": "loss"}, 'metric="loss" differs with the setting'),
        ({}, {"metric": "acuracy"}, "metric='acuracy' is none of the student's: did you mean 'accuracy'"),
        ({}, {"temperatures": (1.0, 1.0)}, "temperatures= names one twice"),
        ({}, {"alphas": (1.0,)}, "alpha=1 leaves nothing to learn from a teacher"),
        ({"loss": tw.SoftLoss(kind="regression")}, {}, "temperature= is for logits"),
        ({}, {"name": "a/b"}, "name='a/b'"),
        ({}, {"validation": 1.5}, "validation=1.5"),
    ],
)
def test_what_cannot_be_searched_is_refused(changed: dict[str, Any], fields: dict[str, Any], said: str) -> None:
    with pytest.raises(JobError) as error:
        tw.Search(distillation=distillation(**changed), **fields)
    assert any(said in problem for problem in error.value.problems), error.value.problems


def test_settings_are_all_pairs_with_their_losses() -> None:
    soft = tw.SoftLoss(divergence="reverse_kl")
    search = tw.Search(distillation=distillation(loss=soft), temperatures=(1, 2.5), alphas=(0, 0.25), seeds=2)
    found = search.settings()
    assert list(found) == ["t1-alpha0", "t1-alpha0.25", "t2.5-alpha0", "t2.5-alpha0.25"]
    setting, loss = found["t2.5-alpha0.25"]
    assert (loss.temperature, loss.alpha, loss.divergence) == (2.5, 0.25, "reverse_kl")
    assert setting.text == "T = 2.5, alpha = 0.25"
    assert search.called == "small-search" and search.numbers == (4, 5)


def found(test: tuple[float, ...], alone: tuple[float, ...], **fields: Any) -> SearchResult:
    settings = (
        Setting(name="t1-alpha0.1", temperature=1, alpha=0.1, validation=Score(values=(0.84, 0.85)), steps=60),
        Setting(name="t4-alpha0.1", temperature=4, alpha=0.1, validation=Score(values=(0.8,)), steps=20, stopped=True),
    )
    own: dict[str, Any] = {
        "name": "small-search", "metric": "accuracy", "mode": "max", "seeds": tuple(range(len(test))),
        "settings": settings, "alone": Setting(name="alone", validation=Score(values=(0.82, 0.83)), steps=60),
        "chosen": "t1-alpha0.1", "test": Score(values=test), "test_alone": Score(values=alone), "together": 0.9,
        "student": ModelCost(name="student", parameters=12_730, size_bytes=50_920, latency_s={1: 2e-4, 64: 1e-3}),
        "teachers": (ModelCost(name="big", parameters=10**6, size_bytes=4 * 10**6, test=0.88),),
        "machine": "2 CPU cores",
        "uri": "runs/small-search",
    }  # fmt: skip
    return SearchResult(**{**own, **fields})


@pytest.mark.parametrize(
    ("test", "alone", "helped", "said"),
    [
        ((0.83, 0.84, 0.85), (0.80, 0.81, 0.82), True, "Distillation helped: accuracy 0.8400 ± 0.0100"),
        ((0.83, 0.84, 0.85), (0.809, 0.81, 0.811), True, "better by 3.0 times the larger deviation"),
        ((0.8, 0.84, 0.88), (0.809, 0.81, 0.811), False, "did not help: accuracy 0.8400 ± 0.0400"),
        ((0.81, 0.82, 0.83), (0.80, 0.81, 0.82), False, "they differ by 1.0 times the larger deviation"),
        ((0.77, 0.78, 0.79), (0.80, 0.81, 0.82), False, "Distillation made it worse"),
        ((0.85,), (0.80,), False, "One seed cannot tell whether distillation helped"),
    ],
)
def test_it_says_plainly_whether_distillation_helped(
    test: tuple[float, ...], alone: tuple[float, ...], helped: bool, said: str
) -> None:
    one = found(test, alone)
    assert one.helped is helped
    assert said in one.sentence


def test_less_is_better_where_the_search_says_so() -> None:
    one = found((2.0, 2.1, 2.2), (2.5, 2.6, 2.7), mode="min", together=None)
    assert one.helped and one.gain == pytest.approx(0.5)
    one = replace(one, teachers=(ModelCost(name="big", parameters=1, size_bytes=4, test=1.89),))
    assert one.kept == pytest.approx(1.89 / 2.1)


def test_what_is_kept_is_of_the_best_that_the_teachers_say() -> None:
    one = found((0.81, 0.81, 0.81), (0.80, 0.81, 0.82))
    assert one.kept == pytest.approx(0.9)
    assert replace(one, together=None).kept == pytest.approx(0.81 / 0.88)
    assert replace(one, together=0.7).teacher == 0.88


@pytest.mark.parametrize("test", [(0.83, 0.84, 0.85), (0.85,)])
def test_it_is_the_same_after_a_round_trip(test: tuple[float, ...]) -> None:
    one = found(test, test)
    assert SearchResult.decode(one.encode()) == one
    told = json.loads(one.encode(), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))["told"]
    assert told["helped"] is False and told["sentence"] == one.sentence


def test_the_table_has_every_figure() -> None:
    said = repr(found((0.83, 0.84, 0.85), (0.80, 0.81, 0.82)))
    rows = [line.split() for line in said.splitlines()]
    assert ["T", "=", "1,", "alpha", "=", "0.1", "0.8450", "±", "0.0071", "0.8400", "±", "0.0100", "chosen"] in rows
    assert ["T", "=", "4,", "alpha", "=", "0.1", "0.8000", "stopped", "after", "20", "steps"] in rows
    assert ["student", "alone", "0.8250", "±", "0.0071", "0.8100", "±", "0.0100"] in rows
    cost = ["93.3%", "12,730", "49.7", "KiB", "0.2", "ms", "1", "ms"]
    assert ["student", "0.8400", "±", "0.0100", *cost] in rows
    assert "latencies on 2 CPU cores" in said and "teachers together" in said


@pytest.mark.parametrize("alone", [(0.80, 0.81, 0.82), (0.81,)])
def test_the_page_holds_the_picture(alone: tuple[float, ...]) -> None:
    one = found((0.83, 0.84, 0.85), alone)
    picture = ElementTree.fromstring(settings_svg(one))
    texts = ["".join(each.itertext()) for each in picture.iter("text")]
    assert {"T = 1, alpha = 0.1", "T = 4, alpha = 0.1, stopped", "student alone"} <= set(texts)
    places = [float(each.attrib["cx"]) for each in picture.iter("circle")]
    assert len(places) == 5 and all(190 <= place <= 900 for place in places)
    page = result_page(one)
    assert one.sentence in page and "<script" not in page


@pytest.mark.parametrize("alone", [(1.0, 1.0), (0.0, 0.0)])
def test_a_picture_of_equal_figures_has_a_scale(alone: tuple[float, ...]) -> None:
    same = Score(values=alone)
    setting = Setting(name="t1-alpha0.1", temperature=1, alpha=0.1, validation=same)
    one = replace(found(alone, alone), settings=(setting,), alone=Setting(name="alone", validation=same))
    assert "nan" not in settings_svg(one)


def test_a_score_of_one_seed_has_no_deviation() -> None:
    assert math.isnan(Score(values=(1.0,)).deviation)
    assert str(Score(values=(0.5,))) == "0.5000"


@pytest.mark.parametrize("kind", ["classification", "multi_label"])
def test_teachers_are_judged_as_the_student_is(kind: str) -> None:
    """Of two teachers, each by itself, and the logits of the mean of their chances, weighted."""
    rng = np.random.default_rng(3)
    one, other = (torch.tensor(rng.normal(size=(9, 4)) * 3) for _ in range(2))
    labels = torch.tensor(rng.integers(0, 4, 9))
    if kind == "multi_label":
        labels = torch.tensor(rng.integers(0, 2, (9, 4)), dtype=torch.float64)
    chances, word = (torch.sigmoid, "sigmoid") if kind == "multi_label" else (lambda v: torch.softmax(v, 1), "softmax")
    mixed = 0.75 * chances(one) + 0.25 * chances(other)

    def metric(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        assert torch.equal(targets, labels)
        return chances(outputs).amax(1)

    soft = tw.SoftLoss(kind=kind, weights={"a": 3.0, "b": 1.0})  # type: ignore[arg-type]
    loss = DistillationLoss(
        soft=soft, hard=cross_entropy, targets=("y", "teacher.a", "teacher.b"), labels=("y",), teachers=("a", "b")
    )
    told = teacher_metrics({word: metric}, loss)
    assert set(told) == {f"teacher.a/{word}", f"teacher.b/{word}", f"teacher./{word}"}
    targets = (labels, one, other)
    outputs = torch.zeros((9, 4), dtype=torch.float64)
    torch.testing.assert_close(told[f"teacher.b/{word}"](outputs, targets), chances(other).amax(1))
    torch.testing.assert_close(told[f"teacher./{word}"](outputs, targets), mixed.amax(1))
