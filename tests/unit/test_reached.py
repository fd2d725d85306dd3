"""Where a process is reached, and which interface its collectives use."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from trainwright.core.group import Address, Generation, Group, Peer
from trainwright.strategies import hosts
from trainwright.strategies.torch import group as membership

VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


@pytest.fixture(autouse=True)
def nobody_told(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As in a new process."""
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(hosts, "_told", [])
    yield


def member(*addresses: str) -> Group:
    """The first of a group whose peers are reached there."""
    peers = tuple(Peer(rank=rank, address=Address(host=host, port=1 + rank)) for rank, host in enumerate(addresses))
    return Group(generation=Generation(token=1, number=1), rank=0, peers=peers, threads=1)


def test_who_is_told_where_it_is_reached_asks_no_route() -> None:
    assert hosts.own_host()
    hosts.be_at("10.78.0.3")
    assert hosts.own_host() == "10.78.0.3"
    hosts.be_at("10.78.0.4")
    assert hosts.own_host() == "10.78.0.4"


def test_collectives_use_the_interface_of_the_address_that_peers_know() -> None:
    with membership._interface(member("127.0.0.1", "192.0.2.7")):
        assert [os.environ[variable] for variable in VARIABLES] == ["lo", "=lo"]
    assert not os.environ.keys() & set(VARIABLES)


def test_an_address_of_no_interface_leaves_the_choice_to_the_libraries() -> None:
    with membership._interface(member("192.0.2.7", "192.0.2.8")):
        assert not os.environ.keys() & set(VARIABLES)


def test_the_users_own_choice_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in VARIABLES:
        monkeypatch.setenv(variable, "ib0")
    with membership._interface(member("127.0.0.1", "192.0.2.7")):
        assert [os.environ[variable] for variable in VARIABLES] == ["ib0", "ib0"]
    assert [os.environ[variable] for variable in VARIABLES] == ["ib0", "ib0"]
