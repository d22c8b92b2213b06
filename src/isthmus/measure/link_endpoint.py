"""One end of a measured link: a program of its own that runs in a host.

:mod:`isthmus.measure.links` starts this file in every host that takes part, so it uses the standard
library alone and needs nothing of isthmus there. It takes requests, one JSON object a line, from
its stdin, and answers on stdout; several may be under way. It ends with its stdin.

Every endpoint is a target: a TCP port that swallows streams and says how fast they came, and a UDP
port that sends each packet back. The receiver measures a stream, with its own clock alone, so the
clocks of hosts need not agree. A window of measurement begins and ends with an arrival: what came
after the first arrival, up to and with the last, over the time between the two. So packets that
arrive in lumps, as segmentation offload makes them, don't count as a fraction of a lump.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

CHUNK_NBYTES = 1 << 18
_PROBE = struct.Struct("!QQQQ")
"""A probe: who sent it, its number, its time in ns, and how many of that sender had arrived."""
_NO_LINGER = struct.pack("ii", 1, 0)
_MSG_TRUNC = getattr(socket, "MSG_TRUNC", 0)
"""On Linux a stream's bytes are dropped inside the kernel instead of being copied out."""
_ECHO_SENDERS_KEPT = 64


class Rates:
    """Goodput of a stream, window after window; knows no socket and no clock.

    Args:
        warm_up_s: Time after the first arrival before the first window may begin.
        window_s: Shortest length of a window; it ends with the first arrival after that.
        windows: How many.
    """

    def __init__(self, warm_up_s: float, window_s: float, windows: int) -> None:
        self._warm_up_s = warm_up_s
        self._window_s = window_s
        self._windows = windows
        self._opens_at_s = math.inf
        self._began_at_s: float | None = None
        self._nbytes = 0
        self.bytes_per_s: list[float] = []

    @property
    def complete(self) -> bool:
        """Whether all windows have passed."""
        return len(self.bytes_per_s) == self._windows

    def arrived(self, now_s: float, nbytes: int) -> None:
        """Take note of an arrival."""
        if self._opens_at_s == math.inf:
            self._opens_at_s = now_s + self._warm_up_s
        if self._began_at_s is None:
            if now_s >= self._opens_at_s:
                self._began_at_s = now_s
            return
        self._nbytes += nbytes
        elapsed_s = now_s - self._began_at_s
        if elapsed_s >= self._window_s and not self.complete:
            self.bytes_per_s.append(self._nbytes / elapsed_s)
            self._began_at_s, self._nbytes = now_s, 0


def receive_stream(stream: socket.socket) -> None:
    """Swallow a stream, and answer with its rates when the windows that it asks for are full."""
    with stream:
        asked = json.loads(_line(stream))
        rates = Rates(asked["warm_up_s"], asked["window_s"], asked["windows"])
        stream.settimeout(asked["stall_s"])
        buffer = bytearray(CHUNK_NBYTES)
        while not rates.complete:
            nbytes = stream.recv_into(buffer, CHUNK_NBYTES, _MSG_TRUNC)
            if nbytes == 0:
                return
            rates.arrived(time.monotonic(), nbytes)
        stream.sendall(json.dumps(rates.bytes_per_s).encode() + b"\n")
        # The sender hangs up when it has this answer; until then its stream is still swallowed.
        with contextlib.suppress(OSError):
            while stream.recv_into(buffer, CHUNK_NBYTES, _MSG_TRUNC):
                pass


def send_stream(
    source: str,
    target: tuple[str, int],
    *,
    warm_up_s: float,
    window_s: float,
    windows: int,
    stall_s: float,
) -> list[float]:
    """Send as fast as the network takes it until the receiver says how fast that was.

    Args:
        source: Own address to send from.
        target: Address and TCP port of the other endpoint.
        warm_up_s: Time before the first window.
        window_s: Length of one.
        windows: How many.
        stall_s: How long nothing may pass.

    Returns:
        Payload bytes per second in each window.
    """
    asked = {"warm_up_s": warm_up_s, "window_s": window_s, "windows": windows, "stall_s": stall_s}
    with socket.create_connection(target, timeout=stall_s, source_address=(source, 0)) as stream:
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
        stream.sendall(json.dumps(asked).encode() + b"\n")
        stream.setblocking(False)
        poll = select.poll()
        poll.register(stream, select.POLLIN | select.POLLOUT)
        chunk, answer = bytes(CHUNK_NBYTES), b""
        while not answer.endswith(b"\n"):
            ready = poll.poll(stall_s * 1e3)
            if not ready:
                raise TimeoutError(f"nothing could be sent for {stall_s:g} s")
            if ready[0][1] & ~select.POLLOUT:
                part = stream.recv(4096)
                if not part:
                    raise ConnectionResetError("the receiver hung up")
                answer += part
            else:
                with contextlib.suppress(BlockingIOError):
                    stream.send(chunk)
        return json.loads(answer)


def send_probes(
    source: str, target: tuple[str, int], *, count: int, interval_s: float, wait_s: float
) -> dict[str, Any]:
    """Send small packets at an even pace and time those that come back.

    Args:
        source: Own address to send from.
        target: Address and UDP port of the other endpoint.
        count: Packets.
        interval_s: Time between two.
        wait_s: How long to wait for the last ones.

    Returns:
        ``rtts_s`` of those that came back; and of the packets up to the last that did: how many
        were ``sent``, and how many of these had ``arrived`` and had been ``returned``.
    """
    sender = int.from_bytes(os.urandom(8))
    with _udp(source) as probe:
        probe.connect(target)
        echoes = Echoes(probe)
        begin_s = time.monotonic()
        for number in range(count):
            echoes.gather(begin_s + number * interval_s)
            # A port that is not there yet refuses: that packet is lost like any other.
            with contextlib.suppress(ConnectionRefusedError, BlockingIOError):
                probe.send(_PROBE.pack(sender, number, time.monotonic_ns(), 0))
        echoes.gather(time.monotonic() + wait_s, enough=count)
    return {
        "rtts_s": list(echoes.rtts_s.values()),
        "sent": max(echoes.rtts_s, default=-1) + 1,
        "arrived": echoes.arrived,
        "returned": len(echoes.rtts_s),
    }


class Echoes:
    """Collects the probes that come back to a socket."""

    def __init__(self, probe: socket.socket) -> None:
        self._probe = probe
        self.rtts_s: dict[int, float] = {}
        self.arrived = 0

    def gather(self, until_s: float, enough: int | None = None) -> None:
        """Take what comes until a time, or until so many have come in all."""
        while len(self.rtts_s) != enough and (left_s := until_s - time.monotonic()) > 0:
            if select.select([self._probe], [], [], left_s)[0]:
                with contextlib.suppress(BlockingIOError, ConnectionRefusedError):
                    self._take(self._probe.recv(2048))

    def _take(self, packet: bytes) -> None:
        _, number, sent_ns, arrived = _PROBE.unpack(packet)
        self.rtts_s.setdefault(number, (time.monotonic_ns() - sent_ns) / 1e9)
        self.arrived = max(self.arrived, arrived)


class Echo:
    """Returns probes, each with how many of its sender's had arrived by then."""

    def __init__(self) -> None:
        self._arrived: dict[int, int] = {}

    def answer(self, packet: bytes) -> bytes:
        """The packet to send back."""
        sender, number, sent_ns, _ = _PROBE.unpack(packet)
        if sender not in self._arrived and len(self._arrived) == _ECHO_SENDERS_KEPT:
            del self._arrived[next(iter(self._arrived))]
        self._arrived[sender] = self._arrived.get(sender, 0) + 1
        return _PROBE.pack(sender, number, sent_ns, self._arrived[sender])


def serve(address: str) -> dict[str, int]:
    """Open the two ports on an address and serve them for as long as the process lives."""
    listener = socket.create_server((address, 0), family=_family(address), backlog=64)
    echo_socket = _udp(address)

    def accept() -> None:
        while True:
            stream, _ = listener.accept()
            _in_thread(partial(_unless_broken, receive_stream, stream))

    def return_probes() -> None:
        echo = Echo()
        while True:
            packet, sender = echo_socket.recvfrom(2048)
            if len(packet) == _PROBE.size:
                with contextlib.suppress(OSError):
                    echo_socket.sendto(echo.answer(packet), sender)

    echo_socket.setblocking(True)
    _in_thread(accept)
    _in_thread(return_probes)
    return {"tcp": listener.getsockname()[1], "udp": echo_socket.getsockname()[1]}


OPERATIONS: dict[str, Callable[..., Any]] = {
    "serve": serve,
    "stream": lambda source, target, **how: send_stream(source, tuple(target), **how),
    "probe": lambda source, target, **how: send_probes(source, tuple(target), **how),
}


def main() -> None:
    """Answer requests from stdin until it ends: ``{"id": 1, "do": "serve", "with": {...}}``."""
    write = threading.Lock()

    def answer(request: dict[str, Any]) -> None:
        try:
            found = {"found": OPERATIONS[request["do"]](**request["with"])}
        except (OSError, ValueError) as error:
            found = {"error": str(error) or type(error).__name__}
        with write:
            sys.stdout.write(json.dumps({"id": request["id"], **found}) + "\n")
            sys.stdout.flush()

    for line in sys.stdin:
        _in_thread(partial(answer, json.loads(line)))
    os._exit(0)  # without waiting for streams under way


def _unless_broken(serve_one: Callable[[socket.socket], None], stream: socket.socket) -> None:
    with contextlib.suppress(OSError, ValueError):  # its sender knows, and says so
        serve_one(stream)


def _in_thread(work: Callable[[], object]) -> None:
    threading.Thread(target=work, daemon=True).start()


def _line(stream: socket.socket) -> bytes:
    """The bytes up to the first newline, and none beyond."""
    line = b""
    while not line.endswith(b"\n") and len(line) < 4096:
        part = stream.recv(1)
        if not part:
            break
        line += part
    return line


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def _udp(address: str) -> socket.socket:
    udp = socket.socket(_family(address), socket.SOCK_DGRAM)
    udp.bind((address, 0))
    udp.setblocking(False)
    return udp


if __name__ == "__main__":
    main()
