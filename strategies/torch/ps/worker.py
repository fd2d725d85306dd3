"""A worker that steps alone: it pulls what the servers hold, computes a unit, and pushes what that came to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor

from trainwright.core.data import Feed, StepReport
from trainwright.core.plan import Plan
from trainwright.core.staleness import Consistency
from trainwright.strategies.ps.client import Clients
from trainwright.strategies.ps.lease_table import Grant
from trainwright.strategies.ps.shard_store import Shard
from trainwright.strategies.torch.ps.gradient_layout import Form
from trainwright.strategies.torch.ps.lease_step import UnitObjective, UnitRunner, compute, own
from trainwright.strategies.torch.ps.overlapped_pull import Arrivals
from trainwright.strategies.torch.ps.server_shard import persistent
from trainwright.strategies.torch.ps.transfer import Incoming, Outgoing, pieces
from trainwright.strategies.torch.training import step
from trainwright.strategies.torch.training.noise_probe import Probe
from trainwright.strategies.torch.training.objective import Caller, Objective
from trainwright.strategies.torch.training.step import Runner
from trainwright.strategies.torch.training.train_state import Replica


class Solo:
    """A worker's model, and its way to and from the servers.

    Args:
        replica: with the model on the worker's device. Its optimizer steps where steps are local alone.
        shards: what each server holds.
        plan: says how far apart workers may be, in what form gradients go, and how many steps are local.
    """

    def __init__(self, replica: Replica, shards: Sequence[Shard], plan: Plan) -> None:
        self._replica, self._shards = replica, shards
        self._joined: Clients | None = None
        self._forms = [Form(shard, plan.wire) for shard in shards]
        where = pieces(shards)
        self._incoming = Incoming(replica.model, shards, replica.device)
        consistency = Consistency.parse(plan.consistency or "sync")
        self._outgoing = Outgoing(replica=replica, where=where, forms=self._forms, leaves_out=consistency.backup > 0)
        self._arrivals = Arrivals(replica.model, where, self._incoming, replica.laps)
        self._ahead = replica.spec.compile != "inductor" and self._arrivals.sees  # of what comes, forward may run
        self._largest = None if consistency.waits else replica.spec.clip_norm
        self._local = plan.local_steps > 1
        self._buffers = persistent(replica.model)
        self._changing = [*(replica.trainable if self._local else ()), *(buffer for _, _, buffer in self._buffers)]
        self._pulled: dict[Tensor, Tensor] = {}  # those, as they were before a unit changed them
        self._sums: list[tuple[float, float]] = []  # of the unit's steps so far: losses and weights

    def join(self, clients: Clients) -> None:
        """A group's servers hold the shards from now on."""
        self._joined = clients
        self._outgoing.forget()
        clients.lay(self._shards, [form.size_bytes for form in self._forms], self._incoming.memory)

    @property
    def _clients(self) -> Clients:
        assert self._joined is not None, "join() comes first"
        return self._joined

    def pull(self, needs: int = 0) -> None:
        """The model's tensors become those of the servers: what a unit changed is undone, and what is newer copied."""
        self._undo()
        if self._clients.pull(needs):
            self._incoming.take()
        self._settle()

    def _settle(self) -> None:
        """What was pushed and not counted goes back to what waits."""
        self._outgoing.settle(self._clients.left_out, self._clients.versions)

    def _undo(self) -> None:
        for module, key, buffer in self._buffers:
            module._buffers[key] = buffer  # the user's code may have put another one there
        for tensor, pulled in self._pulled.items():
            tensor.detach().copy_(pulled)
        self._pulled = {}

    def _begin(self, grant: Grant) -> None:
        """A unit begins at what the servers hold."""
        self.pull(grant.needs)
        for tensor in self._changing:
            self._remember(tensor)

    def _remember(self, tensor: Tensor) -> None:
        """What was pulled of a tensor that a unit changes."""
        self._pulled[tensor] = tensor.detach().clone()

    @contextmanager
    def _begun(self, grant: Grant) -> Iterator[None]:
        """A unit of one step, which begins while what is pulled of other machines is on its way."""
        if self._clients.shares or not self._ahead:
            self._begin(grant)
            self._replica.laps.wait()
            yield
            return
        self._undo()
        self._clients.pull(grant.needs, wait=False)
        self._settle()
        self._replica.laps.wait()
        changing = set(self._changing)
        self._arrivals.begin(self._clients, lambda tensor: self._remember(tensor) if tensor in changing else None)
        with self._arrivals.waiting():
            yield

    def runner(self, caller: Caller) -> Runner:
        """Runs micro-batches of a unit."""
        if self._local:
            objective = Objective(self._replica.model, caller, world=1)
            return Runner(objective=objective, reduced=objective, probe=Probe(objective, ()))
        unit = UnitObjective(self._replica.model, caller)
        outgoing = self._outgoing if self._largest is None else None
        return UnitRunner(objective=unit, reduced=unit, probe=Probe(unit, ()), unit=unit, outgoing=outgoing)

    def train(self, runner: Runner, feed: Feed) -> StepReport:
        """One step of the unit that was leased last.

        Raises:
            NonFiniteLoss: nothing of the step counts.
            PeerLost, UserCodeError, JobError: nothing was pushed.
        """
        grant = self._clients.grant
        assert grant is not None and feed.step in range(grant.unit.step, grant.unit.step + grant.unit.steps)
        if isinstance(runner, UnitRunner):
            return self._whole(runner, feed, grant)
        return self._one_of_several(runner, feed, grant)

    def _whole(self, runner: UnitRunner, feed: Feed, grant: Grant) -> StepReport:
        """A unit of one step, which servers take."""
        replica, outgoing, clients = self._replica, self._outgoing, self._clients
        replica.laps.begin(feed.step)
        with replica.attempt() as attempt:
            with self._begun(grant):
                outgoing.begin(clients)
                done = compute(replica, runner, outgoing, feed, largest=self._largest)
            outgoing.buffers(self._shards)
            by = clients.push(weight=done.weight, sums=[(done.loss, done.weight)], norm=done.norm or 0.0)
            outgoing.counted(by, grant)
            attempt.applied = done.weight > 0
        replica.laps.wait()
        replica.laps.optimizer()
        return StepReport(
            step=feed.step + 1,
            loss=done.loss / done.weight if done.weight else 0.0,
            weight=done.weight,
            learning_rate=replica.set_rates(feed.step, runner.where),
            gradient_norm=done.norm if self._largest is not None else None,
            overflowed=done.overflowed,
            own_s=replica.laps.own_s,
            phases=replica.laps.ended(),
        )

    def _one_of_several(self, runner: Runner, feed: Feed, grant: Grant) -> StepReport:
        """A step that this worker takes by itself; after the last what all of them came to is pushed."""
        unit, trainable = grant.unit, self._replica.trainable
        if feed.step == unit.step:
            self._begin(grant)
            self._sums = []
        report = step.train(self._replica, runner, own(feed))
        self._sums.append((report.loss * report.weight, report.weight))
        if feed.step == unit.step + unit.steps - 1:
            self._outgoing.begin(self._clients)
            for parameter in trainable:
                self._outgoing.put(parameter, parameter.detach() - self._pulled[parameter])
            self._outgoing.rest(1.0)
            self._outgoing.buffers(self._shards)
            by = self._clients.push(weight=sum(weight for _, weight in self._sums), sums=self._sums)
            self._outgoing.counted(by, grant)
        return report
