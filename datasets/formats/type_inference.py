"""Kinds of values in text formats, inferred value by value over whole files: null, bool, int, float, str, object."""

from __future__ import annotations

NULL = "null"
_NUMBERS = {"int", "float"}


def merge_kinds(one: str, other: str) -> str:
    """The narrowest kind that holds values of both: int64 becomes float64, what else differs becomes text.

    Lists and objects of JSON make a column of objects, whatever else is in it.
    """
    if one == other or other == NULL:
        return one
    if one == NULL:
        return other
    if "object" in (one, other):
        return "object"
    return "float" if {one, other} == _NUMBERS else "str"
