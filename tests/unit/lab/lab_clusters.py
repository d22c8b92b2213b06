"""Clusters for tests of the lab, drawn and written out."""

from __future__ import annotations

from hypothesis import strategies as st

from isthmus.spec.cluster import ClusterSpec, Host, Link, Nic, Site

MBIT = 1e6 / 8


def nic(name: str = "eth0", rate_bytes_per_s: float = 100 * MBIT) -> Nic:
    return Nic(name=name, bandwidth_bytes_per_s=rate_bytes_per_s)


def link(a: str, b: str, **properties: float) -> Link:
    return Link(between=(a, b), **{"bandwidth_bytes_per_s": 100 * MBIT, **properties})


@st.composite
def clusters(draw: st.DrawFn) -> ClusterSpec:
    """Up to six sites in a tree with some more links, up to three NICs a host."""
    num_sites = draw(st.integers(1, 6))
    sites = [
        Site(
            name=f"s{number}",
            latency_s=draw(st.sampled_from([0.0, 0.002])),
            hosts=tuple(
                Host(
                    name=f"h{number}{kind}",
                    count=draw(st.integers(1, 3)),
                    num_devices=draw(st.integers(1, 3)),
                    nics=tuple(nic(f"n{rail}") for rail in range(draw(st.integers(1, 3)))),
                )
                for kind in "ab"[: draw(st.integers(1, 2))]
            ),
        )
        for number in range(num_sites)
    ]
    latencies = st.sampled_from([0.002, 0.01, 0.05])
    pairs = {(draw(st.integers(0, number - 1)), number) for number in range(1, num_sites)}
    for _ in range(draw(st.integers(0, 3)) if num_sites > 2 else 0):
        a, b = sorted(draw(st.permutations(range(num_sites)))[:2])
        pairs.add((a, b))
    links = [link(f"s{a}", f"s{b}", latency_s=draw(latencies)) for a, b in sorted(pairs)]
    return ClusterSpec(name="drawn", sites=tuple(sites), links=tuple(links))
