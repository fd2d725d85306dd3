"""`trainwright init --cluster …`: writes a cluster file with the user's values in it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from importlib import resources
from pathlib import Path
from typing import Annotated

import typer

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

_Kind = Annotated[str, typer.Option("--cluster", metavar="KIND", help=f"One of {', '.join(TEMPLATES)}.")]
_Out = Annotated[str | None, typer.Option(metavar="PATH", help="File to write; by default named by its kind.")]
_Values = Annotated[
    list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="A value of the file, not asked for then.")
]
_Yes = Annotated[bool, typer.Option("--yes", "-y", help="Ask nothing: what is not given stays as it is.")]
_Force = Annotated[bool, typer.Option("--force", help="Write over a file that is there.")]


def init(cluster: _Kind, out: _Out = None, values: _Values = None, yes: _Yes = False, force: _Force = False) -> None:
    """Write a file that describes a cluster, with your values in it; says what to type next."""
    text = read_template(cluster)
    path = Path(out or ("cluster.yaml" if cluster == "aws" else TEMPLATES[cluster]))
    if path.exists() and not force:
        remedy = "name another, or write over it: --force"
        raise ClusterFileError(f"{path} is there already", where="--out", remedy=remedy)
    given = parse_values(values or [])
    fill_placeholders(text, given)  # a wrong one is told before anything is asked
    if not yes and sys.stdin.isatty():
        given = ask_values(find_placeholders(text), given, _ask_value)
    _write(path, fill_placeholders(text, given))
    _print_next_steps(cluster, path, find_placeholders(text), given)


def read_template(cluster: str) -> str:
    """The file of a kind as it comes with the package. Raises ClusterFileError."""
    if cluster not in TEMPLATES:
        raise ClusterFileError(f"there is no kind {cluster}", where="--cluster", remedy=nearest(cluster, TEMPLATES))
    return (resources.files("trainwright.clusters") / TEMPLATES[cluster]).read_text(encoding="utf-8")


def parse_values(given: list[str]) -> dict[str, str]:
    """Values by name, of `name=value`. Raises ClusterFileError."""
    split = [item.partition("=") for item in given]
    for item, (name, equals, _) in zip(given, split, strict=True):
        if not (name and equals):
            raise ClusterFileError(f"{item!r} cannot be read", where="--set", remedy="write name=value")
    return {name.strip(): value for name, _, value in split}


def ask_values(
    known: list[Placeholder], given: Mapping[str, str], prompt: Callable[[Placeholder], str]
) -> dict[str, str]:
    """All values: those given, and for the rest what is answered."""
    return {marker.name: given[marker.name] if marker.name in given else prompt(marker) for marker in known}


def _ask_value(marker: Placeholder) -> str:
    answer: str = typer.prompt(f"{marker.name}: {marker.what}", default=marker.value, err=True)
    return answer


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        remedy = "name a file in a folder that is there"
        raise ClusterFileError(f"{path} cannot be written: {error.strerror}", where="--out", remedy=remedy) from error


def _print_next_steps(cluster: str, path: Path, known: list[Placeholder], given: Mapping[str, str]) -> None:
    open_ones = [marker for marker in known if marker.yours and given.get(marker.name, marker.value) == marker.value]
    for marker in open_ones:
        print(f"still the sample's: {marker.name} ({marker.what}), line {marker.line}", file=sys.stderr)
    print(f"{path} is written. Next:", file=sys.stderr)
    print("\n".join(f"    {line.format(file=path)}" for line in _NEXT.get(cluster, _UP)))


# --- `trainwright doctor` ---------------------------------------------------------------------------------------------


_WIDTH = 120  # of tables in files and pipes


def doctor(
    file: Annotated[
        str | None,
        typer.Argument(metavar="[FILE]", help="A cluster file, .yaml or .sbatch; else machines are looked at."),
    ] = None,
    address: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT", help="A Ray cluster, all nodes of it; by default RAY_ADDRESS, else only this."
        ),
    ] = None,
    storage: Annotated[
        str | None, typer.Option(metavar="URI", help="Try this storage: a folder, s3://, gs://, az://.")
    ] = None,
    job: Annotated[
        str | None, typer.Option(metavar="FILE.py", help="Try the storage of this job, and look for its data.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Do not import Ray and the frameworks.")] = False,
    deadline: Annotated[float, typer.Option(min=1, metavar="SECONDS", help="For a node to answer.")] = 60.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON: every finding.")] = False,
) -> None:
    """Say what is wrong with this machine or cluster, and what to do: exit 1 when something is bad, else 0."""
    from rich.console import Console

    from trainwright import api

    found = api.doctor(file, address=address, storage=storage, job=job, imports=not quick, deadline_s=deadline)
    if as_json:
        print(json.dumps(found.data(), indent=2))
    else:
        Console(width=None if sys.stdout.isatty() else _WIDTH, highlight=False).print(found)
    if found.verdict == "bad":
        raise typer.Exit(1)
