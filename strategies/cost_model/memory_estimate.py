"""Bytes that each pipeline stage holds on one device; the fullest stage decides.

Model states as in Rajbhandari et al. (2020), table 1: with Adam 16 bytes a parameter, in half precision 2 for it, 2 for
its gradient and 12 for the optimizer's full-precision copies; in full precision 4, 4 and 8. The engines' half precision
is autocast: states as in full precision, plus a copy of a product's weights in half precision, which backward needs.
ZeRO gathers these weights in half precision, and there is no copy. Activations as in Korthikanti et al. (2022).
Autocast computes losses in full precision.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from trainwright.core.model_profile import ModelProfile
from trainwright.core.plan import Plan, loss_stage
from trainwright.core.topology import Consistency, GradientCompression
from trainwright.strategies.cost_model.machine_model import MachineModel, Vector
from trainwright.strategies.cost_model.step_work import (
    NUMBER_BYTES,
    Indices,
    even_partition,
    gathered_number_bytes,
    layer_vectors,
    parameter_precision,
    reduced_number_bytes,
    section_counts,
    sum_by_stage,
)

_STATES = {2: (2.0, 2.0, 12.0), 4: (4.0, 4.0, 8.0)}  # parameter, gradient, optimizer, by bytes of a number
_UPDATE_NUMBERS = 2  # that an optimizer works with, for each parameter of the layer that it is at
_FOREACH_NUMBERS = 1  # that torch's optimizers work with on a GPU, for each parameter of all layers at once
# that the loss's backward makes, of 4 bytes: of what the loss keeps, and of what it read
_LOSS_GRADIENTS = 2


def model_state_bytes(parameters: float, *, zero: int, degree: int, precision: str) -> float:
    """Return the bytes of parameters, gradients and optimizer state on one device.

    Args:
        parameters: number of the device's share of the model, before ZeRO divides it.
        zero: stage of ZeRO, 0 to 3.
        degree: ranks that ZeRO divides over.
        precision: of the step.
    """
    own = _STATES[NUMBER_BYTES.get(precision, 4)]
    whole = [part / degree if zero >= stage else part for part, stage in zip(own, (3, 2, 1), strict=True)]
    return parameters * sum(whole)


def stage_memory(profile: ModelProfile, plan: Plan, *, apart: bool = True) -> tuple[int, ...]:
    """Return the bytes of each stage: model states, activations of micro-batches in flight, and working memory.

    The stage with the loss also holds the models that run in it.

    Args:
        apart: whether devices have their own memory; on a CPU, offloading moves nothing.
    """
    plan = plan if apart else replace(plan, offload=False)
    layers = layer_memory(profile, plan)
    if plan.mesh.pipeline == 1:
        whole = layers.of_whole(
            layer_vectors(profile).order,
            gradients_stay=_gradients_stay(plan),
            foreach=apart and profile.framework == "torch",
        )
        beside = _loss_model_bytes(profile, plan) + (0 if apart else _push_buffer_bytes(profile, plan))
        return (int(whole) + beside,)
    counts = section_counts(profile, plan.stages or even_partition(profile, plan.sections))
    held = layers.of_stages(counts, plan.schedule, plan.mesh.pipeline)
    last = loss_stage(plan.schedule, stages=plan.mesh.pipeline, chunks=plan.chunks)
    held[last] += _loss_model_bytes(profile, plan)
    return tuple(int(each) for each in held)


@dataclass(frozen=True, eq=False)
class LayerMemory:
    """Bytes of each distinct layer on one device. The optimizer runs after the activations are freed."""

    states: Vector  # parameters, gradients and optimizer state
    gradients: Vector  # the part of `states` that is gradients
    update: Vector  # working memory of the optimizer, for each number that it works with
    kept: Vector  # activations of one micro-batch
    working: Vector  # working memory of the layer; a stage needs that of its largest layer
    # micro-batches that each section keeps at once; where each stage has one section, never more than the stage
    # before it
    flight: Vector

    def of_stages(self, counts: Vector, schedule: str, stages: int) -> Vector:
        """Return the bytes of each stage, given the count of each layer in each section (sections, layers)."""
        held = sum_by_stage(counts @ self.states + self.flight * (counts @ self.kept), schedule, stages)
        standing = sum_by_stage(counts, schedule, stages)
        found: Vector = held + np.where(standing > 0, self.working, 0.0).max(axis=1)
        return found

    def of_whole(self, order: Indices, *, gradients_stay: bool, foreach: bool) -> float:
        """Return the bytes of a model in one stage with its layers in this order.

        Gradients stay from step to step, or appear one by one in backward while activations are freed. The optimizer
        updates all layers at once (`foreach`), or one after the other.
        """
        gradients, kept = self.gradients[order], np.cumsum(self.kept[order])
        here = gradients.sum() if gradients_stay else np.cumsum(gradients[::-1])[::-1]
        backward = (kept + here + self.working[order]).max()
        update = _FOREACH_NUMBERS * self.update[order].sum() if foreach else _UPDATE_NUMBERS * self.update.max()
        return float((self.states - self.gradients)[order].sum() + max(backward, gradients.sum() + update))


def _gradients_stay(plan: Plan) -> bool:
    """Return whether gradients are accumulated over micro-batches, or written into the buckets of a reduction."""
    micro_batches, _ = plan.micro_batches(plan.batch_size)
    return micro_batches > 1 or (plan.mesh.data > 1 and not plan.zero)


def layer_memory(profile: ModelProfile, plan: Plan) -> LayerMemory:
    """Return the memory of each distinct layer under a plan."""
    mesh, width, own = plan.mesh, NUMBER_BYTES.get(plan.precision, 4), parameter_precision(profile, plan.precision)
    micro_batches, rows = plan.micro_batches(plan.batch_size)
    held, kept, working = _numbers(profile, mesh.tensor, mesh.pipeline > 1, plan.recompute, plan.sequence)
    parameter, gradient, optimizer = _STATES[NUMBER_BYTES.get(own, 4)]
    served = optimizer if plan.servers and plan.local_steps == 1 else 0.0  # the optimizer's state is the servers'
    degree = mesh.shard if mesh.shard > 1 else mesh.data
    summed = plan.zero == 1 and (micro_batches > 1 or mesh.pipeline > 1)  # whole, until the step's only reduction
    zero = 2 if plan.zero == 1 and not summed else plan.zero
    each = np.full(len(held), model_state_bytes(1.0, zero=zero, degree=degree, precision=own) - served)
    part = 1 / degree if zero else 1.0
    layers = layer_vectors(profile)
    gathered = gathered_number_bytes(profile, plan)
    if plan.zero in (1, 2):  # FSDP2 holds its part beside the whole that it has gathered
        each += parameter / degree - parameter + gathered
    each += profile.weight_copies * parameter * part
    if plan.streamed or plan.local_steps > 1:  # two versions, or what local steps began with
        each += parameter
    gradients = gradient * (1.0 if summed else part) * held
    # Of a layer that is worked on: gradient and parameters, and what each is sent from.
    sent = gradient + reduced_number_bytes(plan, int(gradient))
    visiting = held * (sent + 2 * gathered * (plan.zero == 3)) * (degree > 1 and plan.zero > 0)
    visiting += gradients * _gradients_stay(plan)
    update = 0.0 * held if served else 4.0 * part * held
    if plan.offload:  # the layer's parameters and their gradients; and the next one's, or all for ZeRO-2
        each = gathered * (plan.zero != 3)
        visiting = held * (gradient + (2 * gathered if plan.zero == 3 else 0.0))
        gradients, update = np.zeros_like(held), np.zeros_like(held)  # in the host's memory
    copied = layers.held(2) / layers.over(mesh.tensor) * (layers.flops > 0)  # by autocast, for each forward: products'
    cast = copied * width * (NUMBER_BYTES.get(own, 4) > width)
    loss = rows * 4.0 * layers.loss_numbers / layers.over(mesh.tensor)
    # Published systems copy half-precision outputs to full precision before the loss; autocast does so within it.
    half = loss / 4 * width * (width < 4 and not profile.framework)
    if not profile.trains:
        none, shared = np.zeros_like(held), degree if plan.zero == 3 else 1
        gathered_whole = parameter * held * (shared > 1)
        return LayerMemory(
            states=parameter * held / shared, gradients=none, update=none, kept=none,
            working=rows * width * (kept + working) + loss + gathered_whole + cast, flight=micro_batches_in_flight(plan,
            micro_batches),
        )  # fmt: skip
    cast = cast * (plan.zero == 0)
    again = (layers.block_place > 0) & (plan.recompute == "full")
    return LayerMemory(
        states=each * held,
        gradients=gradients,
        update=update,
        kept=rows * width * kept + loss + np.where(again, 0.0, cast),
        working=rows * width * working + _LOSS_GRADIENTS * loss + half + visiting + np.where(again, cast, 0.0),
        flight=micro_batches_in_flight(plan, micro_batches),
    )


@lru_cache(maxsize=512)
def _numbers(
    profile: ModelProfile, tensor: int, staged: bool, recompute: str, sequence: bool
) -> tuple[Vector, Vector, Vector]:
    """Return each distinct layer's parameters, numbers kept of one sample for backward, and other working numbers."""
    layers = layer_vectors(profile)
    kept = layers.kept(tensor, recompute, sequence=sequence)
    if recompute == "full":
        working = layers.recomputed(tensor, sequence=sequence)
    else:
        working = layers.kept(tensor, "none", sequence=sequence) - kept  # selective: the scores of the layer it is at
    return layers.held(1 + staged) / layers.over(tensor), kept, working


def _loss_model_bytes(profile: ModelProfile, plan: Plan) -> int:
    """Return the bytes of the models in the loss on the device that computes it: parameters and working memory."""
    _, rows = plan.micro_batches(plan.batch_size)
    return int(sum(guest.parameter_bytes + 4 * rows * guest.working_numbers for guest in profile.guests))


def host_bytes(profile: ModelProfile, plan: Plan, machine: MachineModel) -> int:
    """Return a device's bytes in its host's memory: what it offloads, its push buffer, and its share of the servers.

    A server holds parameters, the copy that workers read, and Adam's state.
    """
    found = _push_buffer_bytes(profile, plan)
    if plan.offload:
        degree = plan.mesh.shard if plan.mesh.shard > 1 else plan.mesh.data
        own = parameter_precision(profile, plan.precision)
        found += int(model_state_bytes(profile.parameters, zero=3, degree=degree, precision=own))
    if plan.servers:
        own = parameter_precision(profile, "fp32")
        served = model_state_bytes(profile.parameters, zero=0, degree=1, precision=own) / plan.servers
        found += int(served * -(-plan.servers // machine.nodes)) // machine.per_node
    return found


def _push_buffer_bytes(profile: ModelProfile, plan: Plan) -> int:
    """Return the bytes of a worker's push buffer in host memory; two buffers where an update is of several pushes."""
    if plan.topology != "independent":
        return 0
    rule = Consistency.parse(plan.consistency)
    halves = 2 if rule.waits or rule.pushes > 1 else 1
    return int(halves * 4 * GradientCompression.parse(plan.wire).part * profile.parameters)


def micro_batches_in_flight(plan: Plan, micro_batches: int) -> Vector:
    """Return the micro-batches whose activations each section holds at once, in the order of `stage_operations`.

    ZB-H1 keeps them until the weights' gradients are computed, which later stages delay for longer. In an interleaved
    pipeline the count is of all chunks of a stage, divided evenly here. A stage of ZB-V holds up to twice the number of
    stages, most of them of the model's first chunk.
    """
    stages, chunks = plan.mesh.pipeline, plan.chunks
    if stages == 1:
        return np.ones(1)
    after = stages - 1.0 - np.arange(stages)
    if plan.schedule == "interleaved":
        held: Vector = np.minimum(micro_batches * chunks, 2 * after + (chunks - 1) * stages + 1) / chunks
        return np.tile(held, chunks)
    if plan.schedule == "zbv":
        section = np.arange(2 * stages)
        both: Vector = np.minimum(float(micro_batches), 2.0 * stages - 1 - section + (section >= stages))
        return both
    most = {"": 1.0, "gpipe": float(micro_batches), "zero_bubble": float(stages)}.get(plan.schedule, after + 1)
    return np.minimum(float(micro_batches), most) * np.ones(stages)
