"""Mutants of the driver: its source with one fragment replaced, as modules of their own."""

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
    package = "mutant_" + re.sub(r"\W+", "_", mutant.name)
    folder = Path(str(decide.__file__)).parent
    sys.modules[package] = ModuleType(package)
    try:
        for name in MODULES:
            source = (folder / f"{name}.py").read_text()
            if name == mutant.module:
                if source.count(mutant.fragment) != 1:
                    raise ValueError(f"{mutant.name}: the fragment occurs {source.count(mutant.fragment)} times")
                source = source.replace(mutant.fragment, mutant.replacement)
            _define(package, name, source)
        return sys.modules[f"{package}.decide"]
    finally:
        for name in (package, *(f"{package}.{name}" for name in MODULES)):
            sys.modules.pop(name, None)


def _define(package: str, name: str, source: str) -> None:
    for other in MODULES:
        source = source.replace(f"from trainwright.driver.{other} import", f"from {package}.{other} import")
    source = re.sub(r"from trainwright\.driver import (?!messages)", f"from {package} import ", source)
    spec = importlib.machinery.ModuleSpec(f"{package}.{name}", loader=None)
    module = importlib.util.module_from_spec(spec)
    sys.modules[f"{package}.{name}"] = module
    setattr(sys.modules[package], name, module)
    exec(compile(source, f"<{package}.{name}>", "exec"), module.__dict__)
