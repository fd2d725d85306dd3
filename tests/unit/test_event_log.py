"""Events to storage and back: nothing is lost, nothing doubled, whatever the store does."""

from __future__ import annotations

import math
import threading

import pytest

from tests.support.fake_store import FakeStore
from tests.support.sample_run import Recorder, kinds, started, stepped, whole_run
from trainwright.core import events
from trainwright.reporting.run_history import RunHistory, read_steps
from trainwright.storage.event_files import EventReader, append_event, read_events
from trainwright.storage.event_log import EventLog


@pytest.fixture
def store() -> FakeStore:
    return FakeStore()


def journal(store: FakeStore, token: int = 7) -> EventLog:
    made = EventLog(store, "demo", clock=lambda: 50.0, flush_s=3600)
    made.open(token)
    return made


def test_what_comes_to_light_after_a_run_follows_what_its_last_driver_told(store: FakeStore) -> None:
    for token in (7, 12):
        with journal(store, token) as writer:
            for event in whole_run():
                writer.write(event)
    judged = append_event(store, "demo", events.Judged(text="kept", verdict={"rows": 3}))
    again = append_event(store, "demo", events.Judged(text="kept again"))
    told = read_events(store, "demo")
    assert told[-2:] == [judged, again] and judged.time_s > 0
    assert len(told) == 2 * len(whole_run()) + 2
    history = RunHistory.fold(told)
    assert history.summary.judged == again and history.state == "done"
    assert history.totals == RunHistory.fold(told[:-2]).totals  # it took nothing of the run's time


def test_events_come_back_as_they_were_written(store: FakeStore) -> None:
    with journal(store) as writer:
        for event in whole_run():
            writer.write(event)
        writer.flush()
        writer.write(events.Noted(text="later"))
    assert sorted(store.files) == ["demo/events/00000007-000000.jsonl", "demo/events/00000007-000001.jsonl"]
    expected = [*whole_run(), events.Noted(time_s=50.0, text="later")]
    assert [event.to_json() for event in read_events(store, "demo")] == [event.to_json() for event in expected]


def test_nothing_is_written_before_the_token_is_known(store: FakeStore) -> None:
    writer = EventLog(store, "demo", flush_s=3600)
    writer.write(events.Waiting(time_s=1, what="the log"))
    assert not writer.flush() and not store.files
    writer.open(3)
    assert writer.close()
    assert list(store.files) == ["demo/events/00000003-000000.jsonl"]


def test_an_event_log_that_was_never_opened_closes_at_once(store: FakeStore) -> None:
    writer = EventLog(store, "demo")
    writer.write(events.Noted(text="x"))
    assert not writer.close(patience_s=30)
    assert not store.files


@pytest.mark.parametrize("how", ["refused", "landed"])
def test_a_batch_that_failed_is_written_again_with_the_same_bytes(store: FakeStore, how: str) -> None:
    store.fails = [how, how]
    writer = journal(store)
    writer.write(stepped([1], time_s=1))
    assert not writer.flush()
    writer.write(stepped([2], time_s=2))
    assert not writer.flush()
    assert writer.flush()
    writer.close()
    read = read_events(store, "demo")
    assert [event.step for event in read if isinstance(event, events.Steps)] == [[1], [2]]
    assert store.puts[0] == store.puts[1] == store.puts[2]


def test_a_failing_store_is_said_once_and_its_return_once(store: FakeStore) -> None:
    store.fails = ["refused"] * 5
    writer, ears = journal(store), Recorder()
    writer.listen(ears)
    writer.write(stepped([1], time_s=1))
    for _ in range(5):
        assert not writer.flush()
    writer.close()
    notes = [event.text for event in ears.heard if isinstance(event, events.Noted)]
    assert len(notes) == 2
    assert "the store does not answer" in notes[0] and "none was lost" in notes[1]
    assert kinds(read_events(store, "demo")) == ["steps", "noted", "noted"]


def test_close_gives_up_after_its_patience(store: FakeStore) -> None:
    store.fails = ["refused"] * 1000
    writer = journal(store)
    writer.write(stepped([1], time_s=1))
    assert not writer.close(patience_s=0.01)
    ears = Recorder()
    writer.listen(ears)
    assert ears.heard[0].kind == "steps"


def test_the_thread_writes_without_being_asked(store: FakeStore) -> None:
    written = threading.Event()
    put = store.put

    def told(path: str, data: bytes) -> None:
        put(path, data)
        written.set()

    store.put = told  # type: ignore[method-assign]
    with EventLog(store, "demo", flush_s=0.01) as writer:
        writer.open(1)
        writer.write(events.Noted(text="x"))
        assert written.wait(10)


def test_flush_soon_wakes_the_thread(store: FakeStore) -> None:
    written = threading.Event()
    put = store.put

    def told(path: str, data: bytes) -> None:
        put(path, data)
        written.set()

    store.put = told  # type: ignore[method-assign]
    with journal(store) as writer:
        writer.write(events.Noted(text="x"))
        writer.flush_soon()
        assert written.wait(10)


def test_listeners_hear_everything_in_order_and_are_closed(store: FakeStore) -> None:
    early, late = Recorder(), Recorder()
    writer = journal(store)
    writer.listen(early)
    writer.write(started())
    writer.listen(late)
    writer.write(stepped([1], time_s=1))
    writer.close()
    assert kinds(early.heard) == kinds(late.heard) == ["run_started", "steps"]
    assert early.closed and late.closed


def test_a_listener_that_raises_is_taken_off_and_said(store: FakeStore) -> None:
    class Broken(Recorder):
        def on(self, event: events.Event) -> None:
            raise OSError("disk full")

    writer, ears = journal(store), Recorder()
    writer.listen(Broken())
    writer.listen(ears)
    for step in (1, 2):
        writer.write(stepped([step], time_s=step))
    assert writer.close()
    notes = [event.text for event in ears.heard if isinstance(event, events.Noted)]
    assert notes == ["Broken failed and is switched off; training continues: OSError: disk full"]


def test_many_threads_lose_nothing(store: FakeStore) -> None:
    writer = journal(store)

    def write(number: int) -> None:
        for count in range(50):
            writer.write(events.Noted(text=f"{number}.{count}"))
            writer.flush()

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    writer.close()
    read = read_events(store, "demo")
    assert len({event.text for event in read if isinstance(event, events.Noted)}) == len(read) == 200


def test_batches_come_in_order_of_token_then_number(store: FakeStore) -> None:
    for token, number in ((10, 0), (9, 1), (9, 0), (100000000, 0)):
        text = f"{token}.{number}"
        store.files[f"demo/events/{token:08d}-{number:06d}.jsonl"] = events.Noted(text=text).to_json().encode() + b"\n"
    read = read_events(store, "demo")
    assert [event.text for event in read if isinstance(event, events.Noted)] == ["9.0", "9.1", "10.0", "100000000.0"]


def test_a_torn_batch_gives_what_is_before_the_tear_and_says_so(store: FakeStore) -> None:
    whole = "".join(f"{stepped([step], time_s=step).to_json()}\n" for step in (1, 2, 3)).encode()
    store.files["demo/events/00000001-000000.jsonl"] = whole[:-40]
    store.files["demo/events/00000002-000000.jsonl"] = stepped([3], time_s=9).to_json().encode()
    read = read_events(store, "demo")
    assert kinds(read) == ["steps", "steps", "noted", "steps"]
    assert isinstance(read[2], events.Noted)
    assert "00000001-000000.jsonl" in read[2].text and "line 3" in read[2].text


def test_bytes_that_are_no_text_are_a_tear_too(store: FakeStore) -> None:
    store.files["demo/events/00000001-000000.jsonl"] = b"\xff\xfe\x00"
    assert kinds(read_events(store, "demo")) == ["noted"]


def test_a_reader_reads_each_batch_once(store: FakeStore) -> None:
    writer, reader = journal(store), EventReader(store, "demo")
    writer.write(stepped([1], time_s=1))
    writer.flush()
    assert len(list(reader.read())) == 1
    assert list(reader.read()) == []
    writer.write(stepped([2], time_s=2))
    writer.close()
    assert [event.step for event in reader.read() if isinstance(event, events.Steps)] == [[2]]


# --- history ----------------------------------------------------------------------------------------------


def test_a_step_done_again_replaces_the_earlier_one() -> None:
    history = RunHistory.fold(whole_run())
    assert [record.step for record in history.records] == list(range(1, 21))
    assert [history.records[place].loss for place in (9, 10, 11)] == [0.1, 0.05, 0.05]
    assert {record.generation for record in history.records[10:]} == {2}
    assert history.summary.steps_lost == 2


def test_after_a_recovery_lost_steps_are_gone_until_they_are_done_again() -> None:
    history = RunHistory.fold(whole_run()[:10])
    assert history.summary.step == 10 and len(history.records) == 10


def test_an_evaluation_of_a_lost_step_is_lost_with_it() -> None:
    evaluated = events.Evaluated(time_s=107.2, step=12, metrics={"accuracy": 0.1})
    history = RunHistory.fold([*whole_run()[:9], evaluated, *whole_run()[9:10]])
    assert [item.step for item in history.evaluated] == [10]


def test_where_time_went_adds_up() -> None:
    totals = RunHistory.fold(whole_run()).totals
    assert totals.wall_s == pytest.approx(12)
    assert totals.start_s == pytest.approx(4)
    assert totals.computing_s == pytest.approx(20 * 0.08)
    assert totals.data_s == pytest.approx(20 * 0.02)
    assert totals.recovery_s == pytest.approx(2 + 2 * 0.1)
    assert totals.evaluation_s == pytest.approx(3)
    assert totals.checkpoint_s == pytest.approx(0.2)
    parts = totals.computing_s + totals.data_s + totals.start_s + totals.recovery_s + totals.checkpoint_s
    assert parts + totals.evaluation_s + totals.other_s == pytest.approx(totals.wall_s)
    assert totals.goodput == pytest.approx(1.6 / 12)


@pytest.mark.parametrize(
    ("count", "alive", "state"),
    [(14, True, "done"), (14, False, "done"), (13, True, "running"), (13, False, "interrupted"), (1, True, "running")],
)
def test_state(count: int, alive: bool, state: str) -> None:
    assert RunHistory.fold(whole_run()[:count], owner_alive=alive).state == state


def test_a_driver_that_died_is_followed_by_a_session_that_resumes() -> None:
    resumed = events.Formed(time_s=205, step=10, source="checkpoint", checkpoint="checkpoints/00000010-1", seconds=5)
    again = [started(token=2, time_s=200), resumed, stepped(range(11, 21), time_s=206)]
    history = RunHistory.fold([*whole_run()[:8], *again])
    assert [session.token for session in history.summary.time.sessions] == [1, 2]
    assert history.summary.resumes == [resumed] and not history.summary.recoveries
    assert history.totals.wall_s == pytest.approx(7.3 + 6)
    assert history.totals.start_s == pytest.approx(4 + 5)
    assert history.summary.steps_lost == 2


def test_a_fresh_start_forgets_what_was_before() -> None:
    history = RunHistory.fold([*whole_run(), started(token=9, time_s=300, fresh=True), events.Formed(time_s=301)])
    assert history.records == () and not history.summary.failures and history.summary.steps_lost == 0
    assert [session.token for session in history.summary.time.sessions] == [9]
    assert history.state == "running"


def test_frames(store: FakeStore) -> None:
    with journal(store) as writer:
        for event in whole_run():
            writer.write(event)
    steps, history = read_steps(store, "demo"), RunHistory.fold(whole_run())
    assert list(steps.columns) == [
        "step", "epoch", "loss", "learning_rate", "gradient_norm", "samples_per_s", "wait_share", "generation",
    ]  # fmt: skip
    assert list(steps["epoch"]) == [1] * 10 + [2] * 10
    assert steps["samples_per_s"].iloc[0] == pytest.approx(2560)
    assert steps["wait_share"].iloc[0] == pytest.approx(0.2)
    assert list(history.evaluations.columns) == ["step", "epoch", "accuracy", "loss", "seconds"]
    assert list(history.evaluations["accuracy"]) == [0.8, 0.9]


def test_frames_of_nothing_have_their_columns(store: FakeStore) -> None:
    history, steps = RunHistory.fold([]), read_steps(store, "demo")
    assert len(steps) == 0 and "loss" in steps.columns
    assert list(history.evaluations.columns) == ["step", "epoch", "seconds"]
    assert math.isnan(history.loss) and math.isnan(history.samples_per_s) and math.isnan(history.median_step_s)


def test_throughput_and_waiting() -> None:
    history = RunHistory.fold(whole_run())
    assert history.samples_per_s == pytest.approx(2560)
    assert history.wait_share == pytest.approx(0.2)
    assert history.metrics == {"accuracy": 0.9, "loss": 0.3}
