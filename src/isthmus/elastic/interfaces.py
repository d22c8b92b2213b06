"""Which network interface a rank talks through, chosen by asking the kernel for its route.

gloo, left alone, takes the interface that the host's name resolves to, which on many clusters is
the management network, or loopback (``127.0.1.1``). Here the choice is made from the route to a
peer that is really there, and comes with its reason. psutil and sockets only, no torch.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import psutil

from isthmus.errors import LaunchError

__all__ = ["Interface", "choose", "local_address_towards", "local_addresses"]

_DISCARD_PORT = 9
"""A UDP socket that is connected sends nothing; any port will do."""


@dataclass(frozen=True)
class Interface:
    """A network interface, and why it was chosen."""

    name: str
    address: str
    reason: str

    def __str__(self) -> str:
        return f"{self.name} ({self.address}): {self.reason}"


def local_addresses() -> dict[str, str]:
    """Return the IPv4 and IPv6 addresses of this host, each with its interface's name."""
    return {
        _without_scope(address.address): name
        for name, addresses in psutil.net_if_addrs().items()
        for address in addresses
        if address.family in (socket.AF_INET, socket.AF_INET6)
    }


def local_address_towards(host: str) -> str:
    """Return the address that this host would speak from to reach ``host``; sends nothing.

    Raises:
        LaunchError: The name does not resolve, or no route leads there.
    """
    trouble: OSError | None = None
    try:
        candidates = socket.getaddrinfo(host, _DISCARD_PORT, type=socket.SOCK_DGRAM)
    except OSError as error:
        raise LaunchError(
            f"the host name {host!r} does not resolve: {error}",
            hint="set MASTER_ADDR to a name or address that every host can resolve",
        ) from error
    for family, kind, protocol, _, address in candidates:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(address)
                return _without_scope(probe.getsockname()[0])
        except OSError as error:
            trouble = error
    raise LaunchError(
        f"no route leads from here to {host!r}: {trouble}",
        hint="set MASTER_ADDR to an address on a network that all hosts share",
    )


def choose(
    *,
    master_addr: str,
    on_one_machine: bool,
    peer_addresses: Sequence[str] = (),
    interfaces: Mapping[str, str] | None = None,
) -> Interface:
    """Return the interface to talk to the other ranks through.

    Args:
        master_addr: Where rank 0 is.
        on_one_machine: Whether all ranks are on this host.
        peer_addresses: What the other ranks speak from; used on rank 0's own host, where the
            route to rank 0 leads nowhere.
        interfaces: Interface by local address; by default what the host has.

    Raises:
        LaunchError: No interface has the address that the route starts from.
    """
    by_address = local_addresses() if interfaces is None else interfaces
    if on_one_machine:
        loopback = next(filter(_is_loopback, by_address), None)
        if loopback is not None:
            return Interface(by_address[loopback], loopback, "all ranks are on this machine")
    address, why = local_address_towards(master_addr), f"it routes to rank 0 at {master_addr}"
    if _is_loopback(address):
        away = next(
            (a for a in peer_addresses if a not in by_address and not _is_loopback(a)), None
        )
        if away is not None:
            address, why = local_address_towards(away), f"it routes to a peer at {away}"
    if address not in by_address:
        raise LaunchError(
            f"no network interface of this host has the address {address} ({why})",
            hint="name the interface in GLOO_SOCKET_IFNAME",
        )
    return Interface(by_address[address], address, why)


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback


def _without_scope(address: str) -> str:
    return address.partition("%")[0]
