"""Blockwise int8: each block of elements shares one fp32 scale.

Formula, for a block x of at most ``block`` elements::

    s = max|x| / 127          the next fp32 number above it, so that no code exceeds 127
    q = round(x / s)          nearest: ties to even
        floor(x / s + u)      stochastic: u ~ U[0, 1)
    decode: s q

Body: the scales (fp32) of all blocks, then the codes (int8), so ``n + 4 ceil(n / block)`` bytes.
Error: at most s/2 an element with nearest rounding, s with stochastic rounding, which is unbiased.
Either way ``E‖decode(encode(x)) - x‖² <= block / (4 * 127²) ‖x‖²``: a block errs by s²/4 an
element, and ``max|x|² <= ‖x‖²``.
NaN and ±Inf: the block that holds one decodes to NaN as a whole. So a gradient that overflowed is
seen by every rank, as it would be uncompressed; a rank that raised instead would leave the others
waiting. fp64 is worked on as fp32: elements beyond its range count as Inf.
Use it on links 3 to 4 times too slow. Small blocks follow outliers better and cost more: 64
elements 6 %, 256 elements 1.6 %.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Final, Literal

from pydantic import Field

from isthmus.codec.base import TILE, Codec
from isthmus.lazy import torch
from isthmus.spec.codec import CodecProperties, CodecSpec

if TYPE_CHECKING:
    from torch import Tensor

_LEVELS: Final = 127


class Int8(CodecSpec):
    """Blockwise 8-bit integers with an fp32 scale from the largest magnitude of each block."""

    kind: Literal["int8"] = "int8"
    """8-bit integers, about 1.02 bytes an element."""
    block: Annotated[int, Field(ge=64, le=2048)] = 256
    """Elements that share a scale, 64 to 2048."""
    rounding: Literal["nearest", "stochastic"] = "nearest"
    """``nearest`` errs least; ``stochastic`` is unbiased and twice the work."""

    @property
    def properties(self) -> CodecProperties:
        """Contractive; unbiased with stochastic rounding."""
        stochastic = self.rounding == "stochastic"
        return CodecProperties(
            deterministic=not stochastic,
            unbiased=stochastic,
            contraction=1 - self.block / (4 * _LEVELS**2),
            summable=False,
            nonfinite="spread",
        )

    def body_nbytes(self, shape: Sequence[int], dtype: str) -> int:
        """A byte an element and four bytes a block."""
        numel = math.prod(shape)
        return numel + 4 * self.num_blocks(numel)

    def num_blocks(self, numel: int) -> int:
        """Blocks of a tensor; the last may be short."""
        return -(-numel // self.block)

    def build(self) -> Codec:
        """The codec."""
        return Int8Codec(self)


class Int8Codec(Codec[Int8]):
    """Works in tiles that stay in cache, on whole blocks and then on the short last one."""

    def write_body(self, flat: Tensor, body: Tensor, *, seed: int) -> int:
        """Writes scales and codes of ``flat``."""
        scales, codes = self._sections(body, flat.numel())
        random = None
        if self.spec.rounding == "stochastic":
            random = torch.Generator(flat.device).manual_seed(seed)
        scratch = self._scratch(flat)
        infinity = scales.new_full((), math.inf)
        for elements, blocks, width in self._tiles(flat.numel()):
            work = scratch[: elements.stop - elements.start].view(-1, width)
            x = flat[elements].view(-1, width)
            if x.dtype != torch.float32:
                x = x.float()
            scale = scales[blocks].unsqueeze(1)
            torch.abs(x, out=work)
            torch.div(work.amax(dim=1, keepdim=True), _LEVELS, out=scale)
            scale.nextafter_(infinity)
            torch.div(x, scale, out=work)
            _round(work, random)
            codes[elements].view(-1, width).copy_(work)
        return self.spec.body_nbytes((flat.numel(),), "float32")

    def read_body(self, body: Tensor, out: Tensor, *, dtype: torch.dtype) -> None:
        """Writes scale times code into ``out``."""
        scales, codes = self._sections(body, out.numel())
        for elements, blocks, width in self._tiles(out.numel()):
            torch.mul(
                codes[elements].view(-1, width),
                scales[blocks].unsqueeze(1),
                out=out[elements].view(-1, width),
            )

    def add_body(self, body: Tensor, into: Tensor, *, dtype: torch.dtype) -> None:
        """Adds scale times code to ``into``."""
        scales, codes = self._sections(body, into.numel())
        scratch = self._scratch(into)
        for elements, blocks, width in self._tiles(into.numel()):
            work = scratch[: elements.stop - elements.start].view(-1, width)
            torch.mul(codes[elements].view(-1, width), scales[blocks].unsqueeze(1), out=work)
            into[elements].view(-1, width).add_(work)

    def _sections(self, body: Tensor, numel: int) -> tuple[Tensor, Tensor]:
        """Scales and codes, as views of the body."""
        start = 4 * self.spec.num_blocks(numel)
        return body[:start].view(torch.float32), body[start : start + numel].view(torch.int8)

    def _scratch(self, like: Tensor) -> Tensor:
        size = min(TILE, like.numel())
        return torch.empty(size, dtype=torch.float32, device=like.device)

    def _tiles(self, numel: int) -> Iterator[tuple[slice, slice, int]]:
        """Elements and blocks of each tile, and the width of its blocks."""
        block = self.spec.block
        step = TILE // block * block
        whole = numel // block * block
        for start in range(0, whole, step):
            stop = min(start + step, whole)
            yield slice(start, stop), slice(start // block, stop // block), block
        if whole < numel:
            yield slice(whole, numel), slice(whole // block, whole // block + 1), numel - whole


def _round(quotients: Tensor, random: torch.Generator | None) -> None:
    """Rounds in place to integers from -127 to 127."""
    if random is None:
        quotients.round_()
        return
    # Four 16-bit numbers out of each draw, three times as fast as floats; u is a multiple of 2⁻¹⁶
    # plus half of one, so that its mean is 1/2 and the bias at most 2⁻¹⁷ of the scale.
    draws = torch.empty(-(-quotients.numel() // 4), dtype=torch.int64, device=quotients.device)
    bits = draws.random_(-(2**63), None, generator=random).view(torch.int16)
    quotients.add_(bits[: quotients.numel()].view_as(quotients), alpha=2.0**-16)
    quotients.add_(0.5 + 2.0**-17).floor_().clamp_(max=_LEVELS)
