"""How many ranks a run gets when nobody says so."""

from __future__ import annotations

from pathlib import Path

import pytest

from isthmus.spec.load import load
from isthmus.spec.run import RunSpec
from isthmus.train import start


def run_of(*sets: str) -> RunSpec:
    return load(RunSpec, None, sets).spec


@pytest.mark.parametrize(
    ("torch", "visible", "sets", "ranks"),
    [
        ("2.13.0+cpu", "0,1,2,3", [], 2),
        ("2.13.0", "0,1,2,3", [], 4),
        ("2.13.0", "0", [], 1),
        ("2.13.0", "", [], 2),
        ("2.13.0", "-1", [], 2),
        ("2.13.0", "0,1,2,3", ["train.device=cpu"], 2),
    ],
)
def test_one_rank_per_accelerator_that_torch_can_use(
    monkeypatch: pytest.MonkeyPatch, torch: str, visible: str, sets: list[str], ranks: int
) -> None:
    monkeypatch.setattr(start, "version", lambda package: torch)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert start._default_ranks(run_of(*sets)) == ranks


def test_a_bad_batch_is_said_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    from isthmus.errors import ConfigError

    with pytest.raises(ConfigError, match="does not divide"):
        start.train(load(RunSpec, None, ["train.global_batch_size=7"]), start.Request(ranks=2))
    assert list(tmp_path.iterdir()) == []
