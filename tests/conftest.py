"""What all tests share."""

from __future__ import annotations

import gc
import importlib.util
import os
import re
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.gpu import STAND_IN
from tests.support import ray_clusters

pytest_plugins = ["tests.support.s3_server", "tests.support.conformance.pool"]


# The longest come first and the short ones last, so that all processes end together.
ORDER = ("ray", "faults", "hosts", "e2e", "programs", "conformance", "unit")
# Run by one process each, since their files share a Ray cluster; each of them takes about four minutes.
GROUPS = (
    r"tests/ray/test_ray_",
    r"tests/ray/",
    r"tests/faults/test_[a-d]",
    r"tests/faults/test_[e-r]",
    r"tests/faults/test_[s-z]",
)
# Each run by one process too: their ranks are forked from a process that takes ten seconds to import the frameworks.
FORKING = (
    r"tests/conformance/test_[a-f]",
    r"tests/conformance/"
    r"|tests/unit/test_(meta_models|reduce_scatter|torch_(aborts|gradient_noise|process_groups)|unusual_models)\.py",
)
LEAST, MOST = 4, 8  # processes
CLUSTER: list[Callable[[bool], None]] = []  # what connects this process to its Ray cluster, once it has one
APART = ("extras", "hosts", "nodes", "soak")  # marks of what has a target of its own; `-m "hosts or nodes"` runs both
LONGEST = 30  # files, in the table at the end
SOAK = frozenset(Path(__file__).with_name("soak.txt").read_text(encoding="utf-8").splitlines())
gc.disable()  # until all is collected: imports make no garbage
os.environ.setdefault("RAY_worker_niceness", "0")  # Ray's 15 would let its workers starve beside another process


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """Declare the setting `timeout` of pyproject.toml where pytest-timeout is missing, as on GPU machines."""
    if not pluginmanager.hasplugin("timeout"):
        parser.addini("timeout", "seconds that a test may take; not enforced without pytest-timeout")


def pytest_configure(config: pytest.Config) -> None:
    """Let Hypothesis set no deadline, since a busy machine breaks no promise; GPU machines have no Hypothesis."""
    if config.pluginmanager.hasplugin("hypothesispytest"):
        from hypothesis import settings

        settings.register_profile("gate", deadline=None)
        settings.load_profile("gate")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the tests that need a GPU where there is none, and those of targets of their own."""
    mark_long_tests(config, items)
    unwanted = [name for name in APART if name not in config.option.markexpr]
    deselected = [item for item in items if any(map(item.get_closest_marker, unwanted)) or lacks_device(item)]
    config.hook.pytest_deselected(items=deselected)
    items[:] = [item for item in items if item not in deselected]
    order = ("hosts", *ORDER) if "hosts" in config.option.markexpr else ORDER
    items.sort(key=lambda item: [item.nodeid.startswith(f"tests/{name}") for name in order], reverse=True)


def mark_long_tests(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the tests of soak.txt. Raises UsageError for a line that no test has."""
    for item in items:
        if item.nodeid in SOAK:
            item.add_marker("soak")
    files, known = {item.nodeid.partition("::")[0] for item in items}, {item.nodeid for item in items}
    stale = [line for line in SOAK - known if line.partition("::")[0] in files]
    if stale and not any("::" in argument for argument in config.args):
        raise pytest.UsageError(f"tests/soak.txt names tests that are not there: {', '.join(sorted(stale))}")


def lacks_device(item: pytest.Item) -> bool:
    """Whether a test needs a GPU that is not here; some, `gpu(stand_in=False)`, measure CUDA itself."""
    mark = item.get_closest_marker("gpu")
    if mark is None or (Path("/dev/nvidiactl").exists() and STAND_IN not in os.environ):
        return False
    return STAND_IN not in os.environ or not mark.kwargs.get("stand_in", True)


def pytest_collection_finish() -> None:
    """What was imported stays: no collection of garbage looks through it from here on."""
    gc.collect()
    gc.freeze()
    gc.enable()


def group_of(test: str) -> str:
    """Return what one process runs as a whole: files that share a Ray cluster or the process of ranks, or a file."""
    return next((group for group in (*GROUPS, *FORKING) if re.match(group, test)), test.partition("::")[0])


def pytest_runtest_setup(item: pytest.Item) -> None:
    """End the cluster of this process before a test that needs none, and take back what Ray left in this process.

    torch calls `sys.excepthook` for a warning that became an error while another error is on its way. Ray's hook then
    asks a GCS that may be gone, without a deadline and deaf to signals. Ray Train leaves its answer to Ctrl-C, which
    calls an actor that is gone.
    """
    sys.excepthook = sys.__excepthook__
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if CLUSTER and group_of(item.nodeid) not in GROUPS:
        CLUSTER[0]("ray_cluster" in item.fixturenames)  # type: ignore[attr-defined]


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Show which files take longest, where the tests of many were run."""
    seconds: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                seconds[report.nodeid.partition("::")[0]] += report.duration  # type: ignore[assignment]
    if len(seconds) > LONGEST:
        terminalreporter.section("slowest files")
        for file, spent_s in seconds.most_common(LONGEST):
            terminalreporter.write_line(f"{spent_s:7.1f} s  {file}")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Return the processes of `-n auto`: more than two cores, since tests often wait; each may take 1.5 GB."""
    return max(LEAST, min(os.cpu_count() or LEAST, MOST))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Return a scheduler that gives whole groups to the processes, in their order.

    xdist's own groups (`--dist loadgroup`, 3.8) are ignored without a message under pytest 9.2.
    """
    from xdist.scheduler import LoadScopeScheduling

    class Groups(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            separate = any(name in config.option.markexpr for name in APART)  # each file has a cluster of its own
            return nodeid.partition("::")[0] if separate else group_of(nodeid)

    return Groups(config, log)


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Tests and their processes neither use nor change the user's cache of file metadata."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRAINWRIGHT_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session", autouse=True)
def no_cloud() -> Iterator[None]:
    """No run asks the metadata service of the machine that the tests run on."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRAINWRIGHT_CLOUD_NOTICES", "off")
        yield


@pytest.fixture(scope="session", autouse=True)
def no_fork_servers() -> Iterator[None]:
    """No run starts a fork server for its nodes: the clusters of tests have another one, all together."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRAINWRIGHT_FORK_SERVER", "off")
        yield


@pytest.fixture(scope="session", autouse=True)
def few_timed_steps() -> Iterator[None]:
    """Jobs are not timed for long before their plan is shown: most jobs of tests are run once."""
    if importlib.util.find_spec("cloudpickle") is None:  # on a machine for GPU tests, where nothing is planned
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trainwright.runtime.function_trial._TIMED_S", 0.0)
        yield


@pytest.fixture(scope="session")
def forked_workers() -> Iterator[None]:
    """Clusters of `tests.support.ray_clusters` have a process to fork their workers from."""
    with ray_clusters.forking():
        yield


@pytest.fixture(scope="session")
def ray_cluster(forked_workers: None) -> Iterator[None]:
    """A local Ray cluster of 2 CPUs, shared by the tests that need one.

    It ends before tests that need none: a process that forks cannot always end its connection to Ray afterwards, and
    what is tried before a run is not tried where Ray is connected.
    """
    import ray

    def connect(wanted: bool) -> None:
        if wanted and not ray.is_initialized():
            ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
        elif not wanted:
            ray.shutdown()

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_prestart_worker_first_driver", "0")
        ray_clusters.thrifty(patch.setattr)
        connect(True)
        CLUSTER.append(connect)
        yield
        CLUSTER.clear()
        connect(False)
