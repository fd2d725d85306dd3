"""What a run waits for before its first row: the index of its files, and the labels of what Ray Data computes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq
from figures import Figure, compare
from processes import measured, run_alone, start_process

import trainwright as tw
from trainwright.datasets import metadata_cache
from trainwright.datasets.ray_data.delivery_pipeline import PipelineSpec
from trainwright.datasets.sample_order import SampleOrder, StepSchedule, choose_lanes

STORE = Path(__file__).resolve().parent.parent / "tests" / "support" / "slow_s3_server.py"
FILES, LATENCY_S = 2000, 0.05
ROWS, EPOCHS, RANKS, BATCH = 1_280_000, 90, 8, 256
TASKS = 1024  # labels of one execution of Ray Data
DOCUMENTS = 1_000_000
NOTE = (
    f"{FILES:,} parquet files in a store on this machine that takes {1e3 * LATENCY_S:g} ms for each request. `first "
    "index` reads all footers; the peer is pyarrow, one footer after the other. `index again` is a later fit, plan or "
    "resume, which lists the files; the peer is the first index, since nothing was cached before. `labels` is the wait "
    f"before the first piece of a heavy data set of {ROWS:,} rows, {EPOCHS} epochs and {RANKS} data ranks can be read: "
    f"those of one execution of Ray Data ({TASKS:,} pieces); the peer makes those of the whole run, each from the rows "
    "of its share, as trainwright did before. `labels, resumed` begins at nine tenths of the run. `filter` counts "
    f"{DOCUMENTS:,} texts by a function of rows as tasks on a cluster of 2 CPUs that is up; the peer is one process."
)


def measure(folder: Path, *, smoke: bool) -> list[Figure]:
    files, rows, documents = (8, 12_800, 2000) if smoke else (FILES, ROWS, DOCUMENTS)
    figures = [*_footers(folder, files), *_labels(rows)]
    path = folder / "documents.parquet"
    write_documents(path, documents)
    with start_process(cluster=True) as run:
        tasks = run(partial(filter_s, str(path), tasks=True))
    here = run_alone(partial(filter_s, str(path), tasks=False))
    return [*figures, compare("data_index", "filter, against one process", "s", [tasks], [here])]


def _footers(folder: Path, count: int) -> list[Figure]:
    bucket = folder / "bucket"
    (bucket / "table").mkdir(parents=True)
    os.environ["TRAINWRIGHT_CACHE"] = str(folder / "cache")
    pq.write_table(pa.table({"id": np.arange(1000), "x": np.arange(1000) / 3}), folder / "one.parquet")
    for number in range(count):
        path = bucket / "table" / f"{number:05}.parquet"
        shutil.copyfile(folder / "one.parquet", path)
        os.utime(path, (10**9, 10**9))
    command = [sys.executable, str(STORE), str(bucket), str(LATENCY_S)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as store:
        assert store.stdout is not None and store.stdin is not None
        os.environ |= {"AWS_ENDPOINT_URL": store.stdout.readline().strip(), "AWS_REGION": "us-east-1"}
        os.environ |= {"AWS_ACCESS_KEY_ID": "anybody", "AWS_SECRET_ACCESS_KEY": "nothing"}
        one_by_one = _seconds(lambda: one_footer_after_the_other("s3://data/table"))
        first, again = (_seconds(lambda: tw.datasets.parquet("s3://data/table").index()) for _ in range(2))
        store.stdin.close()
    return [
        compare("data_index", "first index, against pyarrow one by one", "s", [first], [one_by_one]),
        compare("data_index", "index again, against the first", "s", [again], [first]),
    ]


def one_footer_after_the_other(path: str) -> int:
    """Rows of all files below a path of the store."""
    system, path = pafs.FileSystem.from_uri(path)
    files = [info.path for info in system.get_file_info(pafs.FileSelector(path)) if info.is_file]
    return sum(pq.read_metadata(file, filesystem=system).num_rows for file in files)


def _labels(rows: int) -> list[Figure]:
    lanes = choose_lanes(rows, 3136, groups=range(0, rows, 12_800))
    schedule = StepSchedule(order=SampleOrder(lanes=lanes), batch_size=BATCH, epochs=EPOCHS)
    data = tw.datasets.table({"id": np.arange(2)})
    recipe = PipelineSpec(dataset=data, index=data.index(), columns=None, schedule=schedule, length=1024 // BATCH)

    def first_of(step: int) -> float:
        return _seconds(lambda: list(islice(recipe.pieces(step, RANKS), TASKS)))

    start, resumed = first_of(0), first_of(schedule.total_steps * 9 // 10)
    whole = _seconds(lambda: shares_of_the_run(recipe))
    return [
        compare("data_index", "labels, against those of the whole run", "s", [start], [whole]),
        compare("data_index", "labels, resumed, against a start", "s", [resumed], [start]),
    ]


def shares_of_the_run(recipe: PipelineSpec) -> int:
    """Rows of all shares of all chunks."""
    schedule, step, rows = recipe.schedule, 0, 0
    while step < schedule.total_steps:
        chunk = schedule.chunk(step, recipe.length)
        rows += sum(len(schedule.share(chunk, rank, RANKS).samples) for rank in range(RANKS))
        step = chunk.stop
    return rows


def write_documents(path: Path, count: int) -> None:
    """Texts of 40 numbers; each row group has the same."""
    rows = count // 50
    words = np.random.default_rng(0).integers(0, 10**6, (rows, 40)).astype(str)
    table = pa.table({"text": [" ".join(row) for row in words]})
    with pq.ParquetWriter(path, table.schema) as writer:
        for _ in range(50):
            writer.write_table(table)


def seldom(row: dict[str, str]) -> bool:
    """Whether few words of a text are short."""
    return sum(len(word) < 6 for word in row["text"].split()) < 5


def filter_s(path: str, *, tasks: bool) -> float:
    """Return the seconds of the index of what a filter leaves."""
    if tasks:
        metadata_cache.MIN_PASS_S = metadata_cache.LONG_PASS_S = 0.0
    return _seconds(lambda: tw.datasets.parquet(path).filter(seldom).index())


def _seconds(work: Callable[[], object]) -> float:
    return measured(work).seconds
