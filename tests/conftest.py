"""What all tests share."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from tests import clusters

pytest_plugins = ["tests.s3"]


FOLDERS = ("faults", "conformance", "ray", "hosts", "e2e", "unit")  # the small ones last
ORDER = tuple(f"tests/{folder}/" for folder in FOLDERS)
GROUPS = ORDER[:3]  # that share a Ray cluster, or ranks and the runs that they are compared with
APART = ("hosts", "nodes")  # marks of what has a target of its own: `make hosts`, `make nodes`
STAND_BACK = 1  # niceness, beside the group that takes longest
settings.register_profile("gate", deadline=None)  # a busy machine breaks no promise
settings.load_profile("gate")
gc.disable()  # until all is collected: imports make no garbage
os.environ.setdefault("RAY_worker_niceness", "0")  # Ray's 15 would let its workers starve beside another process


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the tests that need a GPU where there is none, and those of targets of their own."""
    unwanted = [] if Path("/dev/nvidiactl").exists() else ["gpu"]
    unwanted += [name for name in APART if name != config.option.markexpr]
    deselected = [item for item in items if any(item.get_closest_marker(name) for name in unwanted)]
    config.hook.pytest_deselected(items=deselected)
    items[:] = [item for item in items if item not in deselected]
    order = ("tests/hosts/", *ORDER) if config.option.markexpr == "hosts" else ORDER
    items.sort(key=lambda item: [item.nodeid.startswith(folder) for folder in order], reverse=True)


def pytest_collection_finish() -> None:
    """What was imported stays: no collection of garbage looks through it from here on."""
    gc.collect()
    gc.freeze()
    gc.enable()


def group_of(test: str) -> str:
    """What one process runs in one go: what shares expensive things, or a file."""
    return next((group for group in GROUPS if test.startswith(group)), test.partition("::")[0])


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Where several processes share the cores, the one with the longest group comes first."""
    shared = "PYTEST_XDIST_WORKER" in os.environ
    if shared and group_of(item.nodeid) != ORDER[0] and os.nice(0) < STAND_BACK:
        os.nice(STAND_BACK)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Deal groups to the processes in their order; the first is the longest.

    xdist's own groups (`--dist loadgroup`, 3.8) are silently none with pytest 9.2.
    """
    from xdist.scheduler import LoadScopeScheduling

    class Groups(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            alone = config.option.markexpr in APART  # a cluster of its own each, as a rule
            return nodeid.partition("::")[0] if alone else group_of(nodeid)

    return Groups(config, log)


@pytest.fixture(scope="session")
def forked_workers() -> Iterator[None]:
    """Clusters of `tests.clusters` have a process to fork their workers from."""
    with clusters.forking():
        yield


@pytest.fixture(scope="session")
def ray_cluster(forked_workers: None) -> Iterator[None]:
    """A local Ray cluster of 2 CPUs, shared by the tests that need one."""
    import ray
    from ray._private.parameter import RayParams

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RayParams, "__init__", RayParams.__init__)  # and back
        clusters.thrifty()
        ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield
    ray.shutdown()
