"""The folder `datasets/` gives way to Hugging Face's package of that name, and stays light."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def run(program: str, *paths: Path) -> str:
    """Run a program in the checkout with `paths` behind it on sys.path."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def other_package(folder: Path) -> None:
    (folder / "datasets").mkdir()
    (folder / "datasets" / "__init__.py").write_text("from datasets.part import owner\n")
    (folder / "datasets" / "part.py").write_text("owner = 'the other package'\n")


def test_import_datasets_gives_the_other_package_and_ours_still_works(tmp_path: Path) -> None:
    other_package(tmp_path)
    program = (
        "import sys; sys.path.insert(0, ''); before = list(sys.path)\n"
        "import datasets, datasets.part\n"
        "import trainwright.datasets\n"
        "assert sys.path == before\n"
        "assert trainwright.datasets.table({'x': [1, 2]}).index().rows == 2\n"
        "assert sys.modules['datasets'] is datasets\n"
        "print(datasets.owner, datasets.part.owner, sep=', ')"
    )
    assert run(program, tmp_path) == "the other package, the other package"


def test_the_other_order_of_imports_works_too(tmp_path: Path) -> None:
    other_package(tmp_path)
    program = (
        "import trainwright.datasets as ours, datasets\n"
        "print(datasets.owner, ours.__name__, ours.parquet.__module__, sep=', ')"
    )
    assert run(program, tmp_path) == "the other package, trainwright.datasets, trainwright.datasets.dataset"


def test_without_the_other_package_the_import_fails_as_ever(tmp_path: Path) -> None:
    program = (
        "import sys; sys.path[:] = ['', *(p for p in sys.path if 'site-packages' not in p)]\n"
        "try:\n    import datasets\n"
        "except ModuleNotFoundError as error:\n    print(error.name, 'datasets' in sys.modules)"
    )
    assert run(program) == "datasets False"


def test_importing_ours_imports_neither_ray_nor_arrow_nor_a_framework() -> None:
    program = (
        "import sys, trainwright.datasets\n"
        "import trainwright.datasets.sample_order, trainwright.datasets.sample_order\n"
        "print([name for name in ('ray', 'pyarrow', 'pandas', 'torch', 'tensorflow') if name in sys.modules])"
    )
    assert run(program) == "[]"


def test_delivery_without_ray_data_does_not_import_ray() -> None:
    program = (
        "import sys, trainwright.datasets.loading.batch_loader\n"
        "print([name for name in ('ray', 'torch', 'tensorflow') if name in sys.modules])"
    )
    assert run(program) == "[]"


def test_public_names_are_these() -> None:
    import trainwright.datasets as ours

    names = [
        "Dataset",
        "arrow",
        "concat",
        "csv",
        "decode_image",
        "from_huggingface",
        "from_ray",
        "from_tf",
        "from_torch",
        "images",
        "json_lines",
        "mix",
        "parquet",
        "split",
        "table",
        "text",
        "tfrecord",
        "webdataset",
    ]
    assert sorted(ours.__all__) == dir(ours) == names
    assert all(callable(getattr(ours, name)) for name in ours.__all__)
