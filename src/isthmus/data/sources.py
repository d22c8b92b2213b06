"""Where documents come from: the standard library, or any files.

A source lists what it has at once, says what it costs in bytes and what it looked like (its
``fingerprint``, taken without reading a file), and yields documents in an order that depends on
their names alone. Datasets have a module of their own, :mod:`isthmus.data.huggingface`.
"""

from __future__ import annotations

import glob
import os
import platform
import stat
import sysconfig
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NoReturn, Protocol

import xxhash

from isthmus.data.manifest import Skipped, Split
from isthmus.errors import DataError
from isthmus.spec.data import FilesData, StdlibData

_CHUNK_NBYTES: Final = 16 * 2**20
_PEEK_NBYTES: Final = 64 * 2**10
_NOT_STDLIB: Final = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}


@dataclass(frozen=True)
class Document:
    """One text on its way into the prepared data.

    Attributes:
        name: The manifest's entry that it belongs to.
        split: Which side it is on.
        chunks: Reads it, a few MiB at a time.
    """

    name: str
    split: Split
    chunks: Callable[[], Iterator[bytes]]


class Source(Protocol):
    """Yields documents."""

    label: str
    """What this is, in words, to follow "the"."""
    nbytes: int | None
    """Bytes of all documents, None if they must be read to know."""
    drops_duplicates: bool
    """Whether a document that equals an earlier one is left out."""

    def fingerprint(self) -> bytes | None:
        """Equal while the source is surely unchanged; None if that can't be told now."""
        ...

    def documents(self) -> Iterator[Document | Skipped]:
        """All documents, in an order that depends on their names alone."""
        ...


@dataclass(frozen=True)
class FoundFile:
    """A file as it was when the source was listed."""

    path: Path
    name: str
    """Relative to the source, with forward slashes."""
    status: os.stat_result

    @property
    def unchanged_key(self) -> tuple[object, ...]:
        """What is different as soon as the file was written to."""
        s = self.status
        return (self.name, s.st_size, s.st_mtime_ns, s.st_ctime_ns, s.st_dev, s.st_ino)


class FileSource:
    """Documents that are files, divided by a hash of their names or at their tails."""

    drops_duplicates = True

    def __init__(
        self,
        label: str,
        files: list[FoundFile],
        *,
        split: str,
        validation_fraction: float,
        split_salt: str,
    ) -> None:
        self.label = label
        self.files = sorted(files, key=lambda file: file.name)
        self.nbytes: int | None = sum(file.status.st_size for file in files)
        self._split = split
        self._validation_fraction = validation_fraction
        self._split_salt = split_salt

    def fingerprint(self) -> bytes | None:
        """The files' names, sizes, dates and inodes; None if one was written just now.

        A file that was written within the grain of its file system's clock could be written again
        and keep its date (git calls this racy), so nothing is concluded from such a date.
        """
        newest_ns = max(max(f.status.st_mtime_ns, f.status.st_ctime_ns) for f in self.files)
        if newest_ns > settled_before_ns():
            return None
        division = (self._split, self._validation_fraction, self._split_salt)
        return repr((division, [file.unchanged_key for file in self.files])).encode()

    def documents(self) -> Iterator[Document | Skipped]:
        """Each regular file once."""
        seen: dict[tuple[int, int], str] = {}
        for file in self.files:
            if not stat.S_ISREG(file.status.st_mode):
                yield Skipped(file.name, "not a regular file")
                continue
            identity = (file.status.st_dev, file.status.st_ino)
            if identity in seen:
                yield Skipped(file.name, f"the same file as {seen[identity]}")
                continue
            seen[identity] = file.name
            yield from self._documents_of(file)

    def _documents_of(self, file: FoundFile) -> Iterator[Document]:
        if self._split == "tail":
            cut = _cut_near(file.path, (1 - self._validation_fraction) * file.status.st_size)
            yield _document(file.path, f"{file.name}[:{cut}]", "train", stop=cut)
            yield _document(file.path, f"{file.name}[{cut}:]", "validation", start=cut)
        else:
            key = file.name.encode()
            side = side_of(key, salt=self._split_salt, fraction=self._validation_fraction)
            yield _document(file.path, file.name, side)


def settled_before_ns() -> int:
    """Files with dates before this one can't change and keep their dates: two seconds ago."""
    return time.time_ns() - 2 * 10**9


def stdlib_source(spec: StdlibData) -> FileSource:
    """The standard library's modules, less its tests and what differs from one build to the next.

    Raises:
        DataError: This Python came without the source of its library.
    """
    root = Path(sysconfig.get_path("stdlib"))
    files = [
        file
        for file in _walk(root, root, wanted=_is_portable, seen=set())
        if file.name.endswith(".py") and not file.path.name.startswith("_sysconfigdata")
    ]
    if not files:
        raise DataError(
            f"this Python has no source files of its standard library in {root}",
            hint='train on your own text: data = { kind = "files", paths = ["DIRECTORY"] }',
        )
    return FileSource(
        f"standard library of Python {platform.python_version()}",
        files,
        split="file",
        validation_fraction=spec.validation_fraction,
        split_salt=spec.split_salt,
    )


def files_source(spec: FilesData, *, cache_dir: Path) -> FileSource:
    """The files that a spec names; the cache itself is never among them.

    Raises:
        DataError: A path leads nowhere or can't be read, or no file is left.
    """
    roots = [root for path in spec.paths for root in _roots(path)]
    parents = [root if root.is_dir() else root.parent for root in roots]
    base = Path(os.path.commonpath(parents))
    seen = {_identity(cache_dir)} if cache_dir.is_dir() else set()
    found: dict[str, FoundFile] = {}
    for root in roots:
        if not root.is_dir():
            found.setdefault(*_found(root, base))
            continue
        for file in _walk(root, base, wanted=_is_visible, seen=seen):
            if not spec.suffixes or file.path.name.endswith(spec.suffixes):
                found.setdefault(file.name, file)
    if not found:
        endings = f" that end in {', '.join(spec.suffixes)}" if spec.suffixes else ""
        raise DataError(
            f"there are no files{endings} in {', '.join(spec.paths)}",
            hint="name a directory, files, or a pattern such as corpus/**/*.txt in data.paths",
        )
    return FileSource(
        f"files of {', '.join(spec.paths)}",
        list(found.values()),
        split=spec.split,
        validation_fraction=spec.validation_fraction,
        split_salt=spec.split_salt,
    )


def side_of(key: bytes, *, salt: str, fraction: float) -> Split:
    """The side of a document, by a hash of its key: the same on any machine, in any company."""
    draw = xxhash.xxh3_64_intdigest(salt.encode() + b"\0" + key)
    return "validation" if draw < fraction * 2**64 else "train"


def _roots(path: str) -> list[Path]:
    """What one of the spec's paths stands for: itself, or all that a pattern matches."""
    expanded = os.path.expanduser(path)
    matches = [expanded] if os.path.lexists(expanded) else glob.glob(expanded, recursive=True)
    if not matches:
        raise DataError(
            f"there is nothing at {path!r} (looked from {Path.cwd()})",
            hint="correct data.paths; a pattern such as corpus/**/*.txt must match something",
        )
    return [Path(os.path.abspath(match)) for match in sorted(matches)]


def _walk(
    root: Path, base: Path, *, wanted: Callable[[str], bool], seen: set[tuple[int, int]]
) -> Iterator[FoundFile]:
    """Files below a directory, links followed, no directory entered twice.

    Runs of isthmus are passed over: what they write must not become what they learn from.
    """
    seen.add(_identity(root))
    for folder, subfolders, names in os.walk(root, followlinks=True, onerror=_unreadable):
        if "run.toml" in names and "events" in subfolders:
            subfolders.clear()
            continue
        kept = []
        for name in sorted(filter(wanted, subfolders)):
            identity = _identity(Path(folder, name))
            if identity not in seen:
                seen.add(identity)
                kept.append(name)
        subfolders[:] = kept
        for name in sorted(filter(wanted, names)):
            yield _found(Path(folder, name), base)[1]


def _is_visible(name: str) -> bool:
    return not name.startswith(".")


def _is_portable(name: str) -> bool:
    return name not in _NOT_STDLIB and not name.startswith("config-")


def _found(path: Path, base: Path) -> tuple[str, FoundFile]:
    """The file under its name; bytes of the name that aren't UTF-8 are escaped."""
    relative = os.fsencode(path.relative_to(base).as_posix())
    name = relative.decode("utf-8", "backslashreplace")
    try:
        return name, FoundFile(path, name, path.stat())
    except OSError as error:
        _unreadable(error)


def _identity(path: Path) -> tuple[int, int]:
    try:
        status = path.stat()
    except OSError as error:
        _unreadable(error)
    return status.st_dev, status.st_ino


def _unreadable(error: OSError) -> NoReturn:
    raise DataError(
        f"cannot read {error.filename}: {error.strerror}",
        hint="mend its permissions or its link, or leave it out of data.paths",
    ) from error


def _document(
    path: Path, name: str, split: Split, *, start: int = 0, stop: int | None = None
) -> Document:
    return Document(name, split, lambda: _read_chunks(path, start, stop))


def _read_chunks(path: Path, start: int, stop: int | None) -> Iterator[bytes]:
    """The bytes of a file from start to stop, a chunk at a time."""
    try:
        with path.open("rb") as file:
            file.seek(start)
            position = start
            while stop is None or position < stop:
                limit = _CHUNK_NBYTES if stop is None else min(_CHUNK_NBYTES, stop - position)
                chunk = file.read(limit)
                if not chunk:
                    return
                position += len(chunk)
                yield chunk
    except OSError as error:
        error.filename = error.filename or str(path)
        _unreadable(error)


def _cut_near(path: Path, position: float) -> int:
    """The first line start from a position on; if none is near, the first start of a character."""
    start = max(int(position) - 1, 0)
    peek = next(_read_chunks(path, start, start + _PEEK_NBYTES), b"")
    newline = peek.find(b"\n")
    if 0 <= newline < len(peek) - 1:
        return start + newline + 1
    rest = peek[int(position) - start :][:4]
    return int(position) + next((i for i, byte in enumerate(rest) if byte & 0xC0 != 0x80), 0)
