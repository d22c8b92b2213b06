"""Checks of torch: what it can do here, how fast it computes, whether two ranks agree.

All of them run in child processes, so that a torch that crashes or hangs is a finding too.
"""

from __future__ import annotations

from typing import Final

from isthmus.measure import host
from isthmus.measure.allreduce import AllReduce, allreduce
from isthmus.measure.compute import matmul_rates
from isthmus.measure.finding import Finding, Surroundings, fails, judged, passes, plain, warns
from isthmus.spec.units import format_bytes, format_seconds

TORCH_DEADLINE_S: Final = 60.0
"""An import of torch takes two seconds, from a cold network disk half a minute."""
ALLREDUCE_DEADLINE_S: Final = 90.0
"""Two processes that import torch at once, and then some."""
MIN_THREAD_GAIN: Final = 1.1
"""Two cores give a product this large nearly twice one core's rate. When all usable cores together
are not even a tenth faster than one, they are busy with something else, or aren't there."""
MAX_SMALL_ALLREDUCE_S: Final = 0.01
"""4 KiB on one machine take about 0.2 ms. Fifty times that means that ranks wait for a core."""


def check_torch(surroundings: Surroundings) -> Finding:
    """Whether torch can be imported; its backends and its devices."""
    found = surroundings.worker().call(TORCH_DEADLINE_S, host.torch_facts)
    devices = ", ".join(
        f"{device.name} ({format_bytes(device.memory_nbytes)})" for device in found.accelerators
    )
    backends = " and ".join(found.backends) or "none"
    text = f"backends {backends}; devices: {devices or 'only the CPU'}"
    if "gloo" not in found.backends:
        hint = "install a torch with gloo, as those of pypi.org for Linux are"
        return fails(f"{text}; torch.distributed has no gloo", hint, **plain(found))
    if found.accelerators and "nccl" not in found.backends:
        hint = "install a torch built with NCCL"
        return warns(f"{text}; no nccl for them", hint, **plain(found))
    if host.has_nvidia_gpu() and not found.accelerators:
        hint = "install a torch built for CUDA, and look at nvidia-smi and CUDA_VISIBLE_DEVICES"
        return warns(f"{text}; there is an NVIDIA GPU that torch can't use", hint, **plain(found))
    return passes(text, **plain(found))


def check_matmul(surroundings: Surroundings) -> Finding:
    """Rate of fp32 matrix products on one core and on all usable ones."""
    usable = host.cores().usable
    counts = sorted({1, usable})
    rates = surroundings.worker().call(TORCH_DEADLINE_S, matmul_rates, counts)
    by_threads = {rate.num_threads: rate.flops_per_s.median for rate in rates}
    shown = ", ".join(
        f"{flops_per_s / 1e9:.3g} GFLOP/s on {count} core{'s' if count > 1 else ''}"
        for count, flops_per_s in by_threads.items()
    )
    values = {"rates": [plain(rate) for rate in rates]}
    gain = by_threads[usable] / by_threads[1]
    if usable > 1 and gain < MIN_THREAD_GAIN:
        hint = "look for what keeps the cores busy (top), or for a limit on CPU time"
        return warns(f"fp32 matmul {shown}: {gain:.2f} times one core", hint, **values)
    return passes(f"fp32 matmul {shown}", **values)


def check_allreduce(surroundings: Surroundings) -> Finding:
    """Two ranks on this machine: whether their sum is right, and how long it takes."""
    found = allreduce(deadline_s=ALLREDUCE_DEADLINE_S, environ=_launched_alone(surroundings))
    shown = ", ".join(map(_time_text, found))
    values = {"sizes": [plain(size) for size in found]}
    if not all(size.correct for size in found):
        hint = "this torch or this machine adds wrongly; do not train on it"
        return fails(f"two ranks got a wrong sum ({shown})", hint, **values)
    text = f"two ranks over {found[0].interface}: sums exact, {shown}"
    slow = found[0].duration_s.median > MAX_SMALL_ALLREDUCE_S
    hint = "look for what keeps the cores busy: ranks wait for each other at every step"
    return judged(text, {"slow": hint} if slow else {}, **values)


def _time_text(found: AllReduce) -> str:
    size = f"{found.nbytes >> 20} MiB" if found.nbytes >> 20 else f"{found.nbytes >> 10} KiB"
    return f"{size} in {format_seconds(found.duration_s.median)}"


def _launched_alone(surroundings: Surroundings) -> dict[str, str]:
    """The environment without what steers the ranks of another launcher."""
    return {
        name: value
        for name, value in surroundings.environ.items()
        if not name.startswith(("TORCHELASTIC_", "ISTHMUS_"))
    }
