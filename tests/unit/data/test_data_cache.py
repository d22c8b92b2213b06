"""The cache: what is in it, that it is whole, and what happens if it is not."""

from __future__ import annotations

import fcntl
import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import isthmus.data.cache
import isthmus.data.files
import isthmus.data.sources
import isthmus.data.write
from isthmus.data import TextData, describe_change
from isthmus.data.cache import PreparedData, open_prepared
from isthmus.data.files import checksum
from isthmus.errors import DataError

Opener = Callable[..., TextData]
FILES = ("train.bin", "validation.bin", "manifest.json")


def contents(path: Path) -> dict[str, bytes]:
    return {name: (path / name).read_bytes() for name in FILES}


def reasons(data: TextData) -> dict[str, str]:
    return {skipped.name: skipped.reason for skipped in data.manifest.skipped}


def forbid(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    def fail(*_args: Any) -> None:
        raise AssertionError(f"{what} was called")

    monkeypatch.setattr(isthmus.data.cache, what, fail)


def test_files_are_the_documents_each_ended_by_nul(corpus: Path, open_corpus: Opener) -> None:
    data = open_corpus()
    for split in ("train", "validation"):
        expected = b"".join(
            (corpus / entry.name).read_bytes() + b"\0"
            for entry in data.manifest.entries
            if entry.split == split
        )
        assert (data.path / f"{split}.bin").read_bytes() == expected
        assert data.manifest.files[split].text_nbytes == len(expected)
    assert [e.name for e in data.manifest.entries] == sorted(p.name for p in corpus.iterdir())
    assert all(
        e.xxh3_128 == checksum((corpus / e.name).read_bytes()) for e in data.manifest.entries
    )


def test_any_bytes_but_nul_are_taken(corpus: Path, open_corpus: Opener) -> None:
    (corpus / "latin1.txt").write_bytes(bytes(range(1, 256)))
    (corpus / "binary.bin").write_bytes(b"ELF\0\0")
    (corpus / "empty.txt").write_bytes(b"")
    (corpus / "copy.txt").write_bytes((corpus / "00.txt").read_bytes())
    data = open_corpus()
    assert "latin1.txt" in {entry.name for entry in data.manifest.entries}
    assert reasons(data) == {
        "binary.bin": "contains NUL, as binary files do",
        "copy.txt": "the same text as 00.txt",
        "empty.txt": "empty",
    }


def test_nul_in_a_late_chunk_takes_the_whole_file_back(
    corpus: Path, open_corpus: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    clean = open_corpus()
    monkeypatch.setattr(isthmus.data.sources, "_CHUNK_NBYTES", 100)
    (corpus / "10b.bin").write_bytes(b"x" * 950 + b"\0")
    data = open_corpus()
    assert reasons(data) == {"10b.bin": "contains NUL, as binary files do"}
    assert data.digest == clean.digest
    assert reasons(open_corpus()) == reasons(data)
    assert contents(data.path)["train.bin"] == contents(clean.path)["train.bin"]


def test_a_warm_open_reads_no_document(
    open_corpus: Opener, settled: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = open_corpus()
    forbid(monkeypatch, "write_tokens")
    assert open_corpus().digest == first.digest


def test_fresh_files_are_read_again_and_found_equal(open_corpus: Opener) -> None:
    first = open_corpus()
    inode = first.path.stat().st_ino
    second = open_corpus()
    assert second.path == first.path
    assert second.path.stat().st_ino == inode
    assert list(first.path.parent.iterdir()) == [first.path]  # no index, no staging left


def test_a_change_gives_another_directory_and_is_described(
    corpus: Path, open_corpus: Opener, settled: None
) -> None:
    old = open_corpus()
    (corpus / "03.txt").write_text("something else entirely")
    new = open_corpus()
    assert new.path != old.path
    assert old.path.is_dir()
    assert describe_change(old.manifest, new.manifest) == ["changed: 03.txt"]


def test_neither_seed_nor_sequence_length_makes_other_data(
    open_corpus: Opener, settled: None
) -> None:
    assert open_corpus(seed=1).digest == open_corpus(seed=2, sequence_length=5).digest
    assert open_corpus().digest != open_corpus(split_salt="other").digest
    assert open_corpus().digest != open_corpus(validation_fraction=0.3).digest


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", ["flip", "truncate", "empty", "delete", "replace", "grow"])
def test_a_damaged_directory_is_prepared_again(
    open_corpus: Opener,
    settled: None,
    caplog: pytest.LogCaptureFixture,
    name: str,
    damage: str,
) -> None:
    data = open_corpus()
    sound = contents(data.path)
    whole = sound[name]
    broken = {
        "flip": whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:],
        "truncate": whole[:-1],
        "empty": b"",
        "replace": b"{}",
        "grow": whole + b"x",
    }
    (data.path / name).unlink()
    if damage != "delete":
        (data.path / name).write_bytes(broken[damage])
    with pytest.raises(DataError, match="can't be used"):
        open_prepared(data.path)
    with caplog.at_level(logging.WARNING):
        again = open_corpus()
    assert "preparing them again" in caplog.text
    assert contents(again.path) == sound
    assert {p.name for p in data.path.parent.iterdir()} == {data.path.name, "index"}


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_no_flipped_bit_of_the_manifest_changes_the_tokens(
    open_corpus: Opener, monkeypatch: pytest.MonkeyPatch, place: float, bit: int
) -> None:
    monkeypatch.setattr(isthmus.data.sources, "settled_before_ns", lambda: 2**63)
    data = open_corpus()
    manifest = bytearray(contents(data.path)["manifest.json"])
    manifest[int(place * len(manifest))] ^= 1 << bit
    (data.path / "manifest.json").write_bytes(manifest)
    again = open_corpus()
    assert again.manifest.files == data.manifest.files
    assert again.manifest.dtype == data.manifest.dtype
    assert np.array_equal(again.samples(9, 20).tokens, data.samples(9, 20).tokens)


@pytest.mark.parametrize("index", [b"", b"{}", b'{"digest": 3}', b'{"digest": "0123"}', b"\xff"])
def test_a_damaged_index_is_written_again(open_corpus: Opener, settled: None, index: bytes) -> None:
    data = open_corpus()
    (file,) = (data.path.parent / "index").iterdir()
    good = file.read_bytes()
    file.write_bytes(index)
    assert open_corpus().digest == data.digest
    assert file.read_bytes() == good


def test_two_at_once_share_one_directory(
    open_corpus: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    both_written = threading.Barrier(2)
    publish = isthmus.data.cache._publish

    def publish_together(staging: Path, path: Path) -> PreparedData:
        both_written.wait(timeout=60)
        return publish(staging, path)

    monkeypatch.setattr(isthmus.data.cache, "_publish", publish_together)
    with ThreadPoolExecutor(2) as pool:
        first, second = (future.result() for future in [pool.submit(open_corpus) for _ in "ab"])
    assert first.path == second.path
    assert list(first.path.parent.iterdir()) == [first.path]
    assert np.array_equal(first.samples(0, 20).tokens, second.samples(0, 20).tokens)


def test_open_data_survive_the_repair_by_another(open_corpus: Opener) -> None:
    data = open_corpus()
    before = data.samples(0, 20).tokens
    (data.path / "manifest.json").unlink()
    open_corpus()
    assert np.array_equal(data.samples(0, 20).tokens, before)


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_an_interrupted_preparation_leaves_nothing(
    open_corpus: Opener,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: type[BaseException],
) -> None:
    def stop(*_args: object) -> None:
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(isthmus.data.write, "write_synced", stop)
        with pytest.raises(error):
            open_corpus()
    assert list((tmp_path / "cache").iterdir()) == []
    open_corpus()


def test_what_a_killed_preparation_left_is_swept(open_corpus: Opener, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    for name, age_s in (("staging-left", 120), ("staging-held", 120), ("staging-new", 0)):
        (cache / name).mkdir(parents=True)
        (cache / name / "train.bin").write_text("x")
        then_s = (cache / name).stat().st_mtime - age_s
        os.utime(cache / name, (then_s, then_s))
    held = os.open(cache / "staging-held", os.O_RDONLY)
    try:
        fcntl.flock(held, fcntl.LOCK_EX)
        open_corpus()
        assert {p.name for p in cache.glob("staging-*")} == {"staging-held", "staging-new"}
    finally:
        os.close(held)
    open_corpus()
    assert [p.name for p in cache.glob("staging-*")] == ["staging-new"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_says_how_much_is_needed(
    corpus: Path, open_corpus: Opener, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class WriterToFullDisk(isthmus.data.write._SplitWriter):
        def __init__(self, path: Path, dtype: np.dtype) -> None:
            super().__init__(path, dtype)
            self.file.close()
            self.file = Path("/dev/full").open("wb")  # noqa: SIM115

    monkeypatch.setattr(isthmus.data.write, "_SplitWriter", WriterToFullDisk)
    with pytest.raises(DataError, match=r"disk is full .* up to [\d.]+ kB are needed") as caught:
        open_corpus()
    assert "free some space" in caught.value.hint
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_cache_that_is_a_file_is_refused(open_corpus: Opener, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("")
    with pytest.raises(DataError, match=r"cannot write prepared data to .*cache"):
        open_corpus()


def test_one_document_has_nothing_to_validate_on(tmp_path: Path, open_corpus: Opener) -> None:
    book = tmp_path / "book.txt"
    book.write_text("A line of the book.\n" * 100)
    with pytest.raises(DataError, match="fell to validation: there are too few") as caught:
        open_corpus(paths=(str(book),), validation_fraction=0.01)
    assert 'split = "tail"' in caught.value.hint
    data = open_corpus(paths=(str(book),), split="tail")
    assert data.manifest.files["train"].tokens == 1801
    assert data.manifest.files["validation"].tokens == 201


def test_only_unsuitable_files(tmp_path: Path, open_corpus: Opener) -> None:
    folder = tmp_path / "binaries"
    folder.mkdir()
    (folder / "a.bin").write_bytes(b"\0")
    (folder / "b.bin").write_bytes(b"")
    with pytest.raises(DataError, match=r"no text .* 2 documents skipped, as a\.bin: contains NUL"):
        open_corpus(paths=(str(folder),))


def test_too_short_for_one_sample(open_corpus: Opener) -> None:
    with pytest.raises(DataError, match="less than one sample of 100000 tokens") as caught:
        open_corpus(sequence_length=100_000)
    assert "sequence_length" in caught.value.hint


def test_large_files_are_checked_in_places(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isthmus.data.files, "_WHOLE_CHECKSUM_NBYTES", 1000)
    monkeypatch.setattr(isthmus.data.files, "_NUM_PROBES", 10)
    monkeypatch.setattr(isthmus.data.files, "_PROBE_NBYTES", 100)
    content = bytes(1001)
    for place in (0, 500, 1000):
        changed = content[:place] + b"x" + content[place + 1 :]
        assert checksum(changed) != checksum(content)
