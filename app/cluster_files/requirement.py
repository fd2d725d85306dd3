"""What a job's plan needs of a cluster."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Need:
    """What a job's plan needs of a cluster.

    Attributes:
        workers: how many there are.
        each: devices of one worker; all of them are on one node.
        resource: Ray's name for the devices: GPU, TPU or CPU; empty for what the nodes have.
    """

    workers: int
    each: int = 1
    resource: str = ""
