"""Goodput and delay of emulated links: asked and measured, and what the relay costs.

Two hosts at two sites, joined by one link: a TCP stream in each direction alone, and both at once,
after round trips on the idle link. First links that only have a rate, then links that delay, too,
which is the work of netem or, in kernels without it, of the relay.

Claims: goodput within 3 % of what was asked; the median round trip within 5 % and 1 ms.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from typing import Any, Final

from benchmarks import harness
from benchmarks._lab import two_sites
from isthmus.cli.lab_check import Probe, to_json, ways
from isthmus.lab.cluster import Cluster
from isthmus.measure.ways import WayCheck, measure
from isthmus.spec.units import format_bytes_per_s, format_seconds, parse_bytes_per_s

RATES: Final = ("10 Mbit/s", "100 Mbit/s", "1 Gbit/s", "2 Gbit/s")
DELAYED_RATES: Final = ("10 Mbit/s", "50 Mbit/s", "100 Mbit/s", "200 Mbit/s", "500 Mbit/s")
LATENCY_S: Final = 0.02


def one_link(rate: str, latency_s: float, *, quick: bool) -> dict[str, Any]:
    """Build a cluster with that link and measure it."""
    cluster = two_sites(parse_bytes_per_s(rate), hosts=1, latency_s=latency_s)
    with Cluster(cluster) as lab, Probe(lab) as probe:
        [way] = ways(lab.topology)
        found = measure(way, probe.at, quick=quick)
        relays = {name: relay.counters().cpu_s for name, relay in lab.wiring.relays.items()}
    asked = way.asked_bytes_per_s
    harness.say(
        f"{rate}, {format_seconds(latency_s)}: "
        f"{format_bytes_per_s(found.there.alone.median)} and "
        f"{format_bytes_per_s(found.back.alone.median)}, "
        f"round trip {format_seconds(found.round_trips.p50_s)}"
    )
    return {
        "asked_bytes_per_s": asked,
        "there_over_asked": found.there.alone.median / asked,
        "back_over_asked": found.back.alone.median / asked,
        "both_ways_over_asked": [way.both_ways.median / asked for way in (found.there, found.back)],
        "asked_round_trip_s": way.asked_round_trip_s,
        "round_trip_p50_s": found.round_trips.p50_s,
        "round_trip_p99_s": found.round_trips.p99_s,
        "relay_cpu_s": relays,
        "measured": to_json(found),
        "claim": _claim(rate, latency_s, found),
    }


def _claim(rate: str, latency_s: float, found: WayCheck) -> dict[str, Any]:
    delayed = f" and {format_seconds(latency_s)}" if latency_s else ""
    return harness.claim(f"{rate}{delayed}: as asked", not found.problems, why=found.problems)


def measure_all(options: Namespace) -> dict[str, Any]:
    """All links."""
    wanted = [(rate, 0.0) for rate in options.rates.split(",") if rate]
    wanted += [(rate, LATENCY_S) for rate in options.delayed_rates.split(",") if rate]
    links = [one_link(rate, latency_s, quick=options.quick) for rate, latency_s in wanted]
    return {"claims": [link.pop("claim") for link in links], "links": links}


def add_options(parser: ArgumentParser) -> None:
    """Add what to measure."""
    for name, rates in (("--rates", RATES), ("--delayed-rates", DELAYED_RATES)):
        parser.add_argument(name, default=",".join(rates), metavar="RATE,RATE")


if __name__ == "__main__":
    harness.run(__file__, __doc__ or "", measure_all, add_options)
