"""The order of samples: a keyed permutation that needs no memory.

``Permutation(n, seed=..., epoch=...)`` maps a position in an epoch to a sample. It is computed, not
stored, so any rank finds the sample of any position in constant time and memory, and a run that
starts again in the middle of an epoch has nothing to replay. The arithmetic is written out here, so
that the order can't change with a version of numpy; a test pins it.

The construction is the generalised Feistel network of Black & Rogaway, "Ciphers with Arbitrary
Finite Domains" (CT-RSA 2002), section 5: write ``x = left * b + right`` with ``a * b >= n`` and
``a`` near ``sqrt(n)``, add in turn a keyed hash of one half to the other, and walk on while the
result is not below n. As ``a * b < n + sqrt(n) + 1``, few positions walk at all. The hash is the
finaliser of SplitMix64 (Steele, Lea & Flood, OOPSLA 2014). It shuffles well; it keeps no secrets.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np
from numpy.typing import NDArray

_NUM_ROUNDS: Final = 6
_MASK: Final = 2**64 - 1
_GOLDEN_RATIO: Final = 0x9E3779B97F4A7C15
_FACTOR_1: Final = 0xBF58476D1CE4E5B9
_FACTOR_2: Final = 0x94D049BB133111EB


class Permutation:
    """A bijection of ``range(n)``, chosen by a seed and an epoch.

    Args:
        n: Size of the domain, at least 1.
        seed: Any integer; its low 64 bits count.
        epoch: Each epoch has another order.
    """

    def __init__(self, n: int, *, seed: int, epoch: int = 0) -> None:
        if n < 1:
            raise ValueError(f"a permutation needs at least one element; got {n}")
        self.n = n
        rows = math.isqrt(n - 1) + 1
        self._num_rows = np.uint64(rows)
        self._num_columns = np.uint64(-(-n // rows))
        key = mix(mix(seed & _MASK) ^ (epoch & _MASK))
        self._round_keys = [np.uint64(mix(key + i)) for i in range(_NUM_ROUNDS)]

    def __call__(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """The samples at these positions; both are in ``range(n)``, with the same shape."""
        samples = self._encipher(positions.astype(np.uint64))
        outside = np.flatnonzero(samples >= self.n)
        while outside.size:
            samples[outside] = self._encipher(samples[outside])
            outside = outside[samples[outside] >= self.n]
        return samples.astype(np.int64)

    def _encipher(self, x: NDArray[np.uint64]) -> NDArray[np.uint64]:
        left, right = np.divmod(x, self._num_columns)
        for i, key in enumerate(self._round_keys):
            if i % 2:
                right = (right + _mix_array(left ^ key)) % self._num_columns
            else:
                left = (left + _mix_array(right ^ key)) % self._num_rows
        return left * self._num_columns + right


def mix(x: int) -> int:
    """One output of SplitMix64 whose state was ``x``: 64 well-mixed bits."""
    x = (x + _GOLDEN_RATIO) & _MASK
    x = ((x ^ (x >> 30)) * _FACTOR_1) & _MASK
    x = ((x ^ (x >> 27)) * _FACTOR_2) & _MASK
    return x ^ (x >> 31)


def _mix_array(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """:func:`mix` of each element, less one bit so that adding to it can't overflow."""
    x = x + np.uint64(_GOLDEN_RATIO)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(_FACTOR_1)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(_FACTOR_2)
    return (x ^ (x >> np.uint64(31))) >> np.uint64(1)
