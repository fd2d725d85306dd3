"""Where Ray's dashboard shows the job that drives a run."""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import urlsplit

from trainwright.runtime.ray_compat import dashboard_address

_LOOPBACK = ("127.0.0.1", "localhost", "::1")


def dashboard() -> dict[str, str]:
    """Facts of the connected cluster: `url` of this job's page, number of the `job`, address of the head `node`.

    Empty where the cluster has no dashboard, such as one that was started for this process alone.
    """
    import ray

    context = ray.get_runtime_context()
    return facts(dashboard_address(), str(context.get_job_id()), str(context.gcs_address))


def facts(address: str, job: str, gcs_address: str) -> dict[str, str]:
    """See `dashboard`. Of an address nothing is kept that could be a secret: neither user, password nor query."""
    if not address:
        return {}
    parts = urlsplit(address if "://" in address else f"http://{address}")
    host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
    place = f"{host}:{parts.port}" if parts.port else host
    node = gcs_address.rpartition(":")[0]
    return {"url": f"{parts.scheme}://{place}{parts.path.rstrip('/')}/#/jobs/{job}", "job": job, "node": node}


def dashboard_text(told: Mapping[str, str]) -> str:
    """A line for people; empty where there is no dashboard.

    `http://127.0.0.1:8265/#/jobs/01000000 on 10.0.0.5 (from elsewhere: ray dashboard cluster.yaml, or ssh -L ...)`.
    """
    if not told:
        return ""
    parts = urlsplit(told["url"])
    if parts.hostname not in _LOOPBACK:
        return told["url"]
    tunnel = f"ssh -L {parts.port}:127.0.0.1:{parts.port} {told['node']}"
    return f"{told['url']} on {told['node']} (from elsewhere: ray dashboard cluster.yaml, or {tunnel})"
