"""Local state: buffers that each data rank keeps as its own, such as a hidden state carried from batch to batch.

They are neither averaged nor sent from rank to rank. A checkpoint holds those of every data rank, and each takes its
own back. In the model's state dict, which is for a model on one device, are those of data rank 0.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import Tensor, nn

from trainwright.core.engine import StateReader
from trainwright.core.errors import CheckpointError, JobError, nearest

_FILE = re.compile(r"local-(\d+)-of-(\d+)\.safetensors")


@dataclass(frozen=True, kw_only=True)
class DataRank:
    """A data rank's number and the number of data ranks."""

    rank: int = 0
    ranks: int = 1

    @property
    def piece(self) -> str:
        """The name of its local state in state tags."""
        return f"local-{self.rank}"

    @property
    def file(self) -> str:
        """The checkpoint file that holds its local state."""
        return f"local-{self.rank}-of-{self.ranks}.safetensors"


@dataclass(frozen=True, kw_only=True)
class LocalState:
    """The local state of one data rank: buffers by full name, including those that are not persistent."""

    data_rank: DataRank
    tensors: Mapping[str, Tensor]


def local_buffers(model: nn.Module, patterns: Sequence[str], where: str) -> frozenset[str]:
    """Return the names of the buffers that a job declares as local.

    Args:
        model: the user's.
        patterns: names, or patterns such as `*.hidden`.
        where: the rank, for errors.

    Raises:
        JobError: a pattern names no buffer.
    """
    buffers = [name for name, _ in model.named_buffers()]
    parameters = {name for name, _ in model.named_parameters()}
    found: set[str] = set()
    for pattern in patterns:
        chosen = {name for name in buffers if fnmatchcase(name, pattern)}
        if not chosen:
            raise JobError([f"local_state= names {pattern!r}, {_why_not(pattern, buffers, parameters)}"], where=where)
        found |= chosen
    return frozenset(found)


def _why_not(pattern: str, buffers: Sequence[str], parameters: Collection[str]) -> str:
    if any(fnmatchcase(name, pattern) for name in parameters):
        return "a parameter, which is the same on all ranks: only buffers can be local"
    return f"which is no buffer of the model: {nearest(pattern, buffers)}" if buffers else "and the model has no buffer"


def local_state_file(reader: StateReader, data_rank: DataRank) -> str | None:
    """Return the name of the file with a data rank's local state; None where it is not needed.

    It is needed to continue training. Where the model is only evaluated, by another number of ranks than trained it,
    all of them use that of data rank 0, which is in the model's state dict.

    Raises:
        CheckpointError: the checkpoint has none, or those of another number of data ranks.
    """
    if data_rank.file in reader.names():
        return data_rank.file
    if reader.weights_only:
        return None
    counts = {int(match[2]) for match in map(_FILE.fullmatch, reader.names()) if match}
    if not counts:
        raise CheckpointError(
            "the checkpoint holds no local state: the job that wrote it had no local_state=",
            where=data_rank.file,
            remedy="leave local_state= out, or start a run under a new name",
        )
    wrote = max(counts)
    raise CheckpointError(
        f"the checkpoint holds the local state of {wrote} data ranks, and this run has {data_rank.ranks}: it cannot "
        "be redistributed",
        where=data_rank.file,
        remedy=f"set workers={wrote}, or start a run under a new name",
    )
