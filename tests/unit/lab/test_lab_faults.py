"""The schedule of faults in virtual time, and the player that carries it out."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from signal import SIGCONT, SIGKILL, SIGSTOP
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.errors import ConfigError, IsthmusError
from isthmus.lab.faults import LAB_RANK, Change, FaultPlayer, Schedule
from isthmus.lab.knobs import Actions, LinkIsUp, Override, Quality, Reset
from isthmus.lab.timeline import (
    Continue,
    Fault,
    Heal,
    Kill,
    LinkDown,
    LinkFlap,
    LinkQuality,
    LinkRate,
    LinkUp,
    NicDown,
    NicFlap,
    NicRate,
    NicUp,
    Partition,
    Stop,
)
from isthmus.observe import EventLog, FaultInjected, Step, read_events

AB = ("a", "b")
KNOB = LinkIsUp(*AB)


def changes_until(schedule: Schedule, now_s: float) -> Iterator[Change]:
    while (change := schedule.take_due(now_s)) is not None:
        yield change


times = st.integers(0, 20).map(float)
durations = st.integers(1, 10).map(float)
link_faults = st.one_of(
    st.builds(LinkDown, between=st.just(AB), at_s=times, lasts_s=st.one_of(st.none(), durations)),
    st.builds(LinkUp, between=st.just(AB), at_s=times),
    st.builds(
        LinkFlap,
        between=st.just(AB),
        at_s=times,
        down_s=durations,
        up_s=durations,
        times=st.integers(1, 3),
    ),
)


def is_down_by_definition(faults: list[Fault], now_s: float) -> bool:
    """Whether an outage covers ``now_s`` that no later ``link_up`` has ended."""
    moves = [
        (fault.at_s + (move.begins_s if isinstance(move, Override) else 0.0), move)
        for fault in faults
        for move in fault.moves()
    ]
    in_order = sorted(moves, key=lambda entry: entry[0])  # stable: the file's order decides ties
    begun = [entry for entry in in_order if entry[0] <= now_s]
    last_reset = max(
        (i for i, (_, move) in enumerate(begun) if isinstance(move, Reset)), default=-1
    )
    return any(
        at_s + move.ends_s - move.begins_s > now_s
        for at_s, move in begun[last_reset + 1 :]
        if isinstance(move, Override)
    )


@given(st.lists(link_faults, max_size=8))
def test_a_link_is_down_exactly_while_an_outage_holds_it(faults: list[Fault]) -> None:
    schedule = Schedule(faults)
    for half in range(100):
        now_s = half + 0.5  # between the whole seconds at which things happen
        list(changes_until(schedule, now_s))
        assert (schedule.value(KNOB) is False) == is_down_by_definition(faults, now_s)


@given(st.lists(link_faults, max_size=8), st.lists(st.floats(0, 60), max_size=20))
def test_how_often_one_looks_does_not_change_what_happens(
    faults: list[Fault], looks: list[float]
) -> None:
    often, once = Schedule(faults), Schedule(faults)
    seen = [change for now_s in sorted(looks) for change in changes_until(often, now_s)]
    seen += changes_until(often, 1000.0)
    assert seen == list(changes_until(once, 1000.0))


@given(st.lists(link_faults, max_size=8))
def test_new_changes_alternate_and_end_as_declared(faults: list[Fault]) -> None:
    ending = [*faults, LinkUp(between=AB, at_s=1000.0)]
    schedule = Schedule(ending)
    new = [change.value for change in changes_until(schedule, 1000.0) if change.is_new]
    assert new == [False if index % 2 == 0 else None for index in range(len(new))]
    assert len(new) % 2 == 0
    assert schedule.value(KNOB) is None
    assert schedule.next_due_s == math.inf


def test_the_override_that_began_last_decides_and_then_the_one_before() -> None:
    schedule = Schedule(
        [
            LinkRate(between=AB, at_s=0, bandwidth_bytes_per_s=100),
            LinkRate(between=AB, at_s=1, bandwidth_bytes_per_s=50, lasts_s=2),
            LinkRate(between=AB, at_s=2, bandwidth_bytes_per_s=25, lasts_s=5),
        ]
    )
    assert [(change.value, change.is_new) for change in changes_until(schedule, 60)] == [
        (100, True),
        (50, True),
        (25, True),
        (25, False),
        (100, True),
    ]


def test_faults_of_one_moment_happen_in_the_order_of_the_file() -> None:
    down, up = LinkDown(between=AB, at_s=1), LinkUp(between=AB, at_s=1)
    assert [c.value for c in changes_until(Schedule([down, up]), 1)] == [False, None]
    schedule = Schedule([up, down])
    assert [c.value for c in changes_until(schedule, 1)] == [None, False]
    assert schedule.value(KNOB) is False


def test_steps_bring_the_faults_that_wait_for_them_once() -> None:
    schedule = Schedule([Kill(host="a", at_step=20), LinkDown(between=AB, at_step=10, lasts_s=1)])
    assert schedule.waits_for_steps
    schedule.see_step(9, 1.0)
    assert not list(changes_until(schedule, 5.0))
    schedule.see_step(10, 5.0)
    assert [change.value for change in changes_until(schedule, 5.0)] == [False]
    assert schedule.next_due_s == 6.0
    schedule.see_step(10, 5.5)  # a resumed run takes it again
    schedule.see_step(25, 6.0)
    assert [change.value for change in changes_until(schedule, 6.0)] == [None, SIGKILL]
    assert not schedule.waits_for_steps


class Recorder:
    """Actions that write down what they were told."""

    def __init__(self) -> None:
        self.told: list[tuple[Any, ...]] = []
        self.fails: set[str] = set()
        self.arrived = threading.Condition()

    def __getattr__(self, name: str) -> Callable[..., None]:
        def tell(*arguments: Any) -> None:
            with self.arrived:
                self.told.append((name, *arguments))
                self.arrived.notify_all()
            if name in self.fails:
                raise OSError(f"{name} is out of order")

        return tell


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def actions() -> Recorder:
    return Recorder()


@pytest.fixture
def log(tmp_path: Path) -> Iterator[EventLog]:
    with EventLog(tmp_path / "lab.jsonl") as log:
        yield log


def recorded(log: EventLog) -> list[FaultInjected]:
    reading = read_events(log.path)
    assert not reading.num_unknown + reading.num_damaged
    return [event for event in reading.events if isinstance(event, FaultInjected)]


EVERY_MOVE: list[tuple[Fault, tuple[Any, ...], str, str]] = [
    (LinkDown(between=("b", "a")), ("link_down", "a", "b"), "a-b", "down"),
    (LinkUp(between=AB), ("link_up", "a", "b"), "a-b", "up"),
    (
        LinkFlap(between=AB, down_s=1, up_s=1, at_s=0.5),
        ("link_down", "a", "b"),
        "a-b",
        "down",
    ),
    (
        LinkRate(between=AB, bandwidth_bytes_per_s=125_000),
        ("set_link_rate", "a", "b", 125_000),
        "a-b",
        "1 Mbit/s",
    ),
    (
        LinkQuality(between=AB, loss=0.01),
        ("set_link_quality", "a", "b", Quality(loss=0.01)),
        "a-b",
        "loss 0.01",
    ),
    (NicDown(host="h"), ("nic_down", "h", "eth0"), "h:eth0", "down"),
    (NicUp(host="h"), ("nic_up", "h", "eth0"), "h:eth0", "up"),
    (NicFlap(host="h", down_s=9, up_s=9), ("nic_down", "h", "eth0"), "h:eth0", "down"),
    (
        NicRate(host="h", nic="ib0", bandwidth_bytes_per_s=125_000),
        ("set_nic_rate", "h", "ib0", 125_000),
        "h:ib0",
        "1 Mbit/s",
    ),
    (Partition(groups=(("a", "h"),)), ("partition", (("a", "h"),)), "cluster", "a h"),
    (Heal(), ("heal",), "cluster", "whole"),
    (Stop(host="h"), ("signal", "h", SIGSTOP), "h", "stopped"),
    (Continue(host="h"), ("signal", "h", SIGCONT), "h", "running"),
    (Kill(host="h"), ("signal", "h", SIGKILL), "h", "SIGKILL"),
]


@pytest.mark.parametrize(
    ("fault", "told", "target", "value"), EVERY_MOVE, ids=[f.kind for f, *_ in EVERY_MOVE]
)
def test_every_fault_reaches_the_cluster_and_the_log(
    fault: Fault,
    told: tuple[Any, ...],
    target: str,
    value: str,
    actions: Recorder,
    log: EventLog,
) -> None:
    clock = Clock()
    opposite = {  # an ending has something to do only where something is in force
        "link_up": LinkDown(between=AB),
        "nic_up": NicDown(host="h"),
        "heal": Partition(groups=(("x",),)),
        "continue": Stop(host="h"),
    }
    before = [opposite[fault.kind]] if fault.kind in opposite else []
    player = FaultPlayer(actions, log, [*before, fault], clock=clock, wall_clock=lambda: 7.0)
    clock.now_s += 0.75
    player.poll()
    assert actions.told[len(before) :] == [told]
    event = recorded(log)[-1]
    assert (event.fault, event.target, event.value) == (fault.kind, target, value)
    assert (event.rank, event.time_s, event.since_start_s) == (LAB_RANK, 7.0, 0.75)
    assert (event.cause, event.error, event.is_end) == ("timeline", "", False)


def test_what_lasts_is_undone_in_time(actions: Recorder, log: EventLog) -> None:
    clock = Clock()
    faults = [
        LinkQuality(between=AB, latency_s=0.1, at_s=1, lasts_s=2),
        Stop(host="h", at_s=1, lasts_s=1),
        Partition(groups=(("a",),), at_s=2, lasts_s=2),
    ]
    player = FaultPlayer(actions, log, faults, clock=clock)
    assert player.poll() == 1.0
    for _ in range(4):
        clock.now_s += 1
        player.poll()
    assert actions.told == [
        ("set_link_quality", "a", "b", Quality(latency_s=0.1)),
        ("signal", "h", SIGSTOP),
        ("partition", (("a",),)),
        ("signal", "h", SIGCONT),
        ("set_link_quality", "a", "b", None),
        ("heal",),
    ]
    assert [event.is_end for event in recorded(log)] == [False, False, False, True, True, True]
    assert player.poll() == math.inf


def test_what_changes_nothing_is_recorded_but_not_done(actions: Recorder, log: EventLog) -> None:
    clock = Clock()
    twice = [LinkDown(between=AB, lasts_s=1), LinkDown(between=AB, lasts_s=3)]
    player = FaultPlayer(actions, log, twice, clock=clock)
    for _ in range(5):
        player.poll()
        clock.now_s += 1
    assert actions.told == [("link_down", "a", "b"), ("link_up", "a", "b")]
    assert [(event.value, event.is_end) for event in recorded(log)] == [
        ("down", False),
        ("down", False),
        ("down", True),
        ("up", True),
    ]


def test_a_fault_that_fails_is_recorded_and_the_next_one_is_made(
    actions: Recorder, log: EventLog
) -> None:
    actions.fails = {"link_down"}
    player = FaultPlayer(actions, log, [LinkDown(between=AB), Kill(host="h")], clock=Clock())
    player.poll()
    assert [name for name, *_ in actions.told] == ["link_down", "signal"]
    assert [event.error for event in recorded(log)] == ["link_down is out of order", ""]
    assert player.problems == ["the fault link_down failed: link_down is out of order"]


def test_a_fault_by_hand_is_made_at_once_or_raises(actions: Recorder, log: EventLog) -> None:
    clock = Clock()
    player = FaultPlayer(actions, log, clock=clock)
    player.inject(LinkDown(between=AB, lasts_s=2))
    assert actions.told == [("link_down", "a", "b")]
    assert [event.cause for event in recorded(log)] == ["command"]
    player.inject(Kill(host="h", at_s=5))
    assert len(actions.told) == 1
    clock.now_s += 5
    player.poll()
    assert actions.told[1:] == [("link_up", "a", "b"), ("signal", "h", SIGKILL)]
    actions.fails = {"heal", "partition"}
    with pytest.raises(IsthmusError, match="partition is out of order"):
        player.inject(Partition(groups=(("a",),)))


def test_faults_wait_for_steps_of_the_run(actions: Recorder, log: EventLog, tmp_path: Path) -> None:
    steps = tmp_path / "run" / "events" / "rank-00000.jsonl"
    clock = Clock()
    player = FaultPlayer(actions, log, [Kill(host="h", at_step=2)], steps=steps, clock=clock)
    assert 0 < player.poll() < 1  # the run has not even begun: look again soon
    with EventLog(steps) as run:
        for number in (1, 2):
            assert not actions.told
            run.emit(
                Step(
                    time_s=0.0,
                    rank=0,
                    step=number,
                    loss_nats=1.0,
                    grad_norm=1.0,
                    learning_rate=1.0,
                    tokens=1,
                    step_time_s=1.0,
                    communication_time_s=0.0,
                    sent_nbytes=0,
                )
            )
            player.poll()
    assert actions.told == [("signal", "h", SIGKILL)]
    assert recorded(log)[0].step == 2
    assert player.poll() == math.inf


def test_a_step_that_nobody_counts_is_refused(actions: Recorder, log: EventLog) -> None:
    fault = Kill(host="h", at_step=2)
    with pytest.raises(ConfigError, match="follows no run"):
        FaultPlayer(actions, log, [fault])
    with pytest.raises(ConfigError, match="follows no run"):
        FaultPlayer(actions, log).inject(fault)
    assert not actions.told


def test_a_log_that_takes_no_more_does_not_stop_the_faults(
    actions: Recorder, log: EventLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_event: object) -> None:
        raise IsthmusError("the disk is full")

    monkeypatch.setattr(log, "emit", full)
    player = FaultPlayer(actions, log, [Kill(host="h"), Kill(host="g")], clock=Clock())
    player.poll()
    assert len(actions.told) == 2
    assert player.problems == ["the disk is full"] * 2


def test_the_thread_plays_and_ends(actions: Recorder, log: EventLog) -> None:
    with FaultPlayer(actions, log, [LinkDown(between=AB, at_s=0.01, lasts_s=0.01)]) as player:
        with actions.arrived:
            assert actions.arrived.wait_for(lambda: len(actions.told) == 2, timeout=60)
        player.inject(Stop(host="h", lasts_s=0.01))
        with actions.arrived:
            assert actions.arrived.wait_for(lambda: len(actions.told) == 4, timeout=60)
    player.close()
    assert actions.told == [
        ("link_down", "a", "b"),
        ("link_up", "a", "b"),
        ("signal", "h", SIGSTOP),
        ("signal", "h", SIGCONT),
    ]
    assert not player.problems


def test_every_action_is_used_by_some_fault() -> None:
    used = {told[0] for _, told, _, _ in EVERY_MOVE}
    assert used == {name for name in vars(Actions) if not name.startswith("_")}
