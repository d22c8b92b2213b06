"""An all-reduce between real processes on this machine: is the sum right, how long does it take.

The ranks meet as those of a run on one machine do (``elastic.rendezvous``): a free port is bound
before any of them exists, and rank 0 inherits the socket. gloo, fp32, summed in place.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from isthmus.elastic.environment import LISTEN_FD, RankEnvironment
from isthmus.elastic.rendezvous import rendezvous
from isthmus.errors import IsthmusError, RankFailedError
from isthmus.lazy import dist, torch
from isthmus.measure.timing import Sample
from isthmus.measure.worker import Worker

_PERIOD: Final = 1021
"""Whole numbers below this repeat in the tensors: their sums over the ranks are exact in fp32."""
_OWN_SHARE: Final = 0.9
"""A rank gives up after this share of the deadline, so that it can still say what happened."""


@dataclass(frozen=True)
class AllReduce:
    """Time of an all-reduce of one size.

    Attributes:
        nbytes: Size of the tensor on each rank.
        world_size: Number of ranks.
        duration_s: Of each repetition, the time of the rank that took longest.
        correct: Whether every rank had exactly the sum, every time.
        interface: What the ranks spoke through.
    """

    nbytes: int
    world_size: int
    duration_s: Sample
    correct: bool
    interface: str


def allreduce(
    sizes_nbytes: Sequence[int] = (4 << 10, 4 << 20),
    *,
    world_size: int = 2,
    rounds: int = 20,
    deadline_s: float = 60.0,
    environ: Mapping[str, str] | None = None,
) -> list[AllReduce]:
    """Start ranks on this machine, let them sum tensors, and say how that went.

    Args:
        sizes_nbytes: Sizes of the tensors, multiples of 4.
        world_size: Number of ranks.
        rounds: Repetitions of each size; a few more go before and are not counted.
        deadline_s: For all of it, the start of the processes included.
        environ: Environment of the ranks; by default this process's.

    Raises:
        LaunchError: No process could be started.
        RankFailedError: The ranks did not meet or not end in time, or one failed.
    """
    give_up_at_s = time.monotonic() + deadline_s
    with contextlib.ExitStack() as stack:
        listening = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        place = partial(_place, world_size, listening.getsockname()[1], uuid.uuid4().hex)
        variables = dict(os.environ if environ is None else environ)
        variables[LISTEN_FD] = str(listening.fileno())
        workers = [stack.enter_context(Worker(variables, keep_fds=[listening.fileno()]))]
        del variables[LISTEN_FD]
        workers += [stack.enter_context(Worker(variables)) for _ in range(1, world_size)]
        listening.close()
        for rank, worker in enumerate(workers):
            call = (place(rank), tuple(sizes_nbytes), rounds, _OWN_SHARE * deadline_s)
            worker.begin(deadline_s, _one_rank, *call)
        reports = _gather(workers, give_up_at_s)
    return [_summary(index, nbytes, reports) for index, nbytes in enumerate(sizes_nbytes)]


@dataclass(frozen=True)
class _RankReport:
    durations_s: list[list[float]]
    correct: list[bool]
    interface: str


def _summary(index: int, nbytes: int, reports: Sequence[_RankReport]) -> AllReduce:
    by_rank = [report.durations_s[index] for report in reports]
    return AllReduce(
        nbytes=nbytes,
        world_size=len(reports),
        duration_s=Sample.of([max(ranks) for ranks in zip(*by_rank, strict=True)]),
        correct=all(report.correct[index] for report in reports),
        interface=reports[0].interface,
    )


def _place(world_size: int, port: int, attempt: str, rank: int) -> RankEnvironment:
    return RankEnvironment(
        rank=rank,
        world_size=world_size,
        local_rank=rank,
        local_world_size=world_size,
        master_addr="127.0.0.1",
        master_port=port,
        launcher="isthmus",
        attempt=attempt,
    )


def _gather(workers: Sequence[Worker], give_up_at_s: float) -> list[_RankReport]:
    """The reports of all ranks, or one error with what each rank that failed has to say."""
    reports: list[_RankReport] = []
    errors: dict[str, list[int]] = {}
    hint = ""
    for rank, worker in enumerate(workers):
        try:
            left_s = max(0.0, give_up_at_s - time.monotonic())
            reports.append(worker.result(left_s))
        except IsthmusError as error:
            errors.setdefault(error.message, []).append(rank)
            hint = hint or error.hint
    if errors:
        said = [f"rank {', '.join(map(str, ranks))}: {text}" for text, ranks in errors.items()]
        raise RankFailedError("; ".join(said), hint=hint)
    return reports


def _one_rank(
    place: RankEnvironment,
    sizes_nbytes: Sequence[int],
    rounds: int,
    deadline_s: float,
) -> _RankReport:
    torch.set_num_threads(1)
    durations_s, correct = [], []
    with rendezvous(
        place, run_dir=Path(), rendezvous_s=deadline_s, collective_s=deadline_s
    ) as group:
        for nbytes in sizes_nbytes:
            measured_s, right = _one_size(place, nbytes, rounds)
            durations_s.append(measured_s)
            correct.append(right)
    return _RankReport(durations_s, correct, group.interface.name)


def _one_size(place: RankEnvironment, nbytes: int, rounds: int) -> tuple[list[float], bool]:
    pattern = torch.arange(nbytes // 4).remainder(_PERIOD).to(torch.float32)
    ranks = place.world_size
    expected = pattern * ranks + ranks * (ranks - 1) / 2
    warm_up = max(2, rounds // 4)
    measured_s, right = [], True
    for _ in range(warm_up + rounds):
        tensor = pattern + place.rank
        dist.barrier()
        begin_s = time.perf_counter()
        dist.all_reduce(tensor)
        measured_s.append(time.perf_counter() - begin_s)
        right &= torch.equal(tensor, expected)
    return measured_s[warm_up:], right
