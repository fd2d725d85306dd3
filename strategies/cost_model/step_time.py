"""Seconds of a step, term by term, from its work and a machine's efficiencies.

Compute is a roofline with launch overhead: what a device computes, or what its host tells it, whichever takes longer.
Ring all-reduce as in Patarasuk and Yuan (2009), inside a node and between nodes one after the other; pipelines as in
Huang et al. (2019) and Narayanan et al. (2021), for stages that differ.

A step stands for as many units of work as there are workers, whoever computes them: what is slow is waited for as far
as the consistency says, so that `async` goes by the sum of the workers' rates and `sync` by the slowest of them.

What more steps the same loss takes is a model, not verified. Updates from parameters that are tau steps old converge
as quickly as fresh ones where noise decides, and 1 + tau times as slowly where curvature does (Stich and Karimireddy,
JMLR 2020: T = O(noise / eps^2 + tau / eps)); `_CURVATURE_SHARE` is the share of a run that is taken to be of the second
kind. n workers that push each by itself are (n - 1) / n steps behind on average, as n - 1 others push in between
(Mitliagkas et al., 2016). What workers drift apart in H local steps is taken to cost a share of a run for each doubling
of H.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields

import numpy as np

from trainwright.core.plan import STREAMED_SCHEDULES
from trainwright.strategies.cost_model.machine_model import DEFAULT, RankGroup, Vector
from trainwright.strategies.cost_model.pipeline_schedules import SPLIT_BACKWARD
from trainwright.strategies.cost_model.step_work import (
    BACKWARD,
    HOST_BYTES_PER_S,
    LAUNCHES_BACK,
    UPDATE_BYTES,
    LayerWork,
    StepWork,
)

_MAX_SHARPNESS = 4.0  # how sharply the longer of two overlapping times wins
_PCIE_BYTES_PER_S = 1.2e10  # of a device to its host, one direction: assumed
_GLOO = 30.0  # times as long as NCCL's take the small collectives of gloo
_HALVED_BUBBLE = 1 / 3  # of 1F1B's (ZB-H1; Qi et al., 2023); of ZB-V's chunks likewise


def step_terms(work: StepWork, rates: _Rates) -> dict[str, float]:
    """Seconds by name; they add up to the step."""
    forward, backward = _compute(work, rates)
    reduced = _tensor(work, rates)
    again = work.layers.again * (forward + reduced)
    spent = {
        "compute": work.by_stage(work.layers.counts @ (forward + backward)),
        "recompute": work.by_stage(work.layers.counts @ again),
        "tensor_parallel": work.by_stage(work.layers.counts @ ((2 + work.layers.regathered) * reduced)),
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
    found = (
        _asynchronous_terms(work, rates, found, back) if work.asynchronous.servers else _synchronous_terms(work, found)
    )
    return {name: float(seconds) for name, seconds in found.items() if seconds}


def _bubble(work: StepWork) -> float:
    """What a stage waits for, in what others take for a micro-batch: all of it where too few fill a short bubble.

    Nothing where the next step fills what the one before leaves.
    """
    if work.schedule in STREAMED_SCHEDULES:
        return 0.0
    stages, chunks = work.mesh.pipeline, work.chunks
    enough = {"zero_bubble": stages, "zbv": 2 * stages - 1}.get(work.schedule, 1)
    if work.micro_batches < enough:
        return 1.0
    return (_HALVED_BUBBLE if work.schedule in SPLIT_BACKWARD else 1.0) / chunks


@dataclass(frozen=True, kw_only=True)
class StageTimes:
    """What a step is made of. Vectors are by stage where nothing else is said.

    Attributes:
        forward, backward: of one micro-batch in each section, with tensor parallelism's reductions.
        recompute: of forward, in backward; likewise.
        send: of one message over each cut between sections.
        gather: of ZeRO-3's parameters and their gradients, and of what comes from the host's memory and goes there,
            beyond what a micro-batch's compute hides.
        reduction: of gradients over the data ranks, once a step.
        optimizer: once a step.
        other: once a step, of all stages.
    """

    forward: Vector
    backward: Vector
    recompute: Vector
    send: Vector
    gather: float
    reduction: Vector
    optimizer: Vector
    other: float

    def times(self, factor: float) -> StageTimes:
        """All of them longer by a factor."""
        return StageTimes(**{item.name: getattr(self, item.name) * factor for item in fields(self)})


def stage_times(work: StepWork, rates: _Rates) -> StageTimes:
    """The same seconds that `step_terms` adds up, before anything waits for anything."""
    forward, backward = _compute(work, rates)
    reduced = _tensor(work, rates)
    again = work.layers.counts @ (work.layers.again * (forward + reduced))
    ahead = work.layers.counts @ (forward + reduced) + _loss_models(work, rates)
    back = work.layers.counts @ (backward + (1 + work.layers.regathered) * reduced)
    whole = float(work.by_stage(ahead + back + again).max())
    return StageTimes(
        forward=ahead,
        backward=back,
        recompute=again,
        send=_sent(work, work.sent_bytes, rates) * (work.sent_bytes > 0),
        gather=_gathered(work, rates, whole) + _collective_latency(work, rates) + _offloaded(work, whole),
        reduction=_reduction(work, rates, work.state.gradient_bytes),
        optimizer=work.state.update_s / rates["update"] * work.state.parameters / work.state.parameters.max(),
        other=rates["step_s"] * work.machine.device.host,
    )


def layer_seconds(work: StepWork) -> Vector:
    """Forward and backward of each distinct layer with the default efficiencies, for dividing layers into stages."""
    rates = DEFAULT.efficiencies
    forward, backward = _compute(work, rates)
    reduced = _tensor(work, rates)
    found: Vector = forward + backward + 2 * reduced + work.layers.again * (forward + reduced)
    return found


def send_seconds(work: StepWork, sent_bytes: Vector) -> Vector:
    """There and back over a cut, with the default efficiencies, for dividing layers into stages."""
    found: Vector = 2 * _sent(work, sent_bytes, DEFAULT.efficiencies)
    return found


def _compute(work: StepWork, rates: _Rates) -> tuple[Vector, Vector]:
    """Forward and backward of each distinct layer."""
    device, told, weights = _forward_parts(work.layers, rates)
    return _soft_maximum(device, told), _soft_maximum(
        BACKWARD * device + work.layers.passes * weights, LAUNCHES_BACK * told
    )


def _loss_models(work: StepWork, rates: _Rates) -> Vector:
    """Forward of the models in the loss, for one micro-batch: in the last section."""
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


def _tensor(work: StepWork, rates: _Rates) -> Vector:
    """All-reduces of each layer's forward; those of backward are as many."""
    if work.tensor.size == 1:
        return np.zeros_like(work.layers.flops_s)
    seconds = _all_reduce(work, work.tensor, rates, "tensor", np.ones(1))[0]
    messages = work.layers.reductions * _messages(work.tensor, rates)
    found: Vector = work.layers.reduced_bytes * seconds + messages
    return found


def _all_reduce(work: StepWork, group: RankGroup, rates: _Rates, name: str, size: Vector) -> Vector:
    """Of so many bytes on each rank, without the time of messages."""
    inside = 2 * (group.local - 1) / group.local / (work.machine.device.link_bytes_per_s * rates[name])
    network = group.local * work.machine.network_bytes_per_s * rates["network"]
    between = 2 * (group.nodes - 1) / group.nodes / network
    found: Vector = size * (inside + between)
    return found


def _messages(group: RankGroup, rates: _Rates) -> float:
    return rates["message_s"] * (1 + np.log2(group.size)) if group.size > 1 else 0.0


def _transfers(work: StepWork, rates: _Rates, compute_s: float) -> float:
    """Activations and their gradients from stage to stage: of each micro-batch, and of one that fills the pipeline all.

    GPipe sends one micro-batch while it computes the next; the other schedules wait for what comes back.
    """
    if work.mesh.pipeline == 1:
        return 0.0
    cuts = 2 * _sent(work, work.sent_bytes[work.sent_bytes > 0], rates)
    slowest = float(cuts.max(initial=0.0))
    each = _exposed_seconds(slowest, compute_s) if work.schedule == "gpipe" else slowest
    first = slowest if work.schedule in STREAMED_SCHEDULES else float(cuts.sum()) / work.chunks
    return first + each * (work.micro_batches - 1) * work.chunks


def _sent(work: StepWork, sent_bytes: Vector, rates: _Rates) -> Vector:
    """Messages of so many bytes to the next stage."""
    link = work.machine.network_bytes_per_s if work.remote else work.machine.device.link_bytes_per_s
    found: Vector = sent_bytes / (link * rates["send"]) + rates["send_s"]
    return found


def _gathered(work: StepWork, rates: _Rates, compute_s: float) -> float:
    """ZeRO-3: parameters gathered for forward and for backward, gradients scattered: what compute does not hide."""
    if work.zero < 3 or work.shard.size == 1:
        return 0.0
    size = np.array([work.state.gradient_bytes.max()])
    spent = 1.5 * float(_all_reduce(work, work.shard, rates, "reduce", size)[0])
    return _exposed_seconds(spent, compute_s)


def _collective_latency(work: StepWork, rates: _Rates) -> float:
    """What ZeRO's collectives take whatever their size."""
    return work.gathers * rates["gather_s"] * (1.0 if work.machine.device.apart else _GLOO)


def _offloaded(work: StepWork, compute_s: float) -> float:
    """Parameters from the host, for ZeRO-3 twice, and gradients to it: what compute does not hide."""
    return _exposed_seconds(work.state.offloaded_bytes / _PCIE_BYTES_PER_S, compute_s)


def _gradients(work: StepWork, rates: _Rates, backward_s: float) -> float:
    """Their reduction over the data ranks, once a step, less what is hidden under the last backward."""
    if work.asynchronous.servers:
        return 0.0  # none: see `apart`
    spent = float(_reduction(work, rates, np.array([work.state.gradient_bytes.max()]))[0])
    return _exposed_seconds(spent, rates["overlap"] * backward_s)


def _reduction(work: StepWork, rates: _Rates, size: Vector) -> Vector:
    """Of gradients of so many bytes, with nothing hidden."""
    spent = np.zeros_like(size)
    if work.zero < 3:
        spent += _all_reduce(work, work.shard, rates, "reduce", size) + _messages(work.shard, rates)
    spent += _all_reduce(work, work.data, rates, "reduce", size / work.shard.size) + _messages(work.data, rates)
    return spent


# --- Workers that step alone, or are not alike ------------------------------------------------------------------------


_Rates = Mapping[str, float]
LAST_BUCKET_SHARE = 0.15  # of the gradients: they are sent when backward has ended, whatever was hidden before
_CURVATURE_SHARE = 0.2  # of a run: assumed
_DRIFT_COST = 0.03  # of a run, for each doubling of local steps: assumed
_ADDED_BYTES = 12.0  # a parameter: a gradient added to another, both read and one written
_PREEMPTED_S = 36_000.0  # of a node, between two times that it is taken back: assumed
_RESTART_S = 150.0  # that all lose when ranks that step together lose one and get it back: assumed
_BACKUP_AFTER = 2.0  # usual units' time, in which others have done a slow one's
_LEAST_FACTOR = 1.005  # and less is nothing
_COMPUTED = ("compute", "recompute", "teachers", "other")


def _synchronous_terms(work: StepWork, found: Mapping[str, float]) -> dict[str, float]:
    """Seconds of ranks that step together: what the quicker wait for the slowest is told apart."""
    mean = _mean_speed(work)
    waited = sum((1 - 1 / mean) * found.get(name, 0.0) for name in _COMPUTED)
    own = {name: seconds / mean if name in _COMPUTED else seconds for name, seconds in found.items()}
    return {**own, "stragglers": waited}


def _asynchronous_terms(
    work: StepWork, rates: _Rates, found: Mapping[str, float], backward_s: float
) -> dict[str, float]:
    """Seconds of a step of workers that step alone, from those of the slowest without communication.

    Args:
        work: of the plan.
        rates: efficiencies.
        found: seconds by term, of a worker on the slowest device.
        backward_s: under which gradients are pushed, as they appear.
    """
    mean, rule = _mean_speed(work), work.asynchronous.consistency
    together = rule.bound == 0  # servers work while workers wait
    link_s, served_s, applied_s = _link(work, rates), _server_transfer(work, rates), _server_updates(work)
    sent_s = max(link_s, served_s) if together else link_s
    own = {name: seconds / mean if name in _COMPUTED else seconds for name, seconds in found.items()}
    if work.asynchronous.local_steps == 1:
        own["optimizer"] = 0.0  # the servers'
    hidden_s = rates["overlap"] * backward_s / mean if work.asynchronous.local_steps == 1 else 0.0
    own["gradients"] = (_exposed_seconds(sent_s, hidden_s) + 2 * rates["message_s"]) / work.asynchronous.local_steps
    step_s = sum(own.values())
    own["stragglers"] = _straggler_wait(work, found, step_s)
    if together:
        return {**own, "servers": applied_s / work.asynchronous.local_steps}
    rest_s = (served_s + applied_s) / work.asynchronous.local_steps - step_s - own["stragglers"]
    return {**own, "servers": max(rest_s, 0.0)}


def convergence_factors(work: StepWork) -> dict[str, float]:
    """By what the same loss takes longer than so many steps, by name; nothing where it does not."""
    found = {
        "staleness": 1 + _CURVATURE_SHARE * _staleness(work) if work.asynchronous.servers else 1.0,
        "local_steps": 1 + _DRIFT_COST * math.log2(work.asynchronous.local_steps),
        "preemptions": 1 + _preemptible_nodes(work) * _RESTART_S / _PREEMPTED_S,
    }
    return {name: factor for name, factor in found.items() if factor >= _LEAST_FACTOR}


def _exposed_seconds(spent_s: float, hidden_s: float) -> float:
    """What of a time lies outside another: what is too long for it, and the last part."""
    if not spent_s:
        return 0.0
    return float(max(spent_s - hidden_s, 0.0) + LAST_BUCKET_SHARE * min(spent_s, hidden_s))


def _mean_speed(work: StepWork) -> float:
    return sum(work.asynchronous.speeds) / len(work.asynchronous.speeds)


def _straggler_wait(work: StepWork, found: Mapping[str, float], step_s: float) -> float:
    """For the slowest, as far as others wait for it: a unit may take as long as bound + 1 steps.

    One that takes longer than two of a usual worker is copied by who is done (`servers.book`). Of backup workers the
    slowest are not waited for, and what they did is done again.
    """
    rule, speeds = work.asynchronous.consistency, work.asynchronous.speeds
    if rule.bound is None:
        return 0.0
    least, mean = speeds[min(rule.backup, len(speeds) - 1)], sum(speeds) / len(speeds)
    computed_s = sum(found.get(name, 0.0) for name in _COMPUTED)
    unit_s = step_s + computed_s * (min(1 / least, _BACKUP_AFTER / mean) - 1 / mean)
    waited_s = max(unit_s / (rule.bound + 1) - step_s, 0.0)
    return waited_s + (step_s + waited_s) * rule.backup / (len(speeds) - rule.backup)


def _link(work: StepWork, rates: _Rates) -> float:
    """What a worker pushes and pulls, through its own link."""
    return (1 + work.asynchronous.pushed) * float(work.state.gradient_bytes.max()) / _server_bandwidth(work, rates)


def _server_transfer(work: StepWork, rates: _Rates) -> float:
    """What all workers push and pull, through the servers' links: a node's, which servers of one node share."""
    nodes = min(work.asynchronous.servers, work.machine.nodes)
    size = (1 + work.asynchronous.pushed) * float(work.state.gradient_bytes.max()) * work.mesh.data_ranks
    return size / (nodes * _server_bandwidth(work, rates) * work.machine.per_node)


def _server_bandwidth(work: StepWork, rates: _Rates) -> float:
    """Bytes a second of a device's link to the servers."""
    machine = work.machine
    if work.mesh.data_ranks <= machine.per_node:
        return machine.device.link_bytes_per_s * rates["reduce"]
    return machine.network_bytes_per_s * rates["network"]


def _server_updates(work: StepWork) -> float:
    """What the servers' updates of one step take: one of all units added up, or each unit's own."""
    parameters, ranks = float(work.state.parameters.max()), work.mesh.data_ranks
    each = UPDATE_BYTES[4]
    visited = each + _ADDED_BYTES * ranks if work.asynchronous.consistency.waits else each * ranks
    return parameters * visited / (work.asynchronous.servers * HOST_BYTES_PER_S)


def _staleness(work: StepWork) -> float:
    """Mean, in steps."""
    rule, ranks = work.asynchronous.consistency, work.mesh.data_ranks
    if rule.bound is None:
        return (ranks - 1) / ranks
    if not rule.bound:
        return 0.0
    slow = _mean_speed(work) - 1  # steps that others take while the slowest takes one
    return min(float(rule.bound), max(slow, (ranks - 1) / ranks))


def _preemptible_nodes(work: StepWork) -> int:
    """Nodes that may be taken back and whose loss all ranks wait for: of all of them, or of servers alone."""
    machine = work.machine
    used = (
        min(work.asynchronous.servers, machine.nodes)
        if work.asynchronous.servers
        else -(-work.mesh.size // machine.per_node)
    )
    return min(max(used - machine.steady, 0), machine.preemptible)
