"""The learning rates of a replica: factors from the job's functions, or a scheduler of `torch.optim.lr_scheduler`.

A scheduler's state is part of the replica's state. A state after `step` steps holds what the scheduler has counted in
these steps, and of evaluations those before its last step: what the next step needs is applied with that step, so that
a step taken again finds the same rates. It has what counting has changed, and how the scheduler was made. A job that is
resumed with another scheduler, or with other settings, rates or length, counts its own scheduler from step 0 to `step`:
most of torch's compute a rate from the one before, which is that of the earlier settings.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from trainwright.core.engine import ModelSpec, takes_optimizer
from trainwright.core.errors import JobError
from trainwright.strategies.torch.torch_errors import TorchUserCode

SchedulerState = dict[str, Any]  # values that JSON has
_PAIRS = "pairs"  # of a mapping whose keys are no text
_TENSOR = "tensor"  # the values of a setting that is one
# Of a saved state: how the scheduler was made; the space tells it from an attribute. Older checkpoints do not have it.
_MADE_AS = "made as"
_SCHEDULED = frozenset({"lr", "momentum", "betas"})  # the settings that torch's schedulers change


class LearningRates:
    """Sets the learning rates of an optimizer's parameter groups.

    Attributes:
        initial: each parameter group's settings before the first step.

    Raises:
        JobError: the schedule does not fit the optimizer.
        UserCodeError: making the scheduler raised.
    """

    def __init__(self, spec: ModelSpec, optimizer: torch.optim.Optimizer, where: str) -> None:
        self._spec, self._groups, self._where = spec, optimizer.param_groups, where
        self._factors: tuple[Callable[[int, int], float], ...] = ()
        self._scheduler: LRScheduler | None = None
        schedule = spec.schedule
        if takes_optimizer(schedule):
            self._scheduler = _make_scheduler(spec, optimizer, where)
        elif isinstance(schedule, tuple):
            self._factors = schedule
        elif schedule is not None:
            self._factors = (schedule,) * len(self._groups)
        if self._factors and len(self._factors) != len(self._groups):
            functions, groups = len(self._factors), len(self._groups)
            problem = f"schedule= gives {functions} of the {groups} rates: give a function for each parameter group"
            raise JobError([problem], where=where)
        self.initial = [group_settings(group) for group in self._groups]
        self._fresh = None if self._scheduler is None else _plain_state(self._scheduler)
        self._made_as = {
            "class": type(self._scheduler).__name__,
            "by": spec.schedule_metric or spec.schedule_by,
            "rates": [initial.get("lr") for initial in self.initial],
            "length": [spec.total_steps, spec.epochs],  # a function within it may depend on them
            "settings": self._fresh,
        }

    @property
    def computed(self) -> bool:
        """Whether the rates of a step follow from its number alone."""
        return bool(self._factors)

    def begin(self, step: int, metrics: Mapping[str, float] | None, where: str) -> float:
        """Set each group's rate for a step that is about to be applied, and return the first group's.

        Args:
            metrics: of the evaluation after `step` completed steps, if there was one.

        Raises:
            JobError, UserCodeError: the schedule or the scheduler raised.
        """
        if self._factors:
            with TorchUserCode("schedule=", where):
                factors = [float(factor(step, self._spec.total_steps)) for factor in self._factors]
            for group, initial, factor in zip(self._groups, self.initial, factors, strict=True):
                set_group_option(group, "lr", initial.get("lr", 0.0) * factor)
        elif self._scheduler is not None and self._spec.schedule_metric and metrics is not None:
            with TorchUserCode("the scheduler's step()", where):
                self._scheduler.step(metrics[self._spec.schedule_metric])  # type: ignore[arg-type]
        return float(self._groups[0].get("lr", 0.0))

    def end(self, step: int, where: str) -> None:
        """Let the scheduler count a step, which was applied or skipped. Raises UserCodeError."""
        if self._scheduler is None or self._spec.schedule_metric:
            return
        if self._spec.schedule_by == "epoch" and (step + 1) % self._spec.epoch_steps:
            return
        # torch warns where the first step was skipped; each `catch_warnings` lets other warnings be shown again.
        with warnings.catch_warnings() if step == 0 else nullcontext(), TorchUserCode("the scheduler's step()", where):
            if step == 0:
                warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")
            self._scheduler.step()

    @property
    def state(self) -> SchedulerState | None:
        """What has changed in the scheduler's state, in values that JSON has; None without a scheduler."""
        if self._scheduler is None:
            return None
        return {_MADE_AS: self._made_as, **_changes(_plain_state(self._scheduler), self._fresh)}

    @state.setter
    def state(self, saved: SchedulerState | None) -> None:
        """Restore the state of a scheduler that was made in the same way; None changes nothing."""
        if self._scheduler is not None and saved is not None:
            changes = {key: value for key, value in saved.items() if key != _MADE_AS}
            self._scheduler.load_state_dict(_like(self._scheduler.state_dict(), _with_changes(self._fresh, changes)))

    def restore(self, step: int, options: Sequence[Mapping[str, Any]], saved: SchedulerState | None) -> None:
        """Set the groups' settings and the scheduler to those after `step` completed steps.

        Args:
            step: of the state.
            options: of each group the settings that training had changed.
            saved: `state` of the job that wrote it. Where its scheduler was made in another way, the rates follow from
                this job's own schedule.

        Raises:
            UserCodeError: the scheduler raised.
        """
        made_as = None if saved is None else saved.get(_MADE_AS, self._made_as)
        same = saved is None if self._scheduler is None else made_as == self._made_as
        for group, initial in zip(self._groups, self.initial, strict=True):
            for key, value in initial.items():
                set_group_option(group, key, value)
        if not same and self._scheduler is not None:
            self.state = {}
            if not self._spec.schedule_metric:
                self._count(self._scheduler, step)
        for group, initial, changed in zip(self._groups, self.initial, options, strict=True):
            counted = group_settings(group)
            for key, value in changed.items():  # counting changes those of the scheduler, the optimizer has the others
                if same or (key not in _SCHEDULED and counted.get(key) == initial.get(key)):
                    set_group_option(group, key, value)
        if same:
            self.state = saved
        elif made_as is not None and self._scheduler is not None and self._spec.schedule_metric:
            self._take_reductions(options, saved, made_as)

    def _count(self, scheduler: LRScheduler, steps: int) -> None:
        """Let a fresh scheduler count completed steps."""
        counts = steps // self._spec.epoch_steps if self._spec.schedule_by == "epoch" else steps
        with warnings.catch_warnings(), TorchUserCode("the scheduler's step()", self._where):
            warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")
            for _ in range(counts):
                scheduler.step()

    def _take_reductions(
        self, options: Sequence[Mapping[str, Any]], saved: SchedulerState | None, made_as: Mapping[str, Any]
    ) -> None:
        """Apply to the job's own rates the reductions of a scheduler of the same class that follows the same metric."""
        if any(made_as[key] != self._made_as[key] for key in ("class", "by")):
            return
        self.state = saved
        for group, initial, changed, rate in zip(self._groups, self.initial, options, made_as["rates"], strict=True):
            if "lr" in changed and rate:
                set_group_option(group, "lr", changed["lr"] * (initial["lr"] / rate))


def _make_scheduler(spec: ModelSpec, optimizer: torch.optim.Optimizer, where: str) -> LRScheduler:
    with TorchUserCode("schedule=", where):
        made = spec.make_scheduler(optimizer)
    problems = []
    if not isinstance(made, LRScheduler):
        problems.append(
            f"schedule= takes one argument, the optimizer, and returned {type(made).__name__}: return a scheduler of "
            "torch.optim.lr_scheduler, or take (step, total_steps) and return a factor"
        )
    elif getattr(made, "optimizer", optimizer) is not optimizer:
        problems.append("schedule= made a scheduler of another optimizer than the one that it was given")
    elif isinstance(made, ReduceLROnPlateau) != bool(spec.schedule_metric):
        kind = type(made).__name__
        problems.append(
            f"schedule= made {kind}, which takes no metric: leave schedule_metric= out"
            if spec.schedule_metric
            else f"schedule= made {kind}, which takes a metric: set schedule_metric= to 'loss' or one of metrics="
        )
    else:
        try:
            _plain_state(made)
        except TypeError as error:
            problems.append(f"the state of {type(made).__name__} cannot be saved: {error}")
    if problems:
        raise JobError(problems, where=where)
    assert isinstance(made, LRScheduler)
    return made


# --- The scheduler's state --------------------------------------------------------------------------------------------


def _plain_state(scheduler: LRScheduler) -> SchedulerState:
    """Return the state of a scheduler without its functions, which the job makes again."""
    plain = _plain(scheduler.state_dict(), "")
    assert isinstance(plain, dict), "torch's state_dict() has names for keys"
    return plain


def _plain(value: Any, name: str) -> Any:
    """Return a value of a state as JSON has it. Raises TypeError where it cannot be saved."""
    if isinstance(value, Mapping):
        kept = [(key, _plain(item, str(key))) for key, item in value.items() if not callable(item)]
        return dict(kept) if all(isinstance(key, str) for key in value) else {_PAIRS: [[*pair] for pair in kept]}
    if isinstance(value, list | tuple):
        return [_plain(item, name) for item in value]
    if hasattr(value, "tolist"):  # a tensor, or a number of NumPy's, of which some are floats too
        return value.tolist()
    if isinstance(value, bool | int | float | str | None):
        return value
    raise TypeError(f"{name!r} is a {type(value).__name__}: keep numbers, texts, lists and dicts in it")


def _changes(new: Any, old: Any) -> Any:
    """Return a value of a state without the entries of dicts that are as they were."""
    if isinstance(new, dict) and isinstance(old, dict):
        return {key: _changes(item, old.get(key)) for key, item in new.items() if key not in old or item != old[key]}
    if isinstance(new, list) and isinstance(old, list) and len(new) == len(old):
        return [_changes(*pair) for pair in zip(new, old, strict=True)]
    return new


def _with_changes(old: Any, changes: Any) -> Any:
    """Return the value whose `_changes` against an old one these are."""
    if isinstance(old, dict) and isinstance(changes, dict):
        return {**old, **{key: _with_changes(old.get(key), item) for key, item in changes.items()}}
    if isinstance(old, list) and isinstance(changes, list) and len(old) == len(changes):
        return [_with_changes(*pair) for pair in zip(old, changes, strict=True)]
    return changes


def _like(own: Any, saved: Any) -> Any:
    """Return a saved value in the form of a fresh scheduler's own."""
    if isinstance(own, Mapping) and isinstance(saved, Mapping):
        if saved.keys() == {_PAIRS}:
            return type(own)(dict(map(tuple, saved[_PAIRS])))  # type: ignore[call-arg]
        return {**own, **{key: _like(own.get(key), value) for key, value in saved.items()}}
    if isinstance(own, list | tuple) and isinstance(saved, list):
        items = [_like(*pair) for pair in zip(own, saved, strict=True)] if len(own) == len(saved) else saved
        return tuple(items) if isinstance(own, tuple) else items
    return torch.tensor(saved, dtype=own.dtype, device=own.device) if isinstance(own, Tensor) else saved


# --- Parameter groups -------------------------------------------------------------------------------------------------


def group_settings(group: dict[str, Any]) -> dict[str, Any]:
    """Return a parameter group's settings as plain values, without its parameters and their names."""

    def plain(key: str, value: Any) -> Any:
        if isinstance(value, Tensor) and key != "lr":
            return {_TENSOR: value.tolist(), "dtype": str(value.dtype).removeprefix("torch.")}
        return value.item() if isinstance(value, Tensor | np.generic) else value

    return {key: plain(key, value) for key, value in group.items() if key not in ("params", "param_names")}


def set_group_option(group: dict[str, Any], key: str, value: Any) -> None:
    """Set a parameter group's option, as `group_settings` gives it; one that is held as a tensor stays that tensor."""
    current = group.get(key)
    if isinstance(value, dict) and value.keys() == {_TENSOR, "dtype"}:
        tensor = torch.tensor(value[_TENSOR], dtype=getattr(torch, value["dtype"]), device=group["params"][0].device)
        if isinstance(current, Tensor) and current.shape == tensor.shape:
            current.copy_(tensor)
        else:
            group[key] = tensor
    elif isinstance(current, Tensor):
        current.fill_(value)
    else:
        group[key] = tuple(value) if isinstance(current, tuple) else value
