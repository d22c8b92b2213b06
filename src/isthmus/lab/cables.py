"""Cables: what joins two of a lab's networks, and delays or loses packets on the way.

Three kinds. A plain cable is a veth pair. Where packets are to be late or lost, netem does it if
the kernel has it: two veth pairs, with a bridge between them on whose ports netem stands, so that
delay begins after the shaper's queue, as on a real line. Otherwise a relay does it,
:mod:`isthmus.lab.relay`. To whoever uses the two ends the three are alike.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from isthmus.errors import ConfigError, LaunchError
from isthmus.lab.namespaces import Namespace, tool
from isthmus.lab.network import Script, apply, cable_order
from isthmus.lab.relay import (
    Relay,
    Wire,
    has_netem,
    is_plain,
    netem_options,
    refuse_untrue_rate,
    start_relay,
)

_TUN: Final = "/dev/net/tun"
Means = Literal["netem", "relay", "none"]
"""How packets are delayed; ``none``: they are not, where the user allowed that to be missing."""


@dataclass(frozen=True)
class End:
    """One end of a cable: a device in a namespace."""

    namespace: Namespace
    device: str


class Cable:
    """A cable that can be made, changed and removed.

    Args:
        name: For messages.
        ends: Where it leads. The bridge of a netem cable is in the second one's namespace.
        index: Number that the first end's device gets; see :func:`network.cable_order`.
        bandwidth_bytes_per_s: Goodput that it is to carry, in each direction.
        is_ethernet: Whether its ends are put on a bridge; a relay carries IP packets alone if not.
        means: How packets are delayed.
    """

    def __init__(
        self,
        name: str,
        ends: tuple[End, End],
        *,
        index: int,
        bandwidth_bytes_per_s: float,
        is_ethernet: bool,
        means: Means,
    ) -> None:
        self.name = name
        self.ends = ends
        self.relay: Relay | None = None
        self._index = index
        self._bandwidth_bytes_per_s = bandwidth_bytes_per_s
        self._is_ethernet = is_ethernet
        self._means = means
        self._wire = Wire()

    @property
    def carries_ethernet(self) -> bool:
        """Whether its devices carry Ethernet frames, as all but a relay's between routers do."""
        return self._is_ethernet or self.relay is None

    def orders(self, wire: Wire) -> tuple[list[str], dict[Namespace, Script]] | None:
        """What makes it: lines for ``ip`` in any namespace, then scripts; None if a relay does."""
        first, second = self.ends
        if is_plain(wire) or self._means == "none":
            return [self._pair(first, second)], {}
        if self._means == "relay":
            return None
        middle = second.namespace
        left, right = f"{second.device}.a", f"{second.device}.b"
        bridge = f"{second.device}.w"
        options = " ".join(netem_options(wire, self._bandwidth_bytes_per_s))
        pairs = [
            self._pair(first, End(middle, left)),
            self._pair(End(middle, right), second),
        ]
        script = Script(
            ip=[
                f"link add name {bridge} type bridge stp_state 0 forward_delay 0",
                *(f"link set dev {port} master {bridge} up" for port in (left, right)),
                f"link set dev {bridge} up",
            ],
            tc=[f"qdisc replace dev {port} root netem {options}" for port in (left, right)],
        )
        return pairs, {middle: script}

    def _pair(self, a: End, b: End) -> str:
        return cable_order(a.namespace, a.device, b.namespace, b.device, index=self._index)

    def note_made(self, wire: Wire) -> None:
        """Say that the orders for this wire have been carried out."""
        self._wire = wire

    def make(self, wire: Wire) -> None:
        """Make it. Both devices are down and without address then.

        Raises:
            ConfigError: A relay would not carry the cable's rate.
            LaunchError: The kernel refused.
        """
        orders = self.orders(wire)
        if orders is None:
            self._start_relay(wire)
        else:
            pairs, scripts = orders
            apply({self.ends[0].namespace: Script(ip=pairs)})
            apply(scripts)
        self._wire = wire

    def change(self, wire: Wire) -> bool:
        """Treat packets in another way from now on; returns whether the devices were made anew.

        A plain cable has to be replaced to become one that delays, and the other way round: then
        what is under way is lost, and the devices need their addresses, ways and shapers again.

        Raises:
            ConfigError: A relay would not carry the cable's rate.
            LaunchError: The kernel refused, or the relay has ended.
        """
        if self._means == "none" and not is_plain(wire):
            raise ConfigError(f"{self.name} cannot delay or lose packets in this lab")
        if self.relay is not None and not is_plain(wire):
            refuse_untrue_rate(self.name, self._bandwidth_bytes_per_s, wire)
            self.relay.set_wire(wire)
            self._wire = wire
            return False
        if is_plain(wire) and is_plain(self._wire):
            return False
        self.remove()
        self.make(wire)
        return True

    def remove(self) -> None:
        """Take its devices away."""
        if self.relay is not None:
            self.relay.close()
            self.relay = None
            return
        first, second = self.ends
        apply({first.namespace: Script(ip=[f"link delete dev {first.device}"])})
        if not is_plain(self._wire):
            leave = [f"link delete dev {second.device}.{part}" for part in ("b", "w")]
            apply({second.namespace: Script(ip=leave)})

    def _start_relay(self, wire: Wire) -> None:
        refuse_untrue_rate(self.name, self._bandwidth_bytes_per_s, wire)
        first, second = self.ends
        self.relay = start_relay(
            first.namespace,
            second.namespace,
            wire,
            devices=(first.device, second.device),
            is_tap=self._is_ethernet,
        )


def choose_means(allow_missing: Sequence[str], namespace: Namespace) -> Means:
    """How this machine can delay packets.

    Args:
        allow_missing: ``latency`` among it: nothing is delayed where that can't be done.
        namespace: Where it may be tried out.

    Raises:
        LaunchError: It can't, and that is not allowed to be missing.
    """
    if has_netem(namespace.network_argv([])):
        subprocess.run(
            namespace.network_argv([tool("tc"), "qdisc", "del", "dev", "lo", "root"]), check=True
        )
        return "netem"
    if os.access(_TUN, os.R_OK | os.W_OK):
        return "relay"
    if "latency" in allow_missing:
        return "none"
    if Path(_TUN).exists():
        lack, mend = f"this user may not open {_TUN}", f"run it as root, or chmod 666 {_TUN}"
    else:
        lack, mend = f"there is no {_TUN}", "load a module: modprobe sch_netem, or modprobe tun"
    raise LaunchError(
        f"packets cannot be delayed here: the kernel has no netem, and {lack}",
        hint=f"{mend}; or give --allow-missing latency to go without delay, jitter and loss",
    )
