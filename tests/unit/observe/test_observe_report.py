"""The report: every figure from the event log alone, for whole, broken and empty runs."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from isthmus.errors import ConfigError
from isthmus.observe import (
    Baselines,
    CheckpointLoaded,
    CheckpointRejected,
    CheckpointSaved,
    Event,
    EventLog,
    Failure,
    FaultInjected,
    Notice,
    Prediction,
    RankStarted,
    Report,
    RunFinished,
    RunStarted,
    Step,
    Stopped,
    Validation,
    build_report,
    events_path,
    lab_events_path,
    render_page,
    render_table,
    report_json,
)
from isthmus.observe.report import thin

WriteRun = Callable[[Iterable[Event]], Path]


def strict_json(report: Report) -> Any:
    def refuse(constant: str) -> float:
        raise AssertionError(f"{constant} is no JSON")

    return json.loads(report_json(report), parse_constant=refuse)


def table(report: Report) -> str:
    console = Console(file=io.StringIO(), width=160)
    render_table(report, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.fixture
def whole_run(
    make_step: Callable[..., Step],
    make_run_started: Callable[..., RunStarted],
    make_validation: Callable[..., Validation],
    write_run: WriteRun,
) -> Path:
    """Two ranks; killed at step 6, resumed from 4, finished at 10."""

    def start(rank: int, time_s: float) -> RankStarted:
        return RankStarted(
            time_s=time_s, rank=rank, host=f"h{rank}", pid=7, backend="gloo", interface="lo"
        )

    def steps(first: int, last: int, shift_s: float) -> list[Step]:
        return [
            make_step(
                step,
                rank=rank,
                time_s=1000.0 + step + shift_s,
                sent_nbytes=4000 + rank,
                communication_time_s=0.125 * (rank + 1),
            )
            for step in range(first, last + 1)
            for rank in (0, 1)
        ]

    return write_run(
        [
            make_run_started(),
            start(0, 1000.1),
            start(1, 1000.1),
            Baselines(time_s=1000.2, rank=0, bigram_nats=2.5, trigram_nats=1.75),
            *steps(1, 6, 0.0),
            make_validation(5),
            CheckpointSaved(time_s=1004.5, rank=0, step=4, path="c/4", nbytes=1000, duration_s=0.1),
            Failure(time_s=1006.5, rank=1, host="h1", error_type="OSError", message="m", step=6),
            CheckpointRejected(time_s=1019.0, rank=0, path="c/6", reason="torn"),
            CheckpointLoaded(time_s=1019.5, rank=0, step=4, path="c/4"),
            make_run_started(time_s=1020.0, attempt=2, start_step=4),
            *steps(5, 10, 20.0),
            make_validation(5, time_s=1025.2, loss_nats=3.0),
            make_validation(10, time_s=1030.2, loss_nats=2.0),
            Notice(time_s=1030.3, rank=1, message="slow"),
            RunFinished(time_s=1031.0, rank=0, step=10, duration_s=11.0),
        ]
    )


def test_figures_of_a_run_that_was_killed_and_resumed(whole_run: Path) -> None:
    report = build_report(whole_run)
    assert (report.name, report.outcome, report.last_step) == ("first", "finished", 10)
    assert report.num_replayed_steps == 2
    assert report.tokens == 10 * 8192
    assert report.tokens_per_s == report.tokens_per_s_median == 16384
    assert report.communication_share == 0.25
    assert report.step_time_s is not None
    assert report.step_time_s.p50 == report.step_time_s.max == 0.5
    assert report.loss.last_nats == 0.5
    assert report.loss.validation_nats == report.loss.best_validation_nats == 2.0
    assert (report.loss.bigram_nats, report.loss.trigram_nats) == (2.5, 1.75)
    assert [validation.step for validation in report.validations] == [5, 10]
    assert report.duration_s == pytest.approx(6.5 + 11.0)  # not the pause between them
    assert report.curves["loss_nats"].steps == list(range(1, 11))


def test_what_ranks_sent_includes_repeated_steps(whole_run: Path) -> None:
    report = build_report(whole_run)
    assert [rank.num_steps for rank in report.ranks] == [12, 12]
    assert [rank.sent_nbytes for rank in report.ranks] == [12 * 4000, 12 * 4001]
    assert report.sent_nbytes == 12 * 8001
    assert [rank.communication_share for rank in report.ranks] == [0.25, 0.5]
    assert [(rank.host, rank.interface) for rank in report.ranks] == [("h0", "lo"), ("h1", "lo")]


def test_attempts_end_where_the_next_one_begins(whole_run: Path) -> None:
    first, second = build_report(whole_run).attempts
    assert (first.outcome, first.start_step, first.last_step) == ("failed", 0, 6)
    assert first.detail == "rank 1: OSError: m"
    assert (second.outcome, second.start_step, second.last_step) == ("finished", 4, 10)


def test_the_table_shows_what_matters(whole_run: Path) -> None:
    text = table(build_report(whole_run))
    for part in (
        "first  finished",
        "10 of 10  2 repeated",
        "2.000 nats  bigram 2.500 · trigram 1.750 nats",
        "16.4 k tok/s",
        "gloo on lo",
        "failed (rank 1: OSError: m)",
        "1 checkpoint, the last at step 4: 1 kB in 100 ms",
        "checkpoint c/6 passed over: torn",
        "warning: slow (rank 1)",
    ):
        assert part in text
    assert "predicted" not in text


def test_a_prediction_stands_beside_the_measurement(whole_run: Path) -> None:
    report = build_report(whole_run, predicted=Prediction(step_time_s=0.4, tokens_per_s=20_000))
    rows = [line.split() for line in table(report).splitlines()]
    assert ["measured", "predicted"] in rows
    assert any(row[:6] == ["step", "time", "500", "ms", "400", "ms"] for row in rows)
    assert "400 ms" in render_page(report)
    assert strict_json(report)["predicted"]["step_time_s"] == 0.4


@pytest.mark.parametrize(
    ("ending", "outcome", "detail"),
    [
        ([], "unfinished", ""),
        ([Stopped(time_s=1009.0, rank=0, step=2, reason="SIGTERM")], "stopped", "SIGTERM"),
        (
            [
                Failure(time_s=1008.0, rank=1, host="h", error_type="ValueError", message="bad"),
                Stopped(time_s=1009.0, rank=0, step=2, reason="a peer failed"),
            ],
            "failed",
            "rank 1: ValueError: bad",
        ),
    ],
)
def test_how_a_run_ended(
    ending: list[Event],
    outcome: str,
    detail: str,
    make_step: Callable[..., Step],
    make_run_started: Callable[..., RunStarted],
    write_run: WriteRun,
) -> None:
    report = build_report(write_run([make_run_started(), make_step(1), make_step(2), *ending]))
    assert (report.outcome, report.detail) == (outcome, detail)
    assert outcome in table(report)
    assert f'class="outcome {outcome}"' in render_page(report)


def test_losses_that_are_not_finite_are_counted_and_kept_out_of_the_figures(
    make_step: Callable[..., Step],
    make_run_started: Callable[..., RunStarted],
    make_validation: Callable[..., Validation],
    write_run: WriteRun,
) -> None:
    bad = {"grad_norm": math.nan, "loss_nats": math.nan}
    run_dir = write_run(
        [
            make_run_started(),
            make_step(1),
            make_step(2, **bad),
            make_step(3, **(bad | {"loss_nats": math.inf})),
            make_validation(3, loss_nats=math.nan),
        ]
    )
    report = build_report(run_dir)
    data = strict_json(report)
    assert data["curves"]["loss_nats"]["mean"] == [5.0, None, None]
    assert data["validations"][0]["loss_nats"] is None
    loss = report.loss
    assert (loss.num_not_finite, loss.first_not_finite_step, loss.last_nats) == (2, 2, None)
    assert loss.validation_nats is loss.best_validation_nats is None
    assert "not finite in 2 steps, first at step 2" in table(report)
    assert "first at step 2" in render_page(report)


def test_a_run_that_has_only_begun(
    make_run_started: Callable[..., RunStarted], write_run: WriteRun
) -> None:
    report = build_report(write_run([make_run_started()]))
    assert (report.last_step, report.tokens_per_s, report.step_time_s) == (0, None, None)
    assert strict_json(report)["curves"]["loss_nats"]["steps"] == []
    assert "0 of 10" in table(report)
    assert render_page(report).count("no values yet") >= 5


def test_a_log_without_events(tmp_path: Path) -> None:
    path = events_path(tmp_path / "young", 0)
    path.parent.mkdir(parents=True)
    path.touch()
    report = build_report(tmp_path / "young")
    assert (report.name, report.outcome) == ("young", "unfinished")
    assert "no events yet" in table(report)
    assert "no events yet" in render_page(report)
    strict_json(report)


def test_a_labs_faults_are_reported_and_change_no_figure(whole_run: Path) -> None:
    before = build_report(whole_run)
    with EventLog(lab_events_path(whole_run)) as log:
        for time_s, is_end, error in ((1.0, False, ""), (1e6, True, "no such device")):
            log.emit(
                FaultInjected(
                    time_s=time_s,
                    rank=-1,
                    fault="link_down",
                    target="oslo-paris",
                    value="up" if is_end else "down",
                    is_end=is_end,
                    since_start_s=time_s,
                    error=error,
                )
            )
    report = build_report(whole_run)
    assert msgspec.structs.replace(report, faults=[]) == before
    for view in (table(report), render_page(report)):
        assert "link_down: oslo-paris is down" in view
        assert "link_down ends: oslo-paris is up, which failed: no such device" in view
    assert [fault["target"] for fault in strict_json(report)["faults"]] == ["oslo-paris"] * 2


def test_a_directory_without_a_log_is_an_error(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(ConfigError):
            build_report(path)


def test_lines_that_were_skipped_are_reported(
    make_step: Callable[..., Step], write_run: WriteRun
) -> None:
    run_dir = write_run([make_step(1)])
    with events_path(run_dir, 0).open("ab") as file:
        file.write(b'{"event":"later","time_s":1,"rank":0}\nrubbish\n')
    report = build_report(run_dir)
    words = "skipped in the event log: 1 damaged line and 1 event of a newer version"
    assert words in table(report)
    assert words.capitalize() in render_page(report)


@given(
    st.lists(st.none() | st.floats(-1e6, 1e6) | st.sampled_from([math.nan, math.inf])),
    st.integers(1, 20),
)
def test_a_thinned_curve_keeps_every_extreme(values: list[float | None], points: int) -> None:
    curve = thin(list(range(1, len(values) + 1)), values, points=points)
    assert len(curve.steps) == len(curve.mean) == len(curve.low) == len(curve.high) <= points
    assert curve.steps[-1:] == ([len(values)] if values else [])
    finite = [value for value in values if value is not None and math.isfinite(value)]
    lows = [low for low in curve.low if low is not None]
    highs = [high for high in curve.high if high is not None]
    assert (min(lows, default=None), max(highs, default=None)) == (
        min(finite, default=None),
        max(finite, default=None),
    )
    for low, mean, high in zip(curve.low, curve.mean, curve.high, strict=True):
        assert (low is None) is (mean is None) is (high is None) or low is not None
        if low is not None and mean is not None and high is not None:
            assert low - 1e-6 <= mean <= high + 1e-6
