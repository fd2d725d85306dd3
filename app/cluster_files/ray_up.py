"""Files of `ray up`: what Ray's own validation finds, and what it lets pass."""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import PurePosixPath

from trainwright.cluster_files import ray_start
from trainwright.cluster_files.node_groups import (
    InstanceType,
    Need,
    NodeGroup,
    instance_types,
    parse_tpu_slice,
    price_findings,
    room,
    tpu_generations,
)
from trainwright.cluster_files.yaml_checks import YamlItem, changes, closest, load_schema, near, schema_findings
from trainwright.core.errors import Finding

_PROVIDERS = ("aws", "gcp", "local")
_FOREIGN = ("azure", "aliyun", "vsphere", "external", "spark")


def check_ray_up(file: YamlItem, need: Need | None) -> list[Finding]:
    """Everything found in a file of `ray up`, with this provider or that."""
    known = load_schema("ray")
    found = schema_findings(file, known["file"], known)
    kind = file.text("provider", "type")
    provider = file.at("provider")
    if provider is None or not provider.mapping:
        return found
    if kind not in _PROVIDERS:
        return [*found, _unknown_provider(provider, kind)]
    found += schema_findings(provider, known[f"provider_{kind}"], known)
    found += ray_start.check_starts(_start_commands(file))
    if kind == "local":
        return found + _check_local(file, need)
    groups, of_nodes = _node_groups(file, kind, known)
    return found + of_nodes + _check_cloud(file, kind) + _totals(file, groups, need)


def _unknown_provider(provider: YamlItem, kind: str) -> Finding:
    place = provider.at("type") or provider
    if kind in _FOREIGN:
        return place.finding("provider", "doubtful", f"nothing is known here of {kind}", "check what is below by hand")
    if not kind:
        return place.finding("provider", "bad", "it has no type", f"add type: {closest(kind, _PROVIDERS)}")
    return place.finding("provider", "bad", f"{kind} is no provider", closest(kind, _PROVIDERS))


def _start_commands(file: YamlItem) -> list[ray_start.RayStart]:
    """All calls of `ray start`; what the container's environment holds counts for each."""
    docker = {
        name: value
        for options in ("run_options", "head_run_options", "worker_run_options")
        for option in getattr(file.at("docker", options), "entries", ())
        for name, _, value in [str(option.value).removeprefix("--env=").removeprefix("-e ").partition("=")]
    }
    commands = [
        command
        for name in ("head_start_ray_commands", "worker_start_ray_commands")
        for command in getattr(file.at(name), "entries", ())
    ]
    return [found for command in commands if (found := ray_start.parse_start(command, docker))]


def _node_groups(file: YamlItem, cloud: str, known: dict[str, object]) -> tuple[list[NodeGroup], list[Finding]]:
    """The groups of nodes, head first, and what is wrong with their types."""
    types = file.at("available_node_types")
    head = file.text("head_node_type")
    if types is None or not types.fields:
        return [], [file.finding("node types", "bad", "available_node_types is missing", "say which machines to rent")]
    found = _head(file, types, head)
    groups = []
    for name, kind in types.fields.items():
        node = kind.at("node_config")
        if node is None or not node.mapping:
            continue
        shape = _schema_name(node, cloud)
        found += schema_findings(node, known[shape], dict(known))
        machine, of_machine = _instance_type(node, shape)
        found += of_machine + _resource_findings(kind, machine, shape)
        group = _group(file, kind, node, machine)
        groups.append(group)
        found += _spot_head(node) if name == head and group.spot else []
        found += _bounds(file, group) if name != head else []
    return groups, found


def _group(file: YamlItem, kind: YamlItem, node: YamlItem, machine: InstanceType | None) -> NodeGroup:
    """The nodes of a type."""
    name = kind.path.rpartition(".")[2]
    most = file.number("max_workers", default=2)
    low, high = kind.number("min_workers"), kind.number("max_workers", default=most)
    if name == file.text("head_node_type"):
        low, high = 1, 1
    devices = _machine_devices(machine) | {name: item.value for name, item in _resources(kind).items()}
    return NodeGroup(
        item=kind, name=name, low=low, high=high, devices=devices, machine=machine, spot=_is_spot(node)
    )  # fmt: skip


def _spot_head(node: YamlItem) -> list[Finding]:
    return [node.finding("head", "bad", "the head may be taken away, and the cluster with it", "rent it on demand")]


def _resources(kind: YamlItem) -> dict[str, YamlItem]:
    resources = kind.at("resources")
    fields = resources.fields if resources else {}
    return {name: item for name, item in fields.items() if isinstance(item.value, int)}


def _head(file: YamlItem, types: YamlItem, head: str) -> list[Finding]:
    if head in types.fields:
        return []
    place = file.at("head_node_type")
    if place is None:
        names = ", ".join(types.fields)
        return [file.finding("head", "bad", "head_node_type is missing", f"add head_node_type: one of {names}")]
    return [place.finding("head", "bad", f"{head!r} is none of available_node_types", closest(head, types.fields))]


def _bounds(file: YamlItem, group: NodeGroup) -> list[Finding]:
    low, high, kind = group.low, group.high, group.item
    most = file.number("max_workers", default=2)
    if 0 <= low <= high and low <= most:
        if high > most:
            said = f"max_workers is {high}, but all types together may have {most}"
            return [kind.finding("nodes", "doubtful", said, "raise max_workers of the file, or lower this one")]
        return []
    said = f"min_workers {low}, max_workers {high} and max_workers {most} of all types contradict each other"
    return [kind.finding("nodes", "bad", said, "keep 0 <= min_workers <= max_workers <= max_workers of the file")]


def _totals(file: YamlItem, groups: list[NodeGroup], need: Need | None) -> list[Finding]:
    workers = [group for group in groups if group.name != file.text("head_node_type")]
    limit = file.number("max_workers", default=2)
    found = price_findings(file, groups, limit)
    return found + room(file, workers, need, limit) if need else found


def _check_local(file: YamlItem, need: Need | None) -> list[Finding]:
    """Hosts that are there: what stops Ray's local provider."""
    found = [
        item.finding("nodes", "bad", f"Ray refuses {name} where hosts are given by address", f"take {name} out")
        for name in ("head_node", "worker_nodes", "available_node_types", "head_node_type")
        if (item := file.at(name)) is not None
    ]
    provider = file.at("provider")
    assert provider is not None, "its type was read"
    if provider.at("coordinator_address") is None:
        missing = [name for name in ("head_ip", "worker_ips") if not getattr(provider.at(name), "value", None)]
        found += [provider.finding("keys", "bad", f"{name} is missing", f"add {name}:") for name in missing]
    hosts = len(getattr(provider.at("worker_ips"), "entries", ()))
    for name in ("min_workers", "max_workers"):
        item = file.at(name)
        if item is not None and isinstance(item.value, int) and item.value > hosts and hosts:
            said = f"{name} is {item.value}, but there are {hosts} worker_ips"
            found.append(item.finding("nodes", "doubtful", said, f"write {hosts}, or add addresses"))
    found += _old_autoscaler(file)
    if need is not None and file.number("max_workers", default=hosts) < need.workers and need.each == 1 and hosts:
        said = f"the plan needs {need.workers} workers; what {hosts} hosts have is not in this file"
        found.append(provider.finding("workers", "doubtful", said, "ask the running cluster: trainwright doctor"))
    return found


def _old_autoscaler(file: YamlItem) -> list[Finding]:
    """Ray 2.60's second autoscaler starts one worker too few on hosts given by address (measured)."""
    for start in _start_commands(file):
        if start.head and start.environment.get("RAY_enable_autoscaler_v2", "") not in ("0", "false"):
            return [
                start.item.finding(
                    "autoscaler",
                    "bad",
                    "Ray's second autoscaler starts one worker too few on hosts given by address",
                    "put RAY_enable_autoscaler_v2=0 in front of `ray start --head`",
                )
            ]
    return []


# --- What is AWS's or Google Cloud's in a file of `ray up` ------------------------------------------------------------


_REGIONS = {"aws": r"[a-z]{2}(-[a-z]+)+-\d", "gcp": r"[a-z]+-[a-z]+\d+"}
_SAMPLE_REGIONS = {"aws": "us-west-2", "gcp": "us-central1"}
_IMAGE = re.compile(r"rayproject/ray(?:-ml)?:(?P<version>\d+\.\d+\.\d+)")


def _schema_name(node: YamlItem, cloud: str) -> str:
    """The name of the shape that a node_config has."""
    own = {"acceleratorType", "acceleratorConfig", "runtimeVersion"} & node.fields.keys()
    tpu = cloud == "gcp" and node.at("machineType") is None and own
    return "node_tpu" if tpu else f"node_{cloud}"


def _instance_type(node: YamlItem, shape: str) -> tuple[InstanceType | None, list[Finding]]:
    """What is rented, as the list knows it, and what is wrong with its name."""
    if shape == "node_tpu":
        return _tpu_type(node)
    cloud = shape.removeprefix("node_")
    place = node.at("InstanceType" if cloud == "aws" else "machineType")
    if place is None:
        return None, []
    known = instance_types(cloud)
    found = known.get(str(place.value).rpartition("/")[2])
    if found is None:
        return None, [_unknown_machine(place, list(known))]
    return _add_gpus(node, found) if cloud == "gcp" else (found, [])


def _unknown_machine(place: YamlItem, known: list[str]) -> Finding:
    """A name of which the list has one that differs by a slip is wrong; a new one may be right."""
    name = str(place.value)
    slip = near(name, known)
    if (slip and changes(name, slip) <= 1) or not _plausible(name):
        return place.finding("machines", "bad", f"there is no machine type {name}", closest(name, known))
    said = f"{name} is not in the list of machine types here: its devices and price are not known"
    return place.finding("machines", "doubtful", said, "look it up with the cloud: it may be newer than the list")


def _plausible(name: str) -> bool:
    """Whether a cloud could call a machine so."""
    aws = r"[a-z]{1,3}\d[a-z]*(-[a-z0-9]+)?\.(metal(-\d+xl)?|nano|micro|small|medium|(\d{1,3}x)?large)"
    return bool(re.fullmatch(aws, name) or re.fullmatch(r"[a-z]+\d+[a-z]*-[a-z]+-?\w+(-\w+)?", name))


def _add_gpus(node: YamlItem, machine: InstanceType) -> tuple[InstanceType, list[Finding]]:
    """A machine of Google Cloud with what is added to it."""
    found: list[Finding] = []
    added = instance_types("gpu")
    for entry in getattr(node.at("guestAccelerators"), "entries", ()):
        name = entry.text("acceleratorType").rpartition("/")[2]
        if name not in added:
            place = entry.at("acceleratorType") or entry
            found.append(place.finding("machines", "bad", f"there is no accelerator {name}", closest(name, added)))
            continue
        count = entry.number("acceleratorCount", default=1)
        price = None if machine.price is None else machine.price + count * (added[name].price or 0.0)
        machine = InstanceType(
            name=machine.name, cpus=machine.cpus, memory_gib=machine.memory_gib, kind=added[name].kind,
            accelerators=count, price=price,
        )  # fmt: skip
    return machine, found


def _tpu_type(node: YamlItem) -> tuple[InstanceType | None, list[Finding]]:
    place = node.at("acceleratorType")
    if place is None:
        return None, []
    found = parse_tpu_slice(str(place.value))
    if found is not None:
        return found, []
    names = [f"{name}-8" for name in tpu_generations()]
    return None, [place.finding("machines", "bad", f"there is no TPU slice {place.value}", closest(place.value, names))]


def _machine_devices(machine: InstanceType | None) -> dict[str, int]:
    """Of one host, by Ray's names; empty where the machine is not known."""
    if machine is None:
        return {}
    return (
        {"CPU": machine.cpus, machine.resource: machine.accelerators // machine.hosts}
        if machine.kind
        else {"CPU": machine.cpus}
    )


def _resource_findings(kind: YamlItem, machine: InstanceType | None, shape: str) -> list[Finding]:
    """Whether the devices that a type promises are those that its machine has."""
    if machine is None:
        return []
    have = _machine_devices(machine)
    found = []
    for name, item in (kind.at("resources") or kind).fields.items():
        if name in ("GPU", "TPU", "CPU") and have.get(name, 0) and item.value != have[name]:
            said = f"{machine.name} has {have[name]} {name}, not {item.value}"
            found.append(item.finding("machines", "doubtful", said, f"write {name}: {have[name]}"))
        elif name in ("GPU", "TPU") and not have.get(name) and item.value:
            said = f"{machine.name} has no {name}"
            found.append(item.finding("machines", "bad", said, "take a machine that has, or this resource out"))
    wanted = machine.resource if machine.kind and shape == "node_gcp" else ""
    if wanted and (kind.at("resources", wanted) is None):
        said = f"resources do not name the {have[wanted]} {wanted} of {machine.name}: Ray sees none there"
        found.append(kind.finding("machines", "bad", said, f"add {wanted}: {have[wanted]} to resources"))
    return found


def _is_spot(node: YamlItem) -> bool:
    """Whether a node may be taken away."""
    return (
        node.text("InstanceMarketOptions", "MarketType") == "spot"
        or node.text("scheduling", "provisioningModel") == "SPOT"
        or any(
            getattr(node.at(where, name), "value", None) is True
            for where in ("scheduling", "schedulingConfig")
            for name in ("preemptible", "spot")
        )
    )


def _check_cloud(file: YamlItem, cloud: str) -> list[Finding]:
    """Place, image, keys and mounts."""
    return [
        *_region_findings(file, cloud),
        *_images(file),
        *_keys(file, cloud),
        *_accounts(file, cloud),
        *_mount_findings(file),
    ]


def _region_findings(file: YamlItem, cloud: str) -> list[Finding]:
    region = file.at("provider", "region")
    if region is not None and not re.fullmatch(_REGIONS[cloud], str(region.value)):
        return [
            region.finding(
                "places", "bad", f"{region.value} is no region", f"write one such as {_SAMPLE_REGIONS[cloud]}"
            )
        ]
    zone = file.at("provider", "availability_zone")
    if zone is None or region is None:
        return []
    zones = [part.strip() for part in str(zone.value).split(",")]
    if all(part.startswith(str(region.value)) and len(part) > len(str(region.value)) for part in zones):
        return []
    return [
        zone.finding("places", "bad", f"{zone.value} is no zone of {region.value}", f"add a letter to {region.value}")
    ]


def image_findings(place: YamlItem) -> list[Finding]:
    """Whether a container holds the Ray that is here: the two must be the same."""
    found = _IMAGE.search(str(place.value))
    here = metadata.version("ray")
    if found is None or found["version"] == here:
        return []
    said = f"the image holds Ray {found['version']}; trainwright was tested with Ray {here}, which is here"
    return [place.finding("images", "bad", said, f"write {str(place.value).replace(found['version'], here)}")]


def _images(file: YamlItem) -> list[Finding]:
    docker = file.at("docker")
    names = ("image", "head_image", "worker_image")
    places = [item for name in names if docker is not None and (item := docker.at(name)) is not None]
    return [found for place in places for found in image_findings(place)]


def _keys(file: YamlItem, cloud: str) -> list[Finding]:
    if cloud != "aws" or file.at("auth", "ssh_private_key") is None:
        return []
    types = file.at("available_node_types")
    nodes = [node for kind in (types.fields.values() if types else ()) if (node := kind.at("node_config")) is not None]
    return [
        node.finding("keys of ssh", "bad", "KeyName is missing, but auth.ssh_private_key is given", "add KeyName:")
        for node in nodes
        if node.at("KeyName") is None and node.at("UserData") is None
    ]


def _accounts(file: YamlItem, cloud: str) -> list[Finding]:
    """Nodes without a role reach no storage."""
    name = {"aws": "IamInstanceProfile", "gcp": "serviceAccounts"}[cloud]
    types = file.at("available_node_types")
    return [
        node.finding("roles", "doubtful", f"{name} is missing: these nodes can reach no storage", f"add {name}:")
        for kind in (types.fields.values() if types else ())
        if (node := kind.at("node_config")) is not None and node.at(name) is None and node.at("serviceAccount") is None
    ]


def _mount_findings(file: YamlItem) -> list[Finding]:
    """The token must reach every node where nodes ask for it."""
    mounts = file.at("file_mounts")
    if mounts is not None and any(PurePosixPath(name).name == "auth_token" for name in mounts.fields):
        return []
    said = "no node is given ~/.ray/auth_token, without which Ray does not start under RAY_AUTH_MODE=token"
    place = mounts or file
    return [place.finding("token", "bad", said, "add to file_mounts: ~/.ray/auth_token: ~/.ray/auth_token")]
