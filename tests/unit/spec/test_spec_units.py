"""Units: what is written is what is read, and nothing ambiguous is accepted."""

from __future__ import annotations

import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from isthmus.spec.units import (
    BYTES,
    BYTES_PER_S,
    SECONDS,
    format_bytes,
    format_bytes_per_s,
    format_seconds,
    parse_bytes,
    parse_bytes_per_s,
    parse_seconds,
)

numbers = st.floats(min_value=0, max_value=1e9, allow_nan=False)
spaces = st.sampled_from(["", " ", "  "])


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("4 GiB", 4 * 2**30),
        ("1 kB", 1000),
        ("1KiB", 1024),
        ("8 bit", 1),
        ("0 B", 0),
        ("1.5 MB", 1_500_000),
        ("1e3 bytes", 1000),
    ],
)
def test_sizes(text: str, value: int) -> None:
    assert parse_bytes(text) == value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("100 Mbit/s", 12.5e6),
        ("100Mbps", 12.5e6),
        ("1 GB/s", 1e9),
        ("1 GiB/s", 2**30),
        ("56 kbit/s", 7e3),
    ],
)
def test_rates(text: str, value: float) -> None:
    assert parse_bytes_per_s(text) == pytest.approx(value, rel=1e-12)


@pytest.mark.parametrize(
    ("text", "value"),
    [("20 ms", 0.02), ("5 µs", 5e-6), ("5us", 5e-6), ("2 min", 120), ("1 d", 86400)],
)
def test_durations(text: str, value: float) -> None:
    assert parse_seconds(text) == pytest.approx(value, rel=1e-12)


@pytest.mark.parametrize("parse", [parse_bytes, parse_bytes_per_s, parse_seconds])
@pytest.mark.parametrize(
    "text",
    [
        "",
        "  ",
        "fast",
        "ms",
        "1 2 ms",
        "NaN ms",
        "inf s",
        "1e400 s",
        "--1 s",
        "10",
        "1 b",
        "5 Mb",
        "5 Mb/s",
        "5 m",
        "5 M",
    ],
)
def test_what_is_not_a_quantity_is_refused(parse, text: str) -> None:
    with pytest.raises(ValueError, match=r"expected|known units|too large"):
        parse(text)


def test_a_fraction_of_a_byte_is_refused() -> None:
    with pytest.raises(ValueError, match="whole number"):
        parse_bytes("1 bit")


@given(numbers, st.sampled_from(sorted(BYTES_PER_S)), spaces)
def test_a_rate_scales_with_its_unit(number: float, unit: str, space: str) -> None:
    assert parse_bytes_per_s(f"{number!r}{space}{unit}") == number * BYTES_PER_S[unit]


@given(numbers, st.sampled_from(sorted(SECONDS)), spaces)
def test_a_duration_scales_with_its_unit(number: float, unit: str, space: str) -> None:
    assert parse_seconds(f"{number!r}{space}{unit}") == number * SECONDS[unit]


@given(st.integers(0, 2**50), st.sampled_from([u for u, scale in BYTES.items() if scale >= 1]))
def test_whole_sizes_are_exact(number: int, unit: str) -> None:
    value = number * int(BYTES[unit])
    if value < 2**53:
        assert parse_bytes(f"{number} {unit}") == value


@given(st.floats(1, 9e17))
@example(999.6)
@example(1000)
@example(999_999)
def test_what_is_printed_reads_back_to_three_digits(value: float) -> None:
    assert math.isclose(parse_bytes_per_s(format_bytes_per_s(value)), value, rel_tol=6e-3)
    printed = format_bytes(value)
    assert len(printed.split()[0].lstrip("-")) <= 6, printed


@given(st.floats(1e-9, 59))
def test_printed_durations_read_back(value: float) -> None:
    assert math.isclose(parse_seconds(format_seconds(value)), value, rel_tol=6e-3)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 s"),
        (0.02, "20 ms"),
        (59.97, "1 min 0 s"),
        (200, "3 min 20 s"),
        (7260, "2 h 1 min"),
        (math.inf, "∞"),
    ],
)
def test_durations_read_as_people_say_them(value: float, text: str) -> None:
    assert format_seconds(value) == text
