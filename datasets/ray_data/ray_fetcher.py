"""Delivery through Ray Data: the driver starts the delivery actor, and consumers fetch shares from it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import ray
from ray.exceptions import (
    ActorDiedError,
    ActorUnavailableError,
    GetTimeoutError,
    ObjectLostError,
    RayActorError,
    RayError,
)

from trainwright.core.errors import DataError, HangError
from trainwright.core.pickling import dumps
from trainwright.datasets.data_source import Arrays, Index
from trainwright.datasets.dataset import Dataset
from trainwright.datasets.loading.batch_loader import make_schedule
from trainwright.datasets.sample_order import StepSchedule

if TYPE_CHECKING:
    from trainwright.datasets.ray_data.delivery_actor import StageProgress
    from trainwright.datasets.ray_data.delivery_pipeline import PipelineSpec

_Result = TypeVar("_Result")

_CHUNK_ROWS = 1024  # rows of a chunk of steps
DEADLINE_S = 300.0  # for one share
WAITING = 100_000  # calls that may wait in an actor at a time: those of all ranks and of all readers
_RETRY_S = 1.0
_DEAD_ACTOR_S = 5.0  # for an actor that Ray does not start again, as when its driver is dead
SLACK_S = 30.0  # a consumer waits this much longer than the delivery actor, which knows more about the reason
_CLOSE_S = 10.0
_DEADLINE_SHARE = 0.5  # an actor may take for a piece, so that there is time for another one to open and compute it


def fetch_from_actor(attempt: Callable[[bool], _Result], deadline_s: float, what: str) -> _Result:
    """Return the result of `attempt`, a request to the delivery actor; retry if the actor or an object is lost.

    Args:
        attempt: called with whether objects of an earlier answer were lost.
        deadline_s: for an actor that is not available.
        what: the requested data, for errors.

    Raises:
        DataError: the actor cannot be started.
        HangError: there is no answer.
    """
    end_s, lost = time.monotonic() + deadline_s, False
    while True:
        try:
            return attempt(lost)
        except ObjectLostError:
            lost = True
        except GetTimeoutError as error:
            raise HangError(
                f"the delivery actor gave no answer within {deadline_s + SLACK_S:g} s",
                where=what,
                remedy="run the same command again",
            ) from error
        except (ActorUnavailableError, RayActorError) as error:
            if getattr(error, "actor_init_failed", False):
                raise DataError(
                    "the data set cannot be opened where Ray Data runs",
                    remedy="install what its functions import on every node",
                    detail=str(error),
                ) from error
            if isinstance(error, ActorDiedError):
                end_s = min(end_s, time.monotonic() + _DEAD_ACTOR_S)
            if time.monotonic() > end_s:
                raise HangError(
                    f"the delivery actor is gone: {error}", where=what, remedy="run the same command again"
                ) from error
            time.sleep(_RETRY_S)


class RayFetcher:
    """Fetches the shares of a consumer from the delivery actor. Picklable; each consumer has its own copy."""

    def __init__(self, feeder: Any, source: int, schedule: StepSchedule, length: int, deadline_s: float) -> None:
        self.feeder, self._source = feeder, source
        self._schedule, self._length, self._deadline_s = schedule, length, deadline_s
        self._requests: dict[tuple[int, int, int], Any] = {}
        self._news: Any = None

    def fetch(self, step: int, rank: int, total: int) -> tuple[range, Arrays]:
        """Return the chunk of steps with `step`, and the columns of the share of data rank `rank` of `total`.

        Raises:
            UserCodeError, DataError: an error of the transform or the source, in any process.
            HangError: no answer came within the deadline.
        """
        chunk = self._schedule.chunk(step, self._length)
        early = [self._requests.pop((chunk.start, rank, total), None)]
        self._requests = {key: value for key, value in self._requests.items() if key[0] in (chunk.start, chunk.stop)}

        def attempt(lost: bool) -> Arrays:
            request, early[0] = early[0], None
            if request is not None:
                with suppress(HangError):  # the deadline may have passed while nobody waited, as in an evaluation
                    return self._take(request)
            return self._take(self._request(chunk.start, rank, total, lost))

        columns = fetch_from_actor(attempt, self._deadline_s, f"data rank {rank}, step {chunk.start}")
        if chunk.stop < self._schedule.total_steps:
            self._requests[chunk.stop, rank, total] = self._request(chunk.stop, rank, total, False)
        return chunk, columns

    def stages(self) -> list[StageProgress]:
        """Return the progress of each stage; empty if the actor does not answer."""
        with suppress(RayError):
            stages: list[StageProgress] = ray.get(self.feeder.stages.remote(self._source), timeout=_CLOSE_S)
            return stages
        return []

    def news(self) -> list[str]:
        """Return the notes of the actor since the last call, such as about replaced pool actors."""
        self._news = self._news or self.feeder.news.remote()
        if not ray.wait([self._news], timeout=0)[0]:
            return []
        request, self._news = self._news, None
        with suppress(RayError):  # consumers that wait for data report a dead actor
            notes: list[str] = ray.get(request)
            return notes
        return []

    def close(self) -> None:
        """End the actor with its pipelines and pools, for all data sets and consumers."""
        with suppress(RayError):  # it is killed below in any case
            ray.get(self.feeder.close.remote(), timeout=_CLOSE_S)
            if self._news is not None:
                ray.wait([self._news], timeout=_CLOSE_S)
        ray.kill(self.feeder)

    def _request(self, step: int, rank: int, total: int, lost: bool) -> Any:
        return self.feeder.chunk.remote(self._source, step, rank, total, self._deadline_s, lost)

    def _take(self, request: Any) -> Arrays:
        from trainwright.datasets.ray_data.piece_blocks import Piece

        answer: Any = ray.get(request, timeout=self._deadline_s + SLACK_S)
        if answer.error is not None:
            raise answer.error
        pieces = [Piece.of(block) for block in ray.get(list(answer.blocks), timeout=self._deadline_s)]
        for piece in pieces:
            if piece.error is not None:
                raise piece.error
        return {name: np.concatenate([piece.columns[name] for piece in pieces]) for name in pieces[0].columns}

    def __reduce__(self) -> tuple[Any, ...]:
        return RayFetcher, (self.feeder, self._source, self._schedule, self._length, self._deadline_s)


def make_pipeline_spec(
    dataset: Dataset, index: Index, *, columns: Iterable[str] | None = None, **ordering: Any
) -> PipelineSpec:
    """Return the pipeline of a heavy data set, which has a transform that requests CPUs or GPUs.

    Args:
        columns: of its output; by default all.
        ordering: arguments of `make_schedule`.
    """
    from trainwright.datasets.ray_data.delivery_pipeline import PipelineSpec

    schedule, names = make_schedule(index, **ordering), None if columns is None else tuple(columns)
    length = max(_CHUNK_ROWS // schedule.batch_size, 1)
    return PipelineSpec(dataset=dataset, index=index, columns=names, schedule=schedule, length=length)


def start_delivery(
    recipes: Sequence[PipelineSpec],
    *,
    cpus: float,
    gpus: float = 0.0,
    deadline_s: float = DEADLINE_S,
    hang_s: float = math.inf,
) -> list[RayFetcher]:
    """Start the delivery actor of a run's heavy data sets. The fetchers go to every `BatchLoader` of the run.

    Args:
        recipes: of the data sets.
        cpus, gpus: that Ray Data may use; the workers must have left them free.
        deadline_s: for a consumer to wait for one share.
        hang_s: time without a step after which the consumers count as hung.

    Raises:
        ResourceError: the transforms request more than Ray Data has.
    """
    from trainwright.datasets.ray_data.actor_pools import allocate_actors
    from trainwright.datasets.ray_data.delivery_actor import DeliveryActor

    free = {"CPU": cpus, "GPU": gpus}
    allocate_actors(recipes, free)
    kind: Any = ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1)(DeliveryActor)
    piece_s = _DEADLINE_SHARE * min(deadline_s, hang_s)
    feeder = kind.options(max_concurrency=WAITING).remote([dumps(recipe) for recipe in recipes], free, piece_s)
    feeder.open.remote()
    return [
        RayFetcher(feeder, number, recipe.schedule, recipe.length, deadline_s) for number, recipe in enumerate(recipes)
    ]
