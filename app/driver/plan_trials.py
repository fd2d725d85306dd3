"""Trials of plans before the first step: each plan is timed in a rendezvous epoch of its own, on the same processes.

All ranks time a plan with throwaway steps and rebuild their engine afterwards. A plan that fails is set aside, and the
fastest is chosen. The plan that would run without trials comes first: the driver recovers from failures of its
processes as it would later, and an error that all plans raise is reported as the error of this plan.
"""

from __future__ import annotations

from dataclasses import replace

from trainwright.core.errors import TrainwrightError
from trainwright.core.events import Noted
from trainwright.core.plan import Plan
from trainwright.driver import messages as m
from trainwright.driver.checkpointing import hang_deadline_s
from trainwright.driver.driver_state import DriverState, Phase, Transition
from trainwright.driver.messages import PlanTrials, ProbeRequest
from trainwright.driver.persistent_collections import PersistentList
from trainwright.driver.shutdown import end_run

PROBE_STEPS, PROBE_SECONDS = 8, 3.0  # of steps that are timed, at most; a step that takes longer is timed once


def begin_trials(turn: Transition, acquired: m.LeaseAcquired) -> None:
    """Measure, where there is something to choose from and nothing of the run is there yet."""
    layouts, begun = turn.settings.world.layouts, acquired.head or acquired.kept or acquired.living
    if layouts is not None and len(layouts.plans) > 1 and not begun:
        turn.change(trials=PlanTrials(left=tuple(range(len(layouts.plans)))))


def next_candidate(turn: Transition) -> Plan | None:
    """The plan to try next, for the generation that begins; none where there are not the workers for it."""
    trials, layouts = turn.state.trials, turn.settings.world.layouts
    if trials is None or layouts is None:
        return None
    plan = layouts.plans[trials.left[0]]
    if plan.workers != len(turn.state.membership.members):
        _end_trials(turn)
        return None
    turn.change(trials=replace(trials, trying=True, since_s=trials.since_s or turn.now_s))
    return plan


def begin_probe(turn: Transition) -> None:
    """All ranks stand ready under a plan: have its steps timed."""
    turn.enter(Phase.PROBING)
    turn.call_all("probe", ProbeRequest(steps=PROBE_STEPS, seconds=PROBE_SECONDS))
    turn.arm("hang", hang_deadline_s(turn.state))


def on_probe_returned(turn: Transition) -> None:
    """All ranks have told what a step took them: the next plan's turn."""
    trials = _current_trials(turn.state)
    step_s = {**trials.step_s, trials.left[0]: max(turn.state.answers.values())}
    trials = replace(trials, left=trials.left[1:], step_s=step_s, trying=False)
    turn.change(trials=trials if _is_worthwhile(turn, trials) else _cut_short(trials))
    turn.disarm()
    turn.enter(Phase.GATHERING, blame=None)
    turn.call_all("leave")
    turn.arm("leave", turn.settings.deadlines.leave_deadline_s)


def _is_worthwhile(turn: Transition, trials: PlanTrials) -> bool:
    """Whether there is time for another plan, by what those so far took; the one that goes on is formed once more."""
    share, tried = turn.settings.limits.probe_share, len(trials.step_s) + len(trials.aside)
    run_s = turn.settings.length.total_steps * min(trials.step_s.values())
    return share is None or (turn.now_s - trials.since_s) * (tried + 2) / tried <= share * run_s


def _cut_short(trials: PlanTrials) -> PlanTrials:
    """The rest is not measured."""
    why = "forming groups takes too long beside the run for it to be measured"
    return replace(trials, left=(), aside={**trials.aside, **dict.fromkeys(trials.left, why)})


def is_optional_trial(state: DriverState) -> bool:
    """Whether what happens concerns a plan on trial that the run can do without."""
    return state.trials is not None and state.trials.trying and state.trials.left[0] > 0


def reject_plan(turn: Transition, error: Exception) -> None:
    """The plan on trial fails, unless it was set aside already: others raise as well, or lose their peers."""
    trials, layouts = _current_trials(turn.state), turn.settings.world.layouts
    if not trials.trying:
        return
    assert layouts is not None, "plans are tried"
    place = trials.left[0]
    why = error.what if isinstance(error, TrainwrightError) else f"{type(error).__name__}: {error}"
    aside, first = {**trials.aside, place: why}, trials.first or error
    turn.change(trials=replace(trials, left=trials.left[1:], aside=aside, first=first, trying=False))
    turn.emit(Noted(text=f"{layouts.plans[place].name} is set aside, since it failed when it was tried: {why}"))


def settle_trials(turn: Transition) -> bool:
    """Nobody is at work under a plan: whether the run can go on, under the quickest one when all were tried."""
    state = turn.state
    if is_optional_trial(state) and state.recovery.blame is not None:
        reject_plan(turn, state.recovery.blame.error)
    trials, layouts = turn.state.trials, turn.settings.world.layouts
    if trials is None or trials.left:
        return True
    if not trials.step_s:
        end_run(turn, "failed", trials.first)
        return False
    assert layouts is not None, "plans were tried"
    chosen, event = layouts.measured(trials.step_s, trials.aside)
    _end_trials(turn)
    turn.adjust_policy(layouts=chosen)
    turn.emit(replace(event, seconds=turn.now_s - trials.since_s))
    return True


def _end_trials(turn: Transition) -> None:
    """End the trials; all ranks restart from the initial state."""
    members = PersistentList(replace(member, told=False) for member in turn.state.membership.members)
    turn.change(trials=None, plan=None, members=members)


def _current_trials(state: DriverState) -> PlanTrials:
    assert state.trials is not None, "no plan is on trial"
    return state.trials
