"""The weights that a torch model starts from: files of safetensors, and how their names meet those of the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Protocol

from trainwright.core.errors import JobError


@dataclass(frozen=True)
class InitialWeights:
    """Files of safetensors that a torch model's weights are loaded from before the first step.

    Each tensor of the model's state dict is loaded, and each tensor of the files is used, unless `new` or `unused` says
    otherwise. Tied parameters need one of their names. Numbers are converted to the model's types.

    Attributes:
        path: of a file (`.safetensors`), of an index (`.safetensors.index.json`), or of a folder that holds
            `model.safetensors` or its index; also on `s3://`, `gs://`, `az://`. Every node must be able to read it.
        new: names or patterns, such as `classifier.*`, of the model's tensors that keep what `model()` gives them.
        unused: names or patterns of the files' tensors that the model does not have.
        rename: (name in the model) -> name in the files; by default they are equal.
    """

    path: str
    new: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    rename: Callable[[str], str] | None = None

    def __post_init__(self) -> None:
        problems = [
            f"InitialWeights({name}={value!r}): give a tuple of names or patterns, such as ('classifier.*',)"
            for name, value in (("new", self.new), ("unused", self.unused))
            if not isinstance(value, tuple)
        ]
        path: object = self.path
        if not isinstance(path, str):
            problems.append(f"InitialWeights({path!r}): give the path or URI as a str")
        elif not path.strip():
            problems.append("initial_weights= is empty: give a folder or a file of safetensors")
        if problems:
            raise JobError(problems)

    @classmethod
    def of(cls, given: str | InitialWeights | None) -> InitialWeights | None:
        """Return what `initial_weights=` of a job means."""
        return cls(given) if isinstance(given, str) else given

    def stored_name(self, name: str) -> str:
        """Return the name in the files of a tensor of the model. Raises what the user's function raises."""
        return name if self.rename is None else self.rename(name)


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """Where a tensor is in the files."""

    file: str  # its name
    dtype: str  # as safetensors names it, such as `BF16`
    shape: tuple[int, ...]
    start: int  # first byte in the file
    size_bytes: int  # of all of it


class WeightSource(Protocol):
    """Opened files of weights, of which engines read what their rank holds."""

    @property
    def options(self) -> InitialWeights:
        """The user's."""

    @property
    def tensors(self) -> Mapping[str, StoredTensor]:
        """All tensors by their names in the files."""

    @property
    def digest(self) -> str:
        """A digest of names, types, shapes and samples of the values: 16 hexadecimal digits."""

    def uri_of(self, file: str) -> str:
        """Return where a file is, for errors."""

    def check(self) -> None:
        """Check that the files have the digest as this process sees them. Raises JobError, StorageError."""

    def read(self, file: str, start: int, end: int) -> memoryview:
        """Return bytes `start` to `end` of a file, `end` excluded. Raises StorageError."""


def matches(name: str, patterns: tuple[str, ...]) -> bool:
    """Return whether one of some names or patterns fits a name."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)
