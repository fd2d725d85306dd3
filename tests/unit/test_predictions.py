"""Predictions without Ray: ranges, manifest, columns, who is given what, and one worker by itself."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import trainwright as tw
from tests.support.prediction_jobs import columns_of, train
from tests.support.prediction_jobs import job as trained_job
from tests.support.torch_engines import Net, adam, loss, one_device, plan, spec
from trainwright.core.engine import CheckpointManifest as Files
from trainwright.core.engine import CheckpointRef
from trainwright.core.errors import (
    DataError,
    HangError,
    JobError,
    RunConflict,
    StorageError,
    TrainwrightError,
    UserCodeError,
    WorkerLost,
)
from trainwright.datasets.data_source import Index, RowGroup
from trainwright.datasets.formats import parquet as parquet_format
from trainwright.datasets.formats.file_system import retry_transient
from trainwright.datasets.formats.parquet_writer import tensor_column
from trainwright.distillation.target_cache import _target_request
from trainwright.inference.actor_pool import RangeQueue
from trainwright.inference.batch_inference import MANIFEST as MANIFEST_FILE
from trainwright.inference.batch_inference import (
    PredictionManifest,
    PredictionRequest,
    _check_parts,
    default_range_rows,
    missing_ranges,
    prediction_request,
    split_ranges,
)
from trainwright.inference.inference_model import trained_inference_model
from trainwright.inference.prediction_worker import (
    CheckpointWeights,
    Predictor,
    PredictorConfig,
    PredictorProcess,
    Range,
    StoredPart,
    arrow_column,
    check_schema,
    concatenate_outputs,
    order_outputs,
    part_table,
)
from trainwright.reporting.progress_bar import RowProgress
from trainwright.storage.checkpoints import CheckpointWriter, write_manifest
from trainwright.storage.object_store import open_store
from trainwright.worker.worker_config import pickle_job, unpickle_job

JOB = {"train": "parquet('/one/place'), data 0123abcd", "model": "net [12345678]", "schedule": "None"}
MANIFEST = PredictionManifest(
    run="n", checkpoint="checkpoints/00000012-1", checkpoint_sha256="a" * 64, step=12, job=JOB, data_sha256="b" * 64,
    rows=100, columns=("logits",), keep=("id",), range_rows=10,
)  # fmt: skip
LOST = WorkerLost("the process ended")


def index_of(groups: list[int], row_bytes: int = 8) -> Index:
    firsts = np.cumsum([0, *groups]).tolist()
    return Index(
        rows=firsts[-1],
        groups=tuple(RowGroup(file="f", number=n, rows=rows, first=firsts[n]) for n, rows in enumerate(groups)),
        schema={},
        row_bytes=row_bytes,
        hash="",
    )


# --- ranges -----------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 400), min_size=1, max_size=20), st.integers(1, 300))
def test_ranges_cover_every_row_once_and_their_names_sort(groups: list[int], rows: int) -> None:
    index = index_of(groups)
    ranges = split_ranges(index, rows)
    assert [row for part in ranges for row in range(part.start, part.stop)] == list(range(index.rows))
    assert max(part.rows for part in ranges) <= rows
    assert sorted(part.name for part in ranges) == [part.name for part in ranges]
    # Row groups that fit are never split.
    starts = {part.start for part in ranges}
    for group in index.groups:
        if group.rows <= rows:
            assert not starts & set(range(group.first + 1, group.first + group.rows))


def test_the_usual_range_is_bounded_by_memory_and_leaves_work_for_many() -> None:
    assert default_range_rows(index_of([10_000_000], row_bytes=3072)) == (64 << 20) // 3072
    assert default_range_rows(index_of([1_000_000], row_bytes=8)) == 15_625
    assert default_range_rows(index_of([10_000_000], row_bytes=8)) == 65_536
    assert default_range_rows(index_of([100])) == 256
    logits = 256 * 50_000 * 2  # of a row of a language model
    assert default_range_rows(index_of([1_000_000], row_bytes=512), logits) == (64 << 20) // logits == 2
    assert default_range_rows(index_of([1_000_000], row_bytes=512), 1 << 40) == 1
    assert default_range_rows(index_of([1_000_000], row_bytes=8), 40) == 15_625


def test_what_is_missing_is_what_has_no_part() -> None:
    ranges = split_ranges(index_of([30]), 10)
    names = [ranges[1].name, "_PREDICTIONS.json", "_notes/by-hand.txt"]
    assert missing_ranges(ranges, [*names], "out") == (ranges[0], ranges[2])
    with pytest.raises(RunConflict, match=r"are not parts of these predictions, such as train\.parquet") as caught:
        missing_ranges(ranges, [*names, "train.parquet"], "out")
    assert "fresh=True" not in caught.value.remedy
    with pytest.raises(RunConflict) as caught:
        missing_ranges(ranges, ["part-000000000000-000000000011.parquet"], "out")
    assert "fresh=True" in caught.value.remedy


# --- manifest ---------------------------------------------------------------------------------------------------------


def test_only_the_error_of_a_damaged_part_says_that_it_can_be_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = (Range(start=0, stop=2), Range(start=2, stop=4))
    question = PredictionRequest(
        subject=None, index=None, folder=open_store(str(tmp_path)), manifest=MANIFEST, form=None, ranges=parts,
        waiting=(),
    )  # type: ignore[arg-type]  # fmt: skip
    for part in parts:
        pq.write_table(pa.table({"sample": range(part.start, part.stop)}), tmp_path / part.name)
    _check_parts(question)

    def told(question: PredictionRequest = question) -> tuple[str, str]:
        with pytest.raises(DataError) as caught:
            _check_parts(question)
        return caught.value.where, caught.value.remedy

    def unanswered(system: pafs.FileSystem, place: tuple[str, int]) -> Any:
        def read() -> Any:
            raise OSError("AWS Error SLOW_DOWN")

        return retry_transient(read, place[0], deadline_s=0.0)

    with monkeypatch.context() as patched:
        patched.setattr(parquet_format, "read_footer", unanswered)
        where, remedy = told()
        assert parts[0].name in where and "check whether the store is up" in remedy
    elsewhere = replace(question, folder=SimpleNamespace(uri="ftp3://host/out"))  # type: ignore[arg-type]
    assert told(elsewhere) == ("ftp3://host/out", "use s3, gs, az or abfs")
    pq.write_table(pa.table({"sample": [2]}), tmp_path / parts[1].name)
    where, remedy = told()
    assert parts[1].name in where and remedy.startswith("delete this file")
    (tmp_path / parts[1].name).write_bytes(b"torn")
    where, remedy = told()
    assert parts[1].name in where and remedy.startswith("delete this file")


def test_a_manifest_is_read_back_and_agrees_wherever_the_data_lies() -> None:
    again = PredictionManifest.decode(MANIFEST.encode(), "out")
    assert again == MANIFEST
    moved = {**JOB, "train": "parquet('s3://other/place'), data 0123abcd"}
    again.check(replace(MANIFEST, job=moved), "out")


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (
            {"job": {**JOB, "train": "table(x), data ffff0000"}},
            "data: parquet('/one/place'), data 0123abcd -> table(x), data ffff0000",
        ),
        ({"data_sha256": "c" * 64}, "data_sha256: bbbbbbbbbbbb -> cccccccccccc"),
        ({"content_sha256": "d" * 64}, "content_sha256:  -> dddddddddddd"),
        ({"columns": ()}, "columns: ('logits',) -> ()"),
        ({"keep": ("id", "y")}, "keep: ('id',) -> ('id', 'y')"),
        ({"range_rows": 20}, "range_rows: 10 -> 20"),
        ({"form": "fp16"}, "form:  -> fp16"),
        ({"job": {**JOB, "model": "net [87654321]"}}, "model: net [12345678] -> net [87654321]"),
    ],
)
def test_another_question_is_refused_with_what_differs(changes: dict[str, Any], line: str) -> None:
    with pytest.raises(RunConflict) as caught:
        MANIFEST.check(replace(MANIFEST, **changes), "out")
    assert f"\n    {line}\n" in caught.value.what and caught.value.where == "out"
    assert "fresh=True" in caught.value.remedy and "step=" not in caught.value.remedy


def test_a_newer_checkpoint_is_refused_and_the_older_one_offered() -> None:
    asked = replace(MANIFEST, checkpoint="checkpoints/00000024-1", checkpoint_sha256="c" * 64, step=24)
    with pytest.raises(RunConflict, match="step: 12 -> 24") as caught:
        MANIFEST.check(asked, "out")
    assert "step=12" in caught.value.remedy


@pytest.mark.parametrize("data", [b"", b"[]", b"{}", MANIFEST.encode().replace(b'"format": 1', b'"format": 2')])
def test_what_is_no_manifest_is_told(data: bytes) -> None:
    with pytest.raises(StorageError, match="manifest cannot be read"):
        PredictionManifest.decode(data, "out")


def write_text(path: Path, numbers: np.ndarray) -> tw.datasets.Dataset:
    path.mkdir()
    (path / "a.txt").write_text("".join(f"{number}\n" for number in numbers))
    return tw.datasets.text(str(path / "a.txt"))


def write_images(path: Path, numbers: np.ndarray) -> tw.datasets.Dataset:
    for place, number in enumerate(numbers):
        (path / "one").mkdir(parents=True, exist_ok=True)
        (path / "one" / f"{place}.png").write_bytes(bytes([number]))
    return tw.datasets.images(str(path))


def write_parquet(path: Path, numbers: np.ndarray) -> tw.datasets.Dataset:
    path.mkdir()
    for place, part in enumerate(np.split(numbers, 2)):
        table = pa.table({"x": tensor_column(part[:, None].astype(np.float32).repeat(4, 1))})
        pq.write_table(table, path / f"{place}.parquet", row_group_size=3, compression="none", use_dictionary=False)
    return tw.datasets.parquet(str(path))


@pytest.mark.parametrize("write", [write_parquet, write_text, write_images])
def test_rewritten_files_of_the_same_size_are_other_data_and_a_copy_is_not(
    tmp_path: Path, write: Callable[[Path, np.ndarray], tw.datasets.Dataset]
) -> None:
    rows = np.arange(20) + 10
    first = write(tmp_path / "a", rows)
    derived: list[Callable[[tw.datasets.Dataset], tw.datasets.Dataset]] = [
        lambda data: data,
        lambda data: data.filter(keeps),
        lambda data: data.weighted(np.ones(20)),
        lambda data: tw.datasets.split(data, {"a": 0.5, "b": 0.5})["a"],
    ]
    for derive in derived:
        hashes = {}
        for name, numbers in (("copy", rows), ("reversed", rows[::-1]), ("scaled", rows * 2 + 20)):
            place = tmp_path / f"{name}{len(list(tmp_path.iterdir()))}"
            data, one = derive(write(place, numbers)), derive(first)
            assert data.index().hash == one.index().hash, "of runs: it tells nothing of the content"
            hashes[name] = data.sampled_hash(data.index(), None) == one.sampled_hash(one.index(), None)
        assert hashes == {"copy": True, "reversed": False, "scaled": False}


def keeps(row: dict[str, Any]) -> bool:
    return True


def test_predictions_and_targets_of_rewritten_files_are_not_reused(tmp_path: Path) -> None:
    chosen = trained_job(tmp_path)
    train(chosen, 1, columns_of)
    teacher = tw.Teacher(name="t", job=chosen)

    def target_folder(data: tw.datasets.Dataset) -> str:
        return _target_request(teacher, data, folder=str(tmp_path / "targets"), keep="fp16").folder.uri

    def request(data: tw.datasets.Dataset) -> PredictionRequest:
        return prediction_request(trained_inference_model(chosen, data), to=str(tmp_path / "out"))

    first, copy = (write_parquet(tmp_path / name, np.arange(20)) for name in "ab")
    other = write_parquet(tmp_path / "c", np.arange(20) * 2)
    question = request(first)
    question.folder.put(MANIFEST_FILE, question.manifest.encode())
    request(copy)
    with pytest.raises(RunConflict, match=r":\n    content_sha256: \w{12} -> \w{12}\n "):
        request(other)
    assert target_folder(first) == target_folder(copy) != target_folder(other)


# --- work -------------------------------------------------------------------------------------------------------------


def test_a_lost_range_comes_first_and_is_given_up_in_the_end() -> None:
    ranges = split_ranges(index_of([30]), 10)
    work = RangeQueue(ranges, attempts=2)
    first, second = work.take(), work.take()
    assert (first, second, work.open) == (ranges[0], ranges[1], 3)
    work.done(ranges[1])
    work.lost(ranges[0], "node a", LOST)
    assert work.take() == ranges[0] and work.open == 2
    with pytest.raises(WorkerLost, match="rows 0 to 9 were given up: 2 workers were lost") as caught:
        work.lost(ranges[0], "node b", LOST)
    assert caught.value.where == "rows 0 to 9; on node a, node b"
    assert work.take() == ranges[2] and work.take() is None


def test_what_is_lost_again_and_again_because_it_hangs_says_so() -> None:
    silent = HangError("no answer for 15 s, and no batch took more than 0.1 s before")
    work = RangeQueue(split_ranges(index_of([30]), 10), attempts=2)
    first = work.take()
    assert first is not None and work.losses(first) == 0
    work.lost(first, "node a", silent)
    assert work.take() == first and work.losses(first) == 1
    with pytest.raises(WorkerLost, match=r"rows 0 to 9 were given up: 2 workers .* no answer for 15") as caught:
        work.lost(first, "node b", silent)
    assert caught.value.where == "rows 0 to 9; on node a, node b"
    assert "deadlock" in caught.value.remedy and "raise hang_deadline_s" in caught.value.remedy


def test_a_store_that_stays_away_is_told_as_it_is() -> None:
    work = RangeQueue(split_ranges(index_of([3]), 10), attempts=1)
    part = work.take()
    assert part is not None
    with pytest.raises(StorageError, match="disk full"):
        work.lost(part, "node", StorageError("disk full"))


# --- columns ----------------------------------------------------------------------------------------------------------


def test_columns_keep_their_types_through_parquet(tmp_path: Path) -> None:
    texts, lists = np.empty(3, dtype=object), np.empty(3, dtype=object)
    texts[:], lists[:] = ["a", "b", "c"], [np.arange(n) for n in (0, 2, 1)]
    outputs = {
        "one": np.arange(3, dtype=np.float16),
        "grid": np.arange(24, dtype=np.float32).reshape(3, 2, 4),
        "flags": np.array([[True, False], [False, False], [True, True]]),
    }
    table = part_table(Range(start=7, stop=10), {"text": texts, "list": lists}, outputs)
    pq.write_table(table, tmp_path / "part.parquet")
    assert isinstance(table.schema.field("grid").type, pa.FixedShapeTensorType)
    data = tw.datasets.parquet(tmp_path / "part.parquet")
    found = data.read(data.index(), [0, 1, 2])
    assert list(found) == ["sample", "text", "list", "one", "grid", "flags"]
    assert found["sample"].dtype == np.int64 and found["sample"].tolist() == [7, 8, 9]
    assert found["text"].tolist() == ["a", "b", "c"] and [len(row) for row in found["list"]] == [0, 2, 1]
    for name, array in outputs.items():
        assert found[name].dtype == array.dtype and np.array_equal(found[name], array)


def test_columns_that_cannot_be_written_are_named() -> None:
    with pytest.raises(JobError, match="output 'id' has the name of another column"):
        part_table(Range(start=0, stop=1), {"id": np.zeros(1)}, {"id": np.zeros(1)})
    with pytest.raises(JobError, match="output 'sample'"):
        part_table(Range(start=0, stop=1), {}, {"sample": np.zeros(1)})
    with pytest.raises(JobError, match="complex64"):
        arrow_column("z", np.zeros((2, 3), np.complex64))


def test_outputs_of_different_shapes_or_names_are_refused() -> None:
    part = Range(start=0, stop=4)
    with pytest.raises(JobError, match=r"'x' is \(2,\) for some rows and \(3,\) for others.*tw.Pad\(length"):
        concatenate_outputs([{"x": np.zeros((2, 2))}, {"x": np.zeros((2, 3))}], part)
    with pytest.raises(JobError, match="output 'y' for some batches only"):
        concatenate_outputs([{"x": np.zeros(2)}, {"x": np.zeros(2), "y": np.zeros(2)}], part)
    with pytest.raises(JobError, match="'x' is double for some rows and float"):
        check_schema({"x": "double"}, {"x": "float"}, part)


# --- one worker -------------------------------------------------------------------------------------------------------


def order_of(folder: Path, data: tw.datasets.Dataset, **changes: Any) -> PredictorConfig:
    """An order over a checkpoint of an untrained network."""
    store = open_store(str(folder / "runs"))
    writer = CheckpointWriter(store, "n", "checkpoints/00000000-1")
    engine = one_device()
    engine.transfer(())
    engine.save(engine.snapshot(), writer)
    sums = write_manifest(store, "n", "checkpoints/00000000-1", Files(step=0, files=writer.entries))
    job = tw.Job(name="n", model=Net, optimizer=adam, loss=loss, inputs="x", train=data, batch_size=4)
    fields: dict[str, Any] = {
        "job": pickle_job(job), "plan": plan(engine="trainwright.strategies.torch.engines.base:OneDevice"),
        "index": data.index(), "outputs": (), "keep": ("id",), "batch_size": 4,
        "weights": CheckpointWeights(
            runs=store, run="n", checkpoint=CheckpointRef(step=0, path="checkpoints/00000000-1", manifest_sha256=sums)
        ),
        "folder": open_store(str(folder / "out")),
    }  # fmt: skip
    return PredictorConfig(**{**fields, **changes})


def rows(count: int = 20) -> dict[str, np.ndarray]:
    return {"id": np.arange(count) * 10, "x": np.random.default_rng(5).normal(size=(count, 4)).astype(np.float32)}


def test_one_worker_writes_a_whole_part(tmp_path: Path) -> None:
    data = tw.datasets.table(rows()).map(lambda row, rng: {**row, "x": row["x"] * 2})
    order = order_of(tmp_path, data)
    part = Range(start=5, stop=15)
    *news, last = Predictor(order, order_outputs(order)).compute(part)
    assert news == [4, 4, 2] and isinstance(last, StoredPart)
    table = pq.read_table(io.BytesIO(order.folder.get(part.name)))
    reference = one_device(spec())  # the same seed as the checkpoint's: the same weights
    with torch.no_grad():
        expected = reference.replica.model(torch.from_numpy(rows()["x"][5:15] * 2)).numpy()
    assert last.schema == {field.name: str(field.type) for field in table.schema}
    assert table["sample"].to_pylist() == list(range(5, 15)) and table["id"].to_pylist() == list(range(50, 150, 10))
    found = table["output"].combine_chunks()
    np.testing.assert_allclose(found.to_numpy_ndarray(), expected, rtol=0, atol=1e-6)


def fragile(row: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    if row["id"] in (70, 80):
        raise ValueError(f"damaged: {row['id']}")
    return row


def test_rows_that_cannot_be_read_have_nulls_where_the_job_skips_them(tmp_path: Path) -> None:
    plain = order_of(tmp_path, tw.datasets.table(rows()))
    order = order_of(tmp_path, tw.datasets.table(rows()).map(fragile))
    skipping = replace(order, job=pickle_job(unpickle_job(order.job).replace(on_error="skip", skip_limit=2)))
    part = Range(start=5, stop=15)
    tables = list[pa.Table]()
    for each in (plain, skipping):
        *_, last = Predictor(each, order_outputs(each)).compute(part)
        tables.append(pq.read_table(io.BytesIO(each.folder.get(part.name))))
        assert isinstance(last, StoredPart) and last.schema == {
            field.name: str(field.type) for field in tables[0].schema
        }
    whole, found = tables
    good = [0, 1, *range(4, 10)]
    assert found.schema == whole.schema and found["sample"].to_pylist() == list(range(5, 15))
    assert found.take(good).equals(whole.take(good))
    assert all(found[name].take([2, 3]).null_count == 2 for name in ("id", "output"))
    assert "rows 5 to 14: 2 of 10 cannot be read and have nulls; sample 7: " in last.note and "damaged: 70" in last.note

    with pytest.raises(UserCodeError, match="damaged: 70"):
        list(Predictor(order, order_outputs(order)).compute(part))
    strict = replace(order, job=pickle_job(unpickle_job(order.job).replace(on_error="skip", skip_limit=1)))
    with pytest.raises(DataError, match="more than 1 samples cannot be read") as limit:
        list(Predictor(strict, order_outputs(strict)).compute(part))
    assert limit.value.remedy == "correct the data, or raise skip_limit"


def test_errors_are_answers_with_rows_and_node(tmp_path: Path) -> None:
    process = PredictorProcess()
    assert "pid" in process.hello()
    broken = order_of(tmp_path, tw.datasets.table(rows()), outputs=("logits",))
    assert process.load(broken) is None
    (answer,) = process.compute(Range(start=0, stop=20))
    assert isinstance(answer, JobError) and "no output 'logits'" in answer.what
    assert "rows 0 to 19 on " in answer.where and not list(broken.folder.list())
    assert broken.weights is not None
    lost = replace(broken.weights.checkpoint, path="checkpoints/00000009-1")
    error = process.load(replace(broken, weights=replace(broken.weights, checkpoint=lost)))
    assert isinstance(error, TrainwrightError) and "MANIFEST.json is missing" in error.what


def test_the_meter_tells_tenths_in_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    with RowProgress(1000, 100) as meter:
        for _ in range(90):
            meter.add(10)
        meter.note("a [note]")
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1] == "a [note]" and lines[-2].startswith("rows 1,000/1,000, ")
    assert len(lines) == 10
