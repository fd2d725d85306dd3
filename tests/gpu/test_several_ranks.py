"""Two ranks share a GPU: engines that divide a model equal one device, and survive a killed rank.

gloo carries their collectives, since NCCL takes one rank of a GPU. It neither sends nor receives on GPUs, so that
pipelines cannot run so.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.gpu.lone import CPU, GPU, Run, Task, trained
from tests.gpu.test_engines import assert_near
from tests.support.conformance import harness, torch_case
from tests.support.conformance.cases import CASES, Case
from tests.support.conformance.harness import Pool
from tests.support.conformance.problems import PROBLEMS

pytestmark = pytest.mark.gpu

RANKS = 2
WHOLE = "torch-data-parallel"
NAMES = (WHOLE, "torch-zero-1", "torch-zero-2", "torch-sharded", "torch-tensor-parallel")
SHARED = [pytest.param(case, id=case.name) for case in CASES if case.name in NAMES]


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    """Processes of both ranks."""
    shared = Pool(("torch.nn.parallel", "torch.distributed.fsdp", torch_case.__name__))
    yield shared
    shared.close()


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "DEVICE", GPU)


@pytest.mark.parametrize("name", ["ragged", "clip"])
@pytest.mark.parametrize("case", SHARED)
def test_steps_of_a_divided_model_are_those_of_one_device(pool: Pool, case: Case, name: str) -> None:
    problem = PROBLEMS[name]
    feeds = case.feeds(problem, RANKS, range(problem.steps))
    with case.world(pool, problem, RANKS) as world:
        world.start(feeds[0])
        held = world.every("held_digests")
        found = Run(reports=world.train(feeds)[0], state=torch_case.state(world.files()))
    assert (held[0] == held[1]) == (case.name == WHOLE), "each rank holds a part"
    expected = trained(Task.of(problem), CPU)
    assert_near(found, Run(reports=expected.reports, state={key: expected.state[key] for key in found.state}))


@pytest.mark.parametrize("victim", [0, -1], ids=["first", "last"])
@pytest.mark.parametrize("case", SHARED)
def test_a_killed_rank_is_replaced_bit_by_bit(pool: Pool, case: Case, victim: int) -> None:
    pytest.importorskip("pydantic", reason="the driver's rules need pydantic, which is not installed here")
    from tests.conformance import test_failures

    test_failures.test_a_killed_rank_is_replaced_and_the_run_is_the_unbroken_one(pool, case, RANKS, victim)
