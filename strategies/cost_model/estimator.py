"""Predict a plan's step: seconds by term with an interval, and memory by stage. Calibrate by measured steps.

Compute is a roofline with launch overhead: the device's time or the host's time to launch, whichever is longer.
Ring all-reduce as in Patarasuk and Yuan (2009), inside a node and between nodes one after the other; pipelines as in
Huang et al. (2019) and Narayanan et al. (2021), for stages that differ.

A step has as many units of work as there are workers, whoever computes them. Slow workers are waited for as far as the
consistency says: the rate of `async` is the sum of the workers' rates, and that of `sync` follows the slowest.

How many more steps the same loss takes is a model, not verified. Updates from parameters that are tau steps old
converge as fast as fresh ones where noise dominates, and 1 + tau times slower where curvature does (Stich and
Karimireddy, JMLR 2020: T = O(noise / eps^2 + tau / eps)); `_CURVATURE_SHARE` is the assumed share of a run of the
second kind. n workers that push independently are (n - 1) / n steps behind on average, as n - 1 others push in between
(Mitliagkas et al., 2016). The drift of workers in H local steps is assumed to cost a share of a run for each doubling
of H.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np

from trainwright.core.cluster import Cluster
from trainwright.core.errors import PlanError
from trainwright.core.model_profile import ModelProfile
from trainwright.core.plan import STREAMED_SCHEDULES, Estimate, Plan
from trainwright.strategies.cost_model.machine_model import (
    DEFAULT,
    EFFICIENCIES,
    EFFICIENCY_NAMES,
    MEASUREMENT_NOISE,
    Calibration,
    RankGroup,
    Vector,
    efficiencies,
    shape_covariance,
)
from trainwright.strategies.cost_model.memory_estimate import stage_memory
from trainwright.strategies.cost_model.pipeline_schedules import SPLIT_BACKWARD
from trainwright.strategies.cost_model.plan_constraints import check_request
from trainwright.strategies.cost_model.step_work import (
    HOST_BYTES_PER_S,
    UPDATE_BYTES,
    LayerWork,
    StepWork,
    planned_step_work,
)

INTERVAL_DEVIATIONS = 1.645  # standard deviations to either side: nine of ten steps


def estimate(
    profile: ModelProfile,
    cluster: Cluster,
    plan: Plan,
    *,
    batch_size: int,
    precision: str,
    calibration: Calibration | None = None,
) -> Estimate:
    """Predict the step of a plan on a cluster that need not exist.

    Args:
        profile: of the model, such as `trainwright.transformer_profile(...)`.
        cluster: such as `trainwright.Cluster.parse("4x8xH100-80GB")`.
        plan: such as `trainwright.Plan.parse("dp=8,tp=2,pp=2,micro_batch=4")`; its mesh need not fill the cluster.
        batch_size: global, in samples.
        precision: `fp32`, `tf32`, `fp16` or `bf16`.
        calibration: from `trainwright.calibrate`; without one the efficiencies are assumed.

    Returns:
        Seconds by term, which add up to `step_s`; nine of ten steps are expected between `low_s` and `high_s`.

    Raises:
        PlanError: the plan cannot be carried out by this cluster, or with this model and batch; the batch is no whole
            number of samples, or the precision is unknown.
        ResourceError: an accelerator is missing from the built-in table.
    """
    check_request(batch_size, precision)
    known, plan = calibration or DEFAULT, replace(plan, batch_size=batch_size, precision=precision)
    work = planned_step_work(profile, cluster, plan)
    machine = work.machine
    found = point_estimate(work, stage_memory(profile, plan, apart=machine.device.apart), known)
    slopes = _slopes([work], np.array(known.logs))[0]
    _, unexplained = known.residual(work.shape, work.kind)
    if work.kind not in known.kinds:
        unexplained += machine.device.unsure**2
        if plan.zero == 3 and work.shard.nodes > 1:
            unexplained += _ZERO_3_SPREAD**2
    covariance = known.covariance_on(*_machine_facts(work))
    deviation = math.sqrt(float(slopes @ covariance @ slopes) + unexplained)
    factor = math.exp(INTERVAL_DEVIATIONS * deviation)
    return replace(
        found, low_s=found.step_s / factor, high_s=found.step_s * factor,
        sample_flops=0.0 if profile.untraced else profile.training_flops,
        peak_flops_per_s=machine.device.rate(precision) if machine.device.data_sheet and not machine.each else 0.0,
    )  # fmt: skip


def _machine_facts(work: StepWork) -> tuple[str, float, int]:
    """Return the device, the network of each and the number of nodes that a step runs on; see `Calibration`."""
    machine = work.machine
    return machine.device.name, machine.network_bytes_per_s, -(-work.plan.mesh.size // machine.per_node)


def point_estimate(work: StepWork, stage_memory_bytes: tuple[int, ...], calibration: Calibration) -> Estimate:
    """Return the estimate of a step without an interval: both of its ends are the expected time."""
    terms = expected_terms(work, calibration)
    step_s = sum(terms.values())
    return Estimate(
        step_s=step_s, low_s=step_s, high_s=step_s, terms=terms, stage_memory_bytes=stage_memory_bytes,
        device_memory_bytes=work.machine.device.memory_bytes, factors=_convergence_factors(work),
    )  # fmt: skip


def expected_terms(work: StepWork, calibration: Calibration) -> dict[str, float]:
    """Return the expected seconds of a step by term."""
    residual, _ = calibration.residual(work.shape, work.kind)
    return {name: seconds * math.exp(residual) for name, seconds in _step_terms(work, calibration.efficiencies).items()}


# --- Seconds by term --------------------------------------------------------------------------------------------------


_Rates = Mapping[str, float]
_BACKWARD = 2.0  # operations and traffic of backward, in those of forward
_LAUNCHES_BACK = 1.6  # operations of backward, in those of forward: many are fused
_MAX_SHARPNESS = 4.0  # how sharply the longer of two overlapping times wins
_PCIE_BYTES_PER_S = 1.2e10  # of a device to its host, one direction: assumed
# standard deviation of the logarithm of a step under ZeRO-3 between nodes, which systems carry out differently:
# DeepSpeed's of 2021 takes up to 1.7 times what is predicted (Narayanan et al., 2021, table 2), FSDP's does not
_ZERO_3_SPREAD = 0.22
_GATHER_OVERLAP = 0.8  # of a micro-batch's compute, under which ZeRO gathers and scatters
_HOP_S = 1e-5  # of a message of a ring from one rank to the next
# The small collectives of gloo take so many times as long as NCCL's: FSDP2's took 0.9 to 2 ms, measured with two ranks
# on two cores, models of 3 to 11 groups of layers, ZeRO-2 and 3.
_GLOO = 16.0
_HALVED_BUBBLE = 1 / 3  # of 1F1B's (ZB-H1; Qi et al., 2023); of ZB-V's chunks likewise


def _step_terms(work: StepWork, rates: _Rates) -> dict[str, float]:
    """Return the seconds of a step by term; they add up to the step."""
    forward, backward = _compute(work, rates)
    reduced = _tensor(work, rates)
    again = work.layers.again * (forward + reduced[0])
    spent = {
        "compute": work.by_stage(work.layers.counts @ (forward + backward)),
        "recompute": work.by_stage(work.layers.counts @ again),
        "tensor_parallel": work.by_stage(work.layers.counts @ sum(reduced)),
    }
    if work.guests:
        spent["teachers"] = work.by_stage(_loss_models(work, rates))
    whole = np.sum([*spent.values()], axis=0)
    slowest, count = int(np.argmax(whole)), work.micro_batches
    found = {name: float(each[slowest]) * count for name, each in spent.items()}
    bubble = _bubble(work) * float(whole.sum() - whole[slowest])
    back = float(work.by_stage(work.layers.counts @ (backward + again))[slowest])
    found |= {
        "bubble": bubble,
        "transfers": _transfers(work, rates, float(whole[slowest])),
        "parameters": (_gathered(work, rates, float(whole[slowest])) + _collective_latency(work, rates)) * count,
        "offload": _offloaded(work, float(whole[slowest])) * count,
        "gradients": _gradients(work, rates, back),
        "optimizer": float(work.state.update_s) / rates["update"],
        "other": rates["step_s"] * work.machine.device.host,
    }
    found = _asynchronous_terms(work, rates, found, back) if work.plan.servers else _synchronous_terms(work, found)
    return {name: float(seconds) for name, seconds in found.items() if seconds}


def _bubble(work: StepWork) -> float:
    """Return the bubble as a share of the other stages' time for a micro-batch; 0 where the next step fills it.

    It is all of that time where there are too few micro-batches for a schedule with a short bubble.
    """
    if work.plan.schedule in STREAMED_SCHEDULES:
        return 0.0
    stages, chunks = work.plan.mesh.pipeline, work.plan.chunks
    enough = {"zero_bubble": stages, "zbv": 2 * stages - 1}.get(work.plan.schedule, 1)
    if work.micro_batches < enough:
        return 1.0
    return (_HALVED_BUBBLE if work.plan.schedule in SPLIT_BACKWARD else 1.0) / chunks


@dataclass(frozen=True, kw_only=True)
class StageTimes:
    """The seconds of a step's parts; vectors are by stage unless stated otherwise."""

    # forward, backward: of one micro-batch in each section, with tensor parallelism's reductions
    forward: Vector
    backward: Vector
    recompute: Vector  # of forward, in backward; likewise by section
    send: Vector  # of one message over each cut between sections
    # of ZeRO-3's collectives and of transfers from and to host memory, without what a micro-batch's compute hides
    gather: float
    reduction: Vector  # of gradients over the data ranks, once a step
    optimizer: Vector  # once a step
    other: float  # once a step, of all stages

    def times(self, factor: float) -> StageTimes:
        """Return all times multiplied by a factor."""
        return StageTimes(**{item.name: getattr(self, item.name) * factor for item in fields(self)})


def stage_times(work: StepWork, rates: _Rates) -> StageTimes:
    """Return the seconds that `_step_terms` adds up, before any waiting."""
    forward, backward = _compute(work, rates)
    reduced = _tensor(work, rates)
    again = work.layers.counts @ (work.layers.again * (forward + reduced[0]))
    ahead = work.layers.counts @ (forward + reduced[0]) + _loss_models(work, rates)
    back = work.layers.counts @ (backward + reduced[1])
    whole = float(work.by_stage(ahead + back + again).max())
    return StageTimes(
        forward=ahead,
        backward=back,
        recompute=again,
        send=_sent(work, work.sent_bytes, rates) * (work.sent_bytes > 0),
        gather=_gathered(work, rates, whole) + _collective_latency(work, rates) + _offloaded(work, whole),
        reduction=_reduction(work, rates),
        optimizer=work.state.update_s / rates["update"] * work.state.parameters / work.state.parameters.max(),
        other=rates["step_s"] * work.machine.device.host,
    )


def layer_seconds(work: StepWork) -> Vector:
    """Return the seconds of forward and backward of each distinct layer, with the default efficiencies."""
    rates = DEFAULT.efficiencies
    forward, backward = _compute(work, rates)
    reduced = _tensor(work, rates)
    found: Vector = forward + backward + sum(reduced) + work.layers.again * (forward + reduced[0])
    return found


def send_seconds(work: StepWork, sent_bytes: Vector) -> Vector:
    """Return the seconds there and back over a cut, with the default efficiencies."""
    found: Vector = 2 * _sent(work, sent_bytes, DEFAULT.efficiencies)
    return found


def _compute(work: StepWork, rates: _Rates) -> tuple[Vector, Vector]:
    """Return the seconds of forward and of backward of each distinct layer."""
    device, told, weights = _forward_parts(work.layers, rates)
    return _soft_maximum(device, told), _soft_maximum(
        _BACKWARD * device + work.layers.passes * weights, _LAUNCHES_BACK * told
    )


def _loss_models(work: StepWork, rates: _Rates) -> Vector:
    """Return the seconds of the models in the loss for one micro-batch, by section: all in the last one."""
    found = np.zeros(len(work.layers.counts))
    for guest in work.guests:
        device, told, _ = _forward_parts(guest, rates)
        found[-1] += float(guest.counts[0] @ _soft_maximum(device, told))
    return found


def _forward_parts(of: LayerWork, rates: _Rates) -> tuple[Vector, Vector, Vector]:
    """Return the seconds of forward on the device, of launching it, and of one pass over the parameters."""
    weights = of.weights_s / rates["traffic"]
    product = _soft_maximum(of.flops_s / rates["matmul"], weights * (of.flops_s > 0)) + of.matmuls * rates["matmul_s"]
    device = product + (of.traffic_s + of.scores_s * rates["scores"]) / rates["traffic"]
    return device, of.launches * rates["launch_s"], weights


def _soft_maximum(one: Vector, other: Vector) -> Vector:
    found: Vector = (one**_MAX_SHARPNESS + other**_MAX_SHARPNESS) ** (1 / _MAX_SHARPNESS)
    return found


def _tensor(work: StepWork, rates: _Rates) -> tuple[Vector, Vector]:
    """Return the seconds by which all-reduces lengthen each layer's forward, and its backward.

    They take the device's time: where the host that launches operations is slower, they lengthen nothing.
    """
    if work.tensor.size == 1:
        return np.zeros_like(work.layers.flops_s), np.zeros_like(work.layers.flops_s)
    seconds = _all_reduce(work, work.tensor, rates, "tensor", np.ones(1))[0]
    reduced = work.layers.reduced_bytes * seconds + work.layers.reductions * _messages(work.tensor, rates)
    device, told, weights = _forward_parts(work.layers, rates)
    device_back, told_back = _BACKWARD * device + work.layers.passes * weights, _LAUNCHES_BACK * told
    reduced_back = (1 + work.layers.regathered) * reduced
    return (
        _soft_maximum(device + reduced, told) - _soft_maximum(device, told),
        _soft_maximum(device_back + reduced_back, told_back) - _soft_maximum(device_back, told_back),
    )


def _all_reduce(
    work: StepWork, group: RankGroup, rates: _Rates, name: str, size: Vector, network: str = "network"
) -> Vector:
    """Return the seconds of an all-reduce of `size` bytes on each rank, without latency.

    Args:
        name, network: of the efficiencies of the links inside a node and between nodes.
    """
    inside = 2 * (group.local - 1) / group.local / (work.machine.device.link_bytes_per_s * rates[name])
    bandwidth = group.local * work.machine.network_bytes_per_s * rates[network]
    between = 2 * (group.nodes - 1) / group.nodes / bandwidth
    found: Vector = size * (inside + between)
    return found


def _messages(group: RankGroup, rates: _Rates) -> float:
    return rates["message_s"] * (1 + np.log2(group.size)) if group.size > 1 else 0.0


def _transfers(work: StepWork, rates: _Rates, compute_s: float) -> float:
    """Return the seconds that stages wait for activations and their gradients.

    The first micro-batch passes all cuts, and each later one adds the slowest. GPipe sends one micro-batch while it
    computes the next; the other schedules wait.
    """
    if work.plan.mesh.pipeline == 1:
        return 0.0
    cuts = 2 * _sent(work, work.sent_bytes[work.sent_bytes > 0], rates)
    slowest = float(cuts.max(initial=0.0))
    each = _exposed_seconds(slowest, compute_s) if work.plan.schedule == "gpipe" else slowest
    first = slowest if work.plan.schedule in STREAMED_SCHEDULES else float(cuts.sum()) / work.plan.chunks
    return first + each * (work.micro_batches - 1) * work.plan.chunks


def _sent(work: StepWork, sent_bytes: Vector, rates: _Rates) -> Vector:
    """Return the seconds of messages to the next stage."""
    link = work.machine.network_bytes_per_s if work.remote else work.machine.device.link_bytes_per_s
    found: Vector = sent_bytes / (link * rates["send"]) + rates["send_s"]
    return found


def _gathered(work: StepWork, rates: _Rates, compute_s: float) -> float:
    """Return the seconds that the gathers and scatters of a micro-batch exceed compute by.

    ZeRO-3 gathers twice and scatters once. ZeRO-2 does each once; those of one micro-batch are in `_reduction`. Each
    ring has as many messages as there are ranks.
    """
    if work.plan.zero < 2 or work.shard.size == 1:
        return 0.0
    gathered, scattered = work.state.gathered_bytes.max(), work.state.gradient_bytes.max()
    size = (gathered + scattered) / 2  # a gather or a scatter is half an all-reduce
    size = size + gathered / 2 if work.plan.zero == 3 else size * (1 - 1 / work.micro_batches)
    spent = float(_all_reduce(work, work.shard, rates, "reduce", np.array([size]), network="gather")[0])
    spent += work.gathers * _HOP_S * (work.shard.size - 1)
    return _exposed_seconds(spent, _GATHER_OVERLAP * compute_s)


def _collective_latency(work: StepWork, rates: _Rates) -> float:
    """Return the latency of ZeRO's collectives."""
    return work.gathers * rates["gather_s"] * (1.0 if work.machine.device.apart else _GLOO)


def _offloaded(work: StepWork, compute_s: float) -> float:
    """Return the seconds that transfers from and to host memory exceed compute by."""
    return _exposed_seconds(work.state.offloaded_bytes / _PCIE_BYTES_PER_S, compute_s)


def _gradients(work: StepWork, rates: _Rates, backward_s: float) -> float:
    """Return the seconds of the gradients' reduction over data ranks, without what the last backward hides."""
    if work.plan.servers:
        return 0.0  # pushes are in `_asynchronous_terms`
    spent = float(_reduction(work, rates).max())
    return _exposed_seconds(spent, rates["overlap"] * backward_s)


def _reduction(work: StepWork, rates: _Rates) -> Vector:
    """Return the seconds of each stage's reduction of gradients, of ZeRO-1 and 2 with a gather of the parameters."""
    size = work.state.gradient_bytes
    spent = np.zeros_like(size)
    if work.plan.zero < 3:
        halves = (size + work.state.gathered_bytes) / 2
        spent += _all_reduce(work, work.shard, rates, "reduce", halves) + _messages(work.shard, rates)
    spent += _all_reduce(work, work.data, rates, "reduce", size / work.shard.size) + _messages(work.data, rates)
    return spent


# --- Workers that step asynchronously, or differ ----------------------------------------------------------------------


LAST_BUCKET_SHARE = 0.15  # of the gradients, sent after backward has ended
_CURVATURE_SHARE = 0.2  # of a run: assumed
_DRIFT_COST = 0.03  # of a run, for each doubling of local steps: assumed
_ADDED_BYTES = 12.0  # a parameter: a gradient added to another, both read and one written
_PREEMPTED_S = 36_000.0  # between two preemptions of a node: assumed
_RESTART_S = 150.0  # lost by all ranks that step together when one is replaced: assumed
_BACKUP_AFTER = 2.0  # times of a usual unit, after which another worker computes a slow unit too
_LEAST_FACTOR = 1.005  # smaller factors are left out
_COMPUTED = ("compute", "recompute", "teachers", "other")


def _synchronous_terms(work: StepWork, found: Mapping[str, float]) -> dict[str, float]:
    """Return the terms of ranks that step together; the wait for the slowest is a term of its own."""
    mean = _mean_speed(work)
    waited = sum((1 - 1 / mean) * found.get(name, 0.0) for name in _COMPUTED)
    own = {name: seconds / mean if name in _COMPUTED else seconds for name, seconds in found.items()}
    return {**own, "stragglers": waited}


def _asynchronous_terms(
    work: StepWork, rates: _Rates, found: Mapping[str, float], backward_s: float
) -> dict[str, float]:
    """Return the terms of workers that step asynchronously.

    `found` has the terms of a worker on the slowest device. Gradients are pushed during `backward_s`, as they appear.
    """
    mean, rule = _mean_speed(work), work.consistency
    together = rule.bound == 0  # servers work while workers wait
    link_s, served_s, applied_s = _link(work, rates), _server_transfer(work, rates), _server_updates(work)
    sent_s = max(link_s, served_s) if together else link_s
    own = {name: seconds / mean if name in _COMPUTED else seconds for name, seconds in found.items()}
    if work.plan.local_steps == 1:
        own["optimizer"] = 0.0  # the servers'
    hidden_s = rates["overlap"] * backward_s / mean if work.plan.local_steps == 1 else 0.0
    own["gradients"] = (_exposed_seconds(sent_s, hidden_s) + 2 * rates["message_s"]) / work.plan.local_steps
    step_s = sum(own.values())
    own["stragglers"] = _straggler_wait(work, found, step_s)
    if together:
        return {**own, "servers": applied_s / work.plan.local_steps}
    rest_s = (served_s + applied_s) / work.plan.local_steps - step_s - own["stragglers"]
    return {**own, "servers": max(rest_s, 0.0)}


def _convergence_factors(work: StepWork) -> dict[str, float]:
    """Return the factors by which the same loss takes longer, by name."""
    found = {
        "staleness": 1 + _CURVATURE_SHARE * _staleness(work) if work.plan.servers else 1.0,
        "local_steps": 1 + _DRIFT_COST * math.log2(work.plan.local_steps),
        "preemptions": 1 + _preemptible_nodes(work) * _RESTART_S / _PREEMPTED_S,
    }
    return {name: factor for name, factor in found.items() if factor >= _LEAST_FACTOR}


def _exposed_seconds(spent_s: float, hidden_s: float) -> float:
    """Return the part of a communication that overlapping compute does not hide: the excess, and the last bucket."""
    if not spent_s:
        return 0.0
    return float(max(spent_s - hidden_s, 0.0) + LAST_BUCKET_SHARE * min(spent_s, hidden_s))


def _mean_speed(work: StepWork) -> float:
    return sum(work.speeds) / len(work.speeds)


def _straggler_wait(work: StepWork, found: Mapping[str, float], step_s: float) -> float:
    """Return the wait for the slowest worker: a unit may take as long as bound + 1 steps.

    A unit that takes longer than two of a usual worker is also computed by an idle one (`ps.lease_table`). With backup
    workers the slowest are not waited for, and their units are computed again.
    """
    rule, speeds = work.consistency, work.speeds
    if rule.bound is None:
        return 0.0
    least, mean = speeds[min(rule.backup, len(speeds) - 1)], sum(speeds) / len(speeds)
    computed_s = sum(found.get(name, 0.0) for name in _COMPUTED)
    unit_s = step_s + computed_s * (min(1 / least, _BACKUP_AFTER / mean) - 1 / mean)
    waited_s = max(unit_s / (rule.bound + 1) - step_s, 0.0)
    return waited_s + (step_s + waited_s) * rule.backup / (len(speeds) - rule.backup)


def _link(work: StepWork, rates: _Rates) -> float:
    """Return the seconds of a worker's push and pull through its own link."""
    return (1 + work.pushed) * float(work.state.gradient_bytes.max()) / _server_bandwidth(work, rates)


def _server_transfer(work: StepWork, rates: _Rates) -> float:
    """Return the seconds of all pushes and pulls through the servers' links; servers of one node share its link."""
    nodes = min(work.plan.servers, work.machine.nodes)
    size = (1 + work.pushed) * float(work.state.gradient_bytes.max()) * work.plan.mesh.data_ranks
    return size / (nodes * _server_bandwidth(work, rates) * work.machine.per_node)


def _server_bandwidth(work: StepWork, rates: _Rates) -> float:
    """Return the bytes a second of a device's link to the servers."""
    machine = work.machine
    if work.plan.mesh.data_ranks <= machine.per_node:
        return machine.device.link_bytes_per_s * rates["reduce"]
    return machine.network_bytes_per_s * rates["network"]


def _server_updates(work: StepWork) -> float:
    """Return the seconds of the servers' updates of one step, each of the sum of all units, of some, or of one."""
    parameters, ranks, rule = float(work.state.parameters.max()), work.plan.mesh.data_ranks, work.consistency
    updates = 1.0 if rule.waits else ranks / rule.pushes
    added = _ADDED_BYTES * ranks if rule.waits or rule.pushes > 1 else 0
    visited = UPDATE_BYTES[4] * updates + added
    return parameters * visited / (work.plan.servers * HOST_BYTES_PER_S)


def _staleness(work: StepWork) -> float:
    """Return the mean staleness in steps."""
    rule, ranks = work.consistency, work.plan.mesh.data_ranks
    if rule.bound is None:
        return (ranks - 1) / ranks
    if not rule.bound:
        return 0.0
    slow = _mean_speed(work) - 1  # steps that others take while the slowest takes one
    return min(float(rule.bound), max(slow, (ranks - 1) / ranks))


def _preemptible_nodes(work: StepWork) -> int:
    """Return the number of preemptible nodes whose loss all ranks wait for: all used ones, or those of servers."""
    machine = work.machine
    used = min(work.plan.servers, machine.nodes) if work.plan.servers else -(-work.plan.mesh.size // machine.per_node)
    return min(max(used - machine.steady, 0), machine.preemptible)


# --- Efficiencies from measured steps ---------------------------------------------------------------------------------


_DEVICE_EFFICIENCIES = ("matmul", "traffic", "launch_s", "update")  # as uncertain as the device's own speed
_ROUNDS, _ENOUGH = 40, 1e-4
_STUDENT_T_FREEDOM = 3.0  # degrees of freedom of Student's distribution: one wrong measurement must not bend the others
_SLOPE_STEP = 1e-4


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """A step that was measured.

    Attributes:
        profile, cluster, plan, batch_size, precision: as for `estimate`.
        step_s: seconds of one step, such as the median of several.
    """

    profile: ModelProfile
    cluster: Cluster
    plan: Plan
    batch_size: int
    precision: str
    step_s: float


def calibrate(measurements: Sequence[Measurement]) -> Calibration:
    """Return the most probable efficiencies, given measured steps and what is known of machines in general.

    Least squares of logarithms by Gauss and Newton with Levenberg's damping, the defaults as a prior; so any number of
    measurements will do, and none gives the defaults.

    Raises:
        PlanError: a measured time is not above 0 and finite, or one of the plans is not possible.
    """
    for number, one in enumerate(measurements):
        check_request(one.batch_size, one.precision)
        if not 0 < one.step_s < math.inf:
            raise PlanError(
                f"step_s={one.step_s!r} must be above 0 and finite",
                where=f"measurement {number}",
                remedy="give the seconds of one step, or leave the measurement out",
            )
    if not measurements:
        return Calibration()
    plans = [replace(one.plan, batch_size=one.batch_size, precision=one.precision) for one in measurements]
    works = [planned_step_work(one.profile, one.cluster, plan) for one, plan in zip(measurements, plans, strict=True)]
    measured = np.log([one.step_s for one in measurements])
    shapes, kinds = np.array([work.shape for work in works]), [work.kind for work in works]
    inverse = np.linalg.inv(shape_covariance(shapes, kinds, shapes, kinds) + MEASUREMENT_NOISE**2 * np.eye(len(works)))
    whitened = np.linalg.cholesky(inverse).T  # errors of shapes that are alike are alike: they count as few
    unsure = max(work.machine.device.unsure for work in works)
    known = EFFICIENCIES.items()
    prior = np.array([math.hypot(item.spread, unsure if name in _DEVICE_EFFICIENCIES else 0.0) for name, item in known])
    logs, slopes = _fit_efficiencies(works, measured, whitened, prior)
    return Calibration(
        logs=tuple(logs),
        covariance=tuple(map(tuple, np.linalg.inv(slopes.T @ slopes + np.diag(prior**-2)))),
        shapes=tuple(work.shape for work in works),
        kinds=tuple(kinds),
        residuals=tuple(inverse @ (measured - _predicted(works, logs))),
        inverse=tuple(map(tuple, inverse)),
        measurements=len(works),
        machines=tuple(map(_machine_facts, works)),
    )


def _fit_efficiencies(
    works: Sequence[StepWork], measured: Vector, whitened: Vector, prior: Vector
) -> tuple[Vector, Vector]:
    """Return the logarithms of the efficiencies, and the slopes of the whitened predictions there."""
    logs, damping = np.zeros(len(EFFICIENCY_NAMES)), 1e-2
    missed = whitened @ (_predicted(works, logs) - measured)
    slopes = whitened @ _slopes(works, logs)
    for _ in range(_ROUNDS):
        weights = (_STUDENT_T_FREEDOM + 1) / (_STUDENT_T_FREEDOM + missed**2)
        curvature = slopes.T @ (weights[:, None] * slopes) + np.diag(prior**-2)
        downhill = slopes.T @ (weights * missed) + logs / prior**2
        tried = logs - np.linalg.solve(curvature + damping * np.diag(np.diag(curvature)), downhill)
        then = whitened @ (_predicted(works, tried) - measured)
        gain = _robust_loss(missed, logs / prior) - _robust_loss(then, tried / prior)
        if gain < 0:
            damping *= 4
            continue
        logs, missed, damping = tried, then, damping / 3
        slopes = whitened @ _slopes(works, logs)
        if gain < _ENOUGH * _robust_loss(then, tried / prior):
            break
    return logs, slopes


def _robust_loss(missed: Vector, moved: Vector) -> float:
    """Return twice the negative logarithm of the probability, up to a constant."""
    return float((_STUDENT_T_FREEDOM + 1) * np.log1p(missed**2 / _STUDENT_T_FREEDOM).sum() + moved @ moved)


def _predicted(works: Sequence[StepWork], logs: Vector) -> Vector:
    rates = efficiencies(logs)
    return np.log([sum(_step_terms(work, rates).values()) for work in works])


def _slopes(works: Sequence[StepWork], logs: Vector) -> Vector:
    here = _predicted(works, logs)
    columns = [
        (_predicted(works, logs + _SLOPE_STEP * row) - here) / _SLOPE_STEP for row in np.eye(len(EFFICIENCY_NAMES))
    ]
    return np.stack(columns, axis=1)
