"""The plan as a line, a table and HTML."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest

from tests.support.sample_run import DECISION, PLAN
from trainwright.core.cluster import Cluster
from trainwright.core.formatting import plain_text
from trainwright.core.plan import Mesh, Plan, WorkerResources
from trainwright.reporting.plan_view import plan_from, plan_line

GPU = WorkerResources(cpus=1, accelerators=1, accelerator="GPU")


@pytest.mark.parametrize(
    ("plan", "line"),
    [
        (PLAN, "data_parallel: 2 workers x 1 thread on CPU, batch 256 = 2 x 128, est. 14 ms/step"),
        (
            replace(PLAN, batch_size=257, estimate=None),
            "data_parallel: 2 workers x 1 thread on CPU, batch 257 = 2 x 128 or 129",
        ),
        (
            replace(PLAN, accumulation=4, precision="bf16", estimate=None, placement=GPU),
            "data_parallel: 2 workers on GPU, batch 256 = 2 x 4 micro-batches x 32, bf16",
        ),
        (
            replace(PLAN, strategy="one_device", mesh=Mesh(), estimate=None, placement=WorkerResources(cpus=1,
            threads=2)),
            "one_device: 1 worker x 2 threads on CPU, batch 256",
        ),
        (
            replace(PLAN, strategy="sharded", zero=2, wire="bf16", mesh=Mesh(shard=2), estimate=None),
            "sharded: 2 workers x 1 thread on CPU, shard 2 (ZeRO-2), gradients in bf16, batch 256 = 2 x 128",
        ),
    ],
)  # fmt: skip
def test_line(plan: Plan, line: str) -> None:
    assert plan_line(plan) == line


def test_table_names_the_chosen_plan_its_cost_and_the_others() -> None:
    text = plain_text(DECISION, 150)
    for said in (
        plan_line(PLAN), "1,000 parameters (3.91 KiB), torch", "1 node, 2 CPUs", "data 2", "0.5 CPU for each worker",
        "14 ms (5 ms to 42 ms)", "4 KiB", "gradients", "batch norm is local",
        "rejected", "predicted 1.71 times the step time", "not possible", "no stages; give it as a sequence",
    ):  # fmt: skip
        assert said in text
    assert "\x1b" not in text and plain_text(DECISION) == str(DECISION)
    assert max(map(len, plain_text(DECISION, 80).splitlines())) <= 80


def test_html_is_escaped_and_fetches_nothing() -> None:
    html = replace(DECISION, chosen=replace(PLAN, notes=("<b>1 < 2</b>",)))._repr_html_()
    assert "&lt;b&gt;1 &lt; 2&lt;/b&gt;" in html and "<b>" not in html
    assert "http" not in html and "<script" not in html
    assert plan_line(PLAN) in html and "no stages" in html


def test_a_long_table_of_ranks_is_folded_in_a_page() -> None:
    cluster = Cluster.parse("40x8xH100-80GB")
    wide = replace(PLAN, mesh=Mesh(shard=320), placement=GPU, estimate=None)
    html = replace(DECISION, chosen=wide, cluster=cluster, used=cluster)._repr_html_()
    assert "<details><summary>24 more" in html and "node-39" in html


def test_a_plan_comes_back_from_json() -> None:
    assert plan_from(json.loads(json.dumps(asdict(PLAN)))) == PLAN
    without = replace(PLAN, estimate=None, notes=())
    assert plan_from(json.loads(json.dumps(asdict(without)))) == without


def test_a_plan_of_a_later_version_is_read_as_far_as_known() -> None:
    facts = {**asdict(PLAN), "price": 3.5, "mesh": {**asdict(PLAN.mesh), "expert": 1}}
    assert plan_from(facts) == PLAN
    assert plan_from({"strategy": "x"}) is None
