"""Baselines: what counting bytes achieves, so that a loss means something.

A bigram predicts each byte from the one before, a trigram from the two before. Both are smoothed by
interpolated Witten-Bell (Witten & Bell, IEEE Trans. Information Theory 37(4), 1991; in the form of
Chen & Goodman, Harvard TR-10-98, eq. 16-17)::

    p(w | h) = (c(h w) + T(h) * p(w | h')) / (c(h) + T(h))

with c the counts in the training bytes, T(h) the number of distinct bytes seen after h, and h' the
context h without its first byte; below the unigram lies the uniform 1/256. A context never seen
has T(h) = 0 and takes p(w | h') as it is. Text begins after two NULs, the separator of documents.

Limits: bytes only. Counts take 256**3 cells (128 MiB); they stop after 256 MiB of training bytes,
far beyond what a trigram can learn from, and the result says how many were counted.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

_VOCAB: Final = 256
_PIECE_NBYTES: Final = 2**23
_MAX_TRAIN_NBYTES: Final = 256 * 2**20


class NgramBaselines(msgspec.Struct, frozen=True):
    """Cross-entropies on the validation bytes, in nats per byte."""

    unigram: float
    bigram: float
    trigram: float
    train_nbytes: int
    """Training bytes that were counted."""
    validation_nbytes: int


class WittenBell:
    """Smoothed probabilities of the next byte after 0, 1 or 2 bytes of context.

    Args:
        train: uint8 ``[n]``, the text to count.
    """

    def __init__(self, train: NDArray[np.uint8]) -> None:
        trigrams = np.zeros(_VOCAB**3, np.int64)
        for codes in _trigram_codes(train):
            trigrams += np.bincount(codes, minlength=len(trigrams))
        # Every byte ends one trigram (text begins after two NULs), so the sums over the first byte
        # are the counts of bigrams, and of unigrams.
        bigrams = trigrams.reshape(_VOCAB, -1).sum(axis=0)
        unigrams = bigrams.reshape(_VOCAB, -1).sum(axis=0)
        # counts[k][context, byte], where the context has k bytes.
        self._counts = [counts.reshape(-1, _VOCAB) for counts in (unigrams, bigrams, trigrams)]
        self._totals = [counts.sum(axis=1) for counts in self._counts]
        self._distinct = [np.count_nonzero(counts, axis=1) for counts in self._counts]

    def probabilities(self, codes: NDArray[np.int64], *, order: int) -> NDArray[np.float64]:
        """p(byte | the ``order - 1`` bytes before), elementwise.

        Args:
            codes: Trigrams ``(second to last * 256 + last) * 256 + byte``.
            order: 1 for the unigram, 2 for the bigram, 3 for the trigram.
        """
        contexts, following = np.divmod(codes, _VOCAB)
        p = np.full(codes.shape, 1 / _VOCAB)
        for k in range(order):
            context = contexts % _VOCAB**k
            distinct = self._distinct[k][context]
            weight = self._totals[k][context] + distinct
            smoothed = self._counts[k][context, following] + distinct * p
            p = np.where(weight > 0, smoothed / np.maximum(weight, 1), p)
        return p

    def cross_entropy(self, text: NDArray[np.uint8], *, order: int) -> float:
        """Mean of ``-ln p`` over a text, in nats per byte."""
        surprise = sum(
            -np.log(self.probabilities(codes, order=order)).sum() for codes in _trigram_codes(text)
        )
        return float(surprise / len(text))


def ngram_baselines(train: NDArray[np.uint8], validation: NDArray[np.uint8]) -> NgramBaselines:
    """Unigram, bigram and trigram cross-entropy of the validation bytes, in nats per byte."""
    train = train[:_MAX_TRAIN_NBYTES]
    model = WittenBell(train)
    unigram, bigram, trigram = (model.cross_entropy(validation, order=k) for k in (1, 2, 3))
    return NgramBaselines(unigram, bigram, trigram, len(train), len(validation))


def _trigram_codes(text: NDArray[np.uint8]) -> Iterator[NDArray[np.int64]]:
    """Of each byte, the trigram that ends with it, a piece of the text at a time."""
    for start in range(0, len(text), _PIECE_NBYTES):
        with_context = text[max(0, start - 2) : start + _PIECE_NBYTES].astype(np.int64)
        if start == 0:
            with_context = np.concatenate([np.zeros(2, np.int64), with_context])
        yield (with_context[:-2] * _VOCAB + with_context[1:-1]) * _VOCAB + with_context[2:]
