from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from isthmus.errors import LaunchError
from isthmus.measure import checks_host, checks_network, checks_torch, host, interfaces
from isthmus.measure.allreduce import AllReduce
from isthmus.measure.compute import MatmulRate
from isthmus.measure.disk import DiskWrite
from isthmus.measure.doctor import CHECKS, worst
from isthmus.measure.finding import (
    Check,
    Finding,
    Status,
    Surroundings,
    examine,
    fails,
    passes,
    warns,
)
from isthmus.measure.timing import Sample

HERE = Surroundings(Path(), {})
GIB = 1 << 30


def flat(value: float) -> Sample:
    return Sample(value, value, value, 1)


def here(**environ: str) -> Surroundings:
    return Surroundings(Path(), environ)


def answers(monkeypatch: pytest.MonkeyPatch, module: object, name: str, value: object) -> None:
    monkeypatch.setattr(module, name, lambda *_, **__: value)


# --- running a check ---


def test_a_check_that_raises_is_a_failure_with_its_reason() -> None:
    def broken(_: Surroundings) -> Finding:
        raise ZeroDivisionError("by nought\nand more")

    found = examine(Check("x", broken), HERE)
    assert (found.status, found.text) == (Status.FAIL, "ZeroDivisionError: by nought and more")
    assert found.hint


def test_an_error_of_ours_keeps_its_hint() -> None:
    def broken(_: Surroundings) -> Finding:
        raise LaunchError("no rank", hint="start one")

    assert examine(Check("x", broken), HERE) == fails("no rank", "start one")


def test_an_error_without_a_hint_takes_the_remedy_of_its_check() -> None:
    def broken(_: Surroundings) -> Finding:
        raise LaunchError("no rank")

    assert examine(Check("x", broken, remedy="start one"), HERE) == fails("no rank", "start one")


def test_a_check_that_hangs_is_a_failure_at_its_deadline() -> None:
    let_go = threading.Event()

    def stuck(_: Surroundings) -> Finding:
        let_go.wait()
        return passes("late")

    try:
        found = examine(Check("x", stuck, deadline_s=0.05), HERE)
    finally:
        let_go.set()
    assert found.status is Status.FAIL
    assert "0.05 s" in found.text


def test_findings_are_one_line() -> None:
    found = examine(Check("x", lambda _: warns("a\n b", "c\nd")), HERE)
    assert (found.text, found.hint) == ("a b", "c d")


def test_the_worst_status_counts() -> None:
    good, bad, worse = passes("a"), warns("b", "c"), fails("d", "e")
    assert worst([]) is Status.PASS
    assert worst([good, bad]) is Status.WARN
    assert worst([worse, bad, good]) is Status.FAIL


def test_names_are_unique_and_measuring_checks_come_last() -> None:
    names = [check.name for check in CHECKS]
    assert len(set(names)) == len(names)
    measures = [check.measures for check in CHECKS]
    assert measures == sorted(measures)


# --- judgement, by what a machine might say ---

LIMITS = host.Limits(1 << 16, 1 << 16, None, None, 0)
VERSIONS = host.Versions("1", "3.11", "2.4", host.TESTED_TORCH[0] + "+cpu")
MEMORY = host.Memory(16 * GIB, 8 * GIB, None)
KERNEL = host.KernelFeatures("6", True, True, "")
TORCH = host.TorchFacts("2", ("gloo",), None, (), 2, 1)
GPU = host.Accelerator("NVIDIA H100", 80 * GIB, "9.0")
LOOPBACK = interfaces.Nic("lo", True, None, 65536, ("127.0.0.1",), ("::1",))
ETHERNET = interfaces.Nic("eth0", True, 125e6, 1500, ("10.0.0.1",), ())
NAMED = interfaces.HostName("a", ("10.0.0.1",), ("eth0",), "")


@pytest.mark.parametrize(
    ("look", "module", "name", "answer", "status", "words"),
    [
        (checks_host.check_versions, host, "versions", VERSIONS, "pass", "tests ran"),
        (
            checks_host.check_versions,
            host,
            "versions",
            replace(VERSIONS, torch="2.99.0"),
            "warn",
            "2.13.0",
        ),
        (
            checks_host.check_versions,
            host,
            "versions",
            replace(VERSIONS, torch=None),
            "fail",
            "torch not installed",
        ),
        (checks_host.check_cores, host, "cores", host.Cores(8, 4, 8, None), "pass", "8 of 8"),
        (checks_host.check_cores, host, "cores", host.Cores(8, 4, 8, 2.0), "warn", "8 threads"),
        (checks_host.check_cores, host, "cores", host.Cores(8, 4, 1, None), "warn", "one core"),
        (checks_host.check_memory, host, "memory", MEMORY, "pass", "8.59 GB of 17.2 GB"),
        (
            checks_host.check_memory,
            host,
            "memory",
            replace(MEMORY, available_nbytes=GIB - 1),
            "warn",
            "available",
        ),
        (checks_host.check_limits, host, "limits", LIMITS, "pass", "unlimited processes"),
        (
            checks_host.check_limits,
            host,
            "limits",
            replace(LIMITS, open_files=256),
            "warn",
            "few open files",
        ),
        (
            checks_host.check_limits,
            host,
            "limits",
            replace(LIMITS, processes=100),
            "warn",
            "few processes",
        ),
        (checks_host.check_shared_memory, host, "shared_memory", None, "warn", "no /dev/shm"),
        (
            checks_host.check_shared_memory,
            host,
            "shared_memory",
            host.SharedMemory(64 << 20, 64 << 20),
            "warn",
            "67.1 MB",
        ),
        (
            checks_host.check_shared_memory,
            host,
            "shared_memory",
            host.SharedMemory(GIB, GIB),
            "pass",
            "free",
        ),
        (checks_host.check_kernel, host, "kernel_features", KERNEL, "pass", "netem yes"),
        (
            checks_host.check_kernel,
            host,
            "kernel_features",
            replace(KERNEL, network_namespaces=False, netem=None, reason="not permitted"),
            "warn",
            "not permitted",
        ),
        (
            checks_host.check_disk,
            checks_host,
            "disk_write",
            DiskWrite(flat(1e9), flat(0.001), 1),
            "pass",
            "1 GB/s",
        ),
        (
            checks_host.check_disk,
            checks_host,
            "disk_write",
            DiskWrite(flat(1e6), flat(0.5), 1),
            "warn",
            "slow; slow to sync",
        ),
        (
            checks_network.check_interfaces,
            interfaces,
            "nics",
            [ETHERNET, LOOPBACK],
            "pass",
            "1 Gbit/s",
        ),
        (checks_network.check_interfaces, interfaces, "nics", [LOOPBACK], "warn", "no other"),
        (checks_network.check_interfaces, interfaces, "nics", [ETHERNET], "fail", "no loopback"),
        (checks_network.check_host_name, interfaces, "host_name", NAMED, "pass", "(eth0)"),
        (
            checks_network.check_host_name,
            interfaces,
            "host_name",
            interfaces.HostName("a", ("127.0.1.1",), ("lo",), ""),
            "warn",
            "127.0.1.1",
        ),
        (
            checks_network.check_host_name,
            interfaces,
            "host_name",
            interfaces.HostName("a", (), (), "gaierror"),
            "warn",
            "nothing",
        ),
        (
            checks_network.check_loopback,
            checks_network,
            "loopback_throughput_bytes_per_s",
            flat(125e6),
            "pass",
            "1 Gbit/s",
        ),
        (
            checks_network.check_loopback,
            checks_network,
            "loopback_throughput_bytes_per_s",
            flat(1e6),
            "warn",
            "8 Mbit/s",
        ),
        (
            checks_torch.check_allreduce,
            checks_torch,
            "allreduce",
            [AllReduce(4096, 2, flat(1e-3), True, "lo")],
            "pass",
            "4 KiB in 1 ms",
        ),
        (
            checks_torch.check_allreduce,
            checks_torch,
            "allreduce",
            [AllReduce(4096, 2, flat(0.1), True, "lo")],
            "warn",
            "slow",
        ),
        (
            checks_torch.check_allreduce,
            checks_torch,
            "allreduce",
            [AllReduce(4 << 20, 2, flat(1e-3), False, "lo")],
            "fail",
            "wrong sum (4 MiB",
        ),
    ],
)
def test_judgement(
    monkeypatch: pytest.MonkeyPatch,
    look: Callable[[Surroundings], Finding],
    module: object,
    name: str,
    answer: object,
    status: str,
    words: str,
) -> None:
    answers(monkeypatch, module, name, answer)
    found = examine(Check("x", look), HERE)
    assert found.status == status, found
    assert words in found.text
    assert bool(found.hint) == (status != "pass")


@pytest.mark.parametrize(
    ("facts", "gpu_there", "status", "words"),
    [
        (TORCH, False, "pass", "only the CPU"),
        (TORCH, True, "warn", "torch can't use"),
        (replace(TORCH, backends=()), False, "fail", "no gloo"),
        (replace(TORCH, accelerators=(GPU,)), True, "warn", "no nccl"),
        (replace(TORCH, accelerators=(GPU,), backends=("gloo", "nccl")), True, "pass", "H100"),
    ],
)
def test_judgement_of_torch(
    monkeypatch: pytest.MonkeyPatch,
    facts: host.TorchFacts,
    gpu_there: bool,
    status: str,
    words: str,
) -> None:
    class Answering:
        def call(self, *_: object) -> host.TorchFacts:
            return facts

    monkeypatch.setattr(Surroundings, "worker", lambda _: Answering())
    answers(monkeypatch, host, "has_nvidia_gpu", gpu_there)
    found = examine(Check("x", checks_torch.check_torch), HERE)
    assert found.status == status, found
    assert words in found.text


@pytest.mark.parametrize(("together", "status"), [(20e9, "pass"), (10e9, "warn")])
def test_judgement_of_arithmetic(
    monkeypatch: pytest.MonkeyPatch, together: float, status: str
) -> None:
    class Answering:
        def call(self, *_: object) -> list[MatmulRate]:
            return [MatmulRate(1, 768, flat(10e9)), MatmulRate(4, 768, flat(together))]

    monkeypatch.setattr(Surroundings, "worker", lambda _: Answering())
    answers(monkeypatch, host, "cores", host.Cores(4, 4, 4, None))
    found = examine(Check("x", checks_torch.check_matmul), HERE)
    assert found.status == status, found
    assert "10 GFLOP/s on 1 core, " in found.text


def test_a_directory_that_can_not_be_written_is_a_failure(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    surroundings = Surroundings(tmp_path / "runs", {})
    assert checks_host.check_directory(surroundings).status != "fail"
    assert list(tmp_path.iterdir()) == []

    def refuse(**_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("tempfile.TemporaryFile", refuse)
    found = checks_host.check_directory(surroundings)
    assert (found.status, "Permission denied" in found.text) == (Status.FAIL, True)


def test_rdma_needs_locked_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    answers(monkeypatch, host, "limits", replace(LIMITS, locked_memory_nbytes=65536))
    answers(monkeypatch, host, "has_infiniband", False)
    assert checks_host.check_limits(HERE).status == "pass"
    answers(monkeypatch, host, "has_infiniband", True)
    assert checks_host.check_limits(HERE).status == "warn"


# --- variables ---


def test_variables_that_steer_are_listed() -> None:
    found = checks_network.check_environment(here(NCCL_DEBUG="INFO", HOME="/", OMP_NUM_THREADS="1"))
    assert found == passes("NCCL_DEBUG=INFO OMP_NUM_THREADS=1", **dict(found.values))
    assert set(found.values) == {"NCCL_DEBUG", "OMP_NUM_THREADS"}


@pytest.mark.parametrize(
    ("environ", "status", "words"),
    [
        ({}, "pass", "no variable"),
        ({"MASTER_ADDR": "a"}, "warn", "only one"),
        ({"MASTER_ADDR": "a", "MASTER_PORT": "1"}, "pass", "MASTER_ADDR=a"),
        ({"RANK": "0", "MASTER_ADDR": "a"}, "fail", "half set"),
        ({"GLOO_SOCKET_IFNAME": "nosuch0"}, "fail", "nosuch0"),
        ({"GLOO_SOCKET_IFNAME": "lo"}, "pass", "lo"),
        ({"OMP_NUM_THREADS": "100000"}, "warn", "more threads"),
        ({"OMP_NUM_THREADS": "4,2"}, "pass", "4,2"),
    ],
)
def test_judgement_of_variables(
    monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], status: str, words: str
) -> None:
    answers(monkeypatch, interfaces, "nics", [ETHERNET, LOOPBACK])
    found = examine(Check("x", checks_network.check_environment), here(**environ))
    assert found.status == status, found
    assert words in found.text
    assert bool(found.hint) == (status != "pass")


def test_an_interface_that_is_named_settles_the_host_name(monkeypatch: pytest.MonkeyPatch) -> None:
    answers(monkeypatch, interfaces, "host_name", interfaces.HostName("a", (), (), "no"))
    found = checks_network.check_host_name(here(GLOO_SOCKET_IFNAME="eth0"))
    assert (found.status, "eth0 decides" in found.text) == (Status.PASS, True)


def test_a_resolver_that_hangs_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    def hang(**_: float) -> None:
        raise LaunchError("no answer", hint="repair it")

    monkeypatch.setattr(interfaces, "host_name", hang)
    assert checks_network.check_host_name(HERE) == warns("no answer", "repair it")


def test_torchrun_is_told_apart_and_its_restarts_are_explained() -> None:
    found = checks_network.check_launcher(here(TORCHELASTIC_RUN_ID="x"))
    assert "kills the siblings" in found.text
    assert "fast restart" in found.text
    assert "SLURM job 7" in checks_network.check_launcher(here(SLURM_JOB_ID="7")).text
    assert "restart" not in checks_network.check_launcher(here()).text
