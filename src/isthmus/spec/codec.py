"""What a codec and a reducer declare: bytes and properties, by arithmetic alone.

A **codec** turns one tensor into one payload of bytes and back; it has no state. A **reducer**
averages tensors over ranks in one or more collectives; it may have state. Every codec is also a
reducer, since a mean of encoded tensors can always be had by exchanging payloads
(:meth:`CodecSpec.traffic`); a method that is only a reducer (low rank, a two-stage optimizer)
derives from :class:`ReducerSpec` alone.

Bytes declared here are *payload*: the size of the tensor that a rank hands to the process group in
one call, headers included. What a network then carries depends on the algorithm of the collective;
:attr:`Collective.wire_nbytes` is the least that any algorithm can do. The runtime in
:mod:`isthmus.codec` sends exactly these bytes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal

from isthmus.errors import ConfigError
from isthmus.spec.base import KindSpec

if TYPE_CHECKING:
    from isthmus.codec.base import Codec
    from isthmus.codec.reducer import Reducer

ITEMSIZE: Final[Mapping[str, int]] = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}
"""Bytes of an element, for each dtype that codecs take."""
ALIGNMENT: Final = 8
"""Payloads are padded to a multiple of this, so that they can be laid end to end in one buffer."""

Op = Literal["all_reduce", "all_gather", "all_to_all", "reduce_scatter", "broadcast", "send"]


@dataclass(frozen=True)
class TensorInfo:
    """Name, shape and dtype (as in ``"float32"``) of a tensor that is to travel."""

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor as it lies in memory."""
        return self.numel * itemsize(self.dtype)


@dataclass(frozen=True)
class Collective:
    """One call that each rank makes to the process group, and when.

    Attributes:
        op: Which collective.
        nbytes: Payload: bytes of the input tensor of this call on one rank. For ``all_to_all``
            that is the whole input, the chunk for oneself included.
        world_size: Ranks that take part.
        label: What travels, for people.
        every_steps: The call is made once in so many optimizer steps.
        offset_steps: ... first after so many.
        within_steps: It must be complete so many steps after it began; 0 is within the same step.
        exact: False if the data decide and ``nbytes`` is an upper bound.
    """

    op: Op
    nbytes: int
    world_size: int
    label: str = ""
    every_steps: int = 1
    offset_steps: int = 0
    within_steps: int = 0
    exact: bool = True

    @property
    def wire_nbytes(self) -> float:
        """The least bytes a rank must put on the network for this call, averaged over ranks.

        With n ranks and payload b: all-reduce 2b(n-1)/n and all-to-all and reduce-scatter b(n-1)/n
        (bandwidth-optimal, Patarasuk and Yuan 2009), all-gather b(n-1), broadcast b(n-1)/n, send b.
        """
        others = self.world_size - 1
        share = others / self.world_size
        factor = {"all_reduce": 2 * share, "all_gather": others, "send": 1}.get(self.op, share)
        return factor * self.nbytes


@dataclass(frozen=True)
class Traffic:
    """Every collective of a reducer or strategy, in the order in which a rank calls them."""

    collectives: tuple[Collective, ...] = ()

    @property
    def nbytes(self) -> int:
        """Payload bytes when each collective is called once."""
        return sum(call.nbytes for call in self.collectives)

    @property
    def nbytes_per_step(self) -> float:
        """Payload bytes an optimizer step, on average."""
        return sum(call.nbytes / call.every_steps for call in self.collectives)

    @property
    def wire_nbytes_per_step(self) -> float:
        """Least bytes a rank puts on the network an optimizer step, on average."""
        return sum(call.wire_nbytes / call.every_steps for call in self.collectives)

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.collectives + other.collectives)


@dataclass(frozen=True)
class CodecProperties:
    """What a codec promises; property tests hold every codec to it.

    Attributes:
        deterministic: The same tensor gives the same bytes whatever the seed.
        unbiased: The mean of ``decode(encode(x, seed))`` over seeds is x, up to fp32 rounding.
        contraction: δ in ``‖decode(encode(x)) - x‖² <= (1 - δ) ‖x‖²``, in expectation over seeds,
            for finite x whose non-zero elements lie between 2⁻¹⁰⁰ and 2¹⁰⁰; None if there is none.
        summable: Payloads may be added while encoded: see ``Codec.summands``.
        nonfinite: ``"kept"``: NaN and ±Inf come back as they were, in their places.
            ``"spread"``: each comes back as NaN, and so may neighbours (its block).
            ``"refused"``: encoding raises; this is for tensors that one rank encodes alone, since
            in a collective the others would wait for the one that raised.
        fixed_size: False if the data decide the size; ``encoded_nbytes`` is then an upper bound.
    """

    deterministic: bool
    unbiased: bool
    contraction: float | None
    summable: bool
    nonfinite: Literal["kept", "spread", "refused"]
    fixed_size: bool = True


class ReducerSpec(KindSpec):
    """Base of all that average tensors over ranks; chosen by ``kind``."""

    room: ClassVar[str] = "isthmus.codec"

    def traffic(self, tensors: Sequence[TensorInfo], world_size: int) -> Traffic:
        """The collectives for one bucket: tensors of one dtype that are reduced together.

        One for each round, in steady state, after any warm-up. Without other ranks there are none.
        """
        raise NotImplementedError

    def build_reducer(self) -> Reducer:
        """The runtime of this spec, with fresh state."""
        raise NotImplementedError


class CodecSpec(ReducerSpec):
    """Base of all codecs."""

    @property
    def properties(self) -> CodecProperties:
        """What this codec, with these fields, promises."""
        raise NotImplementedError

    def body_nbytes(self, shape: Sequence[int], dtype: str) -> int:
        """Bytes of a payload without header and padding."""
        raise NotImplementedError

    def encoded_nbytes(self, shape: Sequence[int], dtype: str) -> int:
        """Bytes of a payload, header and padding included.

        Exact, or an upper bound where ``properties.fixed_size`` is False.
        """
        return header_nbytes(len(shape)) + padded(self.body_nbytes(shape, dtype))

    def build(self) -> Codec:
        """The codec itself."""
        raise NotImplementedError

    def traffic(self, tensors: Sequence[TensorInfo], world_size: int) -> Traffic:
        """One all-to-all and one all-gather of payloads; see ``ExchangeReducer``."""
        numel = sum(tensor.numel for tensor in tensors)
        if world_size == 1 or numel == 0:
            return Traffic()
        dtype = tensors[0].dtype
        sizes = split_evenly(numel, world_size)
        outbox = sum(self.encoded_nbytes((size,), dtype) for size in sizes)
        parcel = self.encoded_nbytes((sizes[0],), accumulation_dtype(dtype))
        exact = self.properties.fixed_size
        return Traffic(
            (
                Collective("all_to_all", outbox, world_size, "encoded chunks", exact=exact),
                Collective("all_gather", parcel, world_size, "encoded mean", exact=exact),
            )
        )

    def build_reducer(self) -> Reducer:
        """A reducer that exchanges this codec's payloads and adds them in fp32."""
        return self.build().reducer()


def itemsize(dtype: str) -> int:
    """Bytes of an element; raises ConfigError for a dtype that codecs do not take."""
    try:
        return ITEMSIZE[dtype]
    except KeyError:
        raise ConfigError(
            f"cannot encode elements of {dtype}; expected one of {', '.join(ITEMSIZE)}",
            hint="only floating-point gradients and parameters are encoded",
        ) from None


def header_nbytes(ndim: int) -> int:
    """Bytes of the header that opens each payload: 8, and 8 for each dimension."""
    return 8 + 8 * ndim


def padded(nbytes: int) -> int:
    """The next multiple of the payload alignment."""
    return -nbytes % ALIGNMENT + nbytes


def split_evenly(numel: int, parts: int) -> list[int]:
    """Sizes of contiguous parts that differ by at most one element, the largest first."""
    size, longer = divmod(numel, parts)
    return [size + (part < longer) for part in range(parts)]


def accumulation_dtype(dtype: str) -> str:
    """The dtype in which decoded values are added: fp32, or fp64 for fp64."""
    return "float64" if dtype == "float64" else "float32"


def describe(tensors: Mapping[str, Any]) -> tuple[TensorInfo, ...]:
    """Infos of named torch tensors (of anything with ``shape`` and ``dtype``), in their order."""
    return tuple(
        TensorInfo(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        for name, tensor in tensors.items()
    )
