"""One rank's model and optimizer, with their step.

A streamed pipeline does not drain between steps. With W(k) the weights after k steps, step k, counted from 0, computes
its gradient at W(k - 1), and the first step at W(0): W(k + 1) = W(k) + update(gradient of step k at W(k - 1)). So the
forwards of the next step, which use W(k), may start while backwards of step k are under way. The rule does not depend
on time: draining the pipeline, or dropping and repeating forwards, changes no bit.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from trainwright.core import random_state
from trainwright.core.data import fold_seed
from trainwright.core.engine import ModelSpec
from trainwright.core.errors import JobError, nearest
from trainwright.core.plan import Plan
from trainwright.strategies.torch.checkpoint.initial_weights import (
    base_digest,
    load_slices,
)
from trainwright.strategies.torch.shard_layout import WHOLE_MODEL, ModelPart, ShardSlice, fsdp_slice
from trainwright.strategies.torch.step_trace import PhaseTimer, span
from trainwright.strategies.torch.torch_errors import TorchUserCode
from trainwright.strategies.torch.training.batch_norm import SyncedBatchNorms, running_norms
from trainwright.strategies.torch.training.deferred_init import DeferredInit
from trainwright.strategies.torch.training.learning_rates import LearningRates
from trainwright.strategies.torch.training.model_blocks import checkpoint_blocks, compile_model
from trainwright.strategies.torch.training.new_model import AUTOCAST_DTYPES, frozen_parameters, new_model
from trainwright.strategies.torch.training.optimizers import (
    AveragedWeights,
    MovingParameters,
    NamedOptimizers,
    StepUndo,
    WeightStash,
    make_optimizer,
    needs_closure,
)

_log = logging.getLogger(__name__)
_BufferCopies = dict[str, tuple[Tensor, Tensor]]  # by full name: a buffer or moving parameter, and a copy of it


class _StepAttempt:
    """A step under way; `applied` is set once the optimizer has run."""

    applied = False


class TorchReplica:
    """Model and optimizer of one rank, made by the job's functions.

    Args:
        plan: gives the precision, and how a batch is divided.
        place: divides the model and moves it to its device; returns the slice that it kept of each tensor, by all of
            its names. By default the model is moved to `device`. Until then little of the model is in memory at a time.

    Attributes:
        model: the user's module.
        optimizer: the user's optimizer.
        scale: the loss scale; None where losses are not scaled.
        selective_recompute: backward computes attention's scores again.
        trainable: the parameters that require a gradient, each once.
        names: full name of each parameter that requires a gradient.
        custom: a step is not one backward and one update: several optimizers, or one with a closure.
        undo: sets a custom step back after an error in it.
        moving: frozen parameters that forwards change; they are kept and restored as buffers are.
        rates: sets the learning rates.
        average: average of the trained parameters; None where the job has none.
        rebuilt: names of frozen parameters that no state holds, since `model()` makes them.
        base: digest of these in all of the model; empty where there are none.
        start_digest: of the trained parameters that no file gives, before the model was divided; 0 for a whole one.
        step: completed steps; None before the first step or load.
        sound: False during an update, and after one that failed half way.
        confirm: called before a result of collectives is taken; raises PeerLost where it is not valid.
        phase_timer: times the phases of its steps.
        versions: stashed weights of a streamed pipeline; None where steps use the newest.
        begun: buffers from before the first forward of the next step; None where none has run.
        every_used: each of `trainable` gets a gradient in a step; None until that was tried.
        sometimes_unused: in a later step, one of them did not.
        checked: the loss of a divided batch was compared with those of its parts, in this run or before it.
        logged: names of the values that the job logs, as far as they were tried.
        outer: it applies the results of several local steps of workers.
        local: names of buffers that each data rank keeps as its own.
        data_rank: the data rank whose local state it holds.
        norms: batch norms that keep running statistics of their own share of the batch.
        synchronized: batch norms that look at the whole batch; None where none does.

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
        part: ModelPart = WHOLE_MODEL,
        place: Callable[[nn.Module], Mapping[str, ShardSlice]] | None = None,
        confirm: Callable[[], None] = lambda: None,
    ) -> None:
        self.spec, self.autocast, self.device, self.part = spec, AUTOCAST_DTYPES.get(plan.precision), device, part
        self.scale = LossScale() if plan.precision == "fp16" else None
        self.selective_recompute = plan.recompute == "selective"
        self.step: int | None = None
        self.sound = True
        self.confirm = confirm
        self.every_used: bool | None = None
        self.checked = self.outer = self.sometimes_unused = False
        self.logged: tuple[str, ...] = ()
        self.reseed(fold_seed(spec.seed, -1))
        deferred, self.start_digest = None if place is None else DeferredInit(), 0
        with nullcontext() if deferred is None else deferred.building():
            self.model, stored = new_model(spec, plan, where)
            together = spec.batch_norm == "sync" and plan.mesh.data_ranks > 1
            self.synchronized = SyncedBatchNorms(self.model, where) if together else None
            if plan.recompute == "full":
                checkpoint_blocks(self.model, plan.cuts)
            frozen = {} if spec.save_frozen else frozen_parameters(self.model)
            self.rebuilt, self.base = frozenset(frozen), base_digest(frozen, stored, spec.weights)
            if deferred is not None:
                self.start_digest = deferred.divide(self.model, stored)
            self._cut = (place or self._place)(self.model)
        if spec.weights is not None:
            load_slices(self.model, spec.weights, stored, self.boxes)
        self.names = {parameter: name for name, parameter in self.model.named_parameters() if parameter.requires_grad}
        self.trainable = list(self.names)
        self.versions = WeightStash(self.trainable) if plan.streamed else None
        self.begun: _BufferCopies | None = None
        self._trained: _BufferCopies = {}  # buffers of before an evaluation
        self.optimizer = make_optimizer(spec, self.names, where)
        self.custom = isinstance(self.optimizer, NamedOptimizers) or needs_closure(self.optimizer)
        self.undo = StepUndo(self.optimizer, self.trainable)
        self.moving = MovingParameters(self.model, self.rebuilt, where)
        self.rates = LearningRates(spec, self.optimizer, where)
        mean = spec.weight_average
        self.average = None if mean is None else AveragedWeights(mean, spec.epoch_steps, self.trainable)
        self.phase_timer = PhaseTimer(device)
        self._last: Any = None  # the hook of the parameter whose gradient comes last
        self._places = {
            f"{prefix}.{key}" if prefix else key: (module, key)
            for prefix, module in self.model.named_modules()
            for key, _ in module._buffers.items()  # those of a scripted module cannot be iterated themselves
        }
        self.norms = [] if together else running_norms(self.model)
        self.local, self.data_rank = _local_buffers(self.model, spec.local_state, where), DataRank()
        saved = self.model.state_dict()
        self._fresh = {name: buffer.detach().clone() for name, buffer in self.named_buffers() if name not in saved}

    span = staticmethod(span)

    @contextmanager
    def finding_last(self) -> Iterator[None]:
        """Find which parameter's gradient comes last in a backward; `phase_timer` is told of it from then on."""
        seen: list[nn.Parameter] = []
        handles = [add_gradient_hook(item, partial(lambda item, _: seen.append(item), item)) for item in self.trainable]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
        if seen and self._last is None:
            self._last = add_gradient_hook(seen[-1], lambda _: self.phase_timer.own())

    def move(self, device: torch.device) -> None:
        """Move to another device. Only a replica that was never trained can: its optimizer holds no state yet.

        The optimizer and `names` hold the parameters themselves, which keep their identity.
        """
        if device != self.device:
            assert self.step is None, "a trained replica stays where it is"
            self.device, self.phase_timer = device, PhaseTimer(device)
            self.model.to(device)
            self.versions = WeightStash(self.trainable) if self.versions else None
            if self.spec.weight_average is not None:
                self.average = AveragedWeights(self.spec.weight_average, self.spec.epoch_steps, self.trainable)

    def _place(self, model: nn.Module) -> Mapping[str, ShardSlice]:
        """Compile a whole model where the job says so, and move it to its device."""
        if self.spec.compile == "inductor":
            compile_model(model, self.device)
        model.to(self.device)
        return {}

    def reseed(self, seed: int) -> None:
        """Seed the generators of torch, NumPy and Python, also on the replica's device."""
        random_state.seed_generators(seed)
        if self.device.type == "cuda":
            torch.cuda.manual_seed(seed)

    @property
    def split(self) -> frozenset[str]:
        """Full names of the parameters that were cut when the model was placed; FSDP2 may divide the rest of them."""
        return frozenset(self._cut)

    @property
    def boxes(self) -> dict[str, ShardSlice]:
        """The slice that this rank holds of each divided parameter and buffer, by full name."""
        found = {}
        for name, held in self.model.state_dict().items():
            inner, outer = fsdp_slice(held, self.part), self._cut.get(name)
            box = inner.within(outer) if inner and outer else inner or outer
            if box:
                found[name] = box
        return found

    @property
    def wanted(self) -> dict[str, ShardSlice | None]:
        """What this rank holds, by full name: a slice of a divided tensor, None for a whole one."""
        boxes = self.boxes
        return {name: boxes.get(name) for name in self.model.state_dict() if name not in self.rebuilt}

    def named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Yield all buffers by full name, including those that are not saved."""
        for name, (module, key) in self._places.items():
            buffer = module._buffers[key]
            if buffer is not None:
                yield name, buffer

    def take_buffers(self, tensors: Mapping[str, Tensor]) -> None:
        """Set the values of buffers; one whose shape has changed is replaced."""
        for name, value in tensors.items():
            module, key = self._places[name]
            buffer = module._buffers[key]
            if buffer is not None and (buffer.shape, buffer.dtype) == (value.shape, value.dtype):
                buffer.detach().copy_(value)
            else:
                module._buffers[key] = value.to(self.device, copy=True)

    def forget_unsaved(self) -> None:
        """Set the buffers that are not saved back to what `model()` made of them, as in a new process."""
        self.take_buffers({name: value for name, value in self._fresh.items() if name not in self.local})

    @contextmanager
    def attempt(self) -> Iterator[_StepAttempt]:
        """Drop gradients at the end; restore buffers unless the step was applied, also after an error.

        They, and frozen parameters that forwards change, are what they were before anything of the step was done, in
        the step before it too.
        """
        self.end_evaluation()
        attempt = _StepAttempt()
        before, self.begun = self.begun or self._kept(), None
        try:
            with self.moving.watching(lambda: attempt.applied):
                yield attempt
        finally:
            for parameter in self.trainable:
                parameter.grad = None
            if not attempt.applied:
                self.begun = before
                self.recall()

    def begin_next(self) -> None:
        """Remember the buffers: forwards of the next step follow."""
        self.begun = self._kept()

    def recall(self) -> None:
        """Restore the buffers from before any forward of the next step."""
        before, self.begun = self.begun, None
        _put_back(before or {}, self._places)

    def begin_evaluation(self) -> None:
        """Remember the buffers before the first batch of an evaluation: a model may carry state in them."""
        self._trained = self._trained or self._kept()

    def end_evaluation(self) -> None:
        """Restore the buffers from before an evaluation: whether one came before a checkpoint must change no bit."""
        before, self._trained = self._trained, {}
        _put_back(before, self._places)

    def _kept(self) -> _BufferCopies:
        held = (*self.named_buffers(), *self.moving.found.items())
        return {name: (tensor, tensor.detach().clone()) for name, tensor in held}

    def apply(self, step: int, where: str) -> None:
        """Let the optimizer take step `step`; after an error the replica is unsound."""
        self.sound = False
        with (
            self.versions.updating() if self.versions else nullcontext(),
            TorchUserCode("the optimizer's step()", where),
        ):
            self.optimizer.step()
        self.skip(step, where)

    def skip(self, step: int, where: str) -> None:
        """End step `step` without a change of the parameters."""
        self.sound = False
        self.rates.end(step, where)
        if self.average is not None:
            self.average.update(step + 1)
        self.step = step + 1
        self.sound = True

    def averaged(self) -> AbstractContextManager[None]:
        """Return a context in which the parameters hold their average, if there is one."""
        return nullcontext() if self.average is None else self.average.in_place(self.step)


def _put_back(before: _BufferCopies, places: Mapping[str, tuple[nn.Module, str]]) -> None:
    for name, (tensor, kept) in before.items():
        restored = tensor.detach().copy_(kept)
        if name in places:
            module, key = places[name]
            module._buffers[key] = restored


def add_gradient_hook(parameter: nn.Parameter, told: Callable[[Tensor], None]) -> RemovableHandle:
    """Call a function with the gradient of a parameter whenever a backward has computed it, before DDP sees it."""
    handle: RemovableHandle = parameter.register_hook(told)  # type: ignore[no-untyped-call]
    return handle


def is_elementwise(spec: ModelSpec) -> bool:
    """Return whether an optimizer works elementwise; True where that cannot be tried."""
    start = torch.linspace(-1.0, 2.0, 16).view(4, 4)
    whole = [nn.Parameter(start.clone())]
    parts = [nn.Parameter(start[:2].clone()), nn.Parameter(start[2:].clone())]
    try:
        for given in (whole, parts):
            optimizer = spec.make_optimizer([(f"{number}.weight", each) for number, each in enumerate(given)])
            for step in (1.0, 3.0):
                for parameter, slope in zip(given, (start.cos() * step).chunk(len(given)), strict=True):
                    parameter.grad = slope.clone()
                optimizer.step()
    except Exception as error:
        cause = f"{type(error).__name__}: {error}"
        _log.warning("cannot test whether the optimizer is elementwise; it is treated as if it were: %s", cause)
        return True
    return torch.allclose(whole[0], torch.cat((parts[0], parts[1])), rtol=1e-5, atol=1e-7)


# --- Loss scaling for float16 -----------------------------------------------------------------------------------------


MIN_LOSS_SCALE = 1.0  # of a mean: below, gradients that overflow are too large themselves


@dataclass(frozen=True, kw_only=True)
class LossScale:
    """A loss scale by the rules of `torch.amp.GradScaler`, with its defaults, held on the host.

    It is a power of two, so that multiplying by it and dividing loses nothing. Every rank knows whether the gradient of
    the whole batch is finite, so that every rank does the same.
    """

    factor: float = 2.0**16  # of the losses
    since: int = 0  # steps applied since it last changed

    def applied(self) -> LossScale:
        """Return the scale after an applied step: every 2,000th in a row doubles it."""
        since = self.since + 1
        return replace(self, since=since) if since < 2000 else LossScale(factor=2.0 * self.factor)

    def overflowed(self) -> LossScale:
        """Return the scale after a step whose gradient was not finite: half of it."""
        return LossScale(factor=0.5 * self.factor)


# --- Local state ------------------------------------------------------------------------------------------------------

# Buffers that each data rank keeps as its own, such as a hidden state carried from batch to batch. They are neither
# averaged nor sent from rank to rank. A checkpoint holds those of every data rank, and each takes its own back. In the
# model's state dict, which is for a model on one device, are those of data rank 0.


@dataclass(frozen=True, kw_only=True)
class DataRank:
    """A data rank's number and the number of data ranks."""

    rank: int = 0
    ranks: int = 1

    @property
    def piece(self) -> str:
        """The name of its local state in state tags."""
        return f"local-{self.rank}"

    @property
    def file(self) -> str:
        """The checkpoint file that holds its local state."""
        return f"local-{self.rank}-of-{self.ranks}.safetensors"


@dataclass(frozen=True, kw_only=True)
class LocalState:
    """The local state of one data rank: buffers by full name, including those that are not persistent."""

    data_rank: DataRank
    tensors: Mapping[str, Tensor]


def _local_buffers(model: nn.Module, patterns: Sequence[str], where: str) -> frozenset[str]:
    """Return the names of the buffers that a job declares as local; raise JobError where a pattern names none."""
    buffers = [name for name, _ in model.named_buffers()]
    found: set[str] = set()
    for pattern in patterns:
        chosen = {name for name in buffers if fnmatchcase(name, pattern)}
        if not chosen:
            why = f"which is not a buffer of the model: {nearest(pattern, buffers)}"
            if any(fnmatchcase(name, pattern) for name, _ in model.named_parameters()):
                why = "a parameter, which is the same on all ranks: only buffers can be local"
            elif not buffers:
                why = "and the model has no buffer"
            raise JobError([f"local_state= names {pattern!r}, {why}"], where=where)
        found |= chosen
    return frozenset(found)
