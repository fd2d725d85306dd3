"""Live pages that a thread serves."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import trainwright as tw
from trainwright.reporting.live_page import LivePage


@contextmanager
def served(uri: str, host: str = "127.0.0.1") -> Iterator[LivePage]:
    page = LivePage(tw.open_run("demo", uri), host)
    thread = threading.Thread(target=page.serve)
    thread.start()
    try:
        yield page
    finally:
        page.close()
        thread.join(10)
        assert not thread.is_alive()
