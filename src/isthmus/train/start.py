"""What ``isthmus train`` does around the ranks: choose the run, start them, report. No torch.

On one machine this process starts the ranks, follows rank 0's event log to show progress, and
writes the report when they have ended. When a launcher has already made this process a rank, it
joins the others instead.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, TextIO, cast

from rich.console import Console

from isthmus.elastic import failures
from isthmus.elastic.environment import RankEnvironment, detect
from isthmus.elastic.launcher import launch
from isthmus.errors import EXIT_INTERRUPTED, EXIT_OK, ConfigError, IsthmusError
from isthmus.observe.display import Display
from isthmus.observe.events import Failure
from isthmus.observe.log import EventLog, follow
from isthmus.observe.page import write_report
from isthmus.observe.report import build_report
from isthmus.observe.table import render_table
from isthmus.spec.load import Resolved
from isthmus.spec.run import RunSpec
from isthmus.train.preflight import check_layout, open_checked_data
from isthmus.train.run_directory import (
    DEFAULT_ROOT,
    Opened,
    RunDirectory,
    Status,
    describe,
    open_run,
)

DEFAULT_RANKS = 2
"""Ranks on a machine without accelerators: enough to show that ranks agree."""


@dataclass(frozen=True)
class Request:
    """What the user asked for besides the configuration.

    Attributes:
        ranks: Ranks to start here; None for the configuration's number.
        run_dir: The run's own directory; None for one under ``runs/``.
        fresh: Begin anew in a new directory.
        dry_run: Only say what would be done.
    """

    ranks: int | None = None
    run_dir: Path | None = None
    fresh: bool = False
    dry_run: bool = False


def train(resolved: Resolved[RunSpec], request: Request) -> int:
    """Trains the run that a configuration describes and returns an exit code.

    Raises:
        IsthmusError: What was asked for can't be done.
    """
    environment = detect(os.environ)
    if environment is not None:
        return _join(resolved, request, environment)
    spec, err = resolved.spec, _stderr()
    if "SLURM_JOB_ID" in os.environ:
        err.print("inside a SLURM job, but not one of several tasks: training on this host alone")
    num_ranks = spec.ranks or _default_ranks(spec) if request.ranks is None else request.ranks
    check_layout(spec, num_ranks)
    if not request.dry_run:
        open_checked_data(spec, num_ranks)
    opened = open_run(
        resolved, explicit=request.run_dir, fresh=request.fresh, dry_run=request.dry_run
    )
    _announce(opened, spec, num_ranks, err)
    if request.dry_run:
        return EXIT_OK
    if opened.status is Status.FINISHED:
        return _conclude(opened.directory, err)
    code = _launch(opened.directory, spec, num_ranks, err)
    if code == EXIT_INTERRUPTED:
        saved = any(opened.directory.checkpoints.glob("step-*"))
        then = "with a checkpoint; the same command goes on from there"
        err.print(f"stopped {then if saved else 'before the first checkpoint'}")
    elif code == EXIT_OK:
        _conclude(opened.directory, err)
    else:
        _log_silent_death(opened.directory)
    return code


def _join(resolved: Resolved[RunSpec], request: Request, environment: RankEnvironment) -> int:
    if request.ranks not in (None, environment.world_size):
        raise ConfigError(
            f"--ranks {request.ranks}, but {environment.launcher} has started "
            f"{environment.world_size} ranks",
            hint="leave --ranks out where another launcher starts the ranks",
        )
    check_layout(resolved.spec, environment.world_size)
    if request.dry_run:
        opened = open_run(
            resolved, explicit=request.run_dir, fresh=request.fresh, dry_run=request.dry_run
        )
        _announce(opened, resolved.spec, environment.world_size, _stderr())
        return EXIT_OK
    from isthmus.train.worker import join

    opened = join(
        resolved, environment, root=DEFAULT_ROOT, explicit=request.run_dir, fresh=request.fresh
    )
    if environment.rank == 0:
        return _conclude(opened.directory, _stderr())
    return EXIT_OK


def _launch(directory: RunDirectory, spec: RunSpec, num_ranks: int, err: Console) -> int:
    tail = follow(directory.events(0), skip_existing=True)
    display = Display(err, interval_s=spec.observe.log_interval_s)

    def show() -> None:
        for event in tail.poll():
            if not isinstance(event, Failure):  # the launcher says which one was the first
                display.handle(event)
        display.tick(time.time())

    try:
        return launch(
            [sys.executable, "-m", "isthmus.train", str(directory.path)],
            num_ranks=num_ranks,
            run_dir=directory.path,
            grace_s=spec.deadlines.stop_grace_s,
            failure_grace_s=spec.deadlines.failure_grace_s,
            on_poll=show,
            on_output=_printer(err, num_ranks),
            say=lambda text: err.print(text, soft_wrap=True),
        )
    finally:
        display.close()


def _log_silent_death(directory: RunDirectory) -> None:
    """Writes the failure of a rank that could not do so itself into its event log."""
    failure = failures.read_cause(directory.path)
    if failure is None or failure.rank is None or failure.traceback:
        return
    with suppress(IsthmusError), EventLog(directory.events(failure.rank)) as log:
        log.emit(
            Failure(
                time_s=failure.time_s,
                rank=failure.rank,
                host=failure.host,
                error_type=failure.kind,
                message=failure.message,
                step=failure.step,
            )
        )


def _printer(err: Console, num_ranks: int) -> Callable[[int, str, str], None]:
    """Prints what ranks write, above the display, with the rank where there are several."""

    def show(rank: int, stream: str, line: str) -> None:
        prefix = f"[rank {rank}] " if num_ranks > 1 else ""
        err.print(prefix + line.rstrip("\n"), soft_wrap=True)

    return show


def _announce(opened: Opened, spec: RunSpec, num_ranks: int, err: Console) -> None:
    path = opened.directory.path
    if opened.changed_from is not None:
        err.print(f"the configuration differs from that of {opened.changed_from}:", soft_wrap=True)
        err.print(describe(opened.differences), soft_wrap=True)
    what = f"{spec.model.num_parameters:,} parameters, {num_ranks} rank{'s'[: num_ranks > 1]}"
    match opened.status:
        case Status.NEW:
            err.print(f"training {spec.run_name} in {path} ({what})", soft_wrap=True)
        case Status.RESUME:
            err.print(f"resuming {path} ({what})", soft_wrap=True)
        case Status.FINISHED:
            err.print(f"{path} is finished; --fresh trains it once more", soft_wrap=True)


def _conclude(directory: RunDirectory, err: Console) -> int:
    """Prints the report's table and writes its page."""
    report = build_report(directory.path)
    render_table(report, Console(markup=False))
    try:
        json_path, html_path = write_report(report, directory.path)
        err.print(f"report: {html_path} and {json_path.name}", soft_wrap=True)
    except OSError as error:
        err.print(f"the report's page could not be written: {error}", soft_wrap=True)
    return EXIT_OK


def _stderr() -> Console:
    """Where people are told things: texts are shown as they are, and nothing here ends a run."""
    return Console(file=cast("TextIO", _Unbreakable(sys.stderr)), markup=False, highlight=False)


class _Unbreakable:
    """A text stream whose reader may go away: what can't be written then is dropped."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _default_ranks(spec: RunSpec) -> int:
    """One rank per accelerator that is to be used; ``DEFAULT_RANKS`` without any."""
    usable = 0 if spec.train.device == "cpu" else _accelerators()
    return usable or DEFAULT_RANKS


def _accelerators() -> int:
    """Accelerators that torch can use, counted without importing it.

    They are NVIDIA's as the driver lists them, and none if the installed torch is a CPU build.
    """
    if version("torch").endswith("+cpu"):
        return 0
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([name for name in visible.split(",") if name.strip() not in ("", "-1")])
    listed = Path("/proc/driver/nvidia/gpus")
    return len(list(listed.iterdir())) if listed.is_dir() else 0
