"""What this machine says about itself: versions, cores, memory, limits, shared memory, kernel.

Read, not measured; no torch but in ``torch_facts``, which imports it. What a system does not tell
is None.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Final

import psutil

from isthmus.lazy import dist, torch
from isthmus.measure.cgroup import cgroup_limits

TESTED_TORCH: Final = ("2.13.0",)
"""The releases of torch that the tests ran with; ``constraints.txt`` names the same."""


@dataclass(frozen=True)
class Versions:
    """Versions of what a run depends on; None for what is not installed."""

    isthmus: str | None
    python: str
    numpy: str | None
    torch: str | None


@dataclass(frozen=True)
class Cores:
    """Processor cores, and how many of them this process may use.

    Attributes:
        logical: Hardware threads of the machine.
        physical: Cores of the machine.
        allowed: Hardware threads that the scheduler may put this process on.
        quota: Cores' worth of CPU time that its control groups grant.
    """

    logical: int
    physical: int | None
    allowed: int
    quota: float | None

    @property
    def usable(self) -> int:
        """Threads that can run at the same time: the lesser of the two limits, at least 1."""
        return max(1, min(self.allowed, int(self.quota or self.allowed)))


@dataclass(frozen=True)
class Memory:
    """Main memory; the control group's limit counts where there is one."""

    total_nbytes: int
    available_nbytes: int
    cgroup_limit_nbytes: int | None


@dataclass(frozen=True)
class Limits:
    """What one process may hold (``ulimit``); None is unlimited.

    Attributes:
        open_files: File descriptors, sockets included; the soft limit.
        open_files_hard: How far a process may raise the soft limit by itself.
        processes: Processes and threads of this user, or of this control group if that is less.
        locked_memory_nbytes: Memory that may be pinned, as RDMA does.
        core_nbytes: Size of the file that a crash may leave.
    """

    open_files: int | None
    open_files_hard: int | None
    processes: int | None
    locked_memory_nbytes: int | None
    core_nbytes: int | None


@dataclass(frozen=True)
class SharedMemory:
    """The file system of POSIX shared memory."""

    total_nbytes: int
    free_nbytes: int


@dataclass(frozen=True)
class Accelerator:
    """A device of CUDA or ROCm."""

    name: str
    memory_nbytes: int
    compute_capability: str


@dataclass(frozen=True)
class TorchFacts:
    """What the installed torch can do here."""

    version: str
    backends: tuple[str, ...]
    cuda: str | None
    accelerators: tuple[Accelerator, ...]
    num_threads: int
    resident_nbytes: int


@dataclass(frozen=True)
class KernelFeatures:
    """What emulated networks need; None where it could not be tried.

    Attributes:
        release: The kernel's version.
        network_namespaces: Whether this user may make one.
        netem: Whether the kernel can add delay and loss to a link.
        reason: What was missing.
    """

    release: str
    network_namespaces: bool | None
    netem: bool | None
    reason: str


def versions() -> Versions:
    """Versions from the packages' metadata, without importing them."""

    def of(package: str) -> str | None:
        with suppress(metadata.PackageNotFoundError):
            return metadata.version(package)
        return None

    return Versions(of("isthmus"), platform.python_version(), of("numpy"), of("torch"))


def cores() -> Cores:
    """Count the cores, and those that this process may use."""
    logical = os.cpu_count() or 1
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else logical
    return Cores(logical, psutil.cpu_count(logical=False), allowed, cgroup_limits().cpus)


def processor(cpuinfo: Path = Path("/proc/cpuinfo")) -> str | None:
    """Name of the processor, as it says itself or else as its architecture; None if unknown."""
    with suppress(OSError):
        for line in cpuinfo.read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() in ("model name", "Model") and value.strip():
                return value.strip()
    return platform.processor() or platform.machine() or None


def memory() -> Memory:
    """Main memory in total and available, both capped by the control group's limit."""
    system, limits = psutil.virtual_memory(), cgroup_limits()
    total, left = limits.memory_nbytes, limits.memory_left_nbytes
    return Memory(
        total_nbytes=system.total,
        available_nbytes=system.available if left is None else min(system.available, left),
        cgroup_limit_nbytes=None if total is None or total >= system.total else total,
    )


def limits() -> Limits:
    """Read the limits of this process."""
    import resource

    def soft(which: int) -> int | None:
        return _finite(resource.getrlimit(which)[0])

    processes = [soft(resource.RLIMIT_NPROC), cgroup_limits().processes]
    return Limits(
        open_files=soft(resource.RLIMIT_NOFILE),
        open_files_hard=_finite(resource.getrlimit(resource.RLIMIT_NOFILE)[1]),
        processes=min(filter(None, processes), default=None),
        locked_memory_nbytes=soft(resource.RLIMIT_MEMLOCK),
        core_nbytes=soft(resource.RLIMIT_CORE),
    )


def _finite(limit: int) -> int | None:
    return None if limit < 0 or limit >= 2**62 else limit


def shared_memory(path: Path = Path("/dev/shm")) -> SharedMemory | None:
    """Size of the shared-memory file system; None where there is none."""
    with suppress(OSError):
        usage = shutil.disk_usage(path)
        return SharedMemory(usage.total, usage.free)
    return None


def has_infiniband(path: Path = Path("/sys/class/infiniband")) -> bool:
    """Whether the machine has an RDMA device."""
    with suppress(OSError):
        return any(path.iterdir())
    return False


def has_nvidia_gpu(path: Path = Path("/dev")) -> bool:
    """Whether the machine shows an NVIDIA device, whatever torch thinks of it."""
    return any(path.glob("nvidia[0-9]*"))


def torch_facts() -> TorchFacts:
    """Import torch and ask it what it can do here.

    Call it in a ``Worker``: a broken torch may crash the process, and CUDA may hang.
    """
    backends = {"gloo": dist.is_gloo_available, "nccl": dist.is_nccl_available}
    available = dist.is_available()
    return TorchFacts(
        version=torch.version.__version__,
        backends=tuple(name for name, there in backends.items() if available and there()),
        cuda=torch.version.cuda,
        accelerators=tuple(map(_accelerator, range(torch.cuda.device_count()))),
        num_threads=torch.get_num_threads(),
        resident_nbytes=psutil.Process().memory_info().rss,
    )


def _accelerator(index: int) -> Accelerator:
    found = torch.cuda.get_device_properties(index)
    return Accelerator(found.name, found.total_memory, f"{found.major}.{found.minor}")


def kernel_features(*, deadline_s: float = 5.0) -> KernelFeatures:
    """Try a network namespace, and netem in it. Both are gone when this returns.

    Linux only, with the tools ``unshare`` (util-linux) and ``tc`` (iproute2).
    """
    unshare, tc = shutil.which("unshare"), shutil.which("tc", path=_with_sbin())
    if unshare is None:
        return KernelFeatures(platform.release(), None, None, "unshare is not installed")
    enter = [unshare, "--net"] if os.geteuid() == 0 else [unshare, "-r", "--net"]
    refused = _refusal([*enter, "true"], deadline_s)
    if refused:
        return KernelFeatures(platform.release(), False, None, refused)
    if tc is None:
        return KernelFeatures(platform.release(), True, None, "tc is not installed")
    add_delay = [tc, "qdisc", "add", "dev", "lo", "root", "netem", "delay", "1ms"]
    refused = _refusal([*enter, *add_delay], deadline_s)
    return KernelFeatures(platform.release(), True, not refused, refused)


def _with_sbin() -> str:
    return os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])


def _refusal(command: list[str], deadline_s: float) -> str:
    """Why a command fails, in its own last words; empty if it succeeds."""
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=deadline_s
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    return last if done.returncode else ""
