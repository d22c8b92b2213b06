"""The loop on real ranks: the same batch gives the same losses, however many ranks share it."""

from __future__ import annotations

import math
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from isthmus.data import Batch, TextData
from isthmus.elastic.environment import RankEnvironment
from isthmus.elastic.signals import StopRequest
from isthmus.errors import Interrupted, IsthmusError
from isthmus.observe.events import Step
from isthmus.observe.log import EventLog, read_events
from isthmus.spec.load import load
from isthmus.spec.run import RunSpec
from isthmus.train.assembly import assembled
from isthmus.train.run_directory import RunDirectory
from isthmus.train.trainer import IGNORED, Trainer

SMALL = [
    "model.num_layers=2",
    "model.hidden_size=64",
    "model.intermediate_size=128",
    "data.sequence_length=32",
    "train.steps=20",
    "train.global_batch_size=8",
    "train.validate_every_steps=0",
    "train.validation_samples=16",
    "checkpoint.every_steps=0",
    "optimizer.schedule.warmup_steps=3",
]


def environment_of(rank: int, world_size: int) -> RankEnvironment:
    return RankEnvironment(
        rank=rank,
        world_size=world_size,
        local_rank=rank,
        local_world_size=world_size,
        master_addr="127.0.0.1",
        master_port=None,
        launcher="single",
        attempt="test",
    )


def train(
    rank: int,
    world_size: int,
    *,
    text: str,
    directory: str,
    sets: list[str],
    stop_after: int | None = None,
    masked: bool = False,
) -> dict[str, Any]:
    """Trains in a directory and says what the steps' events say."""
    torch.set_num_threads(1)
    spec = load(
        RunSpec,
        None,
        [
            *SMALL,
            f'data={{kind="files", paths=["{text}"], split="tail", sequence_length=32}}',
            *sets,
        ],
    ).spec
    run = RunDirectory(Path(directory))
    environment = environment_of(rank, world_size)
    log_path = run.events(rank)
    with EventLog(log_path) as log, StopRequest() as stop:
        device = torch.device("cpu")
        os.environ["ISTHMUS_CACHE"] = str(Path(directory).parent / "cache")
        with assembled(spec, run, environment, device, log) as parts:
            if masked:
                mask_some_targets(parts.data)
            trainer = Trainer(spec, parts, environment, stop)
            trainer.resume()
            started_at = trainer.progress.step
            interrupted = False
            try:
                trainer.run(
                    lambda step: (
                        os.kill(os.getpid(), 15)
                        if step == stop_after and rank == world_size - 1
                        else None
                    )
                )
            except Interrupted:
                interrupted = True
            draws = [random.random(), float(np.random.rand()), float(torch.rand(()))]
            last = trainer.progress.step
    steps = [event for event in read_events(log_path).events if isinstance(event, Step)]
    return {
        "losses": {event.step: event.loss_nats for event in steps},
        "tokens": [event.tokens for event in steps],
        "sent": [event.sent_nbytes for event in steps],
        "started_at": started_at,
        "last": last,
        "interrupted": interrupted,
        "draws": draws,
    }


def mask_some_targets(data: TextData) -> None:
    """Ignores more targets of early samples than of late ones, so that ranks have unequal work."""
    whole = data.samples

    def masked(start: int, stop: int) -> Batch:
        tokens, targets = whole(start, stop)
        targets = targets.clone()
        for row, index in enumerate(range(start, stop)):
            targets[row, : (index * 7) % 31] = IGNORED
        return Batch(tokens, targets)

    data.samples = masked  # type: ignore[method-assign]


@pytest.fixture
def text(tmp_path: Path) -> str:
    """Real text: a few modules of the standard library."""
    folder = tmp_path / "text"
    folder.mkdir()
    source = Path(os.__file__).parent
    for name in (
        "argparse",
        "ast",
        "calendar",
        "configparser",
        "dataclasses",
        "difflib",
        "inspect",
        "typing",
        "tarfile",
        "subprocess",
    ):
        (folder / f"{name}.py").write_bytes((source / f"{name}.py").read_bytes())
    return str(folder)


def losses(results: list[dict[str, Any]]) -> list[float]:
    for other in results[1:]:
        assert other["losses"] == results[0]["losses"]
    return list(results[0]["losses"].values())


@pytest.mark.process
@pytest.mark.parametrize("masked", [False, True], ids=["all targets", "unequal targets"])
def test_ranks_and_micro_batches_do_not_change_the_losses(
    ranks, tmp_path: Path, text: str, masked: bool
) -> None:
    runs = {}
    for world_size, micro in [(1, 8), (1, 2), (2, 4), (2, 2), (4, 2)]:
        directory = str(tmp_path / f"{world_size}x{micro}")
        sets = [f"train.micro_batch_size={micro}"]
        results = ranks.run(
            train, world_size, text=text, directory=directory, sets=sets, masked=masked
        )
        runs[world_size, micro] = losses(results)
        assert results[0]["tokens"] == pytest.approx([256] * 20) or masked
    alone = runs.pop((1, 8))
    assert len(alone) == 20
    assert alone[-1] < alone[0]
    for those in runs.values():
        assert those == pytest.approx(alone, rel=1e-5)


@pytest.mark.process
def test_the_same_run_twice_is_bit_identical(ranks, tmp_path: Path, text: str) -> None:
    first, second = (
        losses(ranks.run(train, 2, text=text, directory=str(tmp_path / name), sets=[]))
        for name in ("a", "b")
    )
    assert first == second


@pytest.mark.process
def test_a_stopped_run_goes_on_as_if_it_had_not_been(ranks, tmp_path: Path, text: str) -> None:
    whole = ranks.run(train, 2, text=text, directory=str(tmp_path / "whole"), sets=[])
    part = ranks.run(train, 2, text=text, directory=str(tmp_path / "part"), sets=[], stop_after=7)
    assert [each["interrupted"] for each in part] == [True, True]
    stopped_at = part[0]["last"]
    assert 7 <= stopped_at <= 9
    assert part[1]["last"] == stopped_at
    rest = ranks.run(train, 2, text=text, directory=str(tmp_path / "part"), sets=[])
    assert rest[0]["started_at"] == stopped_at
    assert losses(rest) == losses(whole)
    assert [each["draws"] for each in rest] == [each["draws"] for each in whole]
    assert rest[0]["draws"] != rest[1]["draws"]


@pytest.mark.process
@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 4)])
def test_a_run_goes_on_with_another_number_of_ranks(
    ranks, tmp_path: Path, text: str, before: int, after: int
) -> None:
    whole = losses(ranks.run(train, before, text=text, directory=str(tmp_path / "whole"), sets=[]))
    directory = str(tmp_path / "part")
    ranks.run(train, before, text=text, directory=directory, sets=[], stop_after=8)
    rest = ranks.run(train, after, text=text, directory=directory, sets=[])
    assert list(rest[0]["losses"].values()) == pytest.approx(whole, rel=1e-5)


@pytest.mark.process
def test_bytes_sent_are_the_bytes_declared(ranks, tmp_path: Path, text: str) -> None:
    for codec in ("none", "bf16", "int8"):
        results = ranks.run(
            train,
            2,
            text=text,
            directory=str(tmp_path / codec),
            sets=[f"sync.codec={codec}", "train.steps=3"],
        )
        spec = load(RunSpec, None, [*SMALL, f"sync.codec={codec}"]).spec
        from isthmus.model import Transformer
        from isthmus.spec.codec import describe

        declared = spec.sync.traffic(describe(dict(Transformer(spec.model).named_parameters())), 2)
        for each in results:
            assert each["sent"] == [declared.nbytes] * 3


@pytest.mark.process
def test_a_loss_that_is_no_number_ends_the_run_on_every_rank(
    ranks, tmp_path: Path, text: str
) -> None:
    with pytest.raises(IsthmusError, match=r"training loss is (nan|inf)") as caught:
        ranks.run(
            train,
            2,
            text=text,
            directory=str(tmp_path / "r"),
            sets=[
                "optimizer.learning_rate=1e30",
                "optimizer.clip_norm=0",
                "optimizer.schedule.warmup_steps=0",
            ],
        )
    assert "learning_rate" in getattr(caught.value, "hint", "learning_rate")
    assert not list((tmp_path / "r" / "checkpoint").glob("step-*"))


@pytest.mark.process
def test_replicas_without_synchronisation_are_kept_apart_in_a_checkpoint(
    ranks, tmp_path: Path, text: str
) -> None:
    sets = ["sync=none"]
    directory = str(tmp_path / "r")
    whole = ranks.run(train, 2, text=text, directory=str(tmp_path / "whole"), sets=sets)
    ranks.run(train, 2, text=text, directory=directory, sets=sets, stop_after=8)
    rest = ranks.run(train, 2, text=text, directory=directory, sets=sets)
    assert losses(rest) == losses(whole)
    assert math.isfinite(losses(rest)[-1])
