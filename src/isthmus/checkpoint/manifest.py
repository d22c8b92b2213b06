"""The manifest: what a checkpoint holds, and the checksums that the rest of it is held to.

One JSON file, written last, so that a directory with a valid manifest is a complete checkpoint::

    {"xxh3_128":"<of the manifest's bytes>","manifest":{...}}

Nothing in it is believed before its own checksum fits; after that every name, size and type in it
is still checked, since a file may also have been made to harm. Trees are described in ``tree``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import Any, Final, Literal

import msgspec
import xxhash

from isthmus.checkpoint.blob import Kind, nbytes_of
from isthmus.errors import CheckpointError

FORMAT: Final = 1
MANIFEST_NAME: Final = "manifest.json"
MANIFEST_LIMIT_BYTES: Final = 2**28
"""No manifest of ours comes near; a larger file is refused before it is read."""

_FILE_NAME: Final = re.compile(r"(shared|rank)-\d{5,9}\.safetensors", re.ASCII)
_OPENING: Final = b'{"xxh3_128":"'
_MIDDLE: Final = b'","manifest":'
_CLOSING: Final = b"}"
_DIGEST_LENGTH: Final = 32
_LARGEST_EXTENT: Final = 2**60


class BlobEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One blob of a file; blobs follow one another without gaps, in this order."""

    name: str
    kind: Kind
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    xxh3_128: str


class FileEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One file: a safetensors header of ``header_nbytes``, then the blobs."""

    name: str
    nbytes: int
    header_nbytes: int
    xxh3_128: str
    blobs: tuple[BlobEntry, ...]


class ItemEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One item: its scope, and one state tree (replicated) or one for each rank (per_rank)."""

    scope: Literal["replicated", "per_rank"]
    trees: tuple[Any, ...]


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a checkpoint holds."""

    format: int
    isthmus: str
    step: int
    world_size: int
    items: dict[str, ItemEntry]
    files: tuple[FileEntry, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all files but the manifest."""
        return sum(file.nbytes for file in self.files)


class _Format(msgspec.Struct):
    format: int


class DamagedError(Exception):
    """Something of a checkpoint is not what was written. Caught inside this room.

    Attributes:
        file: Name of the file.
        reason: What is wrong with it.
        tensor: Name of the damaged tensor, if it can be told.
    """

    def __init__(self, file: str, reason: str, tensor: str = "") -> None:
        super().__init__(file, reason, tensor)
        self.file = file
        self.reason = reason
        self.tensor = tensor


def shared_file(rank: int) -> str:
    """Name of the file with this rank's part of the replicated items."""
    return f"shared-{rank:05d}.safetensors"


def rank_file(rank: int) -> str:
    """Name of the file with this rank's own items."""
    return f"rank-{rank:05d}.safetensors"


def seal(manifest: Manifest) -> bytes:
    """The bytes of the manifest's file."""
    body = msgspec.json.encode(manifest)
    return _envelope(xxhash.xxh3_128_hexdigest(body).encode(), body)


def unseal(data: bytes) -> Manifest:
    """The manifest in the bytes of its file.

    Raises:
        DamagedError: The bytes are not those that were written, or were never a manifest.
        CheckpointError: A later isthmus wrote it, in a format that this one doesn't know.
    """
    start = len(_OPENING) + _DIGEST_LENGTH + len(_MIDDLE)
    digest = data[len(_OPENING) : len(_OPENING) + _DIGEST_LENGTH]
    body = data[start : -len(_CLOSING)]
    if data != _envelope(digest, body):
        raise DamagedError(MANIFEST_NAME, "not a manifest, or cut short")
    if xxhash.xxh3_128_hexdigest(body).encode() != digest:
        raise DamagedError(MANIFEST_NAME, "its checksum differs")
    try:
        version = msgspec.json.decode(body, type=_Format).format
        if version == FORMAT:
            manifest = msgspec.json.decode(body, type=Manifest)
            _check(manifest)
            return manifest
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise DamagedError(MANIFEST_NAME, f"not a manifest: {error}") from error
    raise CheckpointError(
        f"this checkpoint has format {version}; this isthmus reads format {FORMAT}",
        hint="Read it with the version of isthmus that wrote it, or a later one.",
    )


def _envelope(digest: bytes, body: bytes) -> bytes:
    return b"".join((_OPENING, digest, _MIDDLE, body, _CLOSING))


def _check(manifest: Manifest) -> None:
    """Raise ValueError for what no isthmus writes: foreign paths, sizes that don't add up."""
    _refuse_repeats("file", (file.name for file in manifest.files))
    for file in manifest.files:
        if not _FILE_NAME.fullmatch(file.name):
            raise ValueError(f"file name {file.name!r:.80} is not one that a checkpoint may have")
        _check_blobs(file)
    for scope in ("shared", "rank"):
        blobs = (
            (scope == "shared" or file.name, blob.name)
            for file in manifest.files
            for blob in file.blobs
            if file.name.startswith(scope)
        )
        _refuse_repeats("blob", blobs)
    if manifest.step < 0 or manifest.world_size < 1:
        raise ValueError(f"step {manifest.step} of {manifest.world_size} ranks")
    for name, item in manifest.items.items():
        expected = 1 if item.scope == "replicated" else manifest.world_size
        if len(item.trees) != expected:
            raise ValueError(f"item {name!r:.80} has {len(item.trees)} states, not {expected}")


def _check_blobs(file: FileEntry) -> None:
    for blob in file.blobs:
        extent = math.prod(max(size, 1) for size in blob.shape)
        if any(size < 0 for size in blob.shape) or extent > _LARGEST_EXTENT:
            raise ValueError(f"{file.name}: {blob.name!r:.80} has an impossible shape")
        if nbytes_of(blob.kind, blob.dtype, blob.shape) != blob.nbytes:
            raise ValueError(f"{file.name}: {blob.name!r:.80} has a shape of another size")
    if file.header_nbytes < 0 or file.nbytes != file.header_nbytes + sum(
        blob.nbytes for blob in file.blobs
    ):
        raise ValueError(f"{file.name}: its parts do not add up to its size")


def _refuse_repeats(what: str, names: Iterable[object]) -> None:
    seen: set[object] = set()
    for name in names:
        if name in seen:
            raise ValueError(f"{what} {name!r:.80} appears twice")
        seen.add(name)
