"""How ranks meet under each launcher, and what they say when they cannot."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from pool import RankPool

from isthmus.elastic import interfaces
from isthmus.elastic.environment import RankEnvironment, detect
from isthmus.elastic.launcher import launch
from isthmus.elastic.rendezvous import Rendezvous, rendezvous
from isthmus.errors import LaunchError


def slurm_variables(rank: int, world_size: int) -> dict[str, str]:
    return {
        "SLURM_JOB_ID": "77",
        "SLURM_STEP_ID": "3",
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank),
        "SLURM_NODEID": "0",
        "SLURM_NTASKS": str(world_size),
        "SLURM_TASKS_PER_NODE": str(world_size),
        "SLURM_STEP_NODELIST": "localhost",
    }


def torchrun_variables(rank: int, world_size: int, address: str, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
    }


def meet(variables: dict[str, str], run_dir: Path, wait_s: float = 30.0) -> Rendezvous:
    os.environ.update(variables)
    environment = detect(os.environ)
    assert environment is not None
    return rendezvous(environment, run_dir=run_dir, rendezvous_s=wait_s, collective_s=30.0)


def total(met: Rendezvous) -> float:
    value = torch.tensor(met.environment.rank + 1.0)
    dist.all_reduce(value)
    return value.item()


# --- SLURM ---------------------------------------------------------------------------------------


def meet_as_slurm_tasks(rank: int, world_size: int, run_dir: Path) -> tuple[float, str, str]:
    with meet(slurm_variables(rank, world_size), run_dir) as met:
        return total(met), met.backend, met.interface.reason


def test_slurm_tasks_meet_by_the_run_directory(ranks: RankPool, tmp_path: Path) -> None:
    stale = tmp_path / "rendezvous" / "slurm-77.3-0.json"
    stale.parent.mkdir()
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        port = nobody.getsockname()[1]
    stale.write_text(json.dumps({"host": "localhost", "port": port}))
    for _ in range(2):  # two runs in one step
        assert (
            ranks.run(meet_as_slurm_tasks, 2, process_group=False, run_dir=tmp_path)
            == [(3.0, "gloo", "all ranks are on this machine")] * 2
        )
    assert list(stale.parent.iterdir()) == [], "the publication is taken away"


def test_a_slurm_task_waits_for_rank_0_only_so_long(ranks: RankPool, tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=r"rank 1 waited 0.2 s for rank 0 .*does not exist"):
        ranks.run(meet_as_rank_1_alone, 1, process_group=False, run_dir=tmp_path)


def meet_as_rank_1_alone(rank: int, world_size: int, run_dir: Path) -> None:
    meet(slurm_variables(1, 2), run_dir, wait_s=0.2)


def meet_with_one_missing(rank: int, world_size: int, run_dir: Path) -> str:
    with pytest.raises(LaunchError) as caught:
        meet(slurm_variables(rank, world_size + 1), run_dir, wait_s=2.0)
    return caught.value.message


def test_a_rank_that_never_came_is_named(ranks: RankPool, tmp_path: Path) -> None:
    said = ranks.run(meet_with_one_missing, 2, process_group=False, run_dir=tmp_path)
    assert said[0] == "rank 0 waited 2 s for 1 of 3 ranks (2) to appear"
    assert re.fullmatch("rank 1 waited 2 s for (1 of 3 ranks .2.|rank 0, .* gone,) to .*", said[1])


# --- torchrun's variables ------------------------------------------------------------------------


def meet_by_port(
    rank: int, world_size: int, run_dir: Path, address: str, port: int
) -> tuple[float, str]:
    with meet(torchrun_variables(rank, world_size, address, port), run_dir) as met:
        return total(met), met.address


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def has_ipv6_loopback() -> bool:
    return "::1" in interfaces.local_addresses()


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1",
        pytest.param("::1", marks=pytest.mark.skipif(not has_ipv6_loopback(), reason="no IPv6")),
    ],
)
def test_ranks_meet_at_a_given_port(ranks: RankPool, tmp_path: Path, address: str) -> None:
    port = free_port()
    met = ranks.run(
        meet_by_port, 2, process_group=False, run_dir=tmp_path, address=address, port=port
    )
    assert met == [(3.0, f"{address}:{port}")] * 2


def test_a_port_in_use_is_an_error_with_a_hint(ranks: RankPool, tmp_path: Path) -> None:
    with socket.create_server(("", 0)) as other:
        port = other.getsockname()[1]
        where = {"address": "localhost", "port": port}
        with pytest.raises(LaunchError) as caught:
            ranks.run(meet_by_port, 1, process_group=False, run_dir=tmp_path, **where)
    assert f"cannot listen on MASTER_PORT {port}: Address already in use" in caught.value.message
    assert "choose another MASTER_PORT" in caught.value.hint


def meet_at_an_agents_store(rank: int, world_size: int, run_dir: Path) -> float:
    """Rank 2 plays torchrun's agent, which holds the store for ranks 0 and 1."""
    board = dist.FileStore(str(run_dir / "board"), world_size)
    if rank == 2:
        agent = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        board.set("port", str(agent.port))
        board.wait(["done 0", "done 1"], timedelta(seconds=30))
        return 3.0
    variables = torchrun_variables(rank, 2, "localhost", int(board.get("port")))
    with meet(variables | {"TORCHELASTIC_USE_AGENT_STORE": "True"}, run_dir) as met:
        result = total(met)
    board.set(f"done {rank}", "")
    return result


def test_an_agents_store_is_used(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks.run(meet_at_an_agents_store, 3, process_group=False, run_dir=tmp_path) == [3.0] * 3


TORCHRUN_SCRIPT = """
import os, sys
from pathlib import Path
import torch
import torch.distributed as dist
from isthmus.elastic import capture, detect, rendezvous
torch.set_num_threads(1)
environment = detect(os.environ)
run_dir = Path(sys.argv[1])
with capture(run_dir, environment) as watch:
    with rendezvous(environment, run_dir=run_dir, rendezvous_s=60, collective_s=60) as met:
        value = torch.ones(1)
        dist.all_reduce(value)
        (run_dir / f"sum-{environment.rank}").write_text(str(value.item()))
        watch.step = 7
        if environment.rank == 1:
            raise ValueError("what rank 1 did")
        dist.all_reduce(value)
"""


def test_under_torchrun_the_first_error_is_shown_and_kept(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(TORCHRUN_SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    done = subprocess.run(
        [*command, str(tmp_path / "script.py"), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode != 0
    assert [(tmp_path / f"sum-{rank}").read_text() for rank in range(2)] == ["2.0", "2.0"]
    error = json.loads((tmp_path / "error.json").read_text())
    assert (error["rank"], error["kind"], error["step"]) == (1, "ValueError", 7)
    assert error["attempt"].startswith("torchrun-")
    assert "ValueError: what rank 1 did" in done.stderr.partition("Root Cause")[2]


# --- isthmus's own launcher ----------------------------------------------------------------------

OWN_SCRIPT = TORCHRUN_SCRIPT.replace(
    'raise ValueError("what rank 1 did")', "os.kill(os.getpid(), 9)"
)


def test_under_the_own_launcher_a_killed_rank_ends_the_others(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(OWN_SCRIPT)
    said: list[str] = []
    code = launch(
        [sys.executable, str(tmp_path / "script.py"), str(tmp_path)],
        num_ranks=2,
        run_dir=tmp_path,
        say=said.append,
    )
    assert code == 1
    assert [(tmp_path / f"sum-{rank}").read_text() for rank in range(2)] == ["2.0", "2.0"]
    error = json.loads((tmp_path / "error.json").read_text())
    assert (error["rank"], error["kind"]) == (1, "SIGKILL")
    peer = json.loads((tmp_path / "failures" / "rank-0.json").read_text())
    assert peer["lost_peer"], "gloo's error is recognised as the loss of a peer"


# --- one rank, leaving, agreeing -----------------------------------------------------------------


def meet_alone(rank: int, world_size: int, run_dir: Path) -> tuple[float, str]:
    met = rendezvous(RankEnvironment.single(), run_dir=run_dir, rendezvous_s=5.0, collective_s=5.0)
    with met:
        return total(met), met.address


def test_one_rank_needs_no_port(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks.run(meet_alone, 1, process_group=False, run_dir=tmp_path) == [(1.0, "in process")]
    assert list(tmp_path.iterdir()) == []


def outward_address() -> str | None:
    """An IPv4 address of this host that is not loopback, if it has one."""
    found = interfaces.local_addresses()
    return next((one for one in found if "." in one and not one.startswith("127.")), None)


def meet_as_two_hosts(
    rank: int, world_size: int, run_dir: Path, address: str, port: int
) -> tuple[float, str, str]:
    variables = torchrun_variables(rank, world_size, address, port)
    variables |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    with meet(variables, run_dir) as met:
        return total(met), met.interface.name, os.environ["GLOO_SOCKET_IFNAME"]


@pytest.mark.skipif(outward_address() is None, reason="this host has only loopback")
def test_between_hosts_the_interface_of_the_route_is_used(ranks: RankPool, tmp_path: Path) -> None:
    address = outward_address() or ""
    where = {"run_dir": tmp_path, "address": address, "port": free_port()}
    name = interfaces.local_addresses()[address]
    met = ranks.run(meet_as_two_hosts, 2, process_group=False, **where)
    assert met == [(3.0, name, name)] * 2


def meet_twice(rank: int, world_size: int, run_dir: Path) -> list[float]:
    """As ranks of the own launcher: rank 0 finds a socket that already listens."""
    board = dist.FileStore(str(run_dir / "board"), world_size)
    variables = {"ISTHMUS_ATTEMPT": "launch-test"}
    if rank == 0:
        listening = socket.create_server(("127.0.0.1", 0))
        board.set("port", str(listening.getsockname()[1]))
        variables["ISTHMUS_LISTEN_FD"] = str(listening.detach())
    variables |= torchrun_variables(rank, world_size, "127.0.0.1", int(board.get("port")))
    with meet(variables, run_dir) as met:
        sums = [total(met)]
    assert "ISTHMUS_LISTEN_FD" not in os.environ
    del met
    if rank == 0:
        board.set("left", "")
    board.wait(["left"], timedelta(seconds=30))
    os.environ.pop("ISTHMUS_LISTEN_FD", None)
    again = {name: value for name, value in variables.items() if name != "ISTHMUS_LISTEN_FD"}
    with meet(again, run_dir) as met:
        return [*sums, total(met)]


def test_the_launchers_socket_serves_once_and_the_port_again(
    ranks: RankPool, tmp_path: Path
) -> None:
    assert ranks.run(meet_twice, 2, process_group=False, run_dir=tmp_path) == [[3.0, 3.0]] * 2


def keep_the_users_interface(rank: int, world_size: int, run_dir: Path) -> tuple[str, str | None]:
    name = interfaces.local_addresses()["127.0.0.1"]
    os.environ["GLOO_SOCKET_IFNAME"] = name
    with meet(slurm_variables(rank, world_size), run_dir) as met:
        return met.interface.reason, os.environ["GLOO_SOCKET_IFNAME"]


def test_an_interface_that_the_user_names_is_kept(ranks: RankPool, tmp_path: Path) -> None:
    loopback = interfaces.local_addresses()["127.0.0.1"]
    kept = ranks.run(keep_the_users_interface, 2, process_group=False, run_dir=tmp_path)
    assert kept == [("GLOO_SOCKET_IFNAME says so", loopback)] * 2


def leave_or_stay(rank: int, world_size: int, run_dir: Path) -> list[bool]:
    board = dist.FileStore(str(run_dir / "board"), world_size)
    met = meet(slurm_variables(rank, world_size), run_dir)
    if rank == 1:
        board.wait(["rank 0 has left"], timedelta(seconds=30))
        return []
    answers = [met.shutdown(timeout_s=0.2), met.shutdown(timeout_s=0.2)]
    board.set("rank 0 has left", "")
    return answers


def test_leaving_does_not_wait_for_ever(ranks: RankPool, tmp_path: Path) -> None:
    left = ranks.run(leave_or_stay, 2, process_group=False, run_dir=tmp_path)
    assert left == [[False, True], []], "it says that a rank was still there; twice does no harm"
