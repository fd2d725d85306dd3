"""Check a cluster file of any kind, without a network: for `ray up`, for sbatch or for Kubernetes."""

from __future__ import annotations

import contextlib
import io
import logging
import os
from collections.abc import Iterator
from importlib import metadata, resources
from pathlib import Path

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
        if all(one.verdict != "bad" for one in found):  # Ray would report a mistake again, without its line
            found += _validate_with_ray(documents[0])
        found += _check_mounted_files(documents[0], Path(file).parent)
    if all(one.verdict == "good" for one in found):
        found.append(Finding(subject="file", verdict="good", what="no mistakes found", where=file))
    return sorted(_deduplicate(found), key=_line_key)


def check_text(text: str, file: str) -> list[Finding]:
    """Return the findings that need the text alone."""
    found = [*yaml_checks.secrets_in_text(text, file), *_check_placeholders(text, file)]
    if text.startswith("#!"):
        return [*found, *ray_start.check_script(text, file)]
    try:
        documents = read_yaml(text, file)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{file}:{mark.line + 1}" if mark else file
        said = f"this is not valid YAML: {getattr(error, 'problem', None) or error}"
        return [*found, Finding(subject="YAML", verdict="bad", what=said, where=where, remedy="correct that line")]
    for document in documents:
        if document.value is not None:
            found += [*yaml_checks.repeated_keys(document), *_check_document(document)]
    return found


def _check_document(document: YamlItem) -> Iterator[Finding]:
    if document.at("apiVersion") or document.at("kind"):
        yield from _check_manifest(document)
    elif document.mapping:
        yield from ray_up.check_ray_up(document)
    else:
        said = "this does not describe a cluster"
        yield document.finding("kinds", "bad", said, "give a file for `ray up`, sbatch or Kubernetes")


def _check_placeholders(text: str, file: str) -> Iterator[Finding]:
    """Find values that the user must change and that are still those of a template."""
    try:
        here = find_placeholders(text)
    except ClusterFileError as error:
        said = f"{error.what} ({error.where})"
        yield Finding(subject="CHANGE", verdict="doubtful", what=said, where=file, remedy=error.remedy)
        return
    files = resources.files("trainwright.clusters").iterdir()
    samples = [file.read_text(encoding="utf-8") for file in files if file.name.endswith((".yaml", ".sbatch"))]
    known = {(marker.name, marker.value) for sample in samples for marker in find_placeholders(sample) if marker.yours}
    for marker in here:
        if marker.yours and (marker.name, marker.value) in known:
            said, where = f"{marker.name} still has the template's value {marker.value}", f"{file}:{marker.line}"
            yield Finding(subject="CHANGE", verdict="doubtful", what=said, where=where, remedy=f"write {marker.what}")


def _validate_with_ray(document: YamlItem) -> Iterator[Finding]:
    """Run Ray's own validation. It needs no network, but prints, and ends the process for some mistakes."""
    talk = logging.getLogger("ray.autoscaler")
    level = talk.level
    try:
        talk.setLevel(logging.ERROR)
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            validate_cluster_file(document.value)
    except (Exception, SystemExit) as error:
        said = [*str(getattr(error, "message", None) or error).splitlines(), repr(error)][0]
        yield document.finding("Ray", "bad", f"Ray refuses it: {said}", "correct what the message names")
    finally:
        talk.setLevel(level)


def _check_mounted_files(document: YamlItem, folder: Path) -> Iterator[Finding]:
    """Check that the mounted folder has one wheel, and that the token exists.

    Relative folders may start at the file's folder or at the working directory.
    """
    mounts = document.at("file_mounts")
    for remote, item in (mounts.fields if mounts else {}).items():
        places = [(base / os.path.expanduser(str(item.value))) for base in (Path.cwd(), folder)]
        if remote.endswith(("/trainwright", "/wheel")) and not any(_installable(place) for place in places):
            said = f"{item.value} does not hold exactly one wheel of trainwright, which nodes install"
            remedy = "build it: `make dist` in a checkout; call `ray up` there, or write the path of its folder dist"
            yield item.finding("files", "doubtful", said, remedy)
        elif remote.endswith("auth_token") and not places[0].is_file():
            remedy = "create it: ray get-auth-token --generate; chmod 600 ~/.ray/auth_token"
            yield item.finding("token", "doubtful", f"{item.value} does not exist yet", remedy)


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


def _check_manifest(document: YamlItem) -> Iterator[Finding]:
    """Check one YAML document."""
    kind, spec = document.text("kind"), document.at("spec")
    if kind == "RayJob" and spec is not None and spec.mapping:
        yield from _check_job(spec)
        spec = spec.at("rayClusterSpec")
    if kind not in _KINDS:
        yield from _check_other_kind(document, kind)
    elif spec is not None and spec.mapping:
        yield from _check_cluster(spec)


def _check_other_kind(document: YamlItem, kind: str) -> Iterator[Finding]:
    place = document.at("kind")
    if not kind or place is None:
        yield document.finding("kinds", "bad", "the key kind is missing", f"add kind: one of {', '.join(_KINDS)}")
    elif document.text("apiVersion").startswith("ray.io/"):
        yield place.finding("kinds", "bad", f"KubeRay has no kind {kind}", nearest(kind, _KINDS))
    elif kind == "Secret" and (document.at("stringData") or document.at("data")):
        remedy = "create it with `kubectl create secret generic NAME --from-file=…` and write only its name here"
        yield place.finding("secrets", "bad", "the file contains a secret; base64 does not protect it", remedy)


def _check_job(spec: YamlItem) -> Iterator[Finding]:
    if not spec.text("entrypoint"):
        yield spec.finding("keys", "bad", "entrypoint is missing", "add entrypoint:")
    if spec.at("rayClusterSpec") is None and spec.at("clusterSelector") is None:
        yield spec.finding("keys", "bad", "rayClusterSpec is missing", "add rayClusterSpec:")
    done = spec.at("shutdownAfterJobFinishes")
    if spec.at("rayClusterSpec") is not None and (done is None or done.value is not True):
        said = "the cluster keeps running, and costs money, after the job has ended"
        yield (done or spec).finding("price", "doubtful", said, "write shutdownAfterJobFinishes: true")


def _check_cluster(spec: YamlItem) -> Iterator[Finding]:
    yield from _check_version(spec)
    yield from _check_token(spec)
    place = spec.at("headGroupSpec", "serviceType")
    if place is not None and place.value != "ClusterIP":
        said = f"a service of type {place.value} exposes the dashboard, which accepts jobs, outside the cluster"
        yield place.finding("dashboard", "bad", said, "write ClusterIP and reach it by `kubectl port-forward`")
    for container in spec.list("headGroupSpec", "template", "spec", "containers")[:1]:
        given = {entry.text("name") for entry in container.list("env")}
        yield from ray_start.check_health_checks(container, given, "add to the head's env")
    place = spec.at("gcsFaultToleranceOptions", "redisPassword", "value")
    if place is not None:
        said = "the file contains the password of Redis"
        yield place.finding("secrets", "bad", said, "write valueFrom: secretKeyRef:")
    workers = spec.list("workerGroupSpecs")
    for group in (spec.at("headGroupSpec"), *workers):
        if group is not None:
            yield from _check_group(group)
    for group in workers:
        low, high = group.number("minReplicas"), group.number("maxReplicas")
        replicas = group.number("replicas", default=low)
        if not 0 <= low <= replicas <= high:
            said = f"minReplicas {low}, replicas {replicas} and maxReplicas {high} contradict each other"
            yield group.finding("nodes", "bad", said, "keep 0 <= minReplicas <= replicas <= maxReplicas")


def _check_version(spec: YamlItem) -> Iterator[Finding]:
    place, here = spec.at("rayVersion"), metadata.version("ray")
    if place is None:
        yield spec.finding("images", "bad", "rayVersion is missing: token authentication needs it", f"add {here}")
    elif str(place.value) != here:
        said = f"rayVersion is {place.value}, but Ray {here} is installed here"
        yield place.finding("images", "bad", said, f"write {here}")


def _check_token(spec: YamlItem) -> Iterator[Finding]:
    place = spec.at("authOptions") or spec
    if spec.text("authOptions", "mode") != "token":
        said = f"token authentication is off: {ray_start.OPEN_PORTS}"
        yield place.finding("token", "bad", said, "write authOptions: {mode: token, secretName: NAME}")
    elif place.at("secretName") is None:
        remedy = "create a secret with the key auth_token and name it in authOptions.secretName"
        yield place.finding("token", "doubtful", "the operator generates a token", remedy)


def _check_group(group: YamlItem) -> Iterator[Finding]:
    """Check the options of `ray start` of a group of nodes, its containers and their volumes.

    Ray keeps objects in /dev/shm, where a container without a volume has 64 MB.
    """
    parameters, template = group.at("rayStartParams"), group.at("template", "spec")
    yield from ray_start.unknown_options(parameters.fields if parameters else {})
    if template is None:
        return
    containers = template.list("containers")
    for container in (*containers, *template.list("initContainers")):
        yield from yaml_checks.secrets_in_environment(container.list("env"))
        yield from ray_start.check_image(container.at("image"))
    volumes = {volume.text("name"): volume for volume in template.list("volumes")}
    for container in containers[:1]:
        mounts = container.list("volumeMounts")
        for mount in mounts:
            if mount.text("name") not in volumes:
                said, remedy = f"there is no volume {mount.text('name')}", nearest(mount.text("name"), volumes)
                yield mount.finding("volumes", "bad", said, remedy)
        if not any(mount.text("mountPath") == "/dev/shm" for mount in mounts):
            said = "/dev/shm has 64 MB: Ray writes objects to disk, and training workers may fail"
            remedy = "mount a volume with emptyDir: {medium: Memory} at /dev/shm"
            yield container.finding("shared memory", "doubtful", said, remedy)
