"""The independent topology: workers step alone against servers, and what comes of it is what one device does.

All in float64, with uneven shares. What is timed by chance changes who computes what, and in `sync` no bit.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.conformance import problems, torch_case
from tests.support.conformance.cases import CASES
from tests.support.conformance.harness import Pool
from tests.support.conformance.problems import PROBLEMS, Problem
from tests.support.conformance.server_processes import ENGINES, Served
from trainwright.core.errors import NonFiniteLoss, PeerLost

STEPS = 12
BY = {"rtol": 1e-9, "atol": 1e-12}
ALL = replace(PROBLEMS["weights"], name="all", batch_size=21, rows=104, dropout=0.3, schedule=True, clip=True)
ONE_DEVICE = next(case for case in CASES if case.name == "torch-one-device")
PARALLEL = next(case for case in CASES if case.name == "torch-data-parallel")


@pytest.fixture(params=sorted(ENGINES))
def framework(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def assert_close(found: dict[str, Any], expected: Any) -> None:
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, err_msg=name, **BY)


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)


@pytest.mark.parametrize(
    ("name", "servers", "workers"),
    [("ragged", 2, 3), ("clip", 3, 2), ("weights", 1, 2), ("empty_shares", 3, 3), ("silent_step", 2, 2)],
)
def test_sync_is_one_device(pool: Pool, framework: str, name: str, servers: int, workers: int) -> None:
    with Served(pool, framework, replace(PROBLEMS[name], steps=STEPS), servers, workers) as own:
        start, reports = own.parameters(), own.run(5) + own.run(STEPS)
        losses, norms, parameters = own.by_hand(start, STEPS)
        assert [report.step for report in reports] == [*range(1, STEPS + 1)]
        np.testing.assert_allclose([report.loss for report in reports], losses, **BY)
        if own.problem.clip:
            np.testing.assert_allclose([report.gradient_norm for report in reports], norms, **BY)
        assert_close(own.parameters(), parameters)


def run(pool: Pool, problem: Problem, servers: int, workers: int, **plan: Any) -> dict[str, Any]:
    with Served(pool, "torch", problem, servers, workers, **plan) as own:
        own.run(STEPS)
        return own.state()


def test_ssp_0_is_sync_bit_by_bit_whoever_computes_and_however_many_servers_there_are(pool: Pool) -> None:
    problem = replace(ALL, steps=STEPS, clip=False)  # servers add up their parts of a norm
    first = run(pool, problem, 2, 3)
    assert_same(run(pool, problem, 2, 3, consistency="ssp(0)"), first)
    assert_same(run(pool, problem, 1, 3), first)


def test_layers_are_waited_for_one_by_one_over_tcp_and_no_bit_is_another(pool: Pool) -> None:
    problem = replace(ALL, steps=STEPS, clip=False)
    assert_same(run(pool, problem, 2, 3, far=True), run(pool, problem, 2, 3))


def test_dropout_is_that_of_data_parallelism(pool: Pool) -> None:
    problem = replace(ALL, steps=STEPS)
    with PARALLEL.world(pool, problem, 2) as world:
        world.start(PARALLEL.feeds(problem, 2, range(1))[0])
        world.train(PARALLEL.feeds(problem, 2, range(STEPS)))
        expected = torch_case.parameters(world.files())
    with Served(pool, "torch", problem, 2, 2) as own:
        own.run(STEPS)
        assert_close(own.parameters(), expected)


@pytest.mark.parametrize("consistency", ["async", "async(scaled)"])
def test_one_worker_alone_is_plain_training(pool: Pool, framework: str, consistency: str) -> None:
    problem = replace(PROBLEMS["schedule"], steps=STEPS, clip=True)
    with Served(pool, framework, problem, 2, 1, consistency=consistency) as own:
        start, reports = own.parameters(), own.run(STEPS)
        _, norms, parameters = own.by_hand(start, STEPS)
        np.testing.assert_allclose([report.gradient_norm for report in reports], norms, **BY)
        assert_close(own.parameters(), parameters)


def test_one_worker_with_updates_of_two_pushes_is_a_loop_that_accumulates_two_batches(pool: Pool) -> None:
    """The learning rate is that of the newest step; a segment's last update is of the push that is left."""
    problem = replace(PROBLEMS["schedule"], steps=STEPS)
    with Served(pool, "torch", problem, 2, 1, consistency="async(pushes=2)") as own:
        start, reports = own.parameters(), own.run(5) + own.run(STEPS)
        found = own.parameters()
    net = torch_case.Net(problem)
    net.load_state_dict({name.removeprefix("model/"): torch.from_numpy(value) for name, value in start.items()})
    rule = torch_case.optimizer(problem.optimizer, net.parameters())
    data, batches = problems.columns(problem), problems.batches(problem, STEPS)
    for steps in ((0, 1), (2, 3), (4,), (5, 6), (7, 8), (9, 10), (11,)):
        rule.zero_grad()
        for ids in (batches[step] for step in steps):
            rows = {name: torch.from_numpy(array[ids]) for name, array in data.items()}
            losses = torch_case.cross_entropy(net(*(rows[name] for name in problem.inputs)), rows["y"])
            (losses.sum() / sum(len(batches[step]) for step in steps)).backward()
        rule.param_groups[0]["lr"] = problems.RATE * problems.schedule(steps[-1], STEPS)
        rule.step()
    assert_close(found, {f"model/{name}": value.numpy() for name, value in net.state_dict().items()})
    assert [report.weight for report in reports] == [len(ids) for ids in batches]


@pytest.mark.parametrize("consistency", ["async", "async(pushes=2)", "ssp(2)", "sync(backup=1)"])
def test_every_unit_is_applied_once(pool: Pool, consistency: str) -> None:
    """Adam counts the updates of each parameter, on whatever server it is."""
    problem = replace(PROBLEMS["empty_shares"], batch_size=12, steps=9)
    with Served(pool, "torch", problem, 2, 3, consistency=consistency) as own:
        reports = own.run(9)
        state = own.state()
    counts = {float(value) for name, value in state.items() if name.endswith("/step")}
    assert counts == {{"async": 27.0, "async(pushes=2)": 14.0}.get(consistency, 9.0)}
    if consistency != "sync(backup=1)":
        assert [report.weight for report in reports] == [len(ids) for ids in problems.batches(own.problem, 9)]


@pytest.mark.parametrize("servers", [1, 3])
def test_checkpoints_go_from_one_device_to_servers_and_back(pool: Pool, servers: int) -> None:
    problem = replace(PROBLEMS["schedule"], steps=STEPS)
    feeds = ONE_DEVICE.feeds(problem, 1, range(STEPS))
    with ONE_DEVICE.world(pool, problem, 1) as world:
        world.start(feeds[0])
        world.train(feeds[:5])
        early = world.files()
        world.train(feeds[5:])
        expected = torch_case.state(world.files())
    with Served(pool, "torch", problem, servers, 2) as own:
        own.load(early)
        assert_same(own.state(), torch_case.state(early))
        own.run(9)
        middle = own.files()
    with Served(pool, "torch", problem, 2, 1) as own:
        own.load(middle)
        own.run(STEPS)
        late = own.files()
    assert_close({name: value for name, value in torch_case.state(late).items() if value.dtype.kind == "f"},
                 {name: value for name, value in expected.items() if value.dtype.kind == "f"})  # fmt: skip
    with ONE_DEVICE.world(pool, problem, 1) as world:
        world.form()
        world.ranks[0].call("load", late)
        assert_same(torch_case.state(world.files()), torch_case.state(late))


@pytest.mark.parametrize("outer", ["average", "nesterov(0.7,0.9)"])
def test_local_steps_are_those_of_a_loop_by_hand(pool: Pool, outer: str) -> None:
    """Rounds of 4 steps of two shares each. Without momentum, since a worker that is quick may take either share."""
    problem = replace(PROBLEMS["ragged"], steps=STEPS, accumulation=1, optimizer="plain")
    with Served(pool, "torch", problem, 2, 2, local_steps=4, outer=outer) as own:
        start = own.parameters()
        for until in (4, 8, 12):
            own.run(until)
        found = own.parameters()
    assert_close(found, by_hand(problem, start, outer))


def by_hand(problem: Problem, start: dict[str, Any], outer: str) -> dict[str, Any]:
    """Rounds of 4 local steps of two workers, and the outer step of torch's own SGD."""
    nets = [torch_case.Net(problem) for _ in range(3)]
    given = {name.removeprefix("model/"): torch.from_numpy(value.copy()) for name, value in start.items()}
    for net in nets:
        net.load_state_dict(given)
    whole, workers = nets[0], nets[1:]
    inner = [torch_case.optimizer(problem.optimizer, net.parameters()) for net in workers]
    rate, momentum = (0.7, 0.9) if outer != "average" else (1.0, 0.0)
    upper = torch.optim.SGD(whole.parameters(), lr=rate, momentum=momentum, nesterov=momentum > 0)
    data, steps = problems.columns(problem), problems.batches(problem, STEPS)
    for first in range(0, STEPS, 4):
        weights = []
        for share, (net, rule) in enumerate(zip(workers, inner, strict=True)):
            net.load_state_dict(whole.state_dict())
            for ids in steps[first : first + 4]:
                rows = {name: torch.from_numpy(array[ids[share::2]]) for name, array in data.items()}
                rule.zero_grad()
                torch_case.cross_entropy(net(*(rows[name] for name in problem.inputs)), rows["y"]).mean().backward()
                rule.step()
            weights.append(sum(len(ids[share::2]) for ids in steps[first : first + 4]))
        for mine, *theirs in zip(*(net.parameters() for net in nets), strict=True):
            went = [weight * (after.detach() - mine.detach()) for weight, after in zip(weights, theirs, strict=True)]
            mine.grad = -sum(went[1:], start=went[0]) / sum(weights)
        upper.step()
    return {f"model/{name}": value.numpy() for name, value in whole.state_dict().items()}


def test_a_killed_worker_changes_nothing(pool: Pool, framework: str) -> None:
    with Served(pool, framework, replace(PROBLEMS["ragged"], steps=STEPS), 2, 3) as own:
        start = own.parameters()
        own.serve(STEPS)
        own.workers[0].send("work", own.problem, own.plan, own.first, "kill", 5)
        for one in own.workers[1:]:
            one.send("work", own.problem, own.plan, own.first)
        assert own.workers[0].outcome().dead
        own.workers.pop(0).kill()
        reports = own.ended()
        losses, _, parameters = own.by_hand(start, STEPS)
        np.testing.assert_allclose([report.loss for report in reports], losses, **BY)
        assert_close(own.parameters(), parameters)


def test_a_loss_that_is_not_finite_names_samples_and_is_not_pushed(pool: Pool) -> None:
    with Served(pool, "torch", replace(PROBLEMS["dividing"], steps=2), 2, 2) as own:
        own.serve(2)
        for one in own.workers:
            one.send("work", own.problem, own.plan, own.first, "nan")
        errors = [one.outcome().error for one in own.workers]
        assert all(isinstance(error, NonFiniteLoss) and len(error.samples) == 12 for error in errors)
        own.close(failed=True)
        own.servers = own.workers = []


def test_servers_are_not_spared(pool: Pool, framework: str) -> None:
    """A dead server ends everybody's work, soon."""
    with Served(pool, framework, replace(PROBLEMS["dividing"], steps=10_000), 2, 2) as own:
        own.serve(10_000)
        own.work()
        own.servers[1].strike()
        outcomes = [one.outcome() for one in (own.servers[0], *own.workers)]
        assert [type(outcome.error) for outcome in outcomes] == [PeerLost] * 3
        own.servers.pop(1).kill()
