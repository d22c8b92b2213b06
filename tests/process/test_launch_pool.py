"""The pool that all process tests stand on."""

from __future__ import annotations

import os
import signal
import threading

import pytest
import torch
import torch.distributed as dist
from pool import RankDied, RankHung, RankPool

from isthmus.errors import ConfigError


def add_ranks(rank: int, world_size: int, offset: float = 0.0) -> float:
    value = torch.tensor(rank + offset)
    dist.all_reduce(value)
    return value.item()


def who(rank: int, world_size: int) -> tuple[int, int, int, bool, str | None]:
    threads = torch.get_num_threads()
    mark = os.environ.get("LEFT_BEHIND")
    os.environ["LEFT_BEHIND"] = "1"
    return os.getpid(), rank, threads, dist.is_initialized(), mark


def raise_on_one(rank: int, world_size: int) -> None:
    if rank == 1:
        raise ConfigError("no such thing", hint="ask for another")
    dist.all_reduce(torch.zeros(1))


def die_on_one(rank: int, world_size: int) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.zeros(1))


def hang_on_one(rank: int, world_size: int) -> None:
    if rank == 1:
        wait_for_nothing()


def wait_for_nothing() -> None:
    threading.Event().wait()


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_each_call_has_a_group_of_its_own(ranks: RankPool, world_size: int) -> None:
    expected = sum(range(world_size))
    assert ranks.run(add_ranks, world_size) == [expected] * world_size
    assert ranks.run(add_ranks, world_size, offset=1.0) == [expected + world_size] * world_size


def test_processes_are_kept_and_put_back(ranks: RankPool) -> None:
    first = ranks.run(who, 2, process_group=False)
    again = ranks.run(who, 2)
    assert [pid for pid, *_ in first] == [pid for pid, *_ in again]
    assert [(rank, threads, mark) for _, rank, threads, _, mark in again] == [
        (0, 1, None),
        (1, 1, None),
    ]
    assert [group for *_, group, _ in first + again] == [False, False, True, True]


def test_an_error_arrives_as_itself_with_its_traceback(ranks: RankPool) -> None:
    with pytest.raises(ConfigError, match="no such thing") as caught:
        ranks.run(raise_on_one, 2)
    assert caught.value.hint == "ask for another"
    assert any("in raise_on_one" in note for note in caught.value.__notes__)
    assert ranks.run(add_ranks, 2) == [1.0, 1.0]


def test_a_death_is_named(ranks: RankPool) -> None:
    with pytest.raises(RankDied, match=r"rank 1 ended \(by SIGKILL\)"):
        ranks.run(die_on_one, 2)
    assert ranks.run(add_ranks, 2) == [1.0, 1.0]


def test_a_hang_shows_where(ranks: RankPool) -> None:
    with pytest.raises(RankHung, match="rank 1 did not answer") as caught:
        ranks.run(hang_on_one, 2, timeout_s=0.5, process_group=False)
    assert "in wait_for_nothing" in str(caught.value)
    assert ranks.run(add_ranks, 2) == [1.0, 1.0]


def test_only_functions_that_ranks_can_import(ranks: RankPool) -> None:
    with pytest.raises(TypeError, match="top level"):
        ranks.run(lambda rank, world_size: None, 1)
    with pytest.raises(ValueError, match="1 to 4"):
        ranks.run(add_ranks, 5)
