"""Several ranks: all save or none, all load the same, and a change of their number is told."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_states import ThreadPeers, Value, items_at, on_ranks, same
from faulty_disk import CountingDisk, FullDisk
from hypothesis import given
from hypothesis import strategies as st

from isthmus.checkpoint import Checkpointer, CheckpointInfo, Item, verify
from isthmus.checkpoint.blob import Blob
from isthmus.checkpoint.saving import spread
from isthmus.errors import CheckpointError


class Own(Value):
    """A per-rank value that can be derived anew."""

    def rederive(self, *, step: int, rank: int, world_size: int) -> None:
        self.state = ("derived", step, rank, world_size)


def state_of(step: int, rank: int) -> dict[str, Any]:
    return {"random": torch.arange(step, step + 10) * (rank + 1), "rank": rank}


def items_of(step: int, rank: int, on_resize: Any = "exact") -> dict[str, Item]:
    own = Own(state_of(step, rank))
    return {**items_at(step)[0], "own": Item(own, scope="per_rank", on_resize=on_resize)}


def save(directory: Path, world_size: int, step: int) -> list[Any]:
    def work(peers: ThreadPeers) -> CheckpointInfo:
        checkpointer = Checkpointer(directory, peers=peers)
        return checkpointer.save(step, items_of(step, peers.rank))

    return on_ranks(world_size, work)


def load(directory: Path, world_size: int, on_resize: Any = "exact") -> list[Any]:
    """(info, items) of each rank, or what it raised."""

    def work(peers: ThreadPeers) -> Any:
        items = items_of(77, peers.rank + 77, on_resize)
        return Checkpointer(directory, peers=peers).load(items), items

    return on_ranks(world_size, work)


def states(items: dict[str, Item]) -> dict[str, Any]:
    return {name: item.value.state_dict() for name, item in items.items()}


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_each_rank_gets_its_own_and_all_get_the_shared(tmp_path: Path, world_size: int) -> None:
    infos = save(tmp_path, world_size, 1)
    assert all(info == infos[0] for info in infos)
    path = infos[0].path
    assert infos[0].nbytes == sum(file.stat().st_size for file in path.iterdir())
    assert verify(path).ok
    for rank, (info, items) in enumerate(load(tmp_path, world_size)):
        assert (info.step, info.world_size, info.notes) == (1, world_size, ())
        assert same(states(items), states(items_of(1, rank)))


def test_shared_tensors_are_written_once_and_by_all(tmp_path: Path) -> None:
    def work(peers: ThreadPeers) -> CheckpointInfo:
        state = {f"layer{index}": torch.ones(1000) for index in range(8)}
        return Checkpointer(tmp_path, peers=peers).save(1, {"model": Item(Value(state))})

    info = on_ranks(4, work)[0]
    sizes = [file.stat().st_size for file in sorted(info.path.glob("shared-*"))]
    assert len(sizes) == 4
    assert all(8000 <= size < 8400 for size in sizes)


@given(st.lists(st.integers(0, 1000), max_size=30), st.integers(1, 6))
def test_spreading_is_even_and_complete(sizes: list[int], world_size: int) -> None:
    blobs = {str(i): Blob.of(bytes(size)) for i, size in enumerate(sizes)}
    shares = spread(blobs, world_size)
    assert sorted(name for share in shares for name in share) == sorted(blobs)
    loads = [sum(blob.nbytes for blob in share.values()) for share in shares]
    assert max(loads) - min(loads) <= max(sizes, default=0)


@pytest.mark.parametrize(("saved", "now"), [(4, 2), (2, 4), (3, 1), (1, 3)])
def test_another_number_of_ranks(tmp_path: Path, saved: int, now: int) -> None:
    save(tmp_path, saved, 1)
    expected_shared = items_at(1)[1].state

    for rank, (info, items) in enumerate(load(tmp_path, now, "reset")):
        assert same(items["it"].value.state_dict(), expected_shared)
        assert same(items["own"].value.state_dict(), state_of(77, rank + 77))
        assert info.notes == (f"own: saved by {saved} ranks, loaded by {now}: starts afresh",)

    for rank, (info, items) in enumerate(load(tmp_path, now, "rederive")):
        assert same(items["it"].value.state_dict(), expected_shared)
        assert items["own"].value.state_dict() == ("derived", 1, rank, now)
        assert "derived anew" in info.notes[0]

    def total(states: Sequence[Any], rank: int, world_size: int) -> Any:
        return {"sum": sum(state["random"] for state in states), "at": (rank, world_size)}

    for rank, (info, items) in enumerate(load(tmp_path, now, total)):
        result = items["own"].value.state_dict()
        assert same(result["sum"], sum(state_of(1, old)["random"] for old in range(saved)))
        assert result["at"] == (rank, now)
        assert "merged by total" in info.notes[0]


def test_exact_refuses_another_number_of_ranks(tmp_path: Path) -> None:
    save(tmp_path, 2, 1)
    for error in load(tmp_path, 3):
        assert isinstance(error, CheckpointError)
        assert "saved by 2 ranks; own cannot be carried over to 3" in error.message
        assert error.hint == "Go on with 2 ranks."
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


@pytest.mark.parametrize("file", ["rank-00000", "rank-00001", "rank-00003", "shared-00001"])
@pytest.mark.parametrize("world_size", [2, 4])
def test_damage_that_one_rank_finds_makes_all_fall_back(
    tmp_path: Path, file: str, world_size: int
) -> None:
    """Also in a file that no rank needs, since two ranks need nothing of rank 3's when resized."""
    for step in (1, 2):
        save(tmp_path, 4, step)
    path = tmp_path / f"step-00000002/{file}.safetensors"
    data = bytearray(path.read_bytes())
    data[-3] ^= 4
    path.write_bytes(data)
    for info, items in load(tmp_path, world_size, "reset"):
        assert info.step == 1
        assert same(items["it"].value.state_dict(), items_at(1)[1].state)
        assert [(r.path.name, r.file) for r in info.rejected] == [
            ("step-00000002.bad-checksum", path.name)
        ]


def test_a_directory_that_is_not_shared_is_said_so(tmp_path: Path) -> None:
    save(tmp_path / "a", 2, 1)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    (tmp_path / "b/step-00000001/rank-00001.safetensors").unlink()

    def work(peers: ThreadPeers) -> Any:
        directory = tmp_path / "ab"[peers.rank]
        return Checkpointer(directory, peers=peers).load(items_of(1, peers.rank))

    def work_elsewhere(peers: ThreadPeers) -> Any:
        directory = tmp_path / "ac"[peers.rank]
        return Checkpointer(directory, peers=peers).load(items_of(1, peers.rank))

    def save_elsewhere(peers: ThreadPeers) -> Any:
        directory = tmp_path / "ac"[peers.rank]
        return Checkpointer(directory, peers=peers).save(2, items_of(2, peers.rank))

    for attempt in (work, work_elsewhere, save_elsewhere):
        for error in on_ranks(2, attempt):
            assert isinstance(error, CheckpointError)
            assert error.message.startswith("rank 1")
            assert "must share the checkpoint directory" in error.hint
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["step-00000001"]


def test_replicas_that_differ_are_named(tmp_path: Path) -> None:
    def work(peers: ThreadPeers, check: bool = True) -> Any:
        weights = {"a": torch.ones(3), "b": torch.ones(3)}
        weights["b"][1] += 1e-7 * (peers.rank == 2)
        checkpointer = Checkpointer(tmp_path, peers=peers, check_replicas=check)
        return checkpointer.save(1, {"model": Item(Value(weights))})

    for error in on_ranks(3, work):
        assert isinstance(error, CheckpointError)
        assert "model/b should be the same" in error.message
        assert "between rank 0 and rank 2" in error.message
        assert "declare the item per_rank" in error.hint
    assert list(tmp_path.iterdir()) == []
    infos = on_ranks(3, lambda peers: work(peers, check=False))
    assert [info.step for info in infos] == [1, 1, 1]


@pytest.mark.parametrize("check", [True, False])
def test_replicated_plain_values_that_differ(tmp_path: Path, check: bool) -> None:
    def work(peers: ThreadPeers) -> Any:
        checkpointer = Checkpointer(tmp_path, peers=peers, check_replicas=check)
        return checkpointer.save(1, {"schedule": Item(Value({"epoch": peers.rank}))})

    for error in on_ranks(2, work):
        assert isinstance(error, CheckpointError)
        assert "schedule should be the same" in error.message


def test_ranks_that_do_different_things(tmp_path: Path) -> None:
    def other_step(peers: ThreadPeers) -> Any:
        return Checkpointer(tmp_path, peers=peers).save(1 + peers.rank, items_at(1)[0])

    def other_items(peers: ThreadPeers) -> Any:
        items = {f"item{peers.rank}": Item(Value(1))}
        return Checkpointer(tmp_path, peers=peers).save(1, items)

    for attempt in (other_step, other_items):
        for error in on_ranks(2, attempt):
            assert isinstance(error, CheckpointError)
            assert "rank 0 saves step 1 with" in error.message
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_a_full_disk_on_one_rank_fails_all(tmp_path: Path, failing: int) -> None:
    save(tmp_path, 3, 1)
    total = CountingDisk()
    for fail_at in range(20):

        def work(peers: ThreadPeers, fail_at: int = fail_at) -> Any:
            disk = FullDisk(fail_at) if peers.rank == failing else total
            return Checkpointer(tmp_path, peers=peers, disk=disk).save(2, items_of(2, peers.rank))

        results = on_ranks(3, work)
        if isinstance(results[0], CheckpointInfo):
            break
        for error in results:
            assert isinstance(error, CheckpointError)
            assert f"rank {failing}: " in error.message or failing == 0
            assert "No space left" in error.message
        assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    assert fail_at > 4
    assert all(info.step == 2 for info in results)


def test_a_state_that_one_rank_cannot_give(tmp_path: Path) -> None:
    class Failing(Value):
        def state_dict(self) -> Any:
            raise RuntimeError("the generator is gone")

    def work(peers: ThreadPeers) -> Any:
        own = (Failing if peers.rank == 1 else Value)(1)
        checkpointer = Checkpointer(tmp_path, peers=peers)
        return checkpointer.save(1, {"own": Item(own, scope="per_rank")})

    for error in on_ranks(3, work):
        assert isinstance(error, CheckpointError)
        assert error.message == "rank 1: RuntimeError: the generator is gone"


def test_a_rank_that_never_comes_is_waited_for_only_so_long(tmp_path: Path) -> None:
    def work(peers: ThreadPeers) -> Any:
        if peers.rank == 1:
            return None
        return Checkpointer(tmp_path, peers=peers).save(1, items_at(1)[0])

    error, _ = on_ranks(2, work, deadline_s=0.05)
    assert isinstance(error, CheckpointError)
    assert list(tmp_path.iterdir()) == []
