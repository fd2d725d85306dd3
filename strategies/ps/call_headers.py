"""Headers of the calls that workers and other servers send to a server: JSON objects, parsed and validated.

`do` names the call. Headers are sent between processes of one run only and are never stored.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from trainwright.core.topology import WorkUnit


def _check_norm(value: float) -> float:
    """Refuse negative values; NaN and infinity are legal, since training reports them itself."""
    if value < 0:
        raise ValueError("a norm is not negative")
    return value


_Integer = Annotated[int, Field(ge=-1, le=2**53)]  # JSON numbers hold these exactly
_Name = Annotated[str, Field(max_length=128)]
_Norm = Annotated[float, AfterValidator(_check_norm)]
_Weight = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class MalformedCallError(Exception):
    """A call that no worker or server makes. The server ends its connection and continues."""


class _Header(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True)


class _UnitCall(_Header):
    worker: _Name
    unit: tuple[_Integer, _Integer, _Integer]
    at: _Integer

    @property
    def work_unit(self) -> WorkUnit:
        """The unit that the call is about."""
        step, share, steps = self.unit
        return WorkUnit(step=step, share=share, steps=steps)


class PullCall(_Header):
    """A worker asks for parameters."""

    do: Literal["pull"]
    needs: _Integer  # rounds whose updates the parameters must hold
    have: tuple[_Integer, _Integer]  # filling and version that the worker has


class PushCall(_UnitCall):
    """A worker pushes a unit's gradients."""

    do: Literal["push"]
    seen: _Integer  # version of the parameters that the gradients were computed on
    weight: _Weight  # sum of weights of the unit's samples
    keep: bool  # the server may leave the push in the worker's memory until it is applied
    # for the first server, of each step: weighted sum of losses, sum of weights
    sums: tuple[tuple[float, float], ...] = ()
    norm: _Norm | None = None  # for the first server, of the whole gradient before clipping
    # for the first server, of each step: sum and weight of each value of `tw.log`; none where none is logged
    logged: tuple[dict[str, tuple[float, float]], ...] = ()


class LeaseCall(_Header):
    """A worker asks the first server for a unit."""

    do: Literal["lease"]
    worker: _Name  # name of the worker
    prefer: _Integer  # share that the worker usually computes
    first: _Integer  # first step of the segment that the worker is in


class DoneCall(_UnitCall):
    """A worker has pushed a unit to every server."""

    do: Literal["done"]


class PollCall(_Header):
    """Another server waits for events."""

    do: Literal["poll"]


class ReportCall(_Header):
    """Another server reports to the first one. One of the attributes is set."""

    do: Literal["report"]
    opens: _Integer | None = None  # it has begun the segment that ends at this step
    ends: _Integer | None = None  # it has ended the segment at this step
    part: tuple[_Integer, _Norm] | None = None  # round, and this server's part of the round's squared gradient norm


CallHeader = PullCall | PushCall | LeaseCall | DoneCall | PollCall | ReportCall
_ADAPTER: TypeAdapter[CallHeader] = TypeAdapter(Annotated[CallHeader, Field(discriminator="do")])


def parse_header(data: bytes) -> CallHeader:
    """Parse the header of a call. Raises MalformedCallError."""
    try:
        return _ADAPTER.validate_json(data)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        raise MalformedCallError(f"{place}: {first['msg']}" if place else first["msg"]) from error


def require(condition: bool, problem: str) -> None:
    """Raise MalformedCallError with the problem unless the condition holds."""
    if not condition:
        raise MalformedCallError(problem)
