"""One load: the newest checkpoint that every rank can trust, or none at all.

Rank 0 proposes a checkpoint and hands out its manifest. Every rank reads and verifies the files
that it needs, and a share of those that it does not. If anybody found damage, rank 0 sets the
checkpoint aside and proposes the next. Only when all ranks hold a whole verified state in memory is
any state changed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, cast

import msgspec

from isthmus.checkpoint.disk import Disk
from isthmus.checkpoint.files import read_blobs
from isthmus.checkpoint.folder import (
    CheckpointInfo,
    Rejected,
    info_of,
    read_manifest,
    set_aside,
    set_aside_in,
    step_name,
    steps_in,
)
from isthmus.checkpoint.item import Item, Rederivable, check_fit
from isthmus.checkpoint.manifest import MANIFEST_NAME, DamagedError, Manifest, rank_file, unseal
from isthmus.checkpoint.peers import Peers, together
from isthmus.checkpoint.tree import decode
from isthmus.errors import CheckpointError

_ACCEPT: Final = b"accept"
_NEXT: Final = b"next"


class _Proposal(msgspec.Struct, frozen=True):
    """The checkpoint to try (no manifest: none was ever written), and those rejected so far."""

    manifest: bytes
    rejected: tuple[tuple[str, str, str, str], ...]


class _Damage(msgspec.Struct, frozen=True):
    file: str
    reason: str
    tensor: str


class Load:
    """A load in progress; ``run`` is called once, by every rank.

    Args:
        directory: The directory of the checkpoints.
        items: The state to load into.
        peers: The ranks.
        disk: The file system.
    """

    def __init__(
        self, directory: Path, items: Mapping[str, Item], *, peers: Peers, disk: Disk
    ) -> None:
        self._directory = directory
        self._items = items
        self._peers = peers
        self._disk = disk
        self._path = directory
        self._rejected: list[Rejected] = []

    def run(self) -> CheckpointInfo | None:
        """Load the newest good checkpoint, and return which one; None if none was ever written.

        Raises:
            CheckpointError: On every rank: none of the checkpoints is good, or the newest good one
                does not fit the items.
        """
        while True:
            answer = together(self._peers, bytes, self._propose)
            proposal = msgspec.msgpack.decode(answer, type=_Proposal)
            if not proposal.manifest:
                return None
            reading = _Reading(self._directory, proposal.manifest, self._items, self._peers)
            self._path = reading.info.path
            if together(self._peers, reading.read, self._judge) == _ACCEPT:
                break
        together(self._peers, reading.apply, lambda _: b"")
        rejected = tuple(Rejected(Path(path), *rest) for path, *rest in proposal.rejected)
        return replace(reading.info, notes=reading.notes(), rejected=rejected)

    def _propose(self, _reports: list[bytes]) -> bytes:
        """Rank 0: the newest checkpoint with a valid manifest."""
        for step in reversed(steps_in(self._directory)):
            path = self._directory / step_name(step)
            try:
                _, sealed = read_manifest(path)
            except DamagedError as damage:
                self._rejected.append(set_aside(self._disk, path, damage))
                continue
            return self._proposal(sealed)
        bad = set_aside_in(self._directory)
        if bad:
            found = "; ".join(map(str, self._rejected)) or ", ".join(path.name for path in bad)
            raise CheckpointError(
                f"no good checkpoint is left in {self._directory}: {found}",
                hint="Move the directories *.bad-* away to start from the beginning.",
            )
        return self._proposal(b"")

    def _proposal(self, sealed: bytes) -> bytes:
        rejected = tuple((str(r.path), r.file, r.reason, r.tensor) for r in self._rejected)
        return msgspec.msgpack.encode(_Proposal(sealed, rejected))

    def _judge(self, reports: list[bytes]) -> bytes:
        """Rank 0: accept the checkpoint if nobody found damage, otherwise set it aside."""
        for rank, report in enumerate(reports):
            for damage in msgspec.msgpack.decode(report, type=list[_Damage]):
                if damage.reason == "missing" and (self._path / damage.file).exists():
                    raise CheckpointError(
                        f"rank {rank} does not see {self._path / damage.file}, which rank 0 sees",
                        hint="All ranks must share the checkpoint directory.",
                    )
                bad = DamagedError(damage.file, damage.reason, damage.tensor)
                self._rejected.append(set_aside(self._disk, self._path, bad))
                return _NEXT
        return _ACCEPT


class _Reading:
    """One checkpoint as one rank sees it: read, held to its checksums, then taken over."""

    def __init__(
        self, directory: Path, sealed: bytes, items: Mapping[str, Item], peers: Peers
    ) -> None:
        self._manifest: Manifest = unseal(sealed)
        self._items = items
        self._peers = peers
        self._resized = self._manifest.world_size != peers.world_size
        self._states: dict[str, Any] = {}
        self.info = info_of(directory / step_name(self._manifest.step), self._manifest, sealed)

    def notes(self) -> tuple[str, ...]:
        """What becomes of each item that is not simply loaded as this rank saved it."""
        saved, now = self._manifest.world_size, self._peers.world_size
        return tuple(
            item.resized(name, saved, now)
            for name, item in self._items.items()
            if self._resized and item.scope == "per_rank"
        )

    def read(self) -> bytes:
        """Get every state that this rank needs into memory; report damage, change nothing."""
        self._check_items()
        damages, values = self._read_files()
        if not damages:
            try:
                self._decode(values)
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                damages = [DamagedError(MANIFEST_NAME, f"does not fit the files: {error!r:.200}")]
        for name, state in self._states.items():
            check_fit(name, self._items[name].value, state)
        return msgspec.msgpack.encode([_Damage(d.file, d.reason, d.tensor) for d in damages])

    def apply(self) -> bytes:
        """Hand every state to its item."""
        for name, item in self._items.items():
            try:
                if name in self._states:
                    item.value.load_state_dict(self._states.pop(name))
                elif self._resized and item.on_resize == "rederive":
                    cast(Rederivable, item.value).rederive(
                        step=self._manifest.step,
                        rank=self._peers.rank,
                        world_size=self._peers.world_size,
                    )
            except Exception as error:
                raise CheckpointError(
                    f"{name!r} refused the state in {self.info.path}: {error}",
                    hint="Items may be half loaded now; do not go on with them.",
                ) from error
        return b""

    def _check_items(self) -> None:
        saved = {name: entry.scope for name, entry in self._manifest.items.items()}
        asked = {name: item.scope for name, item in self._items.items()}
        if saved != asked:
            raise CheckpointError(
                f"{self.info.path} holds {_listed(saved)}; expected {_listed(asked)}",
                hint="The run is not the one that was saved; start a new one.",
            )
        stuck = [
            name
            for name, item in self._items.items()
            if self._resized and item.scope == "per_rank" and item.on_resize == "exact"
        ]
        if stuck:
            raise CheckpointError(
                f"{self.info.path} was saved by {self._manifest.world_size} ranks; "
                f"{', '.join(stuck)} cannot be carried over to {self._peers.world_size}",
                hint=f"Go on with {self._manifest.world_size} ranks.",
            )

    def _read_files(self) -> tuple[list[DamagedError], dict[str, dict[str, Any]]]:
        """Read what this rank needs; of the files that it does not need, verify a share."""
        rank, world_size = self._peers.rank, self._peers.world_size
        needed = {rank_file(source) for source in self._sources()}
        damages: list[DamagedError] = []
        values: dict[str, dict[str, Any]] = {}
        for file in self._manifest.files:
            keep = file.name.startswith("shared-") or file.name in needed
            if keep or _index_of(file.name) % world_size == rank:
                values[file.name], damage = read_blobs(self.info.path, file, keep=keep)
                damages += damage
        return damages, values

    def _sources(self) -> range:
        """The former ranks whose own items this rank needs."""
        if not self._resized:
            return range(self._peers.rank, self._peers.rank + 1)
        merges = any(callable(item.on_resize) for item in self._items.values())
        return range(self._manifest.world_size if merges else 0)

    def _decode(self, values: dict[str, dict[str, Any]]) -> None:
        shared: dict[str, Any] = {}
        for name, blobs in values.items():
            if name.startswith("shared-"):
                shared |= blobs
        rank, world_size = self._peers.rank, self._peers.world_size
        for name, item in self._items.items():
            trees = self._manifest.items[name].trees
            if item.scope == "replicated":
                self._states[name] = decode(trees[0], shared)
            elif not self._resized or callable(item.on_resize):
                states = [
                    decode(trees[source], values.get(rank_file(source), {}))
                    for source in self._sources()
                ]
                merge = item.on_resize
                merged = callable(merge) and self._resized
                self._states[name] = merge(states, rank, world_size) if merged else states[0]


def _index_of(file_name: str) -> int:
    return int(re.sub(r"\D", "", file_name))


def _listed(scopes: Mapping[str, str]) -> str:
    return ", ".join(f"{name} ({scope})" for name, scope in scopes.items()) or "nothing"
