"""Symbols of Ray without a public equivalent.

Every private symbol of Ray that trainwright names is imported here and nowhere else, so that a new version of Ray is
checked in one place (`tests/unit/test_compat.py`). The imports stay inside the functions: `import trainwright` imports
no Ray.
"""

from __future__ import annotations

import json
from functools import wraps
from importlib import resources
from typing import Any
from urllib.parse import urlsplit

_SPACE = b"trainwright"  # namespace of keys


def _dashboard_address() -> str:
    """Return the address of the connected cluster's dashboard; empty where it has none."""
    from ray._private.worker import get_dashboard_url

    return get_dashboard_url() or ""  # type: ignore[no-untyped-call]


def worker_store() -> Any:
    """Return the key-value client of the cluster that started this process as one of its workers."""
    from ray._private.worker import global_worker

    process: Any = global_worker
    return process.gcs_client


def store_at(address: str) -> Any:
    """Return a key-value client of the cluster at an address, for a process that is not connected."""
    from ray import _raylet

    raylet: Any = _raylet
    return raylet.GcsClient(address=address)


def errors_to_stderr() -> None:
    """Have Ray print what its nodes report, such as a lost process, on stderr: stdout is for results."""
    from ray._private import worker

    own = worker.print_to_stdstream
    if hasattr(own, "__wrapped__"):
        return  # an earlier call

    @wraps(own)
    def print_report(data: dict[str, Any], *rest: Any, **more: Any) -> None:
        own({**data, "is_err": True} if data.get("pid") == "raylet" else data, *rest, **more)

    worker.print_to_stdstream = print_report


def draining_nodes() -> dict[str, float]:
    """Return the nodes of the connected cluster that Ray drains: by id, when they end in seconds since 1970.

    0 means that no time is given.
    """
    from ray._private.state import state

    return {node: deadline_ms / 1000 for node, deadline_ms in state.get_draining_nodes().items()}


def validate_cluster_file(config: dict[str, Any]) -> None:
    """Raise what `ray up` raises for a cluster file. It needs no network, prints, and may end the process."""
    from ray.autoscaler._private.util import prepare_config, validate_config

    validate_config(prepare_config(config))


def cluster_file_schema() -> dict[str, Any]:
    """Return the JSON schema that `ray up` checks a cluster file against."""
    text = (resources.files("ray.autoscaler") / "ray-schema.json").read_text(encoding="utf-8")
    schema: dict[str, Any] = json.loads(text)
    return schema


def ray_start_options() -> list[str]:
    """Return the long options of `ray start` and `ray symmetric-run`, without dashes."""
    from ray.scripts.scripts import start
    from ray.scripts.symmetric_run import symmetric_run

    parameters = (*start.params, *symmetric_run.params)
    names = [name for parameter in parameters for name in (*parameter.opts, *parameter.secondary_opts)]
    return [name.removeprefix("--") for name in names if name.startswith("--")]


def autoscaler_report() -> bytes | None:
    """Return what the older autoscaler reports in JSON; None where the newer one runs, or none."""
    from ray._private.ray_constants import DEBUG_AUTOSCALING_STATUS
    from ray.experimental.internal_kv import _internal_kv_get

    report: bytes | None = _internal_kv_get(DEBUG_AUTOSCALING_STATUS)
    return report


def publish(topic: str, name: str) -> None:
    """Keep a name in the key-value store of the connected cluster."""
    from ray.experimental.internal_kv import _internal_kv_put

    _internal_kv_put(f"{topic}\n{name}".encode(), b"", namespace=_SPACE)


def retract(topic: str, name: str) -> None:
    """Remove a name from the key-value store of the connected cluster."""
    from ray.experimental.internal_kv import _internal_kv_del

    _internal_kv_del(f"{topic}\n{name}".encode(), namespace=_SPACE)


def published(topic: str) -> set[str]:
    """Return the names of a topic in the key-value store of the connected cluster."""
    from ray.experimental.internal_kv import _internal_kv_list

    found = _internal_kv_list(f"{topic}\n".encode(), namespace=_SPACE)
    return {key.decode().removeprefix(f"{topic}\n") for key in found}


def kubernetes_cluster(name: str, namespace: str) -> dict[str, Any]:
    """Return a RayCluster of Kubernetes. Raises requests.HTTPError."""
    from ray.autoscaler._private.kuberay.node_provider import KubernetesHttpApiClient

    found: dict[str, Any] = KubernetesHttpApiClient(namespace=namespace).get(f"rayclusters/{name}")
    return found


def kubernetes_autoscaling(cluster: dict[str, Any]) -> dict[str, Any]:
    """Return the autoscaler's configuration that the operator derives from a RayCluster."""
    from ray.autoscaler._private.kuberay.autoscaling_config import _derive_autoscaling_config_from_ray_cr

    config: dict[str, Any] = _derive_autoscaling_config_from_ray_cr(cluster)
    return config


# --- Link to Ray's dashboard ------------------------------------------------------------------------------------------


def dashboard_link() -> dict[str, str]:
    """Facts of the connected cluster: `url` of this job's page, number of the `job`, address of the head `node`.

    Empty where the cluster has no dashboard, such as one that was started for this process alone.
    """
    import ray

    context = ray.get_runtime_context()
    return dashboard_facts(_dashboard_address(), str(context.get_job_id()), str(context.gcs_address))


def dashboard_facts(address: str, job: str, gcs_address: str) -> dict[str, str]:
    """See `dashboard_link`. Of an address nothing is kept that could be a secret: neither user, password nor query."""
    if not address:
        return {}
    parts = urlsplit(address if "://" in address else f"http://{address}")
    host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
    place = f"{host}:{parts.port}" if parts.port else host
    node = gcs_address.rpartition(":")[0]
    return {"url": f"{parts.scheme}://{place}{parts.path.rstrip('/')}/#/jobs/{job}", "job": job, "node": node}
