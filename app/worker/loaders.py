"""The data of a rank: streams of the training and evaluation sets, batches read ahead, and samples that are skipped."""

from __future__ import annotations

import hashlib
import io
import math
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import pyarrow as pa
import pyarrow.parquet as pq

from trainwright.core.data import Feed, FeedAssignment, PrefetchDepth, StepReport, zero_weight
from trainwright.core.engine import Engine
from trainwright.core.errors import NonFiniteLoss
from trainwright.core.job import Job
from trainwright.datasets.loading.bad_samples import SkippedSample, SkippingReader
from trainwright.datasets.loading.batch_loader import BatchLoader, Feeds, LeasedFeeds, Lookahead, ReadAhead
from trainwright.storage.object_store import Store
from trainwright.worker.worker_config import WorkerConfig


@dataclass(frozen=True, kw_only=True)
class RankStreams:
    """Opens streams for any data ranks."""

    job: Job
    order: WorkerConfig
    accumulation: int  # micro-batches of a data rank, for evaluation too, so that it takes no more memory
    static_shapes: bool  # see `core.topology.Capabilities`
    # quarantine, evaluate_quarantine: take unreadable samples, if the job skips them
    quarantine: Quarantine
    evaluate_quarantine: Quarantine

    def training(self, feeding: FeedAssignment) -> BatchLoader:
        """Return the stream of the training set."""
        job, order = self.job, self.order
        return BatchLoader(
            job.train,
            order.train,
            fetcher=order.fetcher,
            rows=order.rows.get("train"),
            row=order.row,
            skipper=skipping_reader(job, self.quarantine),
            feeding=feeding,
            static_shapes=self.static_shapes,
            columns=job.columns,
            accumulation=self.accumulation,
            **job.ordering(),
        )

    def evaluation(self, feeding: FeedAssignment) -> BatchLoader:
        """Return the stream of the evaluation set."""
        job, order = self.job, self.order
        assert job.evaluate is not None, "the job has an evaluation set"
        return BatchLoader(
            job.evaluate,
            order.evaluate,
            fetcher=order.evaluate_fetcher,
            rows=order.rows.get("evaluate"),
            skipper=skipping_reader(job, self.evaluate_quarantine),
            feeding=feeding,
            static_shapes=self.static_shapes,
            columns=job.columns,
            accumulation=self.accumulation,
            **job.ordering(evaluate=True),
        )


class RankFeeds:
    """The open streams of a rank, and its place in them.

    Args:
        feeding: data ranks of this rank.
        independent: this rank steps independently, on units that a server leases to it.

    Attributes:
        training: stream of the training set.
        units: reader of leased units; None unless this rank steps independently.
    """

    def __init__(self, streams: RankStreams, feeding: FeedAssignment, *, independent: bool) -> None:
        self._streams = streams
        self.training = streams.training(feeding)
        self.units = LeasedFeeds(self.training, partial(streams.training, feeding)) if independent else None
        self._evaluation = streams.evaluation(feeding) if streams.job.evaluate is not None else None
        self._feeds: Feeds | None = None
        self._copied: ReadAhead[Feed] | None = None
        self._lookahead: Lookahead | None = None
        self._evaluation_position: tuple[int, Feeds] | None = None  # next batch of the evaluation set, and its feeds

    def start(
        self, step: int, ahead: int, skipped: Container[int], prefetcher: Callable[[Feed], Feed] | None = None
    ) -> None:
        """Read the training set from a step on; with `prefetcher`, the next feed goes to the device ahead."""
        self._feeds = self.training.feeds(step)
        feeds: Iterator[Feed] = self._feeds
        if prefetcher is not None:
            copied = (feed if feed.step in skipped else prefetcher(feed) for feed in self._feeds)
            feeds = self._copied = ReadAhead(copied, depth=1, name="trainwright-device")
        self._lookahead = Lookahead(feeds, ahead, skipped)

    def next(self, end_step: int) -> Feed:
        """Return the next batch, and read ahead up to a step."""
        assert self._lookahead is not None, "restore comes before run"
        return self._lookahead.next(end_step)

    @property
    def prefetch(self) -> PrefetchDepth | None:
        """How far the rank reads ahead."""
        source = self.units or self._feeds
        return source.prefetch if source is not None else None

    def evaluation(self, feeding: FeedAssignment | None = None) -> Feeds:
        """Return all batches of this rank's share of the evaluation set, or of another share."""
        assert self._evaluation is not None, "asked for only if there is an evaluation set"
        if feeding is not None and self._evaluation.feeding != feeding:
            self._evaluation = self._streams.evaluation(feeding)
        return self._evaluation.feeds(0)

    def evaluation_from(self, batch: int) -> Feeds:
        """Return the batches of the evaluation set from `batch` on, read ahead. `evaluated_until` must follow."""
        assert self._evaluation is not None, "asked for only if there is an evaluation set"
        if self._evaluation_position is None or self._evaluation_position[0] != batch:
            self._close_evaluation()
            self._evaluation_position = batch, self._evaluation.feeds(batch)
        _, feeds = self._evaluation_position
        self._evaluation_position = -1, feeds  # unknown if the evaluation fails
        return feeds

    def evaluated_until(self, batch: int) -> None:
        """Note that the batches of `evaluation_from` before `batch` were consumed."""
        assert self._evaluation_position is not None, "evaluation_from comes first"
        self._evaluation_position = batch, self._evaluation_position[1]

    def close(self) -> None:
        """Stop reading ahead; `start` begins again."""
        for feeds in (self._feeds, self._copied):  # the second may wait for the first
            if feeds is not None:
                feeds.close()
        self._feeds = self._copied = self._lookahead = None
        if self.units is not None:
            self.units.close()
        self._close_evaluation()

    def _close_evaluation(self) -> None:
        if self._evaluation_position is not None:
            self._evaluation_position[1].close()
        self._evaluation_position = None


# --- Quarantine of skipped samples ------------------------------------------------------------------------------------


_FOLDER = "quarantine"


class Quarantine:
    """Records skipped samples of one data set; `parquet(<storage>/<run>/quarantine)` reads them all.

    Each file is named after its samples, so that samples that another worker skips too, or after a recovery, are stored
    once. A call returns when its samples are stored.

    Args:
        data: `train` or `evaluate`.
    """

    def __init__(self, store: Store, run: str, data: str = "train") -> None:
        self._store, self._run, self._data = store, run, data
        self._recorded_samples: set[int] = set()
        self.count = 0

    def __call__(self, skipped: SkippedSample) -> None:
        """Record one sample; raises StorageError."""
        self.add([skipped])

    def add(self, skipped: Sequence[SkippedSample]) -> None:
        """Record samples in one file, without those that this process has recorded; raises StorageError."""
        new = [entry for entry in skipped if entry.sample not in self._recorded_samples]
        if not new:
            return
        columns = {name: [getattr(entry, name) for entry in new] for name in ("sample", "where", "error")}
        file = io.BytesIO()
        pq.write_table(pa.table({"data": [self._data] * len(new), **columns}), file)
        self._store.put(f"{self._run}/{_FOLDER}/{self._file_name(columns['sample'])}.parquet", file.getvalue())
        self._recorded_samples.update(columns["sample"])
        self.count += len(new)

    def _file_name(self, samples: list[int]) -> str:
        name = f"{self._data}-{samples[0]:012d}"
        return name if len(samples) == 1 else f"{name}-{hashlib.sha256(repr(samples).encode()).hexdigest()[:16]}"


def skipping_reader(job: Job, record: Callable[[SkippedSample], None]) -> SkippingReader | None:
    """Return a reader that skips the bad samples of one data set; None if the job's `on_error` is "raise"."""
    return SkippingReader(job.recovery.skip_limit, record) if job.data.on_error == "skip" else None


# --- Batch skipping ---------------------------------------------------------------------------------------------------


class StepSkipper:
    """Takes the steps of one process, and counts those that change nothing.

    Attributes:
        overflowed: number of steps whose gradient was too large.
        nonfinite_steps: (step, first data rank) of the steps whose loss was not finite.
        skipped_steps: steps (from 0) that the driver has skipped, because they end the workers, and why.
    """

    def __init__(self, quarantine: Quarantine) -> None:
        self._quarantine = quarantine
        self._blank: Feed | None = None  # of weight 0, from a step that is not skipped
        self.overflowed = 0
        self.nonfinite_steps: set[tuple[int, int]] = set()
        self.skipped_steps: Mapping[int, str] = {}

    def begin(self, skipped_steps: Mapping[int, str], stream: BatchLoader, step: int) -> Feed:
        """Start at `step`; return a feed of weight 0 without samples of skipped steps.

        The worker of the first data rank records the batches of skipped steps at once: a worker that dies in a skipped
        step, or in the next one, cannot record them.
        """
        blank = stream.warm_feed(step, skipped_steps)
        self.skipped_steps, self._blank = skipped_steps, blank if skipped_steps else None
        for number, why in skipped_steps.items() if 0 in stream.feeding.data_ranks else ():
            if number >= step:
                self._record(number, stream.schedule.samples(number).tolist(), why)
        return blank

    def step(self, engine: Engine, job: Job, feed: Feed) -> StepReport:
        """Take a step; if the job says so, repeat it with weight 0 if its loss is not finite."""
        if feed.step in self.skipped_steps:
            return self._skip_step(engine, feed)
        try:
            report = engine.train_step(feed)
            self.overflowed += report.overflowed
            return report
        except NonFiniteLoss as error:
            if job.recovery.on_nonfinite == "raise":
                raise
            self.nonfinite_steps.add((feed.step, feed.data_ranks.start))
            if len(self.nonfinite_steps) + len(self.skipped_steps) > job.recovery.skip_limit:
                error.what = (
                    f"{error.what}, and {job.recovery.skip_limit} steps were skipped before, which is the limit"
                )
                raise
            self._record(feed.step, error.samples, error.what)
        return replace(engine.train_step(zero_weight(feed)), loss=math.nan)

    def _skip_step(self, engine: Engine, feed: Feed) -> StepReport:
        """Take a step with weight 0 and without its batch; the sample order stays the same."""
        assert self._blank is not None, "restore comes before run"
        blank = replace(self._blank, step=feed.step, stop_requested=feed.stop_requested, data_ranks=feed.data_ranks)
        return replace(engine.train_step(blank), loss=math.nan)

    def _record(self, step: int, samples: Iterable[int], why: str) -> None:
        self._quarantine.add([SkippedSample(sample=sample, where=f"step {step + 1}", error=why) for sample in samples])
