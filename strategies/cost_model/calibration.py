"""How well real machines do what their data sheets say: a few efficiencies with what is known of them beforehand.

Uncalibrated they are the defaults, and an estimate's interval is as wide as `spread` says. Measurements narrow both:
`fitting.calibrate` finds the most probable efficiencies, and what they leave unexplained is kept as a residual by shape
of work (Gaussian process regression; Rasmussen and Williams 2006, algorithm 2.1): a kernel that a library picks badly
for one shape is met again wherever that shape comes again, and nowhere else.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

Vector = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Efficiency:
    """One of them: what it is without measurements, and the standard deviation of its logarithm."""

    default: float
    spread: float
    what: str


EFFICIENCIES: Mapping[str, Efficiency] = {
    "matmul": Efficiency(default=0.76, spread=0.06, what="of the peak rate in large matrix products"),
    "matmul_s": Efficiency(default=3.5e-5, spread=0.7, what="seconds more of each matrix product, whatever its size"),
    "traffic": Efficiency(default=0.80, spread=0.3, what="of the memory's bandwidth in all other operations"),
    "scores": Efficiency(default=1.2, spread=0.6, what="of attention's scores that is written to memory"),
    "launch_s": Efficiency(default=2.2e-5, spread=0.5, what="seconds of the host for each operation"),
    "tensor": Efficiency(default=0.9, spread=0.2, what="of the links' bandwidth in tensor parallelism"),
    "message_s": Efficiency(default=1.5e-5, spread=0.7, what="seconds of each message inside a node"),
    "reduce": Efficiency(default=0.75, spread=0.4, what="of the links' bandwidth in reductions of gradients"),
    "gather_s": Efficiency(default=1e-4, spread=0.8, what="seconds of each of ZeRO's collectives, whatever its size"),
    "network": Efficiency(default=0.7, spread=0.4, what="of the network's bandwidth between nodes"),
    "overlap": Efficiency(default=0.2, spread=0.9, what="of backward under which gradients are reduced"),
    "send": Efficiency(default=0.4, spread=0.6, what="of a link's bandwidth between stages"),
    "send_s": Efficiency(default=2.5e-4, spread=0.7, what="seconds of each message between stages"),
    "update": Efficiency(default=0.85, spread=0.4, what="of the memory's bandwidth in the optimizer"),
    "step_s": Efficiency(default=4e-3, spread=0.8, what="seconds of each step for everything else"),
}
NAMES = tuple(EFFICIENCIES)
OF_DEVICE = ("matmul", "traffic", "launch_s", "update")  # as unsure as the device's own speed
RESIDUAL = 0.10  # standard deviation of a shape's own error, of the logarithm
NOISE = 0.03  # of one measurement's
UNKNOWN = 0.08  # of what this model leaves out, measured on no machine like it
SCALES = (0.7, 0.7, 0.7, 3.0, 6.0, 6.0)  # octaves over which shapes are alike; `work.Shape` says of what


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Efficiencies and how sure they are.

    Attributes:
        logs: logarithm of each efficiency over its default, in the order of `NAMES`.
        covariance: of `logs`.
        shapes: of the work that was measured, see `work.Shape`.
        kinds: what must be the same for a shape to say anything of another.
        residuals: weights of the shapes' errors.
        inverse: of the shapes' covariance.
        measurements: how many there were.
    """

    logs: tuple[float, ...] = (0.0,) * len(NAMES)
    covariance: tuple[tuple[float, ...], ...] = tuple(
        tuple(item.spread**2 if row == column else 0.0 for column in range(len(NAMES)))
        for row, item in enumerate(EFFICIENCIES.values())
    )
    shapes: tuple[tuple[float, ...], ...] = ()
    kinds: tuple[str, ...] = ()
    residuals: tuple[float, ...] = ()
    inverse: tuple[tuple[float, ...], ...] = ()
    measurements: int = 0

    @cached_property
    def efficiencies(self) -> Mapping[str, float]:
        """By name."""
        return efficiencies(np.array(self.logs))

    def residual(self, shape: tuple[float, ...], kind: str) -> tuple[float, float]:
        """Mean and variance of what the efficiencies leave unexplained, as a logarithm."""
        if not self.shapes:
            return 0.0, UNKNOWN**2 + RESIDUAL**2
        near = alike(np.array([shape]), [kind], np.array(self.shapes), self.kinds)[0]
        mean = float(near @ np.array(self.residuals))
        return mean, max(RESIDUAL**2 - float(near @ np.array(self.inverse) @ near), 0.0) + NOISE**2


def efficiencies(logs: Vector) -> Mapping[str, float]:
    """Efficiencies from their logarithms."""
    pairs = zip(EFFICIENCIES.items(), logs, strict=True)
    return {name: item.default * float(np.exp(log)) for (name, item), log in pairs}


def spreads(unsure: float) -> Vector:
    """Of all efficiencies, on a device of whose speed the logarithm has this standard deviation."""
    known = EFFICIENCIES.items()
    return np.array([math.hypot(item.spread, unsure if name in OF_DEVICE else 0.0) for name, item in known])


def alike(one: Vector, kinds: Sequence[str], other: Vector, others: Sequence[str]) -> Vector:
    """Covariance of the errors of shapes (n, features) with those of (m, features): (n, m)."""
    apart = (((one[:, None] - other[None]) / np.array(SCALES)) ** 2).sum(axis=2)
    same = np.array(kinds)[:, None] == np.array(others)[None]
    found: Vector = RESIDUAL**2 * np.exp(-0.5 * apart) * same
    return found


DEFAULT = Calibration()
