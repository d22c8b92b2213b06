"""What a check concludes from figures, on made-up ones."""

from __future__ import annotations

import dataclasses

import pytest

from isthmus.measure.links import RoundTrips
from isthmus.measure.timing import Sample
from isthmus.measure.ways import Direction, End, Way, WayCheck

ENDS = (End("a", "eth0", "10.77.0.2", 1e6), End("b", "eth0", "10.77.1.2", 1e6))
WAY = Way(
    "a-b",
    "",
    (ENDS, ENDS),
    asked_bytes_per_s=1e6,
    asked_shared_bytes_per_s=2e6,
    asked_round_trip_s=0.1,
)
TRIPS = RoundTrips(0.1, 0.11, 0.2, 0.09, count=100, sent=100, arrived=100, returned=100)


def rate(bytes_per_s: float) -> Sample:
    return Sample.of([bytes_per_s])


def check(
    alone: float = 1e6, shared: float = 1e6, way: Way = WAY, trips: RoundTrips = TRIPS
) -> WayCheck:
    direction = Direction("a", "b", rate(alone), rate(0.5e6), (rate(shared), rate(1e6)))
    return WayCheck(way, direction, dataclasses.replace(direction, alone=rate(1e6)), trips)


def test_what_is_as_asked_has_no_problem() -> None:
    assert check().problems == []
    assert check(alone=1.029e6).problems == []
    assert check().there.shared_bytes_per_s == 2e6
    alone = Direction("a", "b", rate(1e6), rate(1e6), ())
    assert alone.shared_bytes_per_s is None
    assert WayCheck(WAY, alone, alone, TRIPS).problems == []


@pytest.mark.parametrize("factor", [0.96, 1.04])
def test_goodput_off_by_more_than_three_percent_is_a_problem_alone_and_shared(
    factor: float,
) -> None:
    [alone] = check(alone=factor * 1e6).problems
    assert alone.startswith("a to b, alone: ")
    assert f"({factor - 1:+.1%})" in alone
    off = check(shared=2 * factor * 1e6 - 1e6).problems
    assert len(off) == 2
    assert all(", shared: " in problem for problem in off)


def test_goodput_is_not_judged_where_packets_are_to_be_lost() -> None:
    lossy = dataclasses.replace(WAY, asked_loss=0.01)
    lost = dataclasses.replace(TRIPS, sent=10_000, arrived=9_900, returned=9_801)
    assert check(alone=0.2e6, way=lossy, trips=lost).problems == []


def test_loss_is_judged_by_its_own_deviation() -> None:
    lossy = dataclasses.replace(WAY, asked_loss=0.01)
    none = dataclasses.replace(TRIPS, sent=10_000, arrived=10_000, returned=10_000)
    assert len(check(way=lossy, trips=none).problems) == 2
    some = dataclasses.replace(TRIPS, arrived=99, returned=99)
    assert check(trips=some).problems == ["lost there: 1 of 100, asked 0"]


@pytest.mark.parametrize("p50_s", [0.05, 0.107])
def test_a_round_trip_may_be_neither_short_nor_long(p50_s: float) -> None:
    [problem] = check(trips=dataclasses.replace(TRIPS, p50_s=p50_s)).problems
    assert "asked 100 ms" in problem
