"""What the control groups of this process allow: the limits of containers and batch systems.

A limit may be set on any level from the process's own group up to the root; the tightest holds.
Version 2 (one tree) and version 1 (one tree a controller) are read; what is not there is no limit.
https://docs.kernel.org/admin-guide/cgroup-v2.html
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_V1_UNLIMITED: Final = 2**62
"""Version 1 writes "no limit" as the largest whole number of pages."""


@dataclass(frozen=True)
class CgroupLimits:
    """Limits of the control groups; None where there is none.

    Attributes:
        cpus: Cores' worth of CPU time per unit of time.
        memory_nbytes: Memory that may be used.
        memory_left_nbytes: What of it is unused; reclaimable file cache counts as unused.
        processes: Processes and threads that may exist.
    """

    cpus: float | None
    memory_nbytes: int | None
    memory_left_nbytes: int | None
    processes: int | None


def cgroup_limits(root: Path = Path("/")) -> CgroupLimits:
    """Read the limits that hold for this process.

    Args:
        root: Where ``proc`` and ``sys`` are found.
    """
    levels = [*_levels(root)]
    memory = [found for level in levels if (found := _memory(level))]
    return CgroupLimits(
        cpus=min(filter(None, map(_cpus, levels)), default=None),
        memory_nbytes=min((limit for limit, _ in memory), default=None),
        memory_left_nbytes=min((max(0, limit - used) for limit, used in memory), default=None),
        processes=min((n for level in levels if (n := _number(level / "pids.max"))), default=None),
    )


def _levels(root: Path) -> Iterator[Path]:
    """The directories of all groups that this process is in, each followed by its parents."""
    mount = root / "sys/fs/cgroup"
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        trees = [mount / name for name in (controllers, *controllers.split(","))]
        top = next((tree for tree in trees if controllers and tree.is_dir()), mount)
        group = top / path.lstrip("/")
        while group != top:
            yield group
            group = group.parent
        yield top


def _cpus(level: Path) -> float | None:
    quota, _, period = _text(level / "cpu.max").partition(" ")
    if not quota:
        quota = _text(level / "cpu.cfs_quota_us")
        period = _text(level / "cpu.cfs_period_us")
    with suppress(ValueError, ZeroDivisionError):
        return int(quota) / int(period) if int(quota) > 0 else None
    return None


def _memory(level: Path) -> tuple[int, int] | None:
    """The limit of one level and what of it cannot be reclaimed at will."""
    limit = _number(level / "memory.max") or _number(level / "memory.limit_in_bytes")
    if limit is None or limit >= _V1_UNLIMITED:
        return None
    used = _number(level / "memory.current") or _number(level / "memory.usage_in_bytes") or 0
    counts = dict(line.split(" ", 1) for line in _text(level / "memory.stat").splitlines() if line)
    cache = counts.get("total_inactive_file", counts.get("inactive_file", "0"))
    return limit, max(0, used - int(cache))


def _number(file: Path) -> int | None:
    with suppress(ValueError):
        return int(_text(file))
    return None


def _text(file: Path) -> str:
    with suppress(OSError):
        return file.read_text().strip()
    return ""
