"""Averages of a model's weights over training: exponential moving averages (EMA), and means (SWA)."""

from __future__ import annotations

from dataclasses import dataclass

from trainwright.core.errors import JobError


@dataclass(frozen=True, kw_only=True)
class WeightAverage:
    """An average of the trained parameters, which is evaluated, loaded and exported in their place.

    Training goes on with the parameters themselves. Buffers, such as the statistics of batch norms, are not averaged.

    Attributes:
        decay: of an exponential moving average: average = decay * average + (1 - decay) * parameters, after each
            update (Polyak and Juditsky, 1992). None gives the mean of all averaged states, as in stochastic weight
            averaging (Izmailov et al., 2018).
        warmup: use min(decay, (1 + n) / (10 + n)) in update n, as TensorFlow and diffusers do, so that the weights that
            the average began with do not last. Without, their share after n updates is decay ** n, 61% after 500 with
            decay=0.999: choose that for the numbers of torch's `AveragedModel`. A mean has no warm-up.
        start: epochs before the average begins, with the parameters as they are then. Until then the parameters
            themselves are evaluated.
        every: steps between two updates of the average.
    """

    decay: float | None = 0.999
    warmup: bool = True
    start: int = 0
    every: int = 1

    def __post_init__(self) -> None:
        problems = []
        if self.decay is not None and not 0.0 <= self.decay < 1.0:
            problems.append(f"WeightAverage(decay={self.decay}): use 0 or more and less than 1, or None for the mean")
        if self.start < 0:
            problems.append(f"WeightAverage(start={self.start}): epochs, use 0 or more")
        if self.every < 1:
            problems.append(f"WeightAverage(every={self.every}): steps, use 1 or more")
        if problems:
            raise JobError(problems)

    def begun(self, step: int, epoch_steps: int) -> bool:
        """Return whether there is an average after `step` completed steps."""
        return step >= self.start * epoch_steps

    def share(self, step: int, epoch_steps: int) -> float:
        """Return the share of the parameters in the average after `step` completed steps; 0 where it stays as it is."""
        updates, steps_since = divmod(step - self.start * epoch_steps, self.every)
        if updates < 0 or steps_since:
            return 0.0
        if updates == 0 or self.decay is None:
            return 1.0 / (updates + 1)
        return max(1.0 - self.decay, 9.0 / (10 + updates)) if self.warmup else 1.0 - self.decay
