"""`make bench`: measures trainwright next to its peers, prints a table, writes RESULTS.md and the rows of README.

    python benchmarks/run.py [NAME ...] [--smoke]

The figures of each benchmark are kept in results/, from which RESULTS.md is written. `--smoke` runs each benchmark once
with the smallest sizes, checks that its figures are finite and positive, and writes no file. Exits with 1 when a
benchmark failed or did not finish.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from figures import Figure, Section, page, read_figures, read_sections, table, write_section
from machine import facts, shared_cluster
from rows import write_rows

HERE = Path(__file__).resolve().parent
SMOKE_DEADLINE_S = 600.0  # of each benchmark, on a machine that does much else
SMOKE_CPUS = 10  # of the Ray cluster that smoke runs share: twice the most that one of them asks for

_RUNNING: set[subprocess.Popen[bytes]] = set()


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """How one benchmark is run.

    Attributes:
        deadline_s: seconds after which a measured run is stopped.
        peer: package that is measured only where it is installed.
        ray: it starts a Ray cluster, and may share a larger one with others in a smoke run.
        gpu: it needs a GPU: `make bench` runs it by name alone. Its smoke run takes the CPU where there is no GPU.
    """

    deadline_s: float
    peer: str = ""
    ray: bool = False
    gpu: bool = False


BENCHMARKS = {
    "step_time": Benchmark(deadline_s=420),
    "tf_step_time": Benchmark(deadline_s=420),
    "ray_step_time": Benchmark(deadline_s=420, ray=True),
    "pipeline_step": Benchmark(deadline_s=600),
    "sharded_step": Benchmark(deadline_s=420),
    "first_step": Benchmark(deadline_s=420, ray=True),
    "checkpoint_stall": Benchmark(deadline_s=420),
    "storage": Benchmark(deadline_s=900),
    "checkpoint_load": Benchmark(deadline_s=420),
    "memory": Benchmark(deadline_s=420),
    "plans": Benchmark(deadline_s=900),
    "recovery": Benchmark(deadline_s=900, peer="torchft", ray=True),
    "tf_recovery": Benchmark(deadline_s=900, ray=True),
    "recovery_4": Benchmark(deadline_s=900, peer="torchft", ray=True),
    "recovery_large": Benchmark(deadline_s=420, ray=True),
    "driver_scale": Benchmark(deadline_s=420, ray=True),
    "parameter_server": Benchmark(deadline_s=900, ray=True),
    "data_light": Benchmark(deadline_s=1200, peer="litdata", ray=True),
    "data_heavy": Benchmark(deadline_s=420, ray=True),
    "data_start": Benchmark(deadline_s=240, ray=True),
    "data_step": Benchmark(deadline_s=240),
    "data_index": Benchmark(deadline_s=900, ray=True),
    "tf_feed": Benchmark(deadline_s=240),
    "asynchronous": Benchmark(deadline_s=2400),
    "simulated": Benchmark(deadline_s=420),
    "tf_parameter_server": Benchmark(deadline_s=600, ray=True),
    "distilling": Benchmark(deadline_s=900),
    "distilled": Benchmark(deadline_s=1200),
    "gpu_step": Benchmark(deadline_s=540, gpu=True),
    "gpu_recovery": Benchmark(deadline_s=420, gpu=True),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmarks asked for; 0 when all of them gave figures."""
    options = _options(arguments)
    names = options.names or default_names(smoke=options.smoke)
    failed = _smoke(names) if options.smoke else _measure(names)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def _measure(names: Sequence[str]) -> list[str]:
    """Measure one benchmark after the other, keep the figures and write RESULTS.md; return those that failed."""
    failed = []
    for name in names:
        machine = facts([name])
        figures = _run(name, smoke=False)
        if not figures:
            failed.append(name)
            continue
        print("\n".join(f"{key}: {value}" for key, value in machine.items()), table(figures), sep="\n\n", end="\n\n")
        note = importlib.import_module(name).NOTE
        write_section(HERE / "results", Section(name=name, facts=machine, note=note, figures=figures))
    (HERE / "RESULTS.md").write_text(page(read_sections(HERE / "results", list(BENCHMARKS))), encoding="utf-8")
    write_rows()
    return failed


def _smoke(names: Sequence[str]) -> list[str]:
    """Run two benchmarks at a time; return those that failed.

    Those on Ray share a cluster: one of them runs beside one of the others, then two of what is left.
    """
    on_ray = [name for name in names if BENCHMARKS[name].ray]
    left = deque([*on_ray, *(name for name in names if not BENCHMARKS[name].ray)])
    with ThreadPoolExecutor() as pool, ExitStack() as stack:
        stop = stack.enter_context(_stopping())
        cluster = stack.enter_context(shared_cluster(SMOKE_CPUS)) if len(on_ray) > 1 else {}
        lanes = [pool.submit(_lane, take, cluster, stop) for take in (left.popleft, left.pop)]
        return [name for lane in lanes for name in lane.result()]


def _lane(take: Callable[[], str], environment: Mapping[str, str], stop: threading.Event) -> list[str]:
    """Run the benchmarks that `take` gives, one after the other, and print their figures; return those that failed."""
    failed = []
    while not stop.is_set():
        try:
            name = take()
        except IndexError:
            break
        if figures := _run(name, smoke=True, environment=environment if BENCHMARKS[name].ray else {}):
            print(table(figures), end="\n\n", flush=True)
        else:
            failed.append(name)
    return failed


@contextlib.contextmanager
def _stopping() -> Iterator[threading.Event]:
    """An event that ends all lanes when the main thread leaves the context early, as Ctrl-C makes it do."""
    stop = threading.Event()
    try:
        yield stop
    finally:
        stop.set()
        for process in list(_RUNNING):
            _kill(process)


def default_names(*, smoke: bool) -> list[str]:
    """The benchmarks that are run where none is named."""
    return [name for name, benchmark in BENCHMARKS.items() if smoke or not benchmark.gpu]


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    by_name = [name for name, benchmark in BENCHMARKS.items() if benchmark.gpu]
    parser.add_argument(
        "names", nargs="*", metavar="NAME",
        help=f"of {', '.join(BENCHMARKS)}; all by default, but {', '.join(by_name)} only with --smoke",
    )  # fmt: skip
    parser.add_argument("--smoke", action="store_true", help="check that each benchmark runs; keep no figures")
    options = parser.parse_args(arguments)
    unknown = [name for name in options.names if name not in BENCHMARKS]
    if unknown:  # `choices` of argparse refuses an empty list of names on Python 3.11
        parser.error(f"unknown benchmark {unknown[0]!r}; choose from {', '.join(BENCHMARKS)}")
    return options


def _run(name: str, *, smoke: bool, environment: Mapping[str, str] | None = None) -> list[Figure]:
    """Run one benchmark in a process and a folder of its own.

    Returns:
        Its figures; none where it failed, took too long or gave impossible figures, which is printed with the end of
        its log.
    """
    benchmark, began = BENCHMARKS[name], time.monotonic()
    if benchmark.peer and importlib.util.find_spec(benchmark.peer) is None:
        print(f"{name}: {benchmark.peer} is not installed and is not measured", flush=True)
    with tempfile.TemporaryDirectory(prefix="tw-bench-", ignore_cleanup_errors=True) as folder:
        output, log = Path(folder) / "figures.json", Path(folder) / "log.txt"
        command = [sys.executable, str(HERE / "measure.py"), name, str(output), folder, *(["--smoke"] if smoke else [])]
        deadline_s = SMOKE_DEADLINE_S if smoke else benchmark.deadline_s
        error = _child(command, folder, log, deadline_s, environment or {})
        figures = read_figures(output) if not error else []
        error = error or "; ".join(fault for figure in figures for fault in figure.faults)
        print(f"{name}: {error or 'done'}, {time.monotonic() - began:.0f} s", flush=True)
        if not error:
            return figures
        print("\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-40:]), file=sys.stderr)
    return []


def _child(command: list[str], folder: str, log: Path, deadline_s: float, variables: Mapping[str, str]) -> str:
    """Run a command to its end or its deadline and kill what it left behind; return the error, empty for none."""
    packages = [str(Path(entry).absolute()) for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(packages), "TMPDIR": folder, "PYTHONUNBUFFERED": "1"}
    environment |= variables
    environment.pop("RAY_ADDRESS", None)
    with log.open("w") as written:
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=written, stderr=subprocess.STDOUT, start_new_session=True
        )
        _RUNNING.add(process)
        try:
            code = process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            return f"stopped after {deadline_s:g} s"
        finally:
            _kill(process)
            process.wait()
            _RUNNING.remove(process)
    return "" if code == 0 else f"failed with exit code {code}"


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and those of its group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # which ends what is running, as Ctrl-C does
    sys.exit(main())
