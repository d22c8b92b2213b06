"""Small texts on disk, and the data made of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import isthmus.data.sources
from isthmus.data import TextData, open_data
from isthmus.spec.data import FilesData


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of this test count as written long ago, so that their dates are believed."""
    monkeypatch.setattr(isthmus.data.sources, "settled_before_ns", lambda: 2**63)


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """A directory of 40 text files of 100 to 1000 random letters."""
    draw = np.random.default_rng(7)
    folder = tmp_path / "corpus"
    folder.mkdir()
    for i in range(40):
        letters = draw.integers(97, 123, size=draw.integers(100, 1000), dtype=np.uint8)
        (folder / f"{i:02}.txt").write_bytes(letters.tobytes())
    return folder


@pytest.fixture
def open_corpus(corpus: Path, tmp_path: Path) -> Callable[..., TextData]:
    """Opens the corpus, with changes to its spec."""

    def open_it(*, seed: int = 3, **fields: Any) -> TextData:
        wanted: dict[str, Any] = {"paths": (str(corpus),), "sequence_length": 16, **fields}
        return open_data(FilesData(**wanted), cache_dir=tmp_path / "cache", seed=seed)

    return open_it
