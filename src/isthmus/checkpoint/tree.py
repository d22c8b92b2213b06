"""State trees as JSON: what ``state_dict()`` returns, taken apart into a plain tree and raw blobs.

Exact in both directions, and without pickle, so that reading a checkpoint can run no code.
JSON's own null, booleans, strings, lists, 64-bit integers and finite floats stand for themselves;
everything else is an object with one tag::

    {"dict": {...}}  {"dict": [[key, value], ...]}     string keys, or any keys
    {"ordered": ...}  {"ordered": ..., "metadata": t}  OrderedDict, as torch modules return it
    {"tuple": [...]}  {"int": "0x..."}  {"float": "7ff8..."}  {"complex": [re, im]}  {"str": "hex"}
    {"blob": name}    {"scalar": name}                 tensor, array or bytes; numpy scalar

Tensors that are the same memory (tied weights) become one blob, and one tensor again when decoded.
Devices, strides and ``requires_grad`` are not part of the state: tensors come back contiguous, on
the CPU. Tensors that are split over ranks (DTensor), sparse or quantised ones are refused.
"""

from __future__ import annotations

import math
import struct
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeAlias

import numpy as np
import torch

from isthmus.checkpoint.blob import Blob
from isthmus.errors import CheckpointError

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"
Key: TypeAlias = tuple[Any, ...]

MAX_DEPTH: Final = 100
_INT64: Final = range(-(2**63), 2**63)
_SCALARS: Final = (np.number, np.bool_, np.datetime64)
_DICTS: Final = {dict: "dict", OrderedDict: "ordered"}


class Packer:
    """Encodes trees and collects their blobs, each with a name that no other one has."""

    def __init__(self) -> None:
        self.blobs: dict[str, Blob] = {}
        self._names: dict[tuple[object, ...], str] = {}

    def pack(self, name: str, state: Any) -> Json:
        """The JSON tree of a state, whose blobs are added to ``blobs`` under ``name/...``.

        Raises:
            CheckpointError: The state holds something that has no exact form here; the message
                says where and what.
        """
        return self._encode(state, (name,))

    def _encode(self, value: Any, path: Key) -> Json:
        kind = type(value)
        if value is None or kind is bool:
            return value
        if kind is int:
            return value if value in _INT64 else {"int": hex(value)}
        if kind is float:
            return value if math.isfinite(value) else {"float": struct.pack(">d", value).hex()}
        if kind is str:
            is_text = _is_unicode(value)
            return value if is_text else {"str": value.encode("utf-8", "surrogatepass").hex()}
        if len(path) > MAX_DEPTH:
            where = describe(path[:6])
            raise CheckpointError(
                f"{where}/...: nested more than {MAX_DEPTH} deep, or contains itself",
                hint="Flatten this state before it is checkpointed.",
            )
        if kind is list:
            return self._encode_items(value, path)
        if kind is tuple:
            return {"tuple": self._encode_items(value, path)}
        if kind in _DICTS:
            return self._encode_dict(value, path)
        if kind is complex:
            return {"complex": self._encode_items((value.real, value.imag), path)}
        if isinstance(value, _SCALARS):
            return {"scalar": self._blob(np.asarray(value), path)}
        return {"blob": self._blob(value, path)}

    def _encode_items(self, values: list[Any] | tuple[Any, ...], path: Key) -> list[Json]:
        return [self._encode(value, (*path, index)) for index, value in enumerate(values)]

    def _encode_dict(self, value: dict[Any, Any], path: Key) -> Json:
        if all(type(key) is str and _is_unicode(key) for key in value):
            content: Json = {key: self._encode(each, (*path, key)) for key, each in value.items()}
        else:
            content = [
                [self._encode(key, (*path, "key")), self._encode(each, (*path, key))]
                for key, each in value.items()
            ]
        tree: dict[str, Json] = {_DICTS[type(value)]: content}
        metadata = getattr(value, "_metadata", None)  # versions of a torch module's parts
        if metadata is not None:
            tree["metadata"] = self._encode(metadata, (*path, "_metadata"))
        return tree

    def _blob(self, value: Any, path: Key) -> str:
        blob = Blob.of(value)
        if blob is None:
            raise CheckpointError(
                f"{describe(path)}: a {_name_of(value)} cannot be kept in a checkpoint",
                hint="Keep dense tensors, numpy arrays of numbers or text, Python numbers, strings,"
                " bytes and None, in lists, tuples and dicts.",
            )
        known = self._names.get(blob.memory) if blob.memory else None
        if known is not None:
            return known
        name = unique = describe(path)
        copy = 1
        while unique in self.blobs:
            copy += 1
            unique = f"{name}#{copy}"
        self.blobs[unique] = blob
        if blob.memory:
            self._names[blob.memory] = unique
        return unique


def decode(tree: Json, blob: Callable[[str], Any] | Mapping[str, Any]) -> Any:
    """The state that ``Packer.pack`` made this tree from.

    Args:
        tree: The JSON tree.
        blob: The value of each blob by its name.

    Raises:
        ValueError: The tree is not one that ``Packer`` makes.
        KeyError: A blob that it names is not there.
    """
    lookup = blob.__getitem__ if isinstance(blob, Mapping) else blob
    return _decode(tree, lookup)


def _decode(tree: Any, blob: Callable[[str], Any]) -> Any:
    if type(tree) is list:
        return [_decode(each, blob) for each in tree]
    if type(tree) is not dict:
        return tree
    match tree:
        case {"blob": str(name)}:
            value = blob(name)
        case {"scalar": str(name)}:
            value = blob(name)[()]
        case {"tuple": list(items)}:
            value = tuple([_decode(each, blob) for each in items])
        case {"dict": content}:
            value = dict(_pairs(content, blob))
        case {"ordered": content}:
            value = OrderedDict(_pairs(content, blob))
            if "metadata" in tree:
                value._metadata = _decode(tree["metadata"], blob)  # type: ignore[attr-defined]
        case {"int": str(digits)}:
            value = int(digits, 16)
        case {"float": str(digits)}:
            (value,) = struct.unpack(">d", bytes.fromhex(digits))
        case {"complex": [real, imaginary]}:
            value = complex(_decode(real, blob), _decode(imaginary, blob))
        case {"str": str(digits)}:
            value = bytes.fromhex(digits).decode("utf-8", "surrogatepass")
        case _:
            raise ValueError(f"unknown tag {sorted(tree)!r:.80} in a state tree")
    return value


def _pairs(content: Any, blob: Callable[[str], Any]) -> list[tuple[Any, Any]]:
    if type(content) is dict:
        return [(key, _decode(value, blob)) for key, value in content.items()]
    if type(content) is not list:
        raise ValueError("a dict in a state tree is neither an object nor a list of pairs")
    return [(_decode(key, blob), _decode(value, blob)) for key, value in content]


def describe(path: Key) -> str:
    """A path as people read it: ``optimizer/state/0/exp_avg``."""
    return "/".join(
        key if type(key) is str and _is_unicode(key) else ascii(key)[:80] for key in path
    )


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _name_of(value: Any) -> str:
    kind = type(value)
    name = (
        kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"
    )
    if isinstance(value, torch.Tensor) and kind is torch.Tensor:
        return f"{value.layout} tensor of {value.dtype} on {value.device}"
    if isinstance(value, np.ndarray):
        return f"{name} of {value.dtype}"
    return name
