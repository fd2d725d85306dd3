"""Experiment trackers, public as `tw.trackers`: the protocol of own ones, and those for MLflow and Weights & Biases.

A tracker has three methods, which are called from a thread of their own (`listeners.TrackerThread`).
"""

from __future__ import annotations

import html
import importlib
import io
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, Literal, Protocol

from trainwright.core.errors import JobError
from trainwright.core.events import MediaLogged
from trainwright.core.redaction import redact


@dataclass(frozen=True, kw_only=True)
class TrackedRun:
    """The run that a tracker records."""

    name: str  # name of the run
    # identity of the tracker's record: the same for every driver that continues the run, another one after `--fresh`.
    # It has letters, digits, dots, dashes and underscores.
    id: str
    total_steps: int  # steps of the whole run


@dataclass(frozen=True, kw_only=True)
class Row:
    """The values of one step, with names as in TensorBoard, or the metrics of one evaluation."""

    step: int  # completed steps, counted from 1
    time_s: float  # seconds since the epoch
    # such as `train/loss`, `train/learning_rate`, `speed/samples_per_s`, `evaluation/accuracy`; all finite
    values: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """How the session of a driver ended."""

    # `done`, `stopped` or `failed`; also `failed` where the driver did not report an end
    state: Literal["done", "stopped", "failed"]
    links: Mapping[str, str]  # URIs of the `folder`, the `report`, and the newest `checkpoint` where there is one


class Tracker(Protocol):
    """Records a run while it trains.

    A tracker must be picklable before `begin`, for a driver in the cluster. All calls come from the same thread and may
    block: training does not wait for them. An exception switches the tracker off for this driver, with a note in the
    run; only `end` is still called, if `begin` returned. An optional method `check()` is called before anything starts,
    in the process of the caller; its exception rejects the job. An optional method `log_media(media)` gets a sequence
    of images and texts of callbacks, each with `step`, `name` and `time_s`, and either `image` (bytes, PNG) with
    `width` and `height`, or `text`.
    """

    def begin(self, run: TrackedRun, params: Mapping[str, str]) -> int:
        """Create or continue the record of the run. Returns the last recorded step, 0 for none.

        Args:
            run: the run to record.
            params: facts of job and plan.
        """

    def log(self, rows: Sequence[Row]) -> None:
        """Record rows in order. Each step comes once, even when it was repeated after a failure.

        The rows are all new ones since the last call returned. An evaluation is a row of its own.
        """

    def end(self, ending: RunResult) -> None:
        """Finish the session. After `stopped` or `failed` another driver may call `begin` again."""


def check_trackers(trackers: Iterable[Any]) -> None:
    """Call `check()` of the trackers that have it. Raises JobError or their exceptions."""
    for tracker in trackers:
        asked = getattr(tracker, "check", None)
        if asked is not None:
            asked()


def import_optional(name: str, package: str, tracker: str) -> Any:
    """Import an optional package. Raises a JobError that says how to install it."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != name.partition(".")[0]:
            raise
        wanted = "pillow" if package == "pillow" else f"'trainwright[{package.partition('-')[0]}]'"
        problem = f"trackers= has {tracker}, which needs {package}: pip install {wanted} on the driver"
        raise JobError([problem]) from error


# --- MLflow -----------------------------------------------------------------------------------------------------------


_RUN_ID_TAG = "trainwright.id"  # the tag that identifies a run
_STEP_METRIC = "trainwright/step"  # the metric that holds the last recorded step
_MOST_METRICS, _MOST_PARAMS, _LONGEST = 900, 90, 5000  # limits of a batch and of a value, below those of all servers
# characters that the name of an image, or of a metric, must not have; and the limit of both
_NO_IMAGE_NAME, _NO_METRIC_NAME, _LONGEST_NAME = re.compile(r"[^a-zA-Z0-9_\-./ ]"), re.compile(r"[^\w\-./ :]"), 250
_STATUS = {"done": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}


@dataclass(kw_only=True)
class MLflow:
    """Records a run on an MLflow server, or in `sqlite:///mlflow.db`. Needs `mlflow-skinny` or `mlflow`.

    Args:
        uri: of the tracking server; by default `MLFLOW_TRACKING_URI`. Put user and password into MLflow's own variables
            (`MLFLOW_TRACKING_USERNAME`, ...) in the environment of the driver.
        experiment: name of the experiment; created where it does not exist.
    """

    uri: str | None = None
    experiment: str = "trainwright"
    _client: Any = field(default=None, init=False, repr=False)
    _run: str = field(default="", init=False, repr=False)

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(MLflow, uri=self.uri, experiment=self.experiment), ()

    def check(self) -> None:
        """Raise JobError where MLflow is not installed."""
        import_optional("mlflow", "mlflow-skinny", "MLflow")

    def begin(self, run: TrackedRun, params: Mapping[str, str]) -> int:
        """See `Tracker.begin`. A changed fact becomes a tag: MLflow does not overwrite parameters."""
        tracking = import_optional("mlflow.tracking", "mlflow-skinny", "MLflow")
        self._client = tracking.MlflowClient(tracking_uri=self.uri)
        experiment = self._experiment()
        found = self._client.search_runs([experiment], f"tags.`{_RUN_ID_TAG}` = '{run.id}'", max_results=1)
        if found:
            self._client.update_run(found[0].info.run_id, status="RUNNING")
        kept = found[0] if found else self._client.create_run(experiment, run_name=run.name, tags={_RUN_ID_TAG: run.id})
        self._run = kept.info.run_id
        self._tell(kept.data.params, params)
        return int(kept.data.metrics.get(_STEP_METRIC, 0))

    def _experiment(self) -> str:
        found = self._client.get_experiment_by_name(self.experiment)
        return str(found.experiment_id if found else self._client.create_experiment(self.experiment))

    def _tell(self, kept: Mapping[str, str], params: Mapping[str, str]) -> None:
        entities = import_optional("mlflow.entities", "mlflow-skinny", "MLflow")
        told = {name: value[:_LONGEST] for name, value in params.items()}
        new = [entities.Param(name, value) for name, value in told.items() if name not in kept]
        for start in range(0, len(new), _MOST_PARAMS):
            self._client.log_batch(self._run, params=new[start : start + _MOST_PARAMS])
        for name, value in told.items():
            if kept.get(name, value) != value:
                self._client.set_tag(self._run, f"trainwright.now.{name}", value)

    def log(self, rows: Sequence[Row]) -> None:
        """See `Tracker.log`. Characters that MLflow refuses in the name of a metric become `_`."""
        entities = import_optional("mlflow.entities", "mlflow-skinny", "MLflow")
        waiting: list[Any] = []
        for row in rows:
            values = {**row.values, _STEP_METRIC: float(row.step)}
            if len(waiting) + len(values) > _MOST_METRICS:
                self._client.log_batch(self._run, metrics=waiting)
                waiting = []
            time_ms = int(row.time_s * 1e3)
            waiting += [
                entities.Metric(_clean_name(name, _NO_METRIC_NAME), value, time_ms, row.step)
                for name, value in values.items()
            ]
        self._client.log_batch(self._run, metrics=waiting)

    def log_media(self, media: Sequence[MediaLogged]) -> None:
        """See `Tracker`. MLflow shows images by steps; texts become files, `texts/NAME/STEP.txt`."""
        for each in media:
            name = _clean_name(each.name, _NO_IMAGE_NAME)
            if each.image:
                image = import_optional("PIL.Image", "pillow", "MLflow").open(io.BytesIO(each.image))
                self._client.log_image(
                    self._run, image, key=name, step=each.step, timestamp=int(each.time_s * 1e3), synchronous=True
                )
            else:
                self._client.log_text(self._run, each.text, f"texts/{name}/{each.step:08d}.txt")

    def end(self, ending: RunResult) -> None:
        """See `Tracker.end`. Links become tags."""
        for name, uri in ending.links.items():
            self._client.set_tag(self._run, f"trainwright.{name}", uri)
        self._client.set_terminated(self._run, _STATUS[ending.state])


def _clean_name(name: str, refused: re.Pattern[str]) -> str:
    """Return a name that MLflow takes, which is a path, too."""
    parts = refused.sub("_", name[:_LONGEST_NAME]).split("/")
    return "/".join(part for part in parts if part.strip(". ")) or "_"


# --- Weights & Biases -------------------------------------------------------------------------------------------------


_WandBMode = Literal["online", "offline", "disabled"]


@dataclass(kw_only=True)
class WandB:
    """Records a run in Weights & Biases. Needs `wandb`, and for `online` a key: `wandb login` or WANDB_API_KEY.

    Args:
        project: name of the project.
        entity: user or team; by default that of the key.
        mode: `offline` writes files below `folder` for `wandb sync`; `disabled` writes nothing. The default is
            WANDB_MODE, else `online`.
        folder: for the files of wandb; by default WANDB_DIR, else the working folder.
        tags: tags of the run.
    """

    project: str
    entity: str | None = None
    mode: _WandBMode | None = None
    folder: str | None = None
    tags: tuple[str, ...] = ()
    _run: Any = field(default=None, init=False, repr=False)
    _last: int = field(default=0, init=False, repr=False)

    def __reduce__(self) -> tuple[Any, ...]:
        given = {each.name: getattr(self, each.name) for each in fields(self) if each.init}
        return partial(WandB, **given), ()

    def check(self) -> None:
        """Raise JobError where wandb is not installed or has no key; in a terminal wandb asks for one."""
        wandb = import_optional("wandb", "wandb", "WandB")
        if (self.mode or os.environ.get("WANDB_MODE") or "online") != "online":
            return
        try:
            known = wandb.login()
        except Exception as error:  # of many kinds
            raise JobError(
                [f"trackers= has WandB, which has no key: {redact(str(error))}; run: wandb login"]
            ) from error
        if not known:
            raise JobError(["trackers= has WandB, which has no key: run wandb login, or set WANDB_API_KEY"])

    def begin(self, run: TrackedRun, params: Mapping[str, str]) -> int:
        """See `Tracker.begin`."""
        wandb = import_optional("wandb", "wandb", "WandB")
        self._run = wandb.init(
            project=self.project, entity=self.entity, mode=self.mode, dir=self.folder, tags=list(self.tags) or None,
            id=run.id, name=run.name, config=dict(params), resume="allow", allow_val_change=True, reinit="create_new",
            settings=wandb.Settings(silent=True, console="off"),
        )  # fmt: skip
        self._last = max(int(self._run.step) - 1, 0)  # W&B returns the next step
        return self._last

    def log(self, rows: Sequence[Row]) -> None:
        """See `Tracker.log`. W&B takes no step before the last one, so late rows are recorded at the last step."""
        for row in rows:
            self._last = max(self._last, row.step)
            self._run.log(dict(row.values), step=self._last)

    def log_media(self, media: Sequence[MediaLogged]) -> None:
        """See `Tracker`, and `log` for late ones."""
        wandb = import_optional("wandb", "wandb", "WandB")
        for each in media:
            self._last = max(self._last, each.step)
            if each.image:
                image = import_optional("PIL.Image", "pillow", "WandB").open(io.BytesIO(each.image))
                value = wandb.Image(image)
            else:
                value = wandb.Html(f"<pre>{html.escape(each.text)}</pre>")
            self._run.log({each.name: value}, step=self._last)

    def end(self, ending: RunResult) -> None:
        """See `Tracker.end`. Links become part of the summary."""
        self._run.summary.update({f"trainwright/{name}": uri for name, uri in ending.links.items()})
        self._run.summary.update({"trainwright/state": ending.state})
        self._run.finish(exit_code=1 if ending.state == "failed" else 0)
