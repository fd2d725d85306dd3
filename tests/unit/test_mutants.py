"""The simulation has teeth: every one of these wrong drivers is caught by a few hundred schedules."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from tests.simulation.mutants import Mutant, load, load_storage
from tests.simulation.scenario import draw
from tests.simulation.store import Violation
from tests.simulation.tears import attack, attack_create, record
from tests.simulation.world import simulate

SCHEDULES, CUTS = 500, 1_000

MUTANTS = (
    Mutant(
        name="lets busy ranks wait",
        module="recovering",
        fragment='    turn.call(sorted(state.awaiting - gone), "interrupt", explain)\n',
        replacement="",
    ),
    Mutant(
        name="ends every rank that does not move",
        module="recovering",
        fragment="loops.failed(turn.state, -1, -1, error.what)), explain=True)\n",
        replacement="loops.failed(turn.state, -1, -1, error.what)), lost=state.awaiting, kill=True)\n",
    ),
    Mutant(
        name="calls a spare that is not up yet",
        module="staffing",
        fragment="starting=state.starting if held and held.ready else state.starting | {worker},",
        replacement="starting=state.starting,",
    ),
    Mutant(
        name="starts spares without end",
        module="staffing",
        fragment="missing = state.settings.spares - sum(spare.slot is None for spare in state.spares.values())",
        replacement="missing = state.settings.spares",
    ),
    Mutant(
        name="gives one spare to two ranks",
        module="staffing",
        fragment="spares=state.spares.without({worker}),",
        replacement="spares=state.spares,",
        also=("kill two", "kill all"),
    ),
    Mutant(
        name="shrinks below the fewest",
        module="staffing",
        fragment="return left >= state.settings.fewest and state.seats(left) > 0",
        replacement="return left > 0",
        also=("never starts", "never starts", "kill two"),
    ),
    Mutant(
        name="forgets who has which rank when the world shrinks",
        module="staffing",
        fragment="turn.change(members=PersistentList(members), rank_of=ranks)",
        replacement="turn.change(members=PersistentList(members))",
    ),
    Mutant(
        name="grows beyond its bounds",
        module="staffing",
        fragment="for slot in range(state.settings.most)",
        replacement="for slot in range(state.settings.most + 1)",
    ),
    Mutant(
        name="lets a recruit join that is not up",
        module="staffing",
        fragment="for worker, spare in state.spares.items() if spare.slot is not None and spare.ready)",
        replacement="for worker, spare in state.spares.items() if spare.slot is not None)",
    ),
    Mutant(
        name="gives ranks to more than a plan has",
        module="staffing",
        fragment="    elif change < 0:\n",
        replacement="    elif change < -8:\n",
    ),
    Mutant(
        name="measures plans in the middle of a run",
        module="probing",
        fragment="len(layouts.plans) > 1 and not begun",
        replacement="len(layouts.plans) > 1",
        also=("crash",),
    ),
    Mutant(
        name="sets two plans aside for one failure",
        module="probing",
        fragment="    if not trials.trying:\n        return\n",
        replacement="    if not trials.left:\n        return\n",
        also=("user",) * 6,
    ),
    Mutant(
        name="forgets those who are to go in their groups",
        module="leaving",
        fragment='        turn.call(staying, "leave")\n',
        replacement="",
        also=("preempt",),
    ),
    Mutant(
        name="counts a copy before all keepers have delivered",
        module="keeping",
        fragment="keeping=keeping if keeping.owing else None)\n    if not keeping.owing and not keeping.spoiled:",
        replacement="keeping=keeping if keeping.owing else None)\n    if not keeping.spoiled:",
        also=("kill all", "kill two"),
    ),
    Mutant(
        name="passes over what is in memory",
        module="forming",
        fragment="if state.kept is not None and kept_step > state.committed:",
        replacement="if False:",
        also=("kill all",),
    ),
    Mutant(
        name="agrees on the lowest step",
        module="agree",
        fragment="-1 if step is None else step, reverse=True)",
        replacement="-1 if step is None else step)",
    ),
    Mutant(
        name="takes a torn state for a sound one",
        module="agree",
        fragment="if tags[rank].sound:",
        replacement="if True:",
    ),
    Mutant(
        name="sends nothing to newcomers",
        module="agree",
        fragment="if rank not in settled:",
        replacement="if rank not in settled and tags[rank].step is not None:",
    ),
    Mutant(
        name="gives up one failure early",
        module="loops",
        fragment="if state.failures > settings.failures:",
        replacement="if state.failures >= max(1, settings.failures):",
    ),
    Mutant(
        name="never counts a failure",
        module="loops",
        fragment="turn.change(failures=state.failures + 1, failed_s=",
        replacement="turn.change(failed_s=",
        also=("crash loop",),
    ),
    Mutant(
        name="counts every sign of one failure",
        module="recovering",
        fragment="    if entering or again or (state.blame is None and not blame.peer):",
        replacement="    if True:",
    ),
    Mutant(
        name="does not count a newcomer's death",
        module="recovering",
        fragment="again=event.worker in state.starting",
        replacement="again=False",
        also=("start loop", "kill"),
    ),
    Mutant(
        name="recovers from the user's errors",
        module="recovering",
        fragment='if kind in ("user", "data") or',
        replacement='if kind == "data" or',
    ),
    Mutant(
        name="does not tell idle ranks to leave",
        module="recovering",
        fragment="    _let_go(turn, frozenset(state.rank_of) - state.awaiting - state.starting - gone)\n",
        replacement="",
    ),
    Mutant(
        name="waits for ever for survivors that are silent",
        module="recovering",
        fragment="    _replace(turn, state.awaiting, kill=True)\n",
        replacement="",
    ),
    Mutant(
        name="forgets whoever joins when a server is lost",
        module="apart",
        fragment="    turn.change(apart={}, awaiting=state.awaiting | busy, losing=frozenset())\n",
        replacement="    turn.change(apart={}, losing=frozenset())\n",
        also=("kill", "kill"),
    ),
    Mutant(
        name="ends a generation with a worker that follows a chief",
        module="apart",
        fragment="and state.settings.spares_rank(state.rank_of[worker])\n\n\ndef follows",
        replacement='and state.settings.spares_rank(state.rank_of[worker]) and state.settings.topology == "independent"'
        "\n\n\ndef follows",
        also=("kill",),
    ),
    Mutant(
        name="has those judge who follow a chief",
        module="training",
        fragment="            judges = [state.members[0].worker]\n",
        replacement="            judges = [member.worker for member in state.members]\n",
    ),
    Mutant(
        name="takes processes over that cannot form again",
        module="heirs",
        fragment='    if turn.settings.reform == "in_place":\n        return living\n',
        replacement="    return living\n",
        also=("crash",),
    ),
    Mutant(
        name="has a process join twice that cannot",
        module="recovering",
        fragment='state.settings.reform == "new_process" and kind != "peer"',
        replacement="False",
        also=("storage", "storage"),
    ),
    Mutant(
        name="has a process join again that was cut off",
        module="apart",
        fragment='apart.blame is not None and settings.reform == "new_process"',
        replacement="False",
        also=("cut", "cut"),
    ),
    Mutant(
        name="waits for a server that has raised",
        module="recovering",
        fragment="turn.change(awaiting=turn.state.awaiting - {worker}, apart=others)",
        replacement="turn.change(awaiting=turn.state.awaiting - {worker})",
        also=("storage", "storage"),
    ),
    Mutant(
        name="takes answers of older generations",
        module="decide",
        fragment="return event.generation != state.generation or not owing",
        replacement="return event.worker not in state.rank_of",
        also=("kill", "user"),
    ),
    Mutant(
        name="does not time a hang",
        module="training",
        fragment='    turn.call_all("run", range(turn.state.step, until))\n'
        '    turn.arm("hang", hang_deadline_s(turn.state))\n',
        replacement='    turn.call_all("run", range(turn.state.step, until))\n',
    ),
    Mutant(
        name="waits for the files of a dead uploader",
        module="staffing",
        fragment="    forget(turn, frozenset(gone))\n    keeping",
        replacement="    keeping",
    ),
    Mutant(
        name="commits before all files are stored",
        module="checkpointing",
        fragment="    if upload.owing:\n        return\n",
        replacement="    if upload.committing:\n        return\n",
    ),
    Mutant(
        name="names no parent",
        module="checkpointing",
        fragment='parent = state.head.path if state.head else ""',
        replacement='parent = ""',
    ),
    Mutant(
        name="begins an upload during another",
        module="checkpointing",
        fragment="if state.committed >= step or upload is not None:",
        replacement="if state.committed >= step or (upload is not None and upload.step == step):",
    ),
    Mutant(
        name="steps on after a wish to stop",
        module="training",
        fragment="    elif not state.ending:\n",
        replacement="    elif state.step < state.settings.total_steps:\n",
    ),
    Mutant(
        name="gives the log back during a commit",
        module="decide",
        fragment="    if turn.state.phase is Phase.CLOSING and turn.state.upload is None:\n",
        replacement="    if turn.state.phase is Phase.CLOSING:\n",
        also=("commit slow", "stop now"),
    ),
    Mutant(
        name="ends workers that another driver has taken over",
        module="ending",
        fragment="_let_go(turn) if isinstance(event.error, RunConflict) else _kill_all(turn)",
        replacement="_kill_all(turn)",
        also=("stall",),
    ),
    Mutant(
        name="hides the steps that nobody holds any more",
        module="forming",
        fragment="steps_lost=max(0, state.progress - heal.step, state.told - heal.step),",
        replacement="steps_lost=max(0, state.progress - heal.step),",
        also=("crash",),
    ),
    Mutant(
        name="ends the run where a checkpoint is damaged",
        module="recovering",
        fragment="return bool(state.older) or state.phase is Phase.GATHERING",
        replacement="return False",
        also=("checkpoint damaged",),
    ),
    Mutant(
        name="lets workers live when the log is lost",
        module="ending",
        fragment="_let_go(turn) if isinstance(event.error, RunConflict) else _kill_all(turn)",
        replacement="_let_go(turn)",
    ),
    Mutant(
        name="leaves a rank out of the evaluation",
        module="training",
        fragment="for rank in sorted(state.answers):",
        replacement="for rank in sorted(state.answers)[: max(1, len(state.answers) - 1)]:",
    ),
    Mutant(
        name="clears the failures with steps done again",
        module="turn",
        fragment="        if step > state.high:\n",
        replacement="        if step > state.progress:\n",
        also=("crash loop",),
    ),
    Mutant(
        name="lets a first failure wait",
        module="loops",
        fragment="return 0.0 if failures < 2 else",
        replacement="return 1.0 if failures < 2 else",
    ),
    Mutant(
        name="passes a batch by at the first failure",
        module="loops",
        fragment="if loop is None or loop.times < LOOP or",
        replacement="if loop is None or",
    ),
    Mutant(
        name="passes more batches by than allowed",
        module="loops",
        fragment=" or len(state.passing) >= state.settings.pass_limit",
        replacement="",
        also=("crash loop",),
    ),
)

STORAGE_MUTANTS = (
    Mutant(
        name="ends with a torn entry",
        module="log",
        fragment="        except ValueError:\n            return None\n",
        replacement="        except ValueError as error:\n            raise StorageError('torn') from error\n",
    ),
    Mutant(
        name="writes a burnt number again",
        module="log",
        fragment="number = self._top + 1\n",
        replacement="number = head.number + 1 if head else 1\n",
    ),
    Mutant(
        name="believes a hint that names a torn entry alone",
        module="log",
        fragment="return self._newest(numbers) or self._newest(self._numbers(0))",
        replacement="return self._newest(numbers)",
    ),
    Mutant(
        name="gives up behind a torn entry of its own",
        module="log",
        fragment="last, number = self._read(number) or last, number + 1",
        replacement="last, number = self._read(number), number + 1",
    ),
    Mutant(
        name="takes what a torn packed file had for lost",
        module="eventfiles",
        fragment="                damaged[file] = str(error)\n                return True\n",
        replacement="                yield from self._lost({file: str(error)})\n",
    ),
    Mutant(
        name="takes a packed file that ends early for whole",
        module="eventfiles",
        fragment="        if number <= file.last:\n",
        replacement="        if False:\n",
    ),
    Mutant(
        name="deletes batches that only a torn packed file covers",
        module="summary",
        fragment="return shared and file.path not in self._sound and self._whole(file) is None",
        replacement="return False",
    ),
    Mutant(
        name="believes a summary that is torn",
        module="summary",
        fragment="    except (MissingFile, ValueError, TypeError, KeyError, AttributeError):\n",
        replacement="    except MissingFile:\n",
    ),
)
LINKS = (
    Mutant(
        name="names an entry before the disk has it",
        module="store",
        fragment="            file.flush()\n            os.fsync(file.fileno())\n",
        replacement="",
    ),
    Mutant(
        name="forgets the folder of an entry",
        module="store",
        fragment="            _link(self._folder / path, data)\n            self._sync(path)\n",
        replacement="            _link(self._folder / path, data)\n",
    ),
    Mutant(
        name="replaces what another wrote",
        module="store",
        fragment="            os.link(unnamed, place)\n",
        replacement="            place.unlink(missing_ok=True)\n            os.link(unnamed, place)\n",
    ),
)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_mutant_is_caught(mutant: Mutant, record_property: pytest.RecordProperty) -> None:
    code = load(mutant)
    for seed in range(SCHEDULES):
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
    for seed in range(CUTS):
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


def test_a_fragment_must_occur_exactly_once() -> None:
    with pytest.raises(ValueError, match="occurs 0 times"):
        load(Mutant(name="no such", module="agree", fragment="no such words", replacement=""))


def test_a_copy_that_is_not_mutated_passes() -> None:
    code = load(Mutant(name="the same", module="agree", fragment="reverse=True", replacement="reverse=True"))
    assert sum(simulate(draw(seed), code).outcomes[-1] == "done" for seed in range(60)) > 20
