"""The event log: one file of JSON lines a rank, the source of truth for every view of a run.

``EventLog`` appends, ``read_events`` and ``read_run`` read what is there, ``follow`` reads a file
while it grows. An event is one ``write`` of whole lines, so events written before a process is
killed survive it, and a line that was torn (power lost, disk full) costs that line alone: the next
writer begins on a fresh line, and readers skip and count what they can't read. Nothing is forced to
the disk: events survive the process, not the machine.

A resumed run appends to the same files, so a step that was repeated after a crash is there twice.
:mod:`isthmus.observe.timeline` keeps the ones that count.
"""

from __future__ import annotations

import heapq
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from isthmus.errors import ConfigError, IsthmusError
from isthmus.observe.events import (
    Event,
    Notice,
    UnknownEventError,
    decode_event,
    encode_event,
)
from isthmus.observe.sinks import QueuedSink

Subscriber = Callable[[Event], None]
"""Called with each event right after it was written, on the writer's thread: it must be quick."""


def events_path(run_dir: Path, rank: int) -> Path:
    """Where a rank of a run writes its events."""
    return run_dir / "events" / f"rank-{rank:05d}.jsonl"


def lab_events_path(run_dir: Path) -> Path:
    """Where a lab that runs a run writes the faults that it makes."""
    return run_dir / "events" / "lab.jsonl"


class EventLog:
    """Appends events to one file.

    May be used from several threads and from signal handlers. A subscriber that raises is removed,
    and the log says so: a view must never end the run that it shows.

    Args:
        path: The file; made with its folders if missing, continued if not. One writer at a time.
        subscribers: Who else gets each event: a ``Display.handle``, a ``QueuedSink``.

    Raises:
        IsthmusError: The file can't be opened.
    """

    def __init__(self, path: Path, *, subscribers: Sequence[Subscriber] = ()) -> None:
        self.path = path
        self._subscribers = list(subscribers)
        self._given_once: set[str] = set()
        self._lock = threading.RLock()
        self._last: Event | None = None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            self._fd: int | None = os.open(path, flags, 0o666)
            self._is_torn = not _ends_with_newline(self._fd)
        except OSError as problem:
            raise _cannot_write(path, problem) from problem

    def emit(self, event: Event) -> None:
        """Write one event, then hand it to the subscribers.

        Raises:
            IsthmusError: The event could not be written, for example because the disk is full. The
                log can be used again once there is space; the event that failed is lost.
            ValueError: The log is closed.
        """
        key = event.once_key if isinstance(event, Notice) else ""
        with self._lock:
            if key in self._given_once:
                return
            self._write(encode_event(event))
            self._last = event
            if key:
                self._given_once.add(key)
            for subscriber in tuple(self._subscribers):
                try:
                    subscriber(event)
                except Exception as problem:  # a view never ends the run it shows
                    self._remove(subscriber, problem, event)

    def close(self, *, sink_timeout_s: float = 5.0) -> None:
        """Close the queued sinks among the subscribers, record what they lost, close the file.

        Args:
            sink_timeout_s: How long each of them may take to deliver what it still holds.
        """
        if self._fd is None:
            return
        sinks = [sink for sink in self._subscribers if isinstance(sink, QueuedSink)]
        self._subscribers = [other for other in self._subscribers if other not in sinks]
        try:
            for delivery in [sink.close(sink_timeout_s) for sink in sinks]:
                if not delivery.is_complete and self._last is not None:
                    self.emit(_notice_after(self._last, str(delivery)))
        finally:
            fd, self._fd = self._fd, None
            os.close(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _write(self, line: bytes) -> None:
        if self._fd is None:
            raise ValueError(f"the event log {self.path} is closed")
        if self._is_torn:
            line = b"\n" + line
        try:
            written = os.write(self._fd, line)
        except OSError as problem:
            raise _cannot_write(self.path, problem) from problem
        self._is_torn = written < len(line)
        if self._is_torn:
            problem = OSError(f"only {written} of {len(line)} bytes could be written; is it full?")
            raise _cannot_write(self.path, problem)

    def _remove(self, subscriber: Subscriber, problem: Exception, event: Event) -> None:
        self._subscribers.remove(subscriber)
        who = getattr(subscriber, "__qualname__", type(subscriber).__qualname__)
        what = f"{type(problem).__name__}: {problem}"
        self.emit(_notice_after(event, f"{who} failed and gets no more events ({what})"))


@dataclass(frozen=True)
class Reading:
    """Events read from a log.

    Attributes:
        events: In the order of their files; of several ranks merged by time.
        num_unknown: Lines skipped because their event type is not known to this version.
        num_damaged: Lines skipped because they are torn or are no events.
    """

    events: list[Event]
    num_unknown: int = 0
    num_damaged: int = 0


class EventTail:
    """Reads an event file while another process writes it; see :func:`follow`.

    Attributes:
        num_unknown: Lines skipped so far because their event type is not known to this version.
        num_damaged: Lines skipped so far because they are torn or are no events.
    """

    def __init__(self, path: Path, *, offset_nbytes: int = 0) -> None:
        self.path = path
        self.num_unknown = 0
        self.num_damaged = 0
        self._offset_nbytes = offset_nbytes
        self._unfinished = b""

    def poll(self) -> list[Event]:
        """Events that were completed since the last call; never waits.

        A file that does not exist yet has no events. A line without its newline is left for the
        next call.
        """
        try:
            with self.path.open("rb") as file:
                file.seek(self._offset_nbytes)
                data = file.read()
        except FileNotFoundError:
            return []
        self._offset_nbytes += len(data)
        *lines, self._unfinished = (self._unfinished + data).split(b"\n")
        return [event for line in lines if line and (event := self._decode(line)) is not None]

    def _decode(self, line: bytes) -> Event | None:
        try:
            return decode_event(line)
        except UnknownEventError:
            self.num_unknown += 1
        except (msgspec.DecodeError, UnicodeDecodeError):
            self.num_damaged += 1
        return None


def follow(path: Path, *, skip_existing: bool = False) -> EventTail:
    """Reads an event file from its beginning, or from its present end, as it grows.

    Args:
        path: The file; it may come into being later.
        skip_existing: Leave out what is there already: the earlier attempts of a resumed run.
    """
    offset_nbytes = path.stat().st_size if skip_existing and path.exists() else 0
    return EventTail(path, offset_nbytes=offset_nbytes)


def read_events(path: Path) -> Reading:
    """All events of one file, in the order in which they were written.

    A last line without its newline (a writer at work, or killed within a write) is left out.

    Raises:
        ConfigError: There is no such file.
    """
    if not path.is_file():
        raise ConfigError(
            f"there is no event log {path}",
            hint="give the run directory of `isthmus train`; it writes events/rank-*.jsonl there",
        )
    tail = follow(path)
    return Reading(tail.poll(), tail.num_unknown, tail.num_damaged)


def read_run(run_dir: Path) -> Reading:
    """All events of a run, the ranks (and a lab's faults) merged by time, each in its own order.

    Raises:
        ConfigError: There is no such directory, or it holds no event log.
    """
    if not run_dir.is_dir():
        raise ConfigError(f"there is no run directory {run_dir}", hint="check the path: ls runs/")
    paths = sorted((run_dir / "events").glob("rank-*.jsonl"))
    if not paths:
        raise ConfigError(
            f"{run_dir} holds no event log; expected events/rank-*.jsonl",
            hint="give the run directory of `isthmus train`, such as runs/NAME",
        )
    if lab_events_path(run_dir).is_file():
        paths.append(lab_events_path(run_dir))
    readings = [read_events(path) for path in paths]
    return Reading(
        list(heapq.merge(*(r.events for r in readings), key=lambda event: event.time_s)),
        sum(reading.num_unknown for reading in readings),
        sum(reading.num_damaged for reading in readings),
    )


def _ends_with_newline(fd: int) -> bool:
    nbytes = os.fstat(fd).st_size
    return nbytes == 0 or os.pread(fd, 1, nbytes - 1) == b"\n"


def _notice_after(event: Event, message: str) -> Notice:
    """A notice from the rank of ``event`` at its time: the log has no clock of its own."""
    return Notice(time_s=event.time_s, rank=event.rank, message=message)


def _cannot_write(path: Path, problem: OSError) -> IsthmusError:
    return IsthmusError(
        f"the event log {path} cannot be written: {problem.strerror or problem}",
        hint="free some space or mend its permissions; the same command then resumes the run",
    )
