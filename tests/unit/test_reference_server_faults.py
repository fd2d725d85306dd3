"""What goes wrong around servers: connections, workers, servers, the user's functions."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.support.reference.model import Sgd
from tests.support.threaded_servers import SHARES, STEPS, assert_close, cluster
from trainwright.core.errors import NonFiniteLoss, PeerLost, TrainwrightError, UserCodeError
from trainwright.strategies.ps import parameter_client as worker_side


@pytest.mark.parametrize("lost", ["request", "answer"])
@pytest.mark.parametrize("server", [0, 1])
def test_a_connection_that_breaks_around_a_push_changes_nothing(
    lost: str, server: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The push comes again, and a server that applied it says the same."""
    with cluster("clip", 2, 2) as own:
        broken = break_push(monkeypatch, own.workers[0].clients, server, lost)
        own.run()
        _, _, wanted = own.by_hand()
        assert broken == [lost]
        assert_close(own.parameters(), wanted)


def break_push(monkeypatch: pytest.MonkeyPatch, mine: worker_side.ParameterClient, index: int, lost: str) -> list[str]:
    """Break the third push to a server, before it can see it, or after it has answered."""
    begin, broken, pushes = worker_side.ServerClient.begin, [], [0]

    def breaking(self: worker_side.ServerClient, head: dict[str, Any], **more: Any) -> None:
        mark = self is mine.servers[index] and head["do"] == "push" and not broken
        pushes[0] += mark
        if not mark or pushes[0] < 3:
            begin(self, head, **more)
            return
        broken.append(lost)
        if lost == "request":
            self.link.cut()
        begin(self, head, **more)
        if lost == "answer":
            self.link.answer(self._deadline())
            self.link.cut()

    monkeypatch.setattr(worker_side.ServerClient, "begin", breaking)
    return broken


@pytest.mark.parametrize("consistency", ["sync", "async", "async(pushes=5)"])
def test_a_worker_that_is_gone_between_its_pushes_to_two_servers(
    consistency: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another computes the unit again, and each server counts it once."""
    with cluster("schedule", 2, 2, consistency=consistency) as own:
        doomed, begin = own.workers[0], worker_side.ServerClient.begin
        second = doomed.clients.servers[1]

        def stopping(self: worker_side.ServerClient, head: dict[str, Any], **more: Any) -> None:
            if self is second and head["do"] == "push":
                doomed.clients.servers[0].end()  # that one has it
                doomed.leave()
                raise KeyboardInterrupt
            begin(self, head, **more)

        monkeypatch.setattr(worker_side.ServerClient, "begin", stopping)
        serving, lasting = own.serve(), own.work(own.workers[1])
        with pytest.raises(KeyboardInterrupt):
            own.work(doomed).result(30.0)
        lasting.result(30.0)
        reports = own.reports(serving)
        assert [report.step for report in reports] == [*range(1, STEPS + 1)]
        updates = {"sync": STEPS, "async": STEPS * SHARES}.get(consistency, -(-STEPS * SHARES // 5))
        assert {float(one.snapshot().state.slots["count"]) for one in own.servers} == {updates}
        if consistency == "sync":
            assert_close(own.parameters(), own.by_hand()[2])


def test_workers_join_and_leave_while_it_goes_on() -> None:
    with cluster("dividing", 2, 1, consistency="sync") as own:
        serving = own.serve()
        first = own.workers[0]
        assert len(own.work(first, 4).result(30.0)) == 4
        second = own.join()
        assert len(own.work(second, 7).result(30.0)) == 7
        first.leave()
        third = own.join()
        both = [own.work(one) for one in (second, third)]
        units = [unit for one in both for unit in one.result(30.0)]
        assert len(own.reports(serving)) == STEPS and len(units) >= STEPS * SHARES - 11
        assert_close(own.parameters(), own.by_hand()[2])


def test_a_wish_ends_with_what_was_begun_and_the_next_segment_goes_on() -> None:
    with cluster("dividing", 2, 2) as own:
        enough = threading.Event()
        serving = own.serve(1000, enough.is_set)
        working = [own.work(one) for one in own.workers]
        while own.servers[0].server.updates.version < 3:
            assert not enough.wait(0.01)
        enough.set()
        for one in working:
            one.result(30.0)
        stream = own.reports(serving)
        steps = {tag.step for tag in own.tags()}
        assert steps == {len(stream)} and 0 < len(stream) < 1000
        assert not any(report.stop_requested for report in stream[:-1])
        reports = own.run(len(stream) + 3)
        assert [report.step - len(stream) for report in reports] == [1, 2, 3]


def test_nothing_is_begun_where_the_wish_was_there_before() -> None:
    with cluster("dividing", 1, 1) as own:
        serving = own.serve(5, lambda: True)
        assert own.reports(serving) == [] and own.tags()[0].step == 0


def test_a_worker_waits_for_the_segment_that_it_is_called_for_and_for_none_that_is_over() -> None:
    with cluster("dividing", 1, 2) as own:
        early, late = own.workers
        working = own.work(early)
        assert not working.done()
        serving = own.serve(2)
        assert len(working.result(30.0)) == 2 * SHARES
        own.reports(serving)
        assert late.lease(0) is None and late.lease(0) is None
        working = own.pool.submit(late.lease, 2)
        serving = own.serve(4)
        assert working.result(30.0) is not None and late.lease(0) is None
        assert len(own.work(early).result(30.0)) == 2 * SHARES
        assert len(own.reports(serving)) == 2


@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_of_the_optimizer_is_told_by_the_server_that_had_it(rank: int) -> None:
    with cluster("dividing", 2, 1) as own:
        own.servers[rank].program.optimizer = Broken()
        serving, working = own.serve(), own.work(own.workers[0])
        errors = [one.exception(30.0) for one in (*serving, working)]
        assert isinstance(errors[rank], UserCodeError) and "in update" in errors[rank].detail
        assert [type(error) for place, error in enumerate(errors) if place != rank] == [PeerLost] * 2
        with pytest.raises(UserCodeError, match="broken on purpose"):
            own.servers[rank].snapshot()


class Broken(Sgd):
    def update(self, *_: Any) -> Any:
        raise ZeroDivisionError("broken on purpose")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_server_that_is_gone_ends_it_for_all_and_what_they_hold_is_not_sound(rank: int) -> None:
    with cluster("dividing", 2, 2) as own:
        serving = own.serve(10**6)
        working = [own.work(one) for one in own.workers]
        while not all(one.server.updates.version for one in own.servers):
            assert not serving[0].done()
        assert own.servers[rank].interrupt(20.0)
        errors = [one.exception(15.0) for one in (*serving, *working)]
        assert [type(error) for error in errors] == [PeerLost] * 4
        assert [(tag.step, tag.sound) for tag in own.tags()] == [(0, False)] * 2
        for one in own.servers:
            one.leave()
        assert [one._sound for one in own.servers] == [False, False]


def test_a_silent_server_is_lost_at_the_deadline() -> None:
    with cluster("dividing", 2, 1) as own:
        for one in (*own.servers, *own.workers):
            object.__setattr__(one.group, "deadline_s", 1.0)
        serving, working = own.serve(10**6), own.work(own.workers[0])
        with own.servers[1].server.lock:  # it answers nobody
            errors = [one.exception(15.0) for one in (serving[0], working)]
        assert [type(error) for error in errors] == [PeerLost] * 2


def test_a_loss_that_is_not_finite_is_not_pushed_and_the_worker_goes_on_without_it() -> None:
    with cluster("dividing", 1, 1) as own:
        serving, one = own.serve(1), own.workers[0]
        unit = one.lease(0)
        assert unit is not None
        whole = own.feed(0, unit.share)
        good = whole.parts[0][0]
        bad = replace(good, columns={**good.columns, "x": good.columns["x"] * np.nan})
        with pytest.raises(NonFiniteLoss):
            one.train_step(replace(whole, parts=((bad,),)))
        nothing = replace(bad, weights=np.zeros(bad.rows))
        assert one.train_step(replace(whole, parts=((nothing,),))).weight == 0
        own.work(one).result(30.0)
        (report,) = own.reports(serving)
        assert report.weight == own.problem.batch_size - good.rows


def test_a_worker_must_be_fed_the_unit_that_it_leased() -> None:
    with cluster("dividing", 1, 1) as own:
        own.serve(1)
        unit = own.workers[0].lease(0)
        assert unit is not None
        with pytest.raises(TrainwrightError, match="fed step 1 of data ranks"):
            own.workers[0].train_step(own.feed(1, unit.share))
