"""The plan: frozen, explains itself, and says who is fed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from trainwright.core.data import Feeding
from trainwright.core.group import Topology


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """Degrees of parallelism, outermost first; their product is the world size.

    Ranks are laid out with the tensor dimension fastest, so that tensor-parallel ranks are neighbours:
    rank = ((stage * data + d) * shard + s) * tensor + t.
    """

    pipeline: int = 1
    data: int = 1
    shard: int = 1
    tensor: int = 1

    @property
    def size(self) -> int:
        """World size."""
        return self.pipeline * self.data * self.shard * self.tensor

    @property
    def data_ranks(self) -> int:
        """How many different shares a global batch is dealt into."""
        return self.data * self.shard

    def stage_of(self, rank: int) -> int:
        """Pipeline stage of a rank."""
        return rank // (self.data * self.shard * self.tensor)

    def data_rank_of(self, rank: int) -> int:
        """Data rank of a rank; the same data rank means the same samples."""
        return rank // self.tensor % self.data_ranks


@dataclass(frozen=True, kw_only=True)
class Placement:
    """What one worker actor holds.

    Attributes:
        cpus: CPUs reserved from Ray for each worker; a fraction is allowed, so that Ray Data is never starved.
        accelerators: accelerators reserved for each worker (0 on CPU).
        accelerator: name of Ray's resource, such as `GPU` or `TPU`; empty on CPU.
        threads: CPU threads each worker computes with.
        data_cpus: CPUs of the cluster left for Ray Data.
    """

    cpus: float
    accelerators: int = 0
    accelerator: str = ""
    threads: int = 1
    data_cpus: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A predicted step. Terms are seconds by name and add up to `step_s`."""

    step_s: float
    low_s: float
    high_s: float
    terms: Mapping[str, float]
    stage_memory_bytes: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How a job runs on a cluster.

    Attributes:
        strategy: name of the strategy that proposed it, such as `data_parallel`.
        engine: import path of the engine, `module:Class`; imported in the workers only.
        mesh: degrees of parallelism.
        batch_size: global batch, in samples.
        accumulation: micro-batches of one rank in one step.
        devices_per_worker: data ranks one actor drives (virtual or local devices).
        topology: of the engine.
        precision: `fp32` (the model's own types) or `bf16` (autocast).
        placement: what each worker actor reserves.
        estimate: predicted figures; None where the strategy has none.
        notes: what the user should know about this plan, such as what is not equal to one device.
    """

    strategy: str
    engine: str
    mesh: Mesh
    batch_size: int
    placement: Placement
    accumulation: int = 1
    devices_per_worker: int = 1
    topology: Topology = "collective"
    precision: str = "fp32"
    estimate: Estimate | None = None
    notes: tuple[str, ...] = field(default=())

    @property
    def workers(self) -> int:
        """Number of worker actors."""
        return self.mesh.size // self.devices_per_worker

    def feed_of(self, worker: int) -> Feeding:
        """Which data ranks a worker is fed, and whether it wants inputs and targets.

        A coordinator's rank 0 holds all data ranks and the others none.
        """
        total, stage = self.mesh.data_ranks, self.mesh.stage_of(worker * self.devices_per_worker)
        if self.topology == "coordinator":
            return Feeding(data_ranks=range(total if worker == 0 else 0), total=total)
        first = self.mesh.data_rank_of(worker * self.devices_per_worker)
        return Feeding(
            data_ranks=range(first, first + self.devices_per_worker),
            total=total,
            inputs=stage == 0,
            targets=stage == self.mesh.pipeline - 1,
        )


@dataclass(frozen=True, kw_only=True)
class Infeasible:
    """A plan that cannot be: why, and what would make it possible."""

    strategy: str
    reason: str
    hint: str


@dataclass(frozen=True, kw_only=True)
class Rejected:
    """A plan that could be but was not chosen, and why."""

    plan: Plan
    reason: str
