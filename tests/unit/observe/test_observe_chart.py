"""Charts: round ticks, nothing outside the picture, labels that don't cover each other."""

from __future__ import annotations

import itertools
import re

from hypothesis import given
from hypothesis import strategies as st

from isthmus.observe.chart import Chart, Level, Line, Mark, draw, ticks

numbers = st.floats(-1e9, 1e9, allow_nan=False)


@given(numbers, st.floats(1e-6, 1e9), st.integers(1, 12))
def test_ticks_are_inside_evenly_spaced_and_about_as_many(
    low: float, span: float, about: int
) -> None:
    high = low + span
    marks = ticks(low, high, about)
    slack = 1e-6 * (abs(low) + span)
    assert all(low - slack <= mark <= high + slack for mark in marks)
    assert len(marks) <= about + 2
    gaps = [after - before for before, after in itertools.pairwise(marks)]
    assert all(abs(gap - gaps[0]) <= slack for gap in gaps)


def test_ticks_of_an_empty_range() -> None:
    assert ticks(3.0, 3.0, 5) == [3.0]


@given(
    st.lists(st.none() | st.floats(-1e12, 1e12), max_size=30),
    st.lists(st.floats(-1e6, 1e6), max_size=3),
    st.booleans(),
    st.booleans(),
)
def test_any_values_can_be_drawn(
    values: list[float | None], levels: list[float], from_zero: bool, clip_peaks: bool
) -> None:
    chart = Chart(
        title="T",
        word=lambda value: f"{value:.3g}",
        lines=[Line("a", "blue", range(len(values)), values, values, values, True, True)],
        levels=[Level(f"l{index}", value) for index, value in enumerate(levels)],
        marks=[Mark("m", "", 10_000)],
        from_zero=from_zero,
        clip_peaks=clip_peaks,
    )
    svg = draw(chart)
    assert "nan" not in svg
    assert "inf" not in svg
    for x in re.findall(r'\bx[12]?="([^"]+)"', svg):
        assert -20 <= float(x) <= chart.width + 20
    names = re.findall(r'<text class="name [^"]*" x="[^"]+" y="([^"]+)"', svg)
    heights = sorted(map(float, names))
    assert all(b - a >= 13.8 for a, b in itertools.pairwise(heights))


def test_a_gap_interrupts_the_curve() -> None:
    line = Line("a", "blue", [1, 2, 3, 4, 5, 6], [1.0, 2.0, None, 3.0, 2.0, None])
    svg = draw(Chart(title="T", word=str, lines=[line]))
    assert svg.count("<polyline") == 2


def test_a_peak_that_is_cut_off_is_said() -> None:
    values = [1.0] * 99 + [500.0]
    line = Line("a", "blue", range(100), values)
    cut = draw(Chart(title="T", word=lambda v: f"{v:.0f} s", lines=[line], clip_peaks=True))
    assert "up to 500 s" in cut
    whole = draw(Chart(title="T", word=lambda v: f"{v:.0f} s", lines=[line]))
    assert "up to" not in whole
