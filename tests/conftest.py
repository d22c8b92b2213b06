"""What holds for every test: one thread a process, fixed seeds, and nothing left behind."""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is first imported

import psutil
import pytest
from hypothesis import HealthCheck, settings

settings.register_profile(
    "isthmus", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("ci", settings.get_profile("isthmus"), derandomize=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "isthmus"))

if TYPE_CHECKING:
    from pool import RankPool

sys.path.append(str(Path(__file__).parent / "process"))  # the pool is for all tests that need ranks
POOL: pytest.StashKey[RankPool] = pytest.StashKey()
LEAK_GRACE_S = 2.0
PROC = Path("/proc/self")


@pytest.fixture(autouse=True)
def _torch_seed() -> None:
    """Seed torch where a test uses it (pytest-randomly seeds ``random`` and numpy)."""
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.manual_seed(0)


@pytest.fixture(scope="session")
def ranks(pytestconfig: pytest.Config) -> Iterator[RankPool]:
    """Run functions on a few ranks: ``ranks.run(fn, world_size, **kwargs) -> results``."""
    from pool import RankPool

    pool = RankPool()
    pytestconfig.stash[POOL] = pool
    yield pool
    pool.close()


@pytest.fixture
def own_resources(pytestconfig: pytest.Config) -> Callable[[], set[str]]:
    """What the pool of ranks holds is no test's leak."""

    def held() -> set[str]:
        pool = pytestconfig.stash.get(POOL, None)
        return pool.own_resources if pool else set()

    return held


@pytest.fixture(autouse=True)
def _nothing_left_behind(own_resources: Callable[[], set[str]]) -> Iterator[None]:
    """Fail a test that leaves a thread, a child process, a socket or a pipe."""
    before = resources()
    yield
    give_up_at = time.monotonic() + LEAK_GRACE_S
    while (left := resources() - before - own_resources()) and time.monotonic() < give_up_at:
        gc.collect()
        time.sleep(0.02)
    if left:
        pytest.fail(f"left behind: {', '.join(map(describe, sorted(left)))}", pytrace=False)


def resources() -> set[str]:
    """Return a name for each live thread, child process, open socket and open pipe."""
    threads = {f"thread {thread.name} ({thread.ident})" for thread in threading.enumerate()}
    return threads | {f"process {pid}" for pid in child_pids()} | open_channels()


def child_pids() -> set[int]:
    """Return the pids of this process's children (twenty times faster than psutil on Linux)."""
    if not PROC.exists():
        return {child.pid for child in psutil.Process().children()}
    pids: set[int] = set()
    for task in PROC.glob("task/*/children"):
        with suppress(OSError):
            pids.update(map(int, task.read_text().split()))
    return pids


def open_channels() -> set[str]:
    """Return the sockets and pipes that this process has open, by inode; none but on Linux."""
    targets = set()
    for descriptor in PROC.glob("fd/*"):
        with suppress(OSError):
            targets.add(os.readlink(descriptor))
    return {target for target in targets if target.startswith(("socket:", "pipe:"))}


def describe(resource: str) -> str:
    """Add a child's command line to its pid."""
    kind, _, pid = resource.partition(" ")
    if kind == "process":
        with suppress(psutil.Error):
            return f"{resource} ({' '.join(psutil.Process(int(pid)).cmdline())})"
    return resource
