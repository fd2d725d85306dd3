"""MLflow, by its client alone: no global state, so several runs of a process do not meet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trainwright.tracking.base import Ending, Row, Tracked, module_of

_ID = "trainwright.id"  # the tag by which a run is found again
_STEP = "trainwright/step"  # the metric that says what is held; the last one of its batch
_MOST_METRICS, _MOST_PARAMS, _LONGEST = 900, 90, 5000  # of a batch and of a value, below what every server takes
_STATUS = {"done": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}


@dataclass(kw_only=True)
class MLflow:
    """Tells an MLflow server, or a database such as `sqlite:///mlflow.db`. Needs `mlflow-skinny` or `mlflow`.

    Args:
        uri: of the tracking server; by default that of `MLFLOW_TRACKING_URI`. Leave users and passwords to MLflow's own
            variables (`MLFLOW_TRACKING_USERNAME`, ...), which the driver must have.
        experiment: made where there is none of this name.
    """

    uri: str | None = None
    experiment: str = "trainwright"
    _client: Any = field(default=None, init=False, repr=False)
    _run: str = field(default="", init=False, repr=False)

    def __reduce__(self) -> tuple[Any, ...]:
        return _again, (self.uri, self.experiment)

    def check(self) -> None:
        """Raises JobError where MLflow is not installed."""
        module_of("mlflow", "mlflow-skinny", "MLflow")

    def begin(self, run: Tracked, params: Mapping[str, str]) -> int:
        """See `Tracker.begin`. A fact that has changed since becomes a tag, as MLflow's parameters are written once."""
        tracking = module_of("mlflow.tracking", "mlflow-skinny", "MLflow")
        self._client = tracking.MlflowClient(tracking_uri=self.uri)
        experiment = self._experiment()
        found = self._client.search_runs([experiment], f"tags.`{_ID}` = '{run.id}'", max_results=1)
        if found:
            self._client.update_run(found[0].info.run_id, status="RUNNING")
        kept = found[0] if found else self._client.create_run(experiment, run_name=run.name, tags={_ID: run.id})
        self._run = kept.info.run_id
        self._tell(kept.data.params, params)
        return int(kept.data.metrics.get(_STEP, 0))

    def _experiment(self) -> str:
        found = self._client.get_experiment_by_name(self.experiment)
        return str(found.experiment_id if found else self._client.create_experiment(self.experiment))

    def _tell(self, kept: Mapping[str, str], params: Mapping[str, str]) -> None:
        entities = module_of("mlflow.entities", "mlflow-skinny", "MLflow")
        told = {name: value[:_LONGEST] for name, value in params.items()}
        new = [entities.Param(name, value) for name, value in told.items() if name not in kept]
        for start in range(0, len(new), _MOST_PARAMS):
            self._client.log_batch(self._run, params=new[start : start + _MOST_PARAMS])
        for name, value in told.items():
            if kept.get(name, value) != value:
                self._client.set_tag(self._run, f"trainwright.now.{name}", value)

    def log(self, rows: Sequence[Row]) -> None:
        """See `Tracker.log`."""
        entities = module_of("mlflow.entities", "mlflow-skinny", "MLflow")
        waiting: list[Any] = []
        for row in rows:
            values = {**row.values, _STEP: float(row.step)}
            if len(waiting) + len(values) > _MOST_METRICS:
                self._client.log_batch(self._run, metrics=waiting)
                waiting = []
            time_ms = int(row.time_s * 1e3)
            waiting += [entities.Metric(name, value, time_ms, row.step) for name, value in values.items()]
        self._client.log_batch(self._run, metrics=waiting)

    def end(self, ending: Ending) -> None:
        """See `Tracker.end`. Links become tags."""
        for name, uri in ending.links.items():
            self._client.set_tag(self._run, f"trainwright.{name}", uri)
        self._client.set_terminated(self._run, _STATUS[ending.state])


def _again(uri: str | None, experiment: str) -> MLflow:
    return MLflow(uri=uri, experiment=experiment)
