"""Ways between hosts, measured and held against what was asked of them.

A way leads from one NIC to another, over whatever lies between. ``measure`` says what a program
gets on it, by :mod:`isthmus.measure.links`: alone, while another stream goes the other way, and
with other hosts on the same link. Who knows the network says what a way is and what is asked of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from isthmus.measure.links import (
    Endpoint,
    RoundTrips,
    StreamPlan,
    goodputs,
    probe_interval_s,
    round_trips,
)
from isthmus.measure.timing import Sample
from isthmus.spec.units import format_bytes_per_s, format_seconds

RATE_TOLERANCE: Final = 0.03
"""How far goodput may be from what was asked."""
DELAY_TOLERANCE: Final = 0.05
DELAY_TOLERANCE_S: Final = 1e-3
"""How far a median round trip may be: this share and, for a busy machine, this much more."""
_LOSS_DEVIATIONS: Final = 4
_PROBES: Final = 200
_QUICK_PROBES: Final = 50
_LOST_PROBES: Final = 20
"""Where packets are to be lost, so many probes that about this many are."""
_MOST_PROBES: Final = 20_000
_IDLE_INTERVAL_S: Final = 0.002


@dataclass(frozen=True)
class End:
    """A host's NIC."""

    host: str
    nic: str
    address: str
    bandwidth_bytes_per_s: float


@dataclass(frozen=True)
class Way:
    """What is measured: the way between two NICs, and what the cluster's file says of it.

    Attributes:
        name: The link's (``east-west``), or both ends' of a way inside a site.
        site: The site that it is inside of; empty for a link between sites.
        pairs: Its ends; for a link one pair for each stream that shares it.
        asked_bytes_per_s: Goodput of a stream that has the way for itself.
        asked_shared_bytes_per_s: Of all pairs together.
        asked_round_trip_s: There and back.
        asked_jitter_s: Standard deviation of the delay one way.
        asked_loss: Share of packets lost one way.
        elsewhere: Why it can't be measured; empty if it can.
    """

    name: str
    site: str
    pairs: tuple[tuple[End, End], ...]
    asked_bytes_per_s: float
    asked_shared_bytes_per_s: float
    asked_round_trip_s: float
    asked_jitter_s: float = 0.0
    asked_loss: float = 0.0
    elsewhere: str = ""


@dataclass(frozen=True)
class Direction:
    """Goodput one way, in bytes per second.

    Attributes:
        source: Name of the host that sends.
        target: Name of the host that receives.
        alone: One stream, nothing else.
        both_ways: One stream while another goes the other way.
        shared: Each of several pairs of hosts sends a stream; empty if there is one pair only.
    """

    source: str
    target: str
    alone: Sample
    both_ways: Sample
    shared: tuple[Sample, ...]

    @property
    def shared_bytes_per_s(self) -> float | None:
        """All streams that share the way together."""
        return sum(sample.median for sample in self.shared) or None


@dataclass(frozen=True)
class WayCheck:
    """What was measured on a way."""

    way: Way
    there: Direction
    back: Direction
    round_trips: RoundTrips

    @property
    def problems(self) -> list[str]:
        """What is not as asked.

        Goodput is not judged where packets are to be lost: TCP slows down then, as it shall.
        """
        return [*self._slow(), *self._late(), *self._lossy()]

    def _slow(self) -> Iterator[str]:
        for way in (self.there, self.back) if not self.way.asked_loss else ():
            figures = [("alone", way.alone.median, self.way.asked_bytes_per_s)]
            if way.shared_bytes_per_s is not None:
                figures.append(
                    ("shared", way.shared_bytes_per_s, self.way.asked_shared_bytes_per_s)
                )
            for what, measured, asked in figures:
                if abs(measured / asked - 1) > RATE_TOLERANCE:
                    yield (
                        f"{way.source} to {way.target}, {what}: {format_bytes_per_s(measured)}, "
                        f"asked {format_bytes_per_s(asked)} ({measured / asked - 1:+.1%})"
                    )

    def _late(self) -> Iterator[str]:
        asked_s, measured_s = self.way.asked_round_trip_s, self.round_trips.p50_s
        allowed_s = DELAY_TOLERANCE * asked_s + DELAY_TOLERANCE_S + 2 * self.way.asked_jitter_s
        if abs(measured_s - asked_s) > allowed_s:
            yield f"round trip: {format_seconds(measured_s)}, asked {format_seconds(asked_s)}"

    def _lossy(self) -> Iterator[str]:
        probes = self.round_trips
        for what, passed, sent in (
            ("there", probes.arrived, probes.sent),
            ("back", probes.returned, probes.arrived),
        ):
            expected = self.way.asked_loss * sent
            deviation = math.sqrt(expected * (1 - self.way.asked_loss))
            if abs(sent - passed - expected) > _LOSS_DEVIATIONS * deviation:
                yield f"lost {what}: {sent - passed} of {sent}, asked {self.way.asked_loss:.3g}"


def measure(way: Way, endpoint_at: Callable[[End], Endpoint], *, quick: bool = False) -> WayCheck:
    """Measure a way. Delay comes first, before streams leave something in the queues.

    Args:
        way: What to measure.
        endpoint_at: Gives the endpoint at a NIC.
        quick: Look only briefly.

    Raises:
        LaunchError: Nothing passes.
    """
    pairs = [(endpoint_at(a), endpoint_at(b)) for a, b in way.pairs]
    trips = _round_trips(way, *pairs[0], _QUICK_PROBES if quick else _PROBES)
    plan = StreamPlan.for_link(
        way.asked_bytes_per_s,
        way.asked_round_trip_s,
        window_s=0.3 if quick else 0.5,
        windows=1 if quick else 3,
    )
    reverse = [(b, a) for a, b in pairs]
    both_ways = goodputs([pairs[0], reverse[0]], plan)
    a, b = way.pairs[0]
    return WayCheck(
        way,
        there=_direction(a, b, pairs, both_ways[0], plan),
        back=_direction(b, a, reverse, both_ways[1], plan),
        round_trips=trips,
    )


def _direction(
    source: End,
    target: End,
    pairs: Sequence[tuple[Endpoint, Endpoint]],
    both_ways: Sample,
    plan: StreamPlan,
) -> Direction:
    [alone] = goodputs(pairs[:1], plan)
    shared = tuple(goodputs(pairs, plan)) if len(pairs) > 1 else ()
    return Direction(source.host, target.host, alone, both_ways, shared)


def _round_trips(way: Way, source: Endpoint, target: Endpoint, count: int) -> RoundTrips:
    interval_s = probe_interval_s(way.asked_bytes_per_s)
    if way.asked_loss:
        count = max(count, min(_MOST_PROBES, math.ceil(_LOST_PROBES / way.asked_loss)))
    else:
        interval_s = max(interval_s, _IDLE_INTERVAL_S)
    return round_trips(
        source,
        target,
        count=count,
        interval_s=interval_s,
        wait_s=1.0 + 2 * way.asked_round_trip_s,
    )
