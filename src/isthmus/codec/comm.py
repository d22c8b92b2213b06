"""The one door to the process group: every collective goes through it and is counted.

Counted is what is handed over: the bytes of the input tensor of each call, on this rank. That is
what a :class:`~isthmus.spec.codec.Traffic` declares, and tests compare the two.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, cast

from isthmus.lazy import dist
from isthmus.spec.codec import Collective, Op

if TYPE_CHECKING:
    from torch import Tensor


class Comm:
    """A process group whose calls are asynchronous, and counted.

    Every call returns a ``Work``: ``wait()`` on it before the output is read or the input reused.

    Args:
        group: The process group; None is the default one.

    Attributes:
        rank: This rank's number in the group.
        world_size: Number of ranks in the group.
        calls: Every collective so far, in order, while :attr:`record` is set.
        num_calls: Number of collectives so far.
        sent_nbytes: Payload bytes so far.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)
        self.record = False
        self.calls: list[Collective] = []
        self.num_calls = 0
        self.sent_nbytes = 0

    def all_reduce(self, tensor: Tensor, *, op: Literal["avg", "sum", "max"] = "avg") -> dist.Work:
        """Reduces ``tensor`` in place over all ranks."""
        self._count("all_reduce", tensor)
        reduce_op = {"avg": dist.ReduceOp.AVG, "sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}
        return _work(dist.all_reduce(tensor, reduce_op[op], group=self.group, async_op=True))

    def all_to_all(
        self, output: Tensor, input: Tensor, output_sizes: Sequence[int], input_sizes: Sequence[int]
    ) -> dist.Work:
        """Sends the r-th part of ``input`` to rank r and receives one part from each, in order."""
        self._count("all_to_all", input)
        return _work(
            dist.all_to_all_single(
                output,
                input,
                list(output_sizes),
                list(input_sizes),
                group=self.group,
                async_op=True,
            )
        )

    def all_gather(self, output: Tensor, input: Tensor) -> dist.Work:
        """Gathers every rank's ``input`` [n] into ``output`` [world_size * n], in rank order."""
        self._count("all_gather", input)
        return _work(dist.all_gather_single(output, input, group=self.group, async_op=True))

    def broadcast(self, tensor: Tensor, *, source: int = 0) -> dist.Work:
        """Copies ``tensor`` of rank ``source`` to all."""
        self._count("broadcast", tensor)
        return _work(dist.broadcast(tensor, group=self.group, group_src=source, async_op=True))

    def _count(self, op: Op, payload: Tensor) -> None:
        nbytes = payload.numel() * payload.element_size()
        self.num_calls += 1
        self.sent_nbytes += nbytes
        if self.record:
            self.calls.append(Collective(op, nbytes, self.world_size))


def _work(work: object) -> dist.Work:
    if work is None:
        raise RuntimeError("this process is not a member of the group")
    return cast("dist.Work", work)
