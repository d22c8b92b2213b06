"""The relay's arithmetic: when packets come out of a lane, and which links it refuses."""

from __future__ import annotations

import math
import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.errors import ConfigError
from isthmus.lab.relay import (
    LaneCounters,
    Wire,
    has_netem,
    is_plain,
    netem_options,
    rate_limit_bytes_per_s,
    refuse_untrue_rate,
    wire_of,
)
from isthmus.lab.relay_loop import CORRELATION, Lane
from isthmus.spec.cluster import Link

wires = st.builds(
    Wire,
    latency_s=st.floats(0, 1),
    jitter_s=st.one_of(st.just(0.0), st.floats(1e-6, 0.1)),
    loss=st.one_of(st.just(0.0), st.floats(0, 0.99)),
    is_cut=st.booleans(),
)
gaps = st.lists(st.floats(0, 0.01), max_size=50)


def packets(number: int) -> list[bytes]:
    return [number.to_bytes(4, "big"), number.to_bytes(8, "big")]


def send(lane: Lane, times_s: list[float]) -> list[tuple[float, bytes]]:
    """Puts packets in at these times and takes all of them out: with the time of each."""
    for number, now_s in enumerate(times_s):
        lane.accept(packets(number), now_s)
    out = []
    while lane.next_due_s < math.inf:
        due_s = lane.next_due_s
        assert lane.take_due(math.nextafter(due_s, -math.inf)) is None
        taken = lane.take_due(due_s)
        assert taken is not None
        assert taken[0] == due_s
        out += [(due_s, packet) for packet in taken[1]]
    return out


def cumulated(gaps_s: list[float]) -> list[float]:
    return [100.0 + sum(gaps_s[: index + 1]) for index in range(len(gaps_s))]


@given(gaps, wires)
def test_packets_never_overtake_and_are_all_accounted_for(gaps_s: list[float], wire: Wire) -> None:
    lane = Lane(wire, seed=1)
    out = send(lane, cumulated(gaps_s))
    sent = [packet for number in range(len(gaps_s)) for packet in packets(number)]
    remaining = iter(sent)
    assert all(packet in remaining for _, packet in out)  # a subsequence: in order, none twice
    assert lane.num_packets == len(sent) == len(out) + lane.num_lost
    assert lane.nbytes == sum(map(len, sent))
    assert [due_s for due_s, _ in out] == sorted(due_s for due_s, _ in out)
    if wire.is_cut:
        assert not out
    elif not wire.loss:
        assert lane.num_lost == 0


@given(gaps, st.floats(0, 1))
def test_without_jitter_every_packet_takes_the_latency(
    gaps_s: list[float], latency_s: float
) -> None:
    times_s = cumulated(gaps_s)
    out = send(Lane(Wire(latency_s), seed=1), times_s)
    assert [due_s for due_s, _ in out] == [now_s + latency_s for now_s in times_s for _ in (0, 1)]


@given(gaps, wires, st.integers(0, 9))
def test_equal_seeds_give_equal_lanes(gaps_s: list[float], wire: Wire, seed: int) -> None:
    times_s = cumulated(gaps_s)
    assert send(Lane(wire, seed), times_s) == send(Lane(wire, seed), times_s)


def test_loss_is_the_share_that_was_asked_for() -> None:
    lane = Lane(Wire(loss=0.03), seed=7)
    for number in range(20_000):
        lane.accept(packets(number), float(number))
    num_sent = 40_000
    deviation = math.sqrt(num_sent * 0.03 * 0.97)
    assert abs(lane.num_lost - num_sent * 0.03) < 4 * deviation


@pytest.mark.parametrize("gap_s", [1e-4, 1e-2])
def test_jitter_has_the_mean_and_deviation_that_were_asked_for(gap_s: float) -> None:
    """Of means over blocks far longer than the correlation time, so that they are independent."""
    latency_s, jitter_s = 0.05, 0.002
    wander_s = CORRELATION * jitter_s
    count = int(400 * wander_s / gap_s) if gap_s < wander_s else 20_000
    lane = Lane(Wire(latency_s, jitter_s), seed=3)
    times_s = [index * gap_s for index in range(count)]
    for now_s in times_s:
        lane.accept([b"x"], now_s)
    delays_s = [lane.take_due(math.inf)[0] - now_s for now_s in times_s]  # type: ignore[index]
    num_independent = count * gap_s / (2 * wander_s)
    error_s = 5 * jitter_s / math.sqrt(num_independent)
    assert abs(statistics.fmean(delays_s) - latency_s) < error_s + jitter_s / CORRELATION
    assert abs(statistics.pstdev(delays_s) - jitter_s) < error_s


def test_a_shorter_latency_lets_no_packet_overtake() -> None:
    lane = Lane(Wire(1.0), seed=1)
    lane.accept([b"a"], 0.0)
    lane.wire = Wire(0.1)
    lane.accept([b"b"], 0.5)
    lane.accept([b"c"], 1.5)
    assert [lane.take_due(10.0) for _ in range(4)] == [
        (1.0, [b"a"]),
        (1.0, [b"b"]),
        (1.6, [b"c"]),
        None,
    ]


def test_a_cut_lets_through_what_was_under_way() -> None:
    lane = Lane(Wire(1.0), seed=1)
    lane.accept([b"a"], 0.0)
    lane.wire = Wire(1.0, is_cut=True)
    lane.accept([b"b"], 0.5)
    assert lane.take_due(10.0) == (1.0, [b"a"])
    assert lane.next_due_s == math.inf
    assert lane.num_lost == 1


def test_lateness_is_read_from_the_histogram() -> None:
    counters = LaneCounters(100, 0, 0, 0, late=(50, 40, 9, 1))
    assert [counters.late_s(share) for share in (0.5, 0.9, 0.99, 1.0)] == [1e-6, 2e-6, 4e-6, 8e-6]
    assert LaneCounters(0, 0, 0, 0, late=(0, 0)).late_s(0.5) == 1e-6


def link(**properties: float) -> Link:
    return Link(between=("a", "b"), **{"bandwidth_bytes_per_s": 12.5e6, **properties})


def test_a_link_beyond_the_relay_is_refused_and_the_way_round_is_named() -> None:
    for plain in (link(bandwidth_bytes_per_s=1e12), link(latency_s=0.02)):
        refuse_untrue_rate("a-b", plain.bandwidth_bytes_per_s, wire_of(plain))
    for properties in ({"latency_s": 0.02}, {"jitter_s": 0.1}, {"loss": 0.01}):
        wire = wire_of(link(**properties))
        limit = rate_limit_bytes_per_s(wire)
        assert not is_plain(wire)
        assert limit >= 12.5e6  # 100 Mbit/s a link or more
        refuse_untrue_rate("a-b", limit, wire)
        with pytest.raises(ConfigError, match=r"link a-b .* true up to") as refused:
            refuse_untrue_rate("a-b", limit * 1.01, wire)
        assert "--allow-missing latency" in refused.value.hint


def test_netem_is_asked_for_what_the_wire_does() -> None:
    assert netem_options(Wire(), 1e6)[2:] == []
    assert netem_options(Wire(0.02), 1e6)[2:] == ["delay", "20000us"]
    assert netem_options(Wire(0.02, 0.001, 0.01), 1e6)[2:] == [
        *("delay", "20000us", "1000us", "distribution", "normal"),
        *("loss", "1%"),
    ]
    assert netem_options(Wire(0.02, 0, 0.01, is_cut=True), 1e6)[2:] == [
        *("delay", "20000us"),
        *("loss", "100%"),
    ]


@given(st.floats(0, 1), st.floats(1e4, 1e9))
def test_netem_has_room_for_all_that_is_under_way(latency_s: float, rate: float) -> None:
    word, limit = netem_options(Wire(latency_s), rate)[:2]
    assert word == "limit"
    assert int(limit) >= latency_s * rate / 1500


def test_a_machine_without_tc_has_no_netem() -> None:
    assert not has_netem(["isthmus-no-such-command"])
    assert not has_netem(["false"])
    assert has_netem(["true"])


def test_random_numbers_of_others_are_left_alone() -> None:
    random.seed(1)
    expected = random.random()
    random.seed(1)
    send(Lane(Wire(0.1, 0.1, 0.5), seed=2), cumulated([0.1] * 10))
    assert random.random() == expected
