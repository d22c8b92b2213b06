"""What a strategy does with each tensor, as rows and as text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from isthmus.spec.units import format_bytes

_TITLES = ("tensor", "shape", "dtype", "bucket", "codec", "plain", "sent", "note")
_LEFT = {0, 1, 2, 4, 7}


@dataclass(frozen=True)
class ExplainRow:
    """One tensor.

    Attributes:
        name: As in ``model.named_parameters()`` or ``named_buffers()``.
        shape: Its shape.
        dtype: Its dtype, as in ``"float32"``.
        bucket: Index of its bucket in the order of launches; None if it does not travel.
        codec: Kind of what encodes it; empty if it does not travel.
        plain_nbytes: Least bytes that a rank would put on the network for it each time, were it
            all-reduced uncompressed.
        sent_nbytes: The same for the way it does travel: its share, by elements, of its bucket's.
        note: Why it is left uncompressed, or does not travel.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    bucket: int | None
    codec: str
    plain_nbytes: float
    sent_nbytes: float
    note: str = ""


@dataclass(frozen=True)
class Explanation:
    """All tensors of a model and a line on the whole; ``str()`` of it is a table."""

    summary: str
    rows: tuple[ExplainRow, ...]

    def __iter__(self) -> Iterator[ExplainRow]:
        return iter(self.rows)

    def __str__(self) -> str:
        table = [_TITLES, *(_cells(row) for row in self.rows)]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = (
            "  ".join(
                cell.ljust(width) if place in _LEFT else cell.rjust(width)
                for place, (cell, width) in enumerate(zip(cells, widths, strict=True))
            ).rstrip()
            for cells in table
        )
        return "\n".join([self.summary, *lines])


def _cells(row: ExplainRow) -> tuple[str, ...]:
    return (
        row.name,
        "x".join(map(str, row.shape)) or "scalar",
        row.dtype,
        "-" if row.bucket is None else str(row.bucket),
        row.codec or "-",
        format_bytes(row.plain_nbytes),
        format_bytes(row.sent_nbytes),
        row.note,
    )
