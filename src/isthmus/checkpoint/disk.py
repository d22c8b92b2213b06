"""Every call by which a checkpoint changes the file system, and no other.

The whole crash safety of a checkpoint rests on the order of these few calls, so they go through one
small object, and the tests replace it by one that fails, fills up or loses power at the k-th call.
Reading is not part of it: reading changes nothing.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from isthmus.errors import CheckpointError
from isthmus.spec.units import format_bytes


class Disk:
    """The file system: nine calls, each one system call that either happens or raises OSError."""

    def mkdir(self, path: Path) -> None:
        """Make one directory; its parent must exist."""
        path.mkdir()

    def create(self, path: Path) -> int:
        """Open a new file for writing and return its descriptor; raises if the file exists."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)

    def write(self, fd: int, data: bytes | memoryview) -> None:
        """Append all of ``data``, however many calls the kernel wants for it."""
        rest = memoryview(data)
        while rest.nbytes:
            rest = rest[os.write(fd, rest) :]

    def sync(self, fd: int) -> None:
        """Return when everything written to the file would survive a loss of power."""
        os.fsync(fd)

    def close(self, fd: int) -> None:
        """Close a descriptor from ``create``."""
        os.close(fd)

    def sync_directory(self, path: Path) -> None:
        """Return when the names in a directory would survive a loss of power."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def rename(self, source: Path, target: Path) -> None:
        """Give a directory another name, in one step; raises if the target is taken."""
        os.rename(source, target)

    def unlink(self, path: Path) -> None:
        """Delete one file."""
        path.unlink()

    def rmdir(self, path: Path) -> None:
        """Delete one empty directory."""
        path.rmdir()


def write_file(disk: Disk, path: Path, data: bytes) -> None:
    """Write a new file that survives a loss of power once this returns (with its directory synced).

    Raises:
        OSError: The file exists or could not be written.
    """
    fd = disk.create(path)
    try:
        disk.write(fd, data)
        disk.sync(fd)
    finally:
        disk.close(fd)


def make_directories(disk: Disk, path: Path) -> None:
    """Make a directory and whichever parents it lacks, so that they survive a loss of power."""
    if path.is_dir():
        return
    make_directories(disk, path.parent)
    with suppress(FileExistsError):
        disk.mkdir(path)
    disk.sync_directory(path.parent)


def remove_directory(disk: Disk, path: Path) -> None:
    """Delete a directory of ours, which holds files only; nothing happens if it is gone."""
    try:
        files = sorted(path.iterdir())
    except FileNotFoundError:
        return
    for file in files:
        disk.unlink(file)
    disk.rmdir(path)


def hold(directory: Path) -> int:
    """Mark a directory as in use by a living process, and return what ``os.close`` lets go again.

    The kernel lets go by itself when the process dies, so a directory of a dead run is never held.

    Raises:
        BlockingIOError: A living process holds it.
    """
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise
    except OSError as error:  # a file system without locks: then nothing can be held
        if error.errno not in (errno.ENOTSUP, errno.ENOLCK, errno.EBADF, errno.ENOSYS):
            os.close(fd)
            raise
    return fd


@contextmanager
def writing(directory: Path, nbytes: int) -> Generator[None]:
    """Turn an OSError of the block into a CheckpointError that says how much room was needed."""
    try:
        yield
    except OSError as error:
        what = error.strerror or str(error)
        where = f" ({error.filename})" if error.filename else ""
        message = f"a checkpoint could not be written in {directory}: {what}{where}; "
        message += f"this rank had {format_bytes(nbytes)} to write and {_free(directory)}"
        raise CheckpointError(message, hint=_hint(error)) from error


def _free(directory: Path) -> str:
    try:
        room = os.statvfs(directory)
    except OSError:
        return "the free space is unknown"
    return f"{format_bytes(room.f_bavail * room.f_frsize)} are free"


def _hint(error: OSError) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "Free some space or keep fewer checkpoints; the older checkpoints are untouched."
    if error.errno == errno.ENOENT:
        return "All ranks must share the checkpoint directory."
    return "The older checkpoints are untouched; check the disk and the directory's permissions."
