"""The list of checks of ``isthmus doctor``, in the order in which they run: cheap ones first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from isthmus.measure.checks_host import (
    check_cores,
    check_directory,
    check_disk,
    check_kernel,
    check_limits,
    check_memory,
    check_shared_memory,
    check_versions,
)
from isthmus.measure.checks_network import (
    RESOLVER_DEADLINE_S,
    check_environment,
    check_host_name,
    check_interfaces,
    check_launcher,
    check_loopback,
)
from isthmus.measure.checks_torch import (
    ALLREDUCE_DEADLINE_S,
    TORCH_DEADLINE_S,
    check_allreduce,
    check_matmul,
    check_torch,
)
from isthmus.measure.finding import Check, Finding, Status

_GRACE_S: Final = 10.0
"""A check's own deadlines come first, since they name the cause."""

_ANOTHER_DIRECTORY: Final = "choose a directory on another disk with --directory"
_REPAIR_TORCH: Final = "python -c 'import torch' must work: install torch again"
_REPAIR_RANKS: Final = (
    "runs of several ranks will fail like this; look at GLOO_SOCKET_IFNAME, at free memory and at "
    "what limits processes"
)

CHECKS: Final[tuple[Check, ...]] = (
    Check("versions", check_versions),
    Check("environment", check_environment),
    Check("launcher", check_launcher),
    Check("cores", check_cores),
    Check("memory", check_memory),
    Check("limits", check_limits),
    Check("shared memory", check_shared_memory),
    Check("run directory", check_directory, remedy=_ANOTHER_DIRECTORY),
    Check("interfaces", check_interfaces),
    Check("host name", check_host_name, RESOLVER_DEADLINE_S + _GRACE_S),
    Check("kernel", check_kernel, 20.0),
    Check("torch", check_torch, TORCH_DEADLINE_S + _GRACE_S, remedy=_REPAIR_TORCH),
    Check("loopback", check_loopback, 30.0, measures=True, remedy="ip link set lo up"),
    Check("disk", check_disk, 30.0, measures=True, remedy=_ANOTHER_DIRECTORY),
    Check("matmul", check_matmul, TORCH_DEADLINE_S + _GRACE_S, measures=True, remedy=_REPAIR_TORCH),
    Check(
        "all-reduce",
        check_allreduce,
        ALLREDUCE_DEADLINE_S + _GRACE_S,
        measures=True,
        remedy=_REPAIR_RANKS,
    ),
)
"""All checks; those that measure come last."""


def worst(findings: Sequence[Finding]) -> Status:
    """Return the worst status among findings; PASS if there are none."""
    order = list(Status)
    return max((finding.status for finding in findings), key=order.index, default=Status.PASS)
