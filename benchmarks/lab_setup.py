"""How long a lab of 2, 8 and 32 hosts takes to build and to remove, and that its ranks meet.

Hosts stand on one switch. Building lasts until every host has its addresses and rates, removal
until the last process has ended; both are repeated. In the largest lab one rank a host
then sums a tensor over all of them, and every rank compares the result with the sum that is due.

Claim: the largest lab's ranks all hold the right sum.
"""

from __future__ import annotations

import time
from argparse import ArgumentParser, Namespace
from typing import Any, Final

from benchmarks import harness
from benchmarks._lab import FAST_NIC, run_ranks, serve_rank
from isthmus.lab.cluster import Cluster
from isthmus.spec.cluster import ClusterSpec, Host, Site

HOSTS: Final = (2, 8, 32)
REPEATS: Final = 5
NUM_ELEMENTS: Final = 250_000


def hall(hosts: int) -> ClusterSpec:
    """Hosts on one switch."""
    return ClusterSpec(
        name="hall",
        sites=(Site(name="hall", hosts=(Host(name="host", count=hosts, nics=(FAST_NIC,)),)),),
    )


def set_up(hosts: int, repeats: int) -> dict[str, Any]:
    """Build and remove a lab some times."""
    built_s, removed_s = [], []
    for _ in range(repeats):
        begin_s = time.perf_counter()
        lab = Cluster(hall(hosts)).__enter__()
        built_s.append(time.perf_counter() - begin_s)
        begin_s = time.perf_counter()
        lab.close()
        removed_s.append(time.perf_counter() - begin_s)
    found = {"built_s": harness.sample(built_s), "removed_s": harness.sample(removed_s)}
    harness.say(f"{hosts} hosts: built in {min(built_s):.2f} s, removed in {min(removed_s):.2f} s")
    return {"hosts": hosts, **found}


def all_reduce(hosts: int) -> dict[str, Any]:
    """One rank a host; each sums the same tensor over all."""
    harness.say(f"{hosts} hosts: an all-reduce over one rank a host")
    begin_s = time.perf_counter()
    with Cluster(hall(hosts)) as lab:
        found = run_ranks(lab, "benchmarks.lab_setup", {"num_elements": NUM_ELEMENTS})
    return {"hosts": hosts, **found, "with_start_s": time.perf_counter() - begin_s}


def one_rank(options: dict[str, Any]) -> dict[str, Any] | None:
    """Sum, compare, and say how long it took and whether every rank had the right sum."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    ranks, pattern = dist.get_world_size(), torch.arange(options["num_elements"]) % 1000
    took_s = []
    is_right = torch.tensor(1)
    for _ in range(3):
        tensor = (pattern + dist.get_rank()).float()
        dist.barrier()
        begin_s = time.perf_counter()
        dist.all_reduce(tensor)
        took_s.append(time.perf_counter() - begin_s)
        is_right &= torch.equal(tensor, (pattern * ranks + ranks * (ranks - 1) // 2).float())
    dist.all_reduce(is_right, dist.ReduceOp.MIN)
    first = dist.get_rank() == 0
    dist.barrier()
    dist.destroy_process_group()
    return {"ranks": ranks, "all_right": bool(is_right), "took_s": took_s} if first else None


def measure(options: Namespace) -> dict[str, Any]:
    """Set-up of each size, and the all-reduce of the largest."""
    sizes = [int(size) for size in options.hosts.split(",")]
    found = [set_up(size, 2 if options.quick else REPEATS) for size in sizes]
    summed = all_reduce(8 if options.quick else max(sizes))
    text = f"{summed['hosts']} hosts x 1 rank: every rank holds the right sum"
    claim = harness.claim(text, summed["all_right"] and summed["ranks"] == summed["hosts"])
    return {"claims": [claim], "set_up": found, "all_reduce": summed}


def add_options(parser: ArgumentParser) -> None:
    """Add the sizes."""
    parser.add_argument("--hosts", default=",".join(map(str, HOSTS)), metavar="N,N")


if __name__ == "__main__" and not serve_rank(one_rank):
    harness.run(__file__, __doc__ or "", measure, add_options)
