"""Commands about data: `inspect` shows a data set, `convert` writes it as parquet files of a good size."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trainwright.cli.options import AsJson, terminal_console
from trainwright.core import formatting

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from trainwright.datasets.dataset import Dataset
    from trainwright.datasets.dataset_tools import Inspection

data = typer.Typer(
    name="data", help="Inspect data, and convert it to parquet.", no_args_is_help=True, rich_markup_mode=None,
)  # fmt: skip

_SHOWN_CLASSES = 12

_Format = Annotated[
    str | None, typer.Option("--format", help="Format of the data: parquet, csv, ...; by default from the suffix.")
]


@data.command()
def inspect(
    path: Annotated[str, typer.Argument(metavar="PATH-or-FILE.py", help="Data, or a job file that names data.")],
    as_json: AsJson = False,
    rows: Annotated[int, typer.Option(min=0, help="Number of rows to show.")] = 3,
    kind: _Format = None,
) -> None:
    """Show columns, counts, sizes, samples and skew of data, and warn about what slows training down."""
    from trainwright.datasets.dataset_tools import inspect as look

    found = {name: look(dataset, rows, **how) for name, (dataset, how) in _load_datasets(path, kind).items()}
    if as_json:
        listed = [as_data(inspection, name) for name, inspection in found.items()]
        print(json.dumps(listed[0] if len(listed) == 1 else listed, indent=2))
        return
    console = terminal_console()
    for name, inspection in found.items():
        console.print(as_table(inspection, name))


@data.command()
def convert(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="A file, folder, glob or URI.")],
    out: Annotated[str, typer.Argument(metavar="OUT", help="A folder or URI that does not exist yet.")],
    rows_per_group: Annotated[
        int | None, typer.Option(min=1, help="Rows of a row group; by default as many as take 12 MiB.")
    ] = None,
    shard_mb: Annotated[float, typer.Option(min=0.001, help="Approximate size of a file in MB.")] = 128,
    kind: _Format = None,
) -> None:
    """Write SOURCE as parquet with files and row groups of a good size. OUT appears when it is complete."""
    from rich.console import Console

    from trainwright.datasets.dataset_tools import convert as write
    from trainwright.datasets.dataset_tools import open_dataset
    from trainwright.datasets.formats.parquet_writer import require_empty_target

    require_empty_target(out)
    dataset = open_dataset(source, kind)
    with progress(Console(stderr=True)) as report:
        written = write(dataset, out, rows_per_group=rows_per_group, shard_bytes=round(shard_mb * 1e6), report=report)
    print(
        f"wrote {formatting.count(written.rows, 'row')} in {formatting.count(written.files, 'file')} of "
        f"{formatting.count(written.groups, 'row group')}, {formatting.size(written.size_bytes)}, to {written.folder}\n"
        f"read them with tw.datasets.parquet({written.folder!r})"
    )


def _load_datasets(path: str, kind: str | None) -> dict[str, tuple[Dataset, dict[str, Any]]]:
    """Return the data set at a path, or those of a job file, by name, with how the job reads them."""
    if path.endswith(".py"):
        from trainwright.planning.job_file import load_job

        job = load_job(path)
        how = {"batch_size": job.batch_size, "window": job.data.shuffle_window, "shuffled": job.data.shuffle}
        delivery = {"delivery": job.data.delivery}
        found: dict[str, tuple[Dataset, dict[str, Any]]] = {"train": (job.train, how | delivery)}
        return found if job.evaluate is None else {**found, "evaluate": (job.evaluate, {"shuffled": False} | delivery)}
    from trainwright.datasets.dataset_tools import open_dataset

    return {"": (open_dataset(path, kind), {})}


def as_data(found: Inspection, name: str = "") -> dict[str, Any]:
    """Return an inspection as data for JSON: sizes in bytes, null for unknown values."""
    return {
        **({"name": name} if name else {}),
        "source": found.source,
        "rows": found.rows,
        "row_bytes": found.row_bytes,
        "delivery": found.delivery,
        "columns": [
            {"name": column, "dtype": str(field.dtype), "shape": list(field.shape)}
            for column, field in found.columns.items()
        ],
        "row_groups": {
            "count": found.groups,
            "rows": asdict(found.group_rows),
            "size_bytes": asdict(found.group_bytes),
            "imbalance": found.imbalance,
        },
        "files": None if found.files is None else asdict(found.files),
        "samples": [dict(sample) for sample in found.samples],
        "classes": {column: {str(value): rows for value, rows in counts.items()} for column, counts in
                    found.classes.items()},
        "counted_rows": found.counted_rows,
        "shuffle": None if found.shuffle is None else asdict(found.shuffle),
        "warnings": list(found.warnings),
    }  # fmt: skip


def as_table(found: Inspection, name: str = "") -> RenderableType:
    """Return an inspection as a table for the terminal."""
    from rich.console import Group
    from rich.padding import Padding
    from rich.text import Text

    parts: list[RenderableType] = [
        Text.assemble((f"{name}  " if name else "", "bold"), (found.source, "bold green")),
        Padding(_summary_table(found), (1, 0, 0, 2)),
        Padding(_column_table(found), (1, 0, 0, 2)),
    ]
    lines = [Text(line) for line in _class_lines(found)]
    lines += [Text(f"warning: {line}", "yellow") for line in found.warnings]
    return Group(*parts, Padding(Group(*lines), (1, 0, 1, 2)))


def _summary_table(found: Inspection) -> RenderableType:
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    sizes, rows = found.group_bytes, found.group_rows
    table.add_row("rows", f"{found.rows:,}, {formatting.size(found.row_bytes)} each when decoded")
    table.add_row("delivery", "{}: {}".format(*found.delivery))
    table.add_row(
        "row groups",
        f"{found.groups:,} of {rows.least:,.0f} to {rows.most:,.0f} rows, median {rows.median:,.0f} "
        f"({formatting.size(sizes.least)} to {formatting.size(sizes.most)}, median {formatting.size(sizes.median)}); "
        f"the largest is {found.imbalance:.2f} times the mean",
    )
    if found.files is not None:
        table.add_row("files", f"{found.files.count:,}, {formatting.size(found.files.size_bytes)}")
    if found.shuffle is not None:
        table.add_row(
            "shuffle",
            f"spreads stored neighbours {found.shuffle.scatter:.2f} times as far as a perfect permutation; batches are "
            f"{found.shuffle.clumping:.2f} times as uneven over the storage as by chance",
        )
    return table


def _column_table(found: Inspection) -> RenderableType:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for head in ("column", "dtype", "shape", *(f"row {row}" for row in range(len(found.samples)))):
        table.add_column(head, overflow="fold")
    for column, field in found.columns.items():
        values = [Text(str(sample[column])) for sample in found.samples]
        table.add_row(Text(column), Text(str(field.dtype)), str(list(field.shape)), *values)
    return table


def _class_lines(found: Inspection) -> Iterator[str]:
    over = "" if found.counted_rows >= found.rows else f" (in {found.counted_rows:,} rows)"
    for column, counts in found.classes.items():
        shown = ", ".join(f"{value}: {rows:,}" for value, rows in list(counts.items())[:_SHOWN_CLASSES])
        more = len(counts) - _SHOWN_CLASSES
        yield f"{column}{over}: {shown}" + (f", and {more} more" if more > 0 else "")


@contextmanager
def progress(console: Console) -> Iterator[Callable[[int, int], None]]:
    """Yield a function of (rows, total) that shows the progress of a conversion."""
    from trainwright.reporting.progress_bar import RowProgress

    with ExitStack() as stack:
        shown: list[RowProgress] = []  # one, from the first call on, which knows the number of rows

        def show(rows: int, total: int) -> None:
            if not shown:
                shown.append(stack.enter_context(RowProgress(total, 0, console)))
            shown[0].add(rows - shown[0].done)

        yield show
