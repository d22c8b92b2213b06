"""What the machines are: sites, hosts, devices, NICs and the links between sites.

Read by the planner, which predicts on it, and by the lab, which builds it. Rates are the goodput
that a TCP stream can reach, in each direction.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Self

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from isthmus.spec.base import Spec
from isthmus.spec.units import Bytes, BytesPerSecond, Seconds


def _refuse_repeated(what: str, names: Iterable[str]) -> None:
    repeated = [name for name, times in Counter(names).items() if times > 1]
    if repeated:
        raise PydanticCustomError(
            "repeated_name",
            "the {what} {name} is declared twice; names must differ",
            {"what": what, "name": repeated[0]},
        )


class Nic(Spec):
    """A network interface of a host."""

    name: str = "eth0"
    """Name of the interface."""
    bandwidth_bytes_per_s: BytesPerSecond = Field(gt=0)
    """TCP goodput in each direction."""
    failures_per_hour: float = Field(0.0, ge=0)
    """How often the interface fails, on average."""


class Host(Spec):
    """A machine, or ``count`` equal ones."""

    name: str = Field(min_length=1)
    """Name of the host; with ``count`` above 1 its copies are called NAME0, NAME1 and so on."""
    count: int = Field(1, ge=1)
    """How many hosts of this kind the site has."""
    device: str = "cpu"
    """Kind of its devices: ``cpu``, or the name of an accelerator."""
    num_devices: int = Field(1, ge=1)
    """Devices, and so ranks, per host."""
    memory_bytes: Bytes | None = None
    """Main memory; unset means unknown."""
    nics: tuple[Nic, ...] = ()
    """Network interfaces; none means that the host talks to itself only."""

    @model_validator(mode="after")
    def _nics_are_unique(self) -> Self:
        _refuse_repeated("NIC", (nic.name for nic in self.nics))
        return self

    def names(self) -> tuple[str, ...]:
        """Names of the machines that this entry stands for."""
        if self.count == 1:
            return (self.name,)
        return tuple(f"{self.name}{index}" for index in range(self.count))


class Site(Spec):
    """Hosts behind one fast switch."""

    name: str = Field(min_length=1)
    """Name of the site."""
    hosts: tuple[Host, ...] = Field(min_length=1)
    """Hosts of the site."""
    latency_s: Seconds = 0.0
    """One-way delay between two hosts of the site."""


class Link(Spec):
    """A connection between two sites, shared by all their hosts."""

    between: tuple[str, str]
    """The two sites."""
    bandwidth_bytes_per_s: BytesPerSecond = Field(gt=0)
    """TCP goodput in each direction, shared by all hosts."""
    latency_s: Seconds = 0.0
    """One-way delay from a host of one site to a host of the other."""
    jitter_s: Seconds = 0.0
    """Standard deviation of the one-way delay."""
    loss: float = Field(0.0, ge=0, lt=1)
    """Share of packets lost."""
    failures_per_hour: float = Field(0.0, ge=0)
    """How often the link fails, on average."""

    @model_validator(mode="after")
    def _ends_differ(self) -> Self:
        if self.between[0] == self.between[1]:
            raise PydanticCustomError(
                "link_to_itself",
                "a link joins {site} with itself; expected two sites",
                {"site": self.between[0]},
            )
        return self


class ClusterSpec(Spec):
    """Sites, their hosts and the links between them."""

    name: str = "this-machine"
    """Name of the cluster."""
    sites: tuple[Site, ...] = Field(
        (Site(name="local", hosts=(Host(name="localhost"),)),), min_length=1
    )
    """Sites of the cluster."""
    links: tuple[Link, ...] = ()
    """Links between sites."""

    @property
    def num_devices(self) -> int:
        """Devices, and so ranks, of the whole cluster."""
        return sum(h.count * h.num_devices for site in self.sites for h in site.hosts)

    def host_names(self) -> tuple[str, ...]:
        """Names of all hosts, in the order of the file."""
        return tuple(n for site in self.sites for host in site.hosts for n in host.names())

    @model_validator(mode="after")
    def _names_are_unique(self) -> Self:
        _refuse_repeated("site", (site.name for site in self.sites))
        _refuse_repeated("host", self.host_names())
        _refuse_repeated("link", (" - ".join(sorted(link.between)) for link in self.links))
        return self

    @model_validator(mode="after")
    def _sites_are_connected(self) -> Self:
        names = [site.name for site in self.sites]
        for link in self.links:
            for end in link.between:
                if end not in names:
                    raise PydanticCustomError(
                        "unknown_site",
                        "a link names the site {end}, which is not among {names}",
                        {"end": end, "names": ", ".join(names)},
                    )
        reached = _reachable(names[0], self.links)
        apart = [name for name in names if name not in reached]
        if apart:
            raise PydanticCustomError(
                "not_connected",
                "no link leads from {start} to {apart}; every site must be reachable",
                {"start": names[0], "apart": ", ".join(apart)},
            )
        return self


def _reachable(start: str, links: Iterable[Link]) -> set[str]:
    reached, frontier = {start}, [start]
    while frontier:
        site = frontier.pop()
        for link in links:
            if site in link.between:
                fresh = set(link.between) - reached
                reached |= fresh
                frontier += fresh
    return reached
