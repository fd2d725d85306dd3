"""`make bench`: measures trainwright next to its peers, prints a table and writes RESULTS.md.

    python benchmarks/run.py [NAME ...] [--quick]

Each whole benchmark's figures are kept in results/ and RESULTS.md is made of them anew; quick ones only print. Exits
with 1 when a benchmark did not finish.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from figures import Figure, Section, page, read_figures, read_sections, table, write_section
from machine import facts

HERE = Path(__file__).resolve().parent
DEADLINES_S = {
    "step_time": 420, "tf_step_time": 420, "ray_step_time": 420, "pipeline_step": 420, "sharded_step": 420,
    "first_step": 420, "checkpoint_stall": 420, "memory": 420, "plans": 900,
    "recovery": 900, "tf_recovery": 900, "recovery_4": 900, "recovery_large": 420,
    "parameter_server": 900,
    "data_light": 420, "data_heavy": 420, "data_start": 240, "data_step": 240, "tf_feed": 240,
    "asynchronous": 2400, "simulated": 420, "tf_parameter_server": 600,
    "distilling": 900, "distilled": 1200, "gpu_step": 540,
}  # fmt: skip
ON_GPU = ("gpu_step",)  # run by name alone


def main() -> int:
    """Run what was asked for; 0 when all of it finished."""
    options = _options()
    failed = 0
    for name in options.names or [name for name in DEADLINES_S if name not in ON_GPU]:
        machine = facts([name, *(["--quick"] if options.quick else [])])
        figures = _run(name, options.quick)
        failed += not figures
        print("\n".join(f"{key}: {value}" for key, value in machine.items()), table(figures), sep="\n\n", end="\n\n")
        if figures and not options.quick:
            note = importlib.import_module(name).NOTE
            write_section(HERE / "results", Section(name=name, facts=machine, note=note, figures=figures))
    (HERE / "RESULTS.md").write_text(page(read_sections(HERE / "results", list(DEADLINES_S))), encoding="utf-8")
    return 1 if failed else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"of {', '.join(DEADLINES_S)}; by default all but {', '.join(ON_GPU)}"
    )
    parser.add_argument("--quick", action="store_true", help="fewer repetitions, under four minutes; not to be quoted")
    options = parser.parse_args()
    unknown = [name for name in options.names if name not in DEADLINES_S]
    if unknown:
        parser.error(f"{unknown[0]} is no benchmark; there are {', '.join(DEADLINES_S)}")
    return options


def _run(name: str, quick: bool) -> list[Figure]:
    """One benchmark in a process and a folder of its own; none where it fails or takes too long, which is printed."""
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="tw-bench-", ignore_cleanup_errors=True) as folder:
        output, log = Path(folder) / "figures.json", Path(folder) / "log.txt"
        command = [sys.executable, str(HERE / "measure.py"), name, str(output), folder, *(["--quick"] if quick else [])]
        ended = _child(command, folder, log, DEADLINES_S[name])
        print(f"{name}: {ended}, {time.monotonic() - begun:.0f} s", flush=True)
        if output.exists():
            return read_figures(output)
        print("\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-40:]), file=sys.stderr)
    return []


def _child(command: list[str], folder: str, log: Path, deadline_s: float) -> str:
    """Run a command to its end or its deadline; says which. What it started goes with it."""
    environment = {**os.environ, "TMPDIR": folder, "PYTHONUNBUFFERED": "1"}
    environment.pop("RAY_ADDRESS", None)
    with log.open("w") as written:
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=written, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            return f"stopped after {deadline_s:g} s"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return "done" if code == 0 else f"failed with exit code {code}"


if __name__ == "__main__":
    sys.exit(main())
