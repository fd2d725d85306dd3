"""The Ray Data pipeline of a heavy data set: read tasks that follow the order, then one stage for each heavy transform.

Each execution of Ray Data would open a slow transform again, and lose it with each process that it ends. So from the
first such transform on, stages run on actors of the delivery actor; see `trainwright.datasets.ray_data.actor_pools`.

A block holds one piece of a share (`piece_blocks`), so that the consumer gets the arrays that it would have computed
itself. Errors of the user's functions travel the same way to the consumer that asked for the piece, and so do the
seconds of each stage.
"""

from __future__ import annotations

import itertools
import logging
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import ray
from ray.data import ActorPoolStrategy, DataContext, Datasource, ReadTask, TaskPoolStrategy, read_datasource
from ray.data._internal.execution.backpressure_policy import (
    ENABLED_BACKPRESSURE_POLICIES,
    ENABLED_BACKPRESSURE_POLICIES_CONFIG_KEY,
)
from ray.data._internal.execution.backpressure_policy.resource_budget_backpressure_policy import (
    ResourceBudgetBackpressurePolicy,
)
from ray.data.block import BlockMetadata

from trainwright.core.errors import DataError, TrainwrightError
from trainwright.core.pickling import loads
from trainwright.datasets.data_source import Arrays, Index, RowAccess, select_columns
from trainwright.datasets.dataset import Dataset
from trainwright.datasets.loading.batch_loader import make_reader
from trainwright.datasets.ops.row_transforms import BatchMap, Counters, StatefulFunction, apply, function_name
from trainwright.datasets.ray_data.piece_blocks import Piece, SharePart
from trainwright.datasets.sample_order import StepSchedule, apply_by_pass

PART_ROWS = 256  # fewer cost more scheduling: of images, 128 take a fifth longer
READING = "reading"  # as a stage: with the light transforms before the first heavy one
MAX_TASKS = 1024  # read tasks of one Ray Data execution: their list is made at once
_QUEUED = 2  # tasks of a stage that wait for a CPU, so that none is idle between two of them


@dataclass(frozen=True, kw_only=True)
class PipelineSpec:
    """All that a process needs to compute any piece of a run."""

    dataset: Dataset  # with its transforms
    index: Index  # of the data set
    columns: tuple[str, ...] | None  # to keep; None keeps all
    schedule: StepSchedule  # of the steps
    length: int  # steps of a chunk

    @cached_property
    def reader(self) -> RowAccess:
        """This process's reader; it keeps what it decoded."""
        return make_reader(self.dataset, self.index, self.columns, self.schedule.order)

    @property
    def stages(self) -> list[tuple[int, int]]:
        """Ranges of transforms: the light ones that are applied on reading, then each heavy one with those after it."""
        transforms = self.dataset.transforms
        heavy = [number for number, transform in enumerate(transforms) if transform.heavy]
        return list(zip([0, *heavy], [*heavy, len(transforms)], strict=True))

    @property
    def on_actors(self) -> range:
        """Numbers of the stages that run on actors: the first that is slow to open, and all after it."""
        count = len(self.stages)
        slow = (number for number in range(1, count) if self.heavy(number).stateful)
        return range(next(slow, count), count)

    @property
    def read_by_one(self) -> bool:
        """Whether one process reads: before heavy stages, so that what is decoded is decoded once, or in its order."""
        return len(self.stages) > 1 or self.index.in_order

    def readers(self, free: Mapping[str, float]) -> int:
        """Processes that read: one, or one a CPU."""
        return 1 if self.read_by_one else max(int(free["CPU"] + 1e-6), 1)

    def heavy(self, stage: int) -> BatchMap:
        """The heavy transform that a stage, not the first one, begins with."""
        step = self.dataset.transforms[self.stages[stage][0]]
        assert isinstance(step, BatchMap), "only functions of batches are heavy"
        return step

    def pieces(self, step: int, total: int) -> Iterator[SharePart]:
        """Yield labels from the chunk with `step` to the end of the run, in the order in which they are needed."""
        while step < self.schedule.total_steps:
            chunk = self.schedule.chunk(step, self.length)
            for rank, rows in enumerate(self.schedule.share_rows(chunk, total).tolist()):
                parts = -(-rows // PART_ROWS)
                yield from (SharePart(chunk.start, rank, total, part, parts) for part in range(parts))
            step = chunk.stop

    def read(self, label: SharePart) -> Piece:
        """Read a piece's rows, in order, and apply the transforms before the first heavy one."""
        share = self.schedule.share(self.schedule.chunk(label.step, self.length), label.rank, label.total)
        part = slice(label.part * PART_ROWS, (label.part + 1) * PART_ROWS)
        samples, passes = share.samples[part], share.passes[part]
        piece, begun = Piece(label=label, samples=samples, passes=passes), time.perf_counter()
        try:
            columns = apply_by_pass(passes, lambda mask, number: self.reader.gather(samples[mask], number))
        except TrainwrightError as error:
            return replace(piece, error=error)
        result = self.transform(replace(piece, columns=columns), 0)
        return replace(result, spent=((READING, time.perf_counter() - begun),))

    def transform(self, piece: Piece, stage: int) -> Piece:
        """Apply the transforms of a stage; the last stage keeps only the requested columns."""
        first, last = self.stages[stage]
        transforms = self.dataset.transforms[first:last]

        def transformed(mask: npt.NDArray[np.bool_], number: int) -> Arrays:
            counters = Counters(seed=self.schedule.order.seed, epoch=number)
            columns = {name: array[mask] for name, array in piece.columns.items()}  # functions may change them in place
            return apply(transforms, columns, piece.samples[mask], counters, first)

        try:
            columns = apply_by_pass(piece.passes, transformed)
            if stage == len(self.stages) - 1:
                columns = {name: columns[name] for name in select_columns(columns, self.columns, repr(self.dataset))}
        except TrainwrightError as error:
            return replace(piece, columns={}, error=error)
        return replace(piece, columns=columns)


class ReadGate(NamedTuple):
    """Delays the reading of chunks that are not needed yet, which bounds the memory of a pipeline."""

    feeder: Any  # handle of the actor, with `admit(source, pipeline, step) -> bool`
    pipeline: int  # number of the pipeline
    source: int = 0  # number of the data set

    def pass_(self, step: int) -> None:
        """Wait until pieces of the chunk at `step` are needed. Raises RuntimeError if the pipeline was replaced."""
        if not ray.get(self.feeder.admit.remote(self.source, self.pipeline, step)):
            raise RuntimeError(f"pipeline {self.pipeline} was replaced by another")


class _PlannedDatasource(Datasource):
    """A read task for each piece."""

    def __init__(self, recipe: ray.ObjectRef[bytes], pieces: Sequence[SharePart], gate: ReadGate) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # Ray Data is typed in part
        self._recipe, self._pieces, self._gate = recipe, pieces, gate

    def estimate_inmemory_data_size(self) -> int | None:
        """Unknown."""
        return None

    def get_read_tasks(
        self, parallelism: int, per_task_row_limit: int | None = None, data_context: DataContext | None = None
    ) -> list[ReadTask]:
        """Return one task for each piece, in their order, for any parallelism."""
        metadata = BlockMetadata(num_rows=1, size_bytes=None, input_files=None, exec_stats=None)
        return [ReadTask(_reading(self._recipe, piece, self._gate), metadata) for piece in self._pieces]


def run_pipeline(
    recipe: ray.ObjectRef[bytes], pieces: Iterable[SharePart], free: Mapping[str, float], gate: ReadGate
) -> Iterator[ray.ObjectRef[pa.Table]]:
    """Run the pipeline over pieces, up to the stages on actors; yield finished blocks in any order.

    Pieces are taken from the iterable as executions need them: a run has too many to list before its first block.

    Ray Data's own reservation of resources is off: it leaves a CPU idle from the end of a task to the next iteration of
    its loop, a third of the time with tasks of 100 ms. The gate bounds memory, and the sizes of the pools bound CPUs.
    """
    stages, pending = _load_spec(recipe), iter(pieces)
    readers = stages.readers(free)
    context = DataContext.get_current()
    context.enable_progress_bars = context.print_on_execution_start = False
    _disable_reservation(context)
    logging.getLogger("ray.data").setLevel(logging.WARNING)
    while part := list(itertools.islice(pending, MAX_TASKS)):
        data = read_datasource(
            _PlannedDatasource(recipe, part, gate),
            override_num_blocks=len(part),
            compute=ActorPoolStrategy(size=readers),
            num_cpus=0 if readers == 1 else 1,  # there are several readers only if CPUs are free
        )
        for number in range(1, stages.on_actors.start):
            step = stages.heavy(number)
            data = data.map_batches(
                _stage(recipe, number),
                batch_size=1,
                batch_format="pyarrow",
                num_cpus=step.cpus,
                num_gpus=step.gpus,
                compute=TaskPoolStrategy(size=max_concurrency(step, free) + _QUEUED),
            )
        for bundle in data.iter_internal_ref_bundles():
            yield from bundle.block_refs


def max_concurrency(step: BatchMap, free: Mapping[str, float]) -> int:
    """Return how many calls of a heavy transform fit into the free resources."""
    return int(min((free[name] + 1e-6) / need for name, need in step.needs.items() if need))


def run_stage(recipe: ray.ObjectRef[bytes], block: pa.Table, stage: int) -> pa.Table:
    """Apply a stage to the piece of a block."""
    piece, begun = Piece.of(block), time.perf_counter()
    if piece.error:
        return block
    result = _load_spec(recipe).transform(piece, stage)
    name = function_name(_load_spec(recipe).heavy(stage).function)
    return replace(result, spent=(*piece.spent, (name, time.perf_counter() - begun))).to_block()


def open_stage(recipe: ray.ObjectRef[bytes], stage: int) -> Any:
    """Open the function of a stage in this process, and return it."""
    function = _load_spec(recipe).heavy(stage).function
    if isinstance(function, StatefulFunction):
        function.open()
    return function


@dataclass(frozen=True, kw_only=True)
class DeliveryReply:
    """References of the requested blocks, in order, or the error."""

    blocks: tuple[Any, ...] = ()
    error: TrainwrightError | None = None
    run: int = -1  # of a stream, number of the execution that the blocks are of


def as_our_error(error: Exception, what: str, where: str = "") -> TrainwrightError:
    """Return a TrainwrightError unchanged, and any other error as a DataError that `what` failed."""
    if isinstance(error, TrainwrightError):
        return error
    text, detail = f"{what} failed: {type(error).__name__}: {error}", "".join(traceback.format_exception(error))
    return DataError(text, where=where, remedy="see the error above", detail=detail)


@lru_cache(maxsize=4)
def _load_spec(recipe: ray.ObjectRef[bytes]) -> PipelineSpec:
    spec: PipelineSpec = loads(ray.get(recipe))
    return spec


def _reading(recipe: ray.ObjectRef[bytes], piece: SharePart, gate: ReadGate) -> Callable[[], list[pa.Table]]:
    def read() -> list[pa.Table]:
        gate.pass_(piece.step)
        return [_load_spec(recipe).read(piece).to_block()]

    return read


def _stage(recipe: ray.ObjectRef[bytes], number: int) -> Callable[[pa.Table], pa.Table]:
    def transform(block: pa.Table) -> pa.Table:
        return run_stage(recipe, block, number)

    return transform


# --- Private symbols of Ray Data, each named here and nowhere else (`tests/unit/test_compat.py`) ----------------------


def _disable_reservation(context: DataContext) -> None:
    """Turn off the reservation of resources, and the policy that depends on it.

    Without a reservation that policy limits nothing, and before Ray 2.56 it fails.
    """
    context.op_resource_reservation_enabled = False
    policies = [policy for policy in ENABLED_BACKPRESSURE_POLICIES if policy is not ResourceBudgetBackpressurePolicy]
    context.set_config(ENABLED_BACKPRESSURE_POLICIES_CONFIG_KEY, policies)


def allow_blocking_get() -> None:
    """Suppress the warning when threads of an asynchronous actor wait: Ray takes them for the event loop."""
    from ray._private import worker

    worker.blocking_get_inside_async_warned = True
