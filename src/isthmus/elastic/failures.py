"""What went wrong first: each failing rank leaves a record, and the cause is chosen from them.

When a rank fails its peers fail too, because they lose a connection, and often sooner than the
rank that is to blame has ended. So every failing rank writes ``failures/rank-N.json``, and
``error.json`` holds the *cause*: the earliest failure that is not merely the loss of a peer.

isthmus's own launcher adds records for ranks that died without a word. Under torchrun and SLURM
nobody watches all ranks, so the ranks settle ``error.json`` between themselves: each writes its
record, then the cause of all records it sees, until it sees no new ones. Times come from the
hosts' clocks, so between hosts whose clocks differ "earliest" is only as good as the clocks.
"""

from __future__ import annotations

import json
import os
import re
import socket
import sys
import time
import traceback
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import msgspec

from isthmus.elastic.environment import RankEnvironment
from isthmus.errors import EXIT_FAILED, Interrupted, IsthmusError

__all__ = [
    "Failure",
    "Watch",
    "begin",
    "capture",
    "cause",
    "read_all",
    "read_cause",
    "record",
    "settle",
]

_LOST_PEER_WORDS: Final = re.compile(
    r"connection (closed|reset|refused)|broken pipe|timed out|timeout|peer (is )?(closed|gone)",
    re.IGNORECASE,
)
_CAUSE_S: Final = 1.0
"""How long a rank that has lost a peer waits for the record of the one to blame."""
_LOST_PEER_TYPES: Final = {"DistNetworkError", "DistStoreError", "DistBackendError"}


class Failure(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How one rank failed; the content of ``failures/rank-N.json`` and of ``error.json``.

    Attributes:
        attempt: Which start of the run this belongs to.
        time_s: Seconds since the epoch on the rank's host.
        rank: The rank, or None where no single one is to blame.
        kind: The exception's type, a signal's name, or ``exit``.
        message: What happened.
        hint: How to mend it, if that is known.
        traceback: The full traceback, empty for a rank that died without one.
        output_tail: The last lines the rank wrote to stderr, where no traceback says more.
        step: The last step that the rank reported.
        expected: Whether the error is one that isthmus raises on purpose.
        lost_peer: Whether the failure may be but the loss of another rank.
        exit_code: What the command ends with if this is the cause.
    """

    attempt: str
    time_s: float
    rank: int | None
    host: str
    pid: int
    kind: str
    message: str
    hint: str = ""
    traceback: str = ""
    output_tail: str = ""
    step: int | None = None
    expected: bool = False
    lost_peer: bool = False
    exit_code: int = EXIT_FAILED

    def report(self) -> str:
        """Return what a person is shown: short for expected errors, all there is for others."""
        where = "" if self.rank is None else f"rank {self.rank} on {self.host}"
        where += "" if self.step is None else f", after step {self.step}"
        lines = [f"error: {where + ': ' if where else ''}{self.message}"]
        if not self.expected and self.traceback:
            lines.append(self.traceback.rstrip())
        if self.output_tail and not self.traceback:
            lines.append("its last output:\n" + self.output_tail.rstrip())
        if self.hint:
            lines.append(f"hint: {self.hint}")
        return "\n".join(lines)


class Watch:
    """What the code inside ``capture`` tells about itself: ``watch.step = 12``."""

    step: int | None = None


def begin(run_dir: Path, attempt: str) -> None:
    """Remove the ``error.json`` of an earlier start; called before any rank can fail.

    Raises:
        OSError: The run directory cannot be written.
    """
    (run_dir / "failures").mkdir(parents=True, exist_ok=True)
    known = _read(run_dir / "error.json")
    if known is None or known.attempt != attempt:
        (run_dir / "error.json").unlink(missing_ok=True)


@contextmanager
def capture(run_dir: Path, environment: RankEnvironment) -> Generator[Watch]:
    """Record what ends a rank; put around all that the rank does.

    Under isthmus's own launcher, which shows the cause once, the rank then ends silently with the
    error's exit code (SystemExit). Elsewhere the error goes on to the caller, ``error.json`` is
    settled with the other ranks, and torchrun's own error file is written where it asks for one.
    Interrupted is no failure and leaves no record.
    """
    own_launcher = environment.launcher == "isthmus"
    if environment.rank == 0 and not own_launcher:
        begin(run_dir, environment.attempt)
    watch = Watch()
    try:
        yield watch
    except Interrupted as stop:
        if own_launcher:
            raise SystemExit(stop.exit_code) from None
        raise
    except (Exception, SystemExit) as error:
        if isinstance(error, SystemExit) and error.code in (0, None, Interrupted.exit_code):
            raise
        failure = record(run_dir, environment, error, step=watch.step)
        if own_launcher:
            raise SystemExit(failure.exit_code) from None
        with _disk_trouble_said():
            _tell_the_others(run_dir, failure)
        raise


def record(
    run_dir: Path,
    environment: RankEnvironment,
    error: BaseException,
    *,
    step: int | None = None,
) -> Failure:
    """Write ``failures/rank-N.json`` for an error of this rank, and return what it says.

    A disk that is full must not hide the error: then the trouble goes to stderr, beside the
    traceback.
    """
    failure = Failure(
        attempt=environment.attempt,
        time_s=time.time(),
        rank=environment.rank,
        host=socket.gethostname(),
        pid=os.getpid(),
        kind=type(error).__name__,
        message=_message(error),
        hint=getattr(error, "hint", ""),
        traceback="".join(traceback.format_exception(error)),
        step=step,
        expected=isinstance(error, IsthmusError),
        lost_peer=lost_peer(error),
        exit_code=getattr(error, "exit_code", EXIT_FAILED),
    )
    with _disk_trouble_said(failure):
        write(run_dir / "failures" / f"rank-{environment.rank}.json", failure)
    return failure


def lost_peer(error: BaseException) -> bool:
    """Return whether an error, or what it came from, is the loss of a connection or a timeout.

    Errors raised on purpose are not: they have a cause of their own to tell.
    """
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, IsthmusError):
            return False
        names = {kind.__name__ for kind in type(seen).__mro__}
        if isinstance(seen, ConnectionError | TimeoutError) or names & _LOST_PEER_TYPES:
            return True
        if isinstance(seen, RuntimeError) and _LOST_PEER_WORDS.search(str(seen)):
            return True
        seen = seen.__cause__ or seen.__context__
    return False


def read_all(run_dir: Path, attempt: str) -> list[Failure]:
    """Return the records of one start of a run, by rank; half-written ones do not exist."""
    records = map(_read, sorted((run_dir / "failures").glob("rank-*.json")))
    return [found for found in records if found is not None and found.attempt == attempt]


def read_cause(run_dir: Path) -> Failure | None:
    """Return the content of ``error.json``, or None if there is none."""
    return _read(run_dir / "error.json")


def cause(failures: list[Failure]) -> Failure | None:
    """Return the failure that the others follow from: not a lost peer if possible, the earliest."""
    return min(failures, key=lambda found: (found.lost_peer, found.time_s), default=None)


def settle(run_dir: Path, attempt: str) -> Failure | None:
    """Write the cause of all recorded failures to ``error.json`` and return it.

    Several ranks may do this at once: each goes on until its own writing is followed by a look
    that finds no new record, so the last one to write has seen them all.

    Raises:
        OSError: ``error.json`` cannot be written.
    """
    failures: list[Failure] = []
    while (now := read_all(run_dir, attempt)) != failures:
        failures = now
        first = cause(failures)
        if first is not None:
            write(run_dir / "error.json", first)
    return cause(failures)


def write(path: Path, failure: Failure) -> None:
    """Write a record so that it is there completely or not at all.

    Raises:
        OSError: The file cannot be written; what was there before still is.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{socket.gethostname()}-{os.getpid()}")
    try:
        with unfinished.open("wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(failure), indent=2) + b"\n")
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def _read(path: Path) -> Failure | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=Failure)
    except (FileNotFoundError, msgspec.DecodeError):
        return None


def _message(error: BaseException) -> str:
    if isinstance(error, IsthmusError):
        return error.message
    if isinstance(error, SystemExit):
        return f"the program called exit({error.code!r})"
    return "".join(traceback.format_exception_only(error)).strip()


def _tell_the_others(run_dir: Path, failure: Failure) -> None:
    """Settle ``error.json``, and write what torchrun shows where it asks for it.

    torchrun compares whole seconds, and so would often call a rank that lost its peer the root
    cause. Such a rank waits a moment for the record of the one to blame and passes that on.
    """
    give_up_at_s = time.monotonic() + _CAUSE_S
    first = cause(read_all(run_dir, failure.attempt)) or failure
    while first.lost_peer and time.monotonic() < give_up_at_s:
        time.sleep(0.02)
        first = cause(read_all(run_dir, failure.attempt)) or failure
    torchelastic_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if torchelastic_file:
        _write_for_torchelastic(Path(torchelastic_file), first)
    settle(run_dir, failure.attempt)


def _write_for_torchelastic(path: Path, failure: Failure) -> None:
    """Write what torch.distributed.elastic's own error handler would, so that torchrun shows it."""
    extra = {"py_callstack": failure.traceback, "timestamp": str(int(failure.time_s))}
    said = f"rank {failure.rank} on {failure.host}: {failure.message}"
    said += f" (hint: {failure.hint})" if failure.hint else ""
    path.write_text(json.dumps({"message": {"message": said, "extraInfo": extra}}))


@contextmanager
def _disk_trouble_said(failure: Failure | None = None) -> Generator[None]:
    try:
        yield
    except OSError as trouble:
        with suppress(OSError):
            sys.stderr.write(f"error: could not record a failure: {trouble}\n")
            if failure is not None:
                sys.stderr.write(failure.report() + "\n")
