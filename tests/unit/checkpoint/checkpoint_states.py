"""States for the checkpoint tests, exact equality, and ranks that are threads."""

from __future__ import annotations

import queue
import struct
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from isthmus.checkpoint import Item
from isthmus.errors import CheckpointError


class Value:
    """A stateful value that is its state."""

    def __init__(self, state: Any = None) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


def raw(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def same(one: Any, other: Any) -> bool:
    """Equal in type, value and bits, all the way down."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return (one.dtype, one.shape, raw(one)) == (other.dtype, other.shape, raw(other))
    if isinstance(one, np.ndarray | np.generic):
        return (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())
    if isinstance(one, dict):
        attributes = getattr(one, "_metadata", None), getattr(other, "_metadata", None)
        return same(list(one.items()), list(other.items())) and same(*attributes)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, float):
        return struct.pack(">d", one) == struct.pack(">d", other)
    if isinstance(one, complex):
        return same((one.real, one.imag), (other.real, other.imag))
    return one == other


def items_at(step: int) -> tuple[dict[str, Item], Value]:
    """Items whose state differs in every part from that of another step, and their value."""
    generator = torch.Generator().manual_seed(step)
    value = Value(
        {
            "weight": torch.randn(40, generator=generator),
            "flags": torch.rand(9, generator=generator) < 0.5,
            "step": step,
            "text": f"step {step}",
            "raw": bytes([step]) * 5,
        }
    )
    return {"it": Item(value)}, value


class ThreadPeers:
    """Ranks that are threads of one process; a wait ends after ``deadline_s``."""

    def __init__(self, rank: int, boxes: list[list[queue.Queue[bytes]]], deadline_s: float) -> None:
        self.rank = rank
        self.world_size = len(boxes)
        self._boxes = boxes
        self._deadline_s = deadline_s

    def gather(self, data: bytes) -> list[bytes]:
        if self.rank:
            self._boxes[self.rank][0].put(data)
            return []
        return [data] + [self._take(source, 0) for source in range(1, self.world_size)]

    def broadcast(self, data: bytes) -> bytes:
        if self.rank:
            return self._take(0, self.rank)
        for target in range(1, self.world_size):
            self._boxes[0][target].put(data)
        return data

    def _take(self, source: int, target: int) -> bytes:
        try:
            return self._boxes[source][target].get(timeout=self._deadline_s)
        except queue.Empty:
            raise CheckpointError(f"rank {source} did not answer") from None


def on_ranks(
    world_size: int, work: Callable[[ThreadPeers], Any], *, deadline_s: float = 20.0
) -> list[Any]:
    """What ``work`` returned or raised on each rank."""
    boxes: list[list[queue.Queue[bytes]]] = [
        [queue.Queue() for _ in range(world_size)] for _ in range(world_size)
    ]
    results: list[Any] = [None] * world_size

    def run(rank: int) -> None:
        try:
            results[rank] = work(ThreadPeers(rank, boxes, deadline_s))
        except BaseException as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results
