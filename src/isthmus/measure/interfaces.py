"""The network interfaces of this machine, and which of them a program without advice would take.

gloo, left alone, binds to what the host's name resolves to. A run of isthmus does not: it takes the
route to rank 0 (``elastic.interfaces``). psutil and sockets; nothing is sent but what the resolver
asks.
"""

from __future__ import annotations

import ipaddress
import json
import socket
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

import psutil

from isthmus.elastic.interfaces import local_addresses
from isthmus.errors import LaunchError

_ELSEWHERE: Final = {socket.AF_INET: "198.51.100.1", socket.AF_INET6: "2001:db8::1"}
"""Addresses for documentation (RFC 5737, RFC 3849): no host's own, so the default route's."""
_ASK_RESOLVER: Final = """
import json, socket, sys
found = socket.getaddrinfo(sys.argv[1], None, type=socket.SOCK_STREAM)
print(json.dumps(list(dict.fromkeys(entry[4][0] for entry in found))))
"""


@dataclass(frozen=True)
class Nic:
    """A network interface.

    Attributes:
        name: As the system calls it.
        up: Whether it is ready to be used.
        speed_bytes_per_s: What the driver says; None if it says nothing (virtual ones, loopback).
        mtu_nbytes: Largest packet.
        ipv4: Its addresses.
        ipv6: Its addresses, those of the link itself left out.
    """

    name: str
    up: bool
    speed_bytes_per_s: float | None
    mtu_nbytes: int
    ipv4: tuple[str, ...]
    ipv6: tuple[str, ...]

    @property
    def addresses(self) -> tuple[str, ...]:
        """All addresses that another host could use."""
        return self.ipv4 + self.ipv6

    @property
    def loopback(self) -> bool:
        """Whether all its addresses stay on this host."""
        return bool(self.addresses) and all(map(is_loopback, self.addresses))


@dataclass(frozen=True)
class HostName:
    """What this host's name stands for.

    Attributes:
        name: The name.
        addresses: What it resolves to, in the resolver's order; empty if it resolves to nothing.
        interfaces: This host's interfaces that have these addresses; None for a foreign address.
        trouble: Why it resolves to nothing.
    """

    name: str
    addresses: tuple[str, ...]
    interfaces: tuple[str | None, ...]
    trouble: str

    @property
    def reachable(self) -> bool:
        """Whether some address is this host's and other hosts could connect to it."""
        pairs = zip(self.addresses, self.interfaces, strict=True)
        return any(interface and not is_loopback(address) for address, interface in pairs)


def nics() -> list[Nic]:
    """Return all network interfaces, those that are up and have an address first."""
    addresses, stats = psutil.net_if_addrs(), psutil.net_if_stats()
    found = []
    for name, state in stats.items():
        by_family = {
            family: tuple(
                entry.address.partition("%")[0]
                for entry in addresses.get(name, [])
                if entry.family == family
            )
            for family in (socket.AF_INET, socket.AF_INET6)
        }
        ipv6 = by_family[socket.AF_INET6]
        found.append(
            Nic(
                name=name,
                up=state.isup,
                speed_bytes_per_s=state.speed * 1e6 / 8 if 0 < state.speed < 65535 else None,
                mtu_nbytes=state.mtu,
                ipv4=by_family[socket.AF_INET],
                ipv6=tuple(a for a in ipv6 if not ipaddress.ip_address(a).is_link_local),
            )
        )
    return sorted(found, key=lambda nic: (not nic.up, not nic.addresses, nic.loopback, nic.name))


def default_interface() -> str | None:
    """Return the interface of the default route, IPv4 before IPv6; None without one."""
    owners = local_addresses()
    for family, address in _ELSEWHERE.items():
        with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))
            if owner := owners.get(probe.getsockname()[0].partition("%")[0]):
                return owner
    return None


def host_name(name: str | None = None, *, deadline_s: float = 5.0) -> HostName:
    """Resolve a host name, in a child process, since a resolver may hang for long.

    Args:
        name: By default this host's.
        deadline_s: How long the resolver may take.

    Raises:
        LaunchError: The resolver did not answer in time.
    """
    name = socket.gethostname() if name is None else name
    try:
        asked = subprocess.run(
            [sys.executable, "-I", "-S", "-c", _ASK_RESOLVER, name],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=deadline_s,
        )
    except subprocess.TimeoutExpired:
        raise LaunchError(
            f"the resolver gave no answer for {name!r} within {deadline_s:g} s",
            hint=f"add {name} to /etc/hosts, or repair the name servers in /etc/resolv.conf",
        ) from None
    if asked.returncode:
        return HostName(name, (), (), (asked.stderr.strip().splitlines() or ["no reason"])[-1])
    addresses = tuple(address.partition("%")[0] for address in json.loads(asked.stdout))
    owners = local_addresses()
    return HostName(name, addresses, tuple(map(owners.get, addresses)), "")


def is_loopback(address: str) -> bool:
    """Whether an address stays on its host."""
    return ipaddress.ip_address(address).is_loopback
