"""The job server's client against one that refuses, and what shows a log."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer, ThreadingHTTPServer
from typing import Any

import pytest

from trainwright.core.errors import ResourceError
from trainwright.submit import job_server
from trainwright.submit.job_server import JobServer, LogDisplay, LogFollower


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


class Serving:
    """A job server as far as a package and one job's log need it, without WebSockets. It reads slowly."""

    def __init__(self, read_bytes: int = 1 << 20, pause_s: float = 0.0) -> None:
        self.received = 0
        self.log = ""
        self.status = "RUNNING"
        serving = self

        class Answer(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if self.path == "/api/version":
                    self.answer({"version": "4", "ray_version": "2.60.0", "ray_commit": "a"})
                elif self.path.endswith("/logs/tail"):
                    self.send_error(400)
                elif self.path.endswith("/logs"):
                    self.answer({"logs": serving.log})
                else:
                    job = {"type": "SUBMISSION", "entrypoint": "a", "submission_id": "a-1", "status": serving.status}
                    self.answer({**job, "driver_exit_code": 0 if serving.status == "SUCCEEDED" else None})

            def do_PUT(self) -> None:
                left = int(self.headers["Content-Length"])
                while left:
                    time.sleep(pause_s)
                    left -= len(self.rfile.read(min(read_bytes, left)))
                serving.received = int(self.headers["Content-Length"])
                self.answer({})

            def answer(self, data: dict[str, Any]) -> None:
                body = json.dumps(data).encode()
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
        self._server.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        self.address = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Serving:
        threading.Thread(target=self._server.serve_forever, args=(0.05,)).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


def test_an_upload_may_take_longer_than_one_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_server, "_CONNECT_S", 1.0)
    with Serving(read_bytes=1 << 20, pause_s=0.15) as serving:
        JobServer(serving.address).upload("gcs://a.zip", bytes(24 << 20))
        assert serving.received == 24 << 20


def test_a_log_is_followed_where_a_proxy_lets_no_websocket_through(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_server, "_POLL_S", 0.01)
    shown: list[str] = []
    told: list[str] = []
    with Serving() as serving:
        serving.log = "one\ntwo\nthr"

        def show(line: str) -> None:
            shown.append(line)
            if line == "two":
                serving.log, serving.status = "one\ntwo\nthree\nfour", "SUCCEEDED"

        follower = LogFollower(JobServer(serving.address), "a-1", LogDisplay(show), patience_s=0.0, say=told.append)
        assert follower.follow().driver_exit_code == 0
    assert shown == ["one", "two", "three", "four"] and not told


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
