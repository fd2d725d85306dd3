"""Offer the reference engines to the planner of this process, as the framework `reference`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from trainwright.planning import profiler
from trainwright.strategies import STRATEGIES

FRAMEWORK, PACKAGE = "reference", __name__.rpartition(".")[0]
COLLECTIVE, INDEPENDENT = f"{PACKAGE}.collective:Reference", f"{PACKAGE}.independent:Independent"
_ENGINES = {
    "data_parallel": COLLECTIVE,
    "one_device": COLLECTIVE,
    "parameter_server": INDEPENDENT,
    "local_sgd": INDEPENDENT,
}


def _engines_of(strategy: str) -> dict[str, str]:
    engines = STRATEGIES[strategy].engines
    assert isinstance(engines, dict), "what the product declares"
    return engines


def register() -> None:
    """Register the framework until the process ends."""
    for name, engine in _ENGINES.items():
        _engines_of(name)[FRAMEWORK] = engine
    profiler._FRAMEWORKS[PACKAGE] = f"{PACKAGE}.reference_engine"


@contextmanager
def registered() -> Iterator[None]:
    """Register the framework until the block is left."""
    register()
    yield
    for name in _ENGINES:
        _engines_of(name).pop(FRAMEWORK, None)  # two strategies share a table
    del profiler._FRAMEWORKS[PACKAGE]
