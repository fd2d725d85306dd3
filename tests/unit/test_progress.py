"""Progress: which lines and figures come of which events, and that each surface shows them without flooding."""

from __future__ import annotations

import io
import math
import re
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace

import pytest
from rich.console import Console

from tests.support.sample_run import DECISION, started, stepped, whole_run
from trainwright.core import events, formatting
from trainwright.reporting import progress_bar
from trainwright.reporting.event_messages import EventFormatter, OutputLine, ProgressFigures, event_line, recovery_text
from trainwright.reporting.progress_bar import (
    NotebookDisplay,
    PlainTextDisplay,
    RowProgress,
    RunProgress,
    TerminalDisplay,
    display_for,
)


def told(happened: list[events.Event], *, verbose: bool = False) -> list[str]:
    narrator = EventFormatter(verbose=verbose)
    return [line.text for event in happened for line in narrator.tell(event)]


def test_a_whole_run_in_words() -> None:
    assert told(whole_run()) == [
        "run demo: 2 epochs, 20 steps of 256 samples; 1 node, 2 CPUs, no accelerators",
        "2 workers ready after 4.0 s",
        "evaluation at step 10 (epoch 1): loss 0.5000, accuracy 0.8000 (2.0 s)",
        "rank 1 (node-a, pid 12) failed at about step 12: killed by SIGKILL",
        "back at step 10 after 2.0 s, 2 steps lost (11 to 12), state from checkpoints/00000010-1",
        "evaluation at step 20 (epoch 2): loss 0.3000, accuracy 0.9000 (1.0 s)",
        "done: 20 steps after 12.0 s",
    ]


def test_verbose_adds_checkpoints_and_processes() -> None:
    lines = told(whole_run(), verbose=True)
    assert "worker 1 is up: pid 12 on node-a" in lines
    assert "checkpoint at step 10: 2 KiB, steps waited 100 ms, stored in 1.0 s" in lines


def test_a_resume_says_from_where() -> None:
    formed = events.Formed(
        time_s=103, workers=2, step=10, source="checkpoint", checkpoint="checkpoints/00000010-1", seconds=3
    )
    lines = told([started(), formed])
    assert lines[-1] == "resuming step 10 from memory://x/demo/checkpoints/00000010-1 after 3.0 s"
    taken_over = events.Formed(time_s=103, workers=2, step=11, source="replica", survivors=2, seconds=3)
    assert told([started(), taken_over])[-1] == "resuming step 11 from a replica after 3.0 s"


def test_the_end_of_a_resumed_run_tells_its_own_steps_from_those_before() -> None:
    formed = events.Formed(time_s=103, workers=2, step=10, source="checkpoint", checkpoint="checkpoints/1", seconds=3)
    recovered = replace(formed, time_s=105, step=12)
    ended = events.RunEnded(time_s=106, outcome="done", step=20)
    assert told([started(), formed, recovered, ended])[-1] == "done: 20 steps, 10 of them now, in 6.0 s"


def test_steps_that_are_lost_are_named() -> None:
    formed = events.Formed(time_s=108, step=12, source="checkpoint", checkpoint="checkpoints/1", steps_lost=1)
    assert recovery_text(formed) == "back at step 12 after 0 ms, 1 step lost (13), state from checkpoints/1"


def test_a_replica_is_said() -> None:
    again = events.Formed(time_s=108, generation=2, step=12, source="replica", seconds=0.7, workers=2)
    assert told([*whole_run()[:9], again])[-1] == "back at step 12 after 700 ms, 0 steps lost, state from a replica"


def test_waiting_is_said_once_with_its_deadline() -> None:
    waits = [events.Waiting(time_s=1000 + n, what="2 GPU", deadline_s=300.0) for n in range(3)]
    assert told([*waits]) == ["waiting for 2 GPU, at most 5 min 00 s"]
    assert told([events.Waiting(time_s=1000, what="2 GPU", deadline_s=1060.0)]) == [
        "waiting for 2 GPU, at most 1 min 00 s"
    ]


@pytest.mark.parametrize(
    ("outcome", "text"),
    [
        ("stopped", "stopped at step 12 of 20 after 5.0 s; the same command continues from here"),
        ("failed", "failed after 5.0 s, last checkpoint at step 12 of 20: it broke"),
    ],
)
def test_ends(outcome: str, text: str) -> None:
    assert told([started(), events.RunEnded(time_s=105, outcome=outcome, step=12, error="it broke\nmore")])[-1] == text


def test_the_end_of_a_failed_run_does_not_repeat_its_cause() -> None:
    failed = events.Failed(time_s=104, rank=1, step=12, cause="loss= raised KeyError: 'y'")
    ended = events.RunEnded(time_s=105, outcome="failed", step=12, error=f"{failed.cause} (rank 1)\n  -> mend it")
    assert told([started(), failed, ended])[1:] == [
        "rank 1 failed at about step 12: loss= raised KeyError: 'y'",
        "failed after 5.0 s, last checkpoint at step 12 of 20",
    ]  # fmt: skip
    lost = events.RunEnded(time_s=105, outcome="failed", error="it broke")
    assert told([started(), lost])[-1] == "failed after 5.0 s, before its first checkpoint: it broke"
    assert event_line(ended).text == "failed, last checkpoint at step 12: loss= raised KeyError: 'y' (rank 1)"


def test_every_kind_of_event_has_a_line_for_logs() -> None:
    for event in [
        *whole_run(),
        events.Noted(text="n"),
        events.CheckpointSkipped(step=3, reason="slow"),
        events.Steps(),
    ]:
        assert event_line(event, 10).text.strip() and "\n" not in event_line(event, 10).text


def test_figures_after_a_resume_are_those_of_this_session_alone() -> None:
    narrator = EventFormatter()
    narrator.tell(started(total=110))
    narrator.tell(events.Formed(time_s=200, workers=2, step=10, source="checkpoint", seconds=3))
    figures = narrator.figures
    assert (figures.step, figures.total, figures.epoch, figures.epochs) == (10, 110, 2, 11)
    assert math.isnan(figures.left_s) and math.isnan(figures.samples_per_s)
    narrator.tell(stepped(range(11, 31), time_s=210, loss=0.5))
    figures = narrator.figures
    assert figures.left_s == pytest.approx(80 * 0.5)  # 20 steps took 10 s of this session
    assert figures.samples_per_s == pytest.approx(2560) and figures.wait_share == pytest.approx(0.2)
    assert figures.text() == ("step 30/110, epoch 3/11, loss 0.5000, 2,560 samples/s, waiting for data 20%, 0:40 left")


def test_time_lost_to_a_recovery_does_not_bend_the_rate() -> None:
    narrator = EventFormatter()
    narrator.tell(started(total=30))
    narrator.tell(events.Formed(time_s=200, workers=2))
    narrator.tell(stepped(range(1, 11), time_s=201))
    narrator.tell(events.Failed(time_s=201, worker=0, step=10, cause="x"))
    assert narrator.figures.activity == "recovering"
    narrator.tell(events.Formed(time_s=301, generation=2, workers=2, step=10))
    narrator.tell(stepped(range(11, 21), time_s=302))
    assert narrator.figures.left_s == pytest.approx(1.0)
    assert narrator.figures.activity == ""


def test_epoch_at_the_borders() -> None:
    narrator = EventFormatter()
    narrator.tell(started())
    assert narrator.figures.epoch == 1
    narrator.tell(stepped(range(1, 11), time_s=101))
    assert narrator.figures.epoch == 1
    narrator.tell(events.Formed(time_s=102, step=10))
    assert narrator.figures.epoch == 2
    narrator.tell(stepped(range(11, 21), time_s=102))
    assert narrator.figures.epoch == 2


def console(*, terminal: bool) -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, force_terminal=terminal, width=100, _environ={"TERM": "xterm"}), out


def test_plain_lines_when_not_a_terminal() -> None:
    screen, out = console(terminal=False)
    assert isinstance(display_for(screen), PlainTextDisplay)
    with closing(RunProgress(DECISION.chosen, console=screen)) as progress:
        for event in whole_run():
            progress.on(event)
    lines = out.getvalue().splitlines()
    assert lines[0] == "plan data_parallel: 2 workers x 1 thread on CPU, batch 256 = 2 x 128, est. 14 ms/step"
    assert lines[1] == "  note: batch norm is local to each worker"
    assert lines[2].startswith("run demo:") and lines[-1] == "done: 20 steps after 12.0 s"
    assert any(line.startswith("step 20/20, epoch 2/2, loss 0.0500, 2,560 samples/s") for line in lines)
    assert "\x1b" not in out.getvalue()


def test_plain_lines_come_every_tenth_or_ten_seconds() -> None:
    screen, out = console(terminal=False)
    times: Iterator[float] = iter(range(0, 100000, 1))
    surface = PlainTextDisplay(screen, clock=lambda: 0.0)
    for step in range(1001):
        surface.show(ProgressFigures(step=step, total=1000), news=step == 0)
    assert len(out.getvalue().splitlines()) == 10
    late = PlainTextDisplay(screen, clock=lambda: float(next(times)))
    before = len(out.getvalue().splitlines())
    for step in range(51):
        late.show(ProgressFigures(step=step, total=1_000_000), news=step == 0)
    assert 3 <= len(out.getvalue().splitlines()) - before <= 6


def test_plain_lines_never_wrap_or_colour() -> None:
    screen, out = console(terminal=False)
    PlainTextDisplay(screen).line(OutputLine(text="x" * 300, detail="Traceback\n  boom"))
    assert out.getvalue() == "x" * 300 + "\n    Traceback\n      boom\n"


def test_what_others_print_on_stderr_goes_above_the_bar_as_it_is() -> None:
    out = io.StringIO()
    screen = Console(file=out, width=60, force_terminal=True, color_system=None, markup=False)
    with closing(RunProgress(console=screen)) as progress:
        for event in whole_run()[:9]:
            progress.on(event)
        begun = out.tell()
        print("(raylet) [/x] a worker died", file=sys.stderr)
        print("[half]", end="", file=sys.stderr, flush=True)
    shown = out.getvalue()[begun:]
    assert re.match(r"\r\x1b\[2K\(raylet\) \[/x\] a worker died\n", shown) and "[half]" in shown


def test_a_bar_in_a_terminal() -> None:
    screen, out = console(terminal=True)
    surface = display_for(screen)
    assert isinstance(surface, TerminalDisplay)
    with closing(RunProgress(console=screen, surface=surface)) as progress:
        for event in whole_run()[:9]:
            progress.on(event)
    shown = out.getvalue()
    assert "step 12/20" in shown and "epoch 2/2" in shown and "recovering" in shown
    assert "rank 1 (node-a, pid 12) failed at about step 12" in shown


def test_brackets_are_no_markup() -> None:
    screen, out = console(terminal=True)
    with closing(RunProgress(console=screen)) as progress:
        progress.on(events.Noted(text="shape [red] and [/]"))
    with closing(display_for(screen)) as surface:
        surface.show(ProgressFigures(activity="waiting for 2 [/gpu]"), news=True)
    assert "shape [red] and [/]" in out.getvalue() and "waiting for 2 [/gpu]" in out.getvalue()


def test_a_notebook_changes_one_output() -> None:
    shown: list[str] = []

    def display(body: str) -> object:
        shown.append(body)
        return lambda new: shown.__setitem__(0, new)

    progress = RunProgress(surface=NotebookDisplay(display, clock=lambda: 0.0))
    assert len(shown) == 1 and "starting" in shown[0], "in the cell that starts the run"
    for event in [*whole_run(), events.Noted(text="1 < 2")]:
        progress.on(event)
    progress.close()
    assert len(shown) == 1
    assert "done: 20 steps" in shown[0] and "1 &lt; 2" in shown[0] and 'value="20" max="20"' in shown[0]
    assert shown[0].count("<polyline") == 2, "losses of training and of evaluations"


def test_rows_in_a_notebook_change_one_output(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []

    def display(body: str) -> object:
        shown.append(body)
        return lambda new: shown.__setitem__(0, new)

    monkeypatch.setattr(progress_bar, "_in_notebook", lambda: True)
    monkeypatch.setattr(progress_bar, "_ipython_display", display)
    with RowProgress(100, 10) as rows:
        rows.note("a worker was lost")
        rows.add(45)
        rows.add(45)
    assert len(shown) == 1
    assert "a worker was lost" in shown[0] and 'value="100" max="100"' in shown[0] and "rows 100/100" in shown[0]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0142, "14.2 ms"),
        (2.14, "2.1 s"),
        (59.96, "1 min 00 s"),
        (113, "1 min 53 s"),
        (11100, "3 h 05 min"),
        (359_999, "99 h 59 min"),
        (364_000, "4 d 05 h"),
        (math.nan, "-"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert formatting.duration(seconds) == text


def test_other_words() -> None:
    assert (formatting.clock_time(42), formatting.clock_time(3909), formatting.clock_time(math.nan)) == (
        "0:42",
        "1:05:09",
        "-:--",
    )
    assert (formatting.size(812), formatting.size(1_258_291), formatting.size(1023)) == (
        "812 B",
        "1.2 MiB",
        "0.999 KiB",
    )
    assert (formatting.count(1, "worker"), formatting.count(12000, "step")) == ("1 worker", "12,000 steps")
    assert (formatting.metric(0.91344), formatting.metric(12.345), formatting.metric(1.2e-5)) == (
        "0.9134",
        "12.35",
        "1.2e-05",
    )
