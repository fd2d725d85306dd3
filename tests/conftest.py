"""What all tests share."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partialmethod
from pathlib import Path
from typing import Any

import pytest

pytest_plugins = ["tests.s3"]


ORDER = ("tests/faults/", "tests/unit/", "tests/conformance/")  # then those on Ray
WORKERS_IMPORT = (  # and what Ray does, beside itself
    *("trainwright.worker", "trainwright.strategies.torch.data_parallel", "trainwright.strategies.torch.one_device"),
    "tensorflow",
    *("aiohttp", "asyncio", "google.protobuf", "jsonschema", "pyarrow.json", "pydantic.v1", "requests", "yaml"),
)
STAND_BACK = 1  # niceness, beside the group that takes longest
os.environ.setdefault("RAY_worker_niceness", "0")  # Ray's 15 would let its workers starve beside another process


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the tests that need a GPU where there is none, and those of several hosts, which `make hosts` runs."""
    unwanted = [] if Path("/dev/nvidiactl").exists() else ["gpu"]
    unwanted += [] if config.option.markexpr == "hosts" else ["hosts"]
    deselected = [item for item in items if any(item.get_closest_marker(name) for name in unwanted)]
    config.hook.pytest_deselected(items=deselected)
    items[:] = [item for item in items if item not in deselected]
    items.sort(key=lambda item: [item.nodeid.startswith(folder) for folder in ORDER], reverse=True)


def group_of(test: str) -> str:
    """What one process runs in one go: all tests that kill processes and wait for what becomes of it, or a file."""
    return ORDER[0] if test.startswith(ORDER[0]) else test.partition("::")[0]


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Where two processes share the cores, the one with the longest group comes first."""
    shared = "PYTEST_XDIST_WORKER" in os.environ
    if shared and group_of(item.nodeid) != ORDER[0] and os.nice(0) < STAND_BACK:
        os.nice(STAND_BACK)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Deal groups to the processes in their order; the first is the longest by far.

    xdist's own groups (`--dist loadgroup`, 3.8) are silently none with pytest 9.2.
    """
    from xdist.scheduler import LoadScopeScheduling

    class Groups(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid)

    return Groups(config, log)


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """A local Ray cluster of 2 CPUs, shared by the tests that need one; it spends less on starting processes."""
    import ray
    from ray._private.parameter import RayParams

    from tests import worker_start
    from tests.nursery import VARIABLE, nursery

    with nursery(WORKERS_IMPORT) as name:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(VARIABLE, name)
            own = {"setup_worker_path": worker_start.__file__, "include_log_monitor": False}
            patch.setattr(RayParams, "__init__", partialmethod(RayParams.__init__, **own))
            ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
        yield
        ray.shutdown()
