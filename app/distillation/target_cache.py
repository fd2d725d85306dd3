"""Teacher outputs that are computed once and stored, in a folder of the teacher and the data.

    <folder>/<teacher>-<identity>-<data>-<form>/_PREDICTIONS.json and parts, as `tw.predict` writes them

They are predictions with an encoding. An interrupted computation continues; existing parts are not computed again.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from trainwright.core.data import Columns
from trainwright.core.errors import JobError
from trainwright.core.job import Job
from trainwright.datasets.data_source import Arrays, Index, SequentialSource, hash_parts
from trainwright.datasets.dataset import Dataset, parquet
from trainwright.distillation.distillation_spec import Teacher
from trainwright.distillation.target_encoding import TargetEncoding, decode_targets
from trainwright.distillation.teacher_runner import (
    compared_shape,
    load_teacher,
    output_signature,
    teacher_inference_model,
)
from trainwright.inference.batch_inference import PredictionRequest, prediction_request, run_request
from trainwright.inference.inference_model import InferenceModel
from trainwright.inference.prediction_worker import SAMPLE
from trainwright.planning.job_description import state_relevant_fields
from trainwright.strategies.distillation.teacher_outputs import TeacherOutputs, log_odds

_OUTPUT, _LAYER = "output", "layer_{}"  # column names; a teacher's own have dots and slashes
_LETTERS = 12  # of a sum, in the name of a folder
_COMPARED_ROWS = 4  # whether random transforms change a teacher's inputs


def stored_targets(
    teacher: Teacher,
    data: Dataset,
    *,
    folder: str,
    keep: str = "fp16",
    workers: int | None = None,
    range_rows: int | None = None,
    verbose: bool = False,
    note: Callable[[str], object] = lambda _: None,
    hang_deadline_s: float | None = None,
) -> Dataset:
    """Return a teacher's outputs for every row of a data set, for `data.beside(...)`. Compute missing ones.

    A teacher whose run divided its model over workers runs in that layout. Other teachers run on a pool of workers that
    each hold the whole model. Transforms of the data are those of epoch 0: put random ones after `beside`.

    Args:
        teacher: to compute.
        data: with the teacher's inputs.
        folder: of the targets of all teachers and data sets; `s3://`, `gs://` and `az://` too.
        keep: `fp32`, `fp16`, or `topk(8)`: the 8 largest logits in half precision and the mass of the rest.
        workers: of a pool; by default one for each accelerator or CPU slot of the cluster.
        range_rows: most rows of a part; by default it follows from the size of a row and of its targets.
        verbose: show Ray's own output.
        note: called with problems that were repaired.
        hang_deadline_s: longest time of a batch. A pool waits ten times as long as the slowest batch so far, and at
            least 15 s. By default that of the teacher's job, or 5 minutes (15 for a divided model).

    Returns:
        A data set with `sample` and the teacher's columns, as float32.

    Raises:
        RunConflict: the folder holds the outputs of another teacher or data set; says what differs.
        DataError: a part is damaged.
        TrainwrightError: the teacher, the data, the storage or the cluster is not right.
    """
    request = _target_request(teacher, data, folder=folder, keep=keep, range_rows=range_rows)
    if hang_deadline_s is not None:
        job = request.subject.job.replace(hang_deadline_s=hang_deadline_s)
        request = replace(request, subject=replace(request.subject, job=job))
    done = run_request(request, workers=workers, batch_size=teacher.batch_size, verbose=verbose, note=note)
    return parquet(done.uri).map_batches(_TargetReader(columns=teacher.columns, form=TargetEncoding.parse(keep)))


def _target_request(
    teacher: Teacher, data: Dataset, *, folder: str, keep: str, range_rows: int | None = None
) -> PredictionRequest:
    """Return the request of `stored_targets`, with the parts that are missing. Raises as that."""
    form, subject = TargetEncoding.parse(keep), teacher_inference_model(load_teacher(teacher), data)
    filing, index = _TargetWriter(lesson=teacher.lesson, form=form), data.index()
    columns = (teacher.output, *teacher.lesson.tapped) if teacher.output else ()
    subject.check(index, ())
    row_bytes = _target_row_bytes(teacher, data, index, form)
    content = subject.content_hash(index)
    to = f"{folder.rstrip('/')}/{_folder_name(teacher, subject, index, content, form)}"
    return prediction_request(
        subject, index=index, content=content, to=to, columns=columns, form=filing, range_rows=range_rows,
        row_bytes=row_bytes,
    )  # fmt: skip


def _target_row_bytes(teacher: Teacher, data: Dataset, index: Index, form: TargetEncoding) -> int:
    """Return the approximate bytes of a stored row; 0 if unknown."""
    tapped = teacher.lesson.tapped
    shapes = output_signature(teacher.inference_job(data), index, tapped).shapes
    said = compared_shape({name: shape for name, shape in shapes.items() if name not in tapped}, teacher.output)
    layers = sum(form.layers.row_bytes(shapes[name]) for name in tapped if name in shapes)
    return layers + (form.row_bytes(said) if said else 0)


def stored_bytes(teachers: Sequence[Teacher], data: Dataset, index: Index, *, keep: str) -> int:
    """Return the approximate size of the stored targets of a data set, over all teachers."""
    form = TargetEncoding.parse(keep)
    return index.rows * sum(_target_row_bytes(teacher, data, index, form) for teacher in teachers)


def count_missing_rows(teachers: Sequence[Teacher], job: Job, *, folder: str, keep: str) -> int:
    """Return how many rows have no stored targets yet, over teachers and data sets. Raises as `stored_targets`."""
    sets = [data for data in (job.train, job.evaluate) if data is not None]
    requests = [_target_request(teacher, data, folder=folder, keep=keep) for teacher in teachers for data in sets]
    return sum(part.rows for request in requests for part in request.waiting)


def check_repeated_inputs(data: Dataset, teachers: Sequence[Teacher]) -> None:
    """Raise JobError if a teacher's inputs change from epoch to epoch: stored targets are those of epoch 0."""
    index = data.index()
    if not data.transforms or isinstance(data.source, SequentialSource):
        return
    rows = range(min(_COMPARED_ROWS, index.rows))
    for teacher in teachers:
        names = teacher.input_columns or None
        first, second = (data.read(index, rows, names, epoch=epoch) for epoch in (0, 1))
        for name, column in first.items():
            if not _same(column, second[name]):
                raise JobError(
                    [f"{name!r}, an input of {teacher!r}, differs from epoch to epoch: stored targets are of epoch 0"]
                )


def _same(first: Any, second: Any) -> bool:
    if first.dtype == object:
        return all(map(np.array_equal, first, second))
    return bool(np.array_equal(first, second, equal_nan=first.dtype.kind == "f"))


def _folder_name(teacher: Teacher, subject: InferenceModel, index: Index, content: str, form: TargetEncoding) -> str:
    """Return the folder's name, from the checksums of the teacher's weights and of the data."""
    rows = hash_parts([index.hash, content, state_relevant_fields(subject.facts(index))["train"]])
    layers = f"-{hash_parts(teacher.layers)[:6]}" if teacher.layers else ""
    kept = re.sub(r"\W", "", str(form))
    return f"{teacher.name}-{subject.sha256[:_LETTERS]}-{rows[:_LETTERS]}-{kept}{layers}"


@dataclass(kw_only=True)
class _TargetWriter:
    """Outputs of a teacher's model -> columns of a file. Checks the first outputs in each process."""

    lesson: TeacherOutputs
    form: TargetEncoding
    _looked: bool = False

    def __call__(self, outputs: Columns) -> Columns:
        """Raises JobError for wrong teacher outputs, or values that the encoding cannot store."""
        look, self._looked = None if self._looked else np.asarray, True
        told = self.lesson.told(outputs, log_odds, look)
        output, *layers = (told[name] for name in self.lesson.columns)
        columns = self.form.encode(_OUTPUT, output)
        for number, layer in enumerate(layers):
            columns |= self.form.layers.encode(_LAYER.format(number), layer)
        return columns

    def __str__(self) -> str:
        """Return the settings that change the files, in words."""
        words = [str(self.form), *(f"layer {layer}" for layer in self.lesson.layers)]
        words += [f"output {self.lesson.output}"] if self.lesson.output else []
        return ", ".join(words + ([self.lesson.probabilities] if self.lesson.probabilities else []))


@dataclass(frozen=True, kw_only=True)
class _TargetReader:
    """Columns of a file -> a teacher's columns."""

    columns: tuple[str, ...]
    form: TargetEncoding

    def __call__(self, columns: Arrays) -> dict[str, Any]:
        """Raises JobError if the files hold something else."""
        if _OUTPUT not in columns:
            raise JobError([f"the files hold {', '.join(columns)}, and no {_OUTPUT!r} of a teacher"])
        output, *layers = self.columns
        told = {output: decode_targets(self.form, _OUTPUT, columns)}
        for number, layer in enumerate(layers):
            told[layer] = decode_targets(self.form.layers, _LAYER.format(number), columns)
        return {SAMPLE: columns[SAMPLE], **told}
