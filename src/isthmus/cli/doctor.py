"""``isthmus doctor``: is this machine fit for a run, and what would hold a run back here."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from isthmus.errors import EXIT_FAILED

if TYPE_CHECKING:
    from rich.console import Console

    from isthmus.measure.finding import Check, Finding

_STYLES: Final = {"pass": "green", "warn": "yellow", "fail": "bold red"}


def doctor(
    directory: Annotated[
        Path, typer.Option("--directory", metavar="DIR", help="Where runs are to be kept.")
    ] = Path("runs"),
    quick: Annotated[
        bool, typer.Option("--quick", help="Only look; measure nothing and start no ranks.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check this machine: versions, devices, limits, network, disk, and two ranks that add."""
    from rich.console import Console

    from isthmus.measure.doctor import CHECKS, worst
    from isthmus.measure.finding import Status, Surroundings, examine

    console, progress = Console(highlight=False), Console(stderr=True)
    checks = [check for check in CHECKS if not (quick and check.measures)]
    findings = []
    with Surroundings(directory) as surroundings:
        for check in checks:
            with progress.status(f"{check.name} ..."):
                finding = examine(check, surroundings)
            findings.append(finding)
            if not as_json:
                _show(console, check, finding)
    if as_json:
        typer.echo(_to_json(checks, findings, worst(findings)))
    else:
        _show_summary(console, findings)
    if worst(findings) is Status.FAIL:
        raise typer.Exit(EXIT_FAILED)


def _show(console: Console, check: Check, finding: Finding) -> None:
    """Print a finding: in columns on a terminal, on one unbroken line elsewhere."""
    from rich.table import Table
    from rich.text import Text

    status = Text(finding.status.upper(), _STYLES[finding.status])
    hint = Text(f"hint: {finding.hint}", "dim") if finding.hint else None
    if not console.is_terminal:
        typer.echo(f"{status.plain}  {check.name:<13}  {finding.text}")
        if hint:
            typer.echo(f"{'':19}  {hint.plain}")
        return
    row = Table.grid(padding=(0, 2, 0, 0))
    row.add_column(width=4)
    row.add_column(width=13)
    row.add_column(ratio=1, overflow="fold")
    row.add_row(status, check.name, Text(finding.text))
    if hint:
        row.add_row("", "", hint)
    console.print(row)


def _show_summary(console: Console, findings: list[Finding]) -> None:
    counts = [sum(found.status == status for found in findings) for status in _STYLES]
    passed, warned, failed = counts
    plural = "s" if warned != 1 else ""
    console.print(f"{passed} passed, {warned} warning{plural}, {failed} failed")


def _to_json(checks: list[Check], findings: list[Finding], status: str) -> str:
    import json

    from isthmus.measure.host import versions

    shown = [
        {
            "name": check.name,
            "status": finding.status,
            "finding": finding.text,
            "hint": finding.hint,
            "values": finding.values,
        }
        for check, finding in zip(checks, findings, strict=True)
    ]
    head = {"isthmus": versions().isthmus, "status": status}
    return json.dumps(head | {"checks": shown}, indent=2)
