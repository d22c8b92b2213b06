"""Model tests open transformers and torch's compiler, whose progress bars start a thread."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _no_progress_monitor(monkeypatch: pytest.MonkeyPatch) -> None:
    tqdm = pytest.importorskip("tqdm")
    monkeypatch.setattr(tqdm.tqdm, "monitor_interval", 0)
