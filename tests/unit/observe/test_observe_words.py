"""Figures are worded short, with their unit, and absent ones are told from zero."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.observe import words


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (7, "7"),
        (1234, "1,234"),
        (9999.4, "9,999"),
        (0.125, "0.125"),
        (2.5, "2.5"),
        (9999.5, "10 k"),
        (12_345, "12.3 k"),
        (999_600, "1 M"),
        (1_213_440, "1.21 M"),
        (405e9, "405 G"),
        (-20_000, "-20 k"),
        (math.nan, "nan"),
        (math.inf, "inf"),
        (None, words.ABSENT),
    ],
)
def test_counts(value: float | None, text: str) -> None:
    assert words.count(value) == text


@given(st.none() | st.floats())
def test_any_number_has_a_wording(value: float | None) -> None:
    for wording in (words.count, words.share, words.nats, words.seconds, words.nbytes):
        assert wording(value)
        assert (wording(value) == words.ABSENT) is (value is None)


def test_things() -> None:
    assert [words.things(n, "step") for n in (0, 1, 1200)] == ["0 steps", "1 step", "1,200 steps"]


def test_times() -> None:
    assert words.moment(0.0) == "1970-01-01 00:00:00 UTC"
    assert words.clock(3725.4) == "1:02:05"
    assert words.clock(-1.0) == "0:00:00"
    assert words.share(0.1234) == "12.3 %"
