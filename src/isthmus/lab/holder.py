"""The process that makes namespaces and holds them open: one child for each, and their parent.

:mod:`isthmus.lab.namespaces` starts this file as a program of its own, once a lab, so it uses the
standard library alone. Namespaces have no names and no files: they exist as long as their holder,
and a holder lives until the lab closes its socket or the lab's process has ended, however it ended.
A host's holder is process 1 of a process namespace, so the kernel then kills whatever runs in it.

A host has its own network, host name, System V and POSIX queues, mounts and processes. Over the
machine's files it sees its own ``/proc``, ``/sys``, ``/dev/shm``, ``/etc/hosts``, ``/etc/hostname``
and boot id, so that nobody takes two hosts for one machine and sends by shared memory what belongs
on the network. The other files are the machine's: they stand for a cluster's shared file system,
as a training run needs it.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import select
import signal
import socket
import sys
from collections.abc import Generator
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

CLONE_NEWNS = 0x00020000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000

_PR_SET_CHILD_SUBREAPER = 36
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_NOEXEC = 0x1, 0x2, 0x4, 0x8
_MS_BIND, _MS_REC, _MS_PRIVATE = 0x1000, 0x4000, 0x40000
_MS_SEALED = _MS_NOSUID | _MS_NODEV | _MS_NOEXEC

_HOST_SETTINGS = {
    "ipv4/conf/all/rp_filter": "0",  # an answer may leave by another NIC than the question came by
    "ipv4/conf/default/rp_filter": "0",
    "ipv4/conf/all/arp_ignore": "1",  # a NIC answers for its own address only
    "ipv4/conf/all/arp_announce": "2",
    "ipv4/conf/all/accept_redirects": "0",
    "ipv4/tcp_no_metrics_save": "1",  # what one connection learnt of a bad link, the next forgets
    "ipv6/conf/default/disable_ipv6": "1",  # loopback alone keeps it
}
_SWITCH_SETTINGS = {
    "ipv4/ip_forward": "1",
    "ipv4/conf/all/rp_filter": "0",
    "ipv4/conf/default/rp_filter": "0",
    "ipv4/conf/all/send_redirects": "0",
    "ipv4/conf/default/send_redirects": "0",
    "ipv6/conf/default/disable_ipv6": "1",
}


class StepError(Exception):
    """A step of making a namespace failed; the arguments are the step and the error's number."""


def main(report: socket.socket) -> None:
    """Make the namespaces that the first message asks for, report their pids, and see them end."""
    plan = json.loads(report.recv(1 << 20))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with _step("watch the lab's process"):
            lab = os.pidfd_open(plan["lab_pid"])
            _check(_libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0))
        _gain_rights()
        pids = [_start_holder(holder, lab) for holder in plan["holders"]]
    except StepError as problem:
        report.send(json.dumps({"error": problem.args}).encode())
        return
    report.send(json.dumps({"pids": pids}).encode())
    report.close()
    with suppress(ChildProcessError):
        while True:
            os.wait()


def _gain_rights() -> None:
    """Where making namespaces is not allowed as it is: become root of a new user namespace."""
    try:
        _unshare(CLONE_NEWNS)
    except OSError as problem:
        if problem.errno != errno.EPERM:
            raise StepError("make a mount namespace", problem.errno) from None
    else:
        return
    uid, gid = os.geteuid(), os.getegid()
    with _step("make a user namespace"):
        _unshare(CLONE_NEWUSER)
        _write("/proc/self/setgroups", "deny")
        _write("/proc/self/uid_map", f"0 {uid} 1")
        _write("/proc/self/gid_map", f"0 {gid} 1")


def _start_holder(holder: dict[str, Any], lab: int) -> int:
    """Fork a holder: the first process of a process namespace, if it is for a host.

    A process that has made a process namespace can make no other one, and without root it can't go
    back. So one in between makes it and ends; the holder then becomes a child of this process.
    """
    with socket.socket(fileno=holder["fd"]) as orders:
        reading, writing = os.pipe()
        between = os.fork()
        if between == 0:
            os.close(reading)
            _fork_holder(holder["host"], orders, lab, writing)
        os.close(writing)
        with open(reading) as answers:
            answer = json.loads(answers.read() or "null")
        os.waitpid(between, 0)
    if not isinstance(answer, int):
        raise StepError(*answer or ("start a holder", errno.EAGAIN))
    return answer


def _fork_holder(
    host: dict[str, Any] | None, orders: socket.socket, lab: int, writing: int
) -> NoReturn:
    answer: Any = None
    try:
        if host is not None:
            with _step("make a process namespace"):
                _unshare(CLONE_NEWPID)
        with _step("start a holder"):
            answer = os.fork()
        if answer == 0:
            os.close(writing)
            _hold(host, orders, lab)
    except StepError as problem:
        answer = problem.args
    os.write(writing, json.dumps(answer).encode())
    os._exit(0)


def _hold(host: dict[str, Any] | None, orders: socket.socket, lab: int) -> NoReturn:
    """Make the namespaces, say so, and follow orders until there can't be any more."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # orphans of a host come here and are forgotten
    try:
        try:
            _make_switch() if host is None else _make_host(host)
        except StepError as problem:
            orders.send(json.dumps({"error": problem.args}).encode())
            os._exit(1)
        orders.send(b"{}")
        _follow(orders, lab)
    except OSError:
        pass  # the lab is gone
    os._exit(0)


def _follow(orders: socket.socket, lab: int) -> None:
    """Each order is the number of a signal, for every process of this namespace but this one."""
    while True:
        ready, _, _ = select.select([orders, lab], (), ())
        order = orders.recv(16) if orders in ready else b""
        if not order or lab in ready:
            return
        with suppress(ProcessLookupError):  # nothing runs here
            os.kill(-1, int(order))
        orders.send(b"{}")


def _make_switch() -> None:
    with _step("make a network namespace"):
        _unshare(CLONE_NEWNET)
    _set_up_network(_SWITCH_SETTINGS)


def _make_host(host: dict[str, Any]) -> None:
    with _step("make a host's namespaces"):
        _unshare(CLONE_NEWNET | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWNS)
    _set_up_network(_HOST_SETTINGS)
    with _step("name a host"):
        socket.sethostname(host["name"])
    with _step("keep a host's mounts to itself"):
        _mount("none", "/", None, _MS_REC | _MS_PRIVATE)
    _mount_sys()
    with _step("mount a host's own /proc"):
        _mount("proc", "/proc", "proc", _MS_SEALED)
    with _step("mount a host's own /dev/shm"):
        _mount("tmpfs", "/dev/shm", "tmpfs", _MS_NOSUID | _MS_NODEV, "mode=1777")
    for target, source in host["files"].items():
        with _step(f"give a host its own {target}"):
            _mount(source, target, None, _MS_BIND)


def _mount_sys() -> None:
    """Mount /sys anew, for it shows the interfaces of the namespace in which it was mounted."""
    with _step("mount a host's own /sys"):
        cgroups = os.open("/sys/fs/cgroup", os.O_PATH | os.O_CLOEXEC)
        try:
            _mount("sysfs", "/sys", "sysfs", _MS_SEALED | _MS_RDONLY)
            _mount(f"/proc/self/fd/{cgroups}", "/sys/fs/cgroup", None, _MS_BIND | _MS_REC)
        finally:
            os.close(cgroups)


def _set_up_network(settings: dict[str, str]) -> None:
    for name, value in settings.items():
        path = f"/proc/sys/net/{name}"
        if os.path.exists(path):  # a kernel without IPv6 has none of its settings
            with _step(f"set net.{name.replace('/', '.')}"):
                _write(path, value)


@contextmanager
def _step(what: str) -> Generator[None]:
    try:
        yield
    except OSError as problem:
        raise StepError(what, problem.errno) from None


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


def _unshare(flags: int) -> None:
    _check(_libc.unshare(flags))


def _mount(source: str, target: str, kind: str | None, flags: int, options: str = "") -> None:
    texts = (source, target, kind, options)
    first, second, third, last = (None if text is None else text.encode() for text in texts)
    _check(_libc.mount(first, second, third, ctypes.c_ulong(flags), last))


def _check(result: int) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


_libc = ctypes.CDLL(None, use_errno=True)

if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])))
