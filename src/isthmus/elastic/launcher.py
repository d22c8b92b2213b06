"""Ranks on this machine: start them, watch them, stop them, and leave nothing running.

``launch`` is the parent of all ranks and imports no torch. What it holds to:

- **No port is fixed or raced for.** It binds a free one and hands rank 0 the listening socket.
- **A rank never outlives the launcher**, not even one killed with SIGKILL: the kernel is asked to
  kill the ranks then (Linux). Processes that a rank has started are killed when the rank ends.
- **The first failure is the one shown**; see ``failures``. Ranks that died without a word are
  described by their signal or exit code and the last lines they wrote. The other ranks get
  SIGTERM, and SIGKILL when ``failure_grace_s`` is over; stopped processes die of that too.
- **Ctrl-C, SIGTERM and SIGUSR1 ask for a checkpoint**: the ranks get the signal once, finish their
  step, write a checkpoint and exit with 75 (a SIGHUP reaches them as SIGTERM). A second Ctrl-C ends
  them at once. Ranks that have not stopped after ``grace_s`` are killed, and that is said.

Not here: several machines (torchrun or SLURM start the ranks there).
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Final

from isthmus.elastic import failures, processes
from isthmus.elastic.environment import ATTEMPT, LISTEN_FD
from isthmus.elastic.failures import Failure
from isthmus.elastic.output import OutputReader, Stream
from isthmus.elastic.signals import STOP_SIGNALS
from isthmus.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK, LaunchError

__all__ = ["launch", "threads_per_rank"]

EXIT_ENDED_AT_ONCE: Final = 128 + signal.SIGINT
"""After the second Ctrl-C: no checkpoint was waited for."""

_POLL_S: Final = 0.1
_SETTLE_S: Final = 0.5
"""After the first failure: how long the others may go on, so that the one to blame can say so."""
_SAME_KEY_PRESS_S: Final = 0.5
"""Wrappers forward the SIGINT that the terminal has already sent to the whole process group."""
_HINTS: Final = {
    "SIGKILL": "nothing but another process sends SIGKILL, most often the kernel when memory "
    "runs out: see 'dmesg | grep -i oom', and try a smaller batch or fewer ranks",
    "SIGSEGV": "native code crashed; PYTHONFAULTHANDLER=1 shows where",
    "SIGBUS": "often a full /dev/shm: containers need a larger --shm-size",
}


def launch(
    command: Sequence[str],
    *,
    num_ranks: int,
    run_dir: Path,
    environ: Mapping[str, str] = os.environ,
    grace_s: float = 300.0,
    failure_grace_s: float = 3.0,
    on_poll: Callable[[], None] = lambda: None,
    on_output: Callable[[int, Stream, str], None] | None = None,
    say: Callable[[str], None] | None = None,
) -> int:
    """Run ``command`` as ``num_ranks`` ranks on this machine and return an exit code.

    Args:
        command: The program and its arguments; every rank runs the same.
        num_ranks: Number of ranks, at least 1.
        run_dir: Where ``failures/`` and ``error.json`` go.
        environ: The ranks' variables; those that name a rank are added.
        grace_s: After a stop request: how long the ranks have for a checkpoint.
        failure_grace_s: After a failure: how long the other ranks have to end by themselves.
        on_poll: Called about ten times a second, for a live display.
        on_output: Gets each line that a rank prints, as ``(rank, stream, line)``; by default it
            goes to the same stream here, after ``[rank N]`` if there are several ranks.
        say: Gets what the launcher itself has to say; by default it goes to stderr.

    Returns:
        0 if all ranks ended well; 75 if they stopped on request after a checkpoint; 130 after a
        second Ctrl-C; otherwise the exit code of the first failure, which is then shown and kept
        in ``error.json``.

    Raises:
        LaunchError: The command cannot be started, the run directory cannot be written,
            ``num_ranks`` is below 1, or this is not the main thread (the ranks would die with any
            other, and signals arrive only there).
    """
    if num_ranks < 1:
        raise LaunchError(f"{num_ranks} ranks asked for", hint="ask for at least 1: --ranks 1")
    if threading.current_thread() is not threading.main_thread():
        raise LaunchError("launch must be called from the main thread")
    attempt = f"launch-{uuid.uuid4().hex[:12]}"
    try:
        failures.begin(run_dir, attempt)
    except OSError as error:
        raise LaunchError(
            f"cannot write to the run directory {run_dir}: {error.strerror}",
            hint="choose a directory that you may write to, on a disk that is not full",
        ) from error
    supervisor = _Supervisor(
        attempt=attempt,
        run_dir=run_dir,
        grace_s=grace_s,
        failure_grace_s=failure_grace_s,
        output=OutputReader(on_output or _forwarder(num_ranks)),
        say=say or _to_stderr,
    )
    with supervisor.signals_caught():
        try:
            supervisor.start(command, num_ranks, environ)
            polled_at_s = time.monotonic()
            while supervisor.step():
                if time.monotonic() >= polled_at_s + _POLL_S:
                    polled_at_s = time.monotonic()
                    on_poll()
            on_poll()
        finally:
            supervisor.end()
    return supervisor.conclude()


def threads_per_rank(num_ranks: int) -> int:
    """Return how many CPU threads each rank may use so that together they fit this machine."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, (cores or 1) // num_ranks)


class _Supervisor:
    """The ranks of one launch, and what has been decided about them."""

    def __init__(
        self,
        *,
        attempt: str,
        run_dir: Path,
        grace_s: float,
        failure_grace_s: float,
        output: OutputReader,
        say: Callable[[str], None],
    ) -> None:
        self._attempt = attempt
        self._run_dir = run_dir
        self._grace_s = grace_s
        self._failure_grace_s = failure_grace_s
        self._output = output
        self._say = say
        self._ranks: list[subprocess.Popen[bytes]] = []
        self._codes: dict[int, int] = {}
        self._told: set[int] = set()  # to end, by SIGTERM from here
        self._killed: set[int] = set()  # by SIGKILL from here
        self._end_others_at_s: float | None = None  # when a rank was lost for the run
        self._frozen = ""  # the ranks that were stopped by SIGSTOP then
        self._stop_at_s: float | None = None  # when a signal first asked to stop
        self._at_once = False

    # --- start ---

    def start(self, command: Sequence[str], num_ranks: int, environ: Mapping[str, str]) -> None:
        threads = threads_per_rank(num_ranks)
        if "OMP_NUM_THREADS" not in environ:
            each = f"{threads} CPU thread{'s'[: threads > 1]} each"
            self._say(f"{num_ranks} rank{'s'[: num_ranks > 1]} with {each} (OMP_NUM_THREADS)")
        with socket.create_server(("127.0.0.1", 0), backlog=1024) as listening:
            common = {
                "OMP_NUM_THREADS": str(threads),
                "PYTHONUNBUFFERED": "1",
                **{name: environ[name] for name in environ if not name.startswith("TORCHELASTIC_")},
                "WORLD_SIZE": str(num_ranks),
                "LOCAL_WORLD_SIZE": str(num_ranks),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(listening.getsockname()[1]),
                ATTEMPT: self._attempt,
            }
            for rank in range(num_ranks):
                own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                listens = {LISTEN_FD: str(listening.fileno())} if rank == 0 else {}
                self._start_rank(
                    command, common | own | listens, listening.fileno() if rank == 0 else None
                )

    def _start_rank(
        self, command: Sequence[str], environ: Mapping[str, str], listen_fd: int | None
    ) -> None:
        try:
            process = subprocess.Popen(
                command,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
                pass_fds=() if listen_fd is None else (listen_fd,),
                preexec_fn=processes.die_with(os.getpid()),
            )
        except OSError as error:
            raise LaunchError(
                f"cannot start {command[0]!r}: {error.strerror}",
                hint="see whether the program exists and may be executed",
            ) from error
        rank = len(self._ranks)
        self._ranks.append(process)
        for stream, pipe in (("stdout", process.stdout), ("stderr", process.stderr)):
            if pipe is not None:
                self._output.add(rank, stream, pipe)

    # --- watch ---

    def step(self) -> bool:
        """Wait a moment, take in what has happened, act on it; return whether a rank still runs."""
        self._output.poll(_POLL_S)
        for rank, process in self._running():
            if processes.has_ended(process.pid):
                processes.kill_group(process.pid)
                self._ended(rank, process.wait())
        self._act(time.monotonic())
        return len(self._codes) < len(self._ranks)

    def _ended(self, rank: int, code: int) -> None:
        self._codes[rank] = code
        if code in (EXIT_OK, EXIT_INTERRUPTED):
            return
        if (rank in self._told and -code in STOP_SIGNALS) or rank in self._killed:
            self._end_others_at_s = self._end_others_at_s or time.monotonic()
            return
        self._output.drain()
        if self._end_others_at_s is None:
            self._end_others_at_s = time.monotonic()
            self._frozen = ", ".join(
                str(r) for r, p in self._running() if processes.is_frozen(p.pid)
            )
        recorded = {found.rank for found in failures.read_all(self._run_dir, self._attempt)}
        if rank not in recorded:
            self._write(f"rank-{rank}", self._death(rank, code))

    def _act(self, now_s: float) -> None:
        if self._at_once:
            self._kill_all()
        elif self._end_others_at_s is not None:
            if now_s > self._end_others_at_s + self._failure_grace_s:
                self._kill_all()
            elif now_s > self._end_others_at_s + min(_SETTLE_S, self._failure_grace_s):
                self._tell_all(signal.SIGTERM)
        elif self._stop_at_s is not None:
            if not self._told:
                self._say("stopping after this step and a checkpoint; Ctrl-C again ends at once")
                self._tell_all(self._stop_signal)
            if now_s > self._stop_at_s + self._grace_s:
                self._grace_is_over()

    def _tell_all(self, number: int) -> None:
        for rank, process in self._running():
            if rank not in self._told:
                self._told.add(rank)
                os.kill(process.pid, number)

    def _kill_all(self) -> None:
        for rank, process in self._running():
            self._killed.add(rank)
            os.kill(process.pid, signal.SIGKILL)

    def _grace_is_over(self) -> None:
        late = ", ".join(str(rank) for rank, _ in self._running() if rank not in self._killed)
        if late:
            message = f"rank {late} did not stop within {self._grace_s:g} s and was killed"
            hint = "the last checkpoint is kept; deadlines.stop_grace_s allows more time"
            self._write("rank-late", self._failure(None, "LaunchError", message, hint=hint))
            self._kill_all()

    def _running(self) -> list[tuple[int, subprocess.Popen[bytes]]]:
        """Return the ranks that have not been taken away, so their pids are theirs.

        They are signalled by pid: Popen's own methods would take an ended one away unseen.
        """
        return [pair for pair in enumerate(self._ranks) if pair[0] not in self._codes]

    def _write(self, name: str, failure: Failure) -> None:
        try:
            failures.write(self._run_dir / "failures" / f"{name}.json", failure)
        except OSError as trouble:
            self._say(f"error: could not record a failure: {trouble}")
            self._say(failure.report())

    # --- stop ---

    @contextmanager
    def signals_caught(self) -> Generator[None]:
        """Note the signals that ask to stop while ranks run."""
        caught = (*STOP_SIGNALS, signal.SIGHUP)
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
            self._stop_signal = number if number in STOP_SIGNALS else signal.SIGTERM
        elif number == signal.SIGINT and now_s > self._stop_at_s + _SAME_KEY_PRESS_S:
            self._at_once = True

    def end(self) -> None:
        """Kill whatever still runs and take it away; reads what the ranks had still written."""
        for rank, process in self._running():
            self._killed.add(rank)
            processes.kill_group(process.pid)
        for rank, process in self._running():
            try:
                self._codes[rank] = process.wait(10)
            except subprocess.TimeoutExpired:
                self._say(
                    f"rank {rank} (pid {process.pid}) cannot be killed: it waits in the kernel"
                )
        self._output.close()

    def conclude(self) -> int:
        """Say how it ended, write ``error.json`` if it failed, and return the exit code."""
        first = failures.settle(self._run_dir, self._attempt)
        if first is not None:
            self._say(first.report())
            if first.lost_peer and self._frozen:
                self._say(f"hint: rank {self._frozen} was stopped (SIGSTOP) at that time")
        if self._at_once:
            self._say("ended at once, without a checkpoint of the last steps")
            return EXIT_ENDED_AT_ONCE
        if first is not None:
            return first.exit_code
        lost = [rank for rank, code in self._codes.items() if code < 0]
        if lost:
            self._say(f"rank {lost[0]} ended before it could write a checkpoint")
        return EXIT_INTERRUPTED if any(self._codes.values()) else EXIT_OK

    # --- records for those that left none ---

    def _death(self, rank: int, code: int) -> Failure:
        if code < 0:
            name = processes.signal_name(-code)
            return self._failure(rank, name, f"killed by {name}", hint=_HINTS.get(name, ""))
        message = f"ended with exit code {code} and left no record of an error"
        return self._failure(rank, "exit", message, exit_code=code)

    def _failure(
        self,
        rank: int | None,
        kind: str,
        message: str,
        *,
        hint: str = "",
        exit_code: int = EXIT_FAILED,
    ) -> Failure:
        return Failure(
            attempt=self._attempt,
            time_s=time.time(),
            rank=rank,
            host=socket.gethostname(),
            pid=os.getpid() if rank is None else self._ranks[rank].pid,
            kind=kind,
            message=message,
            hint=hint,
            output_tail="" if rank is None else self._output.tail(rank),
            exit_code=exit_code,
        )


def _forwarder(num_ranks: int) -> Callable[[int, Stream, str], None]:
    def forward(rank: int, stream: Stream, line: str) -> None:
        target = sys.stdout if stream == "stdout" else sys.stderr
        with suppress(BrokenPipeError):
            target.write(f"[rank {rank}] {line}\n" if num_ranks > 1 else f"{line}\n")
            target.flush()

    return forward


def _to_stderr(text: str) -> None:
    with suppress(BrokenPipeError):
        sys.stderr.write(text + "\n")
        sys.stderr.flush()
