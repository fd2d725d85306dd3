"""The optimizer of a replica: the user's, or several for parts of the model; and copies of weights beside its own."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn

from trainwright.core.engine import ModelSpec
from trainwright.core.errors import JobError
from trainwright.core.weight_average import WeightAverage
from trainwright.strategies.torch.checkpoint.tensor_digests import digests
from trainwright.strategies.torch.shard_layout import to_local
from trainwright.strategies.torch.torch_compat import (
    foreach_copy,
    preserve_version_counter,
    tree_flatten,
    tree_unflatten,
)
from trainwright.strategies.torch.torch_errors import TorchUserCode
from trainwright.strategies.torch.training.learning_rates import group_settings, set_group_option

_WATCHED_STEPS = 3  # a rate that warms up may be 0 in the first one


class NamedOptimizers(torch.optim.Optimizer):
    """Several optimizers by name, with their parameter groups one after the other, and one state."""

    def __init__(self, named: Mapping[str, torch.optim.Optimizer]) -> None:
        groups = [group for each in named.values() for group in each.param_groups]
        super().__init__([{"params": group["params"]} for group in groups], {})
        self.param_groups = groups
        self.named = named
        for each in named.values():
            each.state = self.state

    def parameters(self, name: str) -> list[nn.Parameter]:
        """Return the parameters of one optimizer."""
        return [parameter for group in self.named[name].param_groups for parameter in group["params"]]


def make_optimizer(spec: ModelSpec, names: Mapping[nn.Parameter, str], where: str) -> torch.optim.Optimizer:
    """Make a job's optimizer, or its optimizers, for the trained parameters, whose full names are given.

    Raises:
        JobError: they do not fit the model.
        UserCodeError: the job's function raised.
    """
    pairs = [(name, parameter) for parameter, name in names.items()]
    if not isinstance(spec.optimizer, Mapping):
        with TorchUserCode("optimizer()", where):
            made = spec.make_optimizer(pairs)
        _check_optimizer("optimizer()", made, names, where)
        return made  # type: ignore[no-any-return]
    parts = {key: [pair for pair in pairs if pair[0].startswith(f"{key}.")] for key in spec.optimizer}
    problems = [f"optimizer= names {key!r}, and no trained parameter begins with it" for key in parts if not parts[key]]
    taken = [name for part in parts.values() for name, _ in part]
    problems += [f"parameter {name!r} belongs to no optimizer" for name in names.values() if name not in taken][:1]
    if len(set(taken)) < len(taken):
        problems.append("optimizer= has keys of which one is a part of another: each parameter needs one optimizer")
    if problems:
        parts_of = ", ".join(dict.fromkeys(name.partition(".")[0] for name in names.values()))
        problems[-1] += f": keys are names of the model's modules, such as {parts_of}"
        raise JobError(problems, where=where)
    found = {}
    for key, part in parts.items():
        with TorchUserCode(f"optimizer {key!r}", where):
            found[key] = spec.make_optimizer(part, key)
        _check_optimizer(f"optimizer {key!r}", found[key], names, where)
        if needs_closure(found[key]):
            raise JobError([f"optimizer {key!r} takes a closure: it must be the only one"], where=where)
    return NamedOptimizers(found)


def _check_optimizer(what: str, optimizer: Any, names: Mapping[nn.Parameter, str], where: str) -> None:
    if not isinstance(optimizer, torch.optim.Optimizer):
        kind = type(optimizer).__name__
        raise JobError([f"{what} returned {kind}: return a torch.optim.Optimizer"], where=where)
    if any("initial_lr" in group for group in optimizer.param_groups):  # torch's LRScheduler sets it
        raise JobError(
            [
                f"{what} made a torch.optim.lr_scheduler, whose count is neither saved nor sent to a worker that is "
                "replaced: make it in schedule=, such as schedule=lambda optimizer: StepLR(optimizer, 10, 0.5)"
            ],
            where=where,
        )
    if callable(getattr(optimizer, "train", None)) and callable(getattr(optimizer, "eval", None)):
        kind = type(optimizer).__name__
        problem = (
            f"{what} made {kind}, whose eval() and train() exchange the parameters. Nothing calls them, so evaluations "
            "and exports would have the parameters of training: use an optimizer without them, and "
            "weight_average=tw.WeightAverage(decay=0.999)"
        )
        raise JobError([problem], where=where)
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if any(parameter not in names for parameter in held):
        raise JobError([f"{what} holds a tensor that is not a parameter of the model"], where=where)


def needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer's step() needs a closure, which computes the loss again."""
    given = inspect.signature(optimizer.step).parameters.values()
    named = (each for each in given if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD))
    return any(each.default is each.empty for each in named)


class MovingParameters:
    """The frozen parameters that forwards change, such as those of a momentum encoder or of a mean teacher.

    They are found by their values, since `.data` writes without a new version. They follow trained parameters: those
    with the shape of one are watched, which leaves out the large base of a small adapter. They may be equal to them at
    first, so they are watched until a few steps have been applied.

    Args:
        rebuilt: names of those that no state holds, since `model()` makes them.

    Attributes:
        found: those that were seen to change, by full name.
    """

    def __init__(self, model: nn.Module, rebuilt: Collection[str], where: str) -> None:
        self.found: dict[str, Tensor] = {}
        shapes = {each.shape for each in model.parameters() if each.requires_grad}
        frozen = {name: each for name, each in model.named_parameters() if not each.requires_grad}
        # Those on the meta device are of other stages.
        watched = {name: each for name, each in frozen.items() if each.shape in shapes and not each.is_meta}
        self._saved = {name: each for name, each in watched.items() if name not in rebuilt}
        self._rebuilt = {name: each for name, each in watched.items() if name in rebuilt}
        self._digests: list[int] | None = None  # before the first step: a transfer may set all parameters before
        self._where, self._steps = where, _WATCHED_STEPS

    @contextmanager
    def watching(self, applied: Callable[[], bool]) -> Iterator[None]:
        """Find those that change in this context; set them back unless the step was applied.

        Raises as `check`.
        """
        if not self._steps:
            yield
            return
        if self._digests is None:
            self._digests = self._now()
        watched = {name: each for name, each in self._saved.items() if name not in self.found}
        copies = {name: _held(each).to("cpu", copy=True) for name, each in watched.items()}  # a GPU may have no room
        try:
            yield
        finally:
            moved = {name: each for name, each in watched.items() if not torch.equal(copies[name], _held(each).cpu())}
            self.found |= moved
            if not applied():
                for name, each in moved.items():
                    _held(each).copy_(copies[name])
            self._steps -= applied()
        self.check()

    def check(self) -> None:
        """Raise JobError where one that no state holds has changed since before the first step."""
        if self._digests is None:
            return
        pairs = zip(self._rebuilt, self._digests, self._now(), strict=True)
        lost = [name for name, before, now in pairs if before != now]
        if lost:
            problem = (
                f"parameter {lost[0]!r} is frozen and changes in the forward pass, or where eval() merges an adapter "
                "into it and train() takes it out again (which rounds); checkpoints do not hold it"
            )
            raise JobError([f"{problem}: set save_frozen=True, or do not merge in eval()"], where=self._where)

    def _now(self) -> list[int]:
        """Return the digests of those that no state holds."""
        return digests(map(_held, self._rebuilt.values()))


def _held(parameter: Tensor) -> Tensor:
    """Return what this rank holds of a parameter, whose `.data` a forward may have replaced."""
    return to_local(parameter.detach())


class StepUndo:
    """Sets parameters and their optimizer back after an error in a step.

    The copies of a step have the memory of those before: to allocate it anew costs several times as much.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter]) -> None:
        self._optimizer, self._parameters = optimizer, parameters
        self._copies: list[Any] = []

    @contextmanager
    def after_errors(self, restore: Callable[[], None]) -> Iterator[None]:
        """Set parameters and optimizer back after an error, as they are now; then call `restore`."""
        leaves, structure = tree_flatten((list(self._parameters), dict(self._optimizer.state)))
        self._copy(leaves)
        groups = [group_settings(group) for group in self._optimizer.param_groups]
        try:
            yield
        except BaseException:
            (kept, state), self._copies = tree_unflatten(self._copies, structure), []  # they are the state from now on
            foreach_copy([parameter.detach() for parameter in self._parameters], kept)
            self._optimizer.state.clear()
            self._optimizer.state.update(state)
            for group, settings in zip(self._optimizer.param_groups, groups, strict=True):
                for key, value in settings.items():
                    set_group_option(group, key, value)
            restore()
            raise

    def _copy(self, leaves: Sequence[Any]) -> None:
        """Copy tensors, into the memory of earlier copies where they are alike, and other objects."""
        old, self._copies = self._copies, []
        targets, sources = list[Tensor](), list[Tensor]()
        for leaf, other in zip_longest(leaves, old[: len(leaves)]):
            if not isinstance(leaf, Tensor):
                self._copies.append(copy.deepcopy(leaf))
            elif _are_alike(leaf, other):
                self._copies.append(other)
                targets.append(other)
                sources.append(leaf.detach())
            else:
                self._copies.append(leaf.detach().clone())
        if targets:
            foreach_copy(targets, sources)


def _are_alike(tensor: Tensor, other: Any) -> bool:
    """Return whether another object is a tensor of the same shape, strides, type and device."""
    if not isinstance(other, Tensor) or (tensor.dtype, tensor.device) != (other.dtype, other.device):
        return False
    return tensor.shape == other.shape and tensor.stride() == other.stride()


# --- Copies of weights: those before the last step, and their average -------------------------------------------------


class WeightStash:
    """Keeps the weights before the last step; a step's own micro-batches run with them (PipeDream-2BW).

    A parameter stays the same object with another memory behind it, so that optimizer, names, hooks and ties need not
    know. What autograd has kept of a forward is then the parameter, whose memory must be that of the forward when its
    backward runs; views of it keep theirs. That no memory changes between the two is what `turn` is for: it copies into
    the one that no micro-batch uses any more.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._other: dict[nn.Parameter, Tensor] = {each: each.detach().clone() for each in parameters}
        self._swapped = False

    def use(self, *, before: bool) -> None:
        """Let the parameters hold the weights before the last step, or the newest."""
        if before != self._swapped:
            self._swap()

    def turn(self) -> None:
        """End a step: the newest weights become the earlier ones, and the parameters a copy to update."""
        foreach_copy([*self._other.values()], [each.detach() for each in self._other])
        self._swap()
        self._swapped = False

    def updating(self) -> AbstractContextManager[None]:
        """Return a context for updates in place that autograd must not count: no graph uses the changed memory."""
        return preserve_version_counter((*self._other,))

    @property
    def before(self) -> dict[nn.Parameter, Tensor]:
        """The weights before the last step, in their own memory."""
        assert not self._swapped, "asked for between steps"
        return dict(self._other)

    def _swap(self) -> None:
        for parameter, other in self._other.items():
            self._other[parameter] = parameter.data
            parameter.data = other
        self._swapped = not self._swapped


class AveragedWeights:
    """Averages of the parts of trained parameters that this rank holds."""

    def __init__(self, average: WeightAverage, epoch_steps: int, parameters: Sequence[nn.Parameter]) -> None:
        self._average, self._epoch_steps = average, epoch_steps
        self._tensors = {parameter: parameter.detach().clone() for parameter in parameters}

    def held(self, step: int | None) -> dict[nn.Parameter, Tensor]:
        """Return the average of each parameter after `step` completed steps; none before the average begins."""
        return self._tensors if self._average.begun(step or 0, self._epoch_steps) else {}

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Take in the parameters after `step` completed steps."""
        share = self._average.share(step, self._epoch_steps)
        if share:
            for parameter, mean in self._tensors.items():
                to_local(mean).lerp_(to_local(parameter.detach()), share)

    @contextmanager
    def in_place(self, step: int | None) -> Iterator[None]:
        """Let the parameters hold their averages, in their own memory, where other modules look for them."""
        held = self.held(step)
        kept = {parameter: to_local(parameter.detach()).clone() for parameter in held}
        try:
            for parameter, mean in held.items():
                to_local(parameter.detach()).copy_(to_local(mean))
            yield
        finally:
            for parameter, value in kept.items():
                to_local(parameter.detach()).copy_(value)
