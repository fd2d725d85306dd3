"""The job server's client against one that refuses, and what shows a log."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from rich.console import Console

from trainwright.core.errors import ResourceError
from trainwright.reporting.event_messages import ProgressFigures
from trainwright.reporting.progress_bar import PlainTextDisplay
from trainwright.submit.job_log import LogDisplay
from trainwright.submit.job_server import JobServer


@pytest.fixture
def refusing(request: pytest.FixtureRequest) -> Iterator[str]:
    """A server that answers everything with one status."""

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(request.param)

        def log_message(self, *_: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Answer)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize("refusing", [401, 403], indirect=True)
def test_a_cluster_that_wants_a_token_is_said_with_how_to_give_it(refusing: str) -> None:
    with pytest.raises(ResourceError, match="RAY_AUTH_TOKEN"):
        JobServer(refusing)


@pytest.mark.parametrize("refusing", [404, 500], indirect=True)
def test_what_is_no_job_server_is_said(refusing: str) -> None:
    with pytest.raises(ResourceError) as caught:
        JobServer(refusing)
    assert refusing in str(caught.value)


def test_nobody_at_the_address_is_said_with_what_to_type(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", "http://127.0.0.1:1")  # which Ray's client takes before an argument
    with pytest.raises(ResourceError, match="ray dashboard") as caught:
        JobServer("http://127.0.0.1:9")
    assert caught.value.where == "http://127.0.0.1:9"


class Shown:
    """A surface that keeps what it is shown."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.figures: list[ProgressFigures] = []

    def line(self, line: Any) -> None:
        self.lines.append(line.text)

    def show(self, figures: ProgressFigures, *, news: bool) -> None:
        self.figures.append(figures)

    def close(self) -> None:
        pass


LOG = (
    "Running entrypoint for job a-1: python -m trainwright fit job.py",
    "1 worker ready after 2.0 s",
    "step 10/100, epoch 1/2, loss 0.6780, 115 samples/s, waiting for data 0%, 0:06 left",
)


def test_figures_become_the_bar_in_a_terminal() -> None:
    shown = Shown()
    for line in LOG:
        LogDisplay(Console(), surface=shown).line(line)
    assert shown.lines == [LOG[1]]
    assert [(figures.step, figures.total, figures.left_s) for figures in shown.figures] == [(10, 100, 6.0)]


def test_elsewhere_the_log_stays_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    console = Console(width=120)
    for line in LOG:
        LogDisplay(console, surface=PlainTextDisplay(console)).line(line)
    assert capsys.readouterr().out.splitlines() == list(LOG[1:])
    LogDisplay(console, surface=PlainTextDisplay(console), verbose=True).line(LOG[0])
    assert capsys.readouterr().out.splitlines() == [LOG[0]]
