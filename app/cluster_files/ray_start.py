"""How Ray is started: `ray start` in a command, with the environment before it; or `ray symmetric-run`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from trainwright.cluster_files.yaml_checks import YamlItem, closest, load_schema
from trainwright.core.errors import Finding

HEALTH_CHECK_SETTINGS = {"initial_delay_ms": 1000, "period_ms": 1000, "timeout_ms": 2000, "failure_threshold": 3}
_START_COMMAND = re.compile(r"\bray\s+(?:start|symmetric-run)\b")
_SET = re.compile(r"(?:^|[\s(])(?:export\s+)?(RAY_\w+)=(\S*)")
_OPTION = re.compile(r"(?<=\s)--([a-z][\w-]*)(?:[=\s]+([^\s-]\S*))?")
_ANYWHERE = ("0.0.0.0", "::", "[::]", "*")
_TOKEN = (
    "set RAY_AUTH_MODE=token in front of every `ray start`, and give every node ~/.ray/auth_token "
    "(docs/clusters.md, Token)"
)


@dataclass(frozen=True, kw_only=True)
class RayStart:
    """One call of `ray start`.

    Attributes:
        item: where it stands.
        options: by name, without dashes.
        environment: that it is given.
        head: whether it starts the head.
    """

    item: YamlItem
    options: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    head: bool = False


def parse_start(item: YamlItem, environment: Mapping[str, str]) -> RayStart | None:
    """The call in a command; None where there is none. `environment` is what the command has from elsewhere."""
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


def check_starts(starts: Sequence[RayStart]) -> list[Finding]:
    """What is wrong with how Ray is started."""
    found = [finding for start in starts for finding in (*_options(start), *_token(start))]
    return found + [finding for start in starts if start.head for finding in (*_dashboard(start), *_health(start))]


def _options(start: RayStart) -> list[Finding]:
    known = [*load_schema("ray")["ray_start"], "min-nodes", "help"]
    unknown = [name for name in start.options if name.replace("_", "-") not in known]
    return [
        start.item.finding("options", "bad", f"--{name} is no option of `ray start`", closest(name, known))
        for name in unknown
    ]


def _token(start: RayStart) -> list[Finding]:
    mode = start.environment.get("RAY_AUTH_MODE", "")
    if mode.lower() == "token":
        return []
    said = f"RAY_AUTH_MODE is {mode}" if mode else "RAY_AUTH_MODE is not set"
    return [start.item.finding("token", "bad", f"{said}: whoever reaches Ray's ports can run code here", _TOKEN)]


def _dashboard(start: RayStart) -> list[Finding]:
    host = start.options.get("dashboard-host", "127.0.0.1").strip("'\"")
    if host not in _ANYWHERE:
        return []
    return [
        start.item.finding(
            "dashboard",
            "bad",
            f"the dashboard, which takes jobs, listens on {host}: on every network of the head",
            "write --dashboard-host=127.0.0.1 and reach it through `ray dashboard` or `ssh -L 8265:localhost:8265`",
        )
    ]


def _health(start: RayStart) -> list[Finding]:
    missing = [name for name in HEALTH_CHECK_SETTINGS if f"RAY_health_check_{name}" not in start.environment]
    if not missing:
        return []
    wanted = " ".join(f"RAY_health_check_{name}={HEALTH_CHECK_SETTINGS[name]}" for name in missing)
    return [
        start.item.finding(
            "health checks",
            "doubtful",
            "Ray takes 64 s to find that a node is silent: a run waits as long to recover",
            f"set in front of `ray start --head`: {wanted}",
        )
    ]
