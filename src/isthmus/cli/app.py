"""The command ``isthmus``: its verbs, and how it ends.

A verb ends with ``typer.Exit(code)`` or raises. Here, and only here, errors become text.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version
from typing import Annotated

import typer

from isthmus.cli import checkpoint, config, doctor, lab, report, train
from isthmus.errors import EXIT_FAILED, EXIT_OK, IsthmusError

app = typer.Typer(
    name="isthmus",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Train one PyTorch model across machines joined by slow, mixed or failing networks.",
    epilog="Exit codes: 0 done; 1 failed; 2 bad input; 75 stopped on request after a checkpoint "
    "(the same command goes on).",
)
app.command("train")(train.train)
app.command("report")(report.report)
app.command("doctor")(doctor.doctor)
app.add_typer(config.app, name="config")
app.add_typer(checkpoint.app, name="checkpoint")
app.add_typer(lab.app, name="lab")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"isthmus {version('isthmus')}")
        raise typer.Exit


@app.callback()
def _root(
    _version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    pass


def run(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code; errors are printed, never raised."""
    try:
        app(args=arguments, prog_name="isthmus")
    except SystemExit as end:  # typer's own: a usage error, a verb's code, Ctrl-C, a closed pipe
        return end.code if isinstance(end.code, int) else EXIT_OK
    except IsthmusError as error:
        _complain(error.message, error.hint)
        return error.exit_code
    except OSError as error:
        _complain(f"{error.filename or 'a system call'}: {error.strerror or error}", "")
        return EXIT_FAILED
    return EXIT_OK


def _complain(message: str, hint: str) -> None:
    typer.echo(f"error: {message}", err=True)
    if hint:
        typer.echo(f"hint: {hint}", err=True)
