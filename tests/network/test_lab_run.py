"""One command in all hosts, through the Python API and through ``isthmus lab``."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest
from lab_hosts import LONG_S, PYTHON, need_namespaces, nic, two_sites

from isthmus.cli.app import run as run_cli
from isthmus.errors import ConfigError
from isthmus.lab.cluster import Cluster
from isthmus.lab.run import Member, run_everywhere
from isthmus.observe import FaultInjected, lab_events_path, read_events
from isthmus.spec.cluster import ClusterSpec, Host, Site

pytestmark = pytest.mark.network
need_namespaces()

HOSTS = ["a0", "a1", "old", "b0", "b1"]


class Output:
    """What members of a command have said."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, str, str]] = []
        self.said: list[str] = []

    def take(self, member: Member, stream: str, line: str) -> None:
        self.lines.append((str(member), stream, line))


def everywhere(spec: ClusterSpec, script: str, **options: object) -> tuple[int, Output]:
    output = Output()
    with Cluster(spec) as cluster:
        code = run_everywhere(
            cluster, ["sh", "-c", script], on_output=output.take, say=output.said.append, **options
        )
    return code, output


def test_every_host_runs_the_command_once() -> None:
    code, output = everywhere(two_sites(), "echo $ISTHMUS_LAB_INDEX; echo $RANK >&2")
    assert code == 0
    expected = {(host, "stdout", str(index)) for index, host in enumerate(HOSTS)}
    expected |= {(host, "stderr", str(index)) for index, host in enumerate(HOSTS)}
    assert set(output.lines) == expected
    assert len(output.lines) == len(expected)
    assert output.said == []


def test_every_rank_runs_the_command_once() -> None:
    hosts = (Host(name="big", num_devices=2, nics=(nic(),)), Host(name="small", nics=(nic(),)))
    spec = ClusterSpec(name="mixed", sites=(Site(name="s", hosts=hosts),))
    script = "echo $RANK $LOCAL_RANK $LOCAL_WORLD_SIZE $WORLD_SIZE"
    code, output = everywhere(spec, script, per_rank=True)
    assert code == 0
    assert sorted((member, line) for member, _, line in output.lines) == [
        ("big:0", "0 0 2 3"),
        ("big:1", "1 1 2 3"),
        ("small", "2 0 1 3"),
    ]


def test_the_first_failure_ends_the_others_and_is_the_result() -> None:
    script = 'test $ISTHMUS_LAB_HOST = old && exit 7; trap "exit 5" TERM; sleep 1000 & wait'
    code, output = everywhere(two_sites(), script)
    assert code == 7
    assert output.said == ["error: the command in old failed with exit code 7"]


def test_a_host_that_ignores_the_end_is_killed() -> None:
    script = "test $ISTHMUS_LAB_HOST = old && exit 7; trap '' TERM; while :; do sleep 0.1; done"
    code, _ = everywhere(two_sites(), script, failure_grace_s=0.2)
    assert code == 7


def test_a_death_by_signal_is_named() -> None:
    code, output = everywhere(two_sites(), "test $ISTHMUS_LAB_HOST != b1 || kill -9 $$")
    assert code == 128 + signal.SIGKILL
    assert output.said == ["error: the command in b1 was ended by SIGKILL"]


def test_a_request_to_stop_reaches_all_and_a_checkpoint_is_no_failure() -> None:
    """75 is what a run exits with that has written a checkpoint."""
    seen: set[str] = set()

    def stop_when_all_are_up(member: Member, stream: str, line: str) -> None:
        seen.add(str(member))
        if len(seen) == len(HOSTS):
            os.kill(os.getpid(), signal.SIGINT)

    said: list[str] = []
    with Cluster(two_sites()) as cluster:
        code = run_everywhere(
            cluster,
            ["sh", "-c", "trap 'exit 75' TERM; echo up; while :; do sleep 0.02; done"],
            on_output=stop_when_all_are_up,
            say=said.append,
        )
    assert code == 75
    assert said == ["asking every host to stop; Ctrl-C again ends at once"]


def test_a_second_request_ends_what_will_not_stop() -> None:
    with Cluster(two_sites()) as cluster:
        code = run_everywhere(
            cluster,
            ["sh", "-c", "trap '' TERM; while :; do sleep 0.1; done"],
            grace_s=1000.0,
            on_poll=lambda: os.kill(os.getpid(), signal.SIGINT),  # until it is heeded
            say=lambda text: None,
        )
    assert code == 130


def test_what_does_not_stop_in_time_is_killed_and_named() -> None:
    def stop_when_it_is_up(member: Member, stream: str, line: str) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    said: list[str] = []
    deaf = "trap '' TERM; echo up; while :; do sleep 0.1; done"
    with Cluster(two_sites()) as cluster:
        code = run_everywhere(
            cluster,
            ["sh", "-c", f"test $ISTHMUS_LAB_HOST = b0 || exit 0; {deaf}"],
            grace_s=0.5,
            on_output=stop_when_it_is_up,
            say=said.append,
        )
    assert code == 130
    assert said[-1] == "b0 did not stop within 0.5 s and was killed"


def test_a_command_that_cannot_start_is_refused_before_anything_runs() -> None:
    with Cluster(two_sites()) as cluster, pytest.raises(ConfigError, match="no program 'nothing'"):
        run_everywhere(cluster, ["nothing"])


# --- the command line ---


CLUSTER = """
name = "pair"
[[sites]]
name = "east"
hosts = [{name = "e", nics = [{bandwidth = "100 Mbit/s"}]}]
[[sites]]
name = "west"
hosts = [{name = "w", nics = [{bandwidth = "100 Mbit/s"}]}]
[[links]]
between = ["east", "west"]
bandwidth = "50 Mbit/s"
"""


@pytest.fixture
def cluster_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    (tmp_path / "pair.toml").write_text(CLUSTER)
    return "pair.toml"


def test_output_is_told_apart_and_the_exit_code_passed_on(
    cluster_file: str, capfd: pytest.CaptureFixture[str]
) -> None:
    script = "hostname; test $(hostname) = e || exit 3"
    assert run_cli(["lab", cluster_file, "--", "sh", "-c", script]) == 3
    out, err = capfd.readouterr()
    assert sorted(out.splitlines()) == ["[e] e", "[w] w"]
    assert err == "error: the command in w failed with exit code 3\n"


def test_nothing_is_left_in_the_directory(cluster_file: str, tmp_path: Path) -> None:
    assert run_cli(["lab", cluster_file, "--", "true"]) == 0
    left = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert left == [tmp_path / cluster_file]
    assert not (tmp_path / "runs").exists()


def test_a_timeline_is_played_and_recorded(cluster_file: str, tmp_path: Path) -> None:
    """The command itself waits for the fault, so no time has to be right."""
    (tmp_path / "faults.toml").write_text(
        '[[fault]]\nkind = "nic_down"\nhost = "e"\nat = "10 ms"\n'
        '[[fault]]\nkind = "link_rate"\nbetween = ["west", "east"]\nbandwidth = "1 Mbit/s"\n'
    )
    wait = "until grep -q 0 /sys/class/net/eth0/carrier; do sleep 0.01; done"
    script = f"test $(hostname) = w || {wait}"
    command = ["lab", cluster_file, "--timeline", "faults.toml", "--run-dir", "r"]
    assert run_cli([*command, "--", "sh", "-c", script]) == 0
    events = read_events(lab_events_path(Path("r"))).events
    assert [(e.fault, e.target, e.value) for e in events if isinstance(e, FaultInjected)] == [
        ("link_rate", "east-west", "1 Mbit/s"),
        ("nic_down", "e:eth0", "down"),
    ]


@contextmanager
def running_lab(cluster_file: str, script: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "isthmus", "lab", cluster_file, "--", "sh", "-c", script]
    lab = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    with lab:
        try:
            for _ in "ew":
                assert lab.stdout.readline().endswith("] up\n")
            yield lab
        finally:
            if lab.poll() is None:
                lab.send_signal(signal.SIGTERM)


def test_faults_and_status_reach_a_running_lab(
    cluster_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    script = "echo up; until grep -q 0 /sys/class/net/eth0/carrier; do sleep 0.02; done"
    with running_lab(cluster_file, script) as lab:
        assert run_cli(["lab", "status", "--json"]) == 0
        (status,) = json.loads(capsys.readouterr().out).values()
        assert status["cluster"] == "pair"
        assert set(status["hosts"]) == {"e", "w"}
        assert run_cli(["lab", "fault", "nic_down", "--host", "x"]) == 2
        assert "there is no host 'x'" in capsys.readouterr().err
        for host in "ew":
            assert run_cli(["lab", "fault", "nic_down", "--host", host]) == 0
        assert lab.wait(LONG_S) == 0
    assert run_cli(["lab", "fault", "nic_down", "--host", "e"]) == 2
    assert "no lab runs" in capsys.readouterr().err


def test_with_several_labs_one_must_be_chosen(
    cluster_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with running_lab(cluster_file, "echo up; sleep 1000") as one:
        with running_lab(cluster_file, "echo up; sleep 1000"):
            assert run_cli(["lab", "fault", "heal"]) == 2
            error = capsys.readouterr().err
            assert "2 labs run" in error
            chosen = error.split("2 labs run: ")[1].split()[0]
            assert run_cli(["lab", "fault", "heal", "--lab", chosen]) == 0
        one.send_signal(signal.SIGINT)
        assert one.wait(LONG_S) == 130


ECHO = "import os; print(os.environ.get('RANK'), os.environ.get('TORCHELASTIC_RESTART_COUNT'))"


def test_ranks_of_an_outer_launcher_do_not_leak_in(
    cluster_file: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    outer: Mapping[str, str] = {"RANK": "7", "TORCHELASTIC_RESTART_COUNT": "2"}
    for name, value in outer.items():
        monkeypatch.setenv(name, value)
    assert run_cli(["lab", cluster_file, "--", *PYTHON, ECHO]) == 0
    assert sorted(capfd.readouterr().out.splitlines()) == ["[e] 0 None", "[w] 1 None"]
