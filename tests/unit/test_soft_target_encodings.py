"""Forms of soft targets: what is kept comes back as it was, and what is not keeps its mass."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from trainwright.core.errors import JobError
from trainwright.distillation.target_encoding import TargetEncoding, decode_targets

LOGITS = st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(2, 12)).flatmap(
    lambda shape: arrays(np.float32, shape, elements=st.floats(-60, 60, width=32))
)


def mass(logits: Any, chosen: Any) -> Any:
    """The probability of some classes together, (...,)."""
    wide = logits.astype(np.float64)
    shares = np.exp(wide - wide.max(axis=-1, keepdims=True))
    return np.take_along_axis(shares / shares.sum(axis=-1, keepdims=True), chosen, -1).sum(axis=-1)


@settings(max_examples=200)
@given(logits=LOGITS, data=st.data())
def test_the_largest_logits_stay_and_the_rest_keeps_its_mass(logits: Any, data: Any) -> None:
    count = data.draw(st.integers(1, logits.shape[-1] - 1))
    form = TargetEncoding.parse(f"topk({count})")
    kept = form.encode("output", logits)
    assert tuple(kept) == ("output", *(f"output_{part}" for part in ("index", "rest", "classes") if form.largest))
    whole, index = decode_targets(form, "output", kept), kept["output_index"].astype(np.int64)
    assert whole.shape == logits.shape and whole.dtype == np.float32
    # The largest, exact in half precision, in their order, none smaller than one that is not kept.
    half = logits.astype(np.float16).astype(np.float32)
    np.testing.assert_array_equal(np.take_along_axis(whole, index, -1), np.take_along_axis(half, index, -1))
    values = np.take_along_axis(logits, index, -1)
    np.testing.assert_array_equal(values, -np.sort(-logits, axis=-1)[..., :count])
    others = np.argsort(-logits, axis=-1, kind="stable")[..., count:]
    rest = np.ones(logits.shape, bool)
    np.put_along_axis(rest, index, False, -1)
    assert (whole.max(axis=-1, where=rest, initial=-np.inf) <= whole.min(axis=-1, where=~rest, initial=np.inf)).all()
    # The mass of all others, which nothing but the rounding of the kept logits can move.
    lost = np.argsort(whole, axis=-1, kind="stable")[..., : logits.shape[-1] - count]
    rounding = np.exp(2.0 ** np.floor(np.log2(np.abs(logits).max() + 1)) / 2**10)
    was, now = mass(logits, others), mass(whole, lost)
    assert (now <= was * 1.0001 + 1e-12).all() and (now * rounding * 1.0001 + 1e-12 >= was).all()


@pytest.mark.parametrize("keep", ["fp32", "fp16", "topk(2)"])
@pytest.mark.parametrize("shape", [(7, 5), (7, 3, 5), (7, 3, 70_000)])
def test_what_is_kept_of_a_row_is_known_before(keep: str, shape: tuple[int, ...]) -> None:
    form = TargetEncoding.parse(keep)
    kept = form.encode("output", np.zeros(shape, np.float32))
    kept.pop("output_classes", None)  # the same in all rows
    assert form.row_bytes((None, *shape[1:])) == sum(each.nbytes for each in kept.values()) / shape[0]


@pytest.mark.parametrize("keep", ["fp32", "fp16"])
def test_whole_outputs_come_back(keep: str) -> None:
    values = np.random.default_rng(0).normal(size=(5, 2, 3)) * 20
    form = TargetEncoding.parse(keep)
    found = decode_targets(form, "output", form.encode("output", values))
    np.testing.assert_array_equal(found, values.astype(keep.replace("fp", "float")).astype(np.float32))


def test_a_mass_beyond_half_precision_and_masked_classes_are_kept() -> None:
    logits = np.array([[0.0, -100.0, -101.0, -np.inf], [0.0, -np.inf, -np.inf, -np.inf], [3.0, 3.0, 3.0, 3.0]])
    form = TargetEncoding.parse("topk(1)")
    found = decode_targets(form, "output", form.encode("output", logits))
    shares = (
        np.log(np.exp(found[0]).sum(dtype=np.float64) - 1) if np.exp(found[0]).sum() > 1 else found[0, 1] + np.log(3)
    )
    assert shares == pytest.approx(-100 + np.log1p(np.exp(-1)), abs=1e-4)
    assert np.isneginf(found[1, 1:]).all() and found[2] == pytest.approx(3.0, abs=1e-5)


@pytest.mark.parametrize(
    ("keep", "values", "message"),
    [
        ("fp16", np.full((2, 3), 1e6, np.float32), 'values up to 1e\\+06: use keep="fp32"'),
        ("fp16", np.array([[0.0], [np.nan]]), "NaN or infinite in 1 rows"),
        ("fp32", np.arange(3), "is int64: a teacher's outputs are floats"),
        ("topk(3)", np.zeros((2, 3)), "is for the logits of more than 3 classes"),
        ("topk(1)", np.zeros(4), "is for the logits of more than 1 classes"),
        ("topk(0)", np.zeros((2, 3)), "keep='topk\\(0\\)': use"),
        ("int8", np.zeros((2, 3)), "keep='int8': use"),
    ],
)
def test_what_cannot_be_kept_is_refused(keep: str, values: Any, message: str) -> None:
    with pytest.raises(JobError, match=message):
        TargetEncoding.parse(keep).encode("output", values)
