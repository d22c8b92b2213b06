"""A cluster of real namespaces: what its hosts see, how they reach each other, and how it ends."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from lab_hosts import (
    LONG_S,
    MBIT,
    PYTHON,
    connect,
    is_cut,
    link,
    need_namespaces,
    nic,
    serving,
    two_sites,
)

from isthmus.errors import ConfigError, LaunchError
from isthmus.lab.cables import Cable, End
from isthmus.lab.cluster import Cluster
from isthmus.lab.counters import read_counters
from isthmus.lab.knobs import Quality
from isthmus.lab.network import Script, apply
from isthmus.lab.relay import Wire
from isthmus.spec.cluster import ClusterSpec, Host, Site

pytestmark = pytest.mark.network
need_namespaces()

HOSTS = ("a0", "a1", "old", "b0", "b1")
needs_tun = pytest.mark.skipif(not os.path.exists("/dev/net/tun"), reason="needs /dev/net/tun")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """One cluster for the tests of this file that leave it as they found it."""
    with Cluster(two_sites()) as cluster, serving(cluster, HOSTS):
        yield cluster


@pytest.fixture
def own_resources(cluster: Cluster) -> Callable[[], set[str]]:
    """What the module's cluster holds open is no leak of a test."""
    from conftest import resources

    before = resources()
    return lambda: before


def text(cluster: Cluster, host: str, *command: str) -> str:
    done = cluster.run(command, host=host, timeout_s=LONG_S)
    assert done.returncode == 0, done.stderr
    return done.stdout


# --- what a host sees ---


def test_a_host_has_its_own_name_addresses_and_processes(cluster: Cluster) -> None:
    assert text(cluster, "a1", "hostname") == "a1\n"
    assert text(cluster, "a1", "cat", "/etc/hostname") == "a1\n"
    seen = text(
        cluster, "a1", *PYTHON, "import os; print(os.getpid(), os.listdir('/sys/class/net'))"
    )
    pid, _, devices = seen.partition(" ")
    assert int(pid) < 100
    assert set(json.loads(devices.replace("'", '"'))) == {"lo", "eth0", "ib0"}
    names = psutil.pids()
    processes = text(
        cluster, "a1", *PYTHON, "import os; print(sum(p.isdigit() for p in os.listdir('/proc')))"
    )
    assert int(processes) < len(names)


def test_every_host_knows_all_others_by_name(cluster: Cluster) -> None:
    lookup = "import socket, sys; print(*(socket.gethostbyname(name) for name in sys.argv[1:]))"
    names = [*HOSTS, "a1-ib0"]
    expected = "10.77.1.2 10.77.1.3 10.77.1.4 10.77.2.2 10.77.2.3 10.78.1.3\n"
    assert text(cluster, "b1", *PYTHON, lookup, *names) == expected
    own = "import socket; print(socket.gethostbyname(socket.gethostname()))"
    assert text(cluster, "b1", *PYTHON, own) == "10.77.2.3\n"


def test_no_two_hosts_can_be_taken_for_one_machine(cluster: Cluster) -> None:
    identity = """
import os, socket
print(
    open("/proc/sys/kernel/random/boot_id").read().strip(),
    os.stat("/dev/shm").st_dev,
    *(os.stat(f"/proc/self/ns/{kind}").st_ino for kind in ("net", "ipc", "uts", "mnt", "pid")),
)
"""
    seen = [text(cluster, host, *PYTHON, identity).split() for host in HOSTS]
    outside = subprocess.run([*PYTHON, identity], capture_output=True, text=True, check=True)
    for each in zip(*seen, outside.stdout.split(), strict=False):
        assert len(set(each)) == len(each)


def test_shared_memory_of_one_host_is_not_there_in_another(cluster: Cluster) -> None:
    write = "open('/dev/shm/note', 'w').write('x')"
    text(cluster, "a0", *PYTHON, write)
    assert text(cluster, "a0", "ls", "/dev/shm") == "note\n"
    assert text(cluster, "a1", "ls", "/dev/shm") == ""
    assert not Path("/dev/shm/note").exists()
    text(cluster, "a0", "rm", "/dev/shm/note")


def test_abstract_sockets_are_a_hosts_own(cluster: Cluster) -> None:
    bind = "import socket, sys; server = socket.socket(socket.AF_UNIX); server.bind('\\0lab')"
    server = f"{bind}; print('up', flush=True); sys.stdin.read()"
    client = "import socket; print(socket.socket(socket.AF_UNIX).connect_ex('\\0lab'))"
    running = cluster.start(
        [*PYTHON, server], host="a0", stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with running:
        assert running.stdout.readline() == "up\n"
        assert int(text(cluster, "a1", *PYTHON, client)) != 0
        running.stdin.close()


def test_loopback_works(cluster: Cluster) -> None:
    assert connect(cluster, "a0", "127.0.0.1") == "127.0.0.1"
    assert connect(cluster, "a0", "localhost") == "127.0.0.1"


def test_nothing_outside_the_lab_can_be_reached(cluster: Cluster) -> None:
    assert connect(cluster, "a0", "198.51.100.1", timeout_s=5) in ("ENETUNREACH", "EHOSTUNREACH")


# --- how hosts reach each other ---


def test_all_hosts_reach_all_hosts(cluster: Cluster) -> None:
    own = {host.name: str(host.address) for host in cluster.topology.hosts}
    for host in HOSTS:
        for target in HOSTS:
            assert connect(cluster, host, target) == own[host]


@pytest.mark.parametrize("target", ["a1", "a1-ib0", "old", "b0"])
@pytest.mark.parametrize("choice", [{"source": "10.78.1.2"}, {"device": "ib0"}])
def test_a_chosen_nic_is_the_one_that_is_used(
    cluster: Cluster, target: str, choice: dict[str, str]
) -> None:
    before = cluster.counters()
    assert connect(cluster, "a0", target, **choice) == "10.78.1.2"
    after = cluster.counters()
    assert after["a0", "ib0"].sent_packets > before["a0", "ib0"].sent_packets
    assert after["a0", "ib0"].received_packets > before["a0", "ib0"].received_packets
    other = after["a0", "eth0"].sent_nbytes - before["a0", "eth0"].sent_nbytes
    assert other < 150  # an ARP answer or two


SEND = """
import socket, sys
with socket.create_connection((sys.argv[1], 6001)) as client:
    client.sendall(bytes(int(sys.argv[2])))
"""
RECEIVE = """
import socket
with socket.create_server(("0.0.0.0", 6001)) as server:
    print("ready", flush=True)
    client, _ = server.accept()
    with client:
        print(sum(iter(lambda: len(client.recv(1 << 20)), 0)))
"""


def transfer(cluster: Cluster, source: str, target: str, nbytes: int) -> int:
    receiver = cluster.start([*PYTHON, RECEIVE], host=target, stdout=subprocess.PIPE, text=True)
    with receiver:
        assert receiver.stdout.readline() == "ready\n"
        text(cluster, source, *PYTHON, SEND, target, str(nbytes))
        return int(receiver.stdout.readline())


@pytest.mark.parametrize(("source", "target"), [("a0", "a1"), ("a0", "b0")])
def test_every_byte_is_counted_at_the_interfaces(
    cluster: Cluster, source: str, target: str
) -> None:
    """At least the payload, at most full frames of 1514 bytes for 1448 and some acknowledgements.

    The kernel counts the headers of a burst that it hands on as one packet only once.
    """
    nbytes = 1_448_000
    before = cluster.counters()
    assert transfer(cluster, source, target, nbytes) == nbytes
    after = cluster.counters()
    sent = after[source, "eth0"].sent_nbytes - before[source, "eth0"].sent_nbytes
    received = after[target, "eth0"].received_nbytes - before[target, "eth0"].received_nbytes
    for counted in (sent, received):
        assert nbytes < counted < nbytes * 1514 / 1448 * 1.05
    for host in {*HOSTS} - {source, target}:
        grown = after[host, "eth0"].received_nbytes - before[host, "eth0"].received_nbytes
        assert grown < 1000  # a broadcast or two, but nothing of the transfer


# --- commands ---


def test_a_command_ends_as_it_would_outside(cluster: Cluster) -> None:
    assert cluster.run(["sh", "-c", "exit 7"], host="a0").returncode == 7
    assert cluster.run(["sh", "-c", "kill -SEGV $$"], host="a0").returncode == -signal.SIGSEGV
    assert cluster.run(["sh", "-c", "kill -9 $$"], host="a0").returncode == -signal.SIGKILL
    done = cluster.run(["sh", "-c", "echo out; echo err >&2; pwd"], host="a0")
    assert (done.stdout, done.stderr) == (f"out\n{os.getcwd()}\n", "err\n")


def test_commands_know_where_they_are(cluster: Cluster) -> None:
    show = "echo $ISTHMUS_LAB_HOST $ISTHMUS_LAB_SITE $ISTHMUS_LAB_INDEX $RANK $MASTER_ADDR"
    assert text(cluster, "old", "sh", "-c", show) == "old a 2 2 10.77.1.2\n"


def test_a_signal_goes_on_to_the_command(cluster: Cluster) -> None:
    script = "trap 'echo asked; exit 3' TERM; echo up; while :; do sleep 0.01; done"
    running = cluster.start(["sh", "-c", script], host="a0", stdout=subprocess.PIPE, text=True)
    with running:
        assert running.stdout.readline() == "up\n"
        running.terminate()
        assert running.wait(LONG_S) == 3
        assert running.stdout.read() == "asked\n"


def test_what_a_command_started_ends_with_it(cluster: Cluster) -> None:
    done = cluster.run(["sh", "-c", "sleep 1000 & echo $!"], host="a0", timeout_s=LONG_S)
    assert not Path(f"/proc/{cluster.host('a0').pid}/root/proc/{done.stdout.strip()}").exists()


def test_killing_the_process_outside_kills_the_command(cluster: Cluster) -> None:
    running = cluster.start(
        ["sh", "-c", "echo up; exec sleep 1000"], host="a0", stdout=subprocess.PIPE, text=True
    )
    with running:
        assert running.stdout.readline() == "up\n"
        (command,) = psutil.Process(running.pid).children()
        running.kill()
        running.wait()
    psutil.wait_procs([command], timeout=LONG_S)
    assert not command.is_running()


def test_a_program_that_is_not_there_is_refused(cluster: Cluster) -> None:
    with pytest.raises(ConfigError, match="no program 'no-such-program'"):
        cluster.run(["no-such-program"], host="a0")
    with pytest.raises(ConfigError, match="no host 'c0'"):
        cluster.run(["true"], host="c0")


def test_a_command_that_takes_too_long_is_killed(cluster: Cluster) -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        cluster.run(["sleep", "1000"], host="a0", timeout_s=0.1)


# --- faults ---


def test_a_link_that_is_down_cuts_its_sites_apart(cluster: Cluster) -> None:
    cluster.link_down("b", "a")
    assert connect(cluster, "a0", "b0") == "ENETUNREACH"
    assert connect(cluster, "b0", "a0") == "ENETUNREACH"
    assert connect(cluster, "a0", "a1") == "10.77.1.2"
    cluster.link_up("a", "b")
    assert connect(cluster, "a0", "b0") == "10.77.1.2"
    assert connect(cluster, "b0", "a0") == "10.77.2.2"


CARRIER = "print(open('/sys/class/net/ib0/carrier').read().strip())"


def test_a_nic_that_is_down_has_no_carrier_and_keeps_its_address(cluster: Cluster) -> None:
    cluster.nic_down("a0", "ib0")
    assert is_cut(cluster, "a1", "a0-ib0")
    assert connect(cluster, "a1", "a0") == "10.77.1.3"
    assert text(cluster, "a0", *PYTHON, CARRIER) == "0\n"
    assert "10.78.1.2" in text(cluster, "a0", "cat", "/proc/net/fib_trie")
    cluster.nic_up("a0", "ib0")
    assert text(cluster, "a0", *PYTHON, CARRIER) == "1\n"
    assert connect(cluster, "a1", "a0-ib0", source="10.78.1.3") == "10.78.1.3"


def test_a_partition_is_silent_and_exact(cluster: Cluster) -> None:
    """Groups cross sites and cut them; all that is not named is one more group."""
    cluster.partition((("a0", "b0"), ("old",)))
    groups = [{"a0", "b0"}, {"old"}, {"a1", "b1"}]
    try:
        for host in HOSTS:
            together = next(group for group in groups if host in group)
            for target in together:
                assert connect(cluster, host, target) != "silence"
        for host, target in (("a0", "a1"), ("b0", "b1"), ("old", "b0"), ("a1", "a0-ib0")):
            assert is_cut(cluster, host, target)
        assert text(cluster, "a0", *PYTHON, CARRIER) == "1\n"
    finally:
        cluster.heal()
    for host in HOSTS:
        assert connect(cluster, host, "a0") != "silence"


def test_a_partition_takes_the_place_of_the_one_before(cluster: Cluster) -> None:
    cluster.partition((("a0",),))
    cluster.partition((("b",),))
    try:
        assert connect(cluster, "a0", "a1") == "10.77.1.2"
        assert is_cut(cluster, "a0", "b0")
    finally:
        cluster.heal()
    cluster.heal()


def shaped_bits_per_s(cluster: Cluster, device: str, *, host: str = "", site: str = "") -> int:
    namespace = cluster.host(host) if host else cluster.switch(site)
    command = namespace.network_argv(["tc", "-json", "qdisc", "show", "dev", device])
    shown = subprocess.run(command, capture_output=True, text=True, check=True)
    (found,) = [each for each in json.loads(shown.stdout) if each["kind"] == "tbf"]
    return found["options"]["rate"] * 8


def test_rates_change_in_both_directions_and_back(cluster: Cluster) -> None:
    def rates() -> list[int]:
        return [
            shaped_bits_per_s(cluster, "link0", site="a"),
            shaped_bits_per_s(cluster, "link0", site="b"),
            shaped_bits_per_s(cluster, "ib0", host="a0"),
            shaped_bits_per_s(cluster, "port0.1", site="a"),
        ]

    declared = rates()
    expected = [100e6, 100e6, 200e6, 200e6]
    assert declared == pytest.approx([rate * 1514 / 1448 for rate in expected], rel=1e-6)
    cluster.set_link_rate("a", "b", 20 * MBIT)
    cluster.set_nic_rate("a0", "ib0", 10 * MBIT)
    expected = [20e6, 20e6, 10e6, 10e6]
    assert rates() == pytest.approx([rate * 1514 / 1448 for rate in expected], rel=1e-6)
    cluster.set_link_rate("a", "b", None)
    cluster.set_nic_rate("a0", "ib0", None)
    assert rates() == declared


def test_a_stopped_host_stands_still_alone(cluster: Cluster) -> None:
    cluster.signal("old", signal.SIGSTOP)
    try:
        assert is_cut_after_connect(cluster, "a0", "old")
        assert connect(cluster, "a0", "a1") == "10.77.1.2"
    finally:
        cluster.signal("old", signal.SIGCONT)
    assert connect(cluster, "a0", "old") == "10.77.1.2"


def is_cut_after_connect(cluster: Cluster, host: str, target: str) -> bool:
    """The kernel still accepts for a stopped program, which then says nothing."""
    return connect(cluster, host, target, timeout_s=0.25) == "silence"


def start_and_see(cluster: Cluster, host: str, script: str) -> subprocess.Popen[str]:
    """Start a shell script that says ``up`` when it is there."""
    running = cluster.start(["sh", "-c", script], host=host, stdout=subprocess.PIPE, text=True)
    assert running.stdout.readline() == "up\n"
    return running


def test_a_killed_host_loses_all_its_processes_and_goes_on() -> None:
    with Cluster(two_sites()) as cluster:
        with start_and_see(cluster, "b1", "setsid sleep 1000 & echo up; wait") as running:
            cluster.signal("b1", signal.SIGKILL)
            assert running.wait(LONG_S) == -signal.SIGKILL
        give_up_at_s = time.monotonic() + LONG_S  # a killed process takes a moment to be gone
        while processes_in(cluster, "b1") > 1 and time.monotonic() < give_up_at_s:
            time.sleep(0.01)
        assert processes_in(cluster, "b1") == 1
        with serving(cluster, ["b1"]):
            assert connect(cluster, "a0", "b1") == "10.77.1.2"


def processes_in(cluster: Cluster, host: str) -> int:
    """How many processes a host has, its holder among them."""
    namespace = os.stat(f"/proc/{cluster.host(host).pid}/ns/pid").st_ino
    count = 0
    for path in Path("/proc").glob("[0-9]*/ns/pid"):
        with suppress(OSError):
            count += path.stat().st_ino == namespace
    return count


@needs_tun
def test_a_link_becomes_long_and_short_again() -> None:
    with Cluster(two_sites()) as cluster, serving(cluster, HOSTS):
        wiring = cluster.wiring
        cluster.set_link_quality("a", "b", Quality(latency_s=0.02))
        assert connect(cluster, "a0", "b0") == "10.77.1.2"
        assert wiring.means in ("relay", "netem")
        cluster.set_link_quality("a", "b", Quality(latency_s=0.01, loss=0.01))
        assert connect(cluster, "a0", "b0") == "10.77.1.2"
        cluster.set_link_rate("a", "b", 10 * MBIT)
        cluster.link_down("a", "b")
        cluster.set_link_quality("a", "b", None)
        assert connect(cluster, "a0", "b0") == "ENETUNREACH"
        cluster.link_up("a", "b")
        assert connect(cluster, "a0", "b0") == "10.77.1.2"
        rate = shaped_bits_per_s(cluster, "link0", site="a")
        assert rate == pytest.approx(10e6 * 1514 / 1448, rel=1e-6)


ROUND_TRIP = """
import socket, sys, time
times = []
for _ in range(5):
    begun_s = time.perf_counter()
    socket.create_connection((sys.argv[1], 5001)).close()
    times.append(time.perf_counter() - begun_s)
print(min(times))
"""


@needs_tun
def test_declared_delays_are_there_within_and_between_sites() -> None:
    """Never less than declared; how much more depends on the machine."""
    sites = tuple(
        Site(name=name, latency_s=0.004, hosts=(Host(name=name, count=2, nics=(nic(),)),))
        for name in "xy"
    )
    spec = ClusterSpec(name="far", sites=sites, links=(link("x", "y", latency_s=0.02),))
    with Cluster(spec) as cluster, serving(cluster, ["x1", "y0"]):
        for target in ("x1", "y0"):
            least_s = 2 * cluster.topology.latency_s("x0", target)
            taken_s = float(text(cluster, "x0", *PYTHON, ROUND_TRIP, target))
            assert taken_s > least_s * 0.95


def test_a_cable_with_netem_carries_packets_and_can_be_removed() -> None:
    """With a plain queue in netem's place, which many kernels don't have."""
    wire = Wire(latency_s=0.01, loss=0.01)
    with Cluster(two_sites()) as cluster:
        ends = (End(cluster.host("a0"), "far0"), End(cluster.switch("b"), "far0"))
        cable = Cable(
            "far",
            ends,
            index=5000,
            bandwidth_bytes_per_s=10 * MBIT,
            is_ethernet=False,
            means="netem",
        )
        pairs, scripts = cable.orders(wire)
        for script in scripts.values():
            script.tc = [re.sub("netem .*", "pfifo limit 1000", order) for order in script.tc]
        before = devices_of(cluster)
        apply({ends[0].namespace: Script(ip=pairs)})
        apply(scripts)
        cable.note_made(wire)
        for number, end in enumerate(ends, 1):
            address = f"address add 10.9.9.{number}/24 dev far0"
            apply({end.namespace: Script(ip=[address, "link set dev far0 up"])})
        assert connect(cluster, "a0", "10.9.9.2") == "ECONNREFUSED"  # so somebody is there
        cable.remove()
        assert devices_of(cluster) == before


def devices_of(cluster: Cluster) -> list[set[str]]:
    namespaces = [cluster.host("a0"), cluster.switch("b")]
    return [set(read_counters(namespace.pid)) for namespace in namespaces]


# --- limits and ends ---


@needs_tun
def test_a_link_beyond_the_relay_is_refused_unless_it_may_be_missing() -> None:
    spec = two_sites(mbit_per_s=5000, latency_s=0.01)
    with Cluster(two_sites(latency_s=0.01)) as cluster:
        has_netem = cluster.wiring.means == "netem"
    if has_netem:
        pytest.skip("the kernel has netem")
    with pytest.raises(ConfigError, match="cannot delay packets") as caught, Cluster(spec):
        pass
    assert "--allow-missing latency" in caught.value.hint
    with Cluster(spec, allow_missing=["latency"]) as cluster, serving(cluster, ["b0"]):
        assert connect(cluster, "a0", "b0") == "10.77.1.2"


def test_what_may_be_missing_has_a_name() -> None:
    with pytest.raises(ConfigError, match="latency, memory, not 'speed'"):
        Cluster(two_sites(), allow_missing=["speed"])


def test_a_missing_tool_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import shutil

    monkeypatch.setattr(shutil, "which", lambda name, path=None: None)
    with pytest.raises(LaunchError, match="program ip") as caught, Cluster(two_sites()):
        pass
    assert "iproute2" in caught.value.hint


def test_a_cluster_that_does_not_run_says_so() -> None:
    cluster = Cluster(two_sites())
    for use in (lambda: cluster.run(["true"], host="a0"), lambda: cluster.link_down("a", "b")):
        with pytest.raises(LaunchError, match="does not run"):
            use()


def test_two_labs_with_the_same_addresses_do_not_meet(cluster: Cluster) -> None:
    with Cluster(two_sites()) as other:
        assert other.id != cluster.id
        assert connect(other, "a0", "a1") == "ECONNREFUSED"
        assert connect(cluster, "a0", "a1") == "10.77.1.2"


def interfaces() -> set[str]:
    return set(os.listdir("/sys/class/net"))


LONG_LINK = {"latency_s": 0.01} if os.path.exists("/dev/net/tun") else {}


def test_leaving_a_cluster_leaves_nothing() -> None:
    before = interfaces()
    with Cluster(two_sites(**LONG_LINK)) as cluster:
        running = start_and_see(cluster, "a0", "echo up; exec sleep 1000")
        pids = [cluster.host(host).pid for host in HOSTS] + [running.pid]
        directory = cluster.directory
        assert interfaces() == before  # all is inside
    assert running.returncode == -signal.SIGKILL
    running.stdout.close()
    assert not any(map(psutil.pid_exists, pids))
    assert not directory.exists()


def test_a_lab_that_cannot_be_built_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from isthmus.lab import network

    def broken(*_: Any) -> None:
        raise LaunchError("broken")

    cluster = Cluster(two_sites())
    monkeypatch.setattr(network, "switch_script", broken)
    with pytest.raises(LaunchError, match="broken"), cluster:
        pass
    with pytest.raises(LaunchError, match="does not run"):
        cluster.link_up("a", "b")


LAB = """
import subprocess, sys, time
from pathlib import Path
from isthmus.lab.cables import Cable, End
from isthmus.lab.cluster import Cluster
from isthmus.lab.counters import read_counters
from isthmus.spec.cluster import ClusterSpec
spec = ClusterSpec.model_validate_json(sys.argv[1])
with Cluster(spec, state_dir=Path(sys.argv[2])) as cluster:
    script = ["sh", "-c", "setsid sleep 1000 & echo up; sleep 1000"]
    running = cluster.start(script, host="a0", stdout=subprocess.PIPE, text=True)
    print(running.stdout.readline(), end="")
    print(cluster.run(["id", "-u"], host="a0").stdout, end="", flush=True)
    sys.stdin.read()
"""


def descendants(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """All processes of a lab: what it started, and all that is in its hosts."""
    return psutil.Process(process.pid).children(recursive=True)


def test_a_lab_that_is_killed_leaves_no_process_and_the_next_one_cleans_up(tmp_path: Path) -> None:
    spec = two_sites(**LONG_LINK)
    command = [sys.executable, "-c", LAB, spec.model_dump_json(), str(tmp_path)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, text=True, **pipes) as lab:
        try:
            assert lab.stdout.readline() == "up\n"
            everything = descendants(lab)
        finally:
            lab.kill()
    assert len(everything) >= 1 + len(HOSTS) + 2 + 3  # holders, and the command with its own
    _, alive = psutil.wait_procs(everything, timeout=LONG_S)
    assert alive == []
    assert len(list(tmp_path.iterdir())) == 1
    with Cluster(spec, state_dir=tmp_path) as cluster:
        assert list(tmp_path.iterdir()) == [cluster.directory]
    assert list(tmp_path.iterdir()) == []


AS_NOBODY = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
TRY_AS_NOBODY = [*AS_NOBODY, "unshare", "--user", "--map-root-user", "--net"]
SYSTEM_PYTHON = "/usr/bin/python3"
"""Root's own Python may lie where nobody else may read; the libraries are those of the tests."""


def paths_of_libraries() -> str:
    import isthmus

    folders = [Path(module.__file__).parent.parent for module in (isthmus, psutil, pytest)]
    return os.pathsep.join(map(str, dict.fromkeys(folders)))


def can_be_nobody() -> bool:
    command = [*TRY_AS_NOBODY, SYSTEM_PYTHON, "-Bc", "import isthmus.lab.cluster"]
    environ = {**os.environ, "PYTHONPATH": paths_of_libraries()}
    return not subprocess.run(command, capture_output=True, check=False, env=environ).returncode


@pytest.mark.skipif(not can_be_nobody(), reason="needs user namespaces and a Python for everybody")
def test_a_lab_needs_no_root() -> None:
    with tempfile.TemporaryDirectory() as directory:
        os.chmod(directory, 0o777)
        done = subprocess.run(
            [
                *AS_NOBODY,
                SYSTEM_PYTHON,
                "-Bc",
                LAB,
                two_sites().model_dump_json(),
                f"{directory}/labs",
            ],
            input="",
            capture_output=True,
            text=True,
            check=False,
            timeout=LONG_S,
            cwd="/",
            env={**os.environ, "PYTHONPATH": paths_of_libraries()},
        )
        assert done.stderr == ""
        assert done.stdout == "up\n0\n"
        assert os.listdir(f"{directory}/labs") == []
