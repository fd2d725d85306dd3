"""The engine of sharded data parallelism: torch's FSDP2 (ZeRO-2 and 3, and hybrid shard), over gloo or NCCL.

Each rank holds a part of every parameter, of its gradient and of the optimizer's state. After a failure the process
group is another one, which neither FSDP2's modules nor DTensors can change to: the model is made anew by the job's
function and divided again, and takes the tensors that this rank held.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh

from trainwright.core.data import Columns, Feed, Sums
from trainwright.core.engine import ModelSpec, StateCopy
from trainwright.core.errors import CheckpointError, JobError
from trainwright.core.group import Group, Move, StateTag
from trainwright.core.plan import Plan
from trainwright.strategies.torch import state
from trainwright.strategies.torch.compiling import compile_blocks
from trainwright.strategies.torch.dividing import Calls, divide, gathered, released
from trainwright.strategies.torch.group import compared, same_start
from trainwright.strategies.torch.member import Member
from trainwright.strategies.torch.noise import Probe
from trainwright.strategies.torch.objective import Objective
from trainwright.strategies.torch.parts import Box, Part, local
from trainwright.strategies.torch.replica import Replica
from trainwright.strategies.torch.state import HostState
from trainwright.strategies.torch.step import Runner, Totals


@dataclass(frozen=True, kw_only=True)
class ShardedRunner(Runner):
    """Runs micro-batches of a divided model.

    FSDP2 reduces the model's gradients alone. The sums that travel in DDP's reduction, the norm over all parts and what
    `calls` kept go through one more, small all-reduce, before anything is applied.

    Attributes:
        calls: what each step ran.
        replicas: ranks that hold the same part.
    """

    calls: Calls
    replicas: int
    tells_own: bool = False

    def settle(self, replica: Replica, *, wants_norm: bool) -> tuple[list[Tensor], Totals]:
        """This rank's parts of the averaged gradients and the sums over all ranks.

        Raises:
            JobError: on every rank, where they did not run the same blocks.
        """
        order, used = self.calls.take()
        carried, names = self.objective.carry.grad, replica.names.values()
        assert carried is not None, "carry is part of every objective"
        given = [local(each.grad) for each in replica.trainable if each.grad is not None] if wants_norm else []
        squares = [torch.linalg.vector_norm(each, dtype=torch.float64) ** 2 for each in given]
        square = torch.stack(squares).sum() / self.replicas if squares else carried.new_zeros(()).double()
        facts = torch.tensor([order, order**2, *(name in used for name in names)], dtype=torch.float64)
        world = self.objective.world
        beside = (each.to(carried.device) for each in (square.reshape(1), facts))
        sums = torch.cat((carried.double() / world, *beside))
        distributed.all_reduce(sums)
        weight, loss, wish, *told, norm, orders, squared = sums[: len(carried) + 3].tolist()
        uses = sums[len(carried) + 3 :].tolist()
        if int(orders) ** 2 != int(squared) * world:  # equal for equal orders alone
            raise JobError(
                [
                    "the ranks ran different blocks of the model, or in another order: every rank must run the same "
                    'ones for every batch; a model that chooses by its data needs strategy="data_parallel"'
                ],
                where=self.where,
            )
        for parameter, count in zip(replica.trainable, uses, strict=True):
            if not count:
                parameter.grad = None  # as on one device: the optimizer passes it by
        gradients = [local(each.grad) for each in replica.trainable if each.grad is not None]
        return gradients, Totals(
            weight=weight, loss=loss, wish=wish > 0.5, told=tuple(told), norm=norm**0.5 if wants_norm else None
        )


@dataclass(frozen=True, kw_only=True)
class _Held:
    """What this rank held when it left a group; tensors and nothing of the group's."""

    state: HostState
    buffers: tuple[Tensor, ...]
    sound: bool


class Sharded(Member):
    """A part of the model on each worker: `mesh.shard` of them make a whole, `mesh.data` times."""

    def __init__(self) -> None:
        super().__init__()
        self._mesh: DeviceMesh | None = None
        self._column: distributed.ProcessGroup | None = None  # the ranks that hold this rank's part
        self._part = Part()
        self._job: tuple[ModelSpec, Plan] | None = None
        self._held: _Held | None = None
        self._calls: Calls | None = None
        self._checksum = 0

    # --- the group ----------------------------------------------------------------------------------------

    def form(self, group: Group) -> StateTag:
        """Join the process group, and divide the model anew around what this rank held.

        A part that is not this rank's in the new group is dropped, with the step it stood at.

        Raises:
            PeerLost: it does not form by the group's deadline.
            JobError: the plan's parts do not divide the group.
        """
        self._let_go()
        super().form(group)
        if self._job is not None:
            self._guarded(self._again)
        return self._tag()

    def leave(self) -> None:
        """Keep this rank's tensors, drop the modules, end the process group and close its sockets."""
        self._runner = None
        self._let_go()
        self._mesh = self._column = None
        super().leave()

    # --- the state ----------------------------------------------------------------------------------------

    def build(self, spec: ModelSpec, plan: Plan) -> StateTag:
        """Make the model as one device would, then divide it; the optimizer is made of this rank's parts.

        Raises:
            JobError: the model cannot be trained or divided, or not over this group.
            UserCodeError: the user's code raised.
        """
        self._job = (spec, plan)
        return super().build(spec, plan)

    def transfer(self, moves: Sequence[Move]) -> StateTag:
        """Make this rank equal to the one that its part comes from, bit by bit. Raises PeerLost."""
        sources = {move.piece: move.source for move in moves}
        source = sources.get(self._part.name)
        if source is not None:
            self._guarded(lambda: state.broadcast(self._built, source, self._rank, self._device, self._column))
        return super().transfer(moves)

    def snapshot(self) -> StateCopy:
        """Copy this rank's part to host memory. Training may go on at once."""
        if self._replica is None and self._held is not None:
            kept = state.copied(self._held.state)
            return StateCopy(step=kept.step or 0, size_bytes=kept.size_bytes, state=kept)
        return super().snapshot()

    # --- steps --------------------------------------------------------------------------------------------

    def evaluate_step(self, feed: Feed) -> Sums:
        """Local sums of `loss` and the metrics; parameters are gathered, so that every rank calls it alike."""
        with self._gathering():
            return super().evaluate_step(feed)

    def predict_step(self, feed: Feed) -> Columns:
        """The model's outputs for the feed's rows; parameters are gathered, so that every rank calls it alike."""
        with self._gathering():
            return super().predict_step(feed)

    # --- inside -------------------------------------------------------------------------------------------

    def _tag(self) -> StateTag:
        plain = super()._tag()
        part = self._part
        names = frozenset({part.name})
        return StateTag(step=plain.step, layout=part.layout, pieces=names, whole=part.whole, sound=plain.sound)

    def _made(self, spec: ModelSpec, plan: Plan) -> Replica:
        if self._mesh is None:
            self._mesh, self._column, self._part = self._meshed(plan)
        mesh = self._mesh

        def place(model: nn.Module) -> dict[str, Box]:
            self._checksum = state.checksum(model)
            if spec.compile == "inductor":
                compile_blocks(model, self._device)
            divide(model, mesh, zero=plan.zero, offload=plan.offload, where=self._where)
            return {}

        replica = Replica(spec, plan, self._device, self._where, part=self._part, place=place)
        self._calls = Calls(replica.model, replica.names)
        return replica

    def _meshed(self, plan: Plan) -> tuple[DeviceMesh, distributed.ProcessGroup | None, Part]:
        """The group as a mesh, those who hold this rank's part, and that part. Every rank makes every subgroup."""
        group = self._group
        assert group is not None, "form() comes first"
        shard = plan.mesh.shard if group.size > 1 else 1  # alone a rank rehearses
        replicas, rest = divmod(group.size, shard)
        if rest:
            raise JobError(
                [f"{group.size} ranks cannot hold a model in {shard} parts: use a multiple of {shard} workers"],
                where=self._where,
            )
        part = Part(shard=group.rank % shard, shards=shard)
        world = distributed.group.WORLD
        assert world is not None, "form() has joined it"
        if replicas == 1:
            return DeviceMesh.from_group(world, self._device.type), None, part
        ranks = torch.arange(group.size).reshape(replicas, shard)
        deadline = timedelta(seconds=group.deadline_s)
        rows = [distributed.new_group(row, timeout=deadline) for row in ranks.tolist()]
        columns = [distributed.new_group(column, timeout=deadline) for column in ranks.T.tolist()]
        own = [columns[part.shard], rows[group.rank // shard]]
        names = ("replicate", "shard")
        return DeviceMesh.from_group(own, self._device.type, mesh=ranks, mesh_dim_names=names), own[0], part

    def _let_go(self) -> None:
        """Keep the tensors of this rank's part and let go of all that knows the group."""
        replica, self._replica, self._runner, self._calls = self._replica, None, None, None
        if replica is not None:
            self._held = None
            with suppress(CheckpointError):  # an optimizer's state that cannot be saved cannot be carried over either
                self._held = _Held(state=state.held(replica), buffers=tuple(replica.buffers()), sound=replica.sound)
            gc.unfreeze()  # what the worker froze after its first build: FSDP2's modules are cycles

    def _again(self) -> None:
        """Build as at first, and take what this rank held where it is still this rank's."""
        assert self._job is not None, "build() was called before"
        held = self._held
        self._mesh, self._column, self._part = self._meshed(self._job[1])
        self._replica = self._made(*self._job)
        if held is not None and held.state.step is not None and held.state.part == self._part:
            state.restore(self._replica, held.state)
            self._replica.sound = held.sound
            with torch.no_grad():
                for buffer, kept in zip(self._replica.buffers(), held.buffers, strict=True):
                    buffer.copy_(kept)
        self._held = None

    def _warmed(self, feed: Feed) -> Runner:
        """A runner that has run once on all ranks."""
        assert self._group is not None and self._calls is not None, "form() and build() come first"
        replica = self._built
        answers = compared([0 if replica.step else self._checksum], self._device)
        same_start([checksum for (checksum,) in answers], self._where)
        objective = Objective(replica.model, self._caller(), world=self._group.size)
        part = self._part
        runner = ShardedRunner(
            objective=objective,
            reduced=objective,
            probe=Probe(objective, ()),  # no rank sees a gradient of its own
            local=self._unreplicated,
            calls=self._calls,
            replicas=self._group.size // part.shards,
        )
        self._throwaway(runner, feed)
        self._calls.take()
        return runner

    @contextmanager
    def _gathering(self) -> Iterator[None]:
        """Afterwards only this rank's parts are held: without a backward FSDP2 keeps what it gathered last."""
        try:
            yield
        finally:
            released(self._built.model)

    @contextmanager
    def _unreplicated(self) -> Iterator[None]:
        """Every backward scatters gradients, or each rank would hold all of them; replicas add theirs in the last."""
        root = gathered(self._built.model)[0]
        root.set_requires_all_reduce(False)
        try:
            yield
        finally:
            root.set_requires_all_reduce(True)
