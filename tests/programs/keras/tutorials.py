"""Programs of tensorflow.org and keras.io on small data: each as a job, and as its authors run it on one device.

A custom training loop is a function of `loop`: `tw.CustomLoop` in a job, `PlainLoop` beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import trainwright as tw

BATCH, EPOCHS, ROWS, TESTED = 16, 2, 45, 17  # the last batches have 13 rows and one: fewer than workers
RANDOM = np.random.default_rng(0)
SIDE, CLASSES, STEPS, NOISE = 8, 3, 6, 2
layers, losses, metrics = keras.layers, keras.losses, keras.metrics


def normal(*shape: int) -> Any:
    return RANDOM.normal(size=(ROWS + TESTED, *shape)).astype("float32")


def whole(most: int, *shape: int) -> Any:
    return RANDOM.integers(0, most, (ROWS + TESTED, *shape))


SENTENCES = np.array(["a good film", "a bad film!", "so good", "bad, bad acting", "not so bad"])
BREEDS = np.array(["tabby", "siamese", "poodle"])
COLUMNS: Mapping[str, Any] = {
    "images": normal(SIDE, SIDE, 1),
    "labels": whole(CLASSES),
    "noise": normal(NOISE),
    "text": SENTENCES[whole(len(SENTENCES), 1)],
    "yes": whole(2, 1).astype("float32"),
    "age": np.abs(normal(1)) * 9,
    "breed": BREEDS[whole(len(BREEDS), 1)],
    "photos": whole(5, 1),
    "window": normal(STEPS, 2),
    "next": normal(1),
    "user": whole(7),
    "movie": whole(9),
    "rating": np.abs(normal(1)) % 1,
    "mask": whole(CLASSES, SIDE, SIDE),
}


# --- custom training loops --------------------------------------------------------------------------------------------


class PlainLoop:
    """The loop around the steps of TensorFlow's tutorials, on one device."""

    def __init__(self, train_step: Any, test_step: Any = None, reduction: str = "", **parts: Any) -> None:
        self.train_step, self.test_step = tf.function(train_step), tf.function(test_step) if test_step else None
        self.models = [part for part in parts.values() if isinstance(part, keras.Model)]
        self.metrics = [part for part in parts.values() if isinstance(part, metrics.Metric)]

    def fit(self, data: Any, tested: Any) -> tuple[list[float], dict[str, float]]:
        """Losses of the steps, and metrics of the evaluation at the end."""
        found = []
        for _ in range(EPOCHS):
            for metric in self.metrics:
                metric.reset_state()
            for batch in data:
                told = self.train_step(batch)
                found.append(float(next(iter(told.values())) if isinstance(told, dict) else told))
        for metric in self.metrics:
            metric.reset_state()
        for batch in tested if self.test_step else ():
            self.test_step(batch)
        return found, {each.name: float(each.result()) for each in self.metrics if each.name.startswith("test")}


def convolutional() -> keras.Model:
    keras.utils.set_random_seed(1)
    return keras.Sequential(
        [
            keras.Input((SIDE, SIDE, 1)),
            layers.Conv2D(4, 3, activation="relu", kernel_regularizer="l2"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(CLASSES, kernel_regularizer="l2"),
        ]
    )


def custom_training(loop: Any = tw.CustomLoop) -> Any:
    """tensorflow.org/tutorials/distribute/custom_training."""
    loss_object = losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")

    def compute_loss(labels: Any, predictions: Any, model_losses: Any) -> Any:
        per_example_loss = loss_object(labels, predictions)
        loss = tf.nn.compute_average_loss(per_example_loss)
        if model_losses:
            loss += tf.nn.scale_regularization_loss(tf.add_n(model_losses))
        return loss

    test_loss = metrics.Mean(name="test_loss")
    train_accuracy = metrics.SparseCategoricalAccuracy(name="train_accuracy")
    test_accuracy = metrics.SparseCategoricalAccuracy(name="test_accuracy")
    model = convolutional()
    optimizer = keras.optimizers.Adam(learning_rate=0.01)

    def train_step(inputs: Any) -> Any:
        images, labels = inputs
        with tf.GradientTape() as tape:
            predictions = model(images, training=True)
            loss = compute_loss(labels, predictions, model.losses)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        train_accuracy.update_state(labels, predictions)
        return loss

    def test_step(inputs: Any) -> None:
        images, labels = inputs
        predictions = model(images, training=False)
        test_loss.update_state(loss_object(labels, predictions))
        test_accuracy.update_state(labels, predictions)

    return loop(
        train_step, test_step, model=model, optimizer=optimizer, train_accuracy=train_accuracy, test_loss=test_loss,
        test_accuracy=test_accuracy,
    )  # fmt: skip


def multi_worker_loop(loop: Any = tw.CustomLoop) -> Any:
    """tensorflow.org/tutorials/distribute/multi_worker_with_ctl: with the global batch size by hand, and a clipped
    gradient."""
    model = convolutional()
    optimizer = keras.optimizers.RMSprop(0.01, global_clipnorm=0.1)
    train_accuracy = metrics.SparseCategoricalAccuracy(name="train_accuracy")

    @tf.function
    def step_fn(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            predictions = model(x, training=True)
            each = losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")(y, predictions)
            loss = tf.reduce_sum(each) * (1.0 / BATCH)
        grads = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(grads, model.trainable_variables, strict=True))
        train_accuracy.update_state(y, predictions)
        return loss

    def step(inputs: Any) -> Any:
        return step_fn(*inputs)

    return loop(step if loop is PlainLoop else step_fn, model=model, optimizer=optimizer, train_accuracy=train_accuracy)


def autoencoder(loop: Any = tw.CustomLoop) -> Any:
    """tensorflow.org/tutorials/generative/cvae: the loss is a mean of the rows. The noise is in the data."""
    keras.utils.set_random_seed(2)
    encoder = keras.Sequential(
        [keras.Input((SIDE, SIDE, 1)), layers.Conv2D(4, 3, 2, "same"), layers.Flatten(), layers.Dense(2 * NOISE)]
    )
    decoder = keras.Sequential(
        [
            keras.Input((NOISE,)),
            layers.Dense(SIDE * SIDE, activation="relu"),
            layers.Reshape((SIDE // 2, SIDE // 2, 4)),
            layers.Conv2DTranspose(1, 3, 2, "same"),
        ]
    )
    optimizer, test_elbo = keras.optimizers.Adam(0.01), metrics.Mean(name="test_elbo")

    def compute_losses(x: Any, noise: Any) -> Any:
        mean, logvar = tf.split(encoder(x), 2, axis=1)
        z = noise * tf.exp(logvar * 0.5) + mean
        cross = tf.nn.sigmoid_cross_entropy_with_logits(logits=decoder(z), labels=tf.sigmoid(x))
        divergence = 0.5 * tf.reduce_sum(mean**2 + tf.exp(logvar) - logvar - 1.0, axis=1)
        return tf.reduce_sum(cross, axis=[1, 2, 3]) + divergence

    def train_step(inputs: Any) -> Any:
        weights = encoder.trainable_variables + decoder.trainable_variables
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(compute_losses(*inputs))
        optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        return loss

    def test_step(inputs: Any) -> None:
        test_elbo(-compute_losses(*inputs))

    return loop(
        train_step, test_step, reduction="mean", encoder=encoder, decoder=decoder, optimizer=optimizer,
        test_elbo=test_elbo,
    )  # fmt: skip


def adversarial(loop: Any = tw.CustomLoop) -> Any:
    """tensorflow.org/tutorials/generative/dcgan: two optimizers and two tapes. The noise is in the data."""
    keras.utils.set_random_seed(3)
    generator = keras.Sequential(
        [keras.Input((NOISE,)), layers.Dense(SIDE * SIDE, "tanh"), layers.Reshape((SIDE, SIDE, 1))]
    )
    discriminator = keras.Sequential(
        [keras.Input((SIDE, SIDE, 1)), layers.Conv2D(4, 3, 2), layers.LeakyReLU(), layers.Flatten(), layers.Dense(1)]
    )
    cross_entropy = losses.BinaryCrossentropy(from_logits=True)
    generator_optimizer, discriminator_optimizer = keras.optimizers.Adam(1e-2), keras.optimizers.Adam(2e-2)

    def train_step(inputs: Any) -> Any:
        images, noise = inputs
        with tf.GradientTape() as gen_tape, tf.GradientTape() as disc_tape:
            generated_images = generator(noise, training=True)
            real_output = discriminator(images, training=True)
            fake_output = discriminator(generated_images, training=True)
            gen_loss = cross_entropy(tf.ones_like(fake_output), fake_output)
            disc_loss = cross_entropy(tf.ones_like(real_output), real_output)
            disc_loss += cross_entropy(tf.zeros_like(fake_output), fake_output)
        gradients = gen_tape.gradient(gen_loss, generator.trainable_variables)
        generator_optimizer.apply_gradients(zip(gradients, generator.trainable_variables, strict=True))
        gradients = disc_tape.gradient(disc_loss, discriminator.trainable_variables)
        discriminator_optimizer.apply_gradients(zip(gradients, discriminator.trainable_variables, strict=True))
        return {"gen_loss": gen_loss, "disc_loss": disc_loss}

    return loop(
        train_step, reduction="mean", generator=generator, discriminator=discriminator,
        generator_optimizer=generator_optimizer, discriminator_optimizer=discriminator_optimizer,
    )  # fmt: skip


# --- programs that call fit -------------------------------------------------------------------------------------------


def text_classifier() -> keras.Model:
    """tensorflow.org/tutorials/keras/text_classification, with the vectorization in the model."""
    keras.utils.set_random_seed(4)
    vectorize = layers.TextVectorization(max_tokens=12, output_sequence_length=4)
    vectorize.adapt(SENTENCES)
    model = keras.Sequential(
        [
            keras.Input((1,), dtype="string"),
            vectorize,
            layers.Embedding(12, 4),
            layers.GlobalAveragePooling1D(),
            layers.Dense(1, activation="sigmoid"),
        ]
    )
    model.compile("adam", losses.BinaryCrossentropy(), metrics=[metrics.BinaryAccuracy(threshold=0.5)])
    return model


def structured() -> keras.Model:
    """tensorflow.org/tutorials/structured_data/preprocessing_layers."""
    keras.utils.set_random_seed(5)
    age, photos = keras.Input((1,), name="age"), keras.Input((1,), dtype="int64", name="photos")
    breed = keras.Input((1,), dtype="string", name="breed")
    normalization, lookup = layers.Normalization(), layers.StringLookup(output_mode="multi_hot")
    normalization.adapt(COLUMNS["age"][:ROWS])
    lookup.adapt(BREEDS)
    bins = layers.CategoryEncoding(3, output_mode="multi_hot")(layers.Discretization([1.0, 3.0])(photos))
    x = layers.concatenate([normalization(age), bins, lookup(breed)])
    outputs = layers.Dense(1)(layers.Dense(8, activation="relu")(x))
    model = keras.Model({"age": age, "photos": photos, "breed": breed}, outputs)
    accuracy = metrics.BinaryAccuracy(threshold=0.0)
    model.compile("adam", losses.BinaryCrossentropy(from_logits=True), metrics=[accuracy, metrics.AUC(name="auc")])
    return model


def time_series() -> keras.Model:
    """tensorflow.org/tutorials/structured_data/time_series: a convolution and an LSTM."""
    keras.utils.set_random_seed(6)
    model = keras.Sequential(
        [
            keras.Input((STEPS, 2)),
            layers.Conv1D(4, 3, activation="relu"),
            layers.LSTM(4, return_sequences=True),
            layers.LSTM(4),
            layers.Dense(1),
        ]
    )
    model.compile(keras.optimizers.Adam(0.01), losses.MeanSquaredError(), metrics=[metrics.MeanAbsoluteError()])
    return model


class RecommenderNet(keras.Model):
    """keras.io/examples/structured_data/collaborative_filtering_for_movielens."""

    def __init__(self) -> None:
        super().__init__()
        self.user = layers.Embedding(7, 4, embeddings_initializer="he_normal", embeddings_regularizer="l2")
        self.user_bias = layers.Embedding(7, 1)
        self.movie = layers.Embedding(9, 4, embeddings_initializer="he_normal", embeddings_regularizer="l2")
        self.movie_bias = layers.Embedding(9, 1)

    def call(self, inputs: Any) -> Any:
        user, movie = inputs
        match = tf.reduce_sum(self.user(user) * self.movie(movie), axis=1, keepdims=True)
        return tf.nn.sigmoid(match + self.user_bias(user) + self.movie_bias(movie))


def recommender() -> keras.Model:
    keras.utils.set_random_seed(7)
    model = RecommenderNet()
    model.compile(keras.optimizers.Adam(0.01), losses.BinaryCrossentropy())
    return model


def segmentation() -> keras.Model:
    """tensorflow.org/tutorials/images/segmentation: a U-Net with one skip."""
    keras.utils.set_random_seed(8)
    inputs = keras.Input((SIDE, SIDE, 1))
    down = layers.Conv2D(4, 3, 2, "same", activation="relu")(inputs)
    up = layers.Conv2DTranspose(4, 3, 2, "same", activation="relu")(down)
    outputs = layers.Conv2D(CLASSES, 3, padding="same")(layers.Concatenate()([up, inputs]))
    model = keras.Model(inputs, outputs)
    loss = losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, metrics=["accuracy", metrics.MeanIoU(CLASSES, sparse_y_pred=False, name="iou")])
    return model


# --- all of them ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Program:
    """A program.

    Attributes:
        model: of its job.
        inputs, targets: columns.
        loop: whether it is a custom training loop.
    """

    model: Callable[..., Any]
    inputs: Any
    targets: str = ""
    loop: bool = False

    @property
    def name(self) -> str:
        """Of the model's function."""
        return self.model.__name__

    @property
    def columns(self) -> Sequence[str]:
        """That it reads."""
        own = list(self.inputs) if isinstance(self.inputs, tuple) else [self.inputs]
        return [*own, *([self.targets] if self.targets else [])]

    def rows(self, chosen: slice) -> dict[str, Any]:
        """Of its columns."""
        return {name: COLUMNS[name][chosen] for name in self.columns}

    def job(self, rows: int = ROWS, **fields: Any) -> tw.Job:
        """The job of trainwright."""
        tested = tw.datasets.table(self.rows(slice(ROWS, None)))
        given: dict[str, Any] = {
            "train": tw.datasets.table(self.rows(slice(rows))), "inputs": self._named, "targets": self.targets or (),
            "batch_size": BATCH, "epochs": EPOCHS, "shuffle": False, "run": "fit",
            "evaluate": None if self.model is multi_worker_loop or self.model is adversarial else tested,
        }  # fmt: skip
        return tw.Job(**{"name": self.name, "model": self.model, **given, **fields})

    @property
    def _named(self) -> Any:
        return {name: name for name in self.inputs} if self.model is structured else self.inputs

    def plain(self, rows: int = ROWS) -> tuple[list[float], dict[str, float], list[Any]]:
        """Losses of steps, or of epochs where `fit` runs it; metrics of an evaluation at the end; trained weights."""
        data, tested = (self._batches(part) for part in (slice(rows), slice(ROWS, None)))
        if self.loop:
            loop = self.model(PlainLoop)
            found, means = loop.fit(data, tested)
            return found, means, [each.numpy() for model in loop.models for each in model.trainable_variables]
        model = self.model()
        found = model.fit(data, epochs=EPOCHS, shuffle=False, verbose=0).history["loss"]
        means = model.evaluate(tested, verbose=0, return_dict=True)
        return found, means, [each.numpy() for each in model.trainable_variables]

    def built(self) -> keras.Model:
        """The model with its variables."""
        model = self.model()
        if not model.trainable_variables:
            model(tuple(COLUMNS[name][:1] for name in self.inputs))
        return model

    def _batches(self, chosen: slice) -> tf.data.Dataset:
        columns = self.rows(chosen)
        goal = columns.pop(self.targets, None)
        given: Any = columns if self.model is structured else tuple(columns.values())
        if len(columns) == 1:
            (given,) = columns.values()
        parts = given if goal is None else (given, goal)
        return tf.data.Dataset.from_tensor_slices(parts).batch(BATCH)


PROGRAMS = (
    Program(model=custom_training, inputs="images", targets="labels", loop=True),
    Program(model=multi_worker_loop, inputs="images", targets="labels", loop=True),
    Program(model=autoencoder, inputs=("images", "noise"), loop=True),
    Program(model=adversarial, inputs=("images", "noise"), loop=True),
    Program(model=text_classifier, inputs="text", targets="yes"),
    Program(model=structured, inputs=("age", "photos", "breed"), targets="yes"),
    Program(model=time_series, inputs="window", targets="next"),
    Program(model=recommender, inputs=("user", "movie"), targets="rating"),
    Program(model=segmentation, inputs="images", targets="mask"),
)
