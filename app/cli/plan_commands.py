"""`trainwright simulate`: workers against servers on a virtual clock, before machines are paid for."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from trainwright.core.errors import PlanError
from trainwright.core.topology import Consistency, GradientCompression, OuterOptimizer
from trainwright.planning.what_if import Price

_WIDTH = 140  # of tables in files and pipes
_TIMES = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0}
_COUNTS = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "B": 1e9}
_RATES = {"Mb": 1e6 / 8, "Gb": 1e9 / 8}


_File = Annotated[str | None, typer.Argument(metavar="[FILE.py]", help="A job file: its plan says what is not given.")]
_Workers = Annotated[int | None, typer.Option(min=1, help="How many; by default 8.")]
_Servers = Annotated[str, typer.Option(metavar="N,N", help="How many, one row for each.")]
_Rules = Annotated[
    list[str] | None, typer.Option(metavar="FORM", help="One row for each; by default sync, ssp(3) and async.")
]
_Parameters = Annotated[
    str | None, typer.Option(metavar="25M", help="Of the model, in single precision; by default 25M.")
]
_Compute = Annotated[
    str | None, typer.Option(metavar="100ms", help="That a worker's part of a step takes; by default 100ms.")
]
_Spread = Annotated[float, typer.Option(min=0, help="Deviation of the logarithm of each part's time.")]
_Unequal = Annotated[float, typer.Option(min=0, help="Deviation of the logarithm of each worker's usual time.")]
_Between = Annotated[str, typer.Option(metavar="5ms", help="From a push to the next pull: to have the next batch.")]
_Slow = Annotated[str, typer.Option(metavar="NxFACTOR", help="So many workers take so many times as long.")]
_Network = Annotated[str, typer.Option(metavar="10Gb", help="Of a worker, a second.")]
_ServerNetwork = Annotated[str | None, typer.Option(metavar="10Gb", help="Of a server; by default as a worker's.")]
_Latency = Annotated[str, typer.Option(metavar="200us", help="Of a message, one way.")]
_Failures = Annotated[float, typer.Option(min=0, help="Deaths of each worker an hour.")]
_ServerFailures = Annotated[float, typer.Option(min=0, help="Deaths of each server an hour.")]
_Steps = Annotated[int, typer.Option(min=1, help="Global ones.")]
_BatchSize = Annotated[int | None, typer.Option(min=1, help="Global; by default 64 for each worker.")]
_AsInJob = Annotated[str, typer.Option(help="As in a job.")]
_LocalSteps = Annotated[int, typer.Option(min=1, help="As in a job.")]
_Seed = Annotated[int, typer.Option(min=0, help="Of everything random.")]
_Timing = Annotated[bool, typer.Option("--timing", help="Times alone, without the stand-in problem.")]
_Html = Annotated[str | None, typer.Option(metavar="FILE", help="Write it as a page, with pictures.")]
_AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def simulate(
    file: _File = None,
    workers: _Workers = None,
    servers: _Servers = "1",
    consistency: _Rules = None,
    parameters: _Parameters = None,
    compute: _Compute = None,
    spread: _Spread = 0.05,
    between: _Between = "0ms",
    unequal: _Unequal = 0.0,
    slow: _Slow = "",
    network: _Network = "10Gb",
    server_network: _ServerNetwork = None,
    latency: _Latency = "200us",
    failures: _Failures = 0.0,
    server_failures: _ServerFailures = 0.0,
    steps: _Steps = 200,
    batch_size: _BatchSize = None,
    wire: _AsInJob = "full",
    local_steps: _LocalSteps = 1,
    outer: _AsInJob = "average",
    seed: _Seed = 0,
    timing: _Timing = False,
    html: _Html = None,
    as_json: _AsJson = False,
) -> None:
    """Simulate workers that step alone against servers: throughput, staleness, waiting and loss by virtual time."""
    told = {
        "workers": workers, "parameter_bytes": 4 * _parse_quantity(parameters, _COUNTS,
        "--parameters") if parameters else None,
        "compute_s": _parse_quantity(compute, _TIMES, "--compute") if compute else None, "batch_size": batch_size,
    }  # fmt: skip
    facts = {
        "spread": spread, "unequal": unequal, "slow": _parse_slowdown(slow), "steps": steps, "seed": seed,
        "between_s": _parse_quantity(between, _TIMES, "--between"), "worker_bytes_per_s": _parse_quantity(network,
        _RATES, "--network"),
        "server_bytes_per_s": _parse_quantity(server_network or network, _RATES, "--server-network"),
        "latency_s": _parse_quantity(latency, _TIMES, "--latency"), "failures_per_hour": failures,
        "server_failures_per_hour": server_failures, "wire": GradientCompression.parse(wire),
        "local_steps": local_steps,
        "outer": OuterOptimizer.parse(outer),
    }  # fmt: skip
    rules = [Consistency.parse(word) for word in consistency or ("sync", "ssp(3)", "async")]
    _run(
        {**_scenario_facts(file, told), **facts},
        rules,
        _parse_counts(servers),
        learn=not timing,
        html=html,
        as_json=as_json,
    )


def _run(
    facts: dict[str, Any], rules: Sequence[Consistency], servers: Sequence[int], *, learn: bool, html: str | None,
    as_json: bool,
) -> None:  # fmt: skip
    """Simulate, and show what came of it. Raises PlanError."""
    from rich.console import Console

    from trainwright.simulator.event_simulator import Simulation
    from trainwright.simulator.scenario import Scenario
    from trainwright.simulator.simulation_view import as_data, as_page, as_table

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


def _scenario_facts(file: str | None, told: dict[str, Any]) -> dict[str, Any]:
    """What is given, and for the rest what the job's plan says, or what is usual."""
    usual: dict[str, Any] = _facts_from_plan(file) if file else {"workers": 8, "parameter_bytes": 1e8, "compute_s": 0.1}
    found = usual | {name: value for name, value in told.items() if value is not None}
    return {"batch_size": 64 * found["workers"], **found}


def _facts_from_plan(file: str) -> dict[str, Any]:
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


def _parse_quantity(text: str, units: dict[str, float], option: str) -> float:
    """A number with one of these units. Raises PlanError."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    if found is None or found[2] not in units:
        known = ", ".join(filter(None, units))
        raise PlanError(f"{text!r} cannot be read", where=option, remedy=f"write a number and one of: {known}")
    return float(found[1]) * units[found[2]]


def _parse_slowdown(text: str) -> tuple[float, ...]:
    """`2x5`: two that take five times as long. Raises PlanError."""
    if not text:
        return ()
    found = re.fullmatch(r"(\d+)x(\d+(?:\.\d+)?)", text.strip())
    if found is None or float(found[2]) <= 0:
        raise PlanError(f"{text!r} cannot be read", where="--slow", remedy="write workers x times: 1x5")
    return (float(found[2]),) * int(found[1])


def _parse_counts(text: str) -> list[int]:
    """`1,2,4`. Raises PlanError."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) for part in parts):
        raise PlanError(f"{text!r} is no number of servers", where="--servers", remedy="write numbers: 1,2,4")
    return [int(part) for part in parts]


# --- Options of `trainwright plan` as people write them, read into numbers --------------------------------------------


_OPTIONS = (
    (r"\b(resume|fresh|here|verbose)=True", r"--\1"),
    (r"\bcritical_batch=(?=\d)", "--critical-batch "),
    (r"\b(step|price)=(?=\d)", r"--\1 "),
    (r"\bleave detached out", "leave --detach out"),
    (r"\bleave cluster= out", "leave --cluster out"),
    (r"\bpredictions workers=", "predictions --workers"),
)
_HOURS = {"h": 1.0, "d": 24.0, "y": 24.0 * 365}


def plan_arguments(cluster: str | None, given: Mapping[str, Any], out: str | None = None) -> dict[str, Any]:
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
    readers = {"price": parse_price, "mtbf_hours": parse_hours, "batch_sizes": parse_batch_sizes}
    return {"cluster": cluster} | {name: readers.get(name, _unchanged)(value) for name, value in named.items()}


def with_option_names(remedy: str) -> str:
    """Return what to do in the words of the command line: errors name arguments of Python's functions."""
    for pattern, option in _OPTIONS:
        remedy = re.sub(pattern, option, remedy)
    return remedy


def write_html(answer: Any, path: str) -> None:
    """Write what a notebook would show as a page of its own. Raises PlanError where the file cannot be written."""
    from trainwright.planning.plan_charts import standalone_page

    try:
        Path(path).write_text(standalone_page(answer._repr_html_()), encoding="utf-8")
    except OSError as error:
        remedy = "name a file in a folder that is there"
        raise PlanError(f"{path} cannot be written: {error.strerror}", where="--html", remedy=remedy) from error


def _unchanged(value: Any) -> Any:
    return value


def parse_price(text: str) -> Price | str:
    """`on-demand`, `spot` or dollars an hour, `2.50` or `$2.50`; other words are left for the planner to refuse."""
    try:
        return float(text.removeprefix("$"))
    except ValueError:
        return text


def parse_hours(text: str) -> float:
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


def parse_batch_sizes(text: str) -> tuple[int, ...]:
    """`256,512,1024`. Raises PlanError for anything else."""
    parts = [part.strip() for part in text.split(",")]
    wrong = [part for part in parts if not (part.isascii() and part.isdigit() and int(part))]
    if wrong:
        remedy = "write samples with commas between: 256,512,1024"
        raise PlanError(f"{wrong[0]!r} is no batch size", where="--batch-sizes", remedy=remedy)
    return tuple(map(int, parts))
