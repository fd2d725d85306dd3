"""Plans in files: what was decided and for what, so that it can be looked at, kept and asked for again."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainwright.core.cluster import Cluster
from trainwright.core.errors import PlanError
from trainwright.core.job import Job
from trainwright.core.model_profile import ModelProfile

if TYPE_CHECKING:
    from trainwright.planning.planner import Decision

SUFFIX = ".json"
_VERSION = 1


def write_plan(path: str, decision: Decision) -> None:
    """Write the chosen plan; `Job(plan=path)` asks for it again.

    Raises:
        PlanError: the file cannot be written.
    """
    if not path.endswith(SUFFIX):
        raise PlanError(f"a plan's file must end in {SUFFIX}", where=path, remedy=f"write {Path(path).stem}{SUFFIX}")
    chosen = decision.chosen
    facts = {
        "trainwright_plan": _VERSION,
        "strategy": chosen.strategy,
        "plan": chosen.text,
        "model": _model(decision.profile),
        "cluster": _cluster(decision.cluster),
        "batch_size": chosen.batch_size,
        "precision": chosen.precision,
        "step_s": chosen.estimate.step_s if chosen.estimate else None,
    }
    try:
        Path(path).write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise PlanError(
            f"the plan cannot be written: {error.strerror}", where=path, remedy="give another --out"
        ) from None


def with_plan(job: Job, profile: ModelProfile, cluster: Cluster) -> Job:
    """The job with the plan of its file in its place; a job that names no file as it is.

    Raises:
        PlanError: the file cannot be read, or its plan was made for another model, cluster, batch or precision.
    """
    if job.plan is None or not job.plan.endswith(SUFFIX):
        return job
    facts = _read(job.plan)
    now = {
        "model": _model(profile),
        "cluster": _cluster(cluster),
        "batch_size": job.batch_size,
        "precision": job.precision,
    }
    differences = [
        f"{name}: {_told(facts[name])} then, {_told(value)} now" for name, value in now.items() if facts[name] != value
    ]
    if differences:
        raise PlanError(
            f"the plan was made for something else: {'; '.join(differences)}",
            where=job.plan,
            remedy=f"write it again with trainwright plan --out {job.plan}, or set plan={facts['plan']!r}",
        )
    return job.replace(plan=facts["plan"], strategy=facts["strategy"])


def _read(path: str) -> dict[str, Any]:
    try:
        facts = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise PlanError(
            f"the plan cannot be read: {error.strerror}", where=path, remedy="give the path of a plan's file"
        ) from None
    except ValueError as error:
        raise PlanError(
            f"the file is no JSON: {error}", where=path, remedy="write it with trainwright plan --out"
        ) from None
    wanted = {"strategy", "plan", "model", "cluster", "batch_size", "precision"}
    if not isinstance(facts, dict) or facts.get("trainwright_plan") != _VERSION or not wanted <= facts.keys():
        raise PlanError(
            "the file holds no plan of this version", where=path, remedy="write it with trainwright plan --out"
        )
    return facts


def _model(profile: ModelProfile) -> dict[str, Any]:
    layers = [(layer.parameters, layer.flops, layer.output_numbers) for layer in profile.layers]
    return {
        "parameters": profile.parameters,
        "framework": profile.framework,
        "fingerprint": hashlib.sha256(json.dumps(layers).encode()).hexdigest()[:16],
    }


def _cluster(cluster: Cluster) -> dict[str, Any]:
    """What a plan rests on; which machines they are may change."""
    nodes = sorted([node.cpus, node.accelerators, node.kind] for node in cluster.nodes)
    return {"nodes": len(nodes), "cpus": cluster.cpus, "accelerators": cluster.accelerators, "each": nodes}


def _told(value: Any) -> str:
    if not isinstance(value, dict):
        return str(value)
    if "parameters" in value:
        return f"{value['parameters']:,} parameters of {value['framework']} ({value['fingerprint']})"
    kinds = sorted({kind for _, count, kind in value["each"] if count})
    devices = f", {value['accelerators']} {' and '.join(filter(None, kinds))}" if value["accelerators"] else ""
    return f"{value['nodes']} nodes, {value['cpus']:g} CPUs{devices}"
