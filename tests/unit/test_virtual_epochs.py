"""Virtual epochs: lengths count samples, passes over the data stay as they are."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from trainwright.core.data import Feeding
from trainwright.datasets import table
from trainwright.datasets.stream import Stream


def stream(rows: int, batch: int, epochs: int, samples: int | None, drop_last: bool = False) -> Stream:
    return Stream(
        table({"id": np.arange(rows)}), batch_size=batch, epochs=epochs, epoch_samples=samples, seed=2,
        drop_last=drop_last, feeding=Feeding(data_ranks=range(1), total=1),
    )  # fmt: skip


def fed(of: Stream, start: int = 0) -> list[list[int]]:
    with of.feeds(start) as feeds:
        return [feed.parts[0][0].samples.tolist() for feed in feeds]


@given(st.integers(1, 60), st.integers(1, 16), st.integers(1, 4), st.integers(1, 90))
def test_a_virtual_run_is_the_beginning_of_the_endless_one(rows: int, batch: int, epochs: int, samples: int) -> None:
    virtual = stream(rows, batch, epochs, samples)
    assert virtual.steps_per_epoch == -(-samples // batch)
    assert virtual.total_steps == epochs * virtual.steps_per_epoch
    passes = -(-virtual.total_steps * batch // rows) + 1
    assert fed(virtual) == fed(stream(rows, batch, passes, None))[: virtual.total_steps]


def test_each_pass_has_each_sample_once_and_a_start_in_the_middle_is_the_same() -> None:
    virtual = stream(50, 8, 4, 33)
    batches = fed(virtual)
    assert sorted(sample for batch in batches[:7] for sample in batch) == list(range(50))
    assert fed(virtual, 11) == batches[11:]
    assert (virtual.cursor(7).epoch, virtual.cursor(7).position) == (1, 0)
