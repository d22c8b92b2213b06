"""One command in every host of a cluster: started, its output told apart, watched, and ended.

- Each line of output goes where the command wrote it, stdout or stderr, after its host's name.
- The first failure decides: the others get SIGTERM a moment later and SIGKILL after a grace, and
  its exit code is the result.
- Ctrl-C and SIGTERM ask the commands to end, by SIGTERM, so that a training run can write its
  checkpoint; a second Ctrl-C ends everything at once.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType
from typing import Final

from isthmus.elastic.launcher import threads_per_rank
from isthmus.elastic.output import OutputReader, Stream
from isthmus.elastic.processes import has_ended, signal_name
from isthmus.errors import EXIT_INTERRUPTED, EXIT_OK, LaunchError
from isthmus.lab.cluster import Cluster, refuse_unknown_program
from isthmus.lab.environment import without_ranks

__all__ = ["Member", "members_of", "run_everywhere"]

EXIT_SIGNALLED: Final = 128
"""A command that a signal ended counts as this and the signal's number, as in a shell."""

_POLL_S: Final = 0.1
_SETTLE_S: Final = 0.5
"""After the first failure: how long the others may go on, so that the one to blame can say so."""
_SAME_KEY_PRESS_S: Final = 0.5
"""Wrappers forward the SIGINT that the terminal has already sent to the whole process group."""


@dataclass(frozen=True)
class Member:
    """One process of a command that runs everywhere: a host's, or one rank's of a host."""

    host: str
    local_rank: int | None = None

    def __str__(self) -> str:
        return self.host if self.local_rank is None else f"{self.host}:{self.local_rank}"


def members_of(cluster: Cluster, *, per_rank: bool) -> list[Member]:
    """Where a command runs: once a host, or once for each of its devices."""
    hosts = cluster.topology.hosts
    if not per_rank:
        return [Member(host.name) for host in hosts]
    return [
        Member(host.name, local_rank if host.num_devices > 1 else None)
        for host in hosts
        for local_rank in range(host.num_devices)
    ]


def run_everywhere(
    cluster: Cluster,
    command: Sequence[str],
    *,
    per_rank: bool = False,
    environ: Mapping[str, str] = os.environ,
    grace_s: float = 30.0,
    failure_grace_s: float = 3.0,
    on_poll: Callable[[], None] = lambda: None,
    on_output: Callable[[Member, Stream, str], None] | None = None,
    say: Callable[[str], None] | None = None,
) -> int:
    """Run a command in every host of a cluster and return an exit code.

    Args:
        cluster: The cluster, which runs.
        command: The program and its arguments; the variables tell it where it is, see
            :mod:`isthmus.lab.environment`.
        per_rank: Start it once for each device of a host, as a rank; else once a host.
        environ: The variables to which those are added.
        grace_s: After a stop request: how long the commands have to end.
        failure_grace_s: After a failure: how long the others have to end.
        on_poll: Called about ten times a second.
        on_output: Gets each line of output; by default it goes to the same stream here, after
            ``[HOST]``.
        say: Gets what there is to say beside; by default it goes to stderr.

    Returns:
        0 if all ended well; 75 if they stopped on request after a checkpoint; 130 if they were
        ended by Ctrl-C otherwise; else the exit code of the first failure.

    Raises:
        ConfigError: The command cannot be started.
        LaunchError: This is not the main thread, in which alone signals arrive.
    """
    if threading.current_thread() is not threading.main_thread():
        raise LaunchError("run_everywhere must be called from the main thread")
    refuse_unknown_program(command, environ)
    members = members_of(cluster, per_rank=per_rank)
    forward = on_output or _forward
    supervisor = _Supervisor(
        members,
        grace_s=grace_s,
        failure_grace_s=failure_grace_s,
        output=OutputReader(lambda index, stream, line: forward(members[index], stream, line)),
        say=say or _to_stderr,
    )
    with supervisor.signals_caught():
        try:
            supervisor.start(cluster, command, per_rank, environ)
            while supervisor.step():
                on_poll()
        finally:
            supervisor.end()
    return supervisor.conclude()


class _Supervisor:
    """The processes of one command, by the number of their member."""

    def __init__(
        self,
        members: Sequence[Member],
        *,
        grace_s: float,
        failure_grace_s: float,
        output: OutputReader,
        say: Callable[[str], None],
    ) -> None:
        self._members = members
        self._grace_s = grace_s
        self._failure_grace_s = failure_grace_s
        self._output = output
        self._say = say
        self._processes: list[subprocess.Popen[bytes]] = []
        self._codes: dict[int, int] = {}
        self._told: set[int] = set()  # to end, by SIGTERM from here
        self._killed: set[int] = set()  # by SIGKILL from here
        self._first_failure: int | None = None
        self._failed_at_s = 0.0
        self._stop_at_s: float | None = None
        self._at_once = False

    def start(
        self, cluster: Cluster, command: Sequence[str], per_rank: bool, environ: Mapping[str, str]
    ) -> None:
        common = {
            "OMP_NUM_THREADS": str(threads_per_rank(cluster.topology.num_ranks)),
            "PYTHONUNBUFFERED": "1",
            **without_ranks(environ),
        }
        for index, member in enumerate(self._members):
            local_rank = (member.local_rank or 0) if per_rank else None
            process = cluster.start(
                command,
                host=member.host,
                env={**common, **cluster.environment(member.host, local_rank)},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
            self._processes.append(process)
            for stream, pipe in (("stdout", process.stdout), ("stderr", process.stderr)):
                if pipe is not None:
                    self._output.add(index, stream, pipe)

    def step(self) -> bool:
        """Wait a moment, take in what has happened, act on it; return whether anything runs."""
        self._output.poll(_POLL_S)
        for index, process in self._running():
            if has_ended(process.pid):
                self._ended(index, process.wait())
        self._act(time.monotonic())
        return len(self._codes) < len(self._processes)

    def _ended(self, index: int, code: int) -> None:
        self._codes[index] = code
        asked_to = (index in self._told and code == -signal.SIGTERM) or index in self._killed
        if code in (EXIT_OK, EXIT_INTERRUPTED) or asked_to or self._first_failure is not None:
            return
        self._first_failure = index
        self._failed_at_s = time.monotonic()
        self._output.drain()

    def _act(self, now_s: float) -> None:
        if self._at_once:
            self._kill_all()
        elif self._first_failure is not None:
            if now_s > self._failed_at_s + self._failure_grace_s:
                self._kill_all()
            elif now_s > self._failed_at_s + min(_SETTLE_S, self._failure_grace_s):
                self._terminate_all()
        elif self._stop_at_s is not None:
            if not self._told:
                self._say("asking every host to stop; Ctrl-C again ends at once")
                self._terminate_all()
            if now_s > self._stop_at_s + self._grace_s:
                late = ", ".join(str(self._members[index]) for index, _ in self._running())
                if late and not self._killed:
                    self._say(f"{late} did not stop within {self._grace_s:g} s and was killed")
                self._kill_all()

    def _terminate_all(self) -> None:
        for index, process in self._running():
            if index not in self._told:
                self._told.add(index)
                os.kill(process.pid, signal.SIGTERM)

    def _kill_all(self) -> None:
        for index, process in self._running():
            self._killed.add(index)
            os.kill(process.pid, signal.SIGKILL)

    def _running(self) -> list[tuple[int, subprocess.Popen[bytes]]]:
        return [pair for pair in enumerate(self._processes) if pair[0] not in self._codes]

    @contextmanager
    def signals_caught(self) -> Generator[None]:
        """Note SIGINT, SIGTERM and SIGHUP as requests to stop while commands run."""
        caught = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        before = {number: signal.signal(number, self._note_signal) for number in caught}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _note_signal(self, number: int, frame: FrameType | None) -> None:
        now_s = time.monotonic()
        if self._stop_at_s is None:
            self._stop_at_s = now_s
        elif number == signal.SIGINT and now_s > self._stop_at_s + _SAME_KEY_PRESS_S:
            self._at_once = True

    def end(self) -> None:
        """Kill whatever still runs, and read what was still written."""
        self._kill_all()
        for index, process in self._running():
            self._codes[index] = process.wait()
        self._output.close()

    def conclude(self) -> int:
        """Say how it ended and return the exit code."""
        if self._first_failure is not None:
            code = self._codes[self._first_failure]
            member = self._members[self._first_failure]
            if code < 0:
                self._say(f"error: the command in {member} was ended by {signal_name(-code)}")
                return EXIT_SIGNALLED - code
            self._say(f"error: the command in {member} failed with exit code {code}")
            return code
        codes = set(self._codes.values())
        if self._at_once or not codes <= {EXIT_OK, EXIT_INTERRUPTED}:
            return EXIT_SIGNALLED + signal.SIGINT
        return max(codes, default=EXIT_OK)


def _forward(member: Member, stream: Stream, line: str) -> None:
    target = sys.stdout if stream == "stdout" else sys.stderr
    with suppress(BrokenPipeError):
        target.write(f"[{member}] {line}\n")
        target.flush()


def _to_stderr(text: str) -> None:
    with suppress(BrokenPipeError):
        sys.stderr.write(text + "\n")
        sys.stderr.flush()
