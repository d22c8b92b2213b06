"""Prepared data: documents as tokens in two files that are mapped into memory.

::

    CACHE/
      <digest>/train.bin validation.bin manifest.json     tokens, little-endian, no header
      index/<key>.json                                    which digest a source had when last seen
      staging-*/                                          being written

The directory's name is the digest of what is in it, so its tokens never change. It is
written under another name, synced and renamed: two processes that prepare the same data at once
make the same directory, and the second takes the first one's. On opening, sizes and checksums are
held to the manifest; a damaged directory is said to be so in the log, and prepared again.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import mmap
import os
import secrets
import shutil
import time
from collections.abc import Generator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from isthmus.data.encode import Encoder
from isthmus.data.files import checksum, sync_directory, write_atomically
from isthmus.data.manifest import FORMAT_VERSION, SPLITS, Manifest, Split, SplitFile
from isthmus.data.sources import Source
from isthmus.data.write import little_endian, write_tokens
from isthmus.errors import DataError
from isthmus.spec.units import format_bytes

_log = logging.getLogger(__name__)
_SURELY_LOCKED_AFTER_S: Final = 60.0
"""Longer than any process takes from making its staging directory to locking it."""
_MAX_RENAMES: Final = 8


@dataclass(frozen=True)
class PreparedData:
    """Tokens on disk, mapped into memory.

    Attributes:
        path: Their directory.
        manifest: What they are made of.
        tokens: Of each split, all tokens in a row, read-only, of the manifest's dtype.
    """

    path: Path
    manifest: Manifest
    tokens: dict[Split, NDArray[np.unsignedinteger]]


class _DamagedError(Exception):
    """Prepared data are not what their manifest says."""


def prepare(source: Source, encoder: Encoder, cache_dir: Path) -> PreparedData:
    """Opens the prepared data of a source; prepares them first if that was not yet done.

    Raises:
        DataError: A document can't be read, a split would be empty, or the disk is full.
    """
    index = _index_path(source, encoder, cache_dir)
    if index is not None and (known := _open_known(index, cache_dir)):
        return known
    with _explain_os_errors(source, encoder, cache_dir):
        cache_dir.mkdir(parents=True, exist_ok=True)
        _sweep(cache_dir)
        with _staging(cache_dir) as staging:
            manifest = write_tokens(source, encoder, staging)
            prepared = _publish(staging, cache_dir / manifest.digest)
        prepared = _with_manifest(prepared, manifest)
        if index is not None:
            _write_index(index, manifest.digest)
    return prepared


def open_prepared(path: Path) -> PreparedData:
    """Opens a directory of prepared data and verifies it.

    Raises:
        DataError: It is not there, or damaged.
    """
    try:
        return _open(path)
    except (OSError, _DamagedError) as error:
        raise DataError(
            f"the prepared data in {path} can't be used: {error}",
            hint="delete this directory; the data will be prepared again",
        ) from error


# -- opening ---------------------------------------------------------------------------------------


def _open(path: Path) -> PreparedData:
    text = (path / "manifest.json").read_bytes()
    try:
        manifest = Manifest.from_json(text)
    except msgspec.DecodeError as error:
        raise _DamagedError(f"manifest.json: {error}") from error
    if manifest.digest != path.name:
        raise _DamagedError("manifest.json does not belong to this directory")
    tokens = {split: _map(path, split, manifest) for split in SPLITS}
    return PreparedData(path, manifest, tokens)


def _map(path: Path, split: Split, manifest: Manifest) -> NDArray[np.unsignedinteger]:
    expected = manifest.files.get(split, SplitFile(0, 0, 0, ""))
    name = f"{split}.bin"
    with (path / name).open("rb") as file:
        nbytes = os.fstat(file.fileno()).st_size
        if not nbytes or nbytes != expected.file_nbytes:
            raise _DamagedError(f"{name} has {nbytes} bytes instead of {expected.file_nbytes}")
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    if checksum(memoryview(mapped)) != expected.checksum:
        raise _DamagedError(f"{name} has another checksum than its manifest says")
    return np.frombuffer(mapped, little_endian(manifest.dtype))


def _open_known(index: Path, cache_dir: Path) -> PreparedData | None:
    try:
        digest = msgspec.json.decode(index.read_bytes(), type=dict[str, str])["digest"]
    except (OSError, msgspec.DecodeError, KeyError):
        return None
    return _open_sound(cache_dir / digest)


def _open_sound(path: Path) -> PreparedData | None:
    """Opens prepared data that may be missing or damaged."""
    try:
        return _open(path)
    except FileNotFoundError:
        if path.exists():
            _log.warning("prepared data in %s are incomplete; preparing them again", path)
    except (OSError, _DamagedError) as error:
        _log.warning("prepared data in %s are damaged: %s; preparing them again", path, error)
    return None


# -- publishing ------------------------------------------------------------------------------------


@contextlib.contextmanager
def _staging(cache_dir: Path) -> Generator[Path]:
    """A new directory beside the prepared ones; gone afterwards unless it was renamed.

    It is locked, and the kernel unlocks it when its process dies, however that happens.
    """
    staging = cache_dir / f"staging-{secrets.token_hex(8)}"
    staging.mkdir()
    descriptor = os.open(staging, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with contextlib.suppress(OSError):  # without locks, nothing is ever swept
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield staging
    finally:
        os.close(descriptor)
        shutil.rmtree(staging, ignore_errors=True)


def _publish(staging: Path, path: Path) -> PreparedData:
    """Renames a finished directory to its name; an equal one that is there already wins."""
    for _ in range(_MAX_RENAMES):
        try:
            staging.rename(path)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        else:
            sync_directory(path.parent)
            return open_prepared(path)
        if (winner := _open_sound(path)) is not None:
            return winner
        with contextlib.suppress(FileNotFoundError), _staging(path.parent) as aside:
            path.rename(aside / "damaged")
    raise DataError(
        f"cannot put prepared data to {path}: something goes on damaging them",
        hint="name another data cache directory",
    )


def _with_manifest(prepared: PreparedData, manifest: Manifest) -> PreparedData:
    """The same tokens with the newest word on what is not in them: where from, what was skipped."""
    if prepared.manifest == manifest:
        return prepared
    write_atomically(prepared.path / "manifest.json", manifest.to_json())
    return replace(prepared, manifest=manifest)


def _sweep(cache_dir: Path) -> None:
    """Removes what killed preparations left: staging that nobody holds, if it isn't brand new."""
    for staging in cache_dir.glob("staging-*"):
        with contextlib.suppress(OSError), contextlib.ExitStack() as files:
            descriptor = os.open(staging, os.O_RDONLY | os.O_DIRECTORY)
            files.callback(os.close, descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(descriptor).st_mtime < time.time() - _SURELY_LOCKED_AFTER_S:
                shutil.rmtree(staging, ignore_errors=True)


# -- the index -------------------------------------------------------------------------------------


def _index_path(source: Source, encoder: Encoder, cache_dir: Path) -> Path | None:
    fingerprint = source.fingerprint()
    if fingerprint is None:
        return None
    how = f"{FORMAT_VERSION} {encoder.hash} {encoder.separator}\n".encode()
    return cache_dir / "index" / f"{xxhash.xxh3_128_hexdigest(how + fingerprint)}.json"


def _write_index(index: Path, digest: str) -> None:
    index.parent.mkdir(exist_ok=True)
    write_atomically(index, msgspec.json.encode({"digest": digest}))


# -- errors ----------------------------------------------------------------------------------------


@contextlib.contextmanager
def _explain_os_errors(source: Source, encoder: Encoder, cache_dir: Path) -> Generator[None]:
    """Turns what the cache's file system refuses into a DataError."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise DataError(
                f"cannot write prepared data to {cache_dir}: {error.strerror or error}",
                hint="name a data cache directory that can be written",
            ) from error
        needed = "their size is not known beforehand"
        if source.nbytes is not None:
            most = source.nbytes * np.dtype(encoder.dtype).itemsize
            needed = f"up to {format_bytes(most)} are needed"
        raise DataError(
            f"the disk is full while preparing data in {cache_dir}: {needed}, "
            f"{format_bytes(shutil.disk_usage(cache_dir).free)} are free",
            hint="free some space, or name a data cache directory on another disk",
        ) from error
