"""The table of strategies: what it says of each is what the planner does, and the pages have it as it is."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import trainwright as tw
from tests.support import strategy_table
from tests.support.planner_cases import DEEP, decide, job
from tests.support.reference import registration as registration
from trainwright.cli.main import app
from trainwright.core.cluster import Cluster, Node
from trainwright.core.errors import JobError, PlanError
from trainwright.core.events import RunStarted
from trainwright.core.model_profile import LayerCost
from trainwright.core.plan import Plan
from trainwright.inference import inference_model
from trainwright.inference.inference_model import InferenceModel, inference_job, inference_layout, trained_plan
from trainwright.storage.event_log import EventLog
from trainwright.storage.object_store import open_store
from trainwright.strategies import STRATEGIES

ROOT = Path(__file__).parents[2]
DIVISIBLE = replace(
    DEEP, heads=8, layers=tuple(replace(layer, splits=True, leads=True, reductions=1) for layer in DEEP.layers)
)
KERAS = replace(
    DEEP, framework="tensorflow", layers=(LayerCost(name="l", parameters=1000, parameter_bytes=4000, flops=1e6),)
)
PROFILES = {"torch": DIVISIBLE, "tensorflow": KERAS}
CPUS = Cluster(nodes=(Node(name="a", cpus=16, memory_bytes=2**34),))
TPUS = Cluster(nodes=(Node(name="a", cpus=16, memory_bytes=2**34, accelerators=4, accelerator="TPU", kind="TPU-V4"),))
FIELDS: dict[str, dict[str, Any]] = {
    "one_device": {},
    "tf_one_device": {},
    "tf_mirrored": {"devices": 2},
    "tf_central_storage": {"devices": 2},
    "local_sgd": {"workers": 2, "local_steps": 8},
    "tf_tpu": {},
}
"""What the job says beside the strategy; for the others two workers."""


def planned(name: str, **fields: Any) -> Plan:
    """The plan of a strategy, for a model and on a cluster that suit it."""
    (framework,) = STRATEGIES[name].engines.keys() & PROFILES.keys()
    given = {"strategy": name, **FIELDS.get(name, {"workers": 2}), **fields}
    return decide(cluster_of(name), PROFILES[framework], **given).chosen


def cluster_of(name: str) -> Cluster:
    return TPUS if name == "tf_tpu" else CPUS


def step(model: Any, batch: Any) -> Any: ...


TRAINED: dict[str, tuple[dict[str, Any], set[str]]] = {
    "fit": ({"run": "fit"}, {"yes"}),
    "step": ({"step": step, "loss": None}, {"yes", "one optimizer"}),
    "several": ({"step": step, "loss": None, "optimizer": {"a": list, "b": list}}, {"yes"}),
}


@pytest.mark.parametrize("way", TRAINED)
@pytest.mark.parametrize("name", STRATEGIES)
def test_the_planner_accepts_what_the_table_says_and_nothing_else(name: str, way: str) -> None:
    fields, accepted = TRAINED[way]
    if STRATEGIES[name].row["fit" if way == "fit" else "step"] in accepted:
        assert planned(name, **fields).strategy == name
        return
    with pytest.raises((JobError, PlanError)):
        planned(name, **fields)


@pytest.mark.parametrize("name", [name for name, strategy in STRATEGIES.items() if strategy.layout])
def test_the_example_of_a_plan_is_of_this_strategy(name: str) -> None:
    assert planned(name, strategy=None, workers=None, local_steps=1, plan=STRATEGIES[name].layout).strategy == name


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_trained_model_is_used_where_the_table_says(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, strategy = planned(name), STRATEGIES[name]
    with EventLog(open_store(str(tmp_path)), "n") as journal:
        journal.open(1)
        journal.write(RunStarted(run="n", token=1, plan=asdict(plan)))
    trained = job(storage=str(tmp_path))
    found = trained_plan(trained)
    assert found is not None
    where = "on one device" if found.workers == 1 else "in its layout" if found == plan else "in replicas"
    assert strategy.evaluate == where and (where != "in replicas" or found.strategy == "data_parallel")

    (framework,) = strategy.engines.keys() & PROFILES.keys()
    monkeypatch.setattr(inference_model, "profile_job", lambda *_: PROFILES[framework])
    subject: Any = InferenceModel(job=inference_job(trained, trained.train), weights=plan, sha256="", architecture=dict)  # type: ignore[arg-type]
    layout, pool = inference_layout(subject, tw.datasets.table({"x": [1.0]}).index(), 4, cluster_of(name))
    assert strategy.predict == ("in replicas" if pool else "in its layout")
    assert layout.workers == 1 if pool else layout.mesh == plan.mesh


@pytest.mark.parametrize("page", strategy_table.tables())
def test_the_pages_have_the_table_of_today(page: str) -> None:
    text = (ROOT / page).read_text()
    for table in strategy_table.tables()[page]:
        assert table in text, f"run `python -m tests.support.strategy_table` and put what it prints into {page}"


def test_the_command_prints_every_cell() -> None:
    rows = [strategy.row for strategy in STRATEGIES.values()]
    assert json.loads(CliRunner().invoke(app, ["strategies", "--json"]).stdout) == rows
    shown = set(CliRunner().invoke(app, ["strategies"]).stdout.split())
    names = {row["name"] for row in rows}
    assert names <= shown and {"DDP", "`sync`,", "H100"} <= shown
