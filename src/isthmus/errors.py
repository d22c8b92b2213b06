"""Every error that isthmus raises on purpose, and the exit code that each one gives a command.

The tree::

    IsthmusError                1   something failed while running
    ├── ConfigError             2   what was asked for cannot be done as asked
    │   └── DataError           2   the data are missing, empty or not what they were
    ├── CheckpointError         1   a checkpoint could not be written or trusted
    ├── LaunchError             1   ranks could not be started or could not meet
    └── RankFailedError         1   a rank failed; ``error.json`` has its traceback
    Interrupted                75   stopped on request after a checkpoint; the same command goes on

A second Ctrl-C ends a command at once, with 130 as shells have it.

An error says what happened and what was expected (``message``) and how to mend it (``hint``).
The command line prints both and never a traceback for these.
"""

from __future__ import annotations

from typing import ClassVar, Final

EXIT_OK: Final = 0
EXIT_FAILED: Final = 1
EXIT_BAD_INPUT: Final = 2
EXIT_INTERRUPTED: Final = 75
"""EX_TEMPFAIL of sysexits.h: run the same command again and it goes on where it stopped."""


class IsthmusError(Exception):
    """Base of all errors raised on purpose.

    Args:
        message: What happened, and what was expected.
        hint: How to mend it; empty if there is nothing to say.
    """

    exit_code: ClassVar[int] = EXIT_FAILED

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        if hint:
            self.add_note(f"hint: {hint}")  # shown below a traceback, in anybody's own program

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.message, self.hint))


def _rebuild(kind: type[IsthmusError], message: str, hint: str) -> IsthmusError:
    return kind(message, hint=hint)


class ConfigError(IsthmusError):
    """What was asked for is wrong or cannot be done as asked."""

    exit_code = EXIT_BAD_INPUT


class DataError(ConfigError):
    """The training data are missing, empty, or not those that the run began with."""


class CheckpointError(IsthmusError):
    """A checkpoint could not be written, or could not be trusted."""


class LaunchError(IsthmusError):
    """Ranks could not be started, or could not meet."""


class RankFailedError(IsthmusError):
    """A rank failed; the first failure is the one reported."""


class Interrupted(IsthmusError):  # noqa: N818 - not a failure: the run was asked to stop
    """The run was asked to stop, wrote a checkpoint and stopped."""

    exit_code = EXIT_INTERRUPTED
