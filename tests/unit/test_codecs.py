"""Forms on the wire: what comes out is near what went in, and nothing that is no number passes unseen."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from trainwright.core.errors import PlanError
from trainwright.strategies.torch.ps.gradient_compression import GradientCodec, gradient_codec

NAMES = ("full", "fp16", "bf16", "int8", "topk(0.3)", "topk(1)")
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


def through(codec: GradientCodec, values: np.ndarray, residual: np.ndarray | None = None) -> np.ndarray:
    """What comes out at the other end, whatever was there before."""
    data = memoryview(bytearray(codec.size_bytes(len(values))))
    codec.encode(values, data, residual)
    found = np.full_like(values, 7)
    codec.decode(data, found)
    return found


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("count", [0, 1, 255, 257, 70_000])
@pytest.mark.parametrize("name", NAMES)
def test_any_number_of_values_takes_the_stated_bytes_and_comes_out_near(name: str, count: int, dtype: type) -> None:
    codec, values = gradient_codec(name, dtype), np.random.default_rng(count).normal(size=count).astype(dtype)
    assert codec.size_bytes(count) % 8 == 0
    data = memoryview(bytearray(b"\xff" * codec.size_bytes(count)))  # what lay there before must not show
    codec.encode(values, data)
    found = np.ones_like(values)
    codec.add(data, found, 2.0)
    if name != "topk(0.3)":
        np.testing.assert_allclose(found, 1 + 2 * values, rtol=0.02, atol=0.1)
    else:
        assert count < 2 or 0.6 < np.mean(found == 1) < 0.71


@pytest.mark.parametrize("name", ["full", "topk(1)"])
@few
@given(values=vectors)
def test_what_loses_nothing_gives_the_same_bits(name: str, values: np.ndarray) -> None:
    assert through(gradient_codec(name), values).tobytes() == (values + 0.0).tobytes()


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
    codec, values = gradient_codec("topk(0.5)"), np.array([4.0, 1.0, -3.0, 2.0])
    residual, data = np.zeros(4), memoryview(bytearray(codec.size_bytes(4)))
    codec.encode(values, data, residual)
    assert residual.tolist() == [0, 1, 0, 2]
    codec.add(data, residual)
    assert residual.tolist() == values.tolist()


def test_a_place_outside_is_refused() -> None:
    codec = gradient_codec("topk(1)")
    with pytest.raises(ValueError, match="outside"):
        codec.add(memoryview(b"\xff" * 32), np.zeros(4))


@pytest.mark.parametrize("bad", [None, np.nan, np.inf])
@pytest.mark.parametrize("scale", [1, 1e-12, 1e30, 1e-40, 0])
@pytest.mark.parametrize("name", ["fp16", "bf16"])
def test_torch_writes_the_same_bits_and_reads_the_same_numbers(name: str, scale: float, bad: float | None) -> None:
    import torch

    from trainwright.strategies.torch.ps.gradient_compression import HALF_PRECISION

    random, codec, narrow = np.random.default_rng(0), gradient_codec(name), HALF_PRECISION[name]
    values = (random.normal(size=70_001) * scale).astype(np.float32)
    values[9] = 0 if bad is None else bad
    ours, theirs = (memoryview(bytearray(codec.size_bytes(len(values)))) for _ in range(2))
    codec.encode(values, ours)
    narrow.encode(torch.from_numpy(values), theirs)
    same = np.asarray(ours).view(np.uint16) == np.asarray(theirs).view(np.uint16)
    assert same.sum() >= len(same) - (bad is np.nan)  # whose bits are free
    for factor in (1.0, 0.37):
        found, there = random.normal(size=len(values)).astype(np.float32), torch.empty(len(values))
        added = torch.from_numpy(found.copy())
        codec.add(ours, found, factor)
        narrow.add(theirs, added, factor)
        np.testing.assert_array_equal(added.numpy(), found)
        found[:] = 0
        codec.add(ours, found, factor)
        narrow.fill(theirs, there, factor)
        np.testing.assert_array_equal(there.numpy(), found)


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
    codec.encode(values, data, residual)
    sent = np.frombuffer(data, np.uint32, len(data) // 8)
    assert len(set(sent.tolist())) == len(sent)
    np.testing.assert_array_equal(np.sort(values[sent]), np.sort(values)[len(values) - len(sent) :])


@pytest.mark.parametrize("text", ["half", "topk", "topk(0)", "topk(2)", "topk(x)", "topk(nan)", ""])
def test_an_unknown_form_is_refused(text: str) -> None:
    with pytest.raises(PlanError, match="no form on the wire"):
        gradient_codec(text)
