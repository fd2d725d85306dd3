"""torch and TensorFlow share a process in any order of imports, and a missing one is named with the command.

Each order runs in a process of its own. Triton's library crashes where it binds to TensorFlow's LLVM. The CUDA builds
of torch bring triton; for the CPU builds the extra `dev` installs it. The tests need no Ray.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import sysconfig
from importlib import metadata
from importlib.machinery import ExtensionFileLoader
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from trainwright.core import frameworks
from trainwright.core.errors import JobError, MissingFramework, TrainwrightError, UserCodeError

ROOT = Path(__file__).resolve().parents[2]
HIDDEN = "import ctypes; assert not hasattr(ctypes.CDLL(None), 'TF_Version'), 'TensorFlow exports its symbols'"
USED = """
import tensorflow as tf, torch
import sys
import torch._dynamo.utils  # torch's compiler, which imports triton where that is installed
assert "triton._C.libtriton" in sys.modules, "triton was not loaded, and so could not crash"
torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], 0.1).step()
assert int(2 * tf.constant(3)) == 6
"""
ENGINES = (
    "import trainwright.strategies.tensorflow.strategy_engines, trainwright.strategies.torch.engines.data_parallel"
)
ORDERS = {
    # As in a mixed distillation and a spare: torch's compiler is imported last.
    "both engines": f"{ENGINES}\n{USED}\n{HIDDEN}",
    # As in a worker that a fork server of TensorFlow makes, where the job uses torch too.
    "forked": "import os, trainwright.strategies.tensorflow.strategy_engines\n"
    "if pid := os.fork():\n"
    f"    raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))\n{USED}\n{HIDDEN}",
    # As in a notebook.
    "tensorflow before trainwright": f"import tensorflow, trainwright\n{USED}",
    "keras on torch": f"import os\nos.environ['KERAS_BACKEND'] = 'torch'\nimport keras, trainwright\n{USED}\n{HIDDEN}",
}
ABSENT = ("torch", "tensorflow", "keras")


@pytest.mark.parametrize("order", ORDERS)
def test_no_order_of_imports_crashes(order: str) -> None:
    done = subprocess.run([sys.executable, "-c", ORDERS[order]], capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr


@pytest.fixture
def flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A library of triton that cannot be loaded, and the flags with which that is tried."""
    library = tmp_path / "triton" / "_C" / f"libtriton{sysconfig.get_config_var('EXT_SUFFIX')}"
    library.parent.mkdir(parents=True)
    library.touch()
    for package in (library.parent, library.parent.parent):
        (package / "__init__.py").touch()
    used: list[int] = []
    load = ExtensionFileLoader.create_module

    def create(loader: ExtensionFileLoader, spec: object) -> ModuleType:
        used.append(sys.getdlopenflags())
        return load(loader, spec)  # type: ignore[arg-type]

    monkeypatch.setattr(ExtensionFileLoader, "create_module", create)
    for name in ("triton", "triton._C", "triton._C.libtriton"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))  # so that the test ends without it
        del sys.modules[name]
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    return used


@pytest.mark.parametrize("exported", [False, True])
def test_triton_prefers_its_own_symbols_only_where_tensorflow_exports_its(
    flags: list[int], monkeypatch: pytest.MonkeyPatch, exported: bool
) -> None:
    exports = "tensorflow.python.pywrap_dlopen_global_flags"
    monkeypatch.delitem(sys.modules, exports, raising=False)
    if exported:
        monkeypatch.setitem(sys.modules, exports, ModuleType(exports))
    before = sys.getdlopenflags()
    with pytest.raises(ImportError, match="libtriton"):
        importlib.import_module("triton._C.libtriton")
    assert flags == [before | os.RTLD_DEEPBIND if exported else before]
    assert sys.getdlopenflags() == before


def test_a_preloaded_library_is_not_bypassed(flags: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    exports = "tensorflow.python.pywrap_dlopen_global_flags"
    monkeypatch.setitem(sys.modules, exports, ModuleType(exports))
    monkeypatch.setenv("LD_PRELOAD", "libjemalloc.so")
    with pytest.raises(TrainwrightError, match="import trainwright first"):
        importlib.import_module("triton._C.libtriton")
    assert flags == []


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for PYTHONPATH with trainwright and all that is installed here but the frameworks."""
    folder = tmp_path_factory.mktemp("bare")
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if entry.name.partition("-")[0].partition(".")[0] not in (*ABSENT, "trainwright"):
            (folder / entry.name).symlink_to(entry)
    link_checkout(folder)
    return folder


def link_checkout(folder: Path) -> None:
    """Make `import trainwright` find this checkout in a folder for PYTHONPATH."""
    package = folder / "trainwright"
    package.mkdir()
    for entry in (ROOT / "app").iterdir():
        (package / entry.name).symlink_to(entry)
    for name in ("strategies", "datasets", "clusters"):
        (package / name).symlink_to(ROOT / name)


def with_requirements(*names: str) -> set[str]:
    """The installed distributions of these names and of all that they require."""
    found: set[str] = set()
    unseen = [*names]
    while unseen:
        name = canonicalize_name(unseen.pop())
        if name not in found:
            found.add(name)
            needs = map(Requirement, metadata.requires(name) or ())
            unseen += [need.name for need in needs if need.marker is None or need.marker.evaluate({"extra": ""})]
    return found


def test_tests_for_gpus_need_torch_numpy_pyarrow_and_pytest_alone(tmp_path: Path) -> None:
    for name in with_requirements("torch", "numpy", "pyarrow", "pytest"):
        distribution = metadata.distribution(name)
        for top in {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
            if not (tmp_path / top).exists():  # several distributions share a namespace
                (tmp_path / top).symlink_to(distribution.locate_file(top))
    link_checkout(tmp_path)
    done = subprocess.run(
        [sys.executable, "-S", "-m", "pytest", "-q", "tests/gpu", "-k", "goes_on_to_the_same_bits and fp32"],
        cwd=ROOT,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(tmp_path), "TRAINWRIGHT_GPU_STAND_IN": "cpu"},
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout


LAZY = """
import trainwright as tw

def build():
    import keras
    return keras.Sequential([keras.layers.Dense(1)])

job = tw.Job(
    name="lazy", model=build, loss=abs, optimizer=list, train=tw.datasets.table({"x": [[1.0]], "y": [1.0]}),
    inputs="x", targets="y", batch_size=1, epochs=1, workers=1,
)
"""


@pytest.mark.parametrize(
    ("job", "line"),
    [
        ("import torch", "torch is not installed: pip install 'trainwright[torch]'"),
        (LAZY, "keras is not installed: pip install 'trainwright[tensorflow]'"),
    ],
    ids=["job file", "model()"],
)
def test_a_missing_framework_is_named_with_the_command(bare: Path, tmp_path: Path, job: str, line: str) -> None:
    (tmp_path / "job.py").write_text(job, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-S", "-m", "trainwright", "plan", "job.py"],
        cwd=tmp_path,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(bare)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 1, done.stderr
    assert line in done.stderr
    assert "Traceback" not in done.stderr


def test_only_a_framework_that_is_not_installed_is_missing() -> None:
    assert frameworks.missing_framework(ModuleNotFoundError("no", name="torch.no_such_module")) is None
    assert frameworks.missing_framework(ModuleNotFoundError("no", name="no_such_package")) is None
    assert frameworks.missing_framework(ImportError("no", name="torch")) is None
    with pytest.raises(ModuleNotFoundError, match="no_such_engine"):
        frameworks.load_module("trainwright.strategies.torch.no_such_engine")


def test_a_missing_framework_is_an_error_of_the_users_that_names_the_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    error = frameworks.missing_framework(ModuleNotFoundError("no", name="tensorflow.keras"), "rank 1")
    assert isinstance(error, UserCodeError) and not isinstance(error, JobError)
    assert str(error) == "tensorflow is not installed: pip install 'trainwright[tensorflow]' (rank 1)"
    assert isinstance(error, MissingFramework)
