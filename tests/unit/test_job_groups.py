"""Options of a job in groups: each is read and set by its own name, or through its group."""

from __future__ import annotations

import pickle
import re
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
import torch

import trainwright as tw
from tests.support import peer_table
from trainwright.core.errors import JobError
from trainwright.core.job import FIELD_ORDER, GROUP_OF, GROUPS
from trainwright.core.peer_options import PEER_OPTIONS, advice_of
from trainwright.planning.job_file import load_distillation, load_job

DATA = tw.datasets.table({"x": [[1.0]], "y": [0]})
OWN: dict[str, Any] = {
    "name": "n", "model": dict, "optimizer": list, "train": DATA, "loss": max, "inputs": "x", "targets": "y",
    "batch_size": 4,
}  # fmt: skip


def problems_of(**fields: Any) -> tuple[str, ...]:
    with pytest.raises(JobError) as caught:
        tw.Job(**{**OWN, **fields})
    return caught.value.problems


def test_each_name_belongs_to_one_class_and_is_stored_once() -> None:
    own = set(tw.Job.model_fields) - GROUPS.keys()
    assert own | GROUP_OF.keys() == set(FIELD_ORDER) and len(set(FIELD_ORDER)) == len(FIELD_ORDER)
    assert len(GROUP_OF) == sum(len(kind.model_fields) for kind in GROUPS.values())
    assert not own & GROUP_OF.keys() and not GROUPS.keys() & GROUP_OF.keys()


def test_an_option_by_itself_is_its_groups() -> None:
    by_itself, grouped = tw.Job(**OWN, spares=2, seed=5), tw.Job(**OWN, recovery=tw.Recovery(spares=2))
    assert by_itself.recovery == grouped.recovery == tw.Job(**OWN, recovery={"spares": 2}).recovery
    assert by_itself.recovery.spares == by_itself.get("spares") == 2 and by_itself.get("name") == "n"
    assert tw.Job(**OWN, recovery=tw.Recovery(spares=2), failures=5).recovery == tw.Recovery(spares=2, failures=5)
    assert pickle.loads(pickle.dumps(by_itself)).recovery == by_itself.recovery


def test_what_is_given_and_defaults_are_known_by_name() -> None:
    job = tw.Job(**OWN, spares=2, scaling=tw.Scaling(workers=3))
    assert job.given == {*OWN, "spares", "workers"}
    assert tw.Job.default("keeper_s") == 10.0 and tw.Job.default("epochs") == 1 and tw.Job.default("pad") == {}


def test_a_copy_keeps_the_other_options_of_a_group() -> None:
    job = tw.Job(**OWN, spares=2, failures=5).replace(spares=1, epochs=3)
    assert job.recovery == tw.Recovery(spares=1, failures=5) and job.epochs == 3
    assert job.replace(recovery=tw.Recovery(failures=7)).recovery == tw.Recovery(failures=7)
    assert job.replace(recovery=tw.Recovery(failures=7), spares=3).recovery == tw.Recovery(failures=7, spares=3)


def test_an_option_given_twice_is_refused() -> None:
    assert problems_of(spares=1, recovery=tw.Recovery(spares=2)) == (
        "spares= is given twice: by itself and in recovery=",
    )


def test_problems_of_all_groups_are_said_at_once() -> None:
    problems = problems_of(spares=-1, workers=0)
    assert [problem.partition(":")[0] for problem in problems] == ["workers=0", "spares=-1"]
    assert problems_of(recovery=3)[0].startswith("recovery=3")
    assert problems_of(recovery=3, spares=1)[0].startswith("recovery=3")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"spare": 2}, "spare= is not a field of Job: did you mean 'spares'?"),
        ({"recovry": {"spares": 2}}, "recovry= is not a field of Job: did you mean 'recovery'?"),
        ({"recovery": {"spare": 2}}, "spare= is not a field of Recovery: did you mean 'spares'?"),
        ({"recovery": {"workers": 2}}, "workers= is not a field of Recovery: it belongs to scaling="),
    ],
)
def test_a_misspelt_or_misplaced_name_is_explained(fields: dict[str, Any], message: str) -> None:
    assert problems_of(**fields) == (message,)


def test_the_job_of_the_page_on_moving_in_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[2] / "docs" / "moving-in.md").read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    code = page.partition("```python\n")[2].partition("```")[0]
    rows = {"image": [[[0.0] * 28] * 28] * 4, "label": [0, 1, 2, 3]}
    (tmp_path / "data" / "train").mkdir(parents=True)
    pyarrow.parquet.write_table(pyarrow.table(rows), tmp_path / "data" / "train" / "rows.parquet")
    names: dict[str, Any] = {}
    exec(code, names)
    job = names["job"]
    assert isinstance(job, tw.Job) and job.train.index().rows == 4
    assert job.model()(torch.zeros(2, 28, 28)).shape == (2, 10)


def test_the_page_on_moving_in_lists_the_options_of_other_trainers() -> None:
    page = (Path(__file__).parents[2] / "docs" / "moving-in.md").read_text(encoding="utf-8")
    assert peer_table.markdown() in page, "put what `python -m tests.support.peer_table` prints into docs/moving-in.md"


def test_options_of_other_trainers_are_explained_in_the_words_of_a_job() -> None:
    fields = {*tw.Job.model_fields, *GROUP_OF}
    assert not PEER_OPTIONS.keys() & fields
    for name, advice in PEER_OPTIONS.items():
        assert problems_of(**{name: 1}) == (f"{name}= is not a field of Job: {advice_of(name)}",)
        named = {word for word in re.findall(r"(?<![\w(\"])(\w+)=", advice) if word not in ("lr", "patience")}
        assert named <= fields | {"resume"}, name


def test_a_group_explains_its_own_errors() -> None:
    with pytest.raises(JobError, match="spare= is not a field of Recovery: did you mean 'spares'"):
        tw.Recovery(spare=2)


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "job.py"
    path.write_text(
        "import trainwright as tw\n"
        "data = tw.datasets.table({'x': [[1.0]], 'y': [0]})\n"
        "def model(): ...\n"
        "def optimizer(parameters): ...\n"
        "def loss(outputs, targets): ...\n"
        "job = tw.Job(name='n', model=model, optimizer=optimizer, train=data, loss=loss, inputs='x', targets='y',\n"
        "             batch_size=4, failures=5)\n"
        "distillation = tw.Distillation(student=job, teachers=(tw.Teacher(name='t', model=model, inputs='x'),))\n"
    )
    return str(path)


@pytest.mark.parametrize("name", ["spares", "recovery.spares"])
def test_an_override_sets_an_option_by_either_name(file: str, name: str) -> None:
    assert load_job(file, [f"{name}=2"]).recovery == tw.Recovery(spares=2, failures=5)
    student = load_distillation(file, [f"student.{name}=2", "temperature=4"]).student
    assert student.recovery == tw.Recovery(spares=2, failures=5)


@pytest.mark.parametrize(
    ("override", "near"),
    [
        ("spare=2", "did you mean 'spares'?"),
        ("recovery.spare=2", "did you mean 'recovery.spares'?"),
        ("recover.spares=2", "did you mean 'recovery.spares'?"),
    ],
)
def test_a_misspelt_override_is_explained(file: str, override: str, near: str) -> None:
    with pytest.raises(JobError) as caught:
        load_job(file, [override])
    assert near in str(caught.value)
