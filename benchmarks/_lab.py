"""What the benchmarks that run in a lab share: clusters, ranks in hosts, and counted bytes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any, Final, cast

from benchmarks import harness
from isthmus.errors import RankFailedError
from isthmus.lab.cluster import Cluster
from isthmus.lab.counters import read_counters
from isthmus.spec.cluster import ClusterSpec, Host, Link, Nic, Site
from isthmus.spec.units import parse_bytes_per_s

ROOT: Final = Path(__file__).parents[1]
FAST_NIC: Final = Nic(bandwidth_bytes_per_s=parse_bytes_per_s("4 Gbit/s"))
"""Of hosts whose NIC shall not be what limits them."""

Answer = Callable[[str], Any]
"""Answers what rank 0 asks, with what JSON can carry."""


def two_sites(
    bandwidth_bytes_per_s: float, *, hosts: int, nic: Nic = FAST_NIC, latency_s: float = 0.0
) -> ClusterSpec:
    """Two sites of some hosts each, joined by one link."""
    sites = (
        Site(name=name, hosts=(Host(name=name, count=hosts, nics=(nic,)),))
        for name in ("east", "west")
    )
    link = Link(
        between=("east", "west"),
        bandwidth_bytes_per_s=bandwidth_bytes_per_s,
        latency_s=latency_s,
    )
    return ClusterSpec(name="two-sites", sites=tuple(sites), links=(link,))


def link_nbytes(cluster: Cluster) -> dict[str, int]:
    """Bytes that each end of each link has sent so far, headers included, by ``SITE LINK``.

    They are the kernel's own counters, read from outside. A super-packet, as segmentation offload
    makes them, counts one header; so the figure lies between payload and payload * 1514 / 1448.
    """
    return {
        f"{site} {link.name}": read_counters(cluster.switch(site).pid)[link.device].sent_nbytes
        for link in cluster.topology.links
        for site in link.link.between
    }


def run_ranks(
    cluster: Cluster,
    module: str,
    options: Mapping[str, Any],
    answer: Answer = lambda question: None,
) -> Any:
    """Start ``python -m MODULE --as-rank OPTIONS`` once in every host; return what rank 0 found.

    Each process calls :func:`serve_rank`. While it runs, rank 0 may ask for what only this process
    can see or do.

    Args:
        cluster: Where to run it; host k is rank k.
        module: The benchmark.
        options: What its ranks are told, as JSON.
        answer: Answers what rank 0 asks, or does what it asks for.

    Raises:
        RankFailedError: A rank failed; the last lines that it wrote are in the message.
    """
    words = [sys.executable, "-m", module, "--as-rank", json.dumps(options)]
    with ExitStack() as stack:
        ranks: list[tuple[subprocess.Popen[str], IO[str]]] = []
        for rank, host in enumerate(cluster.topology.hosts):
            log = stack.enter_context(TemporaryFile("w+"))
            process = cluster.start(
                words,
                host=host.name,
                env=harness.user_environment(
                    **cluster.environment(host.name, 0), OMP_NUM_THREADS="1"
                ),
                cwd=ROOT,
                text=True,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
                stderr=log,
            )
            stack.enter_context(process)
            stack.callback(process.kill)
            ranks.append((process, log))
        found = _converse(ranks[0][0], answer)
        codes = [process.wait() for process, _ in ranks] if found is not None else []
        if found is None or any(codes):
            raise RankFailedError(_last_words(ranks))
        return found


def _converse(first: subprocess.Popen[str], answer: Answer) -> Any:
    """Answer rank 0's questions until it says what it found; None if it ends before."""
    questions, replies = cast("IO[str]", first.stdout), cast("IO[str]", first.stdin)
    for line in questions:
        said = json.loads(line)
        if "found" in said:
            return said["found"]
        replies.write(json.dumps(answer(said["ask"])) + "\n")
        replies.flush()
    return None


def _last_words(ranks: Sequence[tuple[subprocess.Popen[str], IO[str]]]) -> str:
    texts = []
    for rank, (_, log) in enumerate(ranks):
        log.seek(0)
        if lines := log.read().strip().splitlines():
            texts.append(f"rank {rank}: {lines[-1]}")
    return "; ".join(texts) or "a rank ended without a word"


def ask(question: str) -> Any:
    """In rank 0: ask the process that started the ranks."""
    sys.stdout.write(json.dumps({"ask": question}) + "\n")
    sys.stdout.flush()
    return json.loads(sys.stdin.readline())


def serve_rank(work: Callable[[dict[str, Any]], Any]) -> bool:
    """In a process that :func:`run_ranks` started: do a rank's work. False in any other process."""
    if sys.argv[1:2] != ["--as-rank"]:
        return False
    found = work(json.loads(sys.argv[2]))
    if found is not None:
        sys.stdout.write(json.dumps({"found": found}) + "\n")
        sys.stdout.flush()
    return True
