"""Offer the reference engines to the planner of this process, as the framework `reference`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from trainwright.planning import profiler
from trainwright.strategies import data_parallel, local_sgd, one_device, parameter_server

FRAMEWORK, PACKAGE = "reference", __name__.rpartition(".")[0]
COLLECTIVE, INDEPENDENT = f"{PACKAGE}.collective:Reference", f"{PACKAGE}.independent:Independent"
_ENGINES = {
    data_parallel: COLLECTIVE,
    one_device: COLLECTIVE,
    parameter_server: INDEPENDENT,
    local_sgd: INDEPENDENT,
}


def register() -> None:
    """Register the framework until the process ends."""
    for strategy, engine in _ENGINES.items():
        strategy.FRAMEWORKS = ("torch", FRAMEWORK)
        strategy.ENGINES[FRAMEWORK] = engine
    profiler._FRAMEWORKS[PACKAGE] = f"{PACKAGE}.reference_engine"


@contextmanager
def registered() -> Iterator[None]:
    """Register the framework until the block is left."""
    register()
    yield
    for strategy in _ENGINES:
        strategy.FRAMEWORKS = ("torch",)
        strategy.ENGINES.pop(FRAMEWORK, None)  # two strategies share a table
    del profiler._FRAMEWORKS[PACKAGE]
