"""A metadata service on this machine that speaks the protocols of AWS, Google Cloud and Azure, and their failures.

Run as `python -m tests.support.metadata_server FOLDER ADDRESS PORT`, it takes its announcements from FOLDER: the file
`answers.json`, from path to text, which may come later.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

ACTION, REBALANCE = "/latest/meta-data/spot/instance-action", "/latest/meta-data/events/recommendations/rebalance"
TOKEN = "/latest/api/token"
PREEMPTED, MAINTENANCE = (f"/computeMetadata/v1/instance/{name}" for name in ("preempted", "maintenance-event"))
EVENTS = "/metadata/scheduledevents?api-version=2020-07-01"
NAME = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
MACHINE = "workers_3"
QUIET = {
    PREEMPTED: "FALSE",
    MAINTENANCE: "NONE",
    NAME: MACHINE,
    EVENTS: '{"DocumentIncarnation": 1, "Events": []}',
}
AZURE_TAG = "7783-7084-3265-9085-8269-3286-77"


def interruption(left_s: float, action: str = "terminate") -> dict[str, str]:
    """What AWS announces."""
    at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + left_s))
    return {ACTION: json.dumps({"action": action, "time": at})}


def scheduled(kind: str, left_s: float | None, machine: str = MACHINE, number: str = "A-1") -> dict[str, str]:
    """What Azure announces; None for an event that has begun."""
    by = "" if left_s is None else formatdate(time.time() + left_s, usegmt=True)
    event = {
        "EventId": number, "EventStatus": "Scheduled" if by else "Started", "EventType": kind,
        "ResourceType": "VirtualMachine", "Resources": ["workers_1", machine], "NotBefore": by,
        "Description": "", "EventSource": "Platform", "DurationInSeconds": -1,
    }  # fmt: skip
    return {EVENTS: json.dumps({"DocumentIncarnation": 2, "Events": [event]})}


@dataclass
class MetadataServer:
    """What the service answers.

    Attributes:
        answers: text by path; all others are not there.
        token_requests: that a token of AWS is good for.
        flavor: says the header by which Google Cloud's answers are known.
        fault: answers in place of the service: `hang`, `drip`, `close`, `redirect`, `garbage`, `large` or a status.
        asked: paths of all requests, with the method.
    """

    answers: Callable[[], Mapping[str, str]] = lambda: QUIET
    token_requests: int = 1000
    fault: str = ""
    flavor: str = "Google"
    asked: list[str] = field(default_factory=list)
    address: str = ""
    ended: threading.Event = field(default_factory=threading.Event)
    tokens: dict[str, int] = field(default_factory=dict)

    def refusal(self, path: str, headers: Any) -> int:
        """The status for a request without the header that its cloud demands; 0 if it has it."""
        if path.startswith("/latest/meta-data"):
            token = headers.get("X-aws-ec2-metadata-token", "")
            self.tokens[token] = self.tokens.get(token, 0) - 1
            return 401 if self.tokens[token] < 0 else 0
        if path.startswith("/computeMetadata"):
            return 0 if headers.get("Metadata-Flavor") == "Google" and not headers.get("X-Forwarded-For") else 403
        return 0 if headers.get("Metadata") == "true" else 400

    def new_token(self) -> str:
        """A token of AWS."""
        token = f"token-{len(self.tokens)}"
        self.tokens[token] = self.token_requests
        return token


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    service: MetadataServer

    def do_PUT(self) -> None:
        self._answer("PUT")

    def do_GET(self) -> None:
        self._answer("GET")

    def _answer(self, method: str) -> None:
        service = self.service
        service.asked.append(f"{method} {self.path}")
        if service.fault:
            self._fail(service.fault)
        elif method == "PUT":
            known = self.path == TOKEN and self.headers.get("X-aws-ec2-metadata-token-ttl-seconds")
            self._send(200 if known else 400, service.new_token() if known else "")
        elif status := service.refusal(self.path, self.headers):
            self._send(status, "")
        else:
            text = service.answers().get(self.path)
            self._send(404 if text is None else 200, text or "")

    def _fail(self, fault: str) -> None:
        self.close_connection = True
        match fault:
            case "hang":
                self.service.ended.wait(60)
            case "drip":
                self.wfile.write(b"HTTP/1.1 200 OK\r\nX: ")
                while not self.service.ended.wait(0.1):
                    self.wfile.write(b"H")
                    self.wfile.flush()
            case "redirect":
                self._send(302, "", Location=f"{self.service.address}/elsewhere")
            case "garbage":
                self._send(200, "<html>sign in to the network</html>")
            case "large":
                self._send(200, "x" * (2 << 20))
            case "close":
                return
            case status:
                self._send(int(status), "")

    def _send(self, status: int, text: str, **headers: str) -> None:
        self.send_response(status)
        google = {"Metadata-Flavor": self.service.flavor} if self.path.startswith("/computeMetadata") else {}
        for name, value in {**google, **headers, "Content-Length": str(len(text))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_: Any) -> None:
        """Say nothing: who asks may hang up."""


@contextmanager
def serving(service: MetadataServer, host: str = "127.0.0.1", port: int = 0) -> Iterator[MetadataServer]:
    """The service answers until the block is left; `address` says where."""
    with _Server((host, port), type("Handler", (_Handler,), {"service": service})) as server:
        service.address = f"http://{host}:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield service
        finally:
            service.ended.set()
            server.shutdown()
            thread.join(30)


def of_file(file: Path) -> Callable[[], Mapping[str, str]]:
    """Answers that a file holds, once it is there."""

    def answers() -> Mapping[str, str]:
        try:
            return {**QUIET, **json.loads(file.read_text(encoding="utf-8"))}
        except FileNotFoundError:
            return QUIET

    return answers


def announce(file: Path, answers: Mapping[str, str]) -> None:
    """Let a service with the answers of a file announce these, from now on."""
    part = file.with_suffix(".part")
    part.write_text(json.dumps(answers), encoding="utf-8")
    part.replace(file)


if __name__ == "__main__":
    folder, host, port = sys.argv[1:]
    with serving(MetadataServer(answers=of_file(Path(folder) / "answers.json")), host, int(port)):
        print("up", flush=True)
        threading.Event().wait()
