"""All strategies by name. To add one, declare it in a module of this package and list it here."""

from __future__ import annotations

from collections.abc import Mapping

from trainwright.strategies.search.strategy import Strategy
from trainwright.strategies.search.tensorflow_strategies import (
    TF_CENTRAL_STORAGE,
    TF_MIRRORED,
    TF_MULTI_WORKER_MIRRORED,
    TF_ONE_DEVICE,
    TF_PARAMETER_SERVER,
    TF_TPU,
)
from trainwright.strategies.search.torch_strategies import (
    DATA_PARALLEL,
    LOCAL_SGD,
    MODEL_PARALLEL,
    ONE_DEVICE,
    PARAMETER_SERVER,
    PIPELINE,
    SHARDED,
    TENSOR_PARALLEL,
)

STRATEGIES: Mapping[str, Strategy] = {
    strategy.name: strategy
    for strategy in (
        ONE_DEVICE,
        DATA_PARALLEL,
        SHARDED,
        TENSOR_PARALLEL,
        PIPELINE,
        MODEL_PARALLEL,
        PARAMETER_SERVER,
        LOCAL_SGD,
        TF_ONE_DEVICE,
        TF_MIRRORED,
        TF_MULTI_WORKER_MIRRORED,
        TF_CENTRAL_STORAGE,
        TF_PARAMETER_SERVER,
        TF_TPU,
    )
}


def strategies_for(framework: str) -> Mapping[str, Strategy]:
    """Return the strategies for models of a framework, by name; without a framework, those for torch."""
    return {name: strategy for name, strategy in STRATEGIES.items() if (framework or "torch") in strategy.engines}
