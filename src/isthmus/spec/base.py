"""What every spec is: closed, frozen, documented, and free of I/O.

``Spec`` is the base of all of them. ``KindSpec`` is the base of those that are chosen by name
(``kind = "int8"``): a codec, a strategy. A kind lives in one file of its room, beside its runtime,
and is found there by :func:`kinds_of`; another package adds kinds through the entry-point group
``isthmus.kinds``.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, model_validator
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from isthmus.spec.units import UNIT_SUFFIXES

PLUGIN_GROUP = "isthmus.kinds"


class Spec(BaseModel):
    """A closed, frozen declaration: an unknown key is an error, a value never changes.

    A field that has a unit carries it in its name (``latency_s``) and takes a number in that unit
    or text with any unit (``"20 ms"``). Its short name (``latency``) takes text with a unit only.
    A table that leaves out its ``kind`` is of the default's kind.
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        validate_default=True,
        use_attribute_docstrings=True,
        protected_namespaces=(),
        allow_inf_nan=False,
    )

    input_keys: ClassVar[Mapping[str, str]] = {}
    """Keys that are read but stand for others, such as the name of a preset, each with its help."""

    @model_validator(mode="before")
    @classmethod
    def _spell_out(cls, data: Any) -> Any:
        """Puts full names for short ones, and the default's kind where a table names none."""
        if not isinstance(data, Mapping):
            return data
        short_names = cls.short_names()
        spelled: dict[str, Any] = {}
        for key, value in data.items():
            field = short_names.get(key)
            if field is None:
                cls._refuse_truth(key, value)
                spelled[key] = cls._with_kind(key, value)
                continue
            if field in data:
                raise PydanticCustomError(
                    "given_twice",
                    "give either {key} or {field}, not both",
                    {"key": key, "field": field},
                )
            if isinstance(value, int | float) and not isinstance(value, bool):
                raise PydanticCustomError(
                    "unit_missing",
                    '{key} needs a unit, as in {key} = "{example}" (or give {field} as a number)',
                    {"key": key, "field": field, "example": UNIT_SUFFIXES[_suffix(field)]},
                )
            spelled[field] = value
        return spelled

    @classmethod
    def _refuse_truth(cls, key: Any, value: Any) -> None:
        """Python takes true for 1; a user who writes ``steps = true`` meant something else."""
        field = cls.model_fields.get(key)
        if isinstance(value, bool) and field is not None and field.annotation is not bool:
            raise PydanticCustomError(
                "truth_given", "{key} does not take true or false", {"key": key}
            )

    @classmethod
    def _with_kind(cls, key: str, value: Any) -> Any:
        if not isinstance(value, Mapping) or "kind" in value or key not in cls.model_fields:
            return value
        default = cls.model_fields[key].default
        kind = default if isinstance(default, str) else getattr(default, "kind", None)
        return {"kind": kind, **value} if kind else value

    @classmethod
    def short_names(cls) -> dict[str, str]:
        """Maps ``latency`` to ``latency_s`` for each field whose name ends in a unit."""
        with_units = {name: _suffix(name) for name in cls.model_fields}
        return {
            name.removesuffix(suffix): name
            for name, suffix in with_units.items()
            if suffix and name.removesuffix(suffix) not in cls.model_fields
        }

    def replace(self, **changes: Any) -> Self:
        """A copy with some fields changed, validated as a whole."""
        unchanged = {name: getattr(self, name) for name in self.model_fields_set}
        return type(self).model_validate(unchanged | changes)


def _suffix(field: str) -> str:
    return next((suffix for suffix in UNIT_SUFFIXES if field.endswith(suffix)), "")


class KindSpec(Spec):
    """A spec that is chosen by its ``kind``.

    A family (``CodecSpec``) names the room where its members live, in ``room``. A member gives its
    own name as ``kind: Literal["int8"] = "int8"`` and is known from the moment it is defined.
    """

    room: ClassVar[str] = ""
    members: ClassVar[dict[str, type[KindSpec]]] = {}

    def label(self) -> str:
        """The kind, and what differs from its defaults: ``allreduce(codec=int8(block=64))``."""
        changed = [
            f"{name}={value.label() if isinstance(value, KindSpec) else value}"
            for name, field in type(self).model_fields.items()
            if name != "kind" and (value := getattr(self, name)) != field.default
        ]
        kind = getattr(self, "kind", type(self).__name__)
        return f"{kind}({', '.join(changed)})" if changed else kind

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        """Start a member table for a new family, or enter a member in its family's."""
        super().__pydantic_init_subclass__(**kwargs)
        if KindSpec in cls.__bases__:
            cls.members = {}
        elif "kind" in cls.model_fields:
            cls.members[cls.model_fields["kind"].default] = cls


def kinds_of(family: type[KindSpec]) -> dict[str, type[KindSpec]]:
    """All kinds of a family by name: those of its room, then those of other packages."""
    room = importlib.import_module(family.room)
    for module in pkgutil.iter_modules(room.__path__, f"{family.room}."):
        importlib.import_module(module.name)
    for plugin in entry_points(group=PLUGIN_GROUP):
        plugin.load()
    return {
        name: member
        for name, member in sorted(family.members.items())
        if issubclass(member, family)
    }


@dataclass(frozen=True)
class ByKind:
    """Annotation of a field that holds any member of a family: ``Annotated[CodecSpec, ByKind()]``.

    Accepts a member, a table with ``kind``, or the bare name of a kind that needs no more.
    """

    def __get_pydantic_core_schema__(
        self, source: type[KindSpec], handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        choices = {
            name: handler.generate_schema(member) for name, member in kinds_of(source).items()
        }
        tagged = core_schema.tagged_union_schema(choices, discriminator="kind")

        def accept(value: Any, validate: core_schema.ValidatorFunctionWrapHandler) -> Any:
            if isinstance(value, source):
                return value
            return validate({"kind": value} if isinstance(value, str) else value)

        return core_schema.no_info_wrap_validator_function(accept, tagged)
