"""Run tests at the ends of the supported versions, each in an environment of its own under .matrix/.

    python .ci/matrix.py                 both ends
    python .ci/matrix.py lowest          one of them
    python .ci/matrix.py lowest conformance    some of its suites

Prints a table in Markdown, for docs/versions.md, and exits with 1 where something failed. A suite that runs past its
limit is stopped and counts as failed; what it printed is in .matrix/END-SUITE.log.
"""

from __future__ import annotations

import argparse
import datetime
import os
import resource
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / ".matrix"
PYTHONS = {"lowest": "python3.11", "highest": "python3.13"}
SET_UP_LIMIT_S = 3600
SUITES = {  # arguments of pytest, and the limit in seconds
    # Without the tests of packaging, set-up and cluster files, which have the versions of constraints.txt.
    "unit": (
        ["tests/unit", *(f"--ignore=tests/unit/test_{name}.py" for name in ("packaging", "make", "clusterfiles"))],
        3600,
    ),
    "conformance": (["tests/conformance"], 3600),
    "faults": (["tests/faults/test_worker_kills.py"], 1200),
    "ray": (["tests/ray/test_ray_actors.py"], 1200),
}


@dataclass(frozen=True, kw_only=True)
class Row:
    """A line of the table."""

    end: str
    suite: str
    result: str
    passed: bool
    cpu_s: float

    def __str__(self) -> str:
        """In Markdown."""
        return f"| {datetime.date.today()} | {self.end} | {self.suite} | {self.result} | {self.cpu_s:.0f} s |"


def run(end: str, suite: str, command: list[str], limit_s: float, **environment: str) -> Row:
    """Run a command with its output in a file, in a process group that ends with it."""
    log = FOLDER / f"{end}-{suite}.log"
    before = cpu_s()
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, env={**os.environ, **environment}, stdout=output, stderr=output, start_new_session=True
        )
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            code = process.wait()
            said = f"stopped after {limit_s:g} s"
        else:
            said = log.read_text(errors="replace").strip().rpartition("\n")[2].strip("= ") or f"exit status {code}"
    return Row(end=end, suite=suite, result=said, passed=code == 0, cpu_s=cpu_s() - before)


def cpu_s() -> float:
    """Processor time of the processes that have ended and were waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def rows(end: str, suites: list[str]) -> list[Row]:
    """Set up an environment and run suites in it; none where the set-up failed."""
    venv = f".matrix/{end}"
    choices = {"CONSTRAINTS": f".ci/{end}.txt", "PYTHON": os.environ.get("PYTHON") or PYTHONS[end]}
    found = [run(end, "set-up", ["sh", ".ci/setup.sh", venv], SET_UP_LIMIT_S, **choices)]
    for suite in suites if found[0].passed else ():
        arguments, limit_s = SUITES[suite]
        command = [f"{venv}/bin/python", "-m", "pytest", "-q", "-n", "2", "--dist", "loadfile", *arguments]
        path = f"{ROOT / venv / 'bin'}{os.pathsep}{os.environ['PATH']}"
        found.append(run(end, suite, command, limit_s, PATH=path))
    return found


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[*PYTHONS, *SUITES], metavar="END|SUITE")
    names = parser.parse_args().names
    ends = [end for end in PYTHONS if end in names] or [*PYTHONS]
    suites = [suite for suite in SUITES if suite in names] or [*SUITES]
    FOLDER.mkdir(exist_ok=True)
    found: list[Row] = []
    print("| date | end | run | result | CPU time |\n|---|---|---|---|---|", flush=True)
    for end in ends:
        for row in rows(end, suites):
            print(row, flush=True)
            found.append(row)
    failed = [row for row in found if not row.passed]
    for row in failed:
        print(f"failed: {row.end} {row.suite}: see .matrix/{row.end}-{row.suite}.log", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
