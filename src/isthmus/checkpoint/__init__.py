"""Checkpoints that are whole or absent, verified before they are believed, and free of pickle.

``Checkpointer`` saves and loads a mapping of names to ``Item``; ``list_checkpoints`` and ``verify``
look at what is there. From the outside in: ``checkpointer``, ``saving`` and ``loading`` (what the
ranks agree on, ``peers``), ``item`` (what is saved), ``folder`` (names, quarantine, retention),
``manifest`` and ``files`` (the format), ``tree`` and ``blob`` (state as JSON and raw bytes), and
``disk`` (every call that changes the file system).

Limits: all ranks share one directory, a save waits until it is on the disk, and each rank's tensors
are whole (a DTensor is refused).
"""

from __future__ import annotations

from isthmus.checkpoint.checkpointer import Checkpointer
from isthmus.checkpoint.folder import (
    CheckpointInfo,
    Problem,
    Rejected,
    VerifyResult,
    list_checkpoints,
    verify,
)
from isthmus.checkpoint.item import Item, OnResize, Rederivable, Scope, Stateful
from isthmus.checkpoint.peers import Alone, GroupPeers, Peers

__all__ = [
    "Alone",
    "CheckpointInfo",
    "Checkpointer",
    "GroupPeers",
    "Item",
    "OnResize",
    "Peers",
    "Problem",
    "Rederivable",
    "Rejected",
    "Scope",
    "Stateful",
    "VerifyResult",
    "list_checkpoints",
    "verify",
]
