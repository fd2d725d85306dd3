"""All errors of trainwright. Each says what happened, where and what to do, and can be pickled."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Literal

_SHOWN_LINES = 20  # of a detail in a notebook


class TrainwrightError(Exception):
    """Base of every error raised on purpose.

    Args:
        what: what happened, one sentence without a full stop.
        where: rank, node, file or field; empty when there is only one place it can be.
        remedy: what the user can do now.
        detail: longer text shown first, such as the failing rank's own traceback.
    """

    def __init__(self, what: str, *, where: str = "", remedy: str = "", detail: str = "") -> None:
        super().__init__(what)
        self.what, self.where, self.remedy, self.detail = what, where, remedy, detail

    @property
    def summary(self) -> str:
        """What happened, where and what to do, without the detail."""
        place = f" ({self.where})" if self.where else ""
        remedy = f"\n  -> {self.remedy}" if self.remedy else ""
        return f"{self.what}{place}{remedy}"

    def __str__(self) -> str:
        detail = f"{self.detail.rstrip()}\n" if self.detail else ""
        return f"{detail}{self.summary}"

    def _render_traceback_(self) -> list[str]:
        """What IPython shows instead of a traceback, whose frames are trainwright's own."""
        detail = self.detail.rstrip().splitlines()
        shown = ["...", *detail[-_SHOWN_LINES:]] if len(detail) > _SHOWN_LINES else detail
        return [*shown, f"{type(self).__name__}: {self.summary}"]

    def hide(self, rewrite: Callable[[str], str]) -> None:
        """Rewrite every text of the error, for example to remove secrets."""
        for name, value in self.__dict__.items():
            self.__dict__[name] = _rewritten(value, rewrite)
        self.args = _rewritten(self.args, rewrite)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.__dict__.copy())


def _rewritten(value: Any, rewrite: Callable[[str], str]) -> Any:
    if isinstance(value, tuple):
        return tuple(_rewritten(item, rewrite) for item in value)
    return rewrite(value) if isinstance(value, str) else value


def _rebuild(kind: type[TrainwrightError], state: dict[str, Any]) -> TrainwrightError:
    error = kind.__new__(kind, state.get("what", ""))
    error.__dict__.update(state)
    return error


class JobError(TrainwrightError, ValueError):
    """The job is wrong. Carries all problems found, so that they can be fixed at once."""

    def __init__(self, problems: Iterable[str], *, where: str = "job") -> None:
        self.problems = tuple(problems)
        count = len(self.problems)
        lines = "".join(f"\n  {number}. {problem}" for number, problem in enumerate(self.problems, 1))
        super().__init__(f"the job has {count} problem{'s' if count != 1 else ''}{lines}", where="")
        self.where = "" if where == "job" else where


class PlanError(TrainwrightError, ValueError):
    """No plan is possible, or a pinned one is not."""


class ResourceError(TrainwrightError):
    """The cluster has too few resources, or did not provide them in time."""


class DataError(TrainwrightError, ValueError):
    """A data set is missing, empty, damaged or has the wrong columns."""


class StorageError(TrainwrightError):
    """The store cannot be read or written."""


class LossSpike(TrainwrightError):
    """The loss rose far above the previous losses."""


class StoreDown(StorageError):
    """The store is unavailable, perhaps for a while; nothing indicates a wrong configuration."""


class CheckpointError(StorageError):
    """A checkpoint is torn, altered or missing."""


class DamagedCheckpoint(CheckpointError):
    """A file of a checkpoint is missing, torn or altered; an older checkpoint may be intact."""


class RunConflict(TrainwrightError):
    """The run name is taken by a finished or changed job, or by other files."""


class RunFinished(RunConflict):
    """The run of this name is finished, and the job is unchanged."""


class OwnedError(RunConflict):
    """Another driver owns the run and is alive."""


class FencedError(RunConflict):
    """Another driver has taken the run over; this one must stop."""


class Stopped(TrainwrightError):
    """A signal stopped a sequence of runs between two of them; the same call continues.

    Args:
        signal: its number.
    """

    def __init__(self, what: str, *, where: str = "", remedy: str = "", detail: str = "", signal: int = 0) -> None:
        super().__init__(what, where=where, remedy=remedy, detail=detail)
        self.signal = signal


class UserCodeError(TrainwrightError):
    """The user's model, loss, optimizer, step, metric or transform raised; `detail` is its traceback."""


class DeviceError(TrainwrightError):
    """An accelerator failed, so that its process cannot use it any more; another process takes the rank."""


class DeviceOutOfMemory(UserCodeError):
    """The memory of a device is too small for the plan; each attempt under the same plan would end like this one."""


class MissingFramework(UserCodeError):
    """The job needs a framework that is not installed."""


class NonFiniteLoss(TrainwrightError):
    """The loss became NaN or infinite; nothing of that step was applied."""

    samples: tuple[int, ...] = ()  # row numbers where it happened, as far as this rank knows
    elsewhere: bool = False  # another rank knows them, whose error counts


class PeerLost(TrainwrightError):
    """A collective broke because another rank went away. Never the first cause of a failure."""


class WorkerLost(TrainwrightError):
    """A worker process or its node died more often than the job allows."""


class HangError(TrainwrightError):
    """There was no progress within the deadline."""


def headline(error: Exception) -> str:
    """Return what an error says, for one line: of a wrong job the first problem, else `what`, or kind and text."""
    if isinstance(error, JobError) and error.problems:
        count = len(error.problems)
        head = "the job has 1 problem" if count == 1 else f"the job has {count} problems, the first is"
        return f"{head}: {error.problems[0]}"
    return error.what if isinstance(error, TrainwrightError) else f"{type(error).__name__}: {error}"


def nearest(name: str, valid: Iterable[str]) -> str:
    """Return a text with the nearest valid name, or all of them when none is near."""
    names = sorted(valid)
    close = get_close_matches(name, names, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else f"valid names: {', '.join(names)}"


def user_traceback(error: Exception, own: int = 1) -> str:
    """Return the traceback of user code, without our own frames, which called it."""
    trace = error.__traceback__
    for _ in range(own):
        trace = trace.tb_next if trace is not None and trace.tb_next is not None else trace
    return "".join(traceback.format_exception(type(error), error, trace))


@contextmanager
def user_code(what: str, remedy: str, where: str = "") -> Iterator[None]:
    """Raise a UserCodeError for what the user's code raises; `what` is the subject of its sentence."""
    try:
        yield
    except TrainwrightError:
        raise
    except Exception as error:
        text = f"{what} raised {type(error).__name__}: {error}"
        raise UserCodeError(text, where=where, remedy=remedy, detail=user_traceback(error, own=2)) from None


# --- Findings of a diagnosis ------------------------------------------------------------------------------------------


Severity = Literal["good", "doubtful", "bad"]
"""Correct; works, but slower or less safely than possible; does not work."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One result of a diagnosis.

    Args:
        subject: what was looked at, in a word or two: `Ray`, `storage`, `clock`.
        verdict: what it comes to.
        what: what was found, with its figures.
        where: node, file and line, or field; empty for the machine that asks.
        remedy: what to do about it; empty only where nothing is to be done.
    """

    subject: str
    verdict: Severity
    what: str
    where: str = ""
    remedy: str = ""

    def __post_init__(self) -> None:
        assert self.remedy or self.verdict == "good", f"{self.subject}: a finding that is not good has a remedy"


# --- Text for a terminal, which would execute control characters ------------------------------------------------------


_CONTROL_CHARACTERS = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]"
)  # not tab and newline; with bidi's


def escape_control_characters(value: Any) -> Any:
    """Return a text, or a JSON value, with control characters as escapes of Python's (`\\x1b`)."""
    match value:
        case str():
            return _CONTROL_CHARACTERS.sub(lambda found: repr(found[0])[1:-1], value)
        case list():
            return [escape_control_characters(item) for item in value]
        case dict():
            return {escape_control_characters(key): escape_control_characters(item) for key, item in value.items()}
    return value
