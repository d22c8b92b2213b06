"""What stands where: addresses, ways and delays follow from the spec alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations, permutations

import pytest
from hypothesis import given
from lab_clusters import clusters, link, nic

from isthmus.errors import ConfigError
from isthmus.lab.topology import LinkPlan, Topology, plan_topology
from isthmus.spec.cluster import ClusterSpec, Host, Site


def all_nics(topology: Topology) -> list:
    return [nic for host in topology.hosts for nic in host.nics]


@given(clusters())
def test_no_address_and_no_port_is_there_twice(cluster: ClusterSpec) -> None:
    topology = plan_topology(cluster)
    routers = [site.gateway(rail) for site in topology.sites for rail in site.rails]
    ends = [end for plan in topology.links for end in plan.addresses]
    addresses = [plan.address for plan in all_nics(topology)] + routers + ends
    assert len({address.ip for address in addresses}) == len(addresses)
    for site in topology.sites:
        ports = [plan.port for host in site.hosts for plan in host.nics]
        assert len(set(ports)) == len(ports)
        assert all(len(port) <= 15 for port in ports)  # the kernel's limit


@given(clusters())
def test_subnets_are_apart(cluster: ClusterSpec) -> None:
    topology = plan_topology(cluster)
    subnets = [site.network(rail) for site in topology.sites for rail in site.rails]
    subnets += [plan.addresses[0].network for plan in topology.links]
    assert not any(a.overlaps(b) for a, b in combinations(subnets, 2))
    for host in topology.hosts:
        for plan in host.nics:
            assert plan.address.network == topology.site(host.site).network(plan.rail)
            assert plan.gateway in plan.address.network


@given(clusters())
def test_hosts_are_those_of_the_spec_in_its_order(cluster: ClusterSpec) -> None:
    topology = plan_topology(cluster)
    assert tuple(host.name for host in topology.hosts) == cluster.host_names()
    assert [host.index for host in topology.hosts] == list(range(len(topology.hosts)))
    assert topology.num_ranks == cluster.num_devices


@given(clusters())
def test_following_next_hops_leads_along_the_path(cluster: ClusterSpec) -> None:
    topology = plan_topology(cluster)
    for a, b in permutations([site.name for site in topology.sites], 2):
        here, taken = a, []
        while here != b:
            hop = {site.name: plan for site, plan in topology.next_hops(here)}[b]
            taken.append(hop)
            here = hop.other(here)
        assert tuple(taken) == topology.path(a, b)


@given(clusters())
def test_the_way_taken_has_the_fewest_links_and_of_those_the_least_delay(
    cluster: ClusterSpec,
) -> None:
    """Against all simple ways, tried one by one."""
    topology = plan_topology(cluster)

    def all_ways(here: str, target: str, seen: frozenset[str]) -> Iterator[list[LinkPlan]]:
        if here == target:
            yield []
        for plan in topology.links:
            if here in plan.link.between and plan.other(here) not in seen:
                for rest in all_ways(plan.other(here), target, seen | {here}):
                    yield [plan, *rest]

    def cost(way: Sequence[LinkPlan]) -> tuple[int, float]:
        return len(way), round(sum(plan.hop_latency_s for plan in way), 9)

    for a, b in permutations([site.name for site in topology.sites], 2):
        assert cost(topology.path(a, b)) == min(map(cost, all_ways(a, b, frozenset({a}))))


@given(clusters())
def test_ways_there_and_back_take_the_same_time(cluster: ClusterSpec) -> None:
    topology = plan_topology(cluster)
    for a, b in combinations([host.name for host in topology.hosts], 2):
        assert topology.latency_s(a, b) == pytest.approx(topology.latency_s(b, a))
        assert topology.bandwidth_bytes_per_s(a, b) == topology.bandwidth_bytes_per_s(b, a)


def two_sites(**properties: float) -> ClusterSpec:
    sites = tuple(
        Site(name=name, latency_s=latency_s, hosts=(Host(name=name, count=2, nics=(nic(),)),))
        for name, latency_s in (("a", 0.002), ("b", 0.004))
    )
    return ClusterSpec(name="two", sites=sites, links=(link("a", "b", **properties),))


def test_a_declared_latency_is_from_host_to_host() -> None:
    topology = plan_topology(two_sites(latency_s=0.02))
    assert topology.latency_s("a0", "b1") == pytest.approx(0.02)
    assert topology.latency_s("a0", "a1") == pytest.approx(0.002)
    assert topology.latency_s("a0", "a0") == 0
    assert topology.links[0].hop_latency_s == pytest.approx(0.02 - 0.001 - 0.002)


def test_a_link_quicker_than_its_sites_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"latency of 1 ms from host to host.*take 3 ms"):
        plan_topology(two_sites(latency_s=0.001))


@pytest.mark.parametrize(
    ("site", "part"),
    [
        (Site(name="s", hosts=(Host(name="h", count=300, nics=(nic(),)),)), "at most 252 a site"),
        (Site(name="s", hosts=(Host(name="h", count=2),)), "host h has no NIC"),
        (Site(name="s", hosts=(Host(name="a b", nics=(nic(),)),)), "no host can be called 'a b'"),
        (Site(name="s", hosts=(Host(name="h" * 70, nics=(nic(),)),)), "no host can be called"),
        (Site(name="s", hosts=(Host(name="h", nics=(nic("lo"),)),)), "called 'lo'"),
        (Site(name="s", hosts=(Host(name="h", nics=(nic("a/b"),)),)), "called 'a/b'"),
        (Site(name="s", hosts=(Host(name="h", nics=(nic("n" * 16),)),)), "no interface"),
    ],
)
def test_what_no_lab_can_build_is_refused(site: Site, part: str) -> None:
    with pytest.raises(ConfigError, match=part):
        plan_topology(ClusterSpec(name="bad", sites=(site,)))


def test_all_problems_are_named_at_once() -> None:
    hosts = (Host(name="a b"), Host(name="c", nics=(nic("lo"),)))
    with pytest.raises(ConfigError) as caught:
        plan_topology(ClusterSpec(name="bad", sites=(Site(name="s", hosts=hosts),)))
    assert "'a b'" in caught.value.message
    assert "'lo'" in caught.value.message
    assert "host a b has no NIC" in caught.value.message


def test_too_many_sites_are_refused() -> None:
    sites = tuple(
        Site(name=f"s{n}", hosts=(Host(name=f"h{n}", nics=(nic(),)),)) for n in range(255)
    )
    links = tuple(link("s0", f"s{n}") for n in range(1, 255))
    with pytest.raises(ConfigError, match="255 sites; at most 254"):
        plan_topology(ClusterSpec(name="many", sites=sites, links=links))


def test_the_default_cluster_is_one_host_without_a_network() -> None:
    topology = plan_topology(ClusterSpec())
    assert [host.name for host in topology.hosts] == ["localhost"]
    assert str(topology.hosts[0].address) == "127.0.0.1"
    assert topology.sites[0].rails == range(0)


def test_unknown_names_are_answered_with_the_known_ones() -> None:
    topology = plan_topology(two_sites(latency_s=0.02))
    with pytest.raises(ConfigError, match=r"no host 'x'.*a0, a1, b0, b1"):
        topology.host("x")
    with pytest.raises(ConfigError, match=r"no link joins a and c.*a-b"):
        topology.link("a", "c")
    with pytest.raises(ConfigError, match=r"a0 has no NIC 'ib0'.*eth0"):
        topology.host("a0").nic("ib0")
    assert topology.link("b", "a") is topology.links[0]


def test_the_hosts_file_names_every_nic_once() -> None:
    hosts = (Host(name="h", count=2, nics=(nic(), nic("ib0"))),)
    text = plan_topology(ClusterSpec(name="x", sites=(Site(name="s", hosts=hosts),))).hosts_file()
    lines = [line.split() for line in text.splitlines()]
    assert ["10.77.1.2", "h0"] in lines
    assert ["10.78.1.3", "h1-ib0"] in lines
    names = [name for _, *names in lines for name in names if name != "localhost"]
    assert len(set(names)) == len(names)
