"""A read-only S3 server over a folder that takes its time for each request, and counts them."""

from __future__ import annotations

import re
import sys
import threading
import time
import urllib.parse
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

BUCKET = "data"


class SlowStore(ThreadingHTTPServer):
    """Serves the files of one folder as the bucket `data`.

    Attributes:
        requests: so far, by method; a listing counts as LIST.
        most: that it worked on at a time.
    """

    daemon_threads = True
    request_queue_size = 256

    def __init__(self, folder: Path, latency_s: float) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder, self.latency_s = folder, latency_s
        self.requests: Counter[str] = Counter()
        self.most = self._now = 0
        self._lock = threading.Lock()

    def environment(self) -> dict[str, str]:
        """What a client needs in its environment."""
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.server_port}",
            "AWS_ACCESS_KEY_ID": "anybody",
            "AWS_SECRET_ACCESS_KEY": "nothing",
            "AWS_REGION": "us-east-1",
        }

    @contextmanager
    def taken(self, method: str) -> Iterator[None]:
        """One request, and the latency before its answer."""
        with self._lock:
            self.requests[method] += 1
            self._now += 1
            self.most = max(self.most, self._now)
        time.sleep(self.latency_s)
        yield
        with self._lock:
            self._now -= 1

    def handle_error(self, request: Any, address: Any) -> None:
        """A client that goes away is no error."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: SlowStore

    def do_HEAD(self) -> None:
        """Size and time of change of an object; a folder has none."""
        with self.server.taken("HEAD"):
            self._object(body=False)

    def do_GET(self) -> None:
        """A listing, or a range of an object."""
        query = urllib.parse.parse_qs(urllib.parse.urlsplit(self.path).query, keep_blank_values=True)
        with self.server.taken("LIST" if "list-type" in query else "GET"):
            if "list-type" in query:
                self._listing({name: values[0] for name, values in query.items()})
            else:
                self._object(body=True)

    def _object(self, *, body: bool) -> None:
        file = self.server.folder / self._key()
        if not self._key() or not file.is_file():
            found = not self._key()  # the bucket itself
            self._answer(200 if found else 404, b"", {})
            return
        content = file.read_bytes()
        size, status = len(content), 200
        headers = {"Last-Modified": formatdate(file.stat().st_mtime, usegmt=True), "ETag": '"1"'}
        if match := re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range", "")):
            start = int(match[1]) if match[1] else size - int(match[2])
            stop = min(int(match[2]) + 1, size) if match[1] and match[2] else size
            content, status = content[start:stop], 206
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{size}"
        self._answer(status, content, headers, body=body)

    def _listing(self, query: dict[str, str]) -> None:
        prefix, after, most = query.get("prefix", ""), query.get("continuation-token", ""), int(query["max-keys"])
        files = [path for path in sorted(self.server.folder.rglob("*")) if path.is_file()]
        keys = {path.relative_to(self.server.folder).as_posix(): path.stat() for path in files}
        left = [(key, facts) for key, facts in keys.items() if key.startswith(prefix) and key > after]
        found, more = left[:most], len(left) > most
        items = "".join(
            f"<Contents><Key>{escape(key)}</Key><Size>{facts.st_size}</Size><LastModified>"
            f"{time.strftime('%Y-%m-%dT%H:%M:%S.000Z', time.gmtime(facts.st_mtime))}</LastModified></Contents>"
            for key, facts in found
        )
        text = (
            f"<ListBucketResult><KeyCount>{len(found)}</KeyCount><IsTruncated>{str(more).lower()}</IsTruncated>{items}"
        )
        text += f"<NextContinuationToken>{escape(found[-1][0])}</NextContinuationToken>" if more else ""
        self._answer(200, f"{text}</ListBucketResult>".encode(), {"Content-Type": "application/xml"})

    def _answer(self, status: int, content: bytes, headers: dict[str, str], *, body: bool = True) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.wfile.write(content)

    def _key(self) -> str:
        path = urllib.parse.unquote(urllib.parse.urlsplit(self.path).path)
        return path.removeprefix(f"/{BUCKET}").strip("/")

    def log_message(self, format: str, *args: Any) -> None:  # its name there
        """Nothing is told."""


@contextmanager
def slow_store(folder: Path, latency_s: float) -> Iterator[SlowStore]:
    """A server, up while the block lasts."""
    with SlowStore(folder, latency_s) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, name="slow-store")
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


if __name__ == "__main__":  # FOLDER LATENCY_S: says its endpoint, and serves until its input ends
    with slow_store(Path(sys.argv[1]), float(sys.argv[2])) as own:
        print(own.environment()["AWS_ENDPOINT_URL"], flush=True)
        sys.stdin.read()
