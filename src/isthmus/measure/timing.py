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

How many blocks are enough depends on the noise, so ``compare_until`` goes on until the interval
is narrow or the time is up. Who looks again and again, and stops when an interval happens to be
narrow, is right less often than the interval says: at 95 %, about 93 % of the time in simulation.
So it looks seldom, at numbers of blocks that grow by a third, and its intervals are of 97 %; with
both, at least 95 % of them hold the true ratio when it stops, which a test holds it to.

Several processes that measure one thing together (the ranks of a group) compare with the same seed:
then they run the same variant at the same time.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from random import Random
from typing import Final

import numpy as np

MIN_BLOCKS: Final = 6
"""With fewer, no interval of signed ranks reaches 95 %: its most is 1 - 2 ** (1 - blocks)."""
SEQUENTIAL_CONFIDENCE: Final = 0.97
"""Of the intervals that are looked at until one is narrow, so that the last one is of 95 %."""
_LOOK_GROWTH: Final = 4 / 3
"""Blocks at one look over those at the look before."""
_MIN_SEQUENTIAL_BLOCKS: Final = 7
"""With fewer, no interval of signed ranks reaches 97 %."""

Run = Callable[[], float]
"""Does the work once and returns what it measured; positive, usually seconds."""
RunOfSeveral = Callable[[], Mapping[str, float]]
"""Does the work once and returns all that it measured, by name; always the same names."""


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
        difference: B minus A, in their unit: the centre over blocks, as of the log ratios.
        difference95: Its 95 % interval.
        a: A's measures in the blocks that judge.
        b: B's.
    """

    ratio: float
    interval95: tuple[float, float]
    control_ratio: float | None
    control_interval: tuple[float, float] | None
    blocks: int
    difference: float
    difference95: tuple[float, float]
    a: Sample
    b: Sample

    @property
    def differs(self) -> bool:
        """Whether 1 lies outside the interval, and inside the control's if there is one."""
        return not _holds_one(self.interval95) and self.sound

    @property
    def sound(self) -> bool:
        """Whether the control's interval holds 1 (a sound control fails once in twenty)."""
        return self.control_interval is None or _holds_one(self.control_interval)

    def at_most(self, limit: float) -> bool | None:
        """Whether B's measure is at most ``limit`` times A's; None if these blocks can't tell.

        It is only denied where the excess is also more than A's over itself.
        """
        if self.sound and self.interval95[1] <= limit:
            return True
        noise = self.control_interval[1] if self.control_interval else 1.0
        return False if self.sound and self.interval95[0] > max(limit, noise) else None

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
    (only,) = compare_each(
        lambda: {"": a()}, lambda: {"": b()}, blocks=blocks, control=control, seed=seed
    ).values()
    return only


def compare_each(
    a: RunOfSeveral,
    b: RunOfSeveral,
    *,
    blocks: int,
    control: bool = True,
    seed: int = 0,
    on_block: Callable[[int], None] = lambda done: None,
) -> dict[str, Comparison]:
    """As :func:`compare`, of several measures that are taken in the same runs.

    Args:
        a: The variant to compare with.
        b: The variant that is judged.
        blocks: Blocks of four runs; at least 6.
        control: Whether to compare A with itself, too.
        seed: Decides the orders within and of the blocks.
        on_block: Called after each block, and its control, with how many are done.

    Returns:
        A comparison for each measure, by its name.

    Raises:
        ValueError: As :func:`compare`.
    """
    if blocks < MIN_BLOCKS:
        raise ValueError(f"{blocks} blocks give no 95 % interval; use at least {MIN_BLOCKS}")
    runs = _Blocks(a, b, control=control, seed=seed)
    for done in runs:
        on_block(done)
        if done == blocks:
            break
    return runs.comparisons(0.95)


def compare_until(
    a: RunOfSeveral,
    b: RunOfSeveral,
    *,
    narrow: float = 0.02,
    time_s: float = 60.0,
    names: Collection[str] = (),
    control: bool = True,
    seed: int = 0,
    on_block: Callable[[int], None] = lambda done: None,
    agree: Callable[[bool], bool] = lambda stop: stop,
    clock: Callable[[], float] = time.monotonic,
) -> dict[str, Comparison]:
    """As :func:`compare_each`, until the intervals are narrow or the time is up.

    Args:
        a: The variant to compare with.
        b: The variant that is judged.
        narrow: Width of an interval that is enough, as a share of the ratio: 0.02 is +-1 %.
        time_s: When to stop in any case; 7 blocks are run however long they take.
        names: Measures that have to be narrow; all if none is named.
        control: Whether to compare A with itself, too. Its interval does not decide when to stop.
        seed: Decides the orders within and of the blocks.
        on_block: Called after each block, and its control, with how many are done.
        agree: Called after each block with whether this process would stop; returns what all do.
            Ranks that measure together let one of them decide: their clocks differ.
        clock: Seconds.

    Returns:
        A comparison for each measure, by its name; the intervals are of 95 %.

    Raises:
        ValueError: As :func:`compare`.
    """
    runs = _Blocks(a, b, control=control, seed=seed)
    give_up_at_s, look_at = clock() + time_s, _MIN_SEQUENTIAL_BLOCKS
    for done in runs:
        on_block(done)
        stop = done >= _MIN_SEQUENTIAL_BLOCKS and clock() >= give_up_at_s
        if done == look_at:
            look_at = math.ceil(look_at * _LOOK_GROWTH)
            stop = stop or all(runs.width(name) <= narrow for name in names or runs.names)
        if agree(stop):
            break
    return runs.comparisons(SEQUENTIAL_CONFIDENCE)


def ratio_of(
    log_ratios: Sequence[float], confidence: float = 0.95
) -> tuple[float, tuple[float, float]]:
    """Return the ratio and its interval from one log ratio a block.

    Raises:
        ValueError: If there are too few log ratios for that confidence: fewer than 6 for 95 %.
    """
    centre, low, high = signed_rank_interval(log_ratios, confidence)
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


@dataclass(frozen=True)
class _Block:
    """What the two runs of each variant in one block measured."""

    a: tuple[Mapping[str, float], Mapping[str, float]]
    b: tuple[Mapping[str, float], Mapping[str, float]]

    def log_ratio(self, name: str) -> float:
        a, b = (sum(math.log(run[name]) for run in runs) for runs in (self.a, self.b))
        return (b - a) / 2

    def difference(self, name: str) -> float:
        a, b = (sum(run[name] for run in runs) for runs in (self.a, self.b))
        return (b - a) / 2


class _Blocks:
    """Runs one block after another, for as long as it is asked for the next."""

    def __init__(self, a: RunOfSeveral, b: RunOfSeveral, *, control: bool, seed: int) -> None:
        self._random = Random(seed)
        self._judged: list[_Block] = []
        self._controls: list[_Block] = []
        self._pairs = [(a, b, self._judged)] + [(a, a, self._controls)] * control

    def __iter__(self) -> Iterator[int]:
        while True:
            for first, second, results in self._random.sample(self._pairs, len(self._pairs)):
                results.append(_block(first, second, b_leads=self._random.random() < 0.5))
            yield len(self._judged)

    @property
    def names(self) -> Collection[str]:
        return self._judged[0].a[0].keys()

    def width(self, name: str) -> float:
        """How wide the interval is now, as a share of its lower end."""
        _, (low, high) = ratio_of(
            [block.log_ratio(name) for block in self._judged], SEQUENTIAL_CONFIDENCE
        )
        return high / low - 1

    def comparisons(self, confidence: float) -> dict[str, Comparison]:
        return {
            name: _comparison(name, self._judged, self._controls, confidence) for name in self.names
        }


def _block(a: RunOfSeveral, b: RunOfSeveral, *, b_leads: bool) -> _Block:
    outer, inner = (b, a) if b_leads else (a, b)
    first, second, third, last = (_checked(run()) for run in (outer, inner, inner, outer))
    around, within = (first, last), (second, third)
    return _Block(within, around) if b_leads else _Block(around, within)


def _checked(measures: Mapping[str, float]) -> Mapping[str, float]:
    for measured in measures.values():
        if not (measured > 0 and math.isfinite(measured)):
            raise ValueError(f"a run returned {measured!r}, expected a positive number")
    return measures


def _comparison(
    name: str, judged: Sequence[_Block], controls: Sequence[_Block], confidence: float
) -> Comparison:
    ratio, interval95 = ratio_of([block.log_ratio(name) for block in judged], confidence)
    control = (
        ratio_of([block.log_ratio(name) for block in controls], confidence)
        if controls
        else (None, None)
    )
    centre, low, high = signed_rank_interval(
        [block.difference(name) for block in judged], confidence
    )
    return Comparison(
        ratio,
        interval95,
        *control,
        blocks=len(judged),
        difference=centre,
        difference95=(low, high),
        a=Sample.of([run[name] for block in judged for run in block.a]),
        b=Sample.of([run[name] for block in judged for run in block.b]),
    )


def _holds_one(interval: tuple[float, float]) -> bool:
    low, high = interval
    return low <= 1 <= high


def _ratio_text(ratio: float, interval: tuple[float, float]) -> str:
    return f"{ratio:.3f} [{interval[0]:.3f}, {interval[1]:.3f}]"
