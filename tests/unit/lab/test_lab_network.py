"""The orders for ip and tc, and the numbers of the shapers."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lab_clusters import MBIT, clusters, link, nic

from isthmus.lab.network import (
    Shaper,
    cut_orders,
    host_script,
    link_orders,
    link_shaper,
    switch_script,
)
from isthmus.lab.timeline import groups_of_hosts
from isthmus.lab.topology import Topology, plan_topology
from isthmus.spec.cluster import ClusterSpec, Host, Site

RATES = st.floats(1e3, 5e9)


def test_a_rate_is_goodput_so_the_shaper_is_set_higher_by_the_headers() -> None:
    on_ethernet = Shaper.for_goodput(100 * MBIT)
    assert on_ethernet.rate_bits_per_s == round(100e6 * 1514 / 1448)
    between_routers = Shaper.for_goodput(100 * MBIT, is_ethernet=False)
    assert between_routers.rate_bits_per_s == round(100e6 * 1500 / 1448)


@given(RATES, st.floats(0, 0.5))
def test_a_shaper_can_keep_its_rate(bandwidth_bytes_per_s: float, round_trip_s: float) -> None:
    shaper = Shaper.for_goodput(bandwidth_bytes_per_s, round_trip_s=round_trip_s)
    rate_bytes_per_s = shaper.rate_bits_per_s / 8
    assert shaper.burst_nbytes >= 1514  # else tbf would drop whole frames
    assert shaper.burst_nbytes >= 0.99e-3 * rate_bytes_per_s  # a timer may be late by that
    under_way = round_trip_s * rate_bytes_per_s
    assert shaper.queue_nbytes >= 0.99 * under_way + shaper.burst_nbytes - 1


@given(RATES, st.floats(1.0, 100.0))
def test_a_quicker_shaper_is_bigger_in_all_respects(rate: float, factor: float) -> None:
    slow, quick = Shaper.for_goodput(rate), Shaper.for_goodput(rate * factor)
    assert quick.rate_bits_per_s >= slow.rate_bits_per_s
    assert quick.burst_nbytes >= slow.burst_nbytes
    assert quick.queue_nbytes >= slow.queue_nbytes


def test_a_queue_holds_what_a_long_way_keeps_under_way() -> None:
    plan = plan_topology(
        ClusterSpec(
            name="long",
            sites=tuple(Site(name=n, hosts=(Host(name=n, nics=(nic(),)),)) for n in "ab"),
            links=(link("a", "b", latency_s=0.2),),
        )
    ).links[0]
    shaper = link_shaper(plan, is_ethernet=True)
    assert shaper.queue_nbytes > 0.4 * 100 * MBIT
    assert link_shaper(plan, 10 * MBIT, is_ethernet=True).rate_bits_per_s == round(
        10e6 * 1514 / 1448
    )


@given(clusters())
def test_every_nic_and_port_gets_its_shaper(cluster: ClusterSpec) -> None:
    topology = plan_topology(cluster)
    for host in topology.hosts:
        shaped = devices(host_script(host).tc)
        assert shaped == [plan.name for plan in host.nics]
    for site in topology.sites:
        ports = [plan.port for host in site.hosts for plan in host.nics]
        assert devices(switch_script(site, topology).tc) == ports


@given(clusters())
def test_routers_know_a_way_to_every_subnet(cluster: ClusterSpec) -> None:
    topology = plan_topology(cluster)
    for site in topology.sites:
        orders = [
            order
            for plan in topology.links
            if site.name in plan.link.between
            for order in link_orders(plan, site.name, topology)
        ]
        routes = [order.split()[2] for order in orders if order.startswith("route replace")]
        others = [other for other in topology.sites if other is not site]
        wanted = [str(other.network(rail)) for other in others for rail in other.rails]
        assert sorted(routes) == sorted(wanted)


def devices(orders: list[str]) -> list[str]:
    return [re.search(r" dev (\S+) ", order)[1] for order in orders]


@given(clusters(), st.data())
def test_a_partition_cuts_exactly_between_its_groups(
    cluster: ClusterSpec, data: st.DataObject
) -> None:
    """Plays every packet from NIC to NIC against the filters of the sender's port."""
    topology = plan_topology(cluster)
    names = list(cluster.host_names())
    chosen = data.draw(st.lists(st.sampled_from(names), unique=True, min_size=1))
    split = data.draw(st.integers(0, len(chosen) - 1))
    named = tuple(tuple(group) for group in (chosen[:split], chosen[split:]) if group)
    whole = groups_of_hosts(named, cluster)
    filters = {site.name: cut_orders(site, topology, whole) for site in topology.sites}
    group_of = {host: number for number, group in enumerate(whole) for host in group}
    for sender in topology.hosts:
        for receiver in topology.hosts:
            for plan in sender.nics:
                for target in receiver.nics:
                    passes = not drops(filters[sender.site], plan.port, target.address.ip)
                    assert passes == (group_of[sender.name] == group_of[receiver.name])


def drops(orders: list[str], port: str, target: object) -> bool:
    from ipaddress import ip_network

    for order in orders:
        found = re.search(r"filter add dev (\S+) ingress .* match ip dst (\S+) ", order)
        if found and found[1] == port and target in ip_network(found[2]):
            return True
    return False


def test_routers_stay_reachable_in_a_partition() -> None:
    topology = one_site()
    for order in cut_orders(topology.sites[0], topology, [["h0"], ["h1", "h2"]]):
        assert str(topology.sites[0].gateway(0).ip) + "/" not in order


def one_site() -> Topology:
    site = Site(name="s", hosts=(Host(name="h", count=3, nics=(nic(),)),))
    return plan_topology(ClusterSpec(name="one", sites=(site,)))


def test_only_hosts_with_several_nics_get_tables_of_their_own() -> None:
    hosts = (Host(name="two", nics=(nic(), nic("ib0"))), Host(name="one", nics=(nic(),)))
    topology = plan_topology(ClusterSpec(name="x", sites=(Site(name="s", hosts=hosts),)))
    assert sum("rule add" in order for order in host_script(topology.host("two")).ip) == 2
    assert not any("rule add" in order for order in host_script(topology.host("one")).ip)


@pytest.mark.parametrize("verb", ["replace", "change"])
def test_a_shaper_as_an_order(verb: str) -> None:
    assert Shaper(8000, 15140, 277284).order(verb, "eth0") == (
        f"qdisc {verb} dev eth0 root handle 1: tbf rate 8000bit burst 15140b limit 277284b"
    )
