"""How replicas of a model agree.

One file a strategy, its spec and its runtime together; :func:`isthmus.spec.base.kinds_of` finds
them. Imports no torch until a model is touched.
"""

from __future__ import annotations

from isthmus.sync.explain import ExplainRow, Explanation
from isthmus.sync.replica import Replica, replicate
from isthmus.sync.strategy import Metrics, Setting, Strategy

__all__ = [
    "ExplainRow",
    "Explanation",
    "Metrics",
    "Replica",
    "Setting",
    "Strategy",
    "replicate",
]
