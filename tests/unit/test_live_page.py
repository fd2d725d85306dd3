"""The server of the page of a run: who is admitted, and what is served."""

from __future__ import annotations

import http.client
import re
import socket
import struct
import threading
import urllib.request
from typing import Any
from urllib.parse import urlsplit

import pytest

import trainwright as tw
from tests.support.html_pages import Balance
from tests.support.live_pages import served
from tests.support.run_views import record, storage
from tests.support.sample_run import started, stepped, whole_run
from trainwright.core import events
from trainwright.core.errors import ResourceError, StorageError
from trainwright.reporting import live_page
from trainwright.reporting.live_page import LivePage
from trainwright.reporting.run_history import HistoryReader
from trainwright.storage.object_store import open_store
from trainwright.storage.run_log import RunLog


def asked(page: LivePage, path: str | None = None, *, method: str = "GET", **headers: str) -> tuple[int, Any, str]:
    """Status, headers and body; the path is by default that of the printed address."""
    at = urlsplit(page.url)
    connection = http.client.HTTPConnection("127.0.0.1", at.port or 0, timeout=30)
    connection.request(method, path or f"{at.path}?{at.query}", headers=headers)
    answer = connection.getresponse()
    body = answer.read().decode()
    connection.close()
    return answer.status, answer.headers, body


@pytest.fixture
def uri() -> str:
    where = storage()
    record(where, [started(), events.Formed(time_s=101), stepped(range(1, 9), time_s=102)])
    return where


def test_the_page_and_its_newer_contents(uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_page, "_FRESH_S", 0.0)
    with served(uri) as page:
        status, headers, body = asked(page)
        assert (status, headers["Content-Type"]) == (200, "text/html; charset=utf-8")
        assert "running" in body and "data-live" in body and "killed by SIGKILL" not in body
        (policy,) = re.findall('Content-Security-Policy" content="([^"]*)"', body)
        assert headers["Content-Security-Policy"] == f"{policy}; frame-ancestors 'none'"
        assert "connect-src 'self'" in policy
        log = RunLog(open_store(uri), "demo")
        head = log.head()
        assert head is not None
        log.release(head.token, "stopped")
        record(uri, whole_run()[1:], outcome="done")
        status, headers, body = asked(page, "/body")
        assert status == 200 and "killed by SIGKILL" in body and "<html" not in body and '"state":"done"' in body
        read = Balance()
        read.feed(body)
        assert read.open == [] and all(target.startswith("#") for target in read.fetched)


def test_many_viewers_cost_one_reading(uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    readings: list[int] = []
    read = HistoryReader.read
    monkeypatch.setattr(live_page, "_FRESH_S", 60.0)
    monkeypatch.setattr(HistoryReader, "read", lambda self: (readings.append(1), read(self))[1])
    with served(uri) as page:
        assert {asked(page, path)[0] for path in ["/", "/body"] * 3} == {200}
    assert len(readings) == 1


def test_each_event_is_read_once(uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_page, "_FRESH_S", 0.0)
    store = open_store(uri)
    got: list[str] = []
    get = type(store).get
    monkeypatch.setattr(type(store), "get", lambda self, path: (got.append(path), get(self, path))[1])
    with served(uri) as page:
        assert {asked(page)[0] for _ in range(3)} == {200}
        _, headers, body = asked(page, "/body")
        status, _, again = asked(page, "/body", **{"If-None-Match": headers["ETag"]})
        assert body and (status, again) == (304, "")
    assert len([path for path in got if path.endswith(".jsonl")]) == 1


def test_other_names_of_this_machine_are_refused(uri: str) -> None:
    with served(uri) as page:
        assert asked(page, Host="evil.example")[0] == 403
        assert asked(page, Host=f"localhost:{urlsplit(page.url).port}")[0] == 200
        assert asked(page, "/body", Host="evil.example")[0] == 403
        assert asked(page, "/runs")[0] == 404
        assert asked(page, method="POST")[0] == 501


def test_addresses_that_cannot_be_read_are_refused(uri: str, capfd: pytest.CaptureFixture[str]) -> None:
    with served(uri) as page:
        assert asked(page, Host="[::1")[0] == 403
        assert asked(page, "http://[::1/", Host="localhost")[0] == 403
    assert capfd.readouterr().err == ""


def test_a_client_that_goes_away_prints_nothing_and_other_errors_do(
    uri: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    came, gone = threading.Event(), threading.Event()

    def answer() -> bytes:
        came.set()
        assert gone.wait(30)
        return b"page"

    def fail() -> bytes:
        raise LookupError("no such page")

    with served(uri) as page:
        monkeypatch.setattr(page, "page", answer)
        client = socket.create_connection(("127.0.0.1", urlsplit(page.url).port or 0), timeout=30)
        client.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert came.wait(30)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # close() sends a reset
        client.close()
        gone.set()
        _join_answers()
        assert capfd.readouterr().err == ""
        monkeypatch.setattr(page, "page", fail)
        with pytest.raises(http.client.RemoteDisconnected):
            asked(page)
        _join_answers()
        assert "LookupError: no such page" in capfd.readouterr().err


def _join_answers() -> None:
    """Wait for the threads that answer a request."""
    for thread in threading.enumerate():
        if "process_request_thread" in thread.name:
            thread.join(30)
            assert not thread.is_alive()


def test_an_address_of_ip_version_6(uri: str) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError as error:
        pytest.skip(f"this machine has no address ::1: {error}")
    with served(uri, "::1") as page:
        assert re.fullmatch(r"http://\[::1\]:\d+/", page.url)
        with urllib.request.urlopen(page.url, timeout=30) as answer:
            assert answer.status == 200


def test_other_machines_need_the_token(uri: str) -> None:
    before = [*open_store(uri).list()]
    with served(uri, "0.0.0.0") as page:
        assert asked(page, Host="cluster.example")[0] == 200
        for path in ("/", "/body", "/?token=", "/body?token=wrong", "/?token=%C3%A4"):
            status, _, body = asked(page, path)
            assert status == 403 and "demo" not in body
    assert [*open_store(uri).list()] == before, "nothing is written"


def test_a_store_that_cannot_be_read_is_said(uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: HistoryReader) -> None:
        raise StorageError("cannot reach the store", remedy="check the address")

    monkeypatch.setattr(HistoryReader, "read", fail)
    with served(uri) as page:
        status, _, body = asked(page, "/body")
    assert status == 503 and "-> check the address" in body


def test_a_port_in_use_is_said(uri: str) -> None:
    with served(uri) as page:
        port = urlsplit(page.url).port or 0
        with pytest.raises(ResourceError, match=rf"cannot listen on 127.0.0.1:{port}: Address already in use"):
            LivePage(tw.open_run("demo", uri), port=port)
