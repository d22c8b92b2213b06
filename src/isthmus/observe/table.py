"""The report of a run as tables on a terminal."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console
from rich.table import Table
from rich.text import Text

from isthmus.observe import words
from isthmus.observe.report import Report, Spread

_OUTCOME_STYLE = {"finished": "green", "stopped": "yellow", "failed": "red", "unfinished": "yellow"}
_LEVEL = {"info": "", "warning": "yellow"}


def render_table(report: Report, console: Console) -> None:
    """Prints a report: its head, its figures (predicted beside measured), its ranks, its events."""
    _print_head(report, console)
    console.print(_figures(report))
    if report.ranks:
        console.print(_ranks(report))
    if len(report.attempts) > 1:
        console.print(_attempts(report))
    for line in _remarks(report):
        console.print(line, highlight=False, soft_wrap=True)


def _print_head(report: Report, console: Console) -> None:
    detail = f" ({report.detail})" if report.detail else ""
    head = Text.assemble(
        (report.name, "bold"),
        "  ",
        (f"{report.outcome}{detail}", _OUTCOME_STYLE[report.outcome]),
    )
    console.print(head, soft_wrap=True)
    facts = [
        words.things(report.world_size, "rank") if report.world_size else "",
        report.device or "",
        f"{words.count(report.num_params)} parameters" if report.num_params else "",
        words.moment(report.started_s) if report.started_s else "no events yet",
        *(f"{label} {text}" for label, text in report.settings.items()),
    ]
    console.print(Text("  ".join(filter(None, facts)), "dim"), soft_wrap=True)


def _figures(report: Report) -> Table:
    predicted = report.predicted
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("")
    table.add_column("measured", justify="right")
    if predicted:
        table.add_column("predicted", justify="right")
    table.add_column("", style="dim")
    for label, measured, expected, remark in figures(report):
        cells = [label, measured, expected, remark] if predicted else [label, measured, remark]
        table.add_row(*map(Text, cells))
    return table


def figures(report: Report) -> list[tuple[str, str, str, str]]:
    """The figures that matter first: label, measured, predicted and a remark, as text."""
    loss, plan = report.loss, report.predicted
    total = f" of {report.total_steps:,}" if report.total_steps else ""
    replayed = f"{report.num_replayed_steps} repeated" if report.num_replayed_steps else ""
    bits = loss.validation_bits_per_byte
    baselines = (
        f"bigram {words.nats(loss.bigram_nats)} · trigram {words.nats(loss.trigram_nats)} nats"
        if loss.bigram_nats is not None
        else ""
    )
    rows = [
        ("steps", f"{report.last_step:,}{total}", "", replayed),
        ("training loss", _nats(loss.last_nats), "", f"from {_nats(loss.first_nats)}"),
        ("validation loss", _nats(loss.validation_nats), "", baselines),
        ("", f"{words.nats(bits)} bit/B", "", "") if bits is not None else None,
        (
            "throughput",
            f"{words.count(report.tokens_per_s)} tok/s",
            f"{words.count(plan.tokens_per_s)} tok/s" if plan else "",
            f"{words.count(report.tokens)} tokens in {words.seconds(report.duration_s)}",
        ),
        ("MFU", words.share(report.mfu), "", "") if report.mfu is not None else None,
        (
            "step time",
            _p50(report.step_time_s),
            words.seconds(plan.step_time_s) if plan else "",
            _tail(report.step_time_s),
        ),
        (
            "communication",
            _p50(report.communication_time_s),
            words.seconds(plan.communication_time_s) if plan else "",
            f"{words.share(report.communication_share)} of the step time",
        ),
        (
            "sent a step",
            words.nbytes(report.sent_nbytes_per_step),
            words.nbytes(plan.sent_nbytes_per_step) if plan else "",
            f"{words.nbytes(report.sent_nbytes)} in all, all ranks",
        ),
    ]
    return [row for row in rows if row is not None]


def _ranks(report: Report) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("rank", justify="right")
    table.add_column("host")
    table.add_column("backend")
    for column in ("steps", "sent", "a step", "communication", "share"):
        table.add_column(column, justify="right")
    for rank in report.ranks:
        via = f" on {rank.interface}" if rank.interface else ""
        cells = (
            str(rank.rank),
            rank.host or words.ABSENT,
            f"{rank.backend or words.ABSENT}{via}",
            f"{rank.num_steps:,}",
            words.nbytes(rank.sent_nbytes),
            words.nbytes(rank.sent_nbytes_per_step),
            words.seconds(rank.communication_time_s),
            words.share(rank.communication_share),
        )
        table.add_row(*map(Text, cells))
    return table


def _attempts(report: Report) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in ("attempt", "steps", "ranks", "took", "outcome"):
        table.add_column(column, justify="left" if column == "outcome" else "right")
    for attempt in report.attempts:
        detail = f" ({attempt.detail})" if attempt.detail else ""
        cells = (
            str(attempt.attempt),
            f"{attempt.start_step:,} to {attempt.last_step:,}",
            str(attempt.world_size),
            words.seconds(attempt.duration_s),
            attempt.outcome + detail,
        )
        table.add_row(*map(Text, cells))
    return table


def _remarks(report: Report) -> list[Text]:
    return [
        *_remarks_on_progress(report),
        *(
            Text(f"checkpoint {rejected.path} passed over: {rejected.reason}", "yellow")
            for rejected in report.checkpoints_rejected
        ),
        *(
            Text(f"{notice.level}: {notice.message} (rank {notice.rank})", _LEVEL[notice.level])
            for notice in report.notices
        ),
        *(Text(fault.summary, "yellow") for fault in report.faults),
        *(
            Text(f"rank {bad.rank} on {bad.host} failed: {bad.error_type}: {bad.message}", "red")
            for bad in report.failures
        ),
        *(Text(skipped, "yellow") for skipped in filter(None, [skipped_lines(report)])),
    ]


def _remarks_on_progress(report: Report) -> Iterator[Text]:
    if report.checkpoints:
        last = report.checkpoints[-1]
        size = f"{words.nbytes(last.nbytes)} in {words.seconds(last.duration_s)}"
        number = words.things(len(report.checkpoints), "checkpoint")
        yield Text(f"{number}, the last at step {last.step}: {size}")
    if report.loss.num_not_finite:
        first = report.loss.first_not_finite_step
        where = f"{words.things(report.loss.num_not_finite, 'step')}, first at step {first}"
        yield Text(f"the training loss was not finite in {where}", "red")


def skipped_lines(report: Report) -> str:
    """What of the log could not be used; empty if all of it was."""
    parts = []
    if report.num_damaged_lines:
        parts.append(words.things(report.num_damaged_lines, "damaged line"))
    if report.num_unknown_events:
        parts.append(f"{words.things(report.num_unknown_events, 'event')} of a newer version")
    return f"skipped in the event log: {' and '.join(parts)}" if parts else ""


def _nats(value: float | None) -> str:
    return words.ABSENT if value is None else f"{words.nats(value)} nats"


def _p50(spread: Spread | None) -> str:
    return words.seconds(spread.p50 if spread else None)


def _tail(spread: Spread | None) -> str:
    if spread is None:
        return ""
    figures = (("p90", spread.p90), ("p99", spread.p99), ("max", spread.max))
    return " · ".join(f"{label} {words.seconds(value)}" for label, value in figures)
