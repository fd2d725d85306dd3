"""What models give, known before anything is computed: of torch's without memory."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass

from trainwright.core.job import Job
from trainwright.datasets.index import Index
from trainwright.distillation.teacher_model import random_kept, teaching_of
from trainwright.planning.profile_model import built
from trainwright.strategies.distillation.layer_projection import Shape
from trainwright.strategies.distillation.teacher_outputs import LOGITS

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Outline:
    """A model by what it gives.

    Attributes:
        framework: as people call it.
        looks: whether its steps can look at numbers, and refuse what a teacher may not say.
        shapes: of its outputs for rows; empty where they are not known.
    """

    framework: str
    looks: bool
    shapes: Mapping[str, Shape]


def outline(job: Job, index: Index, layers: Mapping[str, str] | None = None) -> Outline:
    """Of a job's model, which is given the first row of its training set.

    Args:
        index: of `job.train`.
        layers: further outputs, and the layer that each holds.

    Raises:
        UserCodeError, JobError: the model cannot be built, or has no such layer.
        DataError: a column is not there.
    """
    with random_kept():
        model = built(job.model)
        teaching = teaching_of(model)
        sample = job.collation(job.train.row(index, job.columns))
        tapped = teaching.tap(model, layers or {})
        try:
            shapes = teaching.shapes(tapped, sample, job.arguments, job.keywords)
        except Exception as error:  # it looks at values, or takes no row alone
            _log.info("what model() gives is not known before it runs: %s: %s", type(error).__name__, error)
            shapes = {}
    return Outline(framework=teaching.FRAMEWORK, looks=teaching.LOOKS, shapes=shapes)


def compared(shapes: Mapping[str, Shape], name: str) -> Shape | None:
    """Of the output of this name; where none is given of the only one, or the logits. None where it is not known."""
    wanted = name or (LOGITS if LOGITS in shapes or len(shapes) != 1 else next(iter(shapes)))
    return shapes.get(wanted)
