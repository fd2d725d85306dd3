"""Scripts for Slurm's sbatch."""

from __future__ import annotations

import re

from trainwright.cluster_files import ray_start
from trainwright.cluster_files.node_groups import Need, NodeGroup, room
from trainwright.cluster_files.yaml_checks import YamlItem, closest
from trainwright.core.errors import Finding

# Options of sbatch that say something about a job on several nodes (slurm.schedmd.com/sbatch.html).
_OPTIONS = [
    "account",
    "array",
    "begin",
    "chdir",
    "comment",
    "constraint",
    "cluster-constraint",
    "clusters",
    "container",
    "contiguous",
    "core-spec",
    "cores-per-socket",
    "cpu-freq",
    "cpus-per-gpu",
    "cpus-per-task",
    "deadline",
    "delay-boot",
    "dependency",
    "distribution",
    "error",
    "exclude",
    "exclusive",
    "export",
    "extra-node-info",
    "get-user-env",
    "gid",
    "gpu-bind",
    "gpu-freq",
    "gpus",
    "gpus-per-node",
    "gpus-per-socket",
    "gpus-per-task",
    "gres",
    "gres-flags",
    "hint",
    "hold",
    "input",
    "job-name",
    "kill-on-invalid-dep",
    "licenses",
    "mail-type",
    "mail-user",
    "mcs-label",
    "mem",
    "mem-bind",
    "mem-per-cpu",
    "mem-per-gpu",
    "mincpus",
    "network",
    "nice",
    "no-kill",
    "no-requeue",
    "nodefile",
    "nodelist",
    "nodes",
    "ntasks",
    "ntasks-per-core",
    "ntasks-per-gpu",
    "ntasks-per-node",
    "ntasks-per-socket",
    "open-mode",
    "output",
    "overcommit",
    "oversubscribe",
    "parsable",
    "partition",
    "power",
    "prefer",
    "priority",
    "profile",
    "propagate",
    "qos",
    "quiet",
    "reboot",
    "requeue",
    "reservation",
    "segment",
    "signal",
    "sockets-per-node",
    "spread-job",
    "switches",
    "test-only",
    "thread-spec",
    "threads-per-core",
    "time",
    "time-min",
    "tmp",
    "tres-per-task",
    "uid",
    "use-min-nodes",
    "verbose",
    "wait",
    "wait-all-nodes",
    "wckey",
]
_SHORT = {"N": "nodes", "t": "time", "n": "ntasks", "G": "gpus", "p": "partition", "A": "account", "c": "cpus-per-task"}
_DIRECTIVE = re.compile(r"^#SBATCH\s+(?:--(?P<long>[\w-]+)(?:[=\s]+(?P<value>\S+))?|-(?P<short>\w)\s*(?P<of>\S+)?)")


def check_script(text: str, file: str, need: Need | None) -> list[Finding]:
    """Everything found in a script."""
    whole = YamlItem(value=text, file=file, line=1, path="")
    given = _directives(text, file)
    found = _unknown(given) + _missing(whole, given)
    call = _ray_call(text, file)
    if call is None:
        remedy = "start every node with `srun ... ray symmetric-run --address HEAD:6379 --min-nodes N -- COMMAND`"
        found.append(whole.finding("start", "bad", "`ray symmetric-run` is not called, so only one node works", remedy))
    else:
        found += ray_start.check_starts([call])
    group = _node_group(whole, given)
    return found + (room(whole, [group], need) if need and group else [])


def _directives(text: str, file: str) -> dict[str, YamlItem]:
    """Options behind #SBATCH, by their long names."""
    found = {}
    for line, said in enumerate(text.splitlines(), 1):
        parts = _DIRECTIVE.match(said)
        if parts:
            name = parts["long"] or _SHORT.get(parts["short"], "")
            found[name] = YamlItem(value=parts["value"] or parts["of"] or "", file=file, line=line, path=f"--{name}")
    return found


def _unknown(given: dict[str, YamlItem]) -> list[Finding]:
    return [
        item.finding("options", "bad", f"--{name} is no option of sbatch", closest(name, _OPTIONS))
        for name, item in given.items()
        if name and name not in _OPTIONS
    ]


def _missing(whole: YamlItem, given: dict[str, YamlItem]) -> list[Finding]:
    found = []
    if "nodes" not in given:
        found.append(whole.finding("nodes", "bad", "#SBATCH --nodes is missing", "say how many hosts the run gets"))
    elif not re.fullmatch(r"[1-9]\d*(-[1-9]\d*)?", str(given["nodes"].value)):
        said = f"{given['nodes'].value!r} is no number of nodes"
        found.append(given["nodes"].finding("nodes", "bad", said, "write a number"))
    if "time" not in given:
        said = "#SBATCH --time is missing: the partition's limit, often an hour or none, ends the run"
        found.append(whole.finding("time", "doubtful", said, "say how long the run may take: --time=24:00:00"))
    elif not re.fullmatch(r"(\d+-)?\d+(:\d+){0,2}|UNLIMITED|INFINITE", str(given["time"].value), re.IGNORECASE):
        said = f"{given['time'].value!r} is no time"
        found.append(given["time"].finding("time", "bad", said, "write hours:minutes:seconds or days-hours"))
    each = given.get("ntasks-per-node")
    if each is not None and each.value != "1":
        said = f"{each.value} tasks a node would start as many Rays on each"
        found.append(each.finding("start", "bad", said, "write --ntasks-per-node=1"))
    return found


def _ray_call(text: str, file: str) -> ray_start.RayStart | None:
    """The call of `ray symmetric-run`, its continued lines as one, with what the script exports before."""
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


def _node_group(whole: YamlItem, given: dict[str, YamlItem]) -> NodeGroup | None:
    nodes = re.match(r"\d+", str(given["nodes"].value)) if "nodes" in given else None
    if nodes is None:
        return None
    devices: dict[str, int] = {}
    for name in ("gpus-per-node", "gres"):
        gpus = re.search(r"(\d+)$", str(given[name].value)) if name in given else None
        if gpus:
            devices["GPU"] = int(gpus[1])
    if "cpus-per-task" in given and str(given["cpus-per-task"].value).isdecimal():
        devices["CPU"] = int(given["cpus-per-task"].value)
    count = int(nodes[0])
    return NodeGroup(item=whole, name="nodes", low=count, high=count, devices=devices)
