from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import count, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.measure.timing import (
    MIN_BLOCKS,
    Sample,
    compare,
    compare_each,
    ratio_of,
    signed_rank_interval,
    timed,
)

VALUES = st.lists(st.floats(-5, 5), min_size=MIN_BLOCKS, max_size=12)


class Machine:
    """A pretended clock: each run costs its base time, a drift, and noise."""

    def __init__(self, rng: np.random.Generator, *, drift: float, noise: float, pauses: float):
        self.rng, self.drift, self.noise, self.pauses = rng, drift, noise, pauses
        self.log_drift = 0.0

    def variant(self, base_s: float) -> Callable[[], float]:
        def run() -> float:
            self.log_drift += self.drift
            pause = 10.0 if self.rng.random() < self.pauses else 1.0
            noise = self.noise * self.rng.standard_normal()
            return base_s * pause * math.exp(self.log_drift + noise)

        return run


@pytest.mark.parametrize("true_ratio", [1.0, 0.8])
@pytest.mark.parametrize("blocks", [6, 11])
def test_the_interval_covers_the_true_ratio_as_often_as_it_says(
    blocks: int, true_ratio: float
) -> None:
    rng = np.random.default_rng(blocks)
    trials = 1500
    machine = Machine(rng, drift=0.002, noise=0.05, pauses=0.02)
    a, b = machine.variant(1.0), machine.variant(true_ratio)
    covered = controls = 0
    for trial in range(trials):
        machine.log_drift = 0.0
        found = compare(a, b, blocks=blocks, seed=trial)
        assert found.control_interval is not None
        covered += found.interval95[0] <= true_ratio <= found.interval95[1]
        controls += found.sound
    # Three standard deviations of a share of 95 % below it, and not a useless 100 %.
    least = 0.95 - 3 * math.sqrt(0.95 * 0.05 / trials)
    assert least <= covered / trials < 0.995
    assert least <= controls / trials < 0.995


def test_a_drift_of_the_machine_cancels_exactly() -> None:
    machine = Machine(np.random.default_rng(0), drift=0.1, noise=0.0, pauses=0.0)
    found = compare(machine.variant(2.0), machine.variant(3.0), blocks=8)
    assert found.ratio == pytest.approx(1.5)
    assert found.interval95 == pytest.approx((1.5, 1.5))
    assert found.control_ratio == pytest.approx(1.0)


def test_one_paused_block_moves_neither_ratio_nor_interval_much() -> None:
    rng = np.random.default_rng(1)
    calm = 0.01 * rng.standard_normal(12)
    hit = calm.copy()
    hit[3] = math.log(50)
    (calm_ratio, _), (hit_ratio, (low, high)) = ratio_of(list(calm)), ratio_of(list(hit))
    assert hit_ratio == pytest.approx(calm_ratio, abs=0.01)
    assert 0.97 < low < high < 1.03


@pytest.mark.parametrize("seed", range(4))
def test_blocks_are_mirrored_and_the_seed_decides_their_order(seed: int) -> None:
    def ran(seed: int) -> str:
        calls: list[str] = []
        compare(
            lambda: calls.append("A") or 1.0,
            lambda: calls.append("B") or 1.0,
            blocks=20,
            control=False,
            seed=seed,
        )
        return "".join(calls)

    order = ran(seed)
    blocks = [order[at : at + 4] for at in range(0, len(order), 4)]
    assert set(blocks) == {"ABBA", "BAAB"}
    assert order == ran(seed)
    assert order != ran(seed + 100)


def test_both_variants_run_equally_often_and_the_control_runs_only_a() -> None:
    counts = {"a": 0, "b": 0}

    def run(name: str) -> Callable[[], float]:
        def once() -> float:
            counts[name] += 1
            return 1.0

        return once

    compare(run("a"), run("b"), blocks=7)
    assert counts == {"a": 2 * 7 + 4 * 7, "b": 2 * 7}


def test_the_difference_has_the_unit_of_the_runs_and_forgives_a_linear_drift() -> None:
    drift_s = count(0.0, 0.25)
    found = compare(lambda: 2.0 + next(drift_s), lambda: 2.5 + next(drift_s), blocks=6)
    assert found.difference == pytest.approx(0.5)
    assert found.difference95 == pytest.approx((0.5, 0.5))
    assert (found.a.count, found.b.count) == (12, 12)


def test_several_measures_of_the_same_runs_are_compared_each_by_itself() -> None:
    runs, done = [], []
    found = compare_each(
        lambda: runs.append("A") or {"wall": 1.0, "cpu": 4.0},
        lambda: runs.append("B") or {"wall": 3.0, "cpu": 2.0},
        blocks=6,
        on_block=done.append,
    )
    assert {name: each.ratio for name, each in found.items()} == pytest.approx(
        {"wall": 3.0, "cpu": 0.5}
    )
    assert found["cpu"].difference == pytest.approx(-2.0)
    assert (found["cpu"].a.median, found["cpu"].b.median) == (4.0, 2.0)
    assert (runs.count("A"), runs.count("B")) == (6 * 6, 2 * 6)
    assert done == [1, 2, 3, 4, 5, 6]


def test_without_a_control_there_is_none() -> None:
    found = compare(lambda: 1.0, lambda: 2.0, blocks=6, control=False)
    assert (found.control_ratio, found.control_interval) == (None, None)
    assert found.differs
    assert str(found) == "2.000 [2.000, 2.000] over 6 blocks"


def test_a_control_that_is_off_takes_away_the_claim() -> None:
    found = compare(lambda: 1.0, lambda: 2.0, blocks=6)
    assert found.differs
    assert "A/A control 1.000 [1.000, 1.000]" in str(found)
    off = replace(found, control_ratio=1.1, control_interval=(1.05, 1.2))
    assert not off.sound
    assert not off.differs


@pytest.mark.parametrize(
    ("interval95", "control", "verdict"),
    [
        ((0.99, 1.04), (0.99, 1.01), True),
        ((1.06, 1.08), (0.99, 1.01), False),
        ((1.02, 1.08), (0.99, 1.01), None),
        ((1.06, 1.08), (0.90, 1.10), None),
        ((0.99, 1.04), (1.01, 1.02), None),
        ((1.06, 1.08), (1.01, 1.02), None),
        ((0.99, 1.04), None, True),
        ((1.06, 1.08), None, False),
    ],
)
def test_a_limit_is_kept_missed_or_left_open(
    interval95: tuple[float, float], control: tuple[float, float] | None, verdict: bool | None
) -> None:
    found = compare(lambda: 1.0, lambda: 1.0, blocks=6)
    found = replace(found, interval95=interval95, control_interval=control)
    assert found.at_most(1.05) is verdict


@given(VALUES)
def test_the_interval_inverts_the_exact_test(values: list[float]) -> None:
    """A shift is inside exactly if the signed-rank test, by brute force, does not reject it."""
    array = np.array(values)
    _, low, high = signed_rank_interval(values)
    pairs = [(array[i] + array[j]) / 2 for i in range(len(array)) for j in range(i + 1)]
    null = np.array([_walsh_above(signs) for signs in product((0, 1), repeat=len(array))])
    # shifts strictly between neighbouring pair means, where no ties can blur the statistic
    means = np.unique(pairs)
    for shift in (means[:-1] + means[1:]) / 2:
        if np.isin(shift, means):
            continue
        above = int(sum(mean > shift for mean in pairs))
        p_low, p_high = (null <= above).mean(), (null >= above).mean()
        assert (low < shift < high) == (min(p_low, p_high) > 0.025)


def _walsh_above(signs: tuple[int, ...]) -> int:
    return sum(rank for rank, sign in enumerate(signs, 1) if sign)


@given(VALUES, st.floats(-3, 3))
def test_centre_and_interval_follow_shift_and_sign(values: list[float], shift: float) -> None:
    centre, low, high = signed_rank_interval(values)
    assert low <= centre <= high
    moved = signed_rank_interval([value + shift for value in values])
    assert moved == pytest.approx((centre + shift, low + shift, high + shift), abs=1e-9)
    turned = signed_rank_interval([-value for value in values])
    assert turned == pytest.approx((-centre, -high, -low), abs=1e-9)


def test_too_few_blocks_and_senseless_measures_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 6"):
        compare(lambda: 1.0, lambda: 1.0, blocks=MIN_BLOCKS - 1)
    with pytest.raises(ValueError, match="no interval"):
        ratio_of([0.0] * (MIN_BLOCKS - 1))
    for senseless in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="positive number"):
            compare(lambda: 1.0, lambda value=senseless: value, blocks=6)


def test_a_timed_run_does_the_work_once() -> None:
    calls: list[int] = []
    assert timed(lambda: calls.append(1))() >= 0
    assert calls == [1]


def test_a_sample_is_median_and_range() -> None:
    assert Sample.of([3.0, 1.0, 2.0, 10.0]) == Sample(2.5, 1.0, 10.0, 4)
    with pytest.raises(ValueError, match="no values"):
        Sample.of([])
