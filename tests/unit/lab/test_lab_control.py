"""Talking to a lab that is running."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from isthmus.errors import ConfigError, IsthmusError
from isthmus.lab import control
from isthmus.lab.control import SOCKET_NAME, ControlServer, ask_status, send_fault
from isthmus.lab.timeline import Fault, Kill, LinkRate, Stop
from isthmus.spec.cluster import ClusterSpec, Host, Link, Site

CLUSTER = ClusterSpec(
    name="pair",
    sites=tuple(Site(name=name, hosts=(Host(name=f"{name}0"),)) for name in ("a", "b")),
    links=(Link(between=("a", "b"), bandwidth_bytes_per_s=1e6),),
)


@pytest.fixture
def injected() -> list[Fault]:
    return []


@pytest.fixture
def server(tmp_path: Path, injected: list[Fault]) -> Iterator[ControlServer]:
    def inject(fault: Fault) -> None:
        if isinstance(fault, Kill):
            raise IsthmusError("nothing runs there", hint="start something")
        injected.append(fault)

    def status() -> dict[str, object]:
        return {"hosts": 2}

    with ControlServer(tmp_path, cluster=CLUSTER, inject=inject, status=status) as server:
        yield server


def test_a_fault_arrives_as_it_was_sent(server: ControlServer, injected: list[Fault]) -> None:
    faults = [
        Stop(host="a0", lasts_s=2.5),
        LinkRate(between=("b", "a"), bandwidth_bytes_per_s=1000.0, at_s=3.0),
    ]
    for fault in faults:
        send_fault(server.path.parent, fault)
    assert injected == faults


def test_the_labs_error_is_the_commands_error(server: ControlServer) -> None:
    with pytest.raises(IsthmusError, match="nothing runs there") as failed:
        send_fault(server.path.parent, Kill(host="a0"))
    assert failed.value.hint == "start something"
    with pytest.raises(IsthmusError, match="no host 'c0'; there are: a0, b0"):
        send_fault(server.path.parent, Stop(host="c0"))


def test_status_is_what_the_lab_says(server: ControlServer) -> None:
    assert ask_status(server.path.parent) == {"hosts": 2}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b"nonsense\n", "not JSON"),
        (b'{"fault": {"kind": "meteor"}}\n', "no fault"),
        (b'{"sing": 1}\n', "does not understand"),
        (b"\n", "not JSON"),
    ],
)
def test_a_bad_request_is_answered_and_the_next_one_too(
    server: ControlServer, line: bytes, said: str
) -> None:
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(server.path))
        client.sendall(line)
        with client.makefile("rb") as answers:
            assert said in json.loads(answers.readline())["error"]
    assert ask_status(server.path.parent) == {"hosts": 2}


def test_a_client_that_leaves_does_not_end_the_server(server: ControlServer) -> None:
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(server.path))
    assert ask_status(server.path.parent) == {"hosts": 2}


def test_only_the_labs_user_is_heard(
    server: ControlServer, injected: list[Fault], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "_peer_uid", lambda _connection: os.geteuid() + 1)
    with pytest.raises(IsthmusError, match="another user"):
        send_fault(server.path.parent, Stop(host="a0"))
    assert not injected
    assert server.path.stat().st_mode & 0o777 == 0o600


def test_nobody_answers_where_no_lab_runs(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no running lab answers"):
        ask_status(tmp_path)
    dead = socket.socket(socket.AF_UNIX)
    dead.bind(str(tmp_path / SOCKET_NAME))
    dead.close()  # as after kill -9: the file is there, nobody listens
    with pytest.raises(ConfigError, match="no running lab answers"):
        ask_status(tmp_path)
    server = ControlServer(tmp_path, cluster=CLUSTER, inject=lambda _: None, status=dict)
    assert ask_status(tmp_path) == {}
    server.close()
    server.close()
    assert not server.path.exists()


def test_a_path_that_the_kernel_would_cut_is_refused(tmp_path: Path) -> None:
    far = tmp_path / ("d" * 120)
    far.mkdir()
    with pytest.raises(ConfigError, match="too long a path"):
        ControlServer(far, cluster=CLUSTER, inject=lambda _: None, status=dict)
