"""Check scripts for Slurm's sbatch: nodes, time, the command that starts Ray, and its token.

Unknown options are left to sbatch, which refuses them when the script is submitted.
"""

from __future__ import annotations

import re

from trainwright.cluster_files import ray_start
from trainwright.cluster_files.yaml_checks import YamlItem
from trainwright.core.errors import Finding

_SHORT = {"N": "nodes", "t": "time", "n": "ntasks", "G": "gpus", "p": "partition", "A": "account", "c": "cpus-per-task"}
_DIRECTIVE = re.compile(r"^#SBATCH\s+(?:--(?P<long>[\w-]+)(?:[=\s]+(?P<value>\S+))?|-(?P<short>\w)\s*(?P<of>\S+)?)")


def check_script(text: str, file: str) -> list[Finding]:
    """Return the findings of a script."""
    whole = YamlItem(value=text, file=file, line=1, path="")
    given = _directives(text, file)
    found = _missing(whole, given)
    call = _ray_call(text, file)
    if call is None:
        remedy = "start every node with `srun ... ray symmetric-run --address HEAD:6379 --min-nodes N -- COMMAND`"
        found.append(
            whole.finding(
                "start", "bad", "the script does not call `ray symmetric-run`, so only one node works", remedy
            )
        )
    else:
        found += ray_start.check_starts([call])
    return found


def _directives(text: str, file: str) -> dict[str, YamlItem]:
    """Return the options of #SBATCH lines by their long names."""
    found = {}
    for line, said in enumerate(text.splitlines(), 1):
        parts = _DIRECTIVE.match(said)
        if parts:
            name = parts["long"] or _SHORT.get(parts["short"], "")
            found[name] = YamlItem(value=parts["value"] or parts["of"] or "", file=file, line=line, path=f"--{name}")
    return found


def _missing(whole: YamlItem, given: dict[str, YamlItem]) -> list[Finding]:
    found = []
    if "nodes" not in given:
        found.append(whole.finding("nodes", "bad", "#SBATCH --nodes is missing", "write how many hosts the run gets"))
    elif not re.fullmatch(r"[1-9]\d*(-[1-9]\d*)?", str(given["nodes"].value)):
        said = f"{given['nodes'].value!r} is not a number of nodes"
        found.append(given["nodes"].finding("nodes", "bad", said, "write a number"))
    if "time" not in given:
        said = "#SBATCH --time is missing: the partition's limit, often an hour or none, ends the run"
        found.append(whole.finding("time", "doubtful", said, "write how long the run may take: --time=24:00:00"))
    elif not re.fullmatch(r"(\d+-)?\d+(:\d+){0,2}|UNLIMITED|INFINITE", str(given["time"].value), re.IGNORECASE):
        said = f"{given['time'].value!r} is not a time"
        found.append(given["time"].finding("time", "bad", said, "write hours:minutes:seconds or days-hours"))
    each = given.get("ntasks-per-node")
    if each is not None and each.value != "1":
        said = f"{each.value} tasks on each node would start Ray {each.value} times there"
        found.append(each.finding("start", "bad", said, "write --ntasks-per-node=1"))
    return found


def _ray_call(text: str, file: str) -> ray_start.RayStart | None:
    """Return the call of `ray symmetric-run` with its continuation lines and the variables exported before it."""
    lines = text.splitlines()
    environment: dict[str, str] = {}
    for line, said in enumerate(lines, 1):
        if said.lstrip().startswith("#"):
            continue
        if "symmetric-run" in said:
            command, number = said, line
            while command.endswith("\\") and number < len(lines):
                command, number = command[:-1] + " " + lines[number], number + 1
            own = command.split(" -- ")[0]
            return ray_start.parse_start(
                YamlItem(value=own, file=file, line=line, path="ray symmetric-run"), environment
            )
        for name, value in re.findall(r"\b(RAY_\w+)=([^\s;]*)", said):
            environment[name] = value.strip("'\"")
    return None
