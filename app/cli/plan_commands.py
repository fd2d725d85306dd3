"""Commands that answer questions before a run: plan, simulate and probe."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trainwright.cli.options import (
    AsJson,
    Html,
    JobFile,
    Overrides,
    Strategy,
    Workers,
    print_json,
    terminal_console,
    with_pins,
    write_file,
)
from trainwright.core.errors import PlanError
from trainwright.core.topology import Consistency, GradientCompression, OuterOptimizer

if TYPE_CHECKING:
    from trainwright.planning.what_if import Price

_WIDTH = 140  # of tables in files and pipes
_TIMES = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0}
_COUNTS = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "B": 1e9}
_RATES = {"Mb": 1e6 / 8, "Gb": 1e9 / 8}


_File = Annotated[
    str | None, typer.Argument(metavar="[FILE.py]", help="A job file. Its plan gives the values of missing options.")
]
_Workers = Annotated[int | None, typer.Option(min=1, help="Number of workers; by default 8.")]
_Servers = Annotated[str, typer.Option(metavar="N,N", help="Numbers of servers to compare, one row for each.")]
_Rules = Annotated[
    list[str] | None,
    typer.Option(metavar="FORM", help="Consistency, one row for each; by default sync, ssp(3) and async. Repeatable."),
]
_Parameters = Annotated[
    str | None, typer.Option(metavar="25M", help="Parameters of the model, in single precision; by default 25M.")
]
_Compute = Annotated[
    str | None, typer.Option(metavar="100ms", help="Time that a worker computes in a step; by default 100ms.")
]
_Spread = Annotated[
    float, typer.Option(min=0, help="Standard deviation of the logarithm of a worker's time from step to step.")
]
_Unequal = Annotated[
    float, typer.Option(min=0, help="Standard deviation of the logarithm of the mean time from worker to worker.")
]
_Between = Annotated[
    str, typer.Option(metavar="5ms", help="Time from a push to the next pull, such as waiting for the next batch.")
]
_Slow = Annotated[str, typer.Option(metavar="NxFACTOR", help="N workers take FACTOR times as long: 1x5.")]
_Network = Annotated[str, typer.Option(metavar="10Gb", help="Network rate of a worker, in bits a second.")]
_ServerNetwork = Annotated[
    str | None, typer.Option(metavar="10Gb", help="Network rate of a server; by default that of a worker.")
]
_Latency = Annotated[str, typer.Option(metavar="200us", help="Time of a message from sender to receiver.")]
_Failures = Annotated[float, typer.Option(min=0, help="Failures of each worker in an hour.")]
_ServerFailures = Annotated[float, typer.Option(min=0, help="Failures of each server in an hour.")]
_Steps = Annotated[int, typer.Option(min=1, help="Number of global steps.")]
_BatchSize = Annotated[int | None, typer.Option(min=1, help="Global batch size; by default 64 for each worker.")]
_Wire = Annotated[str, typer.Option(help="Gradient compression, as wire= of a job.")]
_LocalSteps = Annotated[int, typer.Option(min=1, help="Steps between two pushes, as local_steps= of a job.")]
_Outer = Annotated[str, typer.Option(help="Outer optimizer of the servers, as outer= of a job.")]
_Seed = Annotated[int, typer.Option(min=0, help="Seed of all random values.")]
_Timing = Annotated[
    bool, typer.Option("--timing", help="Simulate times only, without the stand-in problem that gives a loss.")
]


_Cluster = Annotated[
    str | None,
    typer.Option(
        metavar="NxGxKIND", help="Plan for this cluster, which need not exist: 128x8xH100-80GB, 4x8xA100-80GB@800Gb."
    ),
]


def plan(
    file: JobFile,
    overrides: Overrides = None,
    strategy: Strategy = None,
    workers: Workers = None,
    cluster: _Cluster = None,
    aim: Annotated[
        str | None,
        typer.Option(
            "--for", metavar="GOAL", help="With --cluster: optimize for fastest (default), cheapest or smallest."
        ),
    ] = None,
    price: Annotated[
        str | None,
        typer.Option(
            metavar="PRICE", help="With --cluster: on-demand (default), spot, or dollars an hour of one accelerator."
        ),
    ] = None,
    mtbf: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="With --cluster: mean time between failures of one accelerator: 50000h."),
    ] = None,
    critical_batch: Annotated[
        float | None, typer.Option(metavar="SAMPLES", help="With --cluster: the gradient noise scale.")
    ] = None,
    batch_sizes: Annotated[
        str | None,
        typer.Option(metavar="N,N", help="With --cluster: compare these batch sizes by time to the target: 256,512."),
    ] = None,
    out: Annotated[
        str | None, typer.Option(metavar="PLAN.json", help="Write the plan; --set plan=PLAN.json uses it later.")
    ] = None,
    html: Html = None,
    as_json: AsJson = False,
) -> None:
    """Show the chosen plan and the rejected ones, with reasons. For a distillation, compare teacher deliveries."""
    from trainwright import api
    from trainwright.planning import job_file
    from trainwright.planning.planner import write_plan
    from trainwright.reporting.html.templates import render_page

    given = {
        "aim": aim, "price": price, "mtbf_hours": mtbf, "critical_batch": critical_batch, "batch_sizes": batch_sizes,
    }  # fmt: skip
    answer: Any = api.plan(
        job_file.load(file, with_pins(overrides, strategy, workers)), **_plan_arguments(cluster, given, out)
    )
    if out:
        write_plan(out, answer)
    if html:
        write_file(html, render_page("trainwright plan", answer._repr_html_()), "--html")
    if as_json:
        print_json(asdict(answer))
    else:
        print(answer)


def strategies(as_json: AsJson = False) -> None:
    """List the strategies, when to use each, and what it supports."""
    from rich.table import Table

    from trainwright.strategies.search.registry import STRATEGIES, TABLES

    rows = [strategy.row for strategy in STRATEGIES.values()]
    if as_json:
        print_json(rows)
        return
    for columns in TABLES:
        table = Table(box=None, padding=(0, 3, 0, 0), header_style="dim")
        for key, heading in columns.items():
            table.add_column(heading, no_wrap=key == "name", overflow="fold")
        for row in rows:
            table.add_row(*(row[key] for key in columns))
        terminal_console(_WIDTH, highlight=False).print(table, "")


def probe(
    everything: Annotated[
        bool, typer.Option("--all", help="Also measure accelerators with a known data sheet, and one CPU core.")
    ] = False,
) -> None:
    """Benchmark accelerators missing from the built-in table. Print lines for a job file that add them to it."""
    from trainwright.planning.profiler import benchmark_accelerators as measure
    from trainwright.planning.profiler import format_as_python

    found = measure(everything=everything)
    if not found:
        print("the built-in table has every accelerator of the cluster; --all measures these too", file=sys.stderr)
        return
    print("from trainwright.core.cluster import ACCELERATORS, Accelerator\n")
    print("\n".join(map(format_as_python, found)))


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
    wire: _Wire = "full",
    local_steps: _LocalSteps = 1,
    outer: _Outer = "average",
    seed: _Seed = 0,
    timing: _Timing = False,
    html: Html = None,
    as_json: AsJson = False,
) -> None:
    """Simulate asynchronous workers and parameter servers. Show throughput, staleness, waiting, and loss over time."""
    given = {
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
        {**_scenario_facts(file, given), **facts},
        rules,
        _parse_numbers(servers, "number of servers", "--servers", "write numbers: 1,2,4"),
        learn=not timing,
        html=html,
        as_json=as_json,
    )


def _run(
    facts: dict[str, Any], rules: Sequence[Consistency], servers: Sequence[int], *, learn: bool, html: str | None,
    as_json: bool,
) -> None:  # fmt: skip
    """Simulate all combinations and show the results. Raises ResourceError if the page cannot be written."""
    from trainwright.simulator.event_simulator import Scenario, Simulation
    from trainwright.simulator.simulation_view import as_data, as_page, as_table

    scenarios = [Scenario(consistency=rule, servers=count, **facts) for rule in rules for count in servers]
    outcomes = [Simulation(scenario, learn=learn).run() for scenario in scenarios]
    if html:
        write_file(html, as_page(outcomes), "--html")
    if as_json:
        print(json.dumps(as_data(outcomes), indent=2))
    else:
        terminal_console(_WIDTH).print(as_table(outcomes))


def _scenario_facts(file: str | None, given: dict[str, Any]) -> dict[str, Any]:
    """Return the given values, and for the others those of the job's plan or the defaults."""
    usual: dict[str, Any] = _facts_from_plan(file) if file else {"workers": 8, "parameter_bytes": 1e8, "compute_s": 0.1}
    chosen = {name: value for name, value in given.items() if value is not None}
    found = {"batch_size": 64 * chosen.get("workers", usual["workers"]), **usual, **chosen}
    if file and "compute_s" not in chosen:  # the plan's is that of its own share of its own batch
        rows, planned = (each["batch_size"] / each["workers"] for each in (found, usual))
        found["compute_s"] *= rows / planned
    return found


def _facts_from_plan(file: str) -> dict[str, Any]:
    """Return workers, parameters, batch size and computing time of a step from a job's plan."""
    from trainwright import api
    from trainwright.planning.job_file import load_job

    decision = api.plan(load_job(file))
    plan = decision.chosen
    assert plan.estimate is not None, "a chosen plan has an estimate"
    computed = ("compute", "recompute", "teachers", "other")
    return {
        "workers": plan.workers,
        "parameter_bytes": float(4 * decision.profile.parameters),
        "compute_s": sum(plan.estimate.terms.get(name, 0.0) for name in computed),
        "batch_size": plan.batch_size,
    }


def _parse_quantity(text: str, units: dict[str, float], option: str) -> float:
    """Parse a number with a unit. Raises PlanError."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    if found is None or found[2] not in units:
        known = ", ".join(filter(None, units))
        raise PlanError(f"{text!r} cannot be read", where=option, remedy=f"write a number and one of: {known}")
    return float(found[1]) * units[found[2]]


def _parse_slowdown(text: str) -> tuple[float, ...]:
    """Parse `2x5`: two workers take five times as long. Raises PlanError."""
    if not text:
        return ()
    found = re.fullmatch(r"(\d+)x(\d+(?:\.\d+)?)", text.strip())
    if found is None or float(found[2]) <= 0:
        raise PlanError(f"{text!r} cannot be read", where="--slow", remedy="write WORKERSxFACTOR: 1x5")
    return (float(found[2]),) * int(found[1])


# --- Options of `trainwright plan` ------------------------------------------------------------------------------------


_OPTIONS = (
    (r"\b(resume|fresh|here|verbose)=True", r"--\1"),
    (r"\btw\.open_run\('(.+?)', '(.+?)'\) shows", r"`trainwright show \1 --storage \2` shows"),
    (r"\ba larger epochs=", "a larger --set epochs="),
    (r"\bcritical_batch=(?=\d)", "--critical-batch "),
    (r"\b(step|price)=(?=\d)", r"--\1 "),
    (r"\bleave detached out", "leave --detach out"),
    (r"\bleave cluster= out", "leave --cluster out"),
    (r"\bpredictions workers=", "predictions --workers"),
)
_HOURS = {"h": 1.0, "d": 24.0, "y": 24.0 * 365}


def _plan_arguments(cluster: str | None, given: Mapping[str, Any], out: str | None = None) -> dict[str, Any]:
    """Return the arguments of `api.plan` for the options of `trainwright plan`.

    Args:
        given: values of the options that need --cluster, by argument; None if missing.

    Raises:
        PlanError: a value cannot be read, or an option needs --cluster or excludes it.
    """
    if out is not None and cluster is not None:
        what = "a plan made with --cluster cannot be saved"
        raise PlanError(what, where="--out", remedy="leave out --cluster or --out")
    named = {name: value for name, value in given.items() if value is not None}
    if cluster is None:
        for name in named:
            option = {"aim": "--for", "mtbf_hours": "--mtbf"}.get(name, f"--{name.replace('_', '-')}")
            remedy = "add one: --cluster 4x8xH100-80GB"
            raise PlanError("this option needs --cluster", where=option, remedy=remedy)
        return {}
    parsers = {"price": parse_price, "mtbf_hours": parse_hours, "batch_sizes": parse_batch_sizes}
    parsed = {name: parse(named[name]) for name, parse in parsers.items() if name in named}
    return {"cluster": cluster, **named, **parsed}


def with_option_names(remedy: str) -> str:
    """Replace Python arguments in the remedy of an error by options of the command line."""
    for pattern, option in _OPTIONS:
        remedy = re.sub(pattern, option, remedy)
    return remedy


def parse_price(text: str) -> Price | str:
    """Parse `on-demand`, `spot` or dollars an hour, `2.50` or `$2.50`; the planner refuses other words."""
    try:
        return float(text.removeprefix("$"))
    except ValueError:
        return text


def parse_hours(text: str) -> float:
    """Parse a time such as `50000h`, `2000d` or `5y`. Raises PlanError without unit or positive number."""
    number, unit = text[:-1], text[-1:]
    try:
        hours = float(number) * _HOURS[unit]
    except (KeyError, ValueError):
        hours = math.nan
    if 0 < hours < math.inf:
        return hours
    missing = " has no unit" if text.replace(".", "", 1).isdigit() else " is not a time between failures"
    remedy = "write hours, days or years of one accelerator: 50000h, 2000d, 5y"
    raise PlanError(f"{text!r}{missing}", where="--mtbf", remedy=remedy)


def parse_batch_sizes(text: str) -> tuple[int, ...]:
    """Parse numbers with commas, such as `256,512,1024`. Raises PlanError."""
    return _parse_numbers(text, "batch size", "--batch-sizes", "write numbers of samples with commas: 256,512,1024")


def _parse_numbers(text: str, what: str, option: str, remedy: str) -> tuple[int, ...]:
    """Parse positive numbers with commas. Raises PlanError."""
    parts = [part.strip() for part in text.split(",")]
    wrong = [part for part in parts if not (part.isascii() and part.isdigit() and int(part))]
    if wrong:
        raise PlanError(f"{wrong[0]!r} is not a {what}", where=option, remedy=remedy)
    return tuple(map(int, parts))
