"""What a program tells Keras and torch for its whole process, and what that does in another one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import cloudpickle
import keras
import numpy as np
import pytest
import torch

import trainwright as tw
from tests.programs.keras.engines import plan_of, spec_of
from trainwright.core.pickling import dumps, loads
from trainwright.strategies import single_rank_engine


def settings() -> tuple[Any, ...]:
    named = keras.config.floatx(), keras.config.epsilon(), keras.config.image_data_format()
    return (*named, keras.config.dtype_policy().name, torch.get_default_dtype())


def set_all(floatx: str, epsilon: float, image_data_format: str, policy: str, dtype: torch.dtype) -> None:
    keras.config.set_floatx(floatx)
    keras.config.set_epsilon(epsilon)
    keras.config.set_image_data_format(image_data_format)
    keras.config.set_dtype_policy(policy)
    torch.set_default_dtype(dtype)


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    before = settings()
    yield
    set_all(*before)


def test_settings_of_the_whole_process_go_with_what_is_sent() -> None:
    before, own = settings(), ("float64", 1e-3, "channels_first", "mixed_bfloat16", torch.float64)
    set_all(*own)
    packed = dumps("job")
    set_all(*before)
    assert loads(packed) == "job" and settings() == own


def test_a_policy_that_is_told_apart_from_floats_stays_apart() -> None:
    """Layers are made before set_floatx: the policy of those that follow is still float32."""
    before = settings()
    keras.layers.Dense(1)
    keras.config.set_floatx("float64")
    packed = dumps("job")
    set_all(*before)
    loads(packed)
    assert settings()[:4] == ("float64", before[1], before[2], "float32")


def test_nothing_is_sent_where_nothing_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker would import the framework for it."""
    monkeypatch.setattr("keras.src.saving.object_registration.GLOBAL_CUSTOM_OBJECTS", {})
    assert cloudpickle.loads(dumps("job")) == {}


def test_a_model_in_bf16_leaves_the_policy_of_this_process_alone() -> None:
    x = np.ones((2, 4), "float32")
    job = tw.Job(
        name="bf16", train=tw.datasets.table({"x": x, "y": x}), inputs="x", targets="y", batch_size=2,
        model=lambda: keras.Sequential([keras.Input((4,)), keras.layers.Dense(4)]),
        loss=keras.losses.MeanSquaredError(), optimizer=lambda variables: keras.optimizers.SGD(),
    )  # fmt: skip
    engine: Any = single_rank_engine(spec_of(job, 1), replace(plan_of(job), precision="bf16"), guest=True)
    assert engine.replica.model.layers[0].compute_dtype == "bfloat16"
    assert keras.config.dtype_policy().name == "float32"
