"""Emulated clusters: a whole ``cluster.toml`` on one Linux machine, with faults on a timeline.

``Cluster`` builds one; :func:`isthmus.lab.run.run_everywhere` runs a command in all of its hosts.
The lab starts commands and imports no trainer and no torch.
"""

from __future__ import annotations

from isthmus.lab.cluster import Cluster

__all__ = ["Cluster"]
