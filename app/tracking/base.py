"""What a tracker of experiments is: three calls, made from a thread of its own."""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from trainwright.core.errors import JobError

_USER = re.compile(r"//[^/@\s]+@")  # user and password of a URI
_SECRETS = ("WANDB_API_KEY", "MLFLOW_TRACKING_TOKEN", "MLFLOW_TRACKING_PASSWORD", "DATABRICKS_TOKEN")


@dataclass(frozen=True, kw_only=True)
class Tracked:
    """The run that a tracker is told of.

    Attributes:
        name: of the run.
        id: of what the tracker keeps of it: the same for every driver that goes on with the run, another one after
            `--fresh`. Letters, digits, dots, dashes and underscores.
        total_steps: of the whole run.
    """

    name: str
    id: str
    total_steps: int


@dataclass(frozen=True, kw_only=True)
class Row:
    """What is known of one step, named as in TensorBoard; of an evaluation, its metrics.

    Attributes:
        step: completed steps, counted from 1.
        time_s: seconds since the epoch.
        values: such as `train/loss`, `train/learning_rate`, `speed/samples_per_s`, `evaluation/accuracy`; all finite.
    """

    step: int
    time_s: float
    values: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class Ending:
    """How a driver let go of the run.

    Attributes:
        state: `done`, `stopped` or `failed`; `failed` too where the driver ended without a word.
        links: URIs by what they lead to: `folder`, `report`, and `checkpoint`, the newest, where there is one.
    """

    state: Literal["done", "stopped", "failed"]
    links: Mapping[str, str]


class Tracker(Protocol):
    """Who is told of a run while it goes.

    It must survive pickling before `begin`, for a driver in the cluster. Each call comes from one and the same thread,
    which may wait as long as it likes: training does not. Whatever a call raises switches the tracker off for the rest
    of this driver's life, with a note in the run. Where it has a method `check()`, that is called before anything is
    started, in the process of the caller; what it raises refuses the job.
    """

    def begin(self, run: Tracked, params: Mapping[str, str]) -> int:
        """Open what is kept of the run, or go on with it; returns the last step that it holds, 0 for none.

        Args:
            run: which one.
            params: facts of job and plan.
        """

    def log(self, rows: Sequence[Row]) -> None:
        """Take rows, each step once, in order, however often it was done again after a failure.

        The rows are all those that came since the last call returned. An evaluation is a row of its own.
        """

    def end(self, ending: Ending) -> None:
        """The driver lets go. After `stopped` or `failed` another one may `begin` again."""


def check(trackers: Iterable[Any]) -> None:
    """Ask those that can tell whether they can begin. Raises JobError, or what they raise."""
    for tracker in trackers:
        asked = getattr(tracker, "check", None)
        if asked is not None:
            asked()


def module_of(name: str, package: str, tracker: str) -> Any:
    """An optional package. Raises JobError that says how to install it."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != name:
            raise
        extra = package.partition("-")[0]
        problem = f"trackers= has {tracker}, which needs {package}: pip install 'trainwright[{extra}]' on the driver"
        raise JobError([problem]) from error


def scrub(text: str) -> str:
    """The same without what may be a secret in it: users in URIs, keys and tokens of the environment."""
    for name in _SECRETS:
        value = os.environ.get(name)
        text = text.replace(value, f"<{name}>") if value else text
    return _USER.sub("//", text)
