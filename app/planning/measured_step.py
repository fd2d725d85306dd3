"""Predict the chosen plan from measured steps: those of the run's past, else one that is timed before.

A step is timed on CPUs of this machine. The time is kept for the machine, unless other work slowed it: a job whose
model, loss, optimizer and batch did not change is not timed again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from trainwright.core.cluster import Cluster
from trainwright.core.errors import StorageError
from trainwright.core.job import Job
from trainwright.core.model_profile import ModelProfile
from trainwright.core.plan import Plan
from trainwright.datasets.metadata_cache import cache_folder
from trainwright.planning.decision import Decision
from trainwright.planning.job_description import comparable, select_fields
from trainwright.reporting.plan_view import plan_from
from trainwright.reporting.run_history import read_history
from trainwright.storage.object_store import Store
from trainwright.strategies.cost_model.estimator import Measurement, calibrate, estimate
from trainwright.strategies.search.plan_ranking import is_asynchronous
from trainwright.strategies.search.plan_request import REPLICATED

TimeStep = Callable[[int, int], tuple[float, bool]]
_FIELDS = ("model", "loss", "step", "optimizer", "precision", "compile", "clip_norm", "inputs", "targets")
_SIZES = ("batch_size", "accumulation", "train")
_FEWEST_STEPS = 10  # of a run, for its median
_MOST_KEPT = 200  # times in the file


def predict_from_past(decision: Decision, job: Job, description: Mapping[str, str], store: Store) -> Decision | None:
    """Return a decision whose chosen plan is predicted from the run's earlier steps under the same plan and cluster.

    Args:
        description: of the job, as text.

    Returns:
        None where there are too few such steps, or the job computes something else now.
    """
    plan = decision.chosen
    try:
        history = read_history(store, job.name)
    except StorageError:  # the run never began; a store that cannot be read is reported where it is needed
        return None
    start = history.summary.start
    before = plan_from(start.plan)
    if (
        before is None
        or is_asynchronous(plan)
        or (before.strategy, before.text, before.workers) != (plan.strategy, plan.text, plan.workers)
        or start.cluster != str(decision.cluster)
        or len(history.records) < _FEWEST_STEPS
        or not {*_FIELDS, *_SIZES} <= start.job.keys()
        or not comparable(start.job)
        or select_fields(start.job, (*_FIELDS, *_SIZES)) != select_fields(description, (*_FIELDS, *_SIZES))
    ):
        return None
    step_s = history.median_step_s
    measured = _measurement(decision, plan, decision.used, plan.batch_size, step_s)
    return _predicted(decision, measured, f"predicted from earlier steps of this run, which took {1e3 * step_s:.3g} ms")


def predict_by_measuring(decision: Decision, job: Job, description: Mapping[str, str], time_step: TimeStep) -> Decision:
    """Return a decision whose chosen plan is predicted from a step on this machine, where its workers are like it.

    Args:
        description: of the job, as text.
        time_step: takes rows and processes; returns the seconds of a step on so many rows, while so many processes take
            one, 0 where it cannot tell; and whether the machine was busy with other work.
    """
    plan, cluster = decision.chosen, decision.used
    here = [node.name for node in cluster.nodes] == [platform.node()]
    alike = here and not cluster.accelerators and plan.placement.threads == 1
    if not alike or plan.strategy not in REPLICATED or job.training.compile == "inductor":
        return decision
    _, rows = plan.micro_batches(plan.batch_size)
    key = _key(description, decision.profile, rows, plan.workers)
    known = _read()
    step_s, busy = known.get(key, 0.0), False
    if not step_s:
        step_s, busy = time_step(rows, plan.workers)
        if not step_s:
            return decision
        if not busy:
            _write({**known, key: step_s})
    one_cpu = Cluster(nodes=(replace(cluster.nodes[0], cpus=1.0),))
    measured = _measurement(decision, Plan.parse(""), one_cpu, rows, step_s)
    together = f", in each of {plan.workers} processes at a time" if plan.workers > 1 else ""
    note = (
        f"predicted from a step of {rows:,} rows, which took {1e3 * step_s:.3g} ms on a CPU of this machine{together}"
        f"{'; other work on the machine slowed it' if busy else ''}"
    )
    return _predicted(decision, measured, note)


def _measurement(decision: Decision, plan: Plan, cluster: Cluster, batch_size: int, step_s: float) -> Measurement:
    return Measurement(
        profile=decision.profile, cluster=cluster, plan=plan, batch_size=batch_size,
        precision=decision.chosen.precision, step_s=step_s,
    )  # fmt: skip


def _predicted(decision: Decision, measured: Measurement, note: str) -> Decision:
    """Return the decision with an estimate of the chosen plan that a measurement calibrates, and a note of it."""
    plan, calibration = decision.chosen, calibrate([measured])
    found = estimate(
        decision.profile, decision.used, plan, batch_size=plan.batch_size, precision=plan.precision,
        calibration=calibration,
    )  # fmt: skip
    chosen = replace(plan, estimate=found).noted(note)
    own = (plan.strategy, plan.text)
    contenders = tuple(chosen if (each.strategy, each.text) == own else each for each in decision.contenders)
    return replace(decision, chosen=chosen, contenders=contenders, calibration=calibration)


def _key(description: Mapping[str, str], profile: ModelProfile, rows: int, workers: int) -> str:
    """Return the key of a step: what it computes, with what, and on which machine."""
    torch = getattr(sys.modules.get("torch"), "__version__", "")
    facts = {**select_fields(description, _FIELDS), "rows": str(rows), "workers": str(workers), "torch": str(torch)}
    layers = [(layer.parameters, layer.flops, layer.kept_numbers) for layer in profile.layers]  # for this size of data
    facts |= {"layers": repr(layers), "machine": platform.machine(), "cpus": str(os.cpu_count()), "cpu": _cpu_name()}
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]


def _cpu_name() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line
    return platform.processor()


def _file() -> Path:
    return cache_folder("steps") / "times.json"


def _read() -> dict[str, float]:
    """Return the times that are kept; none where the file is not readable or not one."""
    with contextlib.suppress(OSError, ValueError):
        found = json.loads(_file().read_text(encoding="utf-8"))
        if isinstance(found, dict):
            return {key: float(value) for key, value in found.items() if isinstance(value, int | float)}
    return {}


def _write(times: dict[str, float]) -> None:
    """Keep the newest times; a machine without room for them measures again."""
    kept = dict([*times.items()][-_MOST_KEPT:])
    path = _file()
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f"{path.name}.{os.getpid()}")
        part.write_text(json.dumps(kept), encoding="utf-8")
        part.replace(path)
