"""Symbols of Ray without a public equivalent.

Every private symbol of Ray that trainwright names is imported here and nowhere else, so that a new version of Ray is
checked in one place (`tests/unit/test_compat.py`). The imports stay inside the functions: `import trainwright` imports
no Ray.
"""

from __future__ import annotations

from typing import Any


def session_folder() -> str:
    """Return the folder of the Ray session that this process is connected to."""
    from ray._private.worker import _global_node

    node: Any = _global_node
    return str(node.get_session_dir_path())


def dashboard_address() -> str:
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


def validate_cluster_file(config: dict[str, Any]) -> None:
    """Raise what `ray up` raises for a cluster file. It needs no network, prints, and may end the process."""
    from ray.autoscaler._private.util import prepare_config, validate_config

    validate_config(prepare_config(config))


def autoscaler_report() -> bytes | None:
    """Return what the older autoscaler reports in JSON; None where the newer one runs, or none."""
    from ray._private.ray_constants import DEBUG_AUTOSCALING_STATUS
    from ray.experimental.internal_kv import _internal_kv_get

    report: bytes | None = _internal_kv_get(DEBUG_AUTOSCALING_STATUS)
    return report


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
