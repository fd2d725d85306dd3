"""Torch engines on several ranks, each a process that exchanges values with the others."""

from __future__ import annotations

import gc
import multiprocessing
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

from tests.support.torch_engines import (
    GENERATION,
    plan,
)
from trainwright.core.engine import ModelSpec
from trainwright.core.plan import Plan
from trainwright.core.topology import Address, Group, Peer
from trainwright.strategies.torch.engines.data_parallel import DataParallel

# A second of each rank otherwise. No effect where a fork server runs already, as that of the conformance tests does.
PRELOADED = [__name__, "pytest", "torch.distributed.fsdp", "trainwright.strategies.torch.engines.fsdp"]
Exchange = Callable[[Any], list[Any]]
Scenario = Callable[[int, int, Exchange], Any]


def _rank(scenario: Scenario, rank: int, world: int, pipe: Connection) -> None:
    def exchange(value: Any) -> list[Any]:
        pipe.send(("exchange", value))
        answer: list[Any] = pipe.recv()
        return answer

    gc.freeze()  # as a worker does: `leave` collects, and looks through all imports otherwise
    pipe.send(("result", scenario(rank, world, exchange)))


def run_ranks(scenario: Scenario, world: int, answer_s: float = 90.0) -> list[Any]:
    """Results of a scenario on each rank; None for one that died. `exchange` gathers a value from all ranks alive.

    Args:
        answer_s: seconds from one exchange of a rank to the next one.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    pipes, processes, results = {}, [], [None] * world
    for rank in range(world):
        pipes[rank], theirs = context.Pipe()
        processes.append(context.Process(target=_rank, args=(scenario, rank, world, theirs), daemon=True))
        processes[-1].start()
        theirs.close()
    try:
        while pipes:
            values: list[Any] = [None] * world
            for rank, pipe in list(pipes.items()):
                assert pipe.poll(answer_s), f"rank {rank} did not answer"
                try:
                    kind, value = pipe.recv()
                except EOFError:
                    del pipes[rank]
                    continue
                if kind == "result":
                    results[rank] = value
                    del pipes[rank]
                values[rank] = value
            for pipe in pipes.values():
                pipe.send(values)
    finally:
        for process in processes:
            process.join(5.0)
            process.kill()
    return results


def formed(
    rank: int,
    exchange: Exchange,
    job: ModelSpec,
    *,
    engine: Any = None,
    ranks: Sequence[int] = (),
    how: Plan | None = None,
) -> Any:
    """An engine, by default of data parallelism, in a group of the ranks alive."""
    engine = engine or DataParallel()
    addresses = [address for address in exchange(engine.reserve("worker")) if isinstance(address, Address)]
    peers = tuple(Peer(rank=number, address=address) for number, address in enumerate(addresses))
    place = ranks.index(rank) if ranks else rank
    tag = engine.form(Group(generation=GENERATION, rank=place, peers=peers, key=b"of tests", deadline_s=20.0))
    if tag.step is None:
        engine.build(job, how or plan(ranks=len(peers)))
    return engine
