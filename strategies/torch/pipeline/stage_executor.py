"""A step of one pipeline stage: its operations in the order of the schedule, then the sums over other ranks.

Zero-bubble schedules split a backward into gradients of inputs and of parameters, where `can_split_backward` says that
the graph allows it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, distributed, nn

from trainwright.core import random_state
from trainwright.core.data import Feed, fold_seed
from trainwright.core.errors import JobError
from trainwright.core.plan import Plan, loss_stage
from trainwright.strategies.cost_model.pipeline_schedules import Operation, stage_operations
from trainwright.strategies.torch.distributed.fsdp_wrap import StageShards
from trainwright.strategies.torch.distributed.mesh_groups import MeshGroups, MeshRunner
from trainwright.strategies.torch.pipeline.p2p import StageLinks, StageMessages
from trainwright.strategies.torch.pipeline.split import SplitModel
from trainwright.strategies.torch.shard_layout import to_local
from trainwright.strategies.torch.torch_compat import (
    accumulate_gradients,
    backward_of_inputs,
    backward_of_parameters,
    can_split_backward,
)
from trainwright.strategies.torch.torch_errors import TorchUserCode
from trainwright.strategies.torch.training.objective import MicroBatchShare, Objective
from trainwright.strategies.torch.training.train_state import TorchReplica
from trainwright.strategies.torch.training.train_step import (
    has_several_samples,
    micro_batches_of,
    throwaway_micro_batches,
)

_AHEAD = 8  # operations whose messages are awaited at once: they come while others are computed, in fewer turns


@dataclass(kw_only=True)
class _MicroBatchInFlight:
    """A micro-batch in a section, between its forward and the end of its backward."""

    given: list[Tensor]  # inputs of the section, in the graph
    roots: list[Tensor]  # outputs, from which backward starts
    slopes: list[Tensor] | None = None  # gradients of the roots; in the last section known after forward
    groups: list[dict[str, Any]] | None = None  # where gradients of parameters start, once those of inputs are known


class StageExecutor:
    """Runs the steps of one rank's stage.

    Attributes:
        begun: the step whose first forwards were done in the one before; None for none.
        accumulate: called after each backward.
    """

    def __init__(
        self, plan: Plan, cut: SplitModel, links: StageLinks, objective: Objective, replica: TorchReplica
    ) -> None:
        self._schedule, self._chunks, self._stages = plan.schedule, plan.chunks, len(links.column)
        self.cut, self.objective, self.replica = cut, objective, replica
        self.stage = links.stage
        self.messages = StageMessages(cut=cut, links=links, schedule=plan.schedule, phase_timer=replica.phase_timer)
        self._flights: dict[tuple[int, int], _MicroBatchInFlight] = {}
        self._halved: dict[int, bool] = {}
        self.begun: int | None = None
        self.accumulate: Callable[[], None] = lambda: None

    @property
    def last(self) -> bool:
        """Whether this stage ends the model."""
        return self.stage == loss_stage(self._schedule, stages=self._stages, chunks=self._chunks)

    def step(
        self,
        shares: Sequence[tuple[int, MicroBatchShare]],
        step: int,
        losses_done: Callable[[], None],
        following: Sequence[tuple[int, MicroBatchShare]] = (),
    ) -> None:
        """Run forward and backward of all micro-batches; add gradients, and give the losses to the objective.

        Args:
            following: micro-batches of the next step, where it follows without a drain: forwards of the first ones run
                now.
            losses_done: called when the objective has all losses, before the last backwards.

        Raises:
            UserCodeError, JobError: the user's code raised or is wrong.
            RuntimeError: another rank went away.
        """
        assert self.begun in (None, step), "the announced next step comes first"
        if self.begun == step:
            self.cut.look()
        else:
            self._forget()
        own = len(shares)
        todo = stage_operations(
            self._schedule,
            stage=self.stage,
            stages=self._stages,
            micro_batches=own,
            chunks=self._chunks,
            begun=self.begun == step,
            followed=bool(following),
        )
        try:
            self._work(todo, [*shares, *following], own, step, losses_done)
            self.messages.settle()
        finally:
            self._use(before=False)
        self._flights = {(micro - own, chunk): flight for (micro, chunk), flight in self._flights.items()}
        self.messages.renumber(own)
        self.begun = step + 1 if following else None

    def recall(self) -> None:
        """Drop the forwards of the next step; messages sent for it are taken first, so that none is under way."""
        self.messages.take_early()
        self._forget()

    def outputs(self, share: MicroBatchShare) -> Any:
        """Return the model's outputs for a micro-batch on the stage that ends the model; None elsewhere."""
        dtypes = dict(self.messages.dtypes)
        outputs = self._passed(share)
        self.messages.dtypes = dtypes  # of training
        return outputs if self.last else None

    def rehearse(self, share: MicroBatchShare) -> None:
        """Learn the types of values between stages: under autocast they differ from those of a trace."""
        with torch.no_grad():
            self._passed(share)

    def _passed(self, share: MicroBatchShare) -> Any:
        """Run one micro-batch through all stages."""
        self._forget()
        outputs: Any = None
        for chunk in range(self._chunks):
            operation = Operation("forward", 0, chunk)
            if self.objective.caller.autocast:
                self.messages.receive_dtypes(operation, share.batch.rows)
            self.messages.expect(operation, [(0, share)])
            outputs = self._run(operation, share, self.messages.received(operation))
            if not self._ends_model(operation):
                if self.objective.caller.autocast:
                    self.messages.send_dtypes(operation, outputs)
                self._check_forms(operation, share, outputs)
                self.messages.send(outputs, operation)
        self.messages.settle()
        return outputs

    # --- operations ---------------------------------------------------------------------------------------

    def _work(
        self,
        todo: Sequence[Operation],
        shares: Sequence[tuple[int, MicroBatchShare]],
        own: int,
        step: int,
        losses_done: Callable[[], None],
    ) -> None:
        """Run the operations in order, on `own` shares of the step and some of the next, each at its step's weights."""
        last = max(number for number, each in enumerate(todo) if each.kind == "forward" and each.micro_batch < own)
        coming = [*todo]
        if len(shares) > own:  # of what the stage before sends in this step one is for the next
            coming.append(Operation("forward", own + self._stages - 1 - self.stage))
        for each in coming[: _AHEAD - 1]:
            self.messages.expect(each, shares)
        for number, operation in enumerate(todo):
            for each in coming[number + _AHEAD - 1 : number + _AHEAD]:
                self.messages.expect(each, shares)
            micro, share = shares[operation.micro_batch]
            later = operation.micro_batch // own
            self._use(before=not later)
            if operation.kind == "forward":
                if later and self.replica.begun is None:
                    self.replica.begin_next()
                seed = fold_seed(
                    self.replica.spec.seed, step + later, micro, share.data_rank, self.messages.section(operation)
                )
                self.replica.reseed(seed)
                with self.replica.span("forward"):
                    self._forward(operation, share, ahead=bool(later))
                self.replica.phase_timer.forward()
                if number == last:
                    losses_done()
            else:
                with self.replica.span("backward"):
                    self._backward(operation)
                self.replica.phase_timer.backward(reduced=False)

    def _use(self, *, before: bool) -> None:
        """Use the weights before the last step, where they are kept, or the newest."""
        if self.replica.versions is not None:
            self.replica.versions.use(before=before)

    def _forward(self, operation: Operation, share: MicroBatchShare, *, ahead: bool) -> None:
        metas = self.messages.input_metas(operation, share.batch.rows)
        received = self.messages.received(operation)
        given = [each.requires_grad_(meta.requires_grad) for each, meta in zip(received, metas, strict=True)]
        made = self._run(operation, share, given)
        if self._ends_model(operation):
            roots = self.objective.output_roots(share, made)
            self.objective.add_sums(roots)
            flight = _MicroBatchInFlight(given=given, roots=[roots.values], slopes=[roots.slopes])
        else:
            self._check(operation, share, made)
            self.messages.send(made, operation, ahead=ahead)
            flight = _MicroBatchInFlight(given=given, roots=[each for each in made if each.requires_grad])
        self._flights[operation.micro_batch, operation.chunk] = flight

    def _backward(self, operation: Operation) -> None:
        flight = self._flights[operation.micro_batch, operation.chunk]
        if operation.kind != "weights" and flight.slopes is None:
            flight.slopes = self.messages.received(operation)
        with TorchUserCode("the backward pass", self.objective.caller.where):
            self._differentiate(operation, flight)
        self.accumulate()
        if operation.kind != "weights":
            wanted = [each for each in flight.given if each.requires_grad]
            back = [torch.zeros_like(each) if each.grad is None else each.grad for each in wanted]
            self.messages.send(back, operation)
        if operation.kind != "inputs":
            del self._flights[operation.micro_batch, operation.chunk]

    def _differentiate(self, operation: Operation, flight: _MicroBatchInFlight) -> None:
        """Compute the gradients of parameters, of inputs, or of both."""
        assert flight.slopes is not None, "what a stage needs has come"
        wanted = [each for each in flight.given if each.requires_grad]
        if operation.kind == "inputs" and wanted:
            if operation.chunk not in self._halved:
                self._halved[operation.chunk] = can_split_backward(flight.roots, wanted, self.replica.trainable)
            if self._halved[operation.chunk]:
                flight.groups = backward_of_inputs(flight.roots, flight.slopes, wanted, self.replica.trainable)
            else:
                accumulate_gradients(tuple(flight.roots), tuple(flight.slopes))
                flight.groups = []
        elif operation.kind == "weights" and flight.groups is not None:
            if flight.groups:
                backward_of_parameters(self.replica.trainable, flight.groups)
        elif operation.kind != "inputs" and flight.roots:
            accumulate_gradients(tuple(flight.roots), tuple(flight.slopes))

    def _check(self, operation: Operation, share: MicroBatchShare, made: Sequence[Tensor]) -> None:
        """Raise JobError where a section's outputs differ in shape, type or gradient from those of the trace."""
        metas = self._check_forms(operation, share, made)
        if [each.requires_grad for each in made] != [meta.requires_grad for meta in metas]:
            raise self._changed(
                "gives gradients to other values than when it was cut: use torch.no_grad() and detach() alike for "
                "every batch"
            )

    def _check_forms(self, operation: Operation, share: MicroBatchShare, made: Sequence[Tensor]) -> list[Tensor]:
        """Return the section's outputs in the trace. Raises JobError where shapes or types are others."""
        metas = self.messages.output_metas(operation, share.batch.rows)
        for each, meta in zip(made, metas, strict=True):
            if (each.shape, each.dtype, each.layout) != (meta.shape, meta.dtype, meta.layout):
                raise self._changed(
                    f"gives {tuple(each.shape)} of {each.dtype} to the next stage where it gave {tuple(meta.shape)} of "
                    f"{meta.dtype} when it was cut: pad or cut values to a fixed shape, or cut the model elsewhere"
                )
        return metas

    def _changed(self, how: str) -> JobError:
        return JobError([f"the model's forward {how}"], where=self.objective.caller.where)

    def _run(self, operation: Operation, share: MicroBatchShare, given: list[Tensor]) -> Any:
        """Run the section's forward."""
        section, caller = self.messages.section(operation), self.objective.caller
        columns = caller.inputs(share.batch) if section == 0 else None
        inputs = None if columns is None else [columns[name] for name in caller.spec.inputs]
        with TorchUserCode("the model", caller.where), caller.saved_tensor_context():
            return self.cut.run(section, given, rows=share.batch.rows, inputs=inputs)

    def _forget(self) -> None:
        """Forget what an error may have left."""
        self._flights.clear()
        self.messages.clear()
        self.begun = None
        self.cut.look()

    def _ends_model(self, operation: Operation) -> bool:
        return self.messages.section(operation) == self.cut.sections - 1


# --- A rank's step, with the sums over replicas, shards and the stages that share parameters -------------------------


_SharedParameter = tuple[nn.Parameter, distributed.ProcessGroup, bool]


@dataclass(frozen=True, kw_only=True)
class StageRunner(MeshRunner):
    """Runs micro-batches through all stages, and reduces gradients and sums."""

    pipe: StageExecutor  # this rank's stage
    # parameters that other stages use too, with the ranks of this pipeline that do, and whether this one is the first
    # of them
    shared: tuple[_SharedParameter, ...]
    shards: StageShards | None = None  # of the stage's parameters, where ranks divide them

    @classmethod
    def of(cls, pipe: StageExecutor, place: MeshGroups, shards: StageShards | None) -> StageRunner:
        """Return the runner of a stage; every rank of the world calls it, since it makes groups."""
        if shards is not None:
            pipe.accumulate = shards.accumulate
        return cls(
            objective=pipe.objective,
            pipe=pipe,
            shared=_shared_parameters(pipe, place),
            place=place,
            data_groups=place.data_groups,
            shards=shards,
        )

    def rehearse(self, feed: Feed, *, check: bool) -> None:
        """Run a step of weight 0 that leaves nothing behind, and check its loss where that is wanted."""
        given = [*throwaway_micro_batches(feed)]
        replica = self.pipe.replica
        with replica.attempt(), random_state.preserve_generators(replica.device), self.objective.checking(check):
            if replica.autocast is not None:
                with nullcontext() if self.shards is None else self.shards.choosing_types(replica, self.data_groups):
                    self.pipe.rehearse(given[0][1])
            self.run(given, feed)
        replica.checked = replica.checked or (check and has_several_samples(share for _, share in given))
        self.objective.begin()

    def accumulate(self, replica: TorchReplica, feed: Feed, *, sampled: bool) -> None:
        """Run forward and backward of every micro-batch, in the order of the schedule."""
        following = feed.following if replica.versions is not None else None
        assert following is None or following.step == feed.step + 1, "steps follow each other"
        self.run(micro_batches_of(feed), feed, micro_batches_of(following) if following else ())

    def run(
        self,
        given: Sequence[tuple[int, MicroBatchShare]],
        feed: Feed,
        following: Sequence[tuple[int, MicroBatchShare]] = (),
    ) -> None:
        """Run the given micro-batches, and the first forwards of the next step's."""
        self.objective.begin()
        self.pending_sums.clear()
        with nullcontext() if self.shards is None else self.shards.gathered():
            self.pipe.step(given, feed.step, partial(self._tell, feed), following)

    def _tell(self, feed: Feed) -> None:
        """Start the sums over all ranks, without waiting for the last backwards."""
        if not self.pipe.last:
            self.objective.add_stop_request(feed.stop_requested)
        self.start_sums()

    def reduce(self, replica: TorchReplica) -> None:
        """Make each gradient that of the global batch."""
        if self.shards is None:
            super().reduce(replica)
        else:
            self.shards.reduce(replica, self.data_groups)
        for parameter, group, _ in self.shared:  # after the replicas, so that all copies come to the same bits
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            distributed.all_reduce(to_local(parameter.grad), group=group)

    def counted_elsewhere(self) -> frozenset[Tensor]:
        """Return the parameters whose gradients another stage adds to the norm."""
        return frozenset(parameter for parameter, _, first in self.shared if not first)


def _shared_parameters(pipe: StageExecutor, place: MeshGroups) -> tuple[_SharedParameter, ...]:
    """Return this stage's parameters that other stages use too. Every rank makes every group."""
    names = {name: parameter for parameter, name in pipe.replica.names.items()}
    columns = pipe.messages.links.columns
    found = []
    for name, sections in sorted(pipe.cut.shared.items()):
        stages = sorted({pipe.messages.stage_of(section) for section in sections})
        ranks = ([column[stage] for stage in stages] for column in columns)
        groups = [distributed.new_group(each, timeout=place.deadline) for each in ranks]
        if len(stages) > 1 and name in names:
            found.append((names[name], groups[place.rank % len(columns)], pipe.stage == stages[0]))
    return tuple(found)
