"""A sink that is slow, broken or stuck costs its own events and nothing else."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from isthmus.errors import ConfigError
from isthmus.observe import (
    Event,
    EventLog,
    Notice,
    QueuedSink,
    RunStarted,
    Step,
    TensorBoardSink,
    Validation,
)

FIVE = [Notice(time_s=float(index), rank=0, message="") for index in range(5)]


class Gate:
    """Takes an event only while it is open; tells when it has begun to wait."""

    def __init__(self) -> None:
        self.opened = threading.Event()
        self.entered = threading.Event()
        self.taken: list[Event] = []
        self.num_closed = 0

    def write(self, event: Event) -> None:
        self.entered.set()
        self.opened.wait()
        self.taken.append(event)

    def close(self) -> None:
        self.num_closed += 1


class Broken:
    def write(self, event: Event) -> None:
        raise ConnectionError("server is away")

    def close(self) -> None:
        raise OSError("still away")


def test_a_sink_gets_all_events_in_order() -> None:
    gate = Gate()
    gate.opened.set()
    queued = QueuedSink(gate)
    for event in FIVE:
        queued(event)
    delivery = queued.close(timeout_s=30.0)
    assert gate.taken == FIVE
    assert gate.num_closed == 1
    assert (delivery.num_delivered, delivery.num_dropped) == (5, 0)
    assert delivery.is_complete


def test_a_full_queue_drops_and_counts() -> None:
    gate = Gate()
    queued = QueuedSink(gate, capacity=2)
    queued(FIVE[0])
    assert gate.entered.wait(30.0)  # it holds the first; two more may wait
    for event in FIVE[1:]:
        queued(event)
    gate.opened.set()
    delivery = queued.close(timeout_s=30.0)
    assert gate.taken == FIVE[:3]
    assert (delivery.num_delivered, delivery.num_dropped) == (3, 2)
    assert str(delivery) == "Gate lost 2 of 5 events: the queue was full"


def test_a_sink_that_hangs_is_abandoned() -> None:
    gate = Gate()
    queued = QueuedSink(gate, capacity=2, name="stuck")
    queued(FIVE[0])
    assert gate.entered.wait(30.0)
    for event in FIVE[1:]:
        queued(event)
    delivery = queued.close(timeout_s=0.01)
    assert (delivery.num_delivered, delivery.num_dropped) == (0, 5)
    assert str(delivery) == "stuck lost 5 of 5 events: did not finish within 0.01 s"
    queued(FIVE[0])  # after closing: no error, no effect
    assert queued.close(timeout_s=0.01) == delivery
    gate.opened.set()  # lets the thread end


def test_a_sink_that_hangs_with_room_in_the_queue_is_abandoned() -> None:
    gate = Gate()
    queued = QueuedSink(gate, capacity=8)
    queued(FIVE[0])
    delivery = queued.close(timeout_s=0.01)
    assert delivery.num_dropped == 1
    gate.opened.set()


def test_a_sink_that_raises_is_counted_and_quoted() -> None:
    queued = QueuedSink(Broken())
    for event in FIVE:
        queued(event)
    delivery = queued.close(timeout_s=30.0)
    assert (delivery.num_delivered, delivery.num_dropped) == (0, 5)
    assert not delivery.is_complete
    assert delivery.error == "OSError: still away"


def test_a_stuck_sink_does_not_hold_up_the_log(tmp_path: Path) -> None:
    gate = Gate()
    log = EventLog(tmp_path / "log.jsonl", subscribers=[QueuedSink(gate, capacity=1)])
    for event in FIVE * 100:
        log.emit(event)  # returns at once, though the sink never does
    log.close(sink_timeout_s=0.01)
    assert "Gate lost 500 of 500 events" in (tmp_path / "log.jsonl").read_text()
    gate.opened.set()


def test_a_queue_holds_at_least_one_event() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        QueuedSink(Gate(), capacity=0)


def test_tensorboard_gets_scalars_that_it_can_read(
    tmp_path: Path,
    make_step: Callable[..., Step],
    make_run_started: Callable[..., RunStarted],
    make_validation: Callable[..., Validation],
) -> None:
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    for attempt, first in ((1, 1), (2, 3)):  # the second attempt repeats step 3
        queued = QueuedSink(TensorBoardSink(tmp_path))
        queued(make_run_started(attempt=attempt, start_step=first - 1))
        for step in range(first, first + 3):
            queued(make_step(step, loss_nats=float(attempt), mfu=0.5))
        queued(make_validation(first + 2, loss_nats=0.25))
        assert queued.close(timeout_s=30.0).is_complete
    board = events.EventAccumulator(str(tmp_path)).Reload()
    losses = [(point.step, point.value) for point in board.Scalars("train/loss_nats")]
    assert losses == [(1, 1.0), (2, 1.0), (3, 2.0), (4, 2.0), (5, 2.0)]
    assert [point.wall_time for point in board.Scalars("speed/mfu")][:2] == [1001.0, 1002.0]
    assert board.Scalars("speed/tokens_per_s")[0].value == 16384.0
    assert board.Scalars("validation/loss_nats")[-1].value == 0.25


def test_without_tensorboard_the_error_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in list(sys.modules):
        if name == "tensorboard" or name.startswith("tensorboard."):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(ConfigError, match="needs the tensorboard package") as caught:
        TensorBoardSink(tmp_path)
    assert "pip install 'isthmus[tensorboard]'" in caught.value.hint
