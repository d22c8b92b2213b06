"""What faults can change about a cluster, and the orders that change it.

A knob is one property of one thing: is this link up, what is that NIC's rate. Its value is None
where it is as the cluster declares it. ``Actions`` is all that a cluster has to know about faults.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from signal import SIGCONT, SIGSTOP, Signals
from typing import Any, Protocol

from isthmus.lab.relay_loop import Wire
from isthmus.spec.cluster import ClusterSpec, Link
from isthmus.spec.units import format_bytes_per_s, format_seconds

Groups = tuple[tuple[str, ...], ...]
"""Names of sites and hosts; all that no group names are one more group."""


@dataclass(frozen=True)
class Quality:
    """Delay, jitter and loss of a link; None leaves what the cluster declares."""

    latency_s: float | None = None
    jitter_s: float | None = None
    loss: float | None = None

    def over(self, link: Link) -> Wire:
        """The link's own qualities with these laid over them."""
        return Wire(
            latency_s=link.latency_s if self.latency_s is None else self.latency_s,
            jitter_s=link.jitter_s if self.jitter_s is None else self.jitter_s,
            loss=link.loss if self.loss is None else self.loss,
        )

    def __str__(self) -> str:
        durations = (("latency", self.latency_s), ("jitter", self.jitter_s))
        parts = [f"{what} {format_seconds(it)}" for what, it in durations if it is not None]
        return ", ".join(parts + ([f"loss {self.loss:.3g}"] if self.loss is not None else []))


class Actions(Protocol):
    """What a cluster can have done to it. None as a value means: as the cluster declares."""

    def link_down(self, a: str, b: str) -> None:
        """Take the link between two sites down; its ends lose their carrier."""

    def link_up(self, a: str, b: str) -> None:
        """Take it up again."""

    def set_link_rate(self, a: str, b: str, bandwidth_bytes_per_s: float | None) -> None:
        """Give a link another rate, in both directions."""

    def set_link_quality(self, a: str, b: str, quality: Quality | None) -> None:
        """Give a link another delay, jitter or loss; ``quality.over(link)`` is the whole of it."""

    def nic_down(self, host: str, nic: str) -> None:
        """Take an interface of a host down."""

    def nic_up(self, host: str, nic: str) -> None:
        """Take it up again."""

    def set_nic_rate(self, host: str, nic: str, bandwidth_bytes_per_s: float | None) -> None:
        """Give an interface another rate."""

    def partition(self, groups: Groups) -> None:
        """Let nothing pass between groups of sites and hosts, in place of any cut before."""

    def heal(self) -> None:
        """Let everything pass again."""

    def signal(self, host: str, number: Signals) -> None:
        """Send a signal to every process of a host."""


class Knob(Protocol):
    """One thing about the cluster that a fault can change; hashable."""

    @property
    def target(self) -> str:
        """Its owner, for people: ``oslo-paris``, ``a0:eth0``, ``a0``."""
        ...

    def turn(self, actions: Actions, value: Any) -> None:
        """Have the cluster take on a value."""

    def describe(self, value: Any) -> str:
        """A value for people."""
        ...


@dataclass(frozen=True)
class LinkKnob:
    """A property of the link between two sites, whose names are in order."""

    a: str
    b: str

    @property
    def target(self) -> str:
        """Both sites."""
        return f"{self.a}-{self.b}"

    def turn(self, actions: Actions, value: Any) -> None:
        """Have the cluster take on a value."""
        raise NotImplementedError

    def describe(self, value: Any) -> str:
        """A value for people."""
        raise NotImplementedError


class LinkIsUp(LinkKnob):
    """Whether a link is up."""

    def turn(self, actions: Actions, value: bool | None) -> None:
        """Have the cluster take on a value."""
        (actions.link_down if value is False else actions.link_up)(self.a, self.b)

    def describe(self, value: bool | None) -> str:
        """A value for people."""
        return "down" if value is False else "up"


class LinkSpeed(LinkKnob):
    """The rate of a link."""

    def turn(self, actions: Actions, value: float | None) -> None:
        """Have the cluster take on a value."""
        actions.set_link_rate(self.a, self.b, value)

    def describe(self, value: float | None) -> str:
        """A value for people."""
        return _rate(value)


class LinkWire(LinkKnob):
    """Delay, jitter and loss of a link."""

    def turn(self, actions: Actions, value: Quality | None) -> None:
        """Have the cluster take on a value."""
        actions.set_link_quality(self.a, self.b, value)

    def describe(self, value: Quality | None) -> str:
        """A value for people."""
        return _AS_DECLARED if value is None else str(value)


@dataclass(frozen=True)
class NicKnob:
    """A property of a host's network interface."""

    host: str
    nic: str

    @property
    def target(self) -> str:
        """Host and interface."""
        return f"{self.host}:{self.nic}"

    def turn(self, actions: Actions, value: Any) -> None:
        """Have the cluster take on a value."""
        raise NotImplementedError

    def describe(self, value: Any) -> str:
        """A value for people."""
        raise NotImplementedError


class NicIsUp(NicKnob):
    """Whether an interface is up."""

    def turn(self, actions: Actions, value: bool | None) -> None:
        """Have the cluster take on a value."""
        (actions.nic_down if value is False else actions.nic_up)(self.host, self.nic)

    def describe(self, value: bool | None) -> str:
        """A value for people."""
        return "down" if value is False else "up"


class NicSpeed(NicKnob):
    """The rate of an interface."""

    def turn(self, actions: Actions, value: float | None) -> None:
        """Have the cluster take on a value."""
        actions.set_nic_rate(self.host, self.nic, value)

    def describe(self, value: float | None) -> str:
        """A value for people."""
        return _rate(value)


@dataclass(frozen=True)
class Cut:
    """How the cluster is cut apart."""

    @property
    def target(self) -> str:
        """All of it."""
        return "cluster"

    def turn(self, actions: Actions, value: Groups | None) -> None:
        """Have the cluster take on a value."""
        if value is None:
            actions.heal()
        else:
            actions.partition(value)

    def describe(self, value: Groups | None) -> str:
        """A value for people."""
        return "whole" if value is None else " | ".join(" ".join(group) for group in value)


@dataclass(frozen=True)
class Running:
    """Whether the processes of a host run."""

    host: str

    @property
    def target(self) -> str:
        """The host."""
        return self.host

    def turn(self, actions: Actions, value: bool | None) -> None:
        """Have the cluster take on a value."""
        actions.signal(self.host, SIGSTOP if value is False else SIGCONT)

    def describe(self, value: bool | None) -> str:
        """A value for people."""
        return "stopped" if value is False else "running"


@dataclass(frozen=True)
class Override:
    """A knob has another value for a while; times count from the moment of the fault."""

    knob: Knob
    value: Any
    begins_s: float = 0.0
    ends_s: float = math.inf


@dataclass(frozen=True)
class Reset:
    """All overrides of a knob end: it is again what the cluster declares."""

    knob: Knob


@dataclass(frozen=True)
class Signal:
    """Every process of a host gets a signal."""

    host: str
    number: Signals


Move = Override | Reset | Signal
"""What a fault does to the cluster, at one moment or for a while."""

_AS_DECLARED = "as declared"


def groups_of_hosts(groups: Groups, cluster: ClusterSpec) -> Groups:
    """The groups of a partition as host names, the hosts that no group names as the last group."""
    hosts_of_site = {
        site.name: tuple(name for host in site.hosts for name in host.names())
        for site in cluster.sites
    }
    named = tuple(
        tuple(host for name in group for host in hosts_of_site.get(name, (name,)))
        for group in groups
    )
    taken = {host for group in named for host in group}
    rest = tuple(host for host in cluster.host_names() if host not in taken)
    return (*named, rest) if rest else named


def _rate(value: float | None) -> str:
    return _AS_DECLARED if value is None else format_bytes_per_s(value)
