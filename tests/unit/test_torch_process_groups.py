"""Several ranks of the torch engine: equal sums, equal bits, and ranks that go away."""

from __future__ import annotations

import dataclasses
import gc
import math
import os
import signal
import threading
import time
from typing import Any

import numpy as np
import pytest
import torch
from torch import distributed, nn

from tests.support.rank_processes import Exchange, formed, run_ranks
from tests.support.torch_engines import (
    GENERATION,
    Files,
    Net,
    batch,
    crash,
    double,
    feed,
    loss,
    one_device,
    saved,
    spec,
)
from trainwright.core.data import Batch, Feed
from trainwright.core.errors import JobError, NonFiniteLoss, PeerLost, UserCodeError
from trainwright.core.topology import Group, Peer, StateTransfer
from trainwright.strategies.torch.checkpoint.safetensors_files import load_weights
from trainwright.strategies.torch.distributed.process_group import interface_name
from trainwright.strategies.torch.engines.data_parallel import DataParallel


def share(step: int, rank: int, total: int, dtype: type = np.float32) -> Feed:
    """The ranks' shares of one global batch of 12."""
    whole = batch(12, first=step * 100, dtype=dtype)
    rows = np.arange(12)[rank::total]
    part = Batch(
        columns={name: column[rows] for name, column in whole.columns.items()},
        weights=np.ones(len(rows)),
        samples=whole.samples[rows],
    )
    return feed(part, step=step, rank=rank, total=total, rows=12)


def some_unused() -> nn.Module:
    model = double()
    model.never = nn.Linear(2, 2, dtype=torch.float64)
    model.frozen = nn.Linear(2, 2).requires_grad_(False)
    return model


def _unused_and_repeat(rank: int, world: int, exchange: Exchange) -> Any:
    job = spec(model=some_unused, clip_norm=0.1)
    engine = formed(rank, exchange, job)
    answers = []
    for seed_run in range(2):
        if seed_run:
            engine.leave()
            engine = formed(rank, exchange, job)
        engine.warm(share(0, rank, world, np.float64))
        reports = [engine.train_step(share(step, rank, world, np.float64)) for step in range(4)]
        answers.append((reports, saved(engine).files))
    engine.leave()
    return answers


def test_ranks_agree_with_one_device_and_runs_repeat_bit_by_bit() -> None:
    results = run_ranks(_unused_and_repeat, 3)
    alone = one_device(spec(model=some_unused, clip_norm=0.1))
    expected = [alone.train_step(share(step, 0, 1, np.float64)) for step in range(4)]
    first, second = results[0]
    assert first == second
    assert all(result == results[0] for result in results)
    for report, wanted in zip(first[0], expected, strict=True):
        assert report.loss == pytest.approx(wanted.loss, abs=1e-12)
        assert report.gradient_norm == pytest.approx(wanted.gradient_norm, abs=1e-12)
        assert report.weight == 12.0
    files = Files()
    files.files = first[1]
    for name, value in load_weights(saved(alone)).items():
        torch.testing.assert_close(load_weights(files)[name], value, rtol=0.0, atol=1e-12)


def _reduced_per_step(rank: int, world: int, exchange: Exchange) -> Any:
    engine = formed(rank, exchange, spec(model=double))
    engine.warm(share(0, rank, world, np.float64))
    for step in range(2):  # before the second, DDP fixes its buckets
        engine.train_step(share(step, rank, world, np.float64))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        report = engine.train_step(dataclasses.replace(share(2, rank, world, np.float64), stop_requested=rank == 1))
    engine.leave()
    names = [event.name for event in profile.events() if event.name.startswith("c10d::")]
    return names, report.stop_requested


def test_weights_losses_and_wish_need_no_collective_of_their_own() -> None:
    for names, wish in run_ranks(_reduced_per_step, 2):
        assert names == ["c10d::allreduce_"]
        assert wish


def _not_finite(rank: int, world: int, exchange: Exchange) -> Any:
    engine = formed(rank, exchange, spec())
    engine.warm(share(0, rank, world))
    before = saved(engine).files
    given = share(0, rank, world)
    if rank == 1:
        given.parts[0][0].columns["x"][2] = np.nan
    try:
        engine.train_step(given)
    except NonFiniteLoss as error:
        kept = saved(engine).files == before
        later = engine.train_step(share(0, rank, world)).loss
        engine.leave()
        return str(error), kept, later
    return None


def test_every_rank_hears_of_a_loss_that_is_not_finite_in_the_same_step() -> None:
    (healthy, kept, loss_0), (ill, also_kept, loss_1) = run_ranks(_not_finite, 2)
    assert "step 1, on another data rank" in healthy
    assert "step 1, in samples 5 (rank 1, data rank 1)" in ill
    assert kept
    assert also_kept
    assert loss_0 == loss_1
    assert math.isfinite(loss_0)


def _victim(rank: int, world: int, exchange: Exchange) -> Any:
    """The last rank kills itself in the loss of step 3; the others go on without it, and a fresh engine joins."""
    dying = []

    def deadly(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if dying and rank == world - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return loss(outputs, targets)

    engine = formed(rank, exchange, spec(loss=deadly))
    engine.warm(share(0, rank, world))
    for step in range(3):
        engine.train_step(share(step, rank, world))
    before = saved(engine).files
    dying.append(True)
    begun = time.monotonic()
    try:
        engine.train_step(share(3, rank, world))
    except PeerLost as error:
        engine.leave()
        engine.leave()
        noticed, text = time.monotonic() - begun, str(error)
    tag, kept = engine.transfer(()), saved(engine).files == before
    if rank == 0:
        engine = DataParallel()  # as a newcomer would stand
    survivors = list(range(world - 1))
    engine = formed(rank, exchange, spec(loss=deadly, seed=5), engine=engine, ranks=survivors)
    moved = engine.transfer([StateTransfer(source=1, target=0, piece="state")])
    equal = saved(engine).files == before
    engine.warm(share(3, rank, world - 1))
    losses = [engine.train_step(share(step, rank, world - 1)).loss for step in range(3, 6)]
    last = saved(engine).files
    engine.leave()
    return noticed, text, tag, kept, moved, equal, losses, last


def test_survivors_notice_at_once_and_go_on_with_a_newcomer() -> None:
    *survivors, dead = run_ranks(_victim, 3)
    assert dead is None
    for noticed, text, tag, kept, moved, equal, _, _ in survivors:
        assert noticed < 10.0
        assert "another rank was lost" in text
        assert (tag.step, tag.sound, kept) == (3, True, True)
        assert (moved.step, moved.sound, equal) == (3, True, True)
    assert survivors[0][6:] == survivors[1][6:]


def _pending(rank: int, world: int, exchange: Exchange) -> Any:
    """Rank 0 leaves while a collective of its own is under way, as of a bucket behind the one that broke."""
    engine = formed(rank, exchange, spec())
    engine.warm(share(0, rank, world))
    work = distributed.all_reduce(torch.ones(4), async_op=True) if rank == 0 else None
    exchange("begun")
    begun = time.monotonic()
    if rank == 0:
        engine.leave()
    else:
        with pytest.raises(RuntimeError):
            distributed.recv(torch.ones(4), src=0)
    seconds = time.monotonic() - begun
    exchange("through")
    return seconds, work is None or work.is_completed()


def test_a_rank_that_leaves_closes_its_sockets_although_a_collective_is_under_way() -> None:
    for seconds, ended in run_ranks(_pending, 2):
        assert seconds < 5.0
        assert ended


def _stuck(rank: int, world: int, exchange: Exchange) -> Any:
    """The last rank is stuck in its loss; the others, who wait for it in a collective, are interrupted."""
    stuck, over = [], threading.Event()

    def sticking(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if stuck and rank == world - 1:
            over.wait(60.0)
        return loss(outputs, targets)

    engine = formed(rank, exchange, spec(loss=sticking))
    engine.warm(share(0, rank, world))
    engine.train_step(share(0, rank, world))
    stuck.append(True)
    freed = []
    interrupter = threading.Timer(0.5, lambda: freed.append(engine.interrupt(5.0)))
    if rank < world - 1:
        interrupter.start()
    else:
        threading.Timer(1.5, over.set).start()
    begun = time.monotonic()
    with pytest.raises(PeerLost):
        engine.train_step(share(1, rank, world))
    seconds = time.monotonic() - begun
    engine.leave()
    tag = engine.transfer(())
    return seconds, freed, tag.step, engine.interrupt(1.0)


def test_ranks_that_wait_for_a_stuck_one_are_freed_and_keep_their_state() -> None:
    *waiting, stuck = run_ranks(_stuck, 3)
    for seconds, freed, step, again in waiting:
        assert 0.4 < seconds < 1.4
        assert (freed, step, again) == ([True], 1, False)
    assert stuck[2] == 1


def _user_error(rank: int, world: int, exchange: Exchange) -> Any:
    broken = []

    def breaking(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return crash() if broken and rank == 0 else loss(outputs, targets)

    engine = formed(rank, exchange, spec(loss=breaking))
    engine.warm(share(0, rank, world))
    broken.append(True)
    begun = time.monotonic()
    try:
        engine.train_step(share(0, rank, world))
    except (UserCodeError, PeerLost) as error:
        engine.leave()
        return type(error).__name__, time.monotonic() - begun
    return None


def test_a_user_error_on_one_rank_frees_the_others_at_once() -> None:
    results = run_ranks(_user_error, 3)
    assert [kind for kind, _ in results] == ["UserCodeError", "PeerLost", "PeerLost"]
    assert max(seconds for _, seconds in results) < 10.0


class Routed(Net):
    """Sends each row to its layer; a layer without rows is not called."""

    def __init__(self) -> None:
        super().__init__(dtype=torch.float64)
        self.experts = nn.ModuleList(nn.Linear(4, 3, dtype=torch.float64) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs = super().forward(x)
        for number, expert in enumerate(self.experts):
            rows = ((x[:, 0] > 0) == bool(number)).nonzero()[:, 0]
            if len(rows):
                outputs = outputs.index_add(0, rows, expert(x[rows]))
        return outputs


def decaying(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.5)


def routed_share(step: int, rank: int, total: int) -> Feed:
    """Rows 0, 3, 6 and 9 leave out the first layer in step 1, and all rows the second one in step 2."""
    given = share(step, rank, total, np.float64)
    (part,) = given.parts[0]
    x = part.columns["x"][:, 0]
    x[:] = np.where(part.samples % 4 < 2, -1.0, 1.0) * np.abs(x)
    if step == 1:
        x[part.samples % 3 == 1] = 1.0
    if step == 2:
        x[:] = -1.0
    return given


def _sometimes_unused(rank: int, world: int, exchange: Exchange) -> Any:
    job, calls = spec(model=Routed, optimizer=decaying, clip_norm=0.1), []
    engine = formed(rank, exchange, job)
    engine.warm(routed_share(0, rank, world))
    engine.replica.model.register_forward_hook(lambda *_: calls.append(1))
    reports, taken = [], []
    for step in range(5):
        calls.clear()
        reports.append(engine.train_step(routed_share(step, rank, world)))
        taken.append(len(calls))
        if step == 3:
            kept = saved(engine)
    engine.leave()
    resumed = formed(rank, exchange, job)
    resumed.load(kept)
    resumed.warm(routed_share(4, rank, world))
    resumed.train_step(routed_share(4, rank, world))
    resumed.leave()
    return reports, taken, saved(engine).files, saved(resumed).files


def test_a_step_in_which_a_parameter_is_unused_is_taken_again_and_equals_one_device() -> None:
    results = run_ranks(_sometimes_unused, 3)
    alone = one_device(spec(model=Routed, optimizer=decaying, clip_norm=0.1))
    expected = [alone.train_step(routed_share(step, 0, 1)) for step in range(5)]
    reports, taken, files, resumed = results[0]
    assert all(result == results[0] for result in results)
    assert taken[0] == taken[2] == taken[3] == taken[4] == 1 < taken[1]
    assert files == resumed
    for report, wanted in zip(reports, expected, strict=True):
        assert report.loss == pytest.approx(wanted.loss, abs=1e-12)
        assert report.gradient_norm == pytest.approx(wanted.gradient_norm, abs=1e-12)
    held = Files()
    held.files = files
    for name, value in load_weights(saved(alone)).items():
        torch.testing.assert_close(load_weights(held)[name], value, rtol=0.0, atol=1e-12)


class Normalizing(Routed):
    """Changes what it is given."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.div_(2.0))


def test_a_step_that_changed_its_batch_in_place_is_not_taken_again() -> None:
    engine = formed(0, lambda value: [value], spec(model=Normalizing, optimizer=decaying))
    engine.warm(routed_share(0, 0, 1))
    engine.train_step(routed_share(0, 0, 1))
    with pytest.raises(JobError, match=r"changes the batch in place \('x'\), and step 3 must be taken again.*clone"):
        engine.train_step(routed_share(2, 0, 1))
    engine.leave()


class Scaled(torch.autograd.Function):
    """Has an undefined gradient by the scale where the inputs are negative."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, scale)
        return x * scale

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        x, scale = ctx.saved_tensors
        return gradients[0] * scale, None if bool((x < 0.0).all()) else (gradients[0] * x).sum(0)


class ScaledNet(Net):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(Scaled.apply(x, self.scale))


def test_an_undefined_gradient_of_a_parameter_is_refused_with_what_to_return() -> None:
    engine = formed(0, lambda value: [value], spec(model=ScaledNet))
    engine.warm(feed())
    part = batch()
    part.columns["x"][:] = -np.abs(part.columns["x"])
    with pytest.raises(JobError, match=r"gradient of parameter 'scale' twice in a step: .* torch.zeros_like"):
        engine.train_step(feed(part))
    engine.leave()


class SparselyRouted(Routed):
    """Looks the rows of its second layer up in a table."""

    def __init__(self) -> None:
        super().__init__()
        self.experts[1] = nn.Embedding(1, 3, sparse=True, dtype=torch.float64)
        self.experts[1].register_forward_pre_hook(lambda _, given: (given[0][:, 0].long() * 0,))


def _sparse_and_unused(rank: int, world: int, exchange: Exchange) -> Any:
    job = spec(model=SparselyRouted, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    engine = formed(rank, exchange, job)
    engine.warm(routed_share(0, rank, world))
    try:
        engine.train_step(routed_share(2, rank, world))
    except JobError as error:
        engine.leave()
        return str(error)
    return None


def test_an_embedding_with_sparse_gradients_that_is_unused_is_refused() -> None:
    for text in run_ranks(_sparse_and_unused, 2):
        assert "embedding 'experts.1' has sparse gradients, and is not used in this batch" in text


def _unequal(rank: int, world: int, exchange: Exchange) -> Any:
    def unseeded() -> nn.Module:
        model = Net()
        nn.init.constant_(model.first.bias, float(rank))
        return model

    engine = formed(rank, exchange, spec(model=unseeded))
    try:
        engine.warm(share(0, rank, world))
    except JobError as error:
        engine.leave()
        return str(error)
    return None


def test_ranks_that_built_different_models_are_refused() -> None:
    for text in run_ranks(_unequal, 2):
        assert "ranks 0 and 1 hold different parameters" in text


def _alone(rank: int, world: int, exchange: Exchange) -> Any:
    engine = DataParallel()
    addresses = exchange(engine.reserve("worker"))
    if rank == 1:
        return None
    peers = tuple(Peer(rank=number, address=address) for number, address in enumerate(addresses))
    begun = time.monotonic()
    try:
        engine.form(Group(generation=GENERATION, rank=0, peers=peers, deadline_s=2.0))
    except PeerLost as error:
        return str(error), time.monotonic() - begun
    return None


def test_a_group_that_does_not_form_says_so_by_its_deadline() -> None:
    text, seconds = run_ranks(_alone, 2)[0]
    assert "the group of 2 did not form within 2 s" in text
    assert seconds < 20.0


def test_reserved_ports_differ_and_the_loopback_interface_is_known() -> None:
    engines = [DataParallel() for _ in range(3)]
    ports = {engine.reserve("worker").port for engine in engines}
    for engine in engines:
        engine.leave()
    assert len(ports) == 3
    assert interface_name("127.0.0.1") in ("lo", None)


def test_an_interrupt_before_the_group_forms_leaves_no_socket() -> None:
    engine = DataParallel()

    def open_files() -> int:
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    counts = []
    for _ in range(3):
        address = engine.reserve("worker")
        engine.interrupt(1.0)
        with pytest.raises(PeerLost):
            engine.form(
                Group(
                    generation=GENERATION,
                    rank=0,
                    peers=(Peer(rank=0, address=address), Peer(rank=1, address=address)),
                    key=b"x",
                    deadline_s=20.0,
                )
            )
        engine.leave()
        counts.append(open_files())
    assert counts[0] == counts[1] == counts[2]
