"""``isthmus checkpoint``: what checkpoints a run has, and whether they are sound."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from isthmus.cli.config import AsJson
from isthmus.errors import EXIT_FAILED, ConfigError

app = typer.Typer(no_args_is_help=True, help="List and verify checkpoints.")

Where = Annotated[
    Path, typer.Argument(metavar="DIR", help="A run, its checkpoint/ directory, or one checkpoint.")
]


@app.command("ls")
def ls(where: Where, as_json: AsJson = False) -> None:
    """List the checkpoints of a run, oldest first."""
    from isthmus.checkpoint import list_checkpoints
    from isthmus.spec.units import format_bytes

    found = list_checkpoints(_directory(where))
    rows = [{**asdict(info), "path": str(info.path)} for info in found]
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    for info in found:
        size, ranks = format_bytes(info.nbytes), info.world_size
        typer.echo(f"step {info.step:>8}  {size:>8}  {ranks} ranks  {info.path}")
    damaged = len(_each(where)) - len(found)
    if damaged:
        typer.echo(
            f"{damaged} more without a valid manifest; see isthmus checkpoint verify", err=True
        )
    elif not found:
        typer.echo(f"{where} has no checkpoint yet", err=True)


@app.command()
def verify(where: Where, as_json: AsJson = False) -> None:
    """Read every byte of a run's checkpoints, or of one, and say what is damaged."""
    from isthmus.checkpoint import verify as verify_one

    paths = _each(where)
    if not paths:
        raise ConfigError(
            f"{where} has no checkpoint to verify", hint="give a run, such as runs/NAME"
        )
    results = [verify_one(path) for path in paths]
    if as_json:
        rows: list[dict[str, Any]] = [
            {"path": str(r.path), "ok": r.ok, "problems": [asdict(p) for p in r.problems]}
            for r in results
        ]
        typer.echo(json.dumps(rows, indent=2))
    else:
        for result in results:
            typer.echo(f"{'ok ' if result.ok else 'BAD'}  {result.path}")
            for problem in result.problems:
                tensor = f" (tensor {problem.tensor})" if problem.tensor else ""
                typer.echo(f"     {problem.file}: {problem.reason}{tensor}")
    if not all(result.ok for result in results):
        raise typer.Exit(EXIT_FAILED)


def _directory(where: Path) -> Path:
    """The directory of the checkpoints of a run, which may be given itself."""
    if not where.is_dir():
        raise ConfigError(f"there is no directory {where}", hint="give a run, such as runs/NAME")
    return where / "checkpoint" if (where / "checkpoint").is_dir() else where


def _each(where: Path) -> list[Path]:
    directory = _directory(where)
    if (directory / "manifest.json").exists():
        return [directory]
    return sorted(path for path in directory.glob("step-????????") if path.is_dir())
