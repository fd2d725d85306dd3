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
        """Run a worker's throwaway forward and backward of full shape; a server runs nothing."""
        if not self._serving:
            super().warm(feed)

    def lease(self, first: int) -> WorkUnit | None:
        """Return the next unit to compute; None once `serve` from step `first` has ended. Raises PeerLost."""
        grant = self._client.lease(first)
        return None if grant is None else grant.unit

    def train_step(self, feed: Feed) -> StepReport:
        """Run a worker's next step of its leased unit: it pulls before the first, and pushes after the last.

        Raises:
            NonFiniteLoss: nothing of the step counts.
            PeerLost: a server is gone.
            UserCodeError, JobError: the user's code raised or is wrong; nothing was pushed.
        """
        if self._runner is None:
            self.warm(feed)
        return self._guarded(lambda: self._trainer.train(self._ready, feed))

    def evaluate_step(self, feed: Feed) -> MetricSums:
        """Return sums at the servers' newest parameters. Raises UserCodeError, JobError, PeerLost."""
        self._trainer.pull()
        return super().evaluate_step(feed)

    def predict_step(self, feed: Feed) -> Columns:
        """Return the model's outputs at the servers' newest parameters. Raises UserCodeError, JobError, PeerLost."""
        self._trainer.pull()
        return super().predict_step(feed)

    def serve(self, until: int, wish: Callable[[], bool]) -> Iterator[StepReport]:
        """Let the workers take the steps before `until`; a server calls it. Raises PeerLost, UserCodeError."""
        replica, server = self.replica, self.server
        yield from server.serve(replica.step or 0, until, wish)
        replica.step = server.step

    def staleness(self) -> StalenessCounts:
        """Return the staleness of the pushes since the last call; the lead server calls it."""
        return self.server.staleness()

    def _warmed(self, feed: Feed) -> StepRunner:
        runner = self._trainer.runner(self._caller())
        self._throwaway(runner, feed)
        return runner
