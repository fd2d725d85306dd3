"""The quarantine beside a run: a small parquet file for each group of skipped samples."""

from __future__ import annotations

import hashlib
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq

from trainwright.core.data import Feed, StepReport, zero_weight
from trainwright.core.engine import Engine
from trainwright.core.errors import NonFiniteLoss
from trainwright.core.job import Job
from trainwright.datasets.loading.bad_samples import SkippedSample
from trainwright.datasets.loading.batch_loader import BatchLoader
from trainwright.storage.object_store import Store

_FOLDER = "quarantine"


class Quarantine:
    """Records skipped samples of one data set; `parquet(<storage>/<run>/quarantine)` reads them all.

    The name of a file is that of its samples, so that those met again, by another worker or after a recovery, are there
    once. What a call was given is stored when it returns.

    Args:
        data: `train` or `evaluate`.
    """

    def __init__(self, store: Store, run: str, data: str = "train") -> None:
        self._store, self._run, self._data = store, run, data
        self._known: set[int] = set()
        self.count = 0

    def __call__(self, skipped: SkippedSample) -> None:
        """Record one sample; raises StorageError."""
        self.add([skipped])

    def add(self, skipped: Sequence[SkippedSample]) -> None:
        """Record samples in one file, without those that this process has recorded; raises StorageError."""
        new = [entry for entry in skipped if entry.sample not in self._known]
        if not new:
            return
        columns = {name: [getattr(entry, name) for entry in new] for name in ("sample", "where", "error")}
        file = io.BytesIO()
        pq.write_table(pa.table({"data": [self._data] * len(new), **columns}), file)
        self._store.put(f"{self._run}/{_FOLDER}/{self._name(columns['sample'])}.parquet", file.getvalue())
        self._known.update(columns["sample"])
        self.count += len(new)

    def _name(self, samples: list[int]) -> str:
        first = f"{self._data}-{samples[0]:012d}"
        return first if len(samples) == 1 else f"{first}-{hashlib.sha256(repr(samples).encode()).hexdigest()[:16]}"


# --- Batch skipping ---------------------------------------------------------------------------------------------------


class StepSkipper:
    """Takes the steps of one process, and counts those that change nothing.

    Attributes:
        overflowed: whose gradient was too large.
        found: whose loss was not finite.
        told: that end the workers, as the driver found out, and how; from 0.
    """

    def __init__(self, quarantine: Quarantine) -> None:
        self._quarantine = quarantine
        self._blank: Feed | None = None  # of weight 0, of another step than those told of
        self.overflowed = 0
        self.found: set[tuple[int, int]] = set()  # step, first data rank
        self.told: Mapping[int, str] = {}

    def begin(self, told: Mapping[int, str], stream: BatchLoader, step: int) -> Feed:
        """Steps from `step` on follow; gives a feed of weight 0 whose samples are none of those told of.

        The worker of the first data rank records the batches of steps told of, before any is passed by: a worker that
        dies in such a step, or the one after, leaves nothing to record.
        """
        blank = stream.warm_feed(step, told)
        self.told, self._blank = told, blank if told else None
        for number, why in told.items() if 0 in stream.feeding.data_ranks else ():
            if number >= step:
                self._record(number, stream.schedule.samples(number).tolist(), why)
        return blank

    def step(self, engine: Engine, job: Job, feed: Feed) -> StepReport:
        """One step; where the job says so, one whose loss is not finite is taken with weight 0."""
        if feed.step in self.told:
            return self._pass_by(engine, feed)
        try:
            report = engine.train_step(feed)
            self.overflowed += report.overflowed
            return report
        except NonFiniteLoss as error:
            if job.recovery.on_nonfinite == "raise":
                raise
            self.found.add((feed.step, feed.data_ranks.start))
            if len(self.found) + len(self.told) > job.recovery.skip_limit:
                error.what = (
                    f"{error.what}, and {job.recovery.skip_limit} steps were passed by before, which is the limit"
                )
                raise
            self._record(feed.step, error.samples, error.what)
        return replace(engine.train_step(zero_weight(feed)), loss=math.nan)

    def _pass_by(self, engine: Engine, feed: Feed) -> StepReport:
        """Take a step with weight 0 and without its batch, which stays in the order of the samples all the same."""
        assert self._blank is not None, "heal comes before run"
        blank = replace(self._blank, step=feed.step, wish=feed.wish, data_ranks=feed.data_ranks)
        return replace(engine.train_step(blank), loss=math.nan)

    def _record(self, step: int, samples: Iterable[int], why: str) -> None:
        self._quarantine.add([SkippedSample(sample=sample, where=f"step {step + 1}", error=why) for sample in samples])
