"""What is AWS's or Google Cloud's in a file of `ray up`: machines, places, images, keys, mounts."""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import PurePosixPath

from trainwright.cluster_files.instance_catalogue import Machine, generations, machines, tpu_slice
from trainwright.cluster_files.schema import changes, closest, near
from trainwright.cluster_files.yaml_tree import Item
from trainwright.core.finding import Finding

_REGIONS = {"aws": r"[a-z]{2}(-[a-z]+)+-\d", "gcp": r"[a-z]+-[a-z]+\d+"}
_SAMPLES = {"aws": "us-west-2", "gcp": "us-central1"}
_IMAGE = re.compile(r"rayproject/ray(?:-ml)?:(?P<version>\d+\.\d+\.\d+)")


def shape_of(node: Item, cloud: str) -> str:
    """The name of the shape that a node_config has."""
    own = {"acceleratorType", "acceleratorConfig", "runtimeVersion"} & node.fields.keys()
    tpu = cloud == "gcp" and node.at("machineType") is None and own
    return "node_tpu" if tpu else f"node_{cloud}"


def machine_of(node: Item, shape: str) -> tuple[Machine | None, list[Finding]]:
    """What is rented, as the list knows it, and what is wrong with its name."""
    if shape == "node_tpu":
        return _tpu(node)
    cloud = shape.removeprefix("node_")
    place = node.at("InstanceType" if cloud == "aws" else "machineType")
    if place is None:
        return None, []
    known = machines(cloud)
    found = known.get(str(place.value).rpartition("/")[2])
    if found is None:
        return None, [_unknown_machine(place, list(known))]
    return _with_gpus(node, found) if cloud == "gcp" else (found, [])


def _unknown_machine(place: Item, known: list[str]) -> Finding:
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


def _with_gpus(node: Item, machine: Machine) -> tuple[Machine, list[Finding]]:
    """A machine of Google Cloud with what is added to it."""
    found: list[Finding] = []
    added = machines("gpu")
    for entry in getattr(node.at("guestAccelerators"), "entries", ()):
        name = entry.text("acceleratorType").rpartition("/")[2]
        if name not in added:
            place = entry.at("acceleratorType") or entry
            found.append(place.finding("machines", "bad", f"there is no accelerator {name}", closest(name, added)))
            continue
        count = entry.number("acceleratorCount", default=1)
        price = None if machine.price is None else machine.price + count * (added[name].price or 0.0)
        machine = Machine(
            name=machine.name, cpus=machine.cpus, memory_gib=machine.memory_gib, kind=added[name].kind,
            accelerators=count, price=price,
        )  # fmt: skip
    return machine, found


def _tpu(node: Item) -> tuple[Machine | None, list[Finding]]:
    place = node.at("acceleratorType")
    if place is None:
        return None, []
    found = tpu_slice(str(place.value))
    if found is not None:
        return found, []
    names = [f"{name}-8" for name in generations()]
    return None, [place.finding("machines", "bad", f"there is no TPU slice {place.value}", closest(place.value, names))]


def devices(machine: Machine | None) -> dict[str, int]:
    """Of one host, by Ray's names; empty where the machine is not known."""
    if machine is None:
        return {}
    return (
        {"CPU": machine.cpus, machine.resource: machine.accelerators // machine.hosts}
        if machine.kind
        else {"CPU": machine.cpus}
    )


def resources_fit(kind: Item, machine: Machine | None, shape: str) -> list[Finding]:
    """Whether the devices that a type promises are those that its machine has."""
    if machine is None:
        return []
    have = devices(machine)
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


def is_spot(node: Item) -> bool:
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


def look_at(file: Item, cloud: str) -> list[Finding]:
    """Place, image, keys and mounts."""
    return [*_place(file, cloud), *_images(file), *_keys(file, cloud), *_accounts(file, cloud), *_mounts(file)]


def _place(file: Item, cloud: str) -> list[Finding]:
    region = file.at("provider", "region")
    if region is not None and not re.fullmatch(_REGIONS[cloud], str(region.value)):
        return [region.finding("places", "bad", f"{region.value} is no region", f"write one such as {_SAMPLES[cloud]}")]
    zone = file.at("provider", "availability_zone")
    if zone is None or region is None:
        return []
    zones = [part.strip() for part in str(zone.value).split(",")]
    if all(part.startswith(str(region.value)) and len(part) > len(str(region.value)) for part in zones):
        return []
    return [
        zone.finding("places", "bad", f"{zone.value} is no zone of {region.value}", f"add a letter to {region.value}")
    ]


def image_findings(place: Item) -> list[Finding]:
    """Whether a container holds the Ray that is here: the two must be the same."""
    found = _IMAGE.search(str(place.value))
    here = metadata.version("ray")
    if found is None or found["version"] == here:
        return []
    said = f"the image holds Ray {found['version']}; trainwright was tested with Ray {here}, which is here"
    return [place.finding("images", "bad", said, f"write {str(place.value).replace(found['version'], here)}")]


def _images(file: Item) -> list[Finding]:
    docker = file.at("docker")
    names = ("image", "head_image", "worker_image")
    places = [item for name in names if docker is not None and (item := docker.at(name)) is not None]
    return [found for place in places for found in image_findings(place)]


def _keys(file: Item, cloud: str) -> list[Finding]:
    if cloud != "aws" or file.at("auth", "ssh_private_key") is None:
        return []
    types = file.at("available_node_types")
    nodes = [node for kind in (types.fields.values() if types else ()) if (node := kind.at("node_config")) is not None]
    return [
        node.finding("keys of ssh", "bad", "KeyName is missing, but auth.ssh_private_key is given", "add KeyName:")
        for node in nodes
        if node.at("KeyName") is None and node.at("UserData") is None
    ]


def _accounts(file: Item, cloud: str) -> list[Finding]:
    """Nodes without a role reach no storage."""
    name = {"aws": "IamInstanceProfile", "gcp": "serviceAccounts"}[cloud]
    types = file.at("available_node_types")
    return [
        node.finding("roles", "doubtful", f"{name} is missing: these nodes can reach no storage", f"add {name}:")
        for kind in (types.fields.values() if types else ())
        if (node := kind.at("node_config")) is not None and node.at(name) is None and node.at("serviceAccount") is None
    ]


def _mounts(file: Item) -> list[Finding]:
    """The token must reach every node where nodes ask for it."""
    mounts = file.at("file_mounts")
    if mounts is not None and any(PurePosixPath(name).name == "auth_token" for name in mounts.fields):
        return []
    said = "no node is given ~/.ray/auth_token, without which Ray does not start under RAY_AUTH_MODE=token"
    place = mounts or file
    return [place.finding("token", "bad", said, "add to file_mounts: ~/.ray/auth_token: ~/.ray/auth_token")]
