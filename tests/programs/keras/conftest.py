"""Processes for engines that drive several devices."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.programs.keras.engines import TENSORFLOW
from tests.support.conformance.harness import Pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Rank processes that are forked from one with TensorFlow."""
    shared = Pool(["tensorflow", "keras", f"{TENSORFLOW}.fit_workers"])
    yield shared
    shared.close()
