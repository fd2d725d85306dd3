"""Wheel, sdist and metadata: the mapped folders arrive under one import name and nothing else does."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import trainwright as tw

ROOT = Path(__file__).resolve().parents[2]
MAPPED = {"app": "trainwright", "strategies": "trainwright/strategies", "datasets": "trainwright/datasets",
          "clusters": "trainwright/clusters"}  # fmt: skip
EXTRAS = ("torch", "tensorflow", "mlflow", "wandb")  # each is imported where a job asks for it
BRING_YOUR_OWN = {"IPython"}  # used only where it is already loaded: in a notebook
LEFT_OUT = (".git", ".venv*", ".typing", "build", "dist", "data", "runs", "*.egg-info", "__pycache__", ".*cache")


@dataclass(frozen=True, kw_only=True)
class Built:
    """The copied tree, its wheel and sdist, and the folder that the wheel was installed into."""

    tree: Path
    wheel: Path
    sdist: Path
    installed: Path


def project() -> dict[str, Any]:
    """The [project] table."""
    table: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return table


def sources(tree: Path) -> set[str]:
    """Every file of the three packages, by its name in the wheel."""
    return {
        f"{target}/{path.relative_to(tree / folder).as_posix()}"
        for folder, target in MAPPED.items()
        for path in (tree / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def run(*command: str | Path, cwd: Path, path: Path | None = None) -> str:
    """Standard output of a command that must succeed; `path` becomes PYTHONPATH."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if path is not None:
        environment["PYTHONPATH"] = str(path)
    done = subprocess.run(
        list(map(str, command)), cwd=cwd, env=environment, capture_output=True, text=True, timeout=150
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    folder = tmp_path_factory.mktemp("build")
    tree, out, installed = folder / "tree", folder / "out", folder / "installed"
    shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(*LEFT_OUT))
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, tree, cwd=folder)
    (wheel,), (sdist,) = out.glob("*.whl"), out.glob("*.tar.gz")
    run(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", installed, wheel, cwd=folder)
    return Built(tree=tree, wheel=wheel, sdist=sdist, installed=installed)


def test_wheel_holds_every_file_under_one_import_name(built: Built) -> None:
    with zipfile.ZipFile(built.wheel) as archive:
        names = set(archive.namelist())
    code = {name for name in names if ".dist-info/" not in name}
    assert code == sources(built.tree)
    assert {name.split("/")[0] for name in code} == {"trainwright"}
    assert "trainwright/py.typed" in code


def test_wheel_has_licence_and_command(built: Built) -> None:
    with zipfile.ZipFile(built.wheel) as archive:
        texts = {name.split(".dist-info/")[-1]: name for name in archive.namelist() if ".dist-info/" in name}
        assert b"License-Expression: Apache-2.0" in archive.read(texts["METADATA"])
        assert archive.read(texts["licenses/LICENSE"]) == (ROOT / "LICENSE").read_bytes()
        assert b"trainwright = trainwright.cli.main:main" in archive.read(texts["entry_points.txt"])


def test_sdist_is_a_checkout_that_can_be_worked_with(built: Built) -> None:
    with tarfile.open(built.sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    files = {
        "cluster.yaml",
        "constraints.txt",
        "Makefile",
        "LICENSE",
        "README.md",
        "CONTRIBUTING.md",
        "CHANGELOG.md",
        ".ci/run",
    }
    for folder in ("app", "strategies", "datasets", "tests", "examples", "benchmarks"):
        files |= {path.relative_to(built.tree).as_posix() for path in (built.tree / folder).rglob("*.py")}
    files |= {path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").glob("*.md")}
    assert files - names == set()


def test_installed_wheel_runs_away_from_the_checkout(built: Built, tmp_path: Path) -> None:
    imports = "import trainwright, trainwright.strategies, trainwright.datasets; print(trainwright.__file__)"
    where = run(sys.executable, "-c", imports, cwd=tmp_path, path=built.installed)
    assert Path(where.strip()).is_relative_to(built.installed)
    assert "fit" in run(sys.executable, "-m", "trainwright", "--help", cwd=tmp_path, path=built.installed)
    init = ("init", "--cluster", "aws", "--set", "region=eu-west-1", "--out", tmp_path / "mine.yaml")
    run(sys.executable, "-m", "trainwright", *init, cwd=tmp_path, path=built.installed)
    written, here = (tmp_path / "mine.yaml").read_text("utf-8"), (ROOT / "cluster.yaml").read_text("utf-8")
    assert written == here.replace("region: us-west-2", "region: eu-west-1")
    assert "fit" in run(built.installed / "bin" / "trainwright", "--help", cwd=tmp_path, path=built.installed)


def test_import_of_datasets_finds_the_real_one_beside_a_checkout(tmp_path: Path) -> None:
    (tmp_path / "datasets").mkdir()
    (tmp_path / "datasets" / "__init__.py").write_text("owner = 'Hugging Face'\n", encoding="utf-8")
    program = (
        "import sys, datasets\n"
        "assert datasets.owner == 'Hugging Face', datasets.__file__\n"
        f"assert sys.path.count({str(ROOT)!r}) == 1, 'the checkout has left sys.path'\n"
        "import trainwright.datasets\n"
        "assert sys.modules['datasets'] is datasets is not trainwright.datasets\n"
        "print('both')\n"
    )
    assert run(sys.executable, "-c", program, cwd=tmp_path, path=Path(f"{ROOT}{os.pathsep}{tmp_path}")) == "both\n"


def test_import_of_datasets_fails_as_usual_where_there_is_none(tmp_path: Path) -> None:
    program = (
        "try:\n    import datasets\nexcept ModuleNotFoundError as error:\n    print(error.name)\n"
        "import sys\nassert 'datasets' not in sys.modules\n"
    )
    assert run(sys.executable, "-S", "-c", program, cwd=tmp_path, path=ROOT) == "datasets\n"


def direct_requirements() -> list[Requirement]:
    """What `make setup` installs: pyproject.toml's dependencies and the tools, with the extras that they name."""
    table = project()
    extras = table["optional-dependencies"]
    asked = [Requirement(line) for line in [*table["dependencies"], *extras["dev"]]]
    own = [extra for requirement in asked if requirement.name == "trainwright" for extra in requirement.extras]
    asked += [Requirement(line) for extra in sorted(own) for line in extras[extra]]
    return [requirement for requirement in asked if requirement.name != "trainwright"]


def pins() -> dict[str, str]:
    """Version by canonical name, from constraints.txt."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    split = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(name): version for name, version in split}


@pytest.mark.parametrize("requirement", direct_requirements(), ids=lambda requirement: requirement.name)
def test_each_requirement_is_pinned_to_what_is_tested_here(requirement: Requirement) -> None:
    pinned = pins()[canonicalize_name(requirement.name)]
    assert requirement.specifier.contains(pinned)
    assert metadata.version(requirement.name).partition("+")[0] == pinned


@pytest.mark.parametrize("end", ["lowest", "highest"])
def test_the_ends_of_the_matrix_are_those_of_the_ranges(end: str) -> None:
    lines = [line for line in (ROOT / ".ci" / f"{end}.txt").read_text().splitlines() if not line.startswith("#")]
    table = project()
    asked = [*table["dependencies"], *(line for lines in table["optional-dependencies"].values() for line in lines)]
    ranges = {each.name: each.specifier for each in map(Requirement, asked)}
    for line in lines:
        name, _, pinned = line.partition("==")
        major, minor, *_ = Version(pinned).release
        assert ranges[name].contains(pinned), name
        if end == "highest":
            assert not ranges[name].contains(f"{major}.{minor + 1}" if name != "pyarrow" else f"{major + 1}"), name
        else:
            (low,) = (each.version for each in ranges[name] if each.operator == ">=")
            assert Version(low) == Version(pinned), name


def imported_roots() -> set[str]:
    """Top-level names of everything that the three packages import, wherever in a file."""
    trees = [ast.parse(path.read_text(encoding="utf-8")) for folder in MAPPED for path in (ROOT / folder).rglob("*.py")]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module and not node.level]
    return {name.partition(".")[0] for name in names}


def test_everything_imported_is_asked_for() -> None:
    homes = metadata.packages_distributions()
    third_party = imported_roots() - sys.stdlib_module_names - {"trainwright"} - BRING_YOUR_OWN
    extras = project()["optional-dependencies"]
    lines = [*project()["dependencies"], *(line for name in EXTRAS for line in extras[name])]
    asked = {canonicalize_name(Requirement(line).name) for line in lines}
    missing = {name for name in third_party if asked.isdisjoint(map(canonicalize_name, homes.get(name, [])))}
    assert missing == set()


def test_constraints_name_versions_only() -> None:
    for name, version in pins().items():
        assert version.replace(".", "").isalnum(), f"{name}=={version} is bound to one builder's wheels"


def test_the_version_is_the_same_everywhere() -> None:
    """In the package, the changelog and the citation."""
    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    assert tw.__version__ == version
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    newest = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").partition("\n## ")[2]
    assert newest.startswith(f"{version},")
