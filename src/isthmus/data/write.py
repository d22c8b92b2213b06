"""Documents to files of tokens, with the manifest that describes them.

Each document is read once: hashed, checked, encoded and written while it passes. One that turns out
to be unsuitable (binary, empty, a duplicate) is taken back by truncating the file.
"""

from __future__ import annotations

import contextlib
import mmap
from collections import Counter
from collections.abc import Generator
from pathlib import Path

import numpy as np
import xxhash

from isthmus.data.encode import Encoder, UnsuitableTextError
from isthmus.data.files import checksum, sync, sync_directory, write_synced
from isthmus.data.manifest import SPLITS, Entry, Manifest, Skipped, Split, SplitFile
from isthmus.data.sources import Document, Source
from isthmus.errors import DataError


def write_tokens(source: Source, encoder: Encoder, folder: Path) -> Manifest:
    """Writes all documents of a source, and the manifest, durably into an empty directory.

    Raises:
        DataError: A document can't be read, or a split has none.
        OSError: The directory's file system refuses.
    """
    dtype = little_endian(encoder.dtype)
    writers = {split: _SplitWriter(folder / f"{split}.bin", dtype) for split in SPLITS}
    entries: dict[tuple[str, Split], Entry] = {}
    skipped: Counter[tuple[str, str]] = Counter()
    first_with: dict[bytes, str] = {}
    with contextlib.ExitStack() as files:
        for writer in writers.values():
            files.enter_context(writer.file)
        for document in source.documents():
            if isinstance(document, Skipped):
                skipped[document.name, document.reason] += 1
                continue
            writer = writers[document.split]
            before = writer.file.tell(), writer.text_nbytes
            try:
                text_hash, nbytes = writer.append(document, encoder)
                if source.drops_duplicates:
                    first = first_with.setdefault(text_hash, document.name)
                    if first != document.name:
                        raise UnsuitableTextError(f"the same text as {first}")
            except UnsuitableTextError as reason:
                writer.rewind(*before)
                skipped[document.name, str(reason)] += 1
                continue
            _account(entries, document, text_hash, nbytes)
        _check_not_empty(source, writers, skipped)
        described = {split: writer.finish() for split, writer in writers.items()}
    manifest = Manifest(
        source=source.label,
        tokenizer=encoder.name,
        tokenizer_hash=encoder.hash,
        vocab_size=encoder.vocab_size,
        dtype=encoder.dtype,
        separator=encoder.separator,
        files=described,
        entries=tuple(entries.values()),
        skipped=tuple(Skipped(*what, documents) for what, documents in skipped.items()),
    )
    write_synced(folder / "manifest.json", manifest.to_json())
    sync_directory(folder)
    return manifest


class _SplitWriter:
    """Appends the documents of one split to its file."""

    def __init__(self, path: Path, dtype: np.dtype) -> None:
        self.path = path
        self.dtype = dtype
        self.text_nbytes = 0
        self.file = path.open("wb")

    def append(self, document: Document, encoder: Encoder) -> tuple[bytes, int]:
        """Writes a document and its separator; returns the hash and the size of its text."""
        hasher = xxhash.xxh3_128()
        nbytes = 0

        def text() -> Generator[bytes]:
            nonlocal nbytes
            for chunk in document.chunks():
                if b"\0" in chunk:
                    raise UnsuitableTextError("contains NUL, as binary files do")
                hasher.update(chunk)
                nbytes += len(chunk)
                yield chunk

        for tokens in encoder.encode(text()):
            self.file.write(tokens.astype(self.dtype, copy=False).data)
        if not nbytes:
            raise UnsuitableTextError("empty")
        self.file.write(np.array(encoder.separator, self.dtype).tobytes())
        self.text_nbytes += nbytes + 1
        return hasher.digest(), nbytes

    def rewind(self, position: int, text_nbytes: int) -> None:
        """Takes back what was appended since."""
        self.file.seek(position)
        self.file.truncate()
        self.text_nbytes = text_nbytes

    def finish(self) -> SplitFile:
        """Makes the file durable and describes it."""
        file_nbytes = self.file.tell()
        sync(self.file)
        if not file_nbytes:
            return SplitFile(0, 0, 0, checksum(b""))
        with self.path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        tokens = file_nbytes // self.dtype.itemsize
        return SplitFile(tokens, self.text_nbytes, file_nbytes, checksum(memoryview(mapped)))


def _account(
    entries: dict[tuple[str, Split], Entry], document: Document, text_hash: bytes, nbytes: int
) -> None:
    """Enters a document, or folds it into the entry that it belongs to."""
    key = (document.name, document.split)
    if (entry := entries.get(key)) is None:
        entries[key] = Entry(document.name, document.split, 1, nbytes, text_hash.hex())
        return
    folded = xxhash.xxh3_128_hexdigest(bytes.fromhex(entry.xxh3_128) + text_hash)
    entries[key] = Entry(
        entry.name, entry.split, entry.documents + 1, entry.nbytes + nbytes, folded
    )


def _check_not_empty(
    source: Source, writers: dict[Split, _SplitWriter], skipped: Counter[tuple[str, str]]
) -> None:
    empty = [split for split, writer in writers.items() if not writer.text_nbytes]
    if len(empty) == len(SPLITS):
        reasons = "; ".join(f"{name}: {reason}" for name, reason in list(skipped)[:3])
        raise DataError(
            f"there is no text in the {source.label}"
            + (f": {skipped.total()} documents skipped, as {reasons}" if skipped else ""),
            hint="name files that have text",
        )
    if empty:
        raise DataError(
            f"none of the documents of the {source.label} fell to {empty[0]}: there are too few",
            hint="change data.validation_fraction or data.split_salt, or validate on the end of "
            'each file: kind = "files" takes split = "tail"',
        )


def little_endian(dtype: str) -> np.dtype:
    """The type of tokens on disk, the same on any machine."""
    return np.dtype(dtype).newbyteorder("<")
