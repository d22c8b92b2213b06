"""The report of a run, made from its event log alone.

``build_report`` boils events down to figures; :mod:`isthmus.observe.table` shows them on a terminal
and :mod:`isthmus.observe.page` writes ``report.json`` and ``report.html``. Curves and per-step
figures are of the model's history as it is now, each step once; what a rank sent and how long it
took are totals that include the steps repeated after a crash, because those bytes did travel.

Numbers carry their unit in their name. A figure that could not be formed, or is not finite, is
None.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Literal, TypeGuard, TypeVar

import msgspec

from isthmus.observe.events import (
    Baselines,
    CheckpointLoaded,
    CheckpointRejected,
    CheckpointSaved,
    Event,
    Failure,
    FaultInjected,
    Notice,
    RankStarted,
    RunFinished,
    RunStarted,
    Step,
    Stopped,
    Validation,
)
from isthmus.observe.log import Reading, read_run
from isthmus.observe.timeline import Timeline

Outcome = Literal["finished", "stopped", "failed", "unfinished"]
"""``unfinished``: the log just ends: the run is still at work, or was killed."""

CURVE_POINTS = 400

Kind = TypeVar("Kind", bound=Event)

_WORK = (Step, Validation, CheckpointSaved, Failure, Stopped, RunFinished)


class Curve(msgspec.Struct, frozen=True, kw_only=True):
    """A quantity over the steps, thinned to at most ``CURVE_POINTS`` points.

    Each point stands for a stretch of steps that ends with ``steps[i]``: their mean, and the lowest
    and highest value among them. None where no value of the stretch is finite.
    """

    steps: list[int]
    mean: list[float | None]
    low: list[float | None]
    high: list[float | None]


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """Percentiles of a quantity over the steps."""

    p50: float
    p90: float
    p99: float
    max: float


class Attempt(msgspec.Struct, frozen=True, kw_only=True):
    """One start of the run, up to its end or its last sign of work before the next start."""

    attempt: int
    outcome: Outcome
    detail: str
    started_s: float
    duration_s: float
    world_size: int
    launcher: str
    start_step: int
    last_step: int


class RankSummary(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank was and did over all attempts, repeated steps included."""

    rank: int
    host: str | None
    pid: int | None
    backend: str | None
    interface: str | None
    device: str | None
    num_steps: int
    sent_nbytes: int
    sent_nbytes_per_step: float | None
    step_time_s: float
    communication_time_s: float
    communication_share: float | None


class LossSummary(msgspec.Struct, frozen=True, kw_only=True):
    """Losses in nats per token; ``validation`` is None for a run that was never validated."""

    first_nats: float | None
    last_nats: float | None
    validation_nats: float | None
    validation_bits_per_byte: float | None
    validation_step: int | None
    best_validation_nats: float | None
    best_validation_step: int | None
    bigram_nats: float | None
    trigram_nats: float | None
    num_not_finite: int
    first_not_finite_step: int | None


class Prediction(msgspec.Struct, frozen=True, kw_only=True):
    """What a plan said beforehand, to be shown beside what was measured."""

    step_time_s: float | None = None
    communication_time_s: float | None = None
    sent_nbytes_per_step: float | None = None
    tokens_per_s: float | None = None


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """All figures of a run. Per-step figures are those of the lowest rank that took steps."""

    name: str
    outcome: Outcome
    detail: str
    started_s: float | None
    ended_s: float | None
    duration_s: float
    last_step: int
    total_steps: int | None
    num_replayed_steps: int
    tokens: int
    tokens_per_s: float | None
    tokens_per_s_median: float | None
    mfu: float | None
    step_time_s: Spread | None
    communication_time_s: Spread | None
    communication_share: float | None
    sent_nbytes: int
    sent_nbytes_per_step: float | None
    loss: LossSummary
    world_size: int | None
    device: str | None
    num_params: int | None
    config_digest: str | None
    git: str | None
    versions: dict[str, str]
    settings: dict[str, str]
    attempts: list[Attempt]
    ranks: list[RankSummary]
    checkpoints: list[CheckpointSaved]
    checkpoints_loaded: list[CheckpointLoaded]
    checkpoints_rejected: list[CheckpointRejected]
    notices: list[Notice]
    failures: list[Failure]
    faults: list[FaultInjected]
    validations: list[Validation]
    curves: dict[str, Curve]
    num_unknown_events: int
    num_damaged_lines: int
    predicted: Prediction | None = None


def build_report(run_dir: Path, *, predicted: Prediction | None = None) -> Report:
    """Reads the event log of a run and boils it down.

    Args:
        run_dir: Directory of the run, finished or not.
        predicted: What a plan said about it.

    Raises:
        ConfigError: There is no such directory, or it holds no event log.
    """
    return summarize(read_run(run_dir), name=run_dir.name, predicted=predicted)


def summarize(reading: Reading, *, name: str, predicted: Prediction | None = None) -> Report:
    """The report of events that were read already; ``name`` serves where the run has none."""
    events = [event for event in reading.events if not isinstance(event, FaultInjected)]
    timeline = Timeline.of(events)
    own_rank = min((rank for rank, steps in timeline.steps.items() if steps), default=0)
    steps = timeline.steps.get(own_rank, [])
    started = _last(events, RunStarted)
    attempts = _attempts(events)
    ranks = _ranks(events)
    outcome, detail = _outcome(_since_last_start(events))
    step_time_s = sum(step.step_time_s for step in steps)
    tokens = sum(step.tokens for step in steps)
    return Report(
        name=started.name if started else name,
        outcome=outcome,
        detail=detail,
        started_s=events[0].time_s if events else None,
        ended_s=events[-1].time_s if events else None,
        duration_s=sum(attempt.duration_s for attempt in attempts),
        last_step=steps[-1].step if steps else 0,
        total_steps=started.total_steps if started else None,
        num_replayed_steps=timeline.num_replayed_steps.get(own_rank, 0),
        tokens=tokens,
        tokens_per_s=_ratio(tokens, step_time_s),
        tokens_per_s_median=_median(_tokens_per_s(step) for step in steps),
        mfu=_median(step.mfu for step in steps),
        step_time_s=_spread(step.step_time_s for step in steps),
        communication_time_s=_spread(step.communication_time_s for step in steps),
        communication_share=_ratio(sum(step.communication_time_s for step in steps), step_time_s),
        sent_nbytes=sum(rank.sent_nbytes for rank in ranks),
        sent_nbytes_per_step=_median(step.sent_nbytes for step in steps),
        loss=_loss(events, steps, timeline.validations),
        world_size=started.world_size if started else None,
        device=started.device if started else None,
        num_params=started.num_params if started else None,
        config_digest=started.config_digest if started else None,
        git=started.git if started else None,
        versions=started.versions if started else {},
        settings=started.settings if started else {},
        attempts=attempts,
        ranks=ranks,
        checkpoints=[event for event in events if isinstance(event, CheckpointSaved)],
        checkpoints_loaded=[event for event in events if isinstance(event, CheckpointLoaded)],
        checkpoints_rejected=[event for event in events if isinstance(event, CheckpointRejected)],
        notices=[event for event in events if isinstance(event, Notice)],
        failures=[event for event in events if isinstance(event, Failure)],
        faults=[event for event in reading.events if isinstance(event, FaultInjected)],
        validations=timeline.validations,
        curves=_curves(steps),
        num_unknown_events=reading.num_unknown,
        num_damaged_lines=reading.num_damaged,
        predicted=predicted,
    )


def thin(steps: Sequence[int], values: Sequence[float | None], *, points: int) -> Curve:
    """A curve of at most ``points`` points that keeps every extreme as its low or high.

    Values that are None or not finite are left out of the mean, the low and the high.
    """
    size = math.ceil(len(steps) / points) or 1
    stretches = [values[start : start + size] for start in range(0, len(steps), size)]
    finite = [[value for value in stretch if _is_finite(value)] for stretch in stretches]
    return Curve(
        steps=[steps[min(start + size, len(steps)) - 1] for start in range(0, len(steps), size)],
        mean=[statistics.fmean(stretch) if stretch else None for stretch in finite],
        low=[min(stretch, default=None) for stretch in finite],
        high=[max(stretch, default=None) for stretch in finite],
    )


def _curves(steps: Sequence[Step]) -> dict[str, Curve]:
    quantities: dict[str, Callable[[Step], float | None]] = {
        "loss_nats": lambda step: step.loss_nats,
        "tokens_per_s": _tokens_per_s,
        "step_time_s": lambda step: step.step_time_s,
        "communication_time_s": lambda step: step.communication_time_s,
        "sent_nbytes": lambda step: step.sent_nbytes,
        "grad_norm": lambda step: step.grad_norm,
        "learning_rate": lambda step: step.learning_rate,
    }
    numbers = [step.step for step in steps]
    return {
        name: thin(numbers, [quantity(step) for step in steps], points=CURVE_POINTS)
        for name, quantity in quantities.items()
    }


def _loss(
    events: Sequence[Event], steps: Sequence[Step], validations: Sequence[Validation]
) -> LossSummary:
    baselines = _last(events, Baselines)
    last = validations[-1] if validations else None
    scored = [validation for validation in validations if math.isfinite(validation.loss_nats)]
    best = min(scored, key=lambda validation: validation.loss_nats, default=None)
    not_finite = [step.step for step in steps if not math.isfinite(step.loss_nats)]
    return LossSummary(
        first_nats=_finite(steps[0].loss_nats) if steps else None,
        last_nats=_finite(steps[-1].loss_nats) if steps else None,
        validation_nats=_finite(last.loss_nats) if last else None,
        validation_bits_per_byte=_finite(last.bits_per_byte) if last else None,
        validation_step=last.step if last else None,
        best_validation_nats=best.loss_nats if best else None,
        best_validation_step=best.step if best else None,
        bigram_nats=_finite(baselines.bigram_nats) if baselines else None,
        trigram_nats=_finite(baselines.trigram_nats) if baselines else None,
        num_not_finite=len(not_finite),
        first_not_finite_step=not_finite[0] if not_finite else None,
    )


def _attempts(events: Sequence[Event]) -> list[Attempt]:
    starts = [index for index, event in enumerate(events) if isinstance(event, RunStarted)]
    return [_attempt(events[start:end]) for start, end in pairwise([*starts, len(events)])]


def _attempt(events: Sequence[Event]) -> Attempt:
    started = events[0]
    if not isinstance(started, RunStarted):
        raise TypeError(f"an attempt begins with run_started, not with {started!r}")
    outcome, detail = _outcome(events)
    # What follows the last sign of work may be the next attempt getting ready, much later.
    ended_s = max((e.time_s for e in events if isinstance(e, _WORK)), default=started.time_s)
    last_step = max(
        (event.step for event in events if isinstance(event, Step)), default=started.start_step
    )
    return Attempt(
        attempt=started.attempt,
        outcome=outcome,
        detail=detail,
        started_s=started.time_s,
        duration_s=max(0.0, ended_s - started.time_s),
        world_size=started.world_size,
        launcher=started.launcher,
        start_step=started.start_step,
        last_step=last_step,
    )


def _since_last_start(events: Sequence[Event]) -> Sequence[Event]:
    for index in range(len(events) - 1, -1, -1):
        if isinstance(events[index], RunStarted):
            return events[index:]
    return events


def _outcome(events: Sequence[Event]) -> tuple[Outcome, str]:
    """How an attempt ended, and a few words why. A failure outweighs what came after it."""
    for event in events:
        if isinstance(event, Failure):
            return "failed", f"rank {event.rank}: {event.error_type}: {event.message}"
    if _last(events, RunFinished):
        return "finished", ""
    stopped = _last(events, Stopped)
    return ("stopped", stopped.reason) if stopped else ("unfinished", "")


def _ranks(events: Sequence[Event]) -> list[RankSummary]:
    started = {event.rank: event for event in events if isinstance(event, RankStarted)}
    taken: dict[int, list[Step]] = {rank: [] for rank in started}
    for event in events:
        if isinstance(event, Step):
            taken.setdefault(event.rank, []).append(event)
    return [_rank(rank, started.get(rank), steps) for rank, steps in sorted(taken.items())]


def _rank(rank: int, started: RankStarted | None, steps: Sequence[Step]) -> RankSummary:
    step_time_s = sum(step.step_time_s for step in steps)
    communication_time_s = sum(step.communication_time_s for step in steps)
    return RankSummary(
        rank=rank,
        host=started.host if started else None,
        pid=started.pid if started else None,
        backend=started.backend if started else None,
        interface=started.interface if started else None,
        device=started.device if started else None,
        num_steps=len(steps),
        sent_nbytes=sum(step.sent_nbytes for step in steps),
        sent_nbytes_per_step=_median(step.sent_nbytes for step in steps),
        step_time_s=step_time_s,
        communication_time_s=communication_time_s,
        communication_share=_ratio(communication_time_s, step_time_s),
    )


def _last(events: Sequence[Event], kind: type[Kind]) -> Kind | None:
    return next((event for event in reversed(events) if isinstance(event, kind)), None)


def _tokens_per_s(step: Step) -> float | None:
    return _ratio(step.tokens, step.step_time_s)


def _spread(values: Iterable[float]) -> Spread | None:
    finite = [value for value in values if _is_finite(value)]
    if not finite:
        return None
    # One value has no quantiles: it is all of them.
    cuts = statistics.quantiles(finite, n=100, method="inclusive") if finite[1:] else finite * 99
    return Spread(p50=cuts[49], p90=cuts[89], p99=cuts[98], max=max(finite))


def _median(values: Iterable[float | None]) -> float | None:
    finite = [value for value in values if _is_finite(value)]
    return statistics.median(finite) if finite else None


def _ratio(part: float, whole: float) -> float | None:
    return _finite(part / whole) if whole > 0 else None


def _finite(value: float | None) -> float | None:
    return value if _is_finite(value) else None


def _is_finite(value: float | None) -> TypeGuard[float]:
    return value is not None and math.isfinite(value)
