"""Reads specs from TOML: the one module of this room that touches files.

A value comes from the default, from a file (after those that it ``extends``), or from
``--set key=value``, the later winning. Where each came from is kept. All errors of a file are
reported at once, each with its key, where it stands, and what was probably meant.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

import tomli_w
from pydantic import ValidationError

from isthmus.errors import ConfigError
from isthmus.spec.base import Spec
from isthmus.spec.tree import suggest, walk

SpecT = TypeVar("SpecT", bound=Spec)

DEFAULT_ORIGIN = "default"
_CHOOSERS = ("kind", "preset")
"""A table in which one of these changes is another thing: it is replaced, not merged."""


@dataclass(frozen=True)
class Resolved(Generic[SpecT]):
    """A spec with the origin of every value that is not a default."""

    spec: SpecT
    origins: Mapping[str, str] = field(default_factory=dict)

    def origin(self, path: str) -> str:
        """Where the value of a dotted key came from; a preset brings all keys of its table."""
        while path:
            table = path.rpartition(".")[0]
            for key in (path, f"{table}.preset"):
                if key in self.origins:
                    return self.origins[key]
            path = table
        return DEFAULT_ORIGIN


def load(spec: type[SpecT], file: Path | None = None, sets: Sequence[str] = ()) -> Resolved[SpecT]:
    """Reads a spec from a file and from ``key=value`` settings.

    Args:
        spec: The class to read, such as ``RunSpec``.
        file: A TOML file; None means the defaults.
        sets: Settings such as ``"train.steps=50"``; the value is TOML, or plain text.

    Raises:
        ConfigError: With every problem that was found, if there is any.
    """
    table, origins = _read_file(file, ()) if file else ({}, {})
    for setting in sets:
        key, value = _parse_setting(setting)
        _merge(table, _nest(key, value), origins, f"--set {setting}")
    try:
        return Resolved(spec.model_validate(table), origins)
    except ValidationError as error:
        problems = _problems(spec, error, origins)
        raise ConfigError(
            "the configuration cannot be used:\n" + "\n".join(f"  {line}" for line in problems),
            hint="isthmus config explain KEY says what a key means and takes",
        ) from None


def to_toml(spec: Spec, resolved: Resolved[Any] | None = None) -> str:
    """The spec as TOML that reads back equal; with ``resolved``, non-defaults say their origin."""
    text = tomli_w.dumps(_kind_first(spec.model_dump(mode="json", exclude_none=True)))
    return text if resolved is None else "".join(_with_origins(text, resolved))


def _kind_first(value: Any) -> Any:
    """The same tables, each with its kind at the head."""
    if isinstance(value, Mapping):
        ordered = sorted(value, key=lambda key: key != "kind")
        return {key: _kind_first(value[key]) for key in ordered}
    if isinstance(value, list):
        return [_kind_first(item) for item in value]
    return value


def _with_origins(text: str, resolved: Resolved[Any]) -> Iterator[str]:
    table = ""
    for line in text.splitlines():
        if line.startswith("["):
            table = line.strip("[]") + "."
        key = line.partition(" = ")[0]
        origin = resolved.origin(f"{table}{key}") if " = " in line else DEFAULT_ORIGIN
        yield f"{line}\n" if origin == DEFAULT_ORIGIN else f"{line}  # {origin}\n"


def _read_file(file: Path, seen: tuple[Path, ...]) -> tuple[dict[str, Any], dict[str, str]]:
    path = Path(os.path.realpath(file))
    if path in seen:
        chain = " → ".join(step.name for step in (*seen, path))
        raise ConfigError(f"{file} extends itself: {chain}", hint="remove one of the extends lines")
    table = _parse_file(file)
    parents = table.pop("extends", [])
    if isinstance(parents, str):
        parents = [parents]
    if not (isinstance(parents, list) and all(isinstance(parent, str) for parent in parents)):
        raise ConfigError(
            f"{file}: extends must be a file name or a list of them, not {parents!r}",
            hint='write extends = "base.toml"',
        )
    merged: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for parent in parents:
        inherited, inherited_origins = _read_file(file.parent / parent, (*seen, path))
        _merge(merged, inherited, origins, "")
        origins.update(inherited_origins)
    _merge(merged, table, origins, str(file))
    return merged, origins


def _parse_file(file: Path) -> dict[str, Any]:
    try:
        if file.exists() and not file.is_file():
            raise ConfigError(f"{file} is not a file", hint="give a TOML file, such as run.toml")
        return tomllib.loads(file.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise ConfigError(
            f"there is no file {file}", hint="check the path; it is relative to where you are"
        ) from None
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file} is not UTF-8 text ({error.reason} at {error.start})") from None
    except (ValueError, RecursionError) as error:  # TOMLDecodeError, a number of 5000 digits, ...
        raise ConfigError(
            f"{file} is not TOML: {error}", hint="strings need quotes; tables are [name]"
        ) from None


def _parse_setting(setting: str) -> tuple[list[str], Any]:
    key, equals, text = setting.partition("=")
    path = [part.strip() for part in key.split(".")]
    if not equals or not all(path):
        raise ConfigError(
            f"--set {setting} is not KEY=VALUE", hint="for example --set train.steps=50"
        )
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return path, text.strip()
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--set {key}: the value cannot be read: {error}") from None
    return path, parsed["value"] if parsed.keys() == {"value"} else text.strip()


def _nest(path: Sequence[str], value: Any) -> dict[str, Any]:
    nested: Any = value
    for part in reversed(path):
        nested = {part: nested}
    return nested


def _merge(
    base: dict[str, Any],
    new: Mapping[str, Any],
    origins: dict[str, str],
    origin: str,
    prefix: str = "",
) -> None:
    """Lays ``new`` over ``base`` in place and notes ``origin`` for each value that it brings."""
    for key, value in new.items():
        path = f"{prefix}{key}"
        below = base.get(key)
        if isinstance(value, Mapping):
            if isinstance(below, str) and not any(name in value for name in _CHOOSERS):
                below = base[key] = _spelled_out(path, below)
            if not isinstance(below, dict) or _chooses_another(below, value):
                _forget(origins, path)
                below = base[key] = {}
            _merge(below, value, origins, origin, f"{path}.")
        else:
            _forget(origins, path)
            base[key] = value
            if origin:
                origins[path] = origin


def _spelled_out(path: str, name: str) -> dict[str, Any]:
    """The table that a bare name stands for: ``model = "gpt-1m"`` is ``model.preset``."""
    return {"preset" if path == "model" else "kind": name}


def _chooses_another(below: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    return any(name in new and new[name] != below.get(name) for name in _CHOOSERS)


def _forget(origins: dict[str, str], path: str) -> None:
    for known in [key for key in origins if key == path or key.startswith(f"{path}.")]:
        del origins[known]


def _problems(
    spec: type[Spec], error: ValidationError, origins: Mapping[str, str]
) -> Iterator[str]:
    known = dict.fromkeys(key.path for key in walk(spec))
    source = Resolved(spec.model_construct(), origins)
    for details in error.errors(include_url=False):
        if details["type"] == "default_factory_not_called":
            continue  # it only follows from another error
        path = _dotted(details["loc"], known)
        origin = source.origin(path)
        where = f" ({origin})" if origin != DEFAULT_ORIGIN else ""
        if details["type"] == "extra_forbidden":
            meant = suggest(path, list(known))
            yield f"{path}: unknown key{where}" + (f"; did you mean {meant}?" if meant else "")
        else:
            given = "" if details["type"] == "missing" else _given(details["input"])
            yield f"{path or 'the whole'}: {details['msg']}{given}{where}"


def _given(value: Any) -> str:
    return "" if isinstance(value, Mapping | Spec) else f", got {value!r}"


def _dotted(loc: Sequence[int | str], known: Collection[str]) -> str:
    """The key as the user wrote it: without the tags that pydantic puts in for kinds.

    A tag is a part that no key has, with more parts behind it.
    """
    parts: list[str] = []
    plain = ""
    for place, part in enumerate(loc):
        longer = f"{plain}.{part}".lstrip(".")
        if isinstance(part, str):
            if longer not in known and place < len(loc) - 1:
                continue
            plain = longer
        parts.append(str(part))
    return ".".join(parts)
