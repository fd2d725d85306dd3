"""The work of one step of a plan, independent of the machine's efficiencies.

It is a few numbers for each distinct layer, and the count of each layer on each pipeline stage. They are computed once
for a plan, and timed many times by a calibration.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from trainwright.core.cluster import Accelerator, Cluster
from trainwright.core.errors import PlanError
from trainwright.core.model_profile import ModelProfile
from trainwright.core.plan import Mesh, Plan, section_of, stage_of_section
from trainwright.core.topology import Consistency, GradientCompression
from trainwright.strategies.cost_model.machine_model import (
    MachineModel,
    RankGroup,
    Vector,
    next_stage_is_remote,
    rank_group,
)
from trainwright.strategies.cost_model.plan_constraints import invalid_staging
from trainwright.strategies.cost_model.stage_partition import balanced_partition

Indices = npt.NDArray[np.intp]
_SCORES_SHARE = 0.08  # of a block's forward: attention's scores, which selective recomputation computes again
UPDATE_BYTES = {2: 34.0, 4: 28.0}  # that Adam reads and writes for each parameter, by bytes of a number
_ACCUMULATE_PASSES = 3.0  # passes over a gradient that is added to another: both are read, one is written
_LIST_ITEM = re.compile(r"(?:.*?\.)?\d+(?=\.|$)")  # the name of an item of a module list
HOST_BYTES_PER_S = 2e10  # of the host's memory, a device's share: assumed
NUMBER_BYTES = {"fp16": 2, "bf16": 2}  # 4 in all other precisions


@dataclass(frozen=True, kw_only=True)
class LayerWork:
    """The work of each distinct layer, of one micro-batch on one rank, forward."""

    counts: Vector  # (sections, layers): number of each layer in each section
    flops_s: Vector  # seconds at the peak rate
    matmuls: Vector  # matrix products
    weights_s: Vector  # seconds of one pass over the parameters at the full memory bandwidth
    passes: Vector  # further such passes that backward makes, over the gradients
    traffic_s: Vector  # of all other operations, at the full memory bandwidth
    scores_s: Vector  # the same for attention scores
    launches: Vector  # operations
    reduced_bytes: Vector  # of the all-reduces of tensor parallelism
    reductions: Vector  # number of these all-reduces
    again: Vector  # share of forward that backward recomputes
    regathered: float  # share of forward's reductions that backward repeats to gather inputs


@dataclass(frozen=True, kw_only=True)
class StateWork:
    """The work on parameters, gradients and optimizer state."""

    parameters: Vector  # of each stage, on one rank
    gradient_bytes: Vector  # of each stage, on one rank, as they are reduced
    gathered_bytes: Vector  # of each stage's parameters where ZeRO gathers them, on one rank
    update_s: float  # of the optimizer at the full memory bandwidth, slowest stage
    offloaded_bytes: float  # of one micro-batch between device and host


@dataclass(frozen=True, kw_only=True)
class StepWork:
    """The work of one step."""

    machine: MachineModel  # devices that do it
    plan: Plan  # whose step it is
    layers: LayerWork  # by distinct layer
    state: StateWork  # on parameters, gradients and optimizer state
    speeds: tuple[float, ...]  # of the ranks' devices, ascending, relative to the slowest
    consistency: Consistency  # between the ranks
    pushed: float  # share of the gradient bytes that asynchronous ranks send
    sent_bytes: Vector  # of one micro-batch over each cut between sections; 0 where both are on one stage
    micro_batches: int  # of a data rank
    gathers: float  # collectives of ZeRO for each micro-batch
    # tensor, data, shard: the groups that reduce with each other
    tensor: RankGroup
    data: RankGroup
    shard: RankGroup
    remote: bool  # whether the next stage is on another node
    guests: tuple[LayerWork, ...]  # models that run in the loss
    shape: tuple[float, ...]  # see `_shape`
    kind: str  # only work of the same kind is compared

    def by_stage(self, values: Vector) -> Vector:
        """Return the sums over the sections of each stage."""
        return sum_by_stage(values, self.plan.schedule, self.plan.mesh.pipeline)


@dataclass(frozen=True, eq=False)
class _LayerVectors:
    """A profile's layers as vectors with one entry for each distinct layer; `order` has the entry of each layer."""

    order: Indices
    last: int
    flops: Vector
    fused_flops: Vector
    matmuls: Vector
    launches: Vector
    parameters: Vector
    tied_parameters: Vector
    output_numbers: Vector
    cut_numbers: Vector
    kept_numbers: Vector
    traffic_numbers: Vector
    scores_numbers: Vector
    loss_numbers: Vector
    block_place: Vector
    shared_kept: Vector
    shared_traffic: Vector
    reductions: Vector
    splits: Vector

    def over(self, tensor: int) -> Vector:
        """Return by how much tensor parallelism divides each layer."""
        return np.where(self.splits > 0, float(tensor), 1.0)

    def held(self, stages: int) -> Vector:
        """Return the parameters of each layer, those tied to a layer of another stage included."""
        return self.parameters + (self.tied_parameters if stages > 1 else 0.0)

    def kept(self, tensor: int, recompute: str, *, sequence: bool = False) -> Vector:
        """Return the numbers of one sample that backward needs, all divided with sequence parallelism.

        With full recomputation, of a block its input alone: the output of the layer before it.
        """
        if recompute == "full":
            before = np.zeros(len(self.flops))
            before[self.order] = self.output_numbers[np.concatenate((self.order[:1], self.order[:-1]))]
            inputs = before * (self.block_place == 1) / (tensor if sequence else 1)
            return np.where(self.block_place > 0, inputs, self.kept(tensor, "none", sequence=sequence))
        if sequence:
            return (self.kept_numbers + self.scores_numbers * (recompute == "none")) / tensor
        scores = self.scores_numbers / self.over(tensor) if recompute == "none" else 0.0
        kept: Vector = self.kept_numbers * (self.shared_kept + (1 - self.shared_kept) / self.over(tensor)) + scores
        return kept

    def recomputed(self, tensor: int, *, sequence: bool = False) -> Vector:
        """Return the numbers of one sample that the backward of a layer has recomputed: its block's up to it."""
        kept, found, block = self.kept(tensor, "none", sequence=sequence), np.zeros(len(self.flops)), 0.0
        for layer in self.order:
            block = kept[layer] + (block if self.block_place[layer] > 1 else 0.0)
            found[layer] = max(found[layer], block) * (self.block_place[layer] > 0)
        return found

    def again(self, recompute: str) -> Vector:
        """Return the share of each layer's forward that backward recomputes; the last layer is still in memory."""
        found = np.full(len(self.flops), {"none": 0.0, "selective": 0.0, "full": 1.0}[recompute])
        if recompute == "selective":
            found += _SCORES_SHARE * (self.scores_numbers > 0)
        found[self.last] = 0.0
        return found

    def sent(self, sizes: Sequence[int]) -> Vector:
        """Return the numbers of one sample that each section but the last sends on."""
        found: Vector = self.over_cuts()[self.order[np.cumsum(sizes)[:-1] - 1]]
        return found

    def over_cuts(self) -> Vector:
        """Return the numbers of one sample that a cut behind each layer sends on."""
        return np.where(self.cut_numbers > 0, self.cut_numbers, self.output_numbers)


@lru_cache(maxsize=64)
def layer_vectors(profile: ModelProfile) -> _LayerVectors:
    """Return the layers of a profile as vectors."""
    distinct = list(dict.fromkeys(profile.layers))
    index = {layer: number for number, layer in enumerate(distinct)}
    names = [item.name for item in fields(_LayerVectors) if item.name not in ("order", "last")]
    columns = {name: np.array([getattr(layer, name) for layer in distinct], float) for name in names}
    order = np.array([index[layer] for layer in profile.layers])
    return _LayerVectors(order=order, last=int(order[-1]), **columns)


@lru_cache(maxsize=512)
def section_counts(profile: ModelProfile, sizes: tuple[int, ...]) -> Vector:
    """Return the number of each layer in each section (sections, layers), given the sections' sizes."""
    layers, section = layer_vectors(profile), np.repeat(np.arange(len(sizes)), sizes)
    counts = np.zeros((len(sizes), len(layers.flops)))
    np.add.at(counts, (section, layers.order), 1.0)
    return counts


def sum_by_stage(values: Vector, schedule: str, stages: int) -> Vector:
    """Return the sums over the sections of each stage, (stages, ...), of values (sections, ...)."""
    if len(values) == stages:
        return values
    found: Vector = values[_sections_of_stages(schedule, stages, len(values) // stages)].sum(axis=0)
    return found


@lru_cache(maxsize=1024)
def _crosses_stages(schedule: str, stages: int, sections: int) -> Vector:
    """Return for each cut between sections 1 where it is between two stages, else 0."""
    found: Vector = (
        np.diff([stage_of_section(schedule, section=each, stages=stages)[0] for each in range(sections)]) != 0
    )
    return found


@lru_cache(maxsize=1024)
def _sections_of_stages(schedule: str, stages: int, chunks: int) -> Indices:
    """Return the sections of each stage (chunks, stages)."""
    turns = range(chunks)
    return np.array(
        [[section_of(schedule, stage=stage, stages=stages, chunk=turn) for stage in range(stages)] for turn in turns]
    )


def planned_step_work(profile: ModelProfile, cluster: Cluster, plan: Plan) -> StepWork:
    """Return the work of one step on a cluster.

    Raises:
        PlanError: the plan is impossible on this cluster, or with this model and batch.
        ResourceError: an accelerator is not in the table.
    """
    machine = MachineModel.of(cluster, plan.mesh.size, plan.placement.threads)
    reason = invalid_plan(profile, machine, plan)
    if reason is not None:
        raise PlanError(reason[0], where=str(plan.mesh), remedy=reason[1])
    return compute_step_work(profile, machine, plan)


def compute_step_work(profile: ModelProfile, machine: MachineModel, plan: Plan) -> StepWork:
    """Return the work of one step of a plan that is possible (`invalid_plan`) on its ranks' machine."""
    mesh, precision = plan.mesh, plan.precision
    micro_batches, rows = plan.micro_batches(plan.batch_size)
    layers, sizes = layer_vectors(profile), plan.stages or even_partition(profile, plan.sections)
    counts = section_counts(profile, sizes)
    width, over = NUMBER_BYTES.get(precision, 4), layers.over(mesh.tensor)
    own, memory = NUMBER_BYTES.get(parameter_precision(profile, precision), 4), machine.device.memory_bytes_per_s
    each, gathered = layers.held(mesh.pipeline) / over, gathered_number_bytes(profile, plan)
    parameters = sum_by_stage(counts @ each, plan.schedule, mesh.pipeline)
    sharded = mesh.data_ranks if mesh.shard == 1 else mesh.shard
    updated = UPDATE_BYTES[own] + 2 * own * plan.streamed  # of two versions one is copied
    update_bytes = updated * parameters.max() / (sharded if plan.zero else 1)
    offload, visits = plan.offload and machine.device.apart, 3 if plan.zero == 3 else 2
    collectives = 2.0 / micro_batches if plan.zero == 1 else float(plan.zero)  # of ZeRO-1 two in each step
    crossing = _crosses_stages(plan.schedule, mesh.pipeline, plan.sections)
    return StepWork(
        machine=machine,
        plan=plan,
        layers=LayerWork(
            counts=counts,
            **_layer_work(profile, machine.device, precision, mesh.tensor, rows),
            passes=_passes(profile, micro_batches),
            again=layers.again(plan.recompute),
            regathered=plan.sequence / 2,
        ),
        state=StateWork(
            parameters=parameters,
            gradient_bytes=parameters * reduced_number_bytes(plan, own),
            gathered_bytes=sum_by_stage(counts @ (each * gathered), plan.schedule, mesh.pipeline),
            update_s=update_bytes / (HOST_BYTES_PER_S if offload else memory),
            offloaded_bytes=visits * own * parameters.max() / sharded if offload else 0.0,
        ),
        speeds=machine.speeds(mesh.size, precision),
        consistency=Consistency.parse(plan.consistency or "sync"),
        pushed=GradientCompression.parse(plan.wire).part,
        sent_bytes=rows * width * layers.sent(sizes) * crossing / mesh.tensor,
        micro_batches=micro_batches,
        gathers=collectives * fsdp_units(profile) / mesh.pipeline if sharded > 1 else 0.0,
        tensor=rank_group(machine, mesh.tensor, 1),
        data=rank_group(machine, mesh.data, mesh.size // mesh.data),
        shard=rank_group(machine, mesh.shard, mesh.tensor),
        remote=next_stage_is_remote(machine, mesh),
        guests=tuple(_loss_model_work(guest, machine.device, precision, rows) for guest in profile.guests),
        shape=_shape(profile, mesh, rows, micro_batches),
        kind=f"{machine.device.name} {precision} {plan.recompute} zero{plan.zero}{' offload' * offload}",
    )


@lru_cache(maxsize=1024)
def _layer_work(
    profile: ModelProfile, device: Accelerator, precision: str, tensor: int, rows: int
) -> Mapping[str, Vector]:
    """Return the fields of `LayerWork` that do not depend on where the layers are."""
    layers, width = layer_vectors(profile), NUMBER_BYTES.get(precision, 4)
    over, shared, memory = layers.over(tensor), layers.shared_traffic, device.memory_bytes_per_s
    traffic = layers.traffic_numbers * (shared + (1 - shared) / over)
    flops = layers.flops + layers.fused_flops * (1 / device.attention - 1)
    own = NUMBER_BYTES.get(parameter_precision(profile, precision), 4)
    return {
        "flops_s": rows * flops / over / (device.rate(precision) * device.sustained),
        "matmuls": layers.matmuls * device.host,
        "weights_s": own * (layers.parameters + layers.tied_parameters) / over / memory,
        "traffic_s": rows * traffic * width / memory,
        "scores_s": rows * layers.scores_numbers / over * width / memory,
        "launches": layers.launches * device.host,
        "reduced_bytes": rows * width * layers.reductions * layers.output_numbers,
        "reductions": layers.reductions,
    }


def _loss_model_work(profile: ModelProfile, device: Accelerator, precision: str, rows: int) -> LayerWork:
    """Return the work of a model that runs forward in the loss, complete on each rank."""
    counts = section_counts(profile, (len(profile.layers),))
    none = np.zeros(counts.shape[1])
    work = _layer_work(profile, device, precision, 1, rows)
    return LayerWork(counts=counts, **work, passes=none, again=none, regathered=0.0)


@lru_cache(maxsize=256)
def fsdp_units(profile: ModelProfile) -> int:
    """Return how many groups of layers ZeRO gathers: each item of a module list, and the rest as one."""
    if not profile.framework:
        return len(profile.layers)
    listed = {found[0] for found in map(_LIST_ITEM.match, (layer.name for layer in profile.layers)) if found}
    return len(listed) + 1


def _passes(profile: ModelProfile, micro_batches: int) -> Vector:
    """Return the passes over each layer's gradients beside those of its products.

    A table that is looked up has a gradient of all its rows. Our engines add each micro-batch's gradient to the sum;
    published systems, whose profiles have no framework, do so within the product.
    """
    looked_up = layer_vectors(profile).flops == 0
    added = _ACCUMULATE_PASSES if micro_batches > 1 and profile.framework else 0.0
    found: Vector = looked_up + np.full(len(looked_up), added)
    return found


def parameter_precision(profile: ModelProfile, precision: str) -> str:
    """Return the precision of parameters and gradients for a step's precision.

    Engines keep parameters in full precision and compute under autocast. Published systems, whose profiles have no
    framework, keep parameters in the step's precision.
    """
    return "fp32" if profile.framework else precision


def gathered_number_bytes(profile: ModelProfile, plan: Plan) -> Vector:
    """Return the bytes of a parameter of each distinct layer where ZeRO gathers it.

    Those of products are gathered in the step's precision, those of norms and tables as they are kept.
    """
    own, width = (NUMBER_BYTES.get(each, 4) for each in (parameter_precision(profile, plan.precision), plan.precision))
    products = (layer_vectors(profile).flops > 0) & (plan.zero > 0)
    return np.where(products, float(min(own, width)), float(own))


def reduced_number_bytes(plan: Plan, own: int) -> int:
    """Return the bytes of a number of a gradient of `own` bytes where ranks that step together reduce it."""
    return min(own, 2) if plan.zero and plan.wire == "bf16" else own


def invalid_plan(profile: ModelProfile, machine: MachineModel, plan: Plan) -> tuple[str, str] | None:
    """Return why a plan is impossible, and a remedy; None where it is possible."""
    mesh = plan.mesh
    if mesh.size > machine.devices:
        return f"the plan takes {mesh.size} devices, the cluster has {machine.devices}", "lower a degree"
    if mesh.data_ranks > plan.batch_size:
        hint = f"use batch_size={mesh.data_ranks} or fewer data ranks"
        return f"batch_size={plan.batch_size} is smaller than the {mesh.data_ranks} data ranks", hint
    if profile.heads and profile.heads % mesh.tensor:
        return f"tp={mesh.tensor} does not divide {profile.heads} heads", "use a divisor of the heads"
    if plan.sequence and mesh.tensor == 1:
        return "sequence=1 divides tokens over tensor-parallel ranks, and tp=1", "use tp=2 or more, or leave it out"
    if mesh.tensor > 1 and not any(layer.splits for layer in profile.layers):
        return "no layer of this model is known to be divisible by tensor parallelism", "use tp=1"
    return invalid_staging(profile, plan)


@lru_cache(maxsize=256)
def even_partition(profile: ModelProfile, stages: int) -> tuple[int, ...]:
    """Return the layers of each stage with equally many of the repeated blocks, and the rest at both ends.

    A model without blocks is divided by operations.
    """
    layers = profile.layers
    block = max(dict.fromkeys(layers), key=layers.count)
    count = layers.count(block)
    first, last = layers.index(block), len(layers) - 1 - layers[::-1].index(block)
    if count < max(stages, len(layers) / 2) or last - first + 1 != count:
        return balanced_partition([layer.flops + layer.traffic_numbers for layer in layers], stages)
    each, rest = divmod(count, stages)
    sizes = [each + (number < rest) for number in range(stages)]
    sizes[0] += first
    sizes[-1] += len(layers) - 1 - last
    return tuple(sizes)


def _shape(profile: ModelProfile, mesh: Mesh, rows: int, micro_batches: int) -> tuple[float, ...]:
    """Return log2 of the tensor degree, tokens of a micro-batch, width, stages, micro-batches and data ranks."""
    heavy = max(profile.layers, key=lambda layer: layer.flops)
    width = math.sqrt(max(heavy.parameters, 1))
    facts = (mesh.tensor, rows * profile.tokens, width, mesh.pipeline, micro_batches, mesh.data_ranks)
    return tuple(math.log2(max(fact, 1)) for fact in facts)
