"""Gradient codecs: decoded values are near the encoded ones, and values that are not finite stay so."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from trainwright.core.errors import PlanError
from trainwright.strategies.torch.ps import gradient_compression
from trainwright.strategies.torch.ps.gradient_compression import GradientCodec

NAMES = ("fp16", "bf16", "int8", "topk(0.3)", "topk(1)")
LOSSY = {
    "fp16": lambda x: 2.0**-11 * np.abs(x) + 2.0**-39 * np.abs(x).max(),
    "bf16": lambda x: 2.0**-8 * np.abs(x) + 1e-40,
    "int8": lambda x: np.repeat(np.maximum.reduceat(np.abs(x), np.arange(0, len(x), 256)), 256)[: len(x)] / 253 + 1e-43,
}
vectors = arrays.arrays(
    np.float32,
    st.one_of(st.integers(1, 40), st.just(1000)),
    elements=st.floats(-(2.0**100), 2.0**100, width=32, allow_subnormal=False),
)
few = settings(max_examples=60)


def gradient_codec(wire: str) -> GradientCodec:
    found = gradient_compression.gradient_codec(wire)
    assert found is not None
    return found


def through(codec: GradientCodec, values: np.ndarray, residual: np.ndarray | None = None) -> np.ndarray:
    """Return the decoded values, whatever the target held before."""
    data = memoryview(bytearray(codec.size_bytes(len(values))))
    codec.encode(torch.from_numpy(values), data, None if residual is None else torch.from_numpy(residual))
    found = np.full_like(values, 7)
    codec.fill(data, torch.from_numpy(found))
    return found


@pytest.mark.parametrize("count", [0, 1, 255, 257, 70_000])
@pytest.mark.parametrize("name", NAMES)
def test_any_number_of_values_takes_the_stated_bytes_and_comes_out_near(name: str, count: int) -> None:
    codec, values = gradient_codec(name), np.random.default_rng(count).normal(size=count).astype(np.float32)
    assert codec.size_bytes(count) % 8 == 0
    data = memoryview(bytearray(b"\xff" * codec.size_bytes(count)))  # what lay there before must not show
    codec.encode(torch.from_numpy(values), data)
    found = np.ones_like(values)
    codec.add(data, torch.from_numpy(found), 2.0)
    if name != "topk(0.3)":
        np.testing.assert_allclose(found, 1 + 2 * values, rtol=0.02, atol=0.1)
    else:
        assert count < 2 or 0.6 < np.mean(found == 1) < 0.71


@few
@given(values=vectors)
def test_what_loses_nothing_gives_the_same_bits(values: np.ndarray) -> None:
    assert through(gradient_codec("topk(1)"), values).tobytes() == (values + 0.0).tobytes()


@pytest.mark.parametrize("name", LOSSY)
@few
@given(values=vectors)
def test_errors_keep_to_their_bound(name: str, values: np.ndarray) -> None:
    error = np.abs(through(gradient_codec(name), values).astype(np.float64) - values)
    assert np.all(error <= LOSSY[name](values.astype(np.float64)))


def test_small_gradients_survive_half_precision() -> None:
    values = np.array([3e-9, -2e-12, 1e-8, 0.0], np.float32)
    assert np.any(values.astype(np.float16) != values)
    np.testing.assert_allclose(through(gradient_codec("fp16"), values), values, rtol=1e-3)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_stays_so_and_spoils_no_far_value(name: str, bad: float) -> None:
    values = np.linspace(-3, 3, 1000, dtype=np.float32)
    values[700] = bad
    found = through(gradient_codec(name), values)
    assert not np.isfinite(found[700])
    assert np.isfinite(found[:512]).all()
    if name != "int8":
        assert np.array_equal(found[700], bad, equal_nan=True)


@few
@given(pushes=st.lists(arrays.arrays(np.float32, 50, elements=st.floats(-99, 99, width=32)), min_size=1, max_size=6))
def test_error_feedback_neither_loses_nor_invents(pushes: list[np.ndarray]) -> None:
    codec, residual = gradient_codec("topk(0.1)"), np.zeros(50, np.float32)
    for values in pushes:
        whole = values + residual
        found = through(codec, values, residual)
        assert (found + residual).tobytes() == (whole + 0.0).tobytes()
        assert np.count_nonzero(found) <= 5
        assert np.abs(found[found != 0]).min(initial=np.inf) >= np.abs(residual).max()


def test_what_did_not_count_is_taken_back_into_the_residual() -> None:
    codec, values = gradient_codec("topk(0.5)"), np.array([4.0, 1.0, -3.0, 2.0], np.float32)
    residual, data = np.zeros(4, np.float32), memoryview(bytearray(codec.size_bytes(4)))
    codec.encode(torch.from_numpy(values), data, torch.from_numpy(residual))
    assert residual.tolist() == [0, 1, 0, 2]
    codec.add(data, torch.from_numpy(residual))
    assert residual.tolist() == values.tolist()


def test_a_place_outside_is_refused() -> None:
    codec = gradient_codec("topk(1)")
    with pytest.raises(ValueError, match="outside"):
        codec.add(memoryview(bytearray(b"\xff" * 32)), torch.zeros(4))


@pytest.mark.parametrize("bad", [None, np.nan, np.inf])
@pytest.mark.parametrize("scale", [1, 1e-12, 1e30, 1e-40, 0])
@pytest.mark.parametrize("name", ["fp16", "bf16"])
def test_fill_and_add_read_the_same_numbers(name: str, scale: float, bad: float | None) -> None:
    random, codec = np.random.default_rng(0), gradient_codec(name)
    values = torch.from_numpy((random.normal(size=70_001) * scale).astype(np.float32))
    values[9] = 0 if bad is None else bad
    data = memoryview(bytearray(codec.size_bytes(len(values))))
    codec.encode(values, data)
    plain, scaled = torch.empty(len(values)), torch.empty(len(values))
    codec.fill(data, plain)
    codec.fill(data, scaled, 0.5)
    torch.testing.assert_close(scaled, 0.5 * plain, rtol=0, atol=1e-44, equal_nan=True)
    added = torch.ones(len(values))
    codec.add(data, added, 0.5)
    torch.testing.assert_close(added, 1 + scaled, rtol=0, atol=0, equal_nan=True)


@given(
    st.lists(st.sampled_from([0.0, 0.5, 1.0, 2.0, np.nan, np.inf]), max_size=30),
    st.sampled_from([1, 61, 1000]),
    st.floats(0.001, 1),
)
@few
def test_topk_sends_the_largest_whatever_the_sample_says(some: list[float], times: int, share: float) -> None:
    values = np.repeat(np.array(some, np.float32), times)
    codec, residual = gradient_codec(f"topk({share})"), np.zeros(len(values), np.float32)
    data = memoryview(bytearray(codec.size_bytes(len(values))))
    codec.encode(torch.from_numpy(values), data, torch.from_numpy(residual))
    sent = np.frombuffer(data, np.uint32, len(data) // 8)
    assert len(set(sent.tolist())) == len(sent)
    np.testing.assert_array_equal(np.sort(values[sent]), np.sort(values)[len(values) - len(sent) :])


@pytest.mark.parametrize("text", ["half", "topk", "topk(0)", "topk(2)", "topk(x)", "topk(nan)", ""])
def test_an_unknown_form_is_refused(text: str) -> None:
    with pytest.raises(PlanError, match="is not known"):
        gradient_compression.gradient_codec(text)
