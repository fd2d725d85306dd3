"""The plan of a run: its mesh, choices and placement, and which data each rank is fed.

A pipeline cuts the model into stages x chunks sections that follow each other. A stage's chunks are dealt out in turns,
each turn in the order of the stages; in folded schedules every second turn goes back through them, so that the sections
of two turns meet on one stage, and the first stage ends the model that it begins.

Ranks that divide a layer between them stay inside a node, since they exchange something in every layer. Those of one
replica follow each other, stage by stage, so that pipeline neighbours share a node or lie on adjacent ones. Replicas
come one after another, so that copies of the same piece lie as far apart as the nodes allow.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, groupby
from typing import Any

from trainwright.core.data import FeedAssignment
from trainwright.core.errors import PlanError, nearest
from trainwright.core.topology import Consistency, GradientCompression, OuterOptimizer, Role, Topology, role_of


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
        """Number of different shares of a global batch."""
        return self.data * self.shard

    def stage_of(self, rank: int) -> int:
        """Return the pipeline stage of a rank."""
        return rank // (self.data * self.shard * self.tensor)

    def part_of(self, rank: int) -> int:
        """Return the number of the part of a replica that a rank holds, in rank order; the same in all replicas."""
        inner = self.shard * self.tensor
        return self.stage_of(rank) * inner + rank % inner

    def data_rank_of(self, rank: int) -> int:
        """Return the data rank of a rank; ranks with the same data rank get the same samples."""
        return rank // self.tensor % self.data_ranks


@dataclass(frozen=True, kw_only=True)
class WorkerResources:
    """Resources of one worker actor."""

    cpus: float  # CPUs reserved from Ray for each worker; a fraction is allowed, so that Ray Data is never starved
    accelerators: int = 0  # accelerators reserved for each worker (0 on CPU)
    accelerator: str = ""  # name of Ray's resource, such as `GPU` or `TPU`; empty on CPU
    kind: str = ""  # Ray's name of the accelerators' model, where the job asks for one
    threads: int = 1  # CPU threads each worker computes with; 0 for its share of the CPUs, where nothing is run
    # Ray's resource of the first host of a TPU slice, such as `TPU-v4-16-head`, which the first worker takes
    head: str = ""
    data_cpus: float = 1.0  # CPUs of the cluster left for Ray Data
    server_cpus: float = 0.1  # CPUs reserved for each server, of a share that no worker has; it takes no accelerator


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """The prediction for a step.

    Attributes:
        step_s: seconds.
        low_s, high_s: nine of ten steps are expected between them.
        terms: seconds by name; they add up to `step_s`.
        stage_memory_bytes: needed by each pipeline stage on a device.
        device_memory_bytes: of one device; 0 where unknown.
        factors: by which the same loss takes longer, by name: `staleness` and `local_steps` (more steps), `preemptions`
            (lost time). Models, not verified.
        sample_flops: operations of the model for one sample, forward and backward, without recomputation; 0 where its
            operations are not known.
        peak_flops_per_s: of one device in the plan's precision, by its data sheet; 0 without one.
    """

    step_s: float
    low_s: float
    high_s: float
    terms: Mapping[str, float]
    stage_memory_bytes: tuple[int, ...]
    device_memory_bytes: int = 0
    factors: Mapping[str, float] = field(default_factory=dict)
    sample_flops: float = 0.0
    peak_flops_per_s: float = 0.0

    @property
    def target_s(self) -> float:
        """Seconds to the loss that one step on one device would reach; plans are ranked by it."""
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
        devices_per_worker: data ranks that one actor drives (virtual or local devices).
        topology: of the engine.
        keras_backend: of a Keras model; empty for other models.
        precision: `fp32` (the model's own types), `bf16` (autocast) or `fp16` (autocast and scaled losses).
        micro_batch: samples of one micro-batch of a data rank; 0 where `accumulation` gives their number.
        schedule: of a pipeline: `gpipe`, `1f1b`, `interleaved`, `zero_bubble`, `zbv` or `pipedream`.
        chunks: of layers that each stage holds: some in an interleaved pipeline, two in `zbv`.
        recompute: activations recomputed in backward: `none`, `selective` (attention's scores) or `full`.
        sequence: sequence parallelism: between divided layers, each tensor-parallel rank holds some of the tokens.
        zero: state that `mesh.shard` ranks divide: 1 the optimizer's, 2 gradients too, 3 parameters too.
        offload: the state that `zero` divides is kept and updated in host memory.
        servers: number of parameter servers, where workers step asynchronously.
        tpu: name of the job's TPU.
        cross_device_ops, communication, bytes_per_pack: as in a job; where TensorFlow chooses, empty, `auto` and 0.
        in_flight: most steps that a coordinator has begun and not completed.
        consistency: how far asynchronous workers may be apart (see `Consistency.parse`).
        wire: compression of pushed gradients: `full`, `fp16`, `bf16`, `int8` or `topk(share)`; with `zero`, of reduced
            ones: `full` or `bf16`.
        local_steps: steps of a worker between two pushes.
        outer: how servers apply the result of local steps: `average` (local SGD) or `nesterov(rate,momentum)` (DiLoCo).
        stages: layers of each of the pipeline's sections in order, one or several a stage; empty for an even division.
        cuts: names of the modules at which the sections after the first begin.
        placement: resources that each worker actor reserves.
        estimate: predicted figures; None where the strategy has none.
        notes: for the user, such as differences from one device.
    """

    strategy: str
    engine: str
    mesh: Mesh
    batch_size: int
    placement: WorkerResources
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
    cross_device_ops: str = ""
    communication: str = "auto"
    bytes_per_pack: int = 0
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
        """Return a plan from degrees and choices: `dp=8,tp=2,pp=4,micro_batch=4,schedule=1f1b,recompute=full`.

        Args:
            text: any of `dp`, `fsdp` (ZeRO-3 over this many ranks, with `dp` replicas), `zero` (1, 2 or 3, over all
                `dp` ranks), `offload` (0 or 1), `tp`, `sequence` (0 or 1), `pp`, `micro_batch`, `accumulation`,
                `schedule`, `chunks`, `recompute`, `precision`, and for asynchronous workers `servers`, `consistency`,
                `wire`, `local_steps`, `outer`. The default is 1 or none; a pipeline has micro-batches of one sample in
                the order 1F1B.

        Raises:
            PlanError: a name or a value is not known.
        """
        return cls(batch_size=0, placement=WorkerResources(cpus=1.0, threads=0), engine="", **_parse_plan(text))

    @property
    def memory_bytes(self) -> int:
        """Predicted memory of the fullest device; 0 without a prediction."""
        return max(self.estimate.stage_memory_bytes, default=0) if self.estimate is not None else 0

    @property
    def text(self) -> str:
        """The text that `Plan.parse` and a job's `plan=` read; without stage sizes and precision."""
        return _format_plan(self)

    @property
    def name(self) -> str:
        """`pipeline (pp=2,schedule=1f1b,accumulation=4)`, `one_device`."""
        return f"{self.strategy} ({self.text})" if self.text else self.strategy

    def noted(self, *notes: str) -> Plan:
        """Return the plan with more notes."""
        return replace(self, notes=(*self.notes, *notes))

    def micro_batches(self, batch_size: int) -> tuple[int, int]:
        """Return the number of micro-batches of a data rank's share of a batch, and the samples of the largest."""
        share = -(-batch_size // self.mesh.data_ranks)
        if self.micro_batch:
            return -(-share // self.micro_batch), min(self.micro_batch, share)
        return self.accumulation, -(-share // self.accumulation)

    @property
    def sections(self) -> int:
        """Number of sections into which the pipeline cuts the model; see `section_of`."""
        return self.mesh.pipeline * self.chunks

    @property
    def streamed(self) -> bool:
        """Whether a step also starts the next one, with its feed; gradients are then one step stale."""
        return self.schedule in STREAMED_SCHEDULES and self.mesh.pipeline > 1

    @property
    def ahead(self) -> int:
        """Number of next steps that may start before a step ends; their feeds are passed with its own."""
        return 1 if self.streamed else self.in_flight - 1

    @property
    def workers(self) -> int:
        """Number of worker actors."""
        return self.mesh.size // self.devices_per_worker

    @property
    def processes(self) -> int:
        """Number of actors: workers, servers, and the coordinator where there is one."""
        chief = self.topology == "coordinator" and self.servers > 0
        return chief + self.servers + self.workers

    def role_of(self, rank: int) -> Role:
        """Return the role of a process; see `topology.role_of`."""
        return role_of(rank, self.topology, self.servers)

    @property
    def layout(self) -> Plan:
        """The layout that a process is built for: its plans differ only in replicas, micro-batches and estimates."""
        mesh = replace(self.mesh, data=1)
        return replace(self, mesh=mesh, accumulation=1, micro_batch=0, estimate=None, notes=())

    def resized(self, workers: int) -> Plan:
        """Return the plan on more or fewer workers: the data dimension changes, the global batch does not.

        On fewer workers there are more micro-batches, so that none is larger than planned; an interleaved pipeline
        keeps a multiple of its stages.

        Raises:
            ValueError: a whole replica of the model needs a multiple of that many workers.
        """
        replica = self.mesh.size // self.mesh.data
        data, remainder = divmod(workers * self.devices_per_worker, replica)
        if remainder or not data:
            raise ValueError(
                f"the devices of {workers} workers are not a multiple of the {replica} that hold a replica"
            )
        accumulation = max(self.accumulation, -(-self.accumulation * self.mesh.data // data))
        if self.schedule == "interleaved":
            accumulation += -accumulation % self.mesh.pipeline
        return replace(self, mesh=replace(self.mesh, data=data), accumulation=accumulation)

    def feed_of(self, worker: int) -> FeedAssignment:
        """Return the data ranks of a worker, and whether it needs inputs.

        A coordinator's rank 0 holds all data ranks and the other ranks none. Servers have none, and a worker that
        steps independently begins with one.
        """
        total, device = self.mesh.data_ranks, worker * self.devices_per_worker
        if self.topology == "coordinator":
            return FeedAssignment(data_ranks=range(total if worker == 0 else 0), total=total)
        if self.topology == "independent":
            share = (worker - self.servers) % total
            return FeedAssignment(data_ranks=range(share, share + (worker >= self.servers)), total=total)
        first_rank = self.mesh.data_rank_of(device)
        ranks = range(first_rank, first_rank + self.devices_per_worker)
        return FeedAssignment(data_ranks=ranks, total=total, inputs=self.mesh.stage_of(device) == 0)


SUMMED_BY: Mapping[str, str] = {
    "cross_device_ops": "tf_mirrored",
    "communication": "tf_multi_worker_mirrored",
    "bytes_per_pack": "tf_multi_worker_mirrored",
}
"""Options of how TensorFlow sums over devices or workers, and the strategy that has each."""


@dataclass(frozen=True, kw_only=True)
class InfeasiblePlan:
    """A plan or strategy that is not possible: why, and what would make it possible."""

    strategy: str  # name of the strategy
    reason: str  # why it is not possible
    hint: str  # what would make it possible
    plan: Plan | None = None  # the impossible plan, if there is one
    missing_bytes: int = 0  # memory missing on its fullest stage; 0 for other reasons


@dataclass(frozen=True, kw_only=True)
class RejectedPlan:
    """A possible plan that was not chosen, and why."""

    plan: Plan
    reason: str


# --- Which stage of a pipeline holds which section of the model -------------------------------------------------------


FOLDED_SCHEDULES = frozenset({"zbv"})  # schedules whose chunks go to the last stage and back (a V: Qi et al., 2024)
STREAMED_SCHEDULES = frozenset(
    {"pipedream"}
)  # schedules whose steps follow each other without a drain (Narayanan et al., 2021a)
_CHUNKED_SCHEDULES = FOLDED_SCHEDULES | {"interleaved"}  # schedules whose stages hold several chunks


def chunk_problem(schedule: str, chunks: int) -> str:
    """Return why a schedule cannot have a number of chunks for each stage; empty where it can."""
    if schedule in FOLDED_SCHEDULES and chunks != 2:
        return f"schedule={schedule} goes through the stages and back, in 2 chunks of each and not {chunks}"
    if schedule not in _CHUNKED_SCHEDULES and chunks > 1:
        return f"chunks={chunks} is for schedule={' or '.join(sorted(_CHUNKED_SCHEDULES))}"
    return ""


def section_of(schedule: str, *, stage: int, stages: int, chunk: int = 0) -> int:
    """Return the section, from 0, of a chunk of a stage."""
    return chunk * stages + _is_turned(schedule, stage, stages, chunk)


def stage_of_section(schedule: str, *, section: int, stages: int) -> tuple[int, int]:
    """Return the stage that holds a section, and the number of its chunk."""
    chunk, place = divmod(section, stages)
    return _is_turned(schedule, place, stages, chunk), chunk


def loss_stage(schedule: str, *, stages: int, chunks: int = 1) -> int:
    """Return the stage with the end of the model, which computes the loss."""
    return stage_of_section(schedule, section=stages * chunks - 1, stages=stages)[0]


def _is_turned(schedule: str, place: int, stages: int, chunk: int) -> int:
    return stages - 1 - place if schedule in FOLDED_SCHEDULES and chunk % 2 else place


# --- Plans in words ---------------------------------------------------------------------------------------------------


_NUMBER_FIELDS = (
    "dp", "fsdp", "tp", "pp", "sequence", "zero", "offload", "micro_batch", "accumulation", "chunks", "servers",
    "local_steps",
)  # fmt: skip
_FIELD_BOUNDS: Mapping[str, tuple[int, int | None]] = {
    "zero": (0, 3),
    "offload": (0, 1),
    "sequence": (0, 1),
    "micro_batch": (0, None),
}
_FIELD_CHOICES: Mapping[str, tuple[str, ...]] = {
    "schedule": ("gpipe", "1f1b", "interleaved", "zero_bubble", "zbv", "pipedream"),
    "recompute": ("none", "selective", "full"),
    "precision": ("fp32", "tf32", "fp16", "bf16"),
}
_FIELD_PARSERS: Mapping[str, Callable[[str], object]] = {
    "consistency": Consistency.parse,
    "wire": GradientCompression.parse,
    "outer": OuterOptimizer.parse,
}
_UNAVAILABLE = {
    "cp": ("context parallelism", "divide the tokens of a layer's activations: tp=2,sequence=1"),
    "ep": ("expert parallelism", "divide the experts' parameters over data ranks: zero=3, or fsdp="),
}
_COMMA = re.compile(r",(?![^()]*\))")  # not one between parentheses


def _parse_plan(text: str) -> dict[str, Any]:
    """Return the fields of a plan for a text of `Plan.parse`, with defaults for the rest."""
    fields = _parse_fields(text)
    mesh, zero = _mesh_of(fields)
    if mesh.pipeline > 1:
        fields = {"micro_batch": 0 if "accumulation" in fields else 1, "schedule": "1f1b"} | fields
    if fields.get("schedule") in _CHUNKED_SCHEDULES:
        fields = {"chunks": 2} | fields
    server_defaults = {"topology": "independent", "consistency": "sync"} if "servers" in fields else {}
    strategy = _strategy_of(mesh, servers=fields.get("servers", 0), local_steps=fields.get("local_steps", 1))
    return {"strategy": strategy, "mesh": mesh, **server_defaults, **fields, "zero": zero}


def single_device_spec(text: str) -> str:
    """Return the part of a job's `plan=` that applies to one device too: its micro-batches."""
    parts = [part.strip() for part in _COMMA.split(text)]
    return ",".join(part for part in parts if part.partition("=")[0].strip() in ("accumulation", "micro_batch"))


def _parse_fields(text: str) -> dict[str, Any]:
    """Return the values of a text by name."""
    values: dict[str, Any] = {}
    for part in filter(None, (part.strip() for part in _COMMA.split(text))):
        name, _, value = (piece.strip() for piece in part.partition("="))
        if name in values:
            raise PlanError(f"{name}= is given twice", where=text, remedy="leave one of them out")
        values[name] = _parse_value(name, value, text)
    problem = chunk_problem(values["schedule"], values["chunks"]) if {"schedule", "chunks"} <= values.keys() else ""
    if problem:
        raise PlanError(problem, where=text, remedy="leave chunks= out")
    return values


def _mesh_of(values: dict[str, Any]) -> tuple[Mesh, int]:
    """Remove the degrees from the values; return the mesh and what is sharded."""
    if "schedule" in values and values.get("pp", 1) == 1:
        raise PlanError(
            f"schedule={values['schedule']} is of a pipeline, and the plan has one stage",
            where="plan",
            remedy="add pp=2 or more, or leave schedule= out",
        )
    if values.get("zero", 0) > 1 and values.get("pp", 1) > 1:
        raise PlanError(
            f"zero={values['zero']}: a pipeline sums the gradients of all micro-batches whole, which is ZeRO-1",
            where="plan",
            remedy="use zero=1",
        )
    numbers = {name: values.pop(name, 1) for name in ("dp", "tp", "pp")}
    default_zero = 1 if numbers["pp"] > 1 else 3  # a pipeline gathers parameters and divides gradients once a step
    zero, fsdp = values.get("zero", default_zero if "fsdp" in values else 0), values.pop("fsdp", None)
    data, shard = (numbers["dp"], fsdp) if fsdp else (1, numbers["dp"]) if zero else (numbers["dp"], 1)
    return Mesh(pipeline=numbers["pp"], data=data, shard=shard, tensor=numbers["tp"]), zero


def _format_plan(plan: Plan) -> str:
    """Return the text of a plan, without values that are defaults."""
    mesh = plan.mesh
    hybrid = mesh.shard > 1 and mesh.data > 1
    parts = {
        "dp": mesh.data if hybrid else mesh.data_ranks,
        "fsdp": mesh.shard if hybrid else 1,
        "tp": mesh.tensor,
        "sequence": int(plan.sequence),
        "pp": mesh.pipeline,
        "zero": plan.zero,
        "offload": int(plan.offload),
        "micro_batch": plan.micro_batch,
        "accumulation": plan.accumulation,
        "schedule": plan.schedule,
        "chunks": plan.chunks,
        "recompute": plan.recompute,
        "servers": plan.servers,
        "consistency": plan.consistency,
        "wire": plan.wire,
        "local_steps": plan.local_steps,
        "outer": plan.outer,
    }
    defaults = {
        "zero": 0, "offload": 0, "sequence": 0, "micro_batch": 0, "schedule": "", "recompute": "none", "servers": 0,
        "consistency": "sync" if plan.servers else "", "wire": "full", "outer": "",
    }  # fmt: skip
    shown_parts = {name: value for name, value in parts.items() if value != defaults.get(name, 1)}
    if mesh.pipeline > 1 and not plan.micro_batch:
        shown_parts["accumulation"] = plan.accumulation
    return ",".join(f"{name}={value}" for name, value in shown_parts.items())


@dataclass(frozen=True, kw_only=True)
class PlanConstraints:
    """The parts of a plan that a job pins."""

    text: str = ""  # of its `plan=`
    fields: Mapping[str, Any] = field(default_factory=dict)  # of its other fields, by their names
    mesh: Mesh | None = None  # degrees; where one is given, those that are left out are 1. None where none is given.
    choices: Mapping[str, Any] = field(default_factory=dict)  # all else, by the names of `Plan.parse`

    @classmethod
    def parse(cls, text: str) -> PlanConstraints:
        """Parse a job's `plan=`. Raises PlanError for an unknown name or value."""
        choices = _parse_fields(text)
        if "precision" in choices:
            raise PlanError("precision is a field of the job", where=text, remedy="write precision= beside plan=")
        if not {"dp", "fsdp", "tp", "pp"} & choices.keys():
            return cls(text=text, choices=choices)
        mesh, zero = _mesh_of(choices)
        return cls(text=text, mesh=mesh, choices=choices | {"zero": zero})

    @property
    def reduces_in_half(self) -> bool:
        """Whether ranks that divide the model's state are to reduce gradients in half precision."""
        return self.choices.get("wire") == "bf16" and bool(self.choices.get("zero"))

    def beside(self, choices: Mapping[str, Any]) -> PlanConstraints:
        """Return these constraints with further choices, which are separate options of a job.

        Raises:
            PlanError: a choice is given twice with different values.
        """
        for name, value in choices.items():
            if self.choices.get(name, value) != value:
                problem = f"{name}={value!r} is not the {name}={self.choices[name]} of plan={self.text!r}"
                raise PlanError(problem, where="plan", remedy="leave one of them out")
        return replace(self, fields=choices, choices={**self.choices, **choices})

    def __str__(self) -> str:
        """Return the options of the job: `plan='dp=2', consistency='async'`."""
        options = {"plan": self.text} if self.text else {}
        return ", ".join(f"{name}={value!r}" for name, value in {**options, **self.fields}.items())

    def allow(self, plan: Plan) -> bool:
        """Return whether a plan meets the constraints."""
        if self.mesh is not None and self.mesh != plan.mesh:
            return False
        plan_choices = {name: getattr(plan, name) for name in self.choices}
        if "consistency" in plan_choices:  # empty in plans whose ranks step together
            plan_choices["consistency"] = plan.consistency or "sync"
        if "micro_batch" in plan_choices:
            plan_choices["micro_batch"] = plan.micro_batches(plan.batch_size)[1]
        return plan_choices == dict(self.choices)


def _strategy_of(mesh: Mesh, *, servers: int = 0, local_steps: int = 1) -> str:
    """Return the strategy for a mesh and a number of servers."""
    if servers:
        return "local_sgd" if local_steps > 1 else "parameter_server"
    degrees = {
        "pipeline": mesh.pipeline, "tensor_parallel": mesh.tensor, "sharded": mesh.shard, "data_parallel": mesh.data,
    }  # fmt: skip
    return next((name for name, degree in degrees.items() if degree > 1), "one_device")


def _parse_value(name: str, value: str, text: str) -> Any:
    if name in _FIELD_CHOICES:
        if value not in _FIELD_CHOICES[name]:
            raise PlanError(f"{name}={value!r} is not known", where=text, remedy=nearest(value, _FIELD_CHOICES[name]))
        return value
    if name in _FIELD_PARSERS:
        return str(_FIELD_PARSERS[name](value))
    if name in _UNAVAILABLE:
        feature, instead = _UNAVAILABLE[name]
        raise PlanError(f"{name}=: {feature} is not available", where=text, remedy=instead)
    if name not in _NUMBER_FIELDS:
        names = (*_NUMBER_FIELDS, *_FIELD_CHOICES, *_FIELD_PARSERS)
        raise PlanError(f"{name!r} is not a part of a plan", where=text, remedy=nearest(name, names))
    least, top = _FIELD_BOUNDS.get(name, (1, None))
    if not value.isdigit() or int(value) < least or (top is not None and int(value) > top):
        expected = {1: "0 or 1", 3: "0, 1, 2 or 3"}.get(top or 0, f"a whole number from {least}")
        raise PlanError(f"{name}={value!r} must be {expected}", where=text, remedy=f"write {name}={top or 2}, for one")
    return bool(int(value)) if name in ("offload", "sequence") else int(value)


# --- Which rank lies on which node ------------------------------------------------------------------------------------


def assign_nodes(mesh: Mesh, rooms: Sequence[int], devices: int = 1) -> tuple[int, ...]:
    """Return the node of each worker.

    Tensor groups cross nodes only if they do not all fit within nodes. If they fit, as many pieces as possible have
    copies on two nodes: a node with q workers holds all copies of max(0, q - (data - 1) * replica) pieces, and no order
    of ranks does better.

    Args:
        mesh: degrees.
        rooms: capacity of each node in workers, in the order in which nodes are filled; `mesh.size // devices` or more
            in all.
        devices: ranks of a worker.

    Raises:
        ValueError: the capacity is too small.
    """
    size, together = mesh.size // devices, tensor_workers(mesh, devices)
    if sum(rooms) < size:
        raise ValueError(f"{size} workers do not fit into {sum(rooms)} places")
    free, node_of_worker = list(rooms), [0] * size
    group_nodes = [node for node, room in enumerate(rooms) for _ in range(room // together)]
    for number, first_worker in enumerate(_tensor_groups(mesh, devices)):
        if number < len(group_nodes):
            nodes = [group_nodes[number]] * together
        else:
            nodes = [node for node, room in enumerate(free) for _ in range(room)][:together]
        for worker, node in enumerate(nodes, first_worker):
            node_of_worker[worker] = node
            free[node] -= 1
    return tuple(node_of_worker)


def assign_slots(mesh: Mesh, nodes: Sequence[Hashable], devices: int = 1) -> tuple[int, ...]:
    """Return the slot of each worker, given the node of each slot: a permutation, the identity on a single node."""
    free: dict[Hashable, list[int]] = {}
    for place, node in enumerate(nodes):
        free.setdefault(node, []).append(place)
    places = [iter(slots) for slots in free.values()]
    return tuple(next(places[node]) for node in assign_nodes(mesh, [len(slots) for slots in free.values()], devices))


def slots_per_node(capacities: Sequence[int], count: int, *, close: bool) -> tuple[int, ...]:
    """Return how many slots each node gets: evenly over the fewest nodes if `close`, else over all."""
    largest = sorted(range(len(capacities)), key=lambda node: -capacities[node])
    if close:
        room_sums = accumulate(capacities[node] for node in largest)
        largest = largest[: 1 + sum(room < count for room in room_sums)]
    rooms = [0] * len(capacities)
    for _ in range(min(count, sum(capacities))):
        rooms[min((rooms[node], node) for node in largest if rooms[node] < capacities[node])[1]] += 1
    return tuple(rooms)


def tensor_workers(mesh: Mesh, devices: int = 1) -> int:
    """Return the number of workers that divide each layer between them; they are placed on one node."""
    return max(1, mesh.tensor // devices)


def ranks_by_node(nodes: Iterable[str]) -> dict[str, str]:
    """Return the ranks on each node in the form of `format_ranges`, from the node of each rank."""
    ranks_of_node: dict[str, list[int]] = {}
    for rank, node in enumerate(nodes):
        ranks_of_node.setdefault(node, []).append(rank)
    return {node: format_ranges(ranks) for node, ranks in ranks_of_node.items()}


def format_ranges(numbers: Iterable[int]) -> str:
    """Return numbers as ranges, such as `0-7, 16`."""
    runs = groupby(enumerate(sorted(set(numbers))), key=lambda pair: pair[1] - pair[0])
    ends = ([number for _, number in run] for _, run in runs)
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in ends)


def parse_ranges(ranges: str) -> tuple[int, ...]:
    """Return the numbers of a text of `format_ranges`."""
    ends = [part.split("-") for part in ranges.split(", ") if part]
    return tuple(number for run in ends for number in range(int(run[0]), int(run[-1]) + 1))


def _tensor_groups(mesh: Mesh, devices: int) -> list[int]:
    """Return the first worker of each tensor group, by replica and then by stage."""
    firsts = (
        ((stage * mesh.data + replica) * mesh.shard + shard) * mesh.tensor
        for replica in range(mesh.data)
        for stage in range(mesh.pipeline)
        for shard in range(mesh.shard)
    )
    return list(dict.fromkeys(worker // devices for worker in firsts))
