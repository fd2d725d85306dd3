"""Models of teachers, whatever their framework: built, given their weights, and tapped for their layers."""

from __future__ import annotations

import hashlib
import random
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trainwright.core.errors import CheckpointError, StorageError
from trainwright.core.frameworks import load
from trainwright.inference.prediction_worker import Weights
from trainwright.planning.profile_model import framework_of, profiler_of
from trainwright.storage.store import open_store

_STRATEGIES = "trainwright.strategies"


@dataclass(frozen=True, kw_only=True)
class Taught:
    """() -> a teacher's model with its weights, which gives some of its layers beside its outputs.

    Attributes:
        build: () -> the model.
        weights: of a checkpoint; None for none.
        file: of weights; empty for none.
        sha256: of that file.
        layers: of each further output.
        run: an engine gives it the weights and needs it as it was trained.
    """

    build: Callable[[], Any]
    weights: Weights | None = None
    file: str = ""
    sha256: str = ""
    layers: Mapping[str, str]
    run: bool = False

    def __call__(self) -> Any:
        """Raises CheckpointError where the weights do not fit, JobError where a layer is not there."""
        model = self.build()
        teaching = teaching_of(model)
        if self.weights is not None:
            profiler_of(model).take_weights(model, self.weights.reader())
        if self.file:
            with local(self.file, self.sha256) as (path, _):
                teaching.take_file(model, path)
        return teaching.tap(model if self.run else teaching.thawed(model), self.layers)


def still(parameters: Any) -> Any:
    """An optimizer for what is not trained, of the parameters' own framework."""
    found = list(parameters)
    return teaching_of(found[0]).still(found)


def teaching_of(model: Any) -> Any:
    """The module that knows teachers of a model's framework. Raises JobError for what is no model."""
    return load(f"{_STRATEGIES}.{framework_of(model)}.distillation.teacher")


@contextmanager
def local(uri: str, sha256: str = "") -> Iterator[tuple[str, str]]:
    """A file of weights as a path on this machine, and its SHA-256.

    Raises:
        CheckpointError: it is not there, or not the one with this sum.
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
            raise _unread(uri, "changed since it was looked at first")
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


@contextmanager
def random_kept() -> Iterator[None]:
    """Afterwards the process draws what it would have drawn: a step of another model may be under way."""
    torch = load(f"{_STRATEGIES}.torch.distillation.teacher") if "torch" in sys.modules else None
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random_kept() if torch else nullcontext():
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)
