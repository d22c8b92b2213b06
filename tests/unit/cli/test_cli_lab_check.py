"""What ``isthmus lab check`` measures and how it says it; real networks are in tests/network."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from isthmus.cli.lab_check import show, to_json, ways
from isthmus.errors import ConfigError
from isthmus.lab.topology import Topology, plan_topology
from isthmus.measure.links import RoundTrips
from isthmus.measure.timing import Sample
from isthmus.measure.ways import Direction, WayCheck
from isthmus.spec.cluster import ClusterSpec
from isthmus.spec.load import load

CLUSTERS = Path(__file__).parents[3] / "recipes" / "clusters"


def topology(name: str) -> Topology:
    return plan_topology(load(ClusterSpec, CLUSTERS / f"{name}.toml").spec)


def test_each_link_and_each_kind_of_neighbours_is_measured_once() -> None:
    link, east, west = ways(topology("two-sites"))
    assert (link.name, east.site, west.site) == ("east-west", "east", "west")
    assert [(a.host, b.host) for a, b in link.pairs] == [("east0", "west0"), ("east1", "west1")]
    assert link.asked_bytes_per_s == link.asked_shared_bytes_per_s == 100e6 / 8
    assert east.asked_bytes_per_s == 1e9 / 8
    assert [way.name for way in ways(topology("mixed-nics"))] == [
        "fast0-fast1 eth0",
        "fast0-fast1 eth1",
        "fast1-slow0 eth0",
        "slow0-slow1 eth0",
    ]
    assert ways(topology("one-machine")) == []
    assert len(ways(topology("world-wide"))) == 28


def test_the_narrowest_on_the_way_is_what_is_asked() -> None:
    rates = {way.name: way.asked_bytes_per_s * 8e-6 for way in ways(topology("four-homes"))}
    assert rates["ada-bob"] == pytest.approx(40)
    assert rates["ada-dee"] == rates["cyd-dee"] == pytest.approx(20)


@pytest.mark.parametrize("name", ["four-regions", "world-wide"])
def test_every_link_asks_for_the_delay_that_its_file_declares(name: str) -> None:
    plan = topology(name)
    for way in ways(plan):
        if not way.site:
            assert way.elsewhere == ""
            declared = plan.link(*way.name.split("-")).link
            assert way.asked_round_trip_s == pytest.approx(2 * declared.latency_s)


def test_only_what_is_named_is_measured_and_a_wrong_name_is_an_error() -> None:
    assert [way.name for way in ways(topology("two-sites"), ["east"])] == ["east0-east1 eth0"]
    assert [way.name for way in ways(topology("two-sites"), ["east-west"])] == ["east-west"]
    with pytest.raises(ConfigError, match="'north'") as wrong:
        ways(topology("two-sites"), ["north"])
    assert "east-west, east, west" in wrong.value.hint


def made_up(measured: float) -> WayCheck:
    link = ways(topology("two-sites"))[0]
    rate = Sample.of([measured * link.asked_bytes_per_s])
    half = Sample.of([measured * link.asked_bytes_per_s / 2])
    trips = RoundTrips(2e-4, 3e-4, 4e-4, 1e-4, count=50, sent=50, arrived=50, returned=50)
    there = Direction("east0", "west0", rate, rate, (half, half))
    return WayCheck(link, there, Direction("west0", "east0", rate, rate, (half, half)), trips)


def text_of(*checks: WayCheck) -> str:
    out = io.StringIO()
    show(checks, {}, Console(file=out, highlight=False))
    return out.getvalue()


def test_asked_stands_beside_measured() -> None:
    good = text_of(made_up(0.999))
    assert "all as asked" in good
    [there] = [line for line in good.splitlines() if "east0 → west0" in line]
    rates = "100 Mbit/s 99.9 Mbit/s -0.1% 99.9 Mbit/s 99.9 Mbit/s 50%, 50%"
    assert " ".join(there.split()) == f"east-west east0 → west0 {rates}"
    bad = text_of(made_up(0.9))
    assert "not as asked: east-west: east0 to west0, alone: 90 Mbit/s, asked 100 Mbit/s" in bad
    assert "all as asked" not in bad
    assert "nothing to measure" in text_of()


def test_json_has_what_was_asked_what_was_measured_and_the_verdict() -> None:
    data = json.loads(json.dumps(to_json(made_up(0.9))))
    assert data["way"]["asked_bytes_per_s"] == 100e6 / 8
    assert data["there"]["alone"]["median"] == pytest.approx(90e6 / 8)
    assert data["round_trips"]["p50_s"] == 2e-4
    assert (data["loss_there"], data["loss_back"]) == (0, 0)
    assert len(data["problems"]) == 4
