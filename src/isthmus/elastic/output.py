"""What ranks print, line by line: forwarded at once, and the last lines of stderr kept.

Each rank writes into two pipes. Reading never blocks; a line that is not finished is held back
until it is, or until its rank has ended.
"""

from __future__ import annotations

import os
import selectors
from collections import deque
from collections.abc import Callable
from typing import IO, Final, Literal

__all__ = ["OutputReader", "Stream"]

Stream = Literal["stdout", "stderr"]

_CHUNK_NBYTES: Final = 1 << 16
_MOST_CHUNKS: Final = 256
_LONGEST_LINE_NBYTES: Final = 1 << 16


class OutputReader:
    """Reads the pipes of all ranks and hands each complete line to ``on_line``.

    Args:
        on_line: Called with the rank, the stream and the line, without its end.
        keep_lines: How many last lines of each rank's stderr are kept.
    """

    def __init__(
        self, on_line: Callable[[int, Stream, str], None], *, keep_lines: int = 40
    ) -> None:
        self._on_line = on_line
        self._keep_lines = keep_lines
        self._selector = selectors.DefaultSelector()
        self._unfinished: dict[tuple[int, Stream], bytes] = {}
        self._tails: dict[int, deque[str]] = {}

    def add(self, rank: int, stream: Stream, pipe: IO[bytes]) -> None:
        """Read a pipe from now on; it is closed here."""
        os.set_blocking(pipe.fileno(), False)
        self._selector.register(pipe, selectors.EVENT_READ, (rank, stream))
        self._unfinished[rank, stream] = b""

    def tail(self, rank: int) -> str:
        """Return the last lines of a rank's stderr."""
        return "\n".join(self._tails.get(rank, ()))

    def poll(self, timeout_s: float) -> bool:
        """Read what is there, waiting at most ``timeout_s`` for something; return if there was."""
        ready = self._selector.select(timeout_s)
        for key, _ in ready:
            rank, stream = key.data
            data = self._read(key.fd)
            if data:
                self._take(rank, stream, data)
            elif data == b"":
                self._finish(rank, stream)
                self._selector.unregister(key.fileobj)
                key.fileobj.close()  # type: ignore[union-attr]
        return bool(ready)

    def drain(self) -> None:
        """Read what has been written so far; a rank that goes on writing does not hold it up."""
        for _ in range(_MOST_CHUNKS):
            if not self.poll(0):
                return

    def close(self) -> None:
        """Read what is left without waiting for an end (a rank's child may hold the pipe open)."""
        self.drain()
        for key in list(self._selector.get_map().values()):
            self._finish(*key.data)
            self._selector.unregister(key.fileobj)
            key.fileobj.close()  # type: ignore[union-attr]
        self._selector.close()

    def _read(self, descriptor: int) -> bytes | None:
        try:
            return os.read(descriptor, _CHUNK_NBYTES)
        except BlockingIOError:
            return None

    def _take(self, rank: int, stream: Stream, data: bytes) -> None:
        *lines, rest = (self._unfinished[rank, stream] + data).split(b"\n")
        if len(rest) > _LONGEST_LINE_NBYTES:
            lines, rest = [*lines, rest], b""
        self._unfinished[rank, stream] = rest
        for line in lines:
            self._emit(rank, stream, line)

    def _finish(self, rank: int, stream: Stream) -> None:
        rest = self._unfinished.pop((rank, stream), b"")
        if rest:
            self._emit(rank, stream, rest)

    def _emit(self, rank: int, stream: Stream, line: bytes) -> None:
        text = line.decode(errors="replace").rstrip("\r")
        if stream == "stderr":
            self._tails.setdefault(rank, deque(maxlen=self._keep_lines)).append(text)
        self._on_line(rank, stream, text)
