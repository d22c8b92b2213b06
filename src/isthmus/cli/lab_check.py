"""``isthmus lab check``: builds an emulated cluster, measures it, and prints asked beside measured.

What is measured is what programs get: TCP goodput and round trips between hosts, over the NICs and
links on their way. ``ways`` picks what to measure from the topology; how is the business of
:mod:`isthmus.measure.ways`. The lab and that room stand on one floor and don't know each other, so
they meet here.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from isthmus.errors import EXIT_FAILED, ConfigError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from isthmus.lab.cluster import Cluster
    from isthmus.lab.relay import RelayCounters
    from isthmus.lab.topology import HostPlan, NicPlan, Topology
    from isthmus.measure.links import Endpoint
    from isthmus.measure.ways import End, Way, WayCheck

_MOST_SHARING: Final = 4
"""Streams that share a link are at most so many: more tell nothing new."""


class Probe:
    """Endpoints in a cluster's hosts, each started when it is first needed; a context manager."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._endpoints: dict[str, Endpoint] = {}
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Probe:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def at(self, end: End) -> Endpoint:
        """The endpoint at a NIC."""
        from isthmus.measure.links import Endpoint

        if end.address not in self._endpoints:
            endpoint = Endpoint(lambda command: self._start(command, end.host), end.address)
            self._endpoints[end.address] = self._stack.enter_context(endpoint)
        return self._endpoints[end.address]

    def _start(self, command: list[str], host: str) -> subprocess.Popen[bytes]:
        return self._cluster.start(
            command, host=host, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )


def ways(topology: Topology, only: Sequence[str] = ()) -> list[Way]:
    """What a check of a cluster measures: each link, and in each site each kind of neighbours.

    Args:
        topology: Of the cluster.
        only: Names of links or sites; all if there are none.

    Raises:
        ConfigError: A name is none of the cluster's.
    """
    known = [link.name for link in topology.links] + [site.name for site in topology.sites]
    for name in only:
        if name not in known:
            raise ConfigError(
                f"there is no link or site {name!r} in {topology.name}",
                hint=f"there are: {', '.join(known)}",
            )
    found = [*_links(topology), *_neighbours(topology)]
    return [way for way in found if not only or way.name in only or way.site in only]


def _links(topology: Topology) -> Iterator[Way]:
    from isthmus.measure.ways import Way

    for plan in topology.links:
        a, b = (topology.site(name) for name in plan.link.between)
        hosts = list(zip(a.hosts, b.hosts, strict=False))[:_MOST_SHARING]
        pairs = tuple((_end(x, x.nics[0]), _end(y, y.nics[0])) for x, y in hosts)
        rate = plan.link.bandwidth_bytes_per_s
        taken = topology.path(a.name, b.name)
        direct = len(taken) == 1
        yield Way(
            name=plan.name,
            site="",
            pairs=pairs,
            asked_bytes_per_s=min(rate, *(end.bandwidth_bytes_per_s for end in pairs[0])),
            asked_shared_bytes_per_s=min(
                rate, *(sum(pair[i].bandwidth_bytes_per_s for pair in pairs) for i in (0, 1))
            ),
            asked_round_trip_s=2 * topology.latency_s(pairs[0][0].host, pairs[0][1].host),
            asked_jitter_s=plan.link.jitter_s,
            asked_loss=plan.link.loss,
            elsewhere="" if direct else f"traffic goes by {', '.join(x.name for x in taken)}",
        )


def _neighbours(topology: Topology) -> Iterator[Way]:
    """In each site the first two neighbours of each combination of rates, on each of their NICs."""
    from isthmus.measure.ways import Way

    for site in topology.sites:
        seen = set[tuple[float, ...]]()
        for x, y in zip(site.hosts, site.hosts[1:], strict=False):
            for nic_x, nic_y in zip(x.nics, y.nics, strict=False):
                rates = (nic_x.bandwidth_bytes_per_s, nic_y.bandwidth_bytes_per_s)
                if (nic_x.rail, *sorted(rates)) in seen:
                    continue
                seen.add((nic_x.rail, *sorted(rates)))
                yield Way(
                    name=f"{x.name}-{y.name} {nic_x.name}",
                    site=site.name,
                    pairs=((_end(x, nic_x), _end(y, nic_y)),),
                    asked_bytes_per_s=min(rates),
                    asked_shared_bytes_per_s=min(rates),
                    asked_round_trip_s=2 * (nic_x.latency_s + nic_y.latency_s),
                )


def _end(host: HostPlan, nic: NicPlan) -> End:
    from isthmus.measure.ways import End

    return End(host.name, nic.name, str(nic.address.ip), nic.bandwidth_bytes_per_s)


def check(
    cluster_file: Annotated[Path, typer.Argument(metavar="CLUSTER", help="A cluster.toml.")],
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Only this link (east-west) or site; may be repeated."),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Look at each stream only briefly.")
    ] = False,
    allow_missing: Annotated[
        list[str] | None,
        typer.Option(metavar="WHAT", help="Go on without what can't be emulated: latency, memory."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Build a cluster, measure its links both ways, alone and shared; print asked and measured."""
    from rich.console import Console

    from isthmus.lab.cluster import Cluster
    from isthmus.measure.ways import measure
    from isthmus.spec.cluster import ClusterSpec
    from isthmus.spec.load import load

    spec = load(ClusterSpec, cluster_file).spec
    progress = Console(stderr=True)
    checks: list[WayCheck] = []
    relays: dict[str, RelayCounters] = {}
    with Cluster(spec, allow_missing=allow_missing or ()) as cluster, Probe(cluster) as probe:
        wanted = ways(cluster.topology, only or ())
        for number, way in enumerate(wanted, 1):
            if way.elsewhere:
                progress.print(f"{way.name} is not measured: {way.elsewhere}", highlight=False)
                continue
            with progress.status(f"{way.name} ({number} of {len(wanted)}) ..."):
                checks.append(measure(way, probe.at, quick=quick))
        relays = {name: relay.counters() for name, relay in cluster.wiring.relays.items()}
    if as_json:
        found = {
            "cluster": spec.name,
            "ways": [to_json(check) for check in checks],
            "relays": {name: asdict(counters) for name, counters in relays.items()},
        }
        typer.echo(json.dumps(found, indent=2))
    else:
        show(checks, relays, Console(highlight=False))
    if any(found.problems for found in checks):
        raise typer.Exit(EXIT_FAILED)


def to_json(found: WayCheck) -> dict[str, Any]:
    """What was measured on a way, with what was asked and what is not as asked."""
    probes = found.round_trips
    return asdict(found) | {
        "problems": found.problems,
        "loss_there": probes.loss_there,
        "loss_back": probes.loss_back,
    }


def show(checks: Sequence[WayCheck], relays: Mapping[str, RelayCounters], console: Console) -> None:
    """Print goodput, round trips, what relays cost, and what is not as asked."""
    from isthmus.measure.ways import RATE_TOLERANCE

    if not console.is_terminal:
        console.width = 120
    if not checks:
        console.print("nothing to measure: no two hosts are joined")
        return
    console.print(_goodput_table(checks))
    console.print()
    console.print(_delay_table(checks))
    if relays:
        console.print()
        console.print(_relay_table(relays))
    problems = [(found.way.name, problem) for found in checks for problem in found.problems]
    console.print()
    for name, problem in problems:
        console.print(f"not as asked: {name}: {problem}", style="yellow", soft_wrap=True)
    if not problems:
        console.print(f"all as asked; goodput within {RATE_TOLERANCE:.0%}")


def _goodput_table(checks: Sequence[WayCheck]) -> Table:
    from isthmus.spec.units import format_bytes_per_s

    table = _table("goodput", "", "asked", "alone", "", "both ways", "shared", "by streams of")
    for found in checks:
        for way, arrow in ((found.there, "→"), (found.back, "←")):
            asked, total = found.way.asked_bytes_per_s, way.shared_bytes_per_s
            first, second = found.there.source, found.there.target
            table.add_row(
                found.way.name if way is found.there else "",
                f"{first} {arrow} {second}",
                format_bytes_per_s(asked),
                format_bytes_per_s(way.alone.median),
                f"{way.alone.median / asked - 1:+.1%}",
                format_bytes_per_s(way.both_ways.median),
                format_bytes_per_s(total) if total else "",
                ", ".join(f"{sample.median / total:.0%}" for sample in way.shared) if total else "",
            )
    return table


def _delay_table(checks: Sequence[WayCheck]) -> Table:
    from isthmus.spec.units import format_seconds

    table = _table(
        "round trip", "asked", "half", "9 in 10", "99 in 100", "lost there", "back", "asked"
    )
    for found in checks:
        trips = found.round_trips
        table.add_row(
            found.way.name,
            format_seconds(found.way.asked_round_trip_s),
            *map(format_seconds, (trips.p50_s, trips.p90_s, trips.p99_s)),
            f"{trips.sent - trips.arrived} of {trips.sent}",
            f"{trips.arrived - trips.returned} of {trips.arrived}",
            f"{found.way.asked_loss:.3g}",
        )
    return table


def _relay_table(relays: Mapping[str, RelayCounters]) -> Table:
    """Relays stand in for netem where the kernel has none; this is what they cost."""
    from isthmus.spec.units import format_bytes, format_seconds

    table = _table("relay", "carried", "CPU time", "per GB", "half late by", "99 in 100", "dropped")
    for name, counted in relays.items():
        lanes = (counted.forward, counted.backward)
        nbytes = sum(lane.nbytes for lane in lanes)
        table.add_row(
            name,
            format_bytes(nbytes),
            format_seconds(counted.cpu_s),
            format_seconds(counted.cpu_s / nbytes * 1e9) if nbytes else "",
            *(f"< {format_seconds(max(lane.late_s(p) for lane in lanes))}" for p in (0.5, 0.99)),
            str(sum(lane.num_dropped for lane in lanes)),
        )
    return table


def _table(*headers: str) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="dim")
    for place, header in enumerate(headers):
        right = place > 0 and header != ""
        table.add_column(header, justify="right" if right else "left", no_wrap=True)
    return table
