"""The report of a run as one page that opens anywhere, without a network and without scripts.

Everything is inline: styles from ``page.css``, curves as SVG from :mod:`isthmus.observe.chart`. A
content security policy forbids the page to load or run anything, and every text of the run is
escaped on its way in (:class:`Html` marks what is markup already).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Final

import msgspec

from isthmus.errors import IsthmusError
from isthmus.observe import words
from isthmus.observe.chart import Chart, draw
from isthmus.observe.curves import loss_chart, small_charts
from isthmus.observe.report import Report
from isthmus.observe.table import figures, skipped_lines

_MOST_LINES: Final = 64
_POLICY: Final = "default-src 'none'; style-src 'unsafe-inline'"


class Html(str):
    """Text that is markup already; every other text is escaped when it enters the page."""

    __slots__ = ()


def write_report(report: Report, run_dir: Path) -> tuple[Path, Path]:
    """Writes ``report.json`` and ``report.html`` into a run directory, each whole or not at all.

    Returns:
        The paths of the two files.

    Raises:
        IsthmusError: A file could not be written.
    """
    json_path, html_path = run_dir / "report.json", run_dir / "report.html"
    _write_whole(json_path, report_json(report))
    _write_whole(html_path, render_page(report).encode())
    return json_path, html_path


def report_json(report: Report) -> bytes:
    """The report as strict JSON; a number that is not finite is null."""
    return msgspec.json.format(msgspec.json.encode(report)) + b"\n"


def render_page(report: Report) -> str:
    """The whole page as HTML."""
    style = files("isthmus.observe").joinpath("page.css").read_text(encoding="utf-8")
    failures = _failures(report)
    is_over = report.outcome == "failed"  # else the run outlived its failures
    body = "\n".join(
        (
            _header(report),
            _tiles(report),
            failures if is_over else "",
            _figure(loss_chart(report)),
            _pair(small_charts(report)),
            _figures_section(report),
            _ranks_section(report),
            "" if is_over else failures,
            _attempts_section(report),
            _checkpoints_section(report),
            _notices_section(report),
            _setup_section(report),
            _footer(report),
        )
    )
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(report.name)}: {report.outcome}</title>\n"
        f"<style>\n{style}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"
    )


def _header(report: Report) -> Html:
    detail = f": {report.detail}" if report.detail else ""
    facts = [
        words.things(report.world_size, "rank") if report.world_size else "",
        report.device or "",
        f"{words.count(report.num_params)} parameters" if report.num_params else "",
        f"started {words.moment(report.started_s)}" if report.started_s else "no events yet",
        f"took {words.seconds(report.duration_s)}" if report.duration_s else "",
    ]
    return Html(
        f"<header><h1>{escape(report.name)}</h1>"
        f'<span class="outcome {report.outcome}">{escape(report.outcome + detail)}</span>'
        f"<p>{escape(' · '.join(filter(None, facts)))}</p></header>"
    )


def _tiles(report: Report) -> Html:
    loss = report.loss
    bits = loss.validation_bits_per_byte
    step = report.step_time_s
    total = f"of {report.total_steps:,}" if report.total_steps else ""
    replayed = f"{report.num_replayed_steps:,} repeated" if report.num_replayed_steps else ""
    baseline = f"bigram {words.nats(loss.bigram_nats)}" if loss.bigram_nats is not None else ""
    tiles = [
        ("Validation loss, nats", words.nats(loss.validation_nats), baseline),
        (
            "Bits per byte",
            words.ABSENT if bits is None else f"{bits:.3f}",
            f"at step {loss.validation_step:,}" if loss.validation_step is not None else "",
        ),
        ("Steps", f"{report.last_step:,}", " · ".join(filter(None, (total, replayed)))),
        (
            "Tokens per second",
            words.count(report.tokens_per_s),
            f"{words.count(report.tokens)} tokens",
        ),
        (
            "Step time, median",
            words.seconds(step.p50 if step else None),
            f"p99 {words.seconds(step.p99)}" if step else "",
        ),
        (
            "Waiting for the network",
            words.share(report.communication_share),
            f"{words.nbytes(report.sent_nbytes)} sent",
        ),
    ]
    cells = "".join(
        f"<div><dt>{escape(label)}</dt><dd>{escape(value)}</dd><dd>{escape(remark)}</dd></div>"
        for label, value, remark in tiles
    )
    return Html(f'<dl class="tiles">{cells}</dl>')


def _figures_section(report: Report) -> Html:
    rows = figures(report)
    if report.predicted is None:
        header = ("", "measured", "")
        rows = [(label, measured, remark) for label, measured, _, remark in rows]
    else:
        header = ("", "measured", "predicted", "")
    return _section("Figures", _table(header, rows, numbers={"measured", "predicted"}))


def _ranks_section(report: Report) -> Html:
    most = max((rank.sent_nbytes for rank in report.ranks), default=0) or 1
    rows = [
        (
            str(rank.rank),
            rank.host or words.ABSENT,
            f"{rank.backend or words.ABSENT}{f' on {rank.interface}' if rank.interface else ''}",
            rank.device or words.ABSENT,
            f"{rank.num_steps:,}",
            words.nbytes(rank.sent_nbytes_per_step),
            _with_bar(words.nbytes(rank.sent_nbytes), rank.sent_nbytes / most, "bar"),
            words.seconds(rank.communication_time_s),
            _with_bar(
                words.share(rank.communication_share), rank.communication_share or 0.0, "bar wait"
            ),
        )
        for rank in report.ranks
    ]
    figures_of = ("steps", "sent a step", "sent in all", "waited", "of its time")
    header = ("rank", "host", "backend", "device", *figures_of)
    table = _table(header, rows, numbers={"rank", *figures_of})
    return _section("Ranks", table) if rows else Html()


def _with_bar(text: str, part: float, style: str) -> Html:
    width = 100 * min(max(part, 0.0), 1.0)
    return Html(f'{escape(text)}<span class="{style}" style="width:{width:.1f}%"></span>')


def _attempts_section(report: Report) -> Html:
    rows = [
        (
            str(attempt.attempt),
            words.moment(attempt.started_s),
            f"{attempt.start_step:,}",
            f"{attempt.last_step:,}",
            str(attempt.world_size),
            attempt.launcher,
            words.seconds(attempt.duration_s),
            _tagged(attempt.outcome, attempt.outcome, attempt.detail),
        )
        for attempt in report.attempts
    ]
    header = ("attempt", "started", "from", "to step", "ranks", "launcher", "took", "outcome")
    numbers = {"attempt", "from", "to step", "ranks", "took"}
    return _section("Attempts", _table(header, rows, numbers=numbers)) if rows else Html()


def _checkpoints_section(report: Report) -> Html:
    rows = [
        (
            f"{saved.step:,}",
            words.moment(saved.time_s),
            words.nbytes(saved.nbytes),
            words.seconds(saved.duration_s),
            _code(saved.path),
        )
        for saved in report.checkpoints
    ]
    loaded = [
        Html(f"went on from step {event.step:,}: {_code(event.path)}")
        for event in report.checkpoints_loaded
    ]
    rejected = [
        _tagged("warning", "passed over", f"{event.path}: {event.reason}")
        for event in report.checkpoints_rejected
    ]
    header = ("step", "saved", "size", "took", "path")
    table = _table(header, rows, numbers={"step", "size", "took"}, most=12) if rows else ""
    remarks = _list([*loaded, *rejected])
    return _section("Checkpoints", Html(table + remarks)) if rows or remarks else Html()


def _failures(report: Report) -> Html:
    parts = []
    for index, failure in enumerate(report.failures[:_MOST_LINES]):
        head = f"rank {failure.rank} on {failure.host}: {failure.error_type}: {failure.message}"
        if not failure.traceback:
            parts.append(f'<div class="failed">{escape(head)}</div>')
            continue
        is_open = " open" if index == 0 else ""
        parts.append(
            f'<details{is_open}><summary class="failed">{escape(head)}</summary>'
            f"<pre>{escape(failure.traceback)}</pre></details>"
        )
    return _section("Failures", Html("".join(parts))) if parts else Html()


def _notices_section(report: Report) -> Html:
    lines = [
        _tagged(
            notice.level,
            notice.level,
            f"{notice.message} (rank {notice.rank}, {words.moment(notice.time_s)})",
        )
        for notice in report.notices
    ]
    lines += [
        _tagged("warning", "fault", f"{fault.summary} ({words.moment(fault.time_s)})")
        for fault in report.faults
    ]
    if report.loss.num_not_finite:
        steps = words.things(report.loss.num_not_finite, "step")
        where = f"in {steps}, first at step {report.loss.first_not_finite_step}"
        lines.insert(0, _tagged("failed", "the training loss was not finite", where))
    return _section("Notices", _list(lines)) if lines else Html()


def _setup_section(report: Report) -> Html:
    facts: dict[str, str] = {
        **report.settings,
        "configuration": report.config_digest or "",
        "commit": report.git or "",
        "versions": ", ".join(f"{name} {version}" for name, version in report.versions.items()),
    }
    shown = {label: text for label, text in facts.items() if text}
    return _section("Set-up", _facts(shown)) if shown else Html()


def _footer(report: Report) -> Html:
    until = f"Events up to {words.moment(report.ended_s)}." if report.ended_s else "No events yet."
    skipped = skipped_lines(report)
    return Html(f"<footer>{escape(until)} {escape(skipped.capitalize())}</footer>")


def _figure(chart: Chart) -> Html:
    return Html(f"<figure><h2>{escape(chart.title)}</h2>{draw(chart)}</figure>")


def _pair(charts: Sequence[Chart]) -> Html:
    return Html(f'<div class="pair">{"".join(map(_figure, charts))}</div>')


def _section(title: str, content: str) -> Html:
    return Html(f'<section><h2>{escape(title)}</h2><div class="wide">{content}</div></section>')


def _table(
    header: Sequence[str], rows: Sequence[Sequence[str]], *, numbers: set[str], most: int = 64
) -> Html:
    """A table of the last ``most`` rows; columns named in ``numbers`` are set to the right."""
    styles = [' class="number"' if name in numbers else "" for name in header]
    head = "".join(f"<th{s}>{escape(name)}</th>" for s, name in zip(styles, header, strict=True))
    body = "".join(
        f"<tr>{''.join(f'<td{s}>{_markup(c)}</td>' for s, c in zip(styles, row, strict=True))}</tr>"
        for row in rows[-most:]
    )
    hidden = len(rows) - most
    note = (
        f"<p>The {words.things(hidden, 'row')} before these are in report.json.</p>"
        if hidden > 0
        else ""
    )
    return Html(f"{note}<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>")


def _list(lines: Sequence[Html]) -> Html:
    if not lines:
        return Html()
    hidden = len(lines) - _MOST_LINES
    note = f"<li>{hidden:,} more are in report.json</li>" if hidden > 0 else ""
    return Html(f"<ul>{''.join(f'<li>{line}</li>' for line in lines[:_MOST_LINES])}{note}</ul>")


def _facts(facts: Mapping[str, str]) -> Html:
    items = (f"<dt>{escape(label)}</dt><dd>{escape(text)}</dd>" for label, text in facts.items())
    return Html(f'<dl class="facts">{"".join(items)}</dl>')


def _tagged(style: str, tag: str, text: str) -> Html:
    """A coloured word, then text."""
    return Html(f'<span class="{style}">{escape(tag)}</span> {escape(text)}')


def _code(text: str) -> Html:
    return Html(f"<code>{escape(text)}</code>")


def _markup(text: str) -> str:
    return text if isinstance(text, Html) else escape(text)


def _write_whole(path: Path, content: bytes) -> None:
    """Writes beside the path and renames, so that a reader never sees half a file."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        unfinished.write_bytes(content)
        unfinished.replace(path)
    except OSError as problem:
        unfinished.unlink(missing_ok=True)
        raise IsthmusError(
            f"{path} cannot be written: {problem.strerror or problem}",
            hint="free some space or mend the directory's permissions, then ask again",
        ) from problem
