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
_VISIBLE = "CUDA_VISIBLE_DEVICES"  # environment variable
_REHEARSAL = Generation(token=0, number=0)  # of a spare, alone


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
        self._tried = False  # probe steps changed the state: the next rendezvous needs a new engine
        self._rank_and_size = (-1, 0)  # rank and world size that the streams are for
        self._spare = self._rehearsed = False
        self._stepping: int | None = None  # the thread of steps
        self._interruption = Interruption()
        self._step = 0
        self._callbacks: Callbacks | None = None  # of a torch job, on rank 0
        self._report: StepReport | None = None  # of the last step, where the job has callbacks
        self._data: RankFeeds | None = None
        self._role: Role = "worker"
        self._passing = StepSkipper(self._quarantine)
        self._staleness: StalenessCounts | None = None  # of the last segment of steps, if this rank reports it
        self._profiler = StepProfiler(store, order.run, order.profile)
        self._decoded = dict[int, Any]()  # what a language model keeps of the tokens so far

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
        if self._plan.placement.accelerator and not os.environ.get(_VISIBLE):  # older Rays hide all GPUs
            os.environ.pop(_VISIBLE, None)
        peer = Peer(rank=0, address=self._engine.reserve("worker"))
        threads = self._plan.placement.threads
        self.form(Group(generation=_REHEARSAL, rank=0, peers=(peer,), threads=threads))
        feed = self._feeds.training.warm_feed(0)
        if not self._plan.placement.accelerator:  # a CPU could take minutes for the batch of one, or to compile for it
            self._engine.warm(feed)
        self._engine.leave()

    def reserve(self, wanted: ReserveRequest) -> Address:
        """Bind a port for the next rendezvous epoch; start a new engine if its plan has another layout."""
        self._interruption.enter(wanted.generation)
        self._profiler.drop()  # another engine may follow
        plan = wanted.plan or self._order.plan
        if self._tried or plan.layout != self._plan.layout:
            self._replace_engine(plan)
        if plan != self._plan:
            self._plan, self._rank_and_size = plan, (-1, 0)
        self._role = wanted.role
        return self._engine.reserve(wanted.role)

    def _replace_engine(self, plan: Plan) -> None:
        """Replace the engine, with all that it holds, by a new one."""
        self._close_feeds()  # a thread that copies batches holds the engine
        with self._interruption.lock:
            self._engine.leave()
            self._engine = engine_class(plan)()
        self._built, self._tried, self._step = False, False, 0
        gc.collect()  # a model's modules and hooks hold each other

    def form(self, group: Group) -> StateTag:
        """Join the group; build model, optimizer and streams the first time."""
        self._stepping = threading.get_ident()
        self._interruption.enter(group.generation)
        if self._rehearsed and group.accelerators and group.devices[0].startswith("cuda"):
            # CUDA reads the variable once, which the job may have made it do in the rehearsal.
            group = replace(group, devices=visible_devices(group.accelerators))
        elif self._spare and group.accelerators:
            os.environ[_VISIBLE] = ",".join(group.accelerators)
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
        self._data = RankFeeds(streams, plan.feed_of(rank), alone=plan.topology == "independent")

    @property
    def _feeds(self) -> RankFeeds:
        assert self._data is not None, "form comes first: it opens the streams"
        return self._data

    def restore(self, restore_plan: RestorePlan) -> StateTag:
        """Bring the state and the data stream to the agreed step, and warm up."""
        self._close_feeds()
        alone = self._plan.topology == "independent"
        if restore_plan.source == "join" or (alone and self._role == "worker"):
            tag = StateTag(step=restore_plan.step, pieces=frozenset())  # the others have it
        elif restore_plan.kept is not None:
            tag = self._engine.load(self._copies.memory_checkpoint(restore_plan.kept))
        elif restore_plan.checkpoint is None:
            tag = self._engine.transfer(restore_plan.moves)
        else:
            tag = self.load(restore_plan.checkpoint, weights_only=False)
        passing = {passed.step - 1: passed.why for passed in restore_plan.passing}
        blank = self._passing.begin(passing, self._feeds.training, restore_plan.step)
        if not alone or self._role == "worker":
            self._engine.warm(blank)
        if not alone:
            prefetcher = None
            if self._engine.capabilities.torch_training:
                prefetcher = cast(TorchTrainingEngine, self._engine).prefetcher()
            self._feeds.start(restore_plan.step, self._plan.ahead, self._passing.told, prefetcher)
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
        """Load a checkpoint; that is enough to evaluate and predict, without a throwaway step."""
        return self._engine.load(self._copies.checkpoint(checkpoint, weights_only=weights_only))

    def probe(self, wanted: ProbeRequest) -> float:
        """Return the median seconds of a step: all ranks take the same number on one batch, after an untimed one."""
        self._close_feeds()  # they would read ahead meanwhile
        self._tried = True
        feed, begun, took = self._feeds.training.full_feed(0, self._passing.told), time.perf_counter(), list[float]()
        over = blank = False
        while not over:
            before = time.perf_counter()
            over = len(took) >= wanted.steps or (len(took) > 0 and before - begun > wanted.seconds)
            try:
                over = self._engine.train_step(replace(feed, step=len(took), stop_requested=over)).stop_requested
            except NonFiniteLoss:  # so many steps on one batch may lead anywhere; on all ranks at once
                if len(took) >= 2:
                    break
                if self._job.recovery.on_nonfinite == "raise" or blank:
                    raise
                feed, blank, over = zero_weight(feed), True, False  # as the run would take it
                continue
            took.append(time.perf_counter() - before)
        return statistics.median(took[1:])

    def run(self, wanted: RunRequest) -> SegmentReport:
        """Take these steps, or fewer if a stop request has reached every rank."""
        steps, stopped, finished = wanted.steps, False, False
        if self._callbacks is not None:
            for ref in wanted.checkpoints:
                self._callbacks.after_checkpoint(ref.step, self._copies.uri_of(ref))
        working = self._plan.topology == "independent" and self._role == "worker"
        if working:
            self._work(steps.start)
        elif self._plan.topology == "independent":
            stopped = self._serve(steps.stop)
        elif self._plan.topology == "coordinator" and self._role != "chief":
            cast(CoordinatorTopologyEngine, self._engine).follow()
        else:
            stopped, finished = self._step_together(steps.stop, wanted.metrics)
            self._engine.verify()  # checkpoints and evaluations follow: all ranks must hold the same state
        self._stop_requested.clear()
        reached = steps.stop if working else self._step  # others may have done the last ones
        over = stopped or finished or reached >= self._feeds.training.schedule.total_steps
        traced, untraced = self._profiler.report(reached, over=over)
        return SegmentReport(
            step=self._step, finished=finished,
            announces=self._callbacks is not None and self._callbacks.announces,
            skipped=self._quarantine.count + self._evaluate_quarantine.count, passed=len(self._passing.found),
            overflowed=self._passing.overflowed, prefetch=self._feeds.prefetch,
            own_s=self._records.own_s, phases=self._meter.phases(last=over), sampled=self._meter.sampled,
            noise=self._meter.noise, staleness=self._staleness,
            memory=self.peak_memory, traced=traced, untraced=untraced,
        )  # fmt: skip

    def _serve(self, until: int) -> bool:
        """Serve workers that step independently. The first server reports steps, and stops after one of them."""
        engine, first, stopped = cast(IndependentEngine, self._engine), self._step, False
        begun = time.perf_counter()
        for report in engine.serve(until, lambda: self._stop_requested.is_set() and self._step > first):
            self._step, stopped, now = report.step, report.stop_requested, time.perf_counter()
            self._records.add(
                report, samples=self._feeds.training.schedule.size(report.step - 1), step_s=now - begun, wait_s=math.nan
            )
            begun = now
        self._staleness = engine.staleness()
        return stopped

    def _work(self, first: int) -> None:
        """Step independently: one leased unit after the other, until the steps from `first` on are over."""
        units = self._feeds.units
        assert units is not None, "this rank steps alone"
        engine = cast(IndependentEngine, self._engine)
        while (unit := engine.lease(first)) is not None:
            begun = time.perf_counter()
            for feed in units.feeds(unit):
                wait_s = time.perf_counter() - begun
                with self._profiler.step(feed.step + 1, self._engine.capabilities.tracer):
                    fed = time.perf_counter()  # a profiler may have started first, for seconds
                    report = self._passing.step(self._engine, self._job, feed)
                begun = time.perf_counter()
                self._meter.add(report, step_s=wait_s + begun - fed, wait_s=wait_s)
            self._step = max(self._step, unit.step + unit.steps)

    def _step_together(self, until: int, metrics: Mapping[str, float] | None) -> tuple[bool, bool]:
        """Take steps; return whether a stop request came, and whether a callback ended the training.

        Args:
            metrics: of the evaluation before the first step.
        """
        stopped = finished = False
        while self._step < until and not (stopped or finished):
            self._interruption.check()
            with self._profiler.step(self._step + 1, self._engine.capabilities.tracer):
                begun = time.perf_counter()  # a profiler may have started first, for seconds
                with self._profiler.span("data wait"):
                    feed = self._feeds.next(until)
                fed = time.perf_counter()
                feed = replace(feed, stop_requested=True) if self._stop_requested.is_set() else feed
                feed, metrics = replace(feed, metrics=metrics) if metrics is not None else feed, None
                report = self._passing.step(self._engine, self._job, feed)
                taken = time.perf_counter()
            self._step, stopped, finished = report.step, report.stop_requested, report.finished
            times = {"step_s": taken - begun, "wait_s": fed - begun}
            self._records.add(report, samples=feed.rows, **times)
            self._meter.add(report, **times)
            if self._job.tensorflow.callbacks is not None:
                self._report = report
            if self._callbacks is not None:
                self._callbacks.after_step(report)
        return stopped, finished

    def evaluate(self, wanted: EvaluateRequest) -> MetricSums:
        """Return metric sums over this rank's share of the evaluation set, or over the requested one.

        Given the sums of all ranks, return them with the values of the metrics that have state; callbacks get them too.
        """
        if wanted.evaluated is not None:
            computed = compute_states(wanted.evaluated)
            if self._callbacks is not None:
                self._callbacks.after_evaluation(wanted.step, computed.means())
            return computed
        if wanted.feeding is None:
            return replace(self._sums(self._feeds.evaluation()), awaited=self._callbacks is not None)
        with self._feeds.evaluation(wanted.feeding) as feeds:
            return self._sums(feeds)

    def evaluate_some(self, steps: range) -> MetricSums:
        """Return metric sums over some batches of it; they are read ahead after the batches of the last call."""
        sums = self._sums(itertools.islice(self._feeds.evaluation_from(steps.start), len(steps)))
        self._feeds.evaluated_until(steps.stop)
        return sums

    def _sums(self, feeds: Iterable[Feed]) -> MetricSums:
        states, sums = metric_states(self._job.metrics), MetricSums()
        for feed in feeds:
            self._interruption.check()
            sums += self._engine.evaluate_step(feed, states)
        return with_states(sums, states)

    def predict(self, wanted: PredictRequest) -> tuple[Columns, ...]:
        """Return the model's outputs for each feed, on the ranks that have them; nothing on the others."""
        return predicted(self._engine, wanted, self._decoded)

    def snapshot(self, wanted: SnapshotRequest) -> SnapshotTaken:
        """Copy the state to host memory; steps may go on at once."""
        return self._copies.take(self._engine, wanted)

    def upload(self, path: str) -> tuple[CheckpointFile, ...]:
        """Write the files of the last snapshot to a checkpoint's folder."""
        return self._copies.upload(path)

    def keep(self, order: MemoryCopyRequest) -> MemoryCopyTaken:
        """Write the files of the last snapshot to the memory of this node, and of its neighbour."""
        return self._copies.keep(order)

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
            with `explain`, the stack traces of all threads before that; otherwise an empty text.
        """
        found = thread_stacks(self._stepping) if explain else ""
        self._interruption.end(generation, self._interrupt)
        return found

    def _interrupt(self) -> None:
        self._engine.interrupt(_INTERRUPT_DEADLINE_S)

    @property
    def peak_memory(self) -> PeakMemory | None:
        """The most memory of its device used so far; None on a CPU."""
        return self._engine.peak_memory()

    @property
    def held(self) -> tuple[Plan | None, int]:
        """The plan whose part of the state is held here, and its completed steps; None and 0 for none."""
        return (self._plan, self._step) if self._step and not self._tried else (None, 0)

    def renew(self, order: WorkerConfig, token: int) -> None:
        """Obey another driver: leave the group of the previous one, and open the streams again."""
        self._order, self._rank_and_size = order, (-1, 0)
        self._profiler.choose(order.profile)
        self._interruption.end(Generation(token=token, number=0), self._interrupt)

    def leave(self, wanted: MemoryCopyRequest | None = None) -> MemoryCopyTaken | None:
        """End the group; the process and its state live on.

        Args:
            wanted: the state is to be copied into memory too, because the process will end.

        Returns:
            the copy; None if none was requested, or there is no state.
        """
        self._engine.leave()
        _, step = self.held
        return self._copies.copy_just_in_time(self._engine, wanted) if wanted is not None and step else None

    def close(self) -> None:
        """End the group and the reading of data, in a process that outlives the run."""
        self._close_feeds()
        self._engine.leave()

    @property
    def newest(self) -> int:
        """The newest completed step that `watch` can report."""
        return self._records.newest

    def watch(self, after: int, timeout_s: float) -> Steps:
        """Return the steps completed after `after`; wait up to `timeout_s` for the first one."""
        return self._records.since(after, timeout_s)

    def _close_feeds(self) -> None:
        if self._data is not None:
            self._data.close()


def predicted(engine: Engine, wanted: PredictRequest, cache: dict[int, Any]) -> tuple[Columns, ...]:
    """Return the model's outputs for each feed of a request.

    Args:
        cache: what the model keeps of the tokens of earlier requests.

    Returns:
        nothing where the engine or the model cannot decode, or the cache does not have the tokens of earlier requests.
    """
    if not wanted.decoding:
        return tuple(wanted.chosen(engine.predict_step(feed)) for feed in wanted.feeds)
    if wanted.decoding == "first":
        cache.clear()
    if not engine.capabilities.decodes or (wanted.decoding == "next" and not cache):
        return ()
    found = [cast(DecodingEngine, engine).decode_step(feed, cache) for feed in wanted.feeds]
    return tuple(wanted.chosen(each) for each in found if each is not None)


def visible_devices(accelerators: Iterable[str]) -> tuple[str, ...]:
    """Return torch's names of GPUs, given Ray's ids of them, in a process that sees others too."""
    visible = os.environ.get(_VISIBLE, "").split(",")
    return tuple(f"cuda:{visible.index(each) if each in visible else each}" for each in accelerators)


# --- Interrupts -------------------------------------------------------------------------------------------------------


class Interruption:
    """Applies interrupts to the rendezvous epoch that they are for, and to no other.

    Calls and interrupts run on different threads: an interrupt may come before the call that it is for has started, or
    after the next epoch has.

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


def thread_stacks(first: int | None = None) -> str:
    """Return the Python stacks of all threads but the caller's, cut to 16,000 characters, the most recent call last.

    Args:
        first: ident of the thread whose stack comes first; the main thread's is next.
    """
    main = threading.main_thread().ident
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = {ident: frame for ident, frame in sys._current_frames().items() if ident != threading.get_ident()}
    parts = [
        f"thread {names.get(ident, ident)}{' (steps)' if ident == first else ''}:\n"
        + "".join(traceback.format_stack(frames[ident]))
        for ident in sorted(frames, key=lambda ident: (ident != first, ident != main, ident))
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

    def since(self, after: int, timeout_s: float) -> Steps:
        """Return the steps after `after`; wait up to `timeout_s` for the first one."""
        with self._news:
            self._news.wait_for(lambda: bool(self._records) and self._records[-1].report.step > after, timeout_s)
            told = [*takewhile(lambda item: item.report.step > after, reversed(self._records))][::-1]
            generation = self._generation
        logged = [item.report.logged.means() for item in told]
        return Steps(
            generation=generation,
            step=[item.report.step for item in told],
            loss=[item.report.loss for item in told],
            learning_rate=[item.report.learning_rate for item in told],
            gradient_norm=[item.report.gradient_norm for item in told],
            samples=[item.samples for item in told],
            step_s=[item.step_s for item in told],
            wait_s=[item.wait_s for item in told],
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


_Save = Callable[[StateSnapshot, StateWriter], None]  # of the engine that made the copy, which may be gone by then


class StateCopies:
    """Snapshots of the state, until they are written, and readers of what was written.

    Args:
        node: of this process, as the driver names it.
        peers: the memory of other nodes.
    """

    def __init__(self, store: Store, run: str, node: str, peers: PeerMemory) -> None:
        self._store, self._run, self._node, self._peers = store, run, node, peers
        self._memory = MemoryCheckpointStore(store.uri_of(run))
        self._snapshots: dict[str, tuple[StateSnapshot, _Save]] = {}  # by the verb that they are for

    def check_store(self) -> None:
        """Raise if this node has no access to the store; an outage may pass before an upload."""
        with suppress(StoreDown):
            self._store.exists(f"{self._run}/log/HINT")

    def uri_of(self, ref: CheckpointRef) -> str:
        """Return the URI of a checkpoint's folder."""
        return self._store.uri_of(f"{self._run}/{ref.path}")

    def take(self, engine: Engine, wanted: SnapshotRequest) -> SnapshotTaken:
        """Copy the state to host memory; steps may continue at once."""
        begun = time.perf_counter()
        if "upload" in wanted.verbs:
            engine.check_unsaved()
        copy = engine.snapshot()
        self._snapshots.update(dict.fromkeys(wanted.verbs, (copy, engine.save)))
        return SnapshotTaken(step=wanted.step, size_bytes=copy.size_bytes, blocked_s=time.perf_counter() - begun)

    def upload(self, path: str) -> tuple[CheckpointFile, ...]:
        """Write the files of the last snapshot to a checkpoint's folder."""
        writer = CheckpointWriter(self._store, self._run, path)
        copy, save = self._snapshots.pop("upload")
        save(copy, writer)
        return writer.entries

    def keep(self, wanted: MemoryCopyRequest) -> MemoryCopyTaken:
        """Write the files of the last snapshot to the node's memory, where they outlive this process.

        Then send them to the node's neighbour, if it has one, in whose memory they outlive this node.
        """
        copy, save = self._snapshots.pop("keep")
        writer, step = self._memory.write(wanted.version, copy.size_bytes, wanted.hold), copy.step
        save(copy, writer)
        del copy, save  # its memory is for the next snapshot
        nodes, trouble = [self._node], ""
        neighbour = dict(wanted.neighbours).get(self._node)
        if neighbour is not None:
            try:
                self._memory.send(wanted.version, writer.entries, wanted.hold, partial(self._peers.send, neighbour))
                nodes.append(neighbour)
            except (StorageError, OSError) as error:
                trouble = f"{neighbour}: {error}"
        files = (NodeMemoryFile(node=node, file=file) for node in nodes for file in writer.entries)
        return MemoryCopyTaken(files=tuple(files), step=step, trouble=trouble)

    def copy_just_in_time(self, engine: Engine, wanted: MemoryCopyRequest) -> MemoryCopyTaken:
        """Copy the state to the node's memory, where it outlives this process; the answer says so if that fails."""
        try:
            copy = engine.snapshot()
            writer = self._memory.write(wanted.version, copy.size_bytes, wanted.hold)
            engine.save(copy, writer)
            files = (NodeMemoryFile(node=self._node, file=file) for file in writer.entries)
            return MemoryCopyTaken(files=tuple(files), step=copy.step)
        except PeerLost:  # a step ended in the middle of its update
            return MemoryCopyTaken(files=())
        except Exception as error:  # of any kind: the failure that came first is the one to be told
            return MemoryCopyTaken(files=(), trouble=headline(error))

    def checkpoint(self, ref: CheckpointRef, *, weights_only: bool) -> CheckpointReader:
        """Return a reader of a checkpoint."""
        manifest = read_manifest(self._store, self._run, ref)
        return CheckpointReader(self._store, self._run, ref, manifest, weights_only=weights_only)

    def memory_checkpoint(self, kept: MemoryCheckpoint) -> MemoryCheckpointReader:
        """Return a reader of an in-memory checkpoint."""
        return MemoryCheckpointReader(self._memory, kept, self._node, self._peers.fetch)
