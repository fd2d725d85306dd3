"""One run, a kill at each moment of its life: forward, backward, reduction, optimizer, snapshot, upload, evaluation,
recovery, two at once, every rank. The end is bitwise that of an unbroken run.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import trainwright as tw
from tests.support import torch_jobs
from tests.support.finished_runs import final_state, told
from trainwright.core import events

WORKERS = 3
# (moment, rank, steps completed before it); a checkpoint comes each 5 steps, an evaluation each 9.
TABLE = (
    ("forward", 1, 2),
    ("backward", 2, 4),
    ("snapshot", 0, 5),
    ("synchronisation", 0, 7),
    ("evaluation", 1, 9),
    ("upload", 0, 10),
    ("optimizer", 1, 12),
    ("forward", 0, 16),
    ("forward", 2, 16),
    ("forward", 1, 20),
    ("recovery", 2, 20),
    ("forward", 0, 23),
    ("forward", 1, 23),
    ("forward", 2, 23),
)
NOW = {"step": -1}  # of this process


def kills_in(folder: Path) -> tuple[torch_jobs.Kill, ...]:
    return tuple(torch_jobs.Kill(rank=rank, step=step, point=point, folder=str(folder)) for point, rank, step in TABLE)


def due(kills: tuple[torch_jobs.Kill, ...], point: str, step: int) -> list[torch_jobs.Kill]:
    return [kill for kill in kills if (kill.point, kill.rank, kill.step) == (point, torch_jobs.rank(), step)]


def strike(kills: tuple[torch_jobs.Kill, ...], point: str, step: int) -> None:
    for kill in due(kills, point, step):
        kill.strike()


def mortal_step(kills: tuple[torch_jobs.Kill, ...]) -> Callable[[Any, Any], torch.Tensor]:
    """The step of `tests.support.torch_jobs`, which also dies in the backward and in the evaluation."""
    inner = torch_jobs.make_step(kills)

    def step(model: Any, batch: Any) -> torch.Tensor:
        net = getattr(model, "module", model)
        NOW["step"] = int(net.steps)
        if not net.training:
            strike(kills, "evaluation", NOW["step"])
        losses = inner(model, batch)
        if net.training and due(kills, "backward", NOW["step"]):
            losses.register_hook(lambda gradient, now=NOW["step"]: strike(kills, "backward", now))
        return losses

    return step


def mortal_optimizer(kills: tuple[torch_jobs.Kill, ...]) -> Callable[[Any], torch.optim.Optimizer]:
    """SGD that dies when the gradients are reduced and nothing is applied yet; the others apply them."""

    def build(parameters: Any) -> torch.optim.Optimizer:
        optimizer = torch_jobs.sgd(parameters)
        optimizer.register_step_pre_hook(lambda *_: strike(kills, "optimizer", NOW["step"]))
        return optimizer

    return build


def mortal_model(kills: tuple[torch_jobs.Kill, ...]) -> Callable[[], torch.nn.Module]:
    """Arms the process for the moments outside of steps: snapshot, upload, recovery."""
    inner = torch_jobs.make_model(kills)

    def build() -> torch.nn.Module:
        from trainwright.strategies.torch.engines.data_parallel import DataParallel
        from trainwright.worker.worker import Worker

        snapshot, restore = DataParallel.snapshot, Worker.restore

        def dying_snapshot(self: Any) -> Any:
            copy = snapshot(self)
            strike(kills, "snapshot", copy.step)
            return copy

        def dying_restore(self: Any, how: Any) -> Any:
            if self._interruption.current.number > 1:
                strike(kills, "recovery", how.step)
            return restore(self, how)

        DataParallel.snapshot, Worker.restore = dying_snapshot, dying_restore  # type: ignore[method-assign]
        return inner()

    return build


def job(folder: Path, kills: tuple[torch_jobs.Kill, ...], **fields: Any) -> tw.Job:
    return torch_jobs.job(
        folder, model=mortal_model(kills), step=mortal_step(kills), optimizer=mortal_optimizer(kills), workers=WORKERS,
        evaluate=tw.datasets.table({name: column[:30] for name, column in torch_jobs.data().items()}), **fields,
    )  # fmt: skip


def test_a_kill_at_each_moment_changes_no_bit(folder: Path, ray_cluster: None) -> None:
    kills = kills_in(folder.parent)
    tw.fit(job(folder, kills, spares=1, failures=6, keeper_s=0.1))
    missed = [(kill.point, kill.rank, kill.step) for kill in kills if not kill.mark.exists()]
    assert not missed, "the proof of each moment is made by its victim"
    plain = folder.parent / "plain"
    tw.fit(job(plain, ()))
    assert final_state(folder, "faulty") == final_state(plain, "faulty")
    formed: Any = told(folder, "faulty", events.Formed)
    assert {event.source for event in formed} <= {"initial", "replica", "keeper", "checkpoint"}
    lost = [event.steps_lost for event in formed if event.survivors]
    assert not any(lost), "where somebody lives no step is lost"
    metrics: Any = [told(place, "faulty", events.Evaluated) for place in (folder, plain)]
    assert [event.metrics for event in metrics[0]] == [event.metrics for event in metrics[1]]
