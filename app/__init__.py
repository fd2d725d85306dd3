"""trainwright: distributed training on Ray that survives failures and explains itself.

Importing it imports no framework and starts nothing; names are loaded when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from trainwright.core.frameworks import separate

if TYPE_CHECKING:
    from trainwright import datasets as datasets
    from trainwright import schedules as schedules
    from trainwright import trackers as trackers
    from trainwright.api import chaos as chaos
    from trainwright.api import distill as distill
    from trainwright.api import doctor as doctor
    from trainwright.api import evaluate as evaluate
    from trainwright.api import export as export
    from trainwright.api import fit as fit
    from trainwright.api import generate as generate
    from trainwright.api import load_model as load_model
    from trainwright.api import plan as plan
    from trainwright.api import predict as predict
    from trainwright.api import start as start
    from trainwright.core.cluster import Cluster as Cluster
    from trainwright.core.collation import Pad as Pad
    from trainwright.core.data import Terms as Terms
    from trainwright.core.errors import TrainwrightError as TrainwrightError
    from trainwright.core.gathering import gather as gather
    from trainwright.core.job import Job as Job
    from trainwright.core.plan import Estimate as Estimate
    from trainwright.core.plan import Plan as Plan
    from trainwright.core.profile import transformer_profile as transformer_profile
    from trainwright.core.soft_loss import Match as Match
    from trainwright.core.soft_loss import SoftLoss as SoftLoss
    from trainwright.distilling.recipes import SelfDistillation as SelfDistillation
    from trainwright.distilling.recipes import TwoStage as TwoStage
    from trainwright.distilling.runs import DistilledRun as DistilledRun
    from trainwright.distilling.runs import students as students
    from trainwright.distilling.searching import Search as Search
    from trainwright.distilling.searching import search as search
    from trainwright.distilling.spec import Distillation as Distillation
    from trainwright.distilling.teachers import Teacher as Teacher
    from trainwright.run import Run as Run
    from trainwright.strategies.calibration import Calibration as Calibration
    from trainwright.strategies.estimating import estimate as estimate
    from trainwright.strategies.fitting import Measurement as Measurement
    from trainwright.strategies.fitting import calibrate as calibrate
    from trainwright.strategies.ranking import rank as rank

__version__ = "0.1.0"

separate()

_HOMES = {
    "Calibration": "trainwright.strategies.calibration",
    "Cluster": "trainwright.core.cluster",
    "DistilledRun": "trainwright.distilling.runs",
    "Distillation": "trainwright.distilling.spec",
    "Estimate": "trainwright.core.plan",
    "Job": "trainwright.core.job",
    "Match": "trainwright.core.soft_loss",
    "Measurement": "trainwright.strategies.fitting",
    "Pad": "trainwright.core.collation",
    "Plan": "trainwright.core.plan",
    "Run": "trainwright.run",
    "Search": "trainwright.distilling.searching",
    "SelfDistillation": "trainwright.distilling.recipes",
    "SoftLoss": "trainwright.core.soft_loss",
    "Teacher": "trainwright.distilling.teachers",
    "Terms": "trainwright.core.data",
    "TrainwrightError": "trainwright.core.errors",
    "TwoStage": "trainwright.distilling.recipes",
    "calibrate": "trainwright.strategies.fitting",
    "chaos": "trainwright.api",
    "distill": "trainwright.api",
    "doctor": "trainwright.api",
    "estimate": "trainwright.strategies.estimating",
    "evaluate": "trainwright.api",
    "export": "trainwright.api",
    "fit": "trainwright.api",
    "gather": "trainwright.core.gathering",
    "generate": "trainwright.api",
    "load_model": "trainwright.api",
    "plan": "trainwright.api",
    "predict": "trainwright.api",
    "rank": "trainwright.strategies.ranking",
    "search": "trainwright.distilling.searching",
    "start": "trainwright.api",
    "students": "trainwright.distilling.runs",
    "transformer_profile": "trainwright.core.profile",
}
_MODULES = ("datasets", "schedules", "trackers")

__all__ = [
    "Calibration",
    "Cluster",
    "Distillation",
    "DistilledRun",
    "Estimate",
    "Job",
    "Match",
    "Measurement",
    "Pad",
    "Plan",
    "Run",
    "Search",
    "SelfDistillation",
    "SoftLoss",
    "Teacher",
    "Terms",
    "TrainwrightError",
    "TwoStage",
    "calibrate",
    "chaos",
    "datasets",
    "distill",
    "doctor",
    "estimate",
    "evaluate",
    "export",
    "fit",
    "gather",
    "generate",
    "load_model",
    "plan",
    "predict",
    "rank",
    "schedules",
    "search",
    "start",
    "students",
    "trackers",
    "transformer_profile",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"trainwright.{name}")
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'trainwright' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
