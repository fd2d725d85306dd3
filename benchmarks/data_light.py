"""The light path: a float table in parquet, shuffled, against one pyarrow thread and what others stream with."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Literal

from figures import Figure, compare
from float_table import FEATURES, GROUP_ROWS, files_of, write_table
from loader_processes import EpochTimes, Loader, time_loaders
from peers import litdata_chunks
from peers.arrow_thread import ArrowThread
from peers.ray_data import StreamingSplit
from peers.tf_data import BUFFER_ROWS, Records, write_records
from peers.torch_loader import FloatLoader
from processes import SMOKE_ROUNDS, Rounds, run_alone
from rank_streams import LightStream, RayStream

GROUPS, LARGE_GROUPS, BATCH_SIZE = 25, 90, 512
LIMIT = 1 / 0.9
STREAM_TARGET = 0.9
Epoch = Literal["first", "later"]
EPOCHS: tuple[Epoch, ...] = ("first", "later")
NOTE = (
    f"{GROUPS * GROUP_ROWS:,} rows of {FEATURES} float32 and a label, in row groups of {GROUP_ROWS:,}, without "
    f"compression or dictionaries; batches of {BATCH_SIZE}, to one consumer that does nothing with them. Microseconds "
    "a row: 1 us is a million rows/s. Each loader has a process of its own and both cores; they take turns, and a turn "
    "opens the data and gives two epochs. Before each turn its process fills and frees some memory, because a virtual "
    "machine charges the first use of memory that it had given back. `first epoch` begins before the data is opened "
    "and reads every row; `later epoch` is the second, which finds the rows decoded in memory in trainwright and "
    "DataLoader. `one pyarrow thread` is the limit: it decodes row group after row group in the order of the files, "
    "memory-mapped, and slices batches without a copy or a shuffle; `core time` is trainwright's processor time, over "
    "all its threads, against that thread's wall time, so rows/s for each core used. `default files` are the same rows "
    f"with pyarrow's own settings (snappy, dictionaries), `large` are {LARGE_GROUPS * GROUP_ROWS:,} rows, more than a "
    "reader keeps decoded, so that each epoch reads all of them again. DataLoader holds the table as tensors in "
    "memory, takes whole batches (`__getitems__`) and shuffles single rows. tf.data reads the same rows from TFRecord "
    f"files (one byte string for a row), a shuffle buffer of {BUFFER_ROWS:,} rows, everything else left to AUTOTUNE. "
    "`streaming_split` has one consumer and a local shuffle buffer of as many rows, on a cluster of two CPUs that is "
    "up; `Ray Dataset as train=` is the same `read_parquet` given to trainwright, which streams it and shuffles in "
    "windows of 64 MiB. S3 is SeaweedFS on the same machine, so its server takes part of the two cores. tf.data needs "
    "another package for S3 and is left out there. litdata, where it is installed "
    "(0.2.76 when this was measured), reads the same rows from chunks of its own format, 64 MB, uncompressed. MosaicML "
    "Streaming could not be measured: it needs torchvision, whose build does not fit the CPU build of torch here."
)


def measure(folder: Path, *, smoke: bool) -> list[Figure]:
    table, default, large = folder / "table", folder / "default", folder / "large"
    groups, large_groups = (1, 2) if smoke else (GROUPS, LARGE_GROUPS)
    write_table(table, groups)
    write_table(default, groups, plain=False)
    write_table(large, large_groups)
    rounds = (SMOKE_ROUNDS,) * 3 if smoke else tuple(Rounds(counted=count) for count in (8, 6, 4))
    return [
        *_local(str(table), folder / "records", rounds[0]),
        *_core_times("default files", str(default), rounds[0], epochs=("first",)),
        *_core_times("large", str(large), rounds[1], epochs=("first", "later")),
        *_litdata(str(table), folder / "chunks", rounds[1]),
        *_on_s3(table, rounds[1]),
        *_on_ray(str(table), str(large), rounds[2]),
    ]


def _local(table: str, records: Path, rounds: Rounds) -> list[Figure]:
    """From the page cache."""
    loaders: dict[str, Loader] = {
        "trainwright": LightStream(path=table, batch_size=BATCH_SIZE),
        "one pyarrow thread": ArrowThread(path=table, batch_size=BATCH_SIZE),
        "DataLoader, 1 worker": FloatLoader(path=table, batch_size=BATCH_SIZE, workers=1),
        "DataLoader, 2 workers": FloatLoader(path=table, batch_size=BATCH_SIZE, workers=2),
        "tf.data": Records(folder=records, batch_size=BATCH_SIZE),
    }
    run_alone(partial(write_records, table, records))
    times = time_loaders(loaders, rounds)
    return [_core_time("page cache", times, "first"), *_walls("page cache", times)]


def _core_times(what: str, table: str, rounds: Rounds, epochs: tuple[Epoch, ...]) -> list[Figure]:
    """Another table from the page cache, against the limit alone."""
    loaders: dict[str, Loader] = {
        "trainwright": LightStream(path=table, batch_size=BATCH_SIZE),
        "one pyarrow thread": ArrowThread(path=table, batch_size=BATCH_SIZE),
    }
    times = time_loaders(loaders, rounds)
    return [_core_time(what, times, epoch) for epoch in epochs]


def _litdata(table: str, folder: Path, rounds: Rounds) -> list[Figure]:
    """Against litdata, where it is installed."""
    if not litdata_chunks.INSTALLED:
        return []
    run_alone(partial(litdata_chunks.write_chunks, table, folder))
    loaders: dict[str, Loader] = {
        "trainwright": LightStream(path=table, batch_size=BATCH_SIZE),
        "litdata, 2 workers": litdata_chunks.Chunks(folder=folder, batch_size=BATCH_SIZE, workers=2),
    }
    return _walls("page cache", time_loaders(loaders, rounds))


def _on_s3(table: Path, rounds: Rounds) -> list[Figure]:
    """From a server on this machine."""
    import pyarrow.fs as pafs

    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    from tests.support.s3_server import running

    with running() as server:
        server.make_bucket("bench")
        os.environ |= server.environment()
        pafs.copy_files(str(table), "s3://bench/table")
        assert len(files_of("s3://bench/table")[1]) == len(files_of(str(table))[1])
        loaders: dict[str, Loader] = {
            "trainwright": LightStream(path="s3://bench/table", batch_size=BATCH_SIZE),
            "one pyarrow thread": ArrowThread(path="s3://bench/table", batch_size=BATCH_SIZE),
            "DataLoader, 2 workers": FloatLoader(path="s3://bench/table", batch_size=BATCH_SIZE, workers=2),
        }
        return _walls("S3", time_loaders(loaders, rounds), limit=LIMIT)


def _on_ray(table: str, large: str, rounds: Rounds) -> list[Figure]:
    """Against Ray Data."""

    def split(path: str) -> StreamingSplit:
        return StreamingSplit(path=path, batch_size=BATCH_SIZE, buffer_rows=BUFFER_ROWS)

    loaders: dict[str, Loader] = {
        "trainwright": LightStream(path=table, batch_size=BATCH_SIZE),
        "streaming_split": split(table),
        "train=ds": RayStream(path=table, batch_size=BATCH_SIZE, cpus=2),
    }
    times = time_loaders(loaders, rounds, on_cluster=["streaming_split", "train=ds"])
    larger: dict[str, Loader] = {
        "trainwright": RayStream(path=large, batch_size=BATCH_SIZE, cpus=2),
        "streaming_split": split(large),
    }
    long = time_loaders(larger, rounds, on_cluster=larger)
    streamed = {"trainwright": times.pop("train=ds"), "streaming_split": times["streaming_split"]}
    return [
        *_walls("page cache", times),
        *_walls("page cache, Ray Dataset as train=", streamed, target=STREAM_TARGET),
        *_walls("large, Ray Dataset as train=", long, target=STREAM_TARGET),
    ]


def _core_time(where: str, times: Mapping[str, list[list[EpochTimes]]], epoch: Epoch) -> Figure:
    """The limit, for each core used."""
    number = EPOCHS.index(epoch)
    ours = [1e6 * turn[number].cpu_s / turn[number].rows for turn in times["trainwright"]]
    peers = [1e6 * turn[number].wall_s / turn[number].rows for turn in times["one pyarrow thread"]]
    what = f"{where}, {epoch} epoch, core time, against one pyarrow thread"
    return compare("data_light", what, "us/row", ours, peers, target=LIMIT)


def _walls(
    where: str, times: Mapping[str, list[list[EpochTimes]]], *, limit: float | None = None, target: float = 1.0
) -> list[Figure]:
    """Wall time of both epochs, against each peer; `limit` is the target against the pyarrow thread."""
    figures = []
    for name, peers in times.items():
        for number, epoch in enumerate(EPOCHS) if name != "trainwright" else ():
            ours = [1e6 * turn[number].wall_s / turn[number].rows for turn in times["trainwright"]]
            theirs = [1e6 * turn[number].wall_s / turn[number].rows for turn in peers]
            bound = limit if name == "one pyarrow thread" else target
            what = f"{where}, {epoch} epoch, against {name}"
            figures.append(compare("data_light", what, "us/row", ours, theirs, target=bound))
    return figures
