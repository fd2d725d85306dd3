"""Private symbols of torch, TensorFlow, Keras and Ray: each is still there, and only a `compat` module names it."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("app", "strategies", "datasets")
LIBRARIES = ("torch", "ray", "tensorflow", "keras")
COMPAT = (
    "app/ray_cluster/ray_compat.py",
    "datasets/ray_data/delivery_pipeline.py",
    "strategies/torch/torch_compat.py",
    "strategies/tensorflow/tensorflow_compat.py",
)
PRIVATE_PACKAGES = ("keras.src", "tensorflow.python")
OPERATORS = "torch.ops.aten."  # named as the operators' schema is, which torch keeps compatible

# Private attributes of objects: class that has them -> attributes. They are used where the object is at hand.
ATTRIBUTES = {
    "torch:nn.Module": ("_parameters", "_buffers", "_forward_hooks"),
    "torch:Tensor": ("_version", "_backward_hooks", "_post_accumulate_grad_hooks"),
    "torch:UntypedStorage": ("_cdata",),
    "torch:operator": ("_overloadpacket", "_schema"),
    "torch:FSDPState": ("_get_fsdp_state",),
    "tensorflow:Dataset": ("_input_dataset",),
    "keras:Layer": ("_layers", "_flatten_layers", "_trainable_variables", "_deferred_dependencies"),
    "keras:Model": ("_compile_loss", "_compile_metrics"),
    "keras:Dropout": ("_seed_generators",),
    "keras:Metric": ("_fn", "_fn_kwargs"),
    "keras:Optimizer": ("_all_reduce_sum_gradients", "_learning_rate"),
}


@dataclass(frozen=True, kw_only=True)
class Use:
    """A symbol of a library that a file names."""

    symbol: str
    file: str
    line: int

    @property
    def library(self) -> str:
        return self.symbol.partition(".")[0]

    @property
    def private(self) -> bool:
        hidden = any(part.startswith("_") and not part.startswith("__") for part in self.symbol.split("."))
        return (hidden or self.symbol.startswith(PRIVATE_PACKAGES)) and not self.symbol.startswith(OPERATORS)


@cache
def text(file: str) -> str:
    return (ROOT / file).read_text(encoding="utf-8")


@cache
def tree(file: str) -> ast.Module:
    return ast.parse(text(file))


def files() -> list[str]:
    return [str(path.relative_to(ROOT)) for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]


def uses(file: str) -> Iterator[Use]:
    """Symbols of the libraries that a file imports, and attributes that it takes of what it imports."""
    if not any(library in text(file) for library in LIBRARIES):
        return
    names: dict[str, str] = {}
    for node in ast.walk(tree(file)):
        if isinstance(node, ast.Import):
            for each in node.names:
                if each.name.partition(".")[0] in LIBRARIES:
                    names[each.asname or each.name.partition(".")[0]] = (
                        each.name if each.asname else each.name.partition(".")[0]
                    )
                    yield Use(symbol=each.name, file=file, line=node.lineno)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in LIBRARIES:
            for each in node.names:
                names[each.asname or each.name] = symbol = f"{node.module}.{each.name}"
                yield Use(symbol=symbol, file=file, line=node.lineno)
    for node in ast.walk(tree(file)):
        parts: list[str] = []
        inner: ast.AST = node
        while isinstance(inner, ast.Attribute):
            parts.insert(0, inner.attr)
            inner = inner.value
        if parts and isinstance(inner, ast.Name) and inner.id in names:
            yield Use(symbol=".".join((names[inner.id], *parts)), file=file, line=node.lineno)


def resolve(symbol: str) -> Any:
    """What a dotted name stands for: the longest module, then attributes. Raises AttributeError."""
    parts = symbol.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for name in parts[length:]:
            found = getattr(found, name)
        return found
    raise AttributeError(symbol)


def users(compat: str) -> list[str]:
    """Files that import from a compat module."""
    module = "trainwright." + compat.removesuffix(".py").removeprefix("app/").replace("/", ".")
    found = (
        file
        for file in files()
        if Path(compat).stem in text(file)
        for node in ast.walk(tree(file))
        if isinstance(node, ast.ImportFrom) and f"{node.module}.{node.names[0].name}".startswith(module)
    )
    return sorted({*found})


def missing(compat: str) -> list[str]:
    """A line for each private symbol of a compat module that the installed library does not have."""
    lines = []
    for use in {use.symbol: use for use in uses(compat) if use.private}.values():
        try:
            resolve(use.symbol)
        except AttributeError:
            where = f"{use.file}:{use.line}, for {', '.join(users(compat))}"
            lines.append(f"{use.symbol} is not in {use.library} {version(use.library)}; used in {where}")
    return lines


@pytest.mark.parametrize("compat", COMPAT)
def test_every_private_symbol_is_there(compat: str) -> None:
    assert [use for use in uses(compat) if use.private], "nothing was found to check"
    assert not missing(compat), "\n".join(missing(compat))


def test_a_symbol_that_is_gone_is_named_with_library_version_and_users(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch.overrides

    monkeypatch.delattr(torch.overrides, "_pop_mode_temporarily")
    (line,) = missing("strategies/torch/torch_compat.py")
    assert line.startswith(f"torch.overrides._pop_mode_temporarily is not in torch {version('torch')}; used in ")
    assert "strategies/torch/torch_compat.py:" in line and "strategies/torch/tracing/call_trace.py" in line


def test_only_compat_modules_name_private_symbols() -> None:
    named = [use for file in files() if file not in COMPAT for use in uses(file) if use.private]
    lines = [f"{use.file}:{use.line}: {use.symbol}" for use in named]
    assert not lines, f"move them into {', '.join(COMPAT)}:\n" + "\n".join(lines)


def torch_objects() -> dict[str, Any]:
    import torch
    from torch.distributed.fsdp import FSDPModule

    return {
        "nn.Module": torch.nn.Linear(1, 1),
        "Tensor": torch.zeros(1, requires_grad=True),
        "UntypedStorage": torch.zeros(1).untyped_storage(),
        "operator": torch.ops.aten.add.Tensor,
        "FSDPState": FSDPModule,
    }


def keras_objects() -> dict[str, Any]:
    import keras

    return {
        "Layer": keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)]),
        "Model": keras.Sequential(),
        "Dropout": keras.layers.Dropout(0.5),
        "Metric": keras.metrics.BinaryAccuracy(),
        "Optimizer": keras.optimizers.SGD(),
    }


def tensorflow_objects() -> dict[str, Any]:
    import tensorflow as tf

    return {"Dataset": tf.data.Dataset.range(3).take(2)}


@pytest.mark.parametrize(
    ("library", "make"), [("torch", torch_objects), ("keras", keras_objects), ("tensorflow", tensorflow_objects)]
)
def test_private_attributes_of_objects_are_there(library: str, make: Callable[[], dict[str, Any]]) -> None:
    objects = make()
    gone = [
        f"{kind}.{name} is not in {library} {version(library)}"
        for key, names in ATTRIBUTES.items()
        if (kind := key.partition(":")[2]) in objects
        for name in names
        if not hasattr(objects[kind], name)
    ]
    assert not gone, "\n".join(gone)
