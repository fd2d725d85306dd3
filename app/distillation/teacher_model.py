"""Build the models of teachers with their weights and hidden layers, and find out what they return."""

from __future__ import annotations

import hashlib
import logging
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainwright.core import random_state
from trainwright.core.errors import CheckpointError, StorageError
from trainwright.core.frameworks import load_module
from trainwright.core.job import Job
from trainwright.datasets.data_source import Index
from trainwright.datasets.dataset import first_batch
from trainwright.inference.prediction_worker import CheckpointWeights
from trainwright.planning.profiler import build_model, framework_of, profiler_of
from trainwright.storage.object_store import open_store
from trainwright.strategies.distillation.layer_match import Shape
from trainwright.strategies.distillation.teacher_outputs import LOGITS

_STRATEGIES = "trainwright.strategies"


@dataclass(frozen=True, kw_only=True)
class TeacherModelBuilder:
    """() -> a teacher's model with its weights, which also returns some hidden layers.

    Attributes:
        build: () -> the model.
        weights: of a checkpoint; None for none.
        file: of weights; empty for none.
        sha256: of that file.
        layers: of each further output.
        run: an engine loads the weights, and needs the model as it was trained.
    """

    build: Callable[[], Any]
    weights: CheckpointWeights | None = None
    file: str = ""
    sha256: str = ""
    layers: Mapping[str, str]
    run: bool = False

    def __call__(self) -> Any:
        """Raises CheckpointError if the weights do not fit, JobError if a layer does not exist."""
        model = self.build()
        teaching = teacher_backend_of(model)
        if self.weights is not None:
            profiler_of(model).take_weights(model, self.weights.reader())
        if self.file:
            with local_weights(self.file, self.sha256) as (path, _):
                teaching.take_file(model, path)
        return teaching.tap(model if self.run else teaching.thawed(model), self.layers)


def frozen_optimizer(parameters: Any) -> Any:
    """Return an optimizer for a model that is not trained, in the parameters' framework."""
    found = list(parameters)
    return teacher_backend_of(found[0]).still(found)


def teacher_backend_of(model: Any) -> Any:
    """Return the backend module for teachers of a model's framework. Raises JobError if it is no model."""
    return load_module(f"{_STRATEGIES}.{framework_of(model)}.distillation.teacher_backend")


@contextmanager
def local_weights(uri: str, sha256: str = "") -> Iterator[tuple[str, str]]:
    """Yield the path of a file of weights on this machine, and its SHA-256.

    Raises:
        CheckpointError: it does not exist, or has another checksum.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(uri)
        if "://" in uri:
            path = Path(folder) / uri.rpartition("/")[2]
            path.write_bytes(_fetched(uri))
        try:
            with path.open("rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise _unread(uri, f"cannot be read: {error.strerror}") from error
        if sha256 and found != sha256:
            raise _unread(uri, "has changed since it was first read")
        yield str(path), found


def _fetched(uri: str) -> bytes:
    folder, _, name = uri.rpartition("/")
    try:
        return open_store(folder).get(name)
    except StorageError as error:
        raise _unread(uri, f"cannot be read: {error.what}") from error


def _unread(uri: str, what: str) -> CheckpointError:
    remedy = "give the file that tw.export wrote, where every node sees it"
    return CheckpointError(f"the file of weights {what}", where=uri, remedy=remedy)


_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class OutputSignature:
    """The outputs of a model, known before anything is computed.

    Attributes:
        framework: name for messages.
        looks: whether its steps can check values, and refuse wrong teacher outputs.
        shapes: of its outputs, by name; empty if they are unknown.
    """

    framework: str
    looks: bool
    shapes: Mapping[str, Shape]


def output_signature(job: Job, index: Index, layers: Mapping[str, str] | None = None) -> OutputSignature:
    """Return the signature of a job's model, from the first row of its training set.

    Args:
        index: of `job.train`.
        layers: further outputs, and the layer that each holds.

    Raises:
        UserCodeError, JobError: the model cannot be built, or has no such layer.
        DataError: a column is missing.
    """
    with random_state.preserve_generators():
        model = build_model(job.model)
        teaching = teacher_backend_of(model)
        sample = job.data.collation(first_batch(job.train, index, job.columns))
        tapped = teaching.tap(model, layers or {})
        try:
            shapes = teaching.shapes(tapped, sample, job.arguments, job.keywords)
        except Exception as error:  # it needs values, or takes no single row
            _log.info("the outputs of model() are not known before it runs: %s: %s", type(error).__name__, error)
            shapes = {}
    return OutputSignature(framework=teaching.FRAMEWORK, looks=teaching.LOOKS, shapes=shapes)


def compared_shape(shapes: Mapping[str, Shape], name: str) -> Shape | None:
    """Return the shape of the named output; by default of the only one, or the logits. None if unknown."""
    wanted = name or (LOGITS if LOGITS in shapes or len(shapes) != 1 else next(iter(shapes)))
    return shapes.get(wanted)
