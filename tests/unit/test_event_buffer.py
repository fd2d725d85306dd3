"""Events that wait for a store: bounded, what matters is kept, what goes is said."""

from __future__ import annotations

from tests.support.fake_store import FakeStore
from tests.support.sample_run import Recorder, stepped
from trainwright.core import events
from trainwright.storage.event_files import read_events
from trainwright.storage.event_log import EventBuffer, EventLog, thin_steps


def steps_of(items: list[events.Event]) -> list[int]:
    return [step for item in items if isinstance(item, events.Steps) for step in item.step]


def test_every_second_record_goes_and_the_newest_stays() -> None:
    told = [stepped(range(start, start + 3), time_s=start) for start in range(1, 13, 3)]
    left = thin_steps([*told[:2], events.Formed(step=6), *told[2:]])
    assert steps_of(left) == [2, 4, 6, 8, 10, 12]
    assert [type(item).__name__ for item in left] == ["Steps", "Formed", "Steps"]
    first = left[0]
    assert isinstance(first, events.Steps)
    assert {len(value) for value in vars(first).values() if isinstance(value, list)} == {3}


def test_records_of_other_generations_stay_apart() -> None:
    again = events.Steps(**{**vars(stepped([2, 3], time_s=9)), "generation": 2})
    left = thin_steps([stepped([1, 2, 3], time_s=5), again])
    assert [(item.generation, item.step) for item in left if isinstance(item, events.Steps)] == [(1, [1, 3]), (2, [3])]


def test_a_backlog_stays_within_its_bounds_and_keeps_what_matters() -> None:
    backlog = EventBuffer(most_steps=100, most_lesser=10)
    kept: list[events.Event] = []
    for step in range(1, 5001):
        backlog.add(stepped([step], time_s=step))
        if step % 100 == 0:
            backlog.add(events.CheckpointSkipped(step=step, reason="the store cannot be reached"))
        if step % 500 == 0:
            kept += [events.Failed(step=step), events.Formed(step=step), events.Checkpointed(step=step)]
            kept += [events.Noted(text=str(step)), events.Evaluated(step=step)]
            for event in kept[-5:]:
                backlog.add(event)
        assert len(steps_of(backlog.items)) <= 100 and len(backlog.items) < 250
    skipped = [item for item in backlog.items if isinstance(item, events.CheckpointSkipped)]
    assert len(skipped) <= 10 and skipped[-1].step == 5000
    assert [item for item in backlog.items if not isinstance(item, (events.Steps, events.CheckpointSkipped))] == kept
    left = steps_of(backlog.items)
    assert left == sorted(left) and left[-1] == 5000 and backlog.steps_dropped == 5000 - len(left)
    assert backlog.lesser_dropped == 50 - len(skipped)
    assert backlog.take() and not backlog.items and not backlog.dropping


def test_an_event_log_that_waits_too_long_says_what_it_dropped() -> None:
    store, ears = FakeStore(), Recorder()
    store.fails = ["refused"] * 3
    journal = EventLog(store, "demo", flush_s=3600, backlog=lambda: EventBuffer(most_steps=50))
    journal.open(1)
    journal.listen(ears)
    journal.write(stepped([1], time_s=1))
    assert not journal.flush()
    for step in range(2, 202):
        journal.write(stepped([step], time_s=step))
    journal.write(events.Failed(step=201, cause="a worker died"))
    assert not journal.flush()
    assert not journal.flush()
    assert journal.flush() and journal.close()
    read = read_events(store, "demo")
    left = steps_of(read)
    assert left[0] == 1 and left[-1] == 201 and 25 <= len(left) <= 51
    assert [event.cause for event in read if isinstance(event, events.Failed)] == ["a worker died"]
    notes = [event.text for event in ears.heard if isinstance(event, events.Noted)]
    assert notes == [event.text for event in read if isinstance(event, events.Noted)]
    assert len(notes) == 3 and "cannot be written" in notes[0] and "only some of these steps are kept" in notes[1]
    assert f"the records of {201 - len(left)} steps did not fit into memory and are lost" in notes[2]


def test_events_that_cannot_be_written_at_the_end_are_said_to_be_lost() -> None:
    store, ears = FakeStore(), Recorder()
    store.fails = ["refused"] * 1000
    journal = EventLog(store, "demo", flush_s=3600)
    journal.open(1)
    journal.listen(ears)
    for step in (1, 2):
        journal.write(stepped([step], time_s=step))
        assert not journal.flush()
    assert not journal.close(patience_s=0.01)
    last = ears.heard[-1]
    assert isinstance(last, events.Noted) and "the last 3 events could not be written" in last.text and ears.closed


def test_a_store_that_takes_less_than_comes_is_no_failure_and_said_all_the_same() -> None:
    store, ears = FakeStore(), Recorder()
    journal = EventLog(store, "demo", flush_s=3600, backlog=lambda: EventBuffer(most_steps=10))
    journal.listen(ears)
    for step in range(1, 31):
        journal.write(stepped([step], time_s=step))
    journal.open(1)
    assert journal.flush() and journal.close()
    notes = [event.text for event in ears.heard if isinstance(event, events.Noted)]
    assert len(notes) == 2 and "did not fit into memory" in notes[1]
