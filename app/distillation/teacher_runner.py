"""Run a teacher in any process: load its weights, build its model, and compute its columns for rows of data."""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from trainwright.core import random_state
from trainwright.core.cluster import Cluster, Node
from trainwright.core.data import Batch, Columns
from trainwright.core.errors import CheckpointError, JobError, StorageError
from trainwright.core.job import ColumnNames, Job
from trainwright.core.model_profile import ModelProfile
from trainwright.datasets.data_source import Index, TableSource
from trainwright.datasets.dataset import Dataset, first_batch
from trainwright.distillation.distillation_spec import Teacher
from trainwright.inference.inference_model import InferenceModel, frozen_optimizer, no_loss
from trainwright.inference.prediction_worker import CheckpointWeights, OutputFunction, local_outputs
from trainwright.planning.planner import choose
from trainwright.planning.profiler import build_model, profile_job, profiler_of
from trainwright.storage.checkpoints import find_checkpoint
from trainwright.storage.object_store import open_store
from trainwright.strategies.distillation.layer_match import Shape
from trainwright.strategies.distillation.multi_student import model_backend
from trainwright.strategies.distillation.teacher_outputs import LOGITS, TeacherOutputs, log_odds

_log = logging.getLogger(__name__)


def load_teacher(teacher: Teacher) -> TeacherRunner:
    """Return the runner of a teacher, with the weights that are the newest now.

    Raises:
        CheckpointError: the run has no such checkpoint, or the file of weights cannot be read.
        JobError: model() has other weights each time, or is no model.
    """
    if teacher.job is not None:
        runs, checkpoint = find_checkpoint(teacher.job, teacher.step)
        weights = CheckpointWeights(runs=runs, run=teacher.job.name, checkpoint=checkpoint)
        return TeacherRunner(teacher=teacher, sha256=checkpoint.manifest_sha256, weights=weights)
    if teacher.weights is not None:
        with _local_weights(teacher.weights) as (_, sha256):
            return TeacherRunner(teacher=teacher, sha256=sha256)
    first, second = (model_backend(model).digest(model) for model in (teacher.builder(), teacher.builder()))
    if first != second:
        problem = "model() has other weights each time: seed it, or give weights="
        raise JobError([problem], where=repr(teacher))
    return TeacherRunner(teacher=teacher, sha256=first)


def teacher_inference_model(runner: TeacherRunner, data: Dataset) -> InferenceModel:
    """Return the model of a teacher with its weights, to compute outputs for the rows of a data set."""
    teacher = runner.teacher
    job, layers, weights = teacher.inference_job(data), teacher.lesson.tapped, runner.weights
    identity, build = runner.sha256, _builder(runner, layers)
    quiet: dict[str, Any] = {"optimizer": frozen_optimizer, "loss": no_loss, "run": "step", "callbacks": None}
    if teacher.job is None:
        return InferenceModel(job=job.replace(model=build), weights=None, sha256=identity, architecture=build.build)
    subject = InferenceModel(job=job, weights=weights, sha256=identity, architecture=teacher.job.model)
    if not layers:
        return subject
    return replace(
        subject,
        job=job.replace(model=replace(build, weights=None, run=True)),
        single_process_job=job.replace(model=build, **quiet),
        whole_model_reason=f"hidden states of {teacher!r} are asked for",
    )


def _builder(runner: TeacherRunner, layers: Mapping[str, str]) -> _TeacherModelBuilder:
    """Return the builder of a teacher's model with its weights."""
    teacher, file = runner.teacher, runner.teacher.weights or ""
    return _TeacherModelBuilder(
        build=teacher.builder, weights=runner.weights, file=file, sha256=runner.sha256, layers=layers
    )


@dataclass(frozen=True, kw_only=True)
class TeacherRunner:
    """Runs a teacher of any framework: takes and returns arrays. Can be pickled.

    The model is built at the first call, once in a process, on the GPU that the process may use, or on the CPU.
    """

    teacher: Teacher  # to run
    sha256: str  # of its weights, or of the manifest of its run's checkpoint
    weights: CheckpointWeights | None = None  # of its run; None without a run

    @property
    def name(self) -> str:
        """Name of the teacher."""
        return self.teacher.name

    @property
    def columns(self) -> ColumnNames:
        """The columns that the teacher adds."""
        return self.teacher.columns

    @property
    def wanted(self) -> ColumnNames:
        """The columns that the model is given."""
        return self.teacher.wanted

    def identity(self) -> str:
        """Return a key of the outputs: the weights' checksum, and how columns are made of the model's outputs."""
        return repr((self.sha256, self.teacher.lesson))

    def module(self) -> Any:
        """Return the model for a loss that runs it in the step: without gradients, in evaluation mode.

        Call it with a dict of the framework's tensors that has `wanted`; it returns a dict of `columns`. In torch it is
        an nn.Module, to be moved to a device, in TensorFlow a callable object. It leaves the random state as it was.

        Raises:
            JobError, CheckpointError: there is no such model or layer, or the weights do not fit.
        """
        with random_state.preserve_generators():
            model = _builder(self, {})()
            return model_backend(model).inside(model, self.teacher.lesson)

    def profile(self, sample: Columns) -> ModelProfile:
        """Return the model's cost, given columns of a row that have `wanted`. Raises UserCodeError, JobError."""
        missing = [name for name in self.wanted if name not in sample]
        if missing:
            problem = f"{self.teacher!r} is given {', '.join(missing)}, which the student's step does not have"
            raise JobError([f'{problem}: add it to what the job\'s collate= gives, or use way="offline" or "online"'])
        with random_state.preserve_generators():
            model = build_model(self.teacher.builder)
        keywords = self.teacher.lesson.keywords
        profile: ModelProfile = profiler_of(model).profile_model(model, sample, self.wanted, keywords=keywords)
        return profile

    def __call__(self, columns: Columns) -> dict[str, Any]:
        """Return the given columns and the teacher's, for `map_batches`. Raises as `teach`."""
        return {**columns, **self.teach(columns)}

    def teach(self, columns: Columns) -> dict[str, Any]:
        """Return the teacher's columns for some rows: (rows, ...) floats by name.

        Raises:
            JobError, UserCodeError, CheckpointError: the model cannot be built, or its outputs are wrong.
        """
        lesson = self.teacher.lesson
        rows = len(next(iter(columns.values())))
        told: list[Columns] = []
        for start in range(0, rows, self.teacher.batch_size):
            part = slice(start, min(start + self.teacher.batch_size, rows))
            samples = np.arange(part.start, part.stop)
            given = {name: column[part] for name, column in columns.items()}
            batch = Batch(columns=given, weights=np.ones(len(samples)), samples=samples)
            told.extend(self._standing(columns).told(batch, lesson))
        return {name: _at_least_float32(np.concatenate([part[name] for part in told])) for name in self.columns}

    def _standing(self, columns: Columns) -> LoadedTeacher:
        key = self.identity()
        with _lock:
            if key not in _open:
                _open[key] = self.opened({name: column[:1] for name, column in columns.items()})
            return _open[key]

    def opened(self, row: Columns) -> LoadedTeacher:
        """Return the model, built on a device of this process, given columns of a row. Raises as `teach`."""
        data = Dataset(source=TableSource(arrays=dict(row)))
        subject, index = teacher_inference_model(self, data), data.index()
        job = (subject.single_process_job or subject.job).on_one_device(accelerator="auto")
        plan = choose(profile_job(job.replace(model=subject.architecture), data, index), _here(), job).chosen
        spec = job.model_spec(1, partial(first_batch, data, index, job.columns))
        with random_state.preserve_generators():
            return LoadedTeacher(
                local_outputs(spec, plan, None if subject.single_process_job else subject.weights, guest=True)
            )


class LoadedTeacher:
    """A model in this process, called by one thread at a time; its first outputs are checked.

    Attributes:
        outputs: of the model itself.
    """

    def __init__(self, outputs: OutputFunction) -> None:
        self.outputs, self._asked = outputs, threading.Lock()
        self._look: Callable[[Any], Any] | None = np.asarray

    def told(self, batch: Batch, lesson: TeacherOutputs) -> list[Columns]:
        """Return the teacher's columns for a batch, in pieces."""
        with self._asked:
            told: list[Columns] = [lesson.told(outputs, log_odds, self._look) for outputs in self.outputs(batch)]
            self._look = None
        return told


_open: dict[str, LoadedTeacher] = {}
_lock = threading.Lock()


def _at_least_float32(values: Any) -> Any:
    """Return floats of four bytes or more."""
    return values.astype(np.float32) if values.dtype.itemsize < np.dtype(np.float32).itemsize else values


def _here() -> Cluster:
    """Return this process as a cluster: the GPU that it may use, and the threads of OMP_NUM_THREADS."""
    gpus = [gpu for gpu in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if gpu not in ("", "-1")]
    threads = os.environ.get("OMP_NUM_THREADS", "")
    cpus = int(threads) if threads.isdecimal() else os.cpu_count() or 1
    node = Node(name="here", cpus=cpus, memory_bytes=0)
    return Cluster(nodes=(replace(node, accelerators=1, accelerator="GPU") if gpus else node,))


# --- The model of a teacher with its weights and hidden layers, and what a model returns ------------------------------


@dataclass(frozen=True, kw_only=True)
class _TeacherModelBuilder:
    """() -> a teacher's model with its weights, which also returns some hidden layers."""

    build: Callable[[], Any]  # () -> the model
    weights: CheckpointWeights | None = None  # of a checkpoint; None for none
    file: str = ""  # of weights; empty for none
    sha256: str = ""  # of that file
    layers: Mapping[str, str]  # of each further output
    run: bool = False  # an engine loads the weights, and needs the model as it was trained

    def __call__(self) -> Any:
        """Raises CheckpointError if the weights do not fit, JobError if a layer does not exist."""
        model = self.build()
        teaching = model_backend(model)
        if self.weights is not None:
            profiler_of(model).take_weights(model, self.weights.reader())
        if self.file:
            with _local_weights(self.file, self.sha256) as (path, _):
                teaching.take_file(model, path)
        return teaching.tap(model if self.run else teaching.thawed(model), self.layers)


@contextmanager
def _local_weights(uri: str, sha256: str = "") -> Iterator[tuple[str, str]]:
    """Yield the path of a file of weights on this machine, and its SHA-256.

    Raises:
        CheckpointError: it does not exist, or has another checksum.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(uri)
        if "://" in uri:
            place, _, name = uri.rpartition("/")
            path = Path(folder) / name
            try:
                path.write_bytes(open_store(place).get(name))
            except StorageError as error:
                raise _unread(uri, f"cannot be read: {error.what}") from error
        try:
            with path.open("rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise _unread(uri, f"cannot be read: {error.strerror}") from error
        if sha256 and found != sha256:
            raise _unread(uri, "has changed since it was first read")
        yield str(path), found


def _unread(uri: str, what: str) -> CheckpointError:
    remedy = "give the file that tw.export wrote, where every node sees it"
    return CheckpointError(f"the file of weights {what}", where=uri, remedy=remedy)


@dataclass(frozen=True, kw_only=True)
class OutputSignature:
    """The outputs of a model, known before anything is computed."""

    framework: str  # name for messages
    looks: bool  # whether its steps can check values, and refuse wrong teacher outputs
    shapes: Mapping[str, Shape]  # of its outputs, by name; empty if they are unknown


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
        teaching = model_backend(model)
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
