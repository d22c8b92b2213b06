"""No compression: the bytes of the tensor as they are.

Formula: ``decode(encode(x)) = x``, bit for bit.
Bytes: those of the tensor. As a reducer: one all-reduce of the bucket in place, in its own dtype,
without header or copy.
Use it as the reference, and on links fast enough that nothing else pays.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from isthmus.codec.base import Codec
from isthmus.codec.reducer import AllReduceReducer
from isthmus.spec.codec import (
    CodecProperties,
    CodecSpec,
    Collective,
    TensorInfo,
    Traffic,
    itemsize,
)

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from isthmus.codec.reducer import Reducer


class Uncompressed(CodecSpec):
    """The tensor as it is."""

    kind: Literal["none"] = "none"
    """No compression."""

    @property
    def properties(self) -> CodecProperties:
        """Exact in every respect."""
        return CodecProperties(
            deterministic=True, unbiased=True, contraction=1.0, summable=True, nonfinite="kept"
        )

    def body_nbytes(self, shape: Sequence[int], dtype: str) -> int:
        """Bytes of the tensor."""
        return math.prod(shape) * itemsize(dtype)

    def build(self) -> Codec:
        """The codec."""
        return UncompressedCodec(self)

    def traffic(self, tensors: Sequence[TensorInfo], world_size: int) -> Traffic:
        """One all-reduce of all elements."""
        nbytes = sum(tensor.nbytes for tensor in tensors)
        if world_size == 1 or nbytes == 0:
            return Traffic()
        return Traffic((Collective("all_reduce", nbytes, world_size, "elements"),))

    def build_reducer(self) -> Reducer:
        """One all-reduce in place."""
        return AllReduceReducer()


class UncompressedCodec(Codec[Uncompressed]):
    """Copies bytes."""

    def write_body(self, flat: Tensor, body: Tensor, *, seed: int) -> int:
        """Copies ``flat`` into ``body``."""
        nbytes = flat.numel() * flat.element_size()
        body[:nbytes].view(flat.dtype).copy_(flat)
        return nbytes

    def read_body(self, body: Tensor, out: Tensor, *, dtype: torch.dtype) -> None:
        """Copies ``body`` into ``out``."""
        out.copy_(body[: out.numel() * dtype.itemsize].view(dtype))

    def add_body(self, body: Tensor, into: Tensor, *, dtype: torch.dtype) -> None:
        """Adds ``body`` to ``into``."""
        into.add_(body[: into.numel() * dtype.itemsize].view(dtype))

    def summands(self, payload: Tensor) -> Tensor:
        """The elements."""
        shape, dtype, body = self._open(payload)
        return body[: math.prod(shape) * dtype.itemsize].view(dtype)
