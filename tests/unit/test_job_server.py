"""The job server's client against one that refuses, and what shows a log."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from trainwright.core.errors import ResourceError
from trainwright.submit.job_server import JobServer, LogDisplay


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


LOG = (
    "Running entrypoint for job a-1: python -m trainwright fit job.py",
    "1 worker ready after 2.0 s",
    "step 10/100, epoch 1/2, loss 0.6780, 115 samples/s, waiting for data 0%, 0:06 left",
)


def test_lines_of_ray_are_shown_only_on_request() -> None:
    shown: list[str] = []
    display = LogDisplay(shown.append)
    for line in (*LOG, "No module named 'trainwright'"):
        assert not display.trainwright_missing
        display.show(line)
    assert shown == [*LOG[1:], "No module named 'trainwright'"] and display.trainwright_missing
    shown.clear()
    LogDisplay(shown.append, verbose=True).show(LOG[0])
    assert shown == [LOG[0]]
