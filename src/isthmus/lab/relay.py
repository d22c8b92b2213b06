"""Delay, jitter and loss between two network namespaces, whatever the kernel can do.

The kernel's own way is the queueing discipline netem, but many cloud kernels are built without it
(``has_netem`` says which). There a relay takes its place: a TUN device in each of the two
namespaces and a process between them, :mod:`isthmus.lab.relay_loop`. To the programs inside it is
a point-to-point interface like any other, so TCP, gloo and every other peer feel it. Rates are
not its business: a shaper (tbf) stands on each device and lets packets out at the link's rate.

How true it is, measured with 20 ms one way, MTU 1500 and one TCP stream, on two cores that had
other work as well (load 2 to 5); *cores* is the relay's processor time, which includes the kernel's
work for the packets that it writes::

                  as super-packets        packet by packet (a wire with loss)
    asked         goodput         cores   goodput         cores
      10 Mbit/s     9.98 Mbit/s    0.08     9.98 Mbit/s    0.10
      50 Mbit/s    49.9  Mbit/s    0.19    50.0  Mbit/s    0.22
     100 Mbit/s    99.8  Mbit/s    0.18   100.0  Mbit/s    0.29
     200 Mbit/s   200.0  Mbit/s    0.20   200.0  Mbit/s    0.35
     400 Mbit/s                           399.9  Mbit/s    0.57
    1000 Mbit/s   991    Mbit/s    0.32   923    Mbit/s    0.84

With a stream in each direction at once, 1000 Mbit/s (super-packets, 0.41 cores) and 200 Mbit/s
(packet by packet, 0.50 cores) stay true: 99 of 100 packets leave less than 0.6 ms late. At
400 Mbit/s packet by packet they don't: 0.82 cores, and one in 100 is 16 ms late. The limits below
follow from that. They are limits of packets per second, about 40,000 both ways together, so they
are lower for small datagrams than for streams.

The delay of single datagrams was 0.05 to 0.11 ms above what was asked at the median, of which the
path without a relay's delay makes most, and 0.2 to 0.9 ms at the 99th percentile, also with every
core busy. At rest a relay takes 0.01 % of a core and 13 MB, and it starts in 30 to 40 ms.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Protocol, Self

from isthmus.errors import ConfigError, LaunchError
from isthmus.lab import relay_loop
from isthmus.lab.relay_loop import Wire
from isthmus.spec.cluster import Link
from isthmus.spec.units import format_bytes_per_s

__all__ = [
    "LOSSY_RATE_LIMIT_BYTES_PER_S",
    "RATE_LIMIT_BYTES_PER_S",
    "WHOLE_BURST_NBYTES",
    "LaneCounters",
    "Namespace",
    "Relay",
    "RelayCounters",
    "Wire",
    "has_netem",
    "is_plain",
    "netem_options",
    "rate_limit_bytes_per_s",
    "refuse_untrue_rate",
    "start_relay",
    "wire_of",
]

RATE_LIMIT_BYTES_PER_S: Final = 1e9 / 8
"""Up to this rate a wire without loss is true in both directions at once."""
LOSSY_RATE_LIMIT_BYTES_PER_S: Final = 200e6 / 8
"""The same for a wire that loses packets, and so has to take them one by one."""
WHOLE_BURST_NBYTES: Final = 70_000
"""A shaper on a relay's device lets the largest super-packet through whole if its burst is at least
this: 64 KiB, and headers for each of its segments. Above ``LOSSY_RATE_LIMIT_BYTES_PER_S`` it has to
be: one that cuts them brought a 1000 Mbit/s link down to 350 Mbit/s."""
_ANSWER_TIMEOUT_S: Final = 10.0
_STOP_TIMEOUT_S: Final = 5.0


class Namespace(Protocol):
    """A network namespace: what a relay has to know of it is a process that lives there."""

    @property
    def pid(self) -> int:
        """A process inside, alive as long as the namespace is needed."""
        ...


def wire_of(link: Link) -> Wire:
    """What a link does to packets besides limiting their rate."""
    return Wire(latency_s=link.latency_s, jitter_s=link.jitter_s, loss=link.loss)


def is_plain(wire: Wire) -> bool:
    """Whether the wire needs neither netem nor a relay: any cable does what it does."""
    return not (wire.latency_s or wire.jitter_s or wire.loss)


def has_netem(prefix: Sequence[str] = ("unshare", "--net")) -> bool:
    """Whether the kernel can delay packets itself.

    Args:
        prefix: Words that run the rest of a command inside a namespace where a discipline may be
            put on the loopback interface and forgotten: a new one, unless told otherwise.
    """
    probe = [*prefix, "tc", "qdisc", "add", "dev", "lo", "root", "netem", "delay", "1ms"]
    try:
        return subprocess.run(probe, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


def netem_options(wire: Wire, bandwidth_bytes_per_s: float) -> list[str]:
    """What follows ``netem`` in a tc command for this wire.

    netem draws each packet's delay anew and so lets packets overtake each other where there is
    jitter; the relay does not.

    Args:
        wire: What the packets shall suffer.
        bandwidth_bytes_per_s: Of the link, so that all that is under way has room.
    """
    longest_s = wire.latency_s + 4 * wire.jitter_s
    limit = 1000 + 2 * int(longest_s * bandwidth_bytes_per_s / 1000)
    options = ["limit", str(limit)]
    if wire.latency_s or wire.jitter_s:
        options += ["delay", f"{wire.latency_s * 1e6:.0f}us"]
    if wire.jitter_s:
        options += [f"{wire.jitter_s * 1e6:.0f}us", "distribution", "normal"]
    if wire.loss or wire.is_cut:
        options += ["loss", f"{100 if wire.is_cut else wire.loss * 100:g}%"]
    return options


def rate_limit_bytes_per_s(wire: Wire) -> float:
    """Up to which rate a relay carries this wire truly."""
    return LOSSY_RATE_LIMIT_BYTES_PER_S if wire.loss else RATE_LIMIT_BYTES_PER_S


def refuse_untrue_rate(name: str, bandwidth_bytes_per_s: float, wire: Wire) -> None:
    """Refuse a link that would be slower through a relay than it was declared.

    Args:
        name: Of the link, for the message.
        bandwidth_bytes_per_s: Its declared goodput.
        wire: What its packets shall suffer.

    Raises:
        ConfigError: The link is beyond what a relay carries truly.
    """
    limit = rate_limit_bytes_per_s(wire)
    if is_plain(wire) or bandwidth_bytes_per_s <= limit:
        return
    rate = format_bytes_per_s(bandwidth_bytes_per_s)
    what = "delay and lose packets" if wire.loss else "delay packets"
    raise ConfigError(
        f"the link {name} cannot {what} at {rate}: this kernel has no netem, and the relay that "
        f"takes its place is true up to {format_bytes_per_s(limit)}",
        hint="lower the link's bandwidth, use a kernel with netem (CONFIG_NET_SCH_NETEM), or give "
        "--allow-missing latency to run without delay, jitter and loss on this link",
    )


@dataclass(frozen=True)
class LaneCounters:
    """What one direction of a relay has done so far.

    Attributes:
        num_packets: Packets that came in, as the kernel hands them over: many segments of a TCP
            stream are one super-packet, unless the wire loses packets.
        nbytes: Their bytes, with IP headers (and Ethernet's on a TAP device).
        num_lost: Those that the wire lost, as it was asked to.
        num_dropped: Those that the far device did not take because it was down.
        late: Histogram of how late packets left: entry k counts those less than 2^k µs late.
    """

    num_packets: int
    nbytes: int
    num_lost: int
    num_dropped: int
    late: tuple[int, ...]

    def late_s(self, share: float) -> float:
        """Upper bound of the lateness of this share of the packets, to a factor of two."""
        wanted = share * sum(self.late)
        reached = 0
        for bucket, count in enumerate(self.late):
            reached += count
            if reached >= wanted:
                return 2.0**bucket * 1e-6
        return 2.0 ** len(self.late) * 1e-6


@dataclass(frozen=True)
class RelayCounters:
    """What a relay has done, and what it cost.

    Attributes:
        forward: From the first end to the second.
        backward: From the second end to the first.
        cpu_s: Processor time of its process, with the kernel's work for the packets it writes.
        is_realtime: Whether the kernel runs it before ordinary processes.
    """

    forward: LaneCounters
    backward: LaneCounters
    cpu_s: float
    is_realtime: bool


class Relay:
    """A running relay; made by :func:`start_relay`. It ends with this object's process at last."""

    def __init__(self, process: subprocess.Popen[bytes], control: socket.socket) -> None:
        self._process = process
        self._control = control
        self._lock = threading.Lock()

    @property
    def pid(self) -> int:
        """Its process."""
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether it still carries packets; if not, both devices are gone."""
        return self._process.poll() is None

    def set_wire(self, wire: Wire) -> None:
        """Treat packets differently from now on; those under way keep the delay that they have.

        Raises:
            LaunchError: The relay has ended.
        """
        self.ask({"wire": wire._asdict()})

    def counters(self) -> RelayCounters:
        """What it has done so far.

        Raises:
            LaunchError: The relay has ended.
        """
        answer = self.ask({})
        return RelayCounters(
            forward=_lane_counters(answer["forward"]),
            backward=_lane_counters(answer["backward"]),
            cpu_s=answer["cpu_s"],
            is_realtime=answer["is_realtime"],
        )

    def hang_up(self) -> None:
        """Tell the relay to end, without waiting: many can then be closed in the time of one."""
        self._control.close()

    def close(self) -> None:
        """End the relay; its devices vanish. Does nothing the second time."""
        self.hang_up()
        try:
            self._process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Send the process a message and wait for its answer (an empty one asks for counters)."""
        try:
            with self._lock:
                self._control.send(json.dumps(request).encode())
                answer = self._control.recv(65536)
        except OSError:
            answer = b""
        if not answer:
            raise LaunchError(
                f"the relay (process {self.pid}) has ended",
                hint="it ends when one of its devices is removed; the link has to be made anew",
            )
        return json.loads(answer)


def start_relay(
    first: Namespace,
    second: Namespace,
    wire: Wire,
    *,
    devices: tuple[str, str],
    is_tap: bool = False,
    seed: int | None = None,
) -> Relay:
    """Make a device in each namespace and carry packets between them.

    The devices are down and have no address yet; they have to be set up like any interface. They
    are there until the relay is closed or the calling process has ended, however it ended.

    Args:
        first: Where one device is made.
        second: Where the other one is made; may be the same namespace.
        wire: What packets suffer on their way, in each direction.
        devices: Names of the two devices.
        is_tap: Make TAP devices, which carry Ethernet frames and can be put on a bridge, instead of
            TUN devices, which carry IP packets and need routes.
        seed: Of loss and jitter; drawn if not given.

    Raises:
        LaunchError: The devices could not be made.
    """
    seed = secrets.randbits(32) if seed is None else seed
    plan = {
        "userns": f"/proc/{first.pid}/ns/user",
        "netns": [f"/proc/{namespace.pid}/ns/net" for namespace in (first, second)],
        "devices": devices,
        "is_tap": is_tap,
        "wire": wire._asdict(),
        "seeds": [seed, seed + 1],
    }
    control, far_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with far_end:
        # A session of its own: Ctrl-C is for the lab, which then ends its relays in order.
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", relay_loop.__file__, str(far_end.fileno())],
            pass_fds=[far_end.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
    control.settimeout(_ANSWER_TIMEOUT_S)
    relay = Relay(process, control)
    try:
        refused = relay.ask(plan).get("error")
    except BaseException:
        relay.close()
        raise
    if refused:
        relay.close()
        raise _cannot_start(devices, refused)
    return relay


def _cannot_start(devices: tuple[str, str], number: int) -> LaunchError:
    hints = {
        errno.ENOENT: "load the kernel's tun module (modprobe tun); /dev/net/tun must exist",
        errno.ENODEV: "load the kernel's tun module (modprobe tun)",
        errno.EPERM: "making a TUN device needs CAP_NET_ADMIN in the namespace it is made in",
        errno.EACCES: "open /dev/net/tun to this user (chmod 666 /dev/net/tun)",
        errno.EBUSY: "an interface of that name is there already",
    }
    return LaunchError(
        f"the relay between {' and '.join(devices)} could not be made: {os.strerror(number)}",
        hint=hints.get(number, ""),
    )


def _lane_counters(answer: dict[str, Any]) -> LaneCounters:
    return LaneCounters(**answer | {"late": tuple(answer["late"])})
