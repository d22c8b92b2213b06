"""No synchronisation: each replica trains alone.

Bytes: none, not even at the start.
Use it for one process, and to measure what computing alone takes. On several ranks the replicas
differ from the first step on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

from isthmus.spec.codec import TensorInfo, Traffic, describe
from isthmus.spec.sync import SyncSpec
from isthmus.sync.explain import ExplainRow, Explanation
from isthmus.sync.strategy import Setting, Strategy


class NoSync(SyncSpec):
    """Each replica on its own."""

    replicas_equal: ClassVar[bool] = False

    kind: Literal["none"] = "none"
    """Replicas never talk."""

    def traffic(self, tensors: Sequence[TensorInfo], world_size: int) -> Traffic:
        """Nothing."""
        return Traffic()

    def build(self, setting: Setting) -> Strategy:
        """A strategy that does nothing."""
        return Alone(setting)


class Alone(Strategy):
    """Does nothing."""

    def __init__(self, setting: Setting) -> None:
        super().__init__()
        self._tensors = describe(setting.parameters)

    def explain(self) -> Explanation:
        """Every tensor stays here."""
        return Explanation(
            "strategy none: replicas never talk",
            tuple(
                ExplainRow(tensor.name, tensor.shape, tensor.dtype, None, "", 0, 0, "stays local")
                for tensor in self._tensors
            ),
        )
