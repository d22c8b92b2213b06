"""What the network tests share: a cluster to test on, and programs that run in its hosts."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest

from isthmus.lab.cluster import Cluster
from isthmus.spec.cluster import ClusterSpec, Host, Link, Nic, Site

MBIT = 1e6 / 8
LONG_S = 30.0
"""For what has to succeed: only a broken lab takes so long."""
SHORT_S = 0.25
"""For what can't succeed, however long one waits."""

PYTHON = [sys.executable, "-I", "-S", "-c"]
_SERVE = """
import socket
server = socket.create_server(("0.0.0.0", 5001))
print("ready", flush=True)
while True:
    client, address = server.accept()
    with client:
        client.sendall(address[0].encode())
"""
_CONNECT = """
import errno, socket, sys
target, source, device, timeout_s = sys.argv[1:]
client = socket.socket()
client.settimeout(float(timeout_s))
if device:
    client.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, device.encode())
if source:
    client.bind((source, 0))
try:
    client.connect((target, 5001))
    print(client.recv(99).decode())
except TimeoutError:
    print("silence")
except OSError as error:
    print(errno.errorcode[error.errno])
"""


def need_namespaces() -> None:
    """Skip a test module where no lab can be built."""
    tried = subprocess.run(["unshare", "--net", "true"], capture_output=True, check=False)
    if tried.returncode:
        pytest.skip("needs root and network namespaces", allow_module_level=True)


def nic(name: str = "eth0", mbit_per_s: float = 200) -> Nic:
    return Nic(name=name, bandwidth_bytes_per_s=mbit_per_s * MBIT)


def link(a: str, b: str, mbit_per_s: float = 100, **properties: float) -> Link:
    return Link(between=(a, b), bandwidth_bytes_per_s=mbit_per_s * MBIT, **properties)


def two_sites(**properties: float) -> ClusterSpec:
    """Two hosts with two NICs and one with one at site a, two hosts at site b."""
    twins = Host(name="a", count=2, nics=(nic(), nic("ib0")))
    sites = (
        Site(name="a", hosts=(twins, Host(name="old", nics=(nic(),)))),
        Site(name="b", hosts=(Host(name="b", count=2, nics=(nic(),)),)),
    )
    return ClusterSpec(name="two", sites=sites, links=(link("a", "b", **properties),))


@contextmanager
def serving(cluster: Cluster, hosts: Sequence[str]) -> Iterator[None]:
    """A program in each of these hosts that tells whoever connects their own address."""
    servers = [
        cluster.start([*PYTHON, _SERVE], host=host, stdout=subprocess.PIPE, text=True)
        for host in hosts
    ]
    try:
        for server in servers:
            assert server.stdout.readline() == "ready\n"
        yield
    finally:
        for server in servers:
            server.kill()
            server.wait()
            server.stdout.close()


def connect(
    cluster: Cluster,
    host: str,
    target: str,
    *,
    source: str = "",
    device: str = "",
    timeout_s: float = LONG_S,
) -> str:
    """Connect from a host: the address that was seen there, ``silence``, or the error's name."""
    command = [*PYTHON, _CONNECT, target, source, device, str(timeout_s)]
    done = cluster.run(command, host=host, timeout_s=2 * LONG_S)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def is_cut(cluster: Cluster, host: str, target: str) -> bool:
    return connect(cluster, host, target, timeout_s=SHORT_S) == "silence"
