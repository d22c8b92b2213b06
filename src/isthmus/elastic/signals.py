"""Stopping on request: a signal is noted, and the training loop looks at the note between steps.

A signal reaches the ranks at different moments, or only one of them, and a rank that stops one step
before its peers leaves them waiting in a collective. So the note is only this rank's; the ranks
agree on it beside what they exchange each step anyway (:mod:`isthmus.train.agreement`).
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from types import FrameType, TracebackType
from typing import Any, Final, Self

__all__ = ["STOP_SIGNALS", "StopRequest"]

STOP_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
"""SIGUSR1 is what SLURM is commonly asked to send before it pre-empts (``--signal=USR1@120``)."""

_SAME_KEY_PRESS_S: Final = 0.5
"""Wrappers forward the SIGINT that the terminal has already sent to the whole process group."""


class StopRequest:
    """Catches the signals that ask a run to stop; a context manager for the main thread.

    A second Ctrl-C is no request but an order: it raises KeyboardInterrupt.
    """

    def __init__(
        self,
        signals: Sequence[signal.Signals] = STOP_SIGNALS,
        *,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._signals = tuple(signals)
        self._clock_s = clock_s
        self._first: signal.Signals | None = None
        self._first_at_s = 0.0
        self._before: dict[signal.Signals, Any] = {}

    @property
    def requested(self) -> str | None:
        """The name of the first signal that asked to stop, or None."""
        return None if self._first is None else self._first.name

    def __enter__(self) -> Self:
        for number in self._signals:
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        while self._before:
            number, handler = self._before.popitem()
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        now_s = self._clock_s()
        if self._first is None:
            self._first, self._first_at_s = signal.Signals(number), now_s
        elif number == signal.SIGINT and now_s - self._first_at_s > _SAME_KEY_PRESS_S:
            raise KeyboardInterrupt
