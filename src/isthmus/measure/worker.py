"""A child process that does for us what may hang, crash or change the process that it runs in.

``with Worker() as worker: worker.call(10, function, *arguments)``. The function and what
it returns travel pickled over a socket pair, so the function must be importable. The child starts
without torch; a function that needs it imports it once, and later calls find it there.

Nothing is left behind: a call that passes its deadline kills the child, ``close`` ends it, and the
child ends itself when its parent is gone or when a call outlives its deadline.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from types import TracebackType
from typing import Any, Final, ParamSpec, Self, TypeVar, cast

from isthmus.errors import IsthmusError, LaunchError, RankFailedError

P = ParamSpec("P")
T = TypeVar("T")

OWN_END_S: Final = 5.0
"""How long after a call's deadline the child ends itself, if nobody has ended it before."""
_CHILD: Final = f"""
import sys
sys.path.append({str(Path(__file__).parents[2])!r})
from isthmus.measure.worker import serve
serve(*map(int, sys.argv[1:]))
"""
"""The path comes last, so that nothing beside isthmus can hide a standard module."""


class Worker:
    """A running child; a context manager.

    Args:
        environ: Its environment; by default this process's.
        keep_fds: File descriptors that it inherits, by the same numbers.
    """

    def __init__(
        self, environ: Mapping[str, str] | None = None, *, keep_fds: Sequence[int] = ()
    ) -> None:
        self._connection, theirs = Pipe()
        lifeline, self._lifeline = os.pipe()
        self._complaints = tempfile.TemporaryFile()  # noqa: SIM115 - closed by close()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _CHILD, str(theirs.fileno()), str(lifeline)],
                env=None if environ is None else dict(environ),
                stdin=subprocess.DEVNULL,
                stdout=self._complaints,
                stderr=self._complaints,
                pass_fds=(theirs.fileno(), lifeline, *keep_fds),
            )
        except OSError as error:
            os.close(self._lifeline)
            self._connection.close()
            self._complaints.close()
            raise LaunchError(f"no child process could be started: {error}") from error
        finally:
            theirs.close()
            os.close(lifeline)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def pid(self) -> int:
        """The child's process id."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether the child can take another call."""
        return not self._connection.closed and self._process.poll() is None

    def close(self) -> None:
        """End the child, at once. May be called twice."""
        if not self._connection.closed:
            self._process.kill()
            self._process.wait()
            self._connection.close()
            os.close(self._lifeline)
            self._complaints.close()

    def call(
        self,
        deadline_s: float,
        function: Callable[P, T],
        /,
        *arguments: P.args,
        **keywords: P.kwargs,
    ) -> T:
        """Run a function in the child and return what it returns.

        Raises:
            LaunchError: The child has ended, or did not answer in time and was killed.
        IsthmusError: The function raised it.
            RankFailedError: The function raised something else; the message names it.
        """
        self.begin(deadline_s, function, *arguments, **keywords)
        return cast("T", self.result(deadline_s))

    def begin(
        self,
        deadline_s: float,
        function: Callable[P, T],
        /,
        *arguments: P.args,
        **keywords: P.kwargs,
    ) -> None:
        """Start a call without waiting for it; ``result`` is to follow.

        Raises:
            LaunchError: The child has ended.
        """
        self._allowed_s = deadline_s
        try:
            self._connection.send((function, arguments, keywords, deadline_s))
        except OSError as error:
            raise self._has_ended() from error

    def result(self, deadline_s: float) -> Any:
        """Return what the call that was begun returns. Raises as ``call`` does."""
        try:
            if not self._connection.poll(deadline_s):
                self.close()
                raise LaunchError(f"a child process gave no answer within {self._allowed_s:g} s")
            succeeded, answer = self._connection.recv()
        except (EOFError, OSError) as error:
            raise self._has_ended() from error
        if not succeeded:
            raise answer
        return answer

    def _has_ended(self) -> LaunchError:
        """Say how the child ended, with the last line that it wrote."""
        if self._connection.closed:
            return LaunchError("the child process has been ended")
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=1.0)
        code = self._process.returncode
        self._complaints.seek(0)
        written = self._complaints.read().decode(errors="replace").strip().splitlines()
        self.close()
        how = "was lost" if code is None else f"ended with {_code_text(code)}"
        last = f": {written[-1].strip()}" if written else ""
        return LaunchError(f"a child process {how}{last}")


def _code_text(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    with contextlib.suppress(ValueError):
        return signal.Signals(-code).name
    return f"signal {-code}"


def serve(calls_fd: int, lifeline_fd: int) -> None:
    """Be the child: answer calls until the parent closes its end, or is gone.

    Args:
        calls_fd: The socket that calls come from and answers go to.
        lifeline_fd: A pipe whose other end only the parent holds.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    threading.Thread(target=_end_with_parent, args=(lifeline_fd,), daemon=True).start()
    connection = Connection(calls_fd)
    while True:
        try:
            function, arguments, keywords, deadline_s = connection.recv()
        except EOFError:
            return
        except Exception as error:  # what cannot be unpickled here is the caller's to know
            connection.send((False, _to_raise(error)))
            continue
        # The watchdog is a thread in C: it ends this process even when Python is stuck.
        faulthandler.dump_traceback_later(deadline_s + OWN_END_S, exit=True)
        try:
            answer: tuple[bool, object] = (True, function(*arguments, **keywords))
        except Exception as error:
            answer = (False, _to_raise(error))
        faulthandler.cancel_dump_traceback_later()
        connection.send(answer)


def _to_raise(error: Exception) -> IsthmusError:
    if isinstance(error, IsthmusError):
        return error
    lines = str(error).strip().splitlines()
    return RankFailedError(": ".join([type(error).__name__, *lines[:1]]))


def _end_with_parent(lifeline: int) -> None:
    os.read(lifeline, 1)
    os._exit(1)
