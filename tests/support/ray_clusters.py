"""Ray clusters for tests: as any other, but they spend less on starting processes.

Workers are forked from a process that has imported what they need, when they are wanted. What serves an autoscaler,
carries logs to the driver, sends metrics or counts usage is left out. Run as a module this is `python -m trainwright`,
whose own Ray cluster, if it starts one, is such a one; `forking` comes first.
"""

from __future__ import annotations

import os
import runpy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partialmethod
from typing import Any

from tests.support import ray_agent_start, ray_worker_start
from tests.support.fork_server import fork_server
from tests.support.ray_worker_start import VARIABLE

TORCH_IMPORTS = (
    "trainwright.worker.worker",
    *(f"trainwright.strategies.torch.engines.{name}" for name in ("base", "data_parallel", "fsdp", "pipeline")),
    *("aiohttp", "asyncio", "google.protobuf", "jsonschema", "pandas"),  # what Ray does beside itself
    *("filelock", "msgpack", "pyarrow.json", "pydantic.v1", "requests", "tqdm.auto", "wcwidth", "yaml"),
)
IMPORTS = (*TORCH_IMPORTS, "tensorflow")
small_agents = True  # for tests of what the whole agent does
_PYTHON_COMMAND = "_build_python_executable_command_memory_profileable"


@contextmanager
def forking(imports: Sequence[str] = IMPORTS) -> Iterator[None]:
    """Start a fork server with these imports, which this process and those that it starts use within the block."""
    with fork_server(imports) as name:
        os.environ[VARIABLE] = name
        try:
            yield
        finally:
            del os.environ[VARIABLE]


def thrifty(put: Callable[[Any, str, Any], object] = setattr) -> None:
    """From now on this process starts such clusters; `put` changes attributes of Ray, and may restore them later."""
    from ray._private import services
    from ray._private.node import Node
    from ray._private.parameter import RayParams
    from ray._private.ray_constants import PROCESS_TYPE_DASHBOARD_AGENT

    own = {"setup_worker_path": ray_worker_start.__file__, "include_log_monitor": False, "no_monitor": True}
    os.environ.setdefault("RAY_prestart_worker_first_driver", "0")
    python_command, start_api_server = getattr(services, _PYTHON_COMMAND), Node.start_api_server

    def start_dashboard(node: Node, *, include_dashboard: bool | None, raise_on_failure: bool) -> None:
        """Without a dashboard Ray starts its process for usage statistics alone."""
        if include_dashboard is not False:
            start_api_server(node, include_dashboard=include_dashboard, raise_on_failure=raise_on_failure)

    def small_agent(component: str, *rest: Any, **more: Any) -> list[str]:
        command: list[str] = python_command(component, *rest, **more)
        small = small_agents and component == PROCESS_TYPE_DASHBOARD_AGENT
        return [*command, ray_agent_start.__file__] if small else command

    put(RayParams, "__init__", partialmethod(RayParams.__init__, **own))
    put(Node, "start_api_server", start_dashboard)
    put(services, _PYTHON_COMMAND, small_agent)


if __name__ == "__main__":
    thrifty()
    runpy.run_module("trainwright", run_name="__main__", alter_sys=True)
