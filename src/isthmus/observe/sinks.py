"""Sinks: other places that events go to, none of which can block or kill a step.

A logger that hangs because its server is away must cost the run nothing but its own lines. So a
sink never runs on the caller's thread: :class:`QueuedSink` hands events to a daemon thread through
a bounded queue. What does not fit, or what the sink fails on, is dropped and counted, and the event
log writes down the count when it closes. The event log itself is no sink: it is the source of
truth, written before anything here.

:class:`TensorBoardSink` uses the ``tensorboard`` package alone and never imports torch.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from isthmus.errors import ConfigError
from isthmus.observe.events import Event, RunStarted, Step, Validation


class Sink(Protocol):
    """Anything that takes events. It may be slow, raise or hang; see :class:`QueuedSink`."""

    def write(self, event: Event) -> None:
        """Take one event."""

    def close(self) -> None:
        """Finish what is pending and let go of files and connections."""


@dataclass(frozen=True)
class Delivery:
    """What became of the events handed to a sink.

    Attributes:
        sink: Name of the sink.
        num_delivered: Events that the sink took.
        num_dropped: Events that found the queue full, made the sink raise, or were still waiting
            when closing timed out.
        error: The last error the sink raised, or that it hung; empty if neither.
    """

    sink: str
    num_delivered: int
    num_dropped: int
    error: str

    @property
    def is_complete(self) -> bool:
        """Whether the sink took everything and closed cleanly."""
        return not self.num_dropped and not self.error

    def __str__(self) -> str:
        total = self.num_delivered + self.num_dropped
        sentence = f"{self.sink} lost {self.num_dropped} of {total} events"
        return f"{sentence}: {self.error}" if self.error else sentence


class QueuedSink:
    """Runs a sink behind a bounded queue on a daemon thread; subscribe it to an event log.

    Args:
        sink: Where the events go. After this call only the thread touches it.
        capacity: Events that may wait; the next one is dropped.
        name: What to call it in messages; the class of the sink by default.
    """

    def __init__(self, sink: Sink, *, capacity: int = 1024, name: str = "") -> None:
        if capacity < 1:
            raise ValueError(f"capacity is {capacity}; expected at least 1")
        self.name = name or type(sink).__name__
        self._sink = sink
        self._queue: queue.Queue[Event | None] = queue.Queue(capacity)
        self._num_offered = 0
        self._num_delivered = 0
        self._error = ""
        self._abandoned = False
        self._delivery: Delivery | None = None
        self._worker = threading.Thread(target=self._drain, name=f"sink-{self.name}", daemon=True)
        self._worker.start()

    def __call__(self, event: Event) -> None:
        """Hand over one event; returns at once and never raises, whatever the sink does."""
        if self._delivery is not None:
            return
        self._num_offered += 1
        try:
            self._queue.put_nowait(event)
        except queue.Full:
            self._error = self._error or "the queue was full"

    def close(self, timeout_s: float) -> Delivery:
        """Deliver what is waiting, close the sink, and say what was lost.

        Args:
            timeout_s: How long to wait in all; a sink that hangs longer is abandoned.
        """
        if self._delivery is None:
            self._delivery = self._close(timeout_s)
        return self._delivery

    def _close(self, timeout_s: float) -> Delivery:
        deadline_s = time.monotonic() + timeout_s
        try:
            self._queue.put(None, timeout=timeout_s)
            self._worker.join(max(0.0, deadline_s - time.monotonic()))
        except queue.Full:
            pass
        if self._worker.is_alive():
            self._abandoned = True
            self._error = f"did not finish within {timeout_s:g} s"
        num_delivered = self._num_delivered
        num_dropped = self._num_offered - num_delivered
        return Delivery(self.name, num_delivered, num_dropped, self._error)

    def _drain(self) -> None:
        while not self._abandoned and (event := self._queue.get()) is not None:
            try:
                self._sink.write(event)
                self._num_delivered += 1
            except Exception as problem:  # whatever a sink raises stays here
                self._error = f"{type(problem).__name__}: {problem}"
        try:
            self._sink.close()
        except Exception as problem:
            self._error = f"{type(problem).__name__}: {problem}"


class TensorBoardSink:
    """Writes steps and validations as TensorBoard scalars.

    A resumed run appends to the same directory and tells TensorBoard which steps it repeats, so
    that curves show each step once.

    Args:
        directory: Where the event files go; made if missing.

    Raises:
        ConfigError: The ``tensorboard`` package is not installed.
    """

    def __init__(self, directory: Path) -> None:
        try:
            from tensorboard.compat.proto import event_pb2, summary_pb2
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        except ImportError as problem:
            raise ConfigError(
                f"the TensorBoard sink needs the tensorboard package ({problem})",
                hint="pip install 'isthmus[tensorboard]', or turn the sink off",
            ) from None
        self._events: Any = event_pb2
        self._summaries: Any = summary_pb2
        self._writer = EventFileWriter(str(directory))

    def write(self, event: Event) -> None:
        """Take one event; those that hold no scalars are passed over."""
        if isinstance(event, RunStarted):
            restart = self._events.SessionLog(status=self._events.SessionLog.START)
            self._add(event, event.start_step + 1, session_log=restart)
        elif isinstance(event, Step | Validation):
            values = [
                self._summaries.Summary.Value(tag=tag, simple_value=value)
                for tag, value in _scalars(event)
            ]
            self._add(event, event.step, summary=self._summaries.Summary(value=values))

    def close(self) -> None:
        """Flush and close the file."""
        self._writer.close()

    def _add(self, event: Event, step: int, **content: Any) -> None:
        self._writer.add_event(self._events.Event(wall_time=event.time_s, step=step, **content))


def _scalars(event: Step | Validation) -> Iterator[tuple[str, float]]:
    """The numbers of an event, each with the tag TensorBoard groups and shows it by."""
    if isinstance(event, Validation):
        yield "validation/loss_nats", event.loss_nats
        if event.bits_per_byte is not None:
            yield "validation/bits_per_byte", event.bits_per_byte
        return
    yield "train/loss_nats", event.loss_nats
    yield "train/grad_norm", event.grad_norm
    yield "train/learning_rate", event.learning_rate
    yield "speed/step_time_s", event.step_time_s
    yield "speed/communication_time_s", event.communication_time_s
    yield "speed/sent_nbytes", event.sent_nbytes
    if event.step_time_s > 0:
        yield "speed/tokens_per_s", event.tokens / event.step_time_s
    if event.mfu is not None:
        yield "speed/mfu", event.mfu
