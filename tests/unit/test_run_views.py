"""`runs_view`, `run_view` and `log_lines` from storage alone, whatever became of the driver."""

from __future__ import annotations

import itertools
import json
import os
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.table import Table

from tests.support.run_views import ALIVE, printed, record, storage
from tests.support.sample_run import started, stepped, whole_run
from trainwright.cli import main as cli
from trainwright.cli.options import terminal_console
from trainwright.core import events
from trainwright.core.errors import StorageError
from trainwright.reporting import run_views as views
from trainwright.reporting.run_history import read_history
from trainwright.storage.event_files import EventCompactor
from trainwright.storage.event_log import EventLog
from trainwright.storage.object_store import Store, open_store
from trainwright.storage.run_log import Owner, RunLog, heartbeat_path, owner_alive

Where = Callable[[], str]
DEAD = Owner(host=ALIVE.host, boot=ALIVE.boot, namespace=ALIVE.namespace, pid=ALIVE.pid, started=ALIVE.started + 1)
ELSEWHERE = Owner(host="far", boot="another", namespace="another", pid=7, started=7)


def test_runs_lists_all_with_the_newest_on_top() -> None:
    uri = storage()
    record(uri, whole_run(), outcome="done")
    record(uri, [started(time_s=500)], name="young")
    open_store(uri).put("notes/readme.txt", b"no run")
    view = views.runs_view(uri)
    assert [(row["name"], row["state"], row["step"], row["total_steps"]) for row in view.data] == [
        ("young", "running", 0, 20), ("demo", "done", 20, 20),
    ]  # fmt: skip
    assert view.data[0]["loss"] is None and view.data[1]["loss"] == pytest.approx(0.05)
    assert view.data[1]["metrics"] == {"accuracy": 0.9, "loss": 0.3}
    text = printed(view)
    assert "demo" in text and "20/20" in text and "accuracy 0.9000" in text


@pytest.mark.parametrize("compacted", [False, True])
def test_after_a_fresh_start_the_views_show_the_new_run_alone(compacted: bool) -> None:
    uri, store = (where := storage()), open_store(where)
    record(uri, whole_run(), owner=DEAD, checkpoint="checkpoints/00000020-1")
    store.put("demo/checkpoints/00000020-1/MANIFEST.json", b"{}")
    if compacted:
        EventCompactor(store, "demo").compact()
    record(uri, [started(token=3, time_s=500, fresh=True)], owner=DEAD, fresh=True)
    first = views.run_view(uri, "demo").data
    assert first["checkpoints"] == first["failures"] == first["recoveries"] == [] and first["step"] == 0
    assert first["changed_s"] == views.runs_view(uri).data[0]["changed_s"] == 500
    assert first["loss"] is None and first["metrics"] == {} and first["steps_lost"] == 0
    record(uri, [started(token=4, time_s=600), events.Formed(time_s=601)])
    later = views.run_view(uri, "demo").data
    assert read_history(store, "demo").summary.told == later["steps_lost"] == 0
    assert views.runs_view(uri).data[0]["step"] == 0


def test_no_runs() -> None:
    uri = storage()
    open_store(uri).put("x.txt", b"")
    view = views.runs_view(uri)
    assert view.data == [] and "no runs in memory://" in printed(view)


@pytest.mark.parametrize(
    ("count", "owner", "outcome", "state"),
    [
        (8, ALIVE, "", "running"),
        (8, DEAD, "", "interrupted"),
        (14, ALIVE, "done", "done"),
        (13, ALIVE, "done", "done"),  # the last batch of events was lost, the log knows
        (8, ALIVE, "stopped", "stopped"),
        (8, ALIVE, "failed", "failed"),
    ],
)
def test_state(count: int, owner: Owner, outcome: str, state: str) -> None:
    uri = storage()
    record(uri, whole_run()[:count], owner=owner, outcome=outcome)
    assert views.run_view(uri, "demo").data["state"] == state


@pytest.mark.parametrize(("owner", "state"), [(ALIVE, "running"), (DEAD, "interrupted")])
def test_a_new_driver_that_has_written_nothing_yet(owner: Owner, state: str) -> None:
    uri = storage()
    record(uri, whole_run(), outcome="done")
    RunLog(open_store(uri), "demo").acquire(owner, {})
    assert read_history(open_store(uri), "demo").state == state


@pytest.mark.parametrize("beats", [True, False])
def test_a_driver_elsewhere_is_known_by_its_counter(beats: bool) -> None:
    store = open_store(storage())
    head = RunLog(store, "demo").acquire(ELSEWHERE, {})
    counts = itertools.count()

    def wait(seconds: float) -> None:
        if beats:
            store.put(heartbeat_path("demo", head.token), str(next(counts)).encode())

    assert owner_alive(store, "demo", head, wait=wait) is beats


def test_show_has_everything_and_is_json() -> None:
    uri = storage()
    record(uri, whole_run(), outcome="done", checkpoint="checkpoints/00000020-1")
    store = open_store(uri)
    store.put("demo/checkpoints/00000020-1/model", b"x" * 100)
    store.put("demo/checkpoints/00000020-1/MANIFEST.json", b"{}")
    store.put("demo/checkpoints/00000030-1/model", b"torn")
    view = views.run_view(uri, "demo")
    data = json.loads(json.dumps(view.data, allow_nan=False))
    assert data["checkpoints"] == [{"step": 20, "path": "checkpoints/00000020-1", "size_bytes": 102}]
    assert data["failures"][0]["cause"] == "killed by SIGKILL"
    assert data["recoveries"] == [
        {
            "time_s": 109.3,
            "step": 10,
            "cause": "killed by SIGKILL",
            "source": "checkpoint",
            "seconds": 2,
            "steps_lost": 2,
        }
    ]
    assert 0 < data["goodput"] < 1
    assert data["seconds"]["wall"] == pytest.approx(12)
    assert data["report"] is None and data["waiting"] == ""
    assert data["nodes"] == {"node-a": "0", "node-b": "1"}, "as it is after the recovery"
    assert data["mesh"] == [{"node": "node-a, node-b", "ranks": "0-1", "data": "0-1, 1 on each"}]
    text = printed(view)
    for said in (
        "demo  done", "data_parallel: 2 workers", "step 20/20, epoch 2/2", "102 B", "SIGKILL", "2 steps lost",
        "node-a, node-b",
    ):  # fmt: skip
        assert said in text


def test_show_of_a_dead_driver_names_the_remedy() -> None:
    uri = storage()
    record(uri, whole_run()[:8], owner=DEAD)
    assert "run the same command again" in printed(views.run_view(uri, "demo"))


def test_show_says_what_a_run_waits_for() -> None:
    uri = storage()
    record(uri, [started(), events.Waiting(time_s=101, what="2 GPU", deadline_s=300)])
    assert views.run_view(uri, "demo").data["waiting"] == "waiting for 2 GPU, at most 3 min 19 s"


def _elsewhere(uri: str, count: int) -> None:
    """Runs whose drivers are on another machine; every second one lives."""
    for number in range(count):
        record(uri, [started(time_s=number)], name=f"run-{number}", owner=ELSEWHERE)
        open_store(uri).put(heartbeat_path(f"run-{number}", 1), b"0")


def test_all_drivers_are_watched_at_the_same_time() -> None:
    uri, waits = storage(), list[float]()
    _elsewhere(uri, 40)

    def beat(seconds: float) -> None:
        waits.append(seconds)
        for number in range(0, 40, 2):
            open_store(uri).put(heartbeat_path(f"run-{number}", 1), b"%d" % len(waits))

    view = views.runs_view(uri, wait=beat)
    assert {row["name"] for row in view.data if row["state"] == "running"} == {f"run-{n}" for n in range(0, 40, 2)}
    assert {row["state"] for row in view.data} == {"running", "interrupted"} and sum(waits) <= 4


def test_a_heartbeat_of_long_ago_is_not_waited_for(tmp_path: Path) -> None:
    _elsewhere(str(tmp_path), 3)
    head = RunLog(open_store(str(tmp_path)), "run-0").head()
    for number in range(3):
        os.utime(tmp_path / heartbeat_path(f"run-{number}", 1), (0, time.time() - 4000))

    def wait(seconds: float) -> None:
        pytest.fail("waited for a driver that has been silent for more than an hour")

    assert not owner_alive(open_store(str(tmp_path)), "run-0", head, wait=wait)


def test_a_list_of_runs_takes_few_requests_for_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, requests, read_bytes = open_store(str(tmp_path)), Counter[str](), [0]
    for number in range(5):
        name = f"run-{number}"
        log = RunLog(store, name)
        token = log.acquire(ALIVE, {"name": name}).token
        with EventLog(store, name, flush_s=3600, compact=EventCompactor(store, name).compact) as journal:
            journal.open(token)
            journal.write(started(total=10**6))
            for first in range(1, 10_000, 1000):
                journal.write(stepped(range(first, first + 1000), time_s=first))
                journal.flush()
        log.release(token, "done")

    def counted(name: str) -> None:
        before: Callable[..., Any] = getattr(Store, name)

        def count(self: Store, *arguments: Any) -> Any:
            requests[name] += 1
            found = before(self, *arguments)
            read_bytes[0] += len(found) if isinstance(found, bytes) else 0
            return found

        monkeypatch.setattr(Store, name, count)

    for name in ("get", "size", "list", "folders", "modified_s"):
        counted(name)
    assert [(row["step"], row["state"]) for row in views.runs_view(str(tmp_path)).data] == [(10_000, "done")] * 5
    assert requests.total() <= 5 * 6 + 1 and read_bytes[0] < 5 * 5_000, (requests, read_bytes)


def test_an_unknown_run_is_refused_with_the_nearest_name() -> None:
    uri = storage()
    record(uri, whole_run(), outcome="done")
    for read in (views.run_view, views.log_lines):
        with pytest.raises(StorageError, match="did you mean 'demo'"):
            read(uri, "dmeo")


def test_logs_are_lines_or_json() -> None:
    uri = storage()
    record(uri, whole_run(), outcome="done")
    lines = list(views.log_lines(uri, "demo"))
    assert len(lines) == len(whole_run())
    assert any("rank 1 (node-a, pid 12) failed at about step 12: killed by SIGKILL" in line for line in lines)
    assert any("evaluation at step 20 (epoch 2): loss 0.3000, accuracy 0.9000" in line for line in lines)
    parsed = [json.loads(line) for line in views.log_lines(uri, "demo", as_json=True)]
    assert [item["kind"] for item in parsed][:2] == ["run_started", "placed"]


def test_steps_of_ten_seconds_share_a_line() -> None:
    uri = storage()
    parts = [stepped(range(1 + 2 * n, 3 + 2 * n), time_s=105 + 4 * n) for n in range(4)]
    evaluated = events.Evaluated(time_s=118, step=8, metrics={"loss": 0.5}, seconds=1)
    record(uri, [started(), *parts[:3], parts[3], evaluated, stepped([9], time_s=119), stepped([10], time_s=119.1)])
    lines = [line.split("  ", 1)[1] for line in views.log_lines(uri, "demo")][1:]
    assert [line.partition(":")[0] for line in lines] == [
        "steps 1 to 6", "steps 7 to 8", "evaluation at step 8 (epoch 1)", "steps 9 to 10",
    ]  # fmt: skip
    assert len(list(views.log_lines(uri, "demo", as_json=True))) == 8


def test_nothing_that_was_stored_is_carried_out_by_a_terminal() -> None:
    """`\\x1b]0;` sets a window's title, `\\x1b[2J` clears it, `\\x9b` begins such too, U+202E turns text around."""
    uri, bad = storage(), "\x1b]0;title\x07\x1b[2J\x9b31m\r\b\u202e"
    failed = events.Failed(cause=f"cause {bad}", detail=f"one\ttwo\nthree {bad}")
    noted = events.Noted(text=f"note {bad}")
    judged = events.Evaluated(step=1, metrics={f"loss{bad}": 1.0})
    record(uri, [started(), failed, noted, judged])
    told = "\n".join(
        [*views.log_lines(uri, "demo"), printed(views.run_view(uri, "demo")), printed(views.runs_view(uri))]
    )
    assert "\\x1b]0;title\\x07\\x1b[2J\\x9b31m\\r\\x08\\u202e" in told
    assert not set(bad) & set(told) - set(" ]0;title[231mJ") and "one\ttwo\n" in told
    assert not set(bad) & set("".join(views.log_lines(uri, "demo", as_json=True))) - set(" ]0;title[231mJ")


def test_brackets_in_names_are_no_markup() -> None:
    uri, name = storage(), "iou[/road] f1[macro] :cat:"
    record(uri, [started(), events.Evaluated(step=1, metrics={name: 0.5})])
    assert f"{name} 0.5000" in printed(views.runs_view(uri)) and f"{name} 0.5000" in printed(
        views.run_view(uri, "demo")
    )


def test_names_of_files_and_errors_are_not_carried_out_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    named = "checkpoints/00000010-1\u202e"
    record(str(tmp_path), [started(), events.Formed(nodes={"a\x9b31m": "0"})], checkpoint=named)
    EventCompactor(open_store(str(tmp_path)), "demo").compact()
    (place,) = (tmp_path / "demo" / "events").glob("SUMMARY.json")
    place.write_text(place.read_text().replace("\\\\x9b31m", "\x9b31m"))
    folder = tmp_path / "demo" / named
    folder.mkdir(parents=True)
    (folder / "MANIFEST.json").touch()
    view = views.run_view(str(tmp_path), "demo")
    assert view.data["nodes"] == {"a\\x9b31m": "0"}
    assert "checkpoints/00000010-1\\u202e" in printed(view) and "\u202e" not in printed(view)
    titled = "checkpoints/00000010-1\x1b]0;title\x07"
    other = tmp_path / "other"
    record(str(other), [started()], owner=DEAD, checkpoint=titled)
    (other / "demo" / "checkpoints").mkdir(parents=True)
    folder.rename(other / "demo" / titled)
    monkeypatch.setattr("sys.argv", ["trainwright", "show", "demo", "--storage", str(other)])
    with pytest.raises(SystemExit):
        cli.main()
    told = capsys.readouterr().err
    assert "\\x1b]0;title\\x07" in told and not {"\x1b", "\x07"} & set(told)


def test_logs_follow_until_the_run_ends() -> None:
    uri = storage()
    store = open_store(uri)
    log = RunLog(store, "demo")
    token = log.acquire(ALIVE, {}).token
    journal = EventLog(store, "demo", flush_s=3600)
    journal.open(token)
    journal.write(started())
    journal.flush()
    waits = []

    def wait(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 2:
            journal.write(stepped([1], time_s=9))
            journal.write(events.RunEnded(outcome="done", step=1))
            journal.close()
            log.release(token, "done")

    lines = list(views.log_lines(uri, "demo", follow=True, wait=wait))
    assert len(lines) == 3 and len(waits) == 2
    assert lines[-1].endswith("done: 1 step")


def test_logs_follow_ends_when_the_driver_is_dead() -> None:
    uri = storage()
    record(uri, whole_run()[:5], owner=DEAD)

    def wait(seconds: float) -> None:
        pytest.fail("waited for a dead driver")

    assert len(list(views.log_lines(uri, "demo", follow=True, wait=wait))) == 5


def test_a_run_is_watched_until_it_ends() -> None:
    uri = storage()
    record(uri, [started(), events.Formed(time_s=101), stepped(range(1, 9), time_s=102)])
    shown: list[str] = []

    def wait(seconds: float) -> None:
        if len(shown) == 2:
            log = RunLog(open_store(uri), "demo")
            head = log.head()
            assert head is not None
            log.release(head.token, "stopped")

    views.watch_run(
        uri, "demo", lambda content: shown.append(printed(views.RunView(data=None, content=content))), wait=wait
    )
    assert ["running" in each.splitlines()[0] for each in shown] == [True, True, False]
    assert "stopped" in shown[-1] and "0.1250  █▄▃▂▂▁▁▁" in shown[0]


def test_tables_in_files_and_pipes_have_no_blanks_at_the_ends_of_lines(capsys: pytest.CaptureFixture[str]) -> None:
    table = Table(box=None, padding=(0, 3, 0, 0))
    for name in ("run", "state"):
        table.add_column(name)
    table.add_row("a long name", "done")
    terminal_console().print(table)
    assert capsys.readouterr().out == "run           state\na long name   done\n"
