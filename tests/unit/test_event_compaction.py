"""Compaction of events: nothing is lost or doubled, whoever is killed, reads or compacts meanwhile."""

from __future__ import annotations

import functools
import json
import math
import random
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.sample_run import checkpointed, started, stepped, whole_run
from trainwright.core import events
from trainwright.reporting.run_history import RunHistory, read_steps
from trainwright.storage.event_files import (
    BRIEF_FILE,
    SUMMARY_FILE,
    EventCompactor,
    EventReader,
    append_event,
    batch_path,
    events_folder,
    find_event_files,
    read_brief_summary,
    read_events,
    read_run_summary,
)
from trainwright.storage.event_log import EventLog
from trainwright.storage.object_store import Store, open_store
from trainwright.storage.run_summary import RunSummary
from trainwright.storage.store_errors import MissingFile

RUN = "demo"


class Killed(BaseException):
    """The process ends here."""


class Memory(Store):
    """A store in memory that counts requests and bytes, and that ends its user before one of its changes."""

    def __init__(self, files: Mapping[str, bytes] | None = None) -> None:
        super().__init__(f"memory://{uuid.uuid4().hex}")
        self.files = dict(files or {})
        self.requests: Counter[str] = Counter()
        self.read_bytes = self.changes = 0
        self.kill_at: int | None = None
        self.before: Callable[[str, str], object] = lambda verb, path: None

    def _change(self, verb: str, path: str) -> None:
        self.before(verb, path)
        self.requests[verb] += 1
        if self.changes == self.kill_at:
            raise Killed
        self.changes += 1

    def put(self, path: str, *pieces: bytes | memoryview, sync: bool = True) -> None:
        self._change("put", path)
        self.files[path] = b"".join(pieces)

    def create(self, path: str, data: bytes) -> bool:
        self._change("create", path)
        return self.files.setdefault(path, data) is data

    def delete(self, paths: Iterable[str]) -> None:
        for path in paths:
            self._change("delete", path)
            self.files.pop(path, None)

    def get(self, path: str) -> bytes:
        self.before("get", path)
        self.requests["get"] += 1
        if path not in self.files:
            raise MissingFile("there is no such file", where=path)
        self.read_bytes += len(self.files[path])
        return self.files[path]

    def list(self, prefix: str = "", after: str | None = None) -> Iterator[tuple[str, int]]:
        self.requests["list"] += 1
        return iter([(path, len(data)) for path, data in sorted(self.files.items()) if path.startswith(prefix)])


def batch_of(happened: Iterable[events.Event]) -> bytes:
    return "".join(f"{event.to_json()}\n" for event in happened).encode()


def batches(count: int, *, token: int = 1, seed: int = 0) -> dict[str, bytes]:
    """A run of so many batches, with recoveries that lose steps."""
    draw, step, generation = random.Random(seed), 0, 1
    found = {batch_path(RUN, token, 0): batch_of([started(token=token), events.Formed(time_s=101, nodes={"a": "0"})])}
    for number in range(1, count):
        happened: list[events.Event] = [stepped(range(step + 1, step + 8), time_s=100 + number, generation=generation)]
        step += 7
        if draw.random() < 0.3:
            happened.append(events.Evaluated(time_s=100 + number, step=step, metrics={"loss": draw.random()}))
        if draw.random() < 0.3:
            happened.append(checkpointed(step, time_s=100 + number))
        if draw.random() < 0.2:
            step, generation = max(0, step - draw.randrange(20)), generation + 1
            happened.append(events.Failed(time_s=100 + number, worker=1, rank=1, cause=f"killed {number}"))
            happened.append(events.Formed(time_s=100 + number, generation=generation, step=step, seconds=1))
        found[batch_path(RUN, token, number)] = batch_of(happened)
    return found


def compact(store: Memory, at_s: float = 0.0, compactor: EventCompactor | None = None) -> EventCompactor:
    """Compact, and once more when the grace of readers is over."""
    now_s = [at_s]
    made = compactor or EventCompactor(store, RUN, clock=lambda: now_s[0])
    made.compact()
    now_s[0] += 100
    made.compact()
    return made


def told(store: Store) -> list[str]:
    return [event.to_json() for event in read_events(store, RUN)]


def folded(lines: Iterable[str]) -> RunSummary:
    folding = RunSummary()
    for line in lines:
        folding.add(events.from_json(line))
    return folding


def row(folding: RunSummary) -> tuple[object, ...]:
    """What a list of runs shows."""
    history = RunHistory(summary=folding, state=folding.state(owner_alive=True))
    loss = None if history.loss != history.loss else history.loss
    return (
        history.state,
        history.summary.step,
        history.summary.start.total_steps,
        loss,
        history.metrics,
        history.summary.last_s,
    )


# --- the same as before -----------------------------------------------------------------------------------------------


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000), cut=st.integers(0, 40), again=st.integers(0, 40))
def test_readers_see_the_same_before_and_after(seed: int, cut: int, again: int) -> None:
    whole = batches(40, seed=seed)
    paths, plain, store = sorted(whole), Memory(whole), Memory()
    for upto in sorted((cut, again)):  # compacted twice, at some batch
        store.files |= {path: whole[path] for path in paths[:upto] if path not in store.files}
        if upto:
            compact(store)
    covered = max((file.last + 1 for file in find_event_files(store, RUN)), default=0)
    store.files |= {path: whole[path] for path in paths[covered:]}
    assert told(store) == told(plain)
    assert read_run_summary(store, RUN).facts() == folded(told(plain)).facts()
    assert row(read_brief_summary(store, RUN)) == row(folded(told(plain)))


def test_a_folding_goes_on_from_its_facts_though_old_steps_are_merged() -> None:
    happened: list[events.Event] = [started(total=50_000), events.Formed(time_s=101, nodes={"a": "0"})]
    happened += [stepped(range(first, first + 100), time_s=first) for first in range(1, 30_000, 100)]
    happened += [events.Failed(time_s=30_001, cause="killed"), events.Formed(time_s=30_002, step=21_111, generation=2)]
    happened += [stepped(range(first, first + 100), time_s=9e4 + first) for first in range(21_112, 40_000, 100)]
    whole = folded(event.to_json() for event in happened)
    for cut in (150, 303, 350):
        parted = RunSummary.of(folded(event.to_json() for event in happened[:cut]).facts())
        for event in happened[cut:]:
            parted.add(event)
        assert parted.facts() == whole.facts()
    assert len(whole.steps) < 8192 and sum(whole.steps.column("count")) == 40_011
    history = RunHistory(summary=whole, state="running")
    assert history.samples_per_s == pytest.approx(2560) and history.wait_share == pytest.approx(0.2)
    assert history.median_step_s == 0.1 and history.summary.steps_lost == 29_900 + 100 - 21_111
    assert history.totals.computing_s == pytest.approx(40_011 * 0.08)
    assert history.totals.recovery_s == pytest.approx((30_000 - 21_111) * 0.1)
    assert history.loss == 1 / 40_011


def test_logged_values_are_columns_though_some_steps_have_none() -> None:
    plain, logging = stepped([1, 2], time_s=1.0), stepped([3, 4, 5], time_s=2.0)
    logging = replace(logging, logged={"kl": [0.3, 0.4, 0.5]})
    again = replace(stepped([5, 6], time_s=3.0), logged={"kl": [0.7, 0.6]})
    summary = RunSummary()
    for event in (started(), plain, logging, again):
        summary.add(event)
    summary = RunSummary.of(json.loads(json.dumps(summary.facts())))
    assert [record.logged["kl"] for record in summary.steps.records[2:]] == [0.3, 0.4, 0.7, 0.6]
    assert math.isnan(summary.steps.records[0].logged["kl"])
    joined = plain.followed_by(logging).after(1)
    assert math.isnan(joined.logged["kl"][0]) and joined.logged["kl"][1:] == [0.3, 0.4, 0.5]
    steps = range(1, 20_001)
    long = replace(stepped(steps, time_s=1.0), logged={"kl": [float(step % 2) for step in steps]})
    merged = RunSummary()
    merged.add(long)
    assert len(merged.steps) < 8192 and merged.steps.logged["kl"][100] == 0.5


def test_steps_that_report_waiting_now_and_then_are_merged_too() -> None:
    steps = range(1, 20_001)
    summary = RunSummary()
    summary.add(replace(stepped(steps, time_s=1.0), wait_s=[math.nan if step % 2 else 0.01 for step in steps]))
    assert len(summary.steps) < 8192 and sum(summary.steps.column("count")) == 20_000


def test_hundreds_of_logged_values_are_merged_quickly_and_stay_in_their_order() -> None:
    nan, steps = math.nan, range(1, 9001)
    values = [[1.0, nan, 3.0, 1e308, nan, nan, math.inf, 4.0][step % 8] for step in steps]
    long = replace(stepped(steps, time_s=1.0), logged={f"value {300 - number}": values for number in range(300)})
    summary, begun_s = RunSummary(), time.thread_time()
    summary.add(long)
    assert time.thread_time() - begun_s < 3, "the driver waits for it: column by column in Python it took 10 s"
    table = summary.steps
    assert [*table.logged] == [*long.logged] and len({repr(column) for column in table.logged.values()}) == 1
    assert list(table.column("count"))[:4] == [2] * 4 and list(table.column("step"))[:4] == [2, 4, 6, 8]
    assert repr([*table.logged["value 1"]][:4]) == "[3.0, 1e+308, nan, 2.5]"
    facts = summary.facts()
    assert isinstance(facts["steps"]["logged/value 1"], str), "as JSON, all numbers stop the driver's other threads"
    again = RunSummary.of(json.loads(json.dumps(facts)))
    assert again.facts() == facts and [*again.steps.logged] == [*long.logged]


def test_each_step_is_there_for_who_asks_for_it() -> None:
    store = Memory({batch_path(RUN, 1, 0): batch_of([started(), events.Formed(time_s=101)])})
    for number in range(1, 100):
        store.files[batch_path(RUN, 1, number)] = batch_of(
            [stepped(range(200 * number - 199, 200 * number + 1), time_s=number)]
        )
    compact(store)
    assert len(read_run_summary(store, RUN).steps) < 8192
    frame = read_steps(store, RUN)
    assert list(frame["step"]) == list(range(1, 19_801)) and list(frame["loss"][:2]) == [1.0, 0.5]


@pytest.mark.parametrize("kind", ["folder", "memory"])
def test_it_holds_on_real_stores(kind: str, tmp_path: Path) -> None:
    store = open_store(str(tmp_path) if kind == "folder" else f"memory://{uuid.uuid4().hex}")
    whole, seconds = batches(60), [0.0]
    compactor = EventCompactor(store, RUN, clock=lambda: seconds[0])
    for number, path in enumerate(sorted(whole)):
        store.put(path, whole[path])
        if number % 10 == 9:
            seconds[0] += 50
            compactor.compact()
    plain = Memory(whole)
    assert told(store) == told(plain) and len(find_event_files(store, RUN)) < 35
    assert read_run_summary(store, RUN).facts() == folded(told(plain)).facts()


# --- killed at any moment ---------------------------------------------------------------------------------------------


def test_a_kill_at_any_moment_loses_and_doubles_nothing() -> None:
    first, second = batches(20), batches(12, token=30, seed=5)
    whole = first | second
    expected, point, ended = told(Memory(whole)), 0, False
    while not ended:
        store = Memory(first)
        compact(store)
        store.files |= second
        store.kill_at = store.changes + point
        try:
            compact(store)
            ended = True
        except Killed:
            pass
        assert told(store) == expected, point
        assert read_run_summary(store, RUN).facts() == folded(expected).facts(), point
        assert row(read_brief_summary(store, RUN)) == row(folded(expected)), point
        store.kill_at = None
        compact(store, 1000.0)  # by the driver after it
        assert told(store) == expected, point
        assert sum(not file.packed for file in find_event_files(store, RUN)) == 0, point
        point += 1
    assert point > 10


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b'{"covered": {"1": 5}, "folded": {"format": 99}}'])
@pytest.mark.parametrize("name", [SUMMARY_FILE, BRIEF_FILE])
def test_a_summary_that_cannot_be_used_is_as_none(name: str, damage: bytes) -> None:
    store = Memory(batches(20))
    expected = told(store)
    compact(store)
    store.files[events_folder(RUN) + name] = damage
    assert row(read_run_summary(store, RUN)) == row(read_brief_summary(store, RUN)) == row(folded(expected))


def test_a_damaged_packed_file_gives_what_is_before_and_spreads_to_no_other() -> None:
    store = Memory(batches(20))
    expected = told(store)
    compact(store)
    (packed,) = [file for file in find_event_files(store, RUN) if file.packed]
    half = len(store.files[packed.path]) // 2
    store.files[packed.path] = store.files[packed.path][:half]
    *before, note = read_events(store, RUN)
    assert [event.to_json() for event in before] == expected[: len(before)] and 5 < len(before) < len(expected)
    assert isinstance(note, events.Noted) and packed.path in note.text and "cannot be read from batch" in note.text
    later = batch_of([stepped([999], time_s=999)])
    for number in range(20, 60):
        store.files[batch_path(RUN, 1, number)] = later
    compact(store)
    assert (
        len([event for event in read_events(store, RUN) if isinstance(event, events.Steps) and 999 in event.step]) == 40
    )


# --- at the same time -------------------------------------------------------------------------------------------------


def test_a_reader_that_follows_sees_each_event_once_though_files_change() -> None:
    whole = batches(60)
    store, expected, seen = Memory(), told(Memory(whole)), list[str]()
    reader = EventReader(store, RUN)
    for number, path in enumerate(sorted(whole)):
        store.files[path] = whole[path]
        if number % 7 == 3:
            compact(store, 1000.0 * number)
        if number % 5 == 0:
            seen += [event.to_json() for event in reader.read()]
    seen += [event.to_json() for event in reader.read()]
    assert seen == expected


@pytest.mark.parametrize("read", [told, lambda store: read_run_summary(store, RUN).facts()])
def test_a_file_that_is_deleted_under_a_reader_is_read_where_it_went(read: Callable[[Memory], object]) -> None:
    """Compaction strikes between the reader's list and each of its gets."""
    expected = read(Memory(batches(30)))
    for strike in range(0, 30, 3):
        store, gets = Memory(batches(30)), [0]

        def before(verb: str, path: str, *, strike: int, store: Memory, gets: list[int]) -> None:
            gets[0] += verb == "get"
            if gets[0] == strike + 1:
                store.before = lambda verb, path: None
                compact(store)

        store.before = functools.partial(before, strike=strike, store=store, gets=gets)
        assert read(store) == expected


def test_two_that_compact_at_the_same_time_lose_nothing() -> None:
    """A fenced driver, slow, between whose changes the new one compacts, each time after another change."""
    first, second = batches(20), batches(12, token=30, seed=5)
    expected, done, point = told(Memory(first | second)), False, 0
    while not done:
        store, changes = Memory(first), [0]
        slow = EventCompactor(store, RUN, clock=lambda: 0.0)
        slow.compact()

        def before(verb: str, path: str, *, store: Memory, changes: list[int], point: int) -> None:
            changes[0] += verb != "get"
            if changes[0] == point + 1:
                store.before = lambda verb, path: None
                store.files |= second
                compact(store)

        store.files[batch_path(RUN, 1, 20)] = b""
        store.before = functools.partial(before, store=store, changes=changes, point=point)
        slow.compact()
        done = store.before.__class__ is functools.partial
        store.files |= second
        assert told(store) == expected and row(read_run_summary(store, RUN)) == row(folded(expected)), point
        compact(store, 1000.0)
        assert told(store) == expected and row(read_brief_summary(store, RUN)) == row(folded(expected)), point
        point += 1
    assert point > 2


def test_what_a_fenced_driver_tells_late_belongs_before_its_successor() -> None:
    first, second = batches(20), batches(12, token=30, seed=5)
    late = batch_path(RUN, 1, 20)
    store = Memory(first | second)
    compact(store)
    store.files[late] = batch_of([stepped(range(500, 600), time_s=150), events.Noted(time_s=151, text="late")])
    expected = told(Memory(first | second | {late: store.files[late]}))
    for _ in range(2):
        assert told(store) == expected
        assert read_run_summary(store, RUN).facts() == folded(expected).facts()
        assert row(read_brief_summary(store, RUN)) == row(folded(expected))
        compact(store)


def test_what_is_appended_while_another_compacts_is_kept() -> None:
    store = Memory(batches(10))
    other = events.Noted(time_s=900, text="of another process")

    def race(verb: str, path: str) -> None:
        if verb == "create":  # another process appended under this number, and a driver packed it
            store.before = lambda verb, path: None
            store.files[path] = batch_of([other])
            compact(store)

    store.before = race
    judged = append_event(store, RUN, events.Judged(text="kept"))
    assert read_events(store, RUN)[-2:] == [other, judged]


# --- growth -----------------------------------------------------------------------------------------------------------


@functools.cache
def files_of_long_run(batches: int, every: int) -> Mapping[str, bytes]:
    """A run that was compacted each so many batches of 100 steps, with a minute in between."""
    store, seconds = Memory(), [0.0]
    compactor = EventCompactor(store, RUN, clock=lambda: seconds[0])
    store.files[batch_path(RUN, 1, 0)] = batch_of([started(total=10**6), events.Formed(time_s=101, nodes={"a": "0"})])
    for number in range(1, batches):
        steps = stepped(range(100 * number - 99, 100 * number + 1), time_s=100 + number)
        store.files[batch_path(RUN, 1, number)] = batch_of([steps])
        if number % every == 0:
            seconds[0] += 61
            compactor.compact()
    return store.files


def short_and_long_run() -> tuple[Memory, Memory]:
    """Of 201 and of 1001 batches, each compacted after its last one."""
    short, long = (Memory(files_of_long_run(batches, every=10)) for batches in (201, 1001))
    return short, long


def cost(store: Memory, read: Callable[[Memory, str], object]) -> tuple[int, int]:
    """Requests and bytes."""
    store.requests.clear()
    store.read_bytes = 0
    read(store, RUN)
    return store.requests.total(), store.read_bytes


def test_reading_a_run_does_not_grow_with_it() -> None:
    short, long = short_and_long_run()
    for read, most, most_bytes in ((read_run_summary, 12, 2_000_000), (read_brief_summary, 12, 120_000)):
        requests, read_bytes = cost(long, read)
        assert requests <= most and read_bytes <= most_bytes, read
        assert requests == cost(short, read)[0], read
    assert len(find_event_files(long, RUN)) < 50
    assert (
        len(long.files[events_folder(RUN) + SUMMARY_FILE]) < 1_500_000
        and len(long.files[events_folder(RUN) + BRIEF_FILE]) < 3_000
    )


def test_compacting_costs_no_more_late_than_early() -> None:
    early, late = short_and_long_run()
    for store, first in ((early, 201), (late, 1001)):
        for number in range(first, first + 10):
            store.files[batch_path(RUN, 1, number)] = batch_of([stepped([100 * number], time_s=100 + number)])
    requests = [cost(store, lambda store, run: EventCompactor(store, run).compact())[0] for store in (early, late)]
    assert requests[1] <= requests[0] + 8


def test_an_event_log_compacts_what_it_wrote() -> None:
    store = Memory()
    with EventLog(store, RUN, flush_s=3600, compact=EventCompactor(store, RUN).compact) as journal:
        journal.open(1)
        for event in whole_run():
            journal.write(event)
            journal.flush()
    assert sorted(path.rpartition("/")[2] for path in store.files if "json" not in path.rpartition(".")[2]) == [
        "00000001-000000-000013.jsonl.gz"
    ]
    assert told(store) == [event.to_json() for event in whole_run()]
    assert row(read_brief_summary(store, RUN)) == row(folded(told(store)))
