"""Which nodes a job has started for it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import trainwright as tw
from trainwright.core.cluster import Cluster, Node
from trainwright.core.job import NEW_NODE_DEADLINE_S, START_DEADLINE_S
from trainwright.datasets import table
from trainwright.planning.planner import (
    accelerator_kind,
    expansions,
    grow_to_slots,
    growth_notes,
    nodes_needed,
    usable_nodes,
)

DATA = table({"x": [[1.0]], "y": [0]})


def job(**fields: Any) -> tw.Job:
    """One that nothing is asked of but what a plan needs."""
    given: dict[str, Any] = {"name": "n", "model": dict, "optimizer": list, "loss": max, "inputs": "x", "targets": "y"}
    return tw.Job(**{**given, "train": DATA, "batch_size": 64, **fields})


def node(name: str, gpus: int = 0, cpus: float = 8) -> Node:
    """Eight CPUs, and GPUs if asked for."""
    kind: dict[str, Any] = {"accelerators": gpus, "accelerator": "GPU", "kind": "A10G"} if gpus else {}
    return Node(name=name, cpus=cpus, memory_bytes=2**34, **kind)


HEAD = node("head")
GPUS = tuple(node(f"gpu#{number}", gpus=4) for number in range(1, 5))
CPUS = tuple(node(f"cpu#{number}") for number in range(5, 8))
MIXED = Cluster(nodes=(HEAD,), possible=(*CPUS, *GPUS))


def sizes(cluster: Cluster, **fields: Any) -> list[int]:
    """Nodes that are started first, of one expansion after the other."""
    return [len(grown.coming) for grown in expansions(cluster, job(**fields))]


@pytest.mark.parametrize(
    ("fields", "first"),
    [
        ({}, 1),
        ({"workers": 4}, 1),
        ({"workers": 5}, 2),
        ({"workers": 16}, 4),
        ({"workers": 17}, 4),
        ({"workers": 4, "devices": 2}, 2),
        ({"plan": "dp=2,tp=4"}, 2),
        ({"min_workers": 1, "max_workers": 16}, 1),
        ({"workers": 16, "min_workers": 5}, 2),
    ],
)
def test_the_first_has_room_for_those_that_a_job_begins_with(fields: dict[str, Any], first: int) -> None:
    assert sizes(MIXED, **fields)[0] == first


def test_larger_ones_follow_up_to_all() -> None:
    many = Cluster(nodes=(), possible=tuple(node(f"gpu#{number}", gpus=1) for number in range(20)))
    assert sizes(many) == [1, 2, 4, 8, 16, 20]
    assert sizes(many, workers=20) == [20]


def test_a_cluster_that_starts_nothing_is_as_it_is() -> None:
    still = Cluster(nodes=(HEAD,))
    assert list(expansions(still, job(workers=100))) == [still]
    assert not still.grows and job().start_deadline_s(still) == START_DEADLINE_S


@pytest.mark.parametrize(
    ("nodes", "accelerator", "expected"),
    [
        ((HEAD,), "auto", GPUS),
        ((HEAD,), "gpu", GPUS),
        ((HEAD,), "cpu", (*CPUS, *GPUS)),
        ((HEAD,), "tpu", ()),
        ((node("here", gpus=1),), "auto", GPUS),
    ],
)
def test_only_nodes_of_use_are_started(nodes: tuple[Node, ...], accelerator: Any, expected: tuple[Node, ...]) -> None:
    cluster = Cluster(nodes=nodes, possible=MIXED.possible)
    assert usable_nodes(cluster, accelerator_kind(cluster, job(accelerator=accelerator))) == expected


def test_a_job_for_cpus_starts_no_node_with_accelerators_where_it_has_room() -> None:
    cluster = Cluster(nodes=(HEAD,), possible=GPUS)
    assert sizes(cluster, accelerator="cpu")[0] == 0 and sizes(cluster, accelerator="cpu", workers=3)[0] == 1


def test_what_is_not_known_is_told() -> None:
    (grown,) = expansions(Cluster(nodes=(HEAD,), unseen="no answer (the head)"), job())
    assert list(growth_notes(grown, job())) == ["the plan uses only running nodes: no answer (the head)"]


def test_what_runs_already_is_used_first() -> None:
    cluster = Cluster(nodes=(node("here", gpus=4),), possible=GPUS)
    assert sizes(cluster, workers=4)[0] == 0 and sizes(cluster, workers=6)[0] == 1
    assert len(grow_to_slots(cluster, job(), 9).coming) == 2


@given(
    there=st.lists(st.integers(1, 8), max_size=4),
    possible=st.lists(st.integers(1, 8), max_size=12),
    slots=st.integers(1, 80),
)
def test_one_node_fewer_would_be_too_few(there: list[int], possible: list[int], slots: int) -> None:
    cluster = Cluster(
        nodes=tuple(node(f"here-{number}", gpus=count) for number, count in enumerate(there)),
        possible=tuple(node(f"gpu#{number}", gpus=count) for number, count in enumerate(possible)),
    )
    number = nodes_needed(cluster, "GPU", slots)
    assert cluster.grown(number).accelerators >= slots or number == len(possible)
    assert number == 0 or cluster.grown(number - 1).accelerators < slots


def test_notes_say_what_comes_and_what_could() -> None:
    cluster = MIXED.grown(0)
    assert list(growth_notes(cluster, job())) == [
        "the cluster can start 4 nodes (gpu) more: workers= asks for them, max_workers= grows into them"
    ]
    grown = next(expansions(MIXED, job(workers=6)))
    assert list(growth_notes(grown, job(workers=6))) == [
        "2 nodes (gpu) to be started first, which can take minutes and cost money"
    ]
    assert str(grown).endswith("8 A10G, 2 to be started first") and job().start_deadline_s(grown) == NEW_NODE_DEADLINE_S
    assert job(place_deadline_s=7.0).start_deadline_s(grown) == 7.0
