"""What of the user's code and constants counts as a change of a job, and what does not."""

from __future__ import annotations

import functools
import importlib
import json
import linecache
import operator
import os
import random
import subprocess
import sys
import threading
import types
from collections import OrderedDict, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import trainwright as tw
from trainwright.core.events import CODE_FIELD
from trainwright.core.soft_loss import Match, SoftLoss
from trainwright.datasets.formats.image_folder import decode_image
from trainwright.distillation.distillation_job import TeacherActor
from trainwright.distillation.target_cache import _TargetReader
from trainwright.distillation.target_encoding import TargetEncoding
from trainwright.distillation.teacher_runner import TeacherRunner, _TeacherModelBuilder
from trainwright.planning.code_fingerprint import CodeFingerprints
from trainwright.planning.job_description import comparable, describe, description_changes, state_relevant_fields
from trainwright.planning.job_file import load_job
from trainwright.strategies.distillation.distillation_loss import DistillationLoss, student_metrics
from trainwright.strategies.distillation.layer_match import LayerProjection
from trainwright.strategies.distillation.multi_student import StudentModels
from trainwright.worker.worker_config import pickle_job, unpickle_job

HELPERS = """
import math

LIMIT = 3

def clean(columns):
    return {name: column * LIMIT for name, column in columns.items()}

def unused(x):
    return x

class Base:
    rate = 0.5

    def forward(self, x):
        return self.act(x)
"""
LOCAL = """
from deeper import constant

def late(x):
    return x + constant()
"""
JOB = """
import functools, math
import numpy as np
import trainwright as tw
import helpers
from helpers import Base

FACTOR = 1
TABLE = {"a": 1, "b": 2}
NAMES = {"x", "y", "z"}
WEIGHTS = np.arange(4)

def traced(function):
    @functools.wraps(function)
    def wrapped(*given):
        return function(*given)
    return wrapped

class Net(Base):
    '''A network.'''
    width = 8

    def act(self, x):
        return math.sin(x)

    @property
    def size(self):
        return self.width

    @traced
    def traced_forward(self, x):
        return self.forward(x)

def scale(x):
    return x * FACTOR

def build(width=4):
    return Net()

def step(model, batch, margin=0.1):
    from local import late
    kept = [name for name in NAMES if name in TABLE]
    if batch:
        return late(scale(batch["x"]))
    return WEIGHTS[0] + (lambda y: y + 1)(margin)

def lower(level):
    return lambda row: row > level

job = tw.Job(
    name="n", model=functools.partial(build, width=5), step=step, optimizer=lambda parameters: [0.1, parameters],
    train=tw.datasets.table({"x": [1.0, 2.0]}).filter(lower(0)).map_batches(helpers.clean), batch_size=1,
)
"""
FILES = {"job.py": JOB, "helpers.py": HELPERS, "local.py": LOCAL, "deeper.py": "def constant():\n    return 1\n"}


@pytest.fixture
def described(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Writes the job with its modules, loads it as a new process would, and describes it."""
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setattr(sys, "path", list(sys.path))

    def made(changed: dict[str, str], folder: str = "here") -> dict[str, str]:
        (tmp_path / folder).mkdir(exist_ok=True)
        for name, text in {**FILES, **changed}.items():
            (tmp_path / folder / name).write_text(text)
        for name in ("helpers", "local", "deeper"):
            sys.modules.pop(name, None)
        importlib.invalidate_caches()
        sys.path[:] = [path for path in sys.path if not path.startswith(str(tmp_path))]
        return describe(load_job(str(tmp_path / folder / "job.py")))

    yield made
    for name in ("helpers", "local", "deeper"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize(
    ("file", "old", "new", "lines"),
    [
        ("job.py", "math.sin", "math.cos", ["model: Net.act() in job.py changed"]),
        ("job.py", "return x * FACTOR", "return x * 0", ["step: helper scale() in job.py changed"]),
        ("job.py", "FACTOR = 1", "FACTOR = 100", ["step: global FACTOR in job.py changed from 1 to 100"]),
        ("helpers.py", "column * LIMIT", "column + LIMIT", ["train: helper clean() in helpers.py changed"]),
        ("helpers.py", "LIMIT = 3", "LIMIT = 4", ["train: global LIMIT in helpers.py changed from 3 to 4"]),
        ("helpers.py", "self.act(x)", "-self.act(x)", ["model: Base.forward() in helpers.py changed"]),
        ("helpers.py", "rate = 0.5", "rate = 0.6", ["model: class Base in helpers.py changed"]),
        ("job.py", "Net(Base)", "Net(dict)", ["model: class Net in job.py changed"]),
        ("job.py", "self.width", "-self.width", ["model: Net.size() in job.py changed"]),
        ("job.py", "self.forward(x)", "self.forward(-x)", ["model: Net.traced_forward() in job.py changed"]),
        ("job.py", "function(*given)", "function(*given[:1])", ["model: traced.wrapped() in job.py changed"]),
        ("job.py", "width=4", "width=6", ["model: build() in job.py changed"]),
        ("job.py", "width=5", "width=6", ["model: arguments or attributes of build changed"]),
        ("job.py", "margin=0.1", "margin=0.2", ["step: step() in job.py changed"]),
        ("job.py", "y + 1", "y + 2", ["step: step() in job.py changed"]),
        ("job.py", "[0.1,", "[0.2,", ["optimizer: lambda in job.py changed"]),
        ("job.py", "lower(0)", "lower(1)", [
            "train: variable level that lower.<lambda>() in job.py closes over changed from 0 to 1"]),
        ("job.py", '"b": 2', '"b": 3', ["step: global TABLE in job.py changed"]),
        ("job.py", '"z"}', '"w"}', ["step: global NAMES in job.py changed"]),
        ("job.py", "arange(4)", "arange(5)", ["step: global WEIGHTS in job.py changed"]),
        ("local.py", "x + constant", "x - constant", ["step: module local.py changed"]),
        ("deeper.py", "return 1", "return 2", ["step: module deeper.py changed"]),
    ],
)  # fmt: skip
def test_a_change_of_what_is_reached_is_named(described: Any, file: str, old: str, new: str, lines: list[str]) -> None:
    before = described({})
    assert FILES[file].count(old) == 1
    after = described({file: FILES[file].replace(old, new)})
    assert description_changes(before, after) == lines
    assert state_relevant_fields(before) != state_relevant_fields(after)


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("job.py", "FACTOR = 1", "\n\n# a comment\nFACTOR = 1  # another"),
        ("job.py", "    return x * FACTOR", "\n    # why\n\n    return (\n        x\n        * FACTOR\n    )\n"),
        ("job.py", "    return x * FACTOR", '    """Scale it."""\n    return x * FACTOR'),
        ("job.py", "'''A network.'''", "'''Another text.'''"),
        ("job.py", "    '''A network.'''\n", ""),
        ("job.py", "def scale(x):\n    return x * FACTOR", "def scale(y):\n    return y * FACTOR".replace("y", "x")),
        ("job.py", '{"a": 1, "b": 2}', '{"b": 2, "a": 1}'),
        ("job.py", '{"x", "y", "z"}', '{"z", "x", "y"}'),
        ("job.py", "    width = 8\n", "    \n    width = 8\n\n"),
        ("helpers.py", "def unused(x):\n    return x", "def unused(x):\n    return -x"),
        ("helpers.py", "import math\n", "import math, os\n"),
        ("local.py", "def late", "# a comment\n\ndef late"),
        ("deeper.py", "def constant():\n", 'def constant():\n    """One."""\n'),
    ],
)
def test_comments_layout_docstrings_and_order_are_no_change(described: Any, file: str, old: str, new: str) -> None:
    before = described({})
    assert old in FILES[file]
    assert description_changes(before, described({file: FILES[file].replace(old, new)}, "elsewhere")) == []


def test_what_a_process_or_a_machine_has_of_its_own_is_no_change(described: Any) -> None:
    text = JOB.replace(
        "FACTOR = 1\n",
        """
import logging, os, pathlib, random, sys, tempfile, threading, torch
FACTOR = 1
OWN = {
    "random": random.Random(), "generator": np.random.default_rng(), "torch": torch.Generator(), "folder":
    tempfile.mkdtemp(), "here": pathlib.Path(__file__).parent / "weights", "text": os.path.abspath(__file__),
    "lock": threading.Lock(), "log": logging.getLogger("job"), "file": sys.stderr, "environment": os.environ,
    "thing": object(), "layer": torch.nn.Linear(3, 3),
}
COUNT = 0
STARTED = os.getpid()
""",
    ).replace(
        "return x * FACTOR",
        "global COUNT; COUNT += 1; return x * FACTOR if OWN and os.environ.get('PLACE') else x",
    )
    before = described({"job.py": text})
    os.environ["UNKNOWN_TO_IT"] = "1"
    try:
        after = described({"job.py": text.replace("COUNT = 0", "COUNT = 7")}, "elsewhere")
    finally:
        del os.environ["UNKNOWN_TO_IT"]
    assert description_changes(before, after) == []
    (line,) = description_changes(
        before, described({"job.py": text.replace('"weights"', '"others"').replace("Linear(3, 3", "Linear(3, 4")})
    )
    assert line == "step: global OWN in job.py changed"


def digest(value: Any) -> str:
    return CodeFingerprints().digest(value)


def test_recursion_and_cycles_end() -> None:
    def even(n: int) -> bool:
        return n == 0 or odd(n - 1)

    def odd(n: int) -> bool:
        return n != 0 and even(n - 1)

    held: list[Any] = [even]
    held.append({"itself": held})

    class Node:
        def __init__(self) -> None:
            self.next, self.kind, self.held = self, Node, held

    assert digest(even) == digest(even) != digest(odd)
    assert digest(Node()) == digest(Node()) and digest(lambda: held)


def test_values_are_compared_by_value() -> None:
    class Slotted:
        __slots__ = ("size",)

        def __init__(self, size: int) -> None:
            self.size = size

    pairs = [
        (np.zeros(3), np.ones(3)), (np.zeros(3), np.zeros(4)), (torch.zeros(3), torch.ones(3)),
        (torch.zeros(3, dtype=torch.bfloat16), torch.ones(3, dtype=torch.bfloat16)), (Slotted(1), Slotted(2)),
        (functools.partial(max, 1), functools.partial(max, 2)), ([1] * 5000, [1] * 4999 + [2]),
        (dict.fromkeys(range(5000), 0), dict.fromkeys(range(5000), 1)), (torch.float32, torch.float64),
        (np.array(["a", None]), np.array(["b", None])), (torch.nn.Linear(2, 2), torch.nn.Linear(2, 3)),
        (torch.nn.Dropout(0.1), torch.nn.Dropout(0.2)), (np.sin, np.cos), (tw.Pad(value=0), tw.Pad(value=1)),
        (OrderedDict(a=1, b=2), OrderedDict(b=2, a=1)), (defaultdict(lambda: 1), defaultdict(lambda: 2)),
        (torch.nn.Sequential(OrderedDict(a=torch.nn.ReLU(), b=torch.nn.Tanh())),
         torch.nn.Sequential(OrderedDict(b=torch.nn.Tanh(), a=torch.nn.ReLU()))),
            ]  # fmt: skip
    for one, other in pairs:
        assert digest(one) == digest(one) != digest(other), (one, other)
    assert digest(random.Random(1)) == digest(random.Random(2))
    assert digest(threading.Lock()) == digest(threading.Lock())
    assert digest(np.zeros(5_000_000)) != digest(np.ones(5_000_000))


COMPILED = """
import torch
h = torch.compile(lambda x: x * 1, backend="eager")
m = torch.compile(torch.nn.Linear(2, 2), backend="eager")
f = lambda x: h(m(x))
"""


def test_what_torch_compiles_is_compared_by_what_it_was_made_of() -> None:
    """The wrappers hold much that is another in each process."""
    first, again = (cell(number, COMPILED) for number in (5, 6))
    reached, now = dict[str, str](), dict[str, str]()
    assert (
        CodeFingerprints().digest(first["f"], reached) == CodeFingerprints().digest(again["f"], now) and reached == now
    )
    for old, new in (("x * 1", "x * 2"), ("Linear(2, 2", "Linear(2, 3")):
        assert digest(cell(7, COMPILED.replace(old, new))["f"]) != digest(first["f"])


def cell(number: int, text: str, **names: Any) -> Any:
    """What a notebook's cell makes: its functions belong to `__main__`, their source to no file."""
    file = f"/tmp/ipykernel_{number}/{number}.py"
    linecache.cache[file] = (len(text), None, text.splitlines(True), file)
    space = {"__name__": "__main__", **names}
    exec(compile(text, file, "exec"), space)
    return space


def test_functions_and_lambdas_of_a_notebook() -> None:
    first, again = (cell(number, "rate = 1\nf, g = lambda x: x * rate, lambda x: x + rate") for number in (1, 2))
    other = cell(3, "rate = 2\nf, g = lambda x: x * rate, lambda x: x + rate")
    assert digest(first["f"]) == digest(again["f"]) != digest(first["g"])
    reached, now = dict[str, str](), dict[str, str]()
    assert CodeFingerprints().digest(first["f"], reached) != CodeFingerprints().digest(other["f"], now)
    assert list(reached) == ["lambda in the notebook", "global rate in the notebook"]
    assert (reached["global rate in the notebook"], now["global rate in the notebook"]) == ("1", "2")


TEXTS = tw.datasets.table({"text": ["a", "bc"]})
LABELLED = tw.datasets.table({"x": [[1.0], [2.0]], "y": [0, 1]})
BESIDE = tw.datasets.table({"sample": [0, 1], "z": [1.0, 2.0]})
TEACHER = tw.Teacher(name="t", model=dict, inputs="x", output="logits", probabilities=True, layers=("body",))
RUNNER = TeacherRunner(teacher=tw.Teacher(name="t", model=dict, inputs="x"), sha256="0" * 64)
READER = _TargetReader(columns=TEACHER.columns, form=TargetEncoding.parse("topk(8)"))
OFFLINE = DistillationLoss(
    soft=SoftLoss(temperature=2.0), hard=operator.sub, targets=("y", "teacher.t"), labels=("y",), teachers=("t",)
)
SEVERAL = DistillationLoss(
    soft=SoftLoss(matches=(Match(student="a", teacher="b", of="t"),)), hard=operator.sub, labels=("y",),
    targets=("y", "teacher.t", "teacher.t/b"), students=("student", "small"), teachers=("t",), mutual=True,
)  # fmt: skip
MODELS = StudentModels(
    builders={"student": dict, "small": list},
    loss=SEVERAL,
    bridges={"student/0": LayerProjection(axis=1, given=2, wanted=3)},
)


@pytest.mark.parametrize(
    ("value", "stored"),
    [
        (tw.schedules.cosine, "609097ce8f94"),
        (functools.partial(tw.schedules.linear, warmup=0.1), "860f46c2278f"),
        (decode_image("image", 32), "02b6b54a125e"),
        (TEXTS.tokenize().functions, "5be6bc66e87cce48"),
        (TEXTS.tokenize(str, "text", to="t", end=3, cpus=1.0).functions, "c751fdb9d2f039da"),
        (TEXTS.tokenize().pack(4).functions, "5be6bc66e87cce48"),
        (OFFLINE, "dbf9d3ec0a792e0f"),
        (
            DistillationLoss(soft=SoftLoss(alpha=0.0), hard=None, targets=("x",), inline={"t": RUNNER}),
            "a3e2b1829428efa6",
        ),
        (SEVERAL, "cc732c3b82e5b264"),
        (student_metrics({"accuracy": operator.eq}, OFFLINE), "4e9749732d14d527"),
        (MODELS, "83ffd6d6d40d53bc"),
        (LABELLED.beside(BESIDE.map_batches(READER)).functions, "e5ec1eb6bc405cc0"),
        (
            LABELLED.map_batches(
                TeacherActor, cpus=1.0, fn_constructor_args=(TeacherRunner(teacher=TEACHER, sha256="0" * 64),)
            ).functions,
            "272e06b4e87b1a6e",
        ),
        (_TeacherModelBuilder(build=dict, layers={}, file="w.pt", sha256="1"), "0a71b5a8db1c216d"),
    ],
    ids=[
        "schedule", "partial schedule", "images", "tokenize", "tokenize by a function",
        "tokenize and pack", "offline loss", "inline loss", "several students",
        "metrics", "models", "stored targets", "teacher actor", "teacher model",
    ],
)  # fmt: skip
def test_digests_of_objects_of_trainwright_are_those_that_runs_have_stored(value: Any, stored: str) -> None:
    """The digests were computed by the code that stored `tests/stored_runs/0.1.0`. No code of the user's is in them,
    which would change with the version of Python."""
    assert CodeFingerprints().digest(value).startswith(stored)


def test_the_description_of_a_distillation_is_the_stored_one() -> None:
    job = tw.Job(
        name="student", model=MODELS, optimizer=dict, loss=OFFLINE, inputs="x", targets=("y", "teacher.t"),
        train=LABELLED.beside(BESIDE.map_batches(READER)).map_batches(str),
        metrics=student_metrics({"accuracy": operator.eq}, OFFLINE), batch_size=1,
    )  # fmt: skip
    words = describe(job, train=job.train.index())
    assert words["model"] == "StudentModels [83ffd6d6]"
    assert words["loss"] == "DistillationLoss [dbf9d3ec]"
    assert words["metrics"] == "accuracy=StudentMetric [a15fb0a7]"
    assert words["train"].endswith("data 8f58c315, functions 977cb152")


def test_what_is_cached_when_it_is_first_used_is_no_change() -> None:
    functions = TEXTS.tokenize().functions
    before = CodeFingerprints().digest(functions)
    functions[0]({"text": np.array(["a"], dtype=object)})
    assert CodeFingerprints().digest(functions) == before


def test_versions_of_installed_packages_count(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("installed_somewhere")
    module.__version__ = "1.0"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "installed_somewhere", module)
    used = cell(4, "def build():\n    return installed.thing()", installed=module)["build"]
    reached: dict[str, str] = {}
    CodeFingerprints().digest(used, reached)
    assert reached["installed_somewhere"] == "1.0"


def test_a_job_that_travelled_is_the_same(described: Any, tmp_path: Path) -> None:
    """As a detached driver describes it."""
    described({})
    job = load_job(str(tmp_path / "here" / "job.py"))
    assert description_changes(describe(job), describe(unpickle_job(pickle_job(job)))) == []
    (tmp_path / "packed").write_bytes(pickle_job(job))
    read = "import sys, json; from trainwright.worker.worker_config import unpickle_job; "
    read += "from trainwright.planning.job_description import describe; "
    read += "print(json.dumps(describe(unpickle_job(open(sys.argv[1], 'rb').read()))))"
    done = subprocess.run(
        [sys.executable, "-c", read, tmp_path / "packed"], capture_output=True, text=True, check=False, cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "here")},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert description_changes(describe(job), json.loads(done.stdout)) == []


def test_every_process_gives_the_same_fingerprint(described: Any, tmp_path: Path) -> None:
    described({})
    read = "import sys, json; from trainwright.planning.job_file import load_job; "
    read += "from trainwright.planning.job_description import describe; "
    read += "print(json.dumps(describe(load_job(sys.argv[1]))))"
    told = {
        subprocess.run(
            [sys.executable, "-c", read, tmp_path / "here" / "job.py"],
            capture_output=True, text=True, check=True, env={**os.environ, "PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("1", "2")
    }  # fmt: skip
    assert len(told) == 1


def test_an_older_description_raises_no_false_alarm(described: Any) -> None:
    now = described({})
    old = {name: text for name, text in now.items() if name != CODE_FIELD}
    old |= {"model": "partial [01234567]", "train": now["train"].replace("functions ", "functions 0")[:-1]}
    assert comparable(now) and not comparable(old)
    assert description_changes(old, now) == []
    assert description_changes({**old, "batch_size": "7", "model": "other [01234567]"}, now) == [
        "model: other -> partial", "batch_size: 7 -> 1"]  # fmt: skip
    table = json.loads(now[CODE_FIELD])
    python = {
        **now,
        "model": "partial [01234567]",
        CODE_FIELD: json.dumps({**table, "scheme": "bytecode of Python 3.9"}),
    }
    assert description_changes(python, now) == [] and not comparable(python)


def test_secrets_do_not_count(described: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    text = JOB.replace("FACTOR = 1", "import os\nFACTOR = os.environ['SOME_TOKEN']")
    monkeypatch.setenv("SOME_TOKEN", "one-secret")
    before = described({"job.py": text})
    monkeypatch.setenv("SOME_TOKEN", "another-secret")
    assert description_changes(before, described({"job.py": text})) == []
