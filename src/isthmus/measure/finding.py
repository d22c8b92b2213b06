"""What a check is, and what it finds.

A check looks at one thing and returns a finding: one line, and for anything but a pass one line
more that says what to do. ``examine`` runs a check so that nothing it does can end or hang the
caller.
"""

from __future__ import annotations

import dataclasses
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, Final, TypeAlias

from isthmus.errors import IsthmusError
from isthmus.measure.worker import Worker

Value: TypeAlias = str | int | float | bool | Sequence["Value"] | Mapping[str, "Value"] | None

UNEXPECTED: Final = "the check itself broke; run it again, and report it if it stays"


class Status(StrEnum):
    """What a finding means for a run."""

    PASS = "pass"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True)
class Finding:
    """What a check found.

    Attributes:
        status: FAIL if a run can't work here, WARN if it may disappoint.
        text: The finding in one line.
        hint: How to mend it; always there unless the status is PASS.
        values: What was measured or read, by names with units.
    """

    status: Status
    text: str
    hint: str = ""
    values: Mapping[str, Value] = field(default_factory=dict)


def passes(text: str, **values: Value) -> Finding:
    """Return a finding that all is well."""
    return Finding(Status.PASS, text, "", values)


def warns(text: str, hint: str, **values: Value) -> Finding:
    """Return a finding that a run may disappoint."""
    return Finding(Status.WARN, text, hint, values)


def fails(text: str, hint: str, **values: Value) -> Finding:
    """Return a finding that a run can't work here."""
    return Finding(Status.FAIL, text, hint, values)


def judged(text: str, trouble: Mapping[str, str], **values: Value) -> Finding:
    """Return a pass, or a warning with everything that is wrong.

    Args:
        text: The finding if nothing is wrong; what is wrong is added to it.
        trouble: What is wrong, each with its hint.
        values: What was measured or read.
    """
    if not trouble:
        return passes(text, **values)
    return warns("; ".join([text, *trouble]), "; ".join(trouble.values()), **values)


def plain(record: Any) -> dict[str, Value]:
    """Return a dataclass's fields as plain values, by name."""
    return dataclasses.asdict(record)


@dataclass
class Surroundings:
    """What checks look at: a context manager, since it keeps one child process for those on torch.

    Attributes:
        directory: The run directory, which need not exist.
        environ: The environment variables.
    """

    directory: Path
    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    _worker: Worker | None = None

    def __enter__(self) -> Surroundings:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def worker(self) -> Worker:
        """Return the child process for what needs torch; a new one if the last has ended."""
        if self._worker is None or not self._worker.alive:
            self.close()
            self._worker = Worker(self.environ)
        return self._worker

    def close(self) -> None:
        """End the child process, if there is one."""
        if self._worker is not None:
            self._worker.close()


@dataclass(frozen=True)
class Check:
    """One thing to look at.

    Attributes:
        name: One or two words.
        look: Looks, and says what it found; may raise.
        deadline_s: How long it may take.
        measures: Whether it loads the machine for a moment, where others only read.
        remedy: The hint if it ends in an error that has none.
    """

    name: str
    look: Callable[[Surroundings], Finding]
    deadline_s: float = 10.0
    measures: bool = False
    remedy: str = UNEXPECTED


def examine(check: Check, surroundings: Surroundings) -> Finding:
    """Run one check; whatever goes wrong becomes a finding.

    The check runs on a thread of its own. One that is stuck in a system call is left to itself; the
    thread does not keep the program from ending.
    """
    answer: list[Finding] = []

    def look() -> None:
        answer.append(_look(check, surroundings))

    thread = threading.Thread(target=look, name=f"check {check.name}", daemon=True)
    thread.start()
    thread.join(check.deadline_s)
    if answer:
        return answer[0]
    return fails(
        f"no answer within {check.deadline_s:g} s",
        "the machine may be overloaded, or a disk or a device may hang; look at it by hand",
    )


def _look(check: Check, surroundings: Surroundings) -> Finding:
    try:
        found = check.look(surroundings)
        return replace(found, text=_one_line(found.text), hint=_one_line(found.hint))
    except IsthmusError as error:
        return fails(_one_line(error.message), _one_line(error.hint) or check.remedy)
    except Exception as error:
        return fails(f"{type(error).__name__}: {_one_line(str(error))}".rstrip(": "), check.remedy)


def _one_line(text: str) -> str:
    return " ".join(text.split())
