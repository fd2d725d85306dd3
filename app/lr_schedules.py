"""Learning-rate schedules: pure functions (step, total) -> factor on the optimizer's own learning rate.

`step` counts from 0 and `total` is the number of steps of the whole run, so that a schedule means the same after a
resume and on any number of workers. Each function serves as it is, `Job(schedule=tw.schedules.one_cycle)`; set its
keywords with `functools.partial`, `Job(schedule=partial(tw.schedules.cosine, warmup=0.1))`. A keyword `batch_size` that
is not set gets the job's. Steps outside the run get the factor of its nearest end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

Schedule = Callable[[int, int], float]


def constant(step: int, total: int) -> float:
    """Return 1: the optimizer's own learning rate throughout."""
    return 1.0


def linear_warmup(
    step: int, total: int, *, warmup: float = 0.05, start: float = 0.0, then: Schedule = constant
) -> float:
    """Return a factor that rises from `start` to 1 in a straight line, then that of another schedule.

    Source: Goyal et al. 2017, "Accurate, Large Minibatch SGD".

    Args:
        warmup: share of the run that warms up, from 0 to 1.
        start: factor before the first step; the first step already has one part more.
        then: schedule of the rest, which sees its own steps from 0 and its own total.

    Raises:
        ValueError: a share is outside 0 to 1.
    """
    steps = _part("warmup", warmup, total)
    if step < steps > 0:
        return start + (1.0 - start) * (max(step, 0) + 1) / steps
    return then(step - steps, total - steps)


def linear(step: int, total: int, *, warmup: float = 0.0, end: float = 0.0) -> float:
    """Return a factor that warms up, then falls to `end` in a straight line.

    Args:
        warmup: share of the run that warms up, from 0 to 1.
        end: factor of the last step.

    Raises:
        ValueError: a share is outside 0 to 1.
    """
    return linear_warmup(step, total, warmup=warmup, then=lambda at, of: 1.0 + (end - 1.0) * _progress(at, of))


def cosine(step: int, total: int, *, warmup: float = 0.0, end: float = 0.0) -> float:
    """Return a factor that warms up, then falls to `end` along half a cosine.

    Source: Loshchilov and Hutter 2017, "SGDR", without restarts.

    Args:
        warmup: share of the run that warms up, from 0 to 1.
        end: factor of the last step.

    Raises:
        ValueError: a share is outside 0 to 1.
    """
    return linear_warmup(step, total, warmup=warmup, then=lambda at, of: _anneal(1.0, end, _progress(at, of)))


def one_cycle(step: int, total: int, *, rise: float = 0.3, start: float = 1 / 25, end: float = 4e-6) -> float:
    """Return a factor that rises from `start` to 1 and falls to `end`, both along half a cosine.

    The optimizer's own learning rate is the peak. The defaults are those of `torch.optim.lr_scheduler.OneCycleLR`.
    Source: Smith and Topin 2018, "Super-Convergence".

    Args:
        rise: share of the run in which the factor rises, from 0 to 1.
        start: factor of the first step.
        end: factor of the last step.

    Raises:
        ValueError: a share is outside 0 to 1.
    """
    _part("rise", rise, total)
    position, peak = min(max(step, 0), total - 1), rise * total - 1.0
    if position <= peak:
        return _anneal(start, 1.0, position / peak if peak > 0 else 1.0)
    fall = total - 1 - max(peak, 0.0)
    return _anneal(1.0, end, (position - max(peak, 0.0)) / fall if fall > 0 else 1.0)


def warmup_stable_decay(step: int, total: int, *, warmup: float = 0.05, decay: float = 0.2, end: float = 0.0) -> float:
    """Return a factor that warms up, stays at 1, and falls to `end` in a straight line over the last part.

    Source: Hu et al. 2024, "MiniCPM".

    Args:
        warmup: share of the run that warms up, from 0 to 1.
        decay: share of the run in which the factor falls, from 0 to 1.
        end: factor of the last step.

    Raises:
        ValueError: a share is outside 0 to 1.
    """
    steps = _part("decay", decay, total)
    if step < total - steps:
        return linear_warmup(step, total, warmup=warmup)
    return 1.0 + (end - 1.0) * min(step - (total - steps) + 1, steps) / steps if steps else 1.0


def step_decay(step: int, total: int, *, milestones: Sequence[float] = (0.5, 0.75), factor: float = 0.1) -> float:
    """Return a factor that is multiplied by `factor` at each of the milestones.

    Source: He et al. 2016, "Deep Residual Learning".

    Args:
        milestones: shares of the run, from 0 to 1.
        factor: that each milestone multiplies by.

    Raises:
        ValueError: a share is outside 0 to 1.
    """
    return float(factor ** sum(step >= _part("milestones", share, total) for share in milestones))


def inverse_sqrt(step: int, total: int, *, warmup: float = 0.05) -> float:
    """Return a factor that warms up, then falls with the square root of the step, in units of the warm-up.

    Source: Vaswani et al. 2017, "Attention Is All You Need".

    Args:
        warmup: share of the run that warms up, from 0 to 1.

    Raises:
        ValueError: a share is outside 0 to 1.
    """
    steps = max(_part("warmup", warmup, total), 1)
    return min((max(step, 0) + 1) / steps, math.sqrt(steps / (max(step, 0) + 1)))


def linear_scaling(
    step: int, total: int, *, batch_size: int, reference: int, warmup_steps: int, then: Schedule = constant
) -> float:
    """Return a factor that rises to the learning rate of another batch size, then that of another schedule.

    The rate of the optimizer is the one that was found for batches of `reference` samples. It is multiplied by
    batch_size / reference (Goyal et al. 2017, "Accurate, Large Minibatch SGD"; for SGD: Adam's is often scaled by the
    square root instead).

    Args:
        batch_size: in samples; `Job` gives its own.
        reference: batch size, in samples, for which the optimizer's own rate was chosen.
        warmup_steps: from the optimizer's own rate to the scaled one; a rate that is scaled down holds from the start.
        then: schedule of the rest, which sees its own steps from 0 and its own total; its factors are multiplied too.

    Raises:
        ValueError: a batch size is not positive, or the warm-up is negative or longer than the run.
    """
    if batch_size < 1 or reference < 1:
        raise ValueError(f"batch_size={batch_size!r} and reference={reference!r} are samples: use 1 or more")
    if not 0 <= warmup_steps <= total:
        raise ValueError(f"warmup_steps={warmup_steps!r} of a run of {total} steps: use 0 to {total}")
    factor = batch_size / reference
    start = min(1.0, factor)
    done = max(step, 0) + 1
    if done <= warmup_steps:
        return start + (factor - start) * done / warmup_steps
    return factor * then(step - warmup_steps, total - warmup_steps)


def _part(name: str, share: float, total: int) -> int:
    """How many steps a share of the run is; raises ValueError for a share outside 0 to 1."""
    if not 0.0 <= share <= 1.0:
        raise ValueError(f"{name}={share!r} is a share of the run: use a number from 0 to 1")
    return round(share * total)


def _progress(step: int, total: int) -> float:
    """0 at the first step, 1 at the last."""
    return min(max(step, 0) / (total - 1), 1.0) if total > 1 else 0.0


def _anneal(start: float, end: float, progress: float) -> float:
    """Half a cosine from `start` to `end`."""
    return end + (start - end) * (1.0 + math.cos(math.pi * progress)) / 2.0
