"""One rank's process: it owns the engine, the data stream and the loop. Free of Ray.

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
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

from trainwright.checkpoints import CheckpointReader, CheckpointWriter, read_manifest
from trainwright.core.checkpoint import CheckpointRef, FileEntry, Writer
from trainwright.core.data import Columns, Feed, StepReport, Sums
from trainwright.core.engine import Engine, StateCopy
from trainwright.core.errors import NonFiniteLoss, StoreDown
from trainwright.core.events import Steps
from trainwright.core.group import Address, Generation, Group, Peer, StateTag
from trainwright.core.job import Job
from trainwright.core.plan import Plan
from trainwright.datasets.feeds import weightless
from trainwright.datasets.salvage import Salvage, Skipped
from trainwright.datasets.stream import Feeds, Stream
from trainwright.driver.layouts import Predicting, Probing, Reservation
from trainwright.driver.messages import Copying, Heal, KeepOrder, SegmentReport, Snapshot
from trainwright.keeper import Fetch, Shelf, ShelfReader, no_fetch
from trainwright.meter import Meter
from trainwright.quarantine import Quarantine
from trainwright.records import StepRecords
from trainwright.stacks import stacks
from trainwright.store import open_store
from trainwright.strategies import engine_class
from trainwright.travel import unpack
from trainwright.workorder import WorkOrder

INTERRUPT_DEADLINE_S = 5.0
Save = Callable[[StateCopy, Writer], None]  # of the engine that made the copy, which may be gone by then
REHEARSAL = Generation(token=0, number=0)  # of a spare, alone


class Worker:
    """The methods named after verbs run on one thread, `upload`, `keep`, `watch`, `stop` and `interrupt` on others.

    Args:
        node: this process's, as the driver names it.
        fetch: reads from the memory of another node.
    """

    def __init__(self, order: WorkOrder, node: str = "", fetch: Fetch = no_fetch) -> None:
        self._order, self._node, self._fetch = order, node, fetch
        self._plan = order.plan
        self._engine: Engine = engine_class(order.plan)()
        self._store = open_store(order.storage)
        self._shelf = Shelf(self._store.uri_of(order.run))
        self._quarantine = Quarantine(self._store, order.run)
        self._evaluate_quarantine = Quarantine(self._store, order.run, "evaluate")
        with suppress(StoreDown):  # an outage passes; credentials that this node lacks are told now, not at an upload
            self._store.exists(f"{order.run}/log/HINT")
        self._records, self._meter = StepRecords(), Meter()
        self._wish = threading.Event()
        self._built = False
        self._tried = False  # steps were taken of which nothing may be left
        self._seat = (-1, 0)  # rank and world size that the streams are for
        self._spare = False
        self._generation = 0
        self._stepping: int | None = None  # the thread of steps
        self._turnover = threading.Lock()  # an interrupt that comes late must not hit the next generation
        self._step = 0
        self._stream: Stream | None = None
        self._evaluation: Stream | None = None
        self._feeds: Feeds | None = None
        self._judged: tuple[int, Feeds] | None = None  # of the evaluation set, and the batch that they stand at
        self._following: Feed | None = None  # that the step before was told of
        self._overflowed = 0  # steps that changed nothing
        self._passed: set[int] = set()  # steps whose loss was not finite
        self._passing: dict[int, str] = {}  # steps whose batch ends the workers, and how
        self._blank: Feed | None = None  # of weight 0, of another step than those
        self._copies: dict[str, tuple[StateCopy, Save]] = {}  # by the verb that they are for

    def rehearse(self) -> None:
        """Do alone, on the CPU, what a first step needs, so that a rank can be taken at once; nothing is trained.

        Where a new generation needs new processes anyway, the framework's imports are all: a job that is opened may use
        the framework, which some cannot bear before their group is formed.
        """
        self._spare = True
        capabilities = self._engine.capabilities
        if capabilities.reform == "new_process" or capabilities.topology != "collective":
            return
        peer = Peer(rank=0, address=self._engine.reserve(REHEARSAL, "worker"))
        threads = self._plan.placement.threads
        self.form(Group(generation=REHEARSAL, rank=0, peers=(peer,), threads=threads))
        assert self._stream is not None, "form opens the streams"
        self._engine.warm(self._stream.warm_feed(0))
        self._engine.leave()

    def reserve(self, wanted: Reservation) -> Address:
        """Bind a port for the generation to come; begin anew where its plan wants another layout than is built."""
        plan = wanted.plan or self._order.plan
        if self._tried or plan.layout != self._plan.layout:
            self._begin_anew(plan)
        if plan != self._plan:
            self._plan, self._seat = plan, (-1, 0)
        return self._engine.reserve(wanted.generation, "worker")

    def _begin_anew(self, plan: Plan) -> None:
        """Let go of the engine with all that it holds, for another one."""
        with self._turnover:
            self._engine.leave()
            self._engine = engine_class(plan)()
        self._built, self._tried, self._step = False, False, 0
        gc.unfreeze()
        gc.collect()  # a model's modules and hooks hold each other

    def form(self, group: Group) -> StateTag:
        """Join the group; build model, optimizer and streams the first time."""
        self._stepping = threading.get_ident()
        with self._turnover:
            self._generation = group.generation.number
        if self._spare and group.accelerators:
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(group.accelerators)
        tag = self._engine.form(group)
        if self._seat != (group.rank, group.size):
            rehearsal = group.generation == REHEARSAL
            self._open(group.rank, self._plan if rehearsal else self._plan.resized(group.size))
            self._seat = (-1, 0) if rehearsal else (group.rank, group.size)
        if not self._built:
            assert self._stream is not None
            row = partial(self._job.train.row, self._order.train, self._job.columns)
            validation = self._evaluation_feeds if self._job.evaluate is not None else None
            spec = self._job.model_spec(self._stream.total_steps, row, validation)
            tag = self._engine.build(replace(spec, outputs=self._order.outputs), self._plan)
            self._built = True
            gc.freeze()  # `leave` collects what holds the group: 0.13 s where it looks through all imports, 0.1 ms so
            gc.enable()
        return tag

    @cached_property
    def _job(self) -> Job:
        """Opened only after the engine has formed its first group."""
        return unpack(self._order.job)

    def _open(self, rank: int, plan: Plan) -> None:
        """Open the streams of a rank."""
        order, job = self._order, self._job
        self._close_feeds()
        shared: dict[str, Any] = {
            "feeding": plan.feed_of(rank),
            "static_shapes": self._engine.capabilities.static_shapes,
            "columns": job.columns,
            "accumulation": plan.accumulation,  # to evaluate takes no more memory than to train
        }
        skip = job.on_error == "skip"
        self._stream = Stream(
            job.train,
            order.train,
            fetcher=order.fetcher,
            salvage=Salvage(job.skip_limit, self._quarantine) if skip else None,
            **shared,
            **job.ordering(),
        )
        if job.evaluate is not None:
            self._evaluation = Stream(
                job.evaluate,
                order.evaluate,
                fetcher=order.evaluate_fetcher,
                salvage=Salvage(job.skip_limit, self._evaluate_quarantine) if skip else None,
                **shared,
                **job.ordering(evaluate=True),
            )

    def heal(self, heal: Heal) -> StateTag:
        """Bring the state to the agreed step, the stream to its cursor, and ready the group for steps."""
        assert self._stream is not None, "form comes before heal"
        self._close_feeds()
        if heal.kept is not None:
            tag = self._engine.load(ShelfReader(self._shelf, heal.kept, self._node, self._fetch))
        elif heal.checkpoint is None:
            tag = self._engine.transfer(heal.moves)
        else:
            tag = self.load(heal.checkpoint)
        self._passing = {passed.step - 1: passed.why for passed in heal.passing}
        blank = self._stream.warm_feed(heal.step, self._passing)
        self._blank = blank if self._passing else None
        self._engine.warm(blank)
        self._feeds = self._stream.feeds(heal.step)
        self._step = heal.step
        self._records.begin(self._generation, heal.step)
        self._meter.begin()
        return replace(tag, step=heal.step)

    def load(self, checkpoint: CheckpointRef) -> StateTag:
        """Take the state of a checkpoint: enough to evaluate and predict, which needs no throwaway step."""
        manifest = read_manifest(self._store, self._order.run, checkpoint)
        return self._engine.load(CheckpointReader(self._store, self._order.run, checkpoint, manifest))

    def probe(self, wanted: Probing) -> float:
        """Median seconds of a step under the plan: real ones on one batch, all ranks as many, after an untimed one."""
        assert self._stream is not None, "heal comes before probe"
        self._close_feeds()  # they would read ahead meanwhile
        self._tried = True
        feed, begun, took = self._stream.full_feed(0, self._passing), time.perf_counter(), list[float]()
        over = blank = False
        while not over:
            before = time.perf_counter()
            over = len(took) >= wanted.steps or (len(took) > 0 and before - begun > wanted.seconds)
            try:
                over = self._engine.train_step(replace(feed, step=len(took), wish=over)).wish
            except NonFiniteLoss:  # so many steps on one batch may lead anywhere; on all ranks at once
                if len(took) >= 2:
                    break
                if self._job.on_nonfinite == "raise" or blank:
                    raise
                feed, blank, over = weightless(feed), True, False  # as the run would take it
                continue
            took.append(time.perf_counter() - before)
        return statistics.median(took[1:])

    def run(self, until: int) -> SegmentReport:
        """Step until that many steps are complete, or a wish to stop has reached every rank."""
        assert self._feeds is not None and self._stream is not None, "heal comes before run"
        stopped = finished = False
        while self._step < until and not (stopped or finished):
            begun = time.perf_counter()
            feed = self._next_feed(until)
            fed = time.perf_counter()
            report = self._stepped(replace(feed, wish=True) if self._wish.is_set() else feed)
            self._step, stopped, finished = report.step, report.wish, report.finished
            times = {"step_s": time.perf_counter() - begun, "wait_s": fed - begun}
            self._records.add(report, samples=feed.rows, **times)
            self._meter.add(report, **times)
        self._wish.clear()
        over = stopped or finished or self._step >= self._stream.total_steps
        return SegmentReport(
            step=self._step,
            stopped=stopped,
            finished=finished,
            tag=StateTag(step=self._step),
            skipped=self._quarantine.count + self._evaluate_quarantine.count,
            passed=len(self._passed),
            overflowed=self._overflowed,
            prefetch=self._feeds.prefetch,
            own_s=self._records.own_s,
            phases=self._meter.phases(last=over),
            sampled=self._meter.sampled,
            noise=self._meter.noise,
        )

    def _next_feed(self, until: int) -> Feed:
        """The next step's; with the one after it, on all ranks alike, where steps begin the next one."""
        assert self._feeds is not None, "heal comes before run"
        feed, self._following = self._following or next(self._feeds), None
        after = feed.step + 1
        if self._plan.streamed and after < until and not {feed.step, after} & self._passing.keys():
            self._following = next(self._feeds)
        return replace(feed, following=self._following)

    def _stepped(self, feed: Feed) -> StepReport:
        """One step; where the job says so, one whose loss is not finite is taken with weight 0, on all ranks alike."""
        if feed.step in self._passing:
            return self._pass_by(feed)
        try:
            report = self._engine.train_step(feed)
            self._overflowed += report.overflowed
            return report
        except NonFiniteLoss as error:
            if self._job.on_nonfinite == "raise":
                raise
            self._passed.add(feed.step)
            if len(self._passed) + len(self._passing) > self._job.skip_limit:
                error.what = f"{error.what}, and {self._job.skip_limit} steps were passed by before, which is the limit"
                raise
            for sample in error.samples:
                self._quarantine(Skipped(sample=sample, where=f"step {feed.step + 1}", error=error.what))
        return replace(self._engine.train_step(weightless(feed)), loss=math.nan)

    def _pass_by(self, feed: Feed) -> StepReport:
        """Take a step with weight 0 and without its batch, which stays in the order of the samples all the same."""
        assert self._blank is not None, "heal comes before run"
        report = self._engine.train_step(replace(self._blank, step=feed.step, wish=feed.wish))
        for batch in itertools.chain.from_iterable(feed.parts):
            for sample in batch.samples[batch.weights > 0].tolist():
                self._quarantine(Skipped(sample=sample, where=f"step {feed.step + 1}", error=self._passing[feed.step]))
        return replace(report, loss=math.nan)

    def evaluate(self, step: int) -> Sums:
        """Sums over this rank's share of the evaluation set."""
        return self._sums(self._evaluation_feeds())

    def evaluate_some(self, steps: range) -> Sums:
        """The same over some batches of it, which are read ahead from those that were asked for before."""
        assert self._evaluation is not None, "asked for only where there is an evaluation set"
        if self._judged is None or self._judged[0] != steps.start:
            self._close_judged()
            self._judged = steps.start, self._evaluation.feeds(steps.start)
        _, feeds = self._judged
        self._judged = -1, feeds  # nobody knows where, should it fail
        sums = self._sums(itertools.islice(feeds, len(steps)))
        self._judged = steps.stop, feeds
        return sums

    def _sums(self, feeds: Iterable[Feed]) -> Sums:
        return sum((self._engine.evaluate_step(feed) for feed in feeds), Sums())

    def predict(self, wanted: Predicting) -> tuple[Columns, ...]:
        """The model's outputs for each feed, on the ranks that have them; nothing on the others."""
        return tuple(wanted.chosen(self._engine.predict_step(feed)) for feed in wanted.feeds)

    def _evaluation_feeds(self) -> Feeds:
        assert self._evaluation is not None, "asked for only where there is an evaluation set"
        return self._evaluation.feeds(0)

    def snapshot(self, wanted: Copying) -> Snapshot:
        """Copy the state to host memory; steps may go on at once."""
        begun = time.perf_counter()
        copy = self._engine.snapshot()
        self._copies.update(dict.fromkeys(wanted.verbs, (copy, self._engine.save)))
        return Snapshot(step=wanted.step, size_bytes=copy.size_bytes, blocked_s=time.perf_counter() - begun)

    def upload(self, path: str) -> tuple[FileEntry, ...]:
        """Write the last snapshot's files into a checkpoint's folder."""
        writer = CheckpointWriter(self._store, self._order.run, path)
        copy, save = self._copies.pop("upload")
        save(copy, writer)
        return writer.entries

    def keep(self, order: KeepOrder) -> tuple[FileEntry, ...]:
        """Put the last snapshot's files into the node's memory, where they outlive this process."""
        copy, save = self._copies.pop("keep")
        writer = self._shelf.write(order.version, copy.size_bytes, order.hold)
        save(copy, writer)
        return writer.entries

    def stop(self) -> None:
        """Wish to stop; it travels with the next reduction, so that all ranks leave after the same step."""
        self._wish.set()

    def interrupt(self, generation: int, explain: bool) -> str:
        """Make a blocked collective of that generation raise PeerLost, if it is not over and the engine can.

        With `explain`, the stacks of all threads as they stood before; otherwise nothing.
        """
        found = stacks(self._stepping) if explain else ""
        with self._turnover:
            if generation == self._generation:
                self._engine.interrupt(INTERRUPT_DEADLINE_S)
        return found

    @property
    def held(self) -> tuple[Plan | None, int]:
        """The plan whose part of the state is held here, and its completed steps; None and 0 where none is."""
        return (self._plan, self._step) if self._step and not self._tried else (None, 0)

    def renew(self, order: WorkOrder) -> None:
        """Another driver: let go of the group of the one before. Its streams are opened anew."""
        self._order, self._seat = order, (-1, 0)
        with self._turnover:
            self._engine.interrupt(INTERRUPT_DEADLINE_S)

    def leave(self) -> StateTag:
        """End the group; the process and its state live on."""
        self._engine.leave()
        return StateTag(step=self._step)

    def watch(self, after: int, timeout_s: float) -> Steps:
        """Steps completed after step `after`, at most `timeout_s` later; empty when there is no news."""
        return self._records.since(after, timeout_s)

    def close(self) -> None:
        """Let go of group and readers."""
        self._close_feeds()
        self._engine.leave()

    def _close_feeds(self) -> None:
        if self._feeds is not None:
            self._feeds.close()
        self._feeds = self._following = None
        self._close_judged()

    def _close_judged(self) -> None:
        if self._judged is not None:
            self._judged[1].close()
        self._judged = None
