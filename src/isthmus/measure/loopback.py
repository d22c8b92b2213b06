"""Throughput of one TCP connection over the loopback interface.

What ranks on one machine can exchange through sockets, and how busy the machine is: one thread
sends, one receives, nothing else is done. Of the kernel's copying, not of any network.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from typing import Final

from isthmus.measure.timing import Sample

_CHUNK_NBYTES: Final = 1 << 20


def loopback_throughput_bytes_per_s(
    *, rounds: int = 5, round_s: float = 0.05, deadline_s: float = 5.0
) -> Sample:
    """Measure the bytes that arrive per second, several times over one connection.

    One more round goes before, to warm the connection up, and is not counted.

    Args:
        rounds: How many times.
        round_s: Length of one; the whole takes about ``(rounds + 1) * round_s``.
        deadline_s: How long a single send or receive may stand still.

    Raises:
        OSError: If the loopback interface does not carry data (TimeoutError past the deadline).
    """
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        listener.settimeout(deadline_s)
        sender = stack.enter_context(
            socket.create_connection(listener.getsockname(), timeout=deadline_s)
        )
        receiver = stack.enter_context(listener.accept()[0])
        receiver.settimeout(deadline_s)
        thread = threading.Thread(target=_send_until_closed, args=(sender,), daemon=True)
        thread.start()
        # Called before the sockets are closed: the sender sees the end and returns.
        stack.callback(thread.join, deadline_s)
        stack.callback(_hang_up, receiver)
        rates = [_receive(receiver, round_s) for _ in range(rounds + 1)]
    return Sample.of(rates[1:])


def _receive(receiver: socket.socket, duration_s: float) -> float:
    buffer = bytearray(_CHUNK_NBYTES)
    received, begin_s = 0, time.perf_counter()
    while (elapsed_s := time.perf_counter() - begin_s) < duration_s:
        count = receiver.recv_into(buffer)
        if count == 0:
            raise ConnectionResetError("the loopback connection ended by itself")
        received += count
    return received / elapsed_s


def _send_until_closed(sender: socket.socket) -> None:
    chunk = bytes(_CHUNK_NBYTES)
    with contextlib.suppress(OSError):
        while True:
            sender.sendall(chunk)


def _hang_up(receiver: socket.socket) -> None:
    """Close with a reset, so that a sender that waits for room in the buffers wakes up."""
    linger_none = b"\x01\x00\x00\x00\x00\x00\x00\x00"
    receiver.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger_none)
    receiver.close()
