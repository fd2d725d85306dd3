"""The simulation has teeth: every one of these wrong drivers is caught by a few hundred schedules."""

from __future__ import annotations

import ast
import sys
from importlib import import_module
from pathlib import Path
from random import Random

import pytest

from tests.simulation.mutants import Mutant, load, load_storage, mutate
from tests.simulation.power_cuts import attack, attack_create, record
from tests.simulation.scenario import draw
from tests.simulation.store import Violation
from tests.simulation.world import simulate
from trainwright.driver import rendezvous, state_machine
from trainwright.driver.driver_state import DriverState

SCHEDULES, CUTS = 500, 1_000

MUTANTS = (
    Mutant(
        name="lets busy ranks wait",
        module="trainwright.driver.recovery",
        pattern='transition.call(sorted(state.awaiting - gone), "interrupt", explain)',
        seed=114,
    ),
    Mutant(
        name="ends before callbacks are told of the last checkpoint",
        module="trainwright.driver.segments",
        pattern="state.owes_announcement",
        replacement="False",
    ),
    Mutant(
        name="ends where a rank dies as callbacks are told of the last checkpoint",
        module="trainwright.driver.segments",
        function="_call_run",
        pattern="ref.step > saved.announced",
        replacement="ref.step > saved.announced and until > step",
    ),
    Mutant(
        name="ends every rank that does not move",
        module="trainwright.driver.recovery",
        pattern="_begin_recovery(transition, blame, explain=True)",
        replacement="_begin_recovery(transition, blame, lost=state.awaiting, kill=True)",
        seed=114,
    ),
    Mutant(
        name="calls a spare that is not up yet",
        module="trainwright.driver.membership",
        pattern="state.membership.starting if held.ready else state.membership.starting | {worker}",
        replacement="state.membership.starting",
    ),
    Mutant(
        name="starts spares without end",
        module="trainwright.driver.membership",
        pattern="state.settings.world.spares - (len(spares) - len(joining))",
        replacement="state.settings.world.spares",
    ),
    Mutant(
        name="gives one spare to two ranks",
        module="trainwright.driver.membership",
        function="assign_rank",
        pattern="state.membership.spares.without({worker})",
        replacement="state.membership.spares",
        also=("kill two", "kill all"),
    ),
    Mutant(
        name="shrinks below the fewest",
        module="trainwright.driver.membership",
        pattern="left >= world.fewest and state.usable_workers(left) > 0",
        replacement="left > 0",
        also=("never starts", "never starts", "kill two"),
        seed=24,
    ),
    Mutant(
        name="forgets who has which rank when the world shrinks",
        module="trainwright.driver.membership",
        pattern="transition.change(members=PersistentList(members), rank_of=ranks)",
        replacement="transition.change(members=PersistentList(members))",
        seed=17,
    ),
    Mutant(
        name="grows beyond its bounds",
        module="trainwright.driver.membership",
        function="start_standbys",
        pattern="state.settings.world.most",
        replacement="state.settings.world.most + 1",
    ),
    Mutant(
        name="lets a recruit join that is not up",
        module="trainwright.driver.membership",
        function="_joiners_up",
        pattern="spare.slot is not None and spare.ready",
        replacement="spare.slot is not None",
        seed=12,
    ),
    Mutant(
        name="gives ranks to more than a plan has",
        module="trainwright.driver.membership",
        pattern="change < 0",
        replacement="change < -8",
        seed=16,
    ),
    Mutant(
        name="measures plans in the middle of a run",
        module="trainwright.driver.rendezvous",
        function="begin_trials",
        pattern="not begun",
        replacement="True",
        also=("crash",),
        seed=16,
    ),
    Mutant(
        name="sets two plans aside for one failure",
        module="trainwright.driver.rendezvous",
        function="reject_plan",
        pattern="not trials.trying",
        replacement="not trials.left",
        also=("user",) * 6,
        seed=62,
    ),
    Mutant(
        name="forgets those who are to go in their groups",
        module="trainwright.driver.preemption",
        pattern='transition.call(staying, "leave")',
        also=("preempt",),
    ),
    Mutant(
        name="passes over the copy that a survivor made before its process ended",
        module="trainwright.driver.checkpointing",
        function="on_just_in_time_copy_taken",
        pattern="state.copied < taken.step <= latest_usable_step(state)",
        replacement="state.copied > taken.step",
        also=("kill",) * 2,
        seed=87,
    ),
    Mutant(
        name="forms a group without the worker that is making its last copy",
        module="trainwright.driver.recovery",
        pattern="transition.also_await(copying)",
        also=("kill",) * 2,
    ),
    Mutant(
        name="counts a copy before all keepers have delivered",
        module="trainwright.driver.checkpointing",
        pattern="not keeping.owing and not keeping.spoiled",
        replacement="not keeping.spoiled",
        also=("kill all", "kill two"),
        seed=24,
    ),
    Mutant(
        name="passes over what is in memory",
        module="trainwright.driver.rendezvous",
        pattern="state.memory.kept is not None and kept_step > state.committed",
        replacement="False",
        also=("kill all",),
        seed=38,
    ),
    Mutant(
        name="agrees on the lowest step",
        module="trainwright.driver.rendezvous",
        pattern="sorted(standing, key=lambda step: -1 if step is None else step, reverse=True)",
        replacement="sorted(standing, key=lambda step: -1 if step is None else step)",
        seed=10,
    ),
    Mutant(
        name="takes a torn state for a sound one",
        module="trainwright.driver.rendezvous",
        pattern="tags[rank].sound",
        replacement="True",
        seed=28,
    ),
    Mutant(
        name="sends nothing to newcomers",
        module="trainwright.driver.rendezvous",
        pattern="rank not in settled",
        replacement="rank not in settled and tags[rank].step is not None",
    ),
    Mutant(
        name="gives up one failure early",
        module="trainwright.driver.failure_policy",
        pattern="state.recovery.failures > settings.limits.failures",
        replacement="state.recovery.failures >= max(1, settings.limits.failures)",
        seed=11,
    ),
    Mutant(
        name="never counts a failure",
        module="trainwright.driver.failure_policy",
        pattern="transition.change(failures=state.recovery.failures + 1, failed_s=(*recent, transition.now_s))",
        replacement="transition.change(failed_s=(*recent, transition.now_s))",
        also=("crash loop",),
    ),
    Mutant(
        name="counts every sign of one failure",
        module="trainwright.driver.recovery",
        pattern="entering or again or (recovery.blame is None and not blame.peer)",
        replacement="True",
        seed=11,
    ),
    Mutant(
        name="does not count a newcomer's death",
        module="trainwright.driver.recovery",
        function="on_worker_died",
        pattern="event.worker in state.membership.starting",
        replacement="False",
        also=("start loop", "kill"),
    ),
    Mutant(
        name="recovers from the user's errors",
        module="trainwright.driver.recovery",
        function="on_call_raised",
        pattern='kind in ("user", "data")',
        replacement='kind == "data"',
        seed=61,
    ),
    Mutant(
        name="does not tell idle ranks to leave",
        module="trainwright.driver.recovery",
        pattern="_release_workers("
        "transition, frozenset(state.membership.rank_of) - state.awaiting - state.membership.starting - gone)",
    ),
    Mutant(
        name="waits for ever for survivors that are silent",
        module="trainwright.driver.recovery",
        function="on_leave_deadline",
        pattern="_replace(transition, state.awaiting, kill=True)",
        seed=14,
    ),
    Mutant(
        name="forgets whoever joins when a server is lost",
        module="trainwright.driver.dynamic_members",
        pattern="transition.also_await("
        "frozenset(worker for worker, pending in apart.items() if pending.doing in _CALLED))",
        also=("kill", "kill"),
        seed=17,
    ),
    Mutant(
        name="ends a generation with a worker that follows a chief",
        module="trainwright.driver.dynamic_members",
        function="is_dynamic",
        pattern="state.settings.world.spares_rank(state.membership.rank_of[worker])",
        replacement="state.settings.world.spares_rank(state.membership.rank_of[worker])"
        ' and state.settings.world.topology == "independent"',
        also=("kill",),
        seed=81,
    ),
    Mutant(
        name="has those judge who follow a chief",
        module="trainwright.driver.segments",
        pattern="[state.membership.members[0].worker]",
        replacement="[member.worker for member in state.membership.members]",
        seed=38,
    ),
    Mutant(
        name="takes processes over that cannot form again",
        module="trainwright.driver.membership",
        function="_reusable_workers",
        pattern='transition.settings.world.reform == "in_place"',
        replacement="True",
        also=("crash",),
    ),
    Mutant(
        name="has a process join twice that cannot",
        module="trainwright.driver.recovery",
        pattern='state.settings.world.reform == "new_process" and kind != "peer"',
        replacement="False",
        also=("storage", "storage"),
        seed=83,
    ),
    Mutant(
        name="has a process join again that was cut off",
        module="trainwright.driver.dynamic_members",
        pattern='apart.blame is not None and settings.world.reform == "new_process"',
        replacement="False",
        also=("cut", "cut"),
        seed=39,
    ),
    Mutant(
        name="waits for a server that has raised",
        module="trainwright.driver.recovery",
        pattern="dynamic_members.drop_pending(transition, worker)",
        also=("storage", "storage"),
        seed=39,
    ),
    Mutant(
        name="takes answers of older generations",
        module="trainwright.driver.state_machine",
        pattern="event.generation != state.epoch.generation or not owing or state.phase is Phase.CLOSING",
        replacement="event.worker not in state.membership.rank_of",
        also=("kill", "user"),
        seed=24,
    ),
    Mutant(
        name="does not time a hang",
        module="trainwright.driver.segments",
        function="_call_run",
        pattern="dynamic_members.arm_hang_timer(transition)",
        seed=113,
    ),
    Mutant(
        name="waits for the files of a dead uploader",
        module="trainwright.driver.membership",
        pattern="drop_upload_workers(transition, frozenset(workers))",
    ),
    Mutant(
        name="commits before all files are stored",
        module="trainwright.driver.checkpointing",
        function="_commit_if_complete",
        pattern="upload.owing",
        replacement="upload.committing",
    ),
    Mutant(
        name="names no parent",
        module="trainwright.driver.checkpointing",
        pattern='state.checkpoints.head.path if state.checkpoints.head else ""',
        replacement='""',
    ),
    Mutant(
        name="begins an upload during another",
        module="trainwright.driver.checkpointing",
        function="wants_checkpoint",
        pattern="upload is not None",
        replacement="upload is not None and upload.step == step",
    ),
    Mutant(
        name="steps on after a wish to stop",
        module="trainwright.driver.segments",
        function="proceed",
        pattern="not state.ending",
        replacement="state.position.step < state.settings.length.total_steps",
    ),
    Mutant(
        name="gives the log back during a commit",
        module="trainwright.driver.state_machine",
        pattern="transition.state.phase is Phase.CLOSING and transition.state.checkpoints.upload is None",
        replacement="transition.state.phase is Phase.CLOSING",
        also=("commit slow", "stop now"),
        seed=68,
    ),
    Mutant(
        name="ends workers that another driver has taken over",
        module="trainwright.driver.state_machine",
        pattern="membership.drop_all_workers(transition) "
        "if isinstance(event.error, RunConflict) else _kill_all(transition)",
        replacement="_kill_all(transition)",
        also=("stall",),
    ),
    Mutant(
        name="hides the steps that nobody holds any more",
        module="trainwright.driver.rendezvous",
        pattern="max(0, state.position.progress - restore_plan.step, state.position.told - restore_plan.step)",
        replacement="max(0, state.position.progress - restore_plan.step)",
        also=("crash",),
        seed=394,
    ),
    Mutant(
        name="ends the run where a checkpoint is damaged",
        module="trainwright.driver.recovery",
        pattern="bool(state.checkpoints.older) or state.phase is Phase.GATHERING",
        replacement="False",
        also=("checkpoint damaged",),
        seed=18,
    ),
    Mutant(
        name="lets workers live when the log is lost",
        module="trainwright.driver.state_machine",
        pattern="membership.drop_all_workers(transition) "
        "if isinstance(event.error, RunConflict) else _kill_all(transition)",
        replacement="membership.drop_all_workers(transition)",
        seed=11,
    ),
    Mutant(
        name="lets the best checkpoint be deleted",
        module="trainwright.driver.checkpointing",
        pattern="_paths_to_hold(state, upload.step)",
        replacement="()",
        seed=28,
    ),
    Mutant(
        name="goes on without the checkpoint of the best evaluation",
        module="trainwright.driver.segments",
        pattern="is_best_unsaved(transition.state) and transition.state.checkpoints.upload is not None",
        replacement="False",
        seed=41,
    ),
    Mutant(
        name="leaves a rank out of the evaluation",
        module="trainwright.driver.segments",
        function="on_evaluated",
        pattern="sorted(state.answers)",
        replacement="sorted(state.answers)[: max(1, len(state.answers) - 1)]",
    ),
    Mutant(
        name="clears the failures with steps done again",
        module="trainwright.driver.failure_policy",
        function="note_step",
        pattern="step > state.position.high",
        replacement="step > state.position.progress",
        also=("crash loop",),
    ),
    Mutant(
        name="lets a first failure wait",
        module="trainwright.driver.failure_policy",
        pattern="0.0 if failures < 2 else min(_MAX_BACKOFF_S, 2.0 ** min(failures - 2, 10))",
        replacement="1.0 if failures < 2 else min(_MAX_BACKOFF_S, 2.0 ** min(failures - 2, 10))",
    ),
    Mutant(
        name="passes a batch by at the first failure",
        module="trainwright.driver.failure_policy",
        function="record_crash_loop",
        pattern="loop.times < CRASH_LOOP_FAILURES",
        replacement="False",
        seed=11,
    ),
    Mutant(
        name="passes more batches by than allowed",
        module="trainwright.driver.failure_policy",
        function="record_crash_loop",
        pattern="len(state.recovery.passing) >= state.settings.limits.pass_limit",
        replacement="False",
        also=("crash loop",),
    ),
    Mutant(
        name="forgets a trace when another one is asked for",
        module="trainwright.driver.step_traces",
        pattern="(*tracing.get(event.worker, ()), rank)",
        replacement="(rank,)",
        seed=230,
    ),
    Mutant(
        name="ends before traces are written",
        module="trainwright.driver.state_machine",
        pattern="closing and not step_traces.delays_end(transition)",
        replacement="closing",
        seed=51,
    ),
    Mutant(
        name="waits for ever for traces",
        module="trainwright.driver.step_traces",
        pattern='transition.arm("trace", _END_DEADLINE_S)',
        seed=51,
    ),
    Mutant(
        name="recovers from a trace that could not be written",
        module="trainwright.driver.state_machine",
        function="_on_call_raised",
        pattern="step_traces.on_trace_raised(transition, event)",
        replacement="recovery.on_call_raised(transition, event)",
        seed=22,
    ),
)

STORAGE_MUTANTS = (
    Mutant(
        name="ends with a torn entry",
        module="trainwright.storage.run_log",
        function="_read",
        pattern="return None",
        replacement='raise StorageError("torn")',
    ),
    Mutant(
        name="writes a burnt number again",
        module="trainwright.storage.run_log",
        pattern="number = self._top + 1",
        replacement="number = head.number + 1 if head else 1",
        seed=22,
    ),
    Mutant(
        name="believes a hint that names a torn entry alone",
        module="trainwright.storage.run_log",
        pattern="self._newest(numbers) or self._newest(self._numbers(0))",
        replacement="self._newest(numbers)",
    ),
    Mutant(
        name="gives up behind a torn entry of its own",
        module="trainwright.storage.run_log",
        pattern="self._read(number) or newest",
        replacement="self._read(number)",
    ),
    Mutant(
        name="takes what a torn packed file had for lost",
        module="trainwright.storage.event_files",
        pattern="damaged[file] = str(error)\nreturn True",
        replacement="yield from self._lost({file: str(error)})",
    ),
    Mutant(
        name="takes a packed file that ends early for whole",
        module="trainwright.storage.event_files",
        pattern="number <= file.last",
        replacement="False",
        seed=66,
    ),
    Mutant(
        name="deletes batches that only a torn packed file covers",
        module="trainwright.storage.event_files",
        pattern="shared and file.path not in self._sound and self._whole(file) is None",
        replacement="False",
    ),
    Mutant(
        name="believes a summary that is torn",
        module="trainwright.storage.event_files",
        function="_stored",
        pattern="(MissingFile, ValueError, TypeError, KeyError, AttributeError)",
        replacement="MissingFile",
    ),
)
LINKS = (
    Mutant(
        name="names an entry before the disk has it",
        module="trainwright.storage.object_store",
        pattern="file.flush()\nos.fsync(file.fileno())",
    ),
    Mutant(
        name="forgets the folder of an entry",
        module="trainwright.storage.object_store",
        function="create",
        pattern="self._sync(path)",
    ),
    Mutant(
        name="replaces what another wrote",
        module="trainwright.storage.object_store",
        pattern="os.link(unnamed, place)",
        replacement="place.unlink(missing_ok=True)\nos.link(unnamed, place)",
    ),
)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_mutant_is_caught(mutant: Mutant, record_property: pytest.RecordProperty) -> None:
    code = load(mutant)
    for seed in dict.fromkeys((mutant.seed, *range(SCHEDULES))):
        try:
            simulate(draw(seed, also=mutant.also), code)
        except Exception as error:  # a wrong driver may fail in any way
            record_property("caught", f"schedule {seed}: {type(error).__name__}: {error}")
            print(f"{mutant.name}: caught by schedule {seed}: {type(error).__name__}: {str(error)[:100]}")
            return
    pytest.fail(f"{SCHEDULES} schedules did not notice a driver that {mutant.name}")


@pytest.mark.parametrize("mutant", STORAGE_MUTANTS, ids=lambda mutant: mutant.name)
def test_mutant_of_what_is_stored_is_caught(mutant: Mutant) -> None:
    code = load_storage(mutant)
    for seed in dict.fromkeys((mutant.seed, *range(CUTS))):
        try:
            attack(record(Random(seed)), Random(seed), code)
        except Exception as error:  # wrong code may fail in any way
            print(f"{mutant.name}: caught by cut {seed}: {type(error).__name__}: {str(error)[:100]}")
            return
    pytest.fail(f"{CUTS} power cuts did not notice code that {mutant.name}")


@pytest.mark.parametrize("mutant", LINKS, ids=lambda mutant: mutant.name)
def test_mutant_of_a_create_is_caught(mutant: Mutant, tmp_path: Path) -> None:
    with pytest.raises(Violation):
        attack_create(tmp_path, load_storage(mutant))


SOURCE = """
def first(state: int) -> int:
    # a comment
    return max(state, 1)


def second(state: int) -> int:
    step(state, kill=True)
    return max(state, 1)
"""
REFORMATTED = """
def first(state: int) -> int: return (max(
    state,  # another comment
    1,
))
def second(state: int) -> int: step(state,
        kill=True); return max(state, 1)
"""


def mutated(source: str, pattern: str, replacement: str = "", function: str = "") -> str:
    mutant = Mutant(name="n", module="m", pattern=pattern, replacement=replacement, function=function)
    return ast.unparse(mutate(mutant, source))


@pytest.mark.parametrize("source", (SOURCE, REFORMATTED), ids=("as written", "reformatted"))
def test_formatting_does_not_matter(source: str) -> None:
    assert "return 7\n\ndef second" in mutated(source, "max(state,   1)", "7", function="first")
    assert mutated(source, "step(state, kill=True)").endswith("int:\n    pass\n    return max(state, 1)")
    assert mutated(source, "step(state, kill=True)\nreturn max(state, 1)", function="second").endswith("pass")
    assert "for i in s:\n        go()\n" in mutated(source, "step(state, kill=True)", "for i in s:\n    go()")


@pytest.mark.parametrize("source", (SOURCE, REFORMATTED), ids=("as written", "reformatted"))
def test_a_pattern_has_to_occur_once(source: str) -> None:
    with pytest.raises(ValueError, match=r"mutant 'n': the pattern 'min\(state, 1\)' occurs 0 times in m"):
        mutated(source, "min(state, 1)", "7")
    with pytest.raises(ValueError, match=r"'max\(state, 1\)' occurs 2 times in m; .* name the function"):
        mutated(source, "max(state, 1)", "7")
    with pytest.raises(ValueError, match="occurs 0 times in m, function 'third'"):
        mutated(source, "max(state, 1)", "7", function="third")


@pytest.mark.parametrize("mutant", (*MUTANTS, *STORAGE_MUTANTS, *LINKS), ids=lambda mutant: mutant.name)
def test_reformatted_module_still_mutates(mutant: Mutant) -> None:
    source = Path(str(import_module(mutant.module).__file__)).read_text()
    mutate(mutant, ast.unparse(ast.parse(source)))


def test_missing_pattern_of_a_module() -> None:
    module = rendezvous.__name__
    with pytest.raises(ValueError, match=f"mutant 'no such': the pattern 'no_such' occurs 0 times in {module}"):
        load(Mutant(name="no such", module=module, pattern="no_such"))
    with pytest.raises(ValueError, match=r"imports tests\.unit"):
        load(Mutant(name="no such", module="tests.unit", pattern="no_such"))


def test_a_mutant_leaves_the_real_modules_alone() -> None:
    code = load(Mutant(name="other", module=rendezvous.__name__, pattern="tags[rank].sound", replacement="True"))
    assert code is not state_machine and sys.modules[state_machine.__name__] is state_machine
    assert (
        sys.modules[rendezvous.__name__] is rendezvous
        and vars(sys.modules[state_machine.__package__])["rendezvous"] is rendezvous
    )
    assert code.DriverState is DriverState, "a module that does not import the mutated one is shared"


def test_a_copy_that_is_not_mutated_passes() -> None:
    code = load(
        Mutant(name="the same", module=rendezvous.__name__, pattern="tags[rank].sound", replacement="tags[rank].sound")
    )
    assert sum(simulate(draw(seed), code).outcomes[-1] == "done" for seed in range(60)) > 20
