"""The relay's process: carries packets between two devices, late, unevenly and not all of them.

:mod:`isthmus.lab.relay` starts this file as a program of its own, one for each wire, so it uses the
standard library alone and is up within milliseconds. It makes a TUN or TAP device in each of two
network namespaces and hands every packet that leaves through one to the other, after the wire's
delay. ``Lane`` is the pure part, one direction of a wire: it knows no clock and no device.

The process lives as long as the other end of its control socket: when the lab ends, however it
ends, the kernel closes that end, this process ends, and its devices vanish with it.

Three things keep it true while the cores are busy with training. It asks for real-time priority,
else for a better nice value. It treats all packets that came since it last looked as one batch,
with one delay. And it takes super-packets whole, as the kernel's segmentation offload makes them,
with their checksums unfinished, because the other device takes them back the same way; only a
wire that loses packets needs them one by one.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import gc
import json
import math
import os
import random
import select
import socket
import struct
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, NamedTuple

BATCH = 32
"""Packets that are read from one device before the other one gets its turn."""
EARLY_S = 50e-6
"""A packet this close to its time leaves now: it saves a wake-up and is within a timer's slack."""
LATE_BUCKETS = 24
"""Histogram of lateness: bucket k counts packets less than 2^k µs late (and not less than half)."""
CORRELATION = 20.0
"""Jitter wanders with a correlation time of this many standard deviations; see ``Lane``."""

_TUNSETIFF = 0x400454CA
_TUNSETOFFLOAD = 0x400454D0
_IFF_TUN, _IFF_TAP, _IFF_NO_PI, _IFF_VNET_HDR = 0x0001, 0x0002, 0x1000, 0x4000
_TUN_F_CSUM, _TUN_F_TSO4, _TUN_F_TSO6 = 0x01, 0x02, 0x04
_VNET_HEADER_NBYTES = 10
_MAX_PACKET = 65536 + 64
_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000


class Wire(NamedTuple):
    """What happens to packets between the two ends, in each direction.

    Attributes:
        latency_s: Mean of the delay.
        jitter_s: Its standard deviation.
        loss: Share of packets that vanish.
        is_cut: Nothing passes, and nobody is told: no carrier is lost, packets just vanish.
    """

    latency_s: float = 0.0
    jitter_s: float = 0.0
    loss: float = 0.0
    is_cut: bool = False


class Lane:
    """One direction of a wire: packets go in at one time and come out, in order, at another.

    Jitter is a stationary Gaussian process with exponential correlation (Ornstein-Uhlenbeck), since
    the delay of a real path wanders instead of being drawn anew for each packet. A packet never
    overtakes another; waiting for the one before adds at most jitter / CORRELATION to the mean
    (the mean of a Brownian path's largest lead over a line: variance rate 2 σ²/τ, slope 1). Delays
    below zero are cut off, which matters where the jitter is above a third of the latency.

    Args:
        wire: How the lane treats packets from now on; may be replaced at any time.
        seed: Of the random numbers for loss and jitter.
    """

    def __init__(self, wire: Wire, seed: int) -> None:
        self.wire = wire
        self.num_packets = 0
        self.nbytes = 0
        self.num_lost = 0
        self._random = random.Random(seed)
        self._waiting: deque[tuple[float, list[bytes]]] = deque()
        self._last_due_s = -math.inf
        self._wander_s = 0.0
        self._wandered_at_s = -math.inf

    @property
    def next_due_s(self) -> float:
        """When the next packet comes out; infinity if none is inside."""
        return self._waiting[0][0] if self._waiting else math.inf

    def accept(self, packets: list[bytes], now_s: float) -> None:
        """Take packets in: those that are not lost come out together, once their time has come."""
        self.num_packets += len(packets)
        self.nbytes += sum(map(len, packets))
        wire = self.wire
        if wire.is_cut:
            kept: list[bytes] = []
        elif wire.loss:
            draw, loss = self._random.random, wire.loss
            kept = [packet for packet in packets if draw() >= loss]
        else:
            kept = packets
        self.num_lost += len(packets) - len(kept)
        if kept:
            due_s = max(now_s + self._delay_s(now_s), self._last_due_s)
            self._last_due_s = due_s
            self._waiting.append((due_s, kept))

    def take_due(self, now_s: float) -> tuple[float, list[bytes]] | None:
        """The next packets whose time has come, with that time; None if there are none yet."""
        if self._waiting and self._waiting[0][0] <= now_s:
            return self._waiting.popleft()
        return None

    def _delay_s(self, now_s: float) -> float:
        wire = self.wire
        if not wire.jitter_s:
            return wire.latency_s
        kept = math.exp((self._wandered_at_s - now_s) / (CORRELATION * wire.jitter_s))
        fresh_s = self._random.gauss(0.0, wire.jitter_s)
        self._wander_s = kept * self._wander_s + math.sqrt(1 - kept * kept) * fresh_s
        self._wandered_at_s = now_s
        return max(0.0, wire.latency_s + self._wander_s)


class Pump:
    """Moves packets from the device that it reads, through a lane, to the device that it writes.

    Counts packets that the far device did not take (it is down), and how late each packet left.
    """

    def __init__(self, source: int, target: int, wire: Wire, seed: int) -> None:
        self.source = source
        self.lane = Lane(wire, seed)
        self._target = target
        self._num_dropped = 0
        self._late = [0] * LATE_BUCKETS
        self.use(wire)

    def pull(self, now_s: float) -> None:
        """Read what has come, at most a batch.

        Raises:
            OSError: The device is gone.
        """
        if packets := list(_read_batch(self.source)):
            self.lane.accept(packets, now_s)

    def push(self, now_s: float) -> None:
        """Write everything whose time has come."""
        target, write, lane = self._target, os.write, self.lane
        while batch := lane.take_due(now_s + EARLY_S):
            due_s, packets = batch
            late_us = max(0, int((now_s - due_s) * 1e6))
            self._late[min(late_us.bit_length(), LATE_BUCKETS - 1)] += len(packets)
            for packet in packets:
                try:
                    write(target, packet)
                except OSError as problem:
                    if problem.errno not in (errno.EIO, errno.ENOBUFS, errno.EAGAIN):
                        raise
                    self._num_dropped += 1

    def counters(self) -> dict[str, Any]:
        """What passed so far in this direction."""
        return {
            "num_packets": self.lane.num_packets,
            "nbytes": self.lane.nbytes - _VNET_HEADER_NBYTES * self.lane.num_packets,
            "num_lost": self.lane.num_lost,
            "num_dropped": self._num_dropped,
            "late": self._late,
        }

    def use(self, wire: Wire) -> None:
        """Treat what is read from now on as ``wire`` says.

        Packets that may be lost are taken one by one: losing a super-packet would lose a burst.
        """
        segmentation = 0 if wire.loss else _TUN_F_TSO4 | _TUN_F_TSO6
        fcntl.ioctl(self.source, _TUNSETOFFLOAD, _TUN_F_CSUM | segmentation)
        self.lane.wire = wire


def _read_batch(device: int) -> Iterator[bytes]:
    with suppress(BlockingIOError):
        for _ in range(BATCH):
            yield os.read(device, _MAX_PACKET)


def run(pumps: list[Pump], control: socket.socket) -> None:
    """Carry packets until the other end of ``control`` is closed."""
    sources = {pump.source: pump for pump in pumps}
    inputs = [control.fileno(), *sources]
    clock, wait = time.monotonic, select.select
    is_realtime = _hurry()
    while True:
        due_s = min(pump.lane.next_due_s for pump in pumps)
        timeout_s = None if due_s == math.inf else max(0.0, due_s - EARLY_S - clock())
        ready, _, _ = wait(inputs, (), (), timeout_s)
        now_s = clock()
        for fd in ready:
            if fd in sources:
                sources[fd].pull(now_s)
            elif not _answer(control, pumps, is_realtime):
                return
        for pump in pumps:
            pump.push(clock())


def _answer(control: socket.socket, pumps: list[Pump], is_realtime: bool) -> bool:
    """Answer one message; False if there won't be any more."""
    message = control.recv(65536)
    if not message:
        return False
    request = json.loads(message)
    if "wire" in request:
        for pump in pumps:
            pump.use(Wire(**request["wire"]))
    answer = {
        "forward": pumps[0].counters(),
        "backward": pumps[1].counters(),
        "cpu_s": time.process_time(),
        "is_realtime": is_realtime,
    }
    control.send(json.dumps(answer).encode())
    return True


def open_device(name: str, netns: str, *, is_tap: bool) -> int:
    """Make a TUN or TAP device in a network namespace and return its descriptor.

    The calling thread stays in that namespace.

    Args:
        name: Of the device.
        netns: Path of the namespace.
        is_tap: Whether it carries Ethernet frames instead of IP packets.
    """
    _enter(netns, _CLONE_NEWNET)
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    flags = (_IFF_TAP if is_tap else _IFF_TUN) | _IFF_NO_PI | _IFF_VNET_HDR
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", name.encode(), flags))
    return device


def _enter(path: str, kind: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    namespace = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if libc.setns(namespace, kind):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), path)
    finally:
        os.close(namespace)


def _join_user_namespace(path: str) -> None:
    """Get the rights over the lab's namespaces; nothing to do where they are ours already."""
    if os.stat(path).st_ino != os.stat("/proc/self/ns/user").st_ino:
        _enter(path, _CLONE_NEWUSER)


def _hurry() -> bool:
    """Ask to be run at once when a packet is due; returns whether that was granted."""
    gc.disable()
    with suppress(OSError), open("/proc/self/timerslack_ns", "w") as slack:
        slack.write("1")
    try:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    except OSError:
        with suppress(OSError):
            os.nice(-10)
        return False
    return True


def main(control: socket.socket) -> None:
    """Make the devices that the first message asks for, say so, and carry packets."""
    plan = json.loads(control.recv(65536))
    try:
        pumps = _make_pumps(plan)
    except OSError as problem:
        control.send(json.dumps({"error": problem.errno}).encode())
        return
    control.send(b"{}")
    with suppress(OSError):  # a device was removed, or the lab is gone: there is nothing to carry
        run(pumps, control)


def _make_pumps(plan: dict[str, Any]) -> list[Pump]:
    """One pump for each direction; this process is back in its own namespace where it may be."""
    home = os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        _join_user_namespace(plan["userns"])
        devices = [
            open_device(name, netns, is_tap=plan["is_tap"])
            for name, netns in zip(plan["devices"], plan["netns"], strict=True)
        ]
        with suppress(PermissionError):  # so that no namespace lives on for this process's sake
            _enter(f"/proc/self/fd/{home}", _CLONE_NEWNET)
    finally:
        os.close(home)
    wire = Wire(**plan["wire"])
    return [
        Pump(source, target, wire, seed)
        for source, target, seed in zip(devices, reversed(devices), plan["seeds"], strict=True)
    ]


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])))
