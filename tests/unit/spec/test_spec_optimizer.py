"""Learning-rate schedules: continuous, bounded, and at their ends where they say they are."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.spec.optimizer import (
    Constant,
    Cosine,
    Linear,
    OptimizerSpec,
    Schedule,
    WarmupStableDecay,
)

schedules = st.sampled_from([Constant, Linear, Cosine, WarmupStableDecay])


@given(schedules, st.integers(0, 50), st.integers(1, 2000), st.integers(0, 3000))
def test_the_rate_stays_between_zero_and_its_peak(
    kind: type[Schedule], warmup: int, steps: int, step: int
) -> None:
    rate = OptimizerSpec(learning_rate=0.5, schedule=kind(warmup_steps=warmup)).learning_rate_at(
        step, steps
    )
    assert 0 <= rate <= 0.5


@given(schedules, st.integers(1, 50))
def test_the_warm_up_is_a_straight_line_from_above_zero(kind: type[Schedule], warmup: int) -> None:
    factors = [kind(warmup_steps=warmup).factor(step, 1000) for step in range(warmup)]
    assert factors == pytest.approx([(step + 1) / (warmup + 1) for step in range(warmup)])


@given(schedules, st.integers(200, 1000))
def test_the_rate_makes_no_jump(kind: type[Schedule], steps: int) -> None:
    factors = [kind(warmup_steps=20).factor(step, steps) for step in range(steps)]
    jumps = [abs(after - before) for before, after in pairwise(factors)]
    assert max(jumps) < 0.25 if kind is WarmupStableDecay else max(jumps) < 0.06


@pytest.mark.parametrize(
    ("schedule", "end"),
    [
        (Constant(), 1.0),
        (Linear(final_fraction=0.2), 0.2),
        (Cosine(final_fraction=0.1), 0.1),
        (WarmupStableDecay(final_fraction=0.0), 0.0),
    ],
)
def test_the_end_is_the_final_fraction(schedule: Schedule, end: float) -> None:
    assert schedule.factor(500, 500) == pytest.approx(end)
    assert schedule.factor(schedule.warmup_steps, 500) == pytest.approx(1.0)


def test_cosine_is_halfway_in_the_middle() -> None:
    assert Cosine(warmup_steps=0, final_fraction=0.0).factor(50, 100) == pytest.approx(0.5)


def test_wsd_is_constant_until_its_decay() -> None:
    schedule = WarmupStableDecay(warmup_steps=0, decay_fraction=0.25)
    assert {schedule.factor(step, 100) for step in range(75)} == {1.0}
    assert schedule.factor(80, 100) == pytest.approx(1 - (0.2) ** 0.5)
