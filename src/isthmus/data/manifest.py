"""The manifest of prepared data: which documents they are made of, and what changed since.

A manifest lies beside the tokens (``manifest.json``) and in each run directory. Its ``digest``
names the data by their content: equal documents, split and tokenized equally, have equal digests on
any machine. Names of files are in it, their directory and dates are not.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Final, Literal

import msgspec
import xxhash

from isthmus.errors import DataError

Split = Literal["train", "validation"]
SPLITS: Final[tuple[Split, ...]] = ("train", "validation")
FORMAT_VERSION: Final = 1
"""Part of every digest: raised when the same documents would give other prepared files."""
_NAMES_SHOWN: Final = 5


class Entry(msgspec.Struct, frozen=True):
    """A document, or a run of small ones that are accounted for together."""

    name: str
    split: Split
    documents: int
    nbytes: int
    """Bytes of text, separators not counted."""
    xxh3_128: str
    """Hash of the text as read (of several documents: each hash folded into the last)."""


class Skipped(msgspec.Struct, frozen=True):
    """A document that was found and not taken, or several of one entry for one reason."""

    name: str
    reason: str
    documents: int = 1


class SplitFile(msgspec.Struct, frozen=True):
    """One of the prepared files."""

    tokens: int
    """Tokens in it, one separator a document included."""
    text_nbytes: int
    """Bytes of text that these tokens stand for, a separator counted as one byte."""
    file_nbytes: int
    checksum: str


class Manifest(msgspec.Struct, frozen=True, dict=True, forbid_unknown_fields=True):
    """Everything that is known about prepared data but the tokens themselves."""

    source: str
    """Where the text came from, in words."""
    tokenizer: str
    tokenizer_hash: str
    vocab_size: int
    dtype: Literal["uint8", "uint16", "uint32"]
    separator: int
    """The token after each document."""
    files: dict[Split, SplitFile]
    entries: tuple[Entry, ...]
    skipped: tuple[Skipped, ...] = ()
    format_version: int = FORMAT_VERSION

    @cached_property
    def digest(self) -> str:
        """Name of these data by content: 32 hexadecimal digits."""
        tokens = (self.tokenizer_hash, self.vocab_size, self.dtype, self.separator)
        content = (self.format_version, tokens, self.files, self.entries)
        return xxhash.xxh3_128_hexdigest(msgspec.json.encode(content))

    def to_json(self) -> bytes:
        """The manifest as indented JSON."""
        return msgspec.json.format(msgspec.json.encode(self), indent=1)

    @staticmethod
    def from_json(text: bytes) -> Manifest:
        """Reads :meth:`to_json`; raises ``msgspec.DecodeError`` if it is no manifest."""
        return msgspec.json.decode(text, type=Manifest)


def describe_change(old: Manifest, new: Manifest) -> list[str]:
    """What differs between two sets of data, one line a finding; empty if they are the same."""
    if old.digest == new.digest:
        return []
    changes = list(_changes(old, new))
    return changes or ["the tokens: the same documents are tokenized differently now"]


def check_unchanged(old: Manifest, new: Manifest) -> None:
    """Holds a resumed run to the data it began with.

    Raises:
        DataError: The data are others; the message names the files.
    """
    if changes := describe_change(old, new):
        raise DataError(
            "the data are not those that this run began with:\n  " + "\n  ".join(changes),
            hint="restore the files, or begin a new run on the new ones (--fresh)",
        )


def _changes(old: Manifest, new: Manifest) -> Iterator[str]:
    if old.format_version != new.format_version:
        yield f"the format of prepared data went from {old.format_version} to {new.format_version}"
    if old.tokenizer_hash != new.tokenizer_hash or old.separator != new.separator:
        yield f"the tokenizer: {old.tokenizer} before, {new.tokenizer} now"
    # A name can be in both splits: rows of one block of a dataset are divided between them.
    before = {(entry.name, entry.split): entry for entry in old.entries}
    after = {(entry.name, entry.split): entry for entry in new.entries}
    gone, come = before.keys() - after.keys(), after.keys() - before.keys()
    moved = {name for name, _ in gone} & {name for name, _ in come}
    changed = {key[0] for key in before.keys() & after.keys() if before[key] != after[key]}
    yield from _listed("changed", changed)
    yield from _listed("missing now", {name for name, _ in gone} - moved - changed)
    yield from _listed("new", {name for name, _ in come} - moved - changed)
    yield from _listed("moved between training and validation", moved - changed)
    if list(before) != list(after) and before == after:
        yield "the order of the documents"


def _listed(what: str, names: set[str]) -> Iterator[str]:
    if names:
        shown = ", ".join(sorted(names)[:_NAMES_SHOWN])
        more = len(names) - _NAMES_SHOWN
        yield f"{what}: {shown}" + (f" and {more} more" if more > 0 else "")
