"""Options of `trainwright plan` as people write them, read into numbers."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainwright.core.errors import PlanError
from trainwright.planning.cluster_sizing import Price

_OPTIONS = (
    (r"\b(resume|fresh|here|verbose)=True", r"--\1"),
    (r"\bcritical_batch=(?=\d)", "--critical-batch "),
    (r"\b(step|price)=(?=\d)", r"--\1 "),
    (r"\bleave detached out", "leave --detach out"),
    (r"\bleave cluster= out", "leave --cluster out"),
    (r"\bpredictions workers=", "predictions --workers"),
)
_HOURS = {"h": 1.0, "d": 24.0, "y": 24.0 * 365}


def wishes_of(cluster: str | None, given: Mapping[str, Any], out: str | None = None) -> dict[str, Any]:
    """Arguments of `api.plan` from options by name, of which None was not given.

    Args:
        cluster: that is not there.
        given: what is asked about it.
        out: where the plan of a job is written.

    Raises:
        PlanError: one cannot be read, or it does not go with a cluster that is not there, or only with one.
    """
    if out is not None and cluster is not None:
        what = "a plan for a cluster that is not there cannot be asked for again"
        raise PlanError(what, where="--out", remedy="leave --cluster or --out out")
    named = {name: value for name, value in given.items() if value is not None}
    if cluster is None:
        for name in named:
            option = {"aim": "--for", "mtbf_hours": "--mtbf"}.get(name, f"--{name.replace('_', '-')}")
            remedy = "give one too: --cluster 4x8xH100-80GB"
            raise PlanError("it is a question about a cluster that is not there", where=option, remedy=remedy)
        return {}
    readers = {"price": price_of, "mtbf_hours": hours_of, "batch_sizes": batch_sizes_of}
    return {"cluster": cluster} | {name: readers.get(name, _same)(value) for name, value in named.items()}


def as_options(remedy: str) -> str:
    """Return what to do in the words of the command line: errors name arguments of Python's functions."""
    for pattern, option in _OPTIONS:
        remedy = re.sub(pattern, option, remedy)
    return remedy


def write_page(answer: Any, path: str) -> None:
    """Write what a notebook would show as a page of its own. Raises PlanError where the file cannot be written."""
    from trainwright.reporting.what_if_view import page

    try:
        Path(path).write_text(page(answer._repr_html_()), encoding="utf-8")
    except OSError as error:
        remedy = "name a file in a folder that is there"
        raise PlanError(f"{path} cannot be written: {error.strerror}", where="--html", remedy=remedy) from error


def _same(value: Any) -> Any:
    return value


def price_of(text: str) -> Price | str:
    """`on-demand`, `spot` or dollars an hour, `2.50` or `$2.50`; other words are left for the planner to refuse."""
    try:
        return float(text.removeprefix("$"))
    except ValueError:
        return text


def hours_of(text: str) -> float:
    """`50000h`, `2000d`, `5y`. Raises PlanError for a number without unit, and for what is no positive number."""
    number, unit = text[:-1], text[-1:]
    try:
        hours = float(number) * _HOURS[unit]
    except (KeyError, ValueError):
        hours = math.nan
    if 0 < hours < math.inf:
        return hours
    missing = " has no unit" if text.replace(".", "", 1).isdigit() else " is no time between failures"
    remedy = "write hours, days or years of one accelerator: 50000h, 2000d, 5y"
    raise PlanError(f"{text!r}{missing}", where="--mtbf", remedy=remedy)


def batch_sizes_of(text: str) -> tuple[int, ...]:
    """`256,512,1024`. Raises PlanError for anything else."""
    parts = [part.strip() for part in text.split(",")]
    wrong = [part for part in parts if not (part.isascii() and part.isdigit() and int(part))]
    if wrong:
        remedy = "write samples with commas between: 256,512,1024"
        raise PlanError(f"{wrong[0]!r} is no batch size", where="--batch-sizes", remedy=remedy)
    return tuple(map(int, parts))
