"""Whether a submission follows a job that runs already, or is a new one. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from trainwright.core.errors import RunConflict
from trainwright.submit.job_server import JobNews

_RUN, _STORAGE, _DIGEST, _FRESH = (f"trainwright_{word}" for word in ("run", "storage", "digest", "fresh"))


@dataclass(frozen=True, kw_only=True)
class Mark:
    """What tells submissions apart; goes with each as its metadata, and holds no secret.

    Attributes:
        run: name of the run.
        storage: where it is.
        digest: of the job's file and of what the command line changes in it.
        fresh: whether it begins the run again.
    """

    run: str
    storage: str
    digest: str
    fresh: bool = False

    def metadata(self) -> dict[str, str]:
        """As Ray stores it."""
        return {
            _RUN: self.run, _STORAGE: self.storage, _DIGEST: self.digest, _FRESH: str(self.fresh).lower(),
            "job_name": self.run,
        }  # fmt: skip

    @classmethod
    def of(cls, metadata: Mapping[str, str]) -> Mark | None:
        """That of a job; None where it is none of ours."""
        if not all(name in metadata for name in (_RUN, _STORAGE, _DIGEST, _FRESH)):
            return None
        return cls(
            run=metadata[_RUN], storage=metadata[_STORAGE], digest=metadata[_DIGEST], fresh=metadata[_FRESH] == "true"
        )


def of_run(jobs: Iterable[JobNews], mark: Mark) -> list[JobNews]:
    """The submissions of the same run, the newest last."""
    marks = ((job, Mark.of(job.metadata)) for job in jobs)
    same = [job for job, other in marks if other and (other.run, other.storage) == (mark.run, mark.storage)]
    return sorted(same, key=lambda job: _number(job.id, mark.run))


def running(jobs: Iterable[JobNews], mark: Mark) -> JobNews | None:
    """The one of the run that has not ended."""
    return next((job for job in of_run(jobs, mark) if not job.over), None)


def attached(jobs: Iterable[JobNews], mark: Mark, *, anyway: bool) -> JobNews | None:
    """The job to follow; None where a new one is to be submitted.

    Args:
        anyway: follow whatever there is of the run, and if it is over the newest.

    Raises:
        RunConflict: the run's job goes by another file, or is not the fresh one that is wanted; or there is none to
            follow.
    """
    known = of_run(jobs, mark)
    alive = next((job for job in known if not job.over), None)
    if anyway:
        if not known:
            raise RunConflict(
                f"no job of the run {mark.run!r} was submitted to this cluster",
                where=mark.storage,
                remedy="leave --attach out to submit it",
            )
        return alive or known[-1]
    if alive is None:
        return None
    other = Mark.of(alive.metadata)
    assert other is not None, "it is one of the run's"
    if other.digest != mark.digest or (mark.fresh and not other.fresh):
        changed = "by another job file or other options" if other.digest != mark.digest else "and not begun afresh"
        raise RunConflict(
            f"the run {mark.run!r} is under way {changed}",
            where=f"job {alive.id}, {alive.status}",
            remedy="--attach follows it as it is; --stop ends it with a checkpoint, then submit again",
        )
    return alive


def next_id(jobs: Iterable[JobNews], run: str) -> str:
    """Of a new submission: the run's name and the next number."""
    return f"{run}-{1 + max((_number(job.id, run) for job in jobs), default=0)}"


def _number(submission: str, run: str) -> int:
    found = re.fullmatch(rf"{re.escape(run)}-(\d+)", submission)
    return int(found[1]) if found else 0
