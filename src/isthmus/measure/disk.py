"""Speed and room of the file system that a run directory is on.

The file that is written has no name (or loses it at once), so that nothing stays behind whatever
happens. Reading is not measured: what has just been written comes from memory.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

import psutil

from isthmus.measure.timing import Sample

_CHUNK_NBYTES: Final = 1 << 20
_SMALL_NBYTES: Final = 4096


@dataclass(frozen=True)
class DiskSpace:
    """The file system that holds a directory.

    Attributes:
        directory: The directory, or the nearest one above it that exists.
        file_system: Its kind, as ``ext4``; empty if the system does not tell.
        total_nbytes: Its size.
        free_nbytes: What this user may still write.
        free_files: How many files may still be made; None where there is no such limit.
    """

    directory: Path
    file_system: str
    total_nbytes: int
    free_nbytes: int
    free_files: int | None


@dataclass(frozen=True)
class DiskWrite:
    """How fast a file system takes data for good.

    Attributes:
        bytes_per_s: A file's size over the time to write it and have it on the disk (fsync).
        fsync_s: Time to write 4 KiB and have them on the disk.
        nbytes: Size of the file.
    """

    bytes_per_s: Sample
    fsync_s: Sample
    nbytes: int


def existing_directory(path: Path) -> Path:
    """Return the nearest directory that exists, from ``path`` upwards."""
    path = path.absolute()
    return next(place for place in (path, *path.parents) if place.is_dir())


def disk_space(directory: Path) -> DiskSpace:
    """Say what file system a directory is on, and how much room it has.

    Raises:
        OSError: If the file system does not answer.
    """
    place = existing_directory(directory)
    usage, statistics = shutil.disk_usage(place), os.statvfs(place)
    return DiskSpace(
        directory=place,
        file_system=_file_system(place),
        total_nbytes=usage.total,
        free_nbytes=usage.free,
        free_files=statistics.f_favail if statistics.f_files else None,
    )


def disk_write(
    directory: Path,
    *,
    nbytes: int = 32 << 20,
    rounds: int = 3,
    small_rounds: int = 9,
    deadline_s: float = 10.0,
) -> DiskWrite:
    """Measure how fast a directory's file system writes, and how long a small fsync takes.

    The data are random: a file system that compresses gains nothing. The deadline is looked at
    between writes; what has been measured by then counts.

    Raises:
        OSError: If the directory can't be written, is full, or not even one round ended in time.
    """
    chunk = os.urandom(_CHUNK_NBYTES)
    give_up_at_s = time.monotonic() + deadline_s
    rates: list[float] = []
    small: list[float] = []
    with tempfile.TemporaryFile(dir=directory, buffering=0) as file:
        for _ in range(rounds):
            duration_s = _write(file, chunk, nbytes, give_up_at_s)
            if duration_s is None:
                break
            rates.append(nbytes / duration_s)
        while len(small) < small_rounds and (not small or time.monotonic() < give_up_at_s):
            small.append(_write_small(file, chunk[:_SMALL_NBYTES]))
    if not rates:
        raise TimeoutError(f"{nbytes} bytes could not be written within {deadline_s:g} s")
    return DiskWrite(Sample.of(rates), Sample.of(small), nbytes)


def _write(file: IO[bytes], chunk: bytes, nbytes: int, give_up_at_s: float) -> float | None:
    """Seconds to write the file anew and have it on the disk; None if time has run out."""
    file.truncate(0)
    file.seek(0)
    begin_s = time.perf_counter()
    left = nbytes
    while left:
        if time.monotonic() >= give_up_at_s:
            return None
        left -= file.write(chunk[:left])
    os.fsync(file.fileno())
    return time.perf_counter() - begin_s


def _write_small(file: IO[bytes], data: bytes) -> float:
    begin_s = time.perf_counter()
    file.write(data)
    os.fsync(file.fileno())
    return time.perf_counter() - begin_s


def _file_system(place: Path) -> str:
    """The kind of the mount that holds a place: the one with the longest path that does."""
    mounts = {mount.mountpoint: mount.fstype for mount in psutil.disk_partitions(all=True)}
    holding = [point for point in mounts if place.resolve().is_relative_to(point)]
    return mounts[max(holding, key=len)] if holding else ""
