"""``isthmus train``: train a model, or go on where a run stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from isthmus.cli.config import RunFile, Sets


def train(
    run: RunFile = None,
    sets: Sets = None,
    ranks: Annotated[
        int | None,
        typer.Option(help="Ranks to start on this machine (default: one per accelerator, or 2)."),
    ] = None,
    run_dir: Annotated[
        Path | None, typer.Option(help="Directory of the run (default: runs/NAME).")
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Begin anew in a new directory.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be done, and do nothing.")
    ] = False,
) -> None:
    """Train the model of RUN, or with no RUN a byte-level one on Python's own source.

    The same command resumes a run that was stopped; a finished run says so. Under torchrun or srun
    it joins the ranks that they have started.
    """
    from isthmus.spec.load import load
    from isthmus.spec.run import RunSpec
    from isthmus.train.start import Request, train

    code = train(
        load(RunSpec, run, sets or ()),
        Request(ranks=ranks, run_dir=run_dir, fresh=fresh, dry_run=dry_run),
    )
    raise typer.Exit(code)
