"""Workers that step alone, or are not alike: seconds of a step, and what the same loss takes beside steps.

A step stands for as many units of work as there are workers, whoever computes them: what is slow is waited for as far
as the consistency says, so that `async` goes by the sum of the workers' rates and `sync` by the slowest of them.

What more steps the same loss takes is a model, not verified. Updates from parameters that are tau steps old converge
as quickly as fresh ones where noise decides, and 1 + tau times as slowly where curvature does (Stich and Karimireddy,
JMLR 2020: T = O(noise / eps^2 + tau / eps)); `CURVED` is the share of a run that is taken to be of the second kind. n
workers that push each by itself are (n - 1) / n steps behind on average, as n - 1 others push in between (Mitliagkas et
al., 2016). What workers drift apart in H local steps is taken to cost a share of a run for each doubling of H.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from trainwright.strategies.cost_model.step_work import HOST_BYTES_PER_S, UPDATE_BYTES, Work

Rates = Mapping[str, float]
LAST = 0.15  # of the gradients: they are sent when backward has ended, whatever was hidden before
CURVED = 0.2  # of a run: assumed
DRIFT = 0.03  # of a run, for each doubling of local steps: assumed
ADDED_BYTES = 12.0  # a parameter: a gradient added to another, both read and one written
PREEMPTED_S = 36_000.0  # of a node, between two times that it is taken back: assumed
RESTART_S = 150.0  # that all lose when ranks that step together lose one and get it back: assumed
COPIED = 2.0  # usual units' time, in which others have done a slow one's
TOLD = 1.005  # and less is nothing
_COMPUTED = ("compute", "recompute", "teachers", "other")


def uneven(work: Work, found: Mapping[str, float]) -> dict[str, float]:
    """Seconds of ranks that step together: what the quicker wait for the slowest is told apart."""
    mean = _mean_speed(work)
    waited = sum((1 - 1 / mean) * found.get(name, 0.0) for name in _COMPUTED)
    own = {name: seconds / mean if name in _COMPUTED else seconds for name, seconds in found.items()}
    return {**own, "stragglers": waited}


def alone(work: Work, rates: Rates, found: Mapping[str, float], backward_s: float) -> dict[str, float]:
    """Seconds of a step of workers that step alone, from those of the slowest without communication.

    Args:
        work: of the plan.
        rates: efficiencies.
        found: seconds by term, of a worker on the slowest device.
        backward_s: under which gradients are pushed, as they appear.
    """
    mean, rule = _mean_speed(work), work.consistency
    together = rule.bound == 0  # servers work while workers wait
    link_s, served_s, applied_s = _link(work, rates), _served(work, rates), _applied(work)
    sent_s = max(link_s, served_s) if together else link_s
    own = {name: seconds / mean if name in _COMPUTED else seconds for name, seconds in found.items()}
    if work.local_steps == 1:
        own["optimizer"] = 0.0  # the servers'
    hidden_s = rates["overlap"] * backward_s / mean if work.local_steps == 1 else 0.0
    own["gradients"] = (exposed(sent_s, hidden_s) + 2 * rates["message_s"]) / work.local_steps
    step_s = sum(own.values())
    own["stragglers"] = _waited(work, found, step_s)
    if together:
        return {**own, "servers": applied_s / work.local_steps}
    rest_s = (served_s + applied_s) / work.local_steps - step_s - own["stragglers"]
    return {**own, "servers": max(rest_s, 0.0)}


def factors(work: Work) -> dict[str, float]:
    """By what the same loss takes longer than so many steps, by name; nothing where it does not."""
    found = {
        "staleness": 1 + CURVED * _staleness(work) if work.servers else 1.0,
        "local_steps": 1 + DRIFT * math.log2(work.local_steps),
        "preemptions": 1 + _struck(work) * RESTART_S / PREEMPTED_S,
    }
    return {name: factor for name, factor in found.items() if factor >= TOLD}


def exposed(spent_s: float, hidden_s: float) -> float:
    """What of a time lies outside another: what is too long for it, and the last part."""
    if not spent_s:
        return 0.0
    return float(max(spent_s - hidden_s, 0.0) + LAST * min(spent_s, hidden_s))


def _mean_speed(work: Work) -> float:
    return sum(work.speeds) / len(work.speeds)


def _waited(work: Work, found: Mapping[str, float], step_s: float) -> float:
    """For the slowest, as far as others wait for it: a unit may take as long as bound + 1 steps.

    One that takes longer than two of a usual worker is copied by who is done (`servers.book`). Of backup workers the
    slowest are not waited for, and what they did is done again.
    """
    rule, speeds = work.consistency, work.speeds
    if rule.bound is None:
        return 0.0
    least, mean = speeds[min(rule.backup, len(speeds) - 1)], sum(speeds) / len(speeds)
    computed_s = sum(found.get(name, 0.0) for name in _COMPUTED)
    unit_s = step_s + computed_s * (min(1 / least, COPIED / mean) - 1 / mean)
    waited_s = max(unit_s / (rule.bound + 1) - step_s, 0.0)
    return waited_s + (step_s + waited_s) * rule.backup / (len(speeds) - rule.backup)


def _link(work: Work, rates: Rates) -> float:
    """What a worker pushes and pulls, through its own link."""
    return (1 + work.pushed) * float(work.gradient_bytes.max()) / _one(work, rates)


def _served(work: Work, rates: Rates) -> float:
    """What all workers push and pull, through the servers' links: a node's, which servers of one node share."""
    nodes = min(work.servers, work.machine.nodes)
    size = (1 + work.pushed) * float(work.gradient_bytes.max()) * work.mesh.data_ranks
    return size / (nodes * _one(work, rates) * work.machine.per_node)


def _one(work: Work, rates: Rates) -> float:
    """Bytes a second of a device's link to the servers."""
    machine = work.machine
    if work.mesh.data_ranks <= machine.per_node:
        return machine.device.link_bytes_per_s * rates["reduce"]
    return machine.network_bytes_per_s * rates["network"]


def _applied(work: Work) -> float:
    """What the servers' updates of one step take: one of all units added up, or each unit's own."""
    parameters, ranks = float(work.parameters.max()), work.mesh.data_ranks
    each = UPDATE_BYTES[4]
    visited = each + ADDED_BYTES * ranks if work.consistency.waits else each * ranks
    return parameters * visited / (work.servers * HOST_BYTES_PER_S)


def _staleness(work: Work) -> float:
    """Mean, in steps."""
    rule, ranks = work.consistency, work.mesh.data_ranks
    if rule.bound is None:
        return (ranks - 1) / ranks
    if not rule.bound:
        return 0.0
    slow = _mean_speed(work) - 1  # steps that others take while the slowest takes one
    return min(float(rule.bound), max(slow, (ranks - 1) / ranks))


def _struck(work: Work) -> int:
    """Nodes that may be taken back and whose loss all ranks wait for: of all of them, or of servers alone."""
    machine = work.machine
    used = min(work.servers, machine.nodes) if work.servers else -(-work.mesh.size // machine.per_node)
    return min(max(used - machine.steady, 0), machine.preemptible)
