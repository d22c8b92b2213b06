from __future__ import annotations

import os
import platform
import shutil
import socket
from pathlib import Path

import psutil
import pytest

from isthmus.elastic.interfaces import local_addresses
from isthmus.errors import LaunchError
from isthmus.measure import disk, host, interfaces
from isthmus.measure.loopback import loopback_throughput_bytes_per_s


def test_the_tested_torch_is_the_one_in_the_constraints() -> None:
    constraints = Path(__file__).parents[3] / "constraints.txt"
    pinned = [
        line.removeprefix("torch==").strip()
        for line in constraints.read_text().splitlines()
        if line.startswith("torch==")
    ]
    assert pinned == [host.TESTED_TORCH[-1]]


@pytest.mark.parametrize(
    ("allowed", "quota", "usable"), [(8, None, 8), (8, 2.5, 2), (8, 0.5, 1), (2, 6.0, 2)]
)
def test_usable_cores_are_the_lesser_of_affinity_and_quota(
    allowed: int, quota: float | None, usable: int
) -> None:
    assert host.Cores(8, 4, allowed, quota).usable == usable


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs affinity")
def test_cores_follow_the_affinity() -> None:
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(before)})
        assert host.cores().allowed == 1
    finally:
        os.sched_setaffinity(0, before)
    assert host.cores().allowed == len(before)


def test_the_processor_has_a_name(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor\t: 0\nmodel name\t: Fast One\nmodel\t\t: 17\n")
    assert host.processor(cpuinfo) == "Fast One"
    assert host.processor(tmp_path / "missing") == (platform.processor() or platform.machine())


def test_memory_and_limits_are_the_systems() -> None:
    found = host.memory()
    assert found.total_nbytes == psutil.virtual_memory().total
    assert 0 < found.available_nbytes <= found.total_nbytes
    limits = host.limits()
    assert limits.open_files is None or limits.open_files > 0


def test_what_is_not_there_is_none(tmp_path: Path) -> None:
    assert host.shared_memory(tmp_path / "no") is None
    assert not host.has_infiniband(tmp_path / "no")
    assert not host.has_nvidia_gpu(tmp_path)
    (tmp_path / "nvidiactl").touch()
    assert not host.has_nvidia_gpu(tmp_path)
    (tmp_path / "nvidia0").touch()
    assert host.has_nvidia_gpu(tmp_path)


def test_kernel_features_without_the_tools_are_not_claimed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda *_, **__: None)
    found = host.kernel_features()
    assert (found.network_namespaces, found.netem) == (None, None)
    assert "unshare" in found.reason


def test_interfaces_have_the_addresses_that_the_system_has() -> None:
    found = interfaces.nics()
    assert {nic.name for nic in found} == set(psutil.net_if_stats())
    own = local_addresses()
    assert all(own[address] == nic.name for nic in found for address in nic.addresses)
    assert interfaces.default_interface() in {None, *psutil.net_if_stats()}


def test_a_name_is_resolved_to_this_hosts_interfaces() -> None:
    found = interfaces.host_name("127.0.0.1")
    assert found.addresses == ("127.0.0.1",)
    assert found.interfaces == (local_addresses()["127.0.0.1"],)
    assert not found.reachable


def test_a_foreign_address_is_not_reachable_and_an_own_one_is() -> None:
    foreign = interfaces.HostName("x", ("198.51.100.1",), (None,), "")
    own = interfaces.HostName("x", ("127.0.1.1", "10.0.0.1"), ("lo", "eth0"), "")
    assert not foreign.reachable
    assert own.reachable


def test_a_name_that_resolves_to_nothing_says_why() -> None:
    found = interfaces.host_name("no-such-host.invalid", deadline_s=60)
    assert found.addresses == ()
    assert "gaierror" in found.trouble


def test_a_resolver_that_hangs_is_an_error_with_a_hint() -> None:
    with pytest.raises(LaunchError, match="within 0 s") as caught:
        interfaces.host_name("localhost", deadline_s=0)
    assert "/etc/hosts" in caught.value.hint


def test_loopback_throughput_is_positive_and_in_order() -> None:
    found = loopback_throughput_bytes_per_s(rounds=3, round_s=0.01)
    assert 0 < found.low <= found.median <= found.high
    assert found.count == 3


def test_loopback_that_carries_nothing_ends_with_a_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("isthmus.measure.loopback._send_until_closed", lambda sender: None)
    with pytest.raises(TimeoutError):
        loopback_throughput_bytes_per_s(deadline_s=0.05)


def test_disk_is_measured_and_nothing_is_left(tmp_path: Path) -> None:
    found = disk.disk_write(tmp_path, nbytes=3 << 20, rounds=2, small_rounds=3)
    assert 0 < found.bytes_per_s.low <= found.bytes_per_s.median
    assert (found.bytes_per_s.count, found.fsync_s.count, found.nbytes) == (2, 3, 3 << 20)
    assert list(tmp_path.iterdir()) == []


def test_a_disk_past_its_deadline_is_a_timeout(tmp_path: Path) -> None:
    with pytest.raises(TimeoutError, match="within 0 s"):
        disk.disk_write(tmp_path, deadline_s=0)
    assert list(tmp_path.iterdir()) == []


def test_disk_space_is_of_the_nearest_directory_there_is(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    found = disk.disk_space(tmp_path / "file" / "runs")
    assert found.directory == tmp_path
    assert found.total_nbytes == shutil.disk_usage(tmp_path).total
    assert found.file_system


def test_the_file_system_is_that_of_the_innermost_mount() -> None:
    if not Path("/proc/self/mounts").exists():
        pytest.skip("needs /proc")
    assert disk.disk_space(Path("/proc/self/fd")).file_system == "proc"


def test_local_name_resolution_agrees_with_socket() -> None:
    infos = socket.getaddrinfo("localhost", None, type=socket.SOCK_STREAM)
    expected = tuple(dict.fromkeys(info[4][0] for info in infos))
    assert interfaces.host_name("localhost", deadline_s=60).addresses == expected
