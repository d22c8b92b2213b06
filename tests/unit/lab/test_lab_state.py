"""A lab's directory: made, found while the lab lives, removed by the next one when it is gone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from lab_clusters import link, nic

from isthmus.errors import ConfigError
from isthmus.lab import state
from isthmus.lab.memory import HOST_NBYTES, RANK_NBYTES, refuse_too_many
from isthmus.lab.topology import plan_topology
from isthmus.spec.cluster import ClusterSpec, Host, Site

CLUSTER = ClusterSpec(
    name="two",
    sites=tuple(
        Site(name=name, hosts=(Host(name=name, count=2, num_devices=2, nics=(nic(),)),))
        for name in "ab"
    ),
    links=(link("a", "b", latency_s=0.0125, loss=0.01),),
)


def test_a_running_lab_is_found_with_its_cluster(tmp_path: Path) -> None:
    directory = state.make_directory(CLUSTER, tmp_path)
    assert list(state.running_labs(tmp_path)) == [(directory, "two")]
    assert state.cluster_of(directory) == CLUSTER
    assert directory.stat().st_mode & 0o777 == 0o700


def test_several_labs_have_directories_of_their_own(tmp_path: Path) -> None:
    made = [state.make_directory(CLUSTER, tmp_path) for _ in range(3)]
    assert len(set(made)) == 3
    assert {path for path, _ in state.running_labs(tmp_path)} == set(made)


def owner(directory: Path, **changes: float) -> None:
    """Say that another process made the directory."""
    file = directory / "lab.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_the_next_lab_removes_what_a_dead_one_left(tmp_path: Path) -> None:
    left = state.make_directory(CLUSTER, tmp_path)
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        pass
    owner(left, pid=process.pid)
    fresh = state.make_directory(CLUSTER, tmp_path)
    assert not left.exists()
    assert fresh.exists()


def test_a_pid_that_is_another_process_by_now_does_not_keep_a_directory(tmp_path: Path) -> None:
    left = state.make_directory(CLUSTER, tmp_path)
    owner(left, started_s=1.0)
    assert list(state.running_labs(tmp_path)) == []
    state.remove_ended(tmp_path)
    assert not left.exists()


@pytest.mark.parametrize("content", [None, "", "{", "[]", '{"pid": 1}'])
def test_what_is_not_provably_a_dead_lab_stays(tmp_path: Path, content: str | None) -> None:
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    if content is not None:
        (foreign / "lab.json").write_text(content)
    state.make_directory(CLUSTER, tmp_path)
    assert foreign.exists()


def test_a_place_of_another_user_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(ConfigError, match="belongs to another user"):
        state.make_directory(CLUSTER, tmp_path)


def test_each_host_sees_files_of_its_own(tmp_path: Path) -> None:
    topology = plan_topology(CLUSTER)
    files = state.write_host_files(tmp_path, topology)
    assert set(files) == {"a0", "a1", "b0", "b1"}
    assert files["b1"]["/etc/hosts"].read_text() == topology.hosts_file()
    boot_ids = {seen["/proc/sys/kernel/random/boot_id"].read_text() for seen in files.values()}
    assert len(boot_ids) == 4


def test_a_cluster_that_does_not_fit_is_told_how_many_hosts_would() -> None:
    topology = plan_topology(CLUSTER)
    one_host = HOST_NBYTES + 2 * RANK_NBYTES
    refuse_too_many(topology, 4 * one_host)
    with pytest.raises(ConfigError, match=r"4 hosts with 8 ranks.*first 3 hosts"):
        refuse_too_many(topology, 4 * one_host - 1)
    with pytest.raises(ConfigError, match="first 0 hosts"):
        refuse_too_many(topology, 0)
