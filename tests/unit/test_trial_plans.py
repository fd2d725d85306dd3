"""Plans on trial: what the driver does where one of them, or all, cannot be measured."""

from __future__ import annotations

import pytest

from tests.simulation.plans import Plans, staged
from tests.support.driver_harness import Story
from trainwright.core import events
from trainwright.core.errors import PeerLost, UserCodeError
from trainwright.core.topology import StateTag
from trainwright.driver import messages as m
from trainwright.driver.driver_state import Phase
from trainwright.driver.messages import ProbeRequest, ReserveRequest

PLANS = Plans(plans=(staged(1, 2, "first"), staged(2, 2, "second")))


def probing(**changes: object) -> Story:
    """All ranks measure the first plan."""
    story = Story(**{"layouts": PLANS, "failures": 0, **changes}).up().formed().returns("restore", StateTag(step=0))
    assert {type(call.argument) for call in story.calls("probe")} == {ProbeRequest}
    return story


def tried(story: Story) -> list[str]:
    """The plan of the generation that begins."""
    orders: list[ReserveRequest] = [call.argument for call in story.calls("reserve")]
    return sorted({order.plan.strategy for order in orders if order.plan})


def test_who_loses_a_peer_to_an_error_of_the_plan_on_trial_is_no_failure() -> None:
    story = probing().raises(1, "probe", "peer", PeerLost("rank 0 is gone"))
    story.raises(0, "probe", "user", UserCodeError("too large for this plan"))
    assert story.state.recovery.failures == 0 and not story.state.recovery.failed_s
    assert story.state.phase is Phase.RESERVING and tried(story) == ["second"]


def test_peers_lost_for_no_reason_while_the_first_plan_is_tried_are_one() -> None:
    story = probing().raises(1, "probe", "peer", PeerLost("rank 0 is gone"))
    story.raises(0, "probe", "peer", PeerLost("rank 1 is gone"))
    assert story.all(m.ReleaseLease)[0].outcome == "failed"


def test_trials_that_are_given_up_leave_nothing_of_the_plan_that_was_tried() -> None:
    story = probing(layouts=Plans(plans=(staged(1, 3, "first"), staged(3, 3, "second"))), workers=3, min_workers=2)
    story.returns("probe", 1.0).returns("leave", None).formed().returns("restore", StateTag(step=0))
    story.tell(m.WorkerDied(worker=2, cause="killed"))
    story.raises(0, "probe", "peer", PeerLost("gone")).raises(1, "probe", "peer", PeerLost("gone")).expires("shrink")
    assert tried(story) == ["first"] and story.emitted(events.Resized)[0].workers == 2
    assert not story.emitted(events.Replanned), "the run works under its own plan"


@pytest.mark.parametrize(("total_steps", "then"), [(1300, "second"), (1100, "first")])
def test_as_many_are_measured_as_the_time_allows_that_forming_groups_really_takes(total_steps: int, then: str) -> None:
    """Each event takes a second here: eight until the first was measured."""
    story = probing(total_steps=total_steps, probe_share=0.02).returns("probe", 1.0)
    story.returns("leave", None)
    assert tried(story) == [then] and bool(story.emitted(events.Probed)) == (then == "first")
