"""``isthmus report``: what happened in a run, as a table, a page and data."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from isthmus.cli.config import AsJson


def report(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="The directory of a run.")],
    as_json: AsJson = False,
) -> None:
    """Show what happened in a run; write report.html and report.json into its directory."""
    from rich.console import Console

    from isthmus.observe.page import report_json, write_report
    from isthmus.observe.report import build_report
    from isthmus.observe.table import render_table

    made = build_report(run_dir)
    if as_json:
        typer.echo(report_json(made).decode(), nl=False)
    else:
        render_table(made, Console(markup=False))
    try:
        _, page = write_report(made, run_dir)
        typer.echo(f"page: {page}", err=True)
    except OSError as problem:
        typer.echo(f"the page could not be written: {problem}", err=True)
