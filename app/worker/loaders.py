"""The streams of a process: of the training set, and of the evaluation set."""

from __future__ import annotations

from dataclasses import dataclass

from trainwright.core.data import FeedAssignment
from trainwright.core.job import Job
from trainwright.datasets.loading.bad_samples import SkippingReader
from trainwright.datasets.loading.batch_loader import BatchLoader
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
        return SkippingReader(self.job.skip_limit, quarantine) if self.job.on_error == "skip" else None
