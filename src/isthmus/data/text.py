"""Batches of prepared text, by step and rank.

The tokens of the training split are cut into ``num_samples`` windows of ``sequence_length`` tokens,
each with the token that follows it as its last target; windows don't overlap, and what is left
after the last one is not used. The position in the data is one number, the *global sample index*:
index i is the sample at place ``i % num_samples`` of the order of epoch ``i // num_samples``. Step
s takes the indices ``[s * B, (s + 1) * B)``, and each rank a contiguous part of these, so the ranks
together see the same samples in the same order however many they are.

Shapes: B is the global batch, b the part of one rank, T the sequence length.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from isthmus.data.cache import PreparedData, prepare
from isthmus.data.encode import encoder_for
from isthmus.data.files import write_atomically
from isthmus.data.huggingface import HuggingFaceSource
from isthmus.data.manifest import Manifest, Split
from isthmus.data.ngram import NgramBaselines, ngram_baselines
from isthmus.data.order import Permutation
from isthmus.data.sources import Source, files_source, stdlib_source
from isthmus.errors import ConfigError, DataError
from isthmus.lazy import torch
from isthmus.spec.data import BYTES, DataSpec, FilesData, StdlibData


class Batch(NamedTuple):
    """Tokens and what follows each of them, both int64 ``[b, T]``."""

    tokens: torch.Tensor
    targets: torch.Tensor


class TextData:
    """Prepared text as samples of a fixed length, in an order that a seed decides.

    Args:
        prepared: The tokens.
        sequence_length: T, tokens of a sample.
        seed: Decides the order of the training samples, and nothing else.

    Raises:
        DataError: A split has not one whole sample.
    """

    def __init__(self, prepared: PreparedData, *, sequence_length: int, seed: int) -> None:
        self.manifest: Manifest = prepared.manifest
        self.path = prepared.path
        self.sequence_length = sequence_length
        self.seed = seed
        self._tokens = prepared.tokens
        self._window = np.arange(sequence_length + 1)
        self.num_samples = self._count_samples("train")
        self.num_validation_samples = self._count_samples("validation")

    @property
    def digest(self) -> str:
        """Name of the data by content; equal on every rank, or they train on different texts."""
        return self.manifest.digest

    @property
    def vocab_size(self) -> int:
        """Number of distinct tokens."""
        return self.manifest.vocab_size

    def epoch_of(self, index: int) -> int:
        """The epoch, from 0, that a global sample index lies in."""
        return index // self.num_samples

    def check_batch(self, global_batch_size: int, world_size: int) -> None:
        """Says whether this batch can be drawn from these data by so many ranks.

        Raises:
            ConfigError: The batch can't be divided equally.
            DataError: The training split has fewer samples than one batch.
        """
        if world_size < 1 or global_batch_size < 1 or global_batch_size % world_size:
            raise ConfigError(
                f"a global batch of {global_batch_size} samples can't be divided equally "
                f"among {world_size} ranks",
                hint="choose a global batch size that is a multiple of the number of ranks",
            )
        if global_batch_size > self.num_samples:
            raise DataError(
                f"a global batch of {global_batch_size} samples is more than the data have: "
                f"{self.num_samples} training samples of {self.sequence_length} tokens",
                hint="give more text, or a smaller batch or sequence_length",
            )

    def batch(
        self, step: int, *, global_batch_size: int, rank: int = 0, world_size: int = 1
    ) -> Batch:
        """The part of a step's global batch that belongs to a rank.

        Args:
            step: Steps done before this one, with this global batch size.
            global_batch_size: B, samples over all ranks.
            rank: This rank takes the samples ``[rank * b, (rank + 1) * b)`` of the batch.
            world_size: Number of ranks; must divide B.

        Raises:
            ConfigError, DataError: As :meth:`check_batch`.
        """
        self.check_batch(global_batch_size, world_size)
        if not 0 <= rank < world_size:
            raise ConfigError(f"rank {rank} is not among {world_size} ranks")
        size = global_batch_size // world_size
        start = step * global_batch_size + rank * size
        return self.samples(start, start + size)

    def samples(self, start: int, stop: int) -> Batch:
        """The training samples with global indices ``[start, stop)``, in their order."""
        parts = [np.empty(0, np.int64)]
        while start < stop:
            epoch, place = divmod(start, self.num_samples)
            end = min(stop, (epoch + 1) * self.num_samples)
            order = _order_of(self.num_samples, self.seed, epoch)
            parts.append(order(np.arange(place, place + end - start)))
            start = end
        return self._read("train", np.concatenate(parts))

    def validation_batches(
        self, *, batch_size: int, max_samples: int, rank: int = 0, world_size: int = 1
    ) -> Iterator[Batch]:
        """A rank's part of a fixed set of samples, spread evenly over the validation split.

        The ranks' parts differ by at most one sample and together are exactly the set, so losses
        must be summed over ranks and divided by the summed count. A rank may have no sample.

        Args:
            batch_size: Samples in a batch; the last may have fewer.
            max_samples: The set's size, if the split has so many.
            rank: Which part.
            world_size: Number of parts.
        """
        total = min(max_samples, self.num_validation_samples)
        mine = np.arange(total * rank // world_size, total * (rank + 1) // world_size)
        chosen = mine * self.num_validation_samples // total
        for first in range(0, len(chosen), batch_size):
            yield self._read("validation", chosen[first : first + batch_size])

    def bits_per_byte(self, nats_per_token: float) -> float:
        """A validation loss as bits per byte of text, whatever the tokenizer."""
        return self.nats_per_byte(nats_per_token) / math.log(2)

    def nats_per_byte(self, nats_per_token: float) -> float:
        """A validation loss as nats per byte of text (a separator counts as one byte)."""
        validation = self.manifest.files["validation"]
        return nats_per_token * validation.tokens / validation.text_nbytes

    def baselines(self) -> NgramBaselines | None:
        """What n-grams achieve on the validation bytes; None unless tokens are bytes.

        Computed once (seconds), then kept beside the prepared data.
        """
        if self.manifest.tokenizer != BYTES:
            return None
        cached = self.path / "ngram.json"
        try:
            return msgspec.json.decode(cached.read_bytes(), type=NgramBaselines)
        except (OSError, msgspec.DecodeError):
            pass
        baselines = ngram_baselines(self._tokens["train"], self._tokens["validation"])
        # A cache that others own may be read-only: then the next run computes them again.
        if os.access(self.path, os.W_OK):
            write_atomically(cached, msgspec.json.encode(baselines))
        return baselines

    def _count_samples(self, split: Split) -> int:
        num_tokens = len(self._tokens[split])
        count = (num_tokens - 1) // self.sequence_length
        if count < 1:
            raise DataError(
                f"the {split} split has {num_tokens} tokens, less than one sample of "
                f"{self.sequence_length} tokens and the one that follows",
                hint="give more text, a smaller sequence_length, or a larger validation_fraction",
            )
        return count

    def _read(self, split: Split, samples: NDArray[np.int64]) -> Batch:
        places = samples[:, None] * self.sequence_length + self._window
        windows = torch.from_numpy(self._tokens[split][places].astype(np.int64))
        return Batch(windows[:, :-1].contiguous(), windows[:, 1:].contiguous())


@lru_cache(maxsize=16)
def _order_of(num_samples: int, seed: int, epoch: int) -> Permutation:
    return Permutation(num_samples, seed=seed, epoch=epoch)


def open_data(spec: DataSpec, *, cache_dir: Path, seed: int) -> TextData:
    """Opens the text that a spec declares; prepares it first if that was not yet done.

    Args:
        spec: What to train on.
        cache_dir: Where prepared data are kept, for any number of runs.
        seed: Decides the order of the training samples.

    Raises:
        DataError: The text is missing, empty, too short or can't be read, or the disk is full.
        ConfigError: A tokenizer or an extra that the spec needs is missing.
    """
    prepared = prepare(_source_for(spec, cache_dir), encoder_for(spec), cache_dir)
    return TextData(prepared, sequence_length=spec.sequence_length, seed=seed)


def _source_for(spec: DataSpec, cache_dir: Path) -> Source:
    if isinstance(spec, StdlibData):
        return stdlib_source(spec)
    if isinstance(spec, FilesData):
        return files_source(spec, cache_dir=cache_dir)
    return HuggingFaceSource(spec)
