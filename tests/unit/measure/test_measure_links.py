"""The parts of the link measurement that know no socket and no clock."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.measure.link_endpoint import _PROBE, Echo, Rates
from isthmus.measure.links import BURST_NBYTES, RoundTrips, StreamPlan, probe_interval_s


@given(
    lump_nbytes=st.integers(1, 1 << 16),
    interval_s=st.floats(1e-4, 0.2),
    warm_up_s=st.floats(0, 1),
    window_s=st.floats(0.05, 1),
    windows=st.integers(1, 4),
)
def test_lumps_that_come_evenly_have_exactly_their_rate_in_every_window(
    lump_nbytes: int, interval_s: float, warm_up_s: float, window_s: float, windows: int
) -> None:
    rates = Rates(warm_up_s, window_s, windows)
    arrivals = 0
    while not rates.complete:
        rates.arrived(100.0 + arrivals * interval_s, lump_nbytes)
        arrivals += 1
    assert rates.bytes_per_s == [pytest.approx(lump_nbytes / interval_s)] * windows
    assert arrivals * interval_s >= warm_up_s + windows * window_s


def test_a_stall_counts_and_what_came_while_warming_up_does_not() -> None:
    rates = Rates(warm_up_s=1.0, window_s=1.0, windows=1)
    for now_s in (0.0, 0.5, 0.9):
        rates.arrived(now_s, 10**9)  # a burst that the shaper had saved up
    rates.arrived(1.0, 10**9)  # opens the window
    rates.arrived(1.5, 100)
    assert rates.bytes_per_s == []
    rates.arrived(5.0, 300)
    assert rates.bytes_per_s == [pytest.approx(400 / 4.0)]
    rates.arrived(9.0, 10**9)
    assert len(rates.bytes_per_s) == 1


@given(st.lists(st.booleans(), min_size=1, max_size=200), st.integers(0, 2**32))
def test_an_echo_says_how_many_probes_of_its_sender_have_arrived(
    arrives: list[bool], stamp: int
) -> None:
    echo = Echo()
    answers = []
    for number, passes in enumerate(arrives):
        echo.answer(_PROBE.pack(2, number, stamp, 0))  # another sender's don't count
        if passes:
            answers.append(_PROBE.unpack(echo.answer(_PROBE.pack(1, number, stamp, 0))))
    assert [sender for sender, *_ in answers] == [1] * sum(arrives)
    assert [number for _, number, *_ in answers] == [n for n, p in enumerate(arrives) if p]
    assert [arrived for *_, arrived in answers] == list(range(1, sum(arrives) + 1))


def test_an_echo_forgets_the_oldest_sender_and_no_other() -> None:
    echo = Echo()
    for sender in range(65):
        echo.answer(_PROBE.pack(sender, 0, 0, 0))
    assert _PROBE.unpack(echo.answer(_PROBE.pack(64, 1, 0, 0)))[3] == 2
    assert _PROBE.unpack(echo.answer(_PROBE.pack(0, 1, 0, 0)))[3] == 1


@given(st.floats(1e5, 1e9), st.floats(0, 1))
def test_a_window_holds_twenty_bursts_and_several_round_trips(
    bandwidth_bytes_per_s: float, round_trip_s: float
) -> None:
    plan = StreamPlan.for_link(bandwidth_bytes_per_s, round_trip_s)
    burst_nbytes = min(BURST_NBYTES, 0.01 * bandwidth_bytes_per_s)
    assert plan.window_s * bandwidth_bytes_per_s >= 20 * burst_nbytes * (1 - 1e-9)
    assert plan.window_s >= 4 * round_trip_s
    assert plan.warm_up_s >= 10 * round_trip_s
    assert plan.stall_s > round_trip_s
    assert plan.duration_s == pytest.approx(plan.warm_up_s + 3 * plan.window_s)


def test_loss_is_told_apart_by_direction() -> None:
    found = RoundTrips(0.1, 0.1, 0.1, 0.1, count=60, sent=100, arrived=80, returned=60)
    assert found.loss_there == pytest.approx(0.2)
    assert found.loss_back == pytest.approx(0.25)


@given(st.floats(1e4, 1e9))
def test_probes_leave_the_link_to_others(bandwidth_bytes_per_s: float) -> None:
    assert 60 / probe_interval_s(bandwidth_bytes_per_s) <= 0.1 * bandwidth_bytes_per_s * 1.0001
