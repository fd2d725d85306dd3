"""A step of a pipeline's rank: its stage, then the sums over replicas, shards and the stages that share parameters."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, distributed, nn

from trainwright.core import random_state
from trainwright.core.data import Feed
from trainwright.strategies.torch.distributed.fsdp_wrap import StageShards
from trainwright.strategies.torch.distributed.mesh_groups import MeshGroups, MeshRunner
from trainwright.strategies.torch.pipeline.stage_executor import StageExecutor
from trainwright.strategies.torch.shard_layout import to_local
from trainwright.strategies.torch.training.objective import MicroBatchShare
from trainwright.strategies.torch.training.train_state import TorchReplica
from trainwright.strategies.torch.training.train_step import (
    GradientNoiseProbe,
    micro_batches_of,
    throwaway_micro_batches,
)

_SharedParameter = tuple[nn.Parameter, distributed.ProcessGroup, bool]


@dataclass(frozen=True, kw_only=True)
class StageRunner(MeshRunner):
    """Runs micro-batches through all stages, and reduces gradients and sums.

    Attributes:
        pipe: this rank's stage.
        shared: parameters that other stages use too, with the ranks of this pipeline that do, and whether this one is
            the first of them.
        shards: of the stage's parameters, where ranks divide them.
    """

    pipe: StageExecutor
    shared: tuple[_SharedParameter, ...]
    shards: StageShards | None = None

    @classmethod
    def of(cls, pipe: StageExecutor, place: MeshGroups, shards: StageShards | None) -> StageRunner:
        """Return the runner of a stage; every rank of the world calls it, since it makes groups."""
        objective = pipe.objective
        return cls(
            objective=objective,
            reduced=objective,
            probe=GradientNoiseProbe(objective, ()),  # no rank sees the gradient of a whole micro-batch
            pipe=pipe,
            shared=_shared_parameters(pipe, place),
            place=place,
            others=place.data_groups,
            shards=shards,
        )

    def rehearse(self, feed: Feed) -> None:
        """Run a step of weight 0 that leaves nothing behind."""
        given = [*throwaway_micro_batches(feed)]
        replica = self.pipe.replica
        with replica.attempt(), random_state.preserve_generators(replica.device), self.objective.checking():
            if self.objective.caller.autocast:
                with nullcontext() if self.shards is None else self.shards.gathered():
                    self.pipe.rehearse(given[0][1])
                if self.shards is not None:
                    self.shards.reshard()
            self.run(given, feed)
        self.objective.begin()

    def accumulate(self, replica: TorchReplica, feed: Feed, *, sampled: bool) -> None:
        """Run forward and backward of every micro-batch, in the order of the schedule."""
        following = feed.following if replica.versions is not None else None
        assert following is None or following.step == feed.step + 1, "steps follow each other"
        self.run(micro_batches_of(feed), feed, micro_batches_of(following) if following else ())

    def run(
        self,
        given: Sequence[tuple[int, MicroBatchShare]],
        feed: Feed,
        following: Sequence[tuple[int, MicroBatchShare]] = (),
    ) -> None:
        """Run the given micro-batches, and the first forwards of the next step's."""
        self.objective.begin()
        self.pending_sums.clear()
        with nullcontext() if self.shards is None else self.shards.gathered():
            self.pipe.step(given, feed.step, partial(self._tell, feed), following)

    def _tell(self, feed: Feed) -> None:
        """Start the sums over all ranks, without waiting for the last backwards."""
        if not self.pipe.last:
            self.objective.add_stop_request(feed.wish)
        self.start_sums()

    def reduce(self, replica: TorchReplica) -> None:
        """Make each gradient that of the global batch."""
        if self.shards is None:
            super().reduce(replica)
        else:
            self.shards.reduce(replica, self.others)
        for parameter, group, _ in self.shared:  # after the replicas, so that all copies come to the same bits
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            distributed.all_reduce(to_local(parameter.grad), group=group)

    def counted_elsewhere(self) -> frozenset[Tensor]:
        """Return the parameters whose gradients another stage adds to the norm."""
        return frozenset(parameter for parameter, _, first in self.shared if not first)


def _shared_parameters(pipe: StageExecutor, place: MeshGroups) -> tuple[_SharedParameter, ...]:
    """Return this stage's parameters that other stages use too. Every rank makes every group."""
    names = {name: parameter for parameter, name in pipe.replica.names.items()}
    columns = pipe.messages.links.columns
    found = []
    for name, sections in sorted(pipe.cut.shared.items()):
        stages = sorted({pipe.messages.stage_of(section) for section in sections})
        ranks = ([column[stage] for stage in stages] for column in columns)
        groups = [distributed.new_group(each, timeout=place.deadline) for each in ranks]
        if len(stages) > 1 and name in names:
            found.append((names[name], groups[place.rank % len(columns)], pipe.stage == stages[0]))
    return tuple(found)
