"""The engine of parameter servers: workers take steps alone, and servers hold the parameters and update them.

A server runs nothing of the model: it holds a shard of it in host memory and takes the optimizer's steps. A worker
copies the parameters, computes the mean gradient of a unit, and pushes it while backward is still under way; or takes
several local steps with an optimizer of its own, and pushes the difference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from trainwright.core.data import Columns, Feed, MetricSums, StepReport
from trainwright.core.topology import StalenessCounts, WorkUnit
from trainwright.strategies.torch.engines.server_group import ServerGroupEngine
from trainwright.strategies.torch.training.train_step import StepRunner


class ParameterServer(ServerGroupEngine):
    """The steps of a worker, and what a server does meanwhile."""

    def warm(self, feed: Feed) -> None:
        """A worker's throwaway forward and backward of full shape; a server runs nothing."""
        if not self._serving:
            super().warm(feed)

    def lease(self, first: int) -> WorkUnit | None:
        """What to compute next; None when the servers' `serve` from step `first` on is over. Raises PeerLost."""
        grant = self._client.lease(first)
        return None if grant is None else grant.unit

    def train_step(self, feed: Feed) -> StepReport:
        """A worker's next step of the unit that it leased last: pulled before the first, pushed after the last.

        Raises:
            NonFiniteLoss: nothing of the step counts.
            PeerLost: a server is gone.
            UserCodeError, JobError: the user's code raised or is wrong; nothing was pushed.
        """
        if self._runner is None:
            self.warm(feed)
        return self._guarded(lambda: self._trainer.train(self._ready, feed))

    def evaluate_step(self, feed: Feed) -> MetricSums:
        """Sums at the servers' newest parameters. Raises UserCodeError, JobError, PeerLost."""
        self._trainer.pull()
        return super().evaluate_step(feed)

    def predict_step(self, feed: Feed) -> Columns:
        """The model's outputs at the servers' newest parameters. Raises UserCodeError, JobError, PeerLost."""
        self._trainer.pull()
        return super().predict_step(feed)

    def serve(self, until: int, wish: Callable[[], bool]) -> Iterator[StepReport]:
        """A server: let the workers take the steps before `until`. Raises PeerLost, UserCodeError."""
        replica, server = self.replica, self.server
        yield from server.serve(replica.step or 0, until, wish)
        replica.step = server.step

    def staleness(self) -> StalenessCounts:
        """The first server: of what was pushed since it was asked last."""
        return self.server.staleness()

    def _warmed(self, feed: Feed) -> StepRunner:
        runner = self._trainer.runner(self._caller())
        self._throwaway(runner, feed)
        return runner
