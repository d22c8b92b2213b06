"""Namespaces for hosts and switches: made, held open, entered, and gone with the lab.

:mod:`isthmus.lab.holder` is the program that makes and holds them and says what a host has of its
own; :mod:`isthmus.lab.enter` runs a command inside. Nothing here is persistent: no named namespace,
no file, no interface outside. Making them needs root, or a kernel that lets users make user
namespaces.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from signal import Signals
from types import TracebackType
from typing import Any, Final, NoReturn, Self

from isthmus.errors import LaunchError
from isthmus.lab import enter, holder
from isthmus.lab.topology import Topology

_TOOLS: Final = {"ip": "iproute2", "tc": "iproute2", "nsenter": "util-linux"}
_SBIN: Final = ("/usr/local/sbin", "/usr/sbin", "/sbin")
_ANSWER_TIMEOUT_S: Final = 60.0
_STOP_TIMEOUT_S: Final = 30.0
_USER_NAMESPACE_SWITCHES: Final = {
    "/proc/sys/kernel/unprivileged_userns_clone": ("0", "kernel.unprivileged_userns_clone=1"),
    "/proc/sys/kernel/apparmor_restrict_unprivileged_userns": (
        "1",
        "kernel.apparmor_restrict_unprivileged_userns=0",
    ),
    "/proc/sys/user/max_user_namespaces": ("0", "user.max_user_namespaces=10000"),
}


@dataclass(frozen=True)
class Namespace:
    """A namespace of the lab: a host, or the switch of a site.

    Attributes:
        name: Of the host, or of the site.
        pid: Its holder: a process inside, alive as long as the lab.
        is_host: Whether it is a host, with processes of its own, or only a network.
        is_rootless: Whether it belongs to a user namespace.
    """

    name: str
    pid: int
    is_host: bool
    is_rootless: bool
    _orders: socket.socket = field(repr=False, compare=False)
    _lock: threading.Lock = field(repr=False, compare=False)

    def enter_argv(self, command: Sequence[str]) -> list[str]:
        """The words that run a command inside; it ends with the process that runs them."""
        if not self.is_host:
            return self.network_argv(command)
        return [sys.executable, "-I", "-S", enter.__file__, str(self.pid), *command]

    def network_argv(self, command: Sequence[str]) -> list[str]:
        """The words that run a tool of the machine in this network, all else being as outside."""
        user = ["--user", "--preserve-credentials"] if self.is_rootless else []
        return [tool("nsenter"), "--target", str(self.pid), *user, "--net", *command]

    def signal(self, number: Signals) -> None:
        """Send a signal to every process of this host.

        Raises:
            LaunchError: The host is gone.
        """
        try:
            with self._lock:
                self._orders.send(str(int(number)).encode())
                answer = self._orders.recv(64)
        except OSError:
            answer = b""
        if not answer:
            raise LaunchError(f"the host {self.name} (process {self.pid}) has ended")


class Namespaces:
    """All namespaces of a lab.

    They end with ``close``, or as soon as this process has ended, and everything that runs in a
    host ends with it.

    Args:
        topology: The cluster.
        host_files: For each host, which files it sees in place of the machine's own: the path that
            it sees, and where the content is.

    Raises:
        LaunchError: They could not be made; it says what would allow it.
    """

    def __init__(self, topology: Topology, host_files: Mapping[str, Mapping[str, Path]]) -> None:
        holders: list[tuple[str, dict[str, Any] | None]] = [
            *((site.name, None) for site in topology.sites),
            *(
                (
                    host.name,
                    {
                        "name": host.name,
                        "files": {to: str(path) for to, path in host_files[host.name].items()},
                    },
                )
                for host in topology.hosts
            ),
        ]
        self._orders: list[socket.socket] = []
        with ExitStack() as far_ends:
            report, far_report = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            far_ends.enter_context(far_report)
            theirs = []
            for _ in holders:
                ours, far_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                ours.settimeout(_ANSWER_TIMEOUT_S)
                self._orders.append(ours)
                theirs.append(far_ends.enter_context(far_end).fileno())
            # A session of its own: Ctrl-C is for the lab, which then ends its hosts in order.
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", holder.__file__, str(far_report.fileno())],
                pass_fds=[far_report.fileno(), *theirs],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        try:
            with report:
                pids = _ask_to_make(report, [host for _, host in holders], theirs)
            is_rootless = _user_namespace(pids[0]) != _user_namespace(os.getpid())
            for orders in self._orders:
                _check_answer(_receive(orders))
        except BaseException:
            self.close()
            raise
        made = [
            Namespace(name, pid, host is not None, is_rootless, orders, threading.Lock())
            for (name, host), pid, orders in zip(holders, pids, self._orders, strict=True)
        ]
        self.switches = {each.name: each for each in made if not each.is_host}
        self.hosts = {each.name: each for each in made if each.is_host}

    def close(self) -> None:
        """End all hosts and what runs in them. Does nothing the second time."""
        for orders in self._orders:
            orders.close()
        try:
            self._process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def tool(name: str) -> str:
    """Path of one of the system's tools, which are often outside a user's PATH.

    Raises:
        LaunchError: It is not installed.
    """
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), *_SBIN])
    found = shutil.which(name, path=path)
    if found is None:
        raise LaunchError(
            f"a lab needs the program {name}, which is not installed",
            hint=f"install the package {_TOOLS[name]}",
        )
    return found


def require_tools() -> None:
    """Make sure that everything is there that a lab runs.

    Raises:
        LaunchError: This is not Linux, or a program is missing.
    """
    if sys.platform != "linux":
        raise LaunchError(
            f"a lab is built of Linux's network namespaces, and this is {sys.platform}",
            hint="run it in a Linux virtual machine",
        )
    for name in _TOOLS:
        tool(name)


def _ask_to_make(
    report: socket.socket, hosts: Sequence[dict[str, Any] | None], descriptors: Sequence[int]
) -> list[int]:
    report.settimeout(_ANSWER_TIMEOUT_S)
    plan = {
        "lab_pid": os.getpid(),
        "holders": [
            {"fd": descriptor, "host": host}
            for descriptor, host in zip(descriptors, hosts, strict=True)
        ],
    }
    report.send(json.dumps(plan).encode())
    answer = _receive(report)
    _check_answer(answer)
    return answer["pids"]


def _receive(channel: socket.socket) -> dict[str, Any]:
    data = channel.recv(1 << 16)
    if not data:
        raise LaunchError("the process that holds the lab's namespaces ended early")
    return json.loads(data)


def _check_answer(answer: dict[str, Any]) -> None:
    if "error" in answer:
        _refuse(*answer["error"])


def _refuse(step: str, number: int) -> NoReturn:
    hint = ""
    if number in (errno.EPERM, errno.EACCES):
        hint = _how_to_be_allowed()
    elif number == errno.ENOSPC:
        hint = "the kernel's limit of namespaces is reached: see /proc/sys/user/max_*_namespaces"
    elif number == errno.EINVAL:
        hint = "the kernel is built without one of the namespaces net, uts, ipc, mnt, pid, user"
    raise LaunchError(f"the lab could not {step}: {os.strerror(number)}", hint=hint)


def _how_to_be_allowed() -> str:
    for path, (forbids, mend) in _USER_NAMESPACE_SWITCHES.items():
        file = Path(path)
        if file.exists() and file.read_text().strip() == forbids:
            return f"run it as root, or allow user namespaces: sudo sysctl -w {mend}"
    if os.geteuid() == 0:
        return "this root lacks CAP_SYS_ADMIN: start the container with --privileged"
    return "run it as root; in a container, start that with --privileged"


def _user_namespace(pid: int) -> int:
    return os.stat(f"/proc/{pid}/ns/user").st_ino
