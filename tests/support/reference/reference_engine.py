"""What the reference engines share: a replica of the state, and all that needs no other rank."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ClassVar, Protocol

import numpy as np

from tests.support.reference.model import ReferenceModel
from tests.support.reference.state import ReferenceState, fit_state, from_bytes, merge_states, to_bytes
from tests.support.reference.user_functions import ReferenceProgram
from trainwright.core.data import Batch, Columns, Feed, MetricSums
from trainwright.core.engine import MetricStates, ModelSpec, StateReader, StateSnapshot, StateWriter
from trainwright.core.errors import CheckpointError, TrainwrightError
from trainwright.core.model_profile import LayerCost, ModelProfile
from trainwright.core.plan import Plan
from trainwright.core.topology import Address, Capabilities, Group, Role, StateTag, StateTransfer
from trainwright.strategies.common.socket_transport import SocketListener, own_host

PREFIX, SUFFIX = "state", ".npz"


class _Connections(Protocol):
    """What holds the sockets of a formed group."""

    def cut(self) -> None:
        """End them, from any thread."""

    def close(self) -> None:
        """End and free them."""


class ReferenceEngine:
    """State, evaluation, files and the life of a group. Subclasses add the topology: `form`, `warm`, `train_step`.

    An error inside a step ends this rank's connections at once, so that no other rank waits for it.

    Args:
        host: address to listen on; by default the one that other nodes reach this node by.
    """

    capabilities: ClassVar[Capabilities] = Capabilities()

    def __init__(self, *, host: str | None = None) -> None:
        self._host = host
        self._port: SocketListener | None = None
        self._group: Group | None = None
        self._connections: _Connections | None = None
        self._program: ReferenceProgram | None = None
        self._state: ReferenceState | None = None
        self._busy = threading.Lock()

    def reserve(self, role: Role) -> Address:
        """Listen on a port that the system chooses."""
        self.leave()
        self._port = SocketListener(self._host or own_host(), unix=False)
        return self._port.address

    def build(self, spec: ModelSpec, plan: Plan) -> StateTag:
        """Make model and optimizer, the same on every rank for one seed; step None."""
        self._program = ReferenceProgram(spec, self._where())
        self._hold(self._part(self._initial()))
        return self._tag()

    def evaluate_step(self, feed: Feed, states: MetricStates | None = None) -> MetricSums:
        """Local sums of `loss` and the metrics; no collective."""
        return self.program.evaluate(self.state.parameters, feed)

    def predict_step(self, feed: Feed) -> Columns:
        """`output` (rows, ...) for the feed's rows, part by part and micro-batch by micro-batch."""
        return self.program.predict(self.state.parameters, feed)

    def check_unsaved(self) -> None:
        """Checkpoints hold everything."""

    def snapshot(self) -> StateSnapshot:
        """A deep copy of this rank's state."""
        copy = self.state.copy()
        return StateSnapshot(step=copy.step or 0, size_bytes=copy.size_bytes, state=copy)

    def restore(self, copy: StateSnapshot) -> StateTag:
        """Take a state copied by `snapshot`."""
        self._hold(replace(copy.state.copy(), step=copy.step))
        return self._tag()

    def save(self, copy: StateSnapshot, writer: StateWriter) -> None:
        """Write this rank's pieces of a snapshot: `state.npz`, by full parameter names."""
        writer.write(self._file(), to_bytes(replace(copy.state, step=copy.step)))

    def load(self, reader: StateReader) -> StateTag:
        """Take the state of a checkpoint, saved in any layout."""
        names = sorted(name for name in reader.names() if name.startswith(PREFIX) and name.endswith(SUFFIX))
        if not names:
            raise CheckpointError("the checkpoint has no state*.npz file", where=self._where())
        try:
            whole = merge_states(from_bytes(reader.read(name)) for name in names)
        except (ValueError, KeyError, OSError) as error:
            raise CheckpointError(f"the checkpoint's {names} cannot be read: {error}", where=self._where()) from error
        self._hold(self._part(fit_state(whole, self._initial())))
        return self._tag()

    def peak_memory(self) -> None:
        """It has no device."""

    def verify(self) -> None:
        """Nothing: every rank takes the same steps from the same sums."""

    def transfer(self, moves: Sequence[StateTransfer]) -> StateTag:
        """Send and receive state as decided; a fresh build stands at step 0 from then on."""
        if moves:
            raise TrainwrightError("this layout has no second copy to move", remedy="restore from a checkpoint")
        self._settle(self.state)
        return self._tag()

    def interrupt(self, deadline_s: float) -> bool:
        """Cut all connections, so that a blocked call raises; True when no call is left within the deadline."""
        for held in (self._port, self._connections):
            if held is not None:
                held.cut()
        if not self._busy.acquire(timeout=deadline_s):
            return False
        self._busy.release()
        return True

    def leave(self) -> None:
        """End the group and keep the state."""
        for held in (self._connections, self._port):
            if held is not None:
                held.close()
        self._connections = self._port = self._group = None

    @property
    def program(self) -> ReferenceProgram:
        """The job's functions; `build` comes first."""
        assert self._program is not None, "build comes first"
        return self._program

    @property
    def state(self) -> ReferenceState:
        """The state held; `build` comes first."""
        assert self._state is not None, "build comes first"
        return self._state

    @property
    def group(self) -> Group:
        """The formed group."""
        assert self._group is not None, "form comes first"
        return self._group

    def _enter(self, group: Group) -> SocketListener:
        """Take the group's data; the reserved port."""
        assert self._port is not None, "reserve comes first"
        self._group = group
        if self._program is not None:
            self._program.where = self._where()
        return self._port

    @contextmanager
    def _acting(self) -> Iterator[None]:
        """While other ranks may wait for this one: an error ends the connections, so that they notice at once."""
        with self._busy:
            try:
                yield
            except BaseException:
                if self._connections is not None:
                    self._connections.cut()
                raise

    def _initial(self) -> ReferenceState:
        """The whole state before the first step."""
        return self.program.initial()

    def _hold(self, state: ReferenceState) -> None:
        """Take a state from elsewhere."""
        self._state = state

    def _part(self, whole: ReferenceState) -> ReferenceState:
        """What this rank holds of a state."""
        return whole

    def _file(self) -> str:
        """Name of this rank's file in a checkpoint."""
        return f"{PREFIX}{SUFFIX}"

    def _tag(self) -> StateTag:
        """What this rank holds, in words."""
        return StateTag(step=None if self._state is None else self._state.step)

    def _settle(self, state: ReferenceState) -> None:
        """Keep a state at which training goes on: a fresh build stands at step 0 from now on."""
        self._state = state if state.step is not None else replace(state, step=0)

    def _expect(self, feed: Feed) -> None:
        """The core feeds the step that comes next."""
        standing = self.state.step or 0
        if feed.step != standing or len(feed.parts) != len(feed.data_ranks):
            raise TrainwrightError(
                f"fed step {feed.step} with {len(feed.parts)} parts for {len(feed.data_ranks)} data ranks "
                f"while standing at step {standing}",
                where=self._where(),
            )

    def _where(self) -> str:
        return f"rank {self._group.rank}" if self._group is not None else ""


def zero_weighted(feed: Feed) -> Feed:
    """The same feed with all weights zero, for the throwaway step of `warm`."""
    return replace(feed, parts=tuple(tuple(_zero_weighted_batch(batch) for batch in part) for part in feed.parts))


def _zero_weighted_batch(batch: Batch) -> Batch:
    return replace(batch, weights=np.zeros(batch.rows))


# --- What a reference model costs, and how it takes the weights of a checkpoint ---------------------------------------


def profile_model(
    model: ReferenceModel, sample: Columns, inputs: tuple[str, ...], *, keywords: tuple[str, ...] = (), step: Any = None
) -> ModelProfile:
    """Cost by parameter array: a multiplication and an addition for each number. Looks at no sample."""
    layers = (
        LayerCost(name=name, parameters=value.size, parameter_bytes=value.nbytes, flops=2.0 * value.size)
        for name, value in model.parameters.items()
    )
    return ModelProfile(framework="reference", layers=tuple(layers))


def weight_bytes(model: ReferenceModel) -> int:
    """Size of a model's parameters."""
    return sum(value.nbytes for value in model.parameters.values())


def take_weights(model: ReferenceModel, reader: StateReader) -> None:
    """Give a model the weights of a checkpoint."""
    names = sorted(name for name in reader.names() if name.startswith(PREFIX) and name.endswith(SUFFIX))
    model.parameters = merge_states(from_bytes(reader.read(name)) for name in names).parameters
