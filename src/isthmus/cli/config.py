"""``isthmus config``: what a run would use, where each value comes from, what each key means."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from isthmus.errors import ConfigError

if TYPE_CHECKING:
    from isthmus.spec.base import Spec

app = typer.Typer(no_args_is_help=True, help="Show and explain the configuration.")

RunFile = Annotated[
    Path | None, typer.Argument(metavar="RUN", help="A run.toml; without it, the defaults.")
]
Sets = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Set one value; may be repeated."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command()
def show(
    run: RunFile = None,
    sets: Sets = None,
    origin: Annotated[
        bool, typer.Option("--origin", help="Say where each value comes from.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Print the configuration as a run would use it."""
    from isthmus.spec.load import load, to_toml
    from isthmus.spec.run import RunSpec

    resolved = load(RunSpec, run, sets or ())
    if as_json:
        values = resolved.spec.model_dump(mode="json")
        shown: Any = {"values": values, "origins": dict(resolved.origins)} if origin else values
        typer.echo(json.dumps(shown, indent=2))
    else:
        typer.echo(to_toml(resolved.spec, resolved if origin else None), nl=False)


@app.command()
def explain(
    key: Annotated[str, typer.Argument(help="A dotted key, as train.steps; or a table.")],
) -> None:
    """Say what a key means, what it takes, and its default."""
    from isthmus.spec.cluster import ClusterSpec
    from isthmus.spec.run import RunSpec
    from isthmus.spec.tree import suggest, walk

    keys = [*walk(RunSpec), *walk(ClusterSpec)]
    found = [known for known in keys if known.path == key]
    below = [known for known in keys if known.path.rpartition(".")[0] == key]
    if not found and not below:
        meant = suggest(key, [known.path for known in keys])
        raise ConfigError(
            f"there is no key {key}",
            hint=f"did you mean {meant}?" if meant else "isthmus config schema lists all keys",
        )
    for known in found:
        typer.echo(f"{known.path}  ({known.type_name}; default {_text(known.default)})")
        typer.echo(f"    {known.help}")
    width = max((len(known.path) for known in below), default=0)
    for owner in dict.fromkeys(known.owner for known in below):
        typer.echo(f"\n{_about(owner)}")
        for known in below:
            if known.owner is owner:
                default = _text(known.default)
                typer.echo(f"  {known.path:<{width}}  {known.help}  [{default}]")


@app.command()
def schema(
    cluster: Annotated[
        bool, typer.Option("--cluster", help="The schema of cluster.toml, not of run.toml.")
    ] = False,
) -> None:
    """Print the JSON schema, for editors and other tools."""
    from isthmus.spec.cluster import ClusterSpec
    from isthmus.spec.run import RunSpec

    spec = ClusterSpec if cluster else RunSpec
    typer.echo(json.dumps(spec.model_json_schema(), indent=2))


def _about(table: type[Spec]) -> str:
    """The first paragraph of a table's documentation, with the kind that chooses it."""
    about = " ".join((table.__doc__ or "").split("\n\n")[0].replace("``", "").split())
    kind = table.model_fields["kind"].default if "kind" in table.model_fields else None
    return f'kind = "{kind}": {about}' if kind else about


def _text(default: Any) -> str:
    from isthmus.spec.base import Spec

    if default is None:
        return "unset"
    if isinstance(default, Spec):
        choice = getattr(default, "kind", None)
        return f'"{choice}"' if choice else "a table"
    return json.dumps(default, default=str)
