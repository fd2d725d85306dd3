"""The data of a rank: streams of the training and evaluation sets, and batches that are read ahead from them."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from functools import partial

from trainwright.core.data import Feed, FeedAssignment, PrefetchDepth
from trainwright.core.job import Job
from trainwright.datasets.loading.bad_samples import SkippingReader
from trainwright.datasets.loading.batch_loader import BatchLoader, Feeds, LeasedFeeds, Lookahead
from trainwright.worker.quarantine import Quarantine
from trainwright.worker.worker_config import WorkerConfig


@dataclass(frozen=True, kw_only=True)
class RankStreams:
    """Opens streams for any data ranks.

    Attributes:
        accumulation: micro-batches of a data rank; to evaluate takes no more memory than to train.
        static_shapes: see `core.group.Capabilities`.
        quarantine, evaluate_quarantine: take samples that cannot be read, where the job goes on without them.
    """

    job: Job
    order: WorkerConfig
    accumulation: int
    static_shapes: bool
    quarantine: Quarantine
    evaluate_quarantine: Quarantine

    def training(self, feeding: FeedAssignment) -> BatchLoader:
        """The training set's."""
        job, order = self.job, self.order
        return BatchLoader(
            job.train,
            order.train,
            fetcher=order.fetcher,
            row=order.row,
            salvage=self._salvage(self.quarantine),
            feeding=feeding,
            static_shapes=self.static_shapes,
            columns=job.columns,
            accumulation=self.accumulation,
            **job.ordering(),
        )

    def evaluation(self, feeding: FeedAssignment) -> BatchLoader:
        """The evaluation set's."""
        job, order = self.job, self.order
        assert job.evaluate is not None, "asked for only where there is an evaluation set"
        return BatchLoader(
            job.evaluate,
            order.evaluate,
            fetcher=order.evaluate_fetcher,
            salvage=self._salvage(self.evaluate_quarantine),
            feeding=feeding,
            static_shapes=self.static_shapes,
            columns=job.columns,
            accumulation=self.accumulation,
            **job.ordering(evaluate=True),
        )

    def _salvage(self, quarantine: Quarantine) -> SkippingReader | None:
        return SkippingReader(self.job.recovery.skip_limit, quarantine) if self.job.data.on_error == "skip" else None


class RankFeeds:
    """The open streams of a rank, and its place in them.

    Args:
        feeding: data ranks of this rank.
        alone: this rank steps alone, on units that a server leases to it.

    Attributes:
        training: stream of the training set.
        units: reader of leased units; None unless this rank steps alone.
    """

    def __init__(self, streams: RankStreams, feeding: FeedAssignment, *, alone: bool) -> None:
        self._streams = streams
        self.training = streams.training(feeding)
        self.units = LeasedFeeds(self.training, partial(streams.training, feeding)) if alone else None
        self._evaluation = streams.evaluation(feeding) if streams.job.evaluate is not None else None
        self._feeds: Feeds | None = None
        self._lookahead: Lookahead | None = None
        self._evaluated: tuple[int, Feeds] | None = None  # of the evaluation set, and the batch that they stand at

    def start(self, step: int, ahead: int, skipped: Container[int]) -> None:
        """Read the training set from a step on."""
        self._feeds = self.training.feeds(step)
        self._lookahead = Lookahead(self._feeds, ahead, skipped)

    def next(self, until: int) -> Feed:
        """Return the next batch, and read ahead up to a step."""
        assert self._lookahead is not None, "heal comes before run"
        return self._lookahead.next(until)

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
        """Return the batches of the evaluation set from one on; they are read ahead. `evaluated_until` must follow."""
        assert self._evaluation is not None, "asked for only if there is an evaluation set"
        if self._evaluated is None or self._evaluated[0] != batch:
            self._close_evaluation()
            self._evaluated = batch, self._evaluation.feeds(batch)
        _, feeds = self._evaluated
        self._evaluated = -1, feeds  # unknown if the evaluation fails
        return feeds

    def evaluated_until(self, batch: int) -> None:
        """Note that the batches of `evaluation_from` were consumed up to one."""
        assert self._evaluated is not None, "evaluation_from comes first"
        self._evaluated = batch, self._evaluated[1]

    def close(self) -> None:
        """Stop reading ahead; `start` begins again."""
        if self._feeds is not None:
            self._feeds.close()
        self._feeds = self._lookahead = None
        if self.units is not None:
            self.units.close()
        self._close_evaluation()

    def _close_evaluation(self) -> None:
        if self._evaluated is not None:
            self._evaluated[1].close()
        self._evaluated = None
