"""Who predicts: a run with a checkpoint, or any other model with weights, bound to the data set that it is to see."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from trainwright.core.errors import JobError, nearest
from trainwright.core.job import Job
from trainwright.datasets.dataset import Dataset
from trainwright.datasets.index import Index
from trainwright.inference.evaluate import find_checkpoint
from trainwright.inference.prediction_files import SAMPLE
from trainwright.inference.prediction_worker import Weights
from trainwright.planning.job_description import describe, narrowed

_FACTS = ("train", "model", "inputs", "pad", "collate", "precision", "seed", "schedule")


@dataclass(frozen=True, kw_only=True)
class Subject:
    """What predicts.

    Attributes:
        job: reads the data set as its `train`, and needs neither targets nor a loss.
        weights: of the run's checkpoint; None where model() brings them.
        sha256: of the checkpoint's manifest, or of the weights.
        outline: () -> the model with whatever weights, to plan by and to be compared.
        lone: the job for one process whose model() brings the checkpoint's weights too; None where the engine does.
        undivided: why no layout that divides layers or cuts between them can run it; empty where they can.
    """

    job: Job
    weights: Weights | None
    sha256: str
    outline: Callable[[], Any]
    lone: Job | None = None
    undivided: str = ""

    @property
    def step(self) -> int:
        """Of the checkpoint; 0 where there is none."""
        return self.weights.checkpoint.step if self.weights else 0

    def facts(self, index: Index) -> dict[str, str]:
        """What says what is computed, in words."""
        return narrowed(describe(self.job.replace(model=self.outline), train=index), _FACTS)

    def check(self, index: Index, keep: tuple[str, ...]) -> None:
        """Raise JobError for a column that is not in the data."""
        fields = self.job.train.fields(index)
        problems = [
            f"{what}={name!r} is no column of the data: {nearest(name, fields)}"
            for what, names in (("inputs", self.job.input_columns), ("keep", keep))
            for name in names
            if name not in fields
        ]
        if SAMPLE in keep:
            problems.append(f"keep={SAMPLE!r}: the row number has that name; rename the data's column")
        if problems:
            raise JobError(problems)


def of_run(job: Job, data: Dataset, step: int | None = None) -> Subject:
    """A run's newest whole checkpoint, or the one at `step`. Raises JobError, CheckpointError."""
    served = serving(job, data)
    runs, checkpoint = find_checkpoint(job, step)
    weights = Weights(runs=runs, run=job.name, checkpoint=checkpoint)
    return Subject(job=served, weights=weights, sha256=checkpoint.manifest_sha256, outline=job.model)


def serving(job: Job, data: Dataset) -> Job:
    """The job without what only training needs, so that the data may lack it too. Raises JobError."""
    if not job.inputs:
        raise JobError(["inputs= is missing: name the columns given to the model to predict with it"])
    needed = job.collation.sources(job.arguments)
    return job.replace(
        train=data,
        evaluate=None,
        step=None,
        loss=no_loss,
        metrics={},
        targets=(),
        schedule=None,
        pad={name: pad for name, pad in job.pad.items() if name in needed},
        workers=None,
        accumulation=1,
        inexact=("batch_norm",),  # its statistics are not taken from batches here
    )


def no_loss(outputs: Any, targets: Any) -> Any:
    """Of what is not trained."""
    raise AssertionError("nothing is trained")
