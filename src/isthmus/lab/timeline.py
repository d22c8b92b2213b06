"""What shall go wrong, and when: the file that schedules faults in a lab.

A timeline is TOML, names as in ``cluster.toml``::

    [[fault]]
    kind = "link_down"
    between = ["paris", "oslo"]
    at = "5 s"          # after the start of the lab's command, or at_step = 20
    lasts = "2 s"       # without it: until a link_up

Each fault is pure data. What it does to the cluster is said by ``moves``;
:mod:`isthmus.lab.faults` plays them.
"""

from __future__ import annotations

import difflib
import math
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, TypeAdapter, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from isthmus.errors import ConfigError
from isthmus.lab.knobs import (
    Cut,
    Groups,
    Knob,
    LinkIsUp,
    LinkKnob,
    LinkSpeed,
    LinkWire,
    Move,
    NicIsUp,
    NicKnob,
    NicSpeed,
    Override,
    Quality,
    Reset,
    Running,
    Signal,
    groups_of_hosts,
)
from isthmus.spec.base import Spec
from isthmus.spec.cluster import ClusterSpec
from isthmus.spec.load import load
from isthmus.spec.units import BytesPerSecond, Seconds


class Fault(Spec):
    """What all faults have in common: when. Without ``at`` and ``at_step`` it is at once."""

    at_s: Seconds | None = None
    """Time after the start of the lab's command."""
    at_step: int | None = Field(None, ge=0)
    """When this training step is complete, as rank 0's event log says."""

    @model_validator(mode="after")
    def _one_moment(self) -> Self:
        if self.at_s is not None and self.at_step is not None:
            raise PydanticCustomError("two_moments", "give either at or at_step, not both")
        return self

    def _knob(self) -> Knob:
        raise NotImplementedError

    def moves(self) -> tuple[Move, ...]:
        """What it does to the cluster, in the order in which it begins."""
        raise NotImplementedError

    def problems(self, cluster: ClusterSpec) -> Iterator[str]:
        """Why this cluster can't have this fault; nothing if it can."""
        raise NotImplementedError


class _OfLink(Fault):
    between: tuple[str, str]
    """The two sites that the link joins, in any order."""
    turns: ClassVar[type[LinkKnob]]

    def _knob(self) -> Knob:
        return self.turns(*sorted(self.between))

    def problems(self, cluster: ClusterSpec) -> Iterator[str]:
        links = [" - ".join(sorted(link.between)) for link in cluster.links]
        yield from _unless_known("link", " - ".join(sorted(self.between)), links)


class _OfNic(Fault):
    host: str
    """The host."""
    nic: str = "eth0"
    """Which of its interfaces."""
    turns: ClassVar[type[NicKnob]]

    def _knob(self) -> Knob:
        return self.turns(self.host, self.nic)

    def problems(self, cluster: ClusterSpec) -> Iterator[str]:
        yield from _unless_known("host", self.host, cluster.host_names())
        for site in cluster.sites:
            for host in site.hosts:
                if self.host in host.names():
                    nics = [nic.name for nic in host.nics]
                    yield from _unless_known(f"interface of {self.host}", self.nic, nics)


class _OfHost(Fault):
    host: str
    """The host."""

    def _knob(self) -> Knob:
        return Running(self.host)

    def problems(self, cluster: ClusterSpec) -> Iterator[str]:
        yield from _unless_known("host", self.host, cluster.host_names())


class _OfCluster(Fault):
    def _knob(self) -> Knob:
        return Cut()

    def problems(self, cluster: ClusterSpec) -> Iterator[str]:
        yield from ()


class _Lasting(Fault):
    lasts_s: Seconds | None = Field(None, gt=0)
    """How long it lasts; unset means until another fault ends it."""

    def _value(self) -> Any:
        return False

    def moves(self) -> tuple[Move, ...]:
        ends_s = math.inf if self.lasts_s is None else self.lasts_s
        return (Override(self._knob(), self._value(), 0.0, ends_s),)


class _Flapping(Fault):
    down_s: Seconds = Field(gt=0)
    """How long it is down each time."""
    up_s: Seconds = Field(gt=0)
    """How long it is up in between."""
    times: int = Field(1, ge=1)
    """How often it goes down."""

    def moves(self) -> tuple[Move, ...]:
        starts = [index * (self.down_s + self.up_s) for index in range(self.times)]
        return tuple(Override(self._knob(), False, start, start + self.down_s) for start in starts)


class _Ending(Fault):
    def moves(self) -> tuple[Move, ...]:
        return (Reset(self._knob()),)


class LinkDown(_OfLink, _Lasting):
    """A link is down; its ends lose their carrier."""

    kind: Literal["link_down"] = "link_down"
    """Which fault this is."""
    turns = LinkIsUp


class LinkUp(_OfLink, _Ending):
    """A link is up again, whatever took it down."""

    kind: Literal["link_up"] = "link_up"
    """Which fault this is."""
    turns = LinkIsUp


class LinkFlap(_OfLink, _Flapping):
    """A link goes down and up several times."""

    kind: Literal["link_flap"] = "link_flap"
    """Which fault this is."""
    turns = LinkIsUp


class LinkRate(_OfLink, _Lasting):
    """A link has another rate."""

    kind: Literal["link_rate"] = "link_rate"
    """Which fault this is."""
    bandwidth_bytes_per_s: BytesPerSecond = Field(gt=0)
    """TCP goodput in each direction."""
    turns = LinkSpeed

    def _value(self) -> float:
        return self.bandwidth_bytes_per_s


class LinkQuality(_OfLink, _Lasting):
    """A link delays or loses packets in another way."""

    kind: Literal["link_quality"] = "link_quality"
    """Which fault this is."""
    latency_s: Seconds | None = None
    """One-way delay; unset leaves it as it is declared."""
    jitter_s: Seconds | None = None
    """Standard deviation of the one-way delay; unset leaves it as it is declared."""
    loss: float | None = Field(None, ge=0, lt=1)
    """Share of packets lost; unset leaves it as it is declared."""
    turns = LinkWire

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        if self.latency_s is None and self.jitter_s is None and self.loss is None:
            raise PydanticCustomError("no_quality", "give latency, jitter or loss")
        return self

    def _value(self) -> Quality:
        return Quality(self.latency_s, self.jitter_s, self.loss)


class NicDown(_OfNic, _Lasting):
    """A network interface is down."""

    kind: Literal["nic_down"] = "nic_down"
    """Which fault this is."""
    turns = NicIsUp


class NicUp(_OfNic, _Ending):
    """A network interface is up again, whatever took it down."""

    kind: Literal["nic_up"] = "nic_up"
    """Which fault this is."""
    turns = NicIsUp


class NicFlap(_OfNic, _Flapping):
    """A network interface goes down and up several times."""

    kind: Literal["nic_flap"] = "nic_flap"
    """Which fault this is."""
    turns = NicIsUp


class NicRate(_OfNic, _Lasting):
    """A network interface has another rate."""

    kind: Literal["nic_rate"] = "nic_rate"
    """Which fault this is."""
    bandwidth_bytes_per_s: BytesPerSecond = Field(gt=0)
    """TCP goodput in each direction."""
    turns = NicSpeed

    def _value(self) -> float:
        return self.bandwidth_bytes_per_s


class Partition(_OfCluster, _Lasting):
    """The cluster is cut apart: nothing passes between the groups, and no carrier is lost."""

    kind: Literal["partition"] = "partition"
    """Which fault this is."""
    groups: Groups = Field(min_length=1)
    """Names of sites and hosts; all that no group names are one more group."""

    def _value(self) -> Groups:
        return self.groups

    def problems(self, cluster: ClusterSpec) -> Iterator[str]:
        """Why this cluster can't be cut so; nothing if it can."""
        known = [*(site.name for site in cluster.sites), *cluster.host_names()]
        for name in (name for group in self.groups for name in group):
            yield from _unless_known("site or host", name, known)
        groups = groups_of_hosts(self.groups, cluster)
        hosts = [host for group in groups for host in group]
        twice = sorted({host for host in hosts if hosts.count(host) > 1})
        if twice:
            yield f"{twice[0]} is in two groups; groups must not overlap"
        elif len(groups) < 2:
            yield "one group holds every host, so nothing is cut"


class Heal(_OfCluster, _Ending):
    """The cluster is whole again."""

    kind: Literal["heal"] = "heal"
    """Which fault this is."""


class Stop(_OfHost, _Lasting):
    """All processes of a host stand still, as if it hung; its network still answers."""

    kind: Literal["stop"] = "stop"
    """Which fault this is."""


class Continue(_OfHost, _Ending):
    """The processes of a host go on."""

    kind: Literal["continue"] = "continue"
    """Which fault this is."""


class Kill(_OfHost):
    """All processes of a host are killed at once."""

    kind: Literal["kill"] = "kill"
    """Which fault this is."""

    def moves(self) -> tuple[Move, ...]:
        """One signal."""
        return (Signal(self.host, signal.SIGKILL),)


AnyFault = Annotated[
    LinkDown
    | LinkUp
    | LinkFlap
    | LinkRate
    | LinkQuality
    | NicDown
    | NicUp
    | NicFlap
    | NicRate
    | Partition
    | Heal
    | Stop
    | Continue
    | Kill,
    Field(discriminator="kind"),
]
"""Any fault, chosen by its ``kind``."""

_FAULT: TypeAdapter[Fault] = TypeAdapter(AnyFault)


class Timeline(Spec):
    """Faults and their times."""

    fault: tuple[AnyFault, ...] = ()
    """The faults, in any order; those of the same moment happen in the order of the file."""

    def check(self, cluster: ClusterSpec) -> None:
        """Make sure that the cluster has everything that the timeline names.

        Raises:
            ConfigError: With everything that it has not.
        """
        problems = [
            f"fault.{index} ({fault.kind}): {problem}"
            for index, fault in enumerate(self.fault)
            for problem in fault.problems(cluster)
        ]
        _refuse(problems, cluster)


def load_timeline(file: Path, cluster: ClusterSpec) -> Timeline:
    """Read a timeline and make sure that it fits the cluster.

    Raises:
        ConfigError: With every problem of the file, if there is any.
    """
    timeline = load(Timeline, file).spec
    timeline.check(cluster)
    return timeline


def fault_of(table: Any, cluster: ClusterSpec) -> Fault:
    """The fault that a table such as ``{"kind": "link_down", ...}`` describes.

    Raises:
        ConfigError: It describes none, or none that this cluster can have.
    """
    try:
        fault = _FAULT.validate_python(table)
    except ValidationError as error:
        problems = [
            ": ".join(filter(None, (".".join(map(str, details["loc"][1:])), details["msg"])))
            for details in error.errors(include_url=False)
        ]
        raise ConfigError("\n  ".join(["this is no fault:", *problems])) from None
    _refuse(list(fault.problems(cluster)), cluster)
    return fault


def _refuse(problems: Sequence[str], cluster: ClusterSpec) -> None:
    if problems:
        raise ConfigError(
            "\n  ".join([f"this does not fit the cluster {cluster.name}:", *problems]),
            hint="names are those of the cluster's file; hosts with a count are NAME0, NAME1",
        )


def _unless_known(what: str, name: str, known: Sequence[str]) -> Iterator[str]:
    if name in known:
        return
    close = difflib.get_close_matches(name, known, n=1)
    meant = f"did you mean {close[0]}?" if close else f"there are: {', '.join(known) or 'none'}"
    yield f"there is no {what} {name!r}; {meant}"
