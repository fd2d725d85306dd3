"""How a TPU is found: what is missing is said, and nothing is waited for without end. The resolver is a fake one."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from trainwright.core.errors import ResourceError
from trainwright.strategies.tensorflow import tpu


class Resolver:
    """TensorFlow's at its boundary: finds at once, late, or not at all; remembers what was asked of it."""

    def __init__(self, error: Exception | None = None, until: threading.Event | None = None) -> None:
        self.error, self.until, self.calls = error, until, list[str]()

    def __call__(self, tpu: str) -> Resolver:
        self.calls.append(f"find {tpu}")
        if self.until is not None:
            self.until.wait()
        if self.error is not None:
            raise self.error
        return self

    def connect(self, resolver: Resolver) -> None:
        self.calls.append("connect")

    def initialize(self, resolver: Resolver) -> None:
        self.calls.append("initialize")


@pytest.fixture
def software(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if TensorFlow's package for TPUs were there."""
    monkeypatch.setenv("TPU_LIBRARY_PATH", "/lib/libtpu.so")


@pytest.fixture
def put(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Has TensorFlow use a resolver."""

    def put(resolver: Resolver) -> Resolver:
        monkeypatch.setattr(tpu.tf.distribute.cluster_resolver, "TPUClusterResolver", resolver)
        monkeypatch.setattr(tpu.tf.config, "experimental_connect_to_cluster", resolver.connect)
        monkeypatch.setattr(tpu.tf.tpu.experimental, "initialize_tpu_system", resolver.initialize)
        return resolver

    return put


@pytest.fixture
def listening() -> Iterator[int]:
    """A port at which somebody answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def found(name: str, within_s: float = 30.0) -> Any:
    return tpu.resolve_tpu(name, time.monotonic() + within_s, "rank 0")


def test_a_tpu_of_this_host_needs_no_connection(software: None, put: Any) -> None:
    resolver = put(Resolver())
    assert found("local") is resolver and resolver.calls == ["find local", "initialize"]


def test_one_by_name_or_address_is_connected_to(software: None, put: Any, listening: int) -> None:
    for name in ("my-tpu", f"grpc://127.0.0.1:{listening}"):
        resolver = put(Resolver())
        found(name)
        assert resolver.calls == [f"find {name}", "connect", "initialize"]


def test_an_address_where_nobody_answers_is_told_before_tensorflow_is_asked(
    software: None, put: Any, listening: int
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    resolver = put(Resolver())
    with pytest.raises(ResourceError, match=rf"no TPU answers at 127.0.0.1:{port}"):
        found(f"grpc://127.0.0.1:{listening},grpc://127.0.0.1:{port}")
    assert resolver.calls == []


def test_one_that_does_not_answer_is_given_up(software: None, put: Any) -> None:
    over = threading.Event()
    put(Resolver(until=over))
    begun = time.monotonic()
    with pytest.raises(ResourceError, match="'my-tpu' did not answer within the deadline"):
        found("my-tpu", within_s=0.2)
    assert time.monotonic() - begun < 10
    over.set()


def test_what_the_resolver_says_is_told(software: None, put: Any) -> None:
    put(Resolver(error=ValueError("Please provide a TPU Name to connect to.\nmore")))
    with pytest.raises(ResourceError, match="'my-tpu' cannot be used: Please provide a TPU Name") as caught:
        found("my-tpu")
    assert "gcloud" in str(caught.value)


def test_missing_software_is_told_first(monkeypatch: pytest.MonkeyPatch, put: Any) -> None:
    monkeypatch.delenv("TPU_LIBRARY_PATH", raising=False)
    resolver = put(Resolver())
    with pytest.raises(ResourceError, match=r"(?s)tensorflow-tpu is not installed.*2\.20") as caught:
        found("local")
    assert resolver.calls == [] and "rank 0" in str(caught.value)


@pytest.mark.parametrize(
    ("variables", "name"),
    [
        ({"TPU_NAME": "my-tpu"}, "my-tpu"),
        ({"KUBE_GOOGLE_CLOUD_TPU_ENDPOINTS": "grpc://10.0.0.2:8470"}, "grpc://10.0.0.2:8470"),
    ],
    ids=["name", "endpoints"],
)
def test_the_environment_tells_which(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], name: str) -> None:
    monkeypatch.setattr(tpu, "glob", lambda pattern: [])
    for variable in tpu.TPU_VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    with pytest.raises(ResourceError, match="this host has no /dev/accel"):
        tpu.TPU().name()
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    assert tpu.TPU().name() == name
    monkeypatch.setattr(tpu, "glob", lambda pattern: ["/dev/accel0"] if "accel" in pattern else [])
    assert tpu.TPU().name() == "local"
    monkeypatch.setenv("TPU_NAME", "named")
    assert tpu.NamedTPU().name() == "named"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("my-tpu", []),
        ("local", []),
        ("grpc://10.0.0.2:8470", [("10.0.0.2", 8470)]),
        ("10.0.0.2:8470, grpc://[fd00::1]:8471", [("10.0.0.2", 8470), ("fd00::1", 8471)]),
    ],
    ids=["name", "local", "one", "two"],
)
def test_addresses_in_a_name(name: str, expected: list[tuple[str, int]]) -> None:
    assert list(tpu.tpu_addresses(name)) == expected
