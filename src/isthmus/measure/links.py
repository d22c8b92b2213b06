"""What links between hosts carry: goodput alone and shared, round trips, loss.

An :class:`Endpoint` is a small program in a host, one for each address that takes part. How it
comes to run there is the caller's business: in a lab, through ssh, on this machine. What the
figures mean, and how they are taken, is said in :mod:`isthmus.measure.link_endpoint`::

    with Endpoint(start_in_a, "10.77.0.1") as a, Endpoint(start_in_b, "10.77.0.2") as b:
        plan = StreamPlan.for_link(bandwidth_bytes_per_s=100e6 / 8, round_trip_s=0.02)
        [a_to_b] = goodputs([(a, b)], plan)
        both_ways = goodputs([(a, b), (b, a)], plan)
        idle = round_trips(a, b)

Goodput is payload bytes a second of one TCP stream; what TCP itself costs (headers, resent packets)
is not in it. Short of the link's rate it says that TCP could not fill it: with loss, or a delay
that the system's buffers don't cover, that is the truth about the link, not an error of the
measurement. Both ways at once cost another 2 % or so: each way carries the other's
acknowledgements.
"""

from __future__ import annotations

import itertools
import json
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Any, Final, Protocol, Self

import numpy as np

from isthmus.errors import LaunchError
from isthmus.measure import link_endpoint
from isthmus.measure.timing import Sample

__all__ = [
    "Endpoint",
    "EndpointProcess",
    "RoundTrips",
    "Start",
    "StreamPlan",
    "goodputs",
    "round_trips",
    "start_here",
]

BURST_NBYTES: Final = 1 << 18
"""What a shaper may let through at once; a window holds at least twenty times as much."""
_SLOW_START_ROUNDS: Final = 12
_START_TIMEOUT_S: Final = 20.0
_FIRST_PACKET_S: Final = 2.0
"""How much longer the first packet may take: a lost question for an address is asked again."""
_PROBE_NBYTES: Final = 60
"""A probe with its UDP and IP headers."""


class EndpointProcess(Protocol):
    """What an endpoint has to know of its process; ``subprocess.Popen`` with pipes is one."""

    stdin: Any
    stdout: Any

    def kill(self) -> None:
        """End it at once."""
        ...

    def wait(self) -> int:
        """Wait until it has ended."""
        ...


Start = Callable[[list[str]], EndpointProcess]
"""Starts a command in a host, with pipes of bytes as its stdin and stdout."""


def start_here(command: list[str]) -> subprocess.Popen[bytes]:
    """Start a command on this machine."""
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


@dataclass(frozen=True)
class StreamPlan:
    """How long to look at a stream.

    Attributes:
        warm_up_s: From the first byte to the first window.
        window_s: Length of a window.
        windows: How many; each gives one value.
        stall_s: How long nothing may pass before the link counts as broken.
    """

    warm_up_s: float = 0.3
    window_s: float = 0.5
    windows: int = 3
    stall_s: float = 10.0

    @classmethod
    def for_link(
        cls,
        bandwidth_bytes_per_s: float,
        round_trip_s: float = 0.0,
        *,
        window_s: float = 0.5,
        windows: int = 3,
    ) -> StreamPlan:
        """A plan that is long enough for a link.

        The warm-up lets the sender find its rate and empties what the shaper had saved up; a window
        holds 20 bursts, and four round trips, over which TCP's own swings even out.

        Args:
            bandwidth_bytes_per_s: The link's expected rate.
            round_trip_s: Its expected round trip.
            window_s: Least length of a window.
            windows: How many.
        """
        bursts_s = 20 * min(BURST_NBYTES, 0.01 * bandwidth_bytes_per_s) / bandwidth_bytes_per_s
        return cls(
            warm_up_s=0.5 + _SLOW_START_ROUNDS * round_trip_s,
            window_s=max(window_s, bursts_s, 4 * round_trip_s),
            windows=windows,
            stall_s=10.0 + 10 * round_trip_s,
        )

    @property
    def duration_s(self) -> float:
        """About how long it takes."""
        return self.warm_up_s + self.windows * self.window_s


@dataclass(frozen=True)
class RoundTrips:
    """Probes that went to another host and back.

    Attributes:
        p50_s: Half of the round trips took at most this long.
        p90_s: Nine in ten.
        p99_s: Ninety-nine in a hundred.
        low_s: The shortest.
        count: Probes behind these.
        sent: Probes that had the time to come back.
        arrived: Of these, those that reached the other host.
        returned: And those that came back.
    """

    p50_s: float
    p90_s: float
    p99_s: float
    low_s: float
    count: int
    sent: int
    arrived: int
    returned: int

    @property
    def loss_there(self) -> float:
        """Share of the probes that was lost on the way there."""
        return 1 - self.arrived / self.sent

    @property
    def loss_back(self) -> float:
        """Share of the answers that was lost on the way back."""
        return 1 - self.returned / self.arrived


class Endpoint:
    """An end of a link that is measured: a process in a host; a context manager.

    Args:
        start: Starts a command in the host.
        address: Of the host; what arrives at it and leaves from it goes over the link in question.
        python: The host's Python.
    """

    def __init__(self, start: Start, address: str, *, python: str = sys.executable) -> None:
        self.address = address
        self._process = start([python, "-I", "-S", link_endpoint.__file__])
        self._ids = itertools.count()
        self._answers: dict[int, dict[str, Any]] = {}
        self._unread = b""
        self._lock = threading.Lock()
        try:
            self._ports: dict[str, int] = self.ask("serve", _START_TIMEOUT_S, address=address)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def target(self, protocol: str) -> tuple[str, int]:
        """Where others reach it: its address and its port of ``tcp`` or ``udp``."""
        return self.address, self._ports[protocol]

    def ask(self, operation: str, deadline_s: float, /, **arguments: Any) -> Any:
        """Have something done and wait for it. Raises as :meth:`answer` does."""
        return self.answer(self.begin(operation, **arguments), deadline_s)

    def begin(self, operation: str, /, **arguments: Any) -> int:
        """Have something done; returns the number under which its answer will come."""
        number = next(self._ids)
        request = {"id": number, "do": operation, "with": arguments}
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        except (OSError, ValueError) as error:
            raise self._lost(str(error)) from error
        return number

    def answer(self, number: int, deadline_s: float) -> Any:
        """Wait for an answer.

        Raises:
            LaunchError: The endpoint has ended, did not answer in time, or could not do it.
        """
        give_up_at_s = time.monotonic() + deadline_s
        while number not in self._answers:
            self._read(give_up_at_s - time.monotonic(), deadline_s)
        answer = self._answers.pop(number)
        if "error" in answer:
            raise LaunchError(
                f"the endpoint at {self.address} could not measure: {answer['error']}",
                hint="is the other host reachable from this one, and the link up?",
            )
        return answer["found"]

    def close(self) -> None:
        """End the process. May be called twice."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            try:
                pipe.close()
            except OSError:  # what was still to be written to a dead process
                continue

    def _read(self, left_s: float, deadline_s: float) -> None:
        descriptor = self._process.stdout
        if left_s <= 0 or not select.select([descriptor], [], [], left_s)[0]:
            raise self._lost(f"no answer within {deadline_s:g} s")
        part = descriptor.read1(1 << 16)
        if not part:
            raise self._lost("its process has ended")
        *lines, self._unread = (self._unread + part).split(b"\n")
        for line in lines:
            answer = json.loads(line)
            self._answers[answer["id"]] = answer

    def _lost(self, why: str) -> LaunchError:
        return LaunchError(
            f"the endpoint at {self.address} is lost: {why}",
            hint="python must start in that host, and the host must own that address",
        )


def goodputs(pairs: Sequence[tuple[Endpoint, Endpoint]], plan: StreamPlan) -> list[Sample]:
    """Goodput of one stream for each pair, all at the same time.

    Args:
        pairs: Sender and receiver of each stream; a pair may occur more than once.
        plan: How long to look.

    Returns:
        For each pair, in bytes per second: median, lowest and highest window.

    Raises:
        LaunchError: An endpoint could not connect, or nothing passed for too long.
    """
    deadline_s = plan.duration_s + 2 * plan.stall_s
    begun = [
        source.begin("stream", source=source.address, target=target.target("tcp"), **asdict(plan))
        for source, target in pairs
    ]
    return [
        Sample.of(source.answer(number, deadline_s))
        for (source, _), number in zip(pairs, begun, strict=True)
    ]


def round_trips(
    source: Endpoint,
    target: Endpoint,
    *,
    count: int = 100,
    interval_s: float = 0.005,
    wait_s: float = 1.0,
) -> RoundTrips:
    """Send small packets to another host and back.

    One goes ahead and is not counted: the first between two hosts has their addresses resolved.

    Args:
        source: Where the clock is.
        target: Where they turn round.
        count: Packets; to see a loss of p, several times 1/p.
        interval_s: Time between two. See :func:`probe_interval_s`.
        wait_s: How long to wait for the last ones; more than a round trip.

    Raises:
        LaunchError: None came back.
    """
    ends = {"source": source.address, "target": target.target("udp")}
    deadline_s = count * interval_s + wait_s + _START_TIMEOUT_S
    first_wait_s = wait_s + _FIRST_PACKET_S
    source.ask("probe", deadline_s, **ends, count=1, interval_s=0, wait_s=first_wait_s)
    found = source.ask(
        "probe", deadline_s, **ends, count=count, interval_s=interval_s, wait_s=wait_s
    )
    if not found["rtts_s"]:
        raise LaunchError(
            f"of {count} packets from {source.address} to {target.address} none came back",
            hint="is the link up, and does a route lead there and back?",
        )
    rtts_s = np.asarray(found.pop("rtts_s"))
    p50_s, p90_s, p99_s = map(float, np.percentile(rtts_s, (50, 90, 99), method="higher"))
    return RoundTrips(p50_s, p90_s, p99_s, float(rtts_s.min()), len(rtts_s), **found)


def probe_interval_s(bandwidth_bytes_per_s: float, *, share: float = 0.1) -> float:
    """Shortest time between two probes that take no more than a share of a link's rate."""
    return max(2e-4, _PROBE_NBYTES / (share * bandwidth_bytes_per_s))
