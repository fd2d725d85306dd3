"""The loss of classes of students: masks, sums, who teaches whom; and what is refused."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
import torch
from torch import nn

from tests.support.small_distillation import TWO, torch_hard
from trainwright.core.data import Terms
from trainwright.core.errors import JobError
from trainwright.core.soft_loss import Match, SoftLoss
from trainwright.strategies.distillation.distillation_loss import DistillationLoss, student_metrics
from trainwright.strategies.torch.distillation import model_backend
from trainwright.strategies.torch.training.batch_losses import per_sample

BIG: dict[str, Any] = {"targets": TWO, "labels": ("y",), "teachers": ("big",)}


def divergences(own: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """The divergence of each sample at temperature 2."""
    return nn.functional.kl_div((own / 2).log_softmax(-1), (other / 2).softmax(-1), reduction="none").sum(-1)


def test_weights_of_tokens_are_those_of_the_hard_loss_or_of_the_mask() -> None:
    random = np.random.default_rng(6)
    student, teacher = torch.tensor(random.normal(size=(2, 2, 3, 4)))
    words, mask = torch.tensor([[0, 1, 2], [3, 0, 0]]), torch.tensor([[1.0, 1.0, 1.0], [1.0, 0.0, 0.0]])
    soft = SoftLoss(kind="language_model")
    labelled = DistillationLoss(
        soft=soft, hard=lambda outputs, given: Terms(torch_hard(outputs, given[0]), given[1]),
        targets=("y", "m", "teacher.t"), labels=("y", "m"), teachers=("t",),
    )  # fmt: skip
    assert labelled(student, (words, mask, teacher)).weights is mask
    bare = SoftLoss(kind="language_model", alpha=0.0, mask="m")
    unlabelled = DistillationLoss(soft=bare, hard=None, targets=("m", "teacher.t"), teachers=("t",))
    assert unlabelled(student, (mask, teacher)).weights is mask


def test_a_class_is_the_sum_of_each_alone_and_students_teach_each_other() -> None:
    random = np.random.default_rng(7)
    one, two, teacher = (torch.tensor(each) for each in random.normal(size=(3, 4, 5)))
    y = torch.tensor([0, 1, 2, 3])
    soft = SoftLoss(alpha=0.2)
    fields: dict[str, Any] = {"soft": soft, "hard": torch_hard, "targets": TWO, "labels": ("y",)}
    pair = DistillationLoss(**fields, teachers=("big",), students=("one", "two"))
    alone = DistillationLoss(**fields, teachers=("big",))
    each = [alone(value, (y, teacher)) for value in (one, two)]
    assert torch.allclose(pair({"one": one, "two": two}, (y, teacher)), each[0] + each[1], rtol=1e-14)

    def loss(own: Any, *teachers: Any) -> Any:
        soft_targets = [nn.functional.kl_div((own / 2).log_softmax(-1), (other / 2).softmax(-1), reduction="none")
                        for other in teachers]  # fmt: skip
        return 0.2 * torch_hard(own, y) + 0.8 * 4 * sum(term.sum(-1) for term in soft_targets) / len(teachers)

    mutual = DistillationLoss(**fields, teachers=("big",), students=("one", "two"), mutual=True)
    assert torch.allclose(
        mutual({"one": one, "two": two}, (y, teacher)), loss(one, teacher, two) + loss(two, teacher, one)
    )
    joint = DistillationLoss(**{**fields, "targets": ("y",)}, students=("one", "two"), joint=("two",))
    assert torch.allclose(joint({"one": one, "two": two}, y), torch_hard(two, y) + loss(one, two))


def test_nothing_goes_back_to_a_teacher() -> None:
    random = np.random.default_rng(8)
    one, two = (torch.tensor(each, requires_grad=True) for each in random.normal(size=(2, 4, 5)))
    y = torch.tensor([0, 1, 2, 3])
    joint = DistillationLoss(
        soft=SoftLoss(), hard=torch_hard, targets=("y",), labels=("y",), students=("one", "two"), joint=("two",)
    )
    joint({"one": one, "two": two}, y).sum().backward()
    taught = two.grad
    two.grad = None
    torch_hard(two, y).sum().backward()
    assert taught is not None and two.grad is not None and torch.equal(taught, two.grad)


def test_metrics_of_each_student() -> None:
    def right(outputs: Any, targets: Any) -> Any:
        return outputs.argmax(-1) == targets

    pair = DistillationLoss(
        soft=SoftLoss(), hard=torch_hard, targets=TWO, labels=("y",), teachers=("big",), students=("one", "two")
    )
    found = student_metrics({"accuracy": right}, pair)
    outputs = {"one": torch.eye(2), "two": torch.eye(2).flip(0)}
    targets = (torch.tensor([0, 1]), torch.zeros(2, 2))
    assert {name: metric(outputs, targets).tolist() for name, metric in found.items()} == {
        "one/accuracy": [True, True], "two/accuracy": [False, False],
    }  # fmt: skip
    alone = DistillationLoss(soft=SoftLoss(), hard=torch_hard, targets=TWO, labels=("y",), teachers=("big",))
    assert list(student_metrics({"accuracy": right}, alone)) == ["accuracy"]


@pytest.mark.parametrize(
    ("kind", "mean", "shape"),
    [
        ("classification", nn.CrossEntropyLoss, (4,)),
        ("regression", nn.MSELoss, (4, 3)),
        ("multi_label", nn.BCEWithLogitsLoss, (4, 3)),
    ],
)
def test_a_mean_of_torchs_own_is_taken_apart_as_in_a_job_without_teachers(kind: Any, mean: Any, shape: Any) -> None:
    random = np.random.default_rng(9)
    outputs, teacher, numbers = torch.tensor(random.normal(size=(3, 4, 3)))
    label = numbers.argmax(1) if kind == "classification" else numbers.sigmoid()
    fields: dict[str, Any] = {
        "soft": SoftLoss(kind=kind, alpha=0.3), "targets": TWO, "labels": ("y",), "teachers": ("big",),
    }  # fmt: skip
    found = DistillationLoss(hard=mean(), **fields)
    expected = DistillationLoss(hard=mean(reduction="none"), **fields)
    result = found(outputs, (label, teacher))
    values = result.values if isinstance(result, Terms) else result
    assert torch.equal(values, expected(outputs, (label, teacher)))
    assert not isinstance(result, Terms) or result.weights.tolist() == [1.0] * 4
    metric = student_metrics({"mean": mean()}, found)["mean"](outputs, (label, teacher))
    values = metric.values if isinstance(metric, Terms) else metric
    assert tuple(values.shape) == shape and torch.equal(values, mean(reduction="none")(outputs, label))


def test_samples_whose_label_is_ignored_count_in_no_term() -> None:
    outputs, teacher = torch.tensor(np.random.default_rng(10).normal(size=(2, 4, 3)))
    label = torch.tensor([0, -100, 2, 1])
    loss = DistillationLoss(soft=SoftLoss(alpha=0.3), hard=nn.CrossEntropyLoss(), **BIG)
    found, real = loss(outputs, (label, teacher)), label >= 0
    expected = 0.3 * nn.functional.cross_entropy(outputs, label) + 0.7 * 4 * divergences(outputs, teacher)[real].mean()
    assert torch.allclose((found.values * found.weights).sum() / found.weights.sum(), expected, rtol=1e-14)


class Shifted(nn.Module):
    """A loss with a tensor of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", torch.ones(()))

    def forward(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(outputs + self.shift, targets, reduction="none")


def test_a_loss_is_prepared_once_and_again_for_another_device(monkeypatch: pytest.MonkeyPatch) -> None:
    prepared = list[Any]()
    monkeypatch.setattr(model_backend, "per_sample", lambda function: prepared.append(function) or per_sample(function))
    outputs, teacher, label = torch.randn(4, 3), torch.randn(4, 3), torch.tensor([0, 1, 2, 1])
    for hard in (nn.CrossEntropyLoss(), nn.CrossEntropyLoss()):
        loss = DistillationLoss(soft=SoftLoss(), hard=hard, **BIG)
        for _ in range(3):
            loss(outputs, (label, teacher))
    assert len(prepared) == 2
    loss = DistillationLoss(soft=SoftLoss(), hard=Shifted(), **BIG)
    for device in ("cpu", "meta"):
        assert loss(outputs.to(device), (label.to(device), teacher.to(device))).device.type == device
        assert prepared[-1].shift.device.type == device


# --- what is refused --------------------------------------------------------------------------------------------------


def test_all_that_is_wrong_with_a_loss_is_said_at_once() -> None:
    with pytest.raises(JobError) as caught:
        DistillationLoss(
            soft=SoftLoss(matches=(Match(student="s", teacher="t", of="bigg"),), weights={"tiny": 1.0}),
            hard=None, targets=("y", "teacher.big"), labels=("x",), students=("a b",), teachers=("big",), joint=("c",),
        )  # fmt: skip
    text = str(caught.value)
    for words in (
        "a student is named 'a b'", "joint= names 'c'", "weights= names the teacher",
        "there is no hard loss", "no such teacher: did you mean 'big'?",
    ):  # fmt: skip
        assert words in text, words


@pytest.mark.parametrize(
    "mean", [nn.CrossEntropyLoss, partial(partial, nn.functional.cross_entropy)], ids=["module", "partial"]
)
def test_class_weights_of_a_mean_are_refused_since_they_would_weigh_the_divergence_too(mean: Any) -> None:
    outputs, teacher = torch.tensor(np.random.default_rng(11).normal(size=(2, 4, 3)))
    label, weight = torch.tensor([0, 1, 2, 1]), torch.tensor([1.0, 10.0, 1.0], dtype=torch.float64)
    weighted = DistillationLoss(soft=SoftLoss(alpha=0.3), hard=mean(weight=weight), **BIG)
    with pytest.raises(JobError, match=r'class weights.*set reduction="none"'):
        weighted(outputs, (label, teacher))
    metric = student_metrics({"weighted": weighted.hard}, weighted)["weighted"](outputs, (label, teacher))
    assert torch.equal(metric.weights, weight[label]), "nothing else is among the terms of a metric"
    hard = mean(weight=weight, reduction="none")
    found = DistillationLoss(soft=SoftLoss(alpha=0.3), hard=hard, **BIG)(outputs, (label, teacher))
    expected = 0.3 * hard(outputs, label) + 0.7 * 4 * divergences(outputs, teacher)
    assert torch.allclose(found, expected, rtol=1e-14)


@pytest.mark.parametrize(
    ("shapes", "kind", "words"),
    [
        (((4, 3), (4, 5)), "classification", "teacher 'big' has 5 classes, student 'student' has 3"),
        (((4, 2, 3), (4, 2, 5)), "language_model", "5 words in the vocabulary"),
        (((4, 3), (4, 2, 3)), "classification", r"gives \(4, 2, 3\), student 'student' gives \(4, 3\)"),
    ],
)
def test_outputs_that_do_not_fit_are_refused(shapes: Any, kind: Any, words: str) -> None:
    loss = DistillationLoss(soft=SoftLoss(kind=kind, alpha=0.0), hard=None, targets=("teacher.big",), teachers=("big",))
    for made in (torch.zeros, tf.zeros):
        with pytest.raises(JobError, match=words):
            loss(made(shapes[0]), made(shapes[1]))


def test_a_hard_loss_of_another_shape_is_refused() -> None:
    loss = DistillationLoss(
        soft=SoftLoss(kind="language_model"), hard=lambda outputs, targets: torch_hard(outputs, targets).mean(1),
        targets=TWO, labels=("y",), teachers=("big",),
    )  # fmt: skip
    with pytest.raises(JobError, match=r"hard loss has shape \(2\).*return one loss for each .*token"):
        loss(torch.zeros(2, 3, 4), (torch.zeros(2, 3, dtype=torch.int64), torch.zeros(2, 3, 4)))


def test_outputs_among_which_none_is_meant_are_refused() -> None:
    loss = DistillationLoss(soft=SoftLoss(alpha=0.0), hard=None, targets=("teacher.big",), teachers=("big",))
    one = torch.zeros(2, 3)
    assert loss({"logits": one, "hidden": one}, one).shape == (2,)
    with pytest.raises(JobError, match=r"gives outputs first, second: name the output to compare"):
        loss({"first": one, "second": one}, one)
