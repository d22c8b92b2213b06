"""Checkpoints of real ranks, which share nothing but a directory and a gloo group."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import RankDied, RankPool

from isthmus.checkpoint import (
    Checkpointer,
    CheckpointInfo,
    GroupPeers,
    Item,
    list_checkpoints,
    verify,
)
from isthmus.checkpoint.disk import Disk
from isthmus.errors import CheckpointError


class RandomState:
    """This rank's random numbers: Python's own and torch's."""

    def state_dict(self) -> dict[str, Any]:
        return {"python": random.getstate(), "torch": torch.get_rng_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        random.setstate(state["python"])
        torch.set_rng_state(state["torch"])

    def rederive(self, *, step: int, rank: int, world_size: int) -> None:
        random.seed(step * world_size + rank)
        torch.manual_seed(step * world_size + rank)


class Training:
    """Data-parallel training in miniature, whose noise differs between the ranks."""

    def __init__(self, rank: int, world_size: int) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Linear(8, 3))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.world_size = world_size
        torch.manual_seed(100 + rank)
        random.seed(100 + rank)

    def items(self) -> dict[str, Item]:
        return {
            "model": Item(self.model),
            "optimizer": Item(self.optimizer),
            "random": Item(RandomState(), scope="per_rank", on_resize="rederive"),
        }

    def step(self) -> None:
        self.optimizer.zero_grad()
        inputs = torch.randn(4, 6) * random.random()
        self.model(inputs).square().sum().backward()
        for parameter in self.model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= self.world_size
        self.optimizer.step()

    def weights(self) -> list[float]:
        return torch.cat([p.detach().flatten() for p in self.model.parameters()]).tolist()


def train(
    rank: int, world_size: int, directory: str, last_step: int, every: int
) -> tuple[CheckpointInfo | None, list[float]]:
    """Resume, train to the last step and save every few steps."""
    training = Training(rank, world_size)
    checkpointer = Checkpointer(directory, keep_last=2)
    info = checkpointer.load(training.items())
    for step in range(info.step + 1 if info else 1, last_step + 1):
        training.step()
        if step % every == 0:
            checkpointer.save(step, training.items())
    return info, training.weights()


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_resumed_run_is_the_undisturbed_one(
    ranks: RankPool, tmp_path: Path, world_size: int
) -> None:
    whole, parts = str(tmp_path / "whole"), str(tmp_path / "parts")
    undisturbed = ranks.run(train, world_size, directory=whole, last_step=6, every=2)
    ranks.run(train, world_size, directory=parts, last_step=4, every=2)
    resumed = ranks.run(train, world_size, directory=parts, last_step=6, every=2)
    assert [weights for _, weights in resumed] == [weights for _, weights in undisturbed]
    assert all(info.step == 4 and info.notes == () for info, _ in resumed)
    assert [info.step for info in list_checkpoints(parts)] == [4, 6]
    assert all(verify(info.path).ok for info in list_checkpoints(parts))


def test_more_and_fewer_ranks_go_on(ranks: RankPool, tmp_path: Path) -> None:
    directory = str(tmp_path)
    saved = ranks.run(train, 2, directory=directory, last_step=2, every=2)[0][1]
    for world_size in (4, 1):
        for info, weights in ranks.run(
            train, world_size, directory=directory, last_step=2, every=2
        ):
            assert weights == saved
            assert info.world_size == 2
            assert info.notes == (
                f"random: saved by 2 ranks, loaded by {world_size}: derived anew from the step",
            )


def test_one_damaged_file_makes_all_ranks_fall_back(ranks: RankPool, tmp_path: Path) -> None:
    directory = str(tmp_path)
    ranks.run(train, 2, directory=directory, last_step=4, every=2)
    path = tmp_path / "step-00000004/rank-00001.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    for info, _ in ranks.run(train, 2, directory=directory, last_step=2, every=2):
        assert info.step == 2
        (rejected,) = info.rejected
        assert rejected.path.name == "step-00000004.bad-checksum"
        assert (rejected.file, rejected.tensor) == (path.name, "random/torch")


class DyingDisk(Disk):
    """A disk at which the process is killed before its data are safe."""

    def sync(self, fd: int) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


def plain_items(rank: int, step: int) -> dict[str, Item]:
    """A model and a state of the rank's own (fresh ranks pay seconds for a first optimizer)."""
    model = torch.nn.Linear(6, 8)
    torch.nn.init.constant_(model.weight, step)
    torch.manual_seed(step * 10 + rank)
    return {"model": Item(model), "random": Item(RandomState(), scope="per_rank")}


def save_plain(rank: int, world_size: int, directory: str, step: int, dying: int = -1) -> None:
    disk = DyingDisk() if rank == dying else None
    try:
        Checkpointer(directory, disk=disk).save(step, plain_items(rank, step))
    except CheckpointError as error:
        Path(directory, f"error-{rank}").write_text(error.message)
        raise


def load_plain(rank: int, world_size: int, directory: str) -> tuple[int, float, float]:
    items = plain_items(rank, 9)
    info = Checkpointer(directory).load(items)
    assert info is not None
    drawn = torch.rand(()).item()
    return info.step, items["model"].value.state_dict()["weight"].mean().item(), drawn


@pytest.mark.parametrize("dying", [0, 1, 2])
def test_a_rank_that_is_killed_while_it_saves(ranks: RankPool, tmp_path: Path, dying: int) -> None:
    """The others raise at once, long before the deadline, and the older checkpoint is there."""
    directory = str(tmp_path)
    ranks.run(save_plain, 3, directory=directory, step=2)
    before = ranks.run(load_plain, 3, directory=directory)
    with pytest.raises(RankDied):
        ranks.run(save_plain, 3, directory=directory, step=3, dying=dying)
    told = {path.name: path.read_text() for path in tmp_path.glob("error-*")}
    assert told.keys() == {f"error-{rank}" for rank in range(3) if rank != dying}
    assert all("lost contact with rank" in message for message in told.values())
    if dying:
        assert f"lost contact with rank {dying}" in told["error-0"]
    after = ranks.run(load_plain, 3, directory=directory)
    assert after == before
    assert [(step, mean) for step, mean, _ in after] == [(2, 2.0)] * 3
    assert len({drawn for _, _, drawn in after}) == 3
    assert not list(tmp_path.glob("step-*.tmp-*"))


def stay_away(rank: int, world_size: int, directory: str) -> str:
    """The last rank does not save; the group of training is not harmed by it."""
    checkpointer = Checkpointer(directory, peers=GroupPeers(deadline_s=0.3))
    message = ""
    if rank < world_size - 1:
        try:
            checkpointer.save(1, plain_items(rank, 1))
        except CheckpointError as error:
            message = error.message
    value = torch.tensor(rank)
    dist.all_reduce(value)
    return f"{int(value)} {message}"


def test_a_rank_that_does_not_come_is_named_at_the_deadline(
    ranks: RankPool, tmp_path: Path
) -> None:
    first, second, away = ranks.run(stay_away, 3, directory=str(tmp_path))
    assert "3 rank 0 lost contact with rank 2" in first
    assert "deadline 0.3 s" in first
    assert "rank 1" in second
    assert away == "3 "
    assert list(tmp_path.glob("step-*")) == []


def save_in_half(rank: int, world_size: int, directory: str) -> int:
    """Two groups of two ranks, each with checkpoints of its own."""
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = rank // 2
    peers = GroupPeers(halves[mine])
    items = {"random": Item(RandomState(), scope="per_rank")}
    path = f"{directory}/{mine}"
    Checkpointer(path, peers=peers).save(rank // 2 + 1, items)
    info = Checkpointer(path, peers=peers).load(items)
    assert info is not None
    assert info.world_size == peers.world_size == 2
    assert peers.rank == rank % 2
    return info.step


def test_a_group_of_some_of_the_ranks(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks.run(save_in_half, 4, directory=str(tmp_path)) == [1, 1, 2, 2]


def move_large(rank: int, world_size: int) -> list[int]:
    """Messages of every size, empty ones too, arrive whole and in order."""
    peers = GroupPeers()
    sizes = [0, 1, 100_000, 0, 3_000_000]
    for size in sizes:
        everyone = peers.gather(bytes([rank]) * size)
        assert everyone == ([bytes([r]) * size for r in range(world_size)] if rank == 0 else [])
        assert peers.broadcast(bytes([rank + 7]) * size) == b"\x07" * size
    return sizes


def test_messages_of_any_size(ranks: RankPool) -> None:
    assert len(ranks.run(move_large, 3)) == 3
