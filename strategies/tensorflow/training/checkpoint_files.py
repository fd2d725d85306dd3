"""Copies of the state and the files of a checkpoint: TensorFlow's own format, by `tf.train.Checkpoint`.

| file                        | holds                                                                   |
|-----------------------------|-------------------------------------------------------------------------|
| `state.index`, `state.data-*` | model and optimizer: `tf.train.Checkpoint(model=..., optimizer=...)`; of a run with |
|                             | `fit` also `metrics`, `seeds` and `others`, which a `train_step` uses    |
| `state.json`                | the step, and the names of the classes                                  |
| `callbacks.npz`             | of a run with `fit`: the state of callbacks, if they have any           |
"""

from __future__ import annotations

import csv
import io
import json
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf
from tensorflow.core.protobuf import trackable_object_graph_pb2

from trainwright.core.engine import ModelSpec, StateReader
from trainwright.core.errors import CheckpointError, JobError, NonFiniteLoss
from trainwright.strategies.common.user_code_errors import first_line
from trainwright.strategies.tensorflow.training.train_state import KerasTrainState

_STATE, PREFIX, CARRIED_OTHERS, _CALLBACKS = "state.json", "state", "others", "callbacks.npz"
_FORMAT = 1
_GRAPH = "_CHECKPOINTABLE_OBJECT_GRAPH"
_TRAINED = "optimizer/_trainable_variables/"
_VALUE = "/.ATTRIBUTES/VARIABLE_VALUE"
_MEMORY = "ram://trainwright"  # TensorFlow's file system in the memory of its process: it ends with the process


_Arrays = Mapping[str, npt.NDArray[Any]]


@dataclass(frozen=True, kw_only=True)
class _HostCopy:
    """A state in host memory."""

    step: int | None
    arrays: _Arrays  # by their names in a checkpoint, in the order of the names
    graph: bytes  # TensorFlow's serialized graph of objects, which maps objects to these names
    optimizer: str  # class name of the optimizer
    aside: _Arrays  # the state of callbacks

    @property
    def size_bytes(self) -> int:
        """Size of the arrays."""
        return sum(array.nbytes for arrays in (self.arrays, self.aside) for array in arrays.values())


class StateCopier:
    """Copies a replica's state to host memory, without files.

    TensorFlow chooses the name of each variable in a checkpoint. One checkpoint, written once, gives the names.
    """

    def __init__(self, replica: KerasTrainState) -> None:
        self._replica = replica
        checkpoint = _checkpoint(replica)
        with _folder() as folder:
            graph = _reader(checkpoint.write(f"{folder}/{PREFIX}")).get_tensor(_GRAPH)
        self._graph = bytes(graph)
        nodes = trackable_object_graph_pb2.TrackableObjectGraph.FromString(self._graph).nodes
        objects = zip(nodes, tf.train.TrackableView(checkpoint).descendants(), strict=True)
        pairs = [(item.checkpoint_key, trackable) for node, trackable in objects for item in node.attributes]
        self._trackables = sorted(pairs, key=lambda pair: pair[0])

    def copy(self) -> _HostCopy:
        """Return a copy of the state. TensorFlow does not write into arrays that were read from a variable."""
        return _HostCopy(
            step=self._replica.step,
            arrays={name: array for key, trackable in self._trackables for name, array in _arrays(key, trackable)},
            graph=self._graph,
            optimizer=type(self._replica.optimizer).__name__,
            aside=self._replica.aside(),
        )


def _arrays(key: str, trackable: Any) -> Iterator[tuple[str, npt.NDArray[Any]]]:
    """Yield the values of a variable or a lookup table, with their names in a checkpoint."""
    if hasattr(trackable, "export"):
        keys, values = trackable.export()
        yield f"{key}-keys", np.asarray(keys.numpy())
        yield f"{key}-values", np.asarray(values.numpy())
    else:
        yield key, np.asarray(trackable.numpy())


def to_files(copy: _HostCopy) -> dict[str, bytes]:
    """Return the files of a state, by name. Raises NonFiniteLoss for a state that is not finite."""
    for name, array in copy.arrays.items():
        if name.startswith(_TRAINED) and not np.isfinite(array.astype(np.float64)).all():
            raise NonFiniteLoss(
                f"a trained variable is not finite after step {copy.step}: a gradient was not, though the loss was",
                where=name,
                remedy='set clip_norm or on_nonfinite="skip", which check the gradient of each step; earlier '
                "checkpoints are kept",
            )
    facts = {"format": _FORMAT, "step": copy.step, "optimizer": copy.optimizer}
    tensors = {**copy.arrays, _GRAPH: np.array(copy.graph, dtype=object)}
    names = sorted(tensors)
    with _folder() as folder, tf.device("/cpu:0"):
        values = [tf.convert_to_tensor(tensors[name]) for name in names]
        tf.raw_ops.SaveV2(
            prefix=f"{folder}/{PREFIX}", tensor_names=names, shape_and_slices=[""] * len(names), tensors=values
        )
        files = {name: _bytes(f"{folder}/{name}") for name in sorted(tf.io.gfile.listdir(folder))}
    callbacks = {_CALLBACKS: _to_bytes(copy.aside)} if copy.aside else {}
    return {**files, **callbacks, _STATE: json.dumps(facts, indent=1).encode()}


def apply_files(replica: KerasTrainState, files: Mapping[str, bytes]) -> None:
    """Load the state of checkpoint files into a replica. Raises CheckpointError if it does not fit; nothing changes."""
    facts = json.loads(files[_STATE])
    if facts["format"] != _FORMAT or "optimizer" not in facts:
        raise _mismatch_error(f"{_STATE} has format {facts['format']}, this version reads format {_FORMAT}")
    optimizer = type(replica.optimizer).__name__
    if facts["optimizer"] != optimizer:
        raise _mismatch_error(f"optimizer: {facts['optimizer']} in the checkpoint, {optimizer} in the job")
    with _folder() as folder:
        prefix = _put(files, folder)
        checkpoint = _checkpoint(replica, _shapes(prefix))
        _compare(prefix, checkpoint)
        with replica.strategy.scope():
            checkpoint.read(prefix).assert_existing_objects_matched()
    replica.put_aside(_from_bytes(files[_CALLBACKS]) if _CALLBACKS in files else {})
    replica.step, replica.sound = facts["step"], True


def read_files(reader: StateReader) -> dict[str, bytes]:
    """Read all files of a checkpoint. Raises CheckpointError if one is missing."""
    files = {name: bytes(reader.read(name)) for name in reader.names()}
    if _STATE not in files:
        raise CheckpointError("it was not written by a TensorFlow engine", remedy="train under a new name")
    return files


def take_weights(model: keras.Model, reader: StateReader) -> None:
    """Load the weights of a checkpoint into a model. Raises CheckpointError if they do not fit.

    The state of optimizers that the model holds is skipped if they have no variables yet.
    """
    if not model.variables:
        raise CheckpointError(
            "the model has no variables yet", remedy="give it a keras.Input, or call it once inside model()"
        )
    with _folder() as folder:
        prefix = _put(read_files(reader), folder)
        try:
            tf.train.Checkpoint(model=model).read(prefix).expect_partial().assert_existing_objects_matched()
        except (ValueError, AssertionError) as error:
            raise _mismatch_error(first_line(error)) from error
    for part in tf.train.TrackableView(model).descendants():
        part._deferred_dependencies.clear()  # TensorFlow would read these later, when the files no longer exist


def export(model: keras.Model, path: str, _: ModelSpec) -> None:
    """Write `.keras`, `.weights.h5`, or a SavedModel for a path without an ending.

    For a path that ends in `/`, a model with `save_to_preset` (Keras-hub) writes its own folder.

    Raises:
        JobError: the ending is not one of these.
    """
    if path.endswith(".keras"):
        model.save(path)
    elif path.endswith(".weights.h5"):
        model.save_weights(path)
    elif path.endswith("/") and hasattr(model, "save_to_preset"):
        model.save_to_preset(path)
    elif not Path(path).suffix:
        model.export(path, verbose=False)
    else:
        formats = "`.keras`, `.weights.h5`, or none for the folder of a SavedModel"
        onnx = f"; then python -m tf2onnx.convert --saved-model FOLDER --output {path} makes an ONNX file of the folder"
        raise JobError([f"{path!r}: a Keras model is exported to {formats}{onnx if path.endswith('.onnx') else ''}"])


@contextmanager
def _folder() -> Iterator[str]:
    name = f"{_MEMORY}/{uuid.uuid4().hex}"
    tf.io.gfile.makedirs(name)
    try:
        yield name
    finally:
        tf.io.gfile.rmtree(name)


def _bytes(path: str) -> bytes:
    with tf.io.gfile.GFile(path, "rb") as file:
        return bytes(file.read())


def _put(files: Mapping[str, bytes], folder: str) -> str:
    for name, data in files.items():
        with tf.io.gfile.GFile(f"{folder}/{name}", "wb") as file:
            file.write(data)
    return f"{folder}/{PREFIX}"


def _reader(prefix: str) -> Any:
    try:
        return tf.compat.v1.train.NewCheckpointReader(prefix)
    except (tf.errors.OpError, ValueError) as error:
        raise CheckpointError(f"the files cannot be read: {first_line(error)}") from error


def _shapes(prefix: str) -> dict[str, list[int]]:
    """Return the shapes of the variables in a checkpoint, by name."""
    return dict(_reader(prefix).get_variable_to_shape_map())


def _checkpoint(replica: KerasTrainState, shapes: Mapping[str, list[int]] | None = None) -> Any:
    """Return a `tf.train.Checkpoint` of model and optimizer, and the metrics and seeds that the replica carries.

    If `shapes` has the shapes of an existing checkpoint, carried variables are left out unless it has all of them.
    """
    carried = {
        name: variables
        for name, variables in replica.carried.items()
        if shapes is None
        or name == CARRIED_OTHERS
        or all(shapes.get(f"{name}/{i}{_VALUE}") == variable.shape.as_list() for i, variable in enumerate(variables))
    }
    return tf.train.Checkpoint(model=replica.model, optimizer=replica.optimizer, **carried)


def _compare(prefix: str, checkpoint: Any) -> None:
    """Raise CheckpointError for a variable that is missing or has another shape, before any is changed."""
    shapes = _shapes(prefix)
    with _folder() as folder:
        for name, shape in _shapes(checkpoint.write(f"{folder}/{PREFIX}")).items():
            if name.startswith(("_CHECKPOINTABLE", "save_counter")):
                continue
            if name not in shapes:
                raise _mismatch_error(f"{name}: missing in the checkpoint")
            if shapes[name] != shape and name.endswith(_VALUE):  # a lookup table can have grown
                raise _mismatch_error(
                    f"{name}: shape {tuple(shapes[name])} in the checkpoint, {tuple(shape)} in the job"
                )


def _mismatch_error(problem: str) -> CheckpointError:
    return CheckpointError(
        f"the checkpoint holds another model or optimizer: {problem}",
        remedy="use the model and optimizer that wrote it, or start a run under a new name",
    )


# --- Callbacks of Keras' `fit` ----------------------------------------------------------------------------------------

# Keras' callbacks start again with each `fit`. A run that resumes would forget for how long EarlyStopping has waited,
# and ModelCheckpoint would overwrite the best model with a worse one. So a checkpoint stores the attributes that their
# decisions depend on, and the attributes that a user's callback names in `carried`.


_CARRIED: tuple[tuple[type[Any], tuple[str, ...]], ...] = (
    (keras.callbacks.EarlyStopping, ("best", "best_epoch", "best_weights", "stopped_epoch", "wait")),
    (keras.callbacks.ReduceLROnPlateau, ("best", "cooldown_counter", "wait")),
    (keras.callbacks.ModelCheckpoint, ("best", "_batches_seen_since_last_saving", "_last_batch_seen")),
    (keras.callbacks.SwapEMAWeights, ("_ema_weights_in_model",)),
)


def callback_state(callbacks: Sequence[Any]) -> _Arrays:
    """Return the state of callbacks for a checkpoint. A list of arrays, such as the best weights, has several keys."""
    state: dict[str, npt.NDArray[Any]] = {}
    for key, callback, name in _carried(callbacks):
        value = getattr(callback, name, None)
        if isinstance(value, list | tuple):
            state |= {f"{key}/{number}": np.asarray(each) for number, each in enumerate(value)}
        elif value is not None:
            state[key] = np.asarray(value)
    return state


def restore_callbacks(callbacks: Sequence[Any], state: _Arrays) -> None:
    """Set the attributes that `callback_state` returned for the same callbacks; others stay."""
    for key, callback, name in _carried(callbacks):
        if key in state:
            setattr(callback, name, state[key].item() if state[key].ndim == 0 else state[key])
        elif f"{key}/0" in state:
            several = sum(each.startswith(f"{key}/") for each in state)
            setattr(callback, name, [state[f"{key}/{number}"] for number in range(several)])


def continue_log(logger: keras.callbacks.CSVLogger, epoch: int) -> None:
    """Make a CSVLogger append to its file, and remove the rows of this epoch and later ones, which are logged again.

    A logger with `append=True` keeps all rows: they may come from earlier trainings.
    """
    if logger.append:
        return
    logger.append = True
    if not tf.io.gfile.exists(logger.filename):
        return
    with tf.io.gfile.GFile(logger.filename) as file:
        lines = list(csv.reader(file, delimiter=logger.sep))
    earlier_lines = [line for line in lines if not (line and line[0].isdigit() and int(line[0]) >= epoch)]
    if len(earlier_lines) < len(lines):
        new_file = f"{logger.filename}.new"
        with tf.io.gfile.GFile(new_file, "w") as file:
            csv.writer(file, delimiter=logger.sep).writerows(earlier_lines)
        tf.io.gfile.rename(new_file, logger.filename, overwrite=True)


def _carried(callbacks: Sequence[Any]) -> Iterator[tuple[str, Any, str]]:
    """Yield each attribute that a checkpoint stores: its key, the callback, its name."""
    for number, callback in enumerate(callbacks):
        names = [name for kind, attributes in _CARRIED if isinstance(callback, kind) for name in attributes]
        for name in (*names, *getattr(callback, "carried", ())):
            yield f"{number}/{type(callback).__name__}/{name}", callback, name


def _to_bytes(state: _Arrays) -> bytes:
    """Return the state as a file."""
    file = io.BytesIO()
    np.savez(file, allow_pickle=False, **state)
    return file.getvalue()


def _from_bytes(data: bytes) -> _Arrays:
    """Return the state of a file."""
    with np.load(io.BytesIO(data), allow_pickle=False) as file:
        return dict(file)
