"""Seconds of a step, term by term, from its work and a machine's efficiencies.

Compute is a roofline with launch overhead: what a device computes, or what its host tells it, whichever takes longer.
Ring all-reduce as in Patarasuk and Yuan (2009), inside a node and between nodes one after the other; pipelines as in
Huang et al. (2019) and Narayanan et al. (2021), for stages that differ.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from trainwright.core.pipeline_layout import STREAMED
from trainwright.strategies.cost_model.calibration import DEFAULT, Vector
from trainwright.strategies.cost_model.machine import Group
from trainwright.strategies.cost_model.staleness_cost import Rates, alone, exposed, uneven
from trainwright.strategies.cost_model.step_work import BACKWARD, LAUNCHES_BACK, Guest, Work
from trainwright.strategies.search.pipeline_schedules import HALVED

SOFT = 4.0  # how sharply the longer of two overlapping times wins
PCIE_BYTES_PER_S = 1.2e10  # of a device to its host, one direction: assumed
GLOO = 30.0  # times as long as NCCL's take the small collectives of gloo
_HALVED_BUBBLE = 1 / 3  # of 1F1B's (ZB-H1; Qi et al., 2023); of ZB-V's chunks likewise


def terms(work: Work, rates: Rates) -> dict[str, float]:
    """Seconds by name; they add up to the step."""
    forward, backward = _compute(work, rates)
    reduced = _tensor(work, rates)
    again = work.again * (forward + reduced)
    spent = {
        "compute": work.by_stage(work.counts @ (forward + backward)),
        "recompute": work.by_stage(work.counts @ again),
        "tensor_parallel": work.by_stage(work.counts @ ((2 + work.regathered) * reduced)),
    }
    if work.guests:
        spent["teachers"] = work.by_stage(_taught(work, rates))
    whole = np.sum([*spent.values()], axis=0)
    slowest, count = int(np.argmax(whole)), work.micro_batches
    found = {name: float(each[slowest]) * count for name, each in spent.items()}
    bubble = _bubble(work) * float(whole.sum() - whole[slowest])
    back = float(work.by_stage(work.counts @ (backward + again))[slowest])
    found |= {
        "bubble": bubble,
        "transfers": _transfers(work, rates, float(whole[slowest])),
        "parameters": (_gathered(work, rates, float(whole[slowest])) + _called(work, rates)) * count,
        "offload": _offloaded(work, float(whole[slowest])) * count,
        "gradients": _gradients(work, rates, back),
        "optimizer": float(work.update_s) / rates["update"],
        "other": rates["step_s"] * work.machine.device.host,
    }
    found = alone(work, rates, found, back) if work.servers else uneven(work, found)
    return {name: float(seconds) for name, seconds in found.items() if seconds}


def _bubble(work: Work) -> float:
    """What a stage waits for, in what others take for a micro-batch: all of it where too few fill a short bubble.

    Nothing where the next step fills what the one before leaves.
    """
    if work.schedule in STREAMED:
        return 0.0
    stages, chunks = work.mesh.pipeline, work.chunks
    enough = {"zero_bubble": stages, "zbv": 2 * stages - 1}.get(work.schedule, 1)
    if work.micro_batches < enough:
        return 1.0
    return (_HALVED_BUBBLE if work.schedule in HALVED else 1.0) / chunks


@dataclass(frozen=True, kw_only=True)
class Pieces:
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

    def times(self, factor: float) -> Pieces:
        """All of them longer by a factor."""
        return Pieces(**{item.name: getattr(self, item.name) * factor for item in fields(self)})


def pieces(work: Work, rates: Rates) -> Pieces:
    """The same seconds that `terms` adds up, before anything waits for anything."""
    forward, backward = _compute(work, rates)
    reduced = _tensor(work, rates)
    again = work.counts @ (work.again * (forward + reduced))
    ahead = work.counts @ (forward + reduced) + _taught(work, rates)
    back = work.counts @ (backward + (1 + work.regathered) * reduced)
    whole = float(work.by_stage(ahead + back + again).max())
    return Pieces(
        forward=ahead,
        backward=back,
        recompute=again,
        send=_sent(work, work.sent_bytes, rates) * (work.sent_bytes > 0),
        gather=_gathered(work, rates, whole) + _called(work, rates) + _offloaded(work, whole),
        reduction=_reduction(work, rates, work.gradient_bytes),
        optimizer=work.update_s / rates["update"] * work.parameters / work.parameters.max(),
        other=rates["step_s"] * work.machine.device.host,
    )


def layer_seconds(work: Work) -> Vector:
    """Forward and backward of each distinct layer with the default efficiencies, for dividing layers into stages."""
    rates = DEFAULT.efficiencies
    forward, backward = _compute(work, rates)
    reduced = _tensor(work, rates)
    found: Vector = forward + backward + 2 * reduced + work.again * (forward + reduced)
    return found


def send_seconds(work: Work, sent_bytes: Vector) -> Vector:
    """There and back over a cut, with the default efficiencies, for dividing layers into stages."""
    found: Vector = 2 * _sent(work, sent_bytes, DEFAULT.efficiencies)
    return found


def _compute(work: Work, rates: Rates) -> tuple[Vector, Vector]:
    """Forward and backward of each distinct layer."""
    device, told, weights = _asked(work, rates)
    return _longer(device, told), _longer(BACKWARD * device + work.passes * weights, LAUNCHES_BACK * told)


def _taught(work: Work, rates: Rates) -> Vector:
    """Forward of the models in the loss, for one micro-batch: in the last section."""
    found = np.zeros(len(work.counts))
    for guest in work.guests:
        device, told, _ = _asked(guest, rates)
        found[-1] += float(guest.counts @ _longer(device, told))
    return found


def _asked(of: Work | Guest, rates: Rates) -> tuple[Vector, Vector, Vector]:
    """What forward takes the device, what it takes to tell it, and one pass over the parameters."""
    weights = of.weights_s / rates["traffic"]
    product = _longer(of.flops_s / rates["matmul"], weights * (of.flops_s > 0)) + of.matmuls * rates["matmul_s"]
    device = product + (of.traffic_s + of.scores_s * rates["scores"]) / rates["traffic"]
    return device, of.launches * rates["launch_s"], weights


def _longer(one: Vector, other: Vector) -> Vector:
    found: Vector = (one**SOFT + other**SOFT) ** (1 / SOFT)
    return found


def _tensor(work: Work, rates: Rates) -> Vector:
    """All-reduces of each layer's forward; those of backward are as many."""
    if work.tensor.size == 1:
        return np.zeros_like(work.flops_s)
    seconds = _all_reduce(work, work.tensor, rates, "tensor", np.ones(1))[0]
    messages = work.reductions * _messages(work.tensor, rates)
    found: Vector = work.reduced_bytes * seconds + messages
    return found


def _all_reduce(work: Work, group: Group, rates: Rates, name: str, size: Vector) -> Vector:
    """Of so many bytes on each rank, without the time of messages."""
    inside = 2 * (group.local - 1) / group.local / (work.machine.device.link_bytes_per_s * rates[name])
    network = group.local * work.machine.network_bytes_per_s * rates["network"]
    between = 2 * (group.nodes - 1) / group.nodes / network
    found: Vector = size * (inside + between)
    return found


def _messages(group: Group, rates: Rates) -> float:
    return rates["message_s"] * (1 + np.log2(group.size)) if group.size > 1 else 0.0


def _transfers(work: Work, rates: Rates, compute_s: float) -> float:
    """Activations and their gradients from stage to stage: of each micro-batch, and of one that fills the pipeline all.

    GPipe sends one micro-batch while it computes the next; the other schedules wait for what comes back.
    """
    if work.mesh.pipeline == 1:
        return 0.0
    cuts = 2 * _sent(work, work.sent_bytes[work.sent_bytes > 0], rates)
    slowest = float(cuts.max(initial=0.0))
    each = exposed(slowest, compute_s) if work.schedule == "gpipe" else slowest
    first = slowest if work.schedule in STREAMED else float(cuts.sum()) / work.chunks
    return first + each * (work.micro_batches - 1) * work.chunks


def _sent(work: Work, sent_bytes: Vector, rates: Rates) -> Vector:
    """Messages of so many bytes to the next stage."""
    link = work.machine.network_bytes_per_s if work.remote else work.machine.device.link_bytes_per_s
    found: Vector = sent_bytes / (link * rates["send"]) + rates["send_s"]
    return found


def _gathered(work: Work, rates: Rates, compute_s: float) -> float:
    """ZeRO-3: parameters gathered for forward and for backward, gradients scattered: what compute does not hide."""
    if work.zero < 3 or work.shard.size == 1:
        return 0.0
    size = np.array([work.gradient_bytes.max()])
    spent = 1.5 * float(_all_reduce(work, work.shard, rates, "reduce", size)[0])
    return exposed(spent, compute_s)


def _called(work: Work, rates: Rates) -> float:
    """What ZeRO's collectives take whatever their size."""
    return work.gathers * rates["gather_s"] * (1.0 if work.machine.device.apart else GLOO)


def _offloaded(work: Work, compute_s: float) -> float:
    """Parameters from the host, for ZeRO-3 twice, and gradients to it: what compute does not hide."""
    return exposed(work.offloaded_bytes / PCIE_BYTES_PER_S, compute_s)


def _gradients(work: Work, rates: Rates, backward_s: float) -> float:
    """Their reduction over the data ranks, once a step, less what is hidden under the last backward."""
    if work.servers:
        return 0.0  # none: see `apart`
    spent = float(_reduction(work, rates, np.array([work.gradient_bytes.max()]))[0])
    return exposed(spent, rates["overlap"] * backward_s)


def _reduction(work: Work, rates: Rates, size: Vector) -> Vector:
    """Of gradients of so many bytes, with nothing hidden."""
    spent = np.zeros_like(size)
    if work.zero < 3:
        spent += _all_reduce(work, work.shard, rates, "reduce", size) + _messages(work.shard, rates)
    spent += _all_reduce(work, work.data, rates, "reduce", size / work.shard.size) + _messages(work.data, rates)
    return spent
