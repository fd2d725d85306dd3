"""Who holds what, in a table."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from tests.support.sample_run import PLAN
from trainwright.core.cluster import Cluster
from trainwright.core.plan import Mesh, WorkerResources
from trainwright.reporting.plan_view import MeshTable, mesh_table, mesh_text, planned_nodes

GPU = WorkerResources(cpus=1, accelerators=1, accelerator="GPU")


def table(cluster: str, **degrees: int) -> MeshTable:
    plan = replace(PLAN, mesh=Mesh(**degrees), placement=GPU, estimate=None)
    found = mesh_table(plan, planned_nodes(plan, Cluster.parse(cluster)))
    assert found is not None
    return found


def test_nodes_that_hold_the_same_of_other_replicas_are_one_row() -> None:
    found = table("125x8xH100-80GB", pipeline=2, data=500)
    assert found.columns == ("node", "ranks", "data", "stage")
    assert found.rows == (("node-0, node-1 … node-124 (125 nodes)", "0-999", "0-499, 4 on each", "0-1"),)
    stages = table("125x8xH100-80GB", pipeline=5, data=25, tensor=8)
    assert len(stages.rows) == 5
    assert stages.rows[1] == ("node-1, node-6 … node-121 (25 nodes)", "200-399", "0-24, 1 on each", "1", "0-7")


def test_each_rank_of_a_node_that_holds_parts_of_two_replicas_is_told() -> None:
    assert table("2x5xH100-80GB", pipeline=3, data=3).rows == (
        ("node-0", "0, 3, 6", "0", "0-2"),
        ("node-0", "1, 4", "1", "0-1"),
        ("node-1", "7", "1", "2"),
        ("node-1", "2, 5, 8", "2", "0-2"),
    )


def test_one_dimension_is_shown_as_one_column() -> None:
    assert table("2x8xH100-80GB", shard=16).rows == (("node-0", "0-7", "0-7"), ("node-1", "8-15", "8-15"))


def test_long_tables_are_cut_in_a_terminal() -> None:
    found = table("40x8xH100-80GB", shard=320)
    out = io.StringIO()
    Console(width=100, file=out).print(mesh_text(found))
    assert "and 24 more" in out.getvalue() and "node-39" not in out.getvalue()


@pytest.mark.parametrize("nodes", [{}, {"a": "0"}, {"a": "0-2"}], ids=str)
def test_no_table_where_nothing_is_known_or_nobody_is_beside(nodes: dict[str, str]) -> None:
    pipeline = replace(PLAN, mesh=Mesh(pipeline=2))
    assert mesh_table(pipeline, nodes) is None
    assert mesh_table(replace(PLAN, mesh=Mesh()), {"a": "0"}) is None
    assert planned_nodes(replace(pipeline, placement=GPU), Cluster.parse("1xH100-80GB")) == {}


def test_servers_and_workers_are_told_apart() -> None:
    served = replace(PLAN, mesh=Mesh(data=3), servers=2, topology="independent", estimate=None)
    found = mesh_table(served, {"a": "0-2", "b": "3-4"})
    assert found is not None and found.columns == ("node", "server", "worker")
    assert found.rows == (("a", "0-1", "2"), ("b", "", "3-4"))
    assert mesh_table(served, planned_nodes(served, Cluster.parse("2x4xH100-80GB"))) is None


def test_a_world_that_has_grown_is_shown_as_it_is() -> None:
    found = mesh_table(PLAN, {"a": "0-1", "b": "2"})
    assert found is not None and found.rows == (("a", "0-1", "0-1"), ("b", "2", "2"))
