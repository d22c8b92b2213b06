"""What the kernel counts at the interfaces of a namespace, read from outside it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class NicCounters:
    """What an interface has carried since it was made; bytes with their Ethernet headers.

    Attributes:
        received_nbytes: Bytes that came in.
        received_packets: Packets that came in; segments of one TCP burst may count as one.
        sent_nbytes: Bytes that went out.
        sent_packets: Packets that went out, counted likewise.
        dropped_packets: Packets lost here, in either direction.
    """

    received_nbytes: int
    received_packets: int
    sent_nbytes: int
    sent_packets: int
    dropped_packets: int


def read_counters(pid: int) -> dict[str, NicCounters]:
    """Counters of every interface in the network namespace of a process, by name."""
    counted = {}
    for line in Path(f"/proc/{pid}/net/dev").read_text().splitlines()[2:]:
        name, _, numbers = line.partition(":")
        values = [int(value) for value in numbers.split()]
        counted[name.strip()] = NicCounters(
            received_nbytes=values[0],
            received_packets=values[1],
            sent_nbytes=values[8],
            sent_packets=values[9],
            dropped_packets=values[3] + values[11],
        )
    return counted
