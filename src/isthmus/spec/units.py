"""Quantities with units: the one place where text such as ``"100 Mbit/s"`` becomes a number.

Decimal prefixes are powers of 1000 (``MB``, ``Mbit``), binary ones powers of 1024 (``MiB``).
``b`` alone is refused: bit or byte must be said.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Final

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

_DECIMAL: Final = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15}
_BINARY: Final = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "Pi": 2**50}
_QUANTITY: Final = re.compile(r"\s*([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*(\S.*?)?\s*")

BYTES: Final[Mapping[str, float]] = {
    **{f"{prefix}B": scale for prefix, scale in (_DECIMAL | _BINARY).items()},
    "byte": 1,
    "bytes": 1,
    **{f"{prefix}bit": scale / 8 for prefix, scale in (_DECIMAL | _BINARY).items()},
}
BYTES_PER_S: Final[Mapping[str, float]] = {
    **{f"{unit}/s": scale for unit, scale in BYTES.items()},
    **{f"{prefix}bps": scale / 8 for prefix, scale in _DECIMAL.items()},
}
SECONDS: Final[Mapping[str, float]] = {
    "ns": 1e-9,
    "us": 1e-6,
    "µs": 1e-6,
    "ms": 1e-3,
    "s": 1,
    "sec": 1,
    "min": 60,
    "h": 3600,
    "d": 86400,
}
UNIT_SUFFIXES: Final[Mapping[str, str]] = {
    "_bytes_per_s": "100 Mbit/s",
    "_bytes": "4 GiB",
    "_s": "20 ms",
}
"""Endings of field names that carry a unit, longest first, each with an example of its text."""


def parse_bytes(text: str) -> int:
    """Bytes of a size such as ``"4 GiB"``; raises ValueError unless it is a whole number."""
    size = _parse(text, BYTES, "a size", "4 GiB")
    if size != int(size):
        raise ValueError(f"{text!r} is {size:g} bytes; expected a whole number of bytes")
    return int(size)


def parse_bytes_per_s(text: str) -> float:
    """Bytes per second of a rate such as ``"100 Mbit/s"``."""
    return _parse(text, BYTES_PER_S, "a rate", "100 Mbit/s")


def parse_seconds(text: str) -> float:
    """Seconds of a duration such as ``"20 ms"``."""
    return _parse(text, SECONDS, "a duration", "20 ms")


def _parse(text: str, units: Mapping[str, float], what: str, example: str) -> float:
    match = _QUANTITY.fullmatch(text)
    if match is None:
        raise ValueError(f'{text!r} is not {what}; expected a number and a unit, as "{example}"')
    number, unit = match.groups()
    if unit is None:
        raise ValueError(f'{text!r} has no unit; expected {what} such as "{example}"')
    if unit not in units:
        known = ", ".join(units)
        raise ValueError(f"{unit!r} is not a unit of {what}; known units: {known}")
    value = float(number) * units[unit]
    if not math.isfinite(value):
        raise ValueError(f"{text!r} is too large")
    return value


def format_bytes(size: float) -> str:
    """Text of a size with three significant digits, as ``"1.25 MB"``."""
    return _format(size, "B")


def format_bytes_per_s(rate: float) -> str:
    """Text of a rate in bits, as network people write it: ``"100 Mbit/s"``."""
    return _format(rate * 8, "bit/s")


def format_seconds(duration: float) -> str:
    """Text of a duration in the unit that suits it: ``"20 ms"``, ``"1.5 s"``, ``"3 min 20 s"``."""
    if not math.isfinite(duration):
        return "∞" if duration > 0 else str(duration)
    size = abs(duration)
    if size >= 59.95:
        minutes, seconds = divmod(round(duration), 60)
        hours, minutes = divmod(minutes, 60)
        return f"{hours} h {minutes} min" if hours else f"{minutes} min {seconds} s"
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if size >= scale * 0.9995:
            return f"{duration / scale:.3g} {unit}"
    return f"{duration / 1e-9:.3g} ns" if size else "0 s"


def _format(value: float, unit: str) -> str:
    size = abs(value)
    for prefix, scale in reversed(_DECIMAL.items()):
        if prefix != "k" and size >= scale * 0.9995 and scale > 1:
            return f"{value / scale:.3g} {'k' if prefix == 'K' else prefix}{unit}"
    return f"{value:.3g} {unit}"


def _reader(parse: Callable[[str], float]) -> BeforeValidator:
    def read(value: Any) -> Any:
        if not isinstance(value, str):
            return value
        try:
            return parse(value)
        except ValueError as problem:
            raise PydanticCustomError("unit", "{problem}", {"problem": str(problem)}) from None

    return BeforeValidator(read)


Bytes = Annotated[int, _reader(parse_bytes), Field(ge=0)]
"""A size in bytes; text such as ``"4 GiB"`` is accepted."""
BytesPerSecond = Annotated[float, _reader(parse_bytes_per_s), Field(ge=0, allow_inf_nan=False)]
"""A rate in bytes per second; text such as ``"100 Mbit/s"`` is accepted."""
Seconds = Annotated[float, _reader(parse_seconds), Field(ge=0, allow_inf_nan=False)]
"""A duration in seconds; text such as ``"20 ms"`` is accepted."""
