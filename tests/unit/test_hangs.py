"""Hangs, as the driver decides about them: how long it waits, whom it asks, and what it says."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.driver_harness import Story
from trainwright.core import events
from trainwright.driver import messages as m
from trainwright.driver.driver_state import Phase
from trainwright.worker.worker import thread_stacks


def progressed(story: Story, step: int, after_s: float) -> Story:
    story.now_s += after_s - 1.0  # a tick of the story is a second
    return story.tell(m.StepsCompleted(generation=story.state.epoch.generation, step=step))


def timer_s(story: Story) -> float:
    return next(timer.after_s for timer in story.all(m.SetTimer) if timer.name == "hang")


def test_a_deadline_that_the_job_gives_is_kept() -> None:
    story = Story(hang_deadline_s=7.0).running()
    assert timer_s(story) == 7.0 and timer_s(progressed(story, 1, 5.0)) == 7.0


@pytest.mark.parametrize(("waited_s", "deadline_s"), [(0.5, 120.0), (6.0, 180.0), (200.0, 900.0)])
def test_without_one_it_is_learned_from_the_longest_wait(waited_s: float, deadline_s: float) -> None:
    story = Story(hang_deadline_s=None).running()
    assert timer_s(story) == 900.0, "the first step may compile"
    assert timer_s(progressed(story, 1, waited_s)) == deadline_s
    assert timer_s(progressed(story, 2, 0.1)) == deadline_s, "the longest counts, not the last"


def test_evaluations_get_the_longest() -> None:
    story = progressed(Story(hang_deadline_s=None, evaluate_steps=4).running(), 1, 0.5).segment(4).snapshot(4)
    assert story.state.phase is Phase.EVALUATING
    assert story.state.hang_deadline_s == timer_s(story) == 900.0


def test_ranks_that_do_not_move_say_where_they_stand_and_the_culprit_s_words_go_into_its_failure() -> None:
    story = Story(hang_deadline_s=5.0).running().expires("hang")
    assert [(call.worker, call.argument) for call in story.calls("interrupt")] == [(0, True), (1, True)]
    generation = story.state.epoch.generation
    story.tell(m.CallReturned(worker=1, generation=generation, verb="interrupt", value="in forward()"))
    assert story.emitted(events.Stacks) == [events.Stacks(worker=1, rank=1, node="n1", text="in forward()")]
    story.raises(0, "run", "peer", RuntimeError("gone")).expires("leave")
    (failed,) = story.emitted(events.Failed)
    assert failed.rank == 1 and "stack traces of rank 1:\nin forward()" in failed.detail
    late = m.CallReturned(worker=1, generation=generation, verb="interrupt", value="too late")
    assert not story.tell(late).wanted


def test_other_failures_ask_for_no_stacks() -> None:
    story = Story().running().tell(m.WorkerDied(worker=0, cause="killed"))
    assert [call.argument for call in story.calls("interrupt")] == [False]


def test_the_stacks_of_a_process_show_where_each_thread_waits() -> None:
    begun, over = threading.Event(), threading.Event()

    def hung_in_user_code() -> None:
        begun.set()
        over.wait(30)

    thread = threading.Thread(target=hung_in_user_code, name="stepper")
    thread.start()
    begun.wait(10)
    found = thread_stacks(thread.ident)
    with ThreadPoolExecutor(1) as others:
        elsewhere = others.submit(thread_stacks, thread.ident).result(10)
    over.set()
    thread.join()
    assert found.startswith("thread stepper (steps):") and "hung_in_user_code" in found
    assert "test_the_stacks_of_a_process" not in found, "not the thread that asks"
    names = [line for line in elsewhere.splitlines() if line.startswith("thread ")]
    assert names[:2] == ["thread stepper (steps):", "thread MainThread:"], "the text is cut at its end"


def test_the_deadline_that_the_job_gives_holds_for_the_copy_of_a_checkpoint_too() -> None:
    story = Story(hang_deadline_s=7.0, call_deadline_s=180.0).running().segment(4)
    assert story.state.phase is Phase.SNAPSHOTTING
    assert [timer.after_s for timer in story.all(m.SetTimer) if timer.name == "hang"][-1:] == [7.0]
    assert [call.verb for call in story.expires("hang").all(m.CallWorker) if call.verb == "interrupt"] == ["interrupt"]
