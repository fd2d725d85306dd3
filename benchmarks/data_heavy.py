"""The heavy path: JPEG images decoded and resized on Ray Data, against streaming_split and DataLoader."""

from __future__ import annotations

from pathlib import Path

from figures import Figure, compare
from images import SIDE, SMALL, shrink, write_images
from loader_processes import EpochTimes, Loader, time_loaders
from peers.ray_data import StreamingSplit
from peers.torch_loader import ImageLoader
from processes import SMOKE_ROUNDS, Rounds
from rank_streams import HeavyStream, RayStream

IMAGES, FILES, BATCH_SIZE, CPUS = 4096, 16, 64, 2
NOTE = (
    f"{IMAGES:,} JPEG images of {SIDE} x {SIDE} pixels in {FILES} parquet files, decoded and resized to {SMALL} x "
    f"{SMALL} by Pillow; batches of {BATCH_SIZE}, shuffled, to one consumer that does nothing with them. Milliseconds "
    f"a row, over two epochs, from the opening of the data to the last batch, start-up included. trainwright and "
    "`streaming_split` run the same function by map_batches with one CPU for each call, on the same cluster of "
    f"{CPUS} CPUs that is up; `streaming_split` reads the folder as {FILES} blocks, so that both CPUs have work, and "
    "shuffles in a local buffer of 1,024 rows. `Ray Dataset as train=` is the same data set of Ray Data, given to "
    "trainwright, which streams it. DataLoader decodes row by row in as many workers as there are CPUs, "
    "and collates; the encoded images are in memory. `later epoch` is the second one alone."
)


def measure(folder: Path, *, smoke: bool) -> list[Figure]:
    path = str(folder / "images")
    images, files, rounds = (128, 2, SMOKE_ROUNDS) if smoke else (IMAGES, FILES, Rounds(counted=4))
    write_images(Path(path), images, files)
    loaders: dict[str, Loader] = {
        "trainwright": HeavyStream(path=path, batch_size=BATCH_SIZE, function=shrink, cpus=CPUS),
        "streaming_split": StreamingSplit(
            path=path, batch_size=BATCH_SIZE, buffer_rows=1024, function=shrink, blocks=files
        ),
        "train=ds": RayStream(path=path, batch_size=BATCH_SIZE, cpus=CPUS, function=shrink, blocks=files),
        "DataLoader": ImageLoader(path=path, batch_size=BATCH_SIZE, workers=CPUS),
    }
    times = time_loaders(loaders, rounds, on_cluster=loaders.keys() - {"DataLoader"})
    ours = times.pop("trainwright")
    streamed = times.pop("train=ds")
    targets = {"streaming_split": 1 / 3, "DataLoader": 1.0}
    return [
        compare("data_heavy", f"{what}, against {name}", "ms/row", first(ours), first(peers), target=targets[name])
        for name, peers in times.items()
        for what, first in (("whole", _whole), ("later epoch", _later))
    ] + [
        compare("data_heavy", f"{what}, Ray Dataset as train=, against streaming_split", "ms/row", first(streamed),
                first(times["streaming_split"]), target=0.9)
        for what, first in (("whole", _whole), ("later epoch", _later))
    ]  # fmt: skip


def _whole(turns: list[list[EpochTimes]]) -> list[float]:
    return [1e3 * sum(one.wall_s for one in turn) / sum(one.rows for one in turn) for turn in turns]


def _later(turns: list[list[EpochTimes]]) -> list[float]:
    return [1e3 * turn[-1].wall_s / turn[-1].rows for turn in turns]
