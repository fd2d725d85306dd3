"""What stages do in a step, seen from inside the model, and what goes wrong in one of them."""

from __future__ import annotations

import functools
import os
import re
import signal
import socket
import struct
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.conformance import problems, torch_case
from tests.support.conformance.harness import Pool, World
from tests.support.conformance.problems import CLASSES, FEATURES, PROBLEMS
from tests.support.conformance.staged_model import plan, spec, streamed
from tests.support.conformance.unbroken_runs import assert_same
from tests.support.own_signals import signal_self
from trainwright.core.data import Feed
from trainwright.core.errors import JobError, PeerLost, UserCodeError
from trainwright.core.plan import Plan, section_of
from trainwright.strategies.cost_model.pipeline_schedules import stage_operations

WIDE = torch.float64
SOON_S = 15.0  # half of the group's deadline
MANY = 400_000  # floats of a row that are given on
SOME = 20_000  # bytes: more than all that is sent beside them, and less than a socket holds whatever was read of it


class Mark(torch.autograd.Function):
    """Nothing, but that its backward is told."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, tell: Any) -> Tensor:
        ctx.tell = tell
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> Any:
        ctx.tell()
        return slopes[0], None


class Noted(nn.Module):
    """A layer that writes down what is done with it: operation, its forwards so far, and its own number."""

    def __init__(self, number: int, folder: Path) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, FEATURES * FEATURES, dtype=WIDE).reshape(FEATURES, FEATURES))
        self.number, self.folder, self.count = number, folder, 0

    def forward(self, hidden: Tensor) -> Tensor:
        note = functools.partial(self.note, self.count)
        if not hidden.is_meta:
            note("forward")
            self.count += 1
        weight = Mark.apply(self.weight, functools.partial(note, "weights"))
        return torch.tanh(Mark.apply(hidden, functools.partial(note, "inputs")) @ weight)

    def note(self, micro_batch: int, what: str) -> None:
        with (self.folder / f"{os.getpid()}").open("a") as file:
            file.write(f"{what} {micro_batch} {self.number}\n")


def noted(sections: int, folder: Path) -> nn.Module:
    return nn.Sequential(*(Noted(number, folder) for number in range(sections)))


ORDERS = {
    "gpipe": (3, 1, 4), "1f1b": (3, 1, 2), "interleaved": (2, 2, 4), "zero_bubble": (3, 1, 4), "zbv": (3, 2, 6),
    "": (2, 1, 3),
}  # fmt: skip


@pytest.mark.parametrize("schedule", ORDERS)
def test_stages_do_what_the_schedule_says(pool: Pool, schedule: str, tmp_path: Path) -> None:
    stages, chunks, count = ORDERS[schedule]
    cuts = tuple(map(str, range(1, stages * chunks)))
    layout = plan(stages, schedule=schedule, chunks=chunks, cuts=cuts, accumulation=count)
    model = functools.partial(noted, stages * chunks, tmp_path)
    with World(pool, "torch", layout, spec(model, loss=torch_case.cross_entropy, clip_norm=None)) as world:
        world.start(_feeds(layout))
        for file in tmp_path.iterdir():
            file.unlink()
        world.train([_feeds(layout)])
        for stage, pid in enumerate(world.pids):
            found = [line.split() for line in (tmp_path / str(pid)).read_text().splitlines()]
            done = [(what, int(number) % count, int(section)) for what, number, section in found]
            assert done == expected(schedule, stage, stages, chunks, count)


def test_steps_that_follow_each_other_do_what_the_schedule_says(pool: Pool, tmp_path: Path) -> None:
    """Three steps without a drain, and one after it: micro-batches are counted on."""
    stages, count = 3, 4
    layout = plan(stages, schedule="pipedream", cuts=("1", "2"), accumulation=count)
    model = functools.partial(noted, stages, tmp_path)
    with World(pool, "torch", layout, spec(model, loss=torch_case.cross_entropy, clip_norm=None)) as world:
        world.start(_feeds(layout))
        for file in tmp_path.iterdir():
            file.unlink()
        world.train(streamed([_feeds(layout, step) for step in range(4)], drains=(3,)))
        for stage, pid in enumerate(world.pids):
            found = [line.split() for line in (tmp_path / str(pid)).read_text().splitlines()]
            done = [(what, int(number) - count, int(section)) for what, number, section in found]  # rehearsed ones
            meant = []
            for step, (begun, followed) in enumerate([(False, True), (True, True), (True, False), (False, False)]):
                each = expected("pipedream", stage, stages, 1, count, begun=begun, followed=followed)
                meant += [(what, number + step * count, section) for what, number, section in each]
            assert done == meant


def expected(
    schedule: str, stage: int, stages: int, chunks: int, count: int, **streaming: bool
) -> list[tuple[str, int, int]]:
    """What layers see of a stage's order: the first section's input has no gradient."""
    seen, asked = [], {"stage": stage, "stages": stages, "micro_batches": count, "chunks": chunks}
    for kind, number, chunk in stage_operations(schedule, **asked, **streaming):
        section = section_of(schedule, stage=stage, stages=stages, chunk=chunk)
        kinds = ("inputs", "weights") if kind == "backward" else (kind,)
        seen += [(each, number, section) for each in kinds if each != "inputs" or section]
    return seen


def _feeds(layout: Plan, step: int = 0) -> list[Feed]:
    problem = PROBLEMS["ragged"]
    return problems.feeds(problem, layout, step, problems.batches(problem)[step], problems.columns(problem))


class Faulty(nn.Module):
    """A layer that goes wrong after so many forwards: in forward, in backward, or by another shape.

    Args:
        after: rehearsed ones included.
    """

    def __init__(self, fault: str, after: int, width: int = FEATURES) -> None:
        super().__init__()
        self.lift = nn.Linear(width, width, dtype=WIDE)
        self.fault, self.left = fault, after

    def forward(self, hidden: Tensor) -> Tensor:
        made = torch.tanh(self.lift(hidden))
        if made.is_meta:
            return made
        self.left -= 1
        if self.left >= 0 or not self.fault:
            return made
        if self.fault == "forward":
            raise ZeroDivisionError("a forward went wrong on purpose")
        if self.fault == "shape":
            return made[:, :-1]
        return Mark.apply(made, self.fail)

    def fail(self) -> None:
        raise ZeroDivisionError("a backward went wrong on purpose")


def faulty(faults: tuple[str, ...], after: int) -> nn.Module:
    """A row of layers of which some go wrong."""
    return nn.Sequential(*(Faulty(fault, after) for fault in faults), nn.Linear(FEATURES, CLASSES, dtype=WIDE))


FAULTS = {
    "forward of a middle stage": ("1f1b", 1, ("", "forward", ""), 1),
    "forward of a last stage": ("1f1b", 1, ("", "", "forward"), 2),
    "backward of a first stage": ("gpipe", 1, ("backward", "", ""), 0),
    "backward of a middle stage": ("zero_bubble", 1, ("", "backward", ""), 1),
    "forward of a fold's way back": ("zbv", 2, ("", "", "", "", "forward", ""), 1),
    "another shape": ("1f1b", 1, ("", "shape", ""), 1),
}


@pytest.mark.parametrize("name", FAULTS)
def test_the_stage_that_failed_has_the_users_traceback(pool: Pool, name: str) -> None:
    schedule, chunks, faults, victim = FAULTS[name]
    cuts = tuple(map(str, range(1, 3 * chunks)))
    layout = plan(3, schedule=schedule, chunks=chunks, cuts=cuts)
    model = functools.partial(faulty, faults, 10)  # four micro-batches are rehearsed, four trained
    with World(pool, "torch", layout, spec(model, loss=torch_case.cross_entropy)) as world:
        world.start(_feeds(layout))
        world.train([_feeds(layout)])
        before = torch_case.state(world.files())
        begun = time.monotonic()
        for number, rank in enumerate(world.ranks):
            rank.send("train", [_feeds(layout, 1)[number]])
        outcomes = [rank.outcome() for rank in world.ranks]
        assert time.monotonic() - begun < SOON_S, "peers waited for their deadline"
        failed = outcomes[victim].error
        if "shape" in faults:
            assert isinstance(failed, JobError)
            assert re.search(r"gives \(\d+, 5\) .* where it gave \(\d+, 6\)", str(failed))
        else:
            assert isinstance(failed, UserCodeError) and "on purpose" in failed.detail
            assert "test_stages.py" in failed.detail
        others = [outcome.error for number, outcome in enumerate(outcomes) if number != victim]
        assert all(isinstance(error, PeerLost) for error in others), others
        assert_same(before, torch_case.state(world.files()))


def test_another_shape_is_named_in_an_evaluation_too(pool: Pool) -> None:
    schedule, chunks, faults, victim = FAULTS["another shape"]
    layout = plan(3, schedule=schedule, chunks=chunks, cuts=("1", "2"))
    model = functools.partial(faulty, faults, 10)
    with World(pool, "torch", layout, spec(model, loss=torch_case.cross_entropy)) as world:
        world.start(_feeds(layout))
        world.train([_feeds(layout)])
        for number, rank in enumerate(world.ranks):
            rank.send("evaluate", [_feeds(layout, 1)[number]])
        failed = world.ranks[victim].outcome().error
        assert isinstance(failed, JobError)
        assert re.search(r"gives \(\d+, 5\) .* where it gave \(\d+, 6\)", str(failed))
        world.ranks[victim].call("leave")
        others = [rank.outcome().error for number, rank in enumerate(world.ranks) if number != victim]
        assert all(isinstance(error, PeerLost) for error in others), others


class Wide(nn.Module):
    """Gives on more than sockets hold, and stops its process in the third backward: the first that is no rehearsal."""

    def __init__(self, stopped: Path) -> None:
        super().__init__()
        self.lift, self.left, self.stopped = nn.Linear(FEATURES, 1, dtype=WIDE), 3, stopped

    def forward(self, hidden: Tensor) -> Tensor:
        made = self.lift(hidden)
        return (made if made.is_meta else Mark.apply(made, self.stop)).expand(-1, MANY)

    def stop(self) -> None:
        self.left -= 1
        if not self.left:
            self.stopped.write_text(str(os.getpid()))
            signal_self(signal.SIGSTOP)


class Mean(nn.Module):
    """Classes of a mean; its fourth backward, whose gradient is the last, waits until the other stage has stopped."""

    def __init__(self, stopped: Path) -> None:
        super().__init__()
        self.head, self.left, self.stopped = nn.Linear(1, CLASSES, dtype=WIDE), 4, stopped

    def forward(self, hidden: Tensor) -> Tensor:
        answer: Tensor = self.head(hidden.mean(1, keepdim=True))
        return answer if answer.is_meta else Mark.apply(answer, self.wait)

    def wait(self) -> None:
        self.left -= 1
        deadline = time.monotonic() + SOON_S
        while not self.left and not (self.stopped.exists() and _stopped(int(self.stopped.read_text() or os.getpid()))):
            assert time.monotonic() < deadline, "the other stage does not stop"
            time.sleep(0.02)


def wide(stopped: Path) -> nn.Module:
    return nn.Sequential(Wide(stopped), Mean(stopped))


@pytest.mark.parametrize("dies", ["receiver", "sender"])
def test_an_end_within_a_message_is_told_at_once(pool: Pool, dies: str, tmp_path: Path) -> None:
    """The gradient that the first stage does not read is larger than what the system keeps of it."""
    layout = plan(2, schedule="gpipe", cuts=("1",), accumulation=2)
    build = functools.partial(wide, tmp_path / "stopped")
    world = World(pool, "torch", layout, spec(build, loss=torch_case.cross_entropy))
    try:
        world.start(_feeds(layout))
        for number, rank in enumerate(world.ranks):
            rank.send("train", [_feeds(layout)[number]])
        deadline = time.monotonic() + SOON_S
        while not _stopped(world.pids[0]) or _unread(world.pids[0]) < SOME:  # of the last gradient
            assert time.monotonic() < deadline, "nothing is on its way"
            time.sleep(0.02)
        victim = 0 if dies == "receiver" else 1
        begun = time.monotonic()
        world.ranks[victim].strike()
        os.kill(world.pids[0], signal.SIGCONT)
        outcome = world.ranks[1 - victim].outcome()
        assert isinstance(outcome.error, PeerLost), outcome
        assert time.monotonic() - begun < SOON_S, "the other waited for its deadline"
    finally:
        world.close(failed=True)


def _stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def _unread(pid: int) -> int:
    """Bytes that wait in a process's Unix sockets to be read, by the kernel's unix_diag(7)."""
    names = {os.readlink(each) for each in Path(f"/proc/{pid}/fd").iterdir()}
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 4) as kernel:  # NETLINK_SOCK_DIAG
        kernel.settimeout(SOON_S)
        # SOCK_DIAG_BY_FAMILY with NLM_F_REQUEST | NLM_F_DUMP; all states, any socket, UDIAG_SHOW_RQLEN.
        asked = struct.pack("=BBHIIIII", socket.AF_UNIX, 0, 0, 0xFFFFFFFF, 0, 0x10, 0xFFFFFFFF, 0xFFFFFFFF)
        kernel.send(struct.pack("=IHHII", 16 + len(asked), 20, 0x301, 1, 0) + asked)
        found = 0
        while True:
            data = kernel.recv(1 << 16)
            while data:
                size, kind = struct.unpack_from("=IH", data)
                assert kind != 2, "the kernel has no unix_diag"
                if kind == 3:  # NLMSG_DONE
                    return found
                (inode,) = struct.unpack_from("=I", data, 20)
                place = 32
                while place < size:
                    length, attribute, unread = struct.unpack_from("=HHI", data, place)
                    found += unread if attribute == 4 and f"socket:[{inode}]" in names else 0  # UNIX_DIAG_RQLEN
                    place += length + 3 & ~3
                data = data[size + 3 & ~3 :]


class Sparse(nn.Sequential):
    """Its second layer is given a sparse tensor."""

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self[1](self[0](inputs).to_sparse())
        return outputs


class Dense(nn.Linear):
    """Takes a sparse tensor."""

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs.to_dense())


def sparse() -> nn.Module:
    return Sparse(nn.Linear(FEATURES, 4, dtype=WIDE), Dense(4, CLASSES, dtype=WIDE))


def test_a_stage_that_gives_what_the_next_cannot_take_is_refused(pool: Pool) -> None:
    layout = plan(2, schedule="1f1b", cuts=("1",))
    world = World(pool, "torch", layout, spec(sparse, loss=torch_case.cross_entropy))
    try:
        with pytest.raises(JobError, match="sparse"):
            world.form()
    finally:
        world.close(failed=True)
