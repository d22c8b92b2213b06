"""Checks of the network: interfaces, host name, loopback, and the variables that steer them."""

from __future__ import annotations

from typing import Final

from isthmus.elastic.environment import detect
from isthmus.errors import LaunchError
from isthmus.measure import host, interfaces
from isthmus.measure.finding import (
    Finding,
    Surroundings,
    Value,
    fails,
    judged,
    passes,
    plain,
    warns,
)
from isthmus.measure.loopback import loopback_throughput_bytes_per_s
from isthmus.spec.units import format_bytes_per_s

MIN_LOOPBACK_BYTES_PER_S: Final = 125e6
"""1 Gbit/s, plain Ethernet: ranks on one machine that exchange less are better off on two. A
healthy loopback does ten times that; a sandboxed network stack or a very busy machine does not."""
RESOLVER_DEADLINE_S: Final = 15.0
"""A resolver asks each name server for five seconds, and most hosts have at most three."""

_STEERING: Final = ("NCCL_", "GLOO_", "TORCH_NCCL_", "TORCH_DISTRIBUTED_", "UCX_", "FI_")
_ALSO_STEERING: Final = (
    "CUDA_VISIBLE_DEVICES",
    "MASTER_ADDR",
    "MASTER_PORT",
    "MKL_NUM_THREADS",
    "OMP_NUM_THREADS",
    "RANK",
    "WORLD_SIZE",
)


def check_interfaces(_: Surroundings) -> Finding:
    """Network interfaces with their addresses, and the one of the default route."""
    found, default = interfaces.nics(), interfaces.default_interface()
    usable = [nic for nic in found if nic.up and nic.addresses]
    text = "; ".join(_nic_text(nic, default) for nic in usable) or "none is up with an address"
    values: dict[str, Value] = {"interfaces": [plain(nic) for nic in found], "default": default}
    if not any(nic.loopback for nic in usable):
        hint = "ip link set lo up: ranks on one machine talk through loopback"
        return fails(f"no loopback interface is up ({text})", hint, **values)
    if all(nic.loopback for nic in usable):
        hint = "enough for one machine; for several, bring a network interface up"
        return warns(f"{text}; no other is up", hint, **values)
    return passes(text, **values)


def _nic_text(nic: interfaces.Nic, default: str | None) -> str:
    speed = f" {format_bytes_per_s(nic.speed_bytes_per_s)}" if nic.speed_bytes_per_s else ""
    route = " (default route)" if nic.name == default else ""
    return f"{nic.name}{route}{speed} mtu {nic.mtu_nbytes} {' '.join(nic.addresses)}"


def check_host_name(surroundings: Surroundings) -> Finding:
    """Whether the host's name stands for an address that other hosts can reach."""
    try:
        found = interfaces.host_name(deadline_s=RESOLVER_DEADLINE_S)
    except LaunchError as error:
        return warns(error.message, error.hint)
    shown = ", ".join(
        f"{address} ({interface or 'not of this host'})"
        for address, interface in zip(found.addresses, found.interfaces, strict=True)
    )
    text = f"{found.name} is {shown}" if shown else f"{found.name} resolves to nothing"
    named = surroundings.environ.get("GLOO_SOCKET_IFNAME")
    if named:
        return passes(f"{text}; GLOO_SOCKET_IFNAME={named} decides", **plain(found))
    if found.reachable:
        return passes(text, **plain(found))
    interface = interfaces.default_interface() or "INTERFACE"
    hint = (
        "isthmus takes the route to rank 0 instead; other programs on gloo, across machines, need "
        f"export GLOO_SOCKET_IFNAME={interface}"
    )
    return warns(f"{text}: no other host can reach that", hint, **plain(found))


def check_loopback(_: Surroundings) -> Finding:
    """Throughput of one TCP connection on this machine."""
    found = loopback_throughput_bytes_per_s()
    text = f"one TCP connection carries {format_bytes_per_s(found.median)}"
    values = {"throughput_bytes_per_s": plain(found)}
    if found.median < MIN_LOOPBACK_BYTES_PER_S:
        hint = "look for what keeps the cores busy, or for a sandbox between this and the kernel"
        return warns(text, hint, **values)
    return passes(text, **values)


def check_environment(surroundings: Surroundings) -> Finding:
    """Variables that change what torch.distributed does, and whether they make sense."""
    environ = surroundings.environ
    steering: dict[str, Value] = {
        name: value
        for name, value in sorted(environ.items())
        if name.startswith(_STEERING) or name in _ALSO_STEERING
    }
    text = " ".join(f"{name}={value}" for name, value in steering.items()) or "no variable is set"
    try:
        detect(environ)
    except LaunchError as error:
        return fails(error.message, error.hint or "unset them, or set them right", **steering)
    if strange := _unknown_interfaces(environ.get("GLOO_SOCKET_IFNAME", "")):
        known = ", ".join(nic.name for nic in interfaces.nics())
        missing = f"GLOO_SOCKET_IFNAME names {', '.join(strange)}, which this host does not have"
        return fails(missing, f"unset it, or name one of {known}", **steering)
    trouble = {}
    if ("MASTER_ADDR" in environ) != ("MASTER_PORT" in environ):
        trouble["of MASTER_ADDR and MASTER_PORT only one is set"] = "set both, or neither"
    threads, usable = environ.get("OMP_NUM_THREADS", ""), host.cores().usable
    if threads.isdecimal() and int(threads) > usable:
        trouble[f"more threads than the {usable} usable cores"] = f"export OMP_NUM_THREADS={usable}"
    return judged(text, trouble, **steering)


def _unknown_interfaces(names: str) -> list[str]:
    known = {nic.name for nic in interfaces.nics()}
    return [name for name in names.split(",") if name and name not in known]


def check_launcher(surroundings: Surroundings) -> Finding:
    """Who started this process, and what that means when a rank fails."""
    found = {
        name: value
        for name, value in surroundings.environ.items()
        if name.startswith("TORCHELASTIC_") or name in ("SLURM_JOB_ID", "SLURM_STEP_ID")
    }
    values: dict[str, Value] = dict(sorted(found.items()))
    if any(name.startswith("TORCHELASTIC_") for name in found):
        text = (
            "torchrun: it kills the siblings of a rank that fails, so a failure is a fast restart"
        )
        return passes(text, **values)
    if "SLURM_JOB_ID" in found:
        return passes(f"inside SLURM job {found['SLURM_JOB_ID']}", **values)
    return passes("none: isthmus train starts its own ranks on this machine", **values)
