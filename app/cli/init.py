"""`trainwright init --cluster …`: writes a cluster file with the user's values in it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import resources
from pathlib import Path
from typing import Annotated

import typer

from trainwright.cluster_files.placeholders import ClusterFileError, Marker, fill, markers
from trainwright.core.errors import nearest

FILES = {
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

Kind = Annotated[str, typer.Option("--cluster", metavar="KIND", help=f"One of {', '.join(FILES)}.")]
Out = Annotated[str | None, typer.Option(metavar="PATH", help="File to write; by default named by its kind.")]
Values = Annotated[
    list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="A value of the file, not asked for then.")
]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Ask nothing: what is not given stays as it is.")]
Force = Annotated[bool, typer.Option("--force", help="Write over a file that is there.")]


def init(cluster: Kind, out: Out = None, values: Values = None, yes: Yes = False, force: Force = False) -> None:
    """Write a file that describes a cluster, with your values in it; says what to type next."""
    text = sample(cluster)
    path = Path(out or ("cluster.yaml" if cluster == "aws" else FILES[cluster]))
    if path.exists() and not force:
        remedy = "name another, or write over it: --force"
        raise ClusterFileError(f"{path} is there already", where="--out", remedy=remedy)
    given = parse(values or [])
    fill(text, given)  # a wrong one is told before anything is asked
    if not yes and sys.stdin.isatty():
        given = ask(markers(text), given, _prompt)
    _write(path, fill(text, given))
    _tell(cluster, path, markers(text), given)


def sample(cluster: str) -> str:
    """The file of a kind as it comes with the package. Raises ClusterFileError."""
    if cluster not in FILES:
        raise ClusterFileError(f"there is no kind {cluster}", where="--cluster", remedy=nearest(cluster, FILES))
    return (resources.files("trainwright.clusters") / FILES[cluster]).read_text(encoding="utf-8")


def parse(given: list[str]) -> dict[str, str]:
    """Values by name, of `name=value`. Raises ClusterFileError."""
    split = [item.partition("=") for item in given]
    for item, (name, equals, _) in zip(given, split, strict=True):
        if not (name and equals):
            raise ClusterFileError(f"{item!r} cannot be read", where="--set", remedy="write name=value")
    return {name.strip(): value for name, _, value in split}


def ask(known: list[Marker], given: Mapping[str, str], prompt: Callable[[Marker], str]) -> dict[str, str]:
    """All values: those given, and for the rest what is answered."""
    return {marker.name: given[marker.name] if marker.name in given else prompt(marker) for marker in known}


def _prompt(marker: Marker) -> str:
    answer: str = typer.prompt(f"{marker.name}: {marker.what}", default=marker.value, err=True)
    return answer


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        remedy = "name a file in a folder that is there"
        raise ClusterFileError(f"{path} cannot be written: {error.strerror}", where="--out", remedy=remedy) from error


def _tell(cluster: str, path: Path, known: list[Marker], given: Mapping[str, str]) -> None:
    open_ones = [marker for marker in known if marker.yours and given.get(marker.name, marker.value) == marker.value]
    for marker in open_ones:
        print(f"still the sample's: {marker.name} ({marker.what}), line {marker.line}", file=sys.stderr)
    print(f"{path} is written. Next:", file=sys.stderr)
    print("\n".join(f"    {line.format(file=path)}" for line in _NEXT.get(cluster, _UP)))
