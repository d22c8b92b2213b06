"""The relay between two real network namespaces: what sockets on both sides see of it."""

from __future__ import annotations

import hashlib
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from isthmus.errors import LaunchError
from isthmus.lab.relay import Relay, Wire, start_relay
from isthmus.lab.relay_loop import _CLONE_NEWNET, EARLY_S, _enter

pytestmark = pytest.mark.network

CAN_TRY = subprocess.run(["unshare", "--net", "true"], capture_output=True, check=False)
if CAN_TRY.returncode or not Path("/dev/net/tun").exists():
    pytest.skip("needs root, network namespaces and /dev/net/tun", allow_module_level=True)

LATENCY_S = 0.02
PATIENCE_S = 60
HOLD = """
for which in all default; do  # its router solicitations would be counted with the packets
    file=/proc/sys/net/ipv6/conf/$which/disable_ipv6
    if [ -e $file ]; then echo 1 >$file; fi
done
echo; exec sleep infinity
"""
TRANSFER = os.urandom(1 << 20) * 2


@dataclass(frozen=True)
class Namespace:
    """A network namespace that lives as long as its holder."""

    pid: int
    address: str

    def ip(self, *words: str) -> str:
        command = ["nsenter", "-t", str(self.pid), "-n", "ip", *words]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    def devices(self) -> list[str]:
        lines = self.ip("-brief", "link").splitlines()
        return [line.split()[0] for line in lines if not line.startswith("lo ")]

    def socket(self, kind: socket.SocketKind) -> socket.socket:
        """A socket of this namespace: it stays there, whoever uses it."""
        made: list[socket.socket] = []

        def make() -> None:
            _enter(f"/proc/{self.pid}/ns/net", _CLONE_NEWNET)  # of this thread alone
            made.append(socket.socket(socket.AF_INET, kind))

        thread = threading.Thread(target=make)
        thread.start()
        thread.join()
        made[0].settimeout(PATIENCE_S)
        return made[0]


@pytest.fixture
def ends() -> Iterator[tuple[Namespace, Namespace]]:
    holders = [
        subprocess.Popen(["unshare", "--net", "sh", "-c", HOLD], stdout=subprocess.PIPE)
        for _ in range(2)
    ]
    try:
        for holder in holders:
            assert holder.stdout is not None
            holder.stdout.readline()
        first, second = (holder.pid for holder in holders)
        yield Namespace(first, "10.77.9.1"), Namespace(second, "10.77.9.2")
    finally:
        for holder in holders:
            holder.kill()
            holder.communicate()


def set_up(ends: tuple[Namespace, Namespace]) -> None:
    for end in ends:
        end.ip("addr", "add", f"{end.address}/24", "dev", "wan0")
        end.ip("link", "set", "wan0", "up")


@pytest.fixture
def wired(ends: tuple[Namespace, Namespace]) -> Iterator[Relay]:
    with start_relay(*ends, Wire(LATENCY_S), devices=("wan0", "wan0"), seed=1) as relay:
        set_up(ends)
        yield relay


def datagrams(ends: tuple[Namespace, Namespace], stack: ExitStack) -> list[socket.socket]:
    """A UDP socket at each end, connected to the other one."""
    pair = [stack.enter_context(end.socket(socket.SOCK_DGRAM)) for end in ends]
    for own, end in zip(pair, ends, strict=True):
        own.bind((end.address, 0))
    for own, other in zip(pair, reversed(pair), strict=True):
        own.connect(other.getsockname())
    return pair


def transfer(ends: tuple[Namespace, Namespace], data: bytes) -> str:
    """Sends data from the first end to the second by TCP; returns the digest of what arrived."""
    with ExitStack() as stack:
        sender, listener = (stack.enter_context(end.socket(socket.SOCK_STREAM)) for end in ends)
        listener.bind((ends[1].address, 0))
        listener.listen()
        sender.connect(listener.getsockname())
        receiver, _ = listener.accept()
        stack.enter_context(receiver)
        receiver.settimeout(PATIENCE_S)

        def send() -> None:
            sender.sendall(data)
            sender.shutdown(socket.SHUT_WR)

        thread = threading.Thread(target=send)
        thread.start()
        digest = hashlib.blake2b()
        while piece := receiver.recv(1 << 16):
            digest.update(piece)
        thread.join()
    return digest.hexdigest()


def test_no_datagram_is_earlier_than_the_latency(
    ends: tuple[Namespace, Namespace], wired: Relay
) -> None:
    with ExitStack() as stack:
        near, far = datagrams(ends, stack)
        for number in range(20):
            for source, target in ((near, far), (far, near)):
                sent_s = time.monotonic()
                source.send(bytes([number]))
                assert target.recv(10) == bytes([number])
                assert time.monotonic() - sent_s >= LATENCY_S - 2 * EARLY_S
    counters = wired.counters()
    for lane in (counters.forward, counters.backward):
        assert lane.num_packets >= 20
        assert lane.nbytes >= 20 * 29
        assert lane.num_lost == 0
    assert counters.cpu_s > 0


@pytest.mark.parametrize("wire", [Wire(0.002), Wire(0.002, 0.001), Wire(0.002, 0, 0.005)])
def test_a_tcp_stream_arrives_whole(
    ends: tuple[Namespace, Namespace], wired: Relay, wire: Wire
) -> None:
    wired.set_wire(wire)
    assert transfer(ends, TRANSFER) == hashlib.blake2b(TRANSFER).hexdigest()
    forward = wired.counters().forward
    largest_nbytes = forward.nbytes / forward.num_packets
    if wire.loss:
        assert forward.num_lost > 0
        assert largest_nbytes <= 1500  # packets are lost one by one
    else:
        assert forward.nbytes > len(TRANSFER)
        assert largest_nbytes > 3000  # and else carried as super-packets


def test_what_is_not_counted_as_lost_arrives(
    ends: tuple[Namespace, Namespace], wired: Relay
) -> None:
    wired.set_wire(Wire(0.001, 0.0, 0.2))
    with ExitStack() as stack:
        near, far = datagrams(ends, stack)
        before = wired.counters().forward
        for number in range(200):
            near.send(number.to_bytes(2, "big"))
        wired.set_wire(Wire(0.001))
        near.send(b"end")
        arrived = list(iter(lambda: far.recv(10), b"end"))
    after = wired.counters().forward
    num_lost = after.num_lost - before.num_lost
    assert 0 < num_lost < 200
    assert len(arrived) == 200 - num_lost
    assert arrived == sorted(arrived)


def test_a_cut_wire_is_silent_and_keeps_its_carrier(
    ends: tuple[Namespace, Namespace], wired: Relay
) -> None:
    with ExitStack() as stack:
        near, far = datagrams(ends, stack)
        wired.set_wire(Wire(is_cut=True))
        near.send(b"lost")
        while wired.counters().forward.num_lost == 0:
            pass
        assert "LOWER_UP" in ends[0].ip("link", "show", "wan0")
        wired.set_wire(Wire())
        near.send(b"found")
        assert far.recv(10) == b"found"


def test_a_device_that_is_down_drops_and_comes_back(
    ends: tuple[Namespace, Namespace], wired: Relay
) -> None:
    with ExitStack() as stack:
        near, far = datagrams(ends, stack)
        ends[1].ip("link", "set", "wan0", "down")
        near.send(b"lost")
        while wired.counters().forward.num_dropped == 0:
            pass
        ends[1].ip("link", "set", "wan0", "up")
        near.send(b"found")
        assert far.recv(10) == b"found"


def test_frames_pass_between_tap_devices(ends: tuple[Namespace, Namespace]) -> None:
    devices = ("wan0", "wan0")
    with start_relay(*ends, Wire(0.001), devices=devices, is_tap=True) as relay:
        set_up(ends)
        assert "link/ether" in ends[0].ip("link", "show", "wan0")
        assert transfer(ends, b"frames") == hashlib.blake2b(b"frames").hexdigest()
        assert relay.counters().forward.num_dropped == 0


def test_closing_takes_the_devices_away(ends: tuple[Namespace, Namespace]) -> None:
    relay = start_relay(*ends, Wire(), devices=("left0", "right0"))
    assert [end.devices() for end in ends] == [["left0"], ["right0"]]
    assert relay.is_running
    relay.close()
    relay.close()
    assert not relay.is_running
    assert [end.devices() for end in ends] == [[], []]


def test_both_devices_may_be_in_one_namespace(ends: tuple[Namespace, Namespace]) -> None:
    with start_relay(ends[0], ends[0], Wire(), devices=("left0", "right0")):
        assert ends[0].devices() == ["left0", "right0"]


def test_a_name_that_is_taken_is_an_error_with_a_hint(
    ends: tuple[Namespace, Namespace], wired: Relay
) -> None:
    with pytest.raises(LaunchError, match="wan1 and wan0 could not be made") as failed:
        start_relay(*ends, Wire(), devices=("wan1", "wan0"))
    assert "is there already" in failed.value.hint
    assert ends[0].devices() == ["wan0"]  # nothing half made is left


def test_a_relay_whose_device_was_removed_says_that_it_has_ended(
    ends: tuple[Namespace, Namespace], wired: Relay
) -> None:
    ends[0].ip("link", "del", "wan0")
    wait_for_end(wired.pid)
    with pytest.raises(LaunchError, match="has ended"):
        wired.counters()
    assert ends[1].devices() == []


LAB = """
import sys
from types import SimpleNamespace
from isthmus.lab.relay import Wire, start_relay
first, second = (SimpleNamespace(pid=int(pid)) for pid in sys.argv[1:])
relay = start_relay(first, second, Wire(0.01), devices=("wan0", "wan0"))
print(relay.pid, flush=True)
sys.stdin.read()
"""


def test_nothing_is_left_when_the_lab_is_killed(ends: tuple[Namespace, Namespace]) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", LAB, *(str(end.pid) for end in ends)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as lab:
        assert lab.stdout is not None
        relay_pid = int(lab.stdout.readline())
        relay = os.pidfd_open(relay_pid)
        assert [end.devices() for end in ends] == [["wan0"], ["wan0"]]
        lab.send_signal(signal.SIGKILL)
        try:
            assert select.select([relay], (), (), PATIENCE_S)[0]
        finally:
            os.close(relay)
    assert [end.devices() for end in ends] == [[], []]


def wait_for_end(pid: int) -> None:
    process = os.pidfd_open(pid)
    try:
        assert select.select([process], (), (), PATIENCE_S)[0]
    finally:
        os.close(process)
