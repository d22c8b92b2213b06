"""The orders that make a lab's network, as text for ``ip`` and ``tc``, and the shapers' numbers.

A rate in a cluster's file is what one TCP stream gets to carry. A shaper counts frames, so it is
set higher by what headers take of one: 1448 bytes of payload travel in 1514 bytes of an Ethernet
frame, or 1500 of an IP packet (MTU 1500, TCP timestamps on). Shapers (tbf) stand where packets
leave: at the NIC for what a host sends, at the port of its switch for what it receives, and at both
ends of a link. So what hosts send through a shared link waits in one queue and competes there.

The functions are pure; ``apply`` alone runs something.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from isthmus.errors import LaunchError
from isthmus.lab.namespaces import Namespace, tool
from isthmus.lab.topology import HostPlan, LinkPlan, NicPlan, SitePlan, Topology

PAYLOAD_NBYTES: Final = 1448
"""What a full TCP segment carries at MTU 1500 with timestamps."""
IP_PACKET_NBYTES: Final = 1500
ETHERNET_FRAME_NBYTES: Final = 1514
NOWHERE: Final = "nowhere"
"""A bridge without ports in every switch: what is sent there vanishes."""

_BURST_S: Final = 2e-3
"""With half of it, 2 Gbit/s fell short by 6 % on two cores with a load of 5."""
_LEAST_BURST_NBYTES: Final = 10 * ETHERNET_FRAME_NBYTES
_QUEUE_S: Final = 0.05
_LEAST_QUEUE_NBYTES: Final = 256 * 1024
"""Less, and a slow NIC drops its own host's packets while TCP finds its pace."""
_FIRST_TABLE: Final = 100


@dataclass
class Script:
    """Orders for one namespace: first those for ``ip``, then those for ``tc``."""

    ip: list[str] = field(default_factory=list)
    tc: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Shaper:
    """A token bucket that lets a TCP stream carry what was asked for.

    Attributes:
        rate_bits_per_s: Of whole frames.
        burst_nbytes: What may leave at once after a pause. Shorter than the timer's lateness on a
            busy machine and the rate is not reached; longer and short messages beat the rate.
        queue_nbytes: What may wait.
    """

    rate_bits_per_s: int
    burst_nbytes: int
    queue_nbytes: int

    @classmethod
    def for_goodput(
        cls, bandwidth_bytes_per_s: float, *, round_trip_s: float = 0.0, is_ethernet: bool = True
    ) -> Shaper:
        """The shaper that gives a goodput.

        Args:
            bandwidth_bytes_per_s: Payload of a TCP stream.
            round_trip_s: Of a stream that passes it: the queue holds what one keeps under way.
            is_ethernet: Whether the device carries Ethernet frames or IP packets.
        """
        frame_nbytes = ETHERNET_FRAME_NBYTES if is_ethernet else IP_PACKET_NBYTES
        rate = bandwidth_bytes_per_s * frame_nbytes / PAYLOAD_NBYTES
        burst = max(_LEAST_BURST_NBYTES, round(rate * _BURST_S))
        queue = max(_LEAST_QUEUE_NBYTES, round(rate * max(_QUEUE_S, round_trip_s)))
        return cls(max(8, round(rate * 8)), burst, burst + queue)

    def order(self, verb: str, device: str) -> str:
        """Line for ``tc`` that puts it on a device (``replace``) or alters it (``change``)."""
        return (
            f"qdisc {verb} dev {device} root handle 1: tbf rate {self.rate_bits_per_s}bit "
            f"burst {self.burst_nbytes}b limit {self.queue_nbytes}b"
        )


def cable_order(
    first: Namespace, device: str, second: Namespace, far_device: str, *, index: int
) -> str:
    """Line for ``ip``, in any of the lab's networks, that joins two of them by a veth pair.

    Args:
        first: Where one end is.
        device: Name of that end.
        second: Where the other end is.
        far_device: Name of the other end.
        index: Number of the first device in its namespace, well above those that the kernel gives.
            Two ends with the same number look to it like one device, for which a change of carrier
            is not urgent: it would take up to a second.
    """
    return (
        f"link add name {device} index {index} netns {first.pid} type veth "
        f"peer name {far_device} netns {second.pid}"
    )


def host_script(host: HostPlan) -> Script:
    """What is to be done inside a host, once its NICs are there."""
    script = Script(ip=["link set dev lo up"])
    for nic in host.nics:
        script.ip += nic_orders(nic)
        if len(host.nics) > 1:
            script.ip += _own_table(nic)
        script.tc.append(nic_shaper(nic).order("replace", nic.name))
    return script


def nic_orders(nic: NicPlan) -> list[str]:
    """Lines for ``ip`` that give a host's NIC its address and its ways."""
    return [
        f"address replace {nic.address} brd + dev {nic.name}",
        f"link set dev {nic.name} up",
        f"route replace default via {nic.gateway} dev {nic.name} metric {_FIRST_TABLE + nic.rail}",
    ]


def _own_table(nic: NicPlan) -> list[str]:
    """What is sent from a NIC's address leaves by that NIC, wherever it goes."""
    table = _FIRST_TABLE + nic.rail
    return [
        f"route replace {nic.address.network} dev {nic.name} src {nic.address.ip} table {table}",
        f"route replace default via {nic.gateway} dev {nic.name} table {table}",
        f"rule add from {nic.address.ip} table {table} priority {table}",
    ]


def switch_script(site: SitePlan, topology: Topology) -> Script:
    """What is to be done inside a site's switch, once its ports and links are there."""
    script = Script(ip=["link set dev lo up", _bridge(NOWHERE), f"link set dev {NOWHERE} up"])
    for rail in site.rails:
        gateway = site.gateway(rail)
        script.ip += [
            _bridge(f"rail{rail}"),
            f"address replace {gateway} dev rail{rail}",
            f"link set dev rail{rail} up",
        ]
    for host in site.hosts:
        for nic in host.nics:
            script.ip.append(f"link set dev {nic.port} master rail{nic.rail} up")
            script.tc.append(nic_shaper(nic).order("replace", nic.port))
    return script


def _bridge(name: str) -> str:
    return f"link add name {name} type bridge stp_state 0 forward_delay 0 mcast_snooping 0"


def link_orders(link: LinkPlan, site: str, topology: Topology) -> list[str]:
    """Lines for ``ip`` that bring one end of a link up, with the ways that lead through it."""
    end = link.end(site)
    here, there = link.addresses[end], link.addresses[1 - end]
    return [
        f"address replace {here} dev {link.device}",
        f"link set dev {link.device} up",
        *(
            f"route replace {other.network(rail)} via {there.ip} dev {link.device}"
            for other, first in topology.next_hops(site)
            if first is link
            for rail in other.rails
        ),
    ]


def nic_shaper(nic: NicPlan, bandwidth_bytes_per_s: float | None = None) -> Shaper:
    """The shaper of a NIC, and of its port, at the declared rate or another one."""
    rate = nic.bandwidth_bytes_per_s if bandwidth_bytes_per_s is None else bandwidth_bytes_per_s
    return Shaper.for_goodput(rate, round_trip_s=4 * nic.latency_s)


def link_shaper(
    link: LinkPlan, bandwidth_bytes_per_s: float | None = None, *, is_ethernet: bool
) -> Shaper:
    """The shaper of both ends of a link, at the declared rate or another one."""
    rate = bandwidth_bytes_per_s
    return Shaper.for_goodput(
        link.link.bandwidth_bytes_per_s if rate is None else rate,
        round_trip_s=2 * link.link.latency_s,
        is_ethernet=is_ethernet,
    )


def cut_orders(site: SitePlan, topology: Topology, groups: Iterable[Sequence[str]]) -> list[str]:
    """Lines for ``tc`` in a switch that let nothing pass between groups of hosts.

    What a host of the site sends to another group vanishes at its port; no carrier is lost, and no
    one is told.
    """
    orders: list[str] = []
    group_of = {host: set(group) for group in groups for host in group}
    for host in site.hosts:
        targets = _unreachable(host, topology, group_of[host.name])
        for nic in host.nics if targets else ():
            orders.append(f"qdisc add dev {nic.port} clsact")
            orders += [
                f"filter add dev {nic.port} ingress protocol ip prio 1 u32 match ip dst {target} "
                f"action mirred egress redirect dev {NOWHERE}"
                for target in targets
            ]
    return orders


def _unreachable(host: HostPlan, topology: Topology, friends: set[str]) -> list[str]:
    """Subnets and addresses of all hosts but the friends; a site's subnets where it has none."""
    targets: list[str] = []
    for site in topology.sites:
        if not any(other.name in friends for other in site.hosts):
            targets += [str(site.network(rail)) for rail in site.rails]
        else:
            targets += [
                f"{nic.address.ip}/32"
                for other in site.hosts
                if other.name not in friends
                for nic in other.nics
            ]
    return targets


def apply(scripts: Mapping[Namespace, Script]) -> None:
    """Carry out the orders of several namespaces, all at the same time.

    Raises:
        LaunchError: The kernel refused an order; it says which.
    """
    running = []
    for namespace, script in scripts.items():
        for name in ("ip", "tc"):
            lines = getattr(script, name)
            if lines:
                running.append((namespace, name, lines))
    for name in ("ip", "tc"):
        _run_all([job for job in running if job[1] == name])


def _run_all(jobs: Sequence[tuple[Namespace, str, list[str]]]) -> None:
    processes = [
        subprocess.Popen(
            namespace.network_argv([tool(name), "-batch", "-"]),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for namespace, name, _ in jobs
    ]
    problems = []
    for process, (namespace, name, lines) in zip(processes, jobs, strict=True):
        _, errors = process.communicate("\n".join(lines) + "\n")
        if process.returncode:
            problems.append(f"{namespace.name}: {name}: {errors.strip()}")
    if problems:
        raise LaunchError(
            "the lab's network could not be made:\n  " + "\n  ".join(problems),
            hint="the kernel needs veth, bridge, tbf (CONFIG_NET_SCH_TBF) and u32 with mirred",
        )
