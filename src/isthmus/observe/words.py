"""How figures are worded, the same on the terminal and on the page."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from typing import Final

from isthmus.spec.units import format_bytes, format_seconds

ABSENT: Final = "\N{EN DASH}"
"""Stands for a figure that is None."""
_SCALES: Final = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def nats(value: float | None) -> str:
    """A loss: ``"2.134"``."""
    return ABSENT if value is None else f"{value:.3f}"


def count(value: float | None) -> str:
    """A number of things: in full to four digits (``"1,234"``), then ``"12.3 k"``, ``"4.5 M"``."""
    if value is None or not math.isfinite(value):
        return ABSENT if value is None else str(value)
    if abs(value) < 9_999.5:
        return f"{value:,.0f}" if value == int(value) or abs(value) >= 100 else f"{value:.3g}"
    scale, suffix = next(
        (scale, suffix) for scale, suffix in _SCALES if abs(value) >= scale * 0.9995
    )
    return f"{value / scale:.3g} {suffix}"


def things(number: int, noun: str) -> str:
    """A number of countable things: ``"1 rank"``, ``"2 ranks"``, ``"1,200 steps"``."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def share(value: float | None) -> str:
    """A part of a whole: ``"12.3 %"``."""
    return ABSENT if value is None else f"{100 * value:.3g} %"


def nbytes(value: float | None) -> str:
    """A size: ``"1.25 MB"``."""
    return ABSENT if value is None else format_bytes(value)


def seconds(value: float | None) -> str:
    """A duration: ``"20 ms"``."""
    return ABSENT if value is None else format_seconds(value)


def moment(time_s: float | None) -> str:
    """A time of the wall clock, in UTC: ``"2026-01-31 12:00:00 UTC"``."""
    if time_s is None:
        return ABSENT
    try:
        return f"{datetime.fromtimestamp(time_s, UTC):%Y-%m-%d %H:%M:%S} UTC"
    except (ValueError, OverflowError, OSError):  # a clock that was never right
        return f"{time_s:g} s"


def clock(duration_s: float) -> str:
    """A duration that ticks: ``"0:01:30"``."""
    minutes, whole_seconds = divmod(max(0, round(duration_s)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{whole_seconds:02d}"
