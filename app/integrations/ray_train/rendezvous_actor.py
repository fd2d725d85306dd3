"""Where the ranks of Ray Train meet: an actor beside them that takes who sits where, and passes on what rank 0 says."""

from __future__ import annotations

import asyncio
import importlib
import uuid
from typing import Any

import cloudpickle
import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from trainwright.core.errors import ResourceError, WorkerLost
from trainwright.integrations.ray_train.worker_mapping import Seat
from trainwright.runtime.takeover import NAMESPACE

TAKEN_S = 10.0  # for the others to hear the last word


class DeskProcess:
    """Keeps what rank 0 says, in order, for each of the others to take.

    Args:
        size: how many ranks there are.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._seats: dict[int, Seat] = {}
        self._said: list[bytes] = []
        self._taken: dict[int, int] = {}  # how much of it, by rank
        self._news = asyncio.Condition()

    async def sit(self, seat: Seat) -> None:
        """A rank is there."""
        async with self._news:
            self._seats[seat.rank] = seat
            self._news.notify_all()

    async def seats(self) -> list[Seat]:
        """All of them, once they are there."""
        async with self._news:
            await self._news.wait_for(lambda: len(self._seats) == self._size)
            return list(self._seats.values())

    async def say(self, word: bytes) -> None:
        """Rank 0's next word."""
        async with self._news:
            self._said.append(word)
            self._news.notify_all()

    async def take(self, rank: int, number: int) -> bytes:
        """The word of that number, once it is said."""
        async with self._news:
            await self._news.wait_for(lambda: len(self._said) > number)
            self._taken[rank] = number + 1
            self._news.notify_all()
            return self._said[number]

    async def taken(self) -> None:
        """Returns when all others have heard all."""
        async with self._news:
            await self._news.wait_for(
                lambda: all(self._taken.get(rank, 0) >= len(self._said) for rank in range(1, self._size))
            )


DESK: Any = ray.remote(num_cpus=0, max_restarts=0)(DeskProcess)
"""The actor class. It ends with rank 0's process, and with Ray Train's placement group."""


class Desk:
    """One rank's way to the desk."""

    def __init__(self, actor: Any, rank: int) -> None:
        self._actor, self._rank, self._heard = actor, rank, 0

    @classmethod
    def meet(cls, group: PlacementGroup) -> Desk:
        """Every rank of Ray Train calls it, as often as the others.

        Raises:
            ResourceError: it is Ray Train's first version, whose ranks cannot meet.
        """
        context: Any = importlib.import_module("ray.train").get_context()
        try:
            collective: Any = importlib.import_module("ray.train.collective")
        except ImportError as error:
            raise ResourceError(
                "trainwright needs the second version of Ray Train",
                where="RAY_TRAIN_V2_ENABLED=0",
                remedy="unset RAY_TRAIN_V2_ENABLED: Ray 2.60 uses that version by default",
            ) from error
        rank, actor, name = context.get_world_rank(), None, f"trainwright-desk/{uuid.uuid4().hex[:12]}"
        if rank == 0:
            size = context.get_world_size()
            options = {"name": name, "namespace": NAMESPACE, "max_concurrency": 2 * size + 8}
            where = PlacementGroupSchedulingStrategy(group)
            actor = DESK.options(scheduling_strategy=where, **options).remote(size)
        name = collective.broadcast_from_rank_zero(name)
        return cls(actor or ray.get_actor(name, namespace=NAMESPACE), rank)

    def sit(self, seat: Seat) -> None:
        """This rank is there."""
        self._ask(self._actor.sit.remote(seat))

    def seats(self) -> list[Seat]:
        """All ranks, once they are there."""
        found: list[Seat] = self._ask(self._actor.seats.remote())
        return found

    def say(self, word: Any) -> None:
        """Rank 0 tells the others; whatever can be pickled."""
        self._ask(self._actor.say.remote(cloudpickle.dumps(word)))

    def say_last(self, word: Any) -> None:
        """The same, and wait for them to hear it: the desk ends with this object."""
        self.say(word)
        ray.wait([self._actor.taken.remote()], timeout=TAKEN_S)

    def take(self) -> Any:
        """Rank 0's next word, whenever it comes."""
        word = self._ask(self._actor.take.remote(self._rank, self._heard))
        self._heard += 1
        return cloudpickle.loads(word)

    def _ask(self, ref: Any) -> Any:
        try:
            return ray.get(ref)
        except RayError as error:
            raise WorkerLost(
                "rank 0 of Ray Train, which drives the run, has ended",
                where=f"rank {self._rank}",
                remedy="FailureConfig(max_failures=...) has Ray Train start again, and the run goes on",
            ) from error
