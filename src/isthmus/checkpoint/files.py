"""Files of blobs: safetensors files, written and read in chunks that are hashed in the cache.

The layout is that of safetensors (8 bytes of length, a JSON header, the raw bytes), so that any
tool of that family can read the tensors. Two things are ours: each blob and the whole file get an
xxh3-128 checksum, which the manifest keeps, and a type that safetensors lacks appears there as
bytes. A blob is never copied as a whole: it goes from its own memory to the file, and from the file
into the memory where it will stay. Checksums find accidents; they are no signature.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec
import xxhash

from isthmus.checkpoint.blob import Blob, allocate, finished, safetensors_code
from isthmus.checkpoint.disk import Disk
from isthmus.checkpoint.manifest import BlobEntry, DamagedError, FileEntry
from isthmus.errors import CheckpointError

CHUNK_NBYTES: Final = 2**20
_ALIGNMENT: Final = 8


def write_blobs(disk: Disk, path: Path, blobs: Mapping[str, Blob]) -> FileEntry:
    """Write a new file of blobs that survives a loss of power once its directory is synced too.

    Raises:
        OSError: The file exists or could not be written.
    """
    ordered = sorted(blobs.items(), key=lambda named: -_alignment_of(named[1]))
    header = _header(ordered)
    whole = xxhash.xxh3_128(header)
    entries = []
    fd = disk.create(path)
    try:
        disk.write(fd, header)
        for name, blob in ordered:
            digest = _write_blob(disk, fd, blob.bytes(), whole)
            entries.append(BlobEntry(name, blob.kind, blob.dtype, blob.shape, blob.nbytes, digest))
        disk.sync(fd)
    finally:
        disk.close(fd)
    nbytes = len(header) + sum(entry.nbytes for entry in entries)
    return FileEntry(path.name, nbytes, len(header), whole.hexdigest(), tuple(entries))


def read_blobs(
    directory: Path, file: FileEntry, *, keep: bool = True
) -> tuple[dict[str, Any], list[DamagedError]]:
    """Read a file of blobs and hold every byte of it to its checksums.

    Args:
        directory: The checkpoint.
        file: What the manifest says of the file.
        keep: Whether to return the values; without, nothing larger than a chunk is in memory.

    Returns:
        The values by name, and everything that is wrong with the file. The values are of use only
        if nothing is.

    Raises:
        CheckpointError: This user may not read the file.

    Raises:
        CheckpointError: This user may not read the file.
    """
    try:
        fd = os.open(directory / file.name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return {}, [DamagedError(file.name, "missing")]
    except PermissionError as error:
        raise CheckpointError(
            f"{directory / file.name} may not be read", hint="Check the permissions of the run."
        ) from error
    except OSError as error:
        return {}, [DamagedError(file.name, f"unreadable: {error.strerror}")]
    try:
        return _read_open(fd, file, keep=keep)
    except OSError as error:
        return {}, [DamagedError(file.name, f"unreadable: {error.strerror}")]
    except EOFError:
        return {}, [DamagedError(file.name, "cut short while it was read")]
    finally:
        os.close(fd)


def digest_of(blob: Blob) -> str:
    """The checksum of a blob's bytes, as ``write_blobs`` would give it."""
    return xxhash.xxh3_128_hexdigest(blob.bytes())


def _write_blob(disk: Disk, fd: int, data: memoryview, whole: xxhash.xxh3_128) -> str:
    own = xxhash.xxh3_128()
    for start in range(0, data.nbytes, CHUNK_NBYTES):
        chunk = data[start : start + CHUNK_NBYTES]
        own.update(chunk)
        whole.update(chunk)
        disk.write(fd, chunk)
    return own.hexdigest()


def _read_open(
    fd: int, file: FileEntry, *, keep: bool
) -> tuple[dict[str, Any], list[DamagedError]]:
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        return {}, [DamagedError(file.name, "not a regular file")]
    if status.st_size != file.nbytes:
        size = f"has {status.st_size} bytes instead of {file.nbytes}"
        return {}, [DamagedError(file.name, size)]
    scratch = memoryview(bytearray(min(CHUNK_NBYTES, max(file.nbytes, 1))))
    whole = xxhash.xxh3_128()
    _absorb(fd, file.header_nbytes, None, scratch, whole)
    values: dict[str, Any] = {}
    damage = []
    for blob in file.blobs:
        value, view = allocate(blob.kind, blob.dtype, blob.shape) if keep else (None, None)
        if _absorb(fd, blob.nbytes, view, scratch, whole) != blob.xxh3_128:
            damage.append(DamagedError(file.name, "its checksum differs", blob.name))
        values[blob.name] = finished(value)
    if not damage and whole.hexdigest() != file.xxh3_128:
        damage.append(DamagedError(file.name, "the checksum of its header differs"))
    return values, damage


def _absorb(
    fd: int, nbytes: int, into: memoryview | None, scratch: memoryview, whole: xxhash.xxh3_128
) -> str:
    """Read the next bytes of a file, into a view or for their checksum only, and return that."""
    own = xxhash.xxh3_128()
    done = 0
    while done < nbytes:
        room = min(CHUNK_NBYTES, nbytes - done)
        chunk = scratch[:room] if into is None else into[done : done + room]
        count = os.readv(fd, [chunk])
        if not count:
            raise EOFError
        own.update(chunk[:count])
        whole.update(chunk[:count])
        done += count
    return own.hexdigest()


def _header(blobs: list[tuple[str, Blob]]) -> bytes:
    entries: dict[str, dict[str, object]] = {}
    end = 0
    for name, blob in blobs:
        start, end = end, end + blob.nbytes
        code = safetensors_code(blob.kind, blob.dtype)
        shape = blob.shape if code else (blob.nbytes,)
        entries[name] = {"dtype": code or "U8", "shape": shape, "data_offsets": (start, end)}
    text = msgspec.json.encode(entries)
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def _alignment_of(blob: Blob) -> int:
    """Largest power of two that divides the blob's elements; those go first, all stay aligned."""
    if blob.kind == "bytes":
        return 1
    itemsize = blob.value.dtype.itemsize
    return min(itemsize & -itemsize, _ALIGNMENT)
