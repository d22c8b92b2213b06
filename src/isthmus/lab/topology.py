"""What stands where in an emulated cluster, computed from a ``ClusterSpec`` before it is built.

Every host has a network namespace, and every site one more, its switch. A host's k-th NIC is on
the k-th *rail* of its site: a bridge in the switch, with a subnet of its own. The switch is the
site's router too; sites are joined by links between routers, which all hosts of a site share::

    host a0        switch of site a                switch of site b        host b0
    eth0 ───────── port0.0 ─ rail0 ┐               ┌ rail0 ─ port0.0 ───────── eth0
    eth1 ───────── port0.1 ─ rail1 ┴ link0 ═ link0 ┘

Addresses tell who is who: 10.(77 + rail).site.host, sites counted from 1 and hosts from 2, for 1
is the router; links are in 10.76.0.0/16. Between sites, packets take the way of the fewest links,
so the direct one where there is one, then of the least delay. Ways are fixed: a link that goes
down is not routed around.

Nothing here does I/O: the same spec gives the same topology everywhere.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from ipaddress import IPv4Address, IPv4Interface, IPv4Network
from itertools import pairwise
from typing import Final

from isthmus.errors import ConfigError
from isthmus.lab.relay_loop import Wire
from isthmus.spec.cluster import ClusterSpec, Link
from isthmus.spec.units import format_seconds

FIRST_RAIL_OCTET: Final = 77
MOST_RAILS: Final = 100
MOST_SITES: Final = 254
MOST_HOSTS_PER_SITE: Final = 252
_LINK_NETWORK: Final = IPv4Network("10.76.0.0/16")
_HOST_NAME: Final = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?")
_NIC_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,14}")


@dataclass(frozen=True)
class NicPlan:
    """A NIC of a host and the port of the switch that it is plugged into.

    Attributes:
        name: In the host.
        port: Name of the other end, in the switch.
        rail: Which of the host's NICs it is, and so which bridge of the site it is on.
        address: Its address, with the length of the rail's subnet.
        gateway: The router's address on the rail.
        bandwidth_bytes_per_s: TCP goodput in each direction.
        latency_s: One-way delay between NIC and switch: half of that between two hosts of the site.
    """

    name: str
    port: str
    rail: int
    address: IPv4Interface
    gateway: IPv4Address
    bandwidth_bytes_per_s: float
    latency_s: float

    @property
    def wire(self) -> Wire:
        """What its cable does to packets."""
        return Wire(latency_s=self.latency_s)


@dataclass(frozen=True)
class HostPlan:
    """A host: ``index`` counts all hosts of the cluster, in the order of the file."""

    name: str
    site: str
    index: int
    num_devices: int
    nics: tuple[NicPlan, ...]

    @property
    def address(self) -> IPv4Address:
        """Address of its first NIC, which its name stands for; loopback if it has none."""
        return self.nics[0].address.ip if self.nics else IPv4Address("127.0.0.1")

    def nic(self, name: str) -> NicPlan:
        """The NIC of that name.

        Raises:
            ConfigError: There is none.
        """
        for nic in self.nics:
            if nic.name == name:
                return nic
        names = ", ".join(nic.name for nic in self.nics) or "none"
        raise ConfigError(f"host {self.name} has no NIC {name!r}; it has: {names}")


@dataclass(frozen=True)
class SitePlan:
    """A site: its switch is a namespace with a bridge for each rail, and the site's router."""

    name: str
    index: int
    hosts: tuple[HostPlan, ...]

    @property
    def rails(self) -> range:
        """Numbers of the rails that some host is on."""
        return range(max((len(host.nics) for host in self.hosts), default=0))

    def gateway(self, rail: int) -> IPv4Interface:
        """Address of the router on a rail."""
        return _address(self.index, rail, 1)

    def network(self, rail: int) -> IPv4Network:
        """Subnet of a rail."""
        return _rail_network(self.index, rail)


@dataclass(frozen=True)
class LinkPlan:
    """A link between two sites, with one device at each end.

    Attributes:
        link: As declared.
        index: Its place in the file, from 0.
        device: Name of its device in the routers of both ends.
        addresses: Of the device in the router of ``link.between[0]``, and of ``[1]``.
        hop_latency_s: What the link itself delays: the hosts' own cables do the rest.
    """

    link: Link
    index: int
    device: str
    addresses: tuple[IPv4Interface, IPv4Interface]
    hop_latency_s: float

    @property
    def name(self) -> str:
        """Both sites, in order: ``oslo-paris``."""
        return "-".join(sorted(self.link.between))

    @property
    def wire(self) -> Wire:
        """What it does to packets besides limiting their rate."""
        return Wire(latency_s=self.hop_latency_s, jitter_s=self.link.jitter_s, loss=self.link.loss)

    def end(self, site: str) -> int:
        """0 or 1: which end is at the site."""
        return self.link.between.index(site)

    def other(self, site: str) -> str:
        """The site at the other end."""
        return self.link.between[1 - self.end(site)]


@dataclass(frozen=True)
class Topology:
    """A cluster's hosts, switches and links, with their names and addresses."""

    name: str
    sites: tuple[SitePlan, ...]
    links: tuple[LinkPlan, ...]

    @cached_property
    def hosts(self) -> tuple[HostPlan, ...]:
        """All hosts, in the order of the file."""
        return tuple(host for site in self.sites for host in site.hosts)

    @property
    def num_ranks(self) -> int:
        """Devices of all hosts."""
        return sum(host.num_devices for host in self.hosts)

    def host(self, name: str) -> HostPlan:
        """The host of that name.

        Raises:
            ConfigError: There is none.
        """
        for host in self.hosts:
            if host.name == name:
                return host
        names = ", ".join(host.name for host in self.hosts)
        raise ConfigError(f"there is no host {name!r} in {self.name}; there are: {names}")

    def site(self, name: str) -> SitePlan:
        """The site of that name, which must exist."""
        return next(site for site in self.sites if site.name == name)

    def link(self, a: str, b: str) -> LinkPlan:
        """The link between two sites, in any order.

        Raises:
            ConfigError: There is none.
        """
        for link in self.links:
            if set(link.link.between) == {a, b}:
                return link
        names = ", ".join(link.name for link in self.links) or "none"
        raise ConfigError(f"no link joins {a} and {b} in {self.name}; there are: {names}")

    def path(self, a: str, b: str) -> tuple[LinkPlan, ...]:
        """Links on the way from one site to another; none within a site."""
        sites = self._ways[a][b]
        return tuple(self.link(*pair) for pair in pairwise(sites))

    def next_hops(self, site: str) -> Iterator[tuple[SitePlan, LinkPlan]]:
        """Each other site, with the link that packets for it leave this site by."""
        for other in self.sites:
            if other.name != site:
                yield other, self.path(site, other.name)[0]

    def latency_s(self, a: str, b: str) -> float:
        """One-way delay between two hosts, through their first NICs; 0 within a host."""
        if a == b:
            return 0.0
        first, second = self.host(a), self.host(b)
        cables_s = sum(host.nics[0].latency_s for host in (first, second))
        return cables_s + sum(link.hop_latency_s for link in self.path(first.site, second.site))

    def bandwidth_bytes_per_s(self, a: str, b: str) -> float:
        """Goodput of a stream that has the way between two hosts for itself."""
        first, second = self.host(a), self.host(b)
        rates = [host.nics[0].bandwidth_bytes_per_s for host in (first, second)]
        path = self.path(first.site, second.site)
        return min(rates + [link.link.bandwidth_bytes_per_s for link in path])

    def hosts_file(self) -> str:
        """Text of /etc/hosts: every host's name, and NAME-NIC for each further NIC.

        IPv4 addresses are there in their IPv6 form as well, for programs that ask an IPv6 socket
        for its peer's name; under names of their own, lest a host's name have two addresses.
        """
        lines = ["127.0.0.1 localhost", "::1 localhost"]
        for host in self.hosts:
            for nic in host.nics:
                name = host.name if nic.rail == 0 else f"{host.name}-{nic.name}"
                lines += [f"{nic.address.ip} {name}", f"::ffff:{nic.address.ip} ip6-{name}"]
            if not host.nics:
                lines.append(f"127.0.0.1 {host.name}")
        return "\n".join(lines) + "\n"

    @cached_property
    def _ways(self) -> dict[str, dict[str, tuple[str, ...]]]:
        return {site.name: _shortest_ways(site.name, self.links) for site in self.sites}


def plan_topology(cluster: ClusterSpec) -> Topology:
    """What stands where in a lab of this cluster.

    Raises:
        ConfigError: The lab can't build it: too many hosts, sites or NICs, names that no host or
            interface can have, a host without a NIC among several hosts, or a link that is quicker
            than its two sites by themselves.
    """
    problems = list(_problems(cluster))
    if problems:
        raise ConfigError(
            "\n  ".join([f"the lab cannot build the cluster {cluster.name}:", *problems]),
            hint="change the cluster's file",
        )
    sites = _plan_sites(cluster)
    latency_s = {site.name: site.latency_s for site in cluster.sites}
    links = tuple(
        LinkPlan(
            link=link,
            index=index,
            device=f"link{index}",
            addresses=_link_addresses(index),
            hop_latency_s=link.latency_s - sum(latency_s[end] for end in link.between) / 2,
        )
        for index, link in enumerate(cluster.links)
    )
    return Topology(cluster.name, sites, links)


def _plan_sites(cluster: ClusterSpec) -> tuple[SitePlan, ...]:
    sites: list[SitePlan] = []
    index = 0
    for number, site in enumerate(cluster.sites):
        hosts: list[HostPlan] = []
        for host in site.hosts:
            for name in host.names():
                place = len(hosts)
                nics = tuple(
                    NicPlan(
                        name=nic.name,
                        port=f"port{place}.{rail}",
                        rail=rail,
                        address=_address(number, rail, place + 2),
                        gateway=_address(number, rail, 1).ip,
                        bandwidth_bytes_per_s=nic.bandwidth_bytes_per_s,
                        latency_s=site.latency_s / 2,
                    )
                    for rail, nic in enumerate(host.nics)
                )
                hosts.append(HostPlan(name, site.name, index, host.num_devices, nics))
                index += 1
        sites.append(SitePlan(site.name, number, tuple(hosts)))
    return tuple(sites)


def _problems(cluster: ClusterSpec) -> Iterator[str]:
    if len(cluster.sites) > MOST_SITES:
        yield f"{len(cluster.sites)} sites; at most {MOST_SITES} fit its addresses"
    num_hosts = len(cluster.host_names())
    for site in cluster.sites:
        in_site = sum(host.count for host in site.hosts)
        if in_site > MOST_HOSTS_PER_SITE:
            yield f"{site.name} has {in_site} hosts; at most {MOST_HOSTS_PER_SITE} a site fit"
        for host in site.hosts:
            if not host.nics and num_hosts > 1:
                yield f"host {host.name} has no NIC, so it could not talk to the other hosts"
            if len(host.nics) > MOST_RAILS:
                yield f"host {host.name} has {len(host.nics)} NICs; at most {MOST_RAILS} fit"
            for nic in host.nics:
                if nic.name == "lo" or not _NIC_NAME.fullmatch(nic.name):
                    yield f"no interface can be called {nic.name!r} (host {host.name})"
    for name in cluster.host_names():
        if name == "localhost" and num_hosts > 1:
            yield "a host is called localhost, which every host is to itself"
        if not _HOST_NAME.fullmatch(name):
            yield f"no host can be called {name!r}: letters, digits, and . _ - inside, at most 63"
    yield from _quick_links(cluster)


def _quick_links(cluster: ClusterSpec) -> Iterator[str]:
    latency_s = {site.name: site.latency_s for site in cluster.sites}
    for link in cluster.links:
        least_s = sum(latency_s[end] for end in link.between) / 2
        if link.latency_s < least_s:
            yield (
                f"the link {' - '.join(link.between)} has a latency of "
                f"{format_seconds(link.latency_s)} from host to host, but the ways inside its two "
                f"sites alone take {format_seconds(least_s)}"
            )


def _address(site: int, rail: int, host: int) -> IPv4Interface:
    network = _rail_network(site, rail)
    return IPv4Interface((int(network.network_address) + host, network.prefixlen))


def _rail_network(site: int, rail: int) -> IPv4Network:
    return IPv4Network(f"10.{FIRST_RAIL_OCTET + rail}.{site + 1}.0/24")


def _link_addresses(index: int) -> tuple[IPv4Interface, IPv4Interface]:
    base = int(_LINK_NETWORK.network_address) + 4 * index
    return IPv4Interface((base + 1, 30)), IPv4Interface((base + 2, 30))


def _shortest_ways(start: str, links: Sequence[LinkPlan]) -> dict[str, tuple[str, ...]]:
    """Fewest links, then least delay, then the order of names: the same way on every machine."""
    ways: dict[str, tuple[str, ...]] = {}
    frontier: list[tuple[int, float, tuple[str, ...]]] = [(0, 0.0, (start,))]
    while frontier:
        length, delay_s, way = heapq.heappop(frontier)
        here = way[-1]
        if here in ways:
            continue
        ways[here] = way
        for link in links:
            if here in link.link.between and link.other(here) not in ways:
                onward = (*way, link.other(here))
                heapq.heappush(frontier, (length + 1, delay_s + link.hop_latency_s, onward))
    return ways
