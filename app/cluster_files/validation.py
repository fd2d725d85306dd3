"""Check a cluster file of any kind, without a network: for `ray up`, for sbatch or for Kubernetes."""

from __future__ import annotations

import contextlib
import io
import logging
import os
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from trainwright.cluster_files import kubernetes, ray_start, ray_up, yaml_checks
from trainwright.cluster_files.placeholders import ClusterFileError, find_placeholders
from trainwright.cluster_files.yaml_checks import YamlItem, read_yaml
from trainwright.core.errors import Finding
from trainwright.ray_cluster.ray_compat import validate_cluster_file


def check(path: str | os.PathLike[str]) -> list[Finding]:
    """Return the findings of a cluster file by line; one good finding if nothing is wrong.

    Args:
        path: of a file for `ray up`, of Kubernetes manifests, or of a script for sbatch.

    Raises:
        ClusterFileError: the file is missing or cannot be read.
    """
    file = os.fspath(path)
    try:
        text = Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ClusterFileError(
            f"{file} cannot be read: {error}", remedy="create one: trainwright init --cluster aws"
        ) from error
    found = check_text(text, file)
    documents = [] if text.startswith("#!") or any(one.subject == "YAML" for one in found) else read_yaml(text, file)
    if documents and documents[0].at("provider") is not None:
        found += _validate_with_ray(documents[0], found) + _check_mounted_files(documents[0], Path(file).parent)
    if all(one.verdict == "good" for one in found):
        found.append(Finding(subject="file", verdict="good", what="no mistakes found", where=file))
    return sorted(_deduplicate(found), key=_line_key)


def check_text(text: str, file: str) -> list[Finding]:
    """Return the findings that need the text alone."""
    found = yaml_checks.secrets_in_text(text, file) + _check_placeholders(text, file)
    if text.startswith("#!"):
        return found + ray_start.check_script(text, file)
    try:
        documents = read_yaml(text, file)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{file}:{mark.line + 1}" if mark else file
        said = f"this is not valid YAML: {getattr(error, 'problem', None) or error}"
        return [*found, Finding(subject="YAML", verdict="bad", what=said, where=where, remedy="correct that line")]
    for document in documents:
        if document.value is not None:
            found += yaml_checks.repeated_key_findings(document) + _document(document)
    return found


def _document(document: YamlItem) -> list[Finding]:
    if document.at("apiVersion") or document.at("kind"):
        return kubernetes.check_manifest(document)
    if document.mapping:
        return ray_up.check_ray_up(document)
    said = "this does not describe a cluster"
    return [document.finding("kinds", "bad", said, "give a file for `ray up`, sbatch or Kubernetes")]


def _check_placeholders(text: str, file: str) -> list[Finding]:
    """Find values that the user must change and that are still those of a template."""
    try:
        here = find_placeholders(text)
    except ClusterFileError as error:
        said = f"{error.what} ({error.where})"
        return [Finding(subject="CHANGE", verdict="doubtful", what=said, where=file, remedy=error.remedy)]
    files = resources.files("trainwright.clusters").iterdir()
    samples = [file.read_text(encoding="utf-8") for file in files if file.name.endswith((".yaml", ".sbatch"))]
    known = {(marker.name, marker.value) for sample in samples for marker in find_placeholders(sample) if marker.yours}
    return [
        Finding(
            subject="CHANGE", verdict="doubtful", what=f"{marker.name} still has the template's value {marker.value}",
            where=f"{file}:{marker.line}", remedy=f"write {marker.what}",
        )
        for marker in here
        if marker.yours and (marker.name, marker.value) in known
    ]  # fmt: skip


def _validate_with_ray(document: YamlItem, found: list[Finding]) -> list[Finding]:
    """Run Ray's own validation. It needs no network, but prints, and ends the process for some mistakes."""
    if any(one.verdict == "bad" for one in found):
        return []  # Ray would report one of these again, without its line
    config: dict[str, Any] = document.value
    talk = logging.getLogger("ray.autoscaler")
    level = talk.level
    try:
        talk.setLevel(logging.ERROR)
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            validate_cluster_file(config)
    except (Exception, SystemExit) as error:
        said = str(getattr(error, "message", None) or error).splitlines()
        return [
            document.finding(
                "Ray", "bad", f"Ray refuses it: {said[0] if said else error!r}", "correct what the message names"
            )
        ]
    finally:
        talk.setLevel(level)
    return []


def _check_mounted_files(document: YamlItem, folder: Path) -> list[Finding]:
    """Check that the mounted folder has one wheel, and that the token exists.

    Relative folders may start at the file's folder or at the working directory.
    """
    mounts = document.at("file_mounts")
    found = []
    for remote, item in (mounts.fields if mounts else {}).items():
        places = [(base / os.path.expanduser(str(item.value))) for base in (Path.cwd(), folder)]
        if remote.endswith(("/trainwright", "/wheel")) and not any(_installable(place) for place in places):
            said = f"{item.value} does not hold exactly one wheel of trainwright, which nodes install"
            remedy = "build it: `make dist` in a checkout; call `ray up` there, or write the path of its folder dist"
            found.append(item.finding("files", "doubtful", said, remedy))
        elif remote.endswith("auth_token") and not places[0].is_file():
            remedy = "create it: ray get-auth-token --generate; chmod 600 ~/.ray/auth_token"
            found.append(item.finding("token", "doubtful", f"{item.value} does not exist yet", remedy))
    return found


def _installable(folder: Path) -> bool:
    """Return whether a folder is what `make dist` writes: one wheel and its constraints."""
    return len([*folder.glob("trainwright-*.whl")]) == 1 and (folder / "constraints.txt").is_file()


def _deduplicate(found: list[Finding]) -> list[Finding]:
    """Remove repeated findings of one line, such as those of a YAML alias."""
    kept = {(one.subject, one.what, one.where.partition(",")[0]): one for one in reversed(found)}
    return [one for one in found if kept[one.subject, one.what, one.where.partition(",")[0]] is one]


def _line_key(finding: Finding) -> tuple[int, str]:
    number = finding.where.partition(",")[0].rpartition(":")[2]
    return (int(number) if number.isdecimal() else 0, finding.where)
