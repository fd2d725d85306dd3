"""The reference framework's parts: model, losses, optimizers, the job's functions, state and messages."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.reference import state as states
from tests.support.reference.independent import model_shards, shard_state
from tests.support.reference.model import (
    ACTIVATIONS,
    Adam,
    LossWithGradient,
    Mlp,
    Sgd,
    accuracy,
    cross_entropy,
    squared_error,
)
from tests.support.reference.user_functions import ReferenceProgram
from trainwright.core.data import Batch, Feed, Terms
from trainwright.core.engine import ModelSpec
from trainwright.core.errors import CheckpointError, JobError, TrainwrightError, UserCodeError

SPEC = ModelSpec(
    model=lambda: Mlp((3, 4, 2)),
    loss=cross_entropy,
    optimizer=lambda parameters: Sgd(learning_rate=0.1, momentum=0.9),
    total_steps=10,
    inputs=("x",),
    targets=("y",),
    metrics={"accuracy": accuracy},
)


def batch(rows: int = 6, start: int = 100) -> Batch:
    random = np.random.default_rng(rows)
    data = {"x": random.normal(size=(rows, 3)), "y": random.integers(0, 2, rows)}
    return Batch(columns=data, weights=np.ones(rows), samples=np.arange(start, start + rows))


def feed(*batches: Batch, step: int = 0, ranks: range = range(1)) -> Feed:
    return Feed(step=step, parts=(batches,) * len(ranks), data_ranks=ranks, total=len(ranks), rows=6)


# --- model, losses, optimizers ----------------------------------------------------------------------------


@settings(max_examples=25)
@given(
    hidden=st.lists(st.integers(1, 5), max_size=3),
    activation=st.sampled_from(sorted(set(ACTIVATIONS) - {"relu"})),
    dropout=st.sampled_from([0.0, 0.4]),
    seed=st.integers(0, 1000),
)
def test_backward_is_the_derivative(hidden: list[int], activation: str, dropout: float, seed: int) -> None:
    model = Mlp((4, *hidden, 3), activation, dropout)
    model.initialize(seed)
    random = np.random.default_rng(seed)
    one, two, direction = random.normal(size=(5, 3)), random.normal(size=(5, 1)), random.normal(size=(5, 3))

    def value(parameters: dict[str, np.ndarray]) -> float:
        model.parameters = parameters
        model.reseed(seed)
        return float((model(one, two) * direction).sum())

    start = dict(model.parameters)
    value(start)
    gradients = model.backward(direction)
    for name, held in start.items():
        shift = random.normal(size=held.shape)
        above, below = (value({**start, name: held + sign * 1e-6 * shift}) for sign in (1, -1))
        assert (above - below) / 2e-6 == pytest.approx(float((gradients[name] * shift).sum()), rel=1e-6, abs=1e-7)


def test_relu_drops_what_is_negative() -> None:
    model = Mlp((1, 2, 1), "relu")
    model.parameters = {
        "layers.0.weight": np.array([[1.0, -1.0]]),
        "layers.0.bias": np.zeros(2),
        "layers.1.weight": np.array([[2.0], [3.0]]),
        "layers.1.bias": np.array([0.5]),
    }
    assert model(np.array([[4.0]])).tolist() == [[8.5]]
    gradients = model.backward(np.ones((1, 1)))
    assert gradients["layers.0.weight"].tolist() == [[8.0, 0.0]]


@pytest.mark.parametrize("loss", [cross_entropy, squared_error])
def test_losses_carry_their_derivative(loss: Callable[..., LossWithGradient]) -> None:
    random = np.random.default_rng(3)
    outputs, shift = random.normal(size=(5, 4)) * 3, random.normal(size=(5, 4))
    targets = random.integers(0, 4, 5) if loss is cross_entropy else random.normal(size=(5, 4))
    graded = loss(outputs, targets)
    slope = (loss(outputs + 1e-6 * shift, targets).values - loss(outputs - 1e-6 * shift, targets).values) / 2e-6
    exact = graded.gradient * shift
    assert np.allclose(slope, exact.sum(axis=1) if slope.ndim == 1 else exact, atol=1e-7)


def test_cross_entropy_of_large_outputs_is_finite() -> None:
    graded = cross_entropy(np.array([[1e4, 0.0], [0.0, -1e4]]), np.array([1, 0]))
    assert graded.values.tolist() == [1e4, 0.0] and np.isfinite(graded.gradient).all()


@pytest.mark.parametrize("rule", [Sgd(learning_rate=0.5, momentum=0.5), Adam(learning_rate=0.5)])
def test_updates_are_pure(rule: Any) -> None:
    parameters, gradients = {"a": np.ones(3)}, {"a": np.full(3, 2.0)}
    slots = rule.initial(parameters)
    before = {name: value.copy() for name, value in slots.items()}
    first = rule.update(parameters, gradients, slots, 0.1)
    again = rule.update(parameters, gradients, slots, 0.1)
    assert parameters["a"].tolist() == [1.0] * 3
    assert all(np.array_equal(before[name], slots[name]) for name in slots)
    assert first[0]["a"].tolist() == again[0]["a"].tolist() != parameters["a"].tolist()


def test_two_updates_by_hand() -> None:
    parameters, gradients = {"a": np.array([1.0])}, {"a": np.array([2.0])}
    sgd, adam = Sgd(momentum=0.5), Adam(epsilon=0.0)
    moved, slots = sgd.update(parameters, gradients, sgd.initial(parameters), 0.1)
    assert sgd.update(moved, gradients, slots, 0.1)[0]["a"] == pytest.approx([1 - 0.2 - 0.3])
    moved, slots = adam.update(parameters, gradients, adam.initial(parameters), 0.1)
    assert adam.update(moved, gradients, slots, 0.1)[0]["a"] == pytest.approx([0.8])


# --- the job's functions ----------------------------------------------------------------------------------


@settings(max_examples=25)
@given(cuts=st.lists(st.integers(1, 5), max_size=3))
def test_any_split_into_micro_batches_gives_the_same_sums(cuts: list[int]) -> None:
    program, whole = ReferenceProgram(SPEC, ""), batch()
    bounds = [0, *sorted(set(cuts)), whole.rows]
    parts = tuple(_rows(whole, slice(*pair)) for pair in itertools.pairwise(bounds))
    parameters = program.initial().parameters
    split = program.share(parameters, parts, step=0, data_rank=0)
    assert np.allclose(split, program.share(parameters, (whole,), step=0, data_rank=0), rtol=1e-12, atol=1e-14)


def test_randomness_is_counted_by_step_micro_batch_and_data_rank() -> None:
    program = ReferenceProgram(replace(SPEC, model=lambda: Mlp((3, 40, 2), dropout=0.5)), "")
    parameters, one = program.initial().parameters, batch()

    def drawn(step: int, data_rank: int, micro_batch: int = 0) -> bytes:
        mute = replace(one, weights=np.zeros(one.rows))
        batches = (*(mute,) * micro_batch, one)
        return program.share(parameters, batches, step=step, data_rank=data_rank).tobytes()

    places = [(0, 0), (1, 0), (0, 1), (0, 0, 1), (0, 0)]
    assert len({drawn(*place) for place in places}) == 4


def test_a_step_of_the_users_own_is_like_loss_and_inputs() -> None:
    own = replace(SPEC, loss=None, step=lambda model, columns: cross_entropy(model(columns["x"]), columns["y"]))
    vectors = []
    for spec in (SPEC, own):
        program = ReferenceProgram(spec, "")
        vectors.append(program.share(program.initial().parameters, (batch(),), step=0, data_rank=0))
    assert np.array_equal(*vectors)


def test_what_has_weight_zero_may_be_anything() -> None:
    bad = batch()
    bad.columns["x"][2], bad.weights[2] = np.inf, 0.0
    with np.errstate(invalid="ignore"):
        sums = ReferenceProgram(SPEC, "").evaluate(ReferenceProgram(SPEC, "").initial().parameters, feed(bad))
    assert sums.totals["loss"][1] == 5 and np.isfinite(sums.totals["loss"][0])


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"loss": lambda outputs, targets: cross_entropy(outputs, targets).values.mean()}, "one number"),
        ({"loss": lambda outputs, targets: cross_entropy(outputs, targets).values}, "LossWithGradient"),
        ({"loss": lambda outputs, targets: cross_entropy(outputs[1:], targets[1:])}, r"\(5,\)"),
        ({"loss": lambda outputs, targets: LossWithGradient(outputs, outputs[:, :1])}, "gradient of the shape"),
        ({"loss": lambda outputs, targets: LossWithGradient(outputs, outputs, np.ones(4))}, "weights of shape"),
        ({"inputs": ("z",)}, "column 'z'"),
        ({"inputs": ()}, "inputs= is missing"),
        ({"loss": None}, "either loss="),
    ],
)
def test_wrong_shapes_and_columns_are_job_errors(fields: dict[str, Any], words: str) -> None:
    program = ReferenceProgram(replace(SPEC, **fields), "rank 3")
    with pytest.raises(JobError, match=words) as raised:
        program.share(program.initial().parameters, (batch(),), step=0, data_rank=0)
    assert raised.value.where == "rank 3"


@pytest.mark.parametrize("what", ["model", "optimizer", "loss", "schedule"])
def test_errors_of_the_users_functions_bring_their_traceback(what: str) -> None:
    def broken(*_: object) -> Any:
        raise KeyError("on purpose")

    with pytest.raises(UserCodeError, match=f"{what} raised KeyError") as raised:
        program = ReferenceProgram(replace(SPEC, **{what: broken}), "")
        program.rate(0)
        program.share(program.initial().parameters, (batch(),), step=0, data_rank=0)
    assert "in broken" in raised.value.detail


def test_metrics_may_be_terms() -> None:
    spec = replace(SPEC, metrics={"half": lambda outputs, targets: Terms(np.ones(len(outputs)), np.full(6, 0.5))})
    program = ReferenceProgram(spec, "")
    assert program.evaluate(program.initial().parameters, feed(batch())).totals["half"] == (3.0, 3.0)


# --- state ------------------------------------------------------------------------------------------------


def test_a_state_comes_back_from_bytes_and_from_shards() -> None:
    whole = replace(ReferenceProgram(replace(SPEC, optimizer=lambda _: Adam()), "").initial(), step=3)
    shards = [
        states.from_bytes(states.to_bytes(shard_state(whole, shard))) for shard in model_shards(whole.parameters, 3)
    ]
    assert any("[" in name for shard in shards for name in shard.parameters), "some rows here, some there"
    merged = states.fit_state(states.merge_states(shards), whole)
    assert states.to_bytes(merged) == states.to_bytes(whole)
    assert states.from_bytes(states.to_bytes(replace(whole, step=None))).step is None


def test_a_state_of_another_model_is_refused() -> None:
    built, other = (
        ReferenceProgram(SPEC, "").initial(),
        ReferenceProgram(replace(SPEC, model=lambda: Mlp((3, 5, 2))), "").initial(),
    )
    with pytest.raises(CheckpointError, match="another model") as raised:
        states.fit_state(replace(other, step=1), built)
    assert "layers.0.weight: (3, 5) in the checkpoint, (3, 4) in the job" in raised.value.detail


@settings(max_examples=25)
@given(st.dictionaries(st.text(max_size=5), st.sampled_from(["<f8", "<i4", "|b1", "<U3"]), max_size=4))
def test_messages_come_back(kinds: dict[str, str]) -> None:
    arrays = {name: np.arange(6).astype(kind).reshape(2, 3)[:, ::2] for name, kind in kinds.items()}
    arrays = {**arrays, "empty": np.zeros((0, 2)), "number": np.array(3.5)}
    decoded = states.decode_arrays(states.encode_arrays(arrays))
    assert list(decoded) == list(arrays)
    for name, value in arrays.items():
        assert decoded[name].dtype == value.dtype and decoded[name].shape == value.shape
        assert np.array_equal(decoded[name], value) and decoded[name].flags.writeable


def test_objects_are_no_message() -> None:
    with pytest.raises(TrainwrightError, match="objects"):
        states.encode_arrays({"a": np.array([{}])})


def _rows(whole: Batch, part: slice) -> Batch:
    columns = {name: array[part] for name, array in whole.columns.items()}
    return Batch(columns=columns, weights=whole.weights[part], samples=whole.samples[part])
