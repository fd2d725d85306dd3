"""Servers and workers of the independent topology, as processes of the pool."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from ipaddress import ip_address
from typing import Any

from tests.support.conformance import problems
from tests.support.conformance.cases import IMPORTS, Framework
from tests.support.conformance.harness import ANSWER_S, Pool, Rank, value_of
from tests.support.conformance.problems import Problem
from trainwright.core.data import StepReport
from trainwright.core.plan import Plan
from trainwright.core.topology import Address, Generation, Group, Peer, Role

GENERATION, KEY = Generation(token=1, number=1), b"of this generation"
DEADLINE_S = 20.0
ENGINES = {
    "reference": "tests.support.reference.independent:Independent",
    "torch": "trainwright.strategies.torch.engines.parameter_server:ParameterServer",
}


@dataclass(frozen=True, kw_only=True)
class Kind:
    """An engine of the topology; of no framework, none."""

    framework: str

    @property
    def imports(self) -> tuple[str, ...]:
        """Modules that its processes need and that take time to import."""
        if self.framework not in ENGINES:
            return ()
        return (
            self.engine.partition(":")[0],
            f"tests.support.conformance.{self.framework}_case",
            *IMPORTS[self.framework],
        )

    @property
    def engine(self) -> str:
        """Import path."""
        return ENGINES[self.framework]

    @property
    def code(self) -> Framework:
        """The framework's module."""
        return importlib.import_module(f"tests.support.conformance.{self.framework}_case")  # type: ignore[return-value]


class Served:
    """Servers and workers of one generation.

    Args:
        pool: where processes come from.
        framework: of the engine.
        problem: what is trained.
        servers, workers: how many.
        spec: fields of the job to replace.
        far: as if the workers were on another machine.
        device: of the workers.
        plan: fields of the plan to replace.

    Attributes:
        first: step at which the last segment began.
    """

    def __init__(
        self,
        pool: Pool,
        framework: str,
        problem: Problem,
        servers: int,
        workers: int,
        spec: Mapping[str, Any] | None = None,
        far: bool = False,
        device: str = "cpu",
        **plan: Any,
    ) -> None:
        self._pool, self._kind, self.problem = pool, Kind(framework=framework), problem
        own = problems.plan_of(problem, self._kind.engine, workers, 1, "independent")
        self.plan: Plan = replace(own, servers=servers, **{"consistency": "sync", **plan})
        self.spec = replace(self._kind.code.spec(problem), **(spec or {}))
        ranks = pool.take(framework, servers + workers)
        roles: list[Role] = ["server"] * servers + ["worker"] * workers
        addresses = [self._reserve(one, role) for one, role in zip(ranks, roles, strict=True)]
        self._peers = tuple(
            Peer(rank=rank, address=address, role=role)
            for rank, (address, role) in enumerate(zip(addresses, roles, strict=True))
        )
        self.servers, self.workers = ranks[:servers], ranks[servers:]
        self.first = 0
        for rank, one in enumerate(self.servers):
            self._enter(one, rank)
        if far:
            self._peers = tuple(replace(peer, address=_by_another_name(peer.address)) for peer in self._peers)
        for rank, one in enumerate(self.workers, servers):
            self._enter(one, rank, device)
        for one in ranks:
            for _ in range(2):
                value_of(one.outcome())
        for one in self.servers:
            one.call("transfer", ())

    def _reserve(self, one: Rank, role: Role) -> Address:
        one.call("open", self.plan)
        address: Address = one.call("reserve", role)
        return address

    def _enter(self, one: Rank, rank: int, device: str = "cpu") -> None:
        group = Group(
            generation=GENERATION, rank=rank, peers=self._peers, key=KEY, devices=(device,), deadline_s=DEADLINE_S
        )
        one.send("form", group)
        one.send("build", self.spec, self.plan)

    def serve(self, until: int) -> None:
        """Let steps be taken."""
        self.first = self.servers[0].call("step")
        for one in self.servers:
            one.send("serve", until)

    def work(self) -> None:
        """Let the workers take them."""
        for one in self.workers:
            one.send("work", self.problem, self.plan, self.first)

    def run(self, until: int) -> list[StepReport]:
        """A segment; the first server's reports."""
        self.serve(until)
        self.work()
        return self.ended()

    def ended(self) -> list[StepReport]:
        """The segment's reports, once it has ended for all."""
        outcomes = [one.outcome(2 * ANSWER_S) for one in (*self.servers, *self.workers)]
        answers = [value_of(outcome) for outcome in outcomes]
        assert not any(answers[1 : len(self.servers)])
        return list(answers[0])

    def files(self) -> dict[str, bytes]:
        """A checkpoint of what the servers hold."""
        found: dict[str, bytes] = {}
        for one in self.servers:
            found.update(one.call("files"))
        return found

    def parameters(self) -> dict[str, Any]:
        """What the servers hold, by name."""
        return self._kind.code.parameters(self.files())

    def state(self) -> dict[str, Any]:
        """The same with all else that training changes."""
        return self._kind.code.state(self.files())

    def load(self, files: Mapping[str, bytes]) -> None:
        """The servers take a checkpoint."""
        for one in (*self.servers, *self.workers):
            one.call("load", files)

    def by_hand(self, start: Mapping[str, Any], steps: int) -> tuple[list[float], list[float], Mapping[str, Any]]:
        """Losses, norms and parameters of a loop on one device."""
        ids, data = problems.batches(self.problem, steps), problems.columns(self.problem)
        return self._kind.code.by_hand(self.problem, start, ids, data)

    def close(self, failed: bool = False) -> None:
        """Give the processes back."""
        for one in (*self.workers, *self.servers):
            if failed:
                one.kill()
            else:
                one.call("leave")
        if not failed:
            self._pool.give_back(self._kind.framework, [*self.workers, *self.servers])

    def __enter__(self) -> Served:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.close(failed=kind is not None)


def _by_another_name(address: Address) -> Address:
    """The same, by which no Unix socket is found."""
    return Address(host=str(int(ip_address(address.host))), port=address.port)
