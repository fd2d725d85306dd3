"""Goals for evaluated metrics: which evaluation is the best, and when a lack of improvement ends a run.

A goal is the name of an evaluated metric, of which a larger value is better; with a leading minus a smaller one. The
loss is always minimized, with or without a minus.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from trainwright.core.errors import JobError, nearest
from trainwright.core.events import Evaluated

_LOSS = "loss"
_ERROR_NAME = re.compile(
    r"(?!neg)(.*[_\W])?(loss|error|error_rate|err|mae|mse|rmse|mape|msle|nll|perplexity|ppl|wer|cer)", re.IGNORECASE
)


@dataclass(frozen=True)
class EarlyStop:
    """End the run when an evaluated metric no longer improves.

    Attributes:
        metric: name of the metric, of which a larger value is better; `-name`, or `loss`: a smaller one.
        patience: evaluations in a row without an improvement, after which the run ends.
        min_delta: an improvement is larger than this, in units of the metric.
    """

    metric: str
    patience: int = 3
    min_delta: float = 0.0

    def __post_init__(self) -> None:
        problems = []
        if self.patience < 1:
            problems.append(f"EarlyStop(patience={self.patience}): use 1 or more")
        if not self.min_delta >= 0:
            problems.append(f"EarlyStop(min_delta={self.min_delta}): use 0 or more")
        if problems:
            raise JobError(problems)

    def reason(self, evaluations: Iterable[Evaluated]) -> str:
        """Return why the run ends after the last of these evaluations, given in order; empty if it goes on."""
        best, waited, last_step = math.nan, 0, 0
        for event in evaluations:
            score, last_step = _score(self.metric, event), event.step
            if score > best + self.min_delta or (math.isnan(best) and not math.isnan(score)):
                best, waited = score, 0
            else:
                waited += 1
        if waited < self.patience:
            return ""
        times = "1 evaluation" if waited == 1 else f"{waited} evaluations"
        return f"stopped early after step {last_step:,}: {metric_name(self.metric)} has not improved in {times}"


def goals_of(best: str | None, early_stop: EarlyStop | None) -> dict[str, str]:
    """Return the goals that the options `best=` and `early_stop=` of a job give, by option."""
    goals = {"best": best, "early_stop": early_stop.metric if early_stop else None}
    return {option: goal for option, goal in goals.items() if goal}


def metric_name(goal: str) -> str:
    """Return the name of the metric of a goal."""
    return goal.removeprefix("-")


def minimizes(goal: str) -> bool:
    """Return whether a smaller value of the metric of a goal is better."""
    return goal.startswith("-") or goal == _LOSS


def best_evaluation(goal: str, evaluations: Iterable[Evaluated]) -> Evaluated | None:
    """Return the best of some evaluations, given in order: the earliest of equal ones, never one whose metric is NaN.

    Returns:
        None if there is none with this metric.
    """
    best = None
    for event in evaluations:
        score = _score(goal, event)
        if not math.isnan(score) and (best is None or score > _score(goal, best)):
            best = event
    return best


def best_text(goal: str, best: Evaluated) -> str:
    """Return the best evaluation in words: `accuracy 0.9134 at step 80`."""
    name = metric_name(goal)
    return f"{name} {best.metrics[name]:.4g} at step {best.step:,}"


def check_goals(goals: Mapping[str, str], metrics: Collection[str]) -> None:
    """Check that the goals of some options, by option, name evaluated metrics. Raises JobError."""
    problems = [
        f"{option}={goal!r} is not an evaluated metric: {nearest(metric_name(goal), metrics)}"
        for option, goal in goals.items()
        if metric_name(goal) not in metrics
    ]
    if problems:
        raise JobError(problems)


def goal_notes(goals: Mapping[str, str]) -> list[str]:
    """Return a note on each goal, by option, that maximizes a metric with the name of an error."""
    return [
        f"{option}: the largest {goal} counts as the best; for the smallest write {'-' + goal!r}"
        for option, goal in goals.items()
        if not minimizes(goal) and _ERROR_NAME.fullmatch(goal)
    ]


def _score(goal: str, event: Evaluated) -> float:
    """Return the value of which a larger one is better; NaN if the evaluation has no such metric."""
    value = event.metrics.get(metric_name(goal), math.nan)
    return -value if minimizes(goal) else value
