"""Check the commands that start Ray, `ray start` and `ray symmetric-run`, their environment, image and sbatch script.

Unknown options of Slurm are left to sbatch, which refuses them when the script is submitted.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import metadata

from trainwright.cluster_files.yaml_checks import YamlItem
from trainwright.core.errors import Finding, nearest
from trainwright.ray_cluster.ray_compat import ray_start_options

_HEALTH_CHECK_SETTINGS = {"initial_delay_ms": 1000, "period_ms": 1000, "timeout_ms": 2000, "failure_threshold": 3}
_START_COMMAND = re.compile(r"\bray\s+(?:start|symmetric-run)\b")
_SET = re.compile(r"(?:^|[\s(])(?:export\s+)?(RAY_\w+)=(\S*)")
_OPTION = re.compile(r"(?<=\s)--([a-z][\w-]*)(?:[=\s]+([^\s-]\S*))?")
_ALL_ADDRESSES = ("0.0.0.0", "::", "[::]", "*")
_IMAGE = re.compile(r"rayproject/ray(?:-ml)?:(?P<version>\d+\.\d+\.\d+)")
OPEN_PORTS = "anyone who reaches Ray's ports can run code"
_TOKEN_REMEDY = (
    "set RAY_AUTH_MODE=token in front of every `ray start`, and copy ~/.ray/auth_token to every node "
    "(docs/clusters.md, Token)"
)


@dataclass(frozen=True, kw_only=True)
class RayStart:
    """One call of `ray start`."""

    item: YamlItem
    options: Mapping[str, str] = field(default_factory=dict)  # values by name, without dashes
    environment: Mapping[str, str] = field(default_factory=dict)
    head: bool = False


def parse_start(item: YamlItem, environment: Mapping[str, str]) -> RayStart | None:
    """Return the call of `ray start` in a command, or None.

    Args:
        environment: variables that are set elsewhere, as by the container.
    """
    call = _START_COMMAND.search(str(item.value))
    if call is None:
        return None
    before, behind = str(item.value)[: call.end()], str(item.value)[call.end() :]
    own = re.split(r"&&|\|\||;|\n", " " + behind)[0]
    options = {name: value or "" for name, value in _OPTION.findall(own)}
    symmetric = "symmetric-run" in call[0]
    return RayStart(
        item=item,
        options=options,
        environment={**environment, **dict(_SET.findall(before))},
        head="head" in options or symmetric,
    )


def check_start(start: RayStart) -> Iterator[Finding]:
    """Find what is wrong with a command that starts Ray."""
    yield from unknown_options(dict.fromkeys(start.options, start.item))
    mode = start.environment.get("RAY_AUTH_MODE", "")
    if mode.lower() != "token":
        said = f"RAY_AUTH_MODE is {mode}" if mode else "RAY_AUTH_MODE is not set"
        yield start.item.finding("token", "bad", f"{said}: {OPEN_PORTS}", _TOKEN_REMEDY)
    if not start.head:
        return
    host = start.options.get("dashboard-host", "127.0.0.1").strip("'\"")
    if host in _ALL_ADDRESSES:
        said = f"the dashboard, which accepts jobs, listens on {host}: on every network of the head"
        remedy = "write --dashboard-host=127.0.0.1 and reach it through `ray dashboard` or `ssh -L 8265:localhost:8265`"
        yield start.item.finding("dashboard", "bad", said, remedy)
    yield from check_health_checks(start.item, start.environment, "set in front of `ray start --head`")


def unknown_options(options: Mapping[str, YamlItem]) -> Iterator[Finding]:
    """Find names that are not options of `ray start`."""
    known = [*ray_start_options(), "help"]
    for name, item in options.items():
        if name.replace("_", "-") not in known:
            yield item.finding("options", "bad", f"`ray start` has no option --{name}", nearest(name, known))


def check_health_checks(place: YamlItem, environment: Iterable[str], remedy: str) -> Iterator[Finding]:
    """Check that the head's environment shortens Ray's health checks.

    Args:
        remedy: where to set missing variables.
    """
    given = set(environment)
    missing = {name: value for name, value in _HEALTH_CHECK_SETTINGS.items() if f"RAY_health_check_{name}" not in given}
    if missing:
        wanted = " ".join(f"RAY_health_check_{name}={value}" for name, value in missing.items())
        said = "Ray needs 64 s to notice that a node has failed, and a run waits as long before it recovers"
        yield place.finding("health checks", "doubtful", said, f"{remedy}: {wanted}")


def check_image(place: YamlItem | None) -> Iterator[Finding]:
    """Check that a container image, if there is one, has the version of Ray of this machine."""
    here = metadata.version("ray")
    if place is None or not (found := _IMAGE.search(str(place.value))) or found["version"] == here:
        return
    said = f"the image has Ray {found['version']}, but Ray {here} is installed here; the versions must be equal"
    yield place.finding("images", "bad", said, f"write {str(place.value).replace(found['version'], here)}")


# --- Scripts for Slurm's sbatch ---------------------------------------------------------------------------------------


_SHORT = {"N": "nodes", "t": "time", "n": "ntasks", "G": "gpus", "p": "partition", "A": "account", "c": "cpus-per-task"}
_DIRECTIVE = re.compile(r"^#SBATCH\s+(?:--(?P<long>[\w-]+)(?:[=\s]+(?P<value>\S+))?|-(?P<short>\w)\s*(?P<of>\S+)?)")


def check_script(text: str, file: str) -> Iterator[Finding]:
    """Check a script."""
    whole = YamlItem(value=text, file=file, line=1, path="")
    yield from _check_directives(whole, _directives(text, file))
    call = _ray_call(text, file)
    if call is None:
        said = "the script does not call `ray symmetric-run`, so only one node works"
        remedy = "start every node with `srun ... ray symmetric-run --address HEAD:6379 --min-nodes N -- COMMAND`"
        yield whole.finding("start", "bad", said, remedy)
    else:
        yield from check_start(call)


def _directives(text: str, file: str) -> dict[str, YamlItem]:
    """Return the options of #SBATCH lines by their long names."""
    found = {}
    for line, said in enumerate(text.splitlines(), 1):
        parts = _DIRECTIVE.match(said)
        if parts:
            name = parts["long"] or _SHORT.get(parts["short"], "")
            found[name] = YamlItem(value=parts["value"] or parts["of"] or "", file=file, line=line, path=f"--{name}")
    return found


def _check_directives(whole: YamlItem, given: dict[str, YamlItem]) -> Iterator[Finding]:
    if "nodes" not in given:
        yield whole.finding("nodes", "bad", "#SBATCH --nodes is missing", "write how many hosts the run gets")
    elif not re.fullmatch(r"[1-9]\d*(-[1-9]\d*)?", str(given["nodes"].value)):
        said = f"{given['nodes'].value!r} is not a number of nodes"
        yield given["nodes"].finding("nodes", "bad", said, "write a number")
    if "time" not in given:
        said = "#SBATCH --time is missing: the partition's limit, often an hour or none, ends the run"
        yield whole.finding("time", "doubtful", said, "write how long the run may take: --time=24:00:00")
    elif not re.fullmatch(r"(\d+-)?\d+(:\d+){0,2}|UNLIMITED|INFINITE", str(given["time"].value), re.IGNORECASE):
        said = f"{given['time'].value!r} is not a time"
        yield given["time"].finding("time", "bad", said, "write hours:minutes:seconds or days-hours")
    each = given.get("ntasks-per-node")
    if each is not None and each.value != "1":
        said = f"{each.value} tasks on each node would start Ray {each.value} times there"
        yield each.finding("start", "bad", said, "write --ntasks-per-node=1")


def _ray_call(text: str, file: str) -> RayStart | None:
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
            return parse_start(YamlItem(value=own, file=file, line=line, path="ray symmetric-run"), environment)
        for name, value in re.findall(r"\b(RAY_\w+)=([^\s;]*)", said):
            environment[name] = value.strip("'\"")
    return None
