"""Which curves a report shows, and how."""

from __future__ import annotations

import math

from isthmus.observe import words
from isthmus.observe.chart import Chart, Level, Line, Mark
from isthmus.observe.report import Curve, Report


def loss_chart(report: Report) -> Chart:
    """Training and validation loss, beside what counting models reach."""
    loss = report.loss
    levels = [
        Level(label, value)
        for label, value in (("bigram", loss.bigram_nats), ("trigram", loss.trigram_nats))
        if value is not None
    ]
    scored = report.validations
    lines = [
        _line("training", "blue", report.curves["loss_nats"]),
        Line(
            "validation",
            "orange",
            [validation.step for validation in scored],
            [v.loss_nats if math.isfinite(v.loss_nats) else None for v in scored],
            dots=True,
        ),
    ]
    return Chart(
        title="Loss in nats per token",
        word=lambda value: f"{value:.4g}",
        lines=lines,
        levels=levels,
        marks=_marks(report),
        width=1000,
        height=330,
    )


def small_charts(report: Report) -> list[Chart]:
    """Throughput, step time with its communication, gradient norm and learning rate."""
    curves, marks = report.curves, _marks(report)
    waited = curves["communication_time_s"]
    return [
        Chart(
            title="Tokens per second",
            word=words.count,
            lines=[_line("", "green", curves["tokens_per_s"])],
            marks=marks,
            from_zero=True,
        ),
        Chart(
            title="Step time",
            word=words.seconds,
            lines=[
                _line("step", "blue", curves["step_time_s"]),
                Line("network", "orange", waited.steps, waited.mean, filled=True),
            ],
            marks=marks,
            from_zero=True,
            clip_peaks=True,
        ),
        Chart(
            title="Gradient norm",
            word=lambda value: f"{value:.3g}",
            lines=[_line("", "violet", curves["grad_norm"])],
            marks=marks,
            from_zero=True,
            clip_peaks=True,
        ),
        Chart(
            title="Learning rate",
            word=lambda value: f"{value:.3g}",
            lines=[_line("", "green", curves["learning_rate"])],
            marks=marks,
            from_zero=True,
        ),
    ]


def _line(label: str, style: str, curve: Curve) -> Line:
    return Line(label, style, curve.steps, curve.mean, curve.low, curve.high)


def _marks(report: Report) -> list[Mark]:
    restarts = [
        Mark(f"attempt {attempt.attempt} began after step {attempt.start_step:,}", "", step)
        for attempt in report.attempts[1:]
        if (step := attempt.start_step) > 0
    ]
    failures = [
        Mark(f"rank {failure.rank} failed: {failure.error_type}", "bad", failure.step)
        for failure in report.failures
        if failure.step is not None
    ]
    return restarts + failures
