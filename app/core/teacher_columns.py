"""Names of the columns that carry teacher outputs, and the protocol of a teacher that runs in the student's step.

A teacher `t` adds the column `teacher.t` to the data, its outputs (logits, or values in regression), and for each of
its layers that a student is to match the column `teacher.t/<layer>`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Protocol

from trainwright.core.model_profile import ModelProfile

_NAME = re.compile(r"[A-Za-z0-9_-]+")
_TEACHER = "teacher."

TEACHERS = "teachers"  # the output with the logits of the teachers' weights, where these are learned


def teacher_column(teacher: str, layer: str = "") -> str:
    """The column that holds a teacher's outputs, or those of a layer of it."""
    return f"{_TEACHER}{teacher}/{layer}" if layer else f"{_TEACHER}{teacher}"


def matched(student: str, number: int) -> str:
    """The output with the layer of a student that its n-th match is about, bridged to the teacher's width."""
    return f"{student}/match-{number}"


def of_layer(teacher: str, layer: str) -> str:
    """The output with a layer of a student that is a teacher."""
    return f"{teacher}/{layer}"


def named(what: str, name: str) -> list[str]:
    """What is wrong with the name of a teacher or student, which becomes part of columns' and parameters' names."""
    if _NAME.fullmatch(name):
        return []
    return [f"{what} is named {name!r}: use letters, digits, dashes and underscores"]


class Inline(Protocol):
    """A teacher that runs in the student's step."""

    @property
    def name(self) -> str:
        """Of the teacher."""

    @property
    def wanted(self) -> tuple[str, ...]:
        """The target columns that it takes."""

    @property
    def columns(self) -> tuple[str, ...]:
        """Its own, which it gives."""

    def identity(self) -> str:
        """Says whether another gives the same."""

    def module(self) -> Any:
        """The model: {column: tensor} -> its own columns, without gradients, as in evaluation."""

    def profile(self, sample: Mapping[str, Any]) -> ModelProfile:
        """What it costs, given columns of a row."""
