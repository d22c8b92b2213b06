"""Events and runs to observe."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from isthmus.observe import Event, EventLog, RunStarted, Step, Validation, events_path

MakeStep = Callable[..., Step]
WriteRun = Callable[[Iterable[Event]], Path]


def _step(step: int = 1, **changes: Any) -> Step:
    fields: dict[str, Any] = {
        "time_s": 1000.0 + step,
        "rank": 0,
        "loss_nats": 5.0 / step,
        "grad_norm": 1.5,
        "learning_rate": 1e-3,
        "tokens": 8192,
        "step_time_s": 0.5,
        "communication_time_s": 0.125,
        "sent_nbytes": 4000,
    }
    return Step(step=step, **(fields | changes))


def _run_started(**changes: Any) -> RunStarted:
    fields: dict[str, Any] = {
        "time_s": 1000.0,
        "rank": 0,
        "name": "first",
        "attempt": 1,
        "world_size": 2,
        "total_steps": 10,
        "launcher": "local",
        "device": "cpu",
        "num_params": 1_200_000,
        "config_digest": "abc123",
        "start_step": 0,
    }
    return RunStarted(**(fields | changes))


def _validation(step: int, **changes: Any) -> Validation:
    loss_nats = changes.get("loss_nats", 6.0 / step)
    fields: dict[str, Any] = {
        "time_s": 1000.25 + step,
        "rank": 0,
        "loss_nats": loss_nats,
        "bits_per_byte": loss_nats / math.log(2),
        "tokens": 65536,
    }
    return Validation(step=step, **(fields | changes))


@pytest.fixture
def make_step() -> MakeStep:
    return _step


@pytest.fixture
def make_run_started() -> Callable[..., RunStarted]:
    return _run_started


@pytest.fixture
def make_validation() -> Callable[..., Validation]:
    return _validation


@pytest.fixture
def write_run(tmp_path: Path) -> WriteRun:
    """Writes events into the files of their ranks and returns the run directory."""

    def write(events: Iterable[Event]) -> Path:
        run_dir = tmp_path / "run"
        for event in events:
            with EventLog(events_path(run_dir, event.rank)) as log:
                log.emit(event)
        return run_dir

    return write
