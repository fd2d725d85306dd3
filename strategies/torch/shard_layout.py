"""What a rank holds of a divided model: its place in the layout, and a slice of each tensor."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, order=True)
class ModelPart:
    """A rank's place among the ranks that hold a model together; replicas have the same one."""

    # stage, stages: which of so many stages of a pipeline
    stage: int = 0
    stages: int = 1
    # shard, shards: which of so many parts of each parameter, by FSDP2
    shard: int = 0
    shards: int = 1
    # tensor, tensors: which of so many parts of each layer that is divided, by tensor parallelism
    tensor: int = 0
    tensors: int = 1
    # server, servers: which of so many parameter servers, each of which holds some tensors, and rows of others
    server: int = 0
    servers: int = 1

    @property
    def _places(self) -> list[tuple[str, int, int]]:
        """Kind, place and count of each dimension along which the model is divided."""
        places = [
            ("stage", self.stage, self.stages),
            ("shard", self.shard, self.shards),
            ("tensor", self.tensor, self.tensors),
            ("server", self.server, self.servers),
        ]
        return [each for each in places if each[2] > 1]

    @property
    def name(self) -> str:
        """The name in state tags: `stage-0`, `shard-1`, `stage-0.tensor-1`; `state` for a whole model."""
        return ".".join(f"{kind}-{place}" for kind, place, _ in self._places) or "state"

    @property
    def layout(self) -> str:
        """The name of the layout in state tags: `shard-4`, or `stage-2.tensor-2`."""
        return ".".join(f"{kind}-{count}" for kind, _, count in self._places) or "replicated"

    @property
    def every(self) -> tuple[ModelPart, ...]:
        """All parts, in order."""
        counts = {"stages": self.stages, "shards": self.shards, "tensors": self.tensors, "servers": self.servers}
        places = product(*(range(count) for count in counts.values()))
        kinds = [name.removesuffix("s") for name in counts]
        return tuple(ModelPart(**dict(zip(kinds, place, strict=True)), **counts) for place in places)

    @property
    def total(self) -> int:
        """How many parts there are."""
        return self.stages * self.shards * self.tensors * self.servers

    @property
    def suffix(self) -> str:
        """The suffix of checkpoint files: `.shard-0-of-4`; empty for a whole model."""
        return "".join(f".{kind}-{place}-of-{count}" for kind, place, count in self._places)

    @classmethod
    def read(cls, suffix: str) -> ModelPart:
        """Return the part that a suffix names."""
        fields: dict[str, int] = {}
        for told in suffix.split(".")[1:]:
            kind, place, _, count = told.split("-")
            fields |= {kind: int(place), f"{kind}s": int(count)}
        return cls(**fields)


WHOLE_MODEL = ModelPart()


@dataclass(frozen=True, kw_only=True)
class ShardSlice:
    """A part of a tensor: a range of indices in each dimension."""

    shape: tuple[int, ...]  # of the whole tensor
    # start, stop: of each dimension
    start: tuple[int, ...]
    stop: tuple[int, ...]

    @classmethod
    def all_of(cls, shape: Sequence[int]) -> ShardSlice:
        """Return the slice that is all of a tensor."""
        return cls(shape=tuple(shape), start=(0,) * len(shape), stop=tuple(shape))

    @classmethod
    def share(cls, shape: Sequence[int], dimension: int, index: int, of: int) -> ShardSlice:
        """Return one of equal parts along a dimension. The last ones may be shorter, or empty."""
        size, start, stop = shape[dimension], [0] * len(shape), [*shape]
        each = -(-size // of)
        start[dimension], stop[dimension] = min(index * each, size), min((index + 1) * each, size)
        return cls(shape=tuple(shape), start=tuple(start), stop=tuple(stop))

    @property
    def size(self) -> tuple[int, ...]:
        """The shape of the slice."""
        return tuple(stop - start for start, stop in zip(self.start, self.stop, strict=True))

    @property
    def count(self) -> int:
        """The number of elements of the slice."""
        return math.prod(self.size)

    def both(self, other: ShardSlice) -> ShardSlice:
        """Return the intersection with another slice of the tensor; its `count` is 0 where it is empty."""
        start = tuple(map(max, self.start, other.start))
        stop = tuple(max(low, high) for low, high in zip(start, map(min, self.stop, other.stop), strict=True))
        return ShardSlice(shape=self.shape, start=start, stop=stop)

    def inside(self, outer: ShardSlice) -> tuple[slice, ...]:
        """Return the indices of this slice in a tensor that holds `outer`."""
        edges = zip(self.start, self.stop, outer.start, strict=True)
        return tuple(slice(start - origin, stop - origin) for start, stop, origin in edges)

    def within(self, outer: ShardSlice) -> ShardSlice:
        """Return this slice of the larger tensor whose slice `outer` is what this one calls the whole."""
        start = tuple(low + origin for low, origin in zip(self.start, outer.start, strict=True))
        stop = tuple(high + origin for high, origin in zip(self.stop, outer.start, strict=True))
        return ShardSlice(shape=outer.shape, start=start, stop=stop)


def hook_problem(name: str, parameter: Tensor) -> str:
    """Return why a parameter with hooks cannot be divided; empty where it has none."""
    if not (parameter._backward_hooks or parameter._post_accumulate_grad_hooks):
        return ""
    return (
        f"parameter {name!r} has a hook, which would be given a part of its gradient: do it in the optimizer, or use "
        'strategy="data_parallel"'
    )


def is_dtensor(tensor: Tensor) -> bool:
    """Return whether a tensor is a DTensor, of which this rank holds a part."""
    return hasattr(tensor, "to_local")  # a DTensor, without importing what one-device jobs never need


def fsdp_slice(tensor: Tensor, part: ModelPart) -> ShardSlice | None:
    """Return the slice that a rank holds of a tensor that FSDP2 divides by its first dimension; None for others.

    The tensor's own mesh is not asked: torch remembers what an operation made by meshes that are equal, so that it may
    be one of a group that is gone, with the place that this process had there.
    """
    if not is_dtensor(tensor):
        return None
    box = ShardSlice.share(tensor.shape, 0, part.shard, part.shards)
    assert box.size == tuple(to_local(tensor).shape), "FSDP2 gives each rank as many rows"
    return box


def to_local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor, in the tensor's own memory; all of one that is not divided."""
    if not is_dtensor(tensor):
        return tensor
    with torch.no_grad():
        held: Tensor = tensor.to_local()  # type: ignore[attr-defined]
    return held.detach()
