"""Checks of the machine itself: versions, cores, memory, limits, disk, kernel.

Each threshold stands here with its reason. A figure that only matters in some situations warns only
there, so that a warning is always worth reading.
"""

from __future__ import annotations

import tempfile
from typing import Final

from isthmus.measure import host
from isthmus.measure.disk import disk_space, disk_write
from isthmus.measure.finding import (
    Finding,
    Surroundings,
    fails,
    judged,
    passes,
    plain,
    warns,
)
from isthmus.spec.units import format_bytes, format_seconds

MIN_MEMORY_NBYTES: Final = 1 << 30
"""A process takes about 230 MB when it has imported torch, and a run has two ranks and a launcher:
half of this is gone before the first tensor."""
MIN_OPEN_FILES: Final = 1024
"""gloo holds a socket to every peer in every group: 128 ranks in four groups take 512, beside the
hundred or so that Python, torch and data loaders hold."""
MIN_PROCESSES: Final = 1024
"""Threads count. A rank has about two a core, and gloo, the data loader and the launcher add some:
eight ranks on 32 cores take over 500."""
MIN_SHARED_MEMORY_NBYTES: Final = 1 << 30
"""What NCCL's guide asks for in containers (``--shm-size=1g``). Docker's default of 64 MiB ends in
bus errors."""
MIN_FREE_NBYTES: Final = 1 << 30
"""Weights and AdamW's state in fp32 take 12 bytes a parameter: room for four checkpoints of a
model with 20 million."""
MIN_WRITE_BYTES_PER_S: Final = 25e6
"""A checkpoint of 125 million parameters, 1.5 GB, should not take more than a minute."""
MAX_FSYNC_S: Final = 0.1
"""A checkpoint syncs about ten files and directories: a second for each, even when small."""


def check_versions(_: Surroundings) -> Finding:
    """Versions of what a run depends on, and whether the tests ran with this torch."""
    found = host.versions()
    text = ", ".join(f"{name} {version or '?'}" for name, version in plain(found).items())
    tested = " or ".join(host.TESTED_TORCH)
    values = plain(found) | {"tested_torch": list(host.TESTED_TORCH)}
    if found.torch is None or found.numpy is None:
        missing = " and ".join(name for name in ("torch", "numpy") if plain(found)[name] is None)
        return fails(f"{missing} not installed ({text})", "pip install isthmus", **values)
    if found.torch.partition("+")[0] not in host.TESTED_TORCH:
        hint = f"pip install 'torch=={host.TESTED_TORCH[-1]}' to be where the tests were"
        return warns(f"{text}: the tests ran with torch {tested}", hint, **values)
    return passes(f"{text} (the tests ran with this torch)", **values)


def check_cores(surroundings: Surroundings) -> Finding:
    """Cores of the machine and of this process, and whether torch will know."""
    found = host.cores()
    text = f"{found.usable} of {found.logical} usable"
    trouble = {}
    if found.allowed < found.logical:
        text += f", {found.allowed} by affinity"
    if found.quota is not None:
        text += f", {found.quota:g} by the control group's quota"
        if found.usable < found.allowed and "OMP_NUM_THREADS" not in surroundings.environ:
            trouble[f"torch will start {found.allowed} threads"] = (
                f"export OMP_NUM_THREADS={found.usable}: torch sees the affinity but not the quota"
            )
    if found.usable < 2:
        trouble["two ranks will share one core"] = "grant more cores, or train with ranks = 1"
    return judged(text, trouble, **plain(found), usable=found.usable)


def check_memory(_: Surroundings) -> Finding:
    """Memory in total, available, and allowed by the control group."""
    found = host.memory()
    text = f"{format_bytes(found.available_nbytes)} of {format_bytes(found.total_nbytes)} available"
    if found.cgroup_limit_nbytes is not None:
        text += f", the control group allows {format_bytes(found.cgroup_limit_nbytes)}"
    if found.available_nbytes < MIN_MEMORY_NBYTES:
        hint = f"free some: two ranks need about {format_bytes(MIN_MEMORY_NBYTES)} to begin with"
        return warns(text, hint, **plain(found))
    return passes(text, **plain(found))


def check_limits(_: Surroundings) -> Finding:
    """What one process may hold: files, processes, locked memory, a core file."""
    found = host.limits()
    unlimited = "unlimited"
    text = (
        f"{found.open_files or unlimited} open files, {found.processes or unlimited} processes, "
        f"locked memory {_size(found.locked_memory_nbytes)}, core files {_size(found.core_nbytes)}"
    )
    trouble = {}
    if found.open_files is not None and found.open_files < MIN_OPEN_FILES:
        trouble["few open files"] = f"ulimit -n {MIN_OPEN_FILES} or more: every peer takes sockets"
    if found.processes is not None and found.processes < MIN_PROCESSES:
        trouble["few processes"] = f"ulimit -u {MIN_PROCESSES} or more: threads count"
    if found.locked_memory_nbytes is not None and host.has_infiniband():
        trouble["RDMA can't pin memory"] = "ulimit -l unlimited"
    return judged(text, trouble, **plain(found))


def check_shared_memory(_: Surroundings) -> Finding:
    """Room in /dev/shm."""
    found = host.shared_memory()
    if found is None:
        return warns("there is no /dev/shm", "mount a tmpfs there; data loaders and NCCL use it")
    text = f"{format_bytes(found.free_nbytes)} of {format_bytes(found.total_nbytes)} free"
    if found.free_nbytes < MIN_SHARED_MEMORY_NBYTES:
        hint = "empty it or make it larger (containers: --shm-size=1g or --ipc=host)"
        return warns(text, hint, **plain(found))
    return passes(text, **plain(found))


def check_directory(surroundings: Surroundings) -> Finding:
    """Whether runs can be written, and how much room there is."""
    space = disk_space(surroundings.directory)
    values = plain(space) | {"directory": str(space.directory)}
    try:
        with tempfile.TemporaryFile(dir=space.directory):
            pass
    except OSError as error:
        hint = "choose a directory that you may write, with --directory"
        return fails(f"{space.directory} can't be written: {error.strerror}", hint, **values)
    kind = f" ({space.file_system})" if space.file_system else ""
    text = f"{format_bytes(space.free_nbytes)} free in {space.directory}{kind}"
    trouble = {}
    if space.free_nbytes < MIN_FREE_NBYTES:
        trouble["little room"] = "free some, or choose another directory with --directory"
    if space.free_files is not None and space.free_files < 1000:
        trouble[f"only {space.free_files} more files"] = "remove files: no inodes are left"
    if space.file_system in ("tmpfs", "ramfs"):
        trouble["it is in memory"] = "checkpoints there don't outlive a restart of the machine"
    return judged(text, trouble, **values)


def check_disk(surroundings: Surroundings) -> Finding:
    """How fast checkpoints can be written for good."""
    found = disk_write(disk_space(surroundings.directory).directory)
    rate, fsync_s = found.bytes_per_s.median, found.fsync_s.median
    text = f"writes {format_bytes(rate)}/s, fsync of 4 KiB {format_seconds(fsync_s)}"
    trouble = {}
    if rate < MIN_WRITE_BYTES_PER_S:
        trouble["slow"] = "checkpoints will take long; choose a faster disk with --directory"
    if fsync_s > MAX_FSYNC_S:
        trouble["slow to sync"] = "write checkpoints more rarely (checkpoint.every_steps)"
    return judged(text, trouble, **plain(found))


def check_kernel(_: Surroundings) -> Finding:
    """What emulated networks need; training does not."""
    found = host.kernel_features()
    states = {True: "yes", False: "no", None: "not tried"}
    text = (
        f"{found.release}; network namespaces {states[found.network_namespaces]}, "
        f"netem {states[found.netem]}"
    )
    if found.network_namespaces and found.netem:
        return passes(text, **plain(found))
    hint = "training needs neither; emulating a network on one machine does"
    return warns(
        f"{text} ({found.reason.removeprefix('Error: ').rstrip('.')})", hint, **plain(found)
    )


def _size(limit: int | None) -> str:
    return "unlimited" if limit is None else format_bytes(limit)
