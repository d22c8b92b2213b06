"""Statistics of repeated measurements, and the comparison of two variants that run in turn.

A machine drifts: it heats up, a neighbour wakes, caches fill. Two numbers from two minutes can't be
compared. So variants run interleaved in blocks ``A B B A`` or ``B A A B``, which cancels any drift
that is linear in time over a block; which of the two, a seeded coin decides. Each block gives one
log ratio, ``(log b1 + log b2 - log a1 - log a2) / 2``, and blocks are the independent samples.

Of these log ratios the estimate is the Hodges-Lehmann centre (the median of all pairwise means),
and the interval is the one that inverts Wilcoxon's signed-rank test, with its exact distribution
(Hollander, Wolfe, Chicken: Nonparametric Statistical Methods, 3.2-3.3). It assumes that a block's
noise is symmetric about the true log ratio, which the mirrored order provides, and nothing about
its shape: one block hit by a pause of the machine hardly moves it, where a mean of times would be
ruined. No resampling, so the same measurements always give the same interval.

The control runs A against itself in blocks of its own, between the others. Its ratio must come out
as 1; how far its interval reaches is how small an effect this machine can show today.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from random import Random
from typing import Final

import numpy as np

MIN_BLOCKS: Final = 6
"""With fewer, no interval of signed ranks reaches 95 %: its most is 1 - 2 ** (1 - blocks)."""

Run = Callable[[], float]
"""Does the work once and returns what it measured; positive, usually seconds."""


@dataclass(frozen=True)
class Sample:
    """Repeated measurements of one thing, in the unit of the field that holds this."""

    median: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Sample:
        """Summarise values; raises ValueError if there are none."""
        if not values:
            raise ValueError("no values to summarise")
        return cls(float(np.median(values)), min(values), max(values), len(values))


@dataclass(frozen=True)
class Comparison:
    """How many times A's measure B's is: below 1, B takes less.

    Attributes:
        ratio: B over A.
        interval95: Where the true ratio lies, with 95 % confidence.
        control_ratio: A over A, by the same method; None if no control ran.
        control_interval: Its 95 % interval; None if no control ran.
        blocks: Number of blocks behind each ratio.
    """

    ratio: float
    interval95: tuple[float, float]
    control_ratio: float | None
    control_interval: tuple[float, float] | None
    blocks: int

    @property
    def differs(self) -> bool:
        """Whether 1 lies outside the interval, and inside the control's if there is one."""
        return not _holds_one(self.interval95) and self.sound

    @property
    def sound(self) -> bool:
        """Whether the control's interval holds 1 (a sound control fails once in twenty)."""
        return self.control_interval is None or _holds_one(self.control_interval)

    def __str__(self) -> str:
        text = f"{_ratio_text(self.ratio, self.interval95)} over {self.blocks} blocks"
        if self.control_ratio is None or self.control_interval is None:
            return text
        return f"{text}, A/A control {_ratio_text(self.control_ratio, self.control_interval)}"


def timed(work: Callable[[], object]) -> Run:
    """Return a run that does ``work`` once and gives the seconds it took."""

    def run() -> float:
        begin_s = time.perf_counter()
        work()
        return time.perf_counter() - begin_s

    return run


def compare(a: Run, b: Run, *, blocks: int, control: bool = True, seed: int = 0) -> Comparison:
    """Run two variants in turn and say how B compares with A.

    Each runs ``2 * blocks`` times, and A another ``4 * blocks`` times for the control. Warm both up
    before; the first block counts like any other.

    Args:
        a: The variant to compare with.
        b: The variant that is judged.
        blocks: Blocks of four runs; at least 6.
        control: Whether to compare A with itself, too.
        seed: Decides the orders within and of the blocks.

    Raises:
        ValueError: If there are too few blocks, or a run returns no positive number.
    """
    if blocks < MIN_BLOCKS:
        raise ValueError(f"{blocks} blocks give no 95 % interval; use at least {MIN_BLOCKS}")
    random = Random(seed)
    pairs = {"judged": (a, b), "control": (a, a)} if control else {"judged": (a, b)}
    log_ratios: dict[str, list[float]] = {name: [] for name in pairs}
    for _ in range(blocks):
        for name in random.sample(sorted(pairs), len(pairs)):
            log_ratios[name].append(_block(*pairs[name], b_leads=random.random() < 0.5))
    judged, its_interval = ratio_of(log_ratios["judged"])
    if not control:
        return Comparison(judged, its_interval, None, None, blocks)
    return Comparison(judged, its_interval, *ratio_of(log_ratios["control"]), blocks)


def ratio_of(log_ratios: Sequence[float]) -> tuple[float, tuple[float, float]]:
    """Return the ratio and its 95 % interval from one log ratio a block.

    Raises:
        ValueError: If there are fewer than 6 log ratios.
    """
    centre, low, high = signed_rank_interval(log_ratios)
    return math.exp(centre), (math.exp(low), math.exp(high))


def signed_rank_interval(
    values: Sequence[float], confidence: float = 0.95
) -> tuple[float, float, float]:
    """Return the Hodges-Lehmann centre of values and its exact signed-rank interval.

    Args:
        values: Independent, each symmetric about the same centre.
        confidence: The least probability that the interval holds the centre.

    Raises:
        ValueError: If there are too few values for that confidence.
    """
    array = np.asarray(values, dtype=np.float64)
    outside = _ranks_outside(len(array), confidence)
    if outside < 0:
        raise ValueError(f"{len(array)} values give no interval of {confidence:.0%} confidence")
    first, second = np.triu_indices(len(array))
    means = np.sort((array[first] + array[second]) / 2)
    return float(np.median(means)), float(means[outside]), float(means[-1 - outside])


@lru_cache
def _ranks_outside(count: int, confidence: float) -> int:
    """The pairwise means to leave out at each end: the largest t with P(T <= t - 1) small enough.

    T is the sum of the ranks with a positive sign, each sign a fair coin: its distribution is the
    product of ``(1 + x ** rank) / 2`` over all ranks. -1 if not even P(T <= 0) is small enough.
    """
    probability = np.zeros(count * (count + 1) // 2 + 1)
    probability[0] = 1.0
    for rank in range(1, count + 1):
        shifted = np.zeros_like(probability)
        shifted[rank:] = probability[:-rank]
        probability = (probability + shifted) / 2
    tail = (1 - confidence) / 2
    return int(np.searchsorted(np.cumsum(probability), tail, side="right")) - 1


def _block(a: Run, b: Run, *, b_leads: bool) -> float:
    outer, inner = (b, a) if b_leads else (a, b)
    logs = [_log(run()) for run in (outer, inner, inner, outer)]
    inner_over_outer = (logs[1] + logs[2] - logs[0] - logs[3]) / 2
    return -inner_over_outer if b_leads else inner_over_outer


def _log(measured: float) -> float:
    if not (measured > 0 and math.isfinite(measured)):
        raise ValueError(f"a run returned {measured!r}, expected a positive number")
    return math.log(measured)


def _holds_one(interval: tuple[float, float]) -> bool:
    low, high = interval
    return low <= 1 <= high


def _ratio_text(ratio: float, interval: tuple[float, float]) -> str:
    return f"{ratio:.3f} [{interval[0]:.3f}, {interval[1]:.3f}]"
