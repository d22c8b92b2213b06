"""One rank of a run, from its environment to its exit code.

Started by isthmus's own launcher as ``python -m isthmus.train RUN_DIR``; under torchrun and
SLURM the command ``isthmus train`` finds itself to be a rank and calls :func:`join`.
"""

from __future__ import annotations

import os
import socket
import sys
import time
import traceback
from collections.abc import Generator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from rich.console import Console

from isthmus.data import Manifest, TextData, check_unchanged
from isthmus.elastic import failures
from isthmus.elastic.environment import RankEnvironment, detect
from isthmus.elastic.rendezvous import Rendezvous, rendezvous
from isthmus.elastic.signals import StopRequest
from isthmus.errors import ConfigError, DataError, Interrupted, IsthmusError, LaunchError
from isthmus.observe.display import Display
from isthmus.observe.events import Baselines, Event, Failure, Notice, RankStarted, RunStarted
from isthmus.observe.log import EventLog
from isthmus.observe.sinks import QueuedSink, TensorBoardSink
from isthmus.spec.load import Resolved
from isthmus.spec.run import RunSpec
from isthmus.train.assembly import assembled, choose_device, describe_device, digest, versions
from isthmus.train.preflight import check_layout, open_checked_data
from isthmus.train.run_directory import (
    Opened,
    RunDirectory,
    Status,
    count_attempts,
    open_run,
    write_whole,
)
from isthmus.train.trainer import Parts, Trainer


def main() -> None:
    """A rank under isthmus's own launcher; the run directory is the one argument."""
    environment = detect(os.environ)
    if environment is None or len(sys.argv) != 2:
        raise SystemExit("this module is started by `isthmus train`")
    directory = RunDirectory(Path(sys.argv[1]))
    with failures.capture(directory.path, environment) as watch:
        spec = directory.load_spec()
        with _met(spec, directory.path, environment) as meeting, StopRequest() as stop:
            _train(spec, directory, meeting, stop, watch)


def join(
    resolved: Resolved[RunSpec],
    environment: RankEnvironment,
    *,
    root: Path,
    explicit: Path | None,
    fresh: bool,
) -> Opened:
    """A rank that another launcher has started: meets the others, agrees on the run, trains.

    Returns:
        The run that they agreed on; it was trained, unless it is finished.

    Raises:
        IsthmusError: As the run does.
    """
    spec = resolved.spec
    check_layout(spec, environment.world_size)
    with _met(spec, root, environment) as meeting, StopRequest() as stop:
        opened = _open_together(resolved, meeting, root=root, explicit=explicit, fresh=fresh)
        if opened.status is not Status.FINISHED:
            with failures.capture(opened.directory.path, environment) as watch:
                _train(spec, opened.directory, meeting, stop, watch, show=True)
        return opened


@contextmanager
def _met(
    spec: RunSpec, shared: Path, environment: RankEnvironment
) -> Generator[Rendezvous, None, None]:
    device = choose_device(spec, environment)
    with rendezvous(
        environment,
        run_dir=shared,
        rendezvous_s=spec.deadlines.rendezvous_s,
        collective_s=spec.deadlines.collective_s,
        device_type="cuda" if device.type == "cuda" else "cpu",
    ) as meeting:
        yield meeting


def _open_together(
    resolved: Resolved[RunSpec],
    meeting: Rendezvous,
    *,
    root: Path,
    explicit: Path | None,
    fresh: bool,
) -> Opened:
    """Rank 0 opens the run; the others learn which one, or why not."""
    answer: list[Any] = [None]
    if meeting.environment.rank == 0:
        try:
            open_checked_data(resolved.spec, meeting.environment.world_size)
            answer = [open_run(resolved, root=root, explicit=explicit, fresh=fresh)]
        except ConfigError as error:
            answer = [error]
    dist.broadcast_object_list(answer, src=0)
    if isinstance(answer[0], ConfigError):
        raise answer[0]
    opened: Opened = answer[0]
    if not opened.directory.path.is_dir():
        raise LaunchError(
            f"rank {meeting.environment.rank} on {socket.gethostname()} does not see the run "
            f"directory {opened.directory.path.resolve()} that rank 0 has opened",
            hint="the run directory must be on a file system that all hosts share (--run-dir)",
        )
    return opened


def _train(
    spec: RunSpec,
    directory: RunDirectory,
    meeting: Rendezvous,
    stop: StopRequest,
    watch: failures.Watch,
    *,
    show: bool = False,
) -> None:
    environment = meeting.environment
    device = choose_device(spec, environment)
    attempt = count_attempts(directory) + 1
    with ExitStack() as stack:
        log = _open_log(spec, directory, environment, stack, show=show)
        _emit(log, environment, RankStarted, **_whereabouts(meeting, device))
        if environment.rank == 0 and environment.world_size > 1:
            _emit(log, environment, Notice, level="info", message=f"gloo uses {meeting.interface}")
        stack.enter_context(_failure_logged(log, environment, watch))
        parts = stack.enter_context(assembled(spec, directory, environment, device, log))
        _keep_manifest(directory, parts.data, environment)
        trainer = Trainer(spec, parts, environment, stop)
        trainer.resume()
        if environment.rank == 0 and attempt > 1 and trainer.progress.step == 0:
            message = "no checkpoint was found: the run begins again at its first step"
            _emit(log, environment, Notice, message=message)
        if environment.rank == 0:
            _introduce(spec, parts, environment, trainer.progress.step, attempt)

        def note_step(step: int) -> None:
            watch.step = step

        trainer.run(note_step)


@contextmanager
def _failure_logged(
    log: EventLog, environment: RankEnvironment, watch: failures.Watch
) -> Generator[None, None, None]:
    """What ends the rank is in its event log too, so that every view can show it."""
    try:
        yield
    except Interrupted:
        raise
    except Exception as error:
        with suppress(IsthmusError):  # a disk that is full must not hide the failure itself
            _emit(
                log,
                environment,
                Failure,
                host=socket.gethostname(),
                error_type=type(error).__name__,
                message=_first_line(error),
                traceback="".join(traceback.format_exception(error)),
                step=watch.step,
            )
        raise


def _first_line(error: Exception, limit: int = 300) -> str:
    """What an error says, short enough for a table: native libraries write pages."""
    return (str(error).splitlines() or [""])[0][:limit]


def _keep_manifest(directory: RunDirectory, data: TextData, environment: RankEnvironment) -> None:
    """Holds the data to the manifest that the run began with, or keeps it if this is the beginning.

    Raises:
        DataError: The data have changed; it names the files.
    """
    kept = directory.data_manifest
    if kept.exists():
        try:
            began_with = Manifest.from_json(kept.read_bytes())
        except msgspec.DecodeError as error:
            raise DataError(
                f"{kept} is damaged: {error}",
                hint="remove it if the data are still those that the run began with",
            ) from None
        check_unchanged(began_with, data.manifest)
    elif environment.rank == 0:
        write_whole(kept, data.manifest.to_json())


def _open_log(
    spec: RunSpec,
    directory: RunDirectory,
    environment: RankEnvironment,
    stack: ExitStack,
    *,
    show: bool,
) -> EventLog:
    subscribers: list[Any] = []
    if environment.rank == 0 and spec.observe.tensorboard:
        subscribers.append(QueuedSink(TensorBoardSink(directory.tensorboard)))
    if environment.rank == 0 and show:
        display = Display(Console(stderr=True), interval_s=spec.observe.log_interval_s)
        stack.callback(display.close)

        def draw(event: Event) -> None:
            display.handle(event)
            display.tick(event.time_s)

        subscribers.append(draw)
    return stack.enter_context(
        EventLog(directory.events(environment.rank), subscribers=subscribers)
    )


def _whereabouts(meeting: Rendezvous, device: torch.device) -> dict[str, Any]:
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "backend": meeting.backend,
        "interface": meeting.interface.name,
        "device": describe_device(device),
    }


def _introduce(
    spec: RunSpec, parts: Parts, environment: RankEnvironment, start_step: int, attempt: int
) -> None:
    """Rank 0 says what the run is, and what its losses are to be held against."""
    manifest = parts.data.manifest
    validation = manifest.files["validation"]
    _emit(
        parts.log,
        environment,
        RunStarted,
        name=spec.run_name,
        attempt=attempt,
        world_size=environment.world_size,
        total_steps=spec.train.steps,
        start_step=start_step,
        launcher=environment.launcher,
        device=describe_device(parts.device),
        num_params=spec.model.num_parameters,
        config_digest=digest(spec),
        bytes_per_token=validation.text_nbytes / validation.tokens,
        versions=versions(),
        settings={
            "data": f"{spec.data.kind}, digest {parts.data.digest}",
            "batch": f"{spec.train.global_batch_size} x {spec.data.sequence_length} tokens",
            "synchronisation": spec.sync.label(),
            "precision": "bf16 autocast" if parts.autocast else "fp32",
        },
    )
    baselines = parts.data.baselines()
    if baselines is not None:
        _emit(
            parts.log,
            environment,
            Baselines,
            bigram_nats=baselines.bigram,
            trigram_nats=baselines.trigram,
        )


def _emit(log: EventLog, environment: RankEnvironment, event: type[Event], **fields: Any) -> None:
    log.emit(event(time_s=time.time(), rank=environment.rank, **fields))
