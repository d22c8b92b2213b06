"""The directory of a run's checkpoints: names, listing, verification, quarantine, retention.

::

    checkpoint/
      step-00000100/                 complete: it has a valid manifest
      step-00000200.tmp-<32 hex>/    being written or deleted; swept if its run is dead
      step-00000150.bad-checksum/    set aside, never used or deleted again by us

Which one is the latest follows from the valid manifests; there is no pointer that could be wrong.
"""

from __future__ import annotations

import os
import re
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from isthmus.checkpoint.disk import Disk, hold, remove_directory
from isthmus.checkpoint.files import read_blobs
from isthmus.checkpoint.manifest import (
    MANIFEST_LIMIT_BYTES,
    MANIFEST_NAME,
    DamagedError,
    Manifest,
    unseal,
)
from isthmus.errors import CheckpointError

_STEP: Final = re.compile(r"step-(\d{8,18})", re.ASCII)
_NAMED_STEP: Final = re.compile(r"step-(\d{8,18})(?!\d)", re.ASCII)
_TEMPORARY: Final = re.compile(r"step-\d{8,18}\.tmp-[0-9a-f]{32}", re.ASCII)
_BAD: Final = re.compile(r"step-\d{8,18}\.bad-.+", re.ASCII)


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """A checkpoint that was written, loaded or listed.

    Attributes:
        step: Step after which it was taken.
        path: Its directory.
        world_size: Number of ranks that wrote it.
        nbytes: Bytes of all its files.
        notes: What its user must hear: an item that was reset, an old one that was not deleted.
        rejected: Newer checkpoints that could not be trusted when this one was loaded.
    """

    step: int
    path: Path
    world_size: int
    nbytes: int
    notes: tuple[str, ...] = ()
    rejected: tuple[Rejected, ...] = ()


@dataclass(frozen=True, slots=True)
class Rejected:
    """A checkpoint that was set aside.

    Attributes:
        path: Where it is now.
        file: The file that is damaged.
        reason: What is wrong with it.
        tensor: The damaged tensor, if it can be told.
    """

    path: Path
    file: str
    reason: str
    tensor: str = ""

    def __str__(self) -> str:
        return f"{self.path.name}: {Problem(self.file, self.reason, self.tensor)}"


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong with a checkpoint: the file, what it is, and the tensor if known."""

    file: str
    reason: str
    tensor: str = ""

    def __str__(self) -> str:
        return f"{self.file}: {f'{self.tensor}: ' if self.tensor else ''}{self.reason}"


@dataclass(frozen=True, slots=True)
class VerifyResult:
    """What ``verify`` found; ``problems`` is empty if every byte is as it was written."""

    path: Path
    problems: tuple[Problem, ...]

    @property
    def ok(self) -> bool:
        """Whether every byte is as it was written."""
        return not self.problems


def step_name(step: int) -> str:
    """Name of the directory of a step's checkpoint."""
    return f"step-{step:08d}"


def temporary_name(step: int) -> str:
    """A new name for a directory that is being written or deleted."""
    return f"{step_name(step)}.tmp-{uuid.uuid4().hex}"


def steps_in(directory: Path) -> list[int]:
    """Steps that have a directory of their own, oldest first, valid or not.

    Raises:
        CheckpointError: The directory can't be read.
    """
    matches = (_STEP.fullmatch(name) for name in _names_in(directory))
    steps = (int(match[1]) for match in matches if match)
    return sorted(step for step in steps if (directory / step_name(step)).is_dir())


def set_aside_in(directory: Path) -> list[Path]:
    """Checkpoints that were quarantined, by name."""
    return sorted(directory / name for name in _names_in(directory) if _BAD.fullmatch(name))


def read_manifest(path: Path) -> tuple[Manifest, bytes]:
    """The manifest of a checkpoint, and its bytes.

    Raises:
        DamagedError: It is missing or not what was written.
        CheckpointError: A later isthmus wrote it, or it can't be read from here.
    """
    try:
        fd = os.open(path / MANIFEST_NAME, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        with open(fd, "rb") as file:
            data = file.read(MANIFEST_LIMIT_BYTES + 1)
    except FileNotFoundError as error:
        raise DamagedError(MANIFEST_NAME, "missing") from error
    except PermissionError as error:
        raise CheckpointError(
            f"{path / MANIFEST_NAME} may not be read", hint="Check the permissions of the run."
        ) from error
    except OSError as error:
        raise DamagedError(MANIFEST_NAME, f"unreadable: {error.strerror}") from error
    if len(data) > MANIFEST_LIMIT_BYTES:
        raise DamagedError(MANIFEST_NAME, f"larger than {MANIFEST_LIMIT_BYTES} bytes")
    manifest = unseal(data)
    named = _NAMED_STEP.match(path.name)
    if named and int(named[1]) != manifest.step:
        raise DamagedError(MANIFEST_NAME, f"written for step {manifest.step}, not {path.name}")
    return manifest, data


def list_checkpoints(directory: str | os.PathLike[str]) -> list[CheckpointInfo]:
    """The checkpoints of a directory that have a valid manifest, oldest first.

    Only the manifests are read; ``verify`` reads the rest.

    Raises:
        CheckpointError: The directory can't be read, or a later isthmus wrote into it.
    """
    directory = Path(directory)
    found = []
    for step in steps_in(directory):
        path = directory / step_name(step)
        try:
            manifest, data = read_manifest(path)
        except DamagedError:
            continue
        found.append(info_of(path, manifest, data))
    return found


def info_of(path: Path, manifest: Manifest, sealed: bytes) -> CheckpointInfo:
    """What a valid manifest says of its checkpoint."""
    return CheckpointInfo(manifest.step, path, manifest.world_size, manifest.nbytes + len(sealed))


def verify(path: str | os.PathLike[str]) -> VerifyResult:
    """Read every byte of a checkpoint and say what is not as it was written; changes nothing.

    Raises:
        CheckpointError: There is no such directory, or a later isthmus wrote it.
    """
    path = Path(path)
    if not path.is_dir():
        raise CheckpointError(f"{path} is not a checkpoint", hint="Name a directory step-NNNNNNNN.")
    try:
        manifest, _ = read_manifest(path)
    except DamagedError as damage:
        return VerifyResult(path, (Problem(damage.file, damage.reason),))
    damages = [
        damage for file in manifest.files for damage in read_blobs(path, file, keep=False)[1]
    ]
    return VerifyResult(path, tuple(Problem(d.file, d.reason, d.tensor) for d in damages))


def sweep(disk: Disk, directory: Path) -> list[str]:
    """Delete what dead runs left half-written, and say what could not be deleted."""
    notes = []
    for name in _names_in(directory):
        if not _TEMPORARY.fullmatch(name):
            continue
        try:
            held = hold(directory / name)
        except BlockingIOError:
            continue  # a living process is writing it
        except OSError as error:
            notes.append(f"{name} is left over from a dead run: {error.strerror}")
            continue
        try:
            remove_directory(disk, directory / name)
        except OSError as error:
            notes.append(f"{name} is left over from a dead run: {error.strerror}")
        finally:
            os.close(held)
    return notes


def set_aside(disk: Disk, path: Path, damage: DamagedError) -> Rejected:
    """Rename a checkpoint that can't be trusted so that it is never used; nothing is deleted.

    Raises:
        CheckpointError: It could not be renamed.
    """
    target = base = path.with_name(f"{path.name}.bad-{_slug(damage.reason)}")
    copy = 1
    while target.exists():
        copy += 1
        target = base.with_name(f"{base.name}-{copy}")
    try:
        disk.rename(path, target)
        disk.sync_directory(path.parent)
    except OSError as error:
        raise CheckpointError(
            f"{path} is damaged ({damage.file}: {damage.reason}) and could not be set aside: "
            f"{error.strerror}",
            hint="Move it away by hand; the next older checkpoint will then be used.",
        ) from error
    return Rejected(target, damage.file, damage.reason, damage.tensor)


def retire(disk: Disk, directory: Path, keep_last: int) -> list[str]:
    """Delete all but the newest valid checkpoints, and say what could not be deleted.

    Each is renamed first, so that none is ever seen half-deleted.
    """
    notes = []
    for old in list_checkpoints(directory)[:-keep_last]:
        doomed = directory / temporary_name(old.step)
        try:
            disk.rename(old.path, doomed)
            disk.sync_directory(directory)
            remove_directory(disk, doomed)
        except OSError as error:
            notes.append(f"{old.path.name} could not be deleted: {error.strerror}")
    return notes


def _names_in(directory: Path) -> list[str]:
    try:
        return sorted(os.listdir(directory))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(
            f"{directory} can't be read: {error.strerror}",
            hint="The checkpoint directory must be a directory that this user may read.",
        ) from error


def _slug(reason: str) -> str:
    for word in ("checksum", "missing", "unreadable", "bytes", "manifest"):
        if word in reason:
            return "size" if word == "bytes" else word
    return "format"
