"""The network of a cluster: its cables, addresses and rates, built and then changed by faults.

:mod:`~isthmus.lab.network` knows the orders, :mod:`~isthmus.lab.cables` the cables; here they are
carried out for a whole topology. ``Wiring`` has every method of ``Actions`` that is about the
network; they may be called from any thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from isthmus.errors import ConfigError
from isthmus.lab import network
from isthmus.lab.cables import Cable, End, Means, choose_means
from isthmus.lab.knobs import Groups, Quality
from isthmus.lab.namespaces import Namespace, Namespaces
from isthmus.lab.network import Script
from isthmus.lab.relay import Relay, Wire, is_plain, refuse_untrue_rate
from isthmus.lab.timeline import groups_of_hosts
from isthmus.lab.topology import HostPlan, LinkPlan, NicPlan, Topology
from isthmus.spec.cluster import ClusterSpec

_MOST_AT_ONCE: Final = 16
_FIRST_NIC_INDEX: Final = 1000
_FIRST_LINK_INDEX: Final = 10000


class Wiring:
    """The network of a cluster whose namespaces are there.

    Args:
        spec: The cluster.
        topology: What stands where in it.
        namespaces: Its hosts and switches.
        allow_missing: ``latency`` among it: nothing is delayed where that can't be done.
    """

    def __init__(
        self,
        spec: ClusterSpec,
        topology: Topology,
        namespaces: Namespaces,
        allow_missing: Sequence[str] = (),
    ) -> None:
        self.means: Means = "none"
        self._spec = spec
        self._topology = topology
        self._hosts = namespaces.hosts
        self._switches = namespaces.switches
        self._allow_missing = tuple(allow_missing)
        self._lock = threading.RLock()
        self._cables: dict[str, Cable] = {}
        self._links_down: set[str] = set()
        self._link_rates: dict[str, float | None] = {}
        self._cut: tuple[str, ...] = ()

    def build(self) -> None:
        """Make all cables, then give addresses, ways and rates.

        Raises:
            ConfigError: A relay would not carry a cable's rate.
            LaunchError: This machine can't delay packets, or the kernel refused something.
        """
        wires = {name: wire for name, _, wire in self._wanted_cables()}
        if not all(map(is_plain, wires.values())):
            self.means = choose_means(self._allow_missing, self._any_switch())
        self._cables = {name: make() for name, make, _ in self._wanted_cables()}
        self._make_cables(wires)
        network.apply(self._scripts())

    def close(self) -> None:
        """End the relays; everything else ends with the namespaces."""
        relays = [cable.relay for cable in self._cables.values() if cable.relay is not None]
        with ThreadPoolExecutor(max_workers=_MOST_AT_ONCE) as pool:
            list(pool.map(Relay.close, relays))

    @property
    def relays(self) -> dict[str, Relay]:
        """The relays that run, by the name of their cable: a link's, or ``HOST:NIC``."""
        return {name: cable.relay for name, cable in self._cables.items() if cable.relay}

    def _wanted_cables(self) -> Iterator[tuple[str, Callable[[], Cable], Wire]]:
        """Name, maker and wire of every cable."""
        for host in self._topology.hosts:
            for nic in host.nics:
                yield _nic_name(host.name, nic.name), _later(self._nic_cable, host, nic), nic.wire
        for link in self._topology.links:
            yield link.name, _later(self._link_cable, link), link.wire

    def _nic_cable(self, host: HostPlan, nic: NicPlan) -> Cable:
        return self._cable(
            _nic_name(host.name, nic.name),
            End(self._hosts[host.name], nic.name),
            End(self._switches[host.site], nic.port),
            rate=nic.bandwidth_bytes_per_s,
            wire=nic.wire,
            is_ethernet=True,
            index=_FIRST_NIC_INDEX + nic.rail,
        )

    def _link_cable(self, plan: LinkPlan) -> Cable:
        first, second = plan.link.between
        return self._cable(
            plan.name,
            End(self._switches[first], plan.device),
            End(self._switches[second], plan.device),
            rate=plan.link.bandwidth_bytes_per_s,
            wire=plan.wire,
            is_ethernet=False,
            index=_FIRST_LINK_INDEX + plan.index,
        )

    def _cable(
        self,
        name: str,
        first: End,
        second: End,
        *,
        rate: float,
        wire: Wire,
        is_ethernet: bool,
        index: int,
    ) -> Cable:
        means = self.means
        if means == "relay":
            try:
                refuse_untrue_rate(name, rate, wire)
            except ConfigError:
                if "latency" not in self._allow_missing:
                    raise
                means = "none"
        return Cable(
            name,
            (first, second),
            index=index,
            bandwidth_bytes_per_s=rate,
            is_ethernet=is_ethernet,
            means=means,
        )

    def _make_cables(self, wires: Mapping[str, Wire]) -> None:
        """All that ``ip`` makes in one go, and the relays side by side."""
        pairs: list[str] = []
        scripts: list[dict[Namespace, Script]] = []
        for_relays: list[Cable] = []
        for name, cable in self._cables.items():
            orders = cable.orders(wires[name])
            if orders is None:
                for_relays.append(cable)
            else:
                pairs += orders[0]
                scripts.append(orders[1])
                cable.note_made(wires[name])
        network.apply({self._any_switch(): Script(ip=pairs)} if pairs else {})
        network.apply(_merge(scripts))
        with ThreadPoolExecutor(max_workers=_MOST_AT_ONCE) as pool:
            list(pool.map(lambda cable: cable.make(wires[cable.name]), for_relays))

    def _scripts(self) -> dict[Namespace, Script]:
        scripts = {
            self._hosts[host.name]: network.host_script(host) for host in self._topology.hosts
        }
        for site in self._topology.sites:
            scripts[self._switches[site.name]] = network.switch_script(site, self._topology)
        for link in self._topology.links:
            for site, script in self._link_scripts(link).items():
                scripts[site].ip += script.ip
                scripts[site].tc += script.tc
        return scripts

    def _link_scripts(self, link: LinkPlan) -> dict[Namespace, Script]:
        is_ethernet = self._cables[link.name].carries_ethernet
        shaper = network.link_shaper(link, self._link_rates.get(link.name), is_ethernet=is_ethernet)
        return {
            self._switches[site]: Script(
                ip=network.link_orders(link, site, self._topology),
                tc=[shaper.order("replace", link.device)],
            )
            for site in link.link.between
        }

    def _any_switch(self) -> Namespace:
        return self._switches[self._topology.sites[0].name]

    # --- faults: the methods of knobs.Actions ---

    def link_down(self, a: str, b: str) -> None:
        """Take the link between two sites down; its ends lose their carrier and their ways."""
        link = self._topology.link(a, b)
        with self._lock:
            self._links_down.add(link.name)
            orders = Script(ip=[f"link set dev {link.device} down"])
            network.apply({self._switches[site]: orders for site in link.link.between})

    def link_up(self, a: str, b: str) -> None:
        """Take it up again."""
        link = self._topology.link(a, b)
        with self._lock:
            self._links_down.discard(link.name)
            network.apply(self._link_scripts(link))

    def set_link_rate(self, a: str, b: str, bandwidth_bytes_per_s: float | None) -> None:
        """Give a link another goodput in both directions; None: the declared one."""
        link = self._topology.link(a, b)
        with self._lock:
            self._link_rates[link.name] = bandwidth_bytes_per_s
            shaper = network.link_shaper(
                link,
                bandwidth_bytes_per_s,
                is_ethernet=self._cables[link.name].carries_ethernet,
            )
            orders = Script(tc=[shaper.order("change", link.device)])
            network.apply({self._switches[site]: orders for site in link.link.between})

    def set_link_quality(self, a: str, b: str, quality: Quality | None) -> None:
        """Give a link another delay, jitter or loss; None: the declared ones."""
        link = self._topology.link(a, b)
        wire = (quality or Quality()).over(link.link)
        ways_inside_s = link.link.latency_s - link.hop_latency_s
        wire = wire._replace(latency_s=max(0.0, wire.latency_s - ways_inside_s))
        with self._lock:
            cable = self._cables[link.name]
            if self.means == "none" and not is_plain(wire):
                self.means = choose_means((), self._any_switch())
                cable = self._cables[link.name] = self._link_cable(link)
            if cable.change(wire):
                network.apply(self._link_scripts(link))
                if link.name in self._links_down:
                    self.link_down(a, b)

    def nic_down(self, host: str, nic: str) -> None:
        """Pull a NIC's cable: it loses its carrier, and its address and ways stay."""
        self._set_carrier(host, nic, is_up=False)

    def nic_up(self, host: str, nic: str) -> None:
        """Plug it in again."""
        self._set_carrier(host, nic, is_up=True)

    def set_nic_rate(self, host: str, nic: str, bandwidth_bytes_per_s: float | None) -> None:
        """Give a NIC another goodput in both directions; None: the declared one."""
        plan = self._topology.host(host)
        shaper = network.nic_shaper(plan.nic(nic), bandwidth_bytes_per_s)
        port = plan.nic(nic).port
        with self._lock:
            network.apply(
                {
                    self._hosts[host]: Script(tc=[shaper.order("change", nic)]),
                    self._switches[plan.site]: Script(tc=[shaper.order("change", port)]),
                }
            )

    def partition(self, groups: Groups) -> None:
        """Let nothing pass between groups of sites and hosts, in place of any cut before."""
        with self._lock:
            self.heal()
            whole = groups_of_hosts(groups, self._spec)
            for site in self._topology.sites:
                orders = network.cut_orders(site, self._topology, whole)
                if orders:
                    self._cut = (*self._cut, site.name)
                    network.apply({self._switches[site.name]: Script(tc=orders)})

    def heal(self) -> None:
        """Let everything pass again."""
        with self._lock:
            for name in self._cut:
                ports = [nic.port for host in self._topology.site(name).hosts for nic in host.nics]
                orders = [f"qdisc delete dev {port} clsact" for port in ports]
                network.apply({self._switches[name]: Script(tc=orders)})
            self._cut = ()

    def _set_carrier(self, host: str, nic: str, *, is_up: bool) -> None:
        plan = self._topology.host(host)
        port = plan.nic(nic).port
        orders = {
            self._switches[plan.site]: Script(
                ip=[f"link set dev {port} {'up' if is_up else 'down'}"]
            )
        }
        if self._cables[_nic_name(host, nic)].relay is not None:
            # A relay's two devices know nothing of each other's carrier; a veth pair's do.
            carrier = f"link set dev {nic} carrier {'on' if is_up else 'off'}"
            orders[self._hosts[host]] = Script(ip=[carrier])
        with self._lock:
            network.apply(orders)


def _nic_name(host: str, nic: str) -> str:
    return f"{host}:{nic}"


def _later(make: Callable[..., Cable], *arguments: Any) -> Callable[[], Cable]:
    return lambda: make(*arguments)


def _merge(scripts: Sequence[dict[Namespace, Script]]) -> dict[Namespace, Script]:
    merged: dict[Namespace, Script] = {}
    for each in scripts:
        for namespace, script in each.items():
            into = merged.setdefault(namespace, Script())
            into.ip += script.ip
            into.tc += script.tc
    return merged
