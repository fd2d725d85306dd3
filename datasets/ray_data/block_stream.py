"""One pass over a Ray Dataset as a stream of blocks, and the actor that delivers such streams to the workers of a run.

Ray Data executes the data set once in each pass, in order, and holds it back where nobody takes its blocks. The actor
numbers the rows over all passes, keeps the blocks of a bounded window, and starts the pass again for a row that comes
before the window. Workers fetch the blocks that they need from the object store.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import pyarrow as pa
import ray
from ray.exceptions import ObjectLostError, RayError, RayTaskError

from trainwright.core.data import least_resources
from trainwright.core.errors import DataError, HangError, ResourceError, TrainwrightError, UserCodeError, user_code
from trainwright.core.pickling import loads
from trainwright.datasets.data_source import (
    Arrays,
    Index,
    Rows,
    require_same_fields,
    schema_of,
    select_columns,
)
from trainwright.datasets.formats.python_objects import arrow_array, hash_values
from trainwright.datasets.loading.sequential_rows import take_rows
from trainwright.datasets.ray_data.delivery_pipeline import DeliveryReply, allow_blocking_get, as_our_error
from trainwright.datasets.ray_data.ray_fetcher import DEADLINE_S, SLACK_S, WAITING, fetch_from_actor

# Of blocks after the furthest row that was asked for, and of blocks before it: bytes, at most and at least, and the
# part of the object store between these. Slower ranks ask for rows of the shuffle window of the quickest one.
_AHEAD_BYTES, _LEAST_AHEAD_BYTES, _AHEAD_SHARE = 256 << 20, 32 << 20, 0.1
_BEHIND_BYTES, _LEAST_BEHIND_BYTES, _BEHIND_SHARE = 512 << 20, 192 << 20, 0.2
_CLOSE_S = 10.0
_SAMPLED_ROWS = 64  # rows that are compared


class Block(NamedTuple):
    """A block of a Ray Dataset."""

    rows: int
    size_bytes: int
    reference: Any  # to the Arrow or pandas block in the object store
    first: int = 0  # of a stream, number of its first row, over all passes


@dataclass(frozen=True, kw_only=True)
class StreamSpec:
    """A streamed data set that any process can execute."""

    make: bytes  # the Dataset, or a function of the epoch that returns one, pickled
    rows: int  # of a pass
    passes: int  # of the run, at most
    exact: bool  # whether a pass must end after that many rows; otherwise later rows are ignored
    first: str  # digest of the first rows of the first pass, which each execution must have; empty for any
    name: str
    counted: tuple[Block, ...] = ()  # stored blocks of a pass that was executed before the run
    counted_passes: int = 1  # passes that use these blocks

    def blocks(self, epoch: int, free: Mapping[str, float] | None = None) -> Iterator[Block]:
        """Execute a pass, and yield its non-empty blocks in order.

        Args:
            free: CPUs and GPUs that Ray Data may use; by default all free ones.

        Raises:
            UserCodeError, DataError: a function of the user or a source failed, or the pass has another length.
        """
        first, begin = 0, epoch * self.rows
        counted: Iterable[Block] = self.counted if epoch < self.counted_passes else ()
        blocks = counted or execute(open_dataset(loads(self.make), epoch, self.name), self.name, free)
        digest = "" if counted or epoch else self.first
        for block in blocks:
            if digest and not first and hash_values([first_rows(ray.get(block.reference), self.name)]) != digest:
                raise DataError(
                    f"the data set gives other rows among its first {_SAMPLED_ROWS} each time it is executed",
                    where=self.name,
                    remedy="seed its shuffle and what else is random (a function of the epoch may give each another "
                    "one), or pass replayable=False: then a recovered run may count some rows twice and others never",
                )
            if first + block.rows > self.rows and self.exact:
                raise self._length_error(f"gives more than {self.rows} rows", epoch)
            rows = min(block.rows, self.rows - first)
            yield block._replace(first=begin + first, rows=rows)
            first += rows
            if first == self.rows and not self.exact:
                return
        if first < self.rows:
            raise self._length_error(f"ended after {first} of {self.rows} rows", epoch)

    def _length_error(self, what: str, epoch: int) -> DataError:
        return DataError(
            f"the Ray Dataset {what}",
            where=f"{self.name}, epoch {epoch}",
            remedy="make each execution give the same rows (seed all randomness), or pass rows= for a shorter pass",
        )


def open_dataset(make: Any, epoch: int, where: str) -> Any:
    """Return the Ray Dataset of an epoch. Raises UserCodeError, DataError."""
    dataset = make
    if not is_ray_dataset(dataset):
        with user_code("the function given to from_ray", "see the error above", where):
            dataset = make(epoch)
    if not is_ray_dataset(dataset):
        raise DataError(f"a {type(dataset).__name__} is no Ray Dataset", where=where, remedy="give a ray.data.Dataset")
    return dataset


def is_ray_dataset(value: Any) -> bool:
    """Return whether `value` is a `ray.data.Dataset`, without importing Ray Data."""
    return hasattr(value, "iter_internal_ref_bundles")


def execute(dataset: Any, where: str, free: Mapping[str, float] | None = None) -> Generator[Block, None, None]:
    """Execute a Ray Dataset in order, and yield each non-empty block."""
    try:
        with _settings(dataset, free):
            for bundle in dataset.iter_internal_ref_bundles():
                for reference, metadata in zip(bundle.block_refs, bundle.metadata, strict=True):
                    rows = metadata.num_rows if metadata.num_rows is not None else len(block_table(ray.get(reference)))
                    if rows:
                        yield Block(rows, metadata.size_bytes or 0, reference)
    except RayTaskError as error:
        cause = error.cause
        if isinstance(cause, TrainwrightError):
            raise cause from error
        text = f"a task of the Ray Dataset raised {type(cause).__name__}: {str(cause).partition(chr(10))[0]}"
        raise UserCodeError(text, where=where, remedy="see the error above", detail=str(error)) from error
    except RayError as error:
        text = f"the Ray Dataset failed: {type(error).__name__}"
        remedy = "see the error above"
        if isinstance(error, ObjectLostError):
            remedy = "read from files, or give from_ray a cache=: blocks in memory end with the process that made them"
        raise DataError(text, where=where, remedy=remedy, detail=str(error)) from error


@contextlib.contextmanager
def _settings(dataset: Any, free: Mapping[str, float] | None) -> Iterator[None]:
    """Configure a Ray Dataset to execute in order and without output, with these CPUs and GPUs."""
    from ray.data import ExecutionResources

    context, options, log = dataset.context, dataset.context.execution_options, logging.getLogger("ray.data")
    level = log.level
    log.setLevel(logging.CRITICAL)  # errors are raised
    before = context.enable_progress_bars, context.print_on_execution_start, context.raise_original_map_exception
    options_before = options.preserve_order, options.resource_limits
    context.enable_progress_bars = context.print_on_execution_start = False
    context.raise_original_map_exception = True
    options.preserve_order = True
    if free is not None:
        options.resource_limits = ExecutionResources(cpu=free["CPU"], gpu=free["GPU"])
    try:
        yield
    finally:
        context.enable_progress_bars, context.print_on_execution_start, context.raise_original_map_exception = before
        options.preserve_order, options.resource_limits = options_before
        log.setLevel(level)


def block_table(block: Any) -> pa.Table:
    """Return a block as an Arrow table."""
    from ray.data.block import BlockAccessor

    return BlockAccessor.for_block(block).to_arrow()


def first_rows(block: Any, where: str) -> Arrays:
    """Return the first rows of a block, which identify an execution."""
    table = block_table(block).slice(0, _SAMPLED_ROWS)
    return block_arrays(table, table.column_names, f"{where}, first block")


def block_arrays(block: Any, columns: Sequence[str], where: str) -> Arrays:
    """Return columns of a block as arrays (rows, *shape). Raises DataError for a missing column and for nulls."""
    table = block_table(block)
    select_columns(dict.fromkeys(table.column_names), columns, where)
    return {name: arrow_array(table.column(name), f"{where}, column {name!r}") for name in columns}


# --- The actor --------------------------------------------------------------------------------------------------------


class _StreamActor:
    """Class of the actor: a window for each streamed data set, which its number identifies.

    Asynchronous, so that any number of consumers may wait.

    Args:
        free: CPUs and GPUs that Ray Data may use.
    """

    def __init__(self, specs: Sequence[StreamSpec], free: Mapping[str, float]) -> None:
        allow_blocking_get()
        resources: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
        share_bytes = resources.get("object_store_memory", math.inf) / len(specs)
        self._windows = [_Window(spec, free, share_bytes) for spec in specs]

    async def blocks(self, source: int, low: int, high: int, deadline_s: float, lost: int) -> DeliveryReply:
        """See `_Window.blocks`."""
        return await self._windows[source].blocks(low, high, deadline_s, lost)

    async def close(self) -> None:
        """End all executions."""
        for window in self._windows:
            window.stop()


class _Window:
    """The blocks of one stream in memory. Only the event loop changes it.

    Args:
        store_bytes: of the object store, of which the window may use a part.
    """

    def __init__(self, spec: StreamSpec, free: Mapping[str, float], store_bytes: float = math.inf) -> None:
        self._spec, self._free = spec, free
        self._most_ahead = min(_AHEAD_BYTES, max(_AHEAD_SHARE * store_bytes, _LEAST_AHEAD_BYTES))
        self._most_behind = min(_BEHIND_BYTES, max(_BEHIND_SHARE * store_bytes, _LEAST_BEHIND_BYTES))
        self._kept = deque[Block]()
        self._run = 0  # number of the current execution
        self._running = False
        self._begin = self._next = 0  # the first row kept, and the row after the last
        self._low = self._high = 0  # the furthest rows that were requested
        self._error: TrainwrightError | None = None
        self._waits = 0  # consumers that wait for rows of this execution
        self._news = asyncio.Event()

    async def blocks(self, low: int, high: int, deadline_s: float, lost: int) -> DeliveryReply:
        """Return the blocks with the rows from `low` up to `high`, numbered over all passes.

        Args:
            deadline_s: to wait for them.
            lost: number of an execution whose blocks are lost, so that the data set is executed again; -1 for none.
        """
        end_s = time.monotonic() + deadline_s
        if lost == self._run:  # else another consumer has reported it
            self._forget_counted()
            self.stop()
        try:
            while True:
                if not self._covers(low):
                    if self._waits:  # consumers of the current execution come first
                        await self._wait(end_s)
                    else:
                        self._start(low)
                    continue
                self._note_request(low, high)
                if self._next >= high:
                    result = tuple(each for each in self._kept if each.first < high and each.first + each.rows > low)
                    return DeliveryReply(run=self._run, blocks=result)
                if self._error is not None:
                    self.stop()
                    return DeliveryReply(error=self._error)
                self._waits += 1
                try:
                    await self._wait(end_s)
                finally:
                    self._waits -= 1
        except TimeoutError:
            resources = ", ".join(f"{number:g} {name}s" for name, number in self._free.items())
            error = HangError(
                f"Ray Data with {resources} delivered no rows within {deadline_s:g} s",
                where=f"{self._spec.name}, rows {low} to {high}",
                remedy="leave more CPUs free for Ray Data (fewer workers), or make the data set quicker",
            )
            return DeliveryReply(error=error)
        finally:
            self._notify()  # consumers that wait for another pass may start it now

    def stop(self) -> None:
        """End the execution at its next block."""
        self._run, self._running = self._run + 1, False
        self._kept.clear()
        self._notify()

    def _covers(self, low: int) -> bool:
        """Whether the row is kept, or is in the rest of the current pass or in the next one."""
        return self._running and self._begin <= low < (self._next // self._spec.rows + 2) * self._spec.rows

    def _note_request(self, low: int, high: int) -> None:
        """Record the requested rows, and drop blocks that no consumer will request again."""
        self._low, self._high = max(self._low, low), max(self._high, high)
        self._trim()
        self._notify()

    def _forget_counted(self) -> None:
        if self._spec.counted:
            self._spec = replace(self._spec, counted=())

    def _trim(self) -> None:
        behind = sum(block.size_bytes for block in self._kept if block.first + block.rows <= self._low)
        while behind > self._most_behind:
            dropped = self._kept.popleft()
            behind -= dropped.size_bytes
            self._begin = dropped.first + dropped.rows

    def _start(self, low: int) -> None:
        """Execute the pass with this row, and the later passes."""
        self.stop()
        self._running, self._error = True, None
        self._begin = self._next = low - low % self._spec.rows
        self._low = self._high = low
        arguments = self._run, low, asyncio.get_running_loop()
        threading.Thread(target=self._pump, args=arguments, name="trainwright-stream", daemon=True).start()

    def _pump(self, run: int, low: int, loop: asyncio.AbstractEventLoop) -> None:
        """Take blocks from Ray Data until the execution is replaced. Runs in a thread."""

        def call(coroutine: Any) -> bool:
            return bool(asyncio.run_coroutine_threadsafe(coroutine, loop).result())

        try:
            for epoch in range(low // self._spec.rows, self._spec.passes):
                # The next pass, which must be executed, then starts at once.
                at_once = epoch == 0 and self._spec.counted_passes == 1 and bool(self._spec.counted)
                for block in self._spec.blocks(epoch, self._free):
                    if not call(self._arrived(run, block, at_once)):
                        return
        except Exception as raised:
            call(self._failed(run, as_our_error(raised, "the Ray Dataset", self._spec.name)))

    async def _arrived(self, run: int, block: Block, at_once: bool) -> bool:
        """Keep a block once there is space, or at once if it is stored already.

        Returns:
            False if the execution was replaced.
        """
        while not at_once and run == self._run and self._ahead_bytes() >= self._most_ahead:
            await self._news.wait()
        if run != self._run:
            return False
        self._kept.append(block)
        self._next = block.first + block.rows
        if self._next >= self._spec.rows * self._spec.counted_passes:
            self._forget_counted()
        self._trim()
        self._notify()
        return True

    async def _failed(self, run: int, error: TrainwrightError) -> None:
        if run == self._run:
            self._error = error
            self._notify()

    def _ahead_bytes(self) -> int:
        return sum(block.size_bytes for block in self._kept if block.first >= self._high)

    async def _wait(self, end_s: float) -> None:
        await asyncio.wait_for(self._news.wait(), end_s - time.monotonic())

    def _notify(self) -> None:
        self._news.set()
        self._news = asyncio.Event()


# --- Readers ----------------------------------------------------------------------------------------------------------


class StreamRows:
    """Rows of a stream by their number in a pass, from the actor. For any thread; picklable.

    Args:
        actor: a `_StreamActor`.
        source: number of the stream there.
        index: of the data set.
        columns: to return.
        name: of the data set, for errors.
        deadline_s: to wait for rows.
    """

    def __init__(
        self, actor: Any, source: int, index: Index, columns: Sequence[str], name: str, deadline_s: float
    ) -> None:
        self._actor, self._source, self._deadline_s = actor, source, deadline_s
        self._index, self._name = index, name
        self._schema = {column: index.schema[column] for column in columns}
        self._kept: dict[int, tuple[int, Arrays]] = {}  # by the first row of a block, the row after its last
        self._lock = threading.Lock()

    def gather(self, rows: Rows, epoch: int = 0) -> Arrays:
        """Return columns of the rows of a pass, in the requested order: fresh arrays (rows, *shape).

        Raises:
            UserCodeError, DataError: an error of the data set or its functions.
            HangError: no rows were delivered within the deadline.
        """
        places = rows + epoch * self._index.rows
        with self._lock:
            if len(rows) and self._schema:
                self._load(int(places.min()), int(places.max()) + 1)
            return take_rows([(first, self._kept[first][1]) for first in sorted(self._kept)], places, self._schema)

    def close(self) -> None:
        """End the actor with its executions, for all data sets and readers."""
        with contextlib.suppress(RayError):  # it is killed in any case
            ray.get(self._actor.close.remote(), timeout=_CLOSE_S)
        ray.kill(self._actor)

    def _load(self, low: int, high: int) -> None:
        """Keep only the blocks with these rows, and fetch missing or lost ones."""
        blocks = {first: block for first, block in self._kept.items() if first < high and block[0] > low}
        run = -1

        def attempt(lost: bool) -> dict[int, tuple[int, Arrays]]:
            nonlocal run
            request = self._actor.blocks.remote(self._source, low, high, self._deadline_s, run if lost else -1)
            reply: DeliveryReply = ray.get(request, timeout=self._deadline_s + SLACK_S)
            if reply.error is not None:
                raise reply.error
            run = reply.run
            return self._arrays(reply.blocks, blocks)

        if not _covers_rows(blocks, low, high):
            blocks = fetch_from_actor(attempt, self._deadline_s, f"rows {low} to {high}")
        self._kept = blocks

    def _arrays(self, blocks: Sequence[Block], prev: Mapping[int, tuple[int, Arrays]]) -> dict[int, tuple[int, Arrays]]:
        result = {block.first: prev.get(block.first, (0, {})) for block in blocks}
        new = [block for block in blocks if result[block.first][0] != block.first + block.rows]
        contents = ray.get([block.reference for block in new], timeout=DEADLINE_S)
        for block, content in zip(new, contents, strict=True):
            arrays = stream_arrays(block, content, self._index, self._schema, self._name)
            result[block.first] = block.first + block.rows, arrays
        return result

    def __reduce__(self) -> tuple[Any, ...]:
        return StreamRows, (
            self._actor, self._source, self._index, list(self._schema), self._name, self._deadline_s,
        )  # fmt: skip


def stream_arrays(block: Block, content: Any, index: Index, columns: Iterable[str], name: str) -> Arrays:
    """Return the columns of a block of a stream. Raises DataError if they differ from the index."""
    epoch, first = divmod(block.first, index.rows)
    where = f"{name}, epoch {epoch}, block of rows {first} to {first + block.rows - 1}"
    arrays = block_arrays(content, list(columns), where)
    require_same_fields(schema_of(arrays), {name: index.schema[name] for name in arrays}, "the first block", where)
    return arrays


def _covers_rows(blocks: Mapping[int, tuple[int, Arrays]], low: int, high: int) -> bool:
    """Return whether blocks have all rows from `low` up to `high`."""
    for first in sorted(blocks):
        if first > low:
            return False
        low = blocks[first][0]
    return low >= high


def start_streams(
    datasets: Sequence[tuple[Any, Index, int]],
    columns: Sequence[str] | None,
    free: Mapping[str, float],
    least_s: float = 0.0,
) -> list[StreamRows]:
    """Start the actor of a run's streamed data sets; return the reader of each for `BatchLoader`.

    Args:
        datasets: `Dataset` of a Ray Dataset, with its index, and the passes of the run.
        columns: that the run needs; None for all.
        free: CPUs and GPUs that Ray Data may use.
        least_s: shortest deadline of a consumer that waits for rows.

    Raises:
        ResourceError: the data sets need more than `free`.
    """
    _require_resources(datasets, free)
    kind: Any = ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1)(_StreamActor)
    actor = kind.options(max_concurrency=WAITING).remote(
        [data.source.spec(index, passes) for data, index, passes in datasets], dict(free)
    )
    deadline_s, readers = max(least_s, DEADLINE_S), []
    for number, (data, index, _) in enumerate(datasets):
        names = data.source_columns(index, columns)
        readers.append(StreamRows(actor, number, index, names, repr(data), deadline_s))
    return readers


def _require_resources(datasets: Sequence[tuple[Any, Index, int]], free: Mapping[str, float]) -> None:
    for name, room in free.items():
        need = least_resources([data.source.needs for data, _, _ in datasets], name)
        if need > room + 1e-6:
            names = " and ".join(dict.fromkeys(repr(data) for data, _, _ in datasets))
            raise ResourceError(
                f"{names} needs {need:g} {name}s for its actors and its largest task, and {room:g} are left for Ray "
                "Data",
                where="from_ray",
                remedy=f"give its functions fewer {name}s (num_{name.lower()}s= of map_batches, fewer actors), or set "
                "fewer workers",
            )


# --- Private symbols of Ray Data, each named here and nowhere else (`tests/unit/test_compat.py`) ----------------------


def resource_needs(dataset: Any) -> dict[str, tuple[float, float]]:
    """Return CPUs and GPUs by name: the need of all actors of a Ray Dataset, and of its largest task."""
    from ray.data import ActorPoolStrategy

    actors, task = {"CPU": 0.0, "GPU": 0.0}, {"CPU": 1.0, "GPU": 0.0}
    for operator in _operators(dataset):
        arguments, pool = getattr(operator, "ray_remote_args", None) or {}, getattr(operator, "compute", None)
        cpus, gpus = arguments.get("num_cpus"), float(arguments.get("num_gpus") or 0.0)
        for name, need in (("CPU", float((not gpus) if cpus is None else cpus)), ("GPU", gpus)):
            if isinstance(pool, ActorPoolStrategy):
                actors[name] += pool.min_size * need
            else:
                task[name] = max(task[name], need)
    return {name: (actors[name], task[name]) for name in task}


def known_rows(dataset: Any) -> int | None:
    """Return the rows of a Ray Dataset if file metadata or less gives them; None if it must be executed."""
    rows: int | None = dataset._meta_count()
    if rows is None and is_plain_read(dataset):
        with _settings(dataset, None):
            rows = dataset.count()
    return rows


def is_plain_read(dataset: Any) -> bool:
    """Return whether a Ray Dataset only reads, with data sources of Ray Data and in a fixed order.

    A user's data source or function may give other rows in each pass, and shuffled files another order.
    """
    return all(map(_is_plain, _operators(dataset)))


def _is_plain(operator: Any) -> bool:
    source = getattr(operator, "datasource", None)
    shuffle = getattr(operator, "shuffle_config_factory", lambda: None)()
    user_functions = [getattr(source, name, None) for name in ("_block_udf", "_shuffle")] + [
        getattr(operator, "block_udf", None)
    ]
    reads_by_ray = source is None or type(source).__module__.startswith("ray.")
    return type(operator).__name__ in _READS and reads_by_ray and shuffle is None and not any(user_functions)


_READS = frozenset({"Read", "ListFiles", "ReadFiles"})  # names of Ray Data's operators


def _operators(dataset: Any) -> Iterator[Any]:
    waiting = [dataset._logical_plan.dag]
    while waiting:
        operator = waiting.pop()
        waiting += operator.input_dependencies
        yield operator


def whole_dataset(value: Any) -> Any:
    """Return the Ray Dataset of a shard from `ray.train.get_dataset_shard`, and other values unchanged.

    Raises DataError if Ray Train has ended the actor that splits the data set.
    """
    from ray.data import DataIterator

    if not isinstance(value, DataIterator):
        return value
    coordinator = getattr(value, "_coord_actor", None)  # of a data set that is split among Ray Train's workers
    try:
        return _base_dataset(value) if coordinator is None else ray.get(coordinator.__ray_call__.remote(_base_dataset))
    except (RayError, AttributeError) as error:
        raise DataError(
            f"Ray Train does not give the data set of its shard: {error}",
            where="train=",
            remedy="give the Ray Dataset itself to the job",
        ) from error


def _base_dataset(holder: Any) -> Any:
    return holder._base_dataset
