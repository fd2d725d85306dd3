"""Trackers: each step once, whatever fails; MLflow and W&B as they are installed."""

from __future__ import annotations

import itertools
import pickle
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support import processes, torch_jobs
from tests.support.sample_run import Recorder, checkpointed, started, stepped, whole_run
from trainwright import trackers
from trainwright.core import events
from trainwright.core.callbacks import encode_image
from trainwright.core.errors import JobError, TrainwrightError
from trainwright.planning.job_description import describe, description_changes
from trainwright.storage.event_log import EventLog
from trainwright.storage.object_store import Store, open_store
from trainwright.tracking.experiment_trackers import check_trackers, import_optional
from trainwright.tracking.listeners import TrackerThread, params_of
from trainwright.worker.worker_config import pickle_job, unpickle_job

_NUMBERS = itertools.count()
SECRET = "hunter2-hunter2"


class Diary:
    """Keeps what it is told; `held` steps are there already."""

    def __init__(self, held: int = 0) -> None:
        self.held = held
        self.calls: list[str] = []
        self.rows: list[trackers.Row] = []
        self.run: Any = None
        self.ending: Any = None

    def begin(self, run: trackers.TrackedRun, params: Mapping[str, str]) -> int:
        self.calls.append("begin")
        self.run = run
        return self.held

    def log(self, rows: Sequence[trackers.Row]) -> None:
        self.calls.append("log")
        self.rows += rows

    def end(self, ending: trackers.RunResult) -> None:
        self.calls.append("end")
        self.ending = ending

    @property
    def steps(self) -> list[int]:
        return [row.step for row in self.rows if "train/loss" in row.values]

    @property
    def evaluations(self) -> list[int]:
        return [row.step for row in self.rows if "evaluation/accuracy" in row.values]


class Closed(Diary):
    """Waits in its first call until it is let on."""

    def __init__(self) -> None:
        super().__init__()
        self.open, self.entered = threading.Event(), threading.Event()

    def begin(self, run: trackers.TrackedRun, params: Mapping[str, str]) -> int:
        self.entered.set()
        assert self.open.wait(30)
        return super().begin(run, params)


class Broken(Diary):
    """Raises in `log`."""

    def log(self, rows: Sequence[trackers.Row]) -> None:
        raise RuntimeError(f"no way to http://me:{SECRET}@tracking.example.org/api")


def new_store() -> Store:
    return open_store(f"memory://trackers-{next(_NUMBERS)}")


def drive(tracker: Any, happened: Sequence[events.Event], store: Store | None = None, **options: Any) -> list[str]:
    """A driver that hears these events; returns the notes in the run."""
    journal, ears = EventLog(store or new_store(), "demo"), Recorder()
    tracking = TrackerThread(
        tracker, store or new_store(), "demo", say=lambda text: journal.write(events.Noted(text=text)), **options
    )
    for listener in (tracking, ears):  # who listens last is closed last, and hears how the tracker ends
        journal.listen(listener)
    for event in happened:
        journal.write(event)
    journal.close(patience_s=0)
    return [event.text for event in ears.heard if isinstance(event, events.Noted)]


def test_each_step_once_though_some_were_done_again() -> None:
    diary = Diary()
    assert drive(diary, whole_run()) == []
    assert diary.steps == list(range(1, 21)) and diary.evaluations == [10, 20]
    assert (diary.calls[0], diary.calls[-1]) == ("begin", "end")
    assert diary.rows[0].values["train/loss"] == 1.0 and diary.rows[0].time_s == 105
    assert diary.ending.state == "done"
    assert diary.ending.links["checkpoint"].endswith("demo/checkpoints/00000020-1")
    assert diary.ending.links["report"].endswith("demo/report.html")


@pytest.mark.parametrize(
    ("held", "evaluations"), [(9, [10, 20]), (10, [10, 20]), (11, [20])], ids=["before", "at", "after"]
)
def test_a_resumed_run_goes_on_after_what_is_held(held: int, evaluations: list[int]) -> None:
    diary = Diary(held=held)
    drive(diary, whole_run())
    assert diary.steps == list(range(held + 1, 21)) and diary.evaluations == evaluations


def test_drivers_of_one_run_have_one_id_until_it_is_begun_again() -> None:
    store, ids = new_store(), []
    for token, fresh in ((1, False), (4, False), (6, True), (8, False)):
        pair = Diary(), Diary()
        for diary in pair:
            drive(diary, [started(token=token, fresh=fresh), *whole_run()[3:]], store)
        assert pair[0].run.id == pair[1].run.id, "two trackers of one run"
        ids.append(pair[0].run.id)
    assert ids[0] == ids[1] != ids[2] == ids[3] and ids[0].startswith("demo-")


def test_a_driver_that_ends_without_a_word_has_failed() -> None:
    diary = Diary()
    drive(diary, whole_run()[:5])
    assert diary.ending.state == "failed" and "checkpoint" not in diary.ending.links


def test_one_that_fails_is_switched_off_once_and_tells_no_secret() -> None:
    broken = Broken()
    (note,) = drive(broken, whole_run())
    assert note.startswith(
        "the tracker Broken failed and is switched off; training continues: RuntimeError: no way to http://me:***@track"
    )
    assert SECRET not in note and broken.calls == ["begin", "end"]
    assert broken.ending.state == "done" and "checkpoint" in broken.ending.links, "it hears how the run ended"


def test_one_that_cannot_end_says_so_and_one_that_could_not_begin_is_not_ended() -> None:
    class Endless(Diary):
        def end(self, ending: trackers.RunResult) -> None:
            raise RuntimeError("no way back")

    class Shut(Broken):
        def begin(self, run: trackers.TrackedRun, params: Mapping[str, str]) -> int:
            raise RuntimeError("no way in")

    assert drive(Endless(), whole_run()) == [
        "the tracker Endless could not finish its record: RuntimeError: no way back"
    ]
    shut = Shut()
    (note,) = drive(shut, whole_run())
    assert note.endswith("training continues: RuntimeError: no way in") and shut.calls == []


def test_one_that_lags_holds_nobody_up() -> None:
    closed = Closed()
    store, notes = new_store(), []
    tracking = TrackerThread(closed, store, "demo", say=notes.append, room_steps=10)
    for event in whole_run():
        tracking.on(event)  # returns, though the tracker has not even begun
    closed.open.set()
    tracking.close()
    assert notes == ["the tracker Closed is too slow: some steps are not sent to it; training continues"]
    assert closed.steps == list(range(1, 11)) and closed.evaluations == [10, 20] and closed.ending.state == "done"


def test_one_that_hangs_is_left_alone_at_the_end() -> None:
    closed = Closed()
    (note,) = drive(closed, whole_run(), patience_s=0.01)
    assert note == "the tracker Closed did not finish within 0 s after the end of the run; its last rows may be missing"
    closed.open.set()


def test_a_run_that_never_began_has_nothing_to_wait_for() -> None:
    diary = Diary()
    assert drive(diary, []) == [] and diary.calls == []


def test_what_is_told_of_the_job_has_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", SECRET)
    told = replace(started(), job={"storage": "https://me:word@host/x", "loss": f"key {SECRET}", "pad": "None"})
    params = params_of(told)
    assert params["job.storage"] == "https://me:***@host/x" and params["job.loss"] == "key ***"
    assert "job.pad" not in params and params["plan"].startswith("data_parallel") and params["workers"] == "2"


def test_trackers_are_no_part_of_a_jobs_identity(tmp_path: Path) -> None:
    plain = torch_jobs.job(tmp_path)
    told = plain.replace(trackers=(trackers.MLflow(uri=f"https://me:{SECRET}@host"), trackers.WandB(project=SECRET)))
    assert describe(told)["trackers"] == "MLflow, WandB"
    assert SECRET not in str(describe(told)) and description_changes(describe(plain), describe(told)) == []
    assert "trackers" not in {line.partition(":")[0] for line in description_changes({}, describe(told))}
    assert unpickle_job(pickle_job(told)).trackers == told.trackers


def test_what_is_no_tracker_is_refused(tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"trackers= has str, which has no begin\(\)"):
        torch_jobs.job(tmp_path, trackers=("mlflow",))


def test_a_package_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("mlflow", "wandb"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(JobError, match=r"MLflow, which needs mlflow-skinny: pip install 'trainwright\[mlflow\]'"):
        check_trackers([trackers.MLflow()])
    with pytest.raises(JobError, match=r"WandB, which needs wandb: pip install 'trainwright\[wandb\]'"):
        check_trackers([trackers.WandB(project="p")])
    check_trackers([Diary()])


def test_a_package_that_is_broken_is_not_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "halved.py").write_text("import absent_part")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="absent_part"):
        import_optional("halved", "halved", "Halved")


def test_a_missing_package_is_told_before_anything_is_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from trainwright import api
    from trainwright.runtime import launch

    monkeypatch.setitem(sys.modules, "mlflow", None)
    for name in ("connect", "prepare"):
        monkeypatch.setattr(launch, name, lambda *_, **__: pytest.fail("something was started"))
    with pytest.raises(TrainwrightError, match="pip install"):
        api.start(torch_jobs.job(tmp_path, trackers=(trackers.MLflow(),)))


@pytest.fixture
def flow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], trackers.MLflow]]:
    """Trackers on MLflow's store of files, the one that needs no server or database."""
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    yield lambda: trackers.MLflow(uri=f"file://{tmp_path}/mlruns", experiment="digits")


def test_mlflow_goes_on_with_the_run_of_a_killed_driver(flow: Callable[[], trackers.MLflow]) -> None:
    store, run = new_store(), whole_run()
    assert drive(flow(), run[:8], store) == []  # up to step 12; then it was killed
    resumed = [
        replace(started(token=2), job={**started().job, "batch_size": "512"}),
        events.Formed(time_s=204, generation=1, workers=2, step=10, source="checkpoint"),
        stepped(range(11, 21), time_s=205),
        checkpointed(20, time_s=206),
        events.RunEnded(time_s=207, outcome="done", step=20),
    ]
    again = flow()
    assert drive(again, resumed, store) == []
    client, (kept,) = again._client, again._client.search_runs([again._experiment()])
    assert kept.info.status == "FINISHED" and kept.info.run_name == "demo"
    losses = client.get_metric_history(kept.info.run_id, "train/loss")
    assert [metric.step for metric in losses] == list(range(1, 21)), "each step once"
    assert losses[0].value == 1.0 and losses[0].timestamp == 105_000
    assert [m.step for m in client.get_metric_history(kept.info.run_id, "evaluation/accuracy")] == [10]
    assert kept.data.params["job.batch_size"] == "256" and kept.data.params["workers"] == "2"
    assert kept.data.tags["trainwright.now.job.batch_size"] == "512"
    assert kept.data.tags["trainwright.checkpoint"].endswith("demo/checkpoints/00000020-1")


def test_mlflow_takes_more_rows_than_one_request_may_have(flow: Callable[[], trackers.MLflow]) -> None:
    tracker = flow()
    tracker.begin(trackers.TrackedRun(name="demo", id="demo-1", total_steps=400), {f"p{n}": "x" for n in range(200)})
    tracker.log([trackers.Row(step=step, time_s=step, values={"a": 1.0, "b": 2.0}) for step in range(1, 401)])
    again = flow()
    assert again.begin(trackers.TrackedRun(name="demo", id="demo-1", total_steps=400), {}) == 400
    assert len(again._client.get_run(again._run).data.params) == 200
    assert len(again._client.get_metric_history(again._run, "b")) == 400


def test_mlflow_takes_metrics_of_any_name(flow: Callable[[], trackers.MLflow]) -> None:
    tracker = flow()
    names = ("acc@5", "top-5 (%)", "a//b", "../up", "kept: ü.1/x", "long" * 100)
    happened = [*whole_run()[:5], events.Evaluated(time_s=109, step=8, metrics=dict.fromkeys(names, 0.5))]
    assert drive(tracker, happened) == []
    found = tracker._client.get_run(tracker._run)
    assert {name for name in found.data.metrics if name.startswith("evaluation/")} == {
        "evaluation/acc_5", "evaluation/top-5 ___", "evaluation/a/b", "evaluation/up", "evaluation/kept: ü.1/x",
        f"evaluation/{'long' * 100}"[:250],
    }  # fmt: skip


def media(*steps: int, name: str = "../digits: a") -> list[events.MediaLogged]:
    """An image and a text after each step."""
    image = encode_image(name, np.eye(3))
    return [
        event
        for step in steps
        for event in (
            events.MediaLogged(time_s=100.0 + step, step=step, name=name, **image),
            events.MediaLogged(time_s=100.0 + step, step=step, name="said", text=f"<{step}>"),
        )
    ]


def test_images_and_texts_come_once_for_each_name_and_step() -> None:
    class Album(Diary):
        def __init__(self) -> None:
            super().__init__()
            self.media: list[tuple[int, str, str]] = []

        def log_media(self, media: Sequence[events.MediaLogged]) -> None:
            self.media += [(event.step, event.name, event.text) for event in media]

    album, diary = Album(), Diary()
    happened = [*whole_run()[:5], *media(4, 8), *media(4, 8, 12), events.MediaLogged(step=13, name="said", width=2)]
    assert drive(album, happened) == [] and drive(diary, happened) == [], "one without the method goes without"
    assert album.media == [
        (step, name, text) for step in (4, 8, 12) for name, text in (("../digits: a", ""), ("said", f"<{step}>"))
    ]


def test_mlflow_shows_images_by_steps_and_keeps_texts(flow: Callable[[], trackers.MLflow]) -> None:
    tracker = flow()
    assert drive(tracker, [*whole_run()[:5], *media(4, 8)]) == []
    found = {path.path for path in tracker._client.list_artifacts(tracker._run, "texts/said")}
    assert found == {"texts/said/00000004.txt", "texts/said/00000008.txt"}
    images = [entry.path for entry in tracker._client.list_artifacts(tracker._run, "images")]
    assert sorted(path.split("+step+")[1][0] for path in images if path.endswith(".png")) == ["4", "8"]


def records(file: Path) -> Iterator[Any]:
    """Records of a W&B file: LevelDB's log format after 7 bytes, each a message of `wandb_internal.proto`."""
    from wandb.proto import wandb_internal_pb2

    data, place, whole = file.read_bytes(), 7, b""
    while place + 7 <= len(data):
        if 32768 - place % 32768 < 7:  # the rest of a block
            place += 32768 - place % 32768
            continue
        _, length, kind = struct.unpack("<IHB", data[place : place + 7])
        whole += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last part
            message = wandb_internal_pb2.Record()
            message.ParseFromString(whole)
            whole = b""
            yield message


def test_wandb_writes_what_can_be_sent_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    tracker = trackers.WandB(project="digits", mode="offline", folder=str(tmp_path), tags=("test",))
    check_trackers([tracker])
    diary = Diary()
    store = new_store()
    run = whole_run()
    assert (
        drive(tracker, [*run[:-1], *media(20), run[-1]], store, patience_s=120.0) == []
        and drive(diary, [started(token=2)], store) == []
    )
    (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    # W&B's own process writes the file, and may do so after `finish`.
    processes.wait_for(lambda: "exit" in [record.WhichOneof("record_type") for record in records(file)])
    found = list(records(file))
    (run,) = (record.run for record in found if record.WhichOneof("record_type") == "run")
    assert (run.run_id, run.display_name, run.project) == (diary.run.id, "demo", "digits")
    rows = [record.history for record in found if record.WhichOneof("record_type") == "history"]
    assert [row.step.num for row in rows] == list(range(1, 21)), "each step once"
    values = {item.key or ".".join(item.nested_key): item.value_json for item in rows[9].item}
    last = {item.key or ".".join(item.nested_key): item.value_json for item in rows[-1].item}
    assert (last["../digits: a._type"], last["said._type"]) == ('"image-file"', '"html-file"')
    assert values["train/loss"] == "0.1" and values["evaluation/accuracy"] == "0.8"
    (end,) = (record.exit for record in found if record.WhichOneof("record_type") == "exit")
    assert end.exit_code == 0


def test_wandb_without_a_key_is_told_before_training(tmp_path: Path) -> None:
    program = "from trainwright import trackers; trackers.WandB(project='p').check()"
    environment = {"PATH": "/usr/bin", "HOME": str(tmp_path), "WANDB_ERROR_REPORTING": "false"}
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=60,
        env=environment,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 1 and "JobError" in done.stderr
    assert "trackers= has WandB, which has no key" in done.stderr and "wandb login" in done.stderr


@pytest.mark.parametrize(
    "tracker", [trackers.MLflow(uri="http://x", experiment="e"), trackers.WandB(project="p", tags=("a",))]
)
def test_they_travel_to_a_driver_in_the_cluster(tracker: Any) -> None:
    tracker._run = threading.Lock()  # what is open stays here
    again = pickle.loads(pickle.dumps(tracker))
    assert again._run in ("", None) and repr(again) == repr(tracker)
