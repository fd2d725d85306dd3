"""Training, evaluation and prediction steps of a replica: what all torch engines share but the process group."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace

from trainwright.core import random_state
from trainwright.core.data import Columns, Feed, MetricSums, StepReport
from trainwright.strategies.torch.engines.replica_engine import ReplicaEngine
from trainwright.strategies.torch.training import evaluation, lazy_dynamo, train_step
from trainwright.strategies.torch.training.batch_losses import GroupFactory
from trainwright.strategies.torch.training.batch_tensors import copy_batch
from trainwright.strategies.torch.training.objective import JobFunctions, Objective
from trainwright.strategies.torch.training.train_step import GradientNoiseProbe, StepRunner

lazy_dynamo.postpone()


class TorchEngine(ReplicaEngine):
    """A replica that takes steps by itself."""

    def warm(self, feed: Feed) -> None:
        """Run a throwaway forward and backward of full shape; parameters, buffers and random states are kept.

        Raises:
            JobError, UserCodeError, PeerLost: as `train_step`.
        """
        self._runner = self._guarded(lambda: self._warmed(feed))

    def train_step(self, feed: Feed) -> StepReport:
        """Run this rank's part of one global step.

        Raises:
            NonFiniteLoss: on every rank, before anything is applied.
            PeerLost: another rank went away.
            UserCodeError, JobError: the user's code raised or is wrong.
        """
        if self._runner is None:
            self.warm(feed)
        return self._guarded(lambda: train_step.train(self.replica, self._ready, feed))

    def evaluate_step(self, feed: Feed) -> MetricSums:
        """Return local sums of `loss` and the metrics. Raises UserCodeError, JobError."""
        with self._evaluating(feed) as through:
            return self._guarded(lambda: evaluation.evaluate(self.replica.model, self._caller(), feed, through))

    def predict_step(self, feed: Feed) -> Columns:
        """Return the model's outputs for the feed's rows. Raises UserCodeError, JobError."""
        with self._evaluating(feed) as through:
            return self._guarded(lambda: evaluation.predict(self.replica.model, self._caller(), feed, through))

    @contextmanager
    def _evaluating(self, feed: Feed) -> Iterator[evaluation.OutputsOf | None]:
        """Give what computes outputs in place of a call of the model; None for the call."""
        yield None

    @property
    def _ready(self) -> StepRunner:
        assert self._runner is not None, "warm() comes before a step"
        return self._runner

    def _caller(self) -> JobFunctions:
        replica = self.replica
        return JobFunctions(
            spec=replica.spec, device=replica.device, autocast=replica.autocast, where=self._where,
            selective_recompute=replica.selective_recompute, group=self._batch_group,
        )  # fmt: skip

    @property
    def _batch_group(self) -> GroupFactory | None:
        """A function that makes the process group of a global batch's ranks, called by all; None without one."""
        return None

    def _warmed(self, feed: Feed) -> StepRunner:
        """Return a runner that has run once."""
        runner = self._alone(world=1)
        self._throwaway(runner, feed)
        return runner

    def _alone(self, world: int) -> StepRunner:
        """Return a runner that reduces nothing."""
        objective = Objective(self.replica.model, self._caller(), world=world)
        return StepRunner(
            objective=objective, reduced=objective, probe=GradientNoiseProbe(objective, self.replica.trainable)
        )

    def _throwaway(self, runner: StepRunner, feed: Feed) -> bool:
        """Run a copy of the first micro-batch with weight 0; says whether every parameter got a gradient."""
        replica = self.replica
        _, share = train_step.micro_batches_of(feed, zero_weight=True)[0]
        share = replace(share, batch=copy_batch(share.batch), wish=False)
        with replica.attempt(), random_state.preserve_generators(self._device), runner.objective.checking():
            replica.reseed(0)
            with replica.finding_last() if runner.measures_own_time else nullcontext():
                train_step.run_micro_batch(runner, share)
            replica.uncut = share.layout.whole
            every_used = all(parameter.grad is not None for parameter in replica.trainable)
        runner.objective.begin()
        return every_used
