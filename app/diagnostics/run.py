"""One examination: of this machine, of the connected cluster, or of a file that describes a cluster."""

from __future__ import annotations

import importlib
import os
import socket
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from trainwright.core.errors import JobError, ResourceError
from trainwright.core.finding import Finding
from trainwright.diagnostics.cluster_checks import judge_fleet
from trainwright.diagnostics.machine_checks import judge
from trainwright.diagnostics.machine_probe import Wish, visit
from trainwright.diagnostics.report import Diagnosis
from trainwright.diagnostics.storage_probe import paths_of
from trainwright.reporting import formatting
from trainwright.storage.object_store import canonical

CLUSTER_FILES = (".yaml", ".yml", ".sbatch")
_CONNECT_S = 5.0
_NO_STORAGE = "No storage was tried: name it with --storage URI, or a job that names it with --job FILE.py."


def wish_for(storage: str, job: Any, *, imports: bool, deadline_s: float) -> Wish:
    """What is to be looked at: a storage by its URI, else that of a job, and the job's data."""
    uri = storage or (job.storage if job is not None else "")
    places = dict.fromkeys((*paths_of(job.train), *paths_of(job.evaluate))) if job is not None else ()
    return Wish(storage=canonical(uri) if uri else "", places=tuple(places), imports=imports, deadline_s=deadline_s)


def examine_file(path: str) -> Diagnosis:
    """A cluster file. Raises JobError for a file that is none."""
    if not path.endswith(CLUSTER_FILES):
        raise JobError(
            [f"{path} is no cluster file ({', '.join(CLUSTER_FILES)}); of a job: trainwright doctor --job {path}"]
        )
    findings: Iterable[Finding] = importlib.import_module("trainwright.cluster_files").check(path)
    return Diagnosis(subject=path, findings=tuple(findings))


def examine(wish: Wish, address: str = "") -> Diagnosis:
    """The cluster where one is named or connected; where it cannot be reached, or there is none, this machine."""
    address = address or os.environ.get("RAY_ADDRESS", "")
    notes = () if wish.storage else (_NO_STORAGE,)
    if address in ("", "local") and not connected():
        return replace(_machine(wish), notes=notes)
    try:
        started = _connect(address)
    except ResourceError as error:
        fault = Finding(subject="Ray", verdict="bad", what=error.what, where=error.where, remedy=error.remedy)
        alone = _machine(wish)
        return replace(alone, findings=(fault, *alone.findings), notes=notes)
    try:
        return replace(_cluster(wish), notes=notes)
    finally:
        if started:
            _leave()


def _machine(wish: Wish) -> Diagnosis:
    return Diagnosis(subject="this machine", findings=tuple(judge(visit(wish))))


def _cluster(wish: Wish) -> Diagnosis:
    from trainwright.diagnostics.cluster_probe import look

    fleet = look(wish)
    each = [
        finding for name, machine in fleet.machines.items() for finding in judge(machine, where=name, in_cluster=True)
    ]
    nodes = formatting.count(len(fleet.machines) + len(fleet.absent), "node")
    return Diagnosis(subject=f"{nodes} of the cluster", findings=(*judge_fleet(fleet), *each))


def connected() -> bool:
    """Whether this process has called `ray.init`; Ray is not imported for that."""
    import sys

    ray = sys.modules.get("ray")
    return bool(ray is not None and ray.is_initialized())


def _connect(address: str) -> bool:
    """Connect to a cluster that is there; True where this call did. Raises ResourceError, soon."""
    if connected():
        return False
    _knock(address)
    import ray

    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    try:
        ray.init(address=address, **quiet)
    except (ConnectionError, ValueError, RuntimeError, ray.exceptions.RayError) as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise _unreachable(address, lines[0][:200]) from error
    return True


def _knock(address: str) -> None:
    """Ask whether somebody listens there: Ray itself would ask for a minute."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        if address != "auto":
            raise _unreachable(address, "this is no HOST:PORT")
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_S).close()
    except OSError as error:
        why = (
            f"no answer within {_CONNECT_S:.0f} s" if isinstance(error, TimeoutError) else error.strerror or str(error)
        )
        raise _unreachable(address, why) from error


def _unreachable(address: str, why: str) -> ResourceError:
    return ResourceError(
        f"the cluster cannot be reached: {why}",
        where=address,
        remedy="start it: ray start --head; give HOST:6379 of its head as --address, or unset RAY_ADDRESS",
    )


def _leave() -> None:
    import ray

    ray.shutdown()
