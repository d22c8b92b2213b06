"""SLURM's variables: what a job step says about its tasks and its hosts.

Pure functions on strings, used by ``environment``. The formats are those of ``srun``'s manual page:
host lists as ``node[01-03,7],gpu5`` and tasks per node as ``2(x3),1``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import chain, product

from isthmus.errors import LaunchError

__all__ = ["expand_nodelist", "in_step", "parse_tasks_per_node"]

_TASKS = re.compile(r"(\d+)(?:\(x(\d+)\))?")
_PIECES = re.compile(r"\[([^\[\]]*)\]|([^\[\]]+)")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")
_FIRST_SPECIAL_STEP = 0xFFFF_FFF0
"""Step numbers from here on are no ``srun`` but the batch script, the shell of ``salloc``..."""


def in_step(environ: Mapping[str, str]) -> bool:
    """Return whether this process is one of several tasks that ``srun`` started.

    The shell of ``salloc``, the body of an ``sbatch`` script and a step of one task (``srun --pty
    bash``) carry SLURM's variables too, but nobody waits there for a rank: they are no steps here.
    """
    step = environ.get("SLURM_STEP_ID", "")
    if "SLURM_PROCID" not in environ or not step.isdecimal():
        return False
    num_tasks = environ.get("SLURM_STEP_NUM_TASKS", environ.get("SLURM_NTASKS", ""))
    return int(step) < _FIRST_SPECIAL_STEP and num_tasks != "1"


def parse_tasks_per_node(text: str) -> list[int]:
    """Return the number of tasks on each node: ``"2(x3),1"`` gives ``[2, 2, 2, 1]``.

    Raises:
        LaunchError: The text has another form.
    """
    counts: list[int] = []
    for item in text.split(","):
        match = _TASKS.fullmatch(item.strip())
        if match is None:
            raise LaunchError(
                f"cannot read {item!r} in SLURM's tasks per node {text!r}, expected '2' or '2(x3)'"
            )
        tasks, nodes = match.groups(default="1")
        counts.extend([int(tasks)] * int(nodes))
    return counts


def expand_nodelist(text: str) -> list[str]:
    """Return the hosts of a list: ``"node[01-03,7],gpu5"`` gives node01 to node03, node7, gpu5.

    Raises:
        LaunchError: The brackets or a range in them have another form.
    """
    items = _split_outside_brackets(text)
    return list(chain.from_iterable(_expand_item(item, text) for item in items))


def _split_outside_brackets(text: str) -> list[str]:
    items, depth = [""], 0
    for character in text.strip():
        depth += {"[": 1, "]": -1}.get(character, 0)
        if character == "," and depth == 0:
            items.append("")
        else:
            items[-1] += character
    return items


def _expand_item(item: str, text: str) -> Iterator[str]:
    pieces = list(_PIECES.finditer(item))
    if not item or "".join(match.group() for match in pieces) != item:
        raise LaunchError(f"cannot read {item!r} in SLURM's node list {text!r}")
    choices = [
        [match[2]] if match[1] is None else _expand_ranges(match[1], text) for match in pieces
    ]
    return map("".join, product(*choices))


def _expand_ranges(ranges: str, text: str) -> list[str]:
    names: list[str] = []
    for item in ranges.split(","):
        match = _RANGE.fullmatch(item)
        if match is None or (match[2] and int(match[2]) < int(match[1])):
            raise LaunchError(
                f"cannot read {item!r} in SLURM's node list {text!r}, expected '7' or '01-03'"
            )
        first, last = match[1], match[2] or match[1]
        names.extend(f"{number:0{len(first)}d}" for number in range(int(first), int(last) + 1))
    return names
