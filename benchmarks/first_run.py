"""The first run of a newcomer: how long ``isthmus train`` takes, and what the model has learned.

The command runs as a user runs it, without options, in an empty directory with an empty data cache.
Measured are its wall time, the loss that it ends with, and when the loss fell below that of the
bigram and the trigram counts of the same bytes, as its own events tell: times are from the start of
the command, and a validation is only now and then, so a baseline was passed no later than shown.
With ``--minutes M`` a longer run follows, as many steps as fit into that time by the first run's
pace.

Claims: at most 90 s on two idle cores, with a loss below the bigram's; below the trigram's within
10 minutes.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, Final

from benchmarks import harness
from isthmus.observe.events import Baselines, Event, RankStarted, Step, Validation
from isthmus.observe.log import read_run

LIMIT_S: Final = 90.0
TRIGRAM_LIMIT_S: Final = 600.0
_RESERVE: Final = 0.1
"""Share of the time of the longer run that is kept free, since paces vary."""
_QUICK_SETS: Final = ("train.steps=60", "train.validate_every_steps=20")


def run_once(sets: Sequence[str]) -> dict[str, Any]:
    """One run from an empty directory to its end."""
    with tempfile.TemporaryDirectory(prefix="isthmus-bench-") as place:
        command = [sys.executable, "-m", "isthmus", "train"]
        command += [word for setting in sets for word in ("--set", setting)]
        environ = harness.user_environment(ISTHMUS_CACHE=f"{place}/cache")
        began_s, clock_s = time.monotonic(), time.time()
        done = subprocess.run(
            command,
            cwd=place,
            env=environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
        wall_s = time.monotonic() - began_s
        if done.returncode:
            raise SystemExit(f"error: isthmus train failed:\n{done.stderr[-4000:]}")
        (run_dir,) = Path(place, "runs").iterdir()
        return {"wall_s": wall_s, **summary(read_run(run_dir).events, clock_s)}


def summary(events: Sequence[Event], began_s: float) -> dict[str, Any]:
    """What the events of a finished run say; times from ``began_s``, a wall clock."""
    steps = [event for event in events if isinstance(event, Step) and event.rank == 0]
    validations = [event for event in events if isinstance(event, Validation)]
    (baselines,) = [event for event in events if isinstance(event, Baselines)]
    ranks = [event for event in events if isinstance(event, RankStarted)]
    curve = [(event.time_s - began_s, event.loss_nats) for event in validations]

    def passed_s(limit_nats: float) -> float | None:
        return next((time_s for time_s, loss_nats in curve if loss_nats < limit_nats), None)

    return {
        "steps": steps[-1].step,
        "ranks": len(ranks),
        "ranks_ready_s": max(event.time_s for event in ranks) - began_s,
        "first_step_s": steps[0].time_s - began_s,
        "last_step_s": steps[-1].time_s - began_s,
        "step_s": median(step.step_time_s for step in steps),
        "validation_nats": validations[-1].loss_nats,
        "bits_per_byte": validations[-1].bits_per_byte,
        "bigram_nats": baselines.bigram_nats,
        "trigram_nats": baselines.trigram_nats,
        "bigram_passed_s": passed_s(baselines.bigram_nats),
        "trigram_passed_s": passed_s(baselines.trigram_nats),
        "validations": [[event.step, event.loss_nats] for event in validations],
    }


def steps_within(limit_s: float, pace: dict[str, Any]) -> int:
    """Steps of a run that takes ``limit_s`` with a reserve, by a finished run's pace."""
    training_s = pace["last_step_s"] - pace["first_step_s"]
    around_s = pace["wall_s"] - training_s
    return max(1, int(((1 - _RESERVE) * limit_s - around_s) * (pace["steps"] - 1) / training_s))


def in_words(run: dict[str, Any]) -> str:
    """A run in one line."""
    baselines = f"bigram {run['bigram_nats']:.3f}, trigram {run['trigram_nats']:.3f}"
    return f"{run['wall_s']:.1f} s, {run['validation_nats']:.3f} nats ({baselines})"


def measure(options: Namespace) -> dict[str, Any]:
    sets = [*(_QUICK_SETS if options.quick else ()), *options.set]
    repeats = options.runs or (1 if options.quick else 3)
    runs = []
    for number in range(1, repeats + 1):
        runs.append(run_once(sets))
        harness.say(f"run {number} of {repeats}: {in_words(runs[-1])}")
    found = {
        "wall_s": harness.sample([run["wall_s"] for run in runs]),
        "validation_nats": harness.sample([run["validation_nats"] for run in runs]),
        "runs": runs,
        "claims": [] if options.quick else [first_claim(runs)],
    }
    if options.minutes:
        steps = options.steps or steps_within(60 * options.minutes, runs[-1])
        harness.say(f"a run of {steps} steps, to end within {options.minutes:g} minutes")
        longer = run_once([*options.set, f"train.steps={steps}"])
        harness.say(in_words(longer))
        found["longer_run"] = longer
        found["claims"].append(longer_claim(longer))
    return found


def first_claim(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    wall_s = median(run["wall_s"] for run in runs)
    below = all(run["validation_nats"] < run["bigram_nats"] for run in runs)
    text = f"at most {LIMIT_S:g} s on two idle cores, ending below the bigram's loss"
    return harness.claim(text, below and wall_s <= LIMIT_S)


def longer_claim(run: dict[str, Any]) -> dict[str, Any]:
    passed_s = run["trigram_passed_s"]
    text = f"below the trigram's loss within {TRIGRAM_LIMIT_S:g} s"
    return harness.claim(text, passed_s is not None and passed_s <= TRIGRAM_LIMIT_S)


def add_options(parser: ArgumentParser) -> None:
    parser.add_argument("--runs", type=int, help="repetitions (default 3, with --quick 1)")
    parser.add_argument("--minutes", type=float, help="also train for about so long")
    parser.add_argument("--steps", type=int, help="of the longer run, instead of by its time")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="of the runs"
    )


if __name__ == "__main__":
    harness.run(__file__, __doc__ or "", measure, add_options)
