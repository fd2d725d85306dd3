"""The phases of a step that engines time, and what of them a plan's terms foretell.

A phase is a place of a step, or several that an engine cannot tell apart, joined by `+`:

    forward     losses of all micro-batches, their conversion to tensors included
    backward    their gradients, until the last of this rank's is there, with the part of the reduction that it hides
    wait        from then until the gradients are reduced over all ranks; in a pipeline also for what other stages send
    optimizer   gradient norm, scaling, clipping and the update
    other       what is left of a step besides waiting for data: the loop, checks, records
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

PLACES = ("forward", "backward", "wait", "optimizer", "other")
COMPILED = "forward+backward+wait+optimizer"  # of an engine whose step is one function


@dataclass(frozen=True, kw_only=True)
class Phases:
    """Median seconds by phase of so many steps of one rank, and of what they waited for data."""

    steps: int
    medians: Mapping[str, float] = field(default_factory=dict)
    data_s: float = 0.0

    @property
    def own_s(self) -> float:
        """What the rank did before it waited for others, as far as that is known."""
        return self.data_s + sum(seconds for phase, seconds in self.medians.items() if "wait" not in phase.split("+"))


def merged(found: Sequence[Phases]) -> Phases | None:
    """All of them as one, where they name the same phases as the last: the median weighs each by its steps."""
    alike = [phases for phases in found if phases.medians.keys() == found[-1].medians.keys()]
    if not alike:
        return None
    weights = [phases.steps for phases in alike]
    return Phases(
        steps=sum(weights),
        medians={name: _median([phases.medians[name] for phases in alike], weights) for name in alike[-1].medians},
        data_s=_median([phases.data_s for phases in alike], weights),
    )


def _median(values: Sequence[float], weights: Sequence[int]) -> float:
    """The value at which half of the weight is reached."""
    passed, half = 0.0, sum(weights) / 2
    for value, weight in sorted(zip(values, weights, strict=True)):
        passed += weight
        if passed >= half:
            return value
    raise AssertionError("some weight is positive")


def slowest(found: Iterable[Phases]) -> Phases | None:
    """Those of the rank whose own part of a step takes longest: the others' waits are for it."""
    return max(found, key=lambda phases: phases.own_s, default=None)
