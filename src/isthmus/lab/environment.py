"""The variables that tell a command in a lab where it is, and the libraries in it whom to talk to.

==========================  =======================================================================
``ISTHMUS_LAB``             id of the lab
``ISTHMUS_LAB_DIR``         its directory, where it listens for faults
``ISTHMUS_LAB_HOST``        name of the host
``ISTHMUS_LAB_SITE``        name of its site
``ISTHMUS_LAB_INDEX``       number of the host, from 0
``ISTHMUS_LAB_NUM_HOSTS``   number of hosts
``MASTER_ADDR``, ``_PORT``  where rank 0 is; the port is free, the network being a new one
``GLOO_SOCKET_IFNAME``      the host's first NIC; also ``TP_SOCKET_IFNAME``
``NCCL_SOCKET_IFNAME``      all its NICs
``PET_...``                 what ``torchrun`` takes in place of ``--nnodes``, ``--node-rank`` etc.
``RANK``, ``WORLD_SIZE``    and ``LOCAL_RANK``, ``LOCAL_WORLD_SIZE``: for a command that is a rank
==========================  =======================================================================

A command that is started once a host is a rank only if every host has one device.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from isthmus.lab.topology import HostPlan, Topology

MASTER_PORT: Final = 29500
_OF_RANKS: Final = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)
_STRAY_PREFIXES: Final = ("TORCHELASTIC_", "PET_", "SLURM_", "ISTHMUS_LAB")


def without_ranks(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables without those that say which rank of which run this very process is."""
    return {
        name: value
        for name, value in environ.items()
        if name not in _OF_RANKS and not name.startswith(_STRAY_PREFIXES)
    }


def host_variables(
    topology: Topology,
    host: HostPlan,
    local_rank: int | None,
    *,
    lab: str,
    directory: Path,
) -> dict[str, str]:
    """Variables of a command in a host.

    Args:
        topology: The cluster.
        host: Where it runs.
        local_rank: Which of the host's ranks the command is; None if it stands for the whole host.
        lab: The lab's id.
        directory: The lab's directory.
    """
    nics = [nic.name for nic in host.nics] or ["lo"]
    first = topology.hosts[0]
    variables = {
        "ISTHMUS_LAB": lab,
        "ISTHMUS_LAB_DIR": str(directory),
        "ISTHMUS_LAB_HOST": host.name,
        "ISTHMUS_LAB_SITE": host.site,
        "ISTHMUS_LAB_INDEX": str(host.index),
        "ISTHMUS_LAB_NUM_HOSTS": str(len(topology.hosts)),
        "MASTER_ADDR": str(first.address),
        "MASTER_PORT": str(MASTER_PORT),
        "GLOO_SOCKET_IFNAME": nics[0],
        "TP_SOCKET_IFNAME": nics[0],
        "NCCL_SOCKET_IFNAME": f"={','.join(nics)}",
        "PET_NNODES": str(len(topology.hosts)),
        "PET_NODE_RANK": str(host.index),
        "PET_NPROC_PER_NODE": str(host.num_devices),
        "PET_MASTER_ADDR": str(first.address),
        "PET_MASTER_PORT": str(MASTER_PORT),
    }
    if local_rank is None and all(each.num_devices == 1 for each in topology.hosts):
        local_rank = 0
    if local_rank is not None:
        before = sum(each.num_devices for each in topology.hosts[: host.index])
        variables |= {
            "RANK": str(before + local_rank),
            "WORLD_SIZE": str(topology.num_ranks),
            "LOCAL_RANK": str(local_rank),
            "LOCAL_WORLD_SIZE": str(host.num_devices),
            "TORCHELASTIC_RUN_ID": f"lab-{lab}",
        }
    return variables
