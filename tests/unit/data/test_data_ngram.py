"""N-gram baselines equal a brute-force reading of the formula, and are probabilities."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import isthmus.data.ngram
from isthmus.data import open_data
from isthmus.data.ngram import WittenBell, ngram_baselines
from isthmus.spec.data import StdlibData

TEXTS = st.lists(st.sampled_from(b"ab\0\xff"), min_size=1, max_size=60).map(bytes)


def as_array(text: bytes) -> np.ndarray:
    return np.frombuffer(text, np.uint8)


def brute_force(train: bytes, context: bytes, byte: int) -> float:
    """The formula of the module's docstring, word for word."""
    shorter = brute_force(train, context[1:], byte) if context else 1 / 256
    padded = b"\0\0" + train
    k = len(context)
    followers = [padded[i] for i in range(2, len(padded)) if padded[i - k : i] == context]
    if not followers:
        return shorter
    distinct = len(set(followers))
    return (followers.count(byte) + distinct * shorter) / (len(followers) + distinct)


def brute_force_cross_entropy(train: bytes, text: bytes, order: int) -> float:
    padded = b"\0\0" + text
    surprise = 0.0
    for i in range(2, len(padded)):
        surprise -= math.log(brute_force(train, padded[i - order + 1 : i], padded[i]))
    return surprise / len(text)


@settings(max_examples=20)
@given(train=TEXTS, text=TEXTS)
def test_equals_brute_force(train: bytes, text: bytes) -> None:
    baselines = ngram_baselines(as_array(train), as_array(text))
    expected = [brute_force_cross_entropy(train, text, order) for order in (1, 2, 3)]
    assert [baselines.unigram, baselines.bigram, baselines.trigram] == pytest.approx(expected)
    assert (baselines.train_nbytes, baselines.validation_nbytes) == (len(train), len(text))


@pytest.mark.parametrize("order", [1, 2, 3])
def test_probabilities_sum_to_one_after_any_context(order: int) -> None:
    draw = np.random.default_rng(0)
    model = WittenBell(draw.integers(90, 120, size=5000, dtype=np.uint8))
    seen, unseen, half_seen = 100 * 256 + 101, 3 * 256 + 4, 3 * 256 + 100
    for context in (0, seen, unseen, half_seen):
        p = model.probabilities(context * 256 + np.arange(256), order=order)
        assert p.sum() == pytest.approx(1)
        assert p.min() > 0


def test_pieces_do_not_change_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = np.random.default_rng(1)
    train, text = draw.integers(0, 4, size=(2, 1000), dtype=np.uint8)
    whole = ngram_baselines(train, text)
    monkeypatch.setattr(isthmus.data.ngram, "_PIECE_NBYTES", 333)
    pieces = ngram_baselines(train, text)
    assert [pieces.unigram, pieces.bigram, pieces.trigram] == pytest.approx(
        [whole.unigram, whole.bigram, whole.trigram]
    )


def test_says_how_much_was_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isthmus.data.ngram, "_MAX_TRAIN_NBYTES", 10)
    text = as_array(b"abcabcabcabcabcabc")
    assert ngram_baselines(text, text) == ngram_baselines(text[:10], text)
    assert ngram_baselines(text, text).train_nbytes == 10


def test_values_on_the_standard_library(tmp_path: Path) -> None:
    """Python source has about 2.4 nats per byte to a bigram, 1.8 to a trigram."""
    baselines = open_data(StdlibData(), cache_dir=tmp_path, seed=0).baselines()
    assert baselines is not None
    assert 3.0 < baselines.unigram < 3.4
    assert 2.2 < baselines.bigram < 2.6
    assert 1.6 < baselines.trigram < 1.95
