"""A run's directory: which one a configuration belongs to, and what state it is in. No torch.

``runs/NAME`` belongs to the configuration in its ``run.toml``. The same configuration finds it
again and resumes; a changed one gets ``runs/NAME-2`` and is told what differs. One process at a
time holds a run, by a lock on the directory's ``.lock`` that the kernel drops with the process.
"""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, Final

from isthmus.errors import ConfigError
from isthmus.observe.events import RunFinished, RunStarted
from isthmus.observe.log import EventTail, events_path, follow, lab_events_path
from isthmus.spec.load import Resolved, load, to_toml
from isthmus.spec.run import RunSpec, differences

DEFAULT_ROOT: Final = Path("runs")
_END_OF_LOG_NBYTES: Final = 64 * 1024
_ENDINGS: Final = re.compile(r"(.+)-(\d+)")

Difference = tuple[str, Any, Any]


class Status(Enum):
    """What a run directory asks for."""

    NEW = "new"
    RESUME = "resume"
    FINISHED = "finished"


@dataclass(frozen=True)
class RunDirectory:
    """The paths of one run."""

    path: Path

    @property
    def run_toml(self) -> Path:
        """The configuration as resolved, with origins."""
        return self.path / "run.toml"

    @property
    def checkpoints(self) -> Path:
        """The directory of the checkpoints."""
        return self.path / "checkpoint"

    @property
    def report_json(self) -> Path:
        """The report as data."""
        return self.path / "report.json"

    @property
    def report_html(self) -> Path:
        """The report as a page."""
        return self.path / "report.html"

    @property
    def data_manifest(self) -> Path:
        """The files that the run learns from, with their hashes."""
        return self.path / "data.json"

    @property
    def tensorboard(self) -> Path:
        """The directory of TensorBoard files."""
        return self.path / "tensorboard"

    def events(self, rank: int) -> Path:
        """The event log of one rank."""
        return events_path(self.path, rank)

    def load_spec(self) -> RunSpec:
        """The configuration that this run belongs to.

        Raises:
            ConfigError: If it is missing, or not a configuration.
        """
        return load(RunSpec, self.run_toml).spec

    def write_spec(self, resolved: Resolved[RunSpec]) -> None:
        """Writes ``run.toml``, whole or not at all."""
        write_whole(self.run_toml, to_toml(resolved.spec, resolved).encode())

    def is_finished(self) -> bool:
        """Whether the run reached its last step."""
        log = self.events(0)
        start = max(0, log.stat().st_size - _END_OF_LOG_NBYTES) if log.exists() else 0
        return any(isinstance(e, RunFinished) for e in EventTail(log, offset_nbytes=start).poll())

    def lock(self) -> None:
        """Holds the run for the life of this process.

        Raises:
            ConfigError: If another process holds it.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        handle = os.open(self.path / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(handle, 32).decode(errors="replace").strip()
            os.close(handle)
            raise ConfigError(
                f"another process (pid {holder or 'unknown'}) is training in {self.path}",
                hint="wait for it, or use --fresh to begin another run beside it",
            ) from None
        os.ftruncate(handle, 0)
        os.write(handle, str(os.getpid()).encode())


@dataclass(frozen=True)
class Opened:
    """A run directory, locked, with its ``run.toml`` written."""

    directory: RunDirectory
    status: Status
    changed_from: Path | None = None
    """The latest run of the same name, if this one is new because its configuration changed."""
    differences: list[Difference] = field(default_factory=list)


def open_run(
    resolved: Resolved[RunSpec],
    *,
    root: Path = DEFAULT_ROOT,
    explicit: Path | None = None,
    fresh: bool = False,
    dry_run: bool = False,
) -> Opened:
    """Finds or makes the directory that a configuration belongs to.

    Args:
        resolved: The configuration.
        root: Where runs are kept.
        explicit: A directory chosen by the user instead of one under ``root``.
        fresh: Begin a new run in a new directory whatever exists.
        dry_run: Only say which directory it would be; touch nothing.

    Raises:
        ConfigError: If the explicit directory belongs to another configuration, or another
            process holds the run.
    """
    base = explicit or root / resolved.spec.run_name
    opened = _choose(
        resolved.spec, base, must_match=explicit is not None and not fresh, fresh=fresh
    )
    if not dry_run:
        _claim(opened.directory)
        if opened.status is not Status.FINISHED:
            opened.directory.write_spec(resolved)
    return opened


def _claim(directory: RunDirectory) -> None:
    try:
        directory.lock()
    except (FileExistsError, NotADirectoryError):
        raise ConfigError(
            f"{directory.path} is not a directory", hint="choose another --run-dir"
        ) from None


def _choose(spec: RunSpec, base: Path, *, must_match: bool, fresh: bool) -> Opened:
    existing = list(_numbered(base))
    if must_match:
        existing = [found for found in existing if found == base]
    for path in [] if fresh else reversed(existing):
        directory = RunDirectory(path)
        changes = _changes(directory, spec)
        if not changes:
            status = Status.FINISHED if directory.is_finished() else Status.RESUME
            return Opened(directory, status)
        if must_match:
            raise ConfigError(
                f"{path} belongs to another configuration:\n{describe(changes)}",
                hint="choose another --run-dir, or use --fresh to begin anew beside it",
            )
    new = Opened(RunDirectory(_next_free(base)), Status.NEW)
    if not existing or fresh:
        return new
    latest = existing[-1]
    return Opened(new.directory, Status.NEW, latest, _changes(RunDirectory(latest), spec))


def write_whole(path: Path, content: bytes) -> None:
    """Writes a file so that it is there completely or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_bytes(content)
    partial.replace(path)


def count_attempts(directory: RunDirectory) -> int:
    """How often the run was started before."""
    return sum(isinstance(event, RunStarted) for event in follow(directory.events(0)).poll())


def describe(changes: list[Difference]) -> str:
    """The differences of two configurations, a line each."""
    return "\n".join(f"  {key}: {_shown(old)} → {_shown(new)}" for key, old, new in changes)


def _shown(value: Any) -> str:
    return "unset" if value is None else str(value)


def _changes(directory: RunDirectory, spec: RunSpec) -> list[Difference]:
    try:
        return differences(directory.load_spec(), spec)
    except ConfigError as error:
        return [("run.toml", f"unreadable ({error.message.splitlines()[-1].strip()})", "readable")]


def _numbered(base: Path) -> Iterator[Path]:
    """The run directories of one name that exist, oldest first."""
    if RunDirectory(base).run_toml.exists():
        yield base
    numbers = [
        int(match[2])
        for path in (base.parent.iterdir() if base.parent.is_dir() else ())
        if (match := _ENDINGS.fullmatch(path.name))
        and match[1] == base.name
        and RunDirectory(path).run_toml.exists()
    ]
    for number in sorted(numbers):
        yield base.with_name(f"{base.name}-{number}")


def _next_free(base: Path) -> Path:
    """The first of NAME, NAME-2, NAME-3 and so on that does not exist, or is an empty directory."""
    path, number = base, 1
    while path.exists() and not (path.is_dir() and _is_unused(path)):
        number += 1
        path = base.with_name(f"{base.name}-{number}")
    return path


def _is_unused(path: Path) -> bool:
    """Whether nothing is there but a lock, and the log of a lab that is about to start the run."""
    lab = lab_events_path(path)
    return all(
        entry.name == ".lock" or (entry == lab.parent and list(entry.iterdir()) == [lab])
        for entry in path.iterdir()
    )
