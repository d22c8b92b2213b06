"""What the benchmarks share: options, progress, facts about the machine, and the JSON they print.

A benchmark prints one JSON object to stdout: what was measured, the claims that this decides, and
what a reader needs to trust it (machine, load before and after, versions, settings). Progress goes
to stderr. A claim's ``holds`` is true, false, or null where this run can't tell.

On a machine that others use, ``chrt -r 1 scripts/bench NAME`` gives the benchmark and all that it
starts precedence; the policy is printed with the rest.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from isthmus.measure import host
from isthmus.measure.timing import Comparison, Sample

BLOCKS: Final = 20
"""Blocks behind a published ratio."""
QUICK_BLOCKS: Final = 6
"""Blocks of ``--quick``: the fewest that give an interval."""

_BEGAN_S: Final = time.monotonic()
_POLICIES: Final = {
    getattr(os, name): name
    for name in ("SCHED_OTHER", "SCHED_BATCH", "SCHED_IDLE", "SCHED_FIFO", "SCHED_RR")
    if hasattr(os, name)
}

_LISTS: Final = re.compile(r"\[\n[^\[\]{}]*\]")

Measure = Callable[[Namespace], Mapping[str, Any]]


def run(
    file: str,
    doc: str,
    measure: Measure,
    add_options: Callable[[ArgumentParser], object] = lambda parser: None,
    *,
    arguments: Sequence[str] | None = None,
) -> None:
    """Parse the command line, measure, and print the JSON.

    Args:
        file: The benchmark's ``__file__``, which names it.
        doc: Its docstring.
        measure: Measures, with the options; returns its part of the JSON.
        add_options: Adds options besides ``--quick``.
        arguments: The command line; by default this process's.
    """
    name = Path(file).stem
    title, _, text = doc.partition("\n")
    parser = ArgumentParser(f"python -m benchmarks.{name}", description=f"{title} {text.strip()}")
    parser.add_argument("--quick", action="store_true", help="under a minute; decides less")
    add_options(parser)
    options = parser.parse_args(arguments)
    load_before = os.getloadavg()
    found = measure(options)
    report = {
        "benchmark": name,
        "what": title,
        **found,
        "settings": {key: _plain(value) for key, value in vars(options).items()},
        "machine": machine() | {"load_before": load_before, "load_after": os.getloadavg()},
        "versions": asdict(host.versions()),
        "duration_s": time.monotonic() - _BEGAN_S,
    }
    print(_LISTS.sub(_on_one_line, json.dumps(_rounded(report), indent=2)))


def machine() -> dict[str, Any]:
    """What decides how fast it is."""
    policy = os.sched_getscheduler(0) if hasattr(os, "sched_getscheduler") else None
    return {
        "cores": host.cores().usable,
        "cpu": host.processor(),
        "memory_nbytes": host.memory().total_nbytes,
        "scheduling": _POLICIES.get(policy, policy) if policy is not None else None,
    }


def say(text: str) -> None:
    """Tell whoever waits how far it is."""
    print(f"[{time.monotonic() - _BEGAN_S:5.0f} s] {text}", file=sys.stderr, flush=True)


def say_blocks(what: str, blocks: int) -> Callable[[int], None]:
    """Return what tells, after every fifth block, how many are done."""

    def on_block(done: int) -> None:
        if done % 5 == 0 or done == blocks:
            say(f"{what}: {done} of {blocks} blocks")

    return on_block


def add_block_options(parser: ArgumentParser) -> None:
    """Add the options of a comparison in blocks."""
    text = f"blocks behind each ratio (default {BLOCKS}, with --quick {QUICK_BLOCKS})"
    parser.add_argument("--blocks", type=int, help=text)
    parser.add_argument("--seed", type=int, default=0, help="decides the order of the runs")


def blocks_of(options: Namespace) -> int:
    """Number of blocks that the options ask for."""
    return options.blocks or (QUICK_BLOCKS if options.quick else BLOCKS)


def claim(text: str, holds: bool | None, **measured: Any) -> dict[str, Any]:
    """One claim and whether it holds; None where this run can't tell."""
    return {"claim": text, "holds": holds, **measured}


def shown(comparison: Comparison) -> dict[str, Any]:
    """A comparison as JSON: medians, ratio with its interval, and the control beside it."""
    return asdict(comparison)


def sample(values: Sequence[float]) -> dict[str, float]:
    """Median and range of values as JSON."""
    return asdict(Sample.of(values))


def user_environment(**more: str) -> dict[str, str]:
    """This process's variables, without those that would make a command a rank of something."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "COLUMNS"):
        ours.pop(name, None)
    return ours | more


def _plain(value: Any) -> Any:
    return value if isinstance(value, bool | int | float | str | list | None) else str(value)


def _on_one_line(found: re.Match[str]) -> str:
    return "[" + " ".join(found[0][1:-1].split()) + "]"


def _rounded(value: Any) -> Any:
    """Floats to six significant digits: more is noise."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, Mapping):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(item) for item in value]
    return value
