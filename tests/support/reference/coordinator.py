"""The coordinator topology: rank 0 holds all feeds and leads; the others serve and compute the shares it deals out."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from tests.support.reference.collective import ReplicatedEngine
from tests.support.reference.model import Array
from tests.support.reference.reference_engine import zero_weighted
from tests.support.reference.state import decode_arrays, encode_arrays
from tests.support.reference.user_functions import apply_step
from trainwright.core.data import Batch, Feed, StepReport
from trainwright.core.errors import PeerLost
from trainwright.core.topology import Capabilities

_END = b""
_WEIGHTS, _SAMPLES, _COLUMN, _HEAD = "weights", "samples", "column/", "head"


class Coordinator(ReplicatedEngine):
    """Rank 0 deals data rank d to actor d mod size, and adds up in the order of data ranks.

    So results do not depend on the number of actors. The sum goes to every actor, which applies it too: each holds a
    replica. An actor that fails raises from `serve`; rank 0 then loses a peer. The others' `serve` returns when rank 0
    leaves or is gone.
    """

    capabilities: ClassVar[Capabilities] = Capabilities(topology="coordinator")

    def warm(self, feed: Feed) -> None:
        """One throwaway step of weight 0 over all actors, at rank 0. Nothing is applied."""
        with self._acting():
            self._dealt(zero_weighted(feed), apply=False)

    def train_step(self, feed: Feed) -> StepReport:
        """One global step, at rank 0; `feed` holds every data rank.

        Raises:
            PeerLost: an actor went away or failed; rank 0 stands where it stood.
            NonFiniteLoss, JobError, UserCodeError: in a share that rank 0 computed itself.
        """
        with self._acting():
            self._expect(feed)
            total = self._dealt(feed, apply=True)
            self._state, report = apply_step(self.program, self.state, feed, total)
        return report

    def follow(self) -> None:
        """Compute shares until rank 0 leaves or is gone. Rank 0 serves nobody and returns at once.

        Raises:
            NonFiniteLoss, JobError, UserCodeError: in this actor's share; the group ends.
        """
        if self.group.rank == 0:
            return
        with self._acting():
            while (request := self._request()) != _END:
                feed, apply = unpack_feed(request)
                self._answer(feed, apply)

    def leave(self) -> None:
        """Rank 0 tells the others that the group ends."""
        if self._connections is not None and self._group is not None and self._group.rank == 0:
            self._say_end()
        super().leave()

    def _dealt(self, feed: Feed, *, apply: bool) -> Array:
        """Deal out, compute the own share, gather, and tell everyone the sum."""
        size, until = self.group.size, self.star.until()
        for rank in self.star.others:
            self.star.send(rank, pack_feed(_feed_of_actor(feed, rank, size), apply), until)
        vectors = self._by_data_rank(_feed_of_actor(feed, 0, size))
        for frame in self.star.gather(until).values():
            vectors.update({int(name): vector for name, vector in decode_arrays(frame).items()})
        ordered = [vectors[data_rank] for data_rank in sorted(vectors)]
        total = sum(ordered[1:], start=ordered[0])
        total[-1] = float(feed.wish)
        self.star.broadcast(total.tobytes(), until)
        return total

    def _answer(self, feed: Feed, apply: bool) -> None:
        """Compute the dealt share, send it, and apply the sum when it comes."""
        until = self.star.until()
        if apply:
            self._expect(feed)
        vectors = self._by_data_rank(feed)
        try:
            self.star.send(0, encode_arrays({str(data_rank): vector for data_rank, vector in vectors.items()}), until)
            total = np.frombuffer(self.star.receive(0, until), np.float64)
        except PeerLost:
            return  # rank 0 is gone; the next request ends the service
        if apply:
            self._state, _ = apply_step(self.program, self.state, feed, total)

    def _request(self) -> bytes:
        """The next request; the end when rank 0 is gone. Rank 0 may take its time between steps."""
        try:
            return self.star.receive(0, float("inf"))
        except PeerLost:
            return _END

    def _by_data_rank(self, feed: Feed) -> dict[int, Array]:
        """The vector of sums of each data rank dealt to this actor."""
        return {
            data_rank: self.program.share(self.state.parameters, part, step=feed.step, data_rank=data_rank)
            for data_rank, part in zip(feed.data_ranks, feed.parts, strict=True)
        }

    def _say_end(self) -> None:
        for rank in self.star.others:
            try:
                self.star.send(rank, _END, self.star.until())
            except (PeerLost, KeyError):
                continue  # that rank has left already, or never came


def pack_feed(feed: Feed, apply: bool) -> bytes:
    """A feed as bytes."""
    arrays: dict[str, npt.NDArray[Any]] = {}
    for part_number, part in enumerate(feed.parts):
        for number, batch in enumerate(part):
            arrays.update({f"{part_number}/{number}/{name}": array for name, array in _arrays(batch).items()})
    ranks = feed.data_ranks
    head = {
        "step": feed.step,
        "data_ranks": [ranks.start, ranks.stop, ranks.step],
        "micro_batches": [len(part) for part in feed.parts],
        "total": feed.total,
        "rows": feed.rows,
        "apply": apply,
    }
    return encode_arrays({_HEAD: np.frombuffer(json.dumps(head).encode(), np.uint8), **arrays})


def unpack_feed(data: bytes) -> tuple[Feed, bool]:
    """The feed that `pack_feed` packed, and whether its step is to be applied."""
    arrays = decode_arrays(data)
    head = json.loads(arrays.pop(_HEAD).tobytes())
    parts = tuple(
        tuple(_batch(arrays, f"{part_number}/{number}/") for number in range(count))
        for part_number, count in enumerate(head["micro_batches"])
    )
    data_ranks = range(*head["data_ranks"])
    feed = Feed(step=head["step"], parts=parts, data_ranks=data_ranks, total=head["total"], rows=head["rows"])
    return feed, bool(head["apply"])


def _arrays(batch: Batch) -> dict[str, npt.NDArray[Any]]:
    columns = {f"{_COLUMN}{name}": np.asarray(array) for name, array in batch.columns.items()}
    return {_WEIGHTS: batch.weights, _SAMPLES: batch.samples, **columns}


def _batch(arrays: Mapping[str, npt.NDArray[Any]], prefix: str) -> Batch:
    column = f"{prefix}{_COLUMN}"
    return Batch(
        columns={name.removeprefix(column): array for name, array in arrays.items() if name.startswith(column)},
        weights=arrays[f"{prefix}{_WEIGHTS}"],
        samples=arrays[f"{prefix}{_SAMPLES}"],
    )


def _feed_of_actor(feed: Feed, rank: int, size: int) -> Feed:
    """The data ranks dealt to one actor."""
    ranks = feed.data_ranks[rank::size]
    return Feed(
        step=feed.step, parts=feed.parts[rank::size], data_ranks=ranks, total=feed.total, rows=feed.rows, wish=feed.wish
    )
