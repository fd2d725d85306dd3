"""The worker of one rank: it owns the engine, the data streams and the training loop. Free of Ray.

The driver's verbs are methods here (see `driver/messages.py` for who calls what, and on which thread).
"""

from __future__ import annotations

import gc
import itertools
import math
import os
import statistics
import threading
import time
from collections.abc import Iterable
from dataclasses import replace
from functools import cached_property
from typing import cast

from trainwright.core.data import Batch, Columns, Feed, MetricSums, zero_weight
from trainwright.core.engine import (
    CheckpointFile,
    CheckpointRef,
    CoordinatorTopologyEngine,
    Engine,
    IndependentEngine,
)
from trainwright.core.errors import NonFiniteLoss
from trainwright.core.events import Steps
from trainwright.core.job import Job
from trainwright.core.plan import Plan
from trainwright.core.topology import Address, Generation, Group, Peer, Role, StalenessCounts, StateTag
from trainwright.datasets.dataset import first_batch
from trainwright.driver.messages import (
    EvaluateRequest,
    MemoryCopyRequest,
    PredictRequest,
    ProbeRequest,
    ReserveRequest,
    RestorePlan,
    SegmentReport,
    SnapshotRequest,
    SnapshotTaken,
)
from trainwright.storage.memory_checkpoints import (
    FetchFile,
    fetch_unavailable,
)
from trainwright.storage.object_store import open_store
from trainwright.strategies import engine_class
from trainwright.worker.interruption import Interruption, thread_stacks
from trainwright.worker.loaders import RankFeeds, RankStreams
from trainwright.worker.quarantine import Quarantine, StepSkipper
from trainwright.worker.state_copies import StateCopies
from trainwright.worker.step_log import StepLog, StepTimer
from trainwright.worker.worker_config import WorkerConfig, unpickle_job

_INTERRUPT_DEADLINE_S = 5.0
_REHEARSAL = Generation(token=0, number=0)  # of a spare, alone


class Worker:
    """The methods named after verbs run on one thread, `upload`, `keep`, `watch`, `stop` and `interrupt` on others.

    Args:
        node: this process's, as the driver names it.
        fetch: reads from the memory of another node.
    """

    def __init__(self, order: WorkerConfig, node: str = "", fetch: FetchFile = fetch_unavailable) -> None:
        self._order = order
        self._plan = order.plan
        self._engine: Engine = engine_class(order.plan)()
        store = open_store(order.storage)
        self._copies = StateCopies(store, order.run, node, fetch)
        self._copies.check_store()
        self._quarantine = Quarantine(store, order.run)
        self._evaluate_quarantine = Quarantine(store, order.run, "evaluate")
        self._records, self._meter = StepLog(), StepTimer()
        self._wish = threading.Event()
        self._built = False
        self._tried = False  # steps were taken of which nothing may be left
        self._seat = (-1, 0)  # rank and world size that the streams are for
        self._spare = False
        self._stepping: int | None = None  # the thread of steps
        self._interruption = Interruption()
        self._step = 0
        self._data: RankFeeds | None = None
        self._role: Role = "worker"
        self._passing = StepSkipper(self._quarantine)
        self._staleness: StalenessCounts | None = None  # of the last stretch of steps, where this one told of it

    def rehearse(self) -> None:
        """Do alone, on the CPU, what a first step needs, so that a rank can be taken at once; nothing is trained.
        Where a new generation needs new processes anyway, the framework's imports are all: a job that is opened may use
        the framework, which some cannot bear before their group is formed.
        """
        self._spare = True
        capabilities = self._engine.capabilities
        if capabilities.reform == "new_process" or capabilities.topology != "collective":
            return
        peer = Peer(rank=0, address=self._engine.reserve(_REHEARSAL, "worker"))
        threads = self._plan.placement.threads
        self.form(Group(generation=_REHEARSAL, rank=0, peers=(peer,), threads=threads))
        self._engine.warm(self._feeds.training.warm_feed(0))
        self._engine.leave()

    def reserve(self, wanted: ReserveRequest) -> Address:
        """Bind a port for the generation to come; begin anew where its plan wants another layout than is built."""
        self._interruption.enter(wanted.generation)
        plan = wanted.plan or self._order.plan
        if self._tried or plan.layout != self._plan.layout:
            self._begin_anew(plan)
        if plan != self._plan:
            self._plan, self._seat = plan, (-1, 0)
        self._role = wanted.role
        return self._engine.reserve(wanted.generation, wanted.role)

    def _begin_anew(self, plan: Plan) -> None:
        """Let go of the engine with all that it holds, for another one."""
        with self._interruption.lock:
            self._engine.leave()
            self._engine = engine_class(plan)()
        self._built, self._tried, self._step = False, False, 0
        gc.collect()  # a model's modules and hooks hold each other

    def form(self, group: Group) -> StateTag:
        """Join the group; build model, optimizer and streams the first time."""
        self._stepping = threading.get_ident()
        self._interruption.enter(group.generation)
        if self._spare and group.accelerators:
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(group.accelerators)
        tag = self._engine.form(group)
        if self._seat != (group.rank, group.size):
            rehearsal = group.generation == _REHEARSAL
            fixed = rehearsal or self._plan.topology != "collective"
            self._open(group.rank, self._plan if fixed else self._plan.resized(group.size))
            self._seat = (-1, 0) if rehearsal else (group.rank, group.size)
        if not self._built:
            validation = self._feeds.evaluation if self._job.evaluate is not None else None
            spec = self._job.model_spec(self._feeds.training.schedule.total_steps, self._row, validation)
            gc.freeze()  # `leave` collects what holds the group, or the model too: 0.2 s where it looks through imports
            tag = self._engine.build(replace(spec, outputs=self._order.outputs), self._plan)
            self._built = True
            gc.enable()
        return tag

    def _row(self) -> Batch:
        """One of the training set."""
        return self._order.row or first_batch(self._job.train, self._order.train, self._job.columns)

    @cached_property
    def _job(self) -> Job:
        """Opened only after the engine has formed its first group."""
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

    def heal(self, heal: RestorePlan) -> StateTag:
        """Bring the state to the agreed step, the stream to its cursor, and ready the group for steps."""
        self._close_feeds()
        alone = self._plan.topology == "independent"
        if heal.source == "join" or (alone and self._role == "worker"):
            tag = StateTag(step=heal.step, pieces=frozenset())  # the others have it
        elif heal.kept is not None:
            tag = self._engine.load(self._copies.memory_checkpoint(heal.kept))
        elif heal.checkpoint is None:
            tag = self._engine.transfer(heal.moves)
        else:
            tag = self.load(heal.checkpoint, weights_only=False)
        passing = {passed.step - 1: passed.why for passed in heal.passing}
        blank = self._passing.begin(passing, self._feeds.training, heal.step)
        if not alone or self._role == "worker":
            self._engine.warm(blank)
        if not alone:
            self._feeds.start(heal.step, self._plan.ahead, self._passing.told)
        self._step = heal.step
        self._records.begin(self._interruption.current.number, heal.step)
        self._meter.begin()
        return replace(tag, step=heal.step)

    def load(self, checkpoint: CheckpointRef, *, weights_only: bool = True) -> StateTag:
        """Take the state of a checkpoint: by itself enough to evaluate and predict, which needs no throwaway step."""
        return self._engine.load(self._copies.checkpoint(checkpoint, weights_only=weights_only))

    def probe(self, wanted: ProbeRequest) -> float:
        """Median seconds of a step under the plan: real ones on one batch, all ranks as many, after an untimed one."""
        self._close_feeds()  # they would read ahead meanwhile
        self._tried = True
        feed, begun, took = self._feeds.training.full_feed(0, self._passing.told), time.perf_counter(), list[float]()
        over = blank = False
        while not over:
            before = time.perf_counter()
            over = len(took) >= wanted.steps or (len(took) > 0 and before - begun > wanted.seconds)
            try:
                over = self._engine.train_step(replace(feed, step=len(took), wish=over)).wish
            except NonFiniteLoss:  # so many steps on one batch may lead anywhere; on all ranks at once
                if len(took) >= 2:
                    break
                if self._job.recovery.on_nonfinite == "raise" or blank:
                    raise
                feed, blank, over = zero_weight(feed), True, False  # as the run would take it
                continue
            took.append(time.perf_counter() - before)
        return statistics.median(took[1:])

    def run(self, steps: range) -> SegmentReport:
        """Take these steps, or fewer where a wish to stop has reached every rank; what that is by role."""
        stopped = finished = False
        working = self._plan.topology == "independent" and self._role == "worker"
        if working:
            self._work(steps.start)
        elif self._plan.topology == "independent":
            stopped = self._serve(steps.stop)
        elif self._plan.topology == "coordinator" and self._role != "chief":
            cast(CoordinatorTopologyEngine, self._engine).follow()
        else:
            stopped, finished = self._step_together(steps.stop)
            self._engine.verify()  # whatever follows, a checkpoint or an evaluation, is of one state
        self._wish.clear()
        reached = steps.stop if working else self._step  # others may have done the last ones
        over = stopped or finished or reached >= self._feeds.training.schedule.total_steps
        return SegmentReport(
            step=self._step, finished=finished,
            skipped=self._quarantine.count + self._evaluate_quarantine.count, passed=len(self._passing.found),
            overflowed=self._passing.overflowed, prefetch=self._feeds.prefetch,
            own_s=self._records.own_s, phases=self._meter.phases(last=over), sampled=self._meter.sampled,
            noise=self._meter.noise, staleness=self._staleness,
        )  # fmt: skip

    def _serve(self, until: int) -> bool:
        """A server: let the others step. The first one tells of each step; a wish counts once it told of one."""
        engine, first, stopped = cast(IndependentEngine, self._engine), self._step, False
        begun = time.perf_counter()
        for report in engine.serve(until, lambda: self._wish.is_set() and self._step > first):
            self._step, stopped, now = report.step, report.wish, time.perf_counter()
            self._records.add(
                report, samples=self._feeds.training.schedule.size(report.step - 1), step_s=now - begun, wait_s=math.nan
            )
            begun = now
        self._staleness = engine.staleness()
        return stopped

    def _work(self, first: int) -> None:
        """A worker that steps alone: one unit after the other, until the steps from `first` on are over."""
        units = self._feeds.units
        assert units is not None, "this rank steps alone"
        engine = cast(IndependentEngine, self._engine)
        while (unit := engine.lease(first)) is not None:
            begun = time.perf_counter()
            for feed in units.feeds(unit):
                fed = time.perf_counter()
                report = self._passing.step(self._engine, self._job, feed)
                now = time.perf_counter()
                self._meter.add(report, step_s=now - begun, wait_s=fed - begun)
                begun = now
            self._step = max(self._step, unit.step + unit.steps)

    def _step_together(self, until: int) -> tuple[bool, bool]:
        """Whether a wish was heard, and whether nothing is left to train."""
        stopped = finished = False
        while self._step < until and not (stopped or finished):
            begun = time.perf_counter()
            feed = self._feeds.next(until)
            fed = time.perf_counter()
            feed = replace(feed, wish=True) if self._wish.is_set() else feed
            report = self._passing.step(self._engine, self._job, feed)
            self._step, stopped, finished = report.step, report.wish, report.finished
            times = {"step_s": time.perf_counter() - begun, "wait_s": fed - begun}
            self._records.add(report, samples=feed.rows, **times)
            self._meter.add(report, **times)
        return stopped, finished

    def evaluate(self, wanted: EvaluateRequest) -> MetricSums:
        """Sums over this rank's share of the evaluation set, or over the one that it is given."""
        if wanted.feeding is None:
            return self._sums(self._feeds.evaluation())
        with self._feeds.evaluation(wanted.feeding) as feeds:
            return self._sums(feeds)

    def evaluate_some(self, steps: range) -> MetricSums:
        """The same over some batches of it, which are read ahead from those that were asked for before."""
        sums = self._sums(itertools.islice(self._feeds.evaluation_from(steps.start), len(steps)))
        self._feeds.evaluated_until(steps.stop)
        return sums

    def _sums(self, feeds: Iterable[Feed]) -> MetricSums:
        return sum((self._engine.evaluate_step(feed) for feed in feeds), MetricSums())

    def predict(self, wanted: PredictRequest) -> tuple[Columns, ...]:
        """The model's outputs for each feed, on the ranks that have them; nothing on the others."""
        return tuple(wanted.chosen(self._engine.predict_step(feed)) for feed in wanted.feeds)

    def snapshot(self, wanted: SnapshotRequest) -> SnapshotTaken:
        """Copy the state to host memory; steps may go on at once."""
        return self._copies.take(self._engine, wanted)

    def upload(self, path: str) -> tuple[CheckpointFile, ...]:
        """Write the files of the last snapshot to a checkpoint's folder."""
        return self._copies.upload(path)

    def keep(self, order: MemoryCopyRequest) -> tuple[CheckpointFile, ...]:
        """Write the files of the last snapshot to the node's memory, where they outlive this process."""
        return self._copies.keep(order)

    def stop(self) -> None:
        """Wish to stop; it travels with the next reduction, so that all ranks leave after the same step."""
        self._wish.set()

    def interrupt(self, generation: Generation, explain: bool) -> str:
        """Make what waits for peers of that generation raise PeerLost, or will wait for them, if the engine can.

        With `explain`, the stacks of all threads as they stood before; otherwise nothing.
        """
        found = thread_stacks(self._stepping) if explain else ""
        self._interruption.end(generation, self._interrupt)
        return found

    def _interrupt(self) -> None:
        self._engine.interrupt(_INTERRUPT_DEADLINE_S)

    @property
    def held(self) -> tuple[Plan | None, int]:
        """The plan whose part of the state is held here, and its completed steps; None and 0 where none is."""
        return (self._plan, self._step) if self._step and not self._tried else (None, 0)

    def renew(self, order: WorkerConfig, token: int) -> None:
        """Another driver: let go of the group of the one before. Its streams are opened anew."""
        self._order, self._seat = order, (-1, 0)
        self._interruption.end(Generation(token=token, number=0), self._interrupt)

    def leave(self) -> StateTag:
        """End the group; the process and its state live on."""
        self._engine.leave()
        return StateTag(step=self._step)

    @property
    def newest(self) -> int:
        """The newest completed step that `watch` can tell of."""
        return self._records.newest

    def watch(self, after: int, timeout_s: float) -> Steps:
        """Steps completed after step `after`, at most `timeout_s` later; empty when there is no news."""
        return self._records.since(after, timeout_s)

    def _close_feeds(self) -> None:
        if self._data is not None:
            self._data.close()
