"""Writes the generated half of the reference: docs/reference/generated/.

The run file and the cluster file come from the spec classes, the commands from the command line
itself, so these pages can't say anything else than the program does. Python and events are lists of
names that mkdocstrings fills with signatures and docstrings when the site is built.
"""

from __future__ import annotations

import json
import re
import typing
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any, Final

import typer

import isthmus
from isthmus.cli.app import app
from isthmus.observe import events
from isthmus.spec.base import KindSpec, Spec, kinds_of
from isthmus.spec.cluster import ClusterSpec
from isthmus.spec.codec import CodecSpec
from isthmus.spec.run import RunSpec
from isthmus.spec.sync import SyncSpec
from isthmus.spec.tree import Key, walk

OUT: Final = Path(__file__).parent / "reference" / "generated"
_BOUNDS: Final = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}


def pages() -> dict[str, str]:
    """Every generated page by file name, as Markdown."""
    return {
        "run-file.md": "\n".join(_spec_page("Run file", "run.toml", RunSpec, _RUN_INTRO)),
        "cluster-file.md": "\n".join(
            _spec_page("Cluster file", "cluster.toml", ClusterSpec, _CLUSTER_INTRO)
        ),
        "commands.md": "\n".join(_commands_page()),
        "python.md": "\n".join(_python_page()),
        "contracts.md": "\n".join(_contracts_page()),
        "events.md": "\n".join(_events_page()),
    }


# --- the two files that a user writes ---------------------------------------------------------

_RUN_INTRO: Final = """\
What to train. Every key has a default, so an empty file is a run. `isthmus config show RUN` prints
a file as a run would use it, `isthmus config explain KEY` says the same as this page.

A key whose name ends in a unit (`latency_s`, `memory_bytes`, `bandwidth_bytes_per_s`) takes a
number in that unit or text with any unit; its short name (`latency`) takes text only. One more key
stands at the top of a file: `extends = "base.toml"`, or a list of files, which are read first."""

_CLUSTER_INTRO: Final = """\
What the machines are. No command reads this file yet: it is the declaration that planning and
emulation will share, and its checks are in force."""


def _spec_page(title: str, file: str, spec: type[Spec], intro: str) -> Iterator[str]:
    yield f"# {title}: `{file}`\n\n{intro}\n"
    by_table = groupby(_by_table(spec), key=lambda key: (key.path.rpartition(".")[0], key.owner))
    for (path, owner), keys in by_table:
        members = list(keys)
        yield f"## {_table_heading(path, owner, spec)}\n\n{_summary(owner)}\n"
        yield "| Key | Takes | Default | Meaning |\n|---|---|---|---|"
        for key in members:
            name = key.path.rpartition(".")[2]
            yield f"| `{name}` | {_cell(_takes(key))} | {_default(key)} | {_cell(key.help)} |"
        yield ""


def _by_table(spec: type[Spec]) -> Iterator[Key]:
    """All keys, those of one table together, tables in the order in which they first appear."""
    tables: dict[tuple[str, type[Spec]], list[Key]] = {}
    for key in walk(spec):
        tables.setdefault((key.path.rpartition(".")[0], key.owner), []).append(key)
    for keys in tables.values():
        yield from keys


def _table_heading(path: str, owner: type[Spec], root: type[Spec]) -> str:
    if not path:
        return "Top of the file"
    repeated = any(key.path == path and "list of" in key.type_name for key in walk(root))
    name = f"`[[{path}]]`" if repeated else f"`[{path}]`"
    kind = owner.model_fields.get("kind")
    return f"{name} with `kind = {json.dumps(kind.default)}`" if kind else name


def _takes(key: Key) -> str:
    kinds = " or ".join(dict.fromkeys(key.type_name.split(" or ")))
    bounds = [
        f"{sign} {_number(limit)}"
        for note in key.field.metadata
        for name, sign in _BOUNDS.items()
        if isinstance(limit := getattr(note, name, None), int | float)
    ]
    return " ".join([kinds, ", ".join(bounds)]).strip()


def _number(limit: float) -> str:
    exponent = int(limit).bit_length() - 1
    return f"2^{exponent}" if limit == 2**exponent and exponent > 31 else f"{limit:g}"


def _default(key: Key) -> str:
    if key.field.is_required() and key.path.rpartition(".")[2] not in key.owner.input_keys:
        return "required"
    if isinstance(key.default, KindSpec):
        return f'`"{getattr(key.default, "kind", "")}"`'
    if isinstance(key.default, Spec):
        kind = getattr(key.default, "kind", "")
        return f'`"{kind}"`' if kind else "see below"
    if key.default is None:
        return "from other keys" if key.field.default_factory else "unset"
    if isinstance(key.default, tuple) and any(isinstance(each, Spec) for each in key.default):
        return "see below"
    return f"`{json.dumps(key.default, default=str)}`"


# --- the command line -----------------------------------------------------------------------------


def _commands_page() -> Iterator[str]:
    root: Any = typer.main.get_command(app)
    context = root.make_context("isthmus", [], resilient_parsing=True)
    yield f"# Commands\n\n{root.help}\n\n{root.epilog}\n"
    yield from _options(root, context)
    yield from _subcommands(root, context)


def _subcommands(group: Any, context: Any) -> Iterator[str]:
    for name, command in group.commands.items():
        below = command.make_context(name, [], parent=context, resilient_parsing=True)
        usage = command.get_usage(below).removeprefix("Usage: ")
        yield f"## `{below.command_path}`\n\n{_one_line(command.help)}\n\n```text\n{usage}\n```\n"
        yield from _options(command, below)
        yield from _subcommands(command, below) if hasattr(command, "commands") else ()


def _options(command: Any, context: Any) -> Iterator[str]:
    records = [parameter.get_help_record(context) for parameter in command.get_params(context)]
    yield "| Argument or option | Meaning |\n|---|---|"
    for name, about in filter(None, records):
        yield f"| `{name.replace('|', '/')}` | {_cell(about)} |"
    yield ""


# --- Python ---------------------------------------------------------------------------------------


def _python_page() -> Iterator[str]:
    yield (
        "# Python\n\nThe names that `import isthmus` gives, each imported when it is first used. "
        "[Your own loop](../../guides/your-own-loop.md) shows them at work.\n"
    )
    for name in isthmus.__all__:
        yield from _documented(f"isthmus.{name}", f"isthmus.{name}")


def _contracts_page() -> Iterator[str]:
    yield (
        "# Contracts\n\nWhat a codec, a reducer and a strategy are, as declared (`isthmus.spec`) "
        "and at run time, then the kinds that are there. "
        "[Add a codec](../../guides/add-a-codec.md) uses them.\n"
    )
    modules = {
        "What is declared": ("isthmus.spec.base", "isthmus.spec.codec", "isthmus.spec.sync"),
        "What runs": (
            "isthmus.codec.base",
            "isthmus.codec.reducer",
            "isthmus.codec.comm",
            "isthmus.sync.strategy",
            "isthmus.sync.explain",
        ),
        "Codecs": _homes_of(CodecSpec),
        "Strategies": _homes_of(SyncSpec),
    }
    for title, names in modules.items():
        yield f"## {title}\n"
        for name in names:
            yield from _documented(name, name)


def _homes_of(family: type[KindSpec]) -> tuple[str, ...]:
    return tuple(sorted({member.__module__ for member in kinds_of(family).values()}))


def _events_page() -> Iterator[str]:
    yield (
        "# Events\n\nA run's truth is `events/rank-NNNNN.jsonl` in its directory, one JSON object "
        "a line. The key `event` names its type; each heading here is such a name. Every event "
        "has `time_s`, seconds since the Unix epoch, and `rank`, who says so; a field with a "
        "default may be absent. Numbers that are not finite are the texts `nan`, `inf` and `-inf`."
        "\n"
    )
    for kind in typing.get_args(events.AnyEvent):
        tag = kind.__struct_config__.tag
        yield from _documented(f"{events.__name__}.{kind.__name__}", tag, level=2)


def _documented(path: str, heading: str, level: int = 3) -> Iterator[str]:
    yield (
        f"::: {path}\n    options:\n      heading: {heading}\n      toc_label: {heading}\n"
        f"      heading_level: {level}\n"
    )


# --- text -----------------------------------------------------------------------------------------


def _summary(owner: type[Spec]) -> str:
    """First paragraph of a class's docstring."""
    return _one_line((owner.__doc__ or "").split("\n\n")[0])


def _one_line(text: str | None) -> str:
    return " ".join((text or "").split())


def _cell(text: str) -> str:
    return re.sub(r"(?<!\\)\|", r"\\|", _one_line(text))


def main() -> None:
    """Writes every page, and removes what an earlier version has left."""
    OUT.mkdir(parents=True, exist_ok=True)
    made = pages()
    for old in OUT.glob("*.md"):
        if old.name not in made:
            old.unlink()
    for name, text in made.items():
        (OUT / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
