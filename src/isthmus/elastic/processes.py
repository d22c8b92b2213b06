"""What the launcher asks the kernel about child processes, and asks it to do to them."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress

import psutil

__all__ = ["die_with", "has_ended", "is_frozen", "kill_group", "signal_name"]


def signal_name(number: int) -> str:
    """Return a signal's name, ``SIGKILL`` for 9."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def die_with(parent: int) -> Callable[[], None]:
    """Return what a child calls before it becomes the command: the kernel kills it with us.

    Only a system call through a library that is already loaded: safe between fork and exec. The
    kernel ties this to the thread that forked, which is why ``launch`` wants the main thread.
    """
    libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None
    set_parent_death_signal = 1

    def prepare() -> None:
        if libc is not None:
            libc.prctl(set_parent_death_signal, signal.SIGKILL)
            if os.getppid() != parent:
                os._exit(1)

    return prepare


def kill_group(leader: int) -> None:
    """Kill a rank and every process it has started, unless they moved to sessions of their own."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


def has_ended(pid: int) -> bool:
    """Return whether a child has ended, without taking it away: its pid stays its own."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def is_frozen(pid: int) -> bool:
    """Return whether a process is stopped, by SIGSTOP or a debugger."""
    with suppress(psutil.Error):
        return psutil.Process(pid).status() == psutil.STATUS_STOPPED
    return False
