"""Curves over training steps as inline SVG: small, static, readable without scripts or colours.

A chart names its curves at their right ends, writes its values by the title that a browser shows
when the pointer rests on a step, and describes itself to screen readers. Colours come from the CSS
classes of the page, so that one drawing serves light and dark.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from html import escape

from isthmus.observe import words

_HOVER_STRIPS = 100
_LEFT, _TOP, _BOTTOM = 58, 14, 26
_LABEL_GAP = 14


@dataclass(frozen=True)
class Line:
    """One curve. ``low`` and ``high`` draw a band around it; ``dots`` mark every value.

    ``style`` is the CSS class that gives its colour.
    """

    label: str
    style: str
    steps: Sequence[int]
    values: Sequence[float | None]
    low: Sequence[float | None] = ()
    high: Sequence[float | None] = ()
    dots: bool = False
    filled: bool = False


@dataclass(frozen=True)
class Level:
    """A horizontal line to compare with, such as a baseline."""

    label: str
    value: float


@dataclass(frozen=True)
class Mark:
    """A vertical line where something happened; ``style`` is its CSS class."""

    label: str
    style: str
    step: int


@dataclass(frozen=True)
class Chart:
    """What to draw.

    Attributes:
        title: Its heading, also for screen readers.
        word: Words a value, with its unit.
        lines: Curves; those without values are left out.
        levels: Horizontal lines.
        marks: Vertical lines.
        from_zero: Whether the vertical axis begins at zero.
        clip_peaks: Whether rare high peaks may run out of the picture (which then says so).
        width: Of the drawing, in CSS pixels.
        height: Of the drawing, in CSS pixels.
    """

    title: str
    word: Callable[[float], str]
    lines: Sequence[Line]
    levels: Sequence[Level] = ()
    marks: Sequence[Mark] = ()
    from_zero: bool = False
    clip_peaks: bool = False
    width: int = 470
    height: int = 190


@dataclass(frozen=True)
class _Frame:
    """Where steps and values lie in the drawing."""

    first_step: int
    last_step: int
    bottom: float
    top: float
    right: int
    height: int

    def x(self, step: float) -> float:
        span = self.last_step - self.first_step or 1
        return _LEFT + (self.right - _LEFT) * (step - self.first_step) / span

    def y(self, value: float) -> float:
        part = (value - self.bottom) / (self.top - self.bottom)
        # Peaks far outside stay near, so that numbers in the drawing stay small.
        return self.height - _BOTTOM - (self.height - _TOP - _BOTTOM) * min(max(part, -9.0), 9.0)


def draw(chart: Chart) -> str:
    """The chart as an ``<svg>`` element; a chart without any value says so in its middle."""
    steps = [step for line in chart.lines for step in line.steps]
    values = [value for line in chart.lines for value in line.values if value is not None]
    name = "chart-" + "".join(c if c.isalnum() else "-" for c in chart.title.lower())
    if not values:
        chart = replace(chart, height=48)
        middle = (
            f'<text class="axis" x="{chart.width / 2}" y="{chart.height / 2}" '
            'text-anchor="middle">no values yet</text>'
        )
        return _svg(chart, name, f"{chart.title}: no values yet.", middle)
    extremes = [v for line in chart.lines for v in (*line.low, *line.high) if v is not None]
    bottom, top = _value_range(chart, values, extremes)
    label_width = 8 + 6.3 * max((len(text) for text, _, _ in _end_labels(chart)), default=0)
    right = chart.width - round(max(label_width, 16))
    frame = _Frame(min(steps), max(steps), bottom, top, right, chart.height)
    clip = (
        f'<clipPath id="{name}-clip"><rect x="{_LEFT}" y="{_TOP}" '
        f'width="{right - _LEFT}" height="{chart.height - _TOP - _BOTTOM}"/></clipPath>'
    )
    body = "".join(
        (
            clip,
            *_axes(chart, frame),
            f'<g clip-path="url(#{name}-clip)">',
            *(_level(frame, level) for level in chart.levels),
            *(_curve(frame, line) for line in chart.lines),
            "</g>",
            *(_mark(frame, mark) for mark in chart.marks),
            *_labels(chart, frame),
            *_peak(chart, frame, max(values + extremes)),
            *_hover(chart, frame),
        )
    )
    return _svg(chart, name, _description(chart), body)


def _svg(chart: Chart, name: str, description: str, body: str) -> str:
    return (
        f'<svg viewBox="0 0 {chart.width} {chart.height}" role="img" '
        f'aria-labelledby="{name}-title {name}-desc">'
        f'<title id="{name}-title">{escape(chart.title)}</title>'
        f'<desc id="{name}-desc">{escape(description)}</desc>{body}</svg>'
    )


def _description(chart: Chart) -> str:
    """The chart in words: where each curve begins and ends."""
    sentences = []
    for line in chart.lines:
        known = [value for value in line.values if value is not None]
        if known:
            ends = f"from {chart.word(known[0])} to {chart.word(known[-1])}"
            sentences.append(f"{line.label} {ends} over steps {line.steps[0]} to {line.steps[-1]}.")
    sentences += [f"{level.label} at {chart.word(level.value)}." for level in chart.levels]
    return " ".join(sentences)


def _value_range(
    chart: Chart, values: Sequence[float], extremes: Sequence[float]
) -> tuple[float, float]:
    """The lowest and the highest value that the vertical axis shows."""
    shown = [*values, *extremes, *(level.value for level in chart.levels)]
    low, high = min(shown), max(shown)
    if chart.clip_peaks:
        usual = sorted(values)[math.ceil(0.98 * (len(values) - 1))]
        high = min(high, max(low + 1.5 * (usual - low), usual * 1.25))
    if chart.from_zero:
        low = min(0.0, low)
    margin = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
    return (low if chart.from_zero and low == 0 else low - margin), high + margin


def ticks(low: float, high: float, about: int) -> list[float]:
    """Round numbers between ``low`` and ``high``, about as many as asked for (1-2-5 steps)."""
    raw = (high - low) / max(about, 1)
    if not raw > 0 or not math.isfinite(raw):
        return [low]
    power = 10.0 ** math.floor(math.log10(raw))
    stride = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw * 0.999)
    first, last = math.ceil(low / stride - 1e-9), math.floor(high / stride + 1e-9)
    return [index * stride for index in range(first, last + 1)]


def _axes(chart: Chart, frame: _Frame) -> Iterator[str]:
    for value in ticks(frame.bottom, frame.top, chart.height // 45):
        y = frame.y(value)
        yield f'<line class="grid" x1="{_LEFT}" x2="{frame.right}" y1="{y:.1f}" y2="{y:.1f}"/>'
        text = escape(chart.word(value))
        yield f'<text class="axis" x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{text}</text>'
    for step in ticks(frame.first_step, frame.last_step, chart.width // 110):
        if step == int(step):
            x, y = frame.x(step), chart.height - 8
            text = words.count(step)
            yield f'<text class="axis" x="{x:.1f}" y="{y}" text-anchor="middle">{text}</text>'


def _level(frame: _Frame, level: Level) -> str:
    y = f"{frame.y(level.value):.1f}"
    return f'<line class="level" x1="{_LEFT}" x2="{frame.right}" y1="{y}" y2="{y}"/>'


def _mark(frame: _Frame, mark: Mark) -> str:
    x = f"{frame.x(min(max(mark.step, frame.first_step), frame.last_step)):.1f}"
    return (
        f'<g class="mark {mark.style}"><title>{escape(mark.label)}</title>'
        f'<line x1="{x}" x2="{x}" y1="{_TOP}" y2="{frame.height - _BOTTOM}"/></g>'
    )


def _curve(frame: _Frame, line: Line) -> str:
    parts = [_band(frame, line)] if line.low else []
    for run in _runs(line.steps, line.values):
        points = " ".join(f"{frame.x(step):.1f},{frame.y(value):.1f}" for step, value in run)
        if line.filled:
            ends = [f"{frame.x(run[i][0]):.1f},{frame.height - _BOTTOM}" for i in (-1, 0)]
            parts.append(f'<polygon class="area" points="{points} {" ".join(ends)}"/>')
        if len(run) > 1:
            parts.append(f'<polyline class="line" points="{points}"/>')
        if line.dots or len(run) == 1:
            parts += [
                f'<circle cx="{frame.x(step):.1f}" cy="{frame.y(value):.1f}" r="2.5"/>'
                for step, value in run
            ]
    return f'<g class="{line.style}">{"".join(parts)}</g>'


def _band(frame: _Frame, line: Line) -> str:
    highs = [point for run in _runs(line.steps, line.high) for point in run]
    lows = [point for run in _runs(line.steps, line.low) for point in run]
    points = " ".join(
        f"{frame.x(step):.1f},{frame.y(value):.1f}" for step, value in [*highs, *reversed(lows)]
    )
    return f'<polygon class="band" points="{points}"/>'


def _runs(
    steps: Sequence[int], values: Sequence[float | None]
) -> Iterator[list[tuple[int, float]]]:
    """The stretches of a curve between its gaps."""
    run: list[tuple[int, float]] = []
    for step, value in zip(steps, values, strict=True):
        if value is not None:
            run.append((step, value))
        elif run:
            yield run
            run = []
    if run:
        yield run


def _end_labels(chart: Chart) -> list[tuple[str, str, float]]:
    """What is written beside the right ends: text, CSS class and value."""
    labels = [(level.label, "level", level.value) for level in chart.levels]
    for line in chart.lines:
        last = next((value for value in reversed(line.values) if value is not None), None)
        if last is not None and line.label:
            labels.append((line.label, line.style, last))
    return labels


def _labels(chart: Chart, frame: _Frame) -> Iterator[str]:
    """The labels from top to bottom, each pushed down as far as the one above needs."""
    labels = sorted(_end_labels(chart), key=lambda label: frame.y(label[2]))
    lowest = chart.height - _BOTTOM + 4
    room = [lowest - _LABEL_GAP * index for index in range(len(labels) - 1, -1, -1)]
    above = _TOP - _LABEL_GAP
    for (text, style, value), limit in zip(labels, room, strict=True):
        above = y = min(max(frame.y(value) + 4, above + _LABEL_GAP), limit)
        yield (
            f'<text class="name {style}" x="{frame.right + 6}" y="{y:.1f}">{escape(text)}</text>'
        )


def _peak(chart: Chart, frame: _Frame, highest: float) -> Iterator[str]:
    """Says how high the highest peak is if it runs out of the picture."""
    if highest > frame.top:
        text = f"\N{UPWARDS ARROW} up to {escape(chart.word(highest))}"
        yield f'<text class="axis" x="{frame.right}" y="{_TOP - 3}" text-anchor="end">{text}</text>'


def _hover(chart: Chart, frame: _Frame) -> Iterator[str]:
    """Invisible strips whose titles tell the values there."""
    steps = sorted({step for line in chart.lines for step in line.steps})
    chosen = steps[:: math.ceil(len(steps) / _HOVER_STRIPS)]
    half = (frame.right - _LEFT) / max(len(chosen), 1) / 2
    for step in chosen:
        x = frame.x(step)
        begin, end = max(x - half, _LEFT), min(x + half, frame.right)
        told = [f"step {step:,}"]
        for line in chart.lines:
            value = _value_at(line, step)
            if value is not None:
                told.append(f"{line.label or chart.title} {chart.word(value)}")
        yield (
            f'<g class="hover"><title>{escape(chr(10).join(told))}</title>'
            f'<rect x="{begin:.1f}" y="{_TOP}" width="{end - begin:.1f}" '
            f'height="{frame.height - _TOP - _BOTTOM}"/>'
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{frame.height - _BOTTOM}"/></g>'
        )


def _value_at(line: Line, step: int) -> float | None:
    """The value of the last point at or before ``step``."""
    index = bisect.bisect_right(line.steps, step) - 1
    return line.values[index] if index >= 0 else None
