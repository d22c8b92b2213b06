"""Blobs: the tensors, arrays and byte strings of a state, as raw bytes with a type and a shape."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

import numpy as np
import torch

Kind: TypeAlias = Literal["tensor", "array", "bytes"]

SAFETENSORS_CODES: Final[dict[str, str]] = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "uint16": "U16",
    "int16": "I16",
    "uint32": "U32",
    "int32": "I32",
    "uint64": "U64",
    "int64": "I64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "complex64": "C64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
}
"""Names of safetensors for the types that it has; of the others it sees bytes (U8)."""

TENSOR_DTYPES: Final[dict[str, torch.dtype]] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(getattr(torch, name) for name in SAFETENSORS_CODES),
        torch.complex32,
        torch.complex128,
        torch.float8_e8m0fnu,
        torch.float4_e2m1fn_x2,
    )
}
_ARRAY_KINDS: Final = "biufcSUmM"
_TENSORS: Final = (torch.Tensor, torch.nn.Parameter)


@dataclass(frozen=True, eq=False, slots=True)
class Blob:
    """A value that is kept as raw bytes, little-endian as in memory, in row-major order.

    Attributes:
        kind: What the value is.
        dtype: Element type: a torch name (``bfloat16``) or a numpy one (``<f8``).
        shape: Shape; of bytes, their number.
        value: The value itself, not yet copied.
        memory: Equal for two values that are the same memory; empty if none other can be.
    """

    kind: Kind
    dtype: str
    shape: tuple[int, ...]
    value: Any
    memory: tuple[object, ...] = ()

    @classmethod
    def of(cls, value: Any) -> Blob | None:
        """The blob of a value, or None if the value has no exact form as raw bytes."""
        if type(value) is bytes:
            return cls("bytes", "uint8", (len(value),), value)
        if type(value) is np.ndarray and _is_plain(value.dtype):
            where = (value.ctypes.data, value.strides) if value.size else ()
            key = ("array", *where, value.shape, value.dtype.str) if where else ()
            return cls("array", value.dtype.str, value.shape, value, key)
        if type(value) in _TENSORS and value.layout is torch.strided:
            return cls._of_tensor(value.detach())
        return None

    @classmethod
    def _of_tensor(cls, value: torch.Tensor) -> Blob | None:
        dtype = str(value.dtype).removeprefix("torch.")
        if dtype not in TENSOR_DTYPES or value.is_meta or value.is_nested:
            return None
        shape = tuple(value.shape)
        if not value.numel():
            return cls("tensor", dtype, shape, value)
        where = (value.device, value.data_ptr(), value.stride(), value.is_conj(), value.is_neg())
        return cls("tensor", dtype, shape, value, ("tensor", *where, shape, dtype))

    @property
    def nbytes(self) -> int:
        """Number of bytes that the value takes in a file."""
        return nbytes_of(self.kind, self.dtype, self.shape)

    def bytes(self) -> memoryview:
        """The raw bytes; a view if the value is contiguous and on the CPU, otherwise a copy."""
        if self.kind == "bytes":
            return memoryview(self.value)
        if self.kind == "array":
            return _array_bytes(np.ascontiguousarray(self.value))
        tensor = self.value.cpu().resolve_conj().resolve_neg()
        return _tensor_bytes(tensor.contiguous())


def allocate(kind: Kind, dtype: str, shape: tuple[int, ...]) -> tuple[Any, memoryview]:
    """A value of undefined content, and the view through which its bytes can be filled in.

    A ``bytes`` value comes as a bytearray; ``finished`` makes the final value of it.
    """
    if kind == "bytes":
        text = bytearray(math.prod(shape))
        return text, memoryview(text)
    if kind == "array":
        array = np.empty(shape, np.dtype(dtype))
        return array, _array_bytes(array)
    tensor = torch.empty(shape, dtype=TENSOR_DTYPES[dtype])
    return tensor, _tensor_bytes(tensor)


def finished(value: Any) -> Any:
    """The final value of one from ``allocate`` whose bytes are filled in."""
    return bytes(value) if type(value) is bytearray else value


def nbytes_of(kind: str, dtype: str, shape: tuple[int, ...]) -> int:
    """Number of bytes of a blob.

    Raises:
        ValueError: There is no such kind or element type.
    """
    return math.prod(shape) * _itemsize(kind, dtype)


def safetensors_code(kind: str, dtype: str) -> str | None:
    """The name of an element type in safetensors, or None if it has none."""
    if kind == "array":
        numpy_dtype = np.dtype(dtype)
        return SAFETENSORS_CODES.get(numpy_dtype.name) if numpy_dtype.isnative else None
    return SAFETENSORS_CODES.get(dtype)


def _itemsize(kind: str, dtype: str) -> int:
    if kind == "tensor" and dtype in TENSOR_DTYPES:
        return TENSOR_DTYPES[dtype].itemsize
    if kind == "bytes" and dtype == "uint8":
        return 1
    if kind == "array":
        try:
            numpy_dtype = np.dtype(dtype)
        except (TypeError, ValueError, SyntaxError):
            numpy_dtype = np.dtype(object)
        if _is_plain(numpy_dtype) and numpy_dtype.str == dtype:
            return numpy_dtype.itemsize
    raise ValueError(f"no such element type: {kind} of {dtype!r:.40}")


def _is_plain(dtype: np.dtype) -> bool:
    """Whether all bytes of an element are its value (a long double has padding)."""
    return dtype.kind in _ARRAY_KINDS and dtype.char not in "gG" and dtype.itemsize > 0


def _tensor_bytes(tensor: torch.Tensor) -> memoryview:
    if not tensor.numel():
        return memoryview(b"")
    return _array_bytes(tensor.reshape(-1).view(torch.uint8).numpy())


def _array_bytes(array: np.ndarray) -> memoryview:
    return array.reshape(-1).view(np.uint8).data if array.nbytes else memoryview(b"")
