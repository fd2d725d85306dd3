"""`benchmarks/run.py`: each benchmark is in its table, and a smoke run fails where a benchmark does."""

from __future__ import annotations

import ast
import importlib
import operator
import os
import re
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"
SOURCE = """
from figures import Figure

def measure(folder, *, smoke):
    assert smoke
    return [Figure(benchmark='broken', what='time of a step', unit='ms', ours={ours}, peer=1.0, pairs=1)]
"""


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("run")


def _kept() -> dict[Path, bytes]:
    """What a measured run writes."""
    return {path: path.read_bytes() for path in [FOLDER / "RESULTS.md", *(FOLDER / "results").iterdir()]}


def _functions(path: Path) -> dict[str, ast.FunctionDef]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_a_smoke_run_is_of_every_module_that_measures(run: ModuleType) -> None:
    modules = {path.stem: _functions(path) for path in FOLDER.glob("*.py")}
    measuring = {name for name, functions in modules.items() if "measure" in functions}
    assert set(run.default_names(smoke=True)) == measuring
    for name in sorted(measuring):
        assert [argument.arg for argument in modules[name]["measure"].args.kwonlyargs] == ["smoke"], name


def test_a_measured_run_leaves_out_what_needs_a_gpu(run: ModuleType) -> None:
    assert set(run.default_names(smoke=True)) - set(run.default_names(smoke=False)) == {"gpu_step", "gpu_recovery"}


def test_no_name_is_every_benchmark_and_an_unknown_one_is_refused(
    run: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run._options(["--smoke"]).names == [] and run._options(["recovery"]).names == ["recovery"]
    with pytest.raises(SystemExit):
        run._options(["recoverry"])
    assert "unknown benchmark 'recoverry'; choose from step_time" in capsys.readouterr().err


def test_pages_show_the_figures_that_are_kept(run: ModuleType) -> None:
    rows = importlib.import_module("rows")
    for name in rows.PAGES:
        page = (FOLDER.parent / name).read_text(encoding="utf-8")
        blank, count = rows.ROW.subn(lambda row: re.sub(r"(?<=.)\| [\d.]+ ", "| 0 ", row[0]), page)
        assert rows.filled(blank) == page, f"run `python benchmarks/rows.py`: {name} is out of date"
        assert count == page.count(" --> |\n") > 10


@pytest.mark.parametrize(
    ("source", "told"),
    [
        (SOURCE.format(ours="float('nan')"), "time of a step: trainwright is nan ms"),
        (SOURCE.format(ours="0.0"), "time of a step: trainwright is 0 ms"),
        ("def measure(folder, *, smoke):\n    raise LookupError('no such layer')\n", "LookupError: no such layer"),
        ("import time\ndef measure(folder, *, smoke):\n    time.sleep(600)\n", "stopped after 2 s"),
    ],
)
def test_a_broken_benchmark_is_named_and_nothing_is_kept(
    run: ModuleType,
    source: str,
    told: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "broken.py").write_text(source, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setitem(run.BENCHMARKS, "broken", run.Benchmark(deadline_s=1))
    if "sleep" in source:
        monkeypatch.setattr(run, "SMOKE_DEADLINE_S", 2)
    before = _kept()
    assert run.main(["broken", "--smoke"]) == 1
    said = capfd.readouterr()
    assert told in said.out + said.err
    assert "failed: broken" in said.err
    assert _kept() == before


def test_a_benchmark_that_works_is_shown_and_nothing_is_kept(
    run: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Also with a relative PYTHONPATH, although the benchmark runs in another folder."""
    (tmp_path / "broken.py").write_text(SOURCE.format(ours="2.0"), encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", os.path.relpath(tmp_path))
    monkeypatch.setitem(run.BENCHMARKS, "broken", run.Benchmark(deadline_s=1, peer="no_such_package"))
    before = _kept()
    assert run.main(["broken", "--smoke"]) == 0
    said = capfd.readouterr()
    assert "no_such_package is not installed and is not measured" in said.out
    assert "time of a step  2 ms" in said.out
    assert _kept() == before


def test_memory_is_that_of_the_process_that_is_measured(run: ModuleType) -> None:
    """`ru_maxrss` of a new process begins at that of the process that started it, such as this one."""
    processes = importlib.import_module("processes")
    cost = processes.run_alone(partial(processes.measured, partial(operator.mul, b"x", 64 << 20)))
    assert 60 << 20 < cost.grown_bytes < 80 << 20
    assert cost.seconds > 0
