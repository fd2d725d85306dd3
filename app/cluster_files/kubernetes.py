"""KubeRay's manifests: RayCluster and RayJob against the published definitions, and what these let pass."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import metadata

from trainwright.cluster_files import ray_start, yaml_checks
from trainwright.cluster_files.node_groups import Need, NodeGroup, room
from trainwright.cluster_files.ray_up import image_findings
from trainwright.cluster_files.yaml_checks import YamlItem, closest, load_schema, schema_findings
from trainwright.core.errors import Finding

_KINDS = {"RayCluster": "raycluster", "RayJob": "rayjob"}
_DEVICES = {"nvidia.com/gpu": "GPU", "amd.com/gpu": "GPU", "google.com/tpu": "TPU", "cpu": "CPU"}


def check_manifest(document: YamlItem, need: Need | None) -> list[Finding]:
    """Everything found in one document."""
    kind = document.text("kind")
    if kind not in _KINDS:
        return _check_other_kind(document, kind)
    known = {**load_schema("kuberay"), "ray_start": load_schema("ray")["ray_start"]}
    found = schema_findings(document, known[_KINDS[kind]], known)
    spec = document.at("spec") if kind == "RayCluster" else document.at("spec", "rayClusterSpec")
    if kind == "RayJob":
        found += _check_job(document)
    return found + (_check_cluster(spec, need) if spec is not None and spec.mapping else [])


def _check_other_kind(document: YamlItem, kind: str) -> list[Finding]:
    if not kind:
        return [document.finding("kinds", "bad", "it does not say what it is", f"add kind: one of {', '.join(_KINDS)}")]
    place = document.fields["kind"]
    if document.text("apiVersion").startswith("ray.io/"):
        return [place.finding("kinds", "bad", f"{kind} is no kind of KubeRay's", closest(kind, _KINDS))]
    if kind == "Secret" and (document.at("stringData") or document.at("data")):
        remedy = "make it with `kubectl create secret generic NAME --from-file=…` and name it here only"
        return [place.finding("secrets", "bad", "a secret stands here, whatever its encoding", remedy)]
    return []


def _check_job(document: YamlItem) -> list[Finding]:
    spec = document.at("spec")
    if spec is None or not spec.mapping:
        return []
    found = []
    for name in ("entrypoint",):
        if not spec.text(name):
            found.append(spec.finding("keys", "bad", f"{name} is missing", f"add {name}:"))
    if spec.at("rayClusterSpec") is None and spec.at("clusterSelector") is None:
        found.append(spec.finding("keys", "bad", "rayClusterSpec is missing", "add rayClusterSpec:"))
    done = spec.at("shutdownAfterJobFinishes")
    if spec.at("rayClusterSpec") is not None and (done is None or done.value is not True):
        said = "the cluster stays, and is paid for, when the job has ended"
        found.append((done or spec).finding("price", "doubtful", said, "write shutdownAfterJobFinishes: true"))
    return found


def _check_cluster(spec: YamlItem, need: Need | None) -> list[Finding]:
    found = [*_version(spec), *_token(spec), *_service(spec), *_health(spec), *_redis(spec)]
    for container in _containers(spec):
        env = container.at("env")
        found += yaml_checks.secrets_in_environment(env) if env is not None else []
        image = container.at("image")
        found += image_findings(image) if image is not None else []
    found += [finding for template in _templates(spec) for finding in _shared_memory(template)]
    groups = [group for item in getattr(spec.at("workerGroupSpecs"), "entries", ()) if (group := _group(item))]
    found += [finding for group in groups for finding in _bounds(group)]
    return found + (room(spec, groups, need) if need else [])


def _version(spec: YamlItem) -> list[Finding]:
    place, here = spec.at("rayVersion"), metadata.version("ray")
    if place is None:
        return [spec.finding("images", "bad", "rayVersion is missing: token authentication needs it", f"add {here}")]
    if str(place.value) == here:
        return []
    return [place.finding("images", "bad", f"rayVersion is {place.value}, tested was {here}", f"write {here}")]


def _token(spec: YamlItem) -> list[Finding]:
    if spec.text("authOptions", "mode") == "token":
        if spec.at("authOptions", "secretName") is not None:
            return []
        remedy = "make a secret with the key auth_token and name it in authOptions.secretName"
        place = spec.fields["authOptions"]
        return [place.finding("token", "doubtful", "the operator makes a token of its own", remedy)]
    place = spec.at("authOptions") or spec
    said = "token authentication is off: whoever reaches Ray's ports can run code here"
    return [place.finding("token", "bad", said, "write authOptions: {mode: token, secretName: NAME}")]


def _service(spec: YamlItem) -> list[Finding]:
    """The head's service takes jobs: it stays inside."""
    place = spec.at("headGroupSpec", "serviceType")
    if place is None or place.value == "ClusterIP":
        return []
    said = f"the dashboard, which takes jobs, is reached from outside by a service of type {place.value}"
    return [place.finding("dashboard", "bad", said, "write ClusterIP and reach it by `kubectl port-forward`")]


def _health(spec: YamlItem) -> list[Finding]:
    head = spec.at("headGroupSpec", "template", "spec", "containers")
    if head is None or not head.entries:
        return []
    given = {entry.text("name") for entry in getattr(head.entries[0].at("env"), "entries", ())}
    missing = [
        f"RAY_health_check_{name}"
        for name in ray_start.HEALTH_CHECK_SETTINGS
        if f"RAY_health_check_{name}" not in given
    ]
    if not missing:
        return []
    said = "Ray takes 64 s to find that a node is silent: a run waits as long to recover"
    return [head.entries[0].finding("health checks", "doubtful", said, f"add to the head's env: {', '.join(missing)}")]


def _redis(spec: YamlItem) -> list[Finding]:
    place = spec.at("gcsFaultToleranceOptions", "redisPassword", "value")
    if place is None:
        return []
    return [place.finding("secrets", "bad", "the password of Redis stands here", "write valueFrom: secretKeyRef:")]


def _templates(spec: YamlItem) -> Iterator[YamlItem]:
    for group in (spec.at("headGroupSpec"), *getattr(spec.at("workerGroupSpecs"), "entries", ())):
        found = group.at("template", "spec") if group is not None else None
        if found is not None:
            yield found


def _containers(spec: YamlItem) -> Iterator[YamlItem]:
    for template in _templates(spec):
        for name in ("containers", "initContainers"):
            yield from getattr(template.at(name), "entries", ())


def _shared_memory(template: YamlItem) -> list[Finding]:
    """Objects lie in /dev/shm, of which a container has 64 MB unless a volume is mounted there."""
    containers = getattr(template.at("containers"), "entries", ())
    if not containers:
        return []
    mounts = getattr(containers[0].at("volumeMounts"), "entries", ())
    volumes = {volume.text("name"): volume for volume in getattr(template.at("volumes"), "entries", ())}
    found = []
    for mount in mounts:
        if mount.text("name") not in volumes:
            said, remedy = f"there is no volume {mount.text('name')}", closest(mount.text("name"), volumes)
            found.append(mount.finding("volumes", "bad", said, remedy))
    if not any(mount.text("mountPath") == "/dev/shm" for mount in mounts):
        said = "/dev/shm has 64 MB: Ray's objects go to the disk, and training's workers may fail"
        remedy = "mount a volume with emptyDir: {medium: Memory} at /dev/shm"
        found.append(containers[0].finding("shared memory", "doubtful", said, remedy))
    return found


def _group(item: YamlItem) -> NodeGroup | None:
    containers = getattr(item.at("template", "spec", "containers"), "entries", ())
    if not containers:
        return None
    limits = containers[0].at("resources", "limits")
    devices = {
        _DEVICES[name]: int(str(entry.value))
        for name, entry in (limits.fields if limits else {}).items()
        if name in _DEVICES and str(entry.value).isdecimal()
    }
    hosts = max(item.number("numOfHosts", default=1), 1)
    low, high = item.number("minReplicas"), item.number("maxReplicas")
    return NodeGroup(item=item, name=item.text("groupName"), low=low * hosts, high=high * hosts, devices=devices)


def _bounds(group: NodeGroup) -> list[Finding]:
    replicas = group.item.number("replicas", default=group.low)
    hosts = max(group.item.number("numOfHosts", default=1), 1)
    if 0 <= group.low <= group.high and group.low <= replicas * hosts <= group.high:
        return []
    said = f"minReplicas {group.low}, replicas {replicas} and maxReplicas {group.high} contradict each other"
    return [group.item.finding("nodes", "bad", said, "keep 0 <= minReplicas <= replicas <= maxReplicas")]
