"""Plays faults on a running cluster and writes down what happened.

``Schedule`` is the pure part: (state, time, step) -> changes. It knows no clock, so tests drive it
in virtual time. ``FaultPlayer`` gives it the real clock and a run's steps, has the changes carried
out through ``Actions``, which the lab's cluster implements, and records each one in an event log.

Faults may overlap. Each is an override of a knob, and the override that began last among those in
force decides: a link that two faults took down is up when both have ended, or when a ``link_up``
ends them all.
"""

from __future__ import annotations

import heapq
import itertools
import math
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from isthmus.errors import ConfigError, IsthmusError
from isthmus.lab.knobs import Actions, Knob, Move, Override, Reset, Signal
from isthmus.lab.timeline import Fault
from isthmus.observe import EventLog, EventTail, FaultInjected, Step, follow

LAB_RANK = -1
"""The rank that a lab's events carry: the lab is none of the run's ranks."""
_STEP_POLL_S = 0.02


@dataclass(frozen=True)
class Change:
    """Something that happens now.

    Attributes:
        fault: The fault that it is part of.
        move: The part.
        is_end: Whether the part ends now, rather than begins.
        value: What the knob is from now on; None as declared. Of a signal: its number.
        is_new: Whether that differs from before; if not, another fault had the same effect.
    """

    fault: Fault
    move: Move
    value: Any
    is_end: bool = False
    is_new: bool = True


@dataclass(order=True)
class _Due:
    at_s: float
    order: int
    fault: Fault = field(compare=False)
    move: Move = field(compare=False)
    is_end: bool = field(compare=False)


class Schedule:
    """Faults in the order of their time, and what is in force at present.

    Args:
        faults: The faults of a timeline; times count from zero.
    """

    def __init__(self, faults: Iterable[Fault] = ()) -> None:
        self._order = itertools.count()
        self._due: list[_Due] = []
        self._by_step: list[Fault] = []
        self._in_force: dict[Knob, list[Override]] = {}
        for fault in faults:
            self.add(fault, 0.0)

    @property
    def next_due_s(self) -> float:
        """When the next change is due; infinity if none is, though steps may bring some."""
        return self._due[0].at_s if self._due else math.inf

    @property
    def waits_for_steps(self) -> bool:
        """Whether faults are left that a training step has to bring."""
        return bool(self._by_step)

    def value(self, knob: Knob) -> Any:
        """What a knob is at present; None as declared."""
        in_force = self._in_force.get(knob)
        return in_force[-1].value if in_force else None

    def add(self, fault: Fault, now_s: float) -> None:
        """Take one more fault; the time that it names counts from ``now_s``."""
        if fault.at_step is None:
            self._begin(fault, now_s + (fault.at_s or 0.0))
        else:
            self._by_step.append(fault)

    def see_step(self, step: int, now_s: float) -> None:
        """Let the faults begin that were waiting for this step or an earlier one."""
        reached = [fault for fault in self._by_step if (fault.at_step or 0) <= step]
        self._by_step = [fault for fault in self._by_step if fault not in reached]
        for fault in sorted(reached, key=lambda fault: fault.at_step or 0):
            self._begin(fault, now_s)

    def take_due(self, now_s: float) -> Change | None:
        """The next change whose time has come; None if there is none. It is in force from here."""
        while self._due and self._due[0].at_s <= now_s:
            due = heapq.heappop(self._due)
            change = self._apply(due)
            if change is not None:
                return change
        return None

    def _begin(self, fault: Fault, at_s: float) -> None:
        for move in fault.moves():
            begins_s = move.begins_s if isinstance(move, Override) else 0.0
            self._push(at_s + begins_s, fault, move, is_end=False)

    def _push(self, at_s: float, fault: Fault, move: Any, *, is_end: bool) -> None:
        heapq.heappush(self._due, _Due(at_s, next(self._order), fault, move, is_end))

    def _apply(self, due: _Due) -> Change | None:
        move = due.move
        if isinstance(move, Signal):
            return Change(due.fault, move, value=move.number)
        before = self.value(move.knob)
        in_force = self._in_force.setdefault(move.knob, [])
        if isinstance(move, Reset):
            in_force.clear()
        elif not due.is_end:
            in_force.append(move)
            if move.ends_s < math.inf:
                ends_s = due.at_s + move.ends_s - move.begins_s
                self._push(ends_s, due.fault, move, is_end=True)
        elif not _remove(in_force, move):
            return None  # a reset has ended it before its time
        value = self.value(move.knob)
        is_new = value != before
        return Change(due.fault, move, value=value, is_end=due.is_end, is_new=is_new)


def _remove(overrides: list[Override], move: Override) -> bool:
    """Takes out this very override: an equal one of another fault may be in force as well."""
    for index, override in enumerate(overrides):
        if override is move:
            del overrides[index]
            return True
    return False


class FaultPlayer:
    """Plays a timeline and faults given by hand, in a thread of its own.

    A fault that can't be carried out is recorded with its error, kept in ``problems``, and does not
    hold up the others: whoever owns the lab has to say so in the end. Use it as a context manager
    around the command; what is in force when it closes stays so.

    Args:
        actions: The cluster.
        log: Where to record what happens.
        faults: A timeline's faults.
        steps: Event log of rank 0 of the run, for faults that wait for a step; it need not exist.
        clock: Seconds that never jump; times of the timeline count from the start of the player.
        wall_clock: Seconds since the Unix epoch.

    Raises:
        ConfigError: A fault waits for a training step, and no ``steps`` are given.
    """

    def __init__(
        self,
        actions: Actions,
        log: EventLog,
        faults: Iterable[Fault] = (),
        *,
        steps: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self.problems: list[str] = []
        self._actions = actions
        self._log = log
        self._tail: EventTail | None = follow(steps, skip_existing=True) if steps else None
        for fault in (faults := tuple(faults)):
            self._refuse_unknown_steps(fault)
        self._schedule = Schedule(faults)
        self._clock = clock
        self._wall_clock = wall_clock
        self._started_s = clock()
        self._step: int | None = None
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._is_closed = False
        self._thread = threading.Thread(target=self._play, name="isthmus-faults", daemon=True)

    def start(self) -> None:
        """Begin: the time of the timeline is zero now."""
        self._started_s = self._clock()
        self.poll()
        self._thread.start()

    def inject(self, fault: Fault) -> None:
        """Take one more fault, whose time counts from now; one without a time is made at once.

        Raises:
            ConfigError: It waits for a training step, and no run's steps are known.
            IsthmusError: It could not be made.
        """
        self._refuse_unknown_steps(fault)
        with self._lock:
            num_before = len(self.problems)
            self._schedule.add(fault, self._now_s())
            self._carry_out("command")
            failed = self.problems[num_before:]
        self._wake.set()
        if failed:
            raise IsthmusError(failed[0])

    def poll(self) -> float:
        """Carry out what is due; returns the seconds until something may be due again."""
        with self._lock:
            if self._tail is not None and self._schedule.waits_for_steps:
                for event in self._tail.poll():
                    if isinstance(event, Step):
                        self._step = event.step
                        self._schedule.see_step(event.step, self._now_s())
            self._carry_out("timeline")
            wait_s = self._schedule.next_due_s - self._now_s()
            return min(wait_s, _STEP_POLL_S) if self._schedule.waits_for_steps else wait_s

    def close(self) -> None:
        """Stop playing. Does nothing the second time."""
        self._is_closed = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _now_s(self) -> float:
        return self._clock() - self._started_s

    def _play(self) -> None:
        while not self._is_closed:
            wait_s = self.poll()
            self._wake.wait(None if wait_s == math.inf else max(0.0, wait_s))
            self._wake.clear()

    def _carry_out(self, cause: str) -> None:
        while (change := self._schedule.take_due(self._now_s())) is not None:
            error = ""
            if change.is_new:
                try:
                    carry_out(change, self._actions)
                except Exception as problem:  # whatever it is, the next fault has its time too
                    error = str(problem) or type(problem).__name__
                    self.problems.append(f"the fault {_kind(change.fault)} failed: {error}")
            try:
                self._log.emit(self._event(change, cause, error))
            except IsthmusError as problem:
                self.problems.append(problem.message)

    def _refuse_unknown_steps(self, fault: Fault) -> None:
        if fault.at_step is not None and self._tail is None:
            raise ConfigError(
                f"the fault {_kind(fault)} waits for step {fault.at_step}, but the lab follows no "
                "run whose steps it could count",
                hint='give it a time (at = "5 s"), or let the lab start the run with --train RUN',
            )

    def _event(self, change: Change, cause: str, error: str) -> FaultInjected:
        move = change.move
        if isinstance(move, Signal):
            target, value = move.host, move.number.name
        else:
            target, value = move.knob.target, move.knob.describe(change.value)
        return FaultInjected(
            time_s=self._wall_clock(),
            rank=LAB_RANK,
            fault=_kind(change.fault),
            target=target,
            value=value,
            is_end=change.is_end,
            since_start_s=self._now_s(),
            step=self._step,
            cause=cause,
            error=error,
        )


def carry_out(change: Change, actions: Actions) -> None:
    """Have a change made by the cluster."""
    if isinstance(change.move, Signal):
        actions.signal(change.move.host, change.move.number)
    else:
        change.move.knob.turn(actions, change.value)


def _kind(fault: Fault) -> str:
    return str(getattr(fault, "kind", type(fault).__name__))
