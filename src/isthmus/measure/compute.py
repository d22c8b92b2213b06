"""Rate of dense arithmetic: fp32 matrix products on the CPU.

The product of two n x n matrices takes ``2 n^3`` operations. At n = 768 the three matrices take
7 MB: larger than the inner caches, small enough for a short measurement. The rate is what a model's
linear layers can reach at best. Imports torch; call it in a ``Worker``, since it sets torch's
number of threads.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from isthmus.lazy import torch
from isthmus.measure.timing import Sample


@dataclass(frozen=True)
class MatmulRate:
    """Operations per second by the number of threads."""

    num_threads: int
    size: int
    flops_per_s: Sample


def matmul_rates(
    num_threads: Sequence[int], *, size: int = 768, rounds: int = 5, round_s: float = 0.1
) -> list[MatmulRate]:
    """Measure fp32 matrix products with each number of threads, in turn, several times.

    Args:
        num_threads: Numbers of threads to try.
        size: Rows and columns of the matrices.
        rounds: How many times; one more goes before and is not counted.
        round_s: Least length of one.
    """
    before = torch.get_num_threads()
    generator = torch.Generator().manual_seed(0)
    left = torch.randn(size, size, generator=generator)
    right = torch.randn(size, size, generator=generator)
    rates: dict[int, list[float]] = {count: [] for count in num_threads}
    try:
        for _ in range(rounds + 1):
            for count, measured in rates.items():
                torch.set_num_threads(count)
                measured.append(_rate(left, right, round_s))
    finally:
        torch.set_num_threads(before)
    return [MatmulRate(count, size, Sample.of(found[1:])) for count, found in rates.items()]


def _rate(left: torch.Tensor, right: torch.Tensor, duration_s: float) -> float:
    out = torch.empty_like(left)
    torch.matmul(left, right, out=out)
    products, begin_s = 0, time.perf_counter()
    while (elapsed_s := time.perf_counter() - begin_s) < duration_s or not products:
        torch.matmul(left, right, out=out)
        products += 1
    return products * 2 * left.shape[0] ** 3 / elapsed_s
