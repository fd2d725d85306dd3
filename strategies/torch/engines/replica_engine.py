"""The state of one rank's engine: build, snapshot, restore, save and load of its replica."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import ClassVar, TypeVar

import torch

from trainwright.core import random_state
from trainwright.core.engine import ModelSpec, StateReader, StateSnapshot, StateWriter
from trainwright.core.errors import TrainwrightError
from trainwright.core.plan import Plan
from trainwright.core.topology import Address, Capabilities, Generation, Group, Role, StateTag, StateTransfer
from trainwright.strategies.common.user_code_errors import peer_lost_error
from trainwright.strategies.torch.checkpoint import host_state, safetensors_files
from trainwright.strategies.torch.torch_errors import TorchUserCode, clear_frames
from trainwright.strategies.torch.training.local_state import DataRank
from trainwright.strategies.torch.training.train_state import TorchReplica
from trainwright.strategies.torch.training.train_step import StepRunner

Result = TypeVar("Result")


class ReplicaEngine:
    """Holds a replica and moves its state; `TorchEngine` adds the steps.

    `trainwright.core.engine.Engine` says who calls what, and when.
    """

    capabilities: ClassVar[Capabilities] = Capabilities(
        reform="in_place", topology="collective", devices_per_worker=1, inductor=True
    )

    def __init__(self) -> None:
        self._group: Group | None = None
        self._replica: TorchReplica | None = None
        self._runner: StepRunner | None = None
        self._device = torch.device("cpu")
        self._copies = host_state.HostStateCopier()

    # --- the group ----------------------------------------------------------------------------------------

    def reserve(self, generation: Generation, role: Role) -> Address:
        """Return an address without a port: no other rank connects to this one."""
        return Address(host="127.0.0.1", port=0)

    def form(self, group: Group) -> StateTag:
        """Set threads and device; return what state this rank holds. Raises PeerLost."""
        self._runner = None
        self._group = group
        self._device = torch.device(group.devices[0])
        if group.threads:
            torch.set_num_threads(group.threads)
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        if self._replica is not None:
            self._replica.move(self._device)
        return self._tag()

    def leave(self) -> None:
        """Leave the group; the process keeps its state. Safe to call at any time, and twice."""
        self._runner = None

    def interrupt(self, deadline_s: float) -> bool:
        """Return False: work that does not wait for other ranks cannot be interrupted."""
        return False

    # --- the state ----------------------------------------------------------------------------------------

    def build(self, spec: ModelSpec, plan: Plan) -> StateTag:
        """Build model and optimizer, the same on every rank for one seed.

        Raises:
            JobError: the model cannot be trained, or not with this plan.
            UserCodeError: the user's code raised.
        """
        spec.check(self.capabilities)
        self._replica = self._guarded(lambda: self._build_replica(spec, plan))
        self._runner = None
        return self._tag()

    def transfer(self, moves: Sequence[StateTransfer]) -> StateTag:
        """Send nothing, since one rank holds all state. A fresh build is at step 0 from now on."""
        self._start_at_zero(self.replica)
        return self._tag()

    def snapshot(self) -> StateSnapshot:
        """Copy the state to host memory. Training may continue at once.

        Of data ranks with local state only the first copies what all have, the others what they keep as their own.
        """
        held = host_state.state_of(self.replica)
        if held.local is not None and held.local.data_rank.rank:
            held = replace(held, model={}, slots={}, boxes={}, trained=())
        copy = self._copies.of(held)
        return StateSnapshot(step=copy.step or 0, size_bytes=copy.size_bytes, state=copy)

    def restore(self, copy: StateSnapshot) -> StateTag:
        """Restore a state copied by `snapshot`. Raises CheckpointError, with nothing changed, where it does not fit."""
        host_state.restore(self.replica, copy.state)
        return self._tag()

    @staticmethod
    def save(copy: StateSnapshot, writer: StateWriter) -> None:
        """Write a snapshot's files; may run in another thread, after the engine is gone. Raises StorageError."""
        safetensors_files.write(copy.state, writer)

    def load(self, reader: StateReader) -> StateTag:
        """Load the state of a checkpoint. Raises CheckpointError, with nothing changed, where it does not fit."""
        replica, data_rank = self.replica, self._data_rank
        own = safetensors_files.read_local(reader, data_rank) if replica.local else None
        host_state.restore(replica, replace(safetensors_files.read(reader, replica.wanted, replica.part), local=own))
        replica.data_rank = data_rank
        return self._tag()

    def verify(self) -> None:
        """Do nothing: no other rank holds a copy of this state."""

    # --- for the engines ----------------------------------------------------------------------------------

    def _build_replica(self, spec: ModelSpec, plan: Plan) -> TorchReplica:
        """Return a new model and optimizer."""
        return TorchReplica(spec, plan, self._device, self._where)

    @property
    def replica(self) -> TorchReplica:
        """Model, optimizer and step of this rank; `build` comes first."""
        assert self._replica is not None, "build() comes first"
        return self._replica

    @property
    def _rank(self) -> int:
        return self._group.rank if self._group else 0

    @property
    def _where(self) -> str:
        return f"rank {self._rank}"

    @property
    def _data_rank(self) -> DataRank:
        """This rank's number among the data ranks."""
        return DataRank(rank=self._rank, ranks=self._group.size if self._group else 1)

    def _start_at_zero(self, replica: TorchReplica) -> None:
        """Let a fresh build be at step 0."""
        if replica.step is None:
            replica.step, replica.data_rank = 0, self._data_rank

    def _tag(self) -> StateTag:
        """Return what state this rank holds; local state counts only for the data rank that it belongs to."""
        replica, data_rank = self._replica, self._data_rank
        if replica is None:
            return StateTag(step=None)
        if not replica.local:
            return StateTag(step=replica.step, sound=replica.sound)
        return StateTag(
            step=replica.step,
            pieces=frozenset({"state", data_rank.piece}),
            total=data_rank.ranks + 1,
            sound=replica.sound and (replica.step is None or replica.data_rank == data_rank),
        )

    def _guarded(self, work: Callable[[], Result]) -> Result:
        """Run `work`; clear the frames of errors, which would keep a process group's sockets open.

        Meanwhile no other thread draws from the global generators of random numbers.
        """
        try:
            with random_state.GENERATORS_LOCK:
                return work()
        except TrainwrightError as error:
            failure = error
        except RuntimeError as error:
            if not TorchUserCode.lost_peer(error):
                raise
            failure = peer_lost_error(error, self._where)
            clear_frames(error)
        clear_frames(failure)
        raise failure
