"""Predictions by a pool of actors: equal to a plain loop whatever is killed, and resumed where they were ended."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import trainwright as tw
from tests.support.prediction_jobs import RANGE, ROWS, Strike, check, columns_of, job, read, table, train
from tests.support.torch_engines import loss
from trainwright.core.data import Batch
from trainwright.core.errors import ResourceError, RunConflict, UserCodeError, WorkerLost
from trainwright.datasets.dataset import transformed_fields
from trainwright.inference import batch_inference as predicting

pytestmark = pytest.mark.usefixtures("ray_cluster")


@pytest.fixture
def served(tmp_path: Path) -> tuple[tw.Job, np.ndarray]:
    """A job with a checkpoint, and what a plain loop predicts for `table()`."""
    chosen = job(tmp_path)
    model = train(chosen, 3, columns_of)
    with torch.no_grad():
        outputs = [model(torch.from_numpy(table()["x"][start : start + 8])) for start in range(0, ROWS, 8)]
    return chosen, torch.cat(outputs).numpy()


def test_one_and_three_workers_predict_what_a_plain_loop_does(
    served: tuple[tw.Job, np.ndarray], tmp_path: Path
) -> None:
    chosen, expected = served
    data = tw.datasets.table(table())
    one = tw.predict(chosen, data, to=str(tmp_path / "one"), workers=1, range_rows=RANGE)
    three = tw.predict(chosen, data, to=str(tmp_path / "three"), workers=3, range_rows=RANGE, keep=("id",))
    assert (one.rows, one.parts, one.computed, one.step) == (ROWS, 10, 10, 3)
    assert three.parts == three.computed == 10
    check(one.uri, expected)
    check(three.uri, expected)
    assert read(three.uri)["id"].to_pylist() == table()["id"].tolist()
    found = three.dataset()
    assert found.index().rows == ROWS and list(transformed_fields(found, found.index())) == ["sample", "id", "output"]
    again = tw.predict(chosen, data, to=one.uri, range_rows=RANGE)
    assert again.computed == 0 and again.parts == 10


def test_the_ranges_of_workers_that_die_or_hang_are_computed_by_others(
    served: tuple[tw.Job, np.ndarray], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen, expected = served
    strikes = Strike("kill", str(tmp_path / "killed")), Strike("hang", str(tmp_path / "hung"), at=150)
    data = tw.datasets.table(table()).map(strikes[0]).map(strikes[1])
    found = tw.predict(chosen.replace(hang_deadline_s=4.0), data, to=str(tmp_path / "out"), workers=2, range_rows=RANGE)
    assert all(Path(strike.mark).exists() for strike in strikes) and found.computed == 10
    check(found.uri, expected)
    told = capsys.readouterr().err
    assert "rows 92 to 114 start again on another worker: the process ended" in told
    assert "rows 138 to 160 start again on another worker: no answer for 4 s" in told


def test_a_range_that_kills_every_worker_is_named(
    served: tuple[tw.Job, np.ndarray], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen, _ = served
    monkeypatch.setattr(predicting, "ATTEMPTS", 2)
    data = tw.datasets.table(table()).map(Strike("kill"))
    with pytest.raises(WorkerLost, match="rows 92 to 114 were given up: 2 workers were lost") as caught:
        tw.predict(chosen, data, to=str(tmp_path / "out"), workers=1, range_rows=RANGE)
    assert caught.value.where.startswith("rows 92 to 114; on ") and caught.value.where.count("pid ") == 2


def test_a_second_call_computes_only_what_is_missing(served: tuple[tw.Job, np.ndarray], tmp_path: Path) -> None:
    chosen, expected = served
    out = tmp_path / "out"
    data = tw.datasets.table(table()).map(Strike("raise", str(tmp_path / "raised")))
    with pytest.raises(UserCodeError, match="raised LookupError: struck") as caught:
        tw.predict(chosen, data, to=str(out), workers=1, range_rows=RANGE)
    assert "sample 100" in caught.value.where and "rows 92 to 114 on " in caught.value.where
    done = {path.name: path.stat().st_mtime_ns for path in out.glob("part-*.parquet")}
    assert sorted(done) == [f"part-{n * RANGE:012}-{n * RANGE + RANGE:012}.parquet" for n in range(4)]
    found = tw.predict(chosen, data, to=str(out), workers=2)
    assert found.computed == 6 and found.parts == 10
    assert {name: (out / name).stat().st_mtime_ns for name in done} == done
    check(out, expected)


def test_another_question_is_refused_until_it_is_asked_afresh(
    served: tuple[tw.Job, np.ndarray], tmp_path: Path
) -> None:
    chosen, _ = served
    out = str(tmp_path / "out")
    data = tw.datasets.table(table())
    tw.predict(chosen, data, to=out, workers=1, range_rows=RANGE)
    manifest = Path(out) / "_PREDICTIONS.json"
    before = manifest.read_bytes()
    with pytest.raises(RunConflict, match="range_rows: 23 -> 50"):
        tw.predict(chosen, data, to=out, range_rows=50)
    other = tw.datasets.table({**table(), "x": table()["x"] + 1})
    with pytest.raises(RunConflict, match="data_sha256: "):
        tw.predict(chosen, other, to=out)
    with pytest.raises(ResourceError, match="needs 99 CPU slots, the cluster has 8"):
        tw.predict(chosen, data, to=out, workers=99, fresh=True)
    assert manifest.read_bytes() == before
    newer = train(chosen, 5, columns_of)
    with pytest.raises(RunConflict, match="step: 3 -> 5") as caught:
        tw.predict(chosen, data, to=out)
    assert "step=3" in caught.value.remedy and tw.predict(chosen, data, to=out, step=3).computed == 0
    fresh = tw.predict(chosen, data, to=out, workers=1, range_rows=50, fresh=True)
    assert (fresh.step, fresh.parts, fresh.computed) == (5, 5, 5) and json.loads(manifest.read_bytes())["step"] == 5
    with torch.no_grad():
        check(out, newer(torch.from_numpy(table()["x"])).numpy())


class Reading(nn.Module):
    """Takes keywords, returns a dict; what is padded does not count."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(30, 3)

    def forward(self, *, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> dict[str, torch.Tensor]:
        states = self.embedding(input_ids) * attention_mask[..., None]
        return {"logits": states.sum(1), "tokens": attention_mask.sum(1)}


def reading_batch(step: int) -> Batch:
    column = np.empty(4, dtype=object)
    column[:] = [np.arange(size) for size in (1, 3, 2, 5)]
    return Batch(columns={"tokens": column, "y": np.arange(4) % 3}, weights=np.ones(4), samples=np.arange(4))


def test_texts_of_any_length_from_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(3)
    rows = [random.integers(0, 30, size).tolist() for size in random.integers(1, 12, 57)]
    pq.write_table(pa.table({"id": range(57), "tokens": rows}), tmp_path / "data.parquet", row_group_size=20)
    chosen = job(
        tmp_path, model=Reading, inputs={"input_ids": "tokens", "attention_mask": "tokens_mask"},
        loss=lambda outputs, targets: loss(outputs["logits"], targets), pad={"tokens": tw.Pad(multiple=4)},
        train=tw.datasets.table({"tokens": reading_batch(0).columns["tokens"], "y": np.arange(4)}),
    )  # fmt: skip
    model = train(chosen, 2, reading_batch)
    monkeypatch.setattr("trainwright.planning.job_file.load_job", lambda path, overrides=(): chosen)
    from trainwright.cli.main import app

    out = tmp_path / "out"
    arguments = ["predict", "job.py", "--to", str(out), "--data", str(tmp_path / "data.parquet"), "--workers", "2"]
    done = CliRunner().invoke(app, [*arguments, "--keep", "id", "--column", "logits", "--range-rows", "20", "--json"])
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout[done.stdout.index("{\n") :])
    assert (told["rows"], told["parts"], told["computed"]) == (57, 3, 3)
    found = read(out)
    assert found.column_names == ["sample", "id", "logits"] and found["id"].to_pylist() == list(range(57))
    with torch.no_grad():
        singles = [torch.tensor([row]) for row in rows]
        expected = torch.cat([model(input_ids=one, attention_mask=one >= 0)["logits"] for one in singles]).numpy()
    outputs = found["logits"].combine_chunks().to_numpy_ndarray()
    np.testing.assert_allclose(outputs, expected, rtol=0, atol=1e-6)
