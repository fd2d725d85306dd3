"""Step reports of the first server: sums that workers push with their units, and gradient norms of rounds."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from trainwright.core.data import StepReport
from trainwright.core.topology import WorkUnit
from trainwright.strategies.ps.call_headers import PushCall
from trainwright.strategies.ps.lease_table import ClosedRound
from trainwright.strategies.ps.update_applier import ServerConfig, clipping_factor


@dataclass(frozen=True, kw_only=True)
class _UnitSums:
    """The sums that a worker pushed with a unit."""

    sums: Sequence[tuple[float, float]]
    weight: float
    norm: float


class RoundReports:
    """Collects what the reports of rounds are made of.

    Args:
        servers: number of servers, each of which has a part of a round's norm.
    """

    def __init__(self, servers: int) -> None:
        self._servers = servers
        self._sums: dict[tuple[int, WorkUnit], _UnitSums] = {}  # by round and unit
        self._parts: dict[int, dict[int, float]] = {}  # by round and server, squared norms
        self._norms: dict[int, float] = {}  # by round

    def restart(self) -> None:
        """Forget all rounds."""
        self._sums, self._parts, self._norms = {}, {}, {}

    def add_unit(self, head: PushCall) -> None:
        """Take the sums of a unit from its first push."""
        assert head.norm is not None, "checked before"
        self._sums[head.at, head.work_unit] = _UnitSums(sums=head.sums, weight=head.weight, norm=head.norm)

    def has_unit(self, at: int, unit: WorkUnit) -> bool:
        """Whether the sums of a unit are here."""
        return (at, unit) in self._sums

    def add_norm(self, at: int, rank: int, norm2: float, config: ServerConfig) -> float | None:
        """Take a server's part of a round's squared norm; with the last one, return the round's clipping factor.

        Raises NonFiniteLoss.
        """
        parts = self._parts.setdefault(at, {})
        parts[rank] = norm2
        if len(parts) < self._servers:
            return None
        del self._parts[at]
        norm = self._norms[at] = math.sqrt(sum(parts[rank] for rank in sorted(parts)))
        assert config.clip_norm is not None, "servers send norms only where they clip"
        return clipping_factor(norm, config.clip_norm)

    def report(self, closing: ClosedRound, config: ServerConfig, rate: Callable[[int], float]) -> Iterator[StepReport]:
        """Yield the report of each step of a round, over all its units.

        Args:
            closing: the round.
            config: of the servers.
            rate: (step) -> learning rate.
        """
        units = [self._sums.pop((closing.at, unit)) for unit in closing.units]
        if config.consistency.backup:
            self._sums = {key: sums for key, sums in self._sums.items() if key[0] != closing.at}
        norm = self._norm_of(closing.at, units, config)
        for number in range(closing.steps):
            loss = sum(one.sums[number][0] for one in units)
            weight = sum(one.sums[number][1] for one in units)
            yield StepReport(
                step=closing.step + number + 1,
                loss=loss / weight if weight > 0 else 0.0,
                weight=weight,
                learning_rate=rate(closing.step + number),
                gradient_norm=norm,
            )

    def _norm_of(self, at: int, units: Sequence[_UnitSums], config: ServerConfig) -> float | None:
        """Return a round's gradient norm; if each worker clips its own gradient, their mean."""
        if config.clip_norm is None:
            return None
        if config.clips:
            return self._norms.pop(at)
        weight = sum(one.weight for one in units)
        return sum(one.norm * one.weight for one in units) / weight if weight > 0 else 0.0
