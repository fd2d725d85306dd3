"""trainwright: distributed training on Ray that survives failures and explains itself.

Importing it imports no framework and starts nothing; names are loaded when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from trainwright.core.frameworks import isolate_llvm, silence_widget_notes

if TYPE_CHECKING:
    from trainwright import datasets as datasets
    from trainwright import lr_schedules
    from trainwright.api import chaos as chaos
    from trainwright.api import distill as distill
    from trainwright.api import doctor as doctor
    from trainwright.api import export as export
    from trainwright.api import fit as fit
    from trainwright.api import generate as generate
    from trainwright.api import load_model as load_model
    from trainwright.api import plan as plan
    from trainwright.api import start as start
    from trainwright.api import tune as tune
    from trainwright.core.callbacks import CallbackContext as CallbackContext
    from trainwright.core.cluster import Cluster as Cluster
    from trainwright.core.data import Terms as Terms
    from trainwright.core.engine import Pad as Pad
    from trainwright.core.errors import TrainwrightError as TrainwrightError
    from trainwright.core.initial_weights import InitialWeights as InitialWeights
    from trainwright.core.job import Checkpointing as Checkpointing
    from trainwright.core.job import Data as Data
    from trainwright.core.job import Job as Job
    from trainwright.core.job import Planning as Planning
    from trainwright.core.job import Recovery as Recovery
    from trainwright.core.job import Scaling as Scaling
    from trainwright.core.job import TensorFlow as TensorFlow
    from trainwright.core.job import Training as Training
    from trainwright.core.loss_api import gather as gather
    from trainwright.core.loss_api import log as log
    from trainwright.core.metric_goals import EarlyStop as EarlyStop
    from trainwright.core.plan import Estimate as Estimate
    from trainwright.core.plan import Plan as Plan
    from trainwright.core.soft_loss import Match as Match
    from trainwright.core.soft_loss import SoftLoss as SoftLoss
    from trainwright.core.transformer_profiles import profile_of as profile_of
    from trainwright.core.transformer_profiles import transformer_profile as transformer_profile
    from trainwright.core.weight_average import WeightAverage as WeightAverage
    from trainwright.distillation.distillation_spec import Distillation as Distillation
    from trainwright.distillation.distillation_spec import Teacher as Teacher
    from trainwright.distillation.distilled_run import DistilledRun as DistilledRun
    from trainwright.distillation.hyperparameter_search import Search as Search
    from trainwright.distillation.hyperparameter_search import search as search
    from trainwright.distillation.multi_stage import SelfDistillation as SelfDistillation
    from trainwright.distillation.multi_stage import TwoStage as TwoStage
    from trainwright.distillation.trained_student import students as students
    from trainwright.inference.batch_inference import predict as predict
    from trainwright.inference.run_inference import evaluate as evaluate
    from trainwright.integrations.huggingface import from_hf_trainer as from_hf_trainer
    from trainwright.integrations.lightning import from_lightning as from_lightning
    from trainwright.planning.job_file import load_distillation as load_distillation
    from trainwright.planning.job_file import load_job as load_job
    from trainwright.reporting.run_comparison import compare as compare
    from trainwright.reporting.stored_run import StoredRun as StoredRun
    from trainwright.reporting.stored_run import open_run as open_run
    from trainwright.runtime.run_handle import Run as Run
    from trainwright.strategies.cost_model.estimator import Measurement as Measurement
    from trainwright.strategies.cost_model.estimator import calibrate as calibrate
    from trainwright.strategies.cost_model.estimator import estimate as estimate
    from trainwright.strategies.cost_model.machine_model import Calibration as Calibration
    from trainwright.strategies.search.plan_ranking import rank as rank
    from trainwright.strategies.tensorflow.custom_loop import CustomLoop as CustomLoop
    from trainwright.tracking import experiment_trackers

    schedules = lr_schedules
    trackers = experiment_trackers

__version__ = "0.1.0"

isolate_llvm()
silence_widget_notes()

_EXPORTS: dict[str, tuple[str, ...]] = {
    "api": ("chaos", "distill", "doctor", "export", "fit", "generate", "load_model", "plan", "start", "tune"),
    "core.callbacks": ("CallbackContext",),
    "core.cluster": ("Cluster",),
    "core.data": ("Terms",),
    "core.engine": ("Pad",),
    "core.errors": ("TrainwrightError",),
    "core.initial_weights": ("InitialWeights",),
    "core.job": ("Checkpointing", "Data", "Job", "Planning", "Recovery", "Scaling", "TensorFlow", "Training"),
    "core.loss_api": ("gather", "log"),
    "core.metric_goals": ("EarlyStop",),
    "core.soft_loss": ("Match", "SoftLoss"),
    "core.weight_average": ("WeightAverage",),
    "core.plan": ("Estimate", "Plan"),
    "core.transformer_profiles": ("profile_of", "transformer_profile"),
    "distillation.distillation_spec": ("Distillation", "Teacher"),
    "distillation.distilled_run": ("DistilledRun",),
    "distillation.hyperparameter_search": ("Search", "search"),
    "distillation.multi_stage": ("SelfDistillation", "TwoStage"),
    "distillation.trained_student": ("students",),
    "inference.batch_inference": ("predict",),
    "inference.run_inference": ("evaluate",),
    "integrations.huggingface": ("from_hf_trainer",),
    "integrations.lightning": ("from_lightning",),
    "planning.job_file": ("load_distillation", "load_job"),
    "reporting.run_comparison": ("compare",),
    "reporting.stored_run": ("StoredRun", "open_run"),
    "runtime.run_handle": ("Run",),
    "strategies.cost_model.estimator": ("Measurement", "calibrate", "estimate"),
    "strategies.cost_model.machine_model": ("Calibration",),
    "strategies.search.plan_ranking": ("rank",),
    "strategies.tensorflow.custom_loop": ("CustomLoop",),
}  # fmt: skip
_HOMES = {name: f"trainwright.{module}" for module, names in _EXPORTS.items() for name in names}
_MODULES = {
    "datasets": "trainwright.datasets",
    "schedules": "trainwright.lr_schedules",
    "trackers": "trainwright.tracking.experiment_trackers",
}

__all__ = list({**_HOMES, **_MODULES})


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(_MODULES[name])
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'trainwright' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
