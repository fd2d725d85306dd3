"""When silence is a hang: in proportion to what batches of the same work took so far, whoever computes them. Pure."""

from __future__ import annotations

from dataclasses import dataclass

CHECK_INTERVAL_S = 1.0  # between two looks at who is silent
_PATIENCE, _LEAST_S = 10.0, 15.0  # times the longest batch so far; a machine may stand still for seconds


@dataclass(kw_only=True)
class BatchDurations:
    """What batches of one kind of work take.

    Attributes:
        most_s: that one may take; until one is done all have as long.
        longest_s: that one took so far; 0 while none is done.
    """

    most_s: float
    longest_s: float = 0.0

    def took(self, seconds: float) -> None:
        """One is done."""
        self.longest_s = max(self.longest_s, seconds)

    def limit_s(self, lost: int = 0) -> float:
        """Seconds of silence that are a hang.

        Args:
            lost: how often somebody was lost with the same rows before. Each time they are given ten times as long, so
                that rows which only take long are computed in the end.
        """
        if not self.longest_s:
            return self.most_s
        return min(max(_PATIENCE * self.longest_s, _LEAST_S) * _PATIENCE**lost, self.most_s)

    @property
    def usual(self) -> str:
        """What goes without saying, for people; empty while no batch is done."""
        return f", and no batch took more than {self.longest_s:.2g} s before" if self.longest_s else ""


@dataclass(kw_only=True)
class SilenceTimer:
    """How long nothing was heard of somebody, as far as who listens ran: one that stood still has heard nobody.

    Attributes:
        looked_s: time of the last look, of which there is one every `CHECK_INTERVAL_S`.
        seconds: of silence by then.
    """

    looked_s: float
    seconds: float = 0.0

    def look(self, now_s: float) -> float:
        """Seconds of silence by now."""
        self.seconds += min(now_s - self.looked_s, 2 * CHECK_INTERVAL_S)
        self.looked_s = now_s
        return self.seconds

    def end(self, now_s: float) -> float:
        """Something was heard, and another silence begins; the seconds of this one."""
        seconds, self.seconds = self.look(now_s), 0.0
        return seconds
