"""Check files of `ray up` for mistakes that cost money, open the cluster to others or stop nodes from starting.

Keys and types come from Ray's own JSON schema; `node_config` is left to the cloud, which refuses wrong keys itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from pathlib import PurePosixPath

from trainwright.cluster_files import ray_start
from trainwright.cluster_files.yaml_checks import YamlItem, check_schema
from trainwright.core.cluster import ACCELERATORS, find_accelerator
from trainwright.core.errors import Finding, nearest


@dataclass(frozen=True, kw_only=True)
class _NodeGroup:
    """Nodes of one type."""

    item: YamlItem  # the type in the file
    low: int
    high: int
    machine: _InstanceType | None = None  # the machine to rent; None if it is not in the list
    spot: bool = False

    @property
    def price(self) -> float | None:
        """Return US dollars an hour of one node."""
        if self.machine is None:
            return None
        return self.machine.spot_price if self.spot else self.machine.price


def _price(file: YamlItem, groups: Sequence[_NodeGroup]) -> Iterator[Finding]:
    """Find what the cluster costs an hour with the fewest nodes, and with the most expensive nodes that may start."""
    if not groups or any(group.price is None for group in groups if group.high):
        return
    limit = file.number("max_workers", default=2)  # of nodes without the head
    low = sum((group.price or 0.0) * group.low for group in groups)
    dearest = sorted((group.price or 0.0 for group in groups for _ in range(group.high - group.low)), reverse=True)
    high = low + sum(dearest[: max(limit + 1 - sum(group.low for group in groups), 0)])
    spot = ", spot prices estimated from them" if any(group.spot for group in groups) else ""
    said = f"about ${low:,.2f} to ${high:,.2f} an hour by price lists of mid-2025{spot}; without disks and traffic"
    yield file.finding("price", "good", said)


# --- Machines to rent, with their accelerators and list prices --------------------------------------------------------


_HOST_CHIPS = {"v5litepod": 4, "v6e": 4}  # chips of a host in slices of several hosts; single hosts have up to 8
_KINDS = {"v3": "TPU-V3", "v4": "TPU-V4", "v5litepod": "TPU-V5E", "v5p": "TPU-V5P", "v6e": "TPU-V6E"}
_BY_CHIP = ("v5litepod", "v6e")  # the number in their names counts chips; in others two cores for each chip


@dataclass(frozen=True, kw_only=True)
class _InstanceType:
    """A machine, or a TPU slice of one or several hosts."""

    name: str  # as the cloud writes it
    cpus: int = 0
    kind: str = ""  # kind of accelerator, as in trainwright.core.cluster; empty without one
    accelerators: int = 0
    price: float | None = None  # US dollars an hour on demand; None if it is not in the list
    hosts: int = 1  # number of hosts of a TPU slice; 1 for machines

    @property
    def resource(self) -> str:
        """Return Ray's name of the device that computes."""
        return ACCELERATORS[self.kind].resource if self.kind else "CPU"

    @property
    def spot_price(self) -> float | None:
        """Return an estimate: the accelerator's usual share of the price on demand; a third without accelerator."""
        if self.price is None:
            return None
        known = ACCELERATORS.get(self.kind)
        share = known.spot_price / known.price if known and known.price and known.spot_price else 1 / 3
        return self.price * share


@cache
def instance_types(cloud: str) -> dict[str, _InstanceType]:
    """Return machines by name for `aws` or `gcp`, or for `gpu` the accelerators to add to machines of Google Cloud."""
    text = (resources.files("trainwright.cluster_files") / "machines.txt").read_text(encoding="utf-8")
    rows = [line.split() for line in text.splitlines() if not line.startswith("#")]
    return {
        name: _InstanceType(
            name=name, cpus=int(cpus), kind="" if kind == "-" else kind, accelerators=int(count),
            price=None if price == "-" else float(price),
        )
        for provider, name, cpus, _, kind, count, price in rows
        if provider == cloud
    }  # fmt: skip


def parse_tpu_slice(name: str) -> _InstanceType | None:
    """Return the slice of an accelerator type such as `v5litepod-16` or `v4-8`; None for an unknown generation.

    The number counts chips for v5e and v6e, and cores, two for each chip, for the others (cloud.google.com/tpu/docs).
    """
    found = re.fullmatch(r"(v\d[a-z]*)-([1-9]\d*)", name)
    if found is None or found[1] not in _KINDS:
        return None
    kind = find_accelerator(_KINDS[found[1]])
    assert kind is not None and kind.price is not None, "TPUs are in the table with their prices"
    chips = int(found[2]) if found[1] in _BY_CHIP else int(found[2]) // 2
    if not chips:
        return None
    single = 8 if found[1] in _BY_CHIP else 4
    hosts = 1 if chips <= single else -(-chips // _HOST_CHIPS.get(found[1], 4))
    return _InstanceType(name=name, kind=kind.name, accelerators=chips, price=kind.price * chips, hosts=hosts)


# --- Checks -----------------------------------------------------------------------------------------------------------


_PROVIDERS = ("aws", "gcp", "local")
_UNCHECKED_PROVIDERS = ("azure", "aliyun", "vsphere", "external", "spark")
_PROVIDER_KEYS = {"aws": ("region",), "gcp": ("region", "availability_zone", "project_id"), "local": ()}


def check_ray_up(file: YamlItem) -> Iterator[Finding]:
    """Check a file of `ray up`."""
    yield from check_schema(file)
    kind = file.text("provider", "type")
    provider = file.at("provider")
    if provider is None or not provider.mapping:
        return
    if kind not in _PROVIDERS:
        yield _unknown_provider(provider, kind)
        return
    for name in _PROVIDER_KEYS[kind]:
        if name not in provider.fields:
            yield provider.finding("keys", "bad", f"{name} is missing", f"add {name}:")
    starts = _start_commands(file)
    for start in starts:
        yield from ray_start.check_start(start)
    if kind == "local":
        yield from _check_local(file, provider)
        yield from _check_autoscaler(starts)
        return
    groups, of_nodes = _node_groups(file, kind)
    yield from of_nodes
    yield from _check_region(file, kind)
    for name in ("image", "head_image", "worker_image"):
        yield from ray_start.check_image(file.at("docker", name))
    yield from _check_access(file, kind)
    yield from _price(file, groups)


def _unknown_provider(provider: YamlItem, kind: str) -> Finding:
    place = provider.at("type") or provider
    if kind in _UNCHECKED_PROVIDERS:
        return place.finding("provider", "doubtful", f"the provider {kind} is not checked", "check the file by hand")
    if not kind:
        return place.finding("provider", "bad", "type is missing", f"add type: one of {', '.join(_PROVIDERS)}")
    return place.finding("provider", "bad", f"Ray has no provider {kind}", nearest(kind, _PROVIDERS))


def _start_commands(file: YamlItem) -> list[ray_start.RayStart]:
    """Return all calls of `ray start`, each with the environment of the container."""
    docker = {
        name: value
        for options in ("run_options", "head_run_options", "worker_run_options")
        for option in file.list("docker", options)
        for name, _, value in [str(option.value).removeprefix("--env=").removeprefix("-e ").partition("=")]
    }
    commands = (*file.list("head_start_ray_commands"), *file.list("worker_start_ray_commands"))
    return [found for command in commands if (found := ray_start.parse_start(command, docker))]


def _node_groups(file: YamlItem, cloud: str) -> tuple[list[_NodeGroup], list[Finding]]:
    """Return the groups of nodes and the findings of their types."""
    types = file.at("available_node_types")
    head = file.text("head_node_type")
    if types is None or not types.fields:
        missing = "available_node_types is missing"
        return [], [file.finding("node types", "bad", missing, "add the types of machines to rent")]
    found = [*_check_head(file, types, head)]
    most = file.number("max_workers", default=2)
    groups = []
    for name, kind in types.fields.items():
        node = kind.at("node_config")
        if node is None or not node.mapping:
            continue
        tpu = cloud == "gcp" and node.at("machineType") is None and bool(_TPU_KEYS & node.fields.keys())
        machine, of_machine = _tpu_type(node) if tpu else _instance_type(node, cloud)
        found += [*of_machine, *_check_resources(kind, machine, declared=cloud == "gcp" and not tpu)]
        low, high = kind.number("min_workers"), kind.number("max_workers", default=most)
        group = _NodeGroup(item=kind, low=low, high=high, machine=machine, spot=_is_spot(node))
        if name != head:
            found += _check_bounds(group, most)
        elif group.spot:
            said = "the head is a spot machine: if it is preempted, the cluster ends"
            found.append(node.finding("head", "bad", said, "rent it on demand"))
        groups.append(group if name != head else replace(group, low=1, high=1))
    return groups, found


def _check_head(file: YamlItem, types: YamlItem, head: str) -> Iterator[Finding]:
    place = file.at("head_node_type")
    if place is None:
        names = ", ".join(types.fields)
        yield file.finding("head", "bad", "head_node_type is missing", f"add head_node_type: one of {names}")
    elif head not in types.fields:
        yield place.finding("head", "bad", f"available_node_types has no {head!r}", nearest(head, types.fields))


def _check_bounds(group: _NodeGroup, most: int) -> Iterator[Finding]:
    low, high, kind = group.low, group.high, group.item
    if not (0 <= low <= high and low <= most):
        said = f"min_workers {low}, max_workers {high} and max_workers {most} of the file contradict each other"
        yield kind.finding("nodes", "bad", said, "keep 0 <= min_workers <= max_workers <= max_workers of the file")
    elif high > most:
        said = f"max_workers is {high}, but max_workers of the file is {most}"
        yield kind.finding("nodes", "doubtful", said, "raise max_workers of the file, or lower this one")


def _check_local(file: YamlItem, provider: YamlItem) -> Iterator[Finding]:
    """Check a file for existing hosts, which Ray's local provider uses."""
    for name in ("head_node", "worker_nodes", "available_node_types", "head_node_type"):
        if (item := file.at(name)) is not None:
            yield item.finding("nodes", "bad", f"Ray's local provider does not accept {name}", f"take {name} out")
    if provider.at("coordinator_address") is None:
        for name in ("head_ip", "worker_ips"):
            if not getattr(provider.at(name), "value", None):
                yield provider.finding("keys", "bad", f"{name} is missing", f"add {name}:")
    hosts = len(provider.list("worker_ips"))
    for name in ("min_workers", "max_workers"):
        item = file.at(name)
        if item is not None and isinstance(item.value, int) and item.value > hosts and hosts:
            said = f"{name} is {item.value}, but there are {hosts} worker_ips"
            yield item.finding("nodes", "doubtful", said, f"write {hosts}, or add addresses")


def _check_autoscaler(starts: Sequence[ray_start.RayStart]) -> Iterator[Finding]:
    """Check that the older autoscaler is used: that of Ray 2.60 starts one worker too few on given hosts (measured)."""
    for start in starts:
        if start.head and start.environment.get("RAY_enable_autoscaler_v2", "") not in ("0", "false"):
            said = "Ray's autoscaler v2 starts one worker too few with the local provider"
            remedy = "put RAY_enable_autoscaler_v2=0 in front of `ray start --head`"
            yield start.item.finding("autoscaler", "bad", said, remedy)
            return


# --- Machines, places, images, keys and accounts of AWS and Google Cloud ----------------------------------------------


_REGIONS = {"aws": r"[a-z]{2}(-[a-z]+)+-\d", "gcp": r"[a-z]+-[a-z]+\d+"}
_SAMPLE_REGIONS = {"aws": "us-west-2", "gcp": "us-central1"}
_TPU_KEYS = {"acceleratorType", "acceleratorConfig", "runtimeVersion"}


def _instance_type(node: YamlItem, cloud: str) -> tuple[_InstanceType | None, list[Finding]]:
    """Return the machine of a node, if the list has it, and a finding if not."""
    place = node.at("InstanceType" if cloud == "aws" else "machineType")
    if place is None:
        return None, []
    known = instance_types(cloud)
    name = str(place.value).rpartition("/")[2]
    found = known.get(name)
    if found is None:
        said = f"{name} is not in the list of machine types, which is incomplete: its devices and price are not known"
        remedy = f"{nearest(name, known)} If that is wrong, check the name with the cloud"
        return None, [place.finding("machines", "doubtful", said, remedy)]
    return _add_gpus(node, found) if cloud == "gcp" else (found, [])


def _add_gpus(node: YamlItem, machine: _InstanceType) -> tuple[_InstanceType, list[Finding]]:
    """Return a machine of Google Cloud with its guest accelerators."""
    found: list[Finding] = []
    added = instance_types("gpu")
    for entry in node.list("guestAccelerators"):
        name = entry.text("acceleratorType").rpartition("/")[2]
        if name not in added:
            place, said = entry.at("acceleratorType") or entry, f"Google Cloud has no accelerator {name}"
            found.append(place.finding("machines", "bad", said, nearest(name, added)))
            continue
        count = entry.number("acceleratorCount", default=1)
        price = None if machine.price is None else machine.price + count * (added[name].price or 0.0)
        machine = replace(machine, kind=added[name].kind, accelerators=count, price=price)
    return machine, found


def _tpu_type(node: YamlItem) -> tuple[_InstanceType | None, list[Finding]]:
    place = node.at("acceleratorType")
    if place is None:
        return None, []
    found = parse_tpu_slice(str(place.value))
    if found is not None:
        return found, []
    remedy = nearest(str(place.value), [f"{generation}-8" for generation in _KINDS])
    return None, [place.finding("machines", "bad", f"there is no TPU slice {place.value}", remedy)]


def _check_resources(kind: YamlItem, machine: _InstanceType | None, *, declared: bool) -> Iterator[Finding]:
    """Check that the resources of a node type are the devices of its machine.

    Args:
        declared: whether Ray finds accelerators only if the file declares them.
    """
    if machine is None:
        return
    have = {"CPU": machine.cpus}  # devices of one host, by Ray's names
    if machine.kind:
        have[machine.resource] = machine.accelerators // machine.hosts
    for name, item in (kind.at("resources") or kind).fields.items():
        if name in ("GPU", "TPU", "CPU") and have.get(name, 0) and item.value != have[name]:
            said = f"{machine.name} has {have[name]} {name}, not {item.value}"
            yield item.finding("machines", "doubtful", said, f"write {name}: {have[name]}")
        elif name in ("GPU", "TPU") and not have.get(name) and item.value:
            said = f"{machine.name} has no {name}"
            yield item.finding("machines", "bad", said, "choose a machine that has it, or remove the resource")
    wanted = machine.resource
    if machine.kind and declared and kind.at("resources", wanted) is None:
        said = f"resources do not declare the {have[wanted]} {wanted} of {machine.name}, so Ray does not use them"
        yield kind.finding("machines", "bad", said, f"add {wanted}: {have[wanted]} to resources")


def _is_spot(node: YamlItem) -> bool:
    """Return whether a node is preemptible."""
    return (
        node.text("InstanceMarketOptions", "MarketType") == "spot"
        or node.text("scheduling", "provisioningModel") == "SPOT"
        or any(
            getattr(node.at(where, name), "value", None) is True
            for where in ("scheduling", "schedulingConfig")
            for name in ("preemptible", "spot")
        )
    )


def _check_region(file: YamlItem, cloud: str) -> Iterator[Finding]:
    region, zone = file.at("provider", "region"), file.at("provider", "availability_zone")
    if region is None:
        return
    name = str(region.value)
    if not re.fullmatch(_REGIONS[cloud], name):
        yield region.finding("places", "bad", f"{name} is not a region", f"write one such as {_SAMPLE_REGIONS[cloud]}")
    elif zone is not None:
        zones = [part.strip() for part in str(zone.value).split(",")]
        if not all(part.startswith(name) and len(part) > len(name) for part in zones):
            yield zone.finding("places", "bad", f"{zone.value} is not a zone of {name}", f"add a letter to {name}")


def _check_access(file: YamlItem, cloud: str) -> Iterator[Finding]:
    """Check SSH keys, and roles or accounts, without which nodes cannot read object storage; and the token."""
    types = file.at("available_node_types")
    nodes = [node for kind in (types.fields.values() if types else ()) if (node := kind.at("node_config")) is not None]
    role = {"aws": "IamInstanceProfile", "gcp": "serviceAccounts"}[cloud]
    for node in nodes:
        given = node.fields.keys()
        if cloud == "aws" and file.at("auth", "ssh_private_key") and not {"KeyName", "UserData"} & given:
            said = "KeyName is missing, but auth.ssh_private_key is set"
            yield node.finding("keys of ssh", "bad", said, "add KeyName:")
        if not {role, "serviceAccount"} & given:
            said = f"{role} is missing: these nodes have no access to object storage"
            yield node.finding("roles", "doubtful", said, f"add {role}:")
    mounts = file.at("file_mounts")
    if mounts is None or not any(PurePosixPath(name).name == "auth_token" for name in mounts.fields):
        token, said = "~/.ray/auth_token", "and Ray does not start without it under RAY_AUTH_MODE=token"
        remedy = f"add to file_mounts: {token}: {token}"
        yield (mounts or file).finding("token", "bad", f"{token} is not copied to the nodes, {said}", remedy)
