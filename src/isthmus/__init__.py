"""isthmus trains one PyTorch model across machines joined by slow, mixed or failing networks.

The names below are the library's face; each is imported when it is first used, so that
``import isthmus`` costs nothing and imports no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from isthmus.checkpoint import Checkpointer as Checkpointer
    from isthmus.checkpoint import Item as Item
    from isthmus.data import TextData as TextData
    from isthmus.data import open_data as open_data
    from isthmus.errors import IsthmusError as IsthmusError
    from isthmus.model import Transformer as Transformer
    from isthmus.model import token_loss as token_loss
    from isthmus.observe import EventLog as EventLog
    from isthmus.observe import build_report as build_report
    from isthmus.spec.cluster import ClusterSpec as ClusterSpec
    from isthmus.spec.model import ModelSpec as ModelSpec
    from isthmus.spec.run import RunSpec as RunSpec
    from isthmus.sync import Replica as Replica
    from isthmus.sync import replicate as replicate

_HOMES = {
    "Checkpointer": "isthmus.checkpoint",
    "ClusterSpec": "isthmus.spec.cluster",
    "EventLog": "isthmus.observe",
    "IsthmusError": "isthmus.errors",
    "Item": "isthmus.checkpoint",
    "ModelSpec": "isthmus.spec.model",
    "Replica": "isthmus.sync",
    "RunSpec": "isthmus.spec.run",
    "TextData": "isthmus.data",
    "Transformer": "isthmus.model",
    "build_report": "isthmus.observe",
    "open_data": "isthmus.data",
    "replicate": "isthmus.sync",
    "token_loss": "isthmus.model",
}

__all__ = [
    "Checkpointer",
    "ClusterSpec",
    "EventLog",
    "IsthmusError",
    "Item",
    "ModelSpec",
    "Replica",
    "RunSpec",
    "TextData",
    "Transformer",
    "build_report",
    "open_data",
    "replicate",
    "token_loss",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'isthmus' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
