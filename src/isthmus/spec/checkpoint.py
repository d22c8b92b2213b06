"""When a run writes checkpoints and how many it keeps."""

from __future__ import annotations

from pydantic import Field

from isthmus.spec.base import Spec


class CheckpointSpec(Spec):
    """When a run writes checkpoints and how many it keeps.

    One is always written at the end and when the run is asked to stop.
    """

    every_steps: int = Field(100, ge=0)
    """Steps between two checkpoints; 0 writes them only at the end and on a stop."""
    keep_last: int = Field(2, ge=1)
    """How many of the newest checkpoints are kept; the only good one is never deleted."""
