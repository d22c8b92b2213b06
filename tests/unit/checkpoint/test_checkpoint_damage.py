"""No damaged byte is ever loaded: flips, truncations, foreign and malicious files."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import xxhash
from checkpoint_states import Value, items_at, same

from isthmus.checkpoint import Checkpointer, Item, list_checkpoints, verify
from isthmus.checkpoint.manifest import (
    MANIFEST_LIMIT_BYTES,
    BlobEntry,
    FileEntry,
    Manifest,
    seal,
    unseal,
)
from isthmus.errors import CheckpointError

NUM_FLIPS = 400
NUM_TRUNCATIONS = 100


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the checkpoints of steps 1 and 2, with replicated and per-rank items."""
    directory = tmp_path_factory.mktemp("good") / "checkpoint"
    for step in (1, 2):
        Checkpointer(directory).save(step, both(step)[0])
    return directory


def both(step: int) -> tuple[dict[str, Item], Value, Value]:
    items, value = items_at(step)
    own = Value({"random": items_at(step + 100)[1].state})
    return {**items, "own": Item(own, scope="per_rank")}, value, own


def newest(directory: Path) -> Path:
    return directory / "step-00000002"


def must_load_step_1(directory: Path) -> Any:
    """The newest is damaged: the one before is loaded, exactly; returns why the newest was not."""
    items, value, own = both(3)
    info = Checkpointer(directory).load(items)
    assert info is not None
    assert info.step == 1
    _, expected, expected_own = both(1)
    assert same(value.state, expected.state)
    assert same(own.state, expected_own.state)
    (rejected,) = info.rejected
    assert rejected.path.is_dir()
    assert rejected.path.name.startswith("step-00000002.bad-")
    assert not newest(directory).exists()
    return rejected


def flip(path: Path, position: int, bit: int) -> None:
    with path.open("r+b") as file:
        file.seek(position)
        (byte,) = file.read(1)
        file.seek(position)
        file.write(bytes([byte ^ 1 << bit]))


def places(path: Path) -> list[tuple[Path, int]]:
    return [
        (file, position)
        for file in sorted(path.iterdir())
        for position in range(file.stat().st_size)
    ]


def test_random_bit_flips_are_never_loaded(tmp_path: Path, good: Path) -> None:
    chance = random.Random(20)
    for number, (file, position) in enumerate(chance.choices(places(newest(good)), k=NUM_FLIPS)):
        directory = tmp_path / str(number)
        shutil.copytree(good, directory)
        flip(newest(directory) / file.name, position, chance.randrange(8))
        assert must_load_step_1(directory).file == file.name


def test_random_truncations_are_never_loaded(tmp_path: Path, good: Path) -> None:
    chance = random.Random(21)
    for number, (file, position) in enumerate(
        chance.choices(places(newest(good)), k=NUM_TRUNCATIONS)
    ):
        directory = tmp_path / str(number)
        shutil.copytree(good, directory)
        os.truncate(newest(directory) / file.name, position)
        assert must_load_step_1(directory).file == file.name


def test_a_flip_of_any_byte_is_found_and_named(tmp_path: Path, good: Path) -> None:
    """Every byte of every file; where it lies in a tensor, that tensor is named and no other."""
    path = tmp_path / "step-00000002"
    shutil.copytree(newest(good), path)
    entries = {file.name: file for file in unseal((path / "manifest.json").read_bytes()).files}
    tensors = set()
    for file, position in places(path):
        bit = position % 8
        flip(file, position, bit)
        (problem,) = verify(path).problems
        flip(file, position, bit)
        assert problem.file == file.name
        assert problem.tensor == tensor_at(entries.get(file.name), position)
        tensors.add(problem.tensor)
    assert verify(path).ok
    assert tensors > {"", "it/weight", "it/flags", "it/raw", "own/random/weight"}


def tensor_at(file: FileEntry | None, position: int) -> str:
    if file is None or position < file.header_nbytes:
        return ""
    position -= file.header_nbytes
    for blob in file.blobs:
        if position < blob.nbytes:
            return blob.name
        position -= blob.nbytes
    raise IndexError(position)


def test_verify_names_every_damaged_tensor_and_changes_nothing(tmp_path: Path, good: Path) -> None:
    directory = tmp_path / "checkpoint"
    shutil.copytree(good, directory)
    path = newest(directory)
    file = path / "shared-00000.safetensors"
    entry = next(
        f for f in unseal((path / "manifest.json").read_bytes()).files if f.name == file.name
    )
    flip(file, entry.header_nbytes + 1, 0)
    flip(file, entry.nbytes - 1, 7)
    (path / "rank-00000.safetensors").unlink()
    result = verify(path)
    assert not result.ok
    assert [str(problem) for problem in result.problems] == [
        "shared-00000.safetensors: it/weight: its checksum differs",
        "shared-00000.safetensors: it/raw: its checksum differs",
        "rank-00000.safetensors: missing",
    ]
    assert sorted(p.name for p in directory.iterdir()) == ["step-00000001", "step-00000002"]


def test_longer_files_and_links_are_refused(tmp_path: Path, good: Path) -> None:
    for number, damage in enumerate([lengthen, link_elsewhere, make_directory]):
        directory = tmp_path / str(number)
        shutil.copytree(good, directory)
        damage(newest(directory) / "shared-00000.safetensors")
        assert must_load_step_1(directory).file == "shared-00000.safetensors"


def lengthen(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def link_elsewhere(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def make_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


GARBAGE = {
    "empty": b"",
    "no JSON": b"\xff\xfe" * 100,
    "other JSON": b'{"a": 1}',
    "list": b"[" * 10_000,
    "short": b'{"xxh3_128":"',
    "right length": b"x" * 60,
}


@pytest.mark.parametrize("data", GARBAGE.values(), ids=GARBAGE)
def test_garbage_for_a_manifest(tmp_path: Path, good: Path, data: bytes) -> None:
    directory = tmp_path / "checkpoint"
    shutil.copytree(good, directory)
    (newest(directory) / "manifest.json").write_bytes(data)
    rejected = must_load_step_1(directory)
    assert rejected.file == "manifest.json"
    assert "not a manifest" in rejected.reason


def test_a_huge_manifest_is_not_read(tmp_path: Path, good: Path) -> None:
    directory = tmp_path / "checkpoint"
    shutil.copytree(good, directory)
    os.truncate(newest(directory) / "manifest.json", MANIFEST_LIMIT_BYTES + 1)
    assert "larger than" in must_load_step_1(directory).reason


def blob(**changes: Any) -> Callable[[Manifest], Manifest]:
    return lambda manifest: in_first_file(
        manifest,
        lambda file: {
            "blobs": (msgspec.structs.replace(file.blobs[0], **changes), *file.blobs[1:])
        },
    )


def file(**changes: Any) -> Callable[[Manifest], Manifest]:
    return lambda manifest: in_first_file(manifest, lambda _: changes)


def in_first_file(manifest: Manifest, changes: Callable[[FileEntry], dict[str, Any]]) -> Manifest:
    first, *rest = manifest.files
    return msgspec.structs.replace(
        manifest, files=(msgspec.structs.replace(first, **changes(first)), *rest)
    )


def whole(**changes: Any) -> Callable[[Manifest], Manifest]:
    return lambda manifest: msgspec.structs.replace(manifest, **changes)


def tree(new: Any) -> Callable[[Manifest], Manifest]:
    def change(manifest: Manifest) -> Manifest:
        it = msgspec.structs.replace(manifest.items["it"], trees=(new,))
        return msgspec.structs.replace(manifest, items={**manifest.items, "it": it})

    return change


MALICE = {
    "parent": file(name="../step-00000001/shared-00000.safetensors"),
    "absolute": file(name="/etc/passwd"),
    "slash": file(name="shared-00000.safetensors/../manifest.json"),
    "newline": file(name="shared-00000.safetensors\n"),
    "negative header": file(header_nbytes=-8),
    "huge file": file(nbytes=2**62),
    "huge tensor": blob(shape=(2**50,), nbytes=2**52),
    "negative shape": blob(shape=(-40,)),
    "no bytes, endless shape": blob(shape=(0, 2**62), nbytes=0),
    "shape of another size": blob(shape=(41,)),
    "unknown type": blob(dtype="float33"),
    "objects": blob(kind="array", dtype="|O", shape=(20,), nbytes=160),
    "structured": blob(kind="array", dtype="i4,i4"),
    "no type": blob(kind="array", dtype=""),
    "no ranks": whole(world_size=0),
    "more ranks than states": whole(world_size=2),
    "another step": whole(step=7),
    "no files": whole(files=()),
    "file twice": lambda m: msgspec.structs.replace(m, files=(*m.files, m.files[0])),
    "unknown tag": tree({"eval": "1"}),
    "unknown blob": tree({"blob": "nothing"}),
    "bad pairs": tree({"dict": [[1]]}),
    "bad digits": tree({"float": "zz"}),
    "unhashable key": tree({"dict": [[[1], 2]]}),
    "scalar of none": tree({"scalar": "it/raw"}),
}


@pytest.mark.parametrize("change", MALICE.values(), ids=MALICE)
def test_a_manifest_made_to_harm(
    tmp_path: Path, good: Path, change: Callable[[Manifest], Manifest]
) -> None:
    directory = tmp_path / "checkpoint"
    shutil.copytree(good, directory)
    path = newest(directory) / "manifest.json"
    path.write_bytes(seal(change(unseal(path.read_bytes()))))
    assert must_load_step_1(directory)


@pytest.mark.parametrize("depth", [600, 1_000_000])
def test_a_bottomless_manifest(tmp_path: Path, good: Path, depth: int) -> None:
    directory = tmp_path / "checkpoint"
    shutil.copytree(good, directory)
    path = newest(directory) / "manifest.json"
    sealed = seal(tree("HERE")(unseal(path.read_bytes())))
    body = sealed[57:-1].replace(b'"HERE"', b"[" * depth + b"]" * depth)
    digest = xxhash.xxh3_128_hexdigest(body).encode()
    path.write_bytes(b'{"xxh3_128":"' + digest + b'","manifest":' + body + b"}")
    assert must_load_step_1(directory).file == "manifest.json"


def test_a_later_format_is_not_set_aside(tmp_path: Path, good: Path) -> None:
    directory = tmp_path / "checkpoint"
    shutil.copytree(good, directory)
    path = newest(directory) / "manifest.json"
    path.write_bytes(seal(whole(format=2)(unseal(path.read_bytes()))))
    items = both(3)[0]
    for attempt in (
        lambda: Checkpointer(directory).load(items),
        lambda: Checkpointer(directory).save(3, items),
        lambda: list_checkpoints(directory),
        lambda: verify(newest(directory)),
    ):
        with pytest.raises(CheckpointError, match="format 2"):
            attempt()
    assert newest(directory).is_dir()


def test_when_none_is_good_it_does_not_start_afresh(tmp_path: Path, good: Path) -> None:
    directory = tmp_path / "checkpoint"
    shutil.copytree(good, directory)
    for path in directory.iterdir():
        flip(path / "shared-00000.safetensors", 300, 1)
    items, value, _ = both(3)
    before = value.state
    for _ in range(2):
        with pytest.raises(CheckpointError, match="no good checkpoint is left") as caught:
            Checkpointer(directory).load(items)
        assert "bad-checksum" in str(caught.value)
        assert value.state is before
    assert "Move" in caught.value.hint


def test_names_of_the_set_aside_do_not_collide(tmp_path: Path, good: Path) -> None:
    directory = tmp_path / "checkpoint"
    shutil.copytree(good, directory)
    for _ in range(3):
        flip(newest(directory) / "shared-00000.safetensors", 300, 1)
        rejected = must_load_step_1(directory)
        Checkpointer(directory).save(2, both(2)[0])
    assert rejected.path.name == "step-00000002.bad-checksum-3"


def test_unreadable_for_this_user_is_an_error_and_not_damage(
    tmp_path: Path, good: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "checkpoint"
    shutil.copytree(good, directory)
    really_open = os.open

    def refuse(path: Any, *args: Any) -> int:
        if str(path).endswith(".safetensors"):
            raise PermissionError(13, "Permission denied", str(path))
        return really_open(path, *args)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(CheckpointError, match="may not be read"):
        Checkpointer(directory).load(both(3)[0])
    assert newest(directory).is_dir()


def test_nothing_there_is_none(tmp_path: Path) -> None:
    assert Checkpointer(tmp_path / "nowhere").load(both(3)[0]) is None
    assert list_checkpoints(tmp_path / "nowhere") == []
    with pytest.raises(CheckpointError, match="is not a checkpoint"):
        verify(tmp_path / "nowhere")


def test_listing(good: Path) -> None:
    infos = list_checkpoints(good)
    assert [info.step for info in infos] == [1, 2]
    for info in infos:
        assert info.world_size == 1
        assert info.nbytes == sum(file.stat().st_size for file in info.path.iterdir())


def test_blob_entries_are_what_the_file_holds(good: Path) -> None:
    manifest = unseal((newest(good) / "manifest.json").read_bytes())
    entries = {blob.name: blob for file in manifest.files for blob in file.blobs}
    weight = entries["it/weight"]
    assert isinstance(weight, BlobEntry)
    assert (weight.kind, weight.dtype, weight.shape, weight.nbytes) == (
        "tensor",
        "float32",
        (40,),
        160,
    )
