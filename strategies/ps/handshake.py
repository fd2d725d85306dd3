"""Prove membership of a group by its key (HMAC-SHA256) before anything else is said over a connection.

    server -> member   a nonce
    member -> server   its rank, a nonce of its own, MAC("member", both nonces, rank)
    server -> member   MAC("server", both nonces, rank)

Each message has a fixed size, and nothing in it is used before its MAC is verified. Nobody learns the key by listening,
and no message is of use in another connection. What follows is neither encrypted nor signed.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
import struct

from trainwright.strategies.ps.frames import left

NONCE_BYTES = MAC_BYTES = 32
HANDSHAKE_S = 5.0  # for a member to answer the nonce
_CLAIM = struct.Struct(f"!I{NONCE_BYTES}s{MAC_BYTES}s")
CLAIM_BYTES = _CLAIM.size


def nonce() -> bytes:
    """What a server sends first over each connection."""
    return secrets.token_bytes(NONCE_BYTES)


def claim(key: bytes, challenge: bytes, rank: int) -> tuple[bytes, bytes]:
    """A member's message of `CLAIM_BYTES`, and the answer that only a server with the key can give to it."""
    own = nonce()
    said = _CLAIM.pack(rank, own, _mac(key, b"member", challenge, own, rank))
    return said, _mac(key, b"server", challenge, own, rank)


def admit(key: bytes, challenge: bytes, said: bytes | bytearray | memoryview) -> tuple[int, bytes]:
    """The rank of the member that sent a claim, and the server's answer. Raises ConnectionError for a stranger's."""
    rank, other, mac = _CLAIM.unpack(said)
    if not hmac.compare_digest(mac, _mac(key, b"member", challenge, other, rank)):
        raise ConnectionError("the peer does not know the group's key")
    return int(rank), _mac(key, b"server", challenge, other, rank)


def join(connection: socket.socket, key: bytes, rank: int, until: float) -> None:
    """The member's side, over a socket that blocks; `until` is on the clock of `time.monotonic`. Raises OSError."""
    said, expected = claim(key, _exactly(connection, NONCE_BYTES, until), rank)
    connection.sendall(said)
    if not hmac.compare_digest(_exactly(connection, MAC_BYTES, until), expected):
        raise ConnectionError("the server does not know the group's key")


def accept(connection: socket.socket, key: bytes, until: float) -> int:
    """The server's side of the same: the member's rank. Raises OSError."""
    challenge = nonce()
    connection.settimeout(left(until))
    connection.sendall(challenge)
    rank, proof = admit(key, challenge, _exactly(connection, CLAIM_BYTES, until))
    connection.sendall(proof)
    return rank


def _mac(key: bytes, role: bytes, challenge: bytes, other: bytes, rank: int) -> bytes:
    if not key:
        raise ValueError("the group has no key: whoever makes a Group of several ranks gives all of them the same one")
    return hmac.digest(key, role + challenge + other + struct.pack("!I", rank), hashlib.sha256)


def _exactly(connection: socket.socket, size: int, until: float) -> bytes:
    data = b""
    while len(data) < size:
        connection.settimeout(left(until))
        piece = connection.recv(size - len(data))
        if not piece:
            raise ConnectionError("end of stream")
        data += piece
    return data
