"""`trainwright simulate`: workers against servers on a virtual clock, before machines are paid for."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from trainwright.core.errors import PlanError
from trainwright.core.staleness import Consistency, Outer, Wire

_WIDTH = 140  # of tables in files and pipes
_TIMES = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0}
_COUNTS = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "B": 1e9}
_RATES = {"Mb": 1e6 / 8, "Gb": 1e9 / 8}


File = Annotated[str | None, typer.Argument(metavar="[FILE.py]", help="A job file: its plan says what is not given.")]
Workers = Annotated[int | None, typer.Option(min=1, help="How many; by default 8.")]
Servers = Annotated[str, typer.Option(metavar="N,N", help="How many, one row for each.")]
Rules = Annotated[
    list[str] | None, typer.Option(metavar="FORM", help="One row for each; by default sync, ssp(3) and async.")
]
Parameters = Annotated[
    str | None, typer.Option(metavar="25M", help="Of the model, in single precision; by default 25M.")
]
Compute = Annotated[
    str | None, typer.Option(metavar="100ms", help="That a worker's part of a step takes; by default 100ms.")
]
Spread = Annotated[float, typer.Option(min=0, help="Deviation of the logarithm of each part's time.")]
Unequal = Annotated[float, typer.Option(min=0, help="Deviation of the logarithm of each worker's usual time.")]
Between = Annotated[str, typer.Option(metavar="5ms", help="From a push to the next pull: to have the next batch.")]
Slow = Annotated[str, typer.Option(metavar="NxFACTOR", help="So many workers take so many times as long.")]
Network = Annotated[str, typer.Option(metavar="10Gb", help="Of a worker, a second.")]
ServerNetwork = Annotated[str | None, typer.Option(metavar="10Gb", help="Of a server; by default as a worker's.")]
Latency = Annotated[str, typer.Option(metavar="200us", help="Of a message, one way.")]
Failures = Annotated[float, typer.Option(min=0, help="Deaths of each worker an hour.")]
ServerFailures = Annotated[float, typer.Option(min=0, help="Deaths of each server an hour.")]
Steps = Annotated[int, typer.Option(min=1, help="Global ones.")]
BatchSize = Annotated[int | None, typer.Option(min=1, help="Global; by default 64 for each worker.")]
AsInJob = Annotated[str, typer.Option(help="As in a job.")]
LocalSteps = Annotated[int, typer.Option(min=1, help="As in a job.")]
Seed = Annotated[int, typer.Option(min=0, help="Of everything random.")]
Timing = Annotated[bool, typer.Option("--timing", help="Times alone, without the stand-in problem.")]
Html = Annotated[str | None, typer.Option(metavar="FILE", help="Write it as a page, with pictures.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def simulate(
    file: File = None,
    workers: Workers = None,
    servers: Servers = "1",
    consistency: Rules = None,
    parameters: Parameters = None,
    compute: Compute = None,
    spread: Spread = 0.05,
    between: Between = "0ms",
    unequal: Unequal = 0.0,
    slow: Slow = "",
    network: Network = "10Gb",
    server_network: ServerNetwork = None,
    latency: Latency = "200us",
    failures: Failures = 0.0,
    server_failures: ServerFailures = 0.0,
    steps: Steps = 200,
    batch_size: BatchSize = None,
    wire: AsInJob = "full",
    local_steps: LocalSteps = 1,
    outer: AsInJob = "average",
    seed: Seed = 0,
    timing: Timing = False,
    html: Html = None,
    as_json: AsJson = False,
) -> None:
    """Simulate workers that step alone against servers: throughput, staleness, waiting and loss by virtual time."""
    told = {
        "workers": workers, "parameter_bytes": 4 * _read(parameters, _COUNTS, "--parameters") if parameters else None,
        "compute_s": _read(compute, _TIMES, "--compute") if compute else None, "batch_size": batch_size,
    }  # fmt: skip
    facts = {
        "spread": spread, "unequal": unequal, "slow": _slow(slow), "steps": steps, "seed": seed,
        "between_s": _read(between, _TIMES, "--between"), "worker_bytes_per_s": _read(network, _RATES, "--network"),
        "server_bytes_per_s": _read(server_network or network, _RATES, "--server-network"),
        "latency_s": _read(latency, _TIMES, "--latency"), "failures_per_hour": failures,
        "server_failures_per_hour": server_failures, "wire": Wire.parse(wire), "local_steps": local_steps,
        "outer": Outer.parse(outer),
    }  # fmt: skip
    rules = [Consistency.parse(word) for word in consistency or ("sync", "ssp(3)", "async")]
    _run({**_known(file, told), **facts}, rules, _counts(servers), learn=not timing, html=html, as_json=as_json)


def _run(
    facts: dict[str, Any], rules: Sequence[Consistency], servers: Sequence[int], *, learn: bool, html: str | None,
    as_json: bool,
) -> None:  # fmt: skip
    """Simulate, and show what came of it. Raises PlanError."""
    from rich.console import Console

    from trainwright.simulator.event_simulator import Simulation
    from trainwright.simulator.outcome_view import as_data, as_page, as_table
    from trainwright.simulator.scenario import Scenario

    scenarios = [Scenario(consistency=rule, servers=count, **facts) for rule in rules for count in servers]
    outcomes = [Simulation(scenario, learn=learn).run() for scenario in scenarios]
    if html:
        try:
            Path(html).write_text(as_page(outcomes), encoding="utf-8")
        except OSError as error:
            remedy = "name a file in a folder that is there"
            raise PlanError(f"{html} cannot be written: {error.strerror}", where="--html", remedy=remedy) from error
    if as_json:
        print(json.dumps(as_data(outcomes), indent=2))
    else:
        Console(width=None if sys.stdout.isatty() else _WIDTH).print(as_table(outcomes))


def _known(file: str | None, told: dict[str, Any]) -> dict[str, Any]:
    """What is given, and for the rest what the job's plan says, or what is usual."""
    usual: dict[str, Any] = _planned(file) if file else {"workers": 8, "parameter_bytes": 1e8, "compute_s": 0.1}
    found = usual | {name: value for name, value in told.items() if value is not None}
    return {"batch_size": 64 * found["workers"], **found}


def _planned(file: str) -> dict[str, Any]:
    """Workers, parameters, batch and what a worker computes in a step, of a job's plan."""
    from trainwright import api
    from trainwright.planning.job_file import load_job

    decision = api.plan(load_job(file))
    plan = decision.chosen
    assert plan.estimate is not None, "a chosen plan has one"
    computed = ("compute", "recompute", "teachers", "other")
    return {
        "workers": plan.workers,
        "parameter_bytes": float(4 * decision.profile.parameters),
        "compute_s": sum(plan.estimate.terms.get(name, 0.0) for name in computed),
        "batch_size": plan.batch_size,
    }


def _read(text: str, units: dict[str, float], option: str) -> float:
    """A number with one of these units. Raises PlanError."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    if found is None or found[2] not in units:
        known = ", ".join(filter(None, units))
        raise PlanError(f"{text!r} cannot be read", where=option, remedy=f"write a number and one of: {known}")
    return float(found[1]) * units[found[2]]


def _slow(text: str) -> tuple[float, ...]:
    """`2x5`: two that take five times as long. Raises PlanError."""
    if not text:
        return ()
    found = re.fullmatch(r"(\d+)x(\d+(?:\.\d+)?)", text.strip())
    if found is None or float(found[2]) <= 0:
        raise PlanError(f"{text!r} cannot be read", where="--slow", remedy="write workers x times: 1x5")
    return (float(found[2]),) * int(found[1])


def _counts(text: str) -> list[int]:
    """`1,2,4`. Raises PlanError."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) for part in parts):
        raise PlanError(f"{text!r} is no number of servers", where="--servers", remedy="write numbers: 1,2,4")
    return [int(part) for part in parts]
