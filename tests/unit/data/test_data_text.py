"""Batches: the same samples in the same order, however many ranks there are."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.data import Batch, TextData
from isthmus.data.cache import PreparedData
from isthmus.data.manifest import Manifest, Split, SplitFile
from isthmus.errors import ConfigError, DataError

Opener = Callable[..., TextData]


def counting_data(num_tokens: int, sequence_length: int, seed: int = 0) -> TextData:
    """Data whose token at place p is p, so that a sample tells where it was read."""
    files: dict[Split, SplitFile] = {
        "train": SplitFile(num_tokens, num_tokens, num_tokens * 4, ""),
        "validation": SplitFile(num_tokens, num_tokens * 3, num_tokens * 4, ""),
    }
    manifest = Manifest("numbers", "numbers", "", 2**32, "uint32", 0, files, ())
    tokens = np.arange(num_tokens, dtype=np.uint32)
    prepared = PreparedData(Path(), manifest, {"train": tokens, "validation": tokens})
    return TextData(prepared, sequence_length=sequence_length, seed=seed)


def joined(batches: list[Batch]) -> Batch:
    return Batch(torch.cat([b.tokens for b in batches]), torch.cat([b.targets for b in batches]))


def sample_numbers(data: TextData, batch: Batch) -> list[int]:
    """Which samples of ``counting_data`` a batch has."""
    assert torch.all(batch.tokens[:, 0] % data.sequence_length == 0)
    return (batch.tokens[:, 0] // data.sequence_length).tolist()


def test_shapes_types_and_targets(open_corpus: Opener) -> None:
    data = open_corpus()
    tokens, targets = data.batch(2, global_batch_size=6, rank=1, world_size=2)
    assert tokens.shape == targets.shape == (3, 16)
    assert tokens.dtype == targets.dtype == torch.int64
    assert tokens.is_contiguous()
    assert targets.is_contiguous()
    assert torch.equal(tokens[:, 1:], targets[:, :-1])


@given(num_tokens=st.integers(2, 400), length=st.integers(1, 40))
def test_windows_tile_the_tokens_with_one_more_as_target(num_tokens: int, length: int) -> None:
    if num_tokens <= length:
        with pytest.raises(DataError, match="less than one sample"):
            counting_data(num_tokens, length)
        return
    data = counting_data(num_tokens, length)
    epoch = data.samples(0, data.num_samples)
    in_order = torch.argsort(epoch.tokens[:, 0])
    used = data.num_samples * length
    assert torch.equal(epoch.tokens[in_order].flatten(), torch.arange(used))
    assert torch.equal(epoch.targets[in_order].flatten(), torch.arange(1, used + 1))
    assert num_tokens - length <= used + 1 <= num_tokens + length


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("step", [0, 1, 7, 50])
def test_ranks_together_see_the_same_global_batch(
    open_corpus: Opener, world_size: int, step: int
) -> None:
    data = open_corpus()
    alone = data.batch(step, global_batch_size=12)
    parts = [
        data.batch(step, global_batch_size=12, rank=rank, world_size=world_size)
        for rank in range(world_size)
    ]
    together = joined(parts)
    assert torch.equal(together.tokens, alone.tokens)
    assert torch.equal(together.targets, alone.targets)


@given(seed=st.integers(0, 100), batch_size=st.integers(1, 10), start=st.integers(0, 100))
def test_steps_are_consecutive_samples(seed: int, batch_size: int, start: int) -> None:
    data = counting_data(80, 8, seed=seed)
    batch_size = min(batch_size, data.num_samples)
    steps = [data.batch(start + i, global_batch_size=batch_size) for i in range(5)]
    first = start * batch_size
    whole = data.samples(first, first + 5 * batch_size)
    assert torch.equal(joined(steps).tokens, whole.tokens)


@given(seed=st.integers(0, 2**63 - 1), epoch=st.integers(0, 10**6))
def test_every_epoch_has_every_sample_once(seed: int, epoch: int) -> None:
    data = counting_data(200, 8, seed=seed)
    first = epoch * data.num_samples
    seen = sample_numbers(data, data.samples(first, first + data.num_samples))
    assert sorted(seen) == list(range(data.num_samples))
    assert data.epoch_of(first) == epoch
    assert data.epoch_of(first + data.num_samples - 1) == epoch


def test_orders_differ_by_epoch_and_seed_only() -> None:
    data, again = counting_data(2000, 8, seed=1), counting_data(2000, 8, seed=1)
    other = counting_data(2000, 8, seed=2)
    n = data.num_samples
    epochs = [sample_numbers(data, data.samples(e * n, (e + 1) * n)) for e in range(3)]
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert sample_numbers(again, again.samples(n, 2 * n)) == epochs[1]
    assert sample_numbers(other, other.samples(0, n)) != epochs[0]


def test_no_samples_is_an_empty_batch() -> None:
    assert counting_data(80, 8).samples(5, 5).tokens.shape == (0, 8)


@pytest.mark.parametrize(("batch", "world_size"), [(5, 2), (0, 1), (-4, 2), (4, 0), (2, 4)])
def test_a_batch_that_does_not_divide_is_refused(
    open_corpus: Opener, batch: int, world_size: int
) -> None:
    with pytest.raises(ConfigError, match="can't be divided"):
        open_corpus().batch(0, global_batch_size=batch, world_size=world_size)


def test_a_batch_larger_than_the_data_is_refused(open_corpus: Opener) -> None:
    data = open_corpus()
    data.batch(0, global_batch_size=data.num_samples)
    with pytest.raises(DataError, match=rf"{data.num_samples} training samples of 16 tokens"):
        data.check_batch(data.num_samples + 1, 1)


def test_a_rank_that_is_not_there_is_refused(open_corpus: Opener) -> None:
    with pytest.raises(ConfigError, match="rank 2 is not among 2"):
        open_corpus().batch(0, global_batch_size=4, rank=2, world_size=2)


@settings(max_examples=60)
@given(
    num_samples=st.integers(1, 60),
    max_samples=st.integers(1, 80),
    world_size=st.integers(1, 7),
    batch_size=st.integers(1, 9),
)
def test_validation_parts_are_exactly_the_whole(
    num_samples: int, max_samples: int, world_size: int, batch_size: int
) -> None:
    data = counting_data(num_samples * 4 + 1, 4)

    def numbers(rank: int, world_size: int) -> list[int]:
        batches = data.validation_batches(
            batch_size=batch_size, max_samples=max_samples, rank=rank, world_size=world_size
        )
        return [number for batch in batches for number in sample_numbers(data, batch)]

    whole = numbers(0, 1)
    parts = [numbers(rank, world_size) for rank in range(world_size)]
    assert [number for part in parts for number in part] == whole
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    assert len(whole) == len(set(whole)) == min(num_samples, max_samples)
    gaps = np.diff([*whole, num_samples + whole[0]])
    assert gaps.max() - gaps.min() <= 1  # evenly spread


def test_validation_batches_have_no_more_than_asked_for(open_corpus: Opener) -> None:
    data = open_corpus()
    sizes = [len(b.tokens) for b in data.validation_batches(batch_size=4, max_samples=10)]
    assert sizes == [4, 4, 2]


def test_training_and_validation_share_no_text(open_corpus: Opener) -> None:
    data = open_corpus()
    train = data.samples(0, data.num_samples).tokens
    for batch in data.validation_batches(batch_size=8, max_samples=10**6):
        equal = (batch.tokens[:, None] == train[None]).all(dim=-1)
        assert not equal.any()


def test_bits_per_byte_counts_bytes_not_tokens(open_corpus: Opener) -> None:
    numbers = counting_data(100, 8)  # each token stands for three bytes
    assert numbers.nats_per_byte(6.0) == pytest.approx(2.0)
    assert numbers.bits_per_byte(6.0) == pytest.approx(2.0 / math.log(2))
    assert open_corpus().nats_per_byte(1.5) == 1.5


def test_baselines_are_kept(open_corpus: Opener) -> None:
    data = open_corpus()
    first = data.baselines()
    assert first is not None
    kept = data.path / "ngram.json"
    kept.write_text(kept.read_text().replace(str(first.bigram), "1.25"))
    again = open_corpus().baselines()
    assert again is not None
    assert again.bigram == 1.25
    kept.write_text("{")
    assert open_corpus().baselines() == first


def test_other_tokens_than_bytes_have_no_baselines() -> None:
    assert counting_data(100, 8).baselines() is None
