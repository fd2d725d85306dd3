"""Every id counts once, through deaths of a consumer, a task, an actor and the driver, with 2, 3 and 1 workers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load

import trainwright as tw
from tests.support import exactly_once_job, processes, torch_jobs
from tests.support.driver_kills import committed
from tests.support.finished_runs import final_state, told
from trainwright.core import events
from trainwright.datasets.loading.batch_loader import make_schedule

JOB_FILE = """
from tests.support import exactly_once_job, torch_jobs
kill = torch_jobs.Kill(rank=1, step=6, folder={marks!r})
source = exactly_once_job.{source}
job = exactly_once_job.job({folder!r}, {marks!r}, kills=(kill,), fatal={fatal}, held=25, source=source)
"""


def counted(folder: Path) -> np.ndarray:
    """How often each id counted in the newest checkpoint."""
    state = final_state(folder, "faulty")
    seen = next(
        value
        for name, payload in state.files.items()
        if name.endswith(".safetensors")
        for key, value in load(payload).items()
        if key.endswith("seen") and value.shape == (exactly_once_job.IDS,)
    )
    return -seen / exactly_once_job.RATE * exactly_once_job.BATCH


def id_at(position: int, source: str) -> int:
    """The id at a position of the pass; the rows that are left are the ids in order."""
    index = getattr(exactly_once_job, source)("", -1).index()
    schedule = make_schedule(
        index, batch_size=exactly_once_job.BATCH, epochs=1, seed=exactly_once_job.SEED, shuffle=True, drop_last=False
    )
    return int(schedule.order.rows_at(0, np.array([position]))[0])


def struck(marks: Path, fatal: int) -> bool:
    """Whether a task of Ray Data and an actor have died of an id."""
    return all((marks / f"{what}-{fatal}").exists() for what in ("pool", "actor"))


def stop_after(run: tw.Run, folder: Path, step: int, held: Path) -> None:
    """Ask the run to stop once it has committed that step, and release those who are held a little later."""
    while committed(folder) < step and not run.wait(0.1):
        assert run.state == "running"
    run.stop()
    held.touch()
    assert run.wait(120.0) and run.state == "stopped"


@pytest.mark.soak
@pytest.mark.timeout(400)
@pytest.mark.filterwarnings("ignore:Use 'expr' instead of 'fn'")
@pytest.mark.parametrize("source", ["dataset", "streamed"])
def test_each_id_counts_once(folder: Path, tmp_path: Path, ray_cluster: None, source: str) -> None:
    marks, given = str(tmp_path), {"source": getattr(exactly_once_job, source)}
    file = tmp_path / "job.py"
    fatal = id_at(5 * exactly_once_job.BATCH + 123, source)
    file.write_text(JOB_FILE.format(folder=str(folder), marks=marks, fatal=fatal, source=source))
    with processes.trainwright("fit", file, module=processes.FORKING) as driver:  # 2 workers
        processes.wait_until(lambda: committed(folder) >= 10, driver)
        processes.kill(driver)
    assert (tmp_path / "killed-forward-1-6").exists() and struck(tmp_path, fatal)
    after_driver = committed(folder)
    assert 10 <= after_driver < 50, "the driver was killed on the way, after a consumer and the pool"

    kill = torch_jobs.Kill(rank=2, step=after_driver + 3, folder=marks)
    fatal = id_at((after_driver + 5) * exactly_once_job.BATCH + 77, source)
    held = after_driver + 13
    job = exactly_once_job.job(str(folder), marks, kills=(kill,), fatal=fatal, held=held, workers=3, **given)
    stop_after(tw.start(job, resume=True), folder, after_driver + 10, exactly_once_job.released(marks, held))
    assert kill.mark.exists() and struck(tmp_path, fatal)
    with_three = committed(folder)
    assert after_driver < with_three < 50

    done = tw.fit(exactly_once_job.job(str(folder), marks, workers=1, **given), resume=True)
    assert done.state == "done"
    assert np.allclose(counted(folder), 1.0, rtol=0, atol=1e-6)
    assert final_state(folder, "faulty").step == 50
    sizes = [event.workers for event in told(folder, "faulty", events.Formed)]
    assert sizes[0] == 2 and 3 in sizes and sizes[-1] == 1
