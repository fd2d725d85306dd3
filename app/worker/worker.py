"""The worker of one rank: it owns the engine, the data streams and the training loop. Free of Ray.

The driver's verbs are methods here (see `driver/messages.py` for who calls what, and on which thread).
"""

from __future__ import annotations

import gc
import itertools
import math
import os
import statistics
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import takewhile
from statistics import median
from typing import Any, cast

from trainwright.core.callbacks import Callbacks
from trainwright.core.data import (
    Columns,
    Feed,
    MetricSums,
    NoiseScale,
    NoiseScaleAverage,
    PeakMemory,
    PhaseTimes,
    StepReport,
    zero_weight,
)
from trainwright.core.engine import (
    CheckpointFile,
    CheckpointRef,
    CoordinatorTopologyEngine,
    DecodingEngine,
    Engine,
    IndependentEngine,
    StateSnapshot,
    StateWriter,
    TorchTrainingEngine,
)
from trainwright.core.errors import NonFiniteLoss, PeerLost, StorageError, StoreDown, headline
from trainwright.core.events import MediaLogged, Steps
from trainwright.core.job import Job
from trainwright.core.metric_states import compute_states, metric_states, with_states
from trainwright.core.plan import Plan
from trainwright.core.topology import Address, Generation, Group, Peer, Role, StalenessCounts, StateTag
from trainwright.driver.messages import (
    EvaluateRequest,
    MemoryCheckpoint,
    MemoryCopyRequest,
    MemoryCopyTaken,
    NodeMemoryFile,
    PredictRequest,
    ProbeRequest,
    ReserveRequest,
    RestorePlan,
    RunRequest,
    SegmentReport,
    SnapshotRequest,
    SnapshotTaken,
    StoredTrace,
)
from trainwright.storage.checkpoints import CheckpointReader, CheckpointWriter, read_manifest
from trainwright.storage.memory_checkpoints import (
    MemoryCheckpointReader,
    MemoryCheckpointStore,
    PeerMemory,
)
from trainwright.storage.object_store import Store, open_store
from trainwright.strategies import engine_class
from trainwright.worker.loaders import Quarantine, RankFeeds, RankStreams, StepSkipper
from trainwright.worker.step_profiler import StepProfiler
from trainwright.worker.worker_config import WorkerConfig, unpickle_job

_INTERRUPT_DEADLINE_S = 5.0
_VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"  # environment variable
_REHEARSAL = Generation(token=0, number=0)  # the epoch of a warm standby, which is its only member


class Worker:
    """One rank. Methods named after verbs run on the thread of steps; `upload` to `interrupt` and `watch` on others.

    Args:
        node: name of this node, as the driver knows it.
        peers: the memory of other nodes.
        emit: takes images and texts of callbacks.
    """

    def __init__(
        self,
        order: WorkerConfig,
        node: str = "",
        peers: PeerMemory | None = None,
        *,
        emit: Callable[[MediaLogged], object] = lambda media: None,
    ) -> None:
        self._order, self._emit = order, emit
        self._plan = order.plan
        self._engine: Engine = engine_class(order.plan)()
        store = open_store(order.storage)
        self._copies = StateCopies(store, order.run, node, peers or PeerMemory())
        self._copies.check_store()
        self._quarantine = Quarantine(store, order.run)
        self._evaluate_quarantine = Quarantine(store, order.run, "evaluate")
        self._records, self._meter = StepLog(), StepTimer()
        self._stop_requested = threading.Event()
        self._built = False
        self._probed = False  # probe steps changed the state: the next rendezvous needs a new engine
        self._rank_and_size = (-1, 0)  # rank and world size that the streams are for
        self._spare = self._rehearsed = False
        self._step_thread: int | None = None  # its ident
        self._interruption = Interruption()
        self._step = 0
        self._callbacks: Callbacks | None = None  # of a torch job, on rank 0
        self._report: StepReport | None = None  # of the last step, where the job has callbacks
        self._data: RankFeeds | None = None
        self._role: Role = "worker"
        self._skipper = StepSkipper(self._quarantine)
        self._staleness: StalenessCounts | None = None  # of the last segment of steps, if this rank reports it
        self._profiler = StepProfiler(store, order.run, order.profile)
        self._decoded = dict[int, Any]()  # a language model's cache of the tokens so far

    def rehearse(self) -> None:
        """Warm up a standby alone, on the CPU, so that it can take a rank at once; nothing is trained.

        If each rendezvous epoch needs new processes, only the framework is imported: an opened job may use it, which
        some frameworks do not allow before their group is formed.
        """
        self._spare = True
        capabilities = self._engine.capabilities
        if capabilities.reform == "new_process" or capabilities.topology != "collective":
            return
        self._rehearsed = True
        if self._plan.placement.accelerator and not os.environ.get(_VISIBLE_DEVICES):  # older Rays hide all GPUs
            os.environ.pop(_VISIBLE_DEVICES, None)
        peer = Peer(rank=0, address=self._engine.reserve("worker"))
        threads = self._plan.placement.threads
        self.form(Group(generation=_REHEARSAL, rank=0, peers=(peer,), threads=threads))
        feed = self._feeds.training.warm_feed(0)
        if not self._plan.placement.accelerator:  # a CPU could take minutes for the batch of one, or to compile for it
            self._engine.warm(feed)
        self._engine.leave()

    def reserve(self, request: ReserveRequest) -> Address:
        """Bind a port for the next rendezvous epoch; start a new engine if its plan has another layout."""
        self._interruption.enter(request.generation)
        self._profiler.drop()  # another engine may follow
        plan = request.plan or self._order.plan
        if self._probed or plan.layout != self._plan.layout:
            self._replace_engine(plan)
        if plan != self._plan:
            self._plan, self._rank_and_size = plan, (-1, 0)
        self._role = request.role
        return self._engine.reserve(request.role)

    def _replace_engine(self, plan: Plan) -> None:
        """Replace the engine and its state by a new one."""
        self._close_feeds()  # a thread that copies batches holds the engine
        with self._interruption.lock:
            self._engine.leave()
            self._engine = engine_class(plan)()
        self._built, self._probed, self._step = False, False, 0
        gc.collect()  # a model's modules and hooks hold each other

    def form(self, group: Group) -> StateTag:
        """Join the group; build model, optimizer and streams the first time."""
        self._step_thread = threading.get_ident()
        self._interruption.enter(group.generation)
        if self._rehearsed and group.accelerators and group.devices[0].startswith("cuda"):
            # CUDA reads the variable once, and the rehearsal may have started CUDA.
            group = replace(group, devices=visible_devices(group.accelerators))
        elif self._spare and group.accelerators:
            os.environ[_VISIBLE_DEVICES] = ",".join(group.accelerators)
        tag = self._engine.form(group)
        if self._rank_and_size != (group.rank, group.size):
            rehearsal = group.generation == _REHEARSAL
            fixed = rehearsal or self._plan.topology != "collective"
            self._open(group.rank, self._plan if fixed else self._plan.resized(group.size))
            self._rank_and_size = (-1, 0) if rehearsal else (group.rank, group.size)
        if not self._built:
            validation = self._feeds.evaluation if self._job.evaluate is not None else None
            row = partial(self._order.first_row, self._job)
            total_steps = self._order.total_steps or self._feeds.training.schedule.total_steps
            spec = self._job.model_spec(total_steps, row, validation, self._order.weights)
            gc.freeze()  # the collection in `leave` would take 0.2 s more to look through imports
            tag = self._engine.build(replace(spec, outputs=self._order.outputs), self._plan)
            self._built = True
            gc.enable()
        return replace(tag, report=self._report)

    @cached_property
    def _job(self) -> Job:
        """The job, which is opened only after the engine has formed its first group."""
        return unpickle_job(self._order.job)

    def _open(self, rank: int, plan: Plan) -> None:
        """Open the streams of a rank."""
        self._close_feeds()
        streams = RankStreams(
            job=self._job, order=self._order, accumulation=plan.accumulation,
            static_shapes=self._engine.capabilities.static_shapes, quarantine=self._quarantine,
            evaluate_quarantine=self._evaluate_quarantine,
        )  # fmt: skip
        self._data = RankFeeds(streams, plan.feed_of(rank), independent=plan.topology == "independent")

    @property
    def _feeds(self) -> RankFeeds:
        assert self._data is not None, "form comes first: it opens the streams"
        return self._data

    def restore(self, restore_plan: RestorePlan) -> StateTag:
        """Bring the state and the data stream to the agreed step, and warm up."""
        self._close_feeds()
        independent = self._plan.topology == "independent"
        if restore_plan.source == "join" or (independent and self._role == "worker"):
            tag = StateTag(step=restore_plan.step, pieces=frozenset())  # the other ranks have the state
        elif restore_plan.kept is not None:
            tag = self._engine.load(self._copies.memory_checkpoint(restore_plan.kept))
        elif restore_plan.checkpoint is None:
            tag = self._engine.transfer(restore_plan.moves)
        else:
            tag = self.load(restore_plan.checkpoint, weights_only=False)
        passing = {passed.step - 1: passed.why for passed in restore_plan.passing}
        blank = self._skipper.begin(passing, self._feeds.training, restore_plan.step)
        if not independent or self._role == "worker":
            self._engine.warm(blank)
        if not independent:
            prefetcher = None
            if self._engine.capabilities.torch_training:
                prefetcher = cast(TorchTrainingEngine, self._engine).prefetcher()
            self._feeds.start(restore_plan.step, self._plan.ahead, self._skipper.skipped_steps, prefetcher)
        self._step = restore_plan.step
        self._records.begin(self._interruption.current.number, restore_plan.step)
        self._meter.begin()
        self._begin_callbacks(restore_plan)
        return replace(tag, step=restore_plan.step)

    def _begin_callbacks(self, restore_plan: RestorePlan) -> None:
        """Make the callbacks of a torch job in a process that becomes rank 0, and call those of a recovery."""
        make, (rank, _) = self._job.tensorflow.callbacks, self._rank_and_size
        if make is None or rank != 0 or not self._engine.capabilities.torch_training:
            self._callbacks = None
            return
        if self._callbacks is None:
            steps = self._feeds.training.schedule.steps_per_epoch
            self._callbacks = Callbacks(
                make, lambda: cast(TorchTrainingEngine, self._engine).whole_model(), steps, self._emit
            )
        self._callbacks.after_recovery(restore_plan.step, restore_plan.report)

    def load(self, checkpoint: CheckpointRef, *, weights_only: bool = True) -> StateTag:
        """Load a checkpoint. The engine can then evaluate and predict without a training step."""
        return self._engine.load(self._copies.checkpoint(checkpoint, weights_only=weights_only))

    def probe(self, request: ProbeRequest) -> float:
        """Return the median seconds of a step: all ranks take the same number on one batch, after an untimed one."""
        self._close_feeds()  # no data is read ahead while steps are timed
        self._probed = True
        feed, start_s = self._feeds.training.full_feed(0, self._skipper.skipped_steps), time.perf_counter()
        times_s = list[float]()
        over = blank = False
        while not over:
            step_start_s = time.perf_counter()
            over = len(times_s) >= request.steps or (len(times_s) > 0 and step_start_s - start_s > request.seconds)
            try:
                over = self._engine.train_step(replace(feed, step=len(times_s), stop_requested=over)).stop_requested
            except NonFiniteLoss:  # many steps on one batch may diverge, on all ranks at once
                if len(times_s) >= 2:
                    break
                if self._job.recovery.on_nonfinite == "raise" or blank:
                    raise
                feed, blank, over = zero_weight(feed), True, False  # as the run would take it
                continue
            times_s.append(time.perf_counter() - step_start_s)
        return statistics.median(times_s[1:])

    def run(self, request: RunRequest) -> SegmentReport:
        """Take these steps, or fewer if a stop request has reached every rank."""
        steps, stopped, finished = request.steps, False, False
        if self._callbacks is not None:
            for ref in request.checkpoints:
                self._callbacks.after_checkpoint(ref.step, self._copies.uri_of(ref))
        working = self._plan.topology == "independent" and self._role == "worker"
        if working:
            self._work(steps.start)
        elif self._plan.topology == "independent":
            stopped = self._serve(steps.stop)
        elif self._plan.topology == "coordinator" and self._role != "chief":
            cast(CoordinatorTopologyEngine, self._engine).follow()
        else:
            stopped, finished = self._step_together(steps.stop, request.metrics)
            self._engine.verify()  # checkpoints and evaluations follow: all ranks must hold the same state
        self._stop_requested.clear()
        reached = steps.stop if working else self._step  # other workers may have taken the last steps
        over = stopped or finished or reached >= self._feeds.training.schedule.total_steps
        traced, untraced = self._profiler.report(reached, over=over)
        return SegmentReport(
            step=self._step, finished=finished,
            announces=self._callbacks is not None and self._callbacks.announces,
            skipped=self._quarantine.count + self._evaluate_quarantine.count, passed=len(self._skipper.nonfinite_steps),
            overflowed=self._skipper.overflowed, prefetch=self._feeds.prefetch,
            own_s=self._records.own_s, phases=self._meter.phases(last=over), sampled=self._meter.sampled,
            noise=self._meter.noise, staleness=self._staleness,
            memory=self.peak_memory, traced=traced, untraced=untraced,
        )  # fmt: skip

    def _serve(self, end_step: int) -> bool:
        """Serve workers that step independently. The first server reports steps, and stops after one of them."""
        engine, start_step, stopped = cast(IndependentEngine, self._engine), self._step, False
        start_s = time.perf_counter()
        for report in engine.serve(end_step, lambda: self._stop_requested.is_set() and self._step > start_step):
            self._step, stopped, now_s = report.step, report.stop_requested, time.perf_counter()
            samples = self._feeds.training.schedule.size(report.step - 1)
            self._records.add(report, samples=samples, step_s=now_s - start_s, wait_s=math.nan)
            start_s = now_s
        self._staleness = engine.staleness()
        return stopped

    def _work(self, first_step: int) -> None:
        """Step independently: one leased unit after the other, until the steps from `first_step` on are over."""
        units = self._feeds.units
        assert units is not None, "this rank steps independently"
        engine = cast(IndependentEngine, self._engine)
        while (unit := engine.lease(first_step)) is not None:
            start_s = time.perf_counter()
            for feed in units.feeds(unit):
                wait_s = time.perf_counter() - start_s
                with self._profiler.step(feed.step + 1, self._engine.capabilities.tracer):
                    fed_s = time.perf_counter()  # a profiler may have started first, for seconds
                    report = self._skipper.step(self._engine, self._job, feed)
                start_s = time.perf_counter()
                self._meter.add(report, step_s=wait_s + start_s - fed_s, wait_s=wait_s)
            self._step = max(self._step, unit.step + unit.steps)

    def _step_together(self, end_step: int, metrics: Mapping[str, float] | None) -> tuple[bool, bool]:
        """Take steps; return whether a stop request came, and whether a callback ended the training.

        Args:
            metrics: of the evaluation before the first step.
        """
        stopped = finished = False
        while self._step < end_step and not (stopped or finished):
            self._interruption.check()
            with self._profiler.step(self._step + 1, self._engine.capabilities.tracer):
                start_s = time.perf_counter()  # a profiler may have started first, for seconds
                with self._profiler.span("data wait"):
                    feed = self._feeds.next(end_step)
                fed_s = time.perf_counter()
                feed = replace(feed, stop_requested=True) if self._stop_requested.is_set() else feed
                feed, metrics = replace(feed, metrics=metrics) if metrics is not None else feed, None
                report = self._skipper.step(self._engine, self._job, feed)
                end_s = time.perf_counter()
            self._step, stopped, finished = report.step, report.stop_requested, report.finished
            times = {"step_s": end_s - start_s, "wait_s": fed_s - start_s}
            self._records.add(report, samples=feed.rows, **times)
            self._meter.add(report, **times)
            if self._job.tensorflow.callbacks is not None:
                self._report = report
            if self._callbacks is not None:
                self._callbacks.after_step(report)
        return stopped, finished

    def evaluate(self, request: EvaluateRequest) -> MetricSums:
        """Return metric sums over this rank's share of the evaluation set, or over the requested one.

        Given the sums of all ranks, return them with the values of the metrics that have state; callbacks get them too.
        """
        if request.evaluated is not None:
            computed = compute_states(request.evaluated)
            if self._callbacks is not None:
                self._callbacks.after_evaluation(request.step, computed.means())
            return computed
        if request.feeding is None:
            return replace(self._sums(self._feeds.evaluation()), awaited=self._callbacks is not None)
        with self._feeds.evaluation(request.feeding) as feeds:
            return self._sums(feeds)

    def evaluate_some(self, steps: range) -> MetricSums:
        """Return metric sums over some batches of the evaluation set; a later call for the next ones reads ahead."""
        sums = self._sums(itertools.islice(self._feeds.evaluation_from(steps.start), len(steps)))
        self._feeds.evaluated_until(steps.stop)
        return sums

    def _sums(self, feeds: Iterable[Feed]) -> MetricSums:
        states, sums = metric_states(self._job.metrics), MetricSums()
        for feed in feeds:
            self._interruption.check()
            sums += self._engine.evaluate_step(feed, states)
        return with_states(sums, states)

    def predict(self, request: PredictRequest) -> tuple[Columns, ...]:
        """Return the model's outputs for each feed; empty on ranks without outputs."""
        return predicted(self._engine, request, self._decoded)

    def snapshot(self, request: SnapshotRequest) -> SnapshotTaken:
        """Copy the state to host memory; steps may go on at once."""
        return self._copies.take(self._engine, request)

    def upload(self, path: str) -> tuple[CheckpointFile, ...]:
        """Write the files of the last snapshot to a checkpoint's folder."""
        return self._copies.upload(path)

    def keep(self, request: MemoryCopyRequest) -> MemoryCopyTaken:
        """Write the files of the last snapshot to the memory of this node, and of its neighbour."""
        return self._copies.keep(request)

    def trace(self, rank: int) -> StoredTrace:
        """Write the trace of the recorded steps, which this process took as `rank`, to the store."""
        return self._profiler.save(rank)

    def stop(self) -> None:
        """Request a stop; the next reduction carries it, so that all ranks leave after the same step."""
        self._stop_requested.set()

    def interrupt(self, generation: Generation, explain: bool) -> str:
        """Have steps and evaluations of a rendezvous epoch raise PeerLost before the next batch.

        Collectives raise it now and later, if the engine can interrupt them.

        Returns:
            with `explain`, the stack traces of all threads before the interrupt; otherwise an empty text.
        """
        stacks = thread_stacks(self._step_thread) if explain else ""
        self._interruption.end(generation, self._interrupt)
        return stacks

    def _interrupt(self) -> None:
        self._engine.interrupt(_INTERRUPT_DEADLINE_S)

    @property
    def peak_memory(self) -> PeakMemory | None:
        """The most memory of its device used so far; None on a CPU."""
        return self._engine.peak_memory()

    @property
    def held(self) -> tuple[Plan | None, int]:
        """The plan of the state in this process, and the completed steps; None and 0 without a state."""
        return (self._plan, self._step) if self._step and not self._probed else (None, 0)

    def renew(self, order: WorkerConfig, token: int) -> None:
        """Obey another driver: leave the group of the previous one, and open the streams again."""
        self._order, self._rank_and_size = order, (-1, 0)
        self._profiler.choose(order.profile)
        self._interruption.end(Generation(token=token, number=0), self._interrupt)

    def leave(self, request: MemoryCopyRequest | None = None) -> MemoryCopyTaken | None:
        """End the group; the process and its state live on.

        Args:
            request: copy the state into memory too, because the process will end.

        Returns:
            the copy; None if none was requested, or there is no state.
        """
        self._engine.leave()
        _, step = self.held
        return self._copies.copy_just_in_time(self._engine, request) if request is not None and step else None

    def close(self) -> None:
        """End the group and the reading of data, in a process that outlives the run."""
        self._close_feeds()
        self._engine.leave()

    @property
    def newest(self) -> int:
        """The newest completed step that `watch` can report."""
        return self._records.newest

    def watch(self, step: int, timeout_s: float) -> Steps:
        """Return the steps completed after `step`; wait up to `timeout_s` for the first one."""
        return self._records.since(step, timeout_s)

    def _close_feeds(self) -> None:
        if self._data is not None:
            self._data.close()


def predicted(engine: Engine, request: PredictRequest, cache: dict[int, Any]) -> tuple[Columns, ...]:
    """Return the model's outputs for each feed of a request.

    Args:
        cache: the model's cache of the tokens of earlier requests.

    Returns:
        the outputs; empty if the engine or the model cannot decode, or the cache has no tokens of earlier requests.
    """
    if not request.decoding:
        return tuple(request.chosen(engine.predict_step(feed)) for feed in request.feeds)
    if request.decoding == "first":
        cache.clear()
    if not engine.capabilities.decodes or (request.decoding == "next" and not cache):
        return ()
    outputs = [cast(DecodingEngine, engine).decode_step(feed, cache) for feed in request.feeds]
    return tuple(request.chosen(columns) for columns in outputs if columns is not None)


def visible_devices(accelerators: Iterable[str]) -> tuple[str, ...]:
    """Return torch's names of GPUs, given Ray's ids of them, in a process that sees others too."""
    visible = os.environ.get(_VISIBLE_DEVICES, "").split(",")
    return tuple(f"cuda:{visible.index(gpu) if gpu in visible else gpu}" for gpu in accelerators)


# --- Interrupts -------------------------------------------------------------------------------------------------------


class Interruption:
    """Applies interrupts to the rendezvous epoch that they are for, and to no other.

    Calls and interrupts run on different threads: an interrupt may come before its call has started, or after the next
    epoch has started.

    Attributes:
        lock: held while an engine is interrupted; hold it to replace the engine.
        current: the epoch that this rank takes part in, or took part in last.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.current = self._over = Generation(token=-1, number=0)

    def enter(self, generation: Generation) -> None:
        """Take part in a rendezvous epoch from now on. Raises PeerLost if it is over already."""
        with self.lock:
            self.current = generation
            if generation <= self._over:
                raise PeerLost(
                    f"rendezvous epoch {generation} ended before this rank joined it",
                    remedy="look at the rank that failed first",
                )

    def check(self) -> None:
        """Raise PeerLost if the epoch that this rank takes part in is over. Never waits for the lock."""
        if self.current <= self._over:
            raise PeerLost(f"rendezvous epoch {self.current} has ended", remedy="look at the rank that failed first")

    def end(self, generation: Generation, interrupt: Callable[[], object]) -> None:
        """End a rendezvous epoch and those before it: call `interrupt` if this rank takes part in one."""
        with self.lock:
            self._over = max(self._over, generation)
            if self.current <= generation:
                interrupt()


# --- Stack traces for the report of a hang ----------------------------------------------------------------------------


_MAX_STACK_CHARACTERS = 16_000


def thread_stacks(first_ident: int | None = None) -> str:
    """Return the Python stacks of all threads but the caller's, cut to 16,000 characters, the most recent call last.

    Args:
        first_ident: ident of the thread whose stack comes first; the main thread's is next.
    """
    main = threading.main_thread().ident
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = {ident: frame for ident, frame in sys._current_frames().items() if ident != threading.get_ident()}
    parts = [
        f"thread {names.get(ident, ident)}{' (steps)' if ident == first_ident else ''}:\n"
        + "".join(traceback.format_stack(frames[ident]))
        for ident in sorted(frames, key=lambda ident: (ident != first_ident, ident != main, ident))
    ]
    return "\n".join(parts)[:_MAX_STACK_CHARACTERS]


# --- Completed steps --------------------------------------------------------------------------------------------------


_MAX_RECORDS = 20_000
MEDIAN_STEPS = 20  # steps in the median of this rank's own part


@dataclass(frozen=True, kw_only=True)
class _Record:
    report: StepReport
    samples: int
    step_s: float
    wait_s: float


class StepLog:
    """A rank's completed steps, until the driver polls them; bounded. For the thread of steps and that of `watch`."""

    def __init__(self) -> None:
        self._news = threading.Condition()
        self._records: deque[_Record] = deque(maxlen=_MAX_RECORDS)
        self._generation = 0
        self._own_s: deque[float] = deque(maxlen=MEDIAN_STEPS)

    def begin(self, generation: int, step: int) -> None:
        """Start a rendezvous epoch at `step`; steps after it will be done again."""
        with self._news:
            self._generation = generation
            self._own_s.clear()
            while self._records and self._records[-1].report.step > step:
                self._records.pop()

    def add(self, report: StepReport, *, samples: int, step_s: float, wait_s: float) -> None:
        """Record one step."""
        with self._news:
            self._records.append(_Record(report=report, samples=samples, step_s=step_s, wait_s=wait_s))
            self._news.notify_all()
        if report.own_s is not None:
            self._own_s.append(wait_s + report.own_s)

    @property
    def newest(self) -> int:
        """The last recorded step; 0 before there is one."""
        with self._news:
            return self._records[-1].report.step if self._records else 0

    @property
    def own_s(self) -> float | None:
        """Median seconds of this rank's own part of its last steps; None for too few steps."""
        return median(self._own_s) if len(self._own_s) == MEDIAN_STEPS else None

    def since(self, step: int, timeout_s: float) -> Steps:
        """Return the steps after `step`; wait up to `timeout_s` for the first one."""
        with self._news:
            self._news.wait_for(lambda: bool(self._records) and self._records[-1].report.step > step, timeout_s)
            records = [*takewhile(lambda item: item.report.step > step, reversed(self._records))][::-1]
            generation = self._generation
        logged = [item.report.logged.means() for item in records]
        return Steps(
            generation=generation,
            step=[item.report.step for item in records],
            loss=[item.report.loss for item in records],
            learning_rate=[item.report.learning_rate for item in records],
            gradient_norm=[item.report.gradient_norm for item in records],
            samples=[item.samples for item in records],
            step_s=[item.step_s for item in records],
            wait_s=[item.wait_s for item in records],
            logged={
                name: [means.get(name, math.nan) for means in logged]
                for name in dict.fromkeys(name for means in logged for name in means)
            },
        )


# --- Step times and gradient noise ------------------------------------------------------------------------------------


_MAX_TIMED_STEPS = 1_000  # steps in a median, at most
_MIN_TIMED_STEPS = 20


class StepTimer:
    """Phase times of one rendezvous epoch, and the noise scale of the whole process. For one thread."""

    def __init__(self) -> None:
        self._average = NoiseScaleAverage()
        self._steps: deque[tuple[Mapping[str, float], float, float]] = deque(
            maxlen=_MAX_TIMED_STEPS
        )  # phases, step_s, wait_s

    def begin(self) -> None:
        """Start a rendezvous epoch."""
        self._steps.clear()

    def add(self, report: StepReport, *, step_s: float, wait_s: float) -> None:
        """Note one step, which waited `wait_s` for data."""
        if report.scatter is not None:
            self._average.add(report.scatter)
        if report.phases is not None:
            self._steps.append((report.phases, step_s, wait_s))

    def phases(self, *, last: bool) -> PhaseTimes | None:
        """Return medians since the last call; None for too few steps, unless they are the `last` of the run."""
        if len(self._steps) < (1 if last else _MIN_TIMED_STEPS):
            return None
        names = self._steps[-1][0].keys()
        alike = [row for row in self._steps if row[0].keys() == names]
        medians = {name: median(phases[name] for phases, _, _ in alike) for name in names}
        medians["other"] = median(max(step_s - wait_s - sum(phases.values()), 0.0) for phases, step_s, wait_s in alike)
        self._steps.clear()
        return PhaseTimes(steps=len(alike), data_s=median(wait_s for _, _, wait_s in alike), medians=medians)

    @property
    def sampled(self) -> int:
        """Steps whose gradients were sampled."""
        return self._average.count

    @property
    def noise(self) -> NoiseScale | None:
        """The gradient noise scale; None while it is not reliable."""
        return self._average.noise()


# --- Copies of a rank's state: to the store, to the node's memory, and back -------------------------------------------


_Save = Callable[[StateSnapshot, StateWriter], None]  # of the engine that made the copy; another may replace it


class StateCopies:
    """Snapshots of the state, until they are written, and readers of checkpoints.

    Args:
        node: of this process, as the driver names it.
        peers: the memory of other nodes.
    """

    def __init__(self, store: Store, run: str, node: str, peers: PeerMemory) -> None:
        self._store, self._run, self._node, self._peers = store, run, node, peers
        self._memory = MemoryCheckpointStore(store.uri_of(run))
        self._snapshots: dict[str, tuple[StateSnapshot, _Save]] = {}  # by the verb that will write it

    def check_store(self) -> None:
        """Raise if this node has no access to the store; an outage may pass before an upload."""
        with suppress(StoreDown):
            self._store.exists(f"{self._run}/log/HINT")

    def uri_of(self, ref: CheckpointRef) -> str:
        """Return the URI of a checkpoint's folder."""
        return self._store.uri_of(f"{self._run}/{ref.path}")

    def take(self, engine: Engine, request: SnapshotRequest) -> SnapshotTaken:
        """Copy the state to host memory; steps may continue at once."""
        start_s = time.perf_counter()
        if "upload" in request.verbs:
            engine.check_unsaved()
        copy = engine.snapshot()
        self._snapshots.update(dict.fromkeys(request.verbs, (copy, engine.save)))
        return SnapshotTaken(step=request.step, size_bytes=copy.size_bytes, blocked_s=time.perf_counter() - start_s)

    def upload(self, path: str) -> tuple[CheckpointFile, ...]:
        """Write the files of the last snapshot to a checkpoint's folder."""
        writer = CheckpointWriter(self._store, self._run, path)
        copy, save = self._snapshots.pop("upload")
        save(copy, writer)
        return writer.entries

    def keep(self, request: MemoryCopyRequest) -> MemoryCopyTaken:
        """Write the files of the last snapshot to the node's memory, where they outlive this process.

        Then send them to the node's neighbour, if it has one, in whose memory they outlive this node.
        """
        copy, save = self._snapshots.pop("keep")
        writer, step = self._memory.write(request.version, copy.size_bytes, request.hold), copy.step
        save(copy, writer)
        del copy, save  # its memory is for the next snapshot
        nodes, trouble = [self._node], ""
        neighbour = dict(request.neighbours).get(self._node)
        if neighbour is not None:
            try:
                self._memory.send(request.version, writer.entries, request.hold, partial(self._peers.send, neighbour))
                nodes.append(neighbour)
            except (StorageError, OSError) as error:
                trouble = f"{neighbour}: {error}"
        files = (NodeMemoryFile(node=node, file=file) for node in nodes for file in writer.entries)
        return MemoryCopyTaken(files=tuple(files), step=step, trouble=trouble)

    def copy_just_in_time(self, engine: Engine, request: MemoryCopyRequest) -> MemoryCopyTaken:
        """Copy the state to the node's memory, where it outlives this process; the answer says so if that fails."""
        try:
            copy = engine.snapshot()
            writer = self._memory.write(request.version, copy.size_bytes, request.hold)
            engine.save(copy, writer)
            files = (NodeMemoryFile(node=self._node, file=file) for file in writer.entries)
            return MemoryCopyTaken(files=tuple(files), step=copy.step)
        except PeerLost:  # a step ended in the middle of its update
            return MemoryCopyTaken(files=())
        except Exception as error:  # of any kind: the first failure is the one to report
            return MemoryCopyTaken(files=(), trouble=headline(error))

    def checkpoint(self, ref: CheckpointRef, *, weights_only: bool) -> CheckpointReader:
        """Return a reader of a checkpoint."""
        manifest = read_manifest(self._store, self._run, ref)
        return CheckpointReader(self._store, self._run, ref, manifest, weights_only=weights_only)

    def memory_checkpoint(self, checkpoint: MemoryCheckpoint) -> MemoryCheckpointReader:
        """Return a reader of an in-memory checkpoint."""
        return MemoryCheckpointReader(self._memory, checkpoint, self._node, self._peers.fetch)
