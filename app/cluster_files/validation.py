"""Check a cluster file of any kind, without a network: for `ray up`, for sbatch or for Kubernetes."""

from __future__ import annotations

import contextlib
import io
import logging
import os
from collections.abc import Iterator
from importlib import metadata, resources
from pathlib import Path
from typing import Any

import yaml

from trainwright.cluster_files import ray_start, ray_up, yaml_checks
from trainwright.cluster_files.placeholders import ClusterFileError, find_placeholders
from trainwright.cluster_files.yaml_checks import YamlItem, read_yaml
from trainwright.core.errors import Finding, nearest
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
        return _check_manifest(document)
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


# --- KubeRay manifests, RayCluster and RayJob -------------------------------------------------------------------------


_KINDS = ("RayCluster", "RayJob")


def _check_manifest(document: YamlItem) -> list[Finding]:
    """Return the findings of one YAML document."""
    kind = document.text("kind")
    if kind not in _KINDS:
        return _check_other_kind(document, kind)
    spec = document.at("spec") if kind == "RayCluster" else document.at("spec", "rayClusterSpec")
    found = _check_job(document) if kind == "RayJob" else []
    return found + (_check_cluster(spec) if spec is not None and spec.mapping else [])


def _check_other_kind(document: YamlItem, kind: str) -> list[Finding]:
    if not kind:
        return [document.finding("kinds", "bad", "the key kind is missing", f"add kind: one of {', '.join(_KINDS)}")]
    place = document.fields["kind"]
    if document.text("apiVersion").startswith("ray.io/"):
        return [place.finding("kinds", "bad", f"KubeRay has no kind {kind}", nearest(kind, _KINDS))]
    if kind == "Secret" and (document.at("stringData") or document.at("data")):
        remedy = "create it with `kubectl create secret generic NAME --from-file=…` and write only its name here"
        return [place.finding("secrets", "bad", "the file contains a secret; base64 does not protect it", remedy)]
    return []


def _check_job(document: YamlItem) -> list[Finding]:
    spec = document.at("spec")
    if spec is None or not spec.mapping:
        return []
    found = []
    if not spec.text("entrypoint"):
        found.append(spec.finding("keys", "bad", "entrypoint is missing", "add entrypoint:"))
    if spec.at("rayClusterSpec") is None and spec.at("clusterSelector") is None:
        found.append(spec.finding("keys", "bad", "rayClusterSpec is missing", "add rayClusterSpec:"))
    done = spec.at("shutdownAfterJobFinishes")
    if spec.at("rayClusterSpec") is not None and (done is None or done.value is not True):
        said = "the cluster keeps running, and costs money, after the job has ended"
        found.append((done or spec).finding("price", "doubtful", said, "write shutdownAfterJobFinishes: true"))
    return found


def _check_cluster(spec: YamlItem) -> list[Finding]:
    found = [*_version(spec), *_token(spec), *_service(spec), *_health(spec), *_redis(spec)]
    for container in _containers(spec):
        env = container.at("env")
        found += yaml_checks.secrets_in_environment(env) if env is not None else []
        image = container.at("image")
        found += ray_start.image_findings(image) if image is not None else []
    found += [finding for template in _templates(spec) for finding in _shared_memory(template)]
    groups = spec.list("workerGroupSpecs")
    for group in (spec.at("headGroupSpec"), *groups):
        parameters = group.at("rayStartParams") if group is not None else None
        found += ray_start.unknown_options(parameters.fields) if parameters is not None else []
    return found + [finding for group in groups for finding in _replica_findings(group)]


def _version(spec: YamlItem) -> list[Finding]:
    place, here = spec.at("rayVersion"), metadata.version("ray")
    if place is None:
        return [spec.finding("images", "bad", "rayVersion is missing: token authentication needs it", f"add {here}")]
    if str(place.value) == here:
        return []
    return [
        place.finding(
            "images", "bad", f"rayVersion is {place.value}, but Ray {here} is installed here", f"write {here}"
        )
    ]


def _token(spec: YamlItem) -> list[Finding]:
    if spec.text("authOptions", "mode") == "token":
        if spec.at("authOptions", "secretName") is not None:
            return []
        remedy = "create a secret with the key auth_token and name it in authOptions.secretName"
        place = spec.fields["authOptions"]
        return [place.finding("token", "doubtful", "the operator generates a token", remedy)]
    place = spec.at("authOptions") or spec
    said = f"token authentication is off: {ray_start.OPEN_PORTS}"
    return [place.finding("token", "bad", said, "write authOptions: {mode: token, secretName: NAME}")]


def _service(spec: YamlItem) -> list[Finding]:
    """Check that the head's service, which accepts jobs, is not reachable from outside the cluster."""
    place = spec.at("headGroupSpec", "serviceType")
    if place is None or place.value == "ClusterIP":
        return []
    said = f"a service of type {place.value} exposes the dashboard, which accepts jobs, outside the cluster"
    return [place.finding("dashboard", "bad", said, "write ClusterIP and reach it by `kubectl port-forward`")]


def _health(spec: YamlItem) -> list[Finding]:
    head = spec.at("headGroupSpec", "template", "spec", "containers")
    if head is None or not head.entries:
        return []
    given = {entry.text("name") for entry in head.entries[0].list("env")}
    return ray_start.health_check_findings(head.entries[0], given, "add to the head's env")


def _redis(spec: YamlItem) -> list[Finding]:
    place = spec.at("gcsFaultToleranceOptions", "redisPassword", "value")
    if place is None:
        return []
    return [
        place.finding("secrets", "bad", "the file contains the password of Redis", "write valueFrom: secretKeyRef:")
    ]


def _templates(spec: YamlItem) -> Iterator[YamlItem]:
    for group in (spec.at("headGroupSpec"), *spec.list("workerGroupSpecs")):
        found = group.at("template", "spec") if group is not None else None
        if found is not None:
            yield found


def _containers(spec: YamlItem) -> Iterator[YamlItem]:
    for template in _templates(spec):
        for name in ("containers", "initContainers"):
            yield from template.list(name)


def _shared_memory(template: YamlItem) -> list[Finding]:
    """Check that a volume is mounted at /dev/shm, where Ray keeps objects; without one a container has 64 MB there."""
    containers = template.list("containers")
    if not containers:
        return []
    mounts = containers[0].list("volumeMounts")
    volumes = {volume.text("name"): volume for volume in template.list("volumes")}
    found = []
    for mount in mounts:
        if mount.text("name") not in volumes:
            said, remedy = f"there is no volume {mount.text('name')}", nearest(mount.text("name"), volumes)
            found.append(mount.finding("volumes", "bad", said, remedy))
    if not any(mount.text("mountPath") == "/dev/shm" for mount in mounts):
        said = "/dev/shm has 64 MB: Ray writes objects to disk, and training workers may fail"
        remedy = "mount a volume with emptyDir: {medium: Memory} at /dev/shm"
        found.append(containers[0].finding("shared memory", "doubtful", said, remedy))
    return found


def _replica_findings(group: YamlItem) -> list[Finding]:
    low, high = group.number("minReplicas"), group.number("maxReplicas")
    replicas = group.number("replicas", default=low)
    if 0 <= low <= replicas <= high:
        return []
    said = f"minReplicas {low}, replicas {replicas} and maxReplicas {high} contradict each other"
    return [group.finding("nodes", "bad", said, "keep 0 <= minReplicas <= replicas <= maxReplicas")]
