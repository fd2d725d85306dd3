"""The measured rows of README and docs/comparison.md, from the figures in results/.

    python benchmarks/rows.py

Writes the tables between `<!-- rows: NAME -->` and `<!-- rows end -->` again, as `make bench` does. A missed target is
named in its row.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from figures import Figure, read_sections

HERE = Path(__file__).resolve().parent
PAGES = ("README.md", "docs/comparison.md")
_TABLE = re.compile(r"(?<=<!-- rows: )(.+?) -->\n.*?(?=<!-- rows end -->)", re.DOTALL)
_KILL = "SIGKILL to next completed step"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One row: what the reader is told, and which figure of which benchmark it shows.

    Attributes:
        told: the first cell.
        benchmark: its name.
        what: the figure's name there.
        why: the reason for a missed target.
    """

    told: str
    benchmark: str
    what: str
    why: str = ""


STEP = Row(
    told="step of a 0.8 M parameter network, against plain DDP, median",
    benchmark="step_time",
    what="median step, against plain DDP",
    why="0.37 ms more Python in each step, for a network of any size",
)
PIPELINE = Row(
    told="step of a pipeline of two stages, 6.6 M parameters, 4 micro-batches, against torch's Schedule1F1B",
    benchmark="pipeline_step",
    what="median step, against torch's PipelineStage and Schedule1F1B",
)
SHARDED = Row(
    told="sharded step (ZeRO-3) of the 0.8 M parameter network, against plain FSDP2",
    benchmark="sharded_step",
    what="median step, against FSDP2",
    why="one more small reduction carries losses, stop requests and unused parameters",
)
STALL = Row(
    told="training blocked by a checkpoint of 0.33 GiB, against torch.distributed.checkpoint's `async_save`",
    benchmark="checkpoint_stall",
    what="blocked, against dcp.async_save",
)
FIRST = Row(
    told="`fit()` to the first step, against Ray Train, a Ray cluster running, first run",
    benchmark="first_step",
    what="fit() to the first step, a first run, against TorchTrainer",
)
LATER = Row(
    told="the same, a later run, whose workers are forked from a process that the first one has left",
    benchmark="first_step",
    what="fit() to the first step, a later run, against TorchTrainer",
)
SPARE = Row(
    told="SIGKILL of one of two workers to the next completed step, one warm standby, against Ray Train",
    benchmark="recovery",
    what=f"{_KILL}, one spare, against TorchTrainer",
)
NO_SPARE = Row(
    told="without a warm standby, two workers, against torchrun",
    benchmark="recovery",
    what=f"{_KILL}, no spare, against torchrun",
)
FOUR = Row(
    told="with four workers and one warm standby, against torchft, which continues with a smaller batch",
    benchmark="recovery_4",
    what=f"{_KILL}, one spare, against torchft",
)
SHRINK = Row(
    told='with four workers, none in reserve and `on_loss="shrink"`, which keeps the batch, against torchft',
    benchmark="recovery_4",
    what=f"{_KILL}, no spare, the others continue, against torchft",
)
FLOATS = Row(
    told="floats from parquet, first epoch, wall time, against DataLoader with 2 workers",
    benchmark="data_light",
    what="page cache, first epoch, against DataLoader, 2 workers",
)
IMAGES = Row(
    told="JPEG decoding on Ray Data, later epoch, against DataLoader with 2 workers",
    benchmark="data_heavy",
    what="later epoch, against DataLoader",
    why="Ray Data takes a part of the two cores",
)

TABLES: Mapping[str, Sequence[Row]] = {
    "overview": (STEP, SHARDED, PIPELINE, STALL, FIRST, LATER, SPARE, NO_SPARE, SHRINK, FLOATS, IMAGES),
    "steps": (
        STEP,
        Row(
            told="the same, wall time of whole blocks of 25 steps, each with one comparison of the replicas",
            benchmark="step_time",
            what="whole block per step, against plain DDP",
        ),
        PIPELINE,
        Row(
            told="the same against the bound: slowest stage x (m + p - 1) / m",
            benchmark="pipeline_step",
            what="median step, against the bound: slowest stage x (m + p - 1) / m, m = 4, p = 2",
        ),
        SHARDED,
    ),
    "checkpoints": (
        STALL,
        Row(told="the same against its `save`", benchmark="checkpoint_stall", what="blocked, against dcp.save"),
        Row(
            told="time until it is on the disk, SHA-256 included, against `save`, which computes no checksum",
            benchmark="checkpoint_stall",
            what="written, against dcp.save",
        ),
    ),
    "recovery": (
        FIRST,
        LATER,
        SPARE,
        Row(told="the same against torchrun", benchmark="recovery", what=f"{_KILL}, one spare, against torchrun"),
        Row(
            told="completed steps computed again after 7 kills, a checkpoint every 20 steps, against Ray Train",
            benchmark="recovery",
            what="steps done again, one spare, against TorchTrainer",
        ),
        Row(
            told="the same against torchrun",
            benchmark="recovery",
            what="steps done again, one spare, against torchrun",
        ),
        NO_SPARE,
        Row(
            told="the same against Ray Train",
            benchmark="recovery",
            what=f"{_KILL}, no spare, against TorchTrainer",
        ),
        FOUR,
        Row(
            told="the same against Ray Train (torchft's packages on the path slow it)",
            benchmark="recovery_4",
            what=f"{_KILL}, one spare, against TorchTrainer",
        ),
        SHRINK,
        Row(
            told="the same, to a step with all four workers again",
            benchmark="recovery_4",
            what="SIGKILL to a step with all workers again, no spare, the others continue, against torchft",
        ),
        Row(
            told="101 M parameters and Adam, one warm standby, against 0.6 s + 1.5 broadcasts of the state",
            benchmark="recovery_large",
            what=f"{_KILL}, one spare, against the limit",
            why="a step alone takes 0.66 s",
        ),
    ),
    "data": (
        Row(
            told="floats from parquet, shuffled, first epoch, core time, against one pyarrow thread without a shuffle",
            benchmark="data_light",
            what="page cache, first epoch, core time, against one pyarrow thread",
        ),
        Row(
            told="the same from S3 (SeaweedFS on the same machine), wall time",
            benchmark="data_light",
            what="S3, first epoch, against one pyarrow thread",
        ),
        FLOATS,
        Row(
            told="the same against tf.data with AUTOTUNE",
            benchmark="data_light",
            what="page cache, first epoch, against tf.data",
        ),
        Row(
            told="the same against litdata with 2 workers",
            benchmark="data_light",
            what="page cache, first epoch, against litdata, 2 workers",
        ),
        Row(
            told="the same against Ray Data's `streaming_split`",
            benchmark="data_light",
            what="page cache, first epoch, against streaming_split",
        ),
        Row(
            told="the same 0.2 GB as a Ray Dataset given as `train=`, first epoch with start-up, against it",
            benchmark="data_light",
            what="page cache, Ray Dataset as train=, first epoch, against streaming_split",
        ),
        Row(
            told="its later epochs, for which it is not executed again",
            benchmark="data_light",
            what="page cache, Ray Dataset as train=, later epoch, against streaming_split",
        ),
        Row(
            told="0.8 GB as a Ray Dataset given as `train=`, first epoch with start-up",
            benchmark="data_light",
            what="large, Ray Dataset as train=, first epoch, against streaming_split",
            why="trainwright reads its first block before the run",
        ),
        Row(
            told="its later epochs",
            benchmark="data_light",
            what="large, Ray Dataset as train=, later epoch, against streaming_split",
        ),
        Row(
            told="JPEG decoding on Ray Data, later epoch, against `streaming_split`",
            benchmark="data_heavy",
            what="later epoch, against streaming_split",
        ),
        IMAGES,
        Row(
            told="JPEG decoding, a Ray Dataset as `train=`, two epochs with start-up, against `streaming_split`",
            benchmark="data_heavy",
            what="whole, Ray Dataset as train=, against streaming_split",
            why="both execute the same functions on the same cores",
        ),
        Row(
            told="start of a later epoch: the wait for its first batch beyond that for any other, against 50 ms",
            benchmark="data_start",
            what="start of a later epoch, light path, against the limit",
        ),
        Row(
            told="step of the example job's network fed by the stream, against the same fed from memory",
            benchmark="data_step",
            what="demo's network, fed by the stream, against memory",
        ),
    ),
    "tensorflow": (
        Row(
            told="two workers: whole blocks of steps, against plain MultiWorkerMirroredStrategy",
            benchmark="tf_step_time",
            what="whole block per step, against plain MultiWorkerMirroredStrategy",
        ),
        Row(
            told="SIGKILL of a worker to the next completed step, against Ray Train's TensorflowTrainer",
            benchmark="tf_recovery",
            what=f"{_KILL}, against TensorflowTrainer",
        ),
        Row(
            told="floats in memory, shuffled, to tensors, against native tf.data",
            benchmark="tf_feed",
            what="stream to tensors, against native tf.data",
        ),
    ),
}


def filled(page: str, figures: Mapping[tuple[str, str], Figure]) -> str:
    """Return a page with its tables written again.

    Args:
        figures: by benchmark and name; rows without a figure are left out. Raises KeyError for an unknown table.
    """
    return _TABLE.sub(lambda found: f"{found[1]} -->\n{_table(TABLES[found[1]], figures)}\n", page)


def kept_figures() -> dict[tuple[str, str], Figure]:
    """The figures in results/, by benchmark and name."""
    names = sorted({row.benchmark for rows in TABLES.values() for row in rows})
    sections = read_sections(HERE / "results", names)
    return {(section.name, figure.what): figure for section in sections for figure in section.figures}


def write_rows() -> None:
    """Write the tables of all pages again."""
    figures = kept_figures()
    for name in PAGES:
        path = HERE.parent / name
        path.write_text(filled(path.read_text(encoding="utf-8"), figures), encoding="utf-8")


def _table(rows: Sequence[Row], figures: Mapping[tuple[str, str], Figure]) -> str:
    lines = ["| | trainwright | peer | ratio, 95% interval | benchmark |", "|---|---|---|---|---|"]
    for row in rows:
        figure = figures.get((row.benchmark, row.what))
        if figure is None:
            continue  # a peer that was not installed
        cells = _told(row, figure), _value(figure.ours, figure.unit), _value(figure.peer, figure.unit), _ratio(figure)
        lines.append(f"| {' | '.join(cells)} | `{row.benchmark}` |")
    return "\n".join(lines)


def _told(row: Row, figure: Figure) -> str:
    """`step of a network (**target 1.05 missed**: the reason)`."""
    if figure.met is not False:
        return row.told
    return f"{row.told} (**target {figure.target:.3g} missed**{': ' if row.why else ''}{row.why})"


def _value(value: float, unit: str) -> str:
    return f"{value:.0f} {unit}" if value >= 100 or unit == "steps" else f"{value:#.3g} {unit}"


def _ratio(figure: Figure) -> str:
    if figure.ratio is None or figure.pairs == 1:
        return ""
    return f"{figure.ratio.median:.3f} ({figure.ratio.low:.3f} to {figure.ratio.high:.3f})"


if __name__ == "__main__":
    write_rows()
