"""Items: what a checkpoint holds, who writes it, and what becomes of it on other ranks.

The state of a run is a mapping of names to items. An item says two things that nobody can guess
from the state itself: whether every rank has the same (``replicated``) or its own (``per_rank``),
and what happens to it when the number of ranks changes (``on_resize``).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol, TypeAlias, runtime_checkable

import torch

from isthmus.errors import CheckpointError

Scope: TypeAlias = Literal["replicated", "per_rank"]
Merge: TypeAlias = Callable[[Sequence[Any], int, int], Any]
OnResize: TypeAlias = Literal["exact", "reset", "rederive"] | Merge

_RULES: Final = ("exact", "reset", "rederive")
_NAME: Final = re.compile(r"[A-Za-z][A-Za-z0-9_.-]*", re.ASCII)


class Stateful(Protocol):
    """What every torch module, optimizer and scheduler is."""

    def state_dict(self) -> Any:
        """The state, as a tree of tensors and plain Python values."""
        ...

    def load_state_dict(self, state_dict: Any, /) -> Any:
        """Take over a state."""
        ...


@runtime_checkable
class Rederivable(Protocol):
    """A stateful value that can derive its state from the step and the new ranks alone."""

    def rederive(self, *, step: int, rank: int, world_size: int) -> None:
        """Take over the state that belongs to this rank at this step."""
        ...


@dataclass(frozen=True, slots=True)
class Item:
    """One part of a run's state.

    Attributes:
        value: Anything with ``state_dict()`` and ``load_state_dict()``.
        scope: ``replicated``: every rank has the same state, it is written once, and every rank
            loads it. ``per_rank``: every rank has its own, and loads what it wrote.
        on_resize: What happens to a per-rank item when another number of ranks loads it.
            ``exact``: the same state or none; loading is refused. ``reset``: the value is left as
            it is. ``rederive``: ``value.rederive(step=, rank=, world_size=)`` is called. A function
            ``(states of all former ranks, rank, world_size) -> state``: its result is loaded.
            Replicated items are always loaded exactly.

    Raises:
        TypeError: The value lacks a method that the declaration needs.
        ValueError: There is no such scope or rule, or a replicated item has a rule of its own.
    """

    value: Stateful
    scope: Scope = "replicated"
    on_resize: OnResize = "exact"

    def __post_init__(self) -> None:
        kind = type(self.value).__name__
        for method in ("state_dict", "load_state_dict"):
            if not callable(getattr(self.value, method, None)):
                raise TypeError(f"a checkpoint item needs {method}(), which a {kind} has not")
        if self.scope not in ("replicated", "per_rank"):
            raise ValueError(f"scope is {self.scope!r}; expected 'replicated' or 'per_rank'")
        if not callable(self.on_resize) and self.on_resize not in _RULES:
            raise ValueError(
                f"on_resize is {self.on_resize!r}; expected one of {_RULES}, or a function"
            )
        if self.scope == "replicated" and self.on_resize != "exact":
            raise ValueError("a replicated item is loaded exactly; on_resize is for per-rank items")
        if self.on_resize == "rederive" and not isinstance(self.value, Rederivable):
            raise TypeError(f"on_resize='rederive' needs rederive(), which a {kind} has not")

    def resized(self, name: str, saved: int, now: int) -> str:
        """What happens to the item when the number of ranks changes, for people to read."""
        ranks = f"{name}: saved by {saved} ranks, loaded by {now}: "
        if callable(self.on_resize):
            return f"{ranks}merged by {getattr(self.on_resize, '__name__', 'a function')}"
        if self.on_resize == "rederive":
            return f"{ranks}derived anew from the step"
        return f"{ranks}starts afresh"


def check_names(items: Mapping[str, Item]) -> None:
    """Raise ValueError for names that can't be part of a tensor's name."""
    for name in items:
        if not _NAME.fullmatch(name):
            raise ValueError(f"item name {name!r}: expected letters, digits and '_.-'")


def check_fit(name: str, value: Stateful, state: Any) -> None:
    """Refuse a state that a torch module or optimizer could not take over exactly.

    They would find out half-way, or cast in silence; here nothing has been changed yet. Other
    values judge for themselves in ``load_state_dict``.

    Raises:
        CheckpointError: Tensors are missing, unknown, or of another shape or type.
    """
    problems: list[str] = []
    if isinstance(value, torch.nn.Module) and isinstance(state, Mapping):
        problems = _module_misfits(value.state_dict(), state)
    if isinstance(value, torch.optim.Optimizer) and isinstance(state, Mapping):
        problems = _optimizer_misfits(value, state)
    if problems:
        more = f"; and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise CheckpointError(
            f"the checkpoint does not fit {name!r}: {'; '.join(problems[:5])}{more}",
            hint="The model or optimizer is not the one that was saved; start a new run.",
        )


def _module_misfits(own: Mapping[str, Any], state: Mapping[str, Any]) -> list[str]:
    problems = [f"{key} is not in the checkpoint" for key in own if key not in state]
    problems += [f"{key} is not in the model" for key in state if key not in own]
    for key in own:
        mine, other = _kind(own[key]), _kind(state.get(key))
        if mine and other and mine != other:
            problems.append(f"{key} is {mine}, in the checkpoint {other}")
    return problems


def _optimizer_misfits(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> list[str]:
    own = [len(group["params"]) for group in optimizer.param_groups]
    saved = [len(group["params"]) for group in state.get("param_groups", ())]
    return [] if own == saved else [f"parameters by group are {own}, in the checkpoint {saved}"]


def _kind(value: Any) -> str:
    """Type and shape of a tensor; empty for what is none."""
    if not isinstance(value, torch.Tensor):
        return ""
    return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
