"""Jobs: strict fields, all problems at once, copies; and the file they live in."""

from __future__ import annotations

import pickle
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import trainwright as tw
from trainwright.cli.main import app
from trainwright.core.errors import JobError, UserCodeError
from trainwright.planning.job_file import load, load_distillation, load_job


class Summed:
    """Stands where the losses of Keras do."""

    __module__ = "keras.src.losses.loss"
    reduction = "sum"

    def __call__(self, y_true: Any, y_pred: Any) -> Any:
        return y_true - y_pred


DATA = tw.datasets.table({"x": [[1.0]], "y": [0]})


def job(**fields: Any) -> tw.Job:
    given = {"name": "n", "model": dict, "optimizer": list, "train": DATA, "loss": max, "inputs": "x", "batch_size": 1}
    return tw.Job(**{**given, **fields})


def test_all_problems_are_said_at_once_with_the_nearest_name() -> None:
    with pytest.raises(JobError) as caught:
        tw.Job(nam="x", model=dict, optimizer=list, train=DATA, batchsize=3, batch_size=0)
    text = str(caught.value)
    assert "'name'" in text and "'batch_size'" in text and "batch_size=0" in text and "name= is missing" in text
    assert len(caught.value.problems) == 4
    assert pickle.loads(pickle.dumps(caught.value)).problems == caught.value.problems


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"name": "../up"}, "name="),
        ({"loss": None}, "either loss="),
        ({"step": max}, "either loss="),
        ({"inputs": ()}, "inputs= is missing"),
        (
            {"metrics": dict.fromkeys(("loss", "f1", "step", "epoch", "seconds"), max)},
            "metrics= has 'loss', 'step', 'epoch', 'seconds', which run.evaluations has already: use other names",
        ),
        ({"train": [1, 2]}, "train= is not a data set"),
        ({"evaluate": "data"}, "evaluate= is not a data set"),
        ({"workers": 0}, "workers=0"),
        ({"precision": "fp8"}, "precision='fp8'"),
        ({"clip_norm": -1.0}, "clip_norm=-1.0"),
        ({"on_crash_loop": "skip", "failures": 2}, "set failures=3 or more"),
        ({"local_state": "hidden", "min_workers": 1}, "leave min_workers= and max_workers= out"),
        ({"on_loss": "shrink", "workers": 4}, 'on_loss="shrink" needs min_workers='),
        (
            {"on_loss": "shrink", "workers": 4, "min_workers": 4},
            "no worker: min_workers=4 are all of them",
        ),
        ({"batch_norm": "sync", "accumulation": 2}, "leave accumulation= out"),
        ({"sample_weight": "w", "class_weight": {0: 2.0}, "targets": "y"}, "exclude each other"),
        ({"loss": None, "step": max, "sample_weight": "w"}, "sample_weight= cannot be used with step="),
        ({"class_weight": {0: 2.0}}, "class_weight= needs one column of targets="),
        ({"loss": Summed()}, 'loss= has reduction="sum"'),
    ],
)
def test_a_wrong_field_is_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(JobError, match=message.replace("(", r"\(")):
        job(**fields)


def test_a_copy_is_validated_like_a_new_job() -> None:
    assert job().replace(epochs=3).epochs == 3
    with pytest.raises(JobError, match="epochs"):
        job().replace(epochs=0)
    with pytest.raises(JobError, match="'epochs'"):
        job().replace(epoch=1)


def test_columns_are_all_where_the_step_takes_them() -> None:
    assert job(targets="y").columns == ("x", "y")
    assert job(loss=None, step=max).columns is None


FILE = """
import trainwright as tw
{name} = tw.Job(name="n", model=dict, optimizer=list, loss=max, inputs="x", batch_size=1,
                train=tw.datasets.table({{"x": [[1.0]]}}))
"""


def test_a_job_file_and_its_overrides(tmp_path: Path) -> None:
    file = tmp_path / "my_job.py"
    file.write_text(FILE.format(name="anything"))
    loaded = load_job(str(file), ["epochs=7", "storage=s3://b/p", "inputs=('x',)"])
    assert (loaded.epochs, loaded.storage, loaded.inputs) == (7, "s3://b/p", ("x",))
    with pytest.raises(JobError) as caught:
        load_job(str(file), ["epoch=1", "batch"])
    assert "'epochs'" in str(caught.value) and "field=value" in str(caught.value)


def test_what_is_wrong_with_a_job_file(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="no such file"):
        load_job(str(tmp_path / "none.py"))
    empty, broken, two = (tmp_path / f"{name}.py" for name in ("empty", "broken", "two"))
    empty.write_text("")
    broken.write_text("1 / 0")
    two.write_text(FILE.format(name="a") + FILE.format(name="b"))
    with pytest.raises(JobError, match="one job is needed"):
        load_job(str(empty))
    with pytest.raises(JobError, match="found a, b"):
        load_job(str(two))
    with pytest.raises(UserCodeError, match="ZeroDivisionError") as caught:
        load_job(str(broken))
    assert str(broken) in str(caught.value)


MADE = """
from typing import Literal
import trainwright as tw
def job(size: Literal["small", "large"] = "small", wide: int = 1, broken=False) -> tw.Job:
    if broken:
        return 1 / 0
    return tw.Job(name=f"{{size}}-{{wide}}", model=dict, optimizer=list, loss=max, inputs="x", batch_size=1,
                  train=tw.datasets.table({{"x": [[1.0]]}}))
"""


def test_a_job_file_with_a_function_and_its_arguments(tmp_path: Path) -> None:
    file = tmp_path / "made.py"
    file.write_text(MADE.format())
    assert load_job(str(file)).name == "small-1"
    loaded = load_job(str(file), ["size=large", "epochs=7", "wide=2"])
    assert (loaded.name, loaded.epochs) == ("large-2", 7)
    with pytest.raises(JobError, match="--set size=huge: input should be 'small' or 'large'"):
        load_job(str(file), ["size=huge"])
    with pytest.raises(JobError, match="'sizes' is not a field of Job: did you mean 'size'"):
        load_job(str(file), ["sizes=large"])
    with pytest.raises(JobError, match="'lr' is not a field of Job: use the function of optimizer="):
        load_job(str(file), ["lr=0.1"])
    with pytest.raises(UserCodeError, match="ZeroDivisionError") as caught:
        load_job(str(file), ["broken=True"])
    assert "return 1 / 0" in caught.value.detail and "pydantic" not in caught.value.detail


def test_what_is_wrong_with_a_function_of_a_job_file(tmp_path: Path) -> None:
    needs, none = tmp_path / "needs.py", tmp_path / "none.py"
    needs.write_text("def job(size): ...")
    none.write_text("def job(): ...")
    with pytest.raises(JobError, match="no value for size: give it one, or --set size="):
        load_job(str(needs))
    with pytest.raises(JobError, match="returned NoneType"):
        load_job(str(none))


DISTILLED = """
import trainwright as tw
other = tw.Job(name="teacher", model=dict, optimizer=list, loss=max, inputs="x", batch_size=1,
               train=tw.datasets.table({"x": [[1.0]]}))
def distillation(wide: int = 1) -> tw.Distillation:
    student = other.replace(name="s", batch_size=wide, targets="y")
    return tw.Distillation(student=student, teachers=(tw.Teacher(name="t", job=other),))
"""


def test_overrides_of_a_distillation_reach_the_students_job_and_the_loss(tmp_path: Path) -> None:
    file = tmp_path / "distilled.py"
    file.write_text(DISTILLED)
    given = ["wide=2", "keep=fp32", "temperature=4", "alpha=0.1", "student.targets=z", "epochs=3", "name=2024"]
    found = load_distillation(str(file), given)
    student = found.student
    assert (found.keep, found.loss.temperature, found.loss.alpha) == ("fp32", 4, 0.1)
    assert (student.batch_size, student.targets, student.epochs, student.name) == (2, "z", 3, "2024")
    assert type(load(str(file))) is type(found) and load_job(str(file)).name == "teacher"
    with pytest.raises(JobError) as caught:
        load_distillation(str(file), ["temprature=2", "loss.epochs=1", "keep"])
    assert all(text in str(caught.value) for text in ("'temperature'", "loss.epochs", "field=value"))
    with pytest.raises(JobError, match="temperature="):
        load_distillation(str(file), ["temperature=-1"])
    with pytest.raises(JobError, match="student: loss= takes step=, which a distillation does not give"):
        found.replace(student=student.replace(loss=lambda outputs, targets, *, step: outputs))


RECIPE = """
from trainwright.core.strict_model import StrictModel
class Twice(StrictModel):
    times: int = 2
    def distill(self, *, resume, fresh, verbose):
        return f"{self.times} {resume} {fresh} {verbose}"
recipe = Twice()
"""


def test_a_recipe_is_carried_out_by_its_own_hand(tmp_path: Path) -> None:
    file = tmp_path / "recipe.py"
    file.write_text(RECIPE)
    done = CliRunner().invoke(app, ["distill", str(file), "--set", "times=3", "--resume", "-v"])
    assert done.output == "3 True False True\n" and not done.exit_code


def test_a_file_without_a_distillation_is_a_job_file(tmp_path: Path) -> None:
    file = tmp_path / "job.py"
    file.write_text(FILE.format(name="job"))
    assert load(str(file), ["epochs=7"]).epochs == 7
    with pytest.raises(JobError, match="one distillation is needed; write `distillation ="):
        load_distillation(str(file))
    file.write_text(FILE.format(name="job") + "recipe = {}\ndef search(): return recipe\n")
    assert load(str(file)).name == "n"


TYPED = """
from __future__ import annotations
from typing import Literal
from pydantic import BaseModel, model_validator
import trainwright as tw
class Shape(BaseModel):
    tag: int
    @model_validator(mode="after")
    def positive(self):
        assert self.tag > 0
        return self
def job(tag: str = "a", year: Literal["1611", "1769"] = "1611", note: str | None = "", shape: int | str = 1) -> tw.Job:
    Shape(tag=shape)
    return tw.Job(name=f"{{tag}}-{{year}}-{{note}}", model=dict, optimizer=list, loss=max, inputs="x", batch_size=1,
                  train=tw.datasets.table({{"x": [[1.0]]}}))
"""


def test_an_argument_that_is_a_string_is_taken_as_it_is_written(tmp_path: Path) -> None:
    file = tmp_path / "typed.py"
    file.write_text(TYPED.format())
    assert load_job(str(file), ["tag=1e3", "year=1769", "note=None"]).name == "1e3-1769-None"
    assert load_job(str(file), ["tag=True", "note=07"]).name == "True-1611-07"
    with pytest.raises(JobError, match="--set year=1800: input should be '1611' or '1769'"):
        load_job(str(file), ["year=1800"])


@pytest.mark.parametrize("shape", ["x", "0"])
def test_what_pydantic_says_inside_a_function_is_the_functions(tmp_path: Path, shape: str) -> None:
    file = tmp_path / "typed.py"
    file.write_text(TYPED.format())
    with pytest.raises(UserCodeError, match=r"job\(\) raised ValidationError: 1 validation error for Shape") as caught:
        load_job(str(file), [f"shape={shape}"])
    assert "Shape(tag=shape)" in caught.value.detail


def test_fit_says_what_takes_the_place_of_what_it_cannot_do() -> None:
    wrong = {"step": print, "clip_norm": 1.0, "accumulation": 2, "on_error": "skip", "on_nonfinite": "skip"}
    with pytest.raises(JobError) as caught:
        job(run="fit", **wrong)
    assert len(caught.value.problems) == len(wrong)
    for name, remedy in {"clip_norm": "global_clipnorm", "accumulation": "gradient_accumulation_steps"}.items():
        assert any(
            problem.startswith(f"{name}= cannot be used") and remedy in problem for problem in caught.value.problems
        )


def test_a_compiled_model_needs_neither_loss_nor_optimizer() -> None:
    assert job(run="fit", loss=None, optimizer=None).optimizer is None
    with pytest.raises(JobError, match="optimizer= is missing"):
        job(optimizer=None)


def test_a_schedule_that_wants_the_batch_size_is_given_the_jobs() -> None:
    scaled = partial(tw.schedules.linear_scaling, reference=256, warmup_steps=10)
    spec = job(batch_size=2048, schedule=scaled).replace(batch_size=512).model_spec(100)
    assert spec.schedule is not None and spec.schedule(50, 100) == 2.0
    own = partial(scaled, batch_size=1024)
    assert job(batch_size=2048, schedule=own).model_spec(100).schedule is own
    assert job(schedule=max).model_spec(100).schedule is max
    assert job().model_spec(100).schedule is None


def test_a_job_for_one_device_pins_nothing_of_the_layout() -> None:
    """Or what was trained against servers, or in a pipeline, could not be used in one process."""
    apart = job(batch_size=8, workers=2, strategy="local_sgd", plan="dp=2", wire="int8", local_steps=8, outer="average")
    assert vars(apart.on_one_device()) == vars(job(batch_size=8, workers=1, devices=1))
    assert vars(job(batch_size=8, consistency="async").on_one_device()) == vars(apart.on_one_device())
    assert job(plan="dp=2, servers=2, accumulation=4,recompute=full").on_one_device().planning.plan == "accumulation=4"
    assert (
        job(plan="fsdp=2,micro_batch=8").on_one_device().planning.plan == "micro_batch=8"
        and job(plan="a.json").on_one_device().planning.plan is None
    )
