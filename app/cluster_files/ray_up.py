"""Files of `ray up`: what Ray's own validation finds, and what it lets pass."""

from __future__ import annotations

from trainwright.cluster_files import clouds, ray_start
from trainwright.cluster_files.instance_catalogue import Machine
from trainwright.cluster_files.node_groups import Group, prices, room
from trainwright.cluster_files.requirement import Need
from trainwright.cluster_files.schema import closest, misfits, shapes
from trainwright.cluster_files.yaml_tree import Item
from trainwright.core.finding import Finding

PROVIDERS = ("aws", "gcp", "local")
_FOREIGN = ("azure", "aliyun", "vsphere", "external", "spark")


def look_at(file: Item, need: Need | None) -> list[Finding]:
    """Everything found in a file of `ray up`, with this provider or that."""
    known = shapes("ray")
    found = misfits(file, known["file"], known)
    kind = file.text("provider", "type")
    provider = file.at("provider")
    if provider is None or not provider.mapping:
        return found
    if kind not in PROVIDERS:
        return [*found, _unknown_provider(provider, kind)]
    found += misfits(provider, known[f"provider_{kind}"], known)
    found += ray_start.look_at(_starts(file))
    if kind == "local":
        return found + _local(file, need)
    groups, of_nodes = _nodes(file, kind, known)
    return found + of_nodes + clouds.look_at(file, kind) + _sums(file, groups, need)


def _unknown_provider(provider: Item, kind: str) -> Finding:
    place = provider.at("type") or provider
    if kind in _FOREIGN:
        return place.finding("provider", "doubtful", f"nothing is known here of {kind}", "check what is below by hand")
    if not kind:
        return place.finding("provider", "bad", "it has no type", f"add type: {closest(kind, PROVIDERS)}")
    return place.finding("provider", "bad", f"{kind} is no provider", closest(kind, PROVIDERS))


def _starts(file: Item) -> list[ray_start.Start]:
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
    return [found for command in commands if (found := ray_start.start_of(command, docker))]


def _nodes(file: Item, cloud: str, known: dict[str, object]) -> tuple[list[Group], list[Finding]]:
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
        shape = clouds.shape_of(node, cloud)
        found += misfits(node, known[shape], dict(known))
        machine, of_machine = clouds.machine_of(node, shape)
        found += of_machine + clouds.resources_fit(kind, machine, shape)
        group = _group(file, kind, node, machine)
        groups.append(group)
        found += _spot_head(node) if name == head and group.spot else []
        found += _bounds(file, group) if name != head else []
    return groups, found


def _group(file: Item, kind: Item, node: Item, machine: Machine | None) -> Group:
    """The nodes of a type."""
    name = kind.path.rpartition(".")[2]
    most = file.number("max_workers", default=2)
    low, high = kind.number("min_workers"), kind.number("max_workers", default=most)
    if name == file.text("head_node_type"):
        low, high = 1, 1
    devices = clouds.devices(machine) | {name: item.value for name, item in _resources(kind).items()}
    return Group(
        item=kind, name=name, low=low, high=high, devices=devices, machine=machine, spot=clouds.is_spot(node)
    )  # fmt: skip


def _spot_head(node: Item) -> list[Finding]:
    return [node.finding("head", "bad", "the head may be taken away, and the cluster with it", "rent it on demand")]


def _resources(kind: Item) -> dict[str, Item]:
    resources = kind.at("resources")
    fields = resources.fields if resources else {}
    return {name: item for name, item in fields.items() if isinstance(item.value, int)}


def _head(file: Item, types: Item, head: str) -> list[Finding]:
    if head in types.fields:
        return []
    place = file.at("head_node_type")
    if place is None:
        names = ", ".join(types.fields)
        return [file.finding("head", "bad", "head_node_type is missing", f"add head_node_type: one of {names}")]
    return [place.finding("head", "bad", f"{head!r} is none of available_node_types", closest(head, types.fields))]


def _bounds(file: Item, group: Group) -> list[Finding]:
    low, high, kind = group.low, group.high, group.item
    most = file.number("max_workers", default=2)
    if 0 <= low <= high and low <= most:
        if high > most:
            said = f"max_workers is {high}, but all types together may have {most}"
            return [kind.finding("nodes", "doubtful", said, "raise max_workers of the file, or lower this one")]
        return []
    said = f"min_workers {low}, max_workers {high} and max_workers {most} of all types contradict each other"
    return [kind.finding("nodes", "bad", said, "keep 0 <= min_workers <= max_workers <= max_workers of the file")]


def _sums(file: Item, groups: list[Group], need: Need | None) -> list[Finding]:
    workers = [group for group in groups if group.name != file.text("head_node_type")]
    limit = file.number("max_workers", default=2)
    found = prices(file, groups, limit)
    return found + room(file, workers, need, limit) if need else found


def _local(file: Item, need: Need | None) -> list[Finding]:
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


def _old_autoscaler(file: Item) -> list[Finding]:
    """Ray 2.60's second autoscaler starts one worker too few on hosts given by address (measured)."""
    for start in _starts(file):
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
