"""Leases, gates and the deal of tensors: random schedules of workers that come, die, freeze and repeat."""

from __future__ import annotations

import math
import random
from collections import Counter, deque
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainwright.core.topology import Consistency, WorkUnit
from trainwright.strategies.ps.lease_table import ClosedRound, Grant, LeaseTable
from trainwright.strategies.ps.parameter_shards import (
    ALIGNMENT,
    ParameterShard,
    ShardSlot,
    count_busy_servers,
    place_tensors,
)
from trainwright.strategies.ps.update_applier import UpdateAdmission

# --- random schedules -------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class Worker:
    """One process of a worker; what it does next depends on what it has done."""

    name: str
    grant: Grant | None = None
    seen: dict[int, int] = field(default_factory=dict)  # by server
    pushed: set[int] = field(default_factory=set)


class Cluster:
    """Servers and workers that take turns as a random generator wants it; checks what must always hold."""

    def __init__(self, seed: int, consistency: str, servers: int, shares: int, workers: int, until: int, steps: int):
        self.random, self.servers, self.shares = random.Random(seed), servers, shares
        self.consistency = Consistency.parse(consistency)
        self.book = LeaseTable(shares=shares, start=0, consistency=self.consistency, local_steps=steps, window=4)
        self.gates: list[UpdateAdmission[tuple[WorkUnit, int, int]]] = [
            UpdateAdmission(shares=shares, consistency=self.consistency) for _ in range(servers)
        ]
        self.mail: list[deque[ClosedRound]] = [deque() for _ in range(servers)]
        self.applied: list[list[tuple[WorkUnit, ...]]] = [[] for _ in range(servers)]
        self.ages: list[int] = []
        self.closings: list[ClosedRound] = []
        self.done: Counter[WorkUnit] = Counter()
        self.now_s, self.born = 0.0, 0
        self.workers: list[Worker] = []
        for _ in range(workers):
            self.join()
        self.book.extend(until)

    def join(self) -> None:
        self.workers.append(Worker(name=f"w{self.born}"))
        self.born += 1

    def die(self, worker: Worker) -> None:
        """Wherever it is, between its pushes to two servers too."""
        self.workers.remove(worker)
        self.book.lost(worker.name)

    def act(self, worker: Worker) -> None:
        """One move of a worker: lease, pull of one server, push to one (maybe again), or tell that all have it."""
        grant = worker.grant
        if grant is None:
            self.lease(worker)
        elif len(worker.seen) < self.servers:
            server = self.random.choice([one for one in range(self.servers) if one not in worker.seen])
            if self.gates[server].version >= grant.needs:
                worker.seen[server] = self.gates[server].version
        elif len(worker.pushed) < self.servers or self.random.random() < 0.1:
            self.push(worker, grant, self.random.randrange(self.servers))
        else:
            counted = self.book.done(worker.name, grant.unit, grant.at, self.now_s)
            self.done[grant.unit] += counted
            worker.grant = None
            self.close()

    def lease(self, worker: Worker) -> None:
        free, first, again = self.free(), self.book.first([worker.name], self.now_s), self.book.again
        grant = self.book.lease(worker.name, int(worker.name[1:]), self.now_s)
        assert (grant is None) == (first is None), "those who wait are asked just when there is something for them"
        if grant is None:
            assert not free
            return
        assert not self.done[grant.unit] and (self.consistency.backup or grant.at == grant.unit.step // self.steps)
        if self.consistency.waits:
            assert grant.at - len(self.closings) <= (self.consistency.bound or 0)
        held = any(one.grant is not None and one.grant.unit == grant.unit for one in self.workers)
        assert not held or self.book.again > again, "that is a copy, and is counted"
        worker.grant, worker.seen, worker.pushed = grant, {}, set()

    @property
    def steps(self) -> int:
        return self.book._rounds._local_steps

    def free(self) -> set[tuple[int, int]]:
        """Naively: rounds and shares that may be given, are not done and that nobody holds."""
        if self.consistency.backup:
            return set()
        ahead = 4 if self.consistency.bound is None else self.consistency.bound
        held = {(one.grant.at, one.grant.unit.share) for one in self.workers if one.grant is not None}
        done = {(unit.step // self.steps, unit.share) for unit, count in self.done.items() if count}
        last = -(-self.book.until // self.steps)
        rounds = range(len(self.closings), min(len(self.closings) + ahead + 1, last))
        return {(at, share) for at in rounds for share in range(self.shares)} - held - done

    def push(self, worker: Worker, grant: Grant, server: int) -> None:
        gate, seen = self.gates[server], worker.seen[server]
        verdict = gate.offer(worker.name, grant.unit, grant.at, seen)
        applied = any(grant.unit in units for units in self.applied[server])
        assert not applied or verdict == "drop", "it is not kept for ever"
        if verdict == "apply":
            self.apply_gathered(server, grant.unit)
        elif verdict == "keep":
            gate.keep(worker.name, grant.unit, grant.at, seen, (grant.unit, grant.at, seen))
        worker.pushed.add(server)

    def apply_gathered(self, server: int, *last: WorkUnit) -> None:
        self.applied[server].append((*(unit for unit, _, _ in self.gates[server].gathered), *last))
        self.gates[server].applied_gathered()

    def close(self) -> None:
        for closing in self.book.closings():
            self.closings.append(closing)
            for mail in self.mail if self.consistency.waits else ():
                mail.append(closing)

    def hear(self, server: int) -> None:
        """A server hears of a round that is closed, and applies what it can."""
        if self.mail[server]:
            self.gates[server].close(self.mail[server].popleft())
        while (update := self.gates[server].due()) is not None:
            self.applied[server].append(tuple(unit for unit, _, _ in update.pushes))
            self.ages += [at - seen for _, at, seen in update.pushes]
            self.gates[server].applied(update)

    def turn(self) -> None:
        """Anything."""
        self.now_s += self.random.expovariate(1.0)
        kind = self.random.random()
        if kind < 0.02 and len(self.workers) > 1:
            self.die(self.random.choice(self.workers))
        elif kind < 0.04:
            self.join()
        elif kind < 0.25:
            self.hear(self.random.randrange(self.servers))
        else:  # those late in the list act seldom: they are slow, or frozen
            self.act(self.workers[int(len(self.workers) * self.random.random() ** 3)])

    def finish(self) -> None:
        """All get their turn until all is done; a worker that is frozen for good holds nobody up."""
        frozen = self.workers[-1] if len(self.workers) > 1 else None
        for _ in range(100_000):
            if self.book.over and not any(self.mail):
                break
            self.now_s += 1.0
            for server in range(self.servers):
                self.hear(server)
            for worker in list(self.workers):
                if worker is not frozen:
                    self.act(worker)
        for server in range(self.servers):
            self.hear(server)
            if self.gates[server].gathered:
                self.apply_gathered(server)
        assert self.book.over and self.book.step == self.book.until


@settings(max_examples=120, derandomize=True)
@given(
    seed=st.integers(0, 2**32),
    consistency=st.sampled_from(
        ["sync", "ssp(1)", "ssp(3)", "async", "async(pushes=2)", "async(pushes=5)", "sync(backup=1)", "sync(backup=2)"]
    ),
    servers=st.integers(1, 3),
    shares=st.integers(3, 5),
    workers=st.integers(1, 6),
    until=st.integers(1, 12),
    steps=st.integers(1, 3),
    stop=st.booleans(),
)
def test_every_unit_counts_once_on_every_server_whatever_happens(
    seed: int, consistency: str, servers: int, shares: int, workers: int, until: int, steps: int, stop: bool
) -> None:
    own = Cluster(seed, consistency, servers, shares, workers, until, steps)
    for _ in range(own.random.randrange(400)):
        own.turn()
    if stop:
        own.book.stop()
    own.finish()
    first = own.applied[0]
    step = sum(closing.steps for closing in own.closings)
    rounds = [closing.step for closing in own.closings]
    assert step == own.book.step <= until and rounds == sorted(rounds)
    every = {
        WorkUnit(step=closing.step, share=share, steps=closing.steps)
        for closing in own.closings
        for share in range(shares)
    }
    for applied in own.applied:
        assert Counter(unit for units in applied for unit in units) == Counter(every)
    assert set(own.done.values()) <= {0, 1}
    if own.consistency.waits:
        assert all(applied == first for applied in own.applied)
        assert all(list(units) == sorted(units) for units in first)
        assert all(0 <= age <= (own.consistency.bound or 0) for age in own.ages), "computed on what a round may lack"
        fewest = shares - own.consistency.backup
        assert all(len(units) >= fewest for units in first) and len(first) == len(own.closings)
    else:
        pushes, rest = own.consistency.pushes, len(every) % own.consistency.pushes
        sizes = [pushes] * (len(every) // pushes) + [rest] * (rest > 0)
        assert all([len(units) for units in applied] == sizes for applied in own.applied)
        assert {gate.version for gate in own.gates} == {len(sizes)}
    assert sum(own.gates[0].staleness().counts.values()) == len(every)


def test_a_second_segment_goes_on_and_a_wish_ends_with_what_was_begun() -> None:
    book = LeaseTable(shares=2, start=10, consistency=Consistency.parse("async"), window=3)
    book.extend(11)
    grants = [book.lease(f"w{share}", share, 0.0) for share in range(2)]
    assert [one and one.unit for one in grants] == [WorkUnit(step=10, share=0), WorkUnit(step=10, share=1)]
    assert book.lease("w2", 2, 0.0) is None, "the segment has no more"
    for worker, one in zip(("w0", "w1"), grants, strict=True):
        assert one is not None and book.done(worker, one.unit, one.at, 1.0)
    assert book.over and [closing.step for closing in book.closings()] == [10]
    book.extend(20)
    begun = book.lease("w0", 0, 2.0)
    book.stop()
    assert begun is not None and begun.at == 1 and book.until == 12 and not book.over
    assert book.lease("w1", 1, 2.0) is not None, "the other half of the step that was begun"
    assert book.lease("w2", 0, 2.0) is None


def test_local_steps_are_units_of_several_and_the_last_of_a_segment_is_shorter() -> None:
    book = LeaseTable(shares=1, start=0, consistency=Consistency.parse("sync"), local_steps=4)
    book.extend(6)
    units = []
    while not book.over:
        grant = book.lease("w0", 0, 0.0)
        assert grant is not None
        units.append((grant.unit.step, grant.unit.steps, grant.needs))
        book.done("w0", grant.unit, grant.at, 1.0)
    assert units == [(0, 4, 0), (4, 2, 1)]


def learnt(consistency: str, quick: int, slow: float = 1.0) -> tuple[LeaseTable, float]:
    """A book whose workers have done one round each, worker `slow` times slower; when that was."""
    book = LeaseTable(shares=quick + 1, start=0, consistency=Consistency.parse(consistency))
    book.extend(100)
    grants = [book.lease(f"w{share}", share, 0.0) for share in range(quick + 1)]
    for share, grant in enumerate(grants):
        assert grant is not None
        book.done(f"w{share}", grant.unit, grant.at, slow if share == quick else 1.0)
    return book, slow


def test_an_equal_worker_is_not_copied_and_a_slow_one_is_at_once() -> None:
    book, now_s = learnt("sync", 2)
    for share in range(3):
        assert book.lease(f"w{share}", share, now_s)
    assert book.lease("w3", 3, now_s + 0.5) is None and not book.first(["w3"], now_s + 0.5)
    book, now_s = learnt("sync", 2, slow=5.0)
    for share in (2, 0):
        assert book.lease(f"w{share}", share, now_s)
    mine = book.lease("w1", 1, now_s)
    assert mine is not None and book.done("w1", mine.unit, mine.at, now_s + 1.0)
    copy = book.lease("w1", 1, now_s + 1.0)
    assert copy is not None and copy.unit == WorkUnit(step=1, share=2) and book.again == 1
    assert book.lease("w3", 3, now_s + 1.0) is None, "it is out twice"


def test_an_overdue_lease_is_handed_out_again_and_the_first_push_wins() -> None:
    book, now_s = learnt("async", 1)
    frozen = book.lease("w0", 0, now_s)
    assert frozen is not None and book.due_s() is not None
    other = book.lease("w1", 1, now_s)
    assert other is not None and book.done("w1", other.unit, other.at, now_s + 1.0)
    due_s = book.due_s()
    assert due_s is not None and now_s + 3.0 < due_s < now_s + 5.0, "a few times what a unit takes"
    again = book.lease("w1", 1, due_s)
    assert again is not None and again.unit == frozen.unit
    assert book.done("w1", again.unit, again.at, due_s + 1.0)
    assert not book.done("w0", frozen.unit, frozen.at, due_s + 2.0)


def test_a_worker_that_asks_again_has_given_up_what_it_held() -> None:
    book = LeaseTable(shares=2, start=0, consistency=Consistency.parse("sync"))
    book.extend(1)
    first = book.lease("w0", 0, 0.0)
    assert first is not None and book.lease("w0", 0, 0.0) == first, "its answer was lost"


# --- the deal ---------------------------------------------------------------------------------------------


@settings(max_examples=150, derandomize=True)
@given(
    shapes=st.lists(st.lists(st.integers(1, 40), max_size=3), min_size=1, max_size=12),
    kinds=st.lists(st.sampled_from(["trained", "trained", "frozen", "buffer"]), min_size=12, max_size=12),
    servers=st.integers(1, 6),
    cut=st.booleans(),
)
def test_shards_hold_every_byte_once_and_nearly_as_many_each(
    shapes: list[list[int]], kinds: list[str], servers: int, cut: bool
) -> None:
    tensors = [
        ShardSlot(name=f"t{number}", shape=tuple(shape), dtype="float32", size=4 * math.prod(shape), kind=kind)  # type: ignore[arg-type]
        for number, (shape, kind) in enumerate(zip(shapes, kinds, strict=False))
    ]
    shards = place_tensors(tensors, servers, cut=cut)
    assert shards == place_tensors(tensors, servers, cut=cut)
    for tensor in tensors:
        pieces = [slot for shard in shards for slot in shard.slots if slot.name == tensor.name]
        held = [{slot.name for slot in shard.slots} for shard in shards]
        assert sum(slot.size for slot in pieces) == tensor.size
        assert sum(tensor.name in names for names in held) == len(pieces), "a server has one piece at most"
        edges = sorted(slot.rows for slot in pieces if slot.rows)
        assert not edges or (edges[0][0] == 0 and edges[-1][1] == tensor.shape[0])
        assert all(before[1] == after[0] for before, after in pairwise(edges))
        assert cut or len(pieces) == 1
    trained = [(one.shape[0] if one.shape else 1, one.size) for one in tensors if one.kind == "trained"]
    assert not cut or count_busy_servers(trained, servers) == sum(shard.trained_bytes > 0 for shard in shards)
    for kind in ("trained", "frozen"):
        _check_balance(tensors, shards, kind)
    _check_places(shards)


def _check_balance(tensors: list[ShardSlot], shards: tuple[ParameterShard, ...], kind: str) -> None:
    """No server holds more than a fair share, the largest piece, and a row of each tensor that was cut."""
    pieces = [slot for shard in shards for slot in shard.slots if slot.kind == kind]
    rows = {slot.name: slot.size // (slot.rows[1] - slot.rows[0]) for slot in pieces if slot.rows}
    total = sum(tensor.size for tensor in tensors if tensor.kind == kind)
    most = total / len(shards) + max((slot.size for slot in pieces), default=0) + sum(rows.values())
    for shard in shards:
        assert sum(slot.size for slot in shard.slots if slot.kind == kind) <= most


def _check_places(shards: tuple[ParameterShard, ...]) -> None:
    """Slots do not overlap, are aligned, and the kinds lie one after the other."""
    for shard in shards:
        end = 0
        for slot in shard.slots:
            assert slot.offset >= end and slot.offset % ALIGNMENT == 0
            end = slot.offset + slot.size
            limit = {"trained": shard.trained_bytes, "buffer": shard.pulled_bytes, "frozen": shard.size_bytes}
            assert end <= limit[slot.kind]


@pytest.mark.parametrize("servers", [2, 3, 4])
def test_a_large_tensor_is_spread_evenly(servers: int) -> None:
    table = ShardSlot(name="table", shape=(1000, 16), dtype="float32", size=64_000)
    bias = ShardSlot(name="bias", shape=(16,), dtype="float32", size=64)
    loads = [sum(slot.size for slot in shard.slots) for shard in place_tensors([table, bias], servers)]
    assert max(loads) - min(loads) <= 2 * 16 * 4
