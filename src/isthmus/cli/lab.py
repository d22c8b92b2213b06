"""``isthmus lab``: a cluster on this machine, a command in all its hosts, and faults while it runs.

``isthmus lab CLUSTER -- COMMAND`` is ``isthmus lab run CLUSTER -- COMMAND``: the first word is a
cluster's file unless it is one of the verbs.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Generator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from isthmus.cli import lab_check
from isthmus.errors import EXIT_FAILED, EXIT_OK, ConfigError

if TYPE_CHECKING:
    from isthmus.lab.cluster import Cluster
    from isthmus.lab.topology import Topology
    from isthmus.observe.log import EventLog


class _RunsByDefault(TyperGroup):
    """Takes what is no verb for the arguments of ``run``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Put the verb in front where it was left out."""
        if args and args[0] not in (*self.commands, *ctx.help_option_names):
            args = ["run", *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    cls=_RunsByDefault,
    no_args_is_help=True,
    help="Emulate a cluster on this machine: isthmus lab CLUSTER -- COMMAND.",
)
app.command("check")(lab_check.check)

ClusterFile = Annotated[Path, typer.Argument(metavar="CLUSTER", help="A cluster.toml.")]
AllowMissing = Annotated[
    list[str] | None,
    typer.Option(
        metavar="WHAT",
        help="Go on without what can't be emulated here (latency) or checked (memory).",
    ),
]
LabId = Annotated[
    str | None, typer.Option("--lab", metavar="ID", help="Which lab, if several run.")
]


@app.command("run")
def run(
    cluster_file: ClusterFile,
    command: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[-- COMMAND...]",
            help="What to run once in every host.",
        ),
    ] = None,
    train: Annotated[
        Path | None,
        typer.Option(metavar="RUN", help="Train this run.toml, one rank for each device."),
    ] = None,
    sets: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="With --train: set one value of RUN."),
    ] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="With --train: begin anew in a new directory.")
    ] = False,
    per_rank: Annotated[
        bool, typer.Option("--per-rank", help="Start COMMAND once for each device, as a rank.")
    ] = False,
    timeline: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Faults and their times.")
    ] = None,
    run_dir: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Directory of the run: its steps time faults, and faults are recorded there.",
        ),
    ] = None,
    grace_s: Annotated[
        float, typer.Option("--grace", min=0, help="Seconds to end in after Ctrl-C.")
    ] = 30.0,
    allow_missing: AllowMissing = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be built and run, and do nothing.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="With --dry-run: print JSON.")] = False,
) -> None:
    """Build CLUSTER, run COMMAND in every host of it, and take everything down again.

    Each line of output begins with its host. The exit code is that of the first failure.
    """
    from isthmus.lab.cluster import Cluster, refuse_unknown_program
    from isthmus.lab.timeline import load_timeline
    from isthmus.spec.cluster import ClusterSpec
    from isthmus.spec.load import load

    spec = load(ClusterSpec, cluster_file).spec
    words = list(command or ())
    directory = run_dir or Path("runs") / f"lab-in-{spec.name}"
    if train is not None:
        if words:
            raise ConfigError(
                "both --train and a command are given", hint="options of RUN go into --set"
            )
        words, directory = _training(train, sets or [], spec.name, explicit=run_dir, fresh=fresh)
    elif sets or fresh:
        raise ConfigError("--set and --fresh are for --train alone")
    faults = load_timeline(timeline, spec).fault if timeline is not None else ()
    cluster = Cluster(spec, allow_missing=allow_missing or ())
    refuse_unknown_program(words, os.environ)
    if dry_run:
        _show_plan(cluster.topology, words, as_json=as_json)
        return
    steps_of_run = directory if train is not None or run_dir is not None else None
    with ExitStack() as stack:
        stack.enter_context(cluster)
        log = stack.enter_context(_fault_log(directory))
        code = _play(
            cluster,
            words,
            log=log,
            faults=faults,
            steps_of_run=steps_of_run,
            per_rank=per_rank or train is not None,
            grace_s=grace_s,
        )
    raise typer.Exit(code)


def _play(
    cluster: Cluster,
    command: list[str],
    *,
    log: EventLog,
    faults: Any,
    steps_of_run: Path | None,
    per_rank: bool,
    grace_s: float,
) -> int:
    """Run the command with its faults, and listen for more of them; returns the exit code."""
    from isthmus.lab.control import ControlServer
    from isthmus.lab.faults import FaultPlayer
    from isthmus.lab.run import run_everywhere
    from isthmus.observe.log import events_path

    steps = None if steps_of_run is None else events_path(steps_of_run, 0)
    started_s = time.monotonic()

    def status() -> dict[str, Any]:
        return {"command": command, "for_s": time.monotonic() - started_s, **_status(cluster)}

    player = FaultPlayer(cluster, log, faults, steps=steps)
    with (
        player,
        ControlServer(cluster.directory, cluster=cluster.spec, inject=player.inject, status=status),
    ):
        code = run_everywhere(cluster, command, per_rank=per_rank, grace_s=grace_s)
    for problem in player.problems:
        typer.echo(f"error: a fault could not be made: {problem}", err=True)
    return code or (EXIT_FAILED if player.problems else EXIT_OK)


def _status(cluster: Cluster) -> dict[str, Any]:
    counted = cluster.counters()
    return {
        "cluster": cluster.spec.name,
        "hosts": {
            host.name: {
                "pid": cluster.host(host.name).pid,
                "nics": {
                    nic.name: {
                        "address": str(nic.address.ip),
                        "received_bytes": counted[host.name, nic.name].received_nbytes,
                        "sent_bytes": counted[host.name, nic.name].sent_nbytes,
                    }
                    for nic in host.nics
                },
            }
            for host in cluster.topology.hosts
        },
    }


def _training(
    run: Path, sets: list[str], cluster: str, *, explicit: Path | None, fresh: bool
) -> tuple[list[str], Path]:
    """The command that trains a run, and the run's directory: one for each cluster."""
    from isthmus.spec.load import load
    from isthmus.spec.run import RunSpec
    from isthmus.train.run_directory import DEFAULT_ROOT, open_run

    resolved = load(RunSpec, run, sets)
    base = explicit or DEFAULT_ROOT / f"{resolved.spec.run_name}-in-{cluster}"
    directory = open_run(resolved, explicit=base, fresh=fresh, dry_run=True).directory.path
    command = [sys.executable, "-m", "isthmus", "train", str(run), "--run-dir", str(directory)]
    return command + [word for value in sets for word in ("--set", value)], directory


@contextmanager
def _fault_log(directory: Path) -> Generator[EventLog]:
    """The log for faults of a run; it and its folders don't stay if nothing happened."""
    from isthmus.observe.log import EventLog, lab_events_path

    path = lab_events_path(directory)
    made = [folder for folder in (path.parent, directory, directory.parent) if not folder.exists()]
    try:
        with EventLog(path) as log:
            yield log
    finally:
        if path.stat().st_size == 0:
            path.unlink()
            with suppress(OSError):  # a folder with something in it stays, and those around it
                for folder in made:
                    folder.rmdir()


def _show_plan(topology: Topology, command: list[str], *, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(_plan(topology, command), indent=2))
        return
    from isthmus.lab.relay import is_plain
    from isthmus.spec.units import format_bytes_per_s, format_seconds

    for host in topology.hosts:
        nics = ", ".join(
            f"{nic.name} {nic.address.ip} {format_bytes_per_s(nic.bandwidth_bytes_per_s)}"
            for nic in host.nics
        )
        typer.echo(f"host {host.name} in {host.site}: {nics or 'no network'}")
    for plan in topology.links:
        link = plan.link
        more = "" if is_plain(plan.wire) else f", {format_seconds(link.latency_s)} one way"
        more += f" ± {format_seconds(link.jitter_s)}" if link.jitter_s else ""
        more += f", {link.loss:.3g} lost" if link.loss else ""
        rate = format_bytes_per_s(link.bandwidth_bytes_per_s)
        typer.echo(f"link {' - '.join(link.between)}: {rate}{more}")
    typer.echo(f"would run in each: {' '.join(command)}")


def _plan(topology: Topology, command: list[str]) -> dict[str, Any]:
    return {
        "cluster": topology.name,
        "command": command,
        "hosts": [
            {
                "name": host.name,
                "site": host.site,
                "nics": {
                    nic.name: {
                        "address": str(nic.address.ip),
                        "bandwidth_bytes_per_s": nic.bandwidth_bytes_per_s,
                    }
                    for nic in host.nics
                },
            }
            for host in topology.hosts
        ],
        "links": [plan.link.model_dump(mode="json") for plan in topology.links],
    }


@app.command("fault")
def fault(
    kind: Annotated[
        str, typer.Argument(metavar="KIND", help="link_down, nic_rate, partition, kill, ...")
    ],
    between: Annotated[
        str | None, typer.Option(metavar="A,B", help="The two sites that a link joins.")
    ] = None,
    host: Annotated[str | None, typer.Option(metavar="NAME", help="The host.")] = None,
    nic: Annotated[str | None, typer.Option(metavar="NAME", help="Its NIC; eth0 if unset.")] = None,
    group: Annotated[
        list[str] | None,
        typer.Option(metavar="A,B,...", help="Sites and hosts of one side; may be repeated."),
    ] = None,
    lasts: Annotated[
        str | None, typer.Option(metavar="TIME", help='How long, as "2 s"; else until undone.')
    ] = None,
    bandwidth: Annotated[
        str | None, typer.Option(metavar="RATE", help='Goodput each way, as "20 Mbit/s".')
    ] = None,
    latency: Annotated[str | None, typer.Option(metavar="TIME", help="One-way delay.")] = None,
    jitter: Annotated[str | None, typer.Option(metavar="TIME", help="Its deviation.")] = None,
    loss: Annotated[float | None, typer.Option(help="Share of packets lost.")] = None,
    down: Annotated[
        str | None, typer.Option(metavar="TIME", help="Flapping: how long it is down each time.")
    ] = None,
    up: Annotated[
        str | None, typer.Option(metavar="TIME", help="Flapping: how long it is up in between.")
    ] = None,
    times: Annotated[int | None, typer.Option(help="Flapping: how often it goes down.")] = None,
    lab: LabId = None,
) -> None:
    """Make a fault now in a lab that runs, such as: fault link_down --between east,west.

    Kinds: link_down, link_up, link_flap, link_rate, link_quality, nic_down, nic_up, nic_flap,
    nic_rate, partition, heal, stop, continue, kill.
    """
    from isthmus.lab.control import send_fault
    from isthmus.lab.state import cluster_of
    from isthmus.lab.timeline import fault_of

    given = {
        "between": between.split(",") if between else None,
        "host": host,
        "nic": nic,
        "groups": [names.split(",") for names in group] if group else None,
        "lasts": lasts,
        "bandwidth": bandwidth,
        "latency": latency,
        "jitter": jitter,
        "loss": loss,
        "down": down,
        "up": up,
        "times": times,
    }
    directory = _choose_lab(lab)
    table = {name: value for name, value in given.items() if value is not None}
    send_fault(directory, fault_of({"kind": kind, **table}, cluster_of(directory)))


@app.command("status")
def status(
    lab: LabId = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say which labs of yours run, what they run, and what their NICs have carried."""
    from isthmus.lab.control import ask_status
    from isthmus.lab.state import running_labs
    from isthmus.spec.units import format_bytes, format_seconds

    wanted = [path for path, _ in running_labs() if lab in (None, path.name)]
    answers = {}
    for path in wanted:
        with suppress(ConfigError):  # it has only begun, or used the Python API
            answers[path.name] = ask_status(path)
    if as_json:
        typer.echo(json.dumps(answers, indent=2))
        return
    for name, answer in answers.items():
        since = format_seconds(answer["for_s"])
        command = " ".join(answer["command"])
        typer.echo(f"lab {name}: {answer['cluster']}, for {since}: {command}")
        for host_name, host in answer["hosts"].items():
            nics = ", ".join(
                f"{nic} {counted['address']} sent {format_bytes(counted['sent_bytes'])}, "
                f"received {format_bytes(counted['received_bytes'])}"
                for nic, counted in host["nics"].items()
            )
            typer.echo(f"  {host_name} (process {host['pid']}): {nics or 'no network'}")
    if not answers:
        typer.echo("no lab runs")


def _choose_lab(wanted: str | None) -> Path:
    from isthmus.lab.state import running_labs

    labs = list(running_labs())
    if wanted is not None:
        labs = [(path, cluster) for path, cluster in labs if path.name == wanted]
    match labs:
        case [(path, _)]:
            return path
        case []:
            raise ConfigError(
                "no lab runs" if wanted is None else f"no lab {wanted} runs",
                hint="start one with: isthmus lab CLUSTER -- COMMAND",
            )
        case _:
            names = ", ".join(f"{path.name} ({cluster})" for path, cluster in labs)
            raise ConfigError(f"{len(labs)} labs run: {names}", hint="choose one with --lab ID")
