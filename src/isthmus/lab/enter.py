"""Runs a command inside a host: ``enter.py PID COMMAND...`` joins the namespaces of process PID.

Like nsenter, with three differences that a lab needs. A command that is stopped stays stopped
alone: the process outside waits on, so stopping and continuing a host leaves no one behind. A
signal that asks to end goes on to the command. And when the command ends, so do the processes of
its group; when this process is killed, so is the command. It ends as the command did, with its
exit code or by its signal.

A program of its own, started by :mod:`isthmus.lab.namespaces`: the standard library alone.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import NoReturn

EXIT_NOT_EXECUTABLE = 126
EXIT_NOT_FOUND = 127

_KINDS = {
    "user": 0x10000000,
    "net": 0x40000000,
    "uts": 0x04000000,
    "ipc": 0x08000000,
    "pid": 0x20000000,
    "mnt": 0x00020000,
}
_FORWARDED = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
)
_PR_SET_PDEATHSIG = 1

_libc = ctypes.CDLL(None, use_errno=True)


def main(pid: int, command: Sequence[str]) -> NoReturn:
    """Join the namespaces and run the command to its end; ends as the command did."""
    try:
        directory = os.getcwd()
        _join(pid)
        os.chdir(directory)
    except OSError as problem:
        sys.stderr.write(f"cannot enter the host of process {pid}: {problem}\n")
        sys.exit(EXIT_NOT_EXECUTABLE)
    signal.pthread_sigmask(signal.SIG_BLOCK, _FORWARDED)
    child = os.fork()  # only a child becomes a member of the process namespace
    if child == 0:
        _become(command)
    for number in _FORWARDED:
        signal.signal(number, lambda number, frame: os.kill(child, number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _FORWARDED)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)  # its pid, and its group's, stay its own
    signal.pthread_sigmask(signal.SIG_BLOCK, _FORWARDED)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(child, signal.SIGKILL)
    _end_like(os.waitpid(child, 0)[1])


def _join(pid: int) -> None:
    namespaces = {kind: os.open(f"/proc/{pid}/ns/{kind}", os.O_RDONLY) for kind in _KINDS}
    for kind, namespace in namespaces.items():
        ours = os.stat(f"/proc/self/ns/{kind}")
        if not os.path.samestat(os.fstat(namespace), ours) and _libc.setns(namespace, _KINDS[kind]):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), kind)
        os.close(namespace)


def _become(command: Sequence[str]) -> NoReturn:
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.setsid()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _FORWARDED)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)  # Python ignores these; a command expects otherwise
    try:
        os.execvp(command[0], list(command))
    except OSError as problem:
        sys.stderr.write(f"{command[0]}: {problem.strerror}\n")
        missing = isinstance(problem, FileNotFoundError)
        os._exit(EXIT_NOT_FOUND if missing else EXIT_NOT_EXECUTABLE)


def _end_like(status: int) -> NoReturn:
    if os.WIFSIGNALED(status):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        number = os.WTERMSIG(status)
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
        os.kill(os.getpid(), number)
    sys.exit(os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
