"""Load or export the trained model of a run, and print the code that does it."""

from __future__ import annotations

from typing import Any

from trainwright.core.job import Job
from trainwright.planning.profiler import profiler_of
from trainwright.storage.checkpoints import with_checkpoint
from trainwright.strategies.distillation.multi_student import unwrap_student


def load_model(job: Job, step: int | None = None) -> Any:
    """Return the job's model with the weights of its run's newest checkpoint, or of the one at `step`.

    Where the run trained several students and one alone is wanted (`StudentModels.alone`), return that student.

    Raises:
        CheckpointError: there is none, or it does not fit the model.
    """
    model = job.model()
    with_checkpoint(job, step, lambda reader: profiler_of(model).take_weights(model, reader))
    return unwrap_student(model)


def export(job: Job, path: str, step: int | None = None) -> str:
    """Write the trained model to a file or folder, in the format of the path's ending.

    Raises:
        JobError: the ending names no format; lists the formats.
        CheckpointError: there is no checkpoint, or it does not fit the model.
    """
    model = load_model(job, step)
    profiler_of(model).export(model, path)
    return path


def loading_code(file: str, overrides: list[str]) -> str:
    """Return the Python code that loads the model of a run that was started from a job file."""
    if not overrides:
        return f"import trainwright as tw; model = tw.load_model({file!r})"
    return (
        "import trainwright as tw; from trainwright.planning.job_file import load_job; "
        f"model = tw.load_model(load_job({file!r}, {overrides!r}))"
    )
