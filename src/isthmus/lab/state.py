"""A running lab's directory: who owns it, the files its hosts see, its socket and its event log.

Namespaces end with the lab by themselves; files don't. So each lab has one directory, with the pid
of its process and when that started, and every lab that starts removes those whose process is gone.
"""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec
import psutil

from isthmus.errors import ConfigError
from isthmus.lab.topology import Topology
from isthmus.spec.cluster import ClusterSpec

_OWNER: Final = "lab.json"
_CLUSTER: Final = "cluster.json"
_SAME_START_S: Final = 1.0


class _Owner(msgspec.Struct, frozen=True):
    """A lab's process; its start tells it from a later one that has got the same pid."""

    pid: int
    started_s: float
    cluster: str

    def is_alive(self) -> bool:
        try:
            started_s = psutil.Process(self.pid).create_time()
        except psutil.NoSuchProcess:
            return False
        return abs(started_s - self.started_s) < _SAME_START_S


def labs_directory() -> Path:
    """Where this user's labs have their directories."""
    return Path(tempfile.gettempdir()) / f"isthmus-labs-{os.geteuid()}"


def make_directory(cluster: ClusterSpec, parent: Path | None = None) -> Path:
    """Make the directory of a new lab, after removing those of labs that have ended.

    Its name is the lab's id. Only this user may read it.

    Raises:
        ConfigError: The parent belongs to another user.
    """
    parent = labs_directory() if parent is None else parent
    parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if parent.lstat().st_uid != os.geteuid():
        raise ConfigError(
            f"{parent}, where labs keep their state, belongs to another user",
            hint="have it removed, or choose another place with TMPDIR",
        )
    remove_ended(parent)
    directory = parent / secrets.token_hex(3)
    directory.mkdir(mode=0o700)
    (directory / _CLUSTER).write_text(cluster.model_dump_json())
    owner = _Owner(os.getpid(), psutil.Process().create_time(), cluster.name)
    # Under another name first: a lab that starts now takes a directory without owner for a new one.
    draft = directory / f"{_OWNER}.new"
    draft.write_bytes(msgspec.json.encode(owner))
    draft.rename(directory / _OWNER)
    return directory


def running_labs(parent: Path | None = None) -> Iterator[tuple[Path, str]]:
    """Directory and cluster's name of each lab of this user that runs, oldest first."""
    parent = labs_directory() if parent is None else parent
    found = []
    for path in parent.glob(f"*/{_OWNER}"):
        owner = _owner(path)
        if owner is not None and owner.is_alive():
            found.append((owner.started_s, path.parent, owner.cluster))
    for _, directory, cluster in sorted(found):
        yield directory, cluster


def cluster_of(directory: Path) -> ClusterSpec:
    """The cluster of a running lab."""
    return ClusterSpec.model_validate_json((directory / _CLUSTER).read_text())


def remove_ended(parent: Path) -> None:
    """Remove the directories of labs whose process is gone, and nothing else."""
    for path in parent.glob(f"*/{_OWNER}"):
        owner = _owner(path)
        if owner is not None and not owner.is_alive():
            shutil.rmtree(path.parent, ignore_errors=True)  # two labs may begin at once


def write_host_files(directory: Path, topology: Topology) -> dict[str, dict[str, Path]]:
    """Write what each host sees in place of the machine's files; by host: path there, path here."""
    hosts = directory / "hosts"
    hosts.write_text(topology.hosts_file())
    files: dict[str, dict[str, Path]] = {}
    for host in topology.hosts:
        name = directory / f"{host.index}.hostname"
        name.write_text(f"{host.name}\n")
        boot_id = directory / f"{host.index}.boot_id"
        boot_id.write_text(f"{uuid.uuid4()}\n")
        wanted = {
            "/etc/hosts": hosts,
            "/etc/hostname": name,
            "/proc/sys/kernel/random/boot_id": boot_id,
        }
        files[host.name] = {to: path for to, path in wanted.items() if os.path.exists(to)}
        for path in (hosts, name, boot_id):
            path.chmod(0o644)
    return files


def _owner(path: Path) -> _Owner | None:
    """Whose a directory is; None if that can't be told, for then it is nobody's to remove."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=_Owner)
    except (OSError, msgspec.DecodeError):
        return None
