"""Loaders and iterable data sets of torch and Hugging Face: order, shares, passes, and what is refused."""

from __future__ import annotations

import gc
import multiprocessing
import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, WeightedRandomSampler, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader

import trainwright as tw
from trainwright.core.data import FeedAssignment
from trainwright.core.errors import DataError, JobError, UserCodeError
from trainwright.datasets import from_huggingface, from_torch
from trainwright.datasets.loading.batch_loader import BatchLoader

ROWS, BATCH = 100, 16
pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")  # of loader processes, Python 3.12


class Numbers(torch.utils.data.Dataset[Any]):
    """Rows by number."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, row: int) -> Any:
        return torch.tensor([row, 0.5]), row


class Stream(IterableDataset[Any]):
    """Rows of shards, which loader processes deal among themselves; `shuffled` in each pass by a global generator."""

    def __init__(self, rows: int = ROWS, shuffled: bool = False, fails: int = -1) -> None:
        self.rows, self.shuffled, self.fails = rows, shuffled, fails

    def __len__(self) -> int:
        return self.rows

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        numbers = list(range(self.rows))[info.id :: info.num_workers] if info else list(range(self.rows))
        if self.shuffled:
            random.shuffle(numbers)
        for number in numbers:
            if number == self.fails:
                raise ValueError(f"no row {number}")
            yield {"x": np.array([number, 0.5], np.float32), "i": number, "noise": torch.rand(())}


class Unsized(IterableDataset[Any]):
    """It knows nothing of its end."""

    def __init__(self, make: Callable[[], Iterator[Any]]) -> None:
        self.make = make

    def __iter__(self) -> Iterator[Any]:
        return self.make()


class Epochs(IterableDataset[Any]):
    """Another order in each epoch."""

    epoch = 0

    def __len__(self) -> int:
        return ROWS

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        for number in np.random.default_rng(self.epoch).permutation(ROWS):
            yield {"i": int(number)}


def as_columns(samples: list[Any]) -> Any:
    return {"x": torch.stack([x for x, _ in samples]), "i": torch.tensor([i for _, i in samples])}


def stream(data: tw.datasets.Dataset, rank: int = 0, total: int = 1, epochs: int = 2, **fields: Any) -> BatchLoader:
    feeding = FeedAssignment(data_ranks=range(rank, rank + 1), total=total)
    return BatchLoader(data, batch_size=BATCH, epochs=epochs, feeding=feeding, **fields)


def seen(of: BatchLoader, start: int = 0, column: str = "i") -> list[list[int]]:
    """What each step from `start` on trains on."""
    with of.feeds(start) as feeds:
        steps = [next(feeds) for _ in range(start, of.schedule.total_steps)]
    return [[int(i) for batch in feed.parts[0] for i in batch.columns[column][batch.weights > 0]] for feed in steps]


def flat(steps: list[list[int]]) -> list[int]:
    return [row for step in steps for row in step]


def looped(loader: Any) -> list[int]:
    """The rows of a plain loop."""
    return [int(i) for batch in loader for i in np.atleast_1d(batch["i"])]


def check_shares(whole: list[list[int]], open_stream: Callable[[int, int], BatchLoader], starts: list[int]) -> None:
    """By place in the pass, the ranks share the batches, whatever their number and the step they start at."""
    for total, start in sorted({(2, starts[0]), (3, starts[len(starts) // 2]), (1, starts[-1]), (2, starts[-1])}):
        parts = [seen(open_stream(rank, total), start) for rank in range(total)]
        for step, batch in enumerate(whole[start:], start):
            first = step % (len(whole) // 2) * BATCH
            shares = [[row for place, row in enumerate(batch, first) if place % total == r] for r in range(total)]
            assert shares == [part[step - start] for part in parts]


def weighted(generator: torch.Generator) -> WeightedRandomSampler:
    return WeightedRandomSampler(list(range(1, ROWS + 1)), 60, generator=generator)


LOADERS: dict[str, Callable[[], Any]] = {
    "iterable": Stream,
    "loader": lambda: DataLoader(Stream(), batch_size=7),
    "processes": lambda: DataLoader(Stream(), batch_size=7, num_workers=2, persistent_workers=True),
    "no batches": lambda: DataLoader(Stream(), batch_size=None),
    "drop_last": lambda: DataLoader(Stream(), batch_size=7, drop_last=True),
    "collate": lambda: DataLoader(Numbers(), batch_size=9, collate_fn=as_columns),
    "batch_sampler": lambda: DataLoader(
        Numbers(), batch_sampler=[[5, 1], [7], [0, 2, 4, 9] * 8], collate_fn=as_columns, num_workers=1
    ),
    "stateful": lambda: StatefulDataLoader(Stream(), batch_size=7),
}


@pytest.mark.parametrize("name", LOADERS)
def test_the_rows_are_those_of_a_plain_loop(name: str) -> None:
    expected = looped(LOADERS[name]())
    loader = stream(from_torch(LOADERS[name]()))
    steps = seen(loader)
    assert flat(steps) == expected * 2
    assert [len(step) for step in steps] == ([BATCH] * (len(expected) // BATCH) + [len(expected) % BATCH]) * 2


@pytest.mark.parametrize("persistent", [False, True])
def test_the_processes_of_a_loader_end_with_its_pass(persistent: bool) -> None:
    """Garbage collection would end them, too, but waits 5 s for each of those that persist, in the midst of a step."""
    sized: dict[str, Any] = {"batch_size": 7, "num_workers": 1, "persistent_workers": persistent}
    others = {*multiprocessing.active_children()}  # of tests before

    def started() -> set[Any]:
        return {*multiprocessing.active_children()} - others

    gc.disable()
    try:
        long = stream(from_torch(DataLoader(Stream(100 * ROWS), **sized)))
        assert not started(), "the first rows were read"
        with long.feeds(0) as feeds:
            next(feeds)
            assert len(started()) == 1
        del feeds, long
        assert not started(), "closed early"
        assert len(flat(seen(stream(from_torch(DataLoader(Stream(), **sized)))))) == 2 * ROWS
        assert not started(), "read to the end"
        with pytest.raises(UserCodeError, match=f"no row {ROWS - 1}"):
            seen(stream(from_torch(DataLoader(Stream(fails=ROWS - 1), **sized))))
        assert not started(), "it failed"
    finally:
        gc.enable()


@pytest.mark.parametrize(
    "make",
    [
        lambda: DataLoader(Stream(shuffled=True), batch_size=7),
        lambda: DataLoader(Stream(shuffled=True), batch_size=8, num_workers=2),
        lambda: DataLoader(Numbers(), sampler=weighted(torch.Generator().manual_seed(3)), collate_fn=as_columns),
        Epochs,
    ],
)
def test_workers_share_each_batch_from_any_step_on(make: Callable[[], Any]) -> None:
    whole = seen(stream(from_torch(make()), seed=5))
    starts = [9] if getattr(make(), "num_workers", 0) else [0, 3, len(whole) - 2]
    check_shares(whole, lambda rank, total: stream(from_torch(make()), rank, total, seed=5), starts)
    assert flat(whole[: len(whole) // 2]) != flat(whole[len(whole) // 2 :]), "another order in the next epoch"
    if not isinstance(make(), DataLoader) or isinstance(make().dataset, Stream):
        assert sorted(flat(whole)) == sorted([*range(ROWS)] * 2)


class Lazy:
    """Draws each row, or each batch of rows, from all global generators when it is asked for it."""

    def __init__(self, batch: int = 0) -> None:
        self.batch = batch

    def __len__(self) -> int:
        return 200 // max(self.batch, 1)

    def __iter__(self) -> Iterator[Any]:
        for _ in range(len(self)):
            rows = [
                (random.randrange(ROWS) + np.random.randint(ROWS) + int(torch.randint(ROWS, ()))) % ROWS
                for _ in range(max(self.batch, 1))
            ]
            yield rows if self.batch else rows[0]


class Delegating(DataLoader[Any]):
    """Asks its batch sampler for more than batches, as some loaders do."""

    def __len__(self) -> int:
        return 200 // self.batch_sampler.batch  # type: ignore[union-attr]

    def __iter__(self) -> Any:
        rows = super().__iter__()
        return (next(rows) for _ in range(len(self)))


@pytest.mark.parametrize(
    "make",
    [
        lambda: Delegating(Numbers(), batch_sampler=Lazy(10), num_workers=1, collate_fn=as_columns),
        lambda: DataLoader(Numbers(), 10, sampler=Lazy(), num_workers=1, collate_fn=as_columns),
        lambda: StatefulDataLoader(Numbers(), None, sampler=Lazy(), num_workers=1),
    ],
)
def test_a_sampler_draws_from_the_seed_whatever_steps_drew(make: Callable[[], Any]) -> None:
    loader, found = make(), []
    data = from_torch(loader, None if loader.batch_sampler else ("x", "i"))
    index = data.index()
    for number in (1, 2):
        random.seed(number), np.random.seed(number), torch.manual_seed(number)
        found.append(seen(stream(data, index=index, seed=3, epochs=1)))
    assert found[0] == found[1] and len(flat(found[0])) == 200 and len({*flat(found[0])}) > 70
    assert [random.random(), np.random.random(), torch.rand(())] == [
        random.Random(2).random(), np.random.RandomState(2).random_sample(),
        torch.rand((), generator=torch.Generator().manual_seed(2)),
    ], "steps keep their random numbers"  # fmt: skip


def test_the_seed_of_the_run_counts_and_steps_keep_their_random_numbers() -> None:
    torch.manual_seed(1)
    expected, other = torch.rand(2), seen(stream(from_torch(Stream(shuffled=True)), seed=2))
    torch.manual_seed(1)
    first = torch.rand(())
    assert seen(stream(from_torch(Stream(shuffled=True)), seed=1)) != other
    assert [first.item(), torch.rand(()).item()] == expected.tolist()
    noise = [seen(stream(from_torch(Stream()).map(scaled), seed=1), start, "noise") for start in (0, 9)]
    assert noise[0][9:] == noise[1]


def scaled(row: Any, rng: Any) -> Any:
    return {**row, "noise": int(row["noise"] * 1e9)}


def test_a_generator_is_seeded_with_its_seed_and_the_epoch() -> None:
    def loader(seed: int) -> Any:
        generator = torch.Generator().manual_seed(seed)
        return DataLoader(Numbers(), batch_size=7, shuffle=True, generator=generator, collate_fn=as_columns)

    steps = seen(stream(from_torch(loader(40))))
    assert flat(steps[:7]) == looped(loader(40)) and flat(steps[7:]) == looped(loader(41))


def test_set_epoch_reaches_data_sets_and_samplers() -> None:
    sampler = DistributedSampler(Numbers(), num_replicas=1, rank=0)
    steps = seen(stream(from_torch(DataLoader(Numbers(), 7, sampler=sampler, collate_fn=as_columns))))
    assert flat(steps[7:]) == looped(
        [sampler.set_epoch(1), DataLoader(Numbers(), 7, sampler=sampler, collate_fn=as_columns)][1]
    )
    data = Epochs()
    data.set_epoch(1)
    assert flat(seen(stream(from_torch(DataLoader(Epochs(), 9))))[7:]) == looped(data)


def test_a_function_says_what_each_epoch_is() -> None:
    def make(epoch: int) -> Any:
        return DataLoader(Stream(40 if epoch < 0 else ROWS), batch_size=1 + epoch)

    assert flat(seen(stream(from_torch(make)))) == [*range(ROWS)] * 2
    assert flat(seen(stream(from_torch(Stream)))) == [*range(ROWS)] * 2, "a class whose arguments have defaults"
    opened = from_torch(lambda: Unsized(lambda: iter([{"i": 1}, {"i": 2}] * 9)), rows=12)
    assert flat(seen(stream(opened, epochs=1))) == [1, 2] * 6
    assert opened.source.plan_note.startswith(
        "what <lambda> returns: rows come in its own order, every worker iterates"
    )


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("kind", [DataLoader, StatefulDataLoader])
def test_a_loader_of_rows_with_numbers_is_its_data_set(kind: Any, shuffle: bool) -> None:
    data = from_torch(kind(Numbers(), batch_size=7, shuffle=shuffle, num_workers=2), columns=("x", "i"))
    steps = seen(stream(data))
    assert sorted(flat(steps[:7])) == sorted(flat(steps[7:])) == [*range(ROWS)]
    assert (flat(steps[:7]) == [*range(ROWS)]) is (flat(steps[:7]) == flat(steps[7:])) is not shuffle
    assert sorted(flat(seen(stream(data.filter(lambda row: row["i"] > 49), epochs=1)))) == [*range(50, ROWS)]
    assert ("the job's seed shuffles" in data.source.plan_note) is shuffle
    assert "counts exactly once" in data.source.plan_note and "num_workers do not run" in data.source.plan_note


def test_a_loader_of_all_ranks_stands_for_its_data_set() -> None:
    sampler = DistributedSampler(Numbers(), num_replicas=4, rank=2)
    assert from_torch(DataLoader(Numbers(), sampler=sampler)).index().rows == ROWS


@pytest.mark.parametrize(
    ("batch", "columns", "expected"),
    [
        (lambda samples: [list(range(len(samples))), ["a"] * len(samples)], None, {"0", "1"}),
        (lambda samples: samples, ("x", "i"), {"x", "i"}),
        (lambda samples: torch.tensor([i for _, i in samples]), ("i",), {"i"}),
        (lambda samples: {"t": [torch.arange(i % 4) for _, i in samples]}, None, {"t"}),
        (lambda samples: [str(i) for _, i in samples], ("text",), {"text"}),
    ],
)
def test_batches_become_rows(batch: Callable[[Any], Any], columns: Any, expected: set[str]) -> None:
    data = from_torch(DataLoader(Numbers(), batch_size=7, collate_fn=batch), columns)
    index = data.index()
    assert set(index.schema) == expected
    assert {len(array) for array in data.read(index, [70, 3]).values()} == {2}


def endless() -> Iterator[Any]:
    while True:
        yield {"i": 1}


def noisy() -> Iterator[Any]:
    generator = np.random.default_rng()
    return iter([{"x": generator.random(3)} for _ in range(9)])


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (lambda: from_torch(Unsized(endless)), r"does not know how many rows.*\n.*from_torch\(\.\.\., rows=\)"),
        (lambda: from_torch(Unsized(lambda: iter(())), rows=4), "it gives no row"),
        (lambda: from_torch(Unsized(noisy), rows=9), "other rows among its first 64"),
        (lambda: from_torch(Stream(), rows=ROWS + 1), f"rows={ROWS + 1}, and a pass has {ROWS}"),
        (lambda: from_torch(Numbers(), rows=3), "rows by number"),
        (lambda: from_torch(Stream(), rows=0), "not a length of a pass"),
        (lambda: from_torch(Unsized(partial(iter, (n for n in range(3)))), rows=3), "cannot be sent to the workers"),
        (lambda: from_torch(lambda: [1, 2]), "the function returned a list"),
        (lambda: from_huggingface(lambda: Stream()), "the function returned a Stream"),
        (
            lambda: from_torch(
                DataLoader(Numbers(), sampler=DistributedSampler(Numbers(), 2, 0), collate_fn=as_columns)
            ),
            "rows of one rank only",
        ),
        (
            lambda: from_torch(DataLoader(Numbers(), 4, collate_fn=lambda samples: (torch.zeros(4), torch.zeros(3)))),
            "differ in their number of rows: '0' 4, '1' 3",
        ),
        (lambda: from_torch(Unsized(lambda: iter([{"i": None}])), rows=1), "the value is None"),
    ],
)
def test_what_is_wrong_is_said_when_it_is_looked_at(data: Callable[[], Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        data().index()


def test_passes_of_another_length_are_told() -> None:
    class Changed(Stream):
        def __len__(self) -> int:
            return 70

    with pytest.raises(DataError, match="the pass ended before row 60 of 70"):
        seen(stream(from_torch(Changed(60))))
    with pytest.raises(DataError, match="the pass goes on after its 70 rows"):
        seen(stream(from_torch(Changed(71))))


@pytest.mark.parametrize(
    ("data", "where"),
    [
        (Stream(fails=90), "epoch 0, row 90"),
        (DataLoader(Stream(fails=90), batch_size=8), "epoch 0, batch 11, rows from 88 on"),
        (DataLoader(Stream(fails=90), batch_size=8, num_workers=1), "epoch 0, batch 11, rows from 88 on"),
    ],
)
def test_the_error_of_a_row_has_its_traceback(data: Any, where: str) -> None:
    with pytest.raises(UserCodeError, match="ValueError: no row 90") as raised:
        seen(stream(from_torch(data)))
    assert raised.value.where.endswith(where)
    told = ('raise ValueError(f"no row {number}")', 'File "<dynamic-code>", line')  # the latter as Ray 2.52 pickles
    assert any(each in raised.value.detail for each in told)


def test_a_function_that_raises_is_named() -> None:
    with pytest.raises(UserCodeError, match="ZeroDivisionError") as raised:
        from_torch(lambda: 1 // 0).index()
    assert "1 // 0" in raised.value.detail


def job(**fields: Any) -> tw.Job:
    given: dict[str, Any] = {"name": "n", "model": dict, "optimizer": list, "loss": max, "inputs": "x", "batch_size": 4}
    return tw.Job(**{**given, **fields})


def test_a_job_takes_loaders_as_they_are() -> None:
    made = job(train=DataLoader(Stream(), batch_size=7), evaluate=Numbers())
    assert (repr(made.train), repr(made.evaluate)) == ("from_torch(DataLoader)", "from_torch(Numbers)")
    assert repr(made.replace(batch_size=8).train) == "from_torch(DataLoader)"
    with pytest.raises(JobError, match=r"train= is not a data set, but a function: give tw\.datasets\.from_torch"):
        job(train=endless)


# --- Hugging Face -----------------------------------------------------------------------------------------------------


def numbered(first: list[int]) -> Iterator[Any]:
    for start in first:
        for number in range(start, start + 25):
            yield {"i": number, "text": f"row {number}"}


def streamed(shuffled: bool = True) -> Any:
    from datasets import IterableDataset as Streamed

    data = Streamed.from_generator(numbered, gen_kwargs={"first": [0, 25, 50, 75]})
    return data.shuffle(seed=3, buffer_size=30) if shuffled else data


@pytest.mark.parametrize("shuffled", [False, True])
def test_streamed_rows_are_shared_from_any_step_on(shuffled: bool) -> None:
    data = streamed(shuffled)
    whole = seen(stream(from_huggingface(data, rows=ROWS)))
    assert flat(whole[:7]) == looped(data)
    data.set_epoch(1)
    assert flat(whole[7:]) == looped(data)
    assert (flat(whole[7:]) != flat(whole[:7])) is shuffled
    check_shares(
        whole, lambda rank, total: stream(from_huggingface(streamed(shuffled), rows=ROWS), rank, total), [0, 9]
    )


def test_a_streamed_data_set_is_taken_by_a_job_and_its_length_is_asked_for() -> None:
    data = job(train=streamed()).train
    assert repr(data) == "from_huggingface(IterableDataset)"
    with pytest.raises(DataError, match=r"from_huggingface\(\.\.\., rows=\)"):
        data.index()
    note = from_huggingface(streamed(), rows=9).source.plan_note
    assert note.startswith("a streamed Hugging Face data set: rows come in its own order, every worker ")
    assert "counts exactly once" in note and "reads the pass's earlier rows again" in note


def test_the_splits_of_a_hugging_face_data_set_are_named() -> None:
    from datasets import Dataset, DatasetDict

    rows = Dataset.from_dict({"i": [0, 1]})
    with pytest.raises(JobError, match=r"train=: this DatasetDict .* name one of its splits: train, test"):
        job(train=DatasetDict({"train": rows, "test": rows}))
    assert job(train=rows).train.index().rows == 2


def test_a_share_of_a_streamed_data_set_is_refused() -> None:
    from datasets.distributed import split_dataset_by_node

    with pytest.raises(DataError, match="rows of one rank only"):
        from_huggingface(split_dataset_by_node(streamed(), 0, 2), rows=9).index()
