"""torch, imported at its first use.

A codec or a strategy is one file: the spec that a user writes and a planner reads, and below it the
runtime that moves tensors. Importing torch costs seconds of CPU time, and reading a spec must not
cost that. So these files write ``from isthmus.lazy import dist, torch`` and read like any other
torch code; torch is loaded when the first tensor is touched.

Nothing here may be used while a module is being imported (no decorators, no base classes).
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch as torch
    import torch.distributed as dist
else:

    class _OnFirstUse(ModuleType):
        """Stands for a module until one of its attributes is asked for, and keeps what it gave."""

        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            value = getattr(importlib.import_module(self.__name__), name)
            setattr(self, name, value)  # found without this function the next time
            return value

    torch = _OnFirstUse("torch")
    dist = _OnFirstUse("torch.distributed")

__all__ = ["dist", "torch"]
