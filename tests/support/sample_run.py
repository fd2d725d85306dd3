"""Events of a made-up run, small enough to check by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from trainwright.core import events
from trainwright.core.cluster import Cluster, Node
from trainwright.core.model_profile import LayerCost, ModelProfile
from trainwright.core.plan import Estimate, InfeasiblePlan, Mesh, Plan, RejectedPlan, WorkerResources
from trainwright.planning.decision import Decision

PLAN = Plan(
    strategy="data_parallel",
    engine="trainwright.strategies.torch.engines.data_parallel:DataParallel",
    mesh=Mesh(data=2),
    batch_size=256,
    placement=WorkerResources(cpus=0.5),
    estimate=Estimate(
        step_s=0.014,
        low_s=0.005,
        high_s=0.042,
        terms={"compute": 0.012, "gradients": 0.002},
        stage_memory_bytes=(4096,),
    ),
    notes=("batch norm is local to each worker",),
)
CLUSTER = Cluster(nodes=(Node(name="a", cpus=2, memory_bytes=8 << 30),))
DECISION = Decision(
    chosen=PLAN,
    rejected=(
        RejectedPlan(
            plan=replace(PLAN, strategy="one_device", mesh=Mesh()), reason="predicted 1.71 times the step time"
        ),
    ),
    infeasible=(InfeasiblePlan(strategy="pipeline", reason="the model has no stages", hint="give it as a sequence"),),
    profile=ModelProfile(
        framework="torch", layers=(LayerCost(name="conv", parameters=1000, parameter_bytes=4000, flops=1e6),)
    ),
    cluster=CLUSTER,
    used=CLUSTER,
)


def started(*, token: int = 1, time_s: float = 100.0, total: int = 20, fresh: bool = False) -> events.RunStarted:
    """A driver takes the run; 10 steps an epoch."""
    return events.RunStarted(
        time_s=time_s,
        run="demo",
        token=token,
        job={"name": "demo", "batch_size": "256", "storage": "memory://x", "note": "<script>alert(1)</script>"},
        plan=asdict(PLAN),
        rejected=[
            {"strategy": "one_device", "reason": "predicted 1.71 times the step time"},
            {"strategy": "pipeline", "reason": "the model has no stages", "hint": "give it as a sequence"},
        ],
        cluster="1 node, 2 CPUs, no accelerators",
        timeline=DECISION.timeline,
        versions={"python": "3.11"},
        total_steps=total,
        steps_per_epoch=10,
        fresh=fresh,
    )


def stepped(
    steps: Sequence[int], *, time_s: float, generation: int = 1, loss: float | None = None, norm: float | None = 1.5
) -> events.Steps:
    """Steps of 100 ms, of which 20 ms waited for data, with 256 samples each; the loss is 1 / step unless given."""
    count = len(steps)
    return events.Steps(
        time_s=time_s,
        generation=generation,
        step=list(steps),
        loss=[1 / step if loss is None else loss for step in steps],
        learning_rate=[0.1] * count,
        gradient_norm=[norm] * count,
        samples=[256] * count,
        step_s=[0.1] * count,
        wait_s=[0.02] * count,
    )


def checkpointed(step: int, *, time_s: float) -> events.Checkpointed:
    """A checkpoint of 2 KiB that cost the steps 100 ms."""
    path = f"checkpoints/{step:08d}-1"
    return events.Checkpointed(time_s=time_s, step=step, path=path, size_bytes=2048, blocked_s=0.1, seconds=1)


def whole_run() -> list[events.Event]:
    """20 steps with a worker killed after step 12, recovered at step 10, two evaluations and two checkpoints."""
    return [
        started(),
        events.Placed(time_s=101, worker=0, node="node-a", pid=11),
        events.Placed(time_s=101, worker=1, node="node-a", pid=12),
        events.Formed(time_s=104, generation=1, workers=2, seconds=4, nodes={"node-a": "0-1"}),
        stepped(range(1, 11), time_s=105),
        events.Evaluated(time_s=107, step=10, metrics={"accuracy": 0.8, "loss": 0.5}, seconds=2),
        checkpointed(10, time_s=107.1),
        stepped([11, 12], time_s=107.3),
        events.Failed(
            time_s=107.3, generation=1, worker=1, rank=1, node="node-a", pid=12, cause="killed by SIGKILL", step=12
        ),
        events.Formed(
            time_s=109.3, generation=2, workers=2, step=10, source="checkpoint", checkpoint="checkpoints/00000010-1",
            survivors=1, seconds=2, steps_lost=2, nodes={"node-a": "0", "node-b": "1"},
        ),
        stepped(range(11, 21), time_s=110.3, generation=2, loss=0.05),
        events.Evaluated(time_s=111.3, step=20, metrics={"accuracy": 0.9, "loss": 0.3}, seconds=1),
        checkpointed(20, time_s=111.4),
        events.RunEnded(time_s=112, outcome="done", step=20),
    ]  # fmt: skip


class Recorder:
    """A listener that keeps what it hears."""

    def __init__(self) -> None:
        self.heard: list[events.Event] = []
        self.closed = False

    def on(self, event: events.Event) -> None:
        self.heard.append(event)

    def close(self) -> None:
        self.closed = True


def kinds(heard: Sequence[Any]) -> list[str]:
    """Names of the events' kinds."""
    return [event.kind for event in heard]
