"""Where a pipeline is cut: the slowest stage as quick as can be, and none over its memory."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from trainwright.core.model_profile import ModelProfile
from trainwright.core.plan import Plan
from trainwright.strategies.cost_model.machine_model import MachineModel, Vector, next_stage_is_remote
from trainwright.strategies.cost_model.memory_estimate import LayerMemory, layer_memory
from trainwright.strategies.cost_model.stage_partition import MemoryLimit, partition_in_memory
from trainwright.strategies.cost_model.step_time import layer_seconds, send_seconds
from trainwright.strategies.cost_model.step_work import (
    NUMBER_BYTES,
    Indices,
    compute_step_work,
    layer_vectors,
    section_counts,
)

_Sizes = tuple[int, ...]
_FORBIDDEN_CUT_S = 1e6  # over a cut that must not be


def stage_sizes(
    profile: ModelProfile, machine: MachineModel, plan: Plan, *, batch_size: int, precision: str, room_bytes: float
) -> _Sizes:
    """Layers of each stage of a plan, or of each of its chunks.

    A micro-batch's time on the slowest stage, with what is computed again, and its way over the slowest cut are as
    little as can be together. Where that does not fit `room_bytes`, the slowest stage is as quick as can be among the
    divisions that do, by cuts that are no slower if that is possible. Where none does it is the quickest of all:
    `stage_memory` says by how much it does not fit, and where. Chunks are always cut for time: a stage's do not lie
    beside each other. Each stage has a layer that is trained, where there are as many.

    Args:
        profile, batch_size, precision: as for `estimate`.
        machine: that the plan runs on.
        plan: whose own `stages` are not looked at.
        room_bytes: of each device.

    Raises:
        ValueError: there are fewer layers than stages or chunks.
        PlanError: the plan cannot be.
    """
    stages, (_, rows) = plan.sections, plan.micro_batches(batch_size)
    if plan.mesh.pipeline == 1:
        return (len(profile.layers),)
    remote = next_stage_is_remote(machine, plan.mesh)
    step = _MicroBatchStep(
        tensor=plan.mesh.tensor, rows=rows, recompute=plan.recompute, precision=precision, remote=remote
    )
    quickest, limit = _quickest(profile, machine, step, stages)
    if plan.chunks > 1:
        return quickest
    layers = layer_vectors(profile)
    memory = layer_memory(profile, plan, batch_size=batch_size, precision=precision)
    room = _LayerMemoryLimit(memory=memory, order=layers.order, room_bytes=room_bytes)
    if not room.may_do(stages) or memory.of_stages(section_counts(profile, quickest), "", stages).max() <= room_bytes:
        return quickest
    layered = _times(profile, machine, step)
    for most in (limit, float(layered.cut_s.max())):
        found = _partition_below(layered, stages, most, room)
        if found is not None:
            return found[0]
    return quickest


def section_entries(profile: ModelProfile, sizes: _Sizes) -> tuple[str, ...]:
    """Names of the layers with which a pipeline's sections after the first begin, given the sizes of all."""
    return tuple(profile.layers[first].name for first in accumulate(sizes[:-1]))


def cut_tensor_layer(profile: ModelProfile, plan: Plan) -> str:
    """The layer behind a cut of which tensor parallelism divides what it is given; empty where there is none."""
    names = [layer.name for layer in profile.layers]
    cut = [names.index(name) for name in plan.cuts]
    if plan.mesh.tensor == 1:
        return ""
    return next((names[place] for place in cut if profile.layers[place - 1].leads), "")


@dataclass(frozen=True, kw_only=True)
class _MicroBatchStep:
    """What the time of a micro-batch depends on, beside the model and the machine."""

    tensor: int
    rows: int
    recompute: str
    precision: str
    remote: bool


@dataclass(frozen=True, kw_only=True, eq=False)
class _LayerMemoryLimit:
    """What memory allows, layer by layer."""

    memory: LayerMemory
    order: Indices
    room_bytes: float

    def may_do(self, stages: int) -> bool:
        """Whether an average stage fits: most plans that are too large are told by this."""
        least = self.memory.states + self.memory.flight[-1] * self.memory.kept
        return bool(least[self.order].sum() <= stages * self.room_bytes)

    def of(self, begins: Indices) -> MemoryLimit:
        """For runs of layers, given where each begins."""
        return MemoryLimit(
            fixed_bytes=np.add.reduceat(self.memory.states[self.order], begins).tolist(),
            kept_bytes=np.add.reduceat(self.memory.kept[self.order], begins).tolist(),
            working_bytes=np.maximum.reduceat(self.memory.working[self.order], begins).tolist(),
            in_flight=self.memory.flight.tolist(),
            room_bytes=self.room_bytes,
        )


@lru_cache(maxsize=4096)
def _quickest(profile: ModelProfile, machine: MachineModel, step: _MicroBatchStep, stages: int) -> tuple[_Sizes, float]:
    """Whatever memory says: the least sum of the slowest stage and the slowest cut, and how long a cut may take for it.

    Cuts that are slower than one after the other are allowed, until even the quickest stages could not make up for it.
    """
    layered = _times(profile, machine, step)
    *limits, widest = np.unique(layered.cut_s[:-1]).tolist()
    floor = _partition_below(layered, stages, widest, None)
    assert floor is not None  # only memory can forbid every division
    best, most, least = floor[0], widest, floor[1] + widest
    for limit in limits:
        if limit + floor[1] >= least:
            break
        found = _partition_below(layered, stages, limit, None)
        if found is not None and found[1] + limit < least:
            best, most, least = found[0], limit, found[1] + limit
    return best, most


@dataclass(frozen=True, kw_only=True, eq=False)
class _LayerTimes:
    """Of each layer: seconds of a micro-batch in it and over a cut behind it, and whether it is trained."""

    seconds: Vector
    cut_s: Vector
    trained: npt.NDArray[np.bool_]


@lru_cache(maxsize=1024)
def _times(profile: ModelProfile, machine: MachineModel, step: _MicroBatchStep) -> _LayerTimes:
    """Seconds of a micro-batch, layer by layer."""
    alone = replace(Plan.parse(f"tp={step.tensor}"), micro_batch=step.rows, recompute=step.recompute)
    work = replace(
        compute_step_work(profile, machine, alone, batch_size=step.rows, precision=step.precision), remote=step.remote
    )
    layers = layer_vectors(profile)
    # Dear enough to be avoided wherever there is another cut; where there is none, the plan is refused.
    forbidden = np.array([step.tensor > 1 and layer.leads for layer in profile.layers]) * _FORBIDDEN_CUT_S
    sent = step.rows * NUMBER_BYTES.get(step.precision, 4) * layers.over_cuts() / step.tensor
    return _LayerTimes(
        seconds=layer_seconds(work)[layers.order],
        cut_s=send_seconds(work, sent)[layers.order] + forbidden,
        trained=np.array([layer.trained for layer in profile.layers]),
    )


def _partition_below(
    layered: _LayerTimes, stages: int, limit: float, room: _LayerMemoryLimit | None
) -> tuple[_Sizes, float] | None:
    """The best division of which no cut takes longer than a limit, and its slowest stage; None where there is none.

    A stage without a trained layer has nothing for an optimizer: where one would come of it, the layers between two
    places where a cut may be are joined until each run has one, if there are as many trained layers as stages.
    """
    begins = np.concatenate(([0], np.flatnonzero(layered.cut_s[:-1] <= limit) + 1))
    if len(begins) < stages:
        return None
    found = _partition_runs(layered, begins, stages, room)
    if found is None or layered.trained.sum() < stages:
        return found
    if np.logical_or.reduceat(layered.trained, np.cumsum((0, *found[0][:-1]))).all():
        return found
    joined = _trained_runs(layered.trained, begins)
    return _partition_runs(layered, joined, stages, room) if len(joined) >= stages else None


def _trained_runs(trained: npt.NDArray[np.bool_], begins: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Where runs of layers begin that have a trained one each."""
    kept = [0]
    for begin in begins[1:].tolist():
        if trained[kept[-1] : begin].any() and trained[begin:].any():
            kept.append(begin)
    return np.array(kept, dtype=np.int64)


def _partition_runs(
    layered: _LayerTimes, begins: npt.NDArray[np.int64], stages: int, room: _LayerMemoryLimit | None
) -> tuple[_Sizes, float] | None:
    """The best division into stages of whole runs of layers, given where each begins."""
    seconds = layered.seconds
    costs = np.add.reduceat(seconds, begins)
    sizes = partition_in_memory(costs.tolist(), stages, room.of(begins) if room else None)
    if sizes is None:
        return None
    firsts = np.cumsum((0, *sizes[:-1]))
    found = np.diff(np.append(begins[firsts], len(seconds)))
    return tuple(found.tolist()), float(np.add.reduceat(costs, firsts).max())
