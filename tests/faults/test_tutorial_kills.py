"""The programs of `docs/tensorflow.md` on two real workers: each is killed once, and the end is the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import pytest

import trainwright as tw
from tests.programs.keras.tutorials import PROGRAMS, Program
from tests.support.finished_runs import final_state
from tests.support.keras_jobs import tf_rank
from tests.support.torch_jobs import Kill

STEPS = 3  # of an epoch; there are two


class Killer(keras.callbacks.Callback):  # type: ignore[misc]
    """Kills its worker at the end of a step."""

    def __init__(self, kills: tuple[Kill, ...]) -> None:
        super().__init__()
        self.kills, self.epoch = kills, 0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.epoch = epoch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        for kill in self.kills:
            if (kill.rank, kill.step) == (tf_rank(), self.epoch * STEPS + batch):
                kill.strike()


@pytest.mark.soak
@pytest.mark.parametrize("program", PROGRAMS, ids=[program.name for program in PROGRAMS])
def test_a_program_whose_workers_are_killed_is_the_unbroken_one(
    program: Program, ray_cluster: None, tmp_path: Path
) -> None:
    kills = tuple(Kill(rank=rank, step=step, folder=str(tmp_path)) for rank, step in ((1, 1), (0, 3)))
    ends = []
    for name, struck in (("unbroken", ()), ("killed", kills)):
        job = program.job(
            storage=str(tmp_path / name), callbacks=lambda struck=struck: [Killer(struck)], workers=2,
            strategy="tf_multi_worker_mirrored", checkpoint_steps=2, spares=0, keeper_s=0, preflight=False,
        )  # fmt: skip
        assert tw.fit(job).state == "done"
        ends.append(final_state(tmp_path / name, program.name))
    assert all(kill.mark.exists() for kill in kills)
    assert ends[0] == ends[1]
