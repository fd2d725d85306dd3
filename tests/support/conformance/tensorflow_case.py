"""What the suite needs of TensorFlow: the jobs, a loop written by hand, and a look into the files."""

from __future__ import annotations

import functools
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf

from tests.support.conformance.problems import CLASSES, CLIP, FEATURES, HIDDEN, RATE, Ids, Problem, schedule
from trainwright.core.data import Columns, Terms
from trainwright.core.engine import ModelSpec

Arrays = Mapping[str, npt.NDArray[Any]]
TRAINED, VALUE = "optimizer/_trainable_variables/{}", "/.ATTRIBUTES/VARIABLE_VALUE"


def spec(problem: Problem) -> ModelSpec:
    """The job."""
    losses = {"cross_entropy": cross_entropy, "weighted": weighted, "tokens": tokens}
    return ModelSpec(
        model=functools.partial(net, problem),
        loss=_flat if problem.flat else losses[problem.loss],
        optimizer=functools.partial(optimizer, problem.optimizer),
        total_steps=problem.steps,
        inputs=problem.inputs,
        targets=problem.targets,
        metrics={"accuracy": accuracy} if problem.loss == "cross_entropy" else {},
        schedule=schedule if problem.schedule else None,
        clip_norm=CLIP if problem.clip else None,
        seed=problem.seed,
    )


def net(problem: Problem) -> keras.Model:
    """Two layers on the joined inputs."""
    inputs = [keras.Input((FEATURES,), dtype=problem.dtype, name=name) for name in problem.inputs]
    joined = inputs[0] if len(inputs) == 1 else keras.layers.Concatenate(dtype=problem.dtype)(inputs)
    hidden = keras.layers.Dense(HIDDEN, activation="tanh", dtype=problem.dtype)(joined)
    dropped = keras.layers.Dropout(problem.dropout, dtype=problem.dtype)(hidden)
    outputs = keras.layers.Dense(CLASSES, dtype=problem.dtype)(dropped)
    if problem.flat:
        outputs = keras.layers.Lambda(lambda value: tf.reshape(value, (-1,)), dtype=problem.dtype)(outputs)
    return keras.Model(inputs, outputs)


def optimizer(name: str, parameters: Any) -> keras.optimizers.Optimizer:
    if name == "adam":
        return keras.optimizers.Adam(RATE)
    if name == "averaged":
        return keras.optimizers.SGD(RATE, use_ema=True, ema_momentum=0.8)
    return keras.optimizers.SGD(RATE, momentum=0.9)


def cross_entropy(outputs: tf.Tensor, targets: tf.Tensor) -> tf.Tensor:
    return tf.nn.sparse_softmax_cross_entropy_with_logits(targets, outputs)


def weighted(outputs: tf.Tensor, targets: Sequence[tf.Tensor]) -> Terms:
    return Terms(cross_entropy(outputs, targets[0]), targets[1])


def tokens(outputs: tf.Tensor, targets: Sequence[tf.Tensor]) -> Terms:
    return Terms((outputs - targets[0]) ** 2, targets[1])


def accuracy(outputs: tf.Tensor, targets: tf.Tensor) -> tf.Tensor:
    return tf.cast(tf.equal(tf.argmax(outputs, axis=1), targets), tf.float64)


def _flat(outputs: tf.Tensor, targets: object) -> tf.Tensor:
    return outputs**2


def parameters(files: Mapping[str, bytes]) -> dict[str, npt.NDArray[Any]]:
    """Parameters by their number in the optimizer: its path to them is no longer than the model's."""
    return {name: value for name, value in state(files).items() if name.startswith(TRAINED.format(""))}


def state(files: Mapping[str, bytes]) -> dict[str, npt.NDArray[Any]]:
    """All arrays of a checkpoint by name, and its facts as one."""
    with tempfile.TemporaryDirectory() as folder:
        for name, data in files.items():
            (Path(folder) / name).write_bytes(data)
        reader = tf.train.load_checkpoint(f"{folder}/state")
        names = [name for name in reader.get_variable_to_shape_map() if name.endswith(VALUE)]
        found = {name: np.asarray(reader.get_tensor(name)) for name in sorted(names) if "save_counter" not in name}
    return {**found, "state.json": np.array(files["state.json"])}


def by_hand(
    problem: Problem, start: Arrays, steps: Sequence[Ids], data: Columns
) -> tuple[list[float], list[float], Arrays]:
    """Losses, gradient norms and last parameters of a plain loop over whole global batches, in TensorFlow."""
    model = net(problem)
    by_name = {TRAINED.format(place) + VALUE: variable for place, variable in enumerate(model.trainable_variables)}
    for name, value in start.items():
        by_name[name].assign(value)
    rule, losses, norms = optimizer(problem.optimizer, model.trainable_variables), [], []
    rate = float(rule.learning_rate.numpy())  # Keras keeps it in float32
    for step, ids in enumerate(steps):
        batch = {name: tf.constant(np.asarray(array[ids])) for name, array in data.items()}
        given = [batch[name] for name in problem.inputs]
        with tf.GradientTape() as tape:
            outputs = model(given[0] if len(given) == 1 else given)
            values, weights = _terms(problem, outputs, batch)
            total = tf.reduce_sum(weights)
            loss = tf.reduce_sum(values * weights) / total
        if float(total) == 0:
            losses.append(0.0)
            norms.append(0.0)
            continue
        gradients = tape.gradient(loss, model.trainable_variables)
        norm = float(tf.linalg.global_norm(gradients))
        if problem.clip and norm > CLIP:
            gradients = [gradient * (CLIP / norm) for gradient in gradients]
        if problem.schedule:
            rule.learning_rate = rate * schedule(step, problem.steps)
        rule.apply(gradients, model.trainable_variables)
        losses.append(float(loss))
        norms.append(norm)
    rule.finalize_variable_values(model.trainable_variables)
    return losses, norms, {name: variable.numpy() for name, variable in by_name.items()}


def _terms(problem: Problem, outputs: tf.Tensor, batch: Mapping[str, tf.Tensor]) -> tuple[tf.Tensor, tf.Tensor]:
    if problem.loss == "tokens":
        return (outputs - batch["t"]) ** 2, batch["m"]
    values = cross_entropy(outputs, batch["y"])
    return values, batch["w"] if problem.loss == "weighted" else tf.ones_like(values)
