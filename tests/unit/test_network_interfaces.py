"""Where a process is reached, and which interface its collectives use."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator

import pytest
import torch

from trainwright.core.errors import PeerLost
from trainwright.core.topology import Address, Generation, Group, Peer
from trainwright.strategies.common import socket_transport
from trainwright.strategies.torch.distributed import process_group as membership

STORES = {"one host": ("127.0.0.2", "127.0.0.1"), "two hosts": ("127.0.0.3", "127.0.0.2")}
VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


@pytest.fixture(autouse=True)
def nobody_told(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As in a new process."""
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(socket_transport, "_told", [])
    yield


def member(*addresses: str) -> Group:
    """The first of a group whose peers are reached there."""
    peers = tuple(Peer(rank=rank, address=Address(host=host, port=1 + rank)) for rank, host in enumerate(addresses))
    return Group(generation=Generation(token=1, number=1), rank=0, peers=peers, threads=1)


def test_who_is_told_where_it_is_reached_asks_no_route() -> None:
    assert socket_transport.own_host()
    socket_transport.set_own_host("10.78.0.3")
    assert socket_transport.own_host() == "10.78.0.3"
    socket_transport.set_own_host("10.78.0.4")
    assert socket_transport.own_host() == "10.78.0.4"


def test_collectives_use_the_interface_of_the_address_that_peers_know() -> None:
    with membership.socket_interface(member("127.0.0.1", "192.0.2.7")):
        assert [os.environ[variable] for variable in VARIABLES] == ["lo", "=lo"]
    assert not os.environ.keys() & set(VARIABLES)


def test_groups_that_are_made_within_a_group_use_that_interface_too() -> None:
    """Those of stages, shards and tensor parallelism: the host's name may be loopback's, as Debian's 127.0.1.1 is."""
    handle = membership.ProcessGroupHandle()
    for _ in range(2):
        address = handle.reserve()
        peers = (Peer(rank=0, address=address),)
        group = Group(generation=Generation(token=1, number=1), rank=0, peers=peers, threads=1, deadline_s=30.0)
        handle.join(group, torch.device("cpu"))
        assert os.environ[VARIABLES[0]] == "lo"
        handle.leave()
        assert not os.environ.keys() & set(VARIABLES)


def test_an_address_of_no_interface_leaves_the_choice_to_the_libraries() -> None:
    with membership.socket_interface(member("192.0.2.7", "192.0.2.8")):
        assert not os.environ.keys() & set(VARIABLES)


def test_the_users_own_choice_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in VARIABLES:
        monkeypatch.setenv(variable, "ib0")
    with membership.socket_interface(member("127.0.0.1", "192.0.2.7")):
        assert [os.environ[variable] for variable in VARIABLES] == ["ib0", "ib0"]
    assert [os.environ[variable] for variable in VARIABLES] == ["ib0", "ib0"]


def reaches(host: str, port: int) -> bool:
    """Whether somebody listens there."""
    with socket.socket() as caller:
        return caller.connect_ex((host, port)) == 0


@pytest.mark.parametrize(("other", "where"), list(STORES.values()), ids=list(STORES))
def test_the_store_of_torch_listens_where_its_ranks_are_and_nowhere_else(other: str, where: str) -> None:
    """`127.0.0.2` stands for this node's address on the cluster's network, `127.0.0.3` for another node's."""
    socket_transport.set_own_host("127.0.0.2")
    first = membership.ProcessGroupHandle()
    port, known = first.reserve().port, ("127.0.0.2", other)
    group = Group(
        generation=Generation(token=1, number=1),
        rank=0,
        peers=tuple(Peer(rank=rank, address=Address(host=host, port=port)) for rank, host in enumerate(known)),
        deadline_s=30.0,
    )
    joining = threading.Thread(target=lambda: _until_left(first, group))
    joining.start()
    try:
        while not first._port or len(first._sockets):
            time.sleep(0.01)
        found = {host for host in ("127.0.0.1", "127.0.0.2", "127.0.0.4") if reaches(host, port)}
        assert found == {where}
    finally:
        first.interrupt()
        joining.join(30.0)
    assert not joining.is_alive()


def _until_left(member: membership.ProcessGroupHandle, group: Group) -> None:
    with contextlib.suppress(PeerLost):
        member.join(group, torch.device("cpu"))
