"""Filters, one-to-many and packing: counted once, then data sets like any other."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainwright.core.data import FeedAssignment
from trainwright.core.errors import DataError, UserCodeError
from trainwright.datasets import Dataset, parquet, table
from trainwright.datasets.loading.batch_loader import BatchLoader
from trainwright.datasets.metadata_cache import MetadataContext, metadata_context
from trainwright.datasets.ops.derived_dataset import Pack
from trainwright.planning.code_fingerprint import CodeFingerprints

ROWS = 500


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Parquet files of uneven row groups; `id` is the row number."""
    for number, (first, stop) in enumerate([(0, 130), (130, 131), (131, 500)]):
        rows = pa.table({"id": np.arange(first, stop), "x": np.arange(first, stop) * 0.5})
        pq.write_table(rows, tmp_path / f"{number}.parquet", row_group_size=100)
    return tmp_path


def even(row: dict[str, Any]) -> bool:
    return int(row["id"]) % 2 == 0


def copies(row: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for copy in range(int(row["id"]) % 3):
        yield {"id": row["id"], "copy": copy}


def ids(dataset: Dataset, *, ranks: int = 1, batch_size: int = 32, epochs: int = 1, seed: int = 3) -> list[list[Any]]:
    """What each global batch holds, over all ranks."""
    index = dataset.index()
    batches: list[list[Any]] = []
    streams = [
        BatchLoader(dataset, index, batch_size=batch_size, epochs=epochs, seed=seed,
               feeding=FeedAssignment(data_ranks=range(rank, rank + 1), total=ranks))
        for rank in range(ranks)
    ]  # fmt: skip
    for number, feeds in enumerate(zip(*(stream.feeds() for stream in streams), strict=True)):
        held: list[Any] = []
        for feed in feeds:
            assert feed.step == number
            for batch in feed.parts[0]:
                real = batch.weights > 0
                columns = [batch.columns[name][real].tolist() for name in sorted(batch.columns) if name != "x"]
                held += list(zip(*columns, strict=True))
        batches.append(sorted(held))
    return batches


def flat(batches: list[list[Any]]) -> list[Any]:
    return sorted(item for batch in batches for item in batch)


def test_a_filter_keeps_each_row_once_and_knows_its_length(folder: Path) -> None:
    kept = parquet(folder).filter(even)
    assert kept.index().rows == ROWS // 2
    assert flat(ids(kept)) == [(row,) for row in range(0, ROWS, 2)]


def test_a_batch_filter_is_the_row_filter(folder: Path) -> None:
    rows, columns = parquet(folder).filter(even), parquet(folder).filter_batches(lambda given: given["id"] % 2 == 0)
    assert ids(rows) == ids(columns)


def test_one_to_many_gives_each_copy_once(folder: Path) -> None:
    made = parquet(folder).flat_map(copies)
    expected = sorted((copy, row) for row in range(ROWS) for copy in range(row % 3))
    assert made.index().rows == len(expected)
    assert flat(ids(made)) == expected


def test_chains_are_right_and_random_functions_before_them_repeat(folder: Path) -> None:
    def noisy(row: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        return {**row, "noise": rng.integers(0, 4)}

    chained = parquet(folder).map(noisy).filter(lambda row: bool(row["noise"] > 0)).flat_map(copies)
    once, again = flat(ids(chained, epochs=2)), flat(ids(chained, epochs=2, seed=9))
    assert once == again, "neither seed nor epoch changes what comes of a row"
    assert all(once.count(item) == 2 for item in once[:20])


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_the_same_batches_for_any_number_of_ranks(folder: Path, ranks: int) -> None:
    made = parquet(folder).filter(even).flat_map(copies)
    assert ids(made, ranks=ranks) == ids(made)


def test_resizing_in_the_middle_of_an_epoch_changes_no_global_batch(folder: Path) -> None:
    """4 -> 3 -> 5 workers: what each step's ranks hold together, as recorded from their feeds."""
    made = parquet(folder).filter(even).flat_map(copies)
    whole = ids(made, epochs=2)
    thirds = [0, len(whole) // 3, 2 * len(whole) // 3, len(whole)]
    resized: list[list[Any]] = []
    for ranks, start, stop in zip((4, 3, 5), thirds, thirds[1:], strict=False):
        resized += ids(made, ranks=ranks, epochs=2)[start:stop]
    assert resized == whole


def test_transforms_after_a_filter_see_the_run_s_own_numbers(folder: Path) -> None:
    def draw(row: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        return {"id": row["id"], "draw": rng.integers(0, 1 << 30)}

    made = parquet(folder).filter(even).map(draw)
    assert flat(ids(made, seed=1)) != flat(ids(made, seed=2))


@settings(max_examples=60)
@given(
    st.lists(st.lists(st.integers(1, 99), max_size=23), min_size=1, max_size=12),
    st.integers(1, 16),
    st.booleans(),
)
def test_packing_keeps_every_token_in_order(documents: list[list[int]], length: int, split: bool) -> None:
    column = np.empty(len(documents), dtype=object)
    column[:] = [np.array(document, np.int64) for document in documents]
    packed = Pack(column="tokens", length=length, split=split).derive({"tokens": column}, np.arange(len(documents)))
    kept = documents if split else [document[:length] for document in documents]
    assert packed["tokens"][packed["mask"] > 0].tolist() == [token for document in kept for token in document]
    assert ((packed["segment"] > 0) == (packed["mask"] > 0)).all()
    for row in range(len(packed["tokens"])):
        for piece in range(1, packed["segment"][row].max(initial=0) + 1):
            place = packed["position"][row][packed["segment"][row] == piece]
            assert place.tolist() == list(range(len(place))) and len(place)
    if not split:  # no document is torn
        pieces = [
            packed["tokens"][row][packed["segment"][row] == piece].tolist()
            for row in range(len(packed["tokens"]))
            for piece in range(1, packed["segment"][row].max(initial=0) + 1)
        ]
        assert pieces == [document for document in kept if document]


def test_packed_documents_are_fed_in_full_sequences() -> None:
    documents = np.empty(40, dtype=object)
    documents[:] = [np.arange(length % 7 + 1) for length in range(40)]
    packed = table({"tokens": documents}).pack(8)
    index = packed.index()
    assert index.schema["tokens"].shape == (8,) and index.rows == -(-sum(len(d) for d in documents) // 8)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda data: data.filter(lambda row: False), "none of 500 rows is left"),
        (lambda data: data.filter_batches(lambda columns: columns["id"]), "one boolean for each row"),
        (lambda data: data.flat_map(lambda row: [1]), "flat_map gave a int"),
        (lambda data: data.flat_map(lambda row: [{"a": 1}, {"b": 1}]), r"flat_map gave columns \['b'\]"),
        (lambda data: data.pack(8, "id"), "tokens were expected"),
        (lambda data: data.pack(8, "text"), "there is no column 'text'"),
        (lambda data: data.pack(0), "length=0 holds no token"),
        (lambda data: data.flat_map(lambda row: [{"v": np.zeros(int(row["id"]) // 100)}]), "shape"),
    ],
)
def test_what_goes_wrong_is_said(folder: Path, make: Any, said: str) -> None:
    with pytest.raises(DataError, match=said):
        make(parquet(folder)).index()


def test_what_the_function_raises_is_told_with_its_sample(folder: Path) -> None:
    with pytest.raises(UserCodeError, match="ZeroDivisionError") as caught:
        parquet(folder).filter(lambda row: 1 // (int(row["id"]) - 7) > 0).index()
    assert "sample 7" in str(caught.value)


def test_what_was_counted_when_a_run_was_started_is_not_counted_again(folder: Path) -> None:
    """By the same code, of the same files; a part of it that is torn is counted anew."""
    seen, kept = queue.SimpleQueue[int](), dict[str, bytes]()  # what a queue holds is no part of the code

    def made(factor: int, length: int = 7) -> Dataset:
        def keep(row: dict[str, Any]) -> bool:
            seen.put(int(row["id"]))
            return int(row["id"]) * factor % 3 == 0

        def tokens(row: dict[str, Any], _: Any) -> dict[str, Any]:
            return {"tokens": np.full(2, row["id"])}

        return parquet(folder).filter(keep).map(tokens).pack(length, column="tokens")

    def index(data: Dataset) -> tuple[int, Any]:
        """Rows looked at, and the index."""
        before = seen.qsize()
        used = MetadataContext(find=kept.get, fingerprint=lambda value: CodeFingerprints().digest(value))
        with metadata_context(used):
            found = data.index()
        kept.update(used.kept)
        return seen.qsize() - before, found

    first, whole = index(made(1))
    assert first >= ROWS and index(made(1)) == (0, whole)
    assert index(made(2))[0] >= ROWS and index(made(1, 9))[0] > 0, "another function, another length"
    for name in kept:
        kept[name] = kept[name][: len(kept[name]) // 2]
    assert index(made(1)) == (first, whole) and index(made(1)) == (0, whole)
    before = seen.qsize()
    assert made(1).index() == whole and seen.qsize() > before, "outside of a run nothing is kept"


def test_a_function_that_changes_its_mind_is_found_out(folder: Path) -> None:
    seen: list[int] = []

    def moody(row: dict[str, Any]) -> bool:
        seen.append(1)
        return len(seen) <= ROWS or int(row["id"]) % 2 == 0

    kept = parquet(folder).filter(moody)
    index = kept.index()
    with pytest.raises(DataError, match="gave 50 rows now and 100 when the run began"):
        kept.read(index, [0])


def test_a_filter_after_a_heavy_transform_is_refused(folder: Path) -> None:
    with pytest.raises(DataError, match="filter comes after a transform that runs on Ray Data"):
        parquet(folder).map_batches(lambda columns: columns, cpus=1).filter(even)


def test_functions_that_work_in_place_change_nothing_that_is_kept() -> None:
    mine = np.arange(1, 5)

    def double(columns: dict[str, Any]) -> dict[str, Any]:
        columns["x"] *= 2
        return columns

    data = table({"x": mine}).map_batches(double).filter(lambda row: True)
    index = data.index()
    for _ in range(2):
        assert data.read(index, range(4))["x"].tolist() == [2, 4, 6, 8]
    assert mine.tolist() == [1, 2, 3, 4]


def test_a_filter_that_gives_no_truth_value_is_the_user_s_error() -> None:
    with pytest.raises(UserCodeError, match="truth value"):
        table({"x": np.arange(4)}).filter(lambda row: np.array([1, 0])).index()
