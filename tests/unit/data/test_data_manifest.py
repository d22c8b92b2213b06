"""What a manifest says has changed."""

from __future__ import annotations

import msgspec
import pytest

from isthmus.data import Manifest, check_unchanged, describe_change
from isthmus.data.manifest import Entry, Skipped, Split, SplitFile
from isthmus.errors import DataError


def entry(name: str, content: str = "", split: Split = "train") -> Entry:
    return Entry(name, split, 1, 5, content or f"hash of {name}")


def manifest(*entries: Entry, tokenizer_hash: str = "bytes", train_checksum: str = "") -> Manifest:
    files: dict[Split, SplitFile] = {
        "train": SplitFile(10, 10, 10, train_checksum),
        "validation": SplitFile(3, 3, 3, ""),
    }
    return Manifest("text", "bytes", tokenizer_hash, 256, "uint8", 0, files, entries)


OLD = manifest(entry("a"), entry("b"), entry("c", split="validation"))


@pytest.mark.parametrize(
    ("new", "changes"),
    [
        (OLD, []),
        (manifest(entry("a"), entry("b", "x"), entry("c", split="validation")), ["changed: b"]),
        (manifest(entry("a"), entry("c", split="validation")), ["missing now: b"]),
        (manifest(*OLD.entries, entry("d")), ["new: d"]),
        (
            manifest(entry("a"), entry("b"), entry("c")),
            ["moved between training and validation: c"],
        ),
        (
            manifest(entry("b"), entry("a"), entry("c", split="validation")),
            ["the order of the documents"],
        ),
        (
            manifest(*OLD.entries, tokenizer_hash="other"),
            ["the tokenizer: bytes before, bytes now"],
        ),
        (
            manifest(*OLD.entries, train_checksum="other"),
            ["the tokens: the same documents are tokenized differently now"],
        ),
        (
            manifest(entry("a", "x"), entry("d")),
            ["changed: a", "missing now: b, c", "new: d"],
        ),
    ],
)
def test_changes_are_named(new: Manifest, changes: list[str]) -> None:
    assert describe_change(OLD, new) == changes


def test_long_lists_are_cut() -> None:
    new = manifest(*OLD.entries, *(entry(f"n{i}") for i in range(9)))
    assert describe_change(OLD, new) == ["new: n0, n1, n2, n3, n4 and 4 more"]


def test_check_unchanged() -> None:
    check_unchanged(OLD, OLD)
    with pytest.raises(DataError, match=r"began with:\n  new: d") as caught:
        check_unchanged(OLD, manifest(*OLD.entries, entry("d")))
    assert "new run" in caught.value.hint


def test_json_round_trip() -> None:
    full = msgspec.structs.replace(OLD, skipped=(Skipped("x", "empty", 3),))
    again = Manifest.from_json(full.to_json())
    assert again == full
    assert again.digest == full.digest == OLD.digest


def test_where_the_text_lay_is_not_in_the_digest() -> None:
    assert msgspec.structs.replace(OLD, source="elsewhere").digest == OLD.digest
