"""One rank's model and optimizer, and where they stand."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from trainwright.core.data import fold
from trainwright.core.engine import ModelSpec
from trainwright.core.errors import JobError
from trainwright.core.plan import Plan
from trainwright.strategies.combinations import compiled
from trainwright.strategies.torch.compat import BatchNorm
from trainwright.strategies.torch.compiling import compile_whole
from trainwright.strategies.torch.failures import user_code
from trainwright.strategies.torch.laps import Laps
from trainwright.strategies.torch.parts import WHOLE, Box, Part, box_of
from trainwright.strategies.torch.recomputing import recompute, recomputed_buffers
from trainwright.strategies.torch.scaling import Scale
from trainwright.strategies.torch.versions import Versions

Kept = dict[tuple[nn.Module, str], tuple[Tensor, Tensor]]  # by place: a buffer, and a copy of what it held
AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}  # by precision


class Attempt:
    """A step under way; `applied` once the optimizer has run."""

    applied = False


class Replica:
    """Model and optimizer of one rank, made by the job's functions.

    Args:
        spec: the job's functions.
        plan: says the precision, and into how many parts a batch goes.
        device: where the model lives.
        where: the rank, for errors.
        part: of the model, that this rank holds.
        place: brings the model to where it lives, and divides it; tells what it left of each tensor that it cut, by all
            of its names. By default the model is moved to `device`.

    Attributes:
        model: the user's module.
        optimizer: the user's optimizer.
        scale: of the losses; None where they are not scaled.
        rescoring: backward computes attention's scores again.
        trainable: the parameters that require a gradient, each once.
        names: full name of each parameter that requires a gradient.
        initial: each parameter group's settings as the job made them.
        step: completed steps; None before the first step or load.
        sound: False while, and after a failure in which, the optimizer changed only a part.
        laps: what the phases of its steps take.
        versions: of the weights; None where steps are taken at the newest.
        begun: buffers as they were when what was done of the next step began; None where nothing was.
        every_used: each of `trainable` gets a gradient in a step; None until that was tried.
        outer: it takes what several local steps of others came to.

    Raises:
        JobError: the job's functions do not return what they should.
        UserCodeError: they raised.
    """

    def __init__(
        self,
        spec: ModelSpec,
        plan: Plan,
        device: torch.device,
        where: str,
        *,
        part: Part = WHOLE,
        place: Callable[[nn.Module], Mapping[str, Box]] | None = None,
    ) -> None:
        self.spec, self.autocast, self.device, self.part = spec, AUTOCAST.get(plan.precision), device, part
        self.scale = Scale() if plan.precision == "fp16" else None
        self.rescoring = plan.recompute == "selective"
        self.step: int | None = None
        self.sound = True
        self.every_used: bool | None = None
        self.outer = False
        self.reseed(fold(spec.seed, -1))
        with user_code("model()", where):
            self.model = spec.model()
        _check_model(self.model, spec, plan, where)
        if plan.recompute == "full":
            recompute(self.model, plan.cuts)
        self._cut = (place or self._settled)(self.model)
        self.names = {parameter: name for name, parameter in self.model.named_parameters() if parameter.requires_grad}
        self.trainable = list(self.names)
        self.versions = Versions(self.trainable) if plan.streamed else None
        self.begun: Kept | None = None
        with user_code("optimizer()", where):
            assert spec.optimizer is not None, "only a job with run='fit' may leave it out"
            self.optimizer = spec.optimizer(list(self.trainable))
        _check_optimizer(self.optimizer, self.names, where)
        self.initial = [settings(group) for group in self.optimizer.param_groups]
        self.laps = Laps(device)
        self._last: Any = None  # the hook of the parameter whose gradient comes last
        self._places = [(module, key) for module in self.model.modules() for key in module._buffers]

    @contextmanager
    def finding_last(self) -> Iterator[None]:
        """Of the gradients of a backward within, find which comes last; `laps` is told of it from then on."""
        seen: list[nn.Parameter] = []
        handles = [hooked(item, partial(lambda item, _: seen.append(item), item)) for item in self.trainable]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
        if seen and self._last is None:
            self._last = hooked(seen[-1], lambda _: self.laps.own())

    def move(self, device: torch.device) -> None:
        """Live on another device from now on. Only a replica that was never trained: the optimizer holds no state yet.

        The optimizer and `names` hold the parameters themselves, which keep their identity.
        """
        if device != self.device:
            assert self.step is None, "a trained replica stays where it is"
            self.device, self.laps = device, Laps(device)
            self._move(self.model)
            self.versions = Versions(self.trainable) if self.versions else None

    def _settled(self, model: nn.Module) -> Mapping[str, Box]:
        """Where the model is whole."""
        if self.spec.compile == "inductor":
            compile_whole(model, self.device)
        return self._move(model)

    def _move(self, model: nn.Module) -> Mapping[str, Box]:
        model.to(self.device)
        return {}

    def reseed(self, seed: int) -> None:
        """Make what torch, NumPy and Python draw next a function of `seed` alone, also on the replica's device."""
        torch.default_generator.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        if self.device.type == "cuda":
            torch.cuda.manual_seed(seed)

    @property
    def split(self) -> frozenset[str]:
        """Full names of the parameters that it cut, of which FSDP2 may then divide what was left."""
        return frozenset(self._cut)

    @property
    def boxes(self) -> dict[str, Box]:
        """What this rank holds of each parameter and buffer that is divided, by full name."""
        found = {}
        for name, held in self.model.state_dict().items():
            inner, outer = box_of(held, self.part), self._cut.get(name)
            box = inner.within(outer) if inner and outer else inner or outer
            if box:
                found[name] = box
        return found

    @property
    def wanted(self) -> dict[str, Box | None]:
        """What this rank holds, by full name: a box of a tensor that is divided, None for all of one that is not."""
        boxes = self.boxes
        return {name: boxes.get(name) for name in self.model.state_dict()}

    def buffers(self) -> list[Tensor]:
        """All buffers, those that are not saved included, as they are now."""
        return [buffer for _, buffer in self._held()]

    def _held(self) -> Iterator[tuple[tuple[nn.Module, str], Tensor]]:
        """Each buffer with the module and the name under which it is held."""
        for module, key in self._places:
            buffer = module._buffers[key]
            if buffer is not None:
                yield (module, key), buffer

    @contextmanager
    def attempt(self) -> Iterator[Attempt]:
        """Gradients are dropped at the end; buffers are put back unless the step was applied, also after an error.

        They are what they were before anything of the step was done, in the step before it too.
        """
        attempt = Attempt()
        before, self.begun = self.begun or self._kept(), None
        try:
            yield attempt
        finally:
            for parameter in self.trainable:
                parameter.grad = None
            if not attempt.applied:
                self.begun = before
                self.recall()

    def begin_next(self) -> None:
        """What is done from now on is of the next step."""
        self.begun = self._kept()

    def recall(self) -> None:
        """Put buffers back to before anything of the next step was done."""
        before, self.begun = self.begun, None
        for (module, key), (buffer, kept) in (before or {}).items():
            module._buffers[key] = buffer.detach().copy_(kept)

    def _kept(self) -> Kept:
        return {place: (buffer, buffer.detach().clone()) for place, buffer in self._held()}

    def set_rates(self, step: int, where: str) -> float:
        """Set each group's learning rate for the step, and return the first group's."""
        groups = self.optimizer.param_groups
        if self.spec.schedule is not None:
            with user_code("schedule=", where):
                factor = float(self.spec.schedule(step, self.spec.total_steps))
            for group, initial in zip(groups, self.initial, strict=True):
                set_option(group, "lr", initial.get("lr", 0.0) * factor)
        return float(groups[0].get("lr", 0.0))

    def apply(self, step: int, where: str) -> None:
        """Let the optimizer take step `step`; an error leaves the replica unsound."""
        self.sound = False
        with self.versions.updating() if self.versions else nullcontext(), user_code("the optimizer's step()", where):
            self.optimizer.step()
        self.step = step + 1
        self.sound = True


@contextmanager
def random_kept(device: torch.device) -> Iterator[None]:
    """Afterwards torch, NumPy and Python draw what they would have drawn."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


def hooked(parameter: nn.Parameter, told: Callable[[Tensor], None]) -> RemovableHandle:
    """Call a function with the gradient of a parameter whenever a backward has computed it, before DDP sees it."""
    handle: RemovableHandle = parameter.register_hook(told)  # type: ignore[no-untyped-call]
    return handle


def settings(group: dict[str, Any]) -> dict[str, Any]:
    """A parameter group's settings as plain values, without its parameters."""
    return {
        key: value.tolist() if isinstance(value, Tensor) else value for key, value in group.items() if key != "params"
    }


def set_option(group: dict[str, Any], key: str, value: Any) -> None:
    """Set a parameter group's option; one that is held as a tensor stays that tensor."""
    current = group.get(key)
    if isinstance(current, Tensor):
        current.fill_(value)
    else:
        group[key] = tuple(value) if isinstance(current, tuple) else value


def batch_norms(model: nn.Module) -> list[str]:
    """Names of the modules that normalize by statistics of the batch."""
    return [
        name or type(module).__name__
        for name, module in model.named_modules()
        if isinstance(module, BatchNorm) and (module.training or module.running_mean is None)
    ]


def _check_model(model: Any, spec: ModelSpec, plan: Plan, where: str) -> None:
    if not isinstance(model, nn.Module):
        raise JobError([f"model() returned {type(model).__name__}: return a torch.nn.Module"], where=where)
    problems = []
    lazy = [name for name, parameter in model.named_parameters() if nn.parameter.is_lazy(parameter)]
    if lazy:
        problems.append(f"parameter {lazy[0]!r} has no shape yet: run one batch through lazy modules inside model()")
    empty = [name for name, value in (*model.named_parameters(), *model.named_buffers()) if value.is_meta]
    if empty:
        problems.append(
            f"{empty[0]!r} of the model is on the meta device and holds no values: build the model on the CPU, without "
            'torch.device("meta"); where it is too large for a device, plans shard it after that'
        )
    if not any(parameter.requires_grad for parameter in model.parameters()):
        problems.append("the model has no parameter that requires a gradient: there is nothing to train")
    extra = [name for name, value in model.state_dict().items() if not isinstance(value, Tensor)]
    if extra:
        problems.append(f"{extra[0]!r} of the model's state is no tensor: keep state in parameters and buffers")
    half = [name for name, parameter in model.named_parameters() if parameter.dtype == torch.float16]
    if half and plan.precision == "fp16":
        problems.append(
            f"parameter {half[0]!r} is of float16, in which small updates are lost: return the model in float32; "
            'precision="fp16" computes in half precision where that is safe'
        )
    if spec.compile == "inductor":
        again = recomputed_buffers(model, plan.cuts) if plan.recompute == "full" else []
        refused = compiled(plan.recompute, again[0] if again else "")
        problems += [": ".join(refused)] if refused else []
    norms = batch_norms(model)
    if norms and (plan.mesh.data_ranks > 1 or plan.accumulation > 1) and "batch_norm" not in spec.inexact:
        problems.append(
            f"module {norms[0]!r} is a batch norm: {plan.mesh.data_ranks} data ranks and accumulation="
            f"{plan.accumulation} normalize smaller batches than one device would: use GroupNorm or LayerNorm, or "
            'accept the difference with inexact=("batch_norm",)'
        )
    if problems:
        raise JobError(problems, where=where)


def _check_optimizer(optimizer: Any, names: dict[nn.Parameter, str], where: str) -> None:
    if not isinstance(optimizer, torch.optim.Optimizer):
        kind = type(optimizer).__name__
        raise JobError([f"optimizer() returned {kind}: return a torch.optim.Optimizer"], where=where)
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if any(parameter not in names for parameter in held):
        raise JobError(["the optimizer holds a tensor that is no parameter of the model"], where=where)
    if _needs_closure(optimizer):
        kind = type(optimizer).__name__
        problem = (
            f"optimizer() returned {kind}, whose step() takes a closure that computes the loss again, and a step here "
            "computes it once, over all workers: return an optimizer without one, such as Adam or SGD"
        )
        raise JobError([problem], where=where)


def _needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    """Whether step() of an optimizer cannot be called without an argument."""
    given = inspect.signature(optimizer.step).parameters.values()
    named = (each for each in given if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD))
    return any(each.default is each.empty for each in named)
