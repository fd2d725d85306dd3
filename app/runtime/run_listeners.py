"""The listeners of a run: who shows its events and who keeps them."""

from __future__ import annotations

from collections.abc import Sequence

from trainwright.planning.decision import Decision
from trainwright.planning.job_preparation import PreparedJob
from trainwright.ray_cluster.placement_groups import WorkerPlacement
from trainwright.reporting.html.run_report import ReportListener
from trainwright.reporting.progress_bar import RunProgress
from trainwright.runtime.controller import RunController
from trainwright.runtime.run_setup import RunSetup
from trainwright.tracking.listeners import PrometheusListener, TensorBoardWriter, TrackerThread


def create_controller(
    prepared: PreparedJob,
    decision: Decision,
    progress: RunProgress,
    *,
    fresh: bool = False,
    notes: Sequence[str] = (),
    placement: WorkerPlacement | None = None,
) -> RunController:
    """Return the driver of a run with its listeners: progress, TensorBoard, report, Prometheus and trackers.

    `fresh` and `notes` are as of RunController, `placement` as of RunSetup.
    """
    setup = RunSetup(prepared, decision, placement)
    controller = RunController(setup, fresh=fresh, notes=notes)
    controller.listen(progress)
    controller.listen(TensorBoardWriter(prepared.store, prepared.job.name))
    controller.listen(ReportListener(prepared.store, prepared.job.name))
    controller.listen(PrometheusListener())
    for tracker in prepared.job.trackers:
        controller.listen(TrackerThread(tracker, prepared.store, prepared.job.name, say=controller.say))
    return controller
