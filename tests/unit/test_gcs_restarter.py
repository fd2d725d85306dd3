"""The head's guard: what it can bring back, and when it stops. tests/faults/test_gcs.py has it at work."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from trainwright.core.errors import ResourceError
from trainwright.runtime.gcs_restarter import Command, command_of, has_ended, open_process, revive

SLEEPER = (sys.executable, "-S", "-c", "import sys; print('up', flush=True); sys.stdin.read()")


def command(*arguments: str, **environment: str) -> Command:
    return Command(arguments=arguments, environment=environment, folder="/")


@pytest.fixture
def raylet() -> Iterator[subprocess.Popen[bytes]]:
    """A process that lives until its standard input is closed."""
    own = {**os.environ, "MARK": "=a=b"}
    with subprocess.Popen(SLEEPER, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=own) as process:
        assert process.stdout is not None and process.stdout.readline() == b"up\n"  # its arguments show only then
        yield process
        process.kill()


def test_a_process_is_known_by_its_arguments_environment_and_folder(raylet: subprocess.Popen[bytes]) -> None:
    found = command_of(raylet.pid)
    assert found.arguments == SLEEPER
    assert found.environment["MARK"] == "=a=b"
    assert found.folder == os.getcwd()


@pytest.mark.parametrize(
    ("gcs", "durable"),
    [
        (command("gcs_server", "--redis_address=10.0.0.1", "--redis_port=6379"), True),
        (command("gcs_server", RAY_gcs_storage="rocksdb"), True),
        (command("gcs_server", "--session-name=redis_address"), False),
    ],
)
def test_only_what_is_kept_elsewhere_can_come_back(gcs: Command, durable: bool) -> None:
    assert gcs.durable == durable


def test_a_gcs_that_does_not_come_up_is_given_up(raylet: subprocess.Popen[bytes]) -> None:
    broken = command(sys.executable, "-S", "-c", "raise SystemExit(7)", "--log_dir=/logs")
    with open_process(raylet.pid) as head, pytest.raises(ResourceError) as caught:
        revive(broken, head)
    assert "3 times" in str(caught.value) and "with 7" in str(caught.value)
    assert "/logs/gcs_server.out" in str(caught.value)


def test_a_stopped_head_is_left_alone(raylet: subprocess.Popen[bytes]) -> None:
    with open_process(raylet.pid) as head:
        assert not has_ended(head)
        raylet.kill()
        assert has_ended(head, wait_s=None)
        assert revive(command("/no/such/program"), head) == 0


def test_a_process_that_is_gone_is_told(raylet: subprocess.Popen[bytes]) -> None:
    raylet.kill()
    raylet.wait()
    with pytest.raises(ResourceError, match=f"process {raylet.pid} has just ended"), open_process(raylet.pid):
        pass
