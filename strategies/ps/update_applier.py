"""Which pushes a server applies to its shard, and how: admission, copies of kept pushes, clipping."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, NamedTuple, TypeVar

from trainwright.core.engine import ModelSpec
from trainwright.core.errors import TrainwrightError
from trainwright.core.plan import Plan
from trainwright.core.topology import Consistency, StalenessCounts, WorkUnit
from trainwright.strategies.common.shared_memory import allocate_private
from trainwright.strategies.ps.call_headers import MalformedCallError, PushCall, require
from trainwright.strategies.ps.lease_table import ClosedRound
from trainwright.strategies.ps.parameter_shards import GradientPush, ShardStore

_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Settings that all servers of a plan share."""

    shares: int  # units of a round
    consistency: Consistency  # when units may start, and whether an update is of a round or of the next pushes
    local_steps: int = 1  # steps of a round
    clip_norm: float | None = None  # the job's; None does not clip
    # the servers clip, since an update has several workers' gradients; else each worker clips its own
    clips: bool = False

    @classmethod
    def of(cls, plan: Plan, spec: ModelSpec) -> ServerConfig:
        """Return the settings of a plan. Raises PlanError for an unknown consistency."""
        consistency = Consistency.parse(plan.consistency or "sync")
        return cls(
            shares=plan.mesh.data_ranks,
            consistency=consistency,
            local_steps=plan.local_steps,
            clip_norm=spec.clip_norm,
            clips=spec.clip_norm is not None and consistency.waits and not plan.outer,
        )


@dataclass(frozen=True, kw_only=True)
class KeptPush:
    """A push to apply later, and the memory with its copy; empty if it stays in the worker's memory."""

    push: GradientPush
    memory: memoryview


class UpdateApplier:
    """Admits pushes and applies them to the shard of one server.

    Args:
        send_norm: (round, squared norm) -> tells the first server this server's part of a round's gradient norm.

    Attributes:
        sound: no update was applied since the last complete step.
    """

    def __init__(self, send_norm: Callable[[int, float], None]) -> None:
        self.sound = True
        self._send_norm = send_norm
        self._store: ShardStore | None = None
        self._config: ServerConfig | None = None
        self._admission: UpdateAdmission[KeptPush] | None = None
        self._free_memory: list[memoryview] = []  # memory of applied pushes, for the next copies
        self._norms_sent = 0  # rounds
        self._factors: dict[int, float] = {}  # of clipping, by round
        self._last_push: dict[str, tuple[WorkUnit, int]] = {}  # unit and round of each worker's last accepted push

    def open(self, store: ShardStore, config: ServerConfig) -> None:
        """Take the shard that updates are applied to."""
        self._store, self._config = store, config

    def restart(self) -> None:
        """Forget all pushes and rounds, and count versions from 0."""
        self._admission = UpdateAdmission(shares=self.config.shares, consistency=self.config.consistency)
        self._norms_sent, self._factors, self._last_push = 0, {}, {}

    @property
    def opened(self) -> bool:
        """Whether there is a shard."""
        return self._store is not None

    @property
    def started(self) -> bool:
        """Whether `restart` was called."""
        return self._admission is not None

    @property
    def store(self) -> ShardStore:
        """The shard; call `open` first."""
        assert self._store is not None, "open comes first"
        return self._store

    @property
    def config(self) -> ServerConfig:
        """The settings; call `open` first."""
        assert self._config is not None, "open comes first"
        return self._config

    @property
    def admission(self) -> UpdateAdmission[KeptPush]:
        """The admission of this generation; call `restart` first: no unit is leased before."""
        if self._admission is None:
            raise TrainwrightError("a push came before any step was given out")
        return self._admission

    @property
    def version(self) -> int:
        """Updates applied since `restart`."""
        return 0 if self._admission is None else self._admission.version

    def staleness(self) -> StalenessCounts:
        """Return the staleness of the updates applied since the last call."""
        return StalenessCounts() if self._admission is None else self._admission.staleness()

    def push(self, head: PushCall, payload: memoryview) -> tuple[dict[str, object], bool]:
        """Apply a push, keep it (in place or as a copy), or drop it.

        Returns:
            The fields of the answer to the worker; whether it is the first push of its unit and was not too late.

        Raises:
            MalformedCallError: it cannot be of this plan.
        """
        unit = head.work_unit
        self._check(head, unit, payload)
        admission = self.admission
        age = admission.version - head.seen
        decision = admission.offer(head.worker, unit, head.at, head.seen)
        update = head.at if self.config.consistency.waits else admission.version
        if decision == "apply":
            push = self._as_push(unit, head.weight, payload)
            rate_factor = 1.0 / max(1, age) if self.config.consistency.scaled else 1.0
            self.apply_gathered(KeptPush(push=push, memory=memoryview(b"")), rate_factor=rate_factor)
        elif decision == "keep":
            memory = memoryview(b"") if head.keep else self._copy(payload)
            push = self._as_push(unit, head.weight, memory or payload)
            admission.keep(head.worker, unit, head.at, head.seen, KeptPush(push=push, memory=memory))
        is_kept = decision == "keep" and bool(payload)
        # A worker whose connection broke repeats its push, which may be applied already.
        repeated = (unit, head.at) == self._last_push.get(head.worker)
        accepted = decision != "drop" or repeated or admission.first(unit, head.at) == head.worker
        if accepted:
            self._last_push[head.worker] = unit, head.at
        in_place = update if is_kept and head.keep else None
        return {"taken": accepted, "kept": in_place, "copied": is_kept and not head.keep}, decision != "drop"

    def apply_gathered(self, *last: KeptPush, rate_factor: float = 1.0) -> None:
        """Apply an update of the pushes that `async` gathers, and of the last one; without pushes, do nothing.

        The learning rate is that of the newest step.
        """
        gathered = (*self.admission.gathered, *last)
        if gathered:
            pushes = [each.push for each in gathered]
            newest = max(push.unit.step for push in pushes)
            self._apply(pushes, newest, rate_factor=rate_factor, clip_factor=1.0)
            self.admission.applied_gathered()
            self._free_memory += [each.memory for each in gathered if each.memory]

    def set_clip_factor(self, at: int, factor: float) -> None:
        """Take the factor by which all servers clip a round."""
        self._factors[at] = factor

    def apply_due(self) -> Iterator[RoundUpdate[KeptPush]]:
        """Apply the rounds that are closed and whose clipping factor is known, in order; yield each update."""
        while self._admission is not None and (update := self._admission.due()) is not None:
            pushes = [pending.push for pending in update.pushes]
            factor = self._clip_factor(update.closing.at, pushes)
            if factor is None:
                return
            self._apply(pushes, update.closing.step, rate_factor=1.0, clip_factor=factor)
            self._admission.applied(update)
            self._free_memory += [pending.memory for pending in update.pushes if pending.memory]
            yield update

    def _check(self, head: PushCall, unit: WorkUnit, payload: memoryview) -> None:
        """Raise MalformedCallError for a push that cannot be of this plan."""
        require(self.started and self.opened, "a push before any step was given out")
        valid = 0 <= unit.share < self.config.shares and 0 < unit.steps <= self.config.local_steps
        require(valid and unit.step >= 0 and head.at >= 0, f"{unit} in round {head.at} is not a unit of this plan")
        if head.weight > 0:
            try:
                self.store.check(self._as_push(unit, head.weight, payload))
            except ValueError as error:
                raise MalformedCallError(f"a push that cannot be decoded: {error}") from error

    def _as_push(self, unit: WorkUnit, weight: float, payload: memoryview) -> GradientPush:
        shard = self.store.shard
        end = max(0, len(payload) - (shard.pulled_bytes - shard.trained_bytes))
        return GradientPush(unit=unit, weight=weight, payload=payload[:end], buffers=payload[end:])

    def _copy(self, payload: memoryview) -> memoryview:
        """Copy a push into reusable memory of this process: the worker overwrites its own memory."""
        if not payload:
            return payload
        reusable = self._free_memory and len(self._free_memory[-1]) == len(payload)
        memory = self._free_memory.pop() if reusable else allocate_private(len(payload))
        memory[:] = payload
        return memory

    def _apply(self, pushes: Sequence[GradientPush], step: int, *, rate_factor: float, clip_factor: float) -> None:
        self.sound = False
        self.store.apply(pushes, step=step, rate_factor=rate_factor, clip_factor=clip_factor)

    def _clip_factor(self, at: int, pushes: Sequence[GradientPush]) -> float | None:
        """Return the factor on a round's gradient; None while other servers' parts of its norm are missing."""
        if not self.config.clips:
            return 1.0
        if at >= self._norms_sent:
            self._norms_sent = at + 1
            self._send_norm(at, self.store.norm2(pushes))
        return self._factors.pop(at, None)


# --- Admission: which pushes are applied, when, and in which order ----------------------------------------------------

# Pushes can come in any order, twice, late, and of units that were applied long ago. In `async` each server applies the
# next `pushes` units in the order of their arrival, and at the end of a segment those that are left. Otherwise a server
# keeps pushes until the first server closes the round and names the units that count in it.
# All servers apply the same units, round after round, in the order of the units.


@dataclass(frozen=True, kw_only=True)
class RoundUpdate(Generic[_T]):
    """An update to apply now."""

    closing: ClosedRound  # its round
    pushes: tuple[_T, ...]  # of the units that count, in order


class _PendingPush(NamedTuple, Generic[_T]):
    worker: str
    seen: int
    push: _T


class UpdateAdmission(Generic[_T]):
    """The pushes that a server has applied or keeps in this rendezvous epoch; T is the caller's type of a push.

    Args:
        shares: units of a round.
        consistency: whether an update is of a round or of the next pushes.

    Attributes:
        version: updates applied.
        gathered: pushes that are kept for the next update; `async`.
    """

    def __init__(self, *, shares: int, consistency: Consistency) -> None:
        self._shares, self._waits, self._pushes = shares, consistency.waits, consistency.pushes
        self.version = 0
        self.gathered: list[_T] = []
        self._open = 0  # the first round that is not complete here
        self._arrived: dict[int, dict[int, str]] = {}  # by round and share, the worker; `async`
        self._pending: dict[int, dict[WorkUnit, _PendingPush[_T]]] = {}  # by round
        self._closings: dict[int, ClosedRound] = {}
        self._counts: Counter[int] = Counter()
        self._dropped = 0

    def offer(self, worker: str, unit: WorkUnit, at: int, seen: int) -> Literal["apply", "keep", "drop"]:
        """Decide about a push: apply it now, keep it, or drop it, because it is late or its unit has a push already.

        Apply it with the pushes that are `gathered`, and call `applied_gathered` after it.

        Args:
            worker: the worker that pushes.
            unit: the unit that it computed.
            at: the round in which the unit counts.
            seen: version of this server's parameters with which it computed the unit.
        """
        sender = self.first(unit, at)
        if self._waits:
            is_late = at < self.version or (at in self._closings and unit not in self._closings[at].units)
        else:
            is_late = at < self._open
        if is_late or sender is not None:
            self._dropped += sender != worker
            return "drop"
        if self._waits:
            return "keep"
        self._counts[max(0, self.version - seen)] += 1
        self._record_arrival(worker, unit, at)
        return "apply" if len(self.gathered) + 1 == self._pushes else "keep"

    def first(self, unit: WorkUnit, at: int) -> str | None:
        """Return the worker whose push of a unit came first; None without a push, or if its round is complete."""
        if not self._waits:
            return self._arrived.get(at, {}).get(unit.share)
        pending = self._pending[at].get(unit) if at in self._pending else None
        return None if pending is None else pending.worker

    def keep(self, worker: str, unit: WorkUnit, at: int, seen: int, push: _T) -> None:
        """Keep a push after `offer` returned `keep`; it must not change until its update is applied."""
        if not self._waits:
            self.gathered.append(push)
            return
        self._pending.setdefault(at, {})[unit] = _PendingPush(worker, seen, push)

    def close(self, closing: ClosedRound) -> None:
        """Close a round with the units that count in it, whose pushes are here or still come."""
        self._closings[closing.at] = closing

    def due(self) -> RoundUpdate[_T] | None:
        """Return the next round's update if the round is closed and complete. Call `applied` after it."""
        closing = self._closings.get(self.version)
        if closing is None:
            return None
        pending = self._pending.get(closing.at, {})
        if any(unit not in pending for unit in closing.units):
            return None
        return RoundUpdate(closing=closing, pushes=tuple(pending[unit].push for unit in closing.units))

    def applied(self, update: RoundUpdate[_T]) -> None:
        """The update of `due` is applied: drop its pushes."""
        at = update.closing.at
        counting_units = set(update.closing.units)
        for unit, pending in self._pending.pop(at, {}).items():
            if unit in counting_units:
                self._counts[max(0, at - pending.seen)] += 1
            else:
                self._dropped += 1
        del self._closings[at]
        self.version += 1

    def applied_gathered(self) -> None:
        """The gathered pushes, and one that was offered last, are applied: drop them."""
        self.gathered = []
        self.version += 1

    @property
    def behind(self) -> bool:
        """Whether a round is closed and not applied."""
        return bool(self._closings)

    def staleness(self) -> StalenessCounts:
        """Return the staleness of the pushes applied since the last call."""
        counts, dropped = dict(self._counts), self._dropped
        self._counts, self._dropped = Counter(), 0
        unit: Literal["steps", "updates"] = "steps" if self._waits else "updates"
        return StalenessCounts(counts=counts, unit=unit, dropped=dropped)

    def _record_arrival(self, worker: str, unit: WorkUnit, at: int) -> None:
        """Record a unit of `async`; complete rounds are forgotten."""
        self._arrived.setdefault(at, {})[unit.share] = worker
        while len(self._arrived.get(self._open, ())) == self._shares:
            del self._arrived[self._open]
            self._open += 1
