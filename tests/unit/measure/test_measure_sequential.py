from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest

from isthmus.measure.timing import MIN_BLOCKS, compare_each, compare_until

Noise = Callable[[np.random.Generator], float]


def normal(rng: np.random.Generator) -> float:
    return 0.05 * float(rng.standard_normal())


def heavy_tailed(rng: np.random.Generator) -> float:
    return 0.03 * float(rng.standard_t(2))


def variant(
    base_s: float, noise: Noise, rng: np.random.Generator
) -> Callable[[], dict[str, float]]:
    return lambda: {"wall_s": base_s * math.exp(noise(rng))}


def ticks(step_s: float = 1.0) -> Callable[[], float]:
    """A clock that is a step later at each look."""
    times = itertools.count()
    return lambda: step_s * next(times)


@pytest.mark.parametrize("noise", [normal, heavy_tailed])
@pytest.mark.parametrize("narrow", [0.1, 0.05])
def test_an_interval_that_was_narrow_when_it_stopped_covers_the_truth_in_95_percent(
    noise: Noise, narrow: float
) -> None:
    rng = np.random.default_rng(7)
    trials, covered, blocks = 600, 0, set()
    a, b = variant(1.0, noise, rng), variant(0.9, noise, rng)
    for trial in range(trials):
        found = compare_until(
            a, b, narrow=narrow, time_s=200, control=False, seed=trial, clock=ticks()
        )["wall_s"]
        covered += found.interval95[0] <= 0.9 <= found.interval95[1]
        blocks.add(found.blocks)
    assert len(blocks) > 2, "it stopped at different times"
    assert covered / trials >= 0.95 - 2 * math.sqrt(0.95 * 0.05 / trials)


def test_it_stops_as_soon_as_the_interval_is_narrow_and_only_then() -> None:
    rng = np.random.default_rng(0)
    a, b = variant(1.0, normal, rng), variant(2.0, normal, rng)
    found = compare_until(a, b, narrow=0.04, time_s=1e9, clock=ticks())["wall_s"]
    low, high = found.interval95
    assert high / low - 1 <= 0.04
    assert found.blocks > 7
    exact = compare_until(lambda: {"x": 1.0}, lambda: {"x": 3.0}, narrow=0.0, time_s=1e9)["x"]
    assert (exact.blocks, exact.ratio) == (7, pytest.approx(3.0))


@pytest.mark.parametrize(("time_s", "blocks"), [(40.0, 10), (41.0, 11), (0.0, 7)])
def test_it_stops_when_the_time_is_up_but_never_before_it_has_an_interval(
    time_s: float, blocks: int
) -> None:
    now_s, rng = 0.0, np.random.default_rng(0)

    def one_second() -> dict[str, float]:
        nonlocal now_s
        now_s += 1.0
        return {"wall_s": math.exp(normal(rng))}

    found = compare_until(
        one_second, one_second, narrow=0.0, time_s=time_s, control=False, clock=lambda: now_s
    )
    assert found["wall_s"].blocks == blocks >= MIN_BLOCKS


def test_only_the_named_measures_have_to_be_narrow() -> None:
    rng = np.random.default_rng(0)

    def run() -> dict[str, float]:
        return {"steady": 1.0, "wild": math.exp(float(rng.standard_normal()))}

    found = compare_until(run, run, narrow=0.01, time_s=1e9, names=["steady"])
    assert found["steady"].blocks == found["wild"].blocks == 7


def test_all_processes_stop_when_the_one_that_decides_does() -> None:
    rng = np.random.default_rng(0)
    asked: list[bool] = []

    def agree(stop: bool) -> bool:
        asked.append(stop)
        return len(asked) == 9

    a, b = variant(1.0, normal, rng), variant(1.0, normal, rng)
    found = compare_until(a, b, narrow=10.0, time_s=0, agree=agree)["wall_s"]
    assert found.blocks == len(asked) == 9
    assert asked[:6] == [False] * 6, asked
    assert all(asked[6:])


def test_a_fixed_number_of_blocks_runs_the_same_variants_in_the_same_order() -> None:
    orders: list[list[str]] = []
    for compared in (
        lambda a, b: compare_each(a, b, blocks=7, seed=3),
        lambda a, b: compare_until(a, b, narrow=0.0, time_s=0, seed=3),
    ):
        order: list[str] = []
        compared(
            lambda order=order: order.append("a") or {"x": 1.0},
            lambda order=order: order.append("b") or {"x": 1.0},
        )
        orders.append(order)
    assert orders[0] == orders[1]
    assert len(orders[0]) == 7 * 8
