"""The loss of a student with teachers: its numbers, in both frameworks, against numpy and the frameworks' own."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import numpy.typing as npt
import pytest
import tensorflow as tf
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from torch import nn

from tests.support.small_distillation import TWO, torch_hard
from trainwright.core.data import Terms
from trainwright.core.soft_loss import Match, SoftLoss
from trainwright.strategies.distillation.distillation_loss import DistillationLoss
from trainwright.strategies.distillation.layer_match import LayerProjection, projection_for

Array = npt.NDArray[Any]
LOG3 = math.log(3.0)
EXACT = {"rtol": 1e-12, "atol": 1e-12}


def tf_hard(outputs: Any, targets: Any) -> Any:
    return tf.nn.sparse_softmax_cross_entropy_with_logits(targets, outputs)


def values(outputs: Any, columns: tuple[Array, ...], **fields: Any) -> tuple[Array, Array]:
    """The loss in torch and in TensorFlow, with its gradient by all outputs; they agree."""
    hard = fields.pop("hard", (torch_hard, tf_hard))
    found = []
    for number, make in enumerate((torch_made, tf_made)):
        loss = DistillationLoss(**{"hard": hard and hard[number], **fields})
        found.append(make(loss, outputs, columns))
    (own, slopes), (theirs, others) = found
    assert np.allclose(own, theirs, **EXACT) and own.shape == theirs.shape
    for name in slopes:
        assert np.allclose(slopes[name], others[name], **EXACT), name
    return own, slopes["" if "" in slopes else next(iter(slopes))]


def torch_made(loss: DistillationLoss, outputs: Any, targets: Any) -> tuple[Array, dict[str, Array]]:
    held = {name: torch.tensor(value, requires_grad=True) for name, value in named(outputs).items()}
    result = loss(held if isinstance(outputs, dict) else held[""], given_as(targets, torch.tensor))
    result = result.values if isinstance(result, Terms) else result
    result.sum().backward()
    return result.detach().numpy(), {name: gradient(value.grad, value) for name, value in held.items()}


def tf_made(loss: DistillationLoss, outputs: Any, targets: Any) -> tuple[Array, dict[str, Array]]:
    held = {name: tf.Variable(value) for name, value in named(outputs).items()}
    with tf.GradientTape() as tape:
        seen = {name: tf.convert_to_tensor(value) for name, value in held.items()}
        result = loss(seen if isinstance(outputs, dict) else seen[""], given_as(targets, tf.constant))
        result = result.values if isinstance(result, Terms) else result
        total = tf.reduce_sum(result)
    found = tape.gradient(total, held)
    return result.numpy(), {name: gradient(found[name], value.numpy()) for name, value in held.items()}


def named(outputs: Any) -> dict[str, Array]:
    return outputs if isinstance(outputs, dict) else {"": outputs}


def given_as(targets: tuple[Array, ...], made: Callable[[Array], Any]) -> Any:
    columns = tuple(made(column) for column in targets)
    return columns[0] if len(columns) == 1 else columns


def gradient(found: Any, like: Any) -> Array:
    return np.zeros(like.shape) if found is None else np.asarray(found)


# --- numbers by hand --------------------------------------------------------------------------------------------------

# The student's logits are (0, 2 ln 3), the teacher's (0, 0). At T = 2 their chances are (1/4, 3/4) and (1/2, 1/2).
TABLE = {
    "kl": 0.5 * math.log(2.0) + 0.5 * math.log(2.0 / 3.0),
    "reverse_kl": 0.25 * math.log(0.5) + 0.75 * math.log(1.5),
    "jensen_shannon": 0.25 * math.log(16.0 / 15.0) + 0.125 * math.log(2.0 / 3.0) + 0.375 * math.log(1.2),
    "mse": LOG3**2 / 2,
}


@pytest.mark.parametrize("name", TABLE)
def test_the_table(name: str) -> None:
    """The label is the second class, whose chance at T = 1 is 9/10."""
    soft = SoftLoss(alpha=0.3, temperature=2.0, divergence=name)
    targets = (np.array([1]), np.zeros((1, 2)))
    found, _ = values(np.array([[0.0, 2 * LOG3]]), targets, soft=soft, targets=TWO, labels=("y",), teachers=("big",))
    assert found == pytest.approx([0.3 * math.log(10 / 9) + 0.7 * 4 * TABLE[name]], rel=1e-12)


@pytest.mark.parametrize("name", TABLE)
def test_the_table_for_each_label(name: str) -> None:
    """Two labels, of which one has those chances; in `mse` its logits are ln 3 apart."""
    soft = SoftLoss(kind="multi_label", alpha=0.0, divergence=name)
    found, _ = values(
        np.array([[2 * LOG3, 1.0]]), (np.array([[0.0, 1.0]]),), hard=None, soft=soft, targets=("teacher.big",),
        teachers=("big",),
    )  # fmt: skip
    expected = TABLE[name] if name != "mse" else LOG3**2
    assert found == pytest.approx([4 * expected], rel=1e-12)


def test_regression_is_the_mean_squared_difference() -> None:
    soft = SoftLoss(kind="regression", alpha=0.25)
    hard = (lambda outputs, targets: ((outputs - targets) ** 2).mean(1), lambda o, t: tf.reduce_mean((o - t) ** 2, 1))
    targets = (np.array([[1.0, 1.0]]), np.array([[0.0, 1.0]]))
    found, slope = values(
        np.array([[1.0, 3.0]]), targets, hard=hard, soft=soft, targets=TWO, labels=("y",), teachers=("big",)
    )
    assert found == pytest.approx([0.25 * 2.0 + 0.75 * 2.5])
    assert slope == pytest.approx(np.array([[0.75, 0.25 * 2 + 0.75 * 2]]))


# --- against numpy ----------------------------------------------------------------------------------------------------


def chances(logits: Array) -> Array:
    raised = np.exp(logits - logits.max(-1, keepdims=True))
    return raised / raised.sum(-1, keepdims=True)


def entropy(one: Array, other: Array) -> Array:
    """Cross-entropy of chances."""
    return -(one * np.log(other)).sum(-1)


def expected(soft: SoftLoss, student: Array, teacher: Array) -> Array:
    """The divergence written with chances themselves."""
    p, q = (chances(each / soft.temperature) for each in (teacher, student))
    middle = (p + q) / 2
    return {
        "kl": entropy(p, q) - entropy(p, p),
        "reverse_kl": entropy(q, p) - entropy(q, q),
        "jensen_shannon": entropy(middle, middle) - (entropy(p, p) + entropy(q, q)) / 2,
        "mse": (((teacher - student) / soft.temperature) ** 2).mean(-1),
    }[str(soft.divergence)]


def labelled(logits: Array, labels: Array) -> Array:
    return -np.log(np.take_along_axis(chances(logits), labels[..., None], -1))[..., 0]


@pytest.mark.parametrize("name", TABLE)
@pytest.mark.parametrize("combine", ["fixed", "confidence", "learned"])
def test_three_teachers_of_tokens(name: str, combine: Any) -> None:
    """In a language model, whose loss of the next tokens is one shorter than its outputs."""
    random = np.random.default_rng(1)
    student, *teachers = random.normal(scale=2.0, size=(4, 3, 5, 7))
    words, numbers = random.integers(0, 7, (3, 5)), random.normal(size=3)
    weights = {"weights": {"a": 1.0, "c": 3.0}} if combine == "fixed" else {}
    soft = SoftLoss(kind="language_model", alpha=0.4, temperature=1.7, divergence=name, combine=combine, **weights)
    names = ("y", *(f"teacher.{each}" for each in "abc"))
    outputs = {"student": student, "teachers": np.tile(numbers, (3, 1))} if combine == "learned" else student
    following = (lambda o, t: torch_hard(o[:, :-1], t[:, 1:]), lambda o, t: tf_hard(o[:, :-1], t[:, 1:]))
    found, _ = values(
        outputs, (words, *teachers), hard=following, soft=soft, targets=names, labels=("y",), teachers=("a", "b", "c")
    )
    student, words = student[:, :-1], words[:, 1:]
    teachers = [teacher[:, :-1] for teacher in teachers]
    hard = np.stack([labelled(teacher, words) for teacher in teachers])
    share = {
        "fixed": np.array([0.25, 0.0, 0.75])[:, None, None],
        "confidence": np.moveaxis(chances(np.moveaxis(-hard, 0, -1)), -1, 0),
        "learned": chances(numbers)[:, None, None],
    }[combine]
    apart = (np.stack([expected(soft, student, teacher) for teacher in teachers]) * share).sum(0)
    mixture = sum(weight * chances(teacher) for weight, teacher in zip(chances(numbers), teachers, strict=True))
    own = labelled(np.log(mixture), words) if combine == "learned" else 0.0
    assert np.allclose(found, 0.4 * labelled(student, words) + 0.6 * 1.7**2 * apart + own, **EXACT)


def test_learned_weights_follow_the_labels_alone() -> None:
    """They rise for the teacher that is right, though the student is like the one that is wrong."""
    right, wrong = np.array([[3.0, 0.0]]), np.array([[0.0, 3.0]])
    soft = SoftLoss(alpha=0.0, combine="learned")
    names = ("y", "teacher.right", "teacher.wrong")
    found = []
    for student in (wrong, right):
        loss = DistillationLoss(soft=soft, hard=torch_hard, targets=names, labels=("y",), teachers=("right", "wrong"))
        _, slopes = torch_made(loss, {"student": student, "teachers": np.zeros((1, 2))}, (np.array([0]), right, wrong))
        found.append(slopes["teachers"])
    assert np.array_equal(*found) and found[0][0, 0] < 0 < found[0][0, 1]


def test_unlabelled_confidence_is_low_entropy() -> None:
    """Of one label each, of chances 9/10 and 1/2."""
    soft = SoftLoss(kind="multi_label", alpha=0.0, temperature=1.0, combine="confidence")
    sure, unsure, student = np.array([[2 * LOG3]]), np.zeros((1, 1)), np.array([[LOG3]])
    found, _ = values(
        student, (sure, unsure), hard=None, soft=soft, targets=("teacher.a", "teacher.b"), teachers=("a", "b")
    )
    binary = [np.array([[p, 1 - p]]) for p in (0.9, 0.5, 0.75)]
    share = chances(-np.array([entropy(each, each)[0] for each in binary[:2]]))
    apart = [(entropy(each, binary[2]) - entropy(each, each))[0] for each in binary[:2]]
    assert found == pytest.approx([share @ apart], rel=1e-12)


def test_the_frameworks_own_divergences() -> None:
    random = np.random.default_rng(2)
    student, teacher = random.normal(size=(2, 6, 5))
    soft = SoftLoss(alpha=0.0, temperature=3.0)
    found, _ = values(student, (teacher,), hard=None, soft=soft, targets=("teacher.t",), teachers=("t",))
    one, other = (torch.tensor(each / 3.0).log_softmax(-1) for each in (student, teacher))
    own = nn.functional.kl_div(one, other, reduction="none", log_target=True).sum(-1)
    assert np.allclose(found, 9.0 * own.numpy(), **EXACT)
    theirs = keras.losses.KLDivergence(reduction=None, dtype="float64")(chances(teacher / 3.0), chances(student / 3.0))
    assert np.allclose(found, 9.0 * theirs.numpy(), rtol=1e-6)


# --- properties -------------------------------------------------------------------------------------------------------

logits = arrays.arrays(np.float64, (2, 4), elements=st.floats(-20, 20))
names = st.sampled_from(["kl", "reverse_kl", "jensen_shannon", "mse"])
kinds = st.sampled_from(["classification", "multi_label"])


def apart(student: Array, teacher: Array, **fields: Any) -> tuple[Array, Array]:
    """The divergence alone, and its gradient."""
    loss = DistillationLoss(soft=SoftLoss(alpha=0.0, **fields), hard=None, targets=("teacher.t",), teachers=("t",))
    found, slopes = torch_made(loss, student, (teacher,))
    return found, slopes[""]


@settings(max_examples=30)
@given(one=logits, other=logits, divergence=names, kind=kinds, temperature=st.floats(0.5, 20))
def test_zero_between_equals_and_never_negative(
    one: Array, other: Array, divergence: str, kind: str, temperature: float
) -> None:
    fields = {"divergence": divergence, "kind": kind, "temperature": temperature}
    same, slope = apart(one, one.copy(), **fields)
    assert np.allclose(same, 0.0, atol=1e-9) and np.allclose(slope, 0.0, atol=1e-9)
    assert (apart(one, other, **fields)[0] >= -1e-9).all()


@settings(max_examples=20)
@given(one=logits, other=logits, divergence=names.filter(lambda name: name != "mse"), shift=st.floats(-50, 50))
def test_a_constant_added_to_logits_changes_nothing(one: Array, other: Array, divergence: str, shift: float) -> None:
    found, slope = apart(one, other, divergence=divergence)
    shifted, again = apart(one + shift, other, divergence=divergence)
    assert np.allclose(found, shifted, rtol=1e-9, atol=1e-9) and np.allclose(slope, again, rtol=1e-7, atol=1e-9)


@settings(max_examples=20)
@given(one=logits, other=logits)
def test_the_gradient_keeps_its_size_as_the_temperature_grows(one: Array, other: Array) -> None:
    """It tends to that of half the mean squared difference of centred logits (Hinton et al., 2015, section 2.1)."""
    centred = (one - one.mean(-1, keepdims=True)) - (other - other.mean(-1, keepdims=True))
    for temperature in (1e4, 2e4):
        _, slope = apart(one, other, temperature=temperature)
        assert np.allclose(slope, centred / one.shape[-1], rtol=0.01, atol=0.01)


def test_chances_of_nothing_are_no_trouble() -> None:
    """A teacher that rules classes out, as by a mask of -inf."""
    soft = SoftLoss(alpha=0.0, temperature=1.0)
    teacher = np.array([[0.0, 0.0, -np.inf]])
    found, slope = values(np.zeros((1, 3)), (teacher,), hard=None, soft=soft, targets=("teacher.t",), teachers=("t",))
    assert found == pytest.approx([math.log(1.5)]) and slope == pytest.approx(np.array([[-1 / 6, -1 / 6, 1 / 3]]))


def test_half_precision_is_widened() -> None:
    """Under autocast a divergence is what it is without; of half-precision outputs it is in float32."""
    random = np.random.default_rng(3)
    student, teacher = (torch.tensor(each, dtype=torch.float32) for each in random.normal(size=(2, 4, 9)))
    loss = DistillationLoss(soft=SoftLoss(alpha=0.0), hard=None, targets=("teacher.t",), teachers=("t",))
    with torch.autocast("cpu", torch.bfloat16):
        within, half = loss(student, teacher), loss(student.bfloat16(), teacher.half())
    assert torch.equal(within, loss(student, teacher)) and half.dtype == torch.float32
    assert half.tolist() == pytest.approx(within.tolist(), rel=0.05, abs=0.01)


# --- layers -----------------------------------------------------------------------------------------------------------


def matching(match: Match, own: Array, theirs: Array, kind: Any = "classification") -> Array:
    """A layer's distance alone."""
    size = (3, 5, 4) if kind == "language_model" else (3, 4)
    outputs = {"student": np.zeros(size), "student/match-0": own}
    soft = SoftLoss(kind=kind, alpha=0.0, matches=(match,))
    found, _ = values(
        outputs, (np.zeros(size), theirs), hard=None, soft=soft, targets=("teacher.t", "teacher.t/l"), teachers=("t",)
    )
    return found


def unit(value: Array) -> Array:
    return value / np.sqrt((value**2).sum(-1, keepdims=True))


def test_distances_of_layers() -> None:
    random = np.random.default_rng(4)
    own, theirs = random.normal(size=(2, 3, 5, 6))
    mse, cosine, active = (Match(student="s", teacher="l", by=by, weight=2.0) for by in ("mse", "cosine", "attention"))
    assert np.allclose(matching(mse, own, theirs), 2 * ((own - theirs) ** 2).mean((1, 2)), **EXACT)
    tokens = 2 * ((own - theirs) ** 2).mean(2)
    assert np.allclose(matching(mse, own, theirs, "language_model"), tokens, **EXACT)
    alike = (unit(own) * unit(theirs)).sum(-1)
    assert np.allclose(matching(cosine, own, theirs), 2 * (1 - alike).mean(1), **EXACT)
    assert np.allclose(matching(cosine, own, theirs, "language_model"), 2 * (1 - alike), **EXACT)
    where = [unit((each**2).sum(-1)) for each in (own, theirs)]
    assert np.allclose(matching(active, own, theirs), 2 * ((where[0] - where[1]) ** 2).mean(1), **EXACT)


def test_maps_whose_channels_lie_elsewhere() -> None:
    """A teacher of the other framework: channels last, and another number of them."""
    random = np.random.default_rng(5)
    own, theirs = random.normal(size=(3, 2, 4, 5)), random.normal(size=(3, 4, 5, 7))
    found = matching(Match(student="s", teacher="l", by="attention"), own, theirs)
    where = [unit((own**2).sum(1).reshape(3, -1)), unit((theirs**2).sum(-1).reshape(3, -1))]
    assert np.allclose(found, ((where[0] - where[1]) ** 2).mean(1), **EXACT)
    turned = np.moveaxis(theirs, -1, 1)[:, :2]
    same = matching(Match(student="s", teacher="l"), own, np.moveaxis(turned, 1, -1))
    assert np.allclose(same, ((own - turned) ** 2).mean((1, 2, 3)), **EXACT)


@pytest.mark.parametrize(
    ("student", "teacher", "found"),
    [
        ((None, 8), (None, 8), None),
        ((None, 8), (None, 6), LayerProjection(axis=1, given=8, wanted=6)),
        ((None, 10, 8), (None, None, 6), LayerProjection(axis=2, given=8, wanted=6)),
        ((None, 2, 4, 5), (None, 3, 4, 5), LayerProjection(axis=1, given=2, wanted=3)),
        ((None, 2, 4, 5), (None, 4, 5, 3), LayerProjection(axis=1, given=2, wanted=3)),
        ((None, 10, 8), (None, 12, 8), "differ in more than their width"),
        ((None, 8), (None, 4, 8), "differ in more than their width"),
    ],
)
def test_what_makes_layers_alike(student: Any, teacher: Any, found: Any) -> None:
    match = Match(student="s", teacher="t")
    if isinstance(found, str):
        with pytest.raises(ValueError, match=found):
            projection_for(match, student, teacher)
    else:
        assert projection_for(match, student, teacher) == found
