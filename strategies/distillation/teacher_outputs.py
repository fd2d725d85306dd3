"""Turn a teacher's outputs and hidden layers into columns, and refuse wrong outputs. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from trainwright.core.errors import JobError, nearest

LOGITS = "logits"  # the output that teaches if there are several and none is named
_NEAR = 1e-3  # largest error of a sum of probabilities, such as those of half precision
_LogOdds = Callable[[Any, bool], Any]
ToArray = Callable[[Any], npt.NDArray[Any]]


def _chosen_output(outputs: Mapping[str, Any], name: str = "") -> Any:
    """Return the named output; by default the only one, or the logits. Raises JobError."""
    wanted = name or (next(iter(outputs)) if len(outputs) == 1 else LOGITS)
    if wanted not in outputs:
        problem = nearest(name, outputs) if name else f"name one of them with output=: {', '.join(outputs) or 'none'}"
        raise JobError([f"the teacher has no output {wanted!r}: {problem}"])
    return outputs[wanted]


@dataclass(frozen=True, kw_only=True)
class TeacherOutputs:
    """A teacher's inputs, and how its outputs become columns."""

    inputs: tuple[str, ...]  # columns given to the model, after collation
    keywords: tuple[str, ...]  # the model's argument for each input; empty for positional ones
    output: str  # which of its outputs teaches; empty for the only one, or the logits
    layers: tuple[str, ...]  # names of layers, in the order of their columns; see `tapped`
    columns: tuple[str, ...]  # names of the columns of the output and of each layer
    # the output is probabilities of one class among all (`softmax`) or of each class by itself (`sigmoid`), from
    # which logits are computed; empty for logits or values
    probabilities: str
    precision: str  # in which the model computes

    @property
    def tapped(self) -> dict[str, str]:
        """The layer of each further output of the model, by the output's name."""
        return {f"layer:{number}": layer for number, layer in enumerate(self.layers)}

    def told(self, outputs: Mapping[str, Any], log_odds: _LogOdds, look: ToArray | None = None) -> dict[str, Any]:
        """Return the teacher's columns for some rows.

        Args:
            outputs: of the model, with those of layers.
            log_odds: (probabilities, each by itself) -> logits.
            look: converts the output to an array, to check it; None skips the check.

        Raises:
            JobError: there is no such output, or it is probabilities instead of logits, or the reverse.
        """
        layers = [outputs[name] for name in self.tapped]
        output = _chosen_output(
            {name: value for name, value in outputs.items() if name not in self.tapped}, self.output
        )
        if look is not None:
            _check_outputs(look(output), self.probabilities)
        if self.probabilities:
            output = log_odds(output, self.probabilities == "sigmoid")
        return dict(zip(self.columns, (output, *layers), strict=True))


def _check_outputs(output: npt.NDArray[Any], probabilities: str) -> None:
    """Raise JobError for probabilities in place of logits, or the reverse."""
    several = output.ndim > 1 and output.shape[-1] > 1
    one = several and _fractions(output) and bool((np.abs(output.sum(axis=-1, dtype=np.float64) - 1) <= _NEAR).all())
    if one and not probabilities:
        raise JobError(
            [
                "the teacher's outputs are probabilities and no logits: from 0 to 1 in each row, and 1 in sum: "
                "let the model end before its softmax, or give Teacher(probabilities=True), which takes their logarithm"
            ]
        )
    if probabilities and not (one if probabilities == "softmax" else _fractions(output)):
        wanted = "1 in sum in each row" if probabilities == "softmax" else "from 0 to 1"
        raise JobError([f"the teacher's outputs are not probabilities, {wanted}: leave probabilities= out for logits"])


def log_odds(probabilities: npt.NDArray[Any], each: bool) -> npt.NDArray[Any]:
    """Return logits of probabilities: of one class among all, or of each label by itself."""
    least = np.finfo(probabilities.dtype).tiny
    logs = np.log(np.maximum(probabilities, least))
    return np.asarray(logs - np.log(np.maximum(1 - probabilities, least)) if each else logs)


def _fractions(output: npt.NDArray[Any]) -> bool:
    return bool(((output >= 0) & (output <= 1)).all())
