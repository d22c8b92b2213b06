"""Ranks: started, told apart, brought together, stopped on request, and their failures collected.

====================  ============================================================================
``environment``       which rank this process is (isthmus's launcher, torchrun, SLURM)
``launcher``          ranks on this machine: start, watch, stop; imports no torch
``rendezvous``        how ranks meet and form torch's process group
``interfaces``        which network interface they talk through, and why
``failures``          what went wrong first: ``failures/rank-N.json`` and ``error.json``
``signals``           requests to stop, noted for the loop to look at
====================  ============================================================================

Importing this package or any module of it does not import torch.
"""

from __future__ import annotations

from isthmus.elastic.environment import RankEnvironment, detect
from isthmus.elastic.failures import Failure, capture
from isthmus.elastic.launcher import launch
from isthmus.elastic.rendezvous import Rendezvous, rendezvous
from isthmus.elastic.signals import StopRequest

__all__ = [
    "Failure",
    "RankEnvironment",
    "Rendezvous",
    "StopRequest",
    "capture",
    "detect",
    "launch",
    "rendezvous",
]
