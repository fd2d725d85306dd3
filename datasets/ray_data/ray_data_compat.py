"""Private symbols of Ray Data, each named here and nowhere else (`tests/unit/test_compat.py`)."""

from __future__ import annotations

from ray.data import DataContext
from ray.data._internal.execution.backpressure_policy import (
    ENABLED_BACKPRESSURE_POLICIES,
    ENABLED_BACKPRESSURE_POLICIES_CONFIG_KEY,
)
from ray.data._internal.execution.backpressure_policy.resource_budget_backpressure_policy import (
    ResourceBudgetBackpressurePolicy,
)


def disable_reservation(context: DataContext) -> None:
    """Turn off the reservation of resources, and the policy that follows it.

    Without a reservation that policy limits nothing, and before Ray 2.56 it fails.
    """
    context.op_resource_reservation_enabled = False
    policies = [each for each in ENABLED_BACKPRESSURE_POLICIES if each is not ResourceBudgetBackpressurePolicy]
    context.set_config(ENABLED_BACKPRESSURE_POLICIES_CONFIG_KEY, policies)
