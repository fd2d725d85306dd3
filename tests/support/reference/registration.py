"""Importing this module registers the framework `reference` with the strategies and the profiler of this process."""

from __future__ import annotations

from trainwright.planning import profiler
from trainwright.strategies import data_parallel, local_sgd, one_device, parameter_server

FRAMEWORK = "reference"
_COLLECTIVE, _INDEPENDENT = f"{__package__}.collective:Reference", f"{__package__}.independent:Independent"


def register() -> None:
    """Offer these engines to the planner of this process. Safe to call twice."""
    assert __package__, "a module of a package"
    for strategy in (data_parallel, local_sgd, one_device, parameter_server):
        if FRAMEWORK not in strategy.FRAMEWORKS:
            strategy.FRAMEWORKS += (FRAMEWORK,)  # type: ignore[assignment]
        own_workers = strategy in (data_parallel, one_device)
        strategy.ENGINES[FRAMEWORK] = _COLLECTIVE if own_workers else _INDEPENDENT
    profiler._FRAMEWORKS[__package__] = f"{__package__}.reference_engine"


register()
