"""Whether a run that is killed again and again ends with exactly the losses of one left alone.

The same small run is trained twice with two ranks: once undisturbed, and once with ``kill -9`` of
the launcher and all ranks at random steps, at a random moment within them, each time started again
by the same command. Compared bit for bit: every step's loss, gradient norm and rate on every rank,
every validation, and the files of the last checkpoint.

Claim: ten kills leave no trace in the losses.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from random import Random
from statistics import median
from typing import Any, Final

import psutil

from benchmarks import harness
from isthmus.observe.events import Event, RunStarted, Step
from isthmus.observe.log import events_path, follow, read_run
from isthmus.observe.timeline import Timeline

_STEP_DEADLINE_S: Final = 300.0
_POLL_S: Final = 0.005
_SAVE_EVERY_STEPS: Final = 10
_LAST_SHARE: Final = 0.95
"""No kill is planned after this share of the steps: the run must not end before it."""


class Training:
    """The same ``isthmus train`` command as often as it is started, in a directory of its own."""

    def __init__(self, place: Path, sets: Sequence[str]) -> None:
        self.run_dir = place / "run"
        self._output = place / "output.txt"
        self._environ = harness.user_environment(ISTHMUS_CACHE=str(place.parent / "cache"))
        self._command = [sys.executable, "-m", "isthmus", "train", "--run-dir", str(self.run_dir)]
        self._command += [word for setting in sets for word in ("--set", setting)]
        place.mkdir()

    def to_the_end(self) -> None:
        """Run until it is finished."""
        process = self._start()
        if process.wait():
            raise self._broken(f"exit code {process.returncode}")

    def until_killed(self, step: int, delay_s: float) -> float:
        """Run, and kill all of it some time after a step; return the seconds to its first step."""
        log = events_path(self.run_dir, 0)
        tail = follow(log, skip_existing=True)
        process, began_s, first_step_s = self._start(), time.monotonic(), 0.0
        while True:
            steps = [event.step for event in tail.poll() if isinstance(event, Step)]
            if steps and not first_step_s:
                first_step_s = time.monotonic() - began_s
            if steps and steps[-1] >= step:
                break
            if process.poll() is not None or time.monotonic() > began_s + _STEP_DEADLINE_S:
                _kill_all(process)
                raise self._broken(f"did not reach step {step}")
            time.sleep(_POLL_S)
        time.sleep(delay_s)
        if process.poll() is not None:
            raise self._broken("ended before it was killed")
        _kill_all(process)
        return first_step_s

    def events(self) -> list[Event]:
        """All that the ranks have written."""
        return read_run(self.run_dir).events

    def last_checkpoint(self) -> dict[str, bytes]:
        """The tensor files of the newest checkpoint."""
        newest = max((self.run_dir / "checkpoint").glob("step-????????"))
        return {path.name: path.read_bytes() for path in sorted(newest.glob("*.safetensors"))}

    def _start(self) -> subprocess.Popen[bytes]:
        with self._output.open("ab") as output:
            return subprocess.Popen(
                self._command,
                env=self._environ,
                stdout=output,
                stderr=output,
                cwd=self._output.parent,
            )

    def _broken(self, what: str) -> SystemExit:
        said = self._output.read_text(errors="replace")[-4000:]
        return SystemExit(f"error: the run {what}; its output ended with:\n{said}")


def _kill_all(process: subprocess.Popen[bytes]) -> None:
    """SIGKILL to the launcher and to all that it has started."""
    if process.poll() is not None:
        return
    launcher = psutil.Process(process.pid)
    everyone = [launcher, *launcher.children(recursive=True)]
    for each in everyone:
        with suppress(psutil.NoSuchProcess):
            each.kill()
    process.wait()
    _, alive = psutil.wait_procs(everyone, timeout=30)
    if alive:
        raise SystemExit(f"error: processes survived SIGKILL: {alive}")


@dataclass(frozen=True)
class Kill:
    """When to kill: after a step, and how much of the next step later."""

    step: int
    share: float


def plan_kills(num_kills: int, steps: int, seed: int) -> list[Kill]:
    """Random kills in ascending order of their steps."""
    random = Random(seed)
    latest = int(_LAST_SHARE * steps)
    if num_kills > latest:
        raise SystemExit(f"error: {num_kills} kills need more than {steps} steps")
    chosen = sorted(random.sample(range(1, latest + 1), num_kills))
    return [Kill(step, random.random()) for step in chosen]


def history_of(events: list[Event]) -> list[tuple[Any, ...]]:
    """All numbers that decide or show what was learned, in order; times are left out."""
    timeline = Timeline.of(events)
    steps = [
        ("step", rank, e.step, e.loss_nats, e.grad_norm, e.learning_rate, e.tokens)
        for rank, of_rank in sorted(timeline.steps.items())
        for e in of_rank
    ]
    validations = [
        ("validation", e.rank, e.step, e.loss_nats, e.tokens) for e in timeline.validations
    ]
    return steps + validations


def measure(options: Namespace) -> dict[str, Any]:
    num_kills = options.kills or (2 if options.quick else 10)
    steps = options.steps or (60 if options.quick else 300)
    sets = [
        f"train.steps={steps}",
        f"checkpoint.every_steps={_SAVE_EVERY_STEPS}",
        "train.validate_every_steps=50",
        "train.validation_samples=32",
        *options.set,
    ]
    with tempfile.TemporaryDirectory(prefix="isthmus-bench-") as place:
        calm = Training(Path(place, "undisturbed"), sets)
        calm.to_the_end()
        step_s = median(e.step_time_s for e in calm.events() if isinstance(e, Step))
        harness.say(f"undisturbed: {steps} steps, {1e3 * step_s:.0f} ms each")
        killed = Training(Path(place, "killed"), sets)
        kills, first_step_s = plan_kills(num_kills, steps, options.seed), []
        for kill in kills:
            first_step_s.append(killed.until_killed(kill.step, kill.share * step_s))
            harness.say(f"killed after step {kill.step}")
        killed.to_the_end()
        return compared(calm, killed, kills) | {
            "steps": steps,
            "checkpoint_every_steps": _SAVE_EVERY_STEPS,
            "start_to_first_step_s": harness.sample(first_step_s),
        }


def compared(calm: Training, killed: Training, kills: list[Kill]) -> dict[str, Any]:
    """What the two histories and the two last checkpoints have in common."""
    events = killed.events()
    expected, found = history_of(calm.events()), history_of(events)
    differing = [pair for pair in zip_longest(expected, found) if pair[0] != pair[1]]
    weights_equal = calm.last_checkpoint() == killed.last_checkpoint()
    equal = not differing and weights_equal
    starts = [event.start_step for event in events if isinstance(event, RunStarted)]
    return {
        "kills": len(kills),
        "killed_after_steps": [kill.step for kill in kills],
        "resumed_from_steps": starts[1:],
        "steps_repeated": Timeline.of(events).num_replayed_steps[0],
        "values_compared": sum(map(len, expected)),
        "equal": equal,
        "losses_equal": not differing,
        "last_checkpoint_equal": weights_equal,
        "first_difference": [str(side) for side in differing[0]] if differing else None,
        "claims": [
            harness.claim(f"{len(kills)} kills leave no trace in losses and weights", equal)
        ],
    }


def add_options(parser: ArgumentParser) -> None:
    parser.add_argument("--kills", type=int, help="default 10, with --quick 2")
    parser.add_argument("--steps", type=int, help="of the run (default 300, with --quick 60)")
    parser.add_argument("--seed", type=int, default=0, help="decides the steps and moments")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="of the run"
    )


if __name__ == "__main__":
    harness.run(__file__, __doc__ or "", measure, add_options)
