"""Check KubeRay manifests, RayCluster and RayJob, for mistakes that KubeRay accepts: open ports, wrong images, cost.

Keys and types are left to `kubectl apply --dry-run=server`, which knows the definitions of the installed operator.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import metadata

from trainwright.cluster_files import ray_start, yaml_checks
from trainwright.cluster_files.yaml_checks import YamlItem
from trainwright.core.errors import Finding, nearest

_KINDS = ("RayCluster", "RayJob")


def check_manifest(document: YamlItem) -> list[Finding]:
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
