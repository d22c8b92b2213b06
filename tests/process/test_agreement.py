"""What the ranks agree on beside gradients is the same on every rank, whoever was asked to stop."""

from __future__ import annotations

import math
import os
import signal

import torch.distributed as dist
from pool import RankPool

from isthmus.elastic.signals import STOP_SIGNALS, StopRequest
from isthmus.train.agreement import SIGNALS, Agreed, Agreement

Case = tuple[int, int, str]  # the rank that is asked, the step in which it is, the signal


def stop_each(rank: int, world_size: int, cases: list[Case]) -> list[tuple[int, str]]:
    agreement = Agreement(dist.group.WORLD)
    stopped = []
    for asked_rank, asked_step, name in cases:
        reason, step = "", 0
        with StopRequest() as request:
            while step < 9 and not reason:
                step += 1
                if (rank, step) == (asked_rank, asked_step):
                    os.kill(os.getpid(), signal.Signals[name])
                agreement.begin(1.0, 1, stop_signal=request.requested)
                reason = agreement.finish().stop_reason
        stopped.append((step, reason))
    return stopped


def test_all_ranks_stop_after_the_same_step(ranks: RankPool) -> None:
    cases: list[Case] = [
        (rank, step, name) for rank in (0, 2) for step in (1, 4, 9, 99) for name in SIGNALS
    ]
    stopped = ranks.run(stop_each, 3, cases=cases)
    assert stopped[0] == stopped[1] == stopped[2]
    assert stopped[0] == [(step, name) if step <= 9 else (9, "") for _, step, name in cases]


def test_every_signal_that_is_caught_has_its_place() -> None:
    assert {each.name for each in STOP_SIGNALS} == set(SIGNALS)


def exchange(rank: int, world_size: int) -> Agreed:
    return Agreement(dist.group.WORLD).exchange(0.5 * rank, rank, next_num_targets=10**12 + rank)


def test_sums_are_exact_and_equal(ranks: RankPool) -> None:
    results = ranks.run(exchange, 4)
    assert set(results) == {Agreed(3.0, 6, 4 * 10**12 + 6, "")}
    assert results[0].loss_nats == 0.5


def test_a_rank_alone_needs_no_group() -> None:
    agreed = Agreement(None).exchange(2.0, 4)
    assert (agreed.loss_nats, agreed.stop_reason) == (0.5, "")
    assert math.isnan(Agreement(None).exchange().loss_nats)
