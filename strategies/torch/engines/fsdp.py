"""The engine of sharded data parallelism: torch's FSDP2 (ZeRO-1 to 3, and hybrid shard), over gloo or NCCL.

Each rank holds a part of every parameter, of its gradient and of the optimizer's state. With ZeRO-1, parameters are
gathered once a step, and the gradients of its micro-batches are added up whole and divided once. After a failure there
is a new process group, to which neither FSDP2's modules nor DTensors can change. So the job's function builds the model
again, it is sharded again, and it takes over the tensors that this rank held.

FSDP2 matches the ranks' collectives by their order alone. Ranks that run different blocks, or another order, would get
each other's parameters without an error; `_BlockCalls` records the order, and the ranks compare it. FSDP2 gives a
parameter without a gradient zeros, by which an optimizer decays moments and weights, while one device skips it;
`_BlockCalls` records which parameters had a gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial, update_wrapper
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import FSDPModule

from trainwright.core import random_state
from trainwright.core.data import Feed
from trainwright.core.engine import ModelSpec
from trainwright.core.errors import JobError
from trainwright.core.plan import Plan
from trainwright.strategies.torch.distributed.fsdp_wrap import (
    GatherTypes,
    fsdp_modules,
    fully_shard_model,
    reshard_model,
)
from trainwright.strategies.torch.distributed.mesh_groups import MeshRunner
from trainwright.strategies.torch.engines.sharded_model_engine import ShardedModelEngine, choose_layers
from trainwright.strategies.torch.shard_layout import WHOLE_MODEL, ShardSlice
from trainwright.strategies.torch.tensor_parallel.layers import shard_layers
from trainwright.strategies.torch.torch_compat import keep_requires_grad, queue_backward_callback
from trainwright.strategies.torch.training.model_blocks import compile_blocks
from trainwright.strategies.torch.training.objective import Objective
from trainwright.strategies.torch.training.train_state import TorchReplica
from trainwright.strategies.torch.training.train_step import StepRunner, throwaway_micro_batches

_ORDERS = 2**20  # numbers for an order; their squares, summed over ranks, are still exact in float64


class _BlockCalls:
    """Records which blocks a step ran, in which order, and which of the named parameters got a gradient."""

    def __init__(self, model: nn.Module, names: dict[nn.Parameter, str]) -> None:
        self.names = tuple(names.values())
        self.order = 0
        self.used: set[str] = set()
        self._watched: set[str] = set()
        for number, module in enumerate(fsdp_modules(model), 1):
            assert isinstance(module, nn.Module)
            own = [place for place in _own_parameter_sites(module) if place[0]._parameters[place[1]] in names]
            named = [(*place, names[place[0]._parameters[place[1]]]) for place in own]  # type: ignore[index]
            module.register_forward_pre_hook(partial(self._entered, number, named))

    def take(self) -> tuple[int, set[str]]:
        """Return what was recorded so far, and forget it."""
        kept = self.order, self.used
        self.order, self.used = 0, set()
        return kept

    def watch_again(self) -> None:
        """Watch the parameters' gradients anew: FSDP2 may gather them into other tensors than before."""
        self._watched.clear()

    def _entered(self, number: int, named: list[tuple[nn.Module, str, str]], module: nn.Module, _inputs: Any) -> None:
        """Record that a block starts; FSDP2's own hook, which gathers its parameters, ran before."""
        if not torch.is_grad_enabled():
            return
        self.order = (self.order * 31 + number) % _ORDERS
        for owner, key, name in named:
            whole = owner._parameters[key]
            assert whole is not None, "a parameter of the model"
            if name not in self._watched and whole.requires_grad:  # a step may have frozen it for a while
                self._watched.add(name)
                # FSDP2 gathers into this tensor every time.
                whole.register_hook(partial(self._given, name))  # type: ignore[no-untyped-call]

    def _given(self, name: str, _gradient: Tensor) -> None:
        self.used.add(name)


def _own_parameter_sites(module: nn.Module) -> list[tuple[nn.Module, str]]:
    """Return where the parameters are held that are gathered with a module itself."""
    found = [(module, key) for key, parameter in module._parameters.items() if parameter is not None]
    for child in module.children():
        if not isinstance(child, FSDPModule):
            found += _own_parameter_sites(child)
    return found


@dataclass(frozen=True, kw_only=True)
class _ShardedRunner(MeshRunner):
    """Runs micro-batches of a divided model.

    FSDP2 reduces the model's gradients alone. The step's sums and what `calls` recorded go through one more, small
    all-reduce. It starts with the last gradients' reduction, so that nothing waits for it.
    """

    calls: _BlockCalls  # what each step ran

    @contextmanager
    def last_micro_batch(self) -> Iterator[None]:
        """Start the sums at the end of the last backward, before FSDP2 waits for the first layers' gradients."""
        parameter = self.objective.sums_parameter  # its gradient is set before FSDP2 queues its own final callback
        hook = parameter.register_post_accumulate_grad_hook(lambda _: queue_backward_callback(self.start_sums))  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            hook.remove()

    def start_sums(self) -> None:
        """Start the all-reduce of the step's sums and of the parameters that were used."""
        (order, used), sums = self.calls.take(), self.own_sums()
        facts = torch.tensor([order, order**2, *(name in used for name in self.calls.names)], dtype=torch.float64)
        sums = torch.cat((sums, facts.to(sums.device)))
        self.pending_sums.append((sums, distributed.all_reduce(sums, async_op=True)))

    def reduce(self, replica: TorchReplica) -> None:
        """Drop the gradients of unused parameters; FSDP2 has reduced all gradients.

        Raises:
            JobError: on every rank, where they did not run the same blocks.
        """
        sums, work = self.pending_sums.pop()
        assert work is not None, "this rank is in the group"
        work.wait()
        told = len(sums) - len(self.calls.names)
        orders, squared = sums[told - 2 : told].tolist()
        if int(orders) ** 2 != int(squared) * self.place.mesh.size:  # equal for equal orders alone
            raise JobError(
                [
                    "the ranks ran different blocks of the model, or in another order: every rank must run the same "
                    'ones for every batch; a model that chooses by its data needs strategy="data_parallel"'
                ],
                where=self.where,
            )
        for parameter, count in zip(replica.trainable, sums[told:].tolist(), strict=True):
            if not count:
                parameter.grad = None  # as on one device: the optimizer passes it by
        self.pending_sums.append((sums[: told - 2], work))


class Sharded(ShardedModelEngine):
    """Parameters sharded over `mesh.shard` workers, together with tensor parallelism where the plan says so."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: _BlockCalls | None = None
        self._whole_gradients = False  # until the last micro-batch of a step (ZeRO-1)
        self._modules_hold_group = True

    def _drop_model(self) -> None:
        self._calls = None
        super()._drop_model()

    def _build_replica(self, spec: ModelSpec, plan: Plan) -> TorchReplica:
        step = spec.step
        if step is not None:  # its keyword-only arguments are those of the job's
            step = update_wrapper(partial(_run_step_with_freezing, step), step, updated=())
        replica = super()._build_replica(replace(spec, step=step), plan)
        self._calls = _BlockCalls(replica.model, replica.names)
        return replica

    def _shard_model(self, spec: ModelSpec, plan: Plan, model: nn.Module) -> Mapping[str, ShardSlice]:
        layers = choose_layers(spec, plan, model, self._part.tensors, self._where)
        slices = shard_layers(model, layers, self._tensor_group, self._where)
        if spec.compile == "inductor":
            compile_blocks(model, self._device)
        mesh = self._placed.device_mesh(self._device)
        self._whole_gradients = plan.zero == 1
        fully_shard_model(model, mesh, zero=plan.zero, wire=plan.wire, offload=plan.offload, where=self._where)
        return slices

    def _warmed(self, feed: Feed) -> StepRunner:
        if self._part == WHOLE_MODEL:
            return super()._warmed(feed)
        self._check_start()
        assert self._calls is not None, "build() comes first"
        place = self._placed
        runner = _ShardedRunner(
            objective=Objective(self.replica.model, self._caller(), world=place.mesh.data_ranks),
            no_sync=self._before_the_last,
            calls=self._calls,
            place=place,
            data_groups=place.data_groups,
        )
        if self.replica.autocast is not None:
            self._choose_gather_types(self.replica.autocast, runner.objective, feed)
        self._throwaway(runner, feed, check=self._wants_check(feed))
        self._calls.take()
        return runner

    def _choose_gather_types(self, kind: torch.dtype, objective: Objective, feed: Feed) -> None:
        """Run a forward whose results are dropped, and gather in half precision what it only casts to that.

        Blocks are gathered one after the other, whatever the plan says, and nothing is kept for a backward, so that it
        takes less memory than a step. A step of the job's own may differentiate, so that it keeps what it needs.
        """
        assert self._job is not None and self._calls is not None, "build() comes first"
        replica, caller, root = self.replica, objective.caller, fsdp_modules(self.replica.model)[0]
        _, share = next(throwaway_micro_batches(feed))
        compiled = replica.spec.compile == "inductor"
        root.set_reshard_after_forward(True)
        with (
            replica.attempt(), random_state.preserve_generators(self._device),
            GatherTypes(replica.model, kind).chosen(self._device, self._placed.data_groups),
            torch.compiler.set_stance("force_eager") if compiled else nullcontext(),
            torch.set_grad_enabled(replica.spec.step is not None),
        ):  # fmt: skip
            replica.reseed(0)
            columns = caller.tensors(share.batch)
            if replica.spec.step is not None:
                caller.loss(replica.model, columns, share.batch, share.layout)
            else:
                caller.outputs(replica.model, columns)
        root.set_reshard_after_forward(self._job[1].zero == 3)
        self._calls.watch_again()

    @contextmanager
    def _evaluating(self, feed: Feed) -> Iterator[None]:
        """Drop gathered parameters at the end: without a backward FSDP2 keeps those that it gathered last."""
        try:
            yield None
        finally:
            reshard_model(self.replica.model)

    @contextmanager
    def _before_the_last(self) -> Iterator[None]:
        """Leave out of a backward what the step's last one does for all micro-batches.

        ZeRO-1 keeps gradients and parameters whole. Else gradients are scattered each time, and only those of replicas
        are added in the last backward.
        """
        root = fsdp_modules(self.replica.model)[0]
        changed = (
            (root.set_requires_gradient_sync, root.set_reshard_after_backward)
            if self._whole_gradients
            else (root.set_requires_all_reduce,)
        )
        for change in changed:
            change(False)
        try:
            yield
        finally:
            for change in changed:
                change(True)


def _run_step_with_freezing(own: Callable[..., Any], model: nn.Module, batch: Any, /, **numbers: int) -> Any:
    """Run a step of the job's own, which may freeze parameters, whether they are gathered at that moment or not."""
    try:
        return own(model, batch, **numbers)
    finally:
        for module in fsdp_modules(model):
            keep_requires_grad(module)
