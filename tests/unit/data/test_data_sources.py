"""Which files become documents, under which names, on which side."""

from __future__ import annotations

import os
import sysconfig
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import isthmus.data.sources
from isthmus.data.manifest import Skipped
from isthmus.data.sources import FileSource, files_source, side_of, stdlib_source
from isthmus.errors import DataError
from isthmus.spec.data import FilesData, StdlibData


def source_of(*paths: Path | str, cache_dir: Path = Path("/nowhere"), **fields: Any) -> FileSource:
    return files_source(FilesData(paths=tuple(map(str, paths)), **fields), cache_dir=cache_dir)


def names(source: FileSource) -> list[str]:
    return [file.name for file in source.files]


def texts(source: FileSource) -> dict[str, bytes]:
    documents = [d for d in source.documents() if not isinstance(d, Skipped)]
    return {document.name: b"".join(document.chunks()) for document in documents}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    root = tmp_path / "tree"
    for name in ("b.txt", "a/deep/c.txt", "a/d.md", ".hidden/x.txt", "a/.git/y.txt", ".z.txt"):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"text of {name}")
    return root


def test_a_directory_is_read_with_all_below_it(tree: Path) -> None:
    source = source_of(tree)
    assert names(source) == ["a/d.md", "a/deep/c.txt", "b.txt"]
    assert texts(source)["a/deep/c.txt"] == b"text of a/deep/c.txt"
    assert source.nbytes == sum(map(len, texts(source).values()))


def test_suffixes(tree: Path) -> None:
    assert names(source_of(tree, suffixes=(".txt",))) == ["a/deep/c.txt", "b.txt"]
    assert names(source_of(tree, suffixes=(".txt", ".md"))) == names(source_of(tree))


def test_patterns_and_files(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert names(source_of(tree / "**" / "*.txt")) == ["a/deep/c.txt", "b.txt"]
    assert names(source_of(tree / "b.txt")) == ["b.txt"]
    assert names(source_of(tree / ".z.txt", suffixes=(".md",))) == [".z.txt"]
    monkeypatch.chdir(tree)
    assert names(source_of("a/*")) == ["d.md", "deep/c.txt"]
    monkeypatch.setenv("HOME", str(tree))
    assert names(source_of("~/b.txt")) == ["b.txt"]


def test_a_file_whose_name_looks_like_a_pattern(tmp_path: Path) -> None:
    (tmp_path / "a[1].txt").write_text("x")
    assert names(source_of(tmp_path / "a[1].txt")) == ["a[1].txt"]


def test_names_do_not_depend_on_where_the_tree_lies(tree: Path, tmp_path: Path) -> None:
    before = names(source_of(tree / "a", tree / "b.txt"))
    moved = tree.rename(tmp_path / "moved")
    assert names(source_of(moved / "b.txt", moved / "a")) == before


def test_overlapping_paths_give_each_file_once(tree: Path) -> None:
    everything = names(source_of(tree))
    assert names(source_of(tree, tree / "a", tree / "b.txt")) == everything
    assert names(source_of(tree / "a" / "deep", tree, tree / "**" / "*.txt")) == everything


def test_symlink_loops_end(tree: Path) -> None:
    (tree / "a" / "up").symlink_to(tree)
    (tree / "a" / "deep" / "self").symlink_to(".")
    assert names(source_of(tree)) == ["a/d.md", "a/deep/c.txt", "b.txt"]


def test_links_are_followed_once(tree: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "e.txt").write_text("e")
    (tree / "link").symlink_to(elsewhere)
    (tree / "z.txt").hardlink_to(tree / "b.txt")
    source = source_of(tree)
    assert names(source) == ["a/d.md", "a/deep/c.txt", "b.txt", "link/e.txt", "z.txt"]
    assert Skipped("z.txt", "the same file as b.txt") in list(source.documents())


def test_a_pipe_is_skipped_not_waited_for(tree: Path) -> None:
    os.mkfifo(tree / "pipe")
    assert Skipped("pipe", "not a regular file") in list(source_of(tree).documents())


def test_the_cache_is_never_its_own_text(tree: Path) -> None:
    cache = tree / "cache"
    cache.mkdir()
    (cache / "train.bin").write_text("tokens")
    assert "cache/train.bin" in names(source_of(tree))
    assert "cache/train.bin" not in names(source_of(tree, cache_dir=cache))


def test_a_run_never_learns_from_runs(tree: Path) -> None:
    before = names(source_of(tree))
    for run in ("runs/one", "runs/two"):
        (tree / run / "events").mkdir(parents=True)
        (tree / run / "run.toml").write_text("seed = 1\n")
        (tree / run / "events" / "rank-00000.jsonl").write_text("{}\n")
    assert names(source_of(tree)) == before


def test_names_that_are_not_utf8(tree: Path) -> None:
    (tree / os.fsdecode(b"caf\xe9.txt")).write_text("x")
    assert "caf\\xe9.txt" in names(source_of(tree))


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nothing at '.*missing'") as caught:
        source_of(tmp_path / "missing")
    assert "data.paths" in caught.value.hint
    with pytest.raises(DataError, match=r"nothing at '.*\*.txt'"):
        source_of(tmp_path / "*.txt")


def test_nothing_in_it(tmp_path: Path, tree: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(DataError, match=r"no files in .*empty"):
        source_of(empty)
    with pytest.raises(DataError, match=r"no files that end in \.rst"):
        source_of(tree, suffixes=(".rst",))


def test_a_broken_link_is_named(tree: Path) -> None:
    (tree / "broken.txt").symlink_to("nowhere")
    with pytest.raises(DataError, match=r"cannot read .*broken\.txt: No such file"):
        source_of(tree)


def test_a_file_that_cannot_be_read_is_named(tree: Path) -> None:
    (tree / "b2.txt").symlink_to("/proc/self/mem")  # a regular file whose first byte can't be read
    with pytest.raises(DataError, match=r"cannot read .*b2\.txt: Input/output error"):
        texts(source_of(tree))


def test_a_file_that_vanishes_is_named(tree: Path) -> None:
    source = source_of(tree)
    (tree / "b.txt").unlink()
    with pytest.raises(DataError, match=r"cannot read .*b\.txt: No such file"):
        texts(source)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may enter any directory")
def test_a_directory_that_cannot_be_entered_is_named(tree: Path) -> None:
    (tree / "a").chmod(0)
    try:
        with pytest.raises(DataError, match=r"cannot read .*a: Permission denied"):
            source_of(tree)
    finally:
        (tree / "a").chmod(0o755)


def test_files_are_read_in_chunks(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = texts(source_of(tree))
    monkeypatch.setattr(isthmus.data.sources, "_CHUNK_NBYTES", 3)
    source = source_of(tree)
    first = next(source.documents())
    assert not isinstance(first, Skipped)
    assert max(map(len, first.chunks())) == 3
    assert texts(source) == whole


@given(key=st.binary(max_size=30), salt=st.text(max_size=5), low=st.floats(0.01, 0.98))
def test_a_larger_fraction_only_adds_to_validation(key: bytes, salt: str, low: float) -> None:
    if side_of(key, salt=salt, fraction=low) == "validation":
        assert side_of(key, salt=salt, fraction=low + 0.01) == "validation"


def test_sides_have_their_shares_and_depend_on_the_salt() -> None:
    keys = [f"file {i}".encode() for i in range(4000)]
    counts = Counter(side_of(key, salt="", fraction=0.1) for key in keys)
    assert 320 < counts["validation"] < 480  # 400 expected, standard deviation 19
    both = sum(
        side_of(key, salt="", fraction=0.5) == side_of(key, salt="x", fraction=0.5) for key in keys
    )
    assert 1850 < both < 2150


def test_sides_never_change() -> None:
    keys = [f"{i}.py".encode() for i in range(16)]
    sides = "".join(side_of(key, salt="", fraction=0.5)[0] for key in keys)
    assert sides == "ttvvttvvvtvvtvvv"


@pytest.mark.parametrize("text", [b"line\n" * 100, b"x" * 1000, "äöü".encode() * 300, b"x", b"\n"])
@pytest.mark.parametrize("fraction", [0.1, 0.5, 0.99])
def test_tail_split_keeps_every_byte_and_cuts_between_lines(
    tmp_path: Path, text: bytes, fraction: float
) -> None:
    (tmp_path / "long.txt").write_bytes(text)
    source = source_of(tmp_path, split="tail", validation_fraction=fraction)
    train, validation = (d for d in source.documents() if not isinstance(d, Skipped))
    assert (train.split, validation.split) == ("train", "validation")
    head, tail = b"".join(train.chunks()), b"".join(validation.chunks())
    assert head + tail == text
    assert abs(len(tail) - fraction * len(text)) <= 6
    head.decode()
    tail.decode()
    if b"\n" in text and len(text) > 10:
        assert head.endswith(b"\n")


def test_fingerprint_sees_what_changes(tree: Path, settled: None) -> None:
    before = source_of(tree).fingerprint()
    assert before == source_of(tree).fingerprint()
    assert before != source_of(tree, split_salt="x").fingerprint()
    assert before != source_of(tree, validation_fraction=0.2).fingerprint()
    assert before != source_of(tree, split="tail").fingerprint()
    status = (tree / "b.txt").stat()
    (tree / "b.txt").write_text("TEXT OF b.txt")  # as long, and dated back
    os.utime(tree / "b.txt", ns=(status.st_atime_ns, status.st_mtime_ns))
    assert before != source_of(tree).fingerprint()


def test_fresh_files_are_not_believed_by_date(tree: Path) -> None:
    assert source_of(tree).fingerprint() is None


def test_stdlib_is_python_source_without_tests() -> None:
    source = stdlib_source(StdlibData())
    found = names(source)
    assert {"os.py", "asyncio/events.py", "json/decoder.py"} <= set(found)
    assert all(name.endswith(".py") for name in found)
    parts = {part for name in found for part in Path(name).parts}
    assert not parts & {"site-packages", "dist-packages", "test", "tests", "__pycache__"}
    assert not any("_sysconfigdata" in name for name in found)
    assert source.nbytes is not None
    assert source.nbytes > 5_000_000
    sides = Counter(d.split for d in source.documents() if not isinstance(d, Skipped))
    assert 0.05 < sides["validation"] / sides.total() < 0.15


def test_stdlib_without_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda _name: str(tmp_path))
    with pytest.raises(DataError, match="no source files of its standard library") as caught:
        stdlib_source(StdlibData())
    assert "files" in caught.value.hint
