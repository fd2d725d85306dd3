"""Servers and workers of the reference engine: what comes of them is what one device does, or a loop by hand."""

from __future__ import annotations

import functools
from dataclasses import replace

import numpy as np
import pytest

from tests.support.conformance import problems, reference_case
from tests.support.conformance.problems import PROBLEMS
from tests.support.reference import state as states
from tests.support.reference.model import Array, LossWithGradient, Mlp, Sgd
from tests.support.threaded_servers import SHARES, STEPS, Arrays, Cluster, Files, assert_close, cluster
from trainwright.core.plan import Mesh


@pytest.mark.parametrize("name", ["ragged", "clip", "schedule", "weights", "silent_step", "empty_shares"])
@pytest.mark.parametrize(("servers", "workers"), [(1, 1), (2, 3), (3, 4)])
def test_sync_is_one_device(name: str, servers: int, workers: int) -> None:
    with cluster(name, servers, workers) as own:
        reports = own.run(5) + own.run()
        losses, norms, wanted = own.by_hand()
        assert [report.step for report in reports] == [*range(1, STEPS + 1)]
        np.testing.assert_allclose([report.loss for report in reports], losses, rtol=0, atol=1e-12)
        if own.problem.clip:
            np.testing.assert_allclose([report.gradient_norm for report in reports], norms, rtol=0, atol=1e-12)
        assert_close(own.parameters(), wanted)
        stale = own.servers[0].staleness()
        assert stale.counts == {0: SHARES * STEPS} and stale.unit == "steps"
        assert [(tag.step, tag.sound) for tag in own.tags()] == [(STEPS, True)] * servers


def test_the_same_bits_whoever_computes_them() -> None:
    found = set()
    for servers, workers, consistency in ((1, 1, "sync"), (2, 3, "ssp(0)"), (3, 2, "sync")):
        with cluster("weights", servers, workers, consistency=consistency) as own:
            own.run()
            found.add(b"".join(value.tobytes() for _, value in sorted(own.parameters().items())))
    assert len(found) == 1


@pytest.mark.parametrize("consistency", ["ssp(2)", "async", "async(scaled)", "async(pushes=4)", "sync(backup=1)"])
def test_every_unit_counts_once(consistency: str) -> None:
    """Adam counts the updates of each server."""
    with cluster("schedule", 2, 3, consistency=consistency) as own:
        reports = own.run(5) + own.run()
        updates = STEPS if consistency[0] == "s" else STEPS * SHARES
        if consistency == "async(pushes=4)":
            updates = 4 + 6  # of 15 and of 21 pushes: a segment's last update is of those that are left
        counts = {float(one.snapshot().state.slots["count"]) for one in own.servers}
        assert counts == {updates} and [report.step for report in reports] == [*range(1, STEPS + 1)]
        stale = own.servers[0].staleness()
        assert sum(stale.counts.values()) == STEPS * SHARES
        rows = sum(len(ids) for ids in problems.batches(own.problem, STEPS))
        assert sum(report.weight for report in reports) == rows
        assert consistency != "ssp(2)" or max(stale.counts) <= 2


def plain(parameters: object) -> Sgd:
    return Sgd(learning_rate=0.1)


def linear(outputs: Array, target: Array) -> LossWithGradient:
    """A loss whose gradient does not depend on the parameters."""
    slope = 1.0 + target
    return LossWithGradient(outputs.sum(axis=1) * slope, np.repeat(slope[:, None], outputs.shape[1], axis=1))


@pytest.mark.parametrize(("servers", "workers"), [(1, 1), (2, 3)])
def test_updates_of_several_pushes_add_up_to_each_sample_once(servers: int, workers: int) -> None:
    """Pushes of workers that come in any order stay in the workers' memory until their update."""
    job = {"model": functools.partial(Mlp, (problems.FEATURES, problems.CLASSES)), "optimizer": plain, "loss": linear}
    with cluster("dividing", servers, workers, job=job, consistency="async(pushes=4)", mesh=Mesh(data=8)) as own:
        own.run()
        rows = np.concatenate(problems.batches(own.problem, STEPS))
        data, found = problems.columns(own.problem), own.parameters()
    went = -0.1 / (4 * own.problem.batch_size / 8) * (data["x"][rows] * (1.0 + data["y"][rows])[:, None]).sum(axis=0)
    wanted = own.start["model/layers.0.weight"] + went[:, None]
    np.testing.assert_allclose(found["model/layers.0.weight"], wanted, rtol=0, atol=1e-12)


def test_one_local_step_and_the_mean_of_parameters_is_sync() -> None:
    with cluster("ragged", 2, 2, job={"optimizer": plain}) as own:
        own.run()
        wanted = own.parameters()
    with cluster("ragged", 2, 2, job={"optimizer": plain}, outer="average") as own:
        own.run()
        assert_close(own.parameters(), wanted)


@pytest.mark.parametrize("outer", ["average", "nesterov(0.7,0.9)"])
def test_local_steps_are_those_of_a_loop_by_hand(outer: str) -> None:
    """Rounds of 5, 5 and 2 steps; each share has a worker, so that it meets the optimizer's state that it made."""
    with cluster("ragged", 2, 1, job={"optimizer": plain}, local_steps=5, outer=outer) as own:
        reports = own.run()
        assert [report.step for report in reports] == [*range(1, STEPS + 1)]
        assert_close(own.parameters(), rounds_by_hand(own, outer))


def rounds_by_hand(own: Cluster, outer: str) -> Arrays:
    """Each share steps alone, then their means by weight are taken."""
    held, speed = {name: value.copy() for name, value in own.start.items()}, dict.fromkeys(own.start, 0.0)
    data, steps = problems.columns(own.problem), problems.batches(own.problem, STEPS)
    for start in range(0, STEPS, 5):
        mine = steps[start : start + 5]
        total, mean = sum(map(len, mine)), dict.fromkeys(held, 0.0)
        for share in range(SHARES):
            now = held
            for ids in mine:  # by_hand steps with momentum: one step at a time has none
                now = reference_case.by_hand(own.problem, now, [ids[share::SHARES]], data)[2]
            weight = sum(len(ids[share::SHARES]) for ids in mine) / total
            mean = {name: mean[name] + weight * (now[name] - held[name]) for name in held}
        if outer == "average":
            held = {name: held[name] + mean[name] for name in held}
        else:
            speed = {name: 0.9 * speed[name] + mean[name] for name in held}
            held = {name: held[name] + 0.7 * (mean[name] + 0.9 * speed[name]) for name in held}
    return held


def test_workers_converge_on_a_convex_problem() -> None:
    """Least squares with a linear model, each unit of all rows: stale updates end at the one minimum too."""
    problem = replace(PROBLEMS["tokens"], batch_size=60, rows=60, accumulation=1)
    model = functools.partial(Mlp, (problems.FEATURES, problems.CLASSES))
    with cluster(problem, 2, 2, job={"model": model}, consistency="async", mesh=Mesh()) as own:
        own.run(600)
        found, data = own.state().parameters, problems.columns(problem)
    inputs = np.hstack([data["x"], np.ones((60, 1))])
    for column in range(problems.CLASSES):
        kept = data["m"][:, column] > 0
        best = np.linalg.lstsq(inputs[kept], data["t"][kept, column], rcond=None)[0]
        mine = [*found["layers.0.weight"][:, column], found["layers.0.bias"][column]]
        np.testing.assert_allclose(mine, best, rtol=0, atol=1e-3)
    assert sum(own.start["model/layers.0.weight"].ravel() ** 2) > 0.1, "it began elsewhere"


def test_a_checkpoint_is_of_full_names_and_loads_in_any_layout() -> None:
    with cluster("schedule", 3, 2) as own:
        own.run(5)
        files = {}
        for one in own.servers:
            one.save(one.snapshot(), writer := Files())
            files.update(writer.files)
        middle = own.state()
    with cluster("schedule", 2, 1) as own:
        own.every([*own.servers, *own.workers], lambda one: one.load(Files(files)))
        assert [tag.step for tag in own.tags()] == [5, 5]
        again = own.state()
        assert states.to_bytes(states.fit_state(again, middle)) == states.to_bytes(middle)
        kept = [one.snapshot() for one in own.servers]
        own.run()
        wanted = own.parameters()
        for one, copy in zip(own.servers, kept, strict=True):
            one.restore(copy)
        own.run()
        assert_close(own.parameters(), wanted)
