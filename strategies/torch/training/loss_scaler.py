"""The factor by which losses are multiplied where backward computes in half precision: small gradients stay."""

from __future__ import annotations

from dataclasses import dataclass, replace

FLOOR = 1.0  # below, gradients that overflow are too large themselves


@dataclass(frozen=True, kw_only=True)
class Scale:
    """A scale by the rules of `torch.amp.GradScaler`, with its defaults; on the host, the same on all ranks.

    It is a power of two, so that multiplying by it and dividing loses nothing. Every rank knows whether the gradient of
    the whole batch is finite, so that every rank does the same.

    Attributes:
        factor: of the losses.
        since: steps applied since it last changed.
    """

    factor: float = 2.0**16
    since: int = 0

    def applied(self) -> Scale:
        """After a step: doubled by every 2,000th in a row."""
        since = self.since + 1
        return replace(self, since=since) if since < 2000 else Scale(factor=2.0 * self.factor)

    def overflowed(self) -> Scale:
        """After a step whose gradient was not finite: half of it."""
        return Scale(factor=0.5 * self.factor)
