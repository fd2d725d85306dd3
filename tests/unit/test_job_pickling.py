"""Jobs on their way to other processes, and in words."""

from __future__ import annotations

import functools
import importlib
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

import trainwright as tw
from trainwright.core.errors import JobError
from trainwright.planning.job_description import describe, description_changes
from trainwright.worker.worker_config import pickle_job, unpickle_job

SIZE = 3


def build(width: int = SIZE) -> dict[str, int]:
    # a comment that may change
    return {"width": width}


def job(**fields: Any) -> tw.Job:
    given = {"name": "n", "model": build, "optimizer": list, "loss": max, "inputs": "x", "batch_size": 1}
    return tw.Job(**{**given, "train": tw.datasets.table({"x": [[1.0]]}), **fields})


def test_functions_of_a_module_that_a_worker_cannot_import_travel(tmp_path: Path) -> None:
    (tmp_path / "packed").write_bytes(pickle_job(job()))
    read = "import sys; from trainwright.worker.worker_config import unpickle_job; "
    read += "print(unpickle_job(open(sys.argv[1], 'rb').read()).model())"
    done = subprocess.run(
        [sys.executable, "-c", read, tmp_path / "packed"], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert done.stdout.strip() == "{'width': 3}", done.stderr


def test_modules_that_are_imported_late_are_as_they_were_when_the_job_was_packed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On another machine, where they are not, or here after a change: all workers run the same code."""
    home, elsewhere = tmp_path / "home", tmp_path / "elsewhere"
    (home / "own" / "deep").mkdir(parents=True)
    elsewhere.mkdir()
    (home / "own" / "__init__.py").write_text("from own.scale import FACTOR\n")
    (home / "own" / "scale.py").write_text("FACTOR = 2\n")
    (home / "own" / "deep" / "__init__.py").write_text("from . import model\n")
    (home / "own" / "deep" / "model.py").write_text("from .. import scale\ndef made():\n    return scale.FACTOR\n")
    building = "def build():\n    from own.deep.model import made\n    return made(), made.__code__\n"
    (home / "building.py").write_text(building)
    monkeypatch.syspath_prepend(str(home))
    (tmp_path / "packed").write_bytes(pickle_job(job(model=importlib.import_module("building").build)))
    assert "own" not in sys.modules, "nothing was run"
    (home / "own" / "scale.py").write_text("FACTOR = 3\n")
    read = "import sys; from trainwright.worker.worker_config import unpickle_job; "
    read += "job = unpickle_job(open(sys.argv[1], 'rb').read()); "
    read += "made, code = job.model()"
    for folder in (home, elsewhere):
        done = subprocess.run(
            [sys.executable, "-c", f"{read}; print(made, code.co_filename)", tmp_path / "packed"],
            capture_output=True, text=True, check=False, cwd=folder,
        )  # fmt: skip
        assert done.stdout.split() == ["2", str(home / "own" / "deep" / "model.py")], done.stderr
    assert not list((home / "own").rglob("*.pyc"))
    assert unpickle_job((tmp_path / "packed").read_bytes()).model()[0] == 3, "this process has its own"
    for name in [name for name in sys.modules if name.partition(".")[0] in ("own", "building")]:
        monkeypatch.delitem(sys.modules, name)


def test_what_cannot_travel_is_said() -> None:
    lock = threading.Lock()
    with pytest.raises(JobError, match="cannot be sent to the workers"):
        pickle_job(job(model=lambda: lock))


def test_a_module_that_two_names_are_for_hides_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "another_name", sys.modules[__name__])
    lock = threading.Lock()
    with pytest.raises(JobError, match="cannot be sent to the workers"):
        pickle_job(job(model=lambda: lock))


def test_packages_of_another_environment_go_by_their_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch does where PYTHONPATH leads to it."""
    packages = tmp_path / "lib" / "site-packages"
    packages.mkdir(parents=True)
    (packages / "elsewhere.py").write_text("def build():\n    return 'what only the package holds'\n")
    monkeypatch.syspath_prepend(str(packages))
    elsewhere = importlib.import_module("elsewhere")
    packed = pickle_job(job(model=elsewhere.build))
    assert b"elsewhere" in packed and b"what only" not in packed


def test_the_same_job_is_described_alike_and_a_changed_one_is_not() -> None:
    assert not description_changes(describe(job()), describe(job(workers=7, keep=9, storage="elsewhere", plan="dp=7")))
    (line,) = description_changes(describe(job(batch_size=1)), describe(job(batch_size=2)))
    assert line == "batch_size: 1 -> 2"
    assert description_changes(describe(job()), describe(job(model=lambda: build(4))))
    assert description_changes(describe(job(model=lambda: 1)), describe(job(model=lambda: 2)))


def test_closures_and_partials_are_told_apart_by_what_they_hold() -> None:
    def wide(width: int) -> Any:
        return lambda: build(width)

    assert describe(job(model=wide(1))) == describe(job(model=wide(1)))
    assert description_changes(describe(job(model=wide(1))), describe(job(model=wide(2))))
    one, two = (describe(job(model=functools.partial(build, width=width))) for width in (1, 2))
    assert description_changes(one, two) and not description_changes(
        one, describe(job(model=functools.partial(build, width=1)))
    )


STRANGE = """
import sys
sys.path.insert(0, {here!r})
from test_job_pickling import job
from trainwright.planning.job_description import describe

class Plain: ...
thing = Plain()

def local():
    def again(n=0, other=thing):
        return again(n - 1) if n in {{"a", "b", "c"}} else thing
    return again

print(describe(job(model=local())))
"""


def test_the_description_is_the_same_in_every_process(tmp_path: Path) -> None:
    (tmp_path / "strange.py").write_text(STRANGE.format(here=str(Path(__file__).parent)))
    told = {
        subprocess.run(
            [sys.executable, tmp_path / "strange.py"],
            capture_output=True, text=True, check=True, env={**os.environ, "PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("1", "2", "3")
    }  # fmt: skip
    assert len(told) == 1 and "0x" not in told.pop()


def test_changed_data_and_transforms_are_another_job_and_another_place_is_not() -> None:
    data = tw.datasets.table({"x": [[1.0]]})
    index, other = data.index(), tw.datasets.table({"x": [[1.0], [2.0]]}).index()
    plain = describe(job(train=data), train=index)
    assert not description_changes(plain, describe(job(train=data), train=index))
    (line,) = description_changes(plain, describe(job(train=data), train=other))
    assert f"{index.rows} rows in 1 row groups, data {index.hash[:8]}" in line and "2 rows in 1" in line
    one, two = (data.map_batches(lambda columns: columns), data.map_batches(lambda columns: {**columns}))
    assert description_changes(describe(job(train=one)), describe(job(train=two)))


def test_more_epochs_matter_where_a_schedule_looks_at_the_end() -> None:
    assert not description_changes(describe(job(epochs=1)), describe(job(epochs=2)))
    scheduled = [describe(job(epochs=epochs, schedule=tw.schedules.cosine)) for epochs in (1, 2)]
    assert description_changes(*scheduled)
