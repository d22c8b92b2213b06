"""After a crash and a resume each step counts once: as it was done last."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from isthmus.observe import Event, RunStarted, Step, Timeline, Validation, read_run


def steps_of(timeline: Timeline, rank: int = 0) -> list[tuple[int, float]]:
    return [(step.step, step.loss_nats) for step in timeline.steps[rank]]


def test_repeated_steps_count_as_they_were_done_last(
    make_step: Callable[..., Step],
    make_run_started: Callable[..., RunStarted],
    write_run: Callable[[Iterable[Event]], Path],
) -> None:
    killed = [make_step(s, time_s=float(s), loss_nats=1.0) for s in range(1, 8)]
    resumed = [make_step(s, time_s=float(s + 10), loss_nats=2.0) for s in range(5, 10)]
    starts = (make_run_started(time_s=0.5), make_run_started(time_s=14.5, start_step=4))
    run_dir = write_run([starts[0], *killed, starts[1], *resumed])
    timeline = Timeline.of(read_run(run_dir).events)
    assert steps_of(timeline) == [(s, 1.0 if s < 5 else 2.0) for s in range(1, 10)]
    assert timeline.num_replayed_steps == {0: 3}


def test_steps_of_an_abandoned_past_do_not_count(
    make_step: Callable[..., Step],
    make_run_started: Callable[..., RunStarted],
    make_validation: Callable[..., Validation],
) -> None:
    """The run went back to step 2 and was stopped at 4; steps 5 and 6 are of another model."""
    timeline = Timeline.of(
        [
            make_run_started(),
            *(make_step(s, loss_nats=1.0) for s in range(1, 7)),
            make_validation(2),
            make_validation(6),
            make_run_started(attempt=2, start_step=2),
            *(make_step(s, loss_nats=2.0) for s in (3, 4)),
        ]
    )
    assert steps_of(timeline) == [(1, 1.0), (2, 1.0), (3, 2.0), (4, 2.0)]
    assert [validation.step for validation in timeline.validations] == [2]


def test_a_step_that_was_scored_again_counts_once(
    make_validation: Callable[..., Validation], make_run_started: Callable[..., RunStarted]
) -> None:
    """As when a run resumes from the very step that it had scored last."""
    again = make_validation(5, loss_nats=2.0)
    start = make_run_started(attempt=2, start_step=5)
    timeline = Timeline.of([make_validation(4), make_validation(5), start, again])
    assert timeline.validations == [make_validation(4), again]


def test_a_rank_that_did_not_come_back_is_rewound_too(
    make_step: Callable[..., Step], make_run_started: Callable[..., RunStarted]
) -> None:
    timeline = Timeline.of(
        [
            make_run_started(world_size=2),
            *(make_step(s, rank=rank) for s in (1, 2, 3) for rank in (0, 1)),
            make_run_started(world_size=1, attempt=2, start_step=1),
            make_step(2, rank=0),
        ]
    )
    assert [step.step for step in timeline.steps[1]] == [1]


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 20)), max_size=6))
def test_the_timeline_is_the_last_occurrence_of_each_step_of_this_past(
    attempts: list[tuple[int, int]],
) -> None:
    """Attempts as (steps back from where the last one ended, steps done)."""
    events: list[Step] = []
    expected: dict[int, float] = {}
    at = 0
    for number, (back, forward) in enumerate(attempts):
        at = max(0, at - back)
        expected = {step: loss for step, loss in expected.items() if step <= at}
        for step in range(at + 1, at + forward + 1):
            expected[step] = float(number)
            events.append(
                Step(
                    time_s=0.0,
                    rank=0,
                    step=step,
                    loss_nats=float(number),
                    grad_norm=0.0,
                    learning_rate=0.0,
                    tokens=1,
                    step_time_s=0.0,
                    communication_time_s=0.0,
                    sent_nbytes=0,
                )
            )
        at += forward
    timeline = Timeline.of(events)
    assert dict(steps_of(timeline) if events else []) == expected
    assert timeline.num_replayed_steps.get(0, 0) == len(events) - len(expected)
