"""Whether the hosts of a cluster fit this machine's memory."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import psutil

from isthmus.errors import ConfigError
from isthmus.lab.topology import Topology
from isthmus.spec.units import format_bytes

HOST_NBYTES: Final = 16 * 2**20
"""What a host costs by itself: its holder, its network and the process that runs its command."""
RANK_NBYTES: Final = 160 * 2**20
"""What one rank costs at least: a Python process with torch and gloo, without what it shares."""


def refuse_too_many(topology: Topology, available_nbytes: int | None = None) -> None:
    """Refuse a cluster whose ranks could not even import torch side by side.

    Args:
        topology: The cluster.
        available_nbytes: Memory that may be used; by default what this machine has free.

    Raises:
        ConfigError: It does not fit; says how many of its hosts would.
    """
    available = available_memory_nbytes() if available_nbytes is None else available_nbytes
    needed = 0
    for num_fit, host in enumerate(topology.hosts):
        needed += HOST_NBYTES + host.num_devices * RANK_NBYTES
        if needed > available:
            raise ConfigError(
                f"{topology.name} has {len(topology.hosts)} hosts with {topology.num_ranks} ranks, "
                f"and this machine's {format_bytes(available)} of free memory is enough for the "
                f"first {num_fit} hosts at {format_bytes(RANK_NBYTES)} a rank",
                hint="describe fewer hosts, or give --allow-missing memory if the command needs "
                "less than a Python process with torch",
            )


def available_memory_nbytes() -> int:
    """Memory that new processes could use: what is free, within the limit of the cgroup."""
    free = psutil.virtual_memory().available
    group = Path("/sys/fs/cgroup")
    try:
        limit = (group / "memory.max").read_text().strip()
        used = int((group / "memory.current").read_text())
    except (OSError, ValueError):
        return free
    return free if limit == "max" else min(free, max(0, int(limit) - used))
