"""Writing files so that they are whole or absent, and telling whether they still are."""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import BinaryIO, Final

import xxhash

_WHOLE_CHECKSUM_NBYTES: Final = 256 * 2**20
_NUM_PROBES: Final = 256
_PROBE_NBYTES: Final = 2**20


def checksum(content: bytes | memoryview) -> str:
    """xxh3-128 of up to 256 MiB; of more, of 256 MiB that are spread evenly over it."""
    if len(content) <= _WHOLE_CHECKSUM_NBYTES:
        return xxhash.xxh3_128_hexdigest(content)
    hasher = xxhash.xxh3_128()
    for i in range(_NUM_PROBES):
        start = (len(content) - _PROBE_NBYTES) * i // (_NUM_PROBES - 1)
        hasher.update(content[start : start + _PROBE_NBYTES])
    return hasher.hexdigest()


def write_atomically(path: Path, content: bytes) -> None:
    """Replaces a file as a whole: a reader sees the old or the new one, even after a crash."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        write_synced(temporary, content)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_synced(path: Path, content: bytes) -> None:
    """Writes a file that survives a loss of power, once its directory is synced too."""
    with path.open("wb") as file:
        file.write(content)
        sync(file)


def sync(file: BinaryIO) -> None:
    """Returns when what was written to the file would survive a loss of power."""
    file.flush()
    os.fsync(file.fileno())


def sync_directory(path: Path) -> None:
    """Returns when the names in a directory would survive a loss of power."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
