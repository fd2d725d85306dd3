"""Whether this driver still has its run, asked before it acts: it may have been stopped for longer than others wait."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Protocol

import ray
from ray.exceptions import RayError

from trainwright.core.checkpoint import CheckpointRef
from trainwright.core.errors import FencedError, TrainwrightError
from trainwright.driver import messages as m
from trainwright.storage.run_owner import LEASE_S, boot_s

ASK_S = 1.0


class Ledger(Protocol):
    """The run's log and checkpoints, as the driver needs them."""

    def acquire(self) -> int:
        """Take the run; returns the token. Raises RunConflict or StorageError."""

    def assure(self) -> bool:
        """Whether the run is known to be still ours; False when the store cannot tell. Raises FencedError."""

    def chain(self) -> tuple[CheckpointRef, ...]:
        """The checkpoints to go on from, newest last. Raises CheckpointError or StorageError."""

    def commit(self, commit: m.Commit) -> m.Committed:
        """Write the manifest and name the checkpoint; raises FencedError or StorageError."""

    def told(self) -> int:
        """The newest step that storage has an event of."""

    def release(self, release: m.Release) -> None:
        """Give the run back."""


class Lease:
    """Use from the driver's thread; `lose` may be called from any.

    Args:
        ledger: asked first.
        processes: the actors of the run, which know the driver that they belong to: asked while the store is away.

    Attributes:
        token: of this driver; 0 before it has the run.
        lost: why the run is not this driver's; None while it is.
    """

    def __init__(self, ledger: Ledger, processes: Callable[[], Sequence[Any]]) -> None:
        self.token = 0
        self.lost: TrainwrightError | None = None
        self._ledger, self._processes = ledger, processes
        self._asked_s = 0.0

    def check(self) -> bool:
        """Return whether this driver may act."""
        if self.token and self.lost is None:
            try:
                if not self._ledger.assure():
                    self._ask()
            except FencedError as error:
                self.lost = error
        return self.lost is None

    def lose(self, error: TrainwrightError) -> None:
        """Another driver has the run."""
        self.lost = error

    def _ask(self) -> None:
        now_s = boot_s()
        if now_s - self._asked_s < LEASE_S:
            return
        refs = [actor.beat.remote(self.token) for actor in self._processes()]
        for ref in ray.wait(refs, num_returns=len(refs), timeout=ASK_S)[0] if refs else []:
            with suppress(RayError):  # its death is told elsewhere
                refusal = ray.get(ref)
                if refusal is not None:
                    raise refusal.error
        self._asked_s = now_s
