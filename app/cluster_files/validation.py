"""Looks a cluster file over: whatever kind it is of, offline."""

from __future__ import annotations

import contextlib
import io
import logging
import os
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from trainwright.cluster_files import kubernetes, ray_up, slurm, yaml_checks
from trainwright.cluster_files.node_groups import Need
from trainwright.cluster_files.placeholders import ClusterFileError, find_placeholders
from trainwright.cluster_files.yaml_checks import YamlItem, read_yaml
from trainwright.core.errors import Finding
from trainwright.ray_cluster.ray_compat import validate_cluster_file

_SAMPLES = ("aws.yaml", "spot.yaml", "gcp.yaml", "tpu.yaml", "local.yaml", "slurm.sbatch", "kuberay-cluster.yaml",
            "kuberay-job.yaml")  # fmt: skip


def check(path: str | os.PathLike[str], *, workers: Need | int | None = None) -> list[Finding]:
    """Everything found in a cluster file, by line; one good finding where nothing is wrong.

    Args:
        path: of a file for `ray up`, of Kubernetes manifests, or of a script for sbatch.
        workers: what a job's plan needs, or how many workers of one device each; None leaves that open.

    Raises:
        ClusterFileError: the file is not there or cannot be read.
    """
    file = os.fspath(path)
    need = Need(workers=workers) if isinstance(workers, int) else workers
    try:
        text = Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ClusterFileError(
            f"{file} cannot be read: {error}", remedy="make one: trainwright init --cluster aws"
        ) from error
    found = check_text(text, file, need)
    documents = [] if text.startswith("#!") or any(_is_yaml_error(one) for one in found) else read_yaml(text, file)
    if documents and documents[0].at("provider") is not None:
        found += _validate_with_ray(documents[0], found) + _check_mounted_files(documents[0], Path(file).parent)
    if all(one.verdict == "good" for one in found):
        found.append(Finding(subject="file", verdict="good", what="nothing is wrong with it", where=file))
    return sorted(_deduplicate(found), key=_line_key)


def check_text(text: str, file: str, need: Need | None = None) -> list[Finding]:
    """What the text alone tells: pure."""
    found = yaml_checks.secrets_in_text(text, file) + _check_placeholders(text, file)
    if text.startswith("#!"):
        return found + slurm.check_script(text, file, need)
    try:
        documents = read_yaml(text, file)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{file}:{mark.line + 1}" if mark else file
        said = f"this is no YAML: {getattr(error, 'problem', None) or error}"
        return [*found, Finding(subject="YAML", verdict="bad", what=said, where=where, remedy="mend that line")]
    for document in documents:
        if document.value is not None:
            found += _document(document, need)
    return found


def _document(document: YamlItem, need: Need | None) -> list[Finding]:
    if document.at("apiVersion") or document.at("kind"):
        return kubernetes.check_manifest(document, need)
    if document.mapping:
        return ray_up.check_ray_up(document, need)
    said = "this describes no cluster"
    return [document.finding("kinds", "bad", said, "give a file for `ray up`, sbatch or Kubernetes")]


def _check_placeholders(text: str, file: str) -> list[Finding]:
    """Values that only the user can know, and that are still the samples'."""
    try:
        here = find_placeholders(text)
    except ClusterFileError as error:
        said = f"{error.what} ({error.where})"
        return [Finding(subject="CHANGE", verdict="doubtful", what=said, where=file, remedy=error.remedy)]
    folder = resources.files("trainwright.clusters")
    samples = [(folder / name).read_text(encoding="utf-8") for name in _SAMPLES if (folder / name).is_file()]
    known = {(marker.name, marker.value) for sample in samples for marker in find_placeholders(sample) if marker.yours}
    return [
        Finding(
            subject="CHANGE", verdict="doubtful", what=f"{marker.name} is still the sample's: {marker.value}",
            where=f"{file}:{marker.line}", remedy=f"write {marker.what}",
        )
        for marker in here
        if marker.yours and (marker.name, marker.value) in known
    ]  # fmt: skip


def _validate_with_ray(document: YamlItem, found: list[Finding]) -> list[Finding]:
    """What Ray's validation says. It needs no network, but ends the process for some mistakes, and prints."""
    if any(one.verdict == "bad" for one in found):
        return []  # it would say one of these again, with less to go by
    config: dict[str, Any] = document.value
    talk = logging.getLogger("ray.autoscaler")
    level = talk.level
    try:
        talk.setLevel(logging.ERROR)
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            validate_cluster_file(config)
    except (Exception, SystemExit) as error:
        said = str(getattr(error, "message", None) or error).splitlines()
        return [document.finding("Ray", "bad", f"Ray refuses it: {said[0] if said else error!r}", "mend what it names")]
    finally:
        talk.setLevel(level)
    return []


def _check_mounted_files(document: YamlItem, folder: Path) -> list[Finding]:
    """Whether there is a wheel in the folder that is mounted, seen from the file's folder or from here, and a token."""
    mounts = document.at("file_mounts")
    found = []
    for remote, item in (mounts.fields if mounts else {}).items():
        places = [(base / os.path.expanduser(str(item.value))) for base in (Path.cwd(), folder)]
        if remote.endswith(("/trainwright", "/wheel")) and not any(_installable(place) for place in places):
            said = f"{item.value} holds no wheel of trainwright, which nodes install, or not just one"
            remedy = "write it: `make dist` in a checkout; call `ray up` there, or name its folder dist"
            found.append(item.finding("files", "doubtful", said, remedy))
        elif remote.endswith("auth_token") and not places[0].is_file():
            remedy = "make it: ray get-auth-token --generate; chmod 600 ~/.ray/auth_token"
            found.append(item.finding("token", "doubtful", f"{item.value} is not there yet", remedy))
    return found


def _installable(folder: Path) -> bool:
    """Whether this is what `make dist` writes."""
    return len([*folder.glob("trainwright-*.whl")]) == 1 and (folder / "constraints.txt").is_file()


def _deduplicate(found: list[Finding]) -> list[Finding]:
    """Without what is told again of the same line, as where an alias stands."""
    kept = {(one.subject, one.what, one.where.partition(",")[0]): one for one in reversed(found)}
    return [one for one in found if kept[one.subject, one.what, one.where.partition(",")[0]] is one]


def _is_yaml_error(finding: Finding) -> bool:
    return finding.subject == "YAML"


def _line_key(finding: Finding) -> tuple[int, str]:
    number = finding.where.partition(",")[0].rpartition(":")[2]
    return (int(number) if number.isdecimal() else 0, finding.where)
