"""One save, from the state in memory to a directory with its final name.

Two agreements (``peers.together``): that every rank has the same items and the same replicas, then
that every rank's files are on the disk. Only then rank 0 writes the manifest and renames the
directory, so that a checkpoint that can be seen is complete whenever the power goes.

The replicated blobs are spread evenly over the ranks; each rank writes its share and its own items.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from isthmus.checkpoint.blob import Blob
from isthmus.checkpoint.disk import (
    Disk,
    hold,
    make_directories,
    remove_directory,
    write_file,
    writing,
)
from isthmus.checkpoint.files import digest_of, write_blobs
from isthmus.checkpoint.folder import (
    CheckpointInfo,
    info_of,
    list_checkpoints,
    retire,
    set_aside,
    step_name,
    temporary_name,
)
from isthmus.checkpoint.item import Item
from isthmus.checkpoint.manifest import (
    FORMAT,
    MANIFEST_NAME,
    DamagedError,
    FileEntry,
    ItemEntry,
    Manifest,
    rank_file,
    seal,
    shared_file,
)
from isthmus.checkpoint.peers import Peers, together
from isthmus.checkpoint.tree import Json, Packer
from isthmus.errors import CheckpointError


class _Intent(msgspec.Struct, frozen=True):
    """What a rank is about to save; that of replicated items must be the same everywhere."""

    step: int
    scopes: dict[str, str]
    trees: dict[str, str]
    blobs: dict[str, str]


class _Part(msgspec.Struct, frozen=True):
    """What a rank has written: its files, and the trees of its own items."""

    files: tuple[FileEntry, ...]
    trees: dict[str, Any]


class _Committed(msgspec.Struct, frozen=True):
    nbytes: int
    notes: tuple[str, ...]


class Save:
    """A save in progress; ``run`` is called once, by every rank.

    Args:
        directory: The directory of the checkpoints.
        step: Step after which the state is taken.
        items: The state.
        keep_last: Number of checkpoints to keep.
        check_replicas: Whether to compare the content of replicated items between ranks.
        peers: The ranks.
        disk: The file system.
    """

    def __init__(
        self,
        directory: Path,
        step: int,
        items: Mapping[str, Item],
        *,
        keep_last: int,
        check_replicas: bool,
        peers: Peers,
        disk: Disk,
    ) -> None:
        self._directory = directory
        self._step = step
        self._items = items
        self._keep_last = keep_last
        self._check_replicas = check_replicas and peers.world_size > 1
        self._peers = peers
        self._disk = disk
        self._shared, self._own = Packer(), Packer()
        self._trees: dict[str, Json] = {}
        self._temporary: Path | None = None
        self._held: int | None = None

    def run(self) -> CheckpointInfo:
        """Save, and return what was saved once it is safe on the disk.

        Raises:
            CheckpointError: On every rank, if any could not do its part; nothing is left of it.
        """
        try:
            name = together(self._peers, self._prepare, self._begin).decode()
            self._temporary = self._directory / name
            answer = together(self._peers, self._write, self._commit)
        except BaseException:
            if self._peers.rank == 0 and self._temporary is not None:
                with suppress(OSError):  # else it is swept at the next start
                    remove_directory(self._disk, self._temporary)
            raise
        finally:
            if self._held is not None:
                os.close(self._held)
        done = msgspec.msgpack.decode(answer, type=_Committed)
        path = self._directory / step_name(self._step)
        return CheckpointInfo(self._step, path, self._peers.world_size, done.nbytes, done.notes)

    def _prepare(self) -> bytes:
        """Take all items apart and say what they are."""
        for name, item in self._items.items():
            packer = self._shared if item.scope == "replicated" else self._own
            self._trees[name] = packer.pack(name, item.value.state_dict())
        shared = (name for name, item in self._items.items() if item.scope == "replicated")
        intent = _Intent(
            step=self._step,
            scopes={name: item.scope for name, item in self._items.items()},
            trees={name: _digest(self._trees[name]) for name in shared},
            blobs={name: self._signature(blob) for name, blob in self._shared.blobs.items()},
        )
        return msgspec.msgpack.encode(intent)

    def _signature(self, blob: Blob) -> str:
        content = digest_of(blob) if self._check_replicas else ""
        return f"{blob.kind} of {blob.dtype} {list(blob.shape)} {content}"

    def _begin(self, reports: list[bytes]) -> bytes:
        """Rank 0: hold the ranks' intents to each other, then make the temporary directory."""
        _compare([msgspec.msgpack.decode(report, type=_Intent) for report in reports])
        target = self._directory / step_name(self._step)
        newest = max((info.step for info in list_checkpoints(self._directory)), default=-1)
        if newest >= self._step:
            raise CheckpointError(
                f"step {self._step} cannot be saved in {self._directory}, which has step {newest}",
                hint="Steps must grow; resume from the newest checkpoint or use another directory.",
            )
        with writing(self._directory, 0):
            make_directories(self._disk, self._directory)
            if target.exists():
                set_aside(self._disk, target, DamagedError(MANIFEST_NAME, "not a valid manifest"))
            self._temporary = self._directory / temporary_name(self._step)
            self._disk.mkdir(self._temporary)
            self._held = hold(self._temporary)
        return self._temporary.name.encode()

    def _write(self) -> bytes:
        """Write this rank's share of the replicated blobs, and its own."""
        rank, world_size = self._peers.rank, self._peers.world_size
        share = spread(self._shared.blobs, world_size)[rank]
        own = self._own.blobs
        nbytes = sum(blob.nbytes for blob in (*share.values(), *own.values()))
        files = []
        with writing(self._directory, nbytes):
            for name, blobs in ((shared_file(rank), share), (rank_file(rank), own)):
                if blobs:
                    path = self._require_temporary() / name
                    files.append(write_blobs(self._disk, path, blobs))
        trees = {
            name: self._trees[name]
            for name, item in self._items.items()
            if item.scope == "per_rank"
        }
        return msgspec.msgpack.encode(_Part(tuple(files), trees))

    def _commit(self, reports: list[bytes]) -> bytes:
        """Rank 0: everything is on the disk; make it a checkpoint, then delete old ones."""
        parts = [msgspec.msgpack.decode(report, type=_Part) for report in reports]
        manifest = self._manifest(parts)
        sealed = seal(manifest)
        temporary = self._require_temporary()
        target = self._directory / step_name(self._step)
        with writing(self._directory, len(sealed)):
            write_file(self._disk, temporary / MANIFEST_NAME, sealed)
            self._disk.sync_directory(temporary)
            self._disk.rename(temporary, target)
            self._disk.sync_directory(self._directory)
        notes = retire(self._disk, self._directory, self._keep_last)
        nbytes = info_of(target, manifest, sealed).nbytes
        return msgspec.msgpack.encode(_Committed(nbytes, tuple(notes)))

    def _manifest(self, parts: list[_Part]) -> Manifest:
        items = {}
        for name, item in self._items.items():
            if item.scope == "replicated":
                items[name] = ItemEntry(item.scope, (self._trees[name],))
            else:
                items[name] = ItemEntry(item.scope, tuple(part.trees[name] for part in parts))
        return Manifest(
            format=FORMAT,
            isthmus=_version(),
            step=self._step,
            world_size=self._peers.world_size,
            items=items,
            files=tuple(file for part in parts for file in part.files),
        )

    def _require_temporary(self) -> Path:
        if self._temporary is None:
            raise RuntimeError("nothing is being saved")
        return self._temporary


def spread(blobs: Mapping[str, Blob], world_size: int) -> list[dict[str, Blob]]:
    """Which rank writes which replicated blob: the largest first, each to who has least so far."""
    loads = [0] * world_size
    owners = {}
    for name in sorted(blobs, key=lambda name: -blobs[name].nbytes):
        owners[name] = loads.index(min(loads))
        loads[owners[name]] += blobs[name].nbytes
    return [
        {name: blob for name, blob in blobs.items() if owners[name] == rank}
        for rank in range(world_size)
    ]


def _version() -> str:
    try:
        return metadata.version("isthmus")
    except metadata.PackageNotFoundError:  # run from its source tree
        return "unknown"


def _digest(tree: Json) -> str:
    return xxhash.xxh3_128_hexdigest(msgspec.json.encode(tree))


def _compare(intents: list[_Intent]) -> None:
    """Raise CheckpointError unless all ranks are saving the same."""
    first = intents[0]
    for rank, intent in enumerate(intents):
        if (intent.step, intent.scopes) != (first.step, first.scopes):
            raise CheckpointError(
                f"rank 0 saves step {first.step} with items {first.scopes}, "
                f"rank {rank} step {intent.step} with {intent.scopes}",
                hint="Every rank must save the same items after the same step.",
            )
        names = _differences(first.blobs, intent.blobs) or _differences(first.trees, intent.trees)
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise CheckpointError(
                f"{', '.join(names[:3])}{more} should be the same on every rank, "
                f"but differs between rank 0 and rank {rank}",
                hint="The replicas have drifted apart; synchronise them before saving, "
                "or declare the item per_rank.",
            )


def _differences(first: Mapping[str, str], other: Mapping[str, str]) -> list[str]:
    return [name for name in {**first, **other} if first.get(name) != other.get(name)]
