"""The request for a plan: a model, a cluster and the choices of the job, with the checks that strategies share."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cache, cached_property, partial
from typing import TYPE_CHECKING, Any

from trainwright.core.cluster import Cluster
from trainwright.core.data import least_resources
from trainwright.core.engine import takes_optimizer
from trainwright.core.errors import PlanError
from trainwright.core.loss_api import step_keywords
from trainwright.core.model_profile import ModelProfile
from trainwright.core.plan import SUMMED_BY, Mesh, Plan, PlanConstraints, WorkerResources, tensor_workers
from trainwright.core.topology import Consistency, GradientCompression, OuterOptimizer
from trainwright.strategies.cost_model.machine_model import DEFAULT, Calibration

if TYPE_CHECKING:
    from trainwright.core.job import Job, Planning

_RESERVED_CPUS = 1.0  # of each node, for Ray Data and the driver
_DEVICE_CPUS = 1.0  # that a worker with an accelerator keeps where Ray Data has work, as Ray Train's workers do
_NO_PINS = PlanConstraints()
_CPU_WORKERS_PER_CPU = 4  # more than this on one CPU is a mistake
_BATCH_NORM = "batch_norm"  # its name in `ModelProfile.inexact`
REPLICATED = ("one_device", "data_parallel")  # strategies that have all of a torch model on each worker


class Refusal(Exception):
    """A strategy has no plan for a request: the reason, and what to do instead."""

    def __init__(self, reason: str, hint: str) -> None:
        super().__init__(reason)
        self.reason, self.hint = reason, hint


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """A model on a cluster, and the parts of the plan that the job fixes."""

    profile: ModelProfile  # of the model
    cluster: Cluster  # the usable nodes
    batch_size: int  # global, in samples
    precision: str  # of the step
    pins: PlanConstraints = _NO_PINS  # constraints on the plan
    own_step: bool = False  # the job's own step function calls the model
    offload: bool = False  # only plans that keep the model's state in host memory
    room_bytes: int = 0  # most device memory that a plan may take; 0 for all of it
    together: bool = False  # batch norms see the whole batch
    kind: str = ""  # Ray's name of the accelerators' model that the job asks for
    data_cpus: float = 0.0  # least CPUs for Ray Data
    calibration: Calibration = DEFAULT  # of predicted steps
    replicated: tuple[str, ...] = ()  # options that need all of the model on each worker
    torch_option: str = ""  # an option that parameter servers and TensorFlow do not have; empty for none
    # workers, min_workers, max_workers, devices, accumulation, inexact, run, compile, tf_config, tpu: as in `Job`
    workers: int | None = None
    min_workers: int | None = None
    max_workers: int | None = None
    devices: int | None = None
    threads: int | None = None  # CPU threads of each worker
    accumulation: int | None = None
    inexact: tuple[str, ...] = ()
    run: str = "step"
    compile: str = "auto"
    tf_config: str = "own"
    tpu: str | None = None
    # the job's options of how TensorFlow sums, by name; those with their defaults are left out
    sums: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, job: Job, profile: ModelProfile, cluster: Cluster) -> PlanRequest:
        """Return the request of a job. Raises PlanError where its `plan=` cannot be read."""
        pins = PlanConstraints.parse(job.planning.plan or "").beside(_async_choices(job.planning))
        pinned_workers = max(1, pins.mesh.size // (job.tensorflow.devices or 1)) if pins.mesh else None
        if pins.mesh and job.scaling.workers and job.scaling.workers * (job.tensorflow.devices or 1) != pins.mesh.size:
            job_workers = f"workers={job.scaling.workers}" + (
                f" of {job.tensorflow.devices} devices" if job.tensorflow.devices else ""
            )
            raise PlanError(
                f"the degrees of plan={pins.text!r} multiply to {pins.mesh.size}, and the job has {job_workers}",
                where="plan",
                remedy=f"change a degree, or set workers={pinned_workers} or leave it out",
            )
        # Batch norms that must see the whole batch at once have one micro-batch a worker.
        sync_batch_norm = job.training.batch_norm == "sync"
        sync_accumulation = 1 if sync_batch_norm and _BATCH_NORM not in job.training.inexact else None
        return cls(
            profile=_apply_tensor_plan(profile, job.planning.tensor_plan),
            cluster=cluster,
            batch_size=job.batch_size,
            precision=job.training.precision,
            pins=pins,
            own_step=job.training.step is not None,
            offload=bool(pins.choices.get("offload")),
            together=sync_batch_norm,
            data_cpus=_data_cpus(job, cluster),
            replicated=_replicated_options(job),
            torch_option=_torch_option(job),
            workers=job.scaling.workers or pinned_workers,
            min_workers=job.scaling.min_workers,
            max_workers=job.scaling.max_workers,
            devices=job.tensorflow.devices,
            threads=job.scaling.threads_per_worker,
            accumulation=job.training.accumulation or pins.choices.get("accumulation") or sync_accumulation,
            inexact=job.training.inexact,
            run=job.tensorflow.run,
            compile=job.training.compile,
            tf_config=job.tensorflow.tf_config,
            tpu=job.tensorflow.tpu,
            sums={name: job.get(name) for name in SUMMED_BY if job.get(name) != job.default(name)},
        )

    @property
    def free(self) -> PlanRequest:
        """The request without the pinned parts of the layout."""
        pinned = ("workers", "min_workers", "max_workers", "devices", "accumulation")
        return replace(self, pins=_NO_PINS, offload=False, **dict.fromkeys(pinned))  # type: ignore[arg-type]

    @property
    def elastic(self) -> bool:
        """Whether the number of workers may change during the run."""
        return self.min_workers is not None or self.max_workers is not None

    @cached_property
    def undeclared(self) -> tuple[str, ...]:
        """Parts of the model that would differ from one device, and that the job does not accept."""
        return tuple(item for item in self.inexact_parts if item not in self.inexact)

    @property
    def inexact_parts(self) -> tuple[str, ...]:
        """Parts of the model that differ from one device on several."""
        return tuple(item for item in self.profile.inexact if not (self.together and item == _BATCH_NORM))

    @cached_property
    def per_node(self) -> int:
        """Ranks on one node, where every device of the cluster has one."""
        if self.cluster.accelerators:
            return min(node.accelerators for node in self.cluster.nodes if node.accelerators)
        return max(1, self.most_ranks // len(self.cluster.nodes))

    @cached_property
    def ranks(self) -> int:
        """Number of ranks of a plan with one device and a share of the batch in each worker."""
        return self.workers_of()

    @cached_property
    def most_ranks(self) -> int:
        """Number of ranks of a plan whose ranks may share samples, with one device in each worker."""
        return self.workers_of(degree=max(1, self.cluster.slots))

    @property
    def own_devices(self) -> int:
        """Devices of a worker that drives all of its node: accelerators, or logical devices of a CPU."""
        return self.devices or min((node.accelerators for node in self.cluster.nodes if node.accelerators), default=1)

    def workers_of(self, devices: int = 1, degree: int = 1) -> int:
        """Return the first number of workers: the pinned one, or one for each slot; an elastic job takes free slots.

        Args:
            devices: of each worker; on a CPU they share a slot.
            degree: ranks that divide a model, and share its samples; each model has one sample at least.
        """
        shared = devices if self.cluster.accelerators else 1
        slots, capacity = max(1, self.cluster.slots // shared), max(1, worker_capacity(self.cluster) // shared)
        most_workers = degree * self.batch_size
        if not self.elastic:
            return self.workers or min(slots, most_workers)
        requested = self.workers or min(slots, self.max_workers or most_workers)
        return max(min(requested, capacity), self.min_workers or 1)

    def replicas_of(self, degree: int) -> int:
        """Return the number of replicas of `degree` ranks each; 0 if they do not add up to a pinned number of ranks."""
        ranks = self.workers_of(degree=degree)
        pinned = self.workers or self.elastic
        return 0 if pinned and ranks % degree else ranks // degree

    @cached_property
    def place(self) -> Callable[..., WorkerResources]:
        """`placement_for` on this cluster, cached for the thousands of plans."""
        return cache(
            partial(placement_for, self.cluster, data_cpus=self.data_cpus, kind=self.kind, threads=self.threads)
        )

    def plan(
        self, strategy: str, engine: str, mesh: Mesh, *, devices: int = 1, servers: int = 0, **choices: object
    ) -> Plan:
        """Return a plan with some devices in each worker; choices that the strategy leaves open are the job's."""
        if choices.get("zero") and self.pins.reduces_in_half:
            choices = {"wire": "bf16", **choices}
        extra_processes = servers + (choices.get("topology") == "coordinator")  # a chief
        return Plan(
            strategy=strategy,
            engine=engine,
            mesh=mesh,
            batch_size=self.batch_size,
            placement=self.place(mesh.size // devices + extra_processes, devices, tensor_workers(mesh, devices)),
            servers=servers,
            accumulation=self.accumulation or 1,
            devices_per_worker=devices,
            precision=self.precision,
            keras_backend=self.profile.keras_backend,
            notes=tuple(
                f"{item}: computed over each device's own share, as the job accepts"
                for item in (self.inexact_parts if mesh.data_ranks > 1 else ())
            ),
            **self.sums,
            **choices,  # type: ignore[arg-type]
        )

    def check_inexact(self, strategy: str, data_ranks: int) -> None:
        """Raise Refusal where this many data ranks differ from one device and the job does not accept that."""
        if self.batch_size < data_ranks:
            reason = f"batch_size={self.batch_size} is smaller than the {data_ranks} data ranks"
            raise Refusal(reason, f"set batch_size={data_ranks} or more")
        if self.undeclared and data_ranks > 1:
            can_sync = self.undeclared == (_BATCH_NORM,) and strategy == REPLICATED[-1]
            sync = 'set batch_norm="sync", ' if can_sync else ""
            raise Refusal(
                f"{', '.join(self.undeclared)} would give another result than one device",
                f"{sync}use a layer that looks at one sample (group or layer norm), or accept it: "
                f"inexact={self.undeclared}",
            )

    def check_replicas(self, strategy: str) -> None:
        """Raise Refusal where the job asks something of replicas that a strategy cannot do."""
        is_replicated = strategy in REPLICATED and self.profile.framework in ("torch", "")
        if is_replicated or not self.replicated:
            return
        option = self.replicated[0]
        if self.profile.framework != "torch":
            hint = "Keras has BatchNormalization(synchronized=True)" if self.together else "leave it out"
            raise Refusal(f"{option} is for torch models", hint)
        raise Refusal(f"{option} needs all of the model on each worker", f"use {REPLICATED[-1]}")

    def check_torch_option(self, *, asynchronous: bool) -> None:
        """Raise Refusal where the strategy or the framework does not have an option of the job."""
        if self.torch_option and self.profile.framework == "tensorflow":
            hint = "Keras' optimizers have LearningRateSchedule and use_ema=, and run=\"fit\" takes Keras' callbacks"
            raise Refusal(f"{self.torch_option} is for torch models", hint)
        if self.torch_option and asynchronous:
            raise Refusal(f"its servers do not have {self.torch_option}", "leave it out, or use data_parallel")

    def check_sums(self, strategy: str) -> None:
        """Raise Refusal where the strategy or the cluster does not have the job's way to sum."""
        for name, value in self.sums.items():
            if self.profile.framework != "tensorflow":
                raise Refusal(f"{name}={value!r} is for models of TensorFlow", "leave it out")
            if strategy != SUMMED_BY[name]:
                raise Refusal(f"it has no {name}=", f"leave {name}={value!r} out, or use {SUMMED_BY[name]}")
            if value == "nccl" and self.cluster.accelerator != "GPU":
                raise Refusal(f'{name}="nccl" sums over GPUs, and the cluster has none', f"leave {name}= out")

    def check_tpu(self) -> None:
        """Raise Refusal on TPUs, where only tf_tpu can run the model."""
        if self.cluster.accelerator != "TPU" or not self.profile.framework:
            return
        if self.profile.framework == "tensorflow":
            raise Refusal("TensorFlow's TPUs have their own strategy", "use tf_tpu")
        raise Refusal(f"there is no engine for {self.profile.framework} on TPU yet", "use GPU or CPU")

    def check_several(self, ranks: int) -> None:
        """Raise Refusal where there is only one rank and the number of workers is fixed."""
        if ranks == 1 and not self.elastic:
            reason = "workers=1 is pinned" if self.workers else "there is room for one worker only"
            raise Refusal(reason, "give the job two workers or more")


def _data_cpus(job: Job, cluster: Cluster) -> float:
    """Return the least CPUs for Ray Data; infinity, for all free CPUs, where Ray Data feeds accelerators."""
    datasets = [data for data in (job.train, job.evaluate) if data is not None]
    delivered = job.data.delivery == "ray_data" or any(data.streamed for data in datasets)
    if cluster.accelerators and (delivered or (job.data.delivery == "auto" and any(data.heavy for data in datasets))):
        return math.inf
    return least_resources([data.source.needs for data in datasets], "CPU")


def _async_choices(options: Planning) -> dict[str, Any]:
    """Return the plan's choices that a job's options for asynchronous training pin; nothing for options left out."""
    choices: dict[str, Any] = {}
    if options.consistency:
        choices["consistency"] = str(Consistency.parse(options.consistency))
    wire = GradientCompression.parse(options.wire)
    if wire != GradientCompression():
        choices["wire"] = str(wire)
    if options.local_steps > 1:
        outer = OuterOptimizer.parse(options.outer or "average")
        choices |= {"local_steps": options.local_steps, "outer": str(outer)}
    return choices


def _replicated_options(job: Job) -> tuple[str, ...]:
    """Return the options that need all of the model on each worker."""
    options = {
        "optimizer= as a dict": isinstance(job.optimizer, Mapping),
        "local_state=": bool(job.training.local_state),
        'batch_norm="sync"': job.training.batch_norm == "sync",
    }
    return tuple(name for name, given in options.items() if given)


def _torch_option(job: Job) -> str:
    """Return an option that parameter servers and TensorFlow do not have; empty for none."""
    if isinstance(job.training.schedule, tuple) or takes_optimizer(job.training.schedule):
        return "schedule= with a scheduler or several functions"
    if job.training.weight_average is not None:
        return "weight_average="
    if job.training.initial_weights is not None:
        return "initial_weights="
    if names := step_keywords(job.training.step or job.loss):
        return f"the argument {names[0]}= of {'step=' if job.training.step else 'loss='}"
    if job.tensorflow.callbacks is not None and job.tensorflow.run == "step":
        return "callbacks="
    return "" if job.checkpointing.save_frozen else "save_frozen=False"


def _apply_tensor_plan(profile: ModelProfile, plan: Mapping[str, str]) -> ModelProfile:
    """Return the profile with layers divided by tensor parallelism as the job says, by name or pattern."""
    if not plan:
        return profile
    roles = [
        next((role for name, role in plan.items() if fnmatchcase(layer.name, name)), "") for layer in profile.layers
    ]
    layers = (
        replace(layer, splits=bool(role), leads=role == "column", reductions=int(role in ("row", "vocabulary")))
        for layer, role in zip(profile.layers, roles, strict=True)
    )
    return replace(profile, layers=tuple(layers), indivisible="", divides_tokens=False)


def worker_capacity(cluster: Cluster) -> int:
    """Return the workers that the cluster can hold: one for each accelerator, or a few for each CPU without any."""
    return cluster.accelerators or int(cluster.cpus * _CPU_WORKERS_PER_CPU)


def placement_for(
    cluster: Cluster, workers: int, devices: int = 1, together: int = 1, *, data_cpus: float = 0.0, kind: str = "",
    threads: int | None = None,
) -> WorkerResources:  # fmt: skip
    """Return the resources of each of `workers` actors with some devices; some CPU of each node is left for Ray Data.

    Servers count as workers here, and reserve a worker's share or less.

    Args:
        together: workers that are placed on one node, and share its CPUs.
        data_cpus: least CPUs for Ray Data; they do not reduce the workers' threads.
        kind: Ray's name of the accelerators' model; empty for any.
        threads: of each worker; by default its share of the node's CPUs.
    """
    nodes = len(cluster.nodes)
    cpus = min(node.cpus for node in cluster.nodes)
    per_node = max(together, -(-workers // nodes))
    least_cpus = _DEVICE_CPUS if cluster.accelerators else 0.01
    reserved = max(_RESERVED_CPUS if cpus >= 2 else cpus / 2, min(data_cpus / nodes, cpus - least_cpus * per_node))
    share = int(100 * (cpus - reserved) / per_node) / 100
    return WorkerResources(
        cpus=max(0.01, share),
        server_cpus=min(WorkerResources.server_cpus, max(0.01, share)),
        accelerators=devices if cluster.accelerators else 0,
        accelerator=cluster.accelerator,
        kind=kind,
        threads=threads or max(1, int(cpus // per_node)),
        data_cpus=reserved * nodes,
    )
