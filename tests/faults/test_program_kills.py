"""The programs of `docs/programs.md` on real workers: rank 0 is killed in the middle, and the end is the same."""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path

import pytest

import trainwright as tw
from tests.support.finished_runs import final_state, told
from tests.support.program_runs import job_of
from tests.support.program_table import PROGRAMS, Program
from trainwright.core import events

pytestmark = [
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated"),  # peft 0.21 asks transformers 5.23
]


class Killer:
    """Kills the process of rank 0 after a step, once."""

    def __init__(self, mark: Path, step: int) -> None:
        self.mark, self.step = mark, step

    def after_step(self, context: tw.CallbackContext) -> None:
        if context.step == self.step and not self.mark.exists():
            self.mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)


QUICK = ("word_language_model", "knowledge_distillation")  # the others: `make soak`
CASES = [
    pytest.param(program, id=program.name, marks=() if program.name in QUICK else pytest.mark.soak)
    for program in PROGRAMS
]
STEP = {"time_sequence": 2}  # after which rank 0 dies; of four


@pytest.mark.parametrize("program", CASES)
def test_a_killed_run_is_the_unbroken_one(program: Program, ray_cluster: None, tmp_path: Path) -> None:
    job, ends = job_of(program.name), []
    for name, step in (("unbroken", 0), ("killed", STEP.get(program.name, 5))):
        killer, storage = Killer(tmp_path / f"{name}.mark", step), str(tmp_path / name)
        fields = {"workers": 2, "strategy": "data_parallel", "spares": 0, "keeper_s": 0, "preflight": False}
        assert tw.fit(job.replace(storage=storage, callbacks=partial(list, [killer]), **fields)).state == "done"
        ends.append(final_state(storage, job.name))
    recovered = [each.source for each in told(storage, job.name, events.Formed)[1:] if isinstance(each, events.Formed)]
    assert (tmp_path / "killed.mark").exists()
    assert recovered == ["initial" if job.training.local_state else "replica"], "the local state of rank 0 died with it"
    assert ends[0] == ends[1]
