"""Mutants of the driver and of what it stores: source with one fragment replaced, as modules of their own."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import trainwright.driver.decide as decide
from tests.simulation.tears import Code

STORAGE = ("store", "log", "eventfiles", "summary")
MODULES = (
    "turn", "agree", "milestones", "keeping", "checkpointing", "ending", "probing", "loops", "staffing", "heirs",
    "apart", "leaving", "spikes", "straggling", "recovering", "forming", "measuring", "training", "decide",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """One wrong driver. `fragment` occurs exactly once in the module; `also` are kinds of faults that bring it out."""

    name: str
    module: str
    fragment: str
    replacement: str
    also: tuple[str, ...] = ()


def load(mutant: Mutant) -> Any:
    """The mutant's `decide` module; raises ValueError where the fragment does not occur exactly once."""
    return _loaded(mutant, MODULES, "trainwright.driver")["decide"]


def load_storage(mutant: Mutant) -> Code:
    """The mutant's modules that store a run; raises as `load`."""
    return Code(**_loaded(mutant, STORAGE, "trainwright"))


def _loaded(mutant: Mutant, names: tuple[str, ...], origin: str) -> dict[str, ModuleType]:
    """Modules of the package `origin`, one of them mutated, which import each other."""
    package = "mutant_" + re.sub(r"\W+", "_", mutant.name)
    folder = Path(str(decide.__file__)).parents[0 if origin.endswith("driver") else 1]
    sys.modules[package] = ModuleType(package)
    try:
        for name in names:
            source = (folder / f"{name}.py").read_text()
            if name == mutant.module:
                if source.count(mutant.fragment) != 1:
                    raise ValueError(f"{mutant.name}: the fragment occurs {source.count(mutant.fragment)} times")
                source = source.replace(mutant.fragment, mutant.replacement)
            for other in names:
                source = source.replace(f"from {origin}.{other} import", f"from {package}.{other} import")
            if origin != "trainwright":
                source = re.sub(rf"from {re.escape(origin)} import (?!messages)", f"from {package} import ", source)
            _define(package, name, source)
        return {name: sys.modules[f"{package}.{name}"] for name in names}
    finally:
        for name in (package, *(f"{package}.{name}" for name in names)):
            sys.modules.pop(name, None)


def _define(package: str, name: str, source: str) -> None:
    spec = importlib.machinery.ModuleSpec(f"{package}.{name}", loader=None)
    module = importlib.util.module_from_spec(spec)
    sys.modules[f"{package}.{name}"] = module
    setattr(sys.modules[package], name, module)
    exec(compile(source, f"<{package}.{name}>", "exec"), module.__dict__)
