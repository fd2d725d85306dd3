"""The plan: frozen, explains itself, and says who is fed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from trainwright.core.data import Feeding
from trainwright.core.group import Role, Topology, role_of
from trainwright.core.pipeline_layout import STREAMED, loss_stage


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

    def part_of(self, rank: int) -> int:
        """Which part of a replica a rank holds, counted in the order of ranks; the same in all replicas."""
        inner = self.shard * self.tensor
        return self.stage_of(rank) * inner + rank % inner

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
        head: Ray's resource of the first host of a TPU slice, such as `TPU-v4-16-head`, which the first worker takes.
        data_cpus: CPUs of the cluster left for Ray Data.
        server_cpus: CPUs reserved for each server, of a share that no worker has; it takes no accelerator.
    """

    cpus: float
    accelerators: int = 0
    accelerator: str = ""
    threads: int = 1
    head: str = ""
    data_cpus: float = 1.0
    server_cpus: float = 0.1


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A predicted step.

    Attributes:
        step_s: seconds.
        low_s, high_s: nine of ten steps are expected between them.
        terms: seconds by name; they add up to `step_s`.
        stage_memory_bytes: that each pipeline stage takes of a device.
        device_memory_bytes: of one device; 0 where that is not known.
        factors: by what the same loss takes longer than so many steps, by name: `staleness`, `local_steps` (more steps
            for it), `preemptions` (time lost to them). Models, not verified.
    """

    step_s: float
    low_s: float
    high_s: float
    terms: Mapping[str, float]
    stage_memory_bytes: tuple[int, ...]
    device_memory_bytes: int = 0
    factors: Mapping[str, float] = field(default_factory=dict)

    @property
    def target_s(self) -> float:
        """Seconds to the loss that one step of one device would come to: what plans are ranked by."""
        return self.step_s * math.prod(self.factors.values())


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
        keras_backend: that the model was made with; empty for one that is not Keras'.
        precision: `fp32` (the model's own types), `bf16` (autocast) or `fp16` (autocast and scaled losses).
        micro_batch: samples of one micro-batch of a data rank; 0 where `accumulation` says how many there are.
        schedule: of a pipeline: `gpipe`, `1f1b`, `interleaved`, `zero_bubble`, `zbv` or `pipedream`.
        chunks: of layers that each stage holds: some of an interleaved pipeline, two of `zbv`.
        recompute: activations computed again in backward: `none`, `selective` (attention's scores) or `full`.
        sequence: between the layers that tensor parallelism divides each of its ranks holds some of the tokens.
        zero: what `mesh.shard` ranks divide between them: 1 the optimizer's state, 2 gradients too, 3 parameters too.
        offload: what `zero` divides is kept and updated in the memory of the host, and visits the device.
        servers: processes that hold the parameters, where workers step alone.
        tpu: that the job names.
        in_flight: steps that a coordinator has begun and not completed, at most.
        consistency: how far these may be apart (see `Consistency.parse`).
        wire: in what form they push gradients: `full`, `fp16`, `bf16`, `int8` or `topk(share)`.
        local_steps: steps that each of them takes by itself between two pushes.
        outer: how the servers apply what several local steps came to: `average` (local SGD) or `nesterov` (DiLoCo),
            with a learning rate and momentum of their own: `nesterov(0.7,0.9)`.
        stages: layers of each of the pipeline's sections, in order: of each stage, or of each of its chunks; empty
            where they are as equal as can be.
        cuts: modules with whose calls the sections after the first begin.
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
    keras_backend: str = ""
    precision: str = "fp32"
    micro_batch: int = 0
    schedule: str = ""
    chunks: int = 1
    recompute: str = "none"
    sequence: bool = False
    zero: int = 0
    offload: bool = False
    servers: int = 0
    in_flight: int = 1
    tpu: str = ""
    consistency: str = ""
    wire: str = "full"
    local_steps: int = 1
    outer: str = ""
    stages: tuple[int, ...] = ()
    cuts: tuple[str, ...] = ()
    estimate: Estimate | None = None
    notes: tuple[str, ...] = field(default=())

    @classmethod
    def parse(cls, text: str) -> Plan:
        """A plan from degrees and choices, for estimates: `dp=8,tp=2,pp=4,micro_batch=4,schedule=1f1b,recompute=full`.

        Args:
            text: any of `dp`, `fsdp` (ZeRO-3 over so many ranks, `dp` times), `zero` (1, 2 or 3: over all `dp`
                ranks), `offload` (0 or 1), `tp`, `sequence` (0 or 1), `pp`, `micro_batch`, `accumulation`,
                `schedule`, `chunks`, `recompute`, `precision`, and for workers that step alone `servers`,
                `consistency`, `wire`, `local_steps`, `outer`; what is left out is 1, none, or with a pipeline
                micro-batches of one sample in the order 1F1B.

        Raises:
            PlanError: a name or a value is not known.
        """
        from trainwright.core.plan_spec import fields_of

        return cls(batch_size=0, placement=Placement(cpus=1.0), engine="", **fields_of(text))

    @property
    def text(self) -> str:
        """What `Plan.parse` and a job's `plan=` read; without the sizes of stages and the precision."""
        from trainwright.core.plan_spec import text_of

        return text_of(self)

    @property
    def name(self) -> str:
        """`pipeline (pp=2,schedule=1f1b,accumulation=4)`, `one_device`."""
        return f"{self.strategy} ({self.text})" if self.text else self.strategy

    def noted(self, *notes: str) -> Plan:
        """The same with more to know about it."""
        return replace(self, notes=(*self.notes, *notes))

    def micro_batches(self, batch_size: int) -> tuple[int, int]:
        """How many micro-batches a data rank's share of so many samples makes, and the samples of the largest."""
        share = -(-batch_size // self.mesh.data_ranks)
        if self.micro_batch:
            return -(-share // self.micro_batch), min(self.micro_batch, share)
        return self.accumulation, -(-share // self.accumulation)

    @property
    def sections(self) -> int:
        """Into how many the pipeline cuts the model; `core.sections` says which stage holds which."""
        return self.mesh.pipeline * self.chunks

    @property
    def streamed(self) -> bool:
        """Whether a step begins the next one, whose feed it is given too; its gradients are one step stale."""
        return self.schedule in STREAMED and self.mesh.pipeline > 1

    @property
    def ahead(self) -> int:
        """Steps that may begin before the one before them ends, whose feeds are given along with its own."""
        return 1 if self.streamed else self.in_flight - 1

    @property
    def workers(self) -> int:
        """Number of worker actors."""
        return self.mesh.size // self.devices_per_worker

    @property
    def processes(self) -> int:
        """Number of actors: workers and servers, and a coordinator that leads those and computes nothing itself."""
        chief = self.topology == "coordinator" and self.servers > 0
        return chief + self.servers + self.workers

    def role_of(self, rank: int) -> Role:
        """Of a process; see `core.group.role_of`."""
        return role_of(rank, self.topology, self.servers)

    @property
    def layout(self) -> Plan:
        """What a process builds for: two plans of one layout differ in replicas, micro-batches and figures alone."""
        mesh = replace(self.mesh, data=1)
        return replace(self, mesh=mesh, accumulation=1, micro_batch=0, estimate=None, notes=())

    def resized(self, workers: int) -> Plan:
        """The same plan on more or fewer workers: its data dimension changes, the global batch does not.

        On fewer workers there are more micro-batches, so that none is larger than it was planned; of an interleaved
        pipeline they stay a multiple of its stages.

        Raises:
            ValueError: a whole replica of the model needs a multiple of that many workers.
        """
        replica = self.mesh.size // self.mesh.data
        data, rest = divmod(workers * self.devices_per_worker, replica)
        if rest or not data:
            raise ValueError(f"the devices of {workers} workers are no multiple of the {replica} that hold a replica")
        accumulation = max(self.accumulation, -(-self.accumulation * self.mesh.data // data))
        if self.schedule == "interleaved":
            accumulation += -accumulation % self.mesh.pipeline
        return replace(self, mesh=replace(self.mesh, data=data), accumulation=accumulation)

    def feed_of(self, worker: int) -> Feeding:
        """Which data ranks a worker is fed, and whether it wants inputs and targets.

        A coordinator's rank 0 holds all data ranks and the others none. Servers have none, and a worker that steps
        alone has one to begin with.
        """
        total, stage = self.mesh.data_ranks, self.mesh.stage_of(worker * self.devices_per_worker)
        if self.topology == "coordinator":
            return Feeding(data_ranks=range(total if worker == 0 else 0), total=total)
        if self.topology == "independent":
            share = (worker - self.servers) % total
            return Feeding(data_ranks=range(share, share + (worker >= self.servers)), total=total)
        first = self.mesh.data_rank_of(worker * self.devices_per_worker)
        return Feeding(
            data_ranks=range(first, first + self.devices_per_worker),
            total=total,
            inputs=stage == 0,
            targets=stage == loss_stage(self.schedule, stages=self.mesh.pipeline, chunks=self.chunks),
        )


@dataclass(frozen=True, kw_only=True)
class Infeasible:
    """What cannot be: why, and what would make it possible.

    Attributes:
        strategy: whose it is.
        reason: why.
        hint: what would make it possible.
        plan: that cannot be, where there is one.
        missing_bytes: of memory on its fullest stage; 0 where memory is not what is missing.
    """

    strategy: str
    reason: str
    hint: str
    plan: Plan | None = None
    missing_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class Rejected:
    """A plan that could be but was not chosen, and why."""

    plan: Plan
    reason: str
