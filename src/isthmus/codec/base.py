"""What every codec is at run time: tensor to payload and back.

A payload is a contiguous ``uint8`` tensor on the device of its tensor: a header, a body, and zeros
up to the next multiple of 8 bytes. The header tells a receiver what it holds::

    byte 0  "i1"          magic and version
    byte 2  u8            dtype of the tensor that was encoded
    byte 3  u8            number of dimensions
    byte 4  u32           fingerprint of the codec's spec
    byte 8  u64 per dim   the shape                               (all little-endian)

so that a payload of another codec, of another shape, or cut short is refused. A changed byte in the
body is not noticed here: integrity of bytes on the way is the transport's.

A codec writes and reads bodies only (:meth:`Codec.write_body`, :meth:`Codec.read_body`). It is
stateless and works on any device; it reads the header on the host, which on an accelerator waits
for the payload.
"""

from __future__ import annotations

import struct
import zlib
from typing import TYPE_CHECKING, Final, Generic, TypeVar

from isthmus.errors import ConfigError, IsthmusError
from isthmus.lazy import torch
from isthmus.spec.codec import ITEMSIZE, CodecSpec, header_nbytes, itemsize

if TYPE_CHECKING:
    from torch import Tensor

    from isthmus.codec.reducer import Reducer

_MAGIC: Final = b"i1"
_FIXED: Final = struct.Struct("<2sBBI")
_DTYPE_CODES: Final = {name: code for code, name in enumerate(ITEMSIZE, start=1)}
_DTYPE_NAMES: Final = {code: name for name, code in _DTYPE_CODES.items()}

TILE: Final = 128 * 1024
"""Elements worked on at a time: 512 KiB of fp32, which stays in a core's second-level cache."""

S = TypeVar("S", bound=CodecSpec)


class PayloadError(IsthmusError):
    """A payload is not what this codec wrote, or not of the shape expected."""


class Codec(Generic[S]):
    """Base of the codecs' runtimes. Stateless: one object may serve any number of tensors.

    Args:
        spec: The declaration; its fields are the codec's parameters.
    """

    def __init__(self, spec: S) -> None:
        self.spec = spec
        self._fingerprint = zlib.crc32(spec.model_dump_json().encode())

    # What a codec adds.

    def write_body(self, flat: Tensor, body: Tensor, *, seed: int) -> int:
        """Encodes ``flat`` [n] into ``body`` (uint8) and returns the number of bytes written."""
        raise NotImplementedError

    def read_body(self, body: Tensor, out: Tensor, *, dtype: torch.dtype) -> None:
        """Decodes ``body`` into ``out`` [n] of any floating dtype; ``dtype`` was encoded."""
        raise NotImplementedError

    def add_body(self, body: Tensor, into: Tensor, *, dtype: torch.dtype) -> None:
        """Adds what ``body`` holds to ``into`` [n]."""
        decoded = torch.empty_like(into)
        self.read_body(body, decoded, dtype=dtype)
        into.add_(decoded)

    # What a user calls.

    def encode(self, tensor: Tensor, *, seed: int = 0, out: Tensor | None = None) -> Tensor:
        """Encodes a tensor of any shape, strided in any way.

        Args:
            tensor: Floating-point tensor (fp64, fp32, fp16 or bf16).
            seed: Decides every random choice; unused by deterministic codecs.
            out: Contiguous uint8 buffer of at least ``encoded_nbytes`` bytes, 8-byte aligned.

        Returns:
            The payload, a slice of ``out`` if that was given.

        Raises:
            ConfigError: The dtype is not one that codecs take, or ``out`` is too small.
        """
        dtype = _dtype_name(tensor)
        bound = self.spec.encoded_nbytes(tensor.shape, dtype)
        if out is None:
            out = torch.empty(bound, dtype=torch.uint8, device=tensor.device)
        elif out.numel() < bound or out.dtype != torch.uint8 or not out.is_contiguous():
            raise ConfigError(
                f"a {tuple(tensor.shape)} tensor of {dtype} needs a contiguous uint8 buffer of "
                f"{bound} bytes; got {out.numel()} elements of {out.dtype}"
            )
        start = header_nbytes(tensor.dim())
        code = _DTYPE_CODES[dtype]
        header = _FIXED.pack(_MAGIC, code, tensor.dim(), self._fingerprint)
        header += struct.pack(f"<{tensor.dim()}Q", *tensor.shape)
        out[:start].copy_(torch.frombuffer(bytearray(header), dtype=torch.uint8))
        used = self.write_body(tensor.detach().reshape(-1), out[start:bound], seed=seed)
        end = start + used
        out[end : end + (-end % 8)].zero_()
        return out[: end + (-end % 8)]

    def decode(self, payload: Tensor, *, out: Tensor | None = None) -> Tensor:
        """Decodes a payload.

        Args:
            payload: What :meth:`encode` returned, here or on another rank.
            out: Contiguous tensor of the encoded shape and any floating dtype to write into;
                by default a new one of the encoded dtype.

        Raises:
            PayloadError: The payload is of another codec or shape, cut short, or no payload.
        """
        shape, dtype, body = self._open(payload)
        if out is None:
            out = torch.empty(shape, dtype=dtype, device=payload.device)
        _check_target(out, shape)
        self.read_body(body, out.view(-1), dtype=dtype)
        return out

    def add_decoded(self, payload: Tensor, into: Tensor) -> None:
        """Adds a decoded payload to ``into``, in the dtype of ``into``; errors as in decode."""
        shape, dtype, body = self._open(payload)
        _check_target(into, shape)
        self.add_body(body, into.view(-1), dtype=dtype)

    def reducer(self) -> Reducer:
        """A reducer that exchanges payloads of this codec."""
        from isthmus.codec.reducer import ExchangeReducer

        return ExchangeReducer(self)

    def summands(self, payload: Tensor) -> Tensor:
        """The part of a payload that may be summed over ranks while encoded (a view).

        Only of codecs whose properties say ``summable``: the sum of these parts, left in the
        payload, decodes to the sum of the tensors.
        """
        raise ConfigError(
            f"payloads of {self.spec!r} cannot be added while encoded",
            hint="decode them and add the tensors",
        )

    def _open(self, payload: Tensor) -> tuple[tuple[int, ...], torch.dtype, Tensor]:
        """Shape, dtype and body of a payload, all checked."""
        if payload.dtype != torch.uint8 or payload.dim() != 1 or not payload.is_contiguous():
            raise PayloadError(
                f"a payload is a contiguous one-dimensional uint8 tensor; got {payload.dtype} "
                f"of shape {tuple(payload.shape)}"
            )
        shape, dtype = self._read_header(payload)
        expected = self.spec.encoded_nbytes(shape, dtype)
        nbytes = payload.numel()
        if nbytes > expected or (nbytes < expected and self.spec.properties.fixed_size):
            raise PayloadError(
                f"the payload has {nbytes} bytes; a {shape} tensor of {dtype} encoded by "
                f"{self.spec!r} has {expected}",
                hint="it was cut short, or is followed by something else",
            )
        return shape, getattr(torch, dtype), payload[header_nbytes(len(shape)) :]

    def _read_header(self, payload: Tensor) -> tuple[tuple[int, ...], str]:
        head = payload[: header_nbytes(255)].cpu().numpy().tobytes()
        if len(head) < _FIXED.size or head[:2] != _MAGIC:
            raise PayloadError(
                f"these {payload.numel()} bytes are not a payload: expected it to begin with "
                f"{_MAGIC!r}, got {head[:2]!r}"
            )
        _, code, ndim, fingerprint = _FIXED.unpack_from(head)
        if fingerprint != self._fingerprint:
            raise PayloadError(
                f"the payload was not written by {self.spec!r}",
                hint="sender and receiver must use the same codec with the same settings",
            )
        if code not in _DTYPE_NAMES or len(head) < header_nbytes(ndim):
            raise PayloadError("the header of the payload is damaged or cut short")
        return struct.unpack_from(f"<{ndim}Q", head, _FIXED.size), _DTYPE_NAMES[code]


def mix_seed(*parts: int) -> int:
    """One 63-bit seed from integers such as step, bucket and rank (splitmix64, Steele 2014)."""
    state = 0
    for part in parts:
        state = (state ^ part) + 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
        state = (state ^ state >> 27) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
        state ^= state >> 31
    return state >> 1


def _dtype_name(tensor: Tensor) -> str:
    name = str(tensor.dtype).removeprefix("torch.")
    itemsize(name)
    return name


def _check_target(out: Tensor, shape: tuple[int, ...]) -> None:
    if tuple(out.shape) != shape or not out.is_contiguous() or not out.is_floating_point():
        raise PayloadError(
            f"the payload holds a tensor of shape {shape}; cannot write it to {out.dtype} of shape "
            f"{tuple(out.shape)} with strides {out.stride()}"
        )
