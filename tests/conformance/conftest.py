"""The pool of processes that all conformance tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.conformance.harness import Pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Idle rank processes, kept between tests and ended after the last."""
    shared = Pool()
    yield shared
    shared.close()
