"""Walks the tree of spec classes: which keys exist, what they mean, which one was meant."""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Union

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from isthmus.spec.base import ByKind, KindSpec, Spec, kinds_of


@dataclass(frozen=True)
class Key:
    """One key of a spec: its dotted path, its field, and the spec class it belongs to."""

    path: str
    field: FieldInfo
    owner: type[Spec]

    @property
    def help(self) -> str:
        """What the key means: the docstring of its field on one line, as plain text."""
        return " ".join((self.field.description or "").replace("``", "").split())

    @property
    def default(self) -> Any:
        """The default; None if there is none, or it follows from other keys."""
        return None if self.field.default is PydanticUndefined else self.field.default

    @property
    def type_name(self) -> str:
        """The type as a reader would say it."""
        return _type_name(self.field.annotation)

    @property
    def tables(self) -> tuple[type[Spec], ...]:
        """The spec classes that a value of this key may be; empty for plain values."""
        return spec_classes(self.field)


def walk(spec: type[Spec], prefix: str = "") -> Iterator[Key]:
    """All keys below a spec class, depth first, with those of every kind."""
    for name, about in spec.input_keys.items():
        yield Key(f"{prefix}{name}", FieldInfo(annotation=str, description=about), spec)
    for name, field in spec.model_fields.items():
        key = Key(f"{prefix}{name}", field, spec)
        yield key
        for table in key.tables:
            yield from walk(table, f"{key.path}.")


def find(spec: type[Spec], path: str) -> list[Key]:
    """The keys with a dotted path: several if it means something else for each kind."""
    return [key for key in walk(spec) if key.path == path]


def suggest(path: str, known: Sequence[str]) -> str | None:
    """The known path that was probably meant: a near spelling, or the same last name elsewhere."""
    near = difflib.get_close_matches(path, known, n=1, cutoff=0.75)
    if near:
        return near[0]
    last = path.rpartition(".")[2]
    elsewhere = [other for other in known if other.rpartition(".")[2] == last]
    if elsewhere:
        return elsewhere[0]
    names = {other.rpartition(".")[2]: other for other in reversed(known)}
    loose = difflib.get_close_matches(last, list(names), n=1, cutoff=0.75)
    return names[loose[0]] if loose else None


def spec_classes(field: FieldInfo) -> tuple[type[Spec], ...]:
    """The spec classes among the alternatives of a field's type."""
    by_kind = any(isinstance(note, ByKind) for note in field.metadata)
    found: list[type[Spec]] = []
    for kind in _alternatives(field.annotation):
        if by_kind and issubclass(kind, KindSpec):
            found += kinds_of(kind).values()
        elif issubclass(kind, Spec):
            found.append(kind)
    return tuple(found)


def _alternatives(annotation: Any) -> Iterator[type]:
    origin = typing.get_origin(annotation)
    if origin is Annotated:
        yield from _alternatives(typing.get_args(annotation)[0])
    elif origin in (Union, types.UnionType, tuple, list):
        for argument in typing.get_args(annotation):
            yield from _alternatives(argument)
    elif isinstance(annotation, type):
        yield annotation


def _type_name(annotation: Any) -> str:
    origin = typing.get_origin(annotation)
    arguments = [a for a in typing.get_args(annotation) if a not in (type(None), Ellipsis)]
    if origin is Annotated:
        return _type_name(arguments[0])
    if origin is typing.Literal:
        return " or ".join(f'"{choice}"' for choice in arguments)
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(_type_name(argument) for argument in arguments))
    if origin in (tuple, list):
        return "list of " + " or ".join(dict.fromkeys(_type_name(a) for a in arguments))
    if isinstance(annotation, type) and issubclass(annotation, Spec):
        return "table"
    return {int: "whole number", float: "number", str: "text", bool: "true or false"}.get(
        annotation, getattr(annotation, "__name__", str(annotation))
    )
