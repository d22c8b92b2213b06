"""What the benchmarks conclude from events and times, on made-up ones."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from isthmus.observe.events import Baselines, Event, RankStarted, RunStarted, Step, Validation

ROOT = Path(__file__).parents[3]
Load = Callable[[str], ModuleType]


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Load:
    monkeypatch.syspath_prepend(ROOT)
    return lambda name: importlib.import_module(f"benchmarks.{name}")


def step(number: int, loss_nats: float, *, time_s: float = 0.0, rank: int = 0) -> Step:
    return Step(
        time_s=time_s,
        rank=rank,
        step=number,
        loss_nats=loss_nats,
        grad_norm=1.0,
        learning_rate=1e-3,
        tokens=1024,
        step_time_s=0.5,
        communication_time_s=0.0,
        sent_nbytes=0,
    )


def validation(number: int, loss_nats: float, *, time_s: float = 0.0) -> Validation:
    return Validation(time_s=time_s, rank=0, step=number, loss_nats=loss_nats, tokens=64)


def started(start_step: int) -> RunStarted:
    return RunStarted(
        time_s=0.0,
        rank=0,
        name="run",
        attempt=1,
        world_size=1,
        total_steps=4,
        start_step=start_step,
        launcher="isthmus",
        device="cpu",
        num_params=1,
        config_digest="",
    )


def test_a_killed_run_has_the_history_of_the_undisturbed_one_only_if_every_bit_is_equal(
    load: Load,
) -> None:
    history_of = load("resume").history_of
    losses = [3.0, 2.5, 2.1, 1.9]
    calm: list[Event] = [started(0), *(step(n, x) for n, x in enumerate(losses, 1))]
    calm.append(validation(4, 2.0))
    killed = [*calm[:4], started(2), *calm[3:]]  # step 3 is done twice
    assert len(killed) == len(calm) + 2
    assert history_of(killed) == history_of(calm)
    assert history_of(killed[:-1]) != history_of(calm)
    almost = [*killed[:-2], step(4, 1.9 + 2**-52), killed[-1]]
    assert history_of(almost) != history_of(calm)


@pytest.mark.parametrize("seed", range(5))
def test_kills_are_in_order_at_different_steps_and_before_the_end(load: Load, seed: int) -> None:
    plan = load("resume").plan_kills
    kills = plan(10, 40, seed)
    steps = [kill.step for kill in kills]
    assert steps == sorted(set(steps))
    assert all(1 <= kill.step <= 38 and 0 <= kill.share < 1 for kill in kills)
    assert kills == plan(10, 40, seed) != plan(10, 40, seed + 100)
    with pytest.raises(SystemExit, match="10 kills need more than 8 steps"):
        plan(10, 8, seed)


def test_a_baseline_was_passed_at_the_first_validation_below_it(load: Load) -> None:
    events: list[Event] = [
        RankStarted(time_s=102.0, rank=0, host="h", pid=1, backend="gloo"),
        RankStarted(time_s=103.0, rank=1, host="h", pid=2, backend="gloo"),
        Baselines(time_s=104.0, rank=0, bigram_nats=2.4, trigram_nats=1.8),
        step(1, 5.0, time_s=105.0),
        step(1, 5.0, time_s=105.0, rank=1),
        validation(1, 2.4, time_s=106.0),
        step(2, 2.0, time_s=115.0),
        validation(2, 2.3, time_s=116.0),
    ]
    found = load("first_run").summary(events, 100.0)
    assert (found["steps"], found["ranks"], found["ranks_ready_s"]) == (2, 2, 3.0)
    assert (found["first_step_s"], found["last_step_s"]) == (5.0, 15.0)
    assert (found["bigram_passed_s"], found["trigram_passed_s"]) == (16.0, None)
    assert found["validation_nats"] == 2.3


def test_a_longer_run_gets_the_steps_that_fit_with_a_reserve(load: Load) -> None:
    pace = {"first_step_s": 5.0, "last_step_s": 35.0, "wall_s": 40.0, "steps": 301}
    assert load("first_run").steps_within(600, pace) == (540 - 10) * 10
    assert load("first_run").steps_within(1, pace) == 1


@pytest.mark.parametrize(
    ("wall_s", "passed_s", "verdict"),
    [(590.0, 400.0, True), (700.0, 650.0, False), (590.0, None, False), (60.0, None, None)],
)
def test_a_run_that_was_too_short_decides_nothing(
    load: Load, wall_s: float, passed_s: float | None, verdict: bool | None
) -> None:
    run = {"wall_s": wall_s, "trigram_passed_s": passed_s}
    assert load("first_run").longer_claim(run)["holds"] is verdict
