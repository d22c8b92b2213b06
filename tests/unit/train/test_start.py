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


GLOO = "[/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] Connection closed"


def test_what_is_said_is_shown_as_it_is(capfd: pytest.CaptureFixture[str]) -> None:
    err = start._stderr()
    for text in (GLOO, "[/b]", "runs/[red]x[/red]", "☃"):
        err.print(text, soft_wrap=True)
        start._printer(err, 2)(1, "stderr", f"{text}\n")
    shown = capfd.readouterr().err.splitlines()
    assert shown[:2] == [GLOO, f"[rank 1] {GLOO}"]
    assert "runs/[red]x[/red]" in shown


def test_a_reader_that_went_away_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with open("/dev/full", "w") as full:
        monkeypatch.setattr("sys.stderr", full)
        start._stderr().print("x" * 100_000)
