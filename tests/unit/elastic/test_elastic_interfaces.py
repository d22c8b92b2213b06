"""Which network interface is chosen, and the reason given."""

from __future__ import annotations

import socket

import pytest

from isthmus.elastic import interfaces
from isthmus.elastic.interfaces import choose, local_address_towards, local_addresses
from isthmus.errors import LaunchError

HOST = {"127.0.0.1": "lo", "10.0.0.5": "eth0", "192.168.7.5": "ib0", "fd00::5": "eth1"}
ROUTES = {
    "far": "192.168.7.5",
    "far6": "fd00::5",
    "myself": "127.0.1.1",  # what Debian's /etc/hosts says of the host's own name
    "localhost": "127.0.0.1",
    "10.0.0.9": "10.0.0.5",
    "odd": "172.16.0.1",
}


@pytest.fixture(autouse=True)
def _routes(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    if "real" not in request.node.name:
        monkeypatch.setattr(interfaces, "local_address_towards", ROUTES.__getitem__)


@pytest.mark.parametrize(
    ("master_addr", "peers", "name", "reason"),
    [
        ("far", [], "ib0", "it routes to rank 0 at far"),
        ("far6", [], "eth1", "it routes to rank 0 at far6"),
        ("myself", ["127.0.1.1", "10.0.0.9"], "eth0", "it routes to a peer at 10.0.0.9"),
        ("localhost", ["127.0.0.1", "10.0.0.5"], "lo", "it routes to rank 0 at localhost"),
    ],
)
def test_the_route_decides(master_addr: str, peers: list[str], name: str, reason: str) -> None:
    chosen = choose(
        master_addr=master_addr, on_one_machine=False, peer_addresses=peers, interfaces=HOST
    )
    assert (chosen.name, chosen.reason) == (name, reason)
    assert HOST[chosen.address] == name


def test_one_machine_stays_on_loopback() -> None:
    chosen = choose(master_addr="far", on_one_machine=True, interfaces=HOST)
    assert str(chosen) == "lo (127.0.0.1): all ranks are on this machine"


def test_without_loopback_the_route_decides() -> None:
    host = {address: name for address, name in HOST.items() if name != "lo"}
    assert choose(master_addr="far", on_one_machine=True, interfaces=host).name == "ib0"


def test_an_address_of_no_interface_is_an_error() -> None:
    with pytest.raises(LaunchError, match=r"no network interface .* 172.16.0.1") as caught:
        choose(master_addr="odd", on_one_machine=False, interfaces=HOST)
    assert "GLOO_SOCKET_IFNAME" in caught.value.hint


def test_real_loopback() -> None:
    assert local_address_towards("127.0.0.1") == "127.0.0.1"
    assert local_addresses()["127.0.0.1"]


def test_a_real_name_that_does_not_resolve() -> None:
    with pytest.raises(LaunchError, match=r"'no-such-host\.invalid' does not resolve"):
        local_address_towards("no-such-host.invalid")


def test_real_addresses_agree_with_the_kernels_list() -> None:
    names = {name for _, name in socket.if_nameindex()}
    assert set(local_addresses().values()) <= names
