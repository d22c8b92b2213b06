"""Reducers: the mean of a bucket over ranks, in one or more collectives.

A reducer is written as a generator that yields each collective it has begun and is resumed when
that one is done, so the code reads from top to bottom and the caller decides what happens while
bytes are under way. Since collectives must be called in the same order by all ranks, the caller
resumes reducers in an order that depends on nothing but their ``rounds``.

State (feedback, warm starts) is the reducer's own, keyed by the names of the bucket's slots so that
it survives another bucketing and another world size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from isthmus.codec.base import Codec, mix_seed
from isthmus.codec.comm import Comm
from isthmus.errors import CheckpointError
from isthmus.lazy import torch
from isthmus.spec.codec import TensorInfo, accumulation_dtype, split_evenly

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch import Tensor


@dataclass(frozen=True)
class Slot:
    """Where a tensor lies in its bucket.

    Attributes:
        info: The tensor's name, shape and dtype.
        offset: Index of its first element in the bucket.
        view: The bucket's elements from there, in the shape of the tensor.
    """

    info: TensorInfo
    offset: int
    view: Tensor


@dataclass(frozen=True)
class Bucket:
    """Tensors of one dtype that are reduced together, laid end to end.

    Attributes:
        index: Place in the order of launches.
        flat: All elements, [n].
        slots: The tensors in it.
    """

    index: int
    flat: Tensor
    slots: tuple[Slot, ...]


class Reducer:
    """Base of all reducers."""

    rounds: int = 1
    """Collectives that :meth:`reduce` yields for a bucket, one after the other. Equal on all ranks
    and for all buckets of a step; it may change between steps (after a warm-up)."""

    def reduce(self, bucket: Bucket, comm: Comm, *, step: int) -> Iterator[dist.Work]:
        """Replaces ``bucket.flat`` by its mean over the ranks of ``comm``.

        Every rank ends with the same bits. Yields each collective when it has begun; the caller
        waits for it before it resumes.

        Args:
            bucket: The tensors; not touched by others until the generator ends.
            comm: The ranks to average over, at least 2.
            step: Number of reductions of this bucket before this one, equal on all ranks; with
                the bucket and the rank it seeds random choices.
        """
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """What must survive a restart."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes back what :meth:`state_dict` gave; raises CheckpointError if it does not fit."""
        if state:
            raise CheckpointError(
                f"{type(self).__name__} keeps no state, but the checkpoint has {sorted(state)}",
                hint="resume with the codec that the checkpoint was written with",
            )


class AllReduceReducer(Reducer):
    """One all-reduce in place, in the bucket's own dtype; the collective divides."""

    def reduce(self, bucket: Bucket, comm: Comm, *, step: int) -> Iterator[dist.Work]:
        """See :class:`Reducer`."""
        yield comm.all_reduce(bucket.flat, op="avg")


class ExchangeReducer(Reducer):
    """Averages payloads of any codec, adding in fp32 and never adding codes.

    With n ranks the bucket is split in n chunks. Each rank encodes its n chunks and sends each to
    its owner (all-to-all). The owner decodes and adds them in fp32 (fp64 for fp64) in rank order,
    divides, and encodes the mean once. That payload goes to all (all-gather), who decode the same
    bytes and so hold the same bits. Values are encoded twice: errors are those of the codec on
    each rank's values, averaged, and once more on the mean.

    Buffers for one bucket are kept for the next step: twice the payloads, on each rank.
    """

    rounds = 2

    def __init__(self, codec: Codec) -> None:
        self.codec = codec
        self._exchanges: dict[int, _Buffers] = {}

    def reduce(self, bucket: Bucket, comm: Comm, *, step: int) -> Iterator[dist.Work]:
        """See :class:`Reducer`."""
        codec, rank, world_size = self.codec, comm.rank, comm.world_size
        buffers = self._buffers(bucket, rank, world_size)
        chunks = bucket.flat.split(buffers.sizes)

        for owner, (chunk, slot) in enumerate(zip(chunks, buffers.outgoing, strict=True)):
            codec.encode(chunk, seed=mix_seed(step, bucket.index, rank, owner), out=slot)
        yield comm.all_to_all(
            buffers.inbox,
            buffers.outbox,
            [slot.numel() for slot in buffers.incoming],
            [slot.numel() for slot in buffers.outgoing],
        )

        mean = buffers.mean.zero_()
        for payload in buffers.incoming:
            codec.add_decoded(payload, mean)
        mean.div_(world_size)
        codec.encode(mean, seed=mix_seed(step, bucket.index, rank, world_size), out=buffers.parcel)
        yield comm.all_gather(buffers.gathered, buffers.parcel)

        for chunk, payload in zip(chunks, buffers.means, strict=True):
            codec.decode(payload, out=chunk)

    def _buffers(self, bucket: Bucket, rank: int, world_size: int) -> _Buffers:
        buffers = self._exchanges.get(bucket.index)
        if buffers is None or len(buffers.sizes) != world_size:
            buffers = _Buffers(self.codec, bucket.flat, rank, world_size)
            self._exchanges[bucket.index] = buffers
        return buffers


class _Buffers:
    """What an exchange of one bucket works in.

    Attributes:
        sizes: Elements of each rank's chunk.
        outbox, outgoing: This rank's payloads for each owner: all, and one by one.
        inbox, incoming: Each rank's payload for this owner.
        mean: This owner's chunk, added up.
        parcel: This owner's payload of the mean, as long as the longest.
        gathered, means: Every owner's payload of the mean.
    """

    def __init__(self, codec: Codec, flat: Tensor, rank: int, world_size: int) -> None:
        dtype = str(flat.dtype).removeprefix("torch.")
        wide = accumulation_dtype(dtype)
        self.sizes = split_evenly(flat.numel(), world_size)
        sent = [codec.spec.encoded_nbytes((size,), dtype) for size in self.sizes]
        returned = [codec.spec.encoded_nbytes((size,), wide) for size in self.sizes]

        def empty(nbytes: int) -> Tensor:
            return torch.zeros(nbytes, dtype=torch.uint8, device=flat.device)

        self.outbox = empty(sum(sent))
        self.outgoing = self.outbox.split(sent)
        self.inbox = empty(world_size * sent[rank])
        self.incoming = self.inbox.split([sent[rank]] * world_size)
        self.mean = torch.empty(self.sizes[rank], dtype=getattr(torch, wide), device=flat.device)
        self.parcel = empty(returned[0])
        self.gathered = empty(world_size * returned[0])
        longest = self.gathered.split([returned[0]] * world_size)
        self.means = [slot[:size] for slot, size in zip(longest, returned, strict=True)]
