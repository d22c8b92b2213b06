"""Variables of commands in hosts, read back by what reads them in earnest."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from lab_clusters import clusters, nic

from isthmus.elastic.environment import detect
from isthmus.lab.environment import host_variables, without_ranks
from isthmus.lab.topology import Topology, plan_topology
from isthmus.spec.cluster import ClusterSpec, Host, Site


def variables(topology: Topology, host: int, local_rank: int | None) -> dict[str, str]:
    directory = Path("/tmp/labs/abc")
    return host_variables(
        topology, topology.hosts[host], local_rank, lab="abc", directory=directory
    )


@given(clusters())
def test_ranks_are_numbered_through_host_by_host(cluster: ClusterSpec) -> None:
    topology = plan_topology(cluster)
    found = [
        detect(variables(topology, host.index, local_rank))
        for host in topology.hosts
        for local_rank in range(host.num_devices)
    ]
    assert [place.rank for place in found] == list(range(cluster.num_devices))
    assert {place.world_size for place in found} == {cluster.num_devices}
    assert {place.master_addr for place in found} == {str(topology.hosts[0].address)}
    assert {place.attempt for place in found} == {"torchrun-lab-abc-29500-0"}


def hosts_with(num_devices: int) -> Topology:
    hosts = (Host(name="h", count=2, num_devices=num_devices, nics=(nic(), nic("ib0"))),)
    return plan_topology(ClusterSpec(name="x", sites=(Site(name="s", hosts=hosts),)))


def test_a_host_with_one_device_is_a_rank_and_one_with_several_is_none() -> None:
    alone = variables(hosts_with(1), 1, None)
    assert (alone["RANK"], alone["WORLD_SIZE"], alone["LOCAL_RANK"]) == ("1", "2", "0")
    assert detect(variables(hosts_with(2), 1, None)) is None


def test_torchrun_needs_no_options() -> None:
    """``PET_`` and the option's name: what torchrun's argument parser reads."""
    found = variables(hosts_with(2), 1, None)
    assert found["PET_NNODES"] == "2"
    assert found["PET_NODE_RANK"] == "1"
    assert found["PET_NPROC_PER_NODE"] == "2"
    assert (found["PET_MASTER_ADDR"], found["PET_MASTER_PORT"]) == ("10.77.1.2", "29500")


def test_libraries_learn_which_nics_are_there() -> None:
    found = variables(hosts_with(1), 0, None)
    assert found["GLOO_SOCKET_IFNAME"] == "eth0"
    assert found["NCCL_SOCKET_IFNAME"] == "=eth0,ib0"


def test_a_host_without_a_network_talks_to_itself() -> None:
    found = variables(plan_topology(ClusterSpec()), 0, None)
    assert (found["GLOO_SOCKET_IFNAME"], found["MASTER_ADDR"]) == ("lo", "127.0.0.1")


def test_what_another_launcher_has_set_does_not_reach_the_hosts() -> None:
    outside = {"RANK": "3", "TORCHELASTIC_RUN_ID": "x", "SLURM_PROCID": "1", "PATH": "/bin"}
    assert without_ranks(outside) == {"PATH": "/bin"}
