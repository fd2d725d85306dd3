"""Commands about clusters: `init` writes a cluster file, `doctor` checks a machine, a cluster or a cluster file."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping
from importlib import metadata, resources
from pathlib import Path
from typing import Annotated

import typer

from trainwright.cli.options import AsJson, terminal_console, write_file
from trainwright.cluster_files.placeholders import ClusterFileError, Placeholder, fill_placeholders, find_placeholders
from trainwright.core.errors import nearest

TEMPLATES = {
    "aws": "aws.yaml",
    "spot": "spot.yaml",
    "gcp": "gcp.yaml",
    "tpu": "tpu.yaml",
    "local": "local.yaml",
    "slurm": "slurm.sbatch",
    "kuberay": "kuberay-cluster.yaml",
    "kuberay-job": "kuberay-job.yaml",
}
_TOKEN = "ray get-auth-token --generate >/dev/null && chmod 600 ~/.ray/auth_token && export RAY_AUTH_MODE=token"
_SUBMIT = "RAY_ADDRESS=http://localhost:8265 ray job submit --working-dir . -- python -m trainwright fit job.py"
_UP = ("trainwright doctor {file}", _TOKEN, "ray up {file}", "ray dashboard {file}    # in a second terminal", _SUBMIT)
_SECRETS = (
    "kubectl create secret generic trainwright-token --from-file=auth_token=$HOME/.ray/auth_token",
    "kubectl apply -f {file}",
)
_NEXT = {
    "slurm": ("trainwright doctor {file}", _TOKEN, "sbatch {file}", "squeue --me"),
    "kuberay": ("trainwright doctor {file}", _TOKEN, *_SECRETS, "kubectl get rayclusters --watch"),
    "kuberay-job": ("trainwright doctor {file}", _TOKEN, *_SECRETS, "kubectl get rayjobs --watch"),
}

_RAY_VERSION = r'(rayproject/ray:|/trainwright:|rayVersion: ")\d+\.\d+\.\d+'  # in images, and for KubeRay
_Kind = Annotated[str, typer.Option("--cluster", metavar="KIND", help=f"Kind of cluster: {', '.join(TEMPLATES)}.")]
_Out = Annotated[
    str | None, typer.Option(metavar="PATH", help="File to write; by default its name depends on the kind.")
]
_Values = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="NAME=VALUE", help="Set a value of the file, without a question. Repeatable."),
]
_Yes = Annotated[bool, typer.Option("--yes", "-y", help="Ask nothing; other values stay as in the template.")]
_Force = Annotated[bool, typer.Option("--force", help="Overwrite an existing file.")]


def init(cluster: _Kind, out: _Out = None, values: _Values = None, yes: _Yes = False, force: _Force = False) -> None:
    """Write a cluster file with your values. Print the commands to type next."""
    text = read_template(cluster)
    path = Path(out or ("cluster.yaml" if cluster == "aws" else TEMPLATES[cluster]))
    if path.exists() and not force:
        remedy = "name another file, or overwrite it: --force"
        raise ClusterFileError(f"{path} already exists", where="--out", remedy=remedy)
    given = parse_values(values or [])
    fill_placeholders(text, given)  # report a wrong value before asking for others
    if not yes and sys.stdin.isatty():
        given = ask_values(find_placeholders(text), given, _ask_value)
    write_file(path, fill_placeholders(text, given), "--out")
    _print_next_steps(cluster, path, find_placeholders(text), given)


def read_template(cluster: str) -> str:
    """Return the template of a kind of cluster, with the version of Ray that is installed. Raises ClusterFileError."""
    if cluster not in TEMPLATES:
        raise ClusterFileError(
            f"unknown kind of cluster {cluster!r}", where="--cluster", remedy=nearest(cluster, TEMPLATES)
        )
    text = (resources.files("trainwright.clusters") / TEMPLATES[cluster]).read_text(encoding="utf-8")
    return re.sub(_RAY_VERSION, rf"\g<1>{metadata.version('ray')}", text)


def parse_values(given: list[str]) -> dict[str, str]:
    """Parse `name=value` items into a mapping. Raises ClusterFileError."""
    split = [item.partition("=") for item in given]
    for item, (name, equals, _) in zip(given, split, strict=True):
        if not (name and equals):
            raise ClusterFileError(f"{item!r} cannot be read", where="--set", remedy="write name=value")
    return {name.strip(): value for name, _, value in split}


def ask_values(
    known: list[Placeholder], given: Mapping[str, str], prompt: Callable[[Placeholder], str]
) -> dict[str, str]:
    """Return all values: those given, and answers to the prompt for the others."""
    return {marker.name: given[marker.name] if marker.name in given else prompt(marker) for marker in known}


def _ask_value(marker: Placeholder) -> str:
    answer: str = typer.prompt(f"{marker.name}: {marker.what}", default=marker.value, err=True)
    return answer


def _print_next_steps(cluster: str, path: Path, known: list[Placeholder], given: Mapping[str, str]) -> None:
    open_ones = [marker for marker in known if marker.yours and given.get(marker.name, marker.value) == marker.value]
    for marker in open_ones:
        print(f"not set yet: {marker.name} ({marker.what}), line {marker.line}", file=sys.stderr)
    print(f"wrote {path}. Next:", file=sys.stderr)
    print("\n".join(f"    {line.format(file=path)}" for line in _NEXT.get(cluster, _UP)))


def doctor(
    file: Annotated[
        str | None,
        typer.Argument(metavar="[FILE]", help="Check this cluster file (.yaml or .sbatch) instead of machines."),
    ] = None,
    address: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT", help="Check all nodes of this Ray cluster; by default RAY_ADDRESS, or this machine."
        ),
    ] = None,
    storage: Annotated[
        str | None, typer.Option(metavar="URI", help="Try this storage: a folder, s3://, gs:// or az://.")
    ] = None,
    job: Annotated[
        str | None, typer.Option(metavar="FILE.py", help="Try the storage of this job, and check that its data exists.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Do not import Ray and the frameworks.")] = False,
    deadline: Annotated[float, typer.Option(min=1, metavar="SECONDS", help="Time for a node to answer.")] = 60.0,
    as_json: AsJson = False,
) -> None:
    """Check this machine, a cluster or a cluster file. Say what to do; exit 1 if something is bad, else 0."""
    from trainwright import api

    found = api.doctor(file, address=address, storage=storage, job=job, imports=not quick, deadline_s=deadline)
    if as_json:
        print(json.dumps(found.data(), indent=2))
    else:
        terminal_console(highlight=False).print(found)
    if found.verdict == "bad":
        raise typer.Exit(1)
