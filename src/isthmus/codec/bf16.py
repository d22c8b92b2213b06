"""bf16: each element cast to 16 bits.

Formula: round to nearest, ties to even, to 8 significant bits with the exponent range of fp32.
Bytes: 2 an element; half of fp32. On fp16 it saves nothing and costs precision.
Error: at most 2⁻⁸ of each element, so ``‖decode(encode(x)) - x‖² <= 2⁻¹⁶ ‖x‖²``. Values beyond the
largest bf16 (3.39e38) become ±Inf; NaN and ±Inf are kept; below 2⁻¹³³ elements lose their digits.
fp64 is cast to bf16 by way of fp32, as torch does.
Use it where gradients tolerate bf16 (nearly always) and the link is 2 times too slow at most.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from isthmus.codec.base import Codec
from isthmus.lazy import torch
from isthmus.spec.codec import CodecProperties, CodecSpec

if TYPE_CHECKING:
    from torch import Tensor


class BFloat16(CodecSpec):
    """Cast to bf16, rounded to nearest."""

    kind: Literal["bf16"] = "bf16"
    """bf16, 2 bytes an element."""

    @property
    def properties(self) -> CodecProperties:
        """Deterministic, not unbiased, relative error 2⁻⁸."""
        return CodecProperties(
            deterministic=True,
            unbiased=False,
            contraction=1 - 2.0**-16,
            summable=False,
            nonfinite="kept",
        )

    def body_nbytes(self, shape: Sequence[int], dtype: str) -> int:
        """Two bytes an element."""
        return 2 * math.prod(shape)

    def build(self) -> Codec:
        """The codec."""
        return BFloat16Codec(self)


class BFloat16Codec(Codec[BFloat16]):
    """Casts."""

    def write_body(self, flat: Tensor, body: Tensor, *, seed: int) -> int:
        """Casts ``flat`` into ``body``."""
        body[: 2 * flat.numel()].view(torch.bfloat16).copy_(flat)
        return 2 * flat.numel()

    def read_body(self, body: Tensor, out: Tensor, *, dtype: torch.dtype) -> None:
        """Casts ``body`` into ``out``."""
        out.copy_(body[: 2 * out.numel()].view(torch.bfloat16))

    def add_body(self, body: Tensor, into: Tensor, *, dtype: torch.dtype) -> None:
        """Adds ``body`` to ``into`` in the dtype of ``into``."""
        into.add_(body[: 2 * into.numel()].view(torch.bfloat16))
