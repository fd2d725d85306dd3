"""What a Keras model costs, beside the same model in torch."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from torch import nn

import trainwright as tw
from tests.support.torch_profile import profile_model as profile_torch
from trainwright.core.model_profile import ModelProfile
from trainwright.planning.code_fingerprint import CodeFingerprints
from trainwright.strategies.tensorflow.training.keras_profile import profile_model

NUMBERS = ("parameters", "flops", "output_numbers", "kept_numbers", "traffic_numbers", "matmuls", "launches")
layers = keras.layers


def total(profile: ModelProfile, name: str) -> float:
    return sum(getattr(layer, name) for layer in profile.layers)


def convolutional() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((32, 32, 3)),
            layers.Conv2D(32, 3, padding="same", activation="relu"),
            layers.MaxPooling2D(),
            layers.Conv2D(64, 3, padding="same"),
            layers.ReLU(),
            layers.Flatten(),
            layers.Dense(256, activation="relu"),
            layers.Dense(10),
        ]
    )


def the_same_in_torch() -> nn.Module:
    first, second = nn.Conv2d(3, 32, 3, padding=1), nn.Conv2d(32, 64, 3, padding=1)
    front = (first, nn.ReLU(), nn.MaxPool2d(2), second, nn.ReLU(), nn.Flatten())
    return nn.Sequential(*front, nn.Linear(64 * 16 * 16, 256), nn.ReLU(), nn.Linear(256, 10))


def test_a_keras_model_costs_what_the_same_in_torch_costs() -> None:
    profile = profile_model(convolutional, {"x": np.zeros((2, 32, 32, 3), np.float32)}, ("x",))
    other = profile_torch(the_same_in_torch, {"x": np.zeros((2, 3, 32, 32), np.float32)}, ("x",))
    assert not profile.untraced and not other.untraced
    assert [layer.parameters for layer in profile.layers] == [layer.parameters for layer in other.layers]
    for name in NUMBERS:
        exact = name in ("parameters", "flops", "output_numbers", "matmuls")
        assert total(profile, name) == pytest.approx(total(other, name), rel=0 if exact else 0.15), name
    node, plan = tw.Cluster.parse("4xA100-80GB"), tw.Plan.parse("dp=4")
    one, same = (tw.estimate(each, node, plan, batch_size=4096, precision="bf16") for each in (profile, other))
    assert one.step_s == pytest.approx(same.step_s, rel=0.05)
    assert one.stage_memory_bytes[0] == pytest.approx(same.stage_memory_bytes[0], rel=0.1)


def normed() -> keras.Model:
    image = keras.Input((16, 16, 8))
    inner = keras.Sequential([layers.DepthwiseConv2D(3, padding="same"), layers.BatchNormalization(), layers.ReLU()])
    wide = layers.Conv2DTranspose(4, 2, strides=2)(layers.Add()([inner(image), image]))
    pooled = layers.Dropout(0.1)(layers.GlobalAveragePooling2D()(wide))
    return keras.Model(image, layers.Dense(5)(layers.LayerNormalization()(pooled)))


class Normed(nn.Module):
    """Likewise in torch."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.BatchNorm2d(8), nn.ReLU())
        self.wide, self.dropout = nn.ConvTranspose2d(8, 4, 2, 2), nn.Dropout(0.1)
        self.norm, self.last = nn.LayerNorm(4), nn.Linear(4, 5)

    def forward(self, x):  # type: ignore[no-untyped-def]
        return self.last(self.norm(self.dropout(self.wide(self.inner(x) + x).mean((2, 3)))))


def test_nested_models_and_graphs_of_layers() -> None:
    profile = profile_model(normed, {"x": np.zeros((2, 16, 16, 8), np.float32)}, ("x",))
    other = profile_torch(Normed, {"x": np.zeros((2, 8, 16, 16), np.float32)}, ("x",))
    assert profile.inexact == other.inexact == ("batch_norm",) and not profile.untraced
    for name in ("parameters", "flops", "matmuls"):
        assert total(profile, name) == total(other, name), name
    assert total(profile, "kept_numbers") == pytest.approx(total(other, "kept_numbers"), rel=0.2)
    assert total(profile, "traffic_numbers") > total(other, "traffic_numbers"), "Keras norms in several operations"


def attending() -> keras.Model:
    tokens = keras.Input((64,), dtype="int32")
    x = layers.Embedding(1000, 128)(tokens)
    seen = layers.MultiHeadAttention(4, 32, dropout=0.1)(x, x, use_causal_mask=True)
    x = layers.LayerNormalization()(x + seen)
    return keras.Model(tokens, layers.Dense(1000)(x))


def test_products_of_attention_are_counted_and_its_scores_kept() -> None:
    profile = profile_model(attending, {"ids": np.zeros((3, 64), np.int32)}, ("ids",))
    assert not profile.untraced
    products, attention, logits = 4 * 2 * 64 * 128 * 128, 4 * 64 * 64 * 128, 2 * 64 * 128 * 1000
    assert profile.flops == products + attention + logits
    scores, attended = 4 * 64 * 64, next(each for each in profile.layers if "attention" in each.name)
    assert 2 * scores <= attended.kept_numbers <= 3 * scores + 8 * 64 * 128
    assert profile.layers[0].name.startswith("embedding") and profile.layers[0].traffic_numbers < 1000 * 128


def test_a_step_of_ones_own_and_a_model_that_is_no_graph() -> None:
    class Asking(keras.Model):
        def __init__(self, asks: bool) -> None:
            super().__init__()
            self.dense, self.asks = layers.Dense(4), asks

        def call(self, x):  # type: ignore[no-untyped-def]
            return self.dense(x) if not self.asks or float(tf.reduce_sum(x)) > 0 else x

    def step(model, batch):  # type: ignore[no-untyped-def]
        return tf.reduce_mean((model(batch["x"]) - batch["y"]) ** 2, axis=-1)

    sample = {"x": np.zeros((2, 8), np.float32), "y": np.zeros((2, 4), np.float32)}
    model, asking = Asking(asks=False), Asking(asks=True)
    for each in (model, asking):
        each(np.ones((1, 8), np.float32))
    stepped = profile_model(model, sample, (), step=step)
    assert stepped.flops == 2 * 8 * 4 and not stepped.untraced
    counted = profile_model(asking, sample, ("x",))
    assert counted.parameters == 36 and counted.untraced and counted.flops == 2 * 36
    assert "call" not in vars(asking.dense), "nothing is left behind"


def test_what_tf_function_wraps_counts_for_the_fingerprint() -> None:
    def caller(wrapped: Any) -> Any:
        return lambda x: wrapped(x)

    one, again, other = (caller(tf.function(call)) for call in (lambda x: x * 1, lambda x: x * 1, lambda x: x * 2))
    assert CodeFingerprints().digest(one) == CodeFingerprints().digest(again) != CodeFingerprints().digest(other)
