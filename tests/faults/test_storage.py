"""Torn and altered files, unwritable and foreign folders: the newest good checkpoint is found, the rest is said."""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load

import trainwright as tw
from tests.support import processes, torch_jobs
from tests.support.checkpoint_jobs import stop_at
from tests.support.finished_runs import State, final_state, reader_of, told
from tests.support.processes import ROOT
from trainwright.core import events
from trainwright.core.errors import DataError, JobError, RunConflict, StorageError
from trainwright.reporting import run_views
from trainwright.reporting.html.run_report import write_report
from trainwright.runtime import controller, worker_registry
from trainwright.runtime.takeover import Heartbeats
from trainwright.storage.checkpoints import CheckpointWriter, newest_intact, write_manifest
from trainwright.storage.object_store import open_store
from trainwright.storage.run_log import RunLog
from trainwright.strategies.torch.checkpoint.safetensors_files import read as read_state


def newest(folder: Path) -> Path:
    return max((folder / "faulty" / "checkpoints").iterdir())


def tear(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def alter(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


@pytest.fixture(scope="module")
def stopped(ray_cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The storage of a run of two workers that failed after step 12."""
    folder = tmp_path_factory.mktemp("stopped") / "runs"
    stop_at(folder, 12)
    return folder


def test_a_missing_shard_is_told_and_the_run_goes_on_from_the_checkpoint_before(
    stopped: Path, folder: Path, unbroken: Callable[[int], State]
) -> None:
    """Other damage is in test_checkpoints.py, of which the next test has two kinds at once."""
    shutil.copytree(stopped, folder)
    (newest(folder) / "model.safetensors").unlink()
    tw.fit(torch_jobs.job(folder), resume=True)
    assert final_state(folder, "faulty") == unbroken(2)
    assert any("00000010" in event.text for event in told(folder, "faulty", events.Noted))
    formed = told(folder, "faulty", events.Formed)
    assert formed[-1].source == "checkpoint" and formed[-1].step == 5


def test_a_torn_manifest_and_an_altered_shard_with_3_workers(folder: Path, unbroken: Callable[[int], State]) -> None:
    stop_at(folder, 17, workers=3)
    fifteen, ten = sorted((folder / "faulty" / "checkpoints").iterdir(), reverse=True)[:2]
    tear(fifteen / "MANIFEST.json")
    alter(ten / "model.safetensors")
    tw.fit(torch_jobs.job(folder, workers=3), resume=True)
    assert final_state(folder, "faulty") == unbroken(3)
    assert told(folder, "faulty", events.Formed)[-1].step == 5


class Bomb:
    """Unpickling it makes a folder."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.mark),)


def bombs(mark: Path) -> dict[str, bytes]:
    """What makes the folder where it is read by pickle, by torch.load or by numpy.load."""
    saved, array = io.BytesIO(), io.BytesIO()
    torch.save({"weight": Bomb(mark)}, saved)
    np.save(array, np.array([Bomb(mark)], dtype=object), allow_pickle=True)
    return {"pickle": pickle.dumps(Bomb(mark)), "torch": saved.getvalue(), "numpy": array.getvalue()}


def signed(folder: Path) -> None:
    """Have the manifest of the newest checkpoint, and the log, name the files as they are now."""
    manifest, entry = newest(folder) / "MANIFEST.json", max((folder / "faulty" / "log").glob("*.json"))
    facts = json.loads(manifest.read_text())
    for file in facts["files"]:
        data = (manifest.parent / file["name"]).read_bytes()
        file |= {"size_bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    manifest.write_text(json.dumps(facts))
    facts = json.loads(entry.read_text())
    facts["checkpoints"][-1]["manifest_sha256"] = hashlib.sha256(manifest.read_bytes()).hexdigest()
    entry.write_text(json.dumps(facts))


def errors_of(*readers: Callable[[], object]) -> list[str]:
    """Errors of ours that come of reading."""
    errors = []
    for read in readers:
        try:
            read()
        except tw.TrainwrightError as error:
            errors.append(str(error))
    return errors


def load_newest(folder: Path) -> object:
    """Read the state as a worker does."""
    entry = RunLog(open_store(str(folder)), "faulty").head()
    assert entry is not None
    ref, _ = newest_intact(open_store(str(folder)), "faulty", entry.checkpoints)
    return ref and read_state(reader_of(folder, "faulty", ref))


def test_no_file_of_a_run_executes_when_it_is_read(stopped: Path, folder: Path, tmp_path: Path) -> None:
    """Whoever can write to the store can put anything there, under checksums that fit."""
    mark = tmp_path / "executed"
    shutil.copytree(stopped, folder)
    kinds = {re.sub(r"\d+", "", str(path.relative_to(folder))): path for path in folder.rglob("*") if path.is_file()}
    load = partial(load_newest, folder)
    others = (
        load, partial(run_views.run_view, str(folder), "faulty"), lambda: list(run_views.log_lines(str(folder),
        "faulty")),
        partial(run_views.runs_view, str(folder)), partial(write_report, open_store(str(folder)), "faulty"),
    )  # fmt: skip
    assert len(kinds) > 8 and not errors_of(*others)
    whole = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    weights = [path for path in whole if path.parent == newest(folder) and path.name != "MANIFEST.json"]
    planted = [(path, bomb) for path in weights for bomb in bombs(mark).values()]
    planted += [(path, bombs(mark)["pickle"]) for path in kinds.values() if "checkpoints" not in str(path)]
    for path, bomb in planted:
        path.write_bytes(bomb)
        if path in weights:
            signed(folder)
        errors = errors_of(*([load] if path in weights else others))
        assert not mark.exists() and (path not in weights or "cannot be read" in errors[0]), path
        for each, data in whole.items():
            each.write_bytes(data)
    pickle.loads(bombs(mark)["pickle"])
    assert mark.exists()


def test_a_changed_job_is_shown_and_refused(stopped: Path, folder: Path) -> None:
    shutil.copytree(stopped, folder)
    with pytest.raises(RunConflict) as caught:
        tw.fit(torch_jobs.job(folder, batch_size=12))
    assert "batch_size: 24 -> 12" in str(caught.value) and "fresh=True" in str(caught.value)


def test_a_finished_job_is_not_trained_again_unless_asked(folder: Path, unbroken: Callable[[int], State]) -> None:
    tw.fit(torch_jobs.job(folder, epochs=1))
    with pytest.raises(RunConflict, match="finished"):
        tw.fit(torch_jobs.job(folder, epochs=1))
    with pytest.raises(RunConflict, match="epochs: 1 -> 3"):  # a scheduler may depend on the last step
        tw.fit(torch_jobs.job(folder, epochs=3))
    run = tw.fit(torch_jobs.job(folder, epochs=3), resume=True)
    assert run.state == "done" and run.history["step"].tolist() == list(range(1, 28))
    assert final_state(folder, "faulty") == unbroken(2)
    again = tw.fit(torch_jobs.job(folder, epochs=1), fresh=True)
    assert again.history["step"].tolist() == list(range(1, 10))
    shown = run_views.run_view(str(folder), "faulty").data
    assert {item["step"] for item in shown["checkpoints"]} == {5, 9} and shown["steps_lost"] == 0


def test_a_folder_that_is_no_run_is_left_alone(folder: Path, ray_cluster: None) -> None:
    (folder / "faulty").mkdir(parents=True)
    (folder / "faulty" / "thesis.txt").write_text("do not touch")
    with pytest.raises(RunConflict):
        tw.fit(torch_jobs.job(folder))
    assert (folder / "faulty" / "thesis.txt").read_text() == "do not touch"


def test_an_unwritable_store_is_said_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError) as caught:
        tw.fit(torch_jobs.job(tmp_path / "file" / "runs"))
    assert str(tmp_path / "file") in str(caught.value)


_FULL_DISK = """
import shutil, subprocess, sys
import ray
import trainwright as tw
from tests.support import ray_clusters, torch_jobs
from trainwright.core.events import Checkpointed

disk, kept, done = sys.argv[1:]
# Neither of the first two is passed over.
awaits = {5 * number: torch_jobs.Awaited(kind=Checkpointed, number=number) for number in (1, 2)}
job = torch_jobs.job(disk + "/runs", awaits=awaits)
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=9m", "none", disk], check=True)
with ray_clusters.forking(ray_clusters.TORCH_IMPORTS):  # here, where the workers see the disk
    ray_clusters.thrifty()
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    try:
        tw.fit(job)
    except tw.TrainwrightError as error:
        print(error, flush=True)
    shutil.copytree(disk + "/runs", kept)
    subprocess.run(["mount", "-o", "remount,size=64m", disk], check=True)
    tw.fit(job)
    shutil.copytree(disk + "/runs", done)
    ray.shutdown()
"""


@pytest.mark.soak
def test_a_full_disk_costs_checkpoints_and_the_run_goes_on_where_space_is_made(
    tmp_path: Path, unbroken: Callable[[int], State]
) -> None:
    """A real file system of 9 MB, which holds two checkpoints, in a mount namespace of its own."""
    disk, kept, done = (tmp_path / name for name in ("disk", "kept", "done"))
    disk.mkdir()
    script = [sys.executable, "-c", _FULL_DISK, disk, kept, done]
    command = ["unshare", "--user", "--map-root-user", "--mount", *map(str, script)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(command, env=environment, timeout=150, capture_output=True, text=True)
    assert ended.returncode == 0, f"this test mounts a disk of its own in a user namespace: {ended.stderr}"
    assert "no space left" in ended.stdout and "free space or give another storage=" in ended.stdout
    state = final_state(kept, "faulty")
    assert state.step in (5, 10) and f"it goes on from step {state.step}" in ended.stdout + ended.stderr
    assert final_state(done, "faulty") == unbroken(2)


def test_a_batch_smaller_than_the_workers(folder: Path, ray_cluster: None) -> None:
    with pytest.raises((JobError, tw.TrainwrightError), match=r"batch_size=2"):
        tw.fit(torch_jobs.job(folder, batch_size=2, workers=3))


def test_samples_that_cannot_be_read_are_skipped_and_put_into_quarantine(folder: Path, ray_cluster: None) -> None:
    def fragile(row: Any, rng: Any) -> Any:
        if int(row["id"]) in (7, 100, 150):
            raise ValueError(f"damaged: {row['id']}")
        return row

    data = tw.datasets.table(torch_jobs.data()).map(fragile)
    run = tw.fit(torch_jobs.job(folder, train=data, on_error="skip"))
    assert run.state == "done"
    kept = tw.datasets.parquet(folder / "faulty" / "quarantine")
    index = kept.index()
    rows = kept.read(index, range(index.rows))
    assert rows["sample"].tolist() == [7, 100, 150]
    assert all("damaged" in error for error in rows["error"])
    assert any("3 samples were skipped so far" in event.text for event in told(folder, "faulty", events.Noted))
    seen = next(value for value in _tensors(folder) if value.shape == (torch_jobs.ROWS,))
    assert (seen[[7, 100, 150]] == 0).all() and (np.delete(seen, [7, 100, 150]) < 0).all()


def test_more_damage_than_the_limit_ends_the_run(folder: Path, ray_cluster: None) -> None:
    data = tw.datasets.table(torch_jobs.data()).map(lambda row, rng: row if int(row["id"]) % 4 else 1 // 0)
    with pytest.raises(DataError, match="more than 5 samples cannot be read"):
        tw.fit(torch_jobs.job(folder, train=data, on_error="skip", skip_limit=5))


def _tensors(folder: Path) -> list[Any]:
    files = final_state(folder, "faulty").files
    return [
        value for name, payload in files.items() if name.endswith(".safetensors") for value in load(payload).values()
    ]


def hung_until(go: Path) -> Callable[[Any, dict[str, Any]], Any]:
    """A step from whose process no file of a checkpoint is stored before there is a file `go`."""
    made = torch_jobs.make_step(())

    def step(model: Any, batch: dict[str, Any]) -> Any:
        write = CheckpointWriter.write
        if write.__name__ != "late":

            def late(self: CheckpointWriter, name: str, *pieces: Any) -> None:
                processes.wait_for(go.exists)
                write(self, name, *pieces)

            CheckpointWriter.write = late  # type: ignore[method-assign]
        return made(model, batch)

    return step


def test_a_write_that_hangs_is_told_while_training_goes_on(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unbroken: Callable[[int], State]
) -> None:
    """A folder mounted hard never gives an error: first a worker waits for it, then the driver."""
    monkeypatch.setattr(controller, "OVERDUE_S", 0.5)
    worker, driver = tmp_path / "worker", tmp_path / "driver"

    def late(*given: Any) -> str:
        processes.wait_for(driver.exists)
        return write_manifest(*given)

    monkeypatch.setattr("trainwright.storage.run_store.write_manifest", late)
    run = tw.start(torch_jobs.job(folder, step=hung_until(worker)))

    def said(words: str) -> list[str]:
        run._session.flush()
        noted: Any = told(folder, "faulty", events.Noted)
        return [event.text for event in noted if words in event.text]

    by = r"checkpoints/00000005-1 for 500 ms by now: the store at \S+ does not answer. Training goes on"
    for word, go in (("writes", worker), ("commits", driver)):
        processes.wait_for(lambda word=word: bool(said(f" {word} ")))
        go.touch()
    assert run.wait(100) and final_state(folder, "faulty") == unbroken(2)
    assert re.match(rf"worker 0 on \S+ writes {by}", said(" writes ")[0])
    assert re.match("the driver commits the checkpoint of step 5 for 500 ms by now: the store at", said(" commits ")[0])


def test_beats_that_cannot_be_sent_are_told_at_once_and_sent_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch, unbroken: Callable[[int], State]
) -> None:
    """Without them all workers would end by themselves a minute later."""
    monkeypatch.setattr(worker_registry, "BEAT_S", 0.1)
    sent, send = list[Any](), Heartbeats.send

    def broken(self: Heartbeats, actors: Any, token: int) -> Any:
        sent.append(actors)
        if len(sent) < 4:
            raise ZeroDivisionError("a bug")
        return send(self, actors, token)

    monkeypatch.setattr(Heartbeats, "send", broken)
    tw.fit(torch_jobs.job(folder))
    noted: Any = told(folder, "faulty", events.Noted)
    text = "cannot send heartbeats to the workers: ZeroDivisionError: a bug"
    assert [event.text for event in noted] == [text] and sent[-1]
    assert final_state(folder, "faulty") == unbroken(2)
