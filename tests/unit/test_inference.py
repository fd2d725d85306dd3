"""What a run is used for reads the weights alone, each file once, and passes over a damaged checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import trainwright as tw
from tests.support.torch_engines import Net, adam, loss, one_device, saved
from trainwright.core.engine import CheckpointManifest, CheckpointRef, checkpoint_path
from trainwright.core.errors import CheckpointError, DamagedCheckpoint, DataError, JobError, UserCodeError
from trainwright.core.events import Evaluated
from trainwright.runtime import run_handle
from trainwright.storage import checkpoints
from trainwright.storage.checkpoints import CheckpointReader, CheckpointWriter, write_manifest
from trainwright.storage.event_files import append_event
from trainwright.storage.object_store import Store, open_store
from trainwright.storage.run_log import Owner, RunLog


def job(folder: Path) -> tw.Job:
    data = tw.datasets.table({"x": np.zeros((4, 4)), "y": np.zeros(4)})
    return tw.Job(name="n", model=Net, optimizer=list, loss=max, inputs="x", targets="y", batch_size=4,
                  train=data, storage=str(folder))  # fmt: skip


def committed(store: Store, *steps: int) -> list[dict[str, torch.Tensor]]:
    """A run with a checkpoint at each of these steps, of different weights."""
    log, weights, parent = RunLog(store, "n"), list[dict[str, torch.Tensor]](), ""
    token = log.acquire(Owner.here(), {}).token
    for step in steps:
        engine, path = one_device(), checkpoint_path(step, token)
        with torch.no_grad():
            for value in engine.replica.model.parameters():
                value.fill_(step)
        engine.replica.step = step
        writer = CheckpointWriter(store, "n", path)
        for name, data in saved(engine).files.items():
            writer.write(name, data)
        digest = write_manifest(store, "n", path, CheckpointManifest(step=step, files=writer.entries))
        log.commit(token, CheckpointRef(step=step, path=path, manifest_sha256=digest, parent=parent), keep=9)
        weights.append({name: value.clone() for name, value in engine.replica.model.state_dict().items()})
        parent = path
    return weights


def spoil(folder: Path, step: int, name: str) -> None:
    (place,) = (folder / "n" / "checkpoints").glob(f"{step:08d}-*/{name}")
    data = bytearray(place.read_bytes())
    data[-1] ^= 1
    place.write_bytes(data)


def test_a_damaged_checkpoint_is_passed_over_as_it_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    committed(open_store(str(tmp_path)), 10, 20, 30)
    spoil(tmp_path, 30, "model.safetensors")
    model = run_handle.load_model(job(tmp_path))
    assert {float(value.detach().flatten()[0]) for value in model.parameters()} == {20.0}
    told = capsys.readouterr().err
    assert "the checkpoint of step 30 is skipped: model.safetensors is altered" in told
    with pytest.raises(CheckpointError, match="no usable checkpoint at step 30"):
        run_handle.load_model(job(tmp_path), 30)
    assert checkpoints.find_checkpoint(job(tmp_path))[1].step == 20


def test_the_best_checkpoint_is_the_one_of_the_best_evaluation_that_is_kept(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    committed(store, 10, 20, 30)
    with pytest.raises(CheckpointError, match="no checkpoint of the run 'n' has an evaluation with error"):
        run_handle.load_model(job(tmp_path).replace(best="-error"), "best")
    for step, error in ((5, 0.1), (10, 0.4), (20, 0.2), (30, 0.3)):  # that of step 5 is kept no longer
        append_event(store, "n", Evaluated(step=step, metrics={"error": error}))
    model = run_handle.load_model(job(tmp_path).replace(best="-error"), "best")
    assert {float(value.detach().flatten()[0]) for value in model.parameters()} == {20.0}
    assert checkpoints.find_checkpoint(job(tmp_path).replace(best="error"), "best")[1].step == 10
    with pytest.raises(JobError, match="needs best= in the job"):
        run_handle.load_model(job(tmp_path), "best")


def test_an_evaluation_in_this_process_skips_what_training_skips(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fragile(row: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        if row["id"] in (3, 9):
            raise ValueError("damaged")
        return row

    committed(open_store(str(tmp_path)), 10)
    columns = {"x": np.random.default_rng(0).random((12, 4), np.float32), "y": np.arange(12) % 3, "id": np.arange(12)}
    damaged = job(tmp_path).replace(optimizer=adam, loss=loss, evaluate=tw.datasets.table(columns).map(fragile))
    good = {name: np.delete(column, [3, 9], axis=0) for name, column in columns.items()}
    expected = tw.evaluate(damaged.replace(evaluate=tw.datasets.table(good)), here=True)
    with pytest.raises(UserCodeError, match="damaged"):
        tw.evaluate(damaged, here=True)
    assert tw.evaluate(damaged.replace(on_error="skip"), here=True) == pytest.approx(expected, rel=1e-6)
    assert "skipped 2 samples of the evaluation set; see quarantine/" in capsys.readouterr().err
    listed = pa.concat_tables([pq.read_table(path) for path in sorted((tmp_path / "n" / "quarantine").iterdir())])
    assert listed["sample"].to_pylist() == [3, 9] and set(listed["data"].to_pylist()) == {"evaluate"}
    with pytest.raises(DataError, match="more than 1 samples cannot be read"):
        tw.evaluate(damaged.replace(on_error="skip", skip_limit=1), here=True)


def test_inference_reads_each_file_of_the_weights_once_and_no_optimizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    committed(open_store(str(tmp_path)), 10)
    spoil(tmp_path, 10, "optimizer.safetensors")
    read, get = list[str](), Store.get
    monkeypatch.setattr(Store, "get", lambda self, path: read.append(path.rpartition("/")[2]) or get(self, path))
    run_handle.load_model(job(tmp_path))
    assert read.count("model.safetensors") == 1 and "optimizer.safetensors" not in read

    engine = one_device()
    read.clear()
    tag = checkpoints.with_checkpoint(job(tmp_path), None, engine.load)
    assert tag.step == 10 and read.count("model.safetensors") == 1 and "optimizer.safetensors" not in read
    assert all(float(value.detach().flatten()[0]) == 10.0 for value in engine.replica.model.parameters())


def test_training_reads_the_optimizer_too_and_tells_its_damage(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    committed(store, 10)
    ref = RunLog(store, "n").head().checkpoints[0]  # type: ignore[union-attr]
    manifest = checkpoints.read_manifest(store, "n", ref)
    engine = one_device()
    engine.load(CheckpointReader(store, "n", ref, manifest))
    spoil(tmp_path, 10, "optimizer.safetensors")
    with pytest.raises(DamagedCheckpoint, match=r"optimizer\.safetensors is altered"):
        engine.load(CheckpointReader(store, "n", ref, manifest))
