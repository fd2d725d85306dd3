"""A recipe that is begun again: what of it has begun and what has not, whenever it is killed."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import trainwright as tw
from tests.support.small_distillation import distillation
from trainwright.core.errors import RunConflict, RunFinished
from trainwright.distillation.multi_stage import Stage
from trainwright.storage.object_store import open_store
from trainwright.storage.run_log import Owner, RunLog

FIRST, SECOND, THIRD = "student-generation-0", "student-generation-1", "student"


class Killed(Exception):
    """The driver is gone."""


@dataclass
class Driver:
    """Takes runs as a driver does and finishes them, or dies.

    Attributes:
        dies: with the run of this name, before it takes it or when it has it.
        trained: names of runs.
    """

    dies: tuple[str, str] = ("", "")
    trained: list[str] = field(default_factory=list)

    def __call__(self, stage: Stage, **_: Any) -> Any:
        job = stage if isinstance(stage, tw.Job) else stage.student
        log = RunLog(open_store(job.storage), job.name, dead=lambda owner: True)
        head = log.head()
        if head is not None and head.outcome == "done":
            raise RunFinished("it is finished")
        if self.dies == (job.name, "before"):
            raise Killed
        entry = log.acquire(Owner.here(), {})
        self.trained.append(job.name)
        if self.dies == (job.name, "within"):
            raise Killed
        log.release(entry.token, "done")
        return SimpleNamespace(state="done")


@pytest.fixture
def recipe(tmp_path: Path) -> tw.SelfDistillation:
    """Of three stages."""
    return tw.SelfDistillation(distillation=distillation(tmp_path, teachers=()), generations=2)


def drive(recipe: tw.SelfDistillation, monkeypatch: pytest.MonkeyPatch, *dies: str, fresh: bool = False) -> list[str]:
    """What a call trained, which was killed where that is said."""
    driver = Driver(dies=(dies[0], dies[1]) if dies else ("", ""))
    for name in ("_train_job", "run_distillation"):
        monkeypatch.setattr(f"trainwright.distillation.multi_stage.{name}", driver)
    if dies:
        with pytest.raises(Killed):
            recipe.distill(fresh=fresh)
    else:
        assert recipe.distill(fresh=fresh).state == "done"
    return driver.trained


def test_each_stage_begins_again_once(recipe: tw.SelfDistillation, monkeypatch: pytest.MonkeyPatch) -> None:
    assert drive(recipe, monkeypatch) == [FIRST, SECOND, THIRD]
    assert recipe.last().student.name == THIRD
    assert drive(recipe, monkeypatch, SECOND, "before", fresh=True) == [FIRST]
    upcoming: Any = recipe.upcoming()
    assert upcoming.student.name == SECOND
    assert drive(recipe, monkeypatch, SECOND, "before") == [], "the first has begun again, and is finished"
    assert drive(recipe, monkeypatch, THIRD, "before") == [SECOND]
    assert drive(recipe, monkeypatch) == [THIRD]
    with pytest.raises(RunFinished):
        drive(recipe, monkeypatch)


def test_nothing_is_deleted_while_a_driver_of_a_stage_is_alive(
    recipe: tw.SelfDistillation, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert drive(recipe, monkeypatch, SECOND, "within") == [FIRST, SECOND]
    with pytest.raises(RunConflict, match=f"run '{SECOND}' is running"):
        drive(recipe, monkeypatch, fresh=True)
    assert drive(recipe, monkeypatch) == [SECOND, THIRD]
