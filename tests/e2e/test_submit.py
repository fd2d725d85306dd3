"""`trainwright submit` against a real job server: codes, credentials, a stop and what resumes, a broken connection."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import requests
from typer.testing import CliRunner

from tests.support.finished_runs import final_state
from tests.support.job_server import Cluster, serving
from tests.support.processes import wait_for
from tests.support.s3_server import SECRET, S3Bucket
from trainwright.chaos_testing.store_outage import TcpProxy
from trainwright.cli.main import app
from trainwright.core.errors import JobError, ResourceError, RunConflict
from trainwright.storage.object_store import open_store
from trainwright.submit.job_server import JobServer, LogDisplay, LogFollower

pytestmark = pytest.mark.hosts  # a cluster of its own with a job server
CANARY = "canary-7c1f-of-the-tests"
# Nothing but the end: it runs where Ray runs it, and not where it is read before.
ENDING = """
import os, signal, sys
import trainwright as tw

if "RAY_JOB_CONFIG_JSON_ENV_VAR" in os.environ:
    {ending}
job = tw.Job(name="{name}", model=lambda: None, train=tw.datasets.table({{"x": [0.0]}}), batch_size=1, inputs="x",
             optimizer=lambda parameters: None, loss=lambda outputs, targets: outputs, storage={storage!r})
"""
STEPS = 30
# It waits at step 12 for a file, in the worker that trains.
WAITING = """
import os, time
import numpy as np, torch
from torch.nn import functional
import trainwright as tw

rng = np.random.default_rng(0)
x = rng.normal(size=(300, 8)).astype("float32")

def build():
    torch.manual_seed(0)
    return torch.nn.Linear(8, 2)

def wait(step, total):
    if step == 12:
        open({gate!r} + ".reached-" + os.environ.get("TW_CANARY", "none")[:6], "w").close()
        while not os.path.exists({gate!r}):
            time.sleep(0.05)
    return 1.0

def job(name="patient"):
    return tw.Job(
        name=name, model=build, loss=lambda given, labels: functional.cross_entropy(given, labels, reduction="none"),
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=1e-2), schedule=wait, inputs="x", targets="y",
        train=tw.datasets.table({{"x": x, "y": (x[:, 0] > 0).astype("int64")}}), batch_size=10, workers=1, spares=0,
        keeper_s=0, preflight=False, storage={storage!r},
    )
"""
SHOWN = (
    "/api/jobs/", "/api/v0/actors?detail=1", "/api/v0/tasks?detail=1", "/api/v0/workers?detail=1", "/api/v0/jobs",
    "/api/v0/runtime_envs?detail=1", "/api/v0/nodes?detail=1", "/api/v0/placement_groups?detail=1",
    "/nodes?view=summary", "/logical/actors", "/api/cluster_status", "/events",
)  # fmt: skip


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with serving() as found:
        yield found


@dataclass(frozen=True, kw_only=True)
class Done:
    """A command that ended: its code, its error of ours, and all that it printed."""

    code: int
    error: Any
    text: str


def submit(cluster: Cluster, *arguments: object) -> Done:
    """`trainwright submit` in this process."""
    found = CliRunner().invoke(app, ["submit", *map(str, arguments), "--address", cluster.address])
    if found.exception is not None and not isinstance(found.exception, SystemExit):
        return Done(code=-1, error=found.exception, text=found.output)
    return Done(code=found.exit_code, error=None, text=found.output)


def ending(folder: Path, name: str, ending: str) -> Path:
    file = folder / "job.py"
    file.write_text(ENDING.format(name=name, ending=ending, storage=str(folder / "runs")))
    return file


@pytest.mark.parametrize(
    ("name", "line", "code"),
    [("exits", "sys.exit(7)", 7), ("killed", "os.kill(os.getpid(), signal.SIGKILL)", 137)],
)
def test_the_command_ends_with_the_jobs_own_code(
    cluster: Cluster, tmp_path: Path, name: str, line: str, code: int
) -> None:
    done = submit(cluster, ending(tmp_path, name, f"print('the last word', flush=True); {line}"))
    assert done.code == code, done
    assert f"submitted job {name}-1" in done.text and "the last word" in done.text
    assert "INFO job_manager" not in done.text


def test_a_wrong_job_is_refused_before_anything_is_sent(cluster: Cluster, tmp_path: Path) -> None:
    before = JobServer(cluster.address).jobs()
    done = submit(cluster, ending(tmp_path, "refused", "pass"), "--set", "batch_sise=4")
    assert isinstance(done.error, JobError) and "did you mean 'batch_size'" in str(done.error)
    assert JobServer(cluster.address).jobs() == before


def test_credentials_travel_unseen_and_a_stopped_run_goes_on_to_its_end(
    cluster: Cluster, tmp_path: Path, s3_bucket: S3Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = tmp_path / "gate"
    file = tmp_path / "job.py"
    file.write_text(WAITING.format(gate=str(gate), storage=s3_bucket.uri))
    monkeypatch.setenv("TW_CANARY", CANARY)
    sent = submit(cluster, file, "--env", "TW_CANARY", "--no-wait")
    assert sent.code == 0 and "AWS_SECRET_ACCESS_KEY" in sent.text and "TW_CANARY" in sent.text
    wait_for((tmp_path / f"gate.reached-{CANARY[:6]}").exists, 60)  # the worker itself knows it
    assert len(cluster.keys()) == 1
    held = shown(cluster) + processes()

    other = submit(cluster, file, "--set", "seed=5")
    assert isinstance(other.error, RunConflict) and "other options" in str(other.error)
    release = threading.Timer(1.0, gate.touch)  # while it stops
    release.start()
    stopped = submit(cluster, file, "--stop")
    assert stopped.code == 0 and "stopped at step" in stopped.text, stopped
    assert cluster.keys() == []

    resumed = submit(cluster, file, "--env", "TW_CANARY")
    assert resumed.code == 0 and "resuming step" in resumed.text, resumed
    assert final_state(s3_bucket.uri, "patient").step == STEPS

    texts = held + shown(cluster) + written(cluster) + stored(s3_bucket.uri)
    texts += [done.text.encode() for done in (sent, stopped, resumed)]
    assert sum(b"patient-1" in text for text in texts) > 3, "the jobs are in what is looked through"
    assert not [text[:200] for text in texts if SECRET.encode() in text or CANARY.encode() in text]
    assert cluster.keys() == []


def shown(cluster: Cluster) -> list[bytes]:
    """What the dashboard says to anybody who asks."""
    jobs = JobServer(cluster.address).jobs()
    paths = [*SHOWN, *(f"/api/jobs/{job.submission_id}{rest}" for job in jobs for rest in ("", "/logs"))]
    answers = [requests.get(cluster.address + path, timeout=30) for path in paths]
    assert all(answer.ok for answer in answers), [(answer.url, answer.status_code) for answer in answers]
    return [answer.content for answer in answers]


def written(cluster: Cluster) -> list[bytes]:
    """All files of the cluster: logs, and what it unpacked."""
    return [path.read_bytes() for path in cluster.folder.rglob("*") if path.is_file() and not path.is_symlink()]


def processes() -> list[bytes]:
    """Command lines of all processes."""
    lines = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            lines.append(path.read_bytes())
        except OSError:  # it ended
            continue
    return lines


def stored(uri: str) -> list[bytes]:
    """All objects of the runs."""
    store = open_store(uri)
    return [store.get(path) for path, _ in store.list()]


def test_a_log_is_whole_and_told_once_over_a_connection_that_breaks(cluster: Cluster, tmp_path: Path) -> None:
    go = tmp_path / "go"
    first, second = "for i in $(seq 40); do echo first $i; done", "for i in $(seq 40); do echo second $i; done"
    JobServer(cluster.address).submit(
        "talker-1",
        f"{first}; while [ ! -e {go} ]; do sleep 0.1; done; {second}; printf end",
        runtime_env={},
        metadata={},
    )
    host, port = cluster.address.removeprefix("http://").split(":")
    proxy = TcpProxy((host, int(port)))
    kept, said = Kept(), []

    def say(line: str) -> None:
        said.append(line)
        if "is lost" in line:
            go.touch()
            proxy.set_mode("pass")

    kept.at["first 40"] = lambda: proxy.set_mode("refuse")
    server = JobServer(f"http://127.0.0.1:{proxy.port}")
    news = LogFollower(server, "talker-1", LogDisplay(kept.write_line), say=say).follow()
    proxy.close()
    assert news.status == "SUCCEEDED" and len(said) == 2 and "answers again" in said[1]
    assert kept.lines == [f"{word} {i}" for word in ("first", "second") for i in range(1, 41)] + ["end"]


class Kept:
    """Keeps the lines of a log, and does something at one of them."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.at: dict[str, Any] = {}

    def write_line(self, line: str) -> None:
        self.lines.append(line)
        self.at.get(line, lambda: None)()


def test_a_cluster_that_goes_silent_is_given_up_with_the_way_back(cluster: Cluster, tmp_path: Path) -> None:
    server = JobServer(cluster.address)
    server.submit("endless-1", "while true; do sleep 0.2; done", runtime_env={}, metadata={})
    host, port = cluster.address.removeprefix("http://").split(":")
    proxy = TcpProxy((host, int(port)))
    through = JobServer(f"http://127.0.0.1:{proxy.port}")
    proxy.set_mode("refuse")
    with pytest.raises(ResourceError, match="no job server answers"):
        LogFollower(through, "endless-1", LogDisplay(Kept().write_line), patience_s=0.5).follow()
    proxy.close()
    server.stop("endless-1")
