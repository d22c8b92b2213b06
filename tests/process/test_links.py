"""Links measured by real endpoints, over addresses of the loopback interface."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest

from isthmus.errors import LaunchError
from isthmus.measure.links import Endpoint, StreamPlan, goodputs, round_trips, start_here

BRIEF = StreamPlan(warm_up_s=0.02, window_s=0.02, windows=2, stall_s=5.0)


def test_streams_and_probes_pass_both_ways_and_at_the_same_time() -> None:
    with Endpoint(start_here, "127.0.0.1") as a, Endpoint(start_here, "127.0.0.2") as b:
        alone = goodputs([(a, b)], BRIEF)
        shared = goodputs([(a, b), (b, a), (a, b)], BRIEF)
        probes = round_trips(a, b, count=20, interval_s=1e-4)
    assert [sample.count for sample in alone + shared] == [2] * 4
    assert all(0 < sample.low <= sample.median <= sample.high for sample in alone + shared)
    assert (probes.sent, probes.arrived, probes.returned, probes.count) == (20, 20, 20, 20)
    assert probes.loss_there == probes.loss_back == 0
    assert 0 < probes.low_s <= probes.p50_s <= probes.p90_s <= probes.p99_s


def test_a_stream_leaves_from_the_address_that_was_asked_for() -> None:
    with (
        Endpoint(start_here, "127.0.0.2") as source,
        socket.create_server(("127.0.0.3", 0)) as listener,
    ):
        stream = source.begin(
            "stream",
            source=source.address,
            target=listener.getsockname(),
            warm_up_s=0,
            window_s=0,
            windows=1,
            stall_s=5.0,
        )
        connection, peer = listener.accept()
        with connection:
            assert peer[0] == "127.0.0.2"
        with pytest.raises(LaunchError, match=r"127\.0\.0\.2 could not measure"):
            source.answer(stream, 10.0)
        assert source.ask("probe", 10, source="127.0.0.2", target=source.target("udp"),
                          count=1, interval_s=0, wait_s=5.0)["returned"] == 1  # fmt: skip


def test_a_port_where_nobody_listens_is_an_error_that_says_so() -> None:
    with Endpoint(start_here, "127.0.0.1") as a, Endpoint(start_here, "127.0.0.2") as b:
        b.close()
        with pytest.raises(LaunchError, match="refused"):
            goodputs([(a, b)], BRIEF)
        with pytest.raises(LaunchError, match="none came back"):
            round_trips(a, b, count=3, interval_s=1e-4, wait_s=0.01)


def test_an_address_that_is_not_the_hosts_and_a_python_that_is_not_there() -> None:
    with pytest.raises(LaunchError, match=r"198\.51\.100\.1 could not measure"):
        Endpoint(start_here, "198.51.100.1")
    with pytest.raises(LaunchError, match="is lost"):
        Endpoint(start_here, "127.0.0.1", python="/bin/false")


def test_an_endpoint_ends_with_its_stdin() -> None:
    from isthmus.measure import link_endpoint

    command = [sys.executable, "-I", "-S", link_endpoint.__file__]
    done = subprocess.run(command, input=b"", capture_output=True, timeout=20)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def test_a_silent_network_is_given_up_after_the_time_it_was_given() -> None:
    with (
        Endpoint(start_here, "127.0.0.1") as a,
        socket.create_server(("127.0.0.3", 0)) as never_reads,
    ):
        plan = {"warm_up_s": 0, "window_s": 0, "windows": 1, "stall_s": 0.2}
        with pytest.raises(LaunchError, match=r"nothing could be sent for 0\.2 s"):
            a.ask("stream", 20, source=a.address, target=never_reads.getsockname(), **plan)
