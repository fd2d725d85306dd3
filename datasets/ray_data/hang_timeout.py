"""When silence counts as a hang: in proportion to the durations of earlier batches of the same work. Pure."""

from __future__ import annotations

from dataclasses import dataclass

CHECK_INTERVAL_S = 1.0  # between two checks of the silent
_PATIENCE, _LEAST_S = 10.0, 15.0  # times the longest batch so far; a machine can pause for seconds


@dataclass(kw_only=True)
class BatchDurations:
    """How long batches of one kind of work take."""

    most_s: float  # limit of a batch; the only one until a batch is done
    longest_s: float = 0.0  # of the longest batch so far; 0 while none is done

    def took(self, seconds: float) -> None:
        """Record a finished batch."""
        self.longest_s = max(self.longest_s, seconds)

    def limit_s(self, lost: int = 0) -> float:
        """Return the seconds of silence that count as a hang.

        Args:
            lost: actors that were lost with the same rows before. Each makes the limit ten times as long, so that slow
                rows are computed in the end.
        """
        if not self.longest_s:
            return self.most_s
        return min(max(_PATIENCE * self.longest_s, _LEAST_S) * _PATIENCE**lost, self.most_s)

    @property
    def usual(self) -> str:
        """The longest duration in words, for messages; empty while no batch is done."""
        return f", and no batch took more than {self.longest_s:.2g} s before" if self.longest_s else ""


@dataclass(kw_only=True)
class SilenceTimer:
    """How long an actor has been silent. Time in which this process itself was paused does not count."""

    looked_s: float  # time of the last check; there is one every `CHECK_INTERVAL_S`
    seconds: float = 0.0  # of silence until then

    def look(self, now_s: float) -> float:
        """Return the seconds of silence until now."""
        self.seconds += min(now_s - self.looked_s, 2 * CHECK_INTERVAL_S)
        self.looked_s = now_s
        return self.seconds

    def end(self, now_s: float) -> float:
        """End this silence and begin another one. Returns the seconds of this one."""
        seconds, self.seconds = self.look(now_s), 0.0
        return seconds
