"""The doctor and its measurements with real processes."""

from __future__ import annotations

import json
import math
import operator
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from isthmus.errors import LaunchError, RankFailedError
from isthmus.measure import compute, host
from isthmus.measure.allreduce import allreduce
from isthmus.measure.doctor import CHECKS
from isthmus.measure.worker import OWN_END_S, Worker

PATIENCE_S = 60.0


@pytest.fixture
def worker() -> Iterator[Worker]:
    with Worker() as worker:
        yield worker


def test_a_worker_runs_functions_elsewhere_and_lives_on(worker: Worker) -> None:
    assert worker.call(PATIENCE_S, os.getpid) == worker.pid != os.getpid()
    assert worker.call(PATIENCE_S, operator.add, [1], [2]) == [1, 2]


def test_what_a_function_raises_or_prints_does_no_harm(worker: Worker) -> None:
    with pytest.raises(
        RankFailedError, match=r"^ValueError: math domain error|ValueError: expected"
    ):
        worker.call(PATIENCE_S, math.sqrt, -1)
    worker.call(PATIENCE_S, print, "noise")
    assert worker.call(PATIENCE_S, math.sqrt, 4) == 2


def test_a_worker_that_dies_says_how_and_takes_no_more_calls(worker: Worker) -> None:
    with pytest.raises(LaunchError, match="SIGABRT"):
        worker.call(PATIENCE_S, os.abort)
    assert not worker.alive
    with pytest.raises(LaunchError, match="ended"):
        worker.call(PATIENCE_S, os.getpid)


def test_a_worker_that_does_not_answer_is_killed(worker: Worker) -> None:
    worker.call(PATIENCE_S, os.getpid)
    with pytest.raises(LaunchError, match=r"within 0\.05 s"):
        worker.call(0.05, time.sleep, 1000)
    assert not psutil.pid_exists(worker.pid)


def test_a_call_that_nobody_waits_for_ends_by_itself(worker: Worker) -> None:
    worker.call(PATIENCE_S, os.getpid)
    worker.begin(0.1 - OWN_END_S, time.sleep, 1000)
    with pytest.raises(LaunchError, match="exit code 1"):
        worker.result(PATIENCE_S)


def test_a_worker_ends_with_its_parent_even_inside_a_call() -> None:
    code = (
        "import time; from isthmus.measure.worker import Worker; worker = Worker();"
        "worker.call(60, time.time); worker.begin(60, time.sleep, 1000);"
        "print(worker.pid, flush=True); time.sleep(1000)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout
        child = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
    _, alive = psutil.wait_procs([child], timeout=PATIENCE_S)
    assert not alive


def test_torch_is_asked_and_timed_in_a_worker(worker: Worker) -> None:
    facts = worker.call(PATIENCE_S, host.torch_facts)
    assert "gloo" in facts.backends
    threads = worker.call(PATIENCE_S, compute.torch.get_num_threads)
    rates = worker.call(PATIENCE_S, compute.matmul_rates, [1, 2], size=64, rounds=2, round_s=0.001)
    assert [(rate.num_threads, rate.size, rate.flops_per_s.count) for rate in rates] == [
        (1, 64, 2),
        (2, 64, 2),
    ]
    assert all(rate.flops_per_s.low > 0 for rate in rates)
    assert worker.call(PATIENCE_S, compute.torch.get_num_threads) == threads


def test_ranks_add_exactly() -> None:
    found = allreduce([4, 1 << 20], world_size=3, rounds=2, deadline_s=PATIENCE_S)
    assert [(size.nbytes, size.world_size, size.correct) for size in found] == [
        (4, 3, True),
        (1 << 20, 3, True),
    ]
    assert all(size.duration_s.count == 2 and size.duration_s.low > 0 for size in found)


def test_ranks_that_can_not_meet_say_why() -> None:
    environ = os.environ | {"GLOO_SOCKET_IFNAME": "nosuch0"}
    with pytest.raises(RankFailedError, match="nosuch0"):
        allreduce([4], rounds=1, deadline_s=PATIENCE_S, environ=environ)


def test_ranks_past_the_deadline_are_killed_and_named() -> None:
    with pytest.raises(RankFailedError, match=r"^rank 0, 1: .* within 0\.01 s"):
        allreduce([4], rounds=1, deadline_s=0.01)


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "isthmus", "doctor", *arguments]


def test_the_whole_doctor(tmp_path: Path) -> None:
    environ = os.environ | {"TORCHELASTIC_RUN_ID": "x"}
    done = subprocess.run(
        command("--json", "--directory", str(tmp_path)),
        capture_output=True,
        text=True,
        env=environ,
        timeout=100,
    )
    found = json.loads(done.stdout)
    assert [check["name"] for check in found["checks"]] == [check.name for check in CHECKS]
    failed = [check for check in found["checks"] if check["status"] == "fail"]
    assert (done.returncode, failed) == (0, [])
    by_name = {check["name"]: check for check in found["checks"]}
    assert "fast restart" in by_name["launcher"]["finding"]
    assert all(size["correct"] for size in by_name["all-reduce"]["values"]["sizes"])
    assert by_name["disk"]["values"]["bytes_per_s"]["median"] > 0
    assert done.stderr == ""
    assert list(tmp_path.iterdir()) == []


def test_a_wrong_variable_fails_the_doctor(tmp_path: Path) -> None:
    environ = os.environ | {"GLOO_SOCKET_IFNAME": "nosuch0"}
    done = subprocess.run(
        command("--quick"), capture_output=True, text=True, env=environ, cwd=tmp_path, timeout=100
    )
    assert done.returncode == 1
    assert "FAIL  environment    GLOO_SOCKET_IFNAME names nosuch0" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("raise ImportError('libtorch.so is missing')", "ImportError: libtorch.so is missing"),
        ("import os; os.abort()", "SIGABRT"),
    ],
)
def test_a_broken_torch_is_a_finding(tmp_path: Path, source: str, words: str) -> None:
    (tmp_path / "torch.py").write_text(source)
    paths = [str(tmp_path), os.environ.get("PYTHONPATH", "")]
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    done = subprocess.run(
        command("--quick", "--json"), capture_output=True, text=True, env=environ, timeout=100
    )
    assert (done.returncode, done.stderr) == (1, "")
    failed = [check for check in json.loads(done.stdout)["checks"] if check["status"] == "fail"]
    assert [check["name"] for check in failed] == ["torch"]
    assert words in failed[0]["finding"]
    assert "install torch again" in failed[0]["hint"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_doctor_that_is_stopped_leaves_no_process(tmp_path: Path, number: signal.Signals) -> None:
    with subprocess.Popen(
        command("--directory", str(tmp_path)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # Started in the background by a script, pytest ignores Ctrl-C, and so would its child.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as doctor:
        assert doctor.stdout
        for line in doctor.stdout:
            if line[6:].startswith("torch"):  # its worker lives on for the next check
                break
        children = psutil.Process(doctor.pid).children(recursive=True)
        assert children
        doctor.send_signal(number)
        complaints = doctor.stderr.read() if doctor.stderr else ""
    assert "Traceback" not in complaints
    assert doctor.returncode != 0
    _, alive = psutil.wait_procs(children, timeout=PATIENCE_S)
    assert not alive
    assert list(tmp_path.iterdir()) == []
