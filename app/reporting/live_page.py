"""A run as a page in the browser while it trains: its report, which asks for newer contents every second.

`/` is the page, `/body` its contents. Reads storage only, and each event once. Other machines need a token. A page of
this machine is served to its own names alone, so that no other site can read it through the browser (DNS rebinding).
"""

from __future__ import annotations

import hmac
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from hashlib import sha256
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from trainwright.core.errors import ResourceError, StorageError
from trainwright.reporting.html.run_report import render_report, render_report_body
from trainwright.reporting.html.templates import report_policy
from trainwright.reporting.run_history import HistoryReader, RunHistory
from trainwright.reporting.stored_run import StoredRun

_FRESH_S = 0.5  # what was read is as new as this: several viewers cost as much as one
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


class LivePage:
    """Serves the report of a run over HTTP.

    Args:
        run: whose report is served.
        host: address to listen on.
        port: 0 for any.

    Attributes:
        url: of the page, with the token where one is needed.

    Raises:
        ResourceError: the address cannot be listened on.
    """

    def __init__(self, run: StoredRun, host: str = "127.0.0.1", port: int = 0) -> None:
        self._folder, self._reader, self._lock = run.folder, HistoryReader(run.store, run.name), threading.Lock()
        self._read_s, self._history, self._made = -_FRESH_S, RunHistory(), dict[str, bytes]()
        self._token = "" if host in _LOOPBACK else secrets.token_urlsafe(24)
        page = self

        class Handler(_Handler):
            live = page

        class Server(_PageServer):
            address_family = socket.AF_INET6 if ":" in host else socket.AF_INET

        name = f"[{host}]" if ":" in host else host
        try:
            self._server = Server((host, port), Handler)
        except OSError as error:
            what = f"cannot listen on {name}:{port}: {error.strerror}"
            raise ResourceError(what, where="--host, --port", remedy="give another port, or none for any") from error
        self.url = f"http://{name}:{self._server.server_address[1]}/" + (f"?token={self._token}" if self._token else "")

    def serve(self) -> None:
        """Answer requests until `close`, or an interrupt."""
        with self._server:
            self._server.serve_forever()

    def close(self) -> None:
        """Stop `serve`; from another thread."""
        self._server.shutdown()

    def admits(self, path: str, host: str) -> bool:
        """Whether a request may be answered.

        Args:
            path: of the request, with its query.
            host: its `Host` header.
        """
        try:
            query, name = urlsplit(path).query, urlsplit(f"//{host}").hostname
        except ValueError:  # of a malformed address, such as "[::1"
            return False
        if self._token:
            given = parse_qs(query).get("token", [""])[0]
            return hmac.compare_digest(given.encode(), self._token.encode())
        return name in _LOOPBACK

    def page(self) -> bytes:
        """Return the page. Raises StorageError."""
        return self._render("page", partial(render_report, live=True))

    def body(self) -> bytes:
        """Return the contents of the page. Raises StorageError."""
        return self._render("body", render_report_body)

    def _render(self, name: str, render: Callable[..., str]) -> bytes:
        with self._lock:
            if time.monotonic() - self._read_s >= _FRESH_S:
                former, self._read_s = self._history, time.monotonic()  # also where the store fails
                self._history = self._reader.read()
                if self._history is not former or self._history.summary.cause is not None:  # a recovery takes longer
                    self._made.clear()
            if name not in self._made:
                self._made[name] = render(self._history, uri=self._folder, now_s=time.time()).encode()
            return self._made[name]


class _PageServer(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print the traceback of an error, but not of a client that went away."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    live: LivePage

    def do_GET(self) -> None:
        if not self.live.admits(self.path, self.headers.get("Host", "")):
            self._answer(HTTPStatus.FORBIDDEN, b"open the address that `trainwright watch` printed\n", "text/plain")
            return
        contents = {"/": self.live.page, "/body": self.live.body}.get(urlsplit(self.path).path)
        if contents is None:
            self._answer(HTTPStatus.NOT_FOUND, b"there is one page: /\n", "text/plain")
            return
        try:
            found = contents()
            tag = f'"{sha256(found).hexdigest()}"'
            known = self.headers.get("If-None-Match") == tag
            self._answer(HTTPStatus.NOT_MODIFIED if known else HTTPStatus.OK, b"" if known else found, "text/html", tag)
        except StorageError as error:
            self._answer(HTTPStatus.SERVICE_UNAVAILABLE, f"{error}\n".encode(), "text/plain")

    def _answer(self, status: HTTPStatus, body: bytes, kind: str, tag: str = "") -> None:
        self.send_response(status)
        headers = {
            "Content-Type": f"{kind}; charset=utf-8",
            "Content-Length": str(len(body)),
            "Content-Security-Policy": f"{report_policy(live=True)}; frame-ancestors 'none'",
            "Cache-Control": "no-store",
            "Referrer-Policy": "no-referrer",
            "X-Content-Type-Options": "nosniff",
            "X-Frame-Options": "DENY",
            **({"ETag": tag} if tag else {}),
        }
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing about requests: the terminal is the user's."""
