"""The best checkpoint and an early end, where a worker and the driver are killed between evaluations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import trainwright as tw
from tests.support import processes
from tests.support.finished_runs import final_state, told
from trainwright.core import events
from trainwright.core.errors import RunFinished
from trainwright.planning.job_file import load_job
from trainwright.reporting.run_views import run_view
from trainwright.storage.object_store import open_store
from trainwright.storage.run_log import RunLog

REASON = "stopped early after step 20: score has not improved in 3 evaluations"
# An evaluation after each 4 steps. The best is the second; the third to the fifth are no better, and end the run.
JOB = """
import os, signal, time
from pathlib import Path
import numpy as np, torch
from torch import nn
import trainwright as tw

SCORES = torch.tensor([3.0, 1.0, float("nan"), 1.0, 2.0, 0.5, 0.5])
QUICK, KILLED = Path({quick!r}), Path({killed!r})


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 1)
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x):
        if self.training and x.device.type != "meta":
            self.steps += 1
            if not QUICK.exists():
                time.sleep(0.1)
            distributed = torch.distributed.is_initialized() and torch.distributed.get_rank() == 1
            if distributed and int(self.steps) == 6 and not KILLED.exists():
                KILLED.touch()
                os.kill(os.getpid(), signal.SIGKILL)
        return torch.cat((self.body(x), self.steps.expand(len(x), 1)), dim=1)


rows = {{"x": np.random.default_rng(0).normal(size=(32, 4)).astype("float32")}}
rows["y"] = rows["x"].sum(1)
job = tw.Job(
    name="scored",
    model=Net,
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
    loss=lambda outputs, targets: (outputs[:, 0] - targets) ** 2,
    metrics={{"score": lambda outputs, targets: SCORES[outputs[:, 1].long() // 4 - 1]}},
    train=tw.datasets.table(rows), evaluate=tw.datasets.table(rows), inputs="x", targets="y", batch_size=8,
    epochs=7, checkpoint_steps=3, keep=1, workers=2, spares=0, storage={storage!r}, preflight=False,
    best="-score", early_stop=tw.EarlyStop("-score", patience=3),
)
"""


def write_job(folder: Path) -> Path:
    folder.mkdir()
    file, marks = folder / "job.py", (str(folder / name) for name in ("quick", "killed", "runs"))
    file.write_text(JOB.format(**dict(zip(("quick", "killed", "storage"), marks, strict=True))))
    return file


def evaluated(folder: Path) -> list[int]:
    """The steps that were evaluated."""
    found: Any = told(folder / "runs", "scored", events.Evaluated) if (folder / "runs").exists() else []
    return [event.step for event in found]


def test_kills_change_neither_the_best_checkpoint_nor_the_end(ray_cluster: None, tmp_path: Path) -> None:
    plain, broken = tmp_path / "plain", tmp_path / "broken"
    file = write_job(plain)
    for mark in ("quick", "killed"):
        (plain / mark).touch()
    job = load_job(str(file))
    run = tw.fit(job)
    assert run.state == "done" and evaluated(plain) == [4, 8, 12, 16, 20]
    assert (run.best["step"], run.best["score"], run.reason) == (8, 1.0, REASON)

    file = write_job(broken)
    with processes.trainwright("fit", file, cluster=processes.address()) as driver:
        processes.wait_until(lambda: 12 in evaluated(broken), driver)
        processes.kill(driver)
    assert (broken / "killed").exists() and 20 not in evaluated(broken)
    (broken / "quick").touch()
    code, _, err = processes.finish("fit", file, cluster=processes.address())
    assert code == 0 and f"{REASON}; best score 1 at step 8" in err, err

    for folder in (plain, broken):
        entry = RunLog(open_store(str(folder / "runs")), "scored").head()
        assert entry is not None and [ref.step for ref in entry.checkpoints] == [8, 20]
        data = run_view(str(folder / "runs"), "scored").data
        assert (data["state"], data["reason"], data["best"]["text"]) == ("done", REASON, "score 1 at step 8")
        assert "best score" in (folder / "runs" / "scored" / "report.html").read_text()
    assert final_state(broken / "runs", "scored") == final_state(plain / "runs", "scored")
    best, same = (tw.load_model(load_job(str(folder / "job.py")), step="best") for folder in (plain, broken))
    assert all(map(torch.equal, best.state_dict().values(), same.state_dict().values())) and int(best.steps) == 8
    assert tw.evaluate(job, step="best", here=True)["score"] == 1.0

    with pytest.raises(RunFinished, match="goes on with a larger patience"):
        tw.fit(job)
    assert tw.fit(job.replace(early_stop=tw.EarlyStop("-score", patience=4))).state == "done"
    assert evaluated(plain) == [4, 8, 12, 16, 20, 24, 28]
    assert tw.fit(job.replace(early_stop=None, epochs=9, max_time=1e-3)).state == "done", "its time is over already"
    assert evaluated(plain)[-1] == 28
