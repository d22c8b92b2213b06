"""Whether a run can begin, looked at before anything of it is written. No torch.

The data are prepared here, once for all ranks of this host, so that what is wrong with them is said
by one process and not by all.
"""

from __future__ import annotations

import os
from pathlib import Path

from isthmus.data import TextData, open_data
from isthmus.errors import ConfigError
from isthmus.spec.run import RunSpec


def check_layout(spec: RunSpec, num_ranks: int) -> None:
    """Whether the batch and the mesh can be laid out on so many ranks.

    Raises:
        ConfigError: They can't.
    """
    if num_ranks < 1:
        raise ConfigError(f"{num_ranks} ranks asked for", hint="ask for at least 1: --ranks 1")
    spec.train.accumulation_steps(num_ranks)
    spec.parallel.num_replicas(num_ranks)


def open_checked_data(spec: RunSpec, num_ranks: int) -> TextData:
    """Opens the data, prepares them if need be, and holds them to what the run asks of them.

    Raises:
        DataError: They are missing, empty, or fewer than one batch.
        ConfigError: They have more tokens than the model's vocabulary.
    """
    data = open_data(spec.data, cache_dir=cache_directory(), seed=spec.seed)
    data.check_batch(spec.train.global_batch_size, num_ranks)
    if data.vocab_size > spec.model.vocab_size:
        raise ConfigError(
            f"the tokenizer has {data.vocab_size} tokens, but model.vocab_size = "
            f"{spec.model.vocab_size}",
            hint=f"set model.vocab_size = {data.vocab_size}",
        )
    return data


def cache_directory() -> Path:
    """Where prepared data are kept: ``ISTHMUS_CACHE``, else the user's cache directory."""
    chosen = os.environ.get("ISTHMUS_CACHE")
    if chosen:
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "isthmus"
