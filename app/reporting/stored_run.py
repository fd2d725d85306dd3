"""A handle on a run by its storage alone: its state, history and charts; to stop it, or to wait for its end."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainwright.reporting.run_history import RunHistory, read_history, read_steps
from trainwright.storage.object_store import Store, open_store
from trainwright.storage.run_control import await_end, check_run, request_stop

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure


class StoredRun:
    """A run, running or finished, wherever its driver is. Everything is read from storage.

    Attributes:
        name: of the run.
        store: where it is.
    """

    def __init__(self, store: Store, name: str) -> None:
        self.name = name
        self.store = store

    def read(self) -> RunHistory:
        """Return the summary of all events so far. Raises StorageError."""
        self._flush()
        return read_history(self.store, self.name)

    @property
    def state(self) -> str:
        """`running`, `done`, `stopped`, `failed`, or `interrupted`: its driver is gone."""
        return self.read().state

    @property
    def history(self) -> pd.DataFrame:
        """One row a completed step: step, epoch, loss, learning_rate, gradient_norm, samples_per_s, wait_share.

        There is a column for each value of `tw.log`.
        """
        self._flush()
        return read_steps(self.store, self.name)

    @property
    def evaluations(self) -> pd.DataFrame:
        """One row an evaluation: step, and a column for each metric."""
        return self.read().evaluations

    @property
    def metrics(self) -> dict[str, float]:
        """The newest evaluation; empty when there was none."""
        return self.read().metrics

    @property
    def best(self) -> dict[str, float]:
        """Step and metrics of the best evaluation by `best=` of the job; empty without one."""
        best = self.read().best
        return {} if best is None else {"step": best[1].step, **best[1].metrics}

    @property
    def reason(self) -> str:
        """Why the run ended before its last step; empty if it did not."""
        return self.read().reason

    @property
    def folder(self) -> str:
        """URI of the run's folder."""
        return self.store.uri_of(self.name)

    @property
    def report(self) -> str:
        """URI of the report."""
        return self.store.uri_of(f"{self.name}/report.html")

    def stop(self, now: bool = False) -> None:
        """Ask for the end: at the next step after a checkpoint, or at once without one. Returns immediately.

        Raises:
            RunConflict: no driver of the run is alive.
        """
        request_stop(self.store, self.name, now=now)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the driver has released the run; False when `timeout_s` passed first.

        Raises:
            RunConflict: the driver has died, or another one has taken the run over.
        """
        return await_end(self.store, self.name, timeout_s=timeout_s)

    def plot(self) -> Figure:
        """Return a matplotlib figure: loss, metrics of evaluations and throughput, each on its own axes.

        Notebooks show it.
        """
        from trainwright.reporting.html.run_charts import notebook_figure

        steps, evaluations = self.history, self.evaluations
        names = [*dict.fromkeys(name for each in self.read().evaluated for name in each.metrics if name != "loss")]
        figure = notebook_figure(10.0, 2.4 * (2 + len(names)))
        loss, *others, speed = figure.subplots(2 + len(names), 1, sharex=True)
        loss.plot(steps["step"], steps["loss"], alpha=0.5, label="training")
        if "loss" in evaluations:
            loss.plot(evaluations["step"], evaluations["loss"], "o-", label="evaluation")
            loss.legend()
        loss.set_ylabel("loss")
        for axes, name in zip(others, names, strict=True):
            axes.plot(evaluations["step"], evaluations[name], "o-")
            axes.set_ylabel(name)
        speed.plot(steps["step"], steps["samples_per_s"])
        speed.set_ylabel("samples/s")
        speed.set_xlabel("step")
        return figure

    def _repr_html_(self) -> str:
        from trainwright.reporting.html.run_report import summary_html

        return summary_html(self.read())

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, {self.state}, {self.folder})"

    def _flush(self) -> None:
        """Have the driver write its events so far, if it is in this process."""


def open_run(name: str, storage: str = "runs") -> StoredRun:
    """Return a handle on a run of a storage, running or finished. Raises StorageError if there is no such run."""
    store = open_store(storage)
    check_run(store, name)
    return StoredRun(store, name)
