"""What goes over a connection after the handshake: a header, a head that is the caller's own, raw bytes."""

from __future__ import annotations

import struct
import time
from dataclasses import dataclass
from enum import IntEnum

from trainwright.core.errors import PeerLost

HEAD_BYTES = 64 * 2**20
MOST_BYTES = 2**48  # of an outbox: no machine has more
REMEDY = "the first rank that failed says why"
_HEADER = struct.Struct("!BxxxIQQ")
_LONGEST_S = 1e6  # what a socket takes as a timeout


class Kind(IntEnum):
    """What a frame is. A worker sends the first three, a server the others."""

    OUTBOX = 1  # from now on pushes lie in an outbox of so many bytes; its memory may come with the frame
    RANGE = 2  # bytes of the outbox
    CALL = 3  # a request, and the range of the outbox that belongs to it
    ANSWER = 4  # to the oldest call not answered yet, with its bytes
    PUBLISHED = 5  # as ANSWER, but the bytes stand in the published memory, which comes with the frame where it is new


@dataclass(frozen=True, slots=True)
class Header:
    """The first bytes of a frame. What follows: `head` bytes, then `size` raw ones where the kind has such."""

    kind: Kind
    head: int = 0
    offset: int = 0
    size: int = 0

    SIZE = _HEADER.size

    def pack(self) -> bytes:
        """As sent."""
        return _HEADER.pack(self.kind, self.head, self.offset, self.size)

    @classmethod
    def unpack(cls, data: bytes | bytearray | memoryview) -> Header:
        """As received. Raises ConnectionError where it cannot be one."""
        kind, head, offset, size = _HEADER.unpack(data)
        if kind not in Kind.__members__.values() or head > HEAD_BYTES or offset + size > MOST_BYTES:
            raise ConnectionError("no frame of ours")
        return cls(Kind(kind), head, offset, size)


def left(until: float) -> float:
    """Seconds left on the clock of `time.monotonic`, never none: a call that is late still takes what is there."""
    return min(max(until - time.monotonic(), 1e-3), _LONGEST_S)


def lost(peer: str, error: OSError) -> PeerLost:
    """The error of a connection that broke, or was too slow."""
    late = isinstance(error, TimeoutError)
    what = "did not answer within the deadline" if late else f"closed the connection ({error})"
    return PeerLost(f"{peer} {what}", remedy=REMEDY)
