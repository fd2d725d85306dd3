"""A server's life from `form` to `leave`: a thread that answers pulls and pushes whatever else is asked of the process.

`ShardServer` is what all servers have in common. The first is a `lead.Lead`, which keeps the book; the others are
`follower.Follower`s, which do as that says. Nothing waits for one worker: what cannot be answered yet is parked, and
the worker is told to go on waiting now and then, so that both sides know that the other lives.
"""

from __future__ import annotations

import json
import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainwright.core.data import StepReport
from trainwright.core.engine import ModelSpec
from trainwright.core.errors import NonFiniteLoss, PeerLost, TrainwrightError
from trainwright.core.plan import Plan
from trainwright.core.topology import Consistency, Group, Peer, StalenessCounts, WorkUnit
from trainwright.strategies.common.shared_memory import SharedRegion, allocate_private
from trainwright.strategies.common.socket_transport import LOST_PEER_REMEDY, ConnectionCanceller, SocketListener
from trainwright.strategies.ps.parameter_shards import GradientPush, ShardStore
from trainwright.strategies.ps.server_connections import (
    WorkerCall,
    WorkerConnection,
    WorkerConnections,
    WorkerDisconnected,
)
from trainwright.strategies.ps.update_admission import RoundUpdate, UpdateAdmission

_log = logging.getLogger(__name__)
_WAIT_NOTICES = 4  # times within the deadline a worker that waits is told to go on waiting


@dataclass(frozen=True, kw_only=True)
class KeptPush:
    """A push that is applied later, and the memory that holds a copy of it; empty where it stayed where it lies."""

    push: GradientPush
    memory: memoryview


@dataclass(frozen=True, kw_only=True)
class _WaitingPull:
    line: WorkerConnection
    head: CallHeader
    since_s: float


class ShardServer:
    """A server.

    Args:
        listener: closed with it.
        group: that it serves in.
        servers: all of them, in the order of ranks.
        switch: cut already where the group is over before this server is there.

    Attributes:
        lock: hold it to read or write the bank from another thread.
        step: completed steps, as of the last `serve` that began or ended.
        sound: nothing was applied since.
    """

    def __init__(
        self, listener: SocketListener, group: Group, servers: Sequence[Peer], switch: ConnectionCanceller | None = None
    ) -> None:
        self.lock = threading.RLock()
        self._switch = switch or ConnectionCanceller()
        self.step, self.sound = 0, True
        self._group, self._servers = group, tuple(servers)
        self._index = [peer.rank for peer in servers].index(group.rank)
        self._lines = WorkerConnections(listener, group.key, deadline_s=group.deadline_s)
        self._bank: ShardStore | None = None
        self._rules: ServerConfig | None = None
        self._gate: UpdateAdmission[KeptPush] | None = None
        self._region: SharedRegion | None = None
        self._filling = 0
        self._pulls: list[_WaitingPull] = []
        self._spare: list[memoryview] = []
        self._norms_asked = 0  # rounds whose norm was told to the first server
        self._factors: dict[int, float] = {}  # of clipping, by round
        self._news: queue.SimpleQueue[StepReport | Exception | None] = queue.SimpleQueue()
        self._failure: Exception | None = None
        self._handlers: dict[str, Callable[[WorkerConnection, CallHeader, memoryview], None]] = {
            "pull": self._pull,
            "push": self._push,
        }
        self._name = f"server rank {group.rank}"
        self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)

    def open(self, bank: ShardStore, rules: ServerConfig) -> None:
        """From now on there is something to pull."""
        with self.lock:
            self._region = SharedRegion(bank.shard.size_bytes)
            bank.attach(self._region.view)
            self._lines.publish(self._region)
            self._bank, self._rules = bank, rules
            self._filling += 1
        self._lines.wake()

    def renewed(self) -> None:
        """The bank holds another state: what was pulled before counts no more."""
        with self.lock:
            self._filling += 1

    def serve(self, start: int, until: int, wish: Callable[[], bool]) -> Iterator[StepReport]:
        """Let the workers take the steps from `start` on and before `until`, as `core.engine.Independent` has it.

        Raises:
            PeerLost: another server is gone or silent, or `cut` was called.
            UserCodeError: of the bank.
        """
        raise NotImplementedError

    @property
    def version(self) -> int:
        """Updates applied since `serve` first began."""
        return 0 if self._gate is None else self._gate.version

    def staleness(self) -> StalenessCounts:
        """Of what was applied here since this was asked last."""
        with self.lock:
            return StalenessCounts() if self._gate is None else self._gate.staleness()

    def check(self) -> None:
        """Raise what went wrong here meanwhile, another server's end excepted."""
        if self._failure is not None and not isinstance(self._failure, PeerLost):
            raise self._failure

    def cut(self) -> None:
        """End all connections, from any thread: `serve` raises."""
        self._fail(PeerLost(f"rank {self._group.rank} has left its group", remedy=LOST_PEER_REMEDY))

    def join(self, deadline_s: float) -> bool:
        """Whether the thread has ended within the deadline, after `cut`."""
        self._thread.join(deadline_s)
        return not self._thread.is_alive()

    def close(self) -> None:
        """End and free everything; the bank keeps its memory."""
        self.cut()
        self._thread.join()
        if self._region is not None:
            self._region.close()

    # --- of the thread ---

    def _run(self) -> None:
        try:
            while not self._lines.ended:
                events = self._lines.wait(self._next_s())
                with self.lock:
                    for event in events:
                        self._handle(event)
                    self._turn(time.monotonic())
        except Exception as error:
            self._fail(error)
        finally:
            self._lines.close()

    def _next_s(self) -> float:
        """When to look again although nothing comes."""
        return time.monotonic() + self._patience_s / 2

    @property
    def _patience_s(self) -> float:
        """For so long a worker waits without a word."""
        return self._group.deadline_s / _WAIT_NOTICES

    def _handle(self, event: WorkerCall | WorkerDisconnected) -> None:
        if isinstance(event, WorkerDisconnected):
            self._pulls = [pull for pull in self._pulls if pull.line is not event.line]
            self._gone(event.line)
            return
        try:
            head = _parse_header(event.head)
            require(head["do"] in self._handlers, f"only the first server answers {head['do']!r}")
            self._handlers[head["do"]](event.line, head, event.payload)
        except MalformedCallError as error:
            _log.warning("%s ends the connection of rank %d: malformed call: %s", self._name, event.line.rank, error)
            event.line.cut()

    def _gone(self, line: WorkerConnection) -> None:
        """A connection ended."""

    def _turn(self, now_s: float) -> None:
        """After what came: apply what can be, and answer who waited for that."""
        self._apply_due()
        waiting, self._pulls = self._pulls, []
        for pull in waiting:
            if now_s - pull.since_s > self._patience_s:
                send_answer(pull.line, wait=True)
            else:
                self._answer_pull(pull)

    def _fail(self, error: Exception) -> None:
        """The first failure counts, and ends everything here, so that the others notice."""
        if self._failure is None:
            self._failure = error
            self._news.put(error)
        self._lines.cut()

    # --- pulls and pushes ---

    def _pull(self, line: WorkerConnection, head: CallHeader, _: memoryview) -> None:
        self._answer_pull(_WaitingPull(line=line, head=head, since_s=time.monotonic()))

    def _answer_pull(self, pull: _WaitingPull) -> None:
        """Answer a pull, or park it until the updates that it needs are applied."""
        version = self.version
        if self._bank is None or version < pull.head["needs"]:
            self._pulls.append(pull)
            return
        have, shard = pull.head["have"], self._bank.shard
        size = shard.size_bytes if have[0] != self._filling else shard.pulled_bytes
        said = {"have": [self._filling, version], "version": version, "left_out": self._left_out(pull.head)}
        if have == said["have"]:
            send_answer(pull.line, **said, size=0)
        else:
            pull.line.answer_published(json.dumps({**said, "size": size}).encode(), 0, size)

    def _left_out(self, head: CallHeader) -> list[list[int]]:
        """Which pushes of a worker that pulls did not count, of those that it has not been told of."""
        filling, version = head["have"]
        known = version if filling == self._filling else 0
        found = [] if self._gate is None else self._gate.left_out(head["worker"], known)
        return [[at, *unit] for at, unit in found]

    def _push(self, line: WorkerConnection, head: CallHeader, payload: memoryview) -> None:
        """Apply a push, keep it (where it lies, or a copy of it), or drop it."""
        gate, unit = self._checked(head, payload), unit_from_header(head)
        age = gate.version - head["seen"]
        verdict = gate.offer(head["worker"], unit, head["at"], head["seen"])
        if verdict == "apply":
            scaled = self.rules.consistency.scaled
            push = self._as_push(unit, head["weight"], payload)
            self._apply((push,), unit.step, rate_factor=1.0 / max(1, age) if scaled else 1.0, clip_factor=1.0)
        elif verdict == "keep":
            memory = memoryview(b"") if head["keep"] else self._copy(payload)
            push = self._as_push(unit, head["weight"], memory or payload)
            gate.keep(head["worker"], unit, head["at"], head["seen"], KeptPush(push=push, memory=memory))
        kept = verdict == "keep" and bool(payload)
        taken = verdict != "drop" or gate.first(unit, head["at"]) == head["worker"]
        send_answer(line, taken=taken, kept=kept and head["keep"], copied=kept and not head["keep"])
        self._pushed(head, counted=verdict != "drop")

    def _checked(self, head: CallHeader, payload: memoryview) -> UpdateAdmission[KeptPush]:
        """The gate, which may be offered this push. Raises MalformedCall."""
        gate, rules, unit = self._gate, self._rules, unit_from_header(head)
        if gate is None or rules is None or self._bank is None:
            raise MalformedCallError("a push before any step was given out")
        known = 0 <= unit.share < rules.shares and 0 < unit.steps <= rules.local_steps
        require(known and unit.step >= 0 and head["at"] >= 0, f"no unit of this plan: {unit} in round {head['at']}")
        if head["weight"] > 0:
            try:
                self._bank.check(self._as_push(unit, head["weight"], payload))
            except ValueError as error:
                raise MalformedCallError(f"a push that cannot be read: {error}") from error
        return gate

    def _pushed(self, head: CallHeader, *, counted: bool) -> None:
        """A push is here; whether it is the first of its unit."""

    def _as_push(self, unit: WorkUnit, weight: float, payload: memoryview) -> GradientPush:
        shard = self.bank.shard
        end = max(0, len(payload) - (shard.pulled_bytes - shard.trained_bytes))
        return GradientPush(unit=unit, weight=weight, payload=payload[:end], buffers=payload[end:])

    def _copy(self, payload: memoryview) -> memoryview:
        """In memory of ours, which is used again: the worker's may change once its push is answered."""
        if not payload:
            return payload
        fits = self._spare and len(self._spare[-1]) == len(payload)
        memory = self._spare.pop() if fits else allocate_private(len(payload))
        memory[:] = payload
        return memory

    # --- updates ---

    def _apply_due(self) -> None:
        """Apply rounds in order, as far as they are closed and it is known by how much they are clipped."""
        while self._gate is not None and (update := self._gate.due()) is not None:
            pushes = [kept.push for kept in update.pushes]
            factor = self._clipping(update.closing.at, pushes)
            if factor is None:
                return
            self._apply(pushes, update.closing.step, rate_factor=1.0, clip_factor=factor)
            self._gate.applied(update)
            self._spare += [kept.memory for kept in update.pushes if kept.memory]
            self._applied(update)

    def _apply(self, pushes: Sequence[GradientPush], step: int, *, rate_factor: float, clip_factor: float) -> None:
        self.sound = False
        self.bank.apply(pushes, step=step, rate_factor=rate_factor, clip_factor=clip_factor)

    def _applied(self, update: RoundUpdate[KeptPush]) -> None:
        """A round's update is in the parameters."""

    def _clipping(self, at: int, pushes: Sequence[GradientPush]) -> float | None:
        """The factor on a round's gradient; None while the other servers' parts of its norm are not known."""
        if not self.rules.clips:
            return 1.0
        if at >= self._norms_asked:
            self._norms_asked = at + 1
            self._tell_norm(at, self.bank.norm2(pushes))
        return self._factors.pop(at, None)

    def _tell_norm(self, at: int, norm2: float) -> None:
        """This server's part of a round's squared norm."""
        raise NotImplementedError

    def _begin(self, start: int) -> None:
        """A segment begins. Where it does not go on from the last one, all that was counted begins anew."""
        if self._failure is not None:
            raise self._failure
        if self._gate is None or self.step != start:
            self._gate = UpdateAdmission(shares=self.rules.shares, consistency=self.rules.consistency)
            self._norms_asked, self._factors = 0, {}
            self._filling += 1
            self._anew(start)
        self.step, self.sound = start, True

    def _anew(self, start: int) -> None:
        """What else begins anew."""

    @property
    def bank(self) -> ShardStore:
        """The shard; `open` comes first."""
        assert self._bank is not None, "open comes first"
        return self._bank

    @property
    def rules(self) -> ServerConfig:
        """`open` comes first."""
        assert self._rules is not None, "open comes first"
        return self._rules

    @property
    def gate(self) -> UpdateAdmission[KeptPush]:
        """`serve` comes first: no unit is leased before."""
        if self._gate is None:
            raise TrainwrightError("something was pushed before any step was given out")
        return self._gate


def clipping_factor(norm: float, clip_norm: float) -> float:
    """What a gradient of this norm is multiplied with. Raises NonFiniteLoss."""
    if not math.isfinite(norm):
        raise NonFiniteLoss("the gradients of a step are finite and their mean is not, nothing of it was applied")
    return clip_norm / norm if norm > clip_norm else 1.0


def send_answer(line: WorkerConnection, **said: object) -> None:
    """A small answer."""
    line.answer(json.dumps(said).encode())


# --- Heads of calls ---------------------------------------------------------------------------------------------------


CallHeader = dict[str, Any]
_MAX_INTEGER = 2**53  # what JSON numbers hold exactly
_MAX_NAME = 128
_Check = Callable[[Any], bool]


class MalformedCallError(Exception):
    """A call that no worker or server of ours makes: the line that it came over is ended, and nothing else."""


def _whole(value: Any) -> bool:
    return type(value) is int and -1 <= value <= _MAX_INTEGER


def _number(value: Any) -> bool:
    return type(value) in (int, float)


def _norm(value: Any) -> bool:
    return _number(value) and not value < 0  # what is not a number or infinite is a finding of training's


def _weight(value: Any) -> bool:
    return _number(value) and math.isfinite(value) and value >= 0


def _list(each: _Check, length: int | None = None) -> _Check:
    return lambda value: type(value) is list and length in (None, len(value)) and all(map(each, value))


def _name(value: Any) -> bool:
    return type(value) is str and len(value) <= _MAX_NAME


_UNIT: Mapping[str, _Check] = {"worker": _name, "unit": _list(_whole, 3), "at": _whole}
_FIELDS: Mapping[str, Mapping[str, _Check]] = {
    "pull": {"worker": _name, "needs": _whole, "have": _list(_whole, 2)},
    "push": {**_UNIT, "seen": _whole, "weight": _weight, "keep": lambda value: type(value) is bool},
    "lease": {"worker": _name, "prefer": _whole, "first": _whole},
    "done": _UNIT,
    "hear": {"heard": _whole},
    "say": {},
}
_OPTIONAL: Mapping[str, _Check] = {
    "sums": _list(_list(_number, 2)),  # of a push to the first server
    "norm": _norm,
    "opens": _whole,
    "stands": _whole,
    "part": lambda value: _list(_number, 2)(value) and _whole(value[0]) and _norm(value[1]),
}


def _parse_header(said: bytes) -> CallHeader:
    """The head of a call: `do` names it, and its fields are of the right types. Raises MalformedCall."""
    try:
        head: Any = json.loads(said)
    except (ValueError, RecursionError) as error:
        raise MalformedCallError(f"no JSON: {error}") from error
    if not isinstance(head, dict) or not _name(head.get("do")) or head["do"] not in _FIELDS:
        raise MalformedCallError("it names no known call in 'do'")
    fields = _FIELDS[head["do"]]
    wrong = [name for name, check in fields.items() if name not in head or not check(head[name])]
    wrong += [name for name, check in _OPTIONAL.items() if name in head and not check(head[name])]
    if wrong:
        raise MalformedCallError(f"{head['do']!r} with a missing or wrong field {wrong[0]!r}")
    return head


def unit_from_header(head: CallHeader) -> WorkUnit:
    """The unit that a call is about."""
    step, share, steps = head["unit"]
    return WorkUnit(step=step, share=share, steps=steps)


def require(condition: bool, what: str) -> None:
    """Raise MalformedCall where what a call says cannot be."""
    if not condition:
        raise MalformedCallError(what)


# --- What the servers of a plan do with what is pushed ----------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """The same on all servers.

    Attributes:
        shares: units of a round.
        consistency: when units begin, and whether an update is of a round or of one unit.
        local_steps: steps of a round.
        clip_norm: the job's; None does not clip.
        clips: the servers clip, since an update is of several workers' gradients; else each worker clips its own.
    """

    shares: int
    consistency: Consistency
    local_steps: int = 1
    clip_norm: float | None = None
    clips: bool = False

    @classmethod
    def of(cls, plan: Plan, spec: ModelSpec) -> ServerConfig:
        """Those of a plan. Raises PlanError for a consistency that is not known."""
        consistency = Consistency.parse(plan.consistency or "sync")
        return cls(
            shares=plan.mesh.data_ranks,
            consistency=consistency,
            local_steps=plan.local_steps,
            clip_norm=spec.clip_norm,
            clips=spec.clip_norm is not None and consistency.waits and not plan.outer,
        )
