"""Lines that a job prints: kept for the driver, passed on, bounded."""

from __future__ import annotations

import io
import sys
import threading

import pytest

from trainwright.core import events
from trainwright.reporting.event_messages import EventFormatter, event_line
from trainwright.runtime.worker_actor import BURST_LINES, MAX_LINE_LENGTH, MAX_LINES, PrintCapture


def test_lines_are_passed_on_and_given_once() -> None:
    behind = io.StringIO()
    prints = PrintCapture(behind)
    print("epoch", 1, file=prints)
    print("loss ", end="", file=prints)
    assert prints.take(0.0) == ["epoch 1"] and prints.take(0.0) == []
    print(0.5, file=prints)
    assert prints.take(0.0) == ["loss 0.5"]
    assert behind.getvalue() == "epoch 1\nloss 0.5\n" and prints.getvalue() == behind.getvalue()


def test_what_is_written_over_is_not_told_nor_what_a_terminal_would_carry_out() -> None:
    prints = PrintCapture(io.StringIO())
    print(" 1/10\r 2/10\r10/10 done", file=prints)
    print("\x1b[31mred", file=prints)
    print(":actor_name:Worker", file=prints)
    print("x" * (2 * MAX_LINE_LENGTH), file=prints)
    assert prints.take(0.0) == ["10/10 done", "\\x1b[31mred", "x" * MAX_LINE_LENGTH]


def test_secrets_stay_in_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "s3cr3t-value")
    prints = PrintCapture(io.StringIO())
    print("key s3cr3t-value", file=prints)
    assert prints.take(0.0) == ["key ***"]


def test_a_flood_is_cut_and_counted_and_lines_come_again_later() -> None:
    now = [0.0]
    prints = PrintCapture(io.StringIO(), clock=lambda: now[0])
    for number in range(BURST_LINES + 1234):
        print(number, file=prints)
    lines = prints.take(0.0)
    assert len(lines) == BURST_LINES + 1 and lines[:2] == ["0", "1"]
    assert "1,234 lines are left out" in lines[-1]
    now[0] += 1.0
    print("later", file=prints)
    assert prints.take(0.0) == ["later"]


def test_what_nobody_asks_for_does_not_pile_up() -> None:
    now = [0.0]
    prints = PrintCapture(io.StringIO(), clock=lambda: now[0])
    for number in range(3 * MAX_LINES):
        now[0] += 1.0
        print(number, file=prints)
    assert len(prints.take(0.0)) == MAX_LINES


def test_whoever_waits_is_told_at_once() -> None:
    prints = PrintCapture(io.StringIO())
    threading.Timer(0.05, lambda: print("hello", file=prints)).start()
    assert prints.take(30.0) == ["hello"]


def test_it_becomes_the_standard_output_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    prints = PrintCapture.installed()
    assert PrintCapture.installed() is prints is sys.stdout
    print("hello")
    assert prints.take(0.0) == ["hello"]


def test_a_line_is_shown_with_its_rank_without_verbose() -> None:
    event = events.Printed(rank=0, line="epoch 1")
    assert [line.text for line in EventFormatter().tell(event)] == ["[rank 0] epoch 1"] == [event_line(event).text]
    assert EventFormatter(verbose=True).tell(event) == []  # Ray shows it
