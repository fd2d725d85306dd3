"""A fake store: a log with one owner, and checkpoints of which it knows the lineage."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from trainwright.core.engine import CheckpointFile, CheckpointRef
from trainwright.core.events import Evaluated, Event, Formed
from trainwright.driver import messages as m


class Violation(AssertionError):
    """An invariant does not hold."""


class Store:
    """What is durable. Every commit is checked against the run's right lineage."""

    def __init__(self, right: list[int], is_whole: Callable[[list[str]], bool]) -> None:
        self._right, self._is_whole = right, is_whole
        self.entries = 0
        self.owner = 0
        self.chain: list[CheckpointRef] = []  # those that the log names
        self.damaged: set[str] = set()
        self.files: dict[tuple[str, str], tuple[int, int]] = {}
        self.committed: dict[str, CheckpointRef] = {}
        self.commits = 0
        self.keep = 1_000  # checkpoints that the log names, beside those that are held
        self.evaluations: dict[int, Evaluated] = {}  # of the events that are stored
        self.lost: set[int] = set()  # steps whose checkpoint was given up

    @property
    def head(self) -> CheckpointRef | None:
        """The newest checkpoint."""
        return self.chain[-1] if self.chain else None

    @property
    def unsaved(self) -> set[int]:
        """Steps that need not have a checkpoint."""
        return self.lost | {ref.step for ref in self.committed.values() if ref.path in self.damaged}

    @property
    def sound(self) -> list[CheckpointRef]:
        """Those that can be loaded."""
        return [ref for ref in self.chain if ref.path not in self.damaged]

    def acquire(self) -> m.LeaseAcquired:
        """A new owner; the old one is fenced."""
        self.entries += 1
        self.owner = self.entries
        known = tuple(event for _, event in sorted(self.evaluations.items()))
        return m.LeaseAcquired(token=self.owner, head=self.head, older=tuple(self.chain[:-1]), evaluations=known)

    def tell(self, told: Iterable[Event]) -> None:
        """Events are written: a group that is taken back to a step forgets the evaluations after it."""
        for event in told:
            if isinstance(event, Evaluated):
                self.evaluations[event.step] = event
            elif isinstance(event, Formed):
                self.evaluations = {step: known for step, known in self.evaluations.items() if step <= event.step}

    def write(self, path: str, piece: str, step: int, lineage: int) -> tuple[CheckpointFile, ...]:
        """One writer's file."""
        if path in self.committed:
            raise Violation(f"a file of the committed {path} was written again")
        self.files[path, piece] = (step, lineage)
        return (CheckpointFile(name=piece, size_bytes=8, sha256=str(lineage)),)

    def commit(self, token: int, commit: m.CommitCheckpoint) -> CheckpointRef:
        """Name a checkpoint, for its owner only; whole, of one step, right, and the child of the head."""
        if token != self.owner:
            raise Violation("a fenced driver committed")
        names = [entry.name for entry in commit.files]
        if not self._is_whole(names):
            raise Violation(f"step {commit.step}: a checkpoint of {names} is not whole")
        for entry in commit.files:
            if self.files[commit.path, entry.name] != (commit.step, self._right[commit.step]):
                raise Violation(f"step {commit.step}: {entry.name} holds steps that were lost or applied twice")
        while self.chain and self.chain[-1].path != commit.parent and self.chain[-1].path in self.damaged:
            self.chain.pop()  # it was passed over
        parent = self.head.path if self.head else ""
        if commit.parent != parent:
            raise Violation(f"step {commit.step}: parent {commit.parent!r}, but the head is {parent!r}")
        if commit.step <= (self.head.step if self.head else 0):
            raise Violation(f"step {commit.step} was committed after step {self.head.step if self.head else 0}")
        self.entries += 1
        self.commits += 1
        sha = f"{self.entries:064x}"
        ref = CheckpointRef(step=commit.step, path=commit.path, manifest_sha256=sha, parent=parent)
        self.chain.append(ref)
        held = [old for old in self.chain[: -self.keep] if old.path in commit.hold]
        self.chain = [*held, *self.chain[-self.keep :]]
        self.committed[commit.path] = ref
        return ref
