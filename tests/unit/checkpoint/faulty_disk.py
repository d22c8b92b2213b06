"""Disks that fail, fill up, or lose power at the k-th call."""

from __future__ import annotations

import errno
import os
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from isthmus.checkpoint.disk import Disk

ALLOCATING = ("mkdir", "create", "write", "sync")
OPERATIONS = (
    "mkdir",
    "create",
    "write",
    "sync",
    "close",
    "sync_directory",
    "rename",
    "unlink",
    "rmdir",
)


class Crash(BaseException):
    """The process is gone: from here on nothing reaches the disk."""


class CountingDisk(Disk):
    """A disk that counts its calls, and does something else from one call on.

    It does not wait for the real disk, since nobody pulls the real plug here.
    """

    def __init__(self, fail_at: int | None = None) -> None:
        self.calls: list[str] = []
        self.fail_at = fail_at

    def sync(self, fd: int) -> None:
        """Do nothing."""

    def sync_directory(self, path: Path) -> None:
        """Do nothing."""

    def __getattribute__(self, name: str) -> Any:
        attribute = super().__getattribute__(name)
        if name not in OPERATIONS:
            return attribute

        def call(*args: Any) -> Any:
            self.calls.append(name)
            if self.fail_at is not None and len(self.calls) > self.fail_at:
                self.fail(name, args)
            result = attribute(*args)
            self.done(name, args, result)
            return result

        return call

    def fail(self, name: str, args: tuple[Any, ...]) -> None:
        """Raise, or return to let the call go through."""

    def done(self, name: str, args: tuple[Any, ...], result: Any) -> None:
        """Take note of a call that went through."""


class FullDisk(CountingDisk):
    """From the k-th call on there is no room: what allocates fails, what frees works."""

    def fail(self, name: str, args: tuple[Any, ...]) -> None:
        if name in ALLOCATING:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class BrokenDisk(CountingDisk):
    """The k-th call fails, the others work."""

    def fail(self, name: str, args: tuple[Any, ...]) -> None:
        if len(self.calls) == self.fail_at + 1:
            if name == "close":
                os.close(args[0])
            raise OSError(errno.EIO, os.strerror(errno.EIO))


@dataclass
class File:
    data: bytearray
    durable: bytes = b""


@dataclass
class Directory:
    entries: dict[str, File | Directory] = field(default_factory=dict)
    durable: dict[str, File | Directory] = field(default_factory=dict)


class PowerDisk(CountingDisk):
    """A disk whose machine dies at the k-th call, and that knows what may be left of its content.

    Data that were not synced may be there, be zeros or be gone; a name that was not synced may be
    the old or the new one, each by itself. A write that is cut short has written half of its bytes.
    """

    def __init__(self, root: Path, fail_at: int | None = None) -> None:
        super().__init__(fail_at)
        self._root = root
        self._tree = _durable_copy(root)
        self._open: dict[int, File] = {}

    def fail(self, name: str, args: tuple[Any, ...]) -> None:
        if len(self.calls) == self.fail_at + 1 and name == "write":
            fd, data = args
            half = memoryview(data)[: len(data) // 2]
            os.write(fd, half)
            self._open[fd].data += half
        if name == "close":
            os.close(args[0])
        raise Crash

    def done(self, name: str, args: tuple[Any, ...], result: Any) -> None:
        if name in ("write", "sync", "close"):
            self._done_file(name, *args)
            return
        parent = self._directory(args[0].parent)
        if name == "sync_directory":
            directory = self._directory(args[0])
            directory.durable = dict(directory.entries)
        elif name == "mkdir":
            parent.entries[args[0].name] = Directory()
        elif name == "create":
            parent.entries[args[0].name] = self._open[result] = File(bytearray())
        elif name == "rename":
            parent.entries[args[1].name] = parent.entries.pop(args[0].name)
        else:
            del parent.entries[args[0].name]

    def _done_file(self, name: str, fd: int, data: bytes | memoryview = b"") -> None:
        if name == "write":
            self._open[fd].data += data
        elif name == "sync":
            self._open[fd].durable = bytes(self._open[fd].data)
        else:
            del self._open[fd]

    def _directory(self, path: Path) -> Directory:
        directory = self._tree
        if path != self._root and self._root in path.parents:
            for part in path.relative_to(self._root).parts:
                directory = directory.entries[part]
        return directory

    def after_power_loss(self, target: Path, how: str, seed: int = 0) -> None:
        """Write what is left: ``kept``, ``lost``, ``zeroed``, ``truncated`` or ``mixed``."""
        _write_remains(self._tree, target, how, random.Random(seed))


def _durable_copy(path: Path) -> Directory:
    directory = Directory()
    for child in path.iterdir():
        if child.is_dir():
            directory.entries[child.name] = _durable_copy(child)
        else:
            data = child.read_bytes()
            directory.entries[child.name] = File(bytearray(data), data)
    directory.durable = dict(directory.entries)
    return directory


def _write_remains(directory: Directory, target: Path, how: str, chance: random.Random) -> None:
    target.mkdir()
    old, new = directory.durable, directory.entries
    names = {"lost": old, "mixed": old | new}.get(how, new)
    for name in names:
        here = [entries[name] for entries in (old, new) if name in entries]
        if how == "mixed" and len(here) < 2 and chance.random() < 0.5:
            continue
        entry = here[-1] if how != "lost" else old[name]
        if isinstance(entry, Directory):
            _write_remains(entry, target / name, how, chance)
        else:
            (target / name).write_bytes(_remains(entry, how, chance))


def _remains(file: File, how: str, chance: random.Random) -> bytes:
    data = bytes(file.data)
    if how == "mixed":
        how = chance.choice(("kept", "lost", "zeroed", "truncated"))
    if how == "kept" or file.durable == data:
        return data
    return bytes(len(data)) if how == "zeroed" else file.durable
