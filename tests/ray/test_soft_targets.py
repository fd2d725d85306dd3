"""Soft targets on the cluster: computed once whatever is killed, kept in a form, refused where they are another's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from torch import nn

import trainwright as tw
from tests.support.prediction_jobs import RANGE, ROWS, Strike, columns_of, job, table, train
from tests.support.torch_engines import Net, feed, one_device
from tests.support.trained_layouts import trained
from trainwright.core.data import Batch
from trainwright.core.errors import DataError, JobError, PlanError, RunConflict
from trainwright.distillation.distillation_spec import Teacher
from trainwright.distillation.target_cache import stored_targets
from trainwright.distillation.target_encoding import TargetEncoding, decode_targets
from trainwright.distillation.teacher_runner import load_teacher

pytestmark = pytest.mark.usefixtures("ray_cluster")

Columns = Mapping[str, Any]


class Counted(Net):
    """Leaves a file for each of its calls."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.folder = folder

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.device.type == "cpu":
            Path(self.folder, f"{len(list(Path(self.folder).iterdir()))}-{x[0, 0].item()}").touch()
        return super().forward(x)


@dataclass(frozen=True)
class Build:
    """() -> the model."""

    folder: str

    def __call__(self) -> nn.Module:
        return Counted(self.folder)


def read(data: tw.datasets.Dataset) -> Columns:
    index = data.index()
    return data.read(index, range(index.rows))


def test_what_a_killed_actor_had_stored_is_kept_and_what_is_there_is_never_computed_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file of weights teaches, with a layer; half of the parts are there when a worker dies, and torn ones later."""
    (calls := tmp_path / "calls").mkdir()
    model = Net()
    torch.save(model.state_dict(), tmp_path / "w.pt")
    teacher = Teacher(
        name="t", model=Build(str(calls)), weights=str(tmp_path / "w.pt"), inputs="x", layers=("middle",), batch_size=8
    )
    strike = Strike("kill", str(tmp_path / "killed"))
    data = tw.datasets.table(table()).map(strike)
    options: dict[str, Any] = {
        "folder": str(tmp_path / "soft"),
        "keep": "fp32",
        "workers": 1,
        "range_rows": RANGE,
    }
    stored = stored_targets(teacher, data, **options)
    assert Path(strike.mark).exists() and "rows 92 to 114 start again on another worker" in capsys.readouterr().err
    with torch.no_grad():
        expected = model(torch.from_numpy(table()["x"])).numpy()
        hidden = model.middle(model.first(torch.from_numpy(table()["x"]))).numpy()
    found = read(data.beside(stored))
    assert set(found) == {"id", "x", "teacher.t", "teacher.t/middle"}
    np.testing.assert_allclose(found["teacher.t"], expected, atol=1e-6)
    np.testing.assert_allclose(found["teacher.t/middle"], hidden, atol=1e-6)
    # 3 calls for each of 10 ranges: those of the range in which the worker died, up to row 100, came twice.
    batches = len(list(calls.iterdir()))
    assert 30 <= batches <= 33
    (folder,) = (tmp_path / "soft").iterdir()
    stamps = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    again = stored_targets(teacher, data, **{**options, "range_rows": None})
    assert len(list(calls.iterdir())) == batches and read(again)["sample"].tolist() == list(range(ROWS))
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == stamps
    _torn_and_foreign(teacher, data, options, folder)
    assert len(list(calls.iterdir())) == batches
    lost = sorted(folder.glob("part-*"))[-1]
    lost.unlink()  # as where the driver was ended before it
    assert read(stored_targets(teacher, data, **options))["sample"].tolist() == list(range(ROWS))
    assert len(list(calls.iterdir())) == batches + 3


def _torn_and_foreign(teacher: Teacher, data: tw.datasets.Dataset, options: dict[str, Any], folder: Path) -> None:
    """What cannot be relied on is refused with the file, and what differs."""
    part = sorted(folder.glob("part-*"))[2]
    whole = part.read_bytes()
    part.write_bytes(whole[:-20])
    with pytest.raises(DataError, match="not a whole parquet file") as caught:
        stored_targets(teacher, data, **options)
    assert part.name in caught.value.where and "delete this file" in caught.value.remedy
    pq.write_table(pq.read_table(sorted(folder.glob("part-*"))[0]).slice(0, 5), part)
    with pytest.raises(DataError, match="the part has 5 of 23 rows"):
        stored_targets(teacher, data, **options)
    part.write_bytes(whole)
    (folder / "other.parquet").write_bytes(whole)
    with pytest.raises(RunConflict, match=r"not parts of these predictions, such as other\.parquet"):
        stored_targets(teacher, data, **options)
    (folder / "other.parquet").unlink()
    manifest = folder / "_PREDICTIONS.json"
    kept = manifest.read_bytes()
    for old, new, line in (
        (load_teacher(teacher).sha256, "0" * 64, "checkpoint_sha256: 000000000000 -> "),
        (data.index().hash, "1" * 64, "data_sha256: 111111111111 -> "),
        ("fp32, layer middle", "fp16", "form: fp16 -> fp32, layer middle"),
    ):
        manifest.write_bytes(kept.replace(old.encode(), new.encode()))
        with pytest.raises(RunConflict, match=line):
            stored_targets(teacher, data, **options)
    manifest.write_bytes(kept)


def keras_model() -> Any:
    import keras

    given = keras.Input((4,))
    inner = keras.layers.Dense(6, activation="tanh", name="inner")(given)
    return keras.Model(given, keras.layers.Dense(3, kernel_initializer=keras.initializers.Constant(0.5))(inner))


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # Keras' own, of its variables
def test_a_keras_teacher_teaches_a_torch_student(tmp_path: Path) -> None:
    model = keras_model()
    model.save_weights(tmp_path / "w.weights.h5")
    weights = str(tmp_path / "w.weights.h5")
    teacher = Teacher(name="k", model=keras_model, weights=weights, inputs="x", layers=("inner",))
    labelled = tw.datasets.table({**table(), "y": np.arange(ROWS) % 3})
    stored = stored_targets(teacher, labelled, folder=str(tmp_path / "soft"), keep="fp32", workers=1)
    data = labelled.beside(stored)
    given = read(data)
    hidden = np.tanh(given["x"] @ model.get_layer("inner").kernel.numpy())
    np.testing.assert_allclose(given["teacher.k/inner"], hidden, atol=1e-5)

    def distance(outputs: torch.Tensor, targets: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return (outputs - targets[1]).square().sum(-1) + 0 * targets[0]

    student = one_device(job(tmp_path, train=data, targets=("y", "teacher.k"), loss=distance).model_spec(1))
    with torch.no_grad():
        outputs = student.replica.model(torch.from_numpy(given["x"][:12])).numpy()
    taught = hidden[:12].sum(-1, keepdims=True) * 0.5
    rows = Batch(
        columns={name: column[:12] for name, column in given.items()}, weights=np.ones(12), samples=np.arange(12)
    )
    expected = np.square(outputs - taught).sum(-1).mean()
    assert student.train_step(feed(rows)).loss == pytest.approx(expected, rel=1e-4)


def test_a_divided_teacher_is_asked_in_its_layout_with_its_layers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen, model = trained(tmp_path, "sharded")
    teacher = Teacher(name="big", job=chosen, layers=("middle",), batch_size=10)
    data = chosen.train
    stored = stored_targets(teacher, data, folder=str(tmp_path / "soft"), keep="topk(2)", range_rows=30)
    assert "served at step 2 on 2 workers, in the layout that it was trained in: sharded (" in capsys.readouterr().err
    with torch.no_grad():
        given = torch.from_numpy(read(data)["x"])
        expected, hidden = model(given).numpy(), model.middle(model.first(given)).numpy()
    found, form = read(stored), TargetEncoding.parse("topk(2)")
    whole = decode_targets(form, "output", form.encode("output", expected))
    np.testing.assert_allclose(found["teacher.big"], whole, atol=2e-3)
    np.testing.assert_allclose(found["teacher.big/middle"], hidden, atol=1e-3)


def test_a_layer_that_a_layout_would_tear_is_told_by_whole_copies_where_they_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen, model = trained(tmp_path, "pipeline")
    teacher = Teacher(name="big", job=chosen, layers=("middle",))
    found = read(stored_targets(teacher, chosen.train, folder=str(tmp_path / "soft"), keep="fp32"))
    with torch.no_grad():
        hidden = model.middle(model.first(torch.from_numpy(read(chosen.train)["x"]))).numpy()
    np.testing.assert_allclose(found["teacher.big/middle"], hidden, atol=1e-5)

    def none(*_: Any) -> Any:
        raise PlanError("no plan can run this job", where="one_device: 80 GiB are needed")

    monkeypatch.setattr("trainwright.inference.inference_model._plan_pool", none)
    with pytest.raises(JobError, match=r"hidden states of Teacher\('big'\) are asked for, which the layout .* whole"):
        stored_targets(teacher, chosen.train, folder=str(tmp_path / "other"))


def wide() -> nn.Module:
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(4, 12), nn.Tanh(), nn.Linear(12, 3))


def test_a_model_without_a_run_is_divided_as_it_is_told_to_be(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In two stages on two workers, an odd number of rows; it says what it says in one process."""
    data = tw.datasets.table({"x": table(31)["x"]})
    teacher = Teacher(name="t", model=wide, inputs="x", batch_size=6, plan="pp=2")
    found = read(stored_targets(teacher, data, folder=str(tmp_path / "soft"), keep="fp32", range_rows=20))
    assert "teacher-t on 2 workers, in the layout: " in capsys.readouterr().err
    with torch.no_grad():
        np.testing.assert_allclose(found["teacher.t"], wide()(torch.from_numpy(read(data)["x"])).numpy(), atol=1e-6)


def test_the_newest_checkpoint_has_a_folder_of_its_own(tmp_path: Path) -> None:
    chosen = job(tmp_path)
    train(chosen, 3, columns_of)
    teacher, data = Teacher(name="big", job=chosen), tw.datasets.table(table(30))
    assert stored_targets(teacher, data, folder=str(tmp_path / "soft"), workers=1).index().rows == 30
    train(chosen, 5, columns_of)
    with pytest.raises(JobError, match="inputs='x' is not a column of the data"):
        stored_targets(teacher, tw.datasets.table({"y": np.zeros(3)}), folder=str(tmp_path / "soft"))
    names = [path.name for path in (tmp_path / "soft").iterdir()]
    assert len(names) == 1 and names[0].startswith("big-") and names[0].endswith("-fp16")
