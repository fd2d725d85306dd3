"""An engine with one rank, for work beside training: predictions, evaluations and trials in one process."""

from __future__ import annotations

from trainwright.core.engine import Engine, ModelSpec
from trainwright.core.plan import Plan
from trainwright.core.topology import Generation, Group, Peer
from trainwright.strategies import engine_class


def single_rank_engine(spec: ModelSpec, plan: Plan, *, guest: bool = False) -> Engine:
    """Return an engine with one rank and its model, on the device of the plan.

    Args:
        spec: the model and the job's functions.
        plan: of one rank.
        guest: leave the number of threads of this process as it is.
    """
    engine = engine_class(plan)()
    alone = Generation(token=0, number=0)
    peer = Peer(rank=0, address=engine.reserve(alone, "worker"))
    devices = ("cuda:0",) if plan.placement.accelerator == "GPU" else ("cpu",)
    threads = 0 if guest else plan.placement.threads
    engine.form(Group(generation=alone, rank=0, peers=(peer,), devices=devices, threads=threads))
    engine.build(spec, plan)
    return engine
