"""Runs ranks of an engine as plain processes through the documented order of calls, with a deadline on every answer."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections import ChainMap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing import forkserver
from secrets import token_bytes
from typing import Any

from tests.support.conformance import rank as rank_process
from trainwright.core.data import Feed, StepReport
from trainwright.core.engine import ModelSpec
from trainwright.core.plan import Plan
from trainwright.core.topology import Generation, Group, Peer, StateTag, StateTransfer

PRINT_S = 2.0  # for the stack traces of a silent rank
DEVICE = "cpu"  # of all ranks; see tests/gpu/test_several_ranks.py
ANSWER_S, GROUP_S = 120.0, 100.0  # the first compilation by Inductor on a machine takes 40 s of two quiet cores


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a verb came to: a value, an error of the rank, or the end of its process."""

    value: Any = None
    error: Exception | None = None
    text: str = ""
    dead: bool = False


class Rank:
    """One process."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("forkserver")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=rank_process.main, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()

    def send(self, verb: str, *arguments: Any) -> None:
        """Ask for a verb."""
        self._pipe.send((verb, arguments))

    def outcome(self, deadline_s: float = ANSWER_S) -> Outcome:
        """Wait for the answer; a rank that is silent for too long is killed and fails the test."""
        try:
            if not self._pipe.poll(deadline_s):
                assert self._process.pid is not None
                os.kill(self._process.pid, signal.SIGUSR1)
                self._process.join(PRINT_S)
                self.kill()
                raise AssertionError(f"process {self._process.pid} did not answer within {deadline_s:g} s")
            kind, value, text = self._pipe.recv()
        except (EOFError, ConnectionError):
            return Outcome(dead=True, text="the process ended")
        return Outcome(value=value) if kind == "returned" else Outcome(error=value, text=text)

    def call(self, verb: str, *arguments: Any) -> Any:
        """Ask and wait for the value; an error of the rank is raised here with the rank's own traceback as a note."""
        self.send(verb, *arguments)
        return value_of(self.outcome())

    def strike(self) -> None:
        """Kill the process, whatever it does."""
        self._process.kill()

    def kill(self) -> None:
        """End the process."""
        self.strike()
        self._process.join(10.0)
        self._pipe.close()


def _end_fork_server() -> None:
    """Kill the fork server of this process: it ends by itself only when no forked process holds its pipe any more."""
    server: Any = forkserver._forkserver
    if server._forkserver_pid is not None:
        os.kill(server._forkserver_pid, signal.SIGKILL)
    server._stop()


class Pool:
    """Idle processes by framework.

    Importing a framework takes seconds, so ranks are forked from a process that has imported and done nothing else.

    Args:
        modules: what that process imports.

    Attributes:
        open: whether this process has one. It can have no second one.
    """

    open = False

    def __init__(self, modules: Iterable[str] = ()) -> None:
        assert not Pool.open, "there is a pool: without its fork server, its ranks could not be killed any more"
        Pool.open = True
        _end_fork_server()  # one that other tests started has imported less, and would not import more
        multiprocessing.set_forkserver_preload(["pytest", rank_process.__name__, *modules])
        self._idle: dict[str, list[Rank]] = {}

    def take(self, framework: str, count: int) -> list[Rank]:
        """Processes, used or new."""
        idle = self._idle.setdefault(framework, [])
        return [idle.pop() if idle else Rank() for _ in range(count)]

    def give_back(self, framework: str, ranks: Sequence[Rank]) -> None:
        """Take back processes whose engine has left its group."""
        self._idle.setdefault(framework, []).extend(ranks)

    def close(self) -> None:
        """End all."""
        for ranks in self._idle.values():
            for rank in ranks:
                rank.kill()
        self._idle = {}
        Pool.open = False


class World:
    """The ranks of one run, through as many generations as a test wants.

    Args:
        pool: where processes come from.
        framework: of the engine, for the pool.
        plan: names the engine, says how many workers and who is fed.
        spec: of the job.
        reusable: whether a process may run an engine that has left its group again.
        fresh: use new processes only.
    """

    def __init__(
        self, pool: Pool, framework: str, plan: Plan, spec: ModelSpec, *, reusable: bool = True, fresh: bool = False
    ) -> None:
        self._pool, self._framework, self._reusable = pool, framework, reusable
        self.plan, self.spec = plan, spec
        self._fresh = fresh or not reusable
        self.ranks = [self._process() for _ in range(plan.processes)]
        self._built = [False] * plan.processes
        self._generation, self._serving = 0, False
        self.groups: list[Group] = []
        self.pids: list[int] = self.every("open", lambda number: (plan,))

    def start(self, feed: list[Feed] | None = None, *, source: int = 0) -> list[StateTag]:
        """Form, build, take the state of rank `source`, and warm; the tags at which all stand."""
        self.form()
        return self.settle(source, feed)

    def form(
        self, deadline_s: float = GROUP_S, own_s: Mapping[int, float] | None = None, answer_s: float = ANSWER_S
    ) -> list[StateTag]:
        """A new generation: reserve, exchange addresses, form; and build at once in processes that have not.

        Args:
            answer_s: deadline of each of these.
            own_s: deadlines of ranks that have one of their own.
        """
        own = own_s or {}
        groups = [replace(group, deadline_s=own.get(group.rank, deadline_s)) for group in self.reserve(deadline_s)]
        new = [number for number, built in enumerate(self._built) if not built]
        for number, rank in enumerate(self.ranks):
            rank.send("form", groups[number])
            if number in new:
                rank.send("build", self.spec, self.plan)
        answers = [
            [rank.outcome(answer_s) for _ in range(1 + (number in new))] for number, rank in enumerate(self.ranks)
        ]
        tags = [[value_of(outcome) for outcome in outcomes][-1] for outcomes in answers]
        self._built = [True] * len(self.ranks)
        self._tags: list[StateTag] = tags
        return tags

    def rebuild(self, spec: ModelSpec) -> None:
        """All build another job in the group that stands; `settle` follows."""
        self.spec = spec
        self._tags = self.every("build", lambda number: (spec, self.plan))

    def built(self, number: int) -> None:
        """This rank has built, in a group of its own."""
        self._built[number] = True

    def form_without(self, absent: int, deadline_s: float) -> list[Outcome]:
        """What becomes of the others when a rank dies before it has joined; a new process takes its place."""
        groups = self.reserve(deadline_s)
        self.ranks[absent].kill()
        others = [(rank, group) for rank, group in zip(self.ranks, groups, strict=True) if group.rank != absent]
        for rank, group in others:
            rank.send("form", group)
        outcomes = [rank.outcome() for rank, _ in others]
        self._admit(absent, self._process())
        return outcomes

    def rejoin(self, number: int, deadline_s: float = GROUP_S) -> None:
        """A new process takes a dead one's place in the group that stands; the others are not told."""
        self._admit(number, self._process())
        rank, group = self.ranks[number], self.groups[number]
        rank.call("reserve", group.peers[number].role)
        rank.call("form", replace(group, deadline_s=deadline_s))
        rank.call("build", self.spec, self.plan)
        self._built[number] = True

    def reserve(self, deadline_s: float = GROUP_S) -> list[Group]:
        """A new generation as each rank is told of it, once all have bound a port."""
        self._generation += 1
        generation = Generation(token=1, number=self._generation)
        addresses = self.every("reserve", lambda number: (self.plan.role_of(number),))
        roles = map(self.plan.role_of, range(len(addresses)))
        peers = tuple(
            Peer(rank=number, address=address, role=role)
            for number, (address, role) in enumerate(zip(addresses, roles, strict=True))
        )
        devices = (DEVICE,) * self.plan.devices_per_worker
        shared: dict[str, Any] = {
            "generation": generation, "key": token_bytes(), "devices": devices, "deadline_s": deadline_s
        }  # fmt: skip
        self.groups = [Group(rank=rank, peers=peers, **shared) for rank in range(len(self.ranks))]
        return self.groups

    def settle(self, source: int, feed: list[Feed] | None) -> list[StateTag]:
        """Transfer from `source` to all others, or what it does not hold from the first of its kind; and warm."""
        tags = self._tags
        moves = [
            StateTransfer(source=holder, target=rank, piece=piece)
            for rank, tag in enumerate(tags)
            for piece in sorted(tag.pieces)
            for holder in [self._holder(piece, source)]
            if rank != holder
        ]
        moved: list[StateTag] = self.every("transfer", lambda number: (moves,))
        if feed is not None:
            self.warm(feed)
        return moved

    def _holder(self, piece: str, source: int) -> int:
        """`source` where it holds a piece, or the first rank that stands where it does and holds it."""
        tags = self._tags
        there = [rank for rank, tag in enumerate(tags) if piece in tag.pieces and tag.step == tags[source].step]
        return source if source in there else there[0]

    def warm(self, feed: list[Feed]) -> None:
        """The throwaway step. In the coordinator topology the others serve from here on."""
        self._follow()
        self._led("warm", [(one,) for one in feed])

    def train(self, steps: Sequence[list[Feed]]) -> list[list[StepReport]]:
        """The reports of each rank that steps (rank 0 alone in the coordinator topology)."""
        self._follow()
        return self._led("train", [([feeds[number] for feeds in steps],) for number in range(len(self.ranks))])

    def train_with_fault(self, steps: Sequence[list[Feed]], victim: int, fault: str) -> tuple[list[Outcome], float]:
        """What becomes of every rank when `fault` strikes `victim` in the last step, and the seconds it took.

        `gone` strikes from outside, where a rank has no loss that could fail.

        All have left the group afterwards, and a dead process has made room for a new one.
        """
        self._follow()
        for number, rank in enumerate(self.ranks):
            if number == 0 or not self._coordinated:
                armed = fault if number == victim else ""
                rank.send("train", [feeds[number] for feeds in steps], "" if armed == "gone" else armed)
        if fault == "gone":
            self.ranks[victim].strike()
        start = time.monotonic()
        outcomes = [rank.outcome() for rank in self.ranks]
        spent_s = time.monotonic() - start
        self._serving = False
        for number, outcome in enumerate(outcomes):
            if outcome.dead:
                self.ranks[number].kill()
                self._admit(number, self._process())
        return outcomes, spent_s

    def leave(self) -> None:
        """All leave the group, rank 0 first; followers return from serving then."""
        self.ranks[0].call("leave")
        for rank in self.ranks[1:]:
            rank.send("leave")
        for rank in self.ranks[1:]:
            for _ in range(1 + self._serving):
                value_of(rank.outcome())
        self._serving = False

    def replace(self, number: int) -> None:
        """A newcomer instead of a rank that has left."""
        newcomer = self._process()
        self._retire(self.ranks[number])
        self._admit(number, newcomer)

    def files(self, name: str = "") -> Mapping[str, bytes]:
        """The files of all ranks that can be asked, as a checkpoint holds them."""
        asked = self.ranks[:1] if self._serving else self.ranks
        merged: dict[str, bytes] = {}
        for rank in asked:
            merged.update(rank.call("files", name))
        return merged

    def each_files(self) -> list[Mapping[str, bytes]]:
        """The files of each whole: every rank's own, or those of the ranks that hold the model together."""
        files = [rank.call("files") for rank in (self.ranks[:1] if self._serving else self.ranks)]
        mesh = self.plan.mesh
        if mesh.size != len(files):
            return files
        replicas = [rank // (mesh.shard * mesh.tensor) % mesh.data for rank in range(mesh.size)]
        held = [
            [each for each, one in zip(files, replicas, strict=True) if one == number] for number in range(mesh.data)
        ]
        return [dict(ChainMap(*each)) for each in held]

    def every(self, verb: str, arguments: Callable[[int], tuple[Any, ...]] = lambda number: ()) -> list[Any]:
        """Ask all ranks at once; their values."""
        for number, rank in enumerate(self.ranks):
            rank.send(verb, *arguments(number))
        outcomes = [rank.outcome() for rank in self.ranks]
        return [value_of(outcome) for outcome in outcomes]

    def close(self, failed: bool = False) -> None:
        """Give processes back; all are ended where the test failed or they cannot be used again."""
        if not failed and self._reusable:
            self.leave()
        for rank in self.ranks:
            if failed:
                rank.kill()
            else:
                self._retire(rank)

    def __enter__(self) -> World:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.close(failed=kind is not None)

    @property
    def _coordinated(self) -> bool:
        return self.plan.topology == "coordinator"

    def _follow(self) -> None:
        if self._coordinated and not self._serving:
            for rank in self.ranks[1:]:
                rank.send("follow")
            self._serving = True

    def _led(self, verb: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        leading = self.ranks[:1] if self._coordinated else self.ranks
        for rank, given in zip(leading, arguments, strict=False):
            rank.send(verb, *given)
        outcomes = [rank.outcome() for rank in leading]
        return [value_of(outcome) for outcome in outcomes]

    def _process(self) -> Rank:
        return Rank() if self._fresh else self._pool.take(self._framework, 1)[0]

    def _admit(self, number: int, rank: Rank) -> None:
        """A process for a place, with a fresh engine."""
        self.pids[number] = rank.call("open", self.plan)
        self.ranks[number], self._built[number] = rank, False

    def _retire(self, rank: Rank) -> None:
        if self._reusable:
            self._pool.give_back(self._framework, [rank])
        else:
            rank.kill()


def value_of(outcome: Outcome) -> Any:
    """The value, or the rank's error with its traceback as a note."""
    if outcome.dead:
        raise AssertionError(outcome.text)
    if outcome.error is not None:
        outcome.error.add_note(f"in the rank's process:\n{outcome.text}")
        raise outcome.error
    return outcome.value


SOON_S = 15.0  # on a loaded machine; the group's own deadline is twice that
